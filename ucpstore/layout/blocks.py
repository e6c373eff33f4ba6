"""Explicit boxes of other geometries."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import Any

from ucpstore.errors import LayoutError
from ucpstore.layout.faults import Fault, overlaps, uncovered
from ucpstore.layout.joined import Joined, distinct, one_slot, table, union_slots
from ucpstore.layout.node import Geometry, Piece
from ucpstore.layout.region import Region

__all__ = ["Block", "Blocks"]


@dataclass(frozen=True, slots=True)
class Block:
    """A box of the logical tensor: ``child[origin : origin + region.sizes]``."""

    region: Region
    child: Geometry
    origin: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Blocks(Joined):
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
        self._combine(distinct(self.blocks))

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
        of_child = {id(child): child.cuts() for child in distinct(self.blocks)}
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
                found.append(Fault("bounds", block.region, one_slot(block.child), message))
        gaps = uncovered(full, regions)
        # Boxes without a gap whose volumes add up cannot overlap: the common case, checked cheaply.
        if gaps or found or sum(region.volume for region in regions) != full.volume:
            for first, second, common in overlaps(regions):
                message = f"blocks {regions[first]} and {regions[second]} both hold it"
                slot = one_slot(self.blocks[second].child)
                found.append(Fault("overlap", common, slot, message))
        found += [Fault("gap", gap, None, "no block covers it") for gap in gaps]
        of_child = {id(child): child.faults() for child in distinct(self.blocks)}
        for block in self.blocks:
            used = Region(block.origin, block.region.sizes)
            back = tuple(map(sub, block.region.offsets, block.origin))
            if not Region.full(block.child.shape).contains(used):
                message = f"it needs {used} of a part of shape {list(block.child.shape)}"
                found.append(Fault("bounds", block.region, one_slot(block.child), message))
                continue
            moved = (fault.moved(used, back) for fault in of_child[id(block.child)])
            found += [fault for fault in moved if fault is not None]
        return found

    def used_slots(self) -> Sequence[int]:
        return union_slots(distinct(block for block in self.blocks if block.region.volume))

    def to_json(self) -> dict[str, Any]:
        children, index = table(block.child for block in self.blocks)
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
