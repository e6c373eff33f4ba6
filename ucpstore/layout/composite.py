"""Geometries made of other geometries: slices side by side, boxes, stacks and copies."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import sub
from typing import Any

from ucpstore.errors import LayoutError
from ucpstore.layout.coverage import Fault, overlaps, uncovered
from ucpstore.layout.node import Geometry, Piece, Rule
from ucpstore.layout.region import Region

__all__ = ["Block", "Blocks", "Concat", "Copies", "Part", "Stack"]


@dataclass(frozen=True, slots=True)
class Part:
    """Indices ``origin`` to ``origin + width`` of a child along the dim of its `Concat`."""

    width: int
    child: Geometry
    origin: int = 0


@dataclass(frozen=True, slots=True)
class Concat(Geometry):
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

    @property
    def copies(self) -> int:
        return max((child.copies for child in _distinct(self.parts)), default=1)

    @property
    def rule(self) -> Rule:
        return _common_rule(_distinct(self.parts))

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
                yield part, _with_dim(region, dim, start - back, width), back
            index += 1

    def _pieces(self, region: Region, copy: int) -> Iterator[Piece]:
        dim = self.dim
        for part, inner, back in self._inside(region):
            if back == 0:
                yield from part.child._pieces(inner, copy)
                continue
            for piece in part.child._pieces(inner, copy):
                box = piece.region
                moved = _with_dim(box, dim, box.offsets[dim] + back, box.sizes[dim])
                yield Piece(moved, piece.slot, piece.offset, piece.strides)

    def _count(self, region: Region) -> int:
        return sum(part.child._count(inner) for part, inner, _ in self._inside(region))

    def cuts(self) -> tuple[tuple[int, ...], ...]:
        found = [set[int]() for _ in self.shape]
        found[self.dim].update(self._starts)
        of_child = {id(child): child.cuts() for child in _distinct(self.parts)}
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
            gap = _with_dim(full, self.dim, total, length - total)
            message = f"the parts cover {total} of {length} indices along dim {self.dim}"
            found.append(Fault("gap", gap, None, message))
        elif total > length:
            message = f"the parts are {total} long along dim {self.dim}, the tensor {length}"
            found.append(Fault("shape", full, None, message))
        of_child = {id(child): child.faults() for child in _distinct(self.parts)}
        for part, start in zip(self.parts, self._starts, strict=False):
            region = _with_dim(full, self.dim, start, part.width)
            own = _part_faults(part, region, self.dim)
            found += own
            if own or not of_child[id(part.child)]:
                continue
            used = _with_dim(region, self.dim, part.origin, part.width)
            delta = tuple(start - part.origin if d == self.dim else 0 for d in range(full.ndim))
            moved = (fault.moved(used, delta) for fault in of_child[id(part.child)])
            found += [fault for fault in moved if fault is not None]
        return found

    def used_slots(self) -> Sequence[int]:
        return _union_slots(child for child in _distinct(part for part in self.parts if part.width))

    def to_json(self) -> dict[str, Any]:
        children, index = _table(part.child for part in self.parts)
        parts = [[part.width, index[id(part.child)], part.origin] for part in self.parts]
        return {
            "node": "concat",
            "shape": list(self.shape),
            "dim": self.dim,
            "children": [child.to_json() for child in children],
            "parts": parts,
        }


@dataclass(frozen=True, slots=True)
class Block:
    """A box of the logical tensor: ``child[origin : origin + region.sizes]``."""

    region: Region
    child: Geometry
    origin: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Blocks(Geometry):
    """Explicit disjoint boxes: affine maps, shards along several dims at once.

    Attributes
    ----------
    shape : tuple of int
    blocks : tuple of Block
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    _dim: int = field(init=False, repr=False, compare=False)
    _order: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _longest: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ndim = len(self.shape)
        for block in self.blocks:
            if not block.region.ndim == len(block.origin) == len(block.child.shape) == ndim:
                raise LayoutError(
                    f"block {block.region} of a tensor of shape {list(self.shape)} has origin "
                    f"{list(block.origin)} in a part of shape {list(block.child.shape)}: "
                    "the numbers of dims differ."
                )
        offsets = [block.region.offsets for block in self.blocks]
        # The dim with most distinct starts tells blocks apart best; within reach of a bisection
        # along it lie only the blocks of about one row of a grid.
        dim = max(range(ndim), key=lambda d: len({o[d] for o in offsets}), default=-1)
        order = sorted(range(len(offsets)), key=lambda i: offsets[i][dim] if ndim else 0)
        starts = tuple(offsets[i][dim] for i in order) if ndim else (0,) * len(order)
        sizes = [block.region.sizes[dim] if ndim else 1 for block in self.blocks]
        object.__setattr__(self, "_dim", dim)
        object.__setattr__(self, "_order", tuple(order))
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_longest", max(sizes, default=0))

    @property
    def copies(self) -> int:
        return max((child.copies for child in _distinct(self.blocks)), default=1)

    @property
    def rule(self) -> Rule:
        return _common_rule(_distinct(self.blocks))

    def _inside(self, region: Region) -> Iterator[tuple[Block, Region, tuple[int, ...]]]:
        """The blocks that a region meets: (block, region in the child's coordinates, way back)."""
        low, size = (region.offsets[self._dim], region.sizes[self._dim]) if self.shape else (0, 1)
        first = bisect_right(self._starts, low - self._longest)
        last = bisect_left(self._starts, low + size)
        for index in self._order[first:last]:
            block = self.blocks[index]
            common = block.region.intersect(region)
            if common is not None:
                back = tuple(map(sub, block.region.offsets, block.origin))
                yield block, common.shift(tuple(-b for b in back)), back

    def _pieces(self, region: Region, copy: int) -> Iterator[Piece]:
        for block, inner, back in self._inside(region):
            for piece in block.child._pieces(inner, copy):
                yield Piece(piece.region.shift(back), piece.slot, piece.offset, piece.strides)

    def _count(self, region: Region) -> int:
        return sum(block.child._count(inner) for block, inner, _ in self._inside(region))

    def cuts(self) -> tuple[tuple[int, ...], ...]:
        found = [set[int]() for _ in self.shape]
        of_child = {id(child): child.cuts() for child in _distinct(self.blocks)}
        for block in self.blocks:
            inner = of_child[id(block.child)]
            for dim, (start, stop) in enumerate(
                zip(block.region.offsets, block.region.stops, strict=True)
            ):
                back = start - block.origin[dim]
                found[dim].update((start, stop))
                found[dim].update(p + back for p in inner[dim] if start < p + back < stop)
        return tuple(
            tuple(sorted(point for point in points if 0 < point < length))
            for points, length in zip(found, self.shape, strict=True)
        )

    def faults(self) -> list[Fault]:
        full = Region.full(self.shape)
        regions = [block.region for block in self.blocks]
        found: list[Fault] = []
        for block in self.blocks:
            if not full.contains(block.region):
                message = f"the block is outside the tensor of shape {list(self.shape)}"
                found.append(Fault("bounds", block.region, _one_slot(block.child), message))
        for first, second, common in overlaps(regions):
            message = f"blocks {regions[first]} and {regions[second]} both hold it"
            found.append(Fault("overlap", common, _one_slot(self.blocks[second].child), message))
        found += [Fault("gap", gap, None, "no block covers it") for gap in uncovered(full, regions)]
        of_child = {id(child): child.faults() for child in _distinct(self.blocks)}
        for block in self.blocks:
            used = Region(block.origin, block.region.sizes)
            back = tuple(map(sub, block.region.offsets, block.origin))
            if not Region.full(block.child.shape).contains(used):
                message = f"it needs {used} of a part of shape {list(block.child.shape)}"
                found.append(Fault("bounds", block.region, _one_slot(block.child), message))
                continue
            moved = (fault.moved(used, back) for fault in of_child[id(block.child)])
            found += [fault for fault in moved if fault is not None]
        return found

    def used_slots(self) -> Sequence[int]:
        return _union_slots(_distinct(block for block in self.blocks if block.region.volume))

    def to_json(self) -> dict[str, Any]:
        children, index = _table(block.child for block in self.blocks)
        blocks = [
            [list(b.region.offsets), list(b.region.sizes), index[id(b.child)], list(b.origin)]
            for b in self.blocks
        ]
        return {
            "node": "blocks",
            "shape": list(self.shape),
            "children": [child.to_json() for child in children],
            "blocks": blocks,
        }


@dataclass(frozen=True, slots=True)
class Stack(Geometry):
    """Equal tensors under a new leading axis: index ``i`` is ``children[i]``."""

    children: tuple[Geometry, ...]
    shape: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.children:
            raise LayoutError("cannot stack no tensors: their shape is unknown.")
        object.__setattr__(self, "shape", (len(self.children), *self.children[0].shape))

    @property
    def copies(self) -> int:
        return max(child.copies for child in self.children)

    @property
    def rule(self) -> Rule:
        return _common_rule(self.children)

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
        return tuple(range(1, len(self.children))), *_union_cuts(self.children)

    def faults(self) -> list[Fault]:
        full = Region.full(self.shape[1:])
        found: list[Fault] = []
        for index, child in enumerate(self.children):
            if child.shape != self.shape[1:]:
                box = Region((index, *full.offsets), (1, *full.sizes))
                message = (
                    f"item {index} has shape {list(child.shape)}, item 0 {list(self.shape[1:])}"
                )
                found.append(Fault("shape", box, _one_slot(child), message))
                continue
            for fault in child.faults():
                box = Region((index, *fault.region.offsets), (1, *fault.region.sizes))
                found.append(Fault(fault.kind, box, fault.slot, fault.message))
        return found

    def used_slots(self) -> Sequence[int]:
        return _union_slots(self.children)

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
        ``params_to_average``).
    """

    children: tuple[Geometry, ...]
    rule: Rule = "equal"
    shape: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.children:
            raise LayoutError("cannot combine no copies: their shape is unknown.")
        if self.rule not in ("equal", "first", "average"):
            raise LayoutError(
                f"copies cannot be combined by {self.rule!r}: the rules are equal, first, average."
            )
        object.__setattr__(self, "shape", self.children[0].shape)

    @property
    def copies(self) -> int:
        return sum(child.copies for child in self.children)

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
        return _union_cuts(self.children)

    def faults(self) -> list[Fault]:
        full = Region.full(self.shape)
        found: list[Fault] = []
        for index, child in enumerate(self.children):
            if child.shape != self.shape:
                message = f"copy {index} has shape {list(child.shape)}, copy 0 {list(self.shape)}"
                found.append(Fault("shape", full, _one_slot(child), message))
            else:
                found += child.faults()
        return found

    def used_slots(self) -> Sequence[int]:
        return _union_slots(self.children)

    def to_json(self) -> dict[str, Any]:
        children = [child.to_json() for child in self.children]
        return {"node": "copies", "children": children, "rule": self.rule}


def _with_dim(region: Region, dim: int, offset: int, size: int) -> Region:
    """The region with one dim replaced."""
    offsets, sizes = region.offsets, region.sizes
    return Region(
        (*offsets[:dim], offset, *offsets[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :])
    )


def _distinct(holders: Iterable[Part | Block]) -> Iterable[Geometry]:
    """The children of parts or blocks, each object once (interleaved parts share few children)."""
    return {id(holder.child): holder.child for holder in holders}.values()


def _table(children: Iterable[Geometry]) -> tuple[list[Geometry], dict[int, int]]:
    """Distinct children in order, and the position of each object (by id) in that list."""
    distinct = list({id(child): child for child in children}.values())
    return distinct, {id(child): index for index, child in enumerate(distinct)}


def _common_rule(children: Iterable[Geometry]) -> Rule:
    rules = {child.rule for child in children if child.copies > 1}
    if len(rules) > 1:
        raise LayoutError(
            f"copies inside one tensor are combined by the rules {', '.join(sorted(rules))}: "
            "one rule is expected."
        )
    return rules.pop() if rules else "equal"


def _union_slots(children: Iterable[Geometry]) -> Sequence[int]:
    # Thousands of children often use the same range of ranks: unite equal ranges first.
    distinct = {tuple(s) if isinstance(s, list) else s for s in (c.used_slots() for c in children)}
    if len(distinct) == 1:
        return distinct.pop()
    return tuple(sorted({slot for slots in distinct for slot in slots}))


def _union_cuts(children: Iterable[Geometry]) -> tuple[tuple[int, ...], ...]:
    # As with slots: equal cuts are the rule.
    distinct = {child.cuts() for child in children}
    return tuple(tuple(sorted(set().union(*dims))) for dims in zip(*distinct, strict=True))


def _one_slot(child: Geometry) -> int | None:
    """The slot of a child that lies in one."""
    slots = child.used_slots()
    return slots[0] if len(slots) == 1 else None


def _part_faults(part: Part, region: Region, dim: int) -> list[Fault]:
    """Whether the child has what a part of a `Concat` takes from it."""
    shape = part.child.shape
    slot = _one_slot(part.child)
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
    gap = _with_dim(region, dim, region.offsets[dim] + has, part.width - has)
    message = (
        f"the part has {shape[dim]} indices along dim {dim}, expected {part.origin + part.width}"
    )
    return [Fault("gap", gap, slot, message)]
