"""ZeRO stage 0: the whole optimizer state lies in the model file, and no rank has a file of its own.

No tensor has a name; `ucpstore.formats.deepspeed.naming` finds them. Only where ``FP16_Optimizer`` made
the module's weights views of one flat tensor per group do their places in it tell the parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ucpstore.errors import Kind, PatternError, UnsupportedSourceError, listing
from ucpstore.formats.deepspeed.module import Model, take_census
from ucpstore.formats.deepspeed.naming import Entry, Naming, Prober
from ucpstore.formats.deepspeed.saved import SavedOptimizer, read_optimizer
from ucpstore.formats.deepspeed.shards import Shard
from ucpstore.formats.deepspeed.units import GroupUnit, Shapes, Unit, WholeUnit
from ucpstore.formats.torchfile import TensorRef
from ucpstore.io.base import Files

__all__ = [
    "NAMES_FILE",
    "Names",
    "Stage0",
    "entries_of",
    "read_names",
    "read_stage0",
    "recorded_names",
]

NAMES_FILE = "parameter_names.json"
"""Beside the model files: the names of all parameters in the optimizer's order, a list per group.

Or ``{"groups": ...}`` with them, and for a pipeline ``{"tied_modules": {KEY: [layer, ...]}}``.
"""

_NAMES_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class Stage0:
    """One model-parallel rank's file in the words of the other stages.

    Attributes
    ----------
    model : Model
        With the shapes of the trainable parameters.
    shard : Shard
        One unit per parameter, or per flat group; none where no optimizer was saved.
    units : list of Unit
    warnings : list of str
    """

    model: Model
    shard: Shard
    units: list[Unit]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Names:
    """What the owner of a checkpoint says of its parameters.

    Attributes
    ----------
    groups : list of list of str, optional
        Names in the optimizer's order, a list per group.
    tied : mapping of str to tuple of int
        The layers of a pipeline that use a tied module, by its key.
    """

    groups: list[list[str]] | None = None
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def read_names(files: Files, folder: str) -> Names:
    """What `NAMES_FILE` says, if the checkpoint's owner wrote one.

    Raises
    ------
    PatternError
        It is neither a list of lists of names nor an object with such a list, or with tied modules.
    """
    name = f"{folder}/{NAMES_FILE}" if folder else NAMES_FILE
    if files.stat(name) is None:
        return Names()
    try:
        found = json.loads(files.read(name, 0, _NAMES_LIMIT))
    except (ValueError, RecursionError) as error:
        raise _no_names(name, str(error)) from error
    if isinstance(found, list):
        found = {"groups": found}
    if not isinstance(found, dict) or found.keys() - {"groups", "tied_modules"}:
        raise _no_names(name, "another structure")
    groups, tied = found.get("groups"), found.get("tied_modules", {})
    if groups is not None and not (
        isinstance(groups, list) and all(map(_is_list_of_texts, groups))
    ):
        raise _no_names(name, "another structure")
    if not isinstance(tied, dict) or not all(map(_is_list_of_layers, tied.values())):
        raise _no_names(name, "other tied_modules")
    layers = [layer for listed in tied.values() for layer in listed]
    if len(set(layers)) != len(layers):
        raise _no_names(name, "a layer in two tied modules")
    return Names(groups, {key: tuple(listed) for key, listed in tied.items()})


def _is_list_of_layers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _no_names(name: str, found: str) -> PatternError:
    return PatternError(
        f"{name}: found {found}, expected a JSON list with a list of parameter names per group, or an object with such"
        " a list ('groups') and, of a pipeline, the layers that use each tied module ('tied_modules').",
        kind=Kind.MALFORMED,
    )


def read_stage0(
    model: Model,
    names: Sequence[Sequence[str]] | None,
    probe: Prober,
    *,
    remedy: str = "",
) -> Stage0:
    """Take the optimizer of a stage-0 model file apart and find its parameters' names.

    Parameters
    ----------
    model : Model
        That of a pipeline stage with the tensors of its layers.
    names : sequence of sequence of str, optional
        What `read_names` found of the groups.
    probe : Prober
        Compares values where nothing else tells parameters apart.
    remedy : str, optional
        What the user can do about an ambiguity, of a pipeline: its layers' weights view no flat groups.

    Raises
    ------
    PatternError
        A parameter can have several names.
    CorruptSourceError
        Module and optimizer do not belong together.
    UnsupportedSourceError
        The optimizer's state has a schema or layout that is not read.
    """
    if model.optimizer is None:
        text = (
            f"{model.name}: the optimizer's state was not saved ('optimizer' is None without ZeRO): there are"
            " weights only, and which of them were trainable is unknown."
        )
        return Stage0(model, _shard(model, None, [], []), [], [text])
    saved = read_optimizer(model)
    if saved.flat and remedy:
        return _read_listed(model, saved, names, remedy)
    if saved.flat:
        return _read_flat(model, saved, names, probe)
    naming = _naming(model, saved, remedy)
    _declare(naming, model, saved, names)
    found = naming.result(probe)
    flat = [name for group in found for name in group]
    shapes = [{name: model.module[name].shape for name in group} for group in found]
    masters = [
        model.module[name] if ref is None else ref
        for name, ref in zip(flat, saved.masters, strict=True)
    ]
    units: list[Unit] = [
        _unit(model, name, [master, *states.values()])
        for name, master, states in zip(flat, masters, saved.states, strict=True)
    ]
    shard = _shard(model, saved, masters, [len(group) for group in found])
    return Stage0(replace(model, shapes=list(shapes)), shard, units, naming.warnings)


def _read_flat(
    model: Model, saved: SavedOptimizer, names: Sequence[Sequence[str]] | None, probe: Prober
) -> Stage0:
    """Flat groups, whose parameters view them in the module, one after the other."""
    census = take_census(model, 0)
    views: dict[int, list[tuple[int, str, TensorRef]]] = {}
    for name, ref in model.module.items():
        if name in census.frozen and ref.is_contiguous and ref.numel:
            views.setdefault(id(ref.storage), []).append((ref.start, name, ref))
    found: dict[str, TensorRef] = {}
    shapes: dict[str, Shapes] = {}
    for viewed in views.values():
        viewed.sort(key=lambda view: view[0])
        _, label, first = viewed[0]
        ends = list(accumulate((ref.nbytes for _, _, ref in viewed), initial=0))
        if [start for start, _, _ in viewed] == ends[:-1] and ends[-1] == first.storage.nbytes:
            found[label] = replace(first, shape=(sum(r.numel for _, _, r in viewed),), strides=(1,))
            shapes[label] = {name: ref.shape for _, name, ref in viewed}
    groups = entries_of(model, saved)
    entries = [entry for group in groups for entry in group]
    lost = [e.shape for e in entries if e.shape not in {ref.shape for ref in found.values()}]
    if lost:
        raise UnsupportedSourceError(
            f"{model.name}: no weights in 'module' are views of one tensor of {list(lost[0] or ())} elements, as"
            " FP16_Optimizer makes those of a flat group of this length: their order in it is unknown."
        )
    remedy = "Save the checkpoint again with a ZeRO stage, which records names."
    labels = Naming(model.name, found, groups, remedy).result(probe)
    flat = [shapes[label] for group in labels for label in group]
    warnings = [] if names is None else [f"{NAMES_FILE} was ignored: flat groups need no names."]
    shard = _shard(model, saved, [ref for ref in saved.masters if ref is not None], [1] * len(flat))
    units: list[Unit] = [GroupUnit.of(group, 1, None) for group in flat]
    return Stage0(replace(model, shapes=flat), shard, units, warnings)


def _read_listed(
    model: Model, saved: SavedOptimizer, names: Sequence[Sequence[str]] | None, remedy: str
) -> Stage0:
    """Flat groups whose parameters somebody listed in their order."""
    recorded = recorded_names(saved)
    listed = [list(group) for group in (names if names is not None else recorded)]
    masters = [ref for ref in saved.masters if ref is not None]
    if len(listed) != len(masters) or not all(listed):
        raise PatternError(
            f"{model.name}: the order of the parameters in the {len(masters)} flat groups of FP16_Optimizer is not"
            f" recorded; {len(listed)} lists of names were found.",
            kind=Kind.AMBIGUOUS,
            hint=remedy,
        )
    flat: list[Shapes] = []
    for group, master in zip(listed, masters, strict=True):
        unknown = [name for name in group if name not in model.module]
        shapes = {name: model.module[name].shape for name in group if name not in unknown}
        numel = sum(math.prod(shape) for shape in shapes.values())
        if unknown or len(shapes) != len(group) or numel != master.numel:
            raise PatternError(
                f"{model.name}: a flat group of {master.numel} elements is said to hold {len(group)} parameters"
                f" ({listing(map(repr, group), cap=3)}), of which {numel} elements are in the stage's layers.",
                kind=Kind.SHAPE,
                hint=remedy,
            )
        flat.append(shapes)
    for index, (master, states) in enumerate(zip(masters, saved.states, strict=True)):
        _shape(model, master, states, index)
    units: list[Unit] = [GroupUnit.of(group, 1, None) for group in flat]
    shard = _shard(model, saved, masters, [1] * len(flat))
    return Stage0(replace(model, shapes=flat), shard, units, [])


def entries_of(model: Model, saved: SavedOptimizer) -> list[list[Entry]]:
    """What is known of the optimizer's numbered parameters, by group.

    Raises
    ------
    UnsupportedSourceError
        The states of one have several shapes.
    """
    entries = [
        Entry(_shape(model, master, states, index), master)
        for index, (master, states) in enumerate(zip(saved.masters, saved.states, strict=True))
    ]
    return [[entries[index] for index in members] for members in saved.members]


def recorded_names(saved: SavedOptimizer) -> list[list[str]]:
    """Names that torch saved (``param_names``) of all groups that have one name for each of their parameters."""
    found: list[list[str]] = []
    for group, members in zip(saved.groups, saved.members, strict=True):
        names = group.get("param_names")
        names = names if isinstance(names, list | tuple) else ()
        texts = [name for name in names if isinstance(name, str)]
        found.append(texts if saved.flat or len(texts) == len(members) else [])
    return found


def _naming(model: Model, saved: SavedOptimizer, remedy: str) -> Naming:
    census = take_census(model, 0)
    candidates = {name: ref for name, ref in model.module.items() if name in census.frozen}
    groups = entries_of(model, saved)
    remedy = remedy or (
        f"To name the parameters, write {NAMES_FILE} beside the file: a JSON list that holds, for each of the"
        f" optimizer's {len(groups)} groups, the list of its parameters' names in the optimizer's order; a torch"
        " optimizer that is built from named_parameters() saves them itself."
    )
    return Naming(model.name, candidates, groups, remedy)


def _declare(
    naming: Naming, model: Model, saved: SavedOptimizer, names: Sequence[Sequence[str]] | None
) -> None:
    """Names that the owner wrote, or torch's ``param_names``."""
    aliases = take_census(model, 0).aliases
    if names is not None:
        if len(names) != len(saved.groups):
            raise PatternError(
                f"{NAMES_FILE} has {len(names)} lists, but the optimizer of {model.name} {len(saved.groups)} groups.",
                kind=Kind.SHAPE,
            )
        for index, listed in enumerate(names):
            naming.declare(index, [aliases.get(name, name) for name in listed], NAMES_FILE)
        return
    for index, group in enumerate(saved.groups):
        recorded = group.get("param_names")
        if not isinstance(recorded, list | tuple):
            continue
        # FP16_UnfusedOptimizer drops frozen parameters from the group, but not their names.
        known = [aliases.get(name, name) for name in recorded if isinstance(name, str)]
        if len(known) == len(saved.members[index]) and naming.module.keys() >= set(known):
            naming.declare(index, known, f"{model.name}: param_names")
        else:
            naming.warnings.append(
                f"{model.name}: param_names of group {index} are not the names of its"
                f" {len(saved.members[index])} parameters in 'module'; they were ignored."
            )


def _shape(
    model: Model, master: TensorRef | None, states: Mapping[str, TensorRef], index: int
) -> tuple[int, ...] | None:
    """The parameter's shape, which all of its states must have."""
    shapes = {key: ref.shape for key, ref in states.items()}
    if master is not None:
        shapes = {"fp32": master.shape, **shapes}
    if len(set(shapes.values())) > 1:
        text = ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
        raise UnsupportedSourceError(
            f"{model.name}: the optimizer's states of parameter {index} have several shapes ({text}), expected one:"
            " factored states are not supported.",
            kind=Kind.SHAPE,
        )
    return next(iter(shapes.values()), None)


def _unit(model: Model, name: str, refs: Sequence[TensorRef]) -> WholeUnit:
    """Where the elements of a parameter lie in its tensors, which must be alike in this."""
    layouts = {None if ref.is_contiguous else ref.strides for ref in refs}
    strides = layouts.pop()
    if layouts or any(ref.span != ref.nbytes for ref in refs):
        raise UnsupportedSourceError(
            f"{model.name}: weights and optimizer states of {name!r} have several memory formats, or gaps: expected"
            " the same one, dense.",
            fqn=name,
        )
    return WholeUnit({name: refs[0].shape}, strides)


def _shard(
    model: Model, saved: SavedOptimizer | None, masters: Sequence[TensorRef], lengths: Sequence[int]
) -> Shard:
    ends = [sum(lengths[: position + 1]) for position in range(len(lengths))]
    return Shard(
        name=model.name,
        big_endian=model.big_endian,
        stage=0,
        optimizer_class=saved.optimizer_class if saved else "none",
        masters=tuple(masters),
        states=tuple(saved.states) if saved else (),
        scalars=tuple(saved.scalars) if saved else (),
        groups=saved.groups if saved else None,
        group_units=tuple(
            tuple(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)
        ),
        counts=(1,) * len(masters),
        pads=None,
        mappings=None,
        patterns=None,
        rest=saved.rest if saved else {},
        root={key: model.rest.get(key) for key in ("ds_config", "ds_version")},
    )
