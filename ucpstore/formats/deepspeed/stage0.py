"""ZeRO stage 0: the whole optimizer state lies in the model file, and no rank has a file of its own.

What DeepSpeed's ``engine.py`` (``_configure_optimizer``, ``_do_optimizer_sanity_check``) makes of the user's
optimizer decides on the schema of ``optimizer``:

- fp32: torch's own ``state_dict``. The masters are the module's weights.
- fp16 and bf16: ``FP16_UnfusedOptimizer`` with torch's ``state_dict`` and ``fp32_groups``, the masters in
  their parameters' shapes (``fp16/unfused_optimizer.py``, ``state_dict``).
- fp16 and bf16 with DeepSpeed's or Apex's FusedAdam: ``FP16_Optimizer`` with ``fp32_groups_flat``, which is
  refused.

No tensor has a name; `ucpstore.formats.deepspeed.naming` finds them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ucpstore.errors import CorruptSourceError, Kind, PatternError, UnsupportedSourceError, listing
from ucpstore.formats.deepspeed.checks import integer, mapping_of, sequence_of
from ucpstore.formats.deepspeed.module import Model, take_census
from ucpstore.formats.deepspeed.naming import Entry, Naming, Prober
from ucpstore.formats.deepspeed.shards import Shard
from ucpstore.formats.deepspeed.states import name_and_role
from ucpstore.formats.deepspeed.units import WholeUnit
from ucpstore.formats.torchfile import TensorRef
from ucpstore.io.base import Files

__all__ = ["NAMES_FILE", "Stage0", "read_names", "read_stage0"]

NAMES_FILE = "parameter_names.json"
"""Beside the model files: the names of all parameters in the optimizer's order, a list per group."""

_NAMES_LIMIT = 64 << 20
_SCALER = (
    "dynamic_loss_scale",
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "scale_factor",
    "scale_window",
)


@dataclass(frozen=True, slots=True)
class Stage0:
    """One model-parallel rank's file in the words of the other stages.

    Attributes
    ----------
    model : Model
        With the shapes of the trainable parameters.
    shard : Shard
        One unit per parameter; none where no optimizer was saved.
    units : list of WholeUnit
    warnings : list of str
    """

    model: Model
    shard: Shard
    units: list[WholeUnit]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class _Saved:
    """An optimizer's state, whichever class saved it. Lists of parameters are flat, in order."""

    optimizer_class: str
    groups: tuple[Mapping[str, Any], ...]
    members: list[list[int]]
    masters: list[TensorRef | None]
    states: list[dict[str, TensorRef]]
    scalars: list[dict[str, Any]]
    rest: dict[str, Any]


def read_names(files: Files, folder: str) -> list[list[str]] | None:
    """The lists of `NAMES_FILE`, if the checkpoint's owner wrote one.

    Raises
    ------
    PatternError
        It is no list of lists of names.
    """
    name = f"{folder}/{NAMES_FILE}" if folder else NAMES_FILE
    if files.stat(name) is None:
        return None
    try:
        found = json.loads(files.read(name, 0, _NAMES_LIMIT))
    except (ValueError, RecursionError) as error:
        raise _no_names(name, str(error)) from error
    if not isinstance(found, list) or not all(map(_is_list_of_texts, found)):
        raise _no_names(name, "another structure")
    groups: list[list[str]] = found
    return groups


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _no_names(name: str, found: str) -> PatternError:
    return PatternError(
        f"{name}: found {found}, expected a JSON list with a list of parameter names per group.",
        kind=Kind.MALFORMED,
    )


def read_stage0(model: Model, names: Sequence[Sequence[str]] | None, probe: Prober) -> Stage0:
    """Take the optimizer of a stage-0 model file apart and find its parameters' names.

    Parameters
    ----------
    model : Model
    names : sequence of sequence of str, optional
        What `read_names` found.
    probe : Prober
        Compares values where nothing else tells parameters apart.

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
    saved = _read(model)
    naming = _naming(model, saved)
    _declare(naming, model, saved, names)
    found = naming.result(probe)
    flat = [name for group in found for name in group]
    shapes = [{name: model.module[name].shape for name in group} for group in found]
    masters = [
        model.module[name] if ref is None else ref
        for name, ref in zip(flat, saved.masters, strict=True)
    ]
    units = [
        _unit(model, name, [master, *states.values()])
        for name, master, states in zip(flat, masters, saved.states, strict=True)
    ]
    shard = _shard(model, saved, masters, [len(group) for group in found])
    return Stage0(replace(model, shapes=list(shapes)), shard, units, naming.warnings)


def _naming(model: Model, saved: _Saved) -> Naming:
    census = take_census(model, 0)
    candidates = {name: ref for name, ref in model.module.items() if name in census.frozen}
    entries = [
        Entry(_shape(model, master, states, index), master)
        for index, (master, states) in enumerate(zip(saved.masters, saved.states, strict=True))
    ]
    groups = [[entries[index] for index in members] for members in saved.members]
    remedy = (
        f"To name the parameters, write {NAMES_FILE} beside the file: a JSON list that holds, for each of the"
        f" optimizer's {len(groups)} groups, the list of its parameters' names in the optimizer's order; a torch"
        " optimizer that is built from named_parameters() saves them itself."
    )
    return Naming(model.name, candidates, groups, remedy)


def _declare(
    naming: Naming, model: Model, saved: _Saved, names: Sequence[Sequence[str]] | None
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


def _read(model: Model) -> _Saved:
    where = f"{model.name}: optimizer"
    body = mapping_of(model.optimizer, where)
    if "fp32_groups_flat" in body:
        raise UnsupportedSourceError(
            f"{where}: found the flat masters of FP16_Optimizer (fp32_groups_flat, FusedAdam without ZeRO), expected"
            " those of FP16_UnfusedOptimizer or torch's own state: flat groups without ZeRO are not supported yet."
        )
    if "fp32_groups" in body:
        base = mapping_of(body.get("optimizer_state_dict"), f"{where}: optimizer_state_dict")
        owner, used = "FP16_UnfusedOptimizer", {"fp32_groups", "optimizer_state_dict"}
    elif "state" in body and "param_groups" in body:
        base, owner, used = body, "torch.optim.Optimizer", {"state", "param_groups"}
    else:
        raise UnsupportedSourceError(
            f"{where}: found the keys {listing(map(str, body), cap=8)}, expected those of a torch optimizer (state,"
            " param_groups) or of FP16_UnfusedOptimizer (fp32_groups, optimizer_state_dict).",
            kind=Kind.MISSING_KEY,
        )
    groups, keys = _groups(base, where)
    members, flat = _number(keys)
    state = mapping_of(base.get("state"), f"{where}: state")
    others = [key for key in state if isinstance(key, int) and key not in set(flat)]
    if others:
        raise CorruptSourceError(
            f"{where}: there are states of the parameters {listing(others, cap=5)}, which are in no group."
        )
    masters: list[TensorRef | None] = [None] * len(flat)
    if "fp32_groups" in body:
        masters = list(_masters(body["fp32_groups"], [len(k) for k in keys], where))
    rest = {key: value for key, value in body.items() if key not in used}
    scaler = {key: rest.pop(key) for key in _SCALER if key in rest}
    beside = {key: value for key, value in base.items() if key not in ("state", "param_groups")}
    beside.update((key, value) for key, value in state.items() if not isinstance(key, int))
    if beside and base is not body:
        rest["state_dict"] = beside
    split = [
        _split(mapping_of(state.get(key, {}), f"{where}: state"), master, f"{where}: state {key}")
        for key, master in zip(flat, masters, strict=True)
    ]
    return _Saved(
        optimizer_class=owner,
        groups=groups,
        members=members,
        masters=masters,
        states=[states for states, _ in split],
        scalars=[scalars for _, scalars in split],
        rest={**rest, **({"loss_scaler": scaler} if scaler else {})},
    )


def _groups(
    base: Mapping[str, Any], where: str
) -> tuple[tuple[Mapping[str, Any], ...], list[list[int]]]:
    """``param_groups``, and the keys of their parameters in ``state``."""
    what = f"{where}: param_groups"
    groups = tuple(mapping_of(item, what) for item in sequence_of(base.get("param_groups"), what))
    keys = [[integer(k, what) for k in sequence_of(g.get("params"), what)] for g in groups]
    flat = [key for group in keys for key in group]
    if len(set(flat)) != len(flat):
        raise CorruptSourceError(f"{what}: a parameter is in two places, expected each once.")
    return groups, keys


def _number(keys: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """Number parameters through the groups; very old versions of torch use addresses as keys."""
    flat = [key for group in keys for key in group]
    number = {key: index for index, key in enumerate(flat)}
    return [[number[key] for key in group] for group in keys], flat


def _masters(value: object, lengths: Sequence[int], where: str) -> list[TensorRef]:
    what = f"{where}: fp32_groups"
    found: list[TensorRef] = []
    outer = sequence_of(value, what, length=len(lengths))
    for group, length in zip(outer, lengths, strict=True):
        for ref in sequence_of(group, what, length=length):
            if not isinstance(ref, TensorRef) or "float" not in ref.dtype:
                raise CorruptSourceError(
                    f"{what}: found {type(ref).__name__}, expected tensors of floats."
                )
            found.append(ref)
    return found


def _split(
    entry: Mapping[str, Any], master: TensorRef | None, what: str
) -> tuple[dict[str, TensorRef], dict[str, Any]]:
    """Tensor states and everything else. ``step``, and 0-d tensors that are no moments, are scalars."""
    states: dict[str, TensorRef] = {}
    scalars: dict[str, Any] = {}
    for key, value in entry.items():
        moment = isinstance(key, str) and name_and_role(key)[0] != key
        if isinstance(value, TensorRef) and key != "step" and (value.shape or moment):
            if value.shape or master is None or not master.shape:
                states[key] = value
                continue
            raise UnsupportedSourceError(
                f"{what}: {key!r} is a single number, but its parameter has shape {list(master.shape)}.",
                kind=Kind.SHAPE,
            )
        scalars[key] = value
    return states, scalars


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
    model: Model, saved: _Saved | None, masters: Sequence[TensorRef], lengths: Sequence[int]
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
