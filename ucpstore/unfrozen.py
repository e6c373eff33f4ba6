"""A `Source` some of whose frozen parameters are shown as trained, as a run that unfreezes them needs it.

Nothing is copied: the master weight is the frozen weight, and the optimizer's states are zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from ucpstore.contracts import (
    Arrays,
    CommonState,
    Fragment,
    ParameterSpec,
    Role,
    Source,
    SourceFile,
    StateSpec,
)
from ucpstore.errors import Kind, LayoutError, PlanError, close_names, listing
from ucpstore.layout.region import Region
from ucpstore.tagged import decode, encode

__all__ = ["UnfrozenSource", "checked_unfreeze"]

_WEIGHT = "weight"
_MASTER = "fp32"


def checked_unfreeze(unfreeze: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    """The option ``unfreeze`` as pairs of a glob and the number of a parameter group.

    Raises
    ------
    PlanError
        It is something else.
    """
    if unfreeze is None:
        return ()
    if not isinstance(unfreeze, Mapping) or not unfreeze:
        raise PlanError(
            f"unfreeze is {unfreeze!r:.80}, expected globs over names with the number of the parameter group that"
            " each joins."
        )
    for glob, group in unfreeze.items():
        if not isinstance(glob, str) or type(group) is not int or group < 0:
            raise PlanError(
                f"unfreeze: found {glob!r}: {group!r}, expected a glob over names and the number of a parameter"
                " group, from 0."
            )
    return tuple(unfreeze.items())


class UnfrozenSource:
    """A source with frozen parameters that join parameter groups. Picklable if the source is.

    A parameter that joins a group has the group's hyper-parameters, the same optimizer states as its other
    parameters, all zero, and their step: DeepSpeed keeps one step per flat buffer. Its place in the group is that
    of its place in the model, as an optimizer gets it from ``model.named_parameters()``.

    Parameters
    ----------
    source : Source
    unfreeze : sequence of (str, int)
        Globs over names, and the number of the group (in ``param_groups``) that matching frozen parameters join.

    Raises
    ------
    PlanError
        A glob is for no frozen parameter, there is no such group, or what a new member needs is not known.
    """

    def __init__(self, source: Source, unfreeze: Sequence[tuple[str, int]]) -> None:
        self._source = source
        self.format = source.format
        self.url = source.url
        self.is_local = source.is_local
        self._joins = _joins(source, unfreeze)
        document = dict(source.common.document)
        steps = decode(document.get("steps") or {})
        found = dict(source.parameters)
        groups = [dict(group) for group in document.get("param_groups") or ()]
        told = []
        for index in sorted(set(self._joins.values())):
            new = [fqn for fqn, joined in self._joins.items() if joined == index]
            members = list(_group(source, groups, index)["params"])
            states, step = _common_of(source, members, steps, index)
            for fqn in new:
                found[fqn] = _trained(source, fqn, states)
                if step is not None:
                    steps[fqn] = step
            names = _placed(source, members, new, index)
            groups[index]["params"] = names
            if "param_names" in groups[index]:
                groups[index]["param_names"] = names
            told.append(_told(new, index, groups[index], states, step))
        self.parameters: Mapping[str, ParameterSpec] = found
        self.common = CommonState(
            {**document, "param_groups": groups, "steps": encode(steps)}, source.common.tensors
        )
        self.parallelism: Mapping[str, Any] = {
            **source.parallelism,
            "unfrozen": dict(sorted(self._joins.items())),
        }
        self.warnings: Sequence[str] = [*source.warnings, *told]

    def __repr__(self) -> str:
        return f"<UnfrozenSource of {self._source!r}: {len(self._joins)} unfrozen>"

    def files(self) -> Sequence[SourceFile]:
        return self._source.files()

    def current_files(self) -> Sequence[SourceFile]:
        return self._source.current_files()

    def read(
        self, fqn: str, state: str, region: Region, out: Arrays, *, compare: bool = False
    ) -> None:
        origin = self._origin(fqn, state)
        if origin is not None:
            self._source.read(fqn, origin, region, out, compare=compare)
            return
        shape = self.parameters[fqn].states[state].shape
        if not Region.full(shape).contains(region) or out.shape != region.sizes:
            raise LayoutError(
                f"cannot read {fqn!r} ({state}) {region} into an array of shape {out.shape}: the state has shape"
                f" {shape}.",
                fqn=fqn,
                state=state,
            )
        out[...] = 0

    def cuts(self, fqn: str, state: str) -> tuple[tuple[int, ...], ...]:
        return self._source.cuts(fqn, self._origin(fqn, state) or _WEIGHT)

    def fragments(self, fqn: str, state: str, region: Region) -> Sequence[Fragment]:
        origin = self._origin(fqn, state)
        return () if origin is None else self._source.fragments(fqn, origin, region)

    def count_reads(self, fqn: str, state: str) -> int:
        origin = self._origin(fqn, state)
        return 0 if origin is None else self._source.count_reads(fqn, origin)

    def digest(self, fqn: str, state: str) -> str | None:
        origin = self._origin(fqn, state)
        return None if origin is None else self._source.digest(fqn, origin)

    def joint_digests(self) -> Mapping[tuple[tuple[str, str], ...], str]:
        return self._source.joint_digests()

    def _origin(self, fqn: str, state: str) -> str | None:
        """The state of the source that a state is; None for one that is zero."""
        if fqn not in self._joins or state == _WEIGHT:
            return state
        return _WEIGHT if state == _MASTER else None


def _joins(source: Source, unfreeze: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Frozen parameters and the groups that they join, in the order of the model."""
    frozen = [
        fqn
        for fqn, parameter in source.parameters.items()
        if not parameter.trainable and set(parameter.states) == {_WEIGHT}
    ]
    found: dict[str, int] = {}
    for glob, group in unfreeze:
        matching = [fqn for fqn in frozen if fnmatchcase(fqn, glob)]
        if not matching:
            trained = [fqn for fqn in source.parameters if fnmatchcase(fqn, glob)]
            words = f"; it matches {listing(trained)}, which are not frozen" if trained else ""
            raise PlanError(
                f"{source.url}: unfreeze: {glob!r} is for none of the {len(frozen)} frozen parameters"
                f" ({listing(frozen)}){words}.",
                kind=Kind.UNMATCHED,
                hint=close_names(glob, frozen),
            )
        for fqn in matching:
            if found.setdefault(fqn, group) != group:
                raise PlanError(
                    f"{source.url}: unfreeze puts {fqn!r} into the groups {found[fqn]} and {group}, expected one."
                )
    return {fqn: found[fqn] for fqn in frozen if fqn in found}


def _group(source: Source, groups: Sequence[Mapping[str, Any]], index: int) -> Mapping[str, Any]:
    if index < len(groups) and groups[index].get("params"):
        return groups[index]
    told = [
        f"{number}: {len(group.get('params') or ())} parameters, weight_decay {group.get('weight_decay')}, lr"
        f" {group.get('lr')}"
        for number, group in enumerate(groups)
    ]
    raise PlanError(
        f"{source.url}: unfreeze names parameter group {index}, expected one of those with parameters:"
        f" {'; '.join(told) or 'there are none'}."
    )


def _common_of(
    source: Source, members: Sequence[str], steps: Mapping[str, Any], index: int
) -> tuple[list[StateSpec], Any]:
    """The optimizer's states and the step that all parameters of a group have."""
    states = [
        {
            state.name: state
            for state in source.parameters[fqn].states.values()
            if state.role is not Role.MODEL_WEIGHT and state.name != _MASTER
        }
        for fqn in members
    ]
    found = {repr(steps.get(fqn)) for fqn in members}
    for what, differ in (
        ("optimizer states", any(one.keys() != states[0].keys() for one in states)),
        ("steps", len(found) > 1),
    ):
        if differ:
            raise PlanError(
                f"{source.url}: unfreeze: the parameters of group {index} have different {what}; those of a new one"
                " are not known."
            )
    return list(states[0].values()), steps.get(members[0])


def _trained(source: Source, fqn: str, states: Sequence[StateSpec]) -> ParameterSpec:
    """A frozen parameter with a master weight and the states of a group."""
    parameter = source.parameters[fqn]
    weight = parameter.states[_WEIGHT]
    found = {_MASTER: StateSpec(_MASTER, Role.MASTER_WEIGHT, weight.shape, weight.dtype)}
    found |= {state.name: replace(state, shape=weight.shape) for state in states}
    found[_WEIGHT] = replace(weight, derived=True)
    return replace(parameter, states=found, trainable=True)


def _placed(source: Source, members: Sequence[str], new: Sequence[str], index: int) -> list[str]:
    """All parameters of a group in the order of the model, which must be that of the old ones."""
    place = {fqn: number for number, fqn in enumerate(source.parameters)}
    numbers = [place[fqn] for fqn in members]
    rising = all(a < b for a, b in pairwise(numbers))
    if not rising and not all(a > b for a, b in pairwise(numbers)):
        raise PlanError(
            f"{source.url}: unfreeze: the parameters of group {index} are not in the order of the model, so the places"
            f" of {listing(new)} among them are not known."
        )
    return sorted([*members, *new], key=place.__getitem__, reverse=not rising)


def _told(
    new: Sequence[str],
    index: int,
    group: Mapping[str, Any],
    states: Sequence[StateSpec],
    step: Any,
) -> str:
    zero = ", ".join(state.name for state in states) or "no states"
    counted = "" if step is None else f" and its step {step}, by which Adam corrects the bias"
    return (
        f"{len(new)} frozen parameters join group {index} (weight_decay {group.get('weight_decay')}, lr"
        f" {group.get('lr')}) with zeros for {zero}{counted}: {listing(new)}."
    )
