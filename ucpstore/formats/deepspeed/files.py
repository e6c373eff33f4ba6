"""Which files make up a DeepSpeed checkpoint, and whether all of them are there.

Names are those of DeepSpeed's ``runtime/engine.py`` (``_get_ckpt_name``, ``_get_rank_zero_ckpt_name``,
``_get_expert_ckpt_name``) and ``runtime/pipe/module.py`` (``ckpt_layer_path``). Ranks are parsed as
numbers and never sorted as text: ``mp_rank_100`` comes after ``mp_rank_11``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ucpstore.contracts import Detection
from ucpstore.errors import (
    CheckpointNotFoundError,
    CorruptSourceError,
    IncompleteSourceError,
    Kind,
    UnrecognizedSourceError,
    UnsupportedSourceError,
    close_names,
    listing,
)
from ucpstore.io.base import Files, FileStat, check_name

__all__ = ["Grid", "RankFiles", "detect", "discover", "rank_of", "require_layers", "require_ranks"]

LATEST = "latest"

_OPTIM = re.compile(
    r"(?P<prefix>|bf16_|fp16_)zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+?)_?optim_states\.pt"
)
_MODEL = re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")
_MODEL3 = re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d+)-(?:model_(?P<tp>\d+)-)?model_states\.pt")
_OTHERS = {
    "MoE expert files": re.compile(
        r"(layer_-?\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
    ),
}
_FOLDERS = {
    "offloaded_tensors": "NVMe optimizer offload: optimizer states are raw swap files",
    "zero": "a universal checkpoint folder, one file per parameter and state",
}
_MOST_RANKS = 1 << 20
"""A checkpoint that claims more ranks than this is damaged; their names are not worth listing."""

_LATEST_LIMIT = 4096
"""Bytes of ``latest`` that are read at most; it holds one tag."""

_LONGEST_NAME = 255
"""Bytes of a file's name, on the usual file systems."""

Grid: TypeAlias = Mapping[tuple[int, int], FileStat]
"""Files of one kind by (mp rank, dp rank)."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The rank files of one tag, complete as far as their names tell.

    Attributes
    ----------
    where : str
        The URL, or the roots, that were looked at.
    folder : str
        Where they lie below the URL; empty where the URL is the tag's own folder.
    tag : str
    prefix : str
        What the optimizer files' names start with: ``""``, ``"bf16_"`` or ``"fp16_"``.
    partitioned : bool
        Every dp rank has a model file (stage 3); otherwise there is one per mp rank.
    mp, dp : int
        Model-parallel ranks, and data-parallel ranks that have optimizer files.
    models, optims : Grid
        ``models`` has dp rank 0 only, unless ``partitioned``.
    layers : mapping of (layer, tensor-parallel rank) to FileStat
        Layer files of a pipeline.
    """

    where: str
    folder: str
    tag: str
    prefix: str
    partitioned: bool
    mp: int
    dp: int
    models: Grid
    optims: Grid
    layers: Grid = field(default_factory=dict)

    def optim_name(self, mp: int, dp: int) -> str:
        """The name that DeepSpeed gives to an optimizer file."""
        return _join(
            self.folder, f"{self.prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
        )

    def model_name(self, mp: int, dp: int = 0) -> str:
        """The name that DeepSpeed gives to a model file."""
        rank = f"zero_pp_rank_{dp}_" if self.partitioned else ""
        return _join(self.folder, f"{rank}mp_rank_{mp:02d}_model_states.pt")

    def layer_name(self, layer: int, tp: int) -> str:
        """The name that DeepSpeed gives to a layer file of this pipeline's topology."""
        spelled = [_LAYER.fullmatch(_base(stat.name)) for stat in self.layers.values()]
        rank = f"model_{tp:02d}-" if any(match and match["tp"] for match in spelled) else ""
        return _join(self.folder, f"layer_{layer:02d}-{rank}model_states.pt")


def detect(files: Files) -> Detection:
    """Whether a DeepSpeed checkpoint is at the URL, judged by names only."""
    names = [_base(stat.name) for stat in files.list("", recursive=False)]
    found = [name for name in names if _is_rank_file(name)]
    if found:
        return Detection(True, f"rank files such as {found[0]}")
    if LATEST in names:
        tag = _read_latest(files)
        inside = [_base(s.name) for s in files.list(tag, recursive=False)]
        found = [name for name in inside if _is_rank_file(name)]
        if found:
            return Detection(
                True, f"`latest` names {tag!r}, which has rank files such as {found[0]}"
            )
        return Detection(False, f"`latest` names {tag!r}, which has no DeepSpeed rank files")
    return Detection(False, "neither a `latest` file nor DeepSpeed rank files (*_model_states.pt)")


def discover(files: Files, tag: str | None) -> RankFiles:
    """Find the rank files of ``tag`` (default: what ``latest`` names, or the URL's own folder).

    Raises
    ------
    CheckpointNotFoundError
        The tag has no folder.
    UnrecognizedSourceError
        Nothing at the URL is a DeepSpeed checkpoint.
    IncompleteSourceError
        Rank files are missing; the message names them.
    UnsupportedSourceError
        The folder holds files of a kind that is not read (experts, offloaded states, ...).
    """
    folder, tag = _locate(files, tag)
    stats = {_base(stat.name): stat for stat in files.list(folder, recursive=False)}
    where = f"{files.url}/{folder}" if folder else files.url
    _refuse_other_kinds(where, stats, [_base(name) for name in files.folders(folder)])
    prefixes: dict[str, dict[tuple[int, int], FileStat]] = {}
    plain: dict[tuple[int, int], FileStat] = {}
    partitioned: dict[tuple[int, int], FileStat] = {}
    layers: dict[tuple[int, int], FileStat] = {}
    for name, stat in stats.items():
        if match := _OPTIM.fullmatch(name):
            _put(prefixes.setdefault(match["prefix"], {}), int(match["mp"]), int(match["dp"]), stat)
        elif match := _MODEL.fullmatch(name):
            _put(plain, int(match["mp"]), 0, stat)
        elif match := _MODEL3.fullmatch(name):
            _put(partitioned, int(match["mp"]), int(match["dp"]), stat)
        elif match := _LAYER.fullmatch(name):
            _put(
                layers,
                int(match["layer"]),
                int(match["tp"] or 0),
                stat,
                what="layer {}, tp rank {}",
            )
    if layers and not plain and not partitioned:
        raise IncompleteSourceError(
            f"{where}: {len(layers)} layer files but no model file: expected mp_rank_00_model_states.pt and one for"
            " every other model-parallel rank."
        )
    _refuse_mixtures(where, prefixes, plain, partitioned, layers=layers)
    prefix, optims = next(iter(prefixes.items()), ("", {}))
    models = partitioned or plain
    ranks = [*models, *optims]
    found = RankFiles(
        where=files.url,
        folder=folder,
        tag=tag,
        prefix=prefix,
        partitioned=bool(partitioned),
        mp=1 + max(mp for mp, _ in ranks),
        dp=1 + max((dp for _, dp in [*optims, *partitioned]), default=-1),
        models=models,
        optims=optims,
        layers=layers,
    )
    if optims and not models:
        raise IncompleteSourceError(
            f"{where}: {len(optims)} optimizer files but no model file: expected"
            f" {found.model_name(0)} (ZeRO 1 and 2) or zero_pp_rank_0_mp_rank_00_model_states.pt (ZeRO 3)."
        )
    require_ranks(found, mp=found.mp, dp=found.dp)
    return found


def require_ranks(found: RankFiles, *, mp: int, dp: int) -> None:
    """Require the files of all ``mp`` x ``dp`` ranks. No optimizer file at all is another matter.

    Raises
    ------
    IncompleteSourceError
        Names every file that is missing.
    """
    if max(mp, 1) * max(dp, 1) > _MOST_RANKS:
        raise CorruptSourceError(
            f"checkpoint {found.tag!r} claims {mp} model-parallel x {dp} data-parallel ranks, but only"
            f" {len(found.models)} model and {len(found.optims)} optimizer files are there."
        )
    missing = [
        found.optim_name(m, d)
        for m in range(mp)
        for d in range(dp if found.optims else 0)
        if (m, d) not in found.optims
    ]
    model_ranks = dp if found.partitioned else 1
    missing += [
        found.model_name(m, d)
        for m in range(mp)
        for d in range(model_ranks)
        if (m, d) not in found.models
    ]
    if missing:
        raise IncompleteSourceError(
            f"checkpoint {found.tag!r}: {len(missing)} rank files are missing of {mp} model-parallel x {dp}"
            f" data-parallel ranks: {listing(missing)}; looked in {found.where}.",
            hint="Copy them from the nodes that wrote them, or give those nodes' folders as further roots.",
            missing=missing,
        )


def require_layers(found: RankFiles, tp: int) -> None:
    """Require every layer file on all tensor-parallel ranks.

    Raises
    ------
    IncompleteSourceError
        Names every file that is missing.
    UnsupportedSourceError
        There are files of more ranks.
    """
    beyond = [stat.name for (_, rank), stat in found.layers.items() if rank >= tp]
    if beyond:
        raise UnsupportedSourceError(
            f"checkpoint {found.tag!r}: {listing(beyond, cap=3)} are of tensor-parallel ranks beyond the {tp} of the"
            " run.",
            hint="Remove those of the older run.",
            kind=Kind.AMBIGUOUS,
        )
    layers = sorted({layer for layer, _ in found.layers})
    missing = [
        found.layer_name(layer, rank)
        for layer in layers
        for rank in range(tp)
        if (layer, rank) not in found.layers
    ]
    if missing:
        raise IncompleteSourceError(
            f"checkpoint {found.tag!r}: {len(missing)} layer files are missing of {len(layers)} layers on {tp}"
            f" tensor-parallel ranks: {listing(missing)}; looked in {found.where}.",
            hint="Copy them from the nodes that wrote them, or give those nodes' folders as further roots.",
            missing=missing,
        )


def _locate(files: Files, tag: str | None) -> tuple[str, str]:
    """Folder below the URL and tag."""
    if tag is not None:
        tag = check_name(tag.rstrip("/"))
        if files.list(tag, recursive=False):
            return tag, tag
        if _own_tag(files.url) == tag and _has_rank_files(files, ""):
            return "", tag
        raise CheckpointNotFoundError(
            f"{files.url}: no checkpoint with the tag {tag!r}.", hint=close_names(tag, _tags(files))
        )
    names = {_base(stat.name) for stat in files.list("", recursive=False)}
    if any(map(_is_rank_file, names)):
        return "", _own_tag(files.url)
    if LATEST in names:
        tag = _read_latest(files)
        if not files.list(tag, recursive=False):
            raise IncompleteSourceError(
                f"{files.url}: `latest` names {tag!r}, but there is no such folder; found"
                f" {listing(_tags(files)) or 'no other checkpoint'}.",
                hint="Choose a tag.",
            )
        return tag, tag
    tags = _tags(files)
    if tags:
        raise UnrecognizedSourceError(
            f"{files.url}: no `latest` file, but the checkpoints {listing(tags)}.",
            hint="Choose a tag.",
        )
    raise UnrecognizedSourceError(
        f"{files.url}: no DeepSpeed checkpoint: neither `latest` nor *_model_states.pt files."
    )


def _read_latest(files: Files) -> str:
    data = files.read(LATEST, 0, _LATEST_LIMIT + 1)
    try:
        tag = data.decode("utf-8").strip()
    except UnicodeDecodeError:
        tag = ""
    plain = tag and not tag.startswith("/") and not {"", ".", ".."} & set(tag.split("/"))
    plain = plain and max(len(part.encode()) for part in tag.split("/")) <= _LONGEST_NAME
    if len(data) > _LATEST_LIMIT or not plain or "\\" in tag or not tag.isprintable():
        raise CorruptSourceError(
            f"{files.url}/{LATEST}: found {data[:40]!r}, expected the name of a checkpoint folder."
        )
    return tag


def rank_of(name: str) -> tuple[str, int, int] | None:
    """Kind of a rank file, mp rank (or layer) and dp (or tp) rank, as its name says.

    ``None`` for other files.
    """
    name = _base(name)
    layer = _LAYER.fullmatch(name)
    if layer:
        return "layer", int(layer["layer"]), int(layer["tp"] or 0)
    for kind, pattern in (("optimizer", _OPTIM), ("model", _MODEL), ("model", _MODEL3)):
        match = pattern.fullmatch(name)
        if match:
            return kind, int(match["mp"]), int(match.groupdict().get("dp") or 0)
    return None


def _tags(files: Files) -> list[str]:
    folders = [_base(name) for name in files.folders("")]
    return [name for name in folders if _has_rank_files(files, name)]


def _has_rank_files(files: Files, folder: str) -> bool:
    return any(_is_rank_file(_base(stat.name)) for stat in files.list(folder, recursive=False))


def _is_rank_file(name: str) -> bool:
    patterns = (_OPTIM, _MODEL, _MODEL3, _LAYER, *_OTHERS.values())
    return any(pattern.fullmatch(name) for pattern in patterns)


def _refuse_other_kinds(where: str, names: Collection[str], folders: Collection[str]) -> None:
    for what, pattern in _OTHERS.items():
        found = [name for name in names if pattern.fullmatch(name)]
        if found:
            raise UnsupportedSourceError(
                f"{where}: {what} are not supported yet: found {listing(found, cap=3)}."
            )
    for folder in folders:
        if folder in _FOLDERS:
            raise UnsupportedSourceError(
                f"{where}/{folder}: {_FOLDERS[folder]}; this is not supported."
            )


def _refuse_mixtures(
    where: str, prefixes: Mapping[str, Grid], plain: Grid, partitioned: Grid, *, layers: Grid
) -> None:
    if len(prefixes) > 1:
        examples = listing(_base(next(iter(grid.values())).name) for grid in prefixes.values())
        raise UnsupportedSourceError(
            f"{where}: optimizer files of several engines lie in one folder ({examples}).",
            hint="Remove those of the older run.",
            kind=Kind.AMBIGUOUS,
        )
    if plain and partitioned:
        examples = listing(_base(next(iter(grid.values())).name) for grid in (plain, partitioned))
        raise UnsupportedSourceError(
            f"{where}: model files of ZeRO 1/2 and of ZeRO 3 lie in one folder ({examples}).",
            hint="Remove those of the older run.",
            kind=Kind.AMBIGUOUS,
        )
    if layers and partitioned:
        examples = listing(_base(next(iter(grid.values())).name) for grid in (layers, partitioned))
        raise UnsupportedSourceError(
            f"{where}: files of a pipeline and of ZeRO 3 lie in one folder ({examples}).",
            hint="Remove those of the older run.",
            kind=Kind.AMBIGUOUS,
        )
    if not prefixes and not plain and not partitioned:
        raise UnrecognizedSourceError(
            f"{where}: no DeepSpeed rank files (*_model_states.pt, *_optim_states.pt)."
        )


def _put(
    grid: dict[tuple[int, int], FileStat],
    mp: int,
    dp: int,
    stat: FileStat,
    *,
    what: str = "mp rank {}, dp rank {}",
) -> None:
    if (mp, dp) in grid:
        raise UnsupportedSourceError(
            f"two files claim {what.format(mp, dp)}: {grid[mp, dp].name} and {stat.name}.",
            kind=Kind.AMBIGUOUS,
        )
    grid[mp, dp] = stat


def _own_tag(url: str) -> str:
    # Of several roots, "{A,B}": the last one's.
    return _base((url.removesuffix("}") if url.startswith("{") else url).rstrip("/"))


def _base(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
