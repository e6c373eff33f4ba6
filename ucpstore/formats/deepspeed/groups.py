"""The parameter groups of a target: hyper-parameters, parameters in order, names of the optimizer's states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ucpstore.contracts import ParameterSpec, Role, Source
from ucpstore.errors import Kind, UnsupportedSourceError, listing
from ucpstore.formats.deepspeed.ranks import Group, buffer_of
from ucpstore.formats.deepspeed.states import MASTER, name_and_role
from ucpstore.formats.deepspeed.ucpinfo import Member, undeal
from ucpstore.formats.deepspeed.wrapper import ZERO, accumulation_of, engine_class, section
from ucpstore.layout.parallel import Layout

__all__ = ["is_dealt", "native_states", "read_groups", "source_dtype"]

_FLOATS = ("float32", "bfloat16", "float16")


def source_dtype(source: Source, config: Mapping[str, Any]) -> str:
    """Element type of the source's weights."""
    if str(source.parallelism.get("file_prefix", "")).startswith("bf16"):
        return "bfloat16"
    if section(config, "bf16").get("enabled") is True:
        return "bfloat16"
    return "float16" if section(config, "fp16").get("enabled") is True else "float32"


def read_groups(
    source: Source,
    common: Mapping[str, Any],
    config: Mapping[str, Any],
    warnings: list[str],
    *,
    flat: bool,
) -> list[Group]:
    """All groups with logical shapes, in the order of the user's optimizer.

    Parameters
    ----------
    source : Source
    common : mapping
        The decoded common document.
    config : mapping
        The source's DeepSpeed configuration.
    warnings : list of str
        Is added to.
    flat : bool
        A group is one flat buffer, so that all its parameters need the same states.

    Raises
    ------
    UnsupportedSourceError
        States are missing or have no native form.
    """
    groups = []
    for index, entry in enumerate(common["param_groups"]):
        hyper = {key: value for key, value in entry.items() if key != "params"}
        if "lr" not in hyper or hyper.get("use_muon"):
            found = "Muon's group" if hyper.get("use_muon") else "no hyper-parameters"
            raise UnsupportedSourceError(
                f"{source.url}: parameter group {index} has {found}; it cannot be written natively yet."
            )
        members = [_member(source, fqn) for fqn in entry["params"]]
        members = _in_order(source, config, members, warnings)
        groups.append(Group(hyper, tuple(members), _states(source, index, members, flat=flat)))
    owned = {member.fqn for group in groups for member in group.members}
    if not owned:
        raise UnsupportedSourceError(
            f"{source.url}: found weights only, no parameter group with parameters; expected the states of the"
            " optimizer that will load them.",
            kind=Kind.MISSING_KEY,
        )
    astray = [
        f
        for f, p in source.parameters.items()
        if p.trainable and buffer_of(p) is None and f not in owned
    ]
    if astray:
        raise UnsupportedSourceError(
            f"{source.url}: parameter groups list {len(owned)} parameters, but not {listing(astray)}; expected"
            " every trainable one."
        )
    if any(entry for entry in common["framework"].get("optimizer", {}).get("scalars", ())):
        raise UnsupportedSourceError(
            f"{source.url}: the optimizer keeps numbers besides the step; they have no native form yet."
        )
    return groups


def _member(source: Source, fqn: str) -> Member:
    parameter = source.parameters.get(fqn)
    spec = parameter.states.get(MASTER) if parameter else None
    if spec is None or spec.dtype not in _FLOATS:
        found = "no such state" if spec is None else spec.dtype
        raise UnsupportedSourceError(
            f"{source.url}: master weights ({MASTER}) of {fqn}: found {found}, expected one of"
            f" {', '.join(_FLOATS)}.",
            kind=Kind.MISSING_KEY,
        )
    return Member(fqn, spec.shape)


def _in_order(
    source: Source, config: Mapping[str, Any], members: list[Member], warnings: list[str]
) -> list[Member]:
    """The order of the user's optimizer, which the source's flat order came from.

    Stages of a pipeline are listed one after the other, and each lists tied modules first, as
    ``named_parameters`` does; so does whichever stage holds them in the target.
    """
    if source.parallelism.get("mapping_ordered"):
        return members  # the order is the user's, not one that was found in files
    dealt = source.parallelism.get("optimizer_class") == ZERO and is_dealt(
        config,
        # what was written for BF16_Optimizer looks like this, too
        Layout(
            zero_stage=source.parallelism.get("zero_stage", 1),
            dtype=source_dtype(source, config),
            grad_accum_dtype=accumulation_of(config),
        ),
    )
    changed = source.parallelism.get("mapping_reorders") or source.parallelism.get("unfrozen")
    if dealt and changed:
        raise UnsupportedSourceError(
            f"{source.url}: round_robin_gradients has dealt its parameters out by their number and order, and the"
            " mapping or unfreeze changed them; the order in which an optimizer would get them is not known."
        )
    if source.parallelism.get("pp", 1) == 1:
        return undeal(members, source.parallelism.get("dp", 1)) if dealt else members
    if dealt:
        text = (
            "round_robin_gradients with a pipeline: the order of the optimizer's parameters is taken to be that of"
            " the model."
        )
        warnings += [text] if text not in warnings else []
        place = {fqn: position for position, fqn in enumerate(source.parameters)}
        members = sorted(members, key=lambda member: place[member.fqn])
    layers = [layer for m in members if (layer := _layer_of(m.fqn)) is not None]
    if layers != sorted(layers):
        return members
    return sorted(members, key=lambda member: _layer_of(member.fqn) is not None)


def _layer_of(fqn: str) -> int | None:
    """The layer of a pipeline that a name belongs to; None for a tied module."""
    first = fqn.partition(".")[0]
    return int(first) if first.isascii() and first.isdigit() else None


def is_dealt(config: Mapping[str, Any], layout: Layout) -> bool:
    """Whether ``round_robin_gradients`` deals parameters out by the number of ranks."""
    asked = section(config, "zero_optimization").get("round_robin_gradients") is True
    return asked and engine_class(layout, config) == ZERO


def _states(source: Source, index: int, members: Sequence[Member], *, flat: bool) -> dict[str, str]:
    """The optimizer states that all parameters of a group have: the optimizer's name -> ours."""
    held: list[dict[str, str]] = []
    for member in members:
        specs = source.parameters[member.fqn].states
        held.append(native_states(source.parameters[member.fqn]))
        for name in held[-1].values():
            if specs[name].shape != member.shape or specs[name].dtype not in _FLOATS:
                raise UnsupportedSourceError(
                    f"{source.url}: {name} of {member.fqn} has shape {specs[name].shape} and elements of"
                    f" {specs[name].dtype}, expected {member.shape} and floats."
                )
    if flat and any(names != held[0] for names in held):
        raise UnsupportedSourceError(
            f"{source.url}: some parameters of group {index} have optimizer states that others lack; one flat"
            " buffer cannot hold that."
        )
    return held[0] if held else {}


def native_states(parameter: ParameterSpec) -> dict[str, str]:
    """The optimizer states of a parameter: the optimizer's name -> ours."""
    names = [
        n for n, s in parameter.states.items() if n != MASTER and s.role is not Role.MODEL_WEIGHT
    ]
    return {_native(name): name for name in names}


_NATIVE = {name_and_role(state)[0]: state for state in ("exp_avg", "exp_avg_sq")}


def _native(name: str) -> str:
    return _NATIVE.get(name, name)
