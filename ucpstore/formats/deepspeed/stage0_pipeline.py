"""Pipelines without ZeRO: every stage's model file holds its optimizer, the layer files hold the weights.

No file names a parameter, unless the optimizer was built from ``named_parameters()``. Layers are given to the
stages by what these hold (`ucpstore.formats.deepspeed.staging`), then a stage is read as a model of its
own, whose parameters are in the order of ``PipelineModule.named_parameters``: tied modules first. The key
of a tied module is in no file either: somebody must tell it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ucpstore.errors import Kind, PatternError, UnsupportedSourceError, listing
from ucpstore.formats.deepspeed.checks import named
from ucpstore.formats.deepspeed.files import RankFiles
from ucpstore.formats.deepspeed.module import Model
from ucpstore.formats.deepspeed.naming import Entry, Prober
from ucpstore.formats.deepspeed.pipeline import TIED, layer_prefix, require_names
from ucpstore.formats.deepspeed.saved import SavedOptimizer, read_optimizer
from ucpstore.formats.deepspeed.stage0 import (
    NAMES_FILE,
    Names,
    Stage0,
    entries_of,
    read_stage0,
    recorded_names,
)
from ucpstore.formats.deepspeed.stages import align_stages
from ucpstore.formats.deepspeed.staging import Amounts, Held, Stage, assign
from ucpstore.formats.torchfile import TensorRef, TorchFile

__all__ = ["read_stages"]

_GROUPS = (
    '{"groups": [...]} with, for each of the optimizer\'s groups, the names of its parameters on all stages, those of'
    " each in its optimizer's order and tied ones ('tied_modules.KEY.local') once; a torch optimizer that is built"
    " from named_parameters() saves them itself."
)
_ORDER = f"To name the parameters, write {NAMES_FILE} beside the files: {_GROUPS}"
_REMEDY = (
    f'Write {NAMES_FILE} beside the files: {{"tied_modules": {{"KEY": [0, 7]}}}} with the layers of every'
    f" TiedLayerSpec key; or, where that is not enough, {_GROUPS}"
)

_Layer = Mapping[str, TensorRef]


@dataclass(slots=True)
class _Reading:
    """One reading of all stages.

    Attributes
    ----------
    found : RankFiles
    files : mapping of (layer, tensor-parallel rank) to TorchFile
    models : sequence of Model
        By model-parallel rank.
    names : Names
        What the checkpoint's owner wrote.
    probe : callable
        Makes a `Prober` of a model file's name and byte order.
    """

    found: RankFiles
    files: Mapping[tuple[int, int], TorchFile]
    models: Sequence[Model]
    names: Names
    probe: Callable[[Model], Prober]
    tp: int = 1
    saved: list[SavedOptimizer] = field(default_factory=list)
    prefixes: dict[int, str] = field(default_factory=dict)
    entries: list[list[list[Entry]]] = field(default_factory=list)
    shapes: set[tuple[int, ...] | None] = field(default_factory=set)
    buffers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.tp = 1 + max(rank for _, rank in self.files)
        self.saved = [read_optimizer(model) for model in self.models]
        stages = zip(self.models[:: self.tp], self.saved[:: self.tp], strict=True)
        self.entries = [entries_of(model, saved) for model, saved in stages]
        self.shapes = {e.shape for stage in self.entries for group in stage for e in group}
        self.buffers = frozenset[str]().union(*(model.buffer_names for model in self.models))

    def layer(self, layer: int, rank: int) -> _Layer:
        """Tensors of a layer file under their full names."""
        file = self.files[layer, rank]
        entries = named(file.root, file.stat.name).items()
        prefix = self.prefixes[layer]
        return {prefix + key: ref for key, ref in entries if isinstance(ref, TensorRef)}

    def told(self) -> list[list[list[str]]] | None:
        """Names by stage and group, where all of them were saved with the groups."""
        found = [recorded_names(saved) for saved in self.saved[:: self.tp]]
        return found if all(all(groups) for groups in found) else None

    def homes(self, rank: int) -> dict[int, str]:
        """The files of all layers' tensors, by `id` of their storages."""
        return {
            id(ref.storage): file.stat.name
            for (_, mine), file in self.files.items()
            if mine == rank
            for ref in named(file.root, file.stat.name).values()
            if isinstance(ref, TensorRef)
        }


def read_stages(
    found: RankFiles,
    files: Mapping[tuple[int, int], TorchFile],
    *,
    models: Sequence[Model],
    names: Names,
    probe: Callable[[Model], Prober],
) -> tuple[list[Stage0], Mapping[int, str]]:
    """Read every model-parallel rank, with the same units on all of them.

    Parameters
    ----------
    found : RankFiles
        For the names of files that are missing.
    files : mapping of (layer, tensor-parallel rank) to TorchFile
    models : sequence of Model
        By model-parallel rank.
    names : Names
        What `ucpstore.formats.deepspeed.stage0.read_names` found: of all stages.
    probe : callable
        Makes a `Prober` for a model file.

    Returns
    -------
    list of Stage0
        By model-parallel rank.
    mapping of int to str
        What the names of every layer start with.

    Raises
    ------
    PatternError
        Which stage holds a layer, or what a parameter is called, cannot be known.
    IncompleteSourceError
        A layer file is missing.
    CorruptSourceError, UnsupportedSourceError
        See `ucpstore.formats.deepspeed.stage0.read_stage0`.
    """
    reading = _Reading(found, files, models, names=names, probe=probe)
    _require_one_order(reading)
    stages = _stages(reading)
    ranks: list[Stage0] = []
    for rank, model in enumerate(models):
        whole = replace(model, module=_module(reading, stages, rank))
        homes = reading.homes(rank % reading.tp)
        listed = names.groups
        if listed is not None:
            mine = [[name for name in group if name in whole.module] for group in listed]
            listed = [group for group in mine if group]
        prober = replace(probe(model), homes=homes)
        read = read_stage0(whole, listed, prober, remedy=_ORDER)
        at_home = tuple(
            model.name if ref is None else homes.get(id(ref.storage), model.name)
            for ref in read.shard.masters
        )
        shard = replace(read.shard, master_files=at_home)
        told = read.warnings if rank % reading.tp == 0 else []
        found_model = replace(read.model, module={})
        ranks.append(replace(read, model=found_model, shard=shard, warnings=told))
    return align_stages(ranks, names.groups), reading.prefixes


def _require_one_order(reading: _Reading) -> None:
    """Layer files must be read like the model files: masters may be in either."""
    order = reading.models[0].big_endian
    for name, big in [
        *((model.name, model.big_endian) for model in reading.models),
        *((file.stat.name, file.big_endian) for file in reading.files.values()),
    ]:
        if big != order:
            raise UnsupportedSourceError(
                f"{name} and {reading.models[0].name} have different byte orders; expected one."
            )


# ---------------------------------------------------------------------- layers and stages


def _stages(reading: _Reading) -> Sequence[Stage]:
    """The layers of every stage, and the prefixes of all."""
    given = reading.names.groups
    told = reading.told() if given is None else None
    groups = given if given is not None else [g for stage in told or () for g in stage]
    names = [name for group in groups for name in group]
    known: dict[str, int | None] = dict.fromkeys(names)
    if told is not None:
        known.update(_sizes(reading, told))
    tied = {layer: f"{TIED}{key}." for key, them in reading.names.tied.items() for layer in them}
    for name in sorted(reading.buffers):
        layer = name.partition(".")[0]
        if layer.isdecimal() and int(layer) in tied:
            raise PatternError(
                f"{NAMES_FILE}: tied_modules has layer {layer} as one, but {name!r} is a buffer of its own."
            )
    reading.prefixes = {
        layer: tied.get(layer, f"{layer}.")
        if tied
        else layer_prefix(layer, file, known, reading.buffers)
        for (layer, rank), file in sorted(reading.files.items())
        if rank == 0
    }
    here = {name for layer in reading.prefixes for name in _entries(reading, layer)}
    wanted = [*dict.fromkeys([*names, *sorted(reading.buffers)])]
    require_names(reading.found, here, wanted, tp=reading.tp)
    if told is not None:
        return [_of_names([name for group in stage for name in group]) for stage in told]
    candidates = {layer: _candidates(reading, layer, known) for layer in reading.prefixes}
    stages = _assigned(reading, candidates)
    if not known:
        _refuse_twins(reading, {n: refs for n, refs in candidates.items() if n not in tied})
    return stages


def _entries(reading: _Reading, layer: int) -> Iterable[str]:
    file = reading.files[layer, 0]
    return (reading.prefixes[layer] + key for key in named(file.root, file.stat.name))


def _sizes(reading: _Reading, told: Sequence[Sequence[Sequence[str]]]) -> dict[str, int | None]:
    """Elements of parameters whose names were saved with the groups, where they have states."""
    found: dict[str, int | None] = {}
    for stage, groups in zip(told, reading.entries, strict=True):
        for names, entries in zip(stage, groups, strict=True):
            for name, entry in zip(names, entries, strict=False):  # a flat group has one entry
                if entry.shape is not None and len(names) == len(entries):
                    found[name] = math.prod(entry.shape)
    return found


def _of_names(names: Sequence[str]) -> Stage:
    own = [name.partition(".")[0] for name in names if not name.startswith(TIED)]
    tied = [name.split(".")[1] for name in names if name.startswith(TIED)]
    layers = sorted({int(layer) for layer in own if layer.isdecimal()})
    return Stage(tuple(layers), tuple(dict.fromkeys(tied)))


def _candidates(reading: _Reading, layer: int, known: Collection[str]) -> _Layer:
    """What an optimizer may hold of a layer: by name, or what is no buffer and of a shape that some optimizer has."""
    found: dict[str, TensorRef] = {}
    seen: set[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, ref in reading.layer(layer, 0).items():
        place = (id(ref.storage), ref.start, ref.shape, ref.strides)
        alias = place in seen and ref.numel > 0
        seen.add(place)
        number = ref.dtype.startswith(("float", "bfloat", "complex"))
        any_shape = reading.saved[0].flat or None in reading.shapes
        fits = number and (any_shape or ref.shape in reading.shapes)
        if name in known or not (known or alias or name in reading.buffers or not fits):
            found[name] = ref
    return found


def _assigned(reading: _Reading, candidates: Mapping[int, _Layer]) -> Sequence[Stage]:
    """Give layers to stages by the shapes of what the optimizers hold."""
    flat = reading.saved[0].flat
    held = []
    for groups in reading.entries:
        shapes = [entry.shape for group in groups for entry in group]
        amounts = _amounts((shape for shape in shapes if shape is not None), flat=flat)
        held.append(Held(amounts, shapes.count(None)))
    layers: dict[int, Amounts] = {}
    tied: dict[str, Amounts] = {}
    for layer, tensors in candidates.items():
        amounts = _amounts((ref.shape for ref in tensors.values()), flat=flat)
        prefix = reading.prefixes[layer]
        if prefix.startswith(TIED):
            tied[prefix.split(".")[1]] = amounts
        else:
            layers[layer] = amounts
    fixed = {
        int(name.partition(".")[0]): stage
        for stage, model in enumerate(reading.models[:: reading.tp])
        for name in model.buffer_names
        if name.partition(".")[0].isdecimal()
    }
    ways = assign(held, layers, tied, fixed)
    if len(ways) == 1:
        return ways[0]
    first, count = reading.models[0], len(held)
    if not ways:
        total = sum(h.amounts.total() + h.unknown for h in held)
        here = sum(a.total() for a in [*layers.values(), *tied.values()])
        what = "elements" if flat else "parameters"
        raise PatternError(
            f"{first.name} and those of the other stages: no cut of the {len(candidates)} layers into {count} stages"
            f" gives every stage's optimizer what it holds; they hold {total} {what}, the layer files {here}. A layer"
            " file is missing, or there are tied modules, of which several stages hold a copy, or frozen parameters:"
            " without ZeRO these are not recorded.",
            kind=Kind.AMBIGUOUS,
            hint=_REMEDY,
        )
    differ = [
        f"layers {listing(map(str, stage.layers))}{''.join(f' and {key}' for key in stage.tied)}"
        for one, other in zip(*ways, strict=True)
        if one != other
        for stage in (one, other)
    ]
    raise PatternError(
        f"{first.name} and those of the other stages: several cuts of the layers into {count} stages fit what the"
        f" optimizers hold: a stage may have {' or '.join(differ[:2])}.",
        kind=Kind.AMBIGUOUS,
        hint=_REMEDY,
    )


def _amounts(shapes: Iterable[tuple[int, ...]], *, flat: bool) -> Amounts:
    if flat:
        return Counter({"elements": sum(map(math.prod, shapes))})
    return Counter(shapes)


def _refuse_twins(reading: _Reading, candidates: Mapping[int, _Layer]) -> None:
    """Layers with the same values may be one tied module, whose key is not recorded.

    The largest tensors are compared first, then those of layers that are alike in it; only first elements.
    """
    probe = replace(reading.probe(reading.models[0]), homes=reading.homes(0))
    alike: dict[Any, list[int]] = {}
    for layer, tensors in candidates.items():
        if tensors:
            prefix = reading.prefixes[layer]
            kinds = sorted((n.removeprefix(prefix), r.dtype, r.shape) for n, r in tensors.items())
            alike.setdefault(tuple(kinds), []).append(layer)
    for largest in (True, False):
        following: dict[Any, list[int]] = {}
        for layers in alike.values():
            for layer in layers if len(layers) > 1 else ():
                refs = sorted(candidates[layer].values(), key=lambda ref: -ref.numel)
                refs = refs[:1] if largest else refs
                values = [value for ref in refs for value in probe([ref], ref.dtype)]
                following.setdefault((layers[0], *values), []).append(layer)
        alike = following
    twins = next((layers for layers in alike.values() if len(layers) > 1), None)
    if twins is not None:
        raise PatternError(
            f"{reading.models[0].name} and those of the other stages: layers {listing(map(str, twins))} have the same"
            " weights, as those that use a tied module do, whose key is not recorded without ZeRO.",
            kind=Kind.AMBIGUOUS,
            hint=_REMEDY,
        )


def _module(reading: _Reading, stages: Sequence[Stage], rank: int) -> dict[str, TensorRef]:
    """All tensors of a model-parallel rank in the order of ``named_parameters``: tied modules first."""
    place, tp_rank = divmod(rank, reading.tp)
    stage = stages[place]
    before = max((n for other in stages[:place] for n in other.layers), default=-1)
    after = min((n for other in stages[place + 1 :] for n in other.layers), default=math.inf)
    found: dict[str, TensorRef] = {}
    for key in stage.tied:
        copies = [n for n, prefix in reading.prefixes.items() if prefix == f"{TIED}{key}."]
        own = [n for n in copies if before < n < after]  # under a function there is none
        found.update(reading.layer((own or copies)[0], tp_rank))
    for layer in stage.layers:
        found.update(reading.layer(layer, tp_rank))
    return found
