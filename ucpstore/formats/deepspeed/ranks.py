"""What every model-parallel rank of a target holds: the one place where its coordinates are decided.

A rank of stage ``pp`` and tensor-parallel rank ``tp`` is DeepSpeed's model-parallel rank
``pp * degree + tp`` (``runtime/pipe/topology.py``, ``PipelineParallelGrid``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ucpstore.contracts import ParameterSpec, Role, StateSpec
from ucpstore.errors import Kind, PatternError, PlanError, UnsupportedSourceError
from ucpstore.formats.deepspeed.pipelining import Pipeline
from ucpstore.formats.deepspeed.states import MASTER
from ucpstore.formats.deepspeed.ucpinfo import Member, UcpInfo, deal
from ucpstore.layout.local import Local, local_tensors
from ucpstore.layout.parallel import Layout
from ucpstore.layout.patterns import Axis
from ucpstore.layout.rules import Held, Patterns

__all__ = ["Group", "ModelRank", "Slices", "buffer_of", "model_ranks", "weight_of"]

SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default (``runtime/zero/config.py``)."""


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group: hyper-parameters, parameters in flat order, names of the optimizer's states."""

    hyper: Mapping[str, Any]
    members: tuple[Member, ...]
    states: Mapping[str, str]
    """The optimizer's name of a state -> ours; of the first parameter where each has its own."""


@dataclass(frozen=True, slots=True)
class ModelRank:
    """A model-parallel rank.

    Attributes
    ----------
    pp, tp : int
        Pipeline stage and tensor-parallel rank.
    mp : int
        Number in file names.
    names : tuple of str
        Parameters and buffers that it holds.
    groups : tuple of Group
        With local shapes. DeepSpeed removes groups without parameters (``_configure_optimizer`` of
        ``runtime/engine.py``), so a pipeline stage may have fewer.
    places : tuple of int
        Positions of these groups among those of all stages.
    info : UcpInfo
        What each of its data-parallel ranks holds.
    """

    pp: int
    tp: int
    mp: int
    names: tuple[str, ...]
    groups: tuple[Group, ...]
    places: tuple[int, ...]
    info: UcpInfo


def buffer_of(parameter: ParameterSpec) -> str | None:
    """The state of a buffer; None for a parameter."""
    return next((n for n, s in parameter.states.items() if s.role is Role.BUFFER), None)


def weight_of(parameter: ParameterSpec) -> tuple[str, StateSpec]:
    """The state that a model's weight is made from.

    Raises
    ------
    UnsupportedSourceError
        There is none.
    """
    state = MASTER if MASTER in parameter.states else "weight"
    if state not in parameter.states:
        found = ", ".join(parameter.states) or "no states"
        raise UnsupportedSourceError(
            f"{parameter.fqn!r}: found {found}, expected a master weight ({MASTER}) or a weight.",
            kind=Kind.MISSING_KEY,
            fqn=parameter.fqn,
        )
    return state, parameter.states[state]


class Slices:
    """Which slice of every parameter and buffer a tensor-parallel rank holds.

    Parameters
    ----------
    parameters : mapping of str to ParameterSpec
    patterns : Patterns or None
        May be None or empty where the degree is 1.
    degree : int

    Raises
    ------
    PatternError
        No rule says how a parameter lies on the ranks, or it does not fit.
    """

    def __init__(
        self, parameters: Mapping[str, ParameterSpec], patterns: Patterns | None, degree: int
    ) -> None:
        if not patterns and degree > 1:
            raise PatternError(
                f"nothing says how the parameters lie on {degree} tensor-parallel ranks: the source has no patterns.",
                hint="Give patterns: rules such as 'replicate', 'shard(0)' or 'shard(1)' for all parameters.",
            )
        self.degree = degree
        self.held: dict[str, Held] = {}
        self._locals: dict[str, tuple[Local, ...]] = {}
        known: dict[Held, tuple[Local, ...]] = {}
        rules = patterns or Patterns()
        for fqn, parameter in parameters.items():
            if buffer := buffer_of(parameter):  # tensor parallelism cuts no buffers
                whole = Local.whole(parameter.states[buffer].shape)
                self._locals[fqn] = (whole,) * degree
                continue
            held = rules.held(fqn, weight_of(parameter)[1].shape, degree)
            if held not in known:
                known[held] = local_tensors(held.shape, held.axes)
            self.held[fqn] = held
            self._locals[fqn] = known[held]

    def local(self, fqn: str, rank: int) -> Local:
        """What a rank holds of a parameter or buffer."""
        return self._locals[fqn][rank]

    def all(self, fqn: str) -> tuple[Local, ...]:
        """What all ranks hold of it, in rank order."""
        return self._locals[fqn]

    def member(self, member: Member, rank: int) -> Member:
        """A parameter as a rank holds it."""
        local = self.local(member.fqn, rank)
        if local == Local.whole(member.shape):
            return member
        return replace(member, shape=local.shape, local=local)

    def axes(self, fqn: str) -> tuple[Axis, ...]:
        """How a parameter lies on the ranks."""
        return self.held[fqn].axes


def model_ranks(
    groups: Sequence[Group],
    parameters: Mapping[str, ParameterSpec],
    slices: Slices,
    layout: Layout,
    *,
    pipeline: Pipeline | None,
    dealt: bool,
    flat: bool,
) -> Iterator[ModelRank]:
    """All model-parallel ranks, in order of their numbers.

    Parameters
    ----------
    groups : sequence of Group
        With logical shapes, and all parameters in the order of the user's optimizer.
    parameters : mapping of str to ParameterSpec
    slices : Slices
    layout : Layout
    pipeline : Pipeline, optional
        Of a ``PipelineModule``.
    dealt : bool
        Parameters lie in the flat buffers in the order of ``round_robin_gradients``.
    flat : bool
        At stage 0: a group is one buffer, instead of every parameter.

    Raises
    ------
    PlanError
        A pipeline stage has no trainable parameters: DeepSpeed's optimizers need some.
    """
    filled = [group for group in groups if group.members]
    for pp in range(layout.pp):
        names = [f for f in parameters if pipeline is None or pp in pipeline.stages(f)]
        here = set(names)
        for tp in range(layout.tp):
            mine: dict[int, Group] = {}
            for place, group in enumerate(filled):
                members = [slices.member(m, tp) for m in group.members if m.fqn in here]
                if members:
                    hyper = _named(group.hyper, members)
                    members = deal(members, layout.zero_ranks) if dealt else members
                    mine[place] = replace(group, hyper=hyper, members=tuple(members))
            if not mine:
                raise PlanError(
                    f"pipeline stage {pp} of {layout.pp} has no trainable parameters; DeepSpeed's optimizers need"
                    " some.",
                    hint="Choose fewer stages, or other ones with stages=.",
                )
            info = _info([group.members for group in mine.values()], layout, flat=flat)
            mp = pp * layout.tp + tp
            yield ModelRank(pp, tp, mp, tuple(names), tuple(mine.values()), tuple(mine), info)


def _named(hyper: Mapping[str, Any], members: Sequence[Member]) -> Mapping[str, Any]:
    """Hyper-parameters with the rank's own names, where torch saved some (``param_names``)."""
    if "param_names" not in hyper:
        return hyper
    return {**hyper, "param_names": [member.fqn for member in members]}


def _info(members: Sequence[Sequence[Member]], layout: Layout, *, flat: bool) -> UcpInfo:
    if layout.zero_stage == 0:
        return UcpInfo.whole(members, layout.zero_ranks, flat=flat)
    size = layout.sub_group_size or SUB_GROUP_SIZE
    return UcpInfo.of(members, layout.zero_stage, layout.zero_ranks, size)
