"""Pipelines: the layer files, and what the stages' model files leave to them.

``PipelineModule.save_state_dict`` of DeepSpeed's ``runtime/pipe/module.py`` writes every layer's bare
state dict with local names; ``module`` of the model files is then ``None``. Parameters are called
``"{layer}.{local}"``, those of a tied layer ``"tied_modules.{key}.{local}"``: every stage that uses a tied
layer has a copy of it, in its optimizer and, where the layer is no function over it, in a layer file. Entries
without a state dict (functions) have an id but no file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ucpstore.errors import (
    CorruptSourceError,
    IncompleteSourceError,
    Kind,
    UnsupportedSourceError,
    listing,
)
from ucpstore.formats.deepspeed.checks import named
from ucpstore.formats.deepspeed.files import RankFiles
from ucpstore.formats.deepspeed.module import Census, Model, take_census
from ucpstore.formats.deepspeed.shards import Shard
from ucpstore.formats.deepspeed.units import Shapes
from ucpstore.formats.torchfile import TensorRef, TorchFile

__all__ = ["TIED", "Layers", "fill_shapes", "layer_prefix", "read_layers", "require_names"]

TIED = "tied_modules."


@dataclass(frozen=True, slots=True)
class Layers:
    """The layer files of a pipeline as if each were a model file of its own.

    Attributes
    ----------
    replicas : list of list of list of Model
        Per module its copies (one, or several of a tied module), each with all tensor-parallel ranks.
    census : Census
        What the names of all of them stand for.
    numbers : dict of str to list of int
        Per module, by what its names start with, the layers whose files hold it.
    """

    replicas: list[list[list[Model]]]
    census: Census
    numbers: dict[str, list[int]]

    @property
    def names(self) -> list[str]:
        """All names in the order of the layers."""
        return [name for copies in self.replicas for name in copies[0][0].module]

    @property
    def firsts(self) -> list[Model]:
        """The first copy's first rank of every module."""
        return [copies[0][0] for copies in self.replicas]

    def facts(self, stages: Sequence[Model]) -> dict[str, Any]:
        """What a writer must know of the pipeline, as JSON.

        ``stages``: per stage the layers that have names of their own; ``tied``: per key the layers whose
        files hold the tied module, and the stages that do. Layers without a file are not known.

        Parameters
        ----------
        stages : sequence of Model
            The model file of every stage's first rank.
        """
        own: list[list[int]] = []
        tied: dict[str, dict[str, list[int]]] = {
            prefix.removeprefix(TIED).rstrip("."): {"layers": layers, "stages": []}
            for prefix, layers in self.numbers.items()
            if prefix.startswith(TIED)
        }
        for stage, model in enumerate(stages):
            names = {*model.trainable, *model.buffer_names}
            layers = {name.partition(".")[0] for name in names if not name.startswith(TIED)}
            own.append(sorted(int(layer) for layer in layers if layer.isdecimal()))
            keys = {name.split(".")[1] for name in names if name.startswith(TIED)}
            for key in keys & tied.keys():
                tied[key]["stages"].append(stage)
        return {"stages": own, "tied": tied}


def read_layers(
    found: RankFiles,
    files: Mapping[tuple[int, int], TorchFile],
    models: Sequence[Model],
    shards: Sequence[Sequence[Shard]],
    *,
    prefixes: Mapping[int, str] | None = None,
) -> Layers:
    """Give the tensors of the layer files their names, and say what they are.

    Parameters
    ----------
    found : RankFiles
        For the names of files that are missing.
    files : mapping of (layer, tensor-parallel rank) to TorchFile
    models : sequence of Model
        By model-parallel rank.
    shards : sequence of sequence of Shard
        By model-parallel rank.
    prefixes : mapping of int to str, optional
        What the names of every layer start with, where that is known.

    Raises
    ------
    IncompleteSourceError
        A layer file is missing; it is named.
    CorruptSourceError
        Files contradict each other.
    UnsupportedSourceError
        A layer may be one of several tied modules.
    """
    tp = 1 + max(rank for _, rank in files)
    known: list[dict[str, int | None]] = [
        {**_known(models[rank::tp], shards[rank::tp])} for rank in range(tp)
    ]
    buffers = frozenset[str]().union(*(model.buffer_names for model in models))
    shapes = [_shapes(models[rank::tp]) for rank in range(tp)]
    modules: dict[str, list[list[Model]]] = {}
    numbers: dict[str, list[int]] = {}
    for layer in sorted({layer for layer, _ in files}):
        copy = []
        prefix = (prefixes or {}).get(layer)
        prefix = prefix or layer_prefix(layer, files[layer, 0], known[0], buffers)
        for rank in range(tp):
            file = files[layer, rank]
            model = _as_model(file, prefix, known=known[rank], shapes=shapes[rank], buffers=buffers)
            copy.append(model)
            if copy[0].module.keys() != copy[-1].module.keys():
                raise _other_names(copy[-1], copy[0])
        modules.setdefault(prefix, []).append(copy)
        numbers.setdefault(prefix, []).append(layer)
        if modules[prefix][0][0].module.keys() != copy[0].module.keys():
            raise _other_names(copy[0], modules[prefix][0][0])
    replicas = list(modules.values())
    _require_complete(found, replicas, [*dict.fromkeys([*known[0], *sorted(buffers)])])
    return Layers(replicas, _census(replicas, models[0].shared), numbers)


def _known(models: Iterable[Model], shards: Iterable[Sequence[Shard]]) -> dict[str, int]:
    """Trainable parameters of one tensor-parallel rank on all stages, with their numbers of elements."""
    known: dict[str, int] = {}
    for model, group in zip(models, shards, strict=True):
        if model.shapes:
            known.update((name, math.prod(shape)) for name, shape in model.trainable.items())
            continue
        for unit in _recorded(group):
            known.update(unit)
    return known


def _recorded(shards: Sequence[Shard]) -> list[dict[str, int]]:
    """Per unit, parameters in flat order by ``param_slice_mappings``, with their numbers of elements."""
    units: list[dict[str, int]] = [{} for _ in shards[0].masters]
    for shard in shards:
        if shard.mappings is None:
            raise UnsupportedSourceError(
                f"{shard.name}: neither param_shapes nor param_slice_mappings say where parameters lie."
            )
        for unit, slices in zip(units, shard.mappings, strict=True):
            what = f"{shard.name}: param_slice_mappings"
            for name, (_, numel) in sorted(named(slices, what).items(), key=lambda item: item[1]):
                unit[name] = unit.get(name, 0) + numel
    return units


def fill_shapes(
    models: Sequence[Model], shards: Sequence[Sequence[Shard]], layers: Layers
) -> list[Model]:
    """Shapes of the parameters where the model files do not have any.

    BF16_Optimizer under a pipeline at stage 0 saves its shards, but no ``param_shapes``
    (``runtime/engine.py``, ``_save_checkpoint``): the order is then that of ``param_slice_mappings``, and the
    shapes are those of the layer files.

    Raises
    ------
    CorruptSourceError
        A tensor of a layer file has another number of elements than the optimizer's.
    """
    filled: list[Model] = []
    tp = len(layers.replicas[0][0])
    for position, (model, group) in enumerate(zip(models, shards, strict=True)):
        if model.shapes:
            filled.append(model)
            continue
        refs = {
            name: (holder, ref)
            for copies in layers.replicas
            for holder in [copies[0][position % tp]]
            for name, ref in holder.module.items()
        }
        shapes: list[Shapes] = []
        for unit in _recorded(group):
            for name, numel in unit.items():
                if name not in refs:
                    raise CorruptSourceError(
                        f"{group[0].name}: param_slice_mappings hold {name!r}, which is in no layer file.",
                        kind=Kind.MISSING_KEY,
                        fqn=name,
                    )
                holder, ref = refs[name]
                if ref.numel != numel:
                    raise CorruptSourceError(
                        f"{holder.name}: {name!r} has shape {list(ref.shape)}, but param_slice_mappings of"
                        f" {group[0].name} and its like have {numel} elements of it.",
                        kind=Kind.SHAPE,
                        fqn=name,
                    )
            shapes.append({name: refs[name][1].shape for name in unit})
        filled.append(replace(model, shapes=shapes))
    return filled


def _shapes(models: Iterable[Model]) -> dict[str, tuple[int, ...]]:
    return {name: shape for model in models for name, shape in model.trainable.items()}


def layer_prefix(
    layer: int, file: TorchFile, known: Mapping[str, int | None], buffers: frozenset[str]
) -> str:
    """What the names of a layer start with: its number, or the key of a tied module.

    The file does not tell. A layer whose own names nothing knows is the tied module whose parameters have
    the same local names and sizes; should that be wrong, the copies differ, which is an error on reading.

    Parameters
    ----------
    layer : int
    file : TorchFile
    known : mapping of str to int or None
        Parameters of all stages, and their numbers of elements where these are known.
    buffers : frozenset of str

    Raises
    ------
    UnsupportedSourceError
        The layer may be one of several tied modules.
    """
    sizes = {
        key: value.numel
        for key, value in named(file.root, file.stat.name).items()
        if isinstance(value, TensorRef)
    }
    own = f"{layer}."
    if any(own + key in known or own + key in buffers for key in sizes):
        return own
    tied: dict[str, dict[str, int | None]] = {}
    for name, numel in [*known.items(), *((name, None) for name in sorted(buffers))]:
        if name.startswith(TIED):
            key, _, local = name.removeprefix(TIED).partition(".")
            tied.setdefault(key, {})[local] = numel
    fitting = [key for key, locals_ in tied.items() if _fits(locals_, sizes)]
    if len(fitting) > 1:
        names = listing(map(repr, fitting))
        raise UnsupportedSourceError(
            f"{file.stat.name}: the layer may be any of the tied modules {names}: they have the same names and"
            " sizes.",
            kind=Kind.AMBIGUOUS,
        )
    return f"{TIED}{fitting[0]}." if fitting else own


def _fits(locals_: Mapping[str, int | None], sizes: Mapping[str, int]) -> bool:
    """Whether a layer has everything that is known of a tied module; buffers have no known size."""
    return all(local in sizes and numel in (None, sizes[local]) for local, numel in locals_.items())


def _as_model(
    file: TorchFile,
    prefix: str,
    *,
    known: Iterable[str],
    shapes: Shapes,
    buffers: frozenset[str],
) -> Model:
    """A layer file as a model file; where no shapes are recorded, its own count."""
    entries = {prefix + key: value for key, value in named(file.root, file.stat.name).items()}
    module = {key: value for key, value in entries.items() if isinstance(value, TensorRef)}
    trainable = {key: shapes.get(key, module[key].shape) for key in known if key in module}
    return Model(
        name=file.stat.name,
        big_endian=file.big_endian,
        module=module,
        extras={key: value for key, value in entries.items() if key not in module},
        shapes=[trainable],
        buffer_names=buffers.intersection(entries),
        frozen_shapes=None,
        fragments={},
        shared={},
        rest={},
    )


def _require_complete(
    found: RankFiles, replicas: Sequence[Sequence[Sequence[Model]]], names: Iterable[str]
) -> None:
    """Every parameter and buffer of the stages must be in a layer file."""
    here = {name for copies in replicas for name in [*copies[0][0].module, *copies[0][0].extras]}
    require_names(found, here, names, tp=len(replicas[0][0]))


def require_names(
    found: RankFiles, here: Collection[str], names: Iterable[str], *, tp: int
) -> None:
    """Every parameter and buffer in ``names`` must be among those ``here``, in layer files.

    Raises
    ------
    IncompleteSourceError
        Some are not; the layer files that should have them are named.
    """
    absent = [name for name in names if name not in here]
    if not absent:
        return
    numbers = {name.partition(".")[0] for name in absent}
    lost = sorted(int(number) for number in numbers if number.isdecimal())
    missing = [
        found.layer_name(layer, rank)
        for layer in lost
        for rank in range(tp)
        if (layer, rank) not in found.layers
    ]
    what = listing(missing) or "the file of a tied module, or an entry of a file"
    raise IncompleteSourceError(
        f"checkpoint {found.tag!r}: no layer file holds {listing(map(repr, absent), cap=3)}; missing: {what}.",
        hint="Copy them from the nodes that wrote them.",
        missing=missing,
    )


def _census(replicas: Sequence[Sequence[Sequence[Model]]], shared: Mapping[str, str]) -> Census:
    """One census of all layers; ``shared_params`` counts where both names are in one layer."""
    census = Census()
    for copies in replicas:
        model = copies[0][0]
        inside = {
            alias: first
            for alias, first in shared.items()
            if alias in model.module and first in model.module
        }
        mine = take_census(replace(model, shared=inside), 1)
        census.aliases.update(mine.aliases)
        census.frozen.update(mine.frozen)
        census.buffers.update(mine.buffers)
        census.warnings += mine.warnings
    return census


def _other_names(model: Model, first: Model) -> CorruptSourceError:
    differ = sorted(model.module.keys() ^ first.module.keys())
    return CorruptSourceError(
        f"{model.name} and {first.name} do not belong together: {listing(map(repr, differ), cap=3)} in only one of"
        " them.",
        hint="Take all files of a checkpoint from one save.",
        kind=Kind.MISSING_KEY,
    )
