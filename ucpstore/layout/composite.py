"""Geometries made of other geometries: slices side by side, stacks and copies."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, get_args

from ucpstore.errors import LayoutError
from ucpstore.layout.faults import Fault
from ucpstore.layout.joined import (
    Joined,
    distinct,
    one_slot,
    table,
    union_cuts,
    union_slots,
    with_dim,
)
from ucpstore.layout.node import Geometry, Piece, Rule
from ucpstore.layout.region import Region

__all__ = ["Concat", "Copies", "Part", "Stack"]

_RULES: tuple[Rule, ...] = get_args(Rule)


@dataclass(frozen=True, slots=True)
class Part:
    """Indices ``origin`` to ``origin + width`` of a child along the dim of its `Concat`."""

    width: int
    child: Geometry
    origin: int = 0


@dataclass(frozen=True, slots=True)
class Concat(Joined):
    """Slices of children, one after the other along a dim.

    It serves every sharding along a dim: equal, unequal and zero widths; several sections of one
    child (fused q|k|v); a child that is longer than the logical tensor (padding).

    Attributes
    ----------
    shape : tuple of int
    dim : int
    parts : tuple of Part
        Consecutive along ``dim``; the other dims of every child equal those of ``shape``.
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[Part, ...]
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape):
            raise LayoutError(f"cannot join along dim {self.dim}: the shape is {list(self.shape)}.")
        starts = tuple(accumulate((part.width for part in self.parts), initial=0))
        object.__setattr__(self, "_starts", starts)
        self._combine(distinct(self.parts))

    def _inside(self, region: Region) -> Iterator[tuple[Part, Region, int]]:
        """The parts that a region meets: (part, region in the child's coordinates, way back)."""
        dim, starts = self.dim, self._starts
        low = region.offsets[dim]
        high = low + region.sizes[dim]
        index = bisect_right(starts, low) - 1
        while index < len(self.parts) and starts[index] < high:
            part = self.parts[index]
            start = max(low, starts[index])
            width = min(high, starts[index + 1]) - start
            if width > 0:
                back = starts[index] - part.origin
                yield part, with_dim(region, dim, start - back, width), back
            index += 1

    def _pieces(self, region: Region, copy: int) -> Iterator[Piece]:
        dim = self.dim
        for part, inner, back in self._inside(region):
            if back == 0:
                yield from part.child._pieces(inner, copy)
                continue
            for piece in part.child._pieces(inner, copy):
                box = piece.region
                moved = with_dim(box, dim, box.offsets[dim] + back, box.sizes[dim])
                yield Piece(moved, piece.slot, piece.offset, piece.strides)

    def _count(self, region: Region) -> int:
        return sum(part.child._count(inner) for part, inner, _ in self._inside(region))

    def cuts(self) -> tuple[tuple[int, ...], ...]:
        found = [set[int]() for _ in self.shape]
        found[self.dim].update(self._starts)
        of_child = {id(child): child.cuts() for child in distinct(self.parts)}
        for part, start in zip(self.parts, self._starts, strict=False):
            if part.width == 0:
                continue
            for dim, points in enumerate(of_child[id(part.child)]):
                if dim != self.dim:
                    found[dim].update(points)
                    continue
                inside = points[bisect_right(points, part.origin) :]
                inside = inside[: bisect_left(inside, part.origin + part.width)]
                found[dim].update(start + point - part.origin for point in inside)
        return tuple(
            tuple(sorted(point for point in points if 0 < point < length))
            for points, length in zip(found, self.shape, strict=True)
        )

    def faults(self) -> list[Fault]:
        full = Region.full(self.shape)
        found: list[Fault] = []
        total, length = self._starts[-1], self.shape[self.dim]
        if total < length:
            gap = with_dim(full, self.dim, total, length - total)
            message = f"the parts cover {total} of {length} indices along dim {self.dim}"
            found.append(Fault("gap", gap, None, message))
        elif total > length:
            message = f"the parts are {total} long along dim {self.dim}, the tensor {length}"
            found.append(Fault("shape", full, None, message))
        of_child = {id(child): child.faults() for child in distinct(self.parts)}
        for part, start in zip(self.parts, self._starts, strict=False):
            region = with_dim(full, self.dim, start, part.width)
            own = _part_faults(part, region, self.dim)
            found += own
            if own or not of_child[id(part.child)]:
                continue
            used = with_dim(region, self.dim, part.origin, part.width)
            delta = tuple(start - part.origin if d == self.dim else 0 for d in range(full.ndim))
            moved = (fault.moved(used, delta) for fault in of_child[id(part.child)])
            found += [fault for fault in moved if fault is not None]
        return found

    def used_slots(self) -> Sequence[int]:
        return union_slots(child for child in distinct(part for part in self.parts if part.width))

    def to_json(self) -> dict[str, Any]:
        children, index = table(part.child for part in self.parts)
        parts = [[part.width, index[id(part.child)], part.origin] for part in self.parts]
        return {
            "node": "concat",
            "shape": list(self.shape),
            "dim": self.dim,
            "children": [child.to_json() for child in children],
            "parts": parts,
        }


@dataclass(frozen=True, slots=True)
class Stack(Joined):
    """Equal tensors under a new leading axis: index ``i`` is ``children[i]``."""

    children: tuple[Geometry, ...]
    shape: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.children:
            raise LayoutError("cannot stack no tensors: their shape is unknown.")
        object.__setattr__(self, "shape", (len(self.children), *self.children[0].shape))
        self._combine(self.children)

    def _pieces(self, region: Region, copy: int) -> Iterator[Piece]:
        inner = Region(region.offsets[1:], region.sizes[1:])
        for index in range(region.offsets[0], region.offsets[0] + region.sizes[0]):
            for piece in self.children[index]._pieces(inner, copy):
                box = Region((index, *piece.region.offsets), (1, *piece.region.sizes))
                yield Piece(box, piece.slot, piece.offset, (0, *piece.strides))

    def _count(self, region: Region) -> int:
        inner = Region(region.offsets[1:], region.sizes[1:])
        start = region.offsets[0]
        return sum(c._count(inner) for c in self.children[start : start + region.sizes[0]])

    def cuts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(range(1, len(self.children))), *union_cuts(self.children)

    def faults(self) -> list[Fault]:
        full = Region.full(self.shape[1:])
        found: list[Fault] = []
        for index, child in enumerate(self.children):
            if child.shape != self.shape[1:]:
                box = Region((index, *full.offsets), (1, *full.sizes))
                message = (
                    f"item {index} has shape {list(child.shape)}, item 0 {list(self.shape[1:])}"
                )
                found.append(Fault("shape", box, one_slot(child), message))
                continue
            for fault in child.faults():
                box = Region((index, *fault.region.offsets), (1, *fault.region.sizes))
                found.append(Fault(fault.kind, box, fault.slot, fault.message))
        return found

    def used_slots(self) -> Sequence[int]:
        return union_slots(self.children)

    def to_json(self) -> dict[str, Any]:
        return {"node": "stack", "children": [child.to_json() for child in self.children]}


@dataclass(frozen=True, slots=True)
class Copies(Geometry):
    """Several copies of one tensor.

    Attributes
    ----------
    children : tuple of Geometry
        Of equal shape. Copies of copies count one after the other.
    rule : {"equal", "first", "average"}
        Copies must be bit-equal; or the first one counts; or their mean (partial parameters: UCP's
        ``params_to_average``). With copies of copies the later of these rules holds for all: the
        mean over all copies is the mean of the means.
    """

    children: tuple[Geometry, ...]
    rule: Rule = "equal"
    shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _copies: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.children:
            raise LayoutError("cannot combine no copies: their shape is unknown.")
        if self.rule not in _RULES:
            raise LayoutError(
                f"copies cannot be combined by {self.rule!r}: the rules are {', '.join(_RULES)}."
            )
        object.__setattr__(self, "shape", self.children[0].shape)
        object.__setattr__(self, "_copies", sum(child.copies for child in self.children))
        rules = [self.rule, *(child.rule for child in self.children if child.copies > 1)]
        object.__setattr__(self, "rule", max(rules, key=_RULES.index))

    @property
    def copies(self) -> int:
        return self._copies

    def _pieces(self, region: Region, copy: int) -> Iterator[Piece]:
        if copy == 0:
            return self.children[0]._pieces(region, 0)
        for child in self.children:
            if copy < child.copies:
                return child._pieces(region, copy)
            copy -= child.copies
        return iter(())

    def _count(self, region: Region) -> int:
        return self.children[0]._count(region)

    def cuts(self) -> tuple[tuple[int, ...], ...]:
        return union_cuts(self.children)

    def faults(self) -> list[Fault]:
        full = Region.full(self.shape)
        found: list[Fault] = []
        for index, child in enumerate(self.children):
            if child.shape != self.shape:
                message = f"copy {index} has shape {list(child.shape)}, copy 0 {list(self.shape)}"
                found.append(Fault("shape", full, one_slot(child), message))
            else:
                found += child.faults()
        return found

    def used_slots(self) -> Sequence[int]:
        return union_slots(self.children)

    def to_json(self) -> dict[str, Any]:
        children = [child.to_json() for child in self.children]
        return {"node": "copies", "children": children, "rule": self.rule}


def _part_faults(part: Part, region: Region, dim: int) -> list[Fault]:
    """Whether the child has what a part of a `Concat` takes from it."""
    shape = part.child.shape
    slot = one_slot(part.child)
    if part.width < 0 or part.origin < 0:
        message = f"width {part.width} and origin {part.origin} must not be below zero"
        return [Fault("bounds", region, slot, message)]
    others = shape[:dim] + shape[dim + 1 :]
    if len(shape) != region.ndim or others != region.sizes[:dim] + region.sizes[dim + 1 :]:
        message = f"the part has shape {list(shape)}: dims other than {dim} must equal the box's"
        return [Fault("shape", region, slot, message)]
    has = max(min(shape[dim] - part.origin, part.width), 0)
    if has == part.width:
        return []
    gap = with_dim(region, dim, region.offsets[dim] + has, part.width - has)
    message = (
        f"the part has {shape[dim]} indices along dim {dim}, expected {part.origin + part.width}"
    )
    return [Fault("gap", gap, slot, message)]
