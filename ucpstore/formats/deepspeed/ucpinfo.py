"""Which rank of a DeepSpeed run holds which elements: the rules of its optimizers, as pure functions.

Stage 0: every rank holds everything. Stages 1 and 2: ``runtime/zero/stage_1_and_2.py`` (alignment to twice
the ranks, zeros at the end). Stage 3:
``runtime/zero/stage3.py`` (sub-groups) and ``partition_parameters.py`` (every parameter cut on its own).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ucpstore.gather import Part
from ucpstore.layout.local import Local

__all__ = ["Flat", "Member", "UcpInfo", "deal", "sub_groups", "undeal"]


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter that the optimizer owns.

    Attributes
    ----------
    fqn : str
    shape : tuple of int
        What the model-parallel rank holds of it.
    local : Local, optional
        Which part that is; by default all of it.
    """

    fqn: str
    shape: tuple[int, ...]
    local: Local | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat buffer of one rank, the same for the master weights and every optimizer state.

    Attributes
    ----------
    group : int
        Position of the parameter group among those of the rank.
    numel : int, elements
        Padding included.
    padding : int, elements
        At the end, at stages 1 and 2; stage 3 pads every parameter.
    parts : tuple of Part
        ``state`` is empty: they hold for any.
    """

    group: int
    numel: int
    padding: int
    parts: tuple[Part, ...]

    def of(self, state: str) -> tuple[Part, ...]:
        """The parts of one state."""
        return tuple(replace(part, state=state) for part in self.parts)


@dataclass(frozen=True, slots=True)
class UcpInfo:
    """The mapping of ranks to parts (GenUcpMetadata of the UCP paper), of one model-parallel rank.

    Attributes
    ----------
    zero_stage : int
    dp : int
        Ranks that ZeRO cuts over.
    sub_group_size : int or None
        Of stage 3.
    units : tuple of (int, tuple of Member)
        Per flat buffer: its parameter group, and its parameters in flat order.
    ends : tuple of tuple of int, elements
        Of stages 1 and 2, per flat buffer: where its parameters end in that of all ranks.
    """

    zero_stage: int
    dp: int
    sub_group_size: int | None
    units: tuple[tuple[int, tuple[Member, ...]], ...]
    ends: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls, groups: Sequence[Sequence[Member]], stage: int, dp: int, sub_group_size: int
    ) -> UcpInfo:
        """Lay out parameter groups, each in flat order."""
        if stage == 3:
            return cls(stage, dp, sub_group_size, tuple(sub_groups(groups, dp, sub_group_size)))
        units = tuple((g, tuple(group)) for g, group in enumerate(groups))
        ends = tuple(tuple(accumulate(m.numel for m in group)) for _, group in units)
        return cls(stage, dp, None, units, ends)

    @classmethod
    def whole(cls, groups: Sequence[Sequence[Member]], dp: int, *, flat: bool) -> UcpInfo:
        """Lay out stage 0: a buffer per group where it is ``flat``, else one per parameter."""
        units: list[tuple[int, tuple[Member, ...]]] = []
        for index, group in enumerate(groups):
            units += [(index, tuple(group))] if flat else [(index, (member,)) for member in group]
        return cls(0, dp, None, tuple(units))

    def rank(self, rank: int) -> list[Flat]:
        """The flat buffers of a data-parallel rank, in order of `units`."""
        if self.zero_stage == 0:
            return [_whole(group, members) for group, members in self.units]
        if self.zero_stage == 3:
            return [_sub_group(group, members, rank, self.dp) for group, members in self.units]
        units = zip(self.units, self.ends, strict=True)
        return [
            _flat_group(group, members, ends, rank, dp=self.dp) for (group, members), ends in units
        ]

    def to_json(self, rank: int) -> list[dict[str, Any]]:
        """Per buffer of a rank: ``[fqn, first element, elements, offset in the buffer]`` of every part."""
        return [
            {
                "group": flat.group,
                "numel": flat.numel,
                "parts": [[p.fqn, p.start, p.count, p.offset] for p in flat.parts],
            }
            for flat in self.rank(rank)
        ]


def _whole(group: int, members: Sequence[Member]) -> Flat:
    """Without ZeRO every rank has everything, one parameter after the other."""
    parts = []
    offset = 0
    for member in members:
        parts.append(Part(member.fqn, "", member.shape, 0, member.numel, offset, member.local))
        offset += member.numel
    return Flat(group, offset, 0, tuple(parts))


def _flat_group(
    group: int, members: Sequence[Member], ends: Sequence[int], rank: int, *, dp: int
) -> Flat:
    """A rank's partition of a group's flat buffer at stages 1 and 2.

    ``nccl_start_alignment_factor`` is 2: the buffer's length is a multiple of ``2 * dp``. Only the rank's own
    parameters are looked at, of which thousands of ranks have few.
    """
    total = ends[-1] if ends else 0
    size = -(-total // (2 * dp)) * 2
    low, high = rank * size, (rank + 1) * size
    parts = []
    for index in range(bisect_right(ends, low), len(members)):
        member, end = members[index], ends[index]
        start = end - member.numel
        if start >= high:
            break
        first, last = max(start, low), min(end, high)
        if first < last:
            span = (first - start, last - first, first - low)
            parts.append(Part(member.fqn, "", member.shape, *span, member.local))
    return Flat(group, size, min(max(high - total, 0), size), tuple(parts))


def sub_groups(
    groups: Sequence[Sequence[Member]], dp: int, limit: int
) -> Iterable[tuple[int, tuple[Member, ...]]]:
    """Stage 3's sub-groups: closed as soon as ``limit`` elements of a partition are reached."""
    for index, group in enumerate(groups):
        current: list[Member] = []
        size = 0
        for member in group:
            current.append(member)
            size += -(-member.numel // dp)
            if size >= limit:
                yield index, tuple(current)
                current, size = [], 0
        if current:
            yield index, tuple(current)


def _sub_group(group: int, members: Sequence[Member], rank: int, dp: int) -> Flat:
    parts = []
    offset = 0
    for member in members:
        size = -(-member.numel // dp)
        count = min(max(member.numel - rank * size, 0), size)
        if count:
            span = (rank * size, count, offset)
            parts.append(Part(member.fqn, "", member.shape, *span, member.local))
        offset += size
    return Flat(group, offset, 0, tuple(parts))


def _dealt(count: int, ranks: int) -> list[int]:
    """``_round_robin_reorder`` of stages 1 and 2: every ``ranks``-th from 0, then from 1, ..."""
    return [i for rank in range(ranks) for i in range(rank, count, ranks)]


def deal(members: Sequence[Member], ranks: int) -> list[Member]:
    """The flat order under ``round_robin_gradients``."""
    return [members[i] for i in _dealt(len(members), ranks)]


def undeal(members: Sequence[Member], ranks: int) -> list[Member]:
    """The order of which `deal` makes ``members``."""
    found = list(members)
    for position, i in enumerate(_dealt(len(members), ranks)):
        found[i] = members[position]
    return found
