"""What geometries made of other geometries have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ucpstore.errors import LayoutError
from ucpstore.layout.node import Geometry, Rule
from ucpstore.layout.region import Region

__all__ = ["Joined", "distinct", "one_slot", "table", "union_cuts", "union_slots", "with_dim"]


class _Holder(Protocol):
    @property
    def child(self) -> Geometry: ...


@dataclass(frozen=True, slots=True)
class Joined(Geometry):
    """A geometry whose children lie side by side, each with copies of its own."""

    _copies: int = field(init=False, repr=False, compare=False)
    _rules: tuple[Rule, ...] = field(init=False, repr=False, compare=False)

    def _combine(self, children: Iterable[Geometry]) -> None:
        """Remember what the children say about copies, since every read asks."""
        rules: set[Rule] = set()
        copies = 1
        for child in children:
            if child.copies > 1:
                copies = max(copies, child.copies)
                rules.add(child.rule)
        object.__setattr__(self, "_copies", copies)
        object.__setattr__(self, "_rules", tuple(sorted(rules)))

    @property
    def copies(self) -> int:
        return self._copies

    @property
    def rule(self) -> Rule:
        if len(self._rules) > 1:
            raise LayoutError(
                f"copies inside one tensor are combined by the rules {', '.join(self._rules)}: "
                "one rule is expected."
            )
        return self._rules[0] if self._rules else "equal"


def with_dim(region: Region, dim: int, offset: int, size: int) -> Region:
    """The region with one dim replaced."""
    offsets, sizes = region.offsets, region.sizes
    return Region(
        (*offsets[:dim], offset, *offsets[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :])
    )


def distinct(holders: Iterable[_Holder]) -> Iterable[Geometry]:
    """The children of parts or blocks, each object once (interleaved parts share few children)."""
    return {id(holder.child): holder.child for holder in holders}.values()


def table(children: Iterable[Geometry]) -> tuple[list[Geometry], dict[int, int]]:
    """Distinct children in order, and the position of each object (by id) in that list."""
    distinct = list({id(child): child for child in children}.values())
    return distinct, {id(child): index for index, child in enumerate(distinct)}


def union_slots(children: Iterable[Geometry]) -> Sequence[int]:
    # Thousands of children often use the same range of ranks: unite equal ranges first.
    distinct = {tuple(s) if isinstance(s, list) else s for s in (c.used_slots() for c in children)}
    if len(distinct) == 1:
        return distinct.pop()
    return tuple(sorted({slot for slots in distinct for slot in slots}))


def union_cuts(children: Iterable[Geometry]) -> tuple[tuple[int, ...], ...]:
    # As with slots: equal cuts are the rule.
    distinct = {child.cuts() for child in children}
    return tuple(tuple(sorted(set().union(*dims))) for dims in zip(*distinct, strict=True))


def one_slot(child: Geometry) -> int | None:
    """The slot of a child that lies in one."""
    slots = child.used_slots()
    return slots[0] if len(slots) == 1 else None
