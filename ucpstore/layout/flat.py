"""Tensors whose flattened elements are cut into ranges: ZeRO and FSDP."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

from ucpstore.layout.faults import Fault
from ucpstore.layout.node import Geometry, Piece, contiguous_runs, strides_of
from ucpstore.layout.region import Region

__all__ = ["FlatEven", "FlatRanges", "flat_boxes"]

# (first flat index past the segment, slot or -1 for a hole, element offset in the slot)
_Segment = tuple[int, int, int]


def _split(
    region: Region, strides: tuple[int, ...], locate: Callable[[int], _Segment]
) -> Iterator[Piece]:
    """Cut a box of a flattened tensor at the ends of flat segments.

    Walks along the first dim longer than 1: as many rows as fit into the segment make one piece; a
    row that does not fit is cut in the same way. So a segment makes at most ``2 * ndim - 1``
    pieces, segments that the box misses cost nothing, and a box inside one segment is one piece.
    """
    first = sum(map(mul, region.offsets, strides))
    sizes = region.sizes
    span = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    end, slot, offset = locate(first)
    dim = next((d for d, size in enumerate(sizes) if size > 1), None)
    if first + span < end or dim is None:
        if slot >= 0:
            yield Piece(region, slot, offset, strides)
        return
    stride, rows = strides[dim], sizes[dim]
    span -= (rows - 1) * stride
    head, start, tail = region.offsets[:dim], region.offsets[dim], region.offsets[dim + 1 :]
    ones, rest = sizes[:dim], sizes[dim + 1 :]
    row = 0
    while row < rows:
        flat = first + row * stride
        end, slot, offset = locate(flat)
        fit = min((end - 1 - span - flat) // stride + 1, rows - row)
        block = Region((*head, start + row, *tail), (*ones, max(fit, 1), *rest))
        if fit < 1:
            yield from _split(block, strides, locate)
        elif slot >= 0:
            yield Piece(block, slot, offset, strides)
        row += max(fit, 1)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Region]:
    """Elements ``start <= k < stop`` of a flattened tensor as boxes: at most ``2 * ndim - 1``."""
    numel = math.prod(shape)

    def locate(flat: int) -> _Segment:
        if flat < start:
            return start, -1, 0
        return (stop, 0, flat) if flat < stop else (numel, -1, 0)

    if max(start, 0) >= min(stop, numel):
        return []
    pieces = _split(Region.full(shape), strides_of(shape), locate)
    return [piece.region for piece in pieces]


def _span(region: Region, strides: tuple[int, ...]) -> tuple[int, int]:
    """Flat index of the first and the last element of a non-empty region."""
    first = sum(map(mul, region.offsets, strides))
    return first, first + sum(
        (size - 1) * stride for size, stride in zip(region.sizes, strides, strict=True)
    )


@dataclass(frozen=True, slots=True)
class FlatEven(Geometry):
    """A flattened tensor inside a flat space that is cut evenly over ranks; constant size.

    Element ``k`` lies at position ``g = start + k``: in slot ``first_slot + g // width``, at
    ``base + g % width``.

    Attributes
    ----------
    shape : tuple of int
    start : int, elements
        ZeRO-1/2: where the parameter starts in its group's flat buffer. ZeRO-3: 0.
    width : int, elements
        ZeRO-1/2: the partition size. ZeRO-3: ``ceil(numel / slots)``.
    base : int, elements
        ZeRO-3: where the parameter starts in each rank's flat sub-group.
    first_slot : int
    slots : int
        Number of ranks; positions past ``slots * width`` are held by none.
    """

    shape: tuple[int, ...]
    start: int
    width: int
    base: int = 0
    first_slot: int = 0
    slots: int = 1

    def _locate(self, flat: int) -> _Segment:
        index, within = divmod(self.start + flat, self.width)
        if index >= self.slots:
            return math.prod(self.shape), -1, 0
        return flat + self.width - within, self.first_slot + index, self.base + within

    def _pieces(self, region: Region, copy: int) -> Iterator[Piece]:
        if copy or self.width <= 0:
            return iter(())
        return _split(region, strides_of(self.shape), self._locate)

    def _count(self, region: Region) -> int:
        if self.width <= 0:
            return 0
        strides = strides_of(self.shape)
        first, last = _span(region, strides)
        cuts = (self.start + last) // self.width - (self.start + first) // self.width
        return contiguous_runs(region.sizes, strides) + cuts

    def faults(self) -> list[Fault]:
        numel = math.prod(self.shape)
        full = Region.full(self.shape)
        if min(self.start, self.width, self.base, self.first_slot, self.slots, *self.shape, 0) < 0:
            return [Fault("bounds", full, None, f"an address of {self} is below zero")]
        held = min(max(self.slots * self.width - self.start, 0), numel)
        message = (
            f"flat elements {held} to {numel - 1} lie past the last of {self.slots} ranks "
            f"with {self.width} elements each"
        )
        return [Fault("gap", box, None, message) for box in flat_boxes(self.shape, held, numel)]

    def used_slots(self) -> Sequence[int]:
        numel = math.prod(self.shape)
        if self.width <= 0 or numel == 0:
            return ()
        last = min((self.start + numel - 1) // self.width, self.slots - 1)
        return range(self.first_slot + self.start // self.width, self.first_slot + last + 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "node": "flat_even",
            "shape": list(self.shape),
            "start": self.start,
            "width": self.width,
            "base": self.base,
            "first_slot": self.first_slot,
            "slots": self.slots,
        }


@dataclass(frozen=True, slots=True)
class FlatRanges(Geometry):
    """A flattened tensor cut at explicit places.

    Attributes
    ----------
    shape : tuple of int
    bounds : tuple of int, elements
        ``n + 1`` values from 0 to the number of elements; between equal neighbours lies nothing.
    slots : tuple of int
        Slot of each of the ``n`` segments.
    offsets : tuple of int, elements
        Position of each segment's first element in its slot's buffer.
    """

    shape: tuple[int, ...]
    bounds: tuple[int, ...]
    slots: tuple[int, ...]
    offsets: tuple[int, ...]

    def _locate(self, flat: int) -> _Segment:
        index = bisect_right(self.bounds, flat) - 1
        if index < 0:
            return self.bounds[0], -1, 0
        if index >= len(self.slots):
            return math.prod(self.shape), -1, 0
        return (
            self.bounds[index + 1],
            self.slots[index],
            self.offsets[index] + flat - self.bounds[index],
        )

    def _pieces(self, region: Region, copy: int) -> Iterator[Piece]:
        if copy or not self.slots:
            return iter(())
        return _split(region, strides_of(self.shape), self._locate)

    def _count(self, region: Region) -> int:
        strides = strides_of(self.shape)
        first, last = _span(region, strides)
        cuts = bisect_right(self.bounds, last) - bisect_right(self.bounds, first)
        return contiguous_runs(region.sizes, strides) + cuts

    def faults(self) -> list[Fault]:
        numel = math.prod(self.shape)
        full = Region.full(self.shape)
        if not len(self.bounds) - 1 == len(self.slots) == len(self.offsets):
            message = (
                f"{len(self.bounds)} bounds, {len(self.slots)} slots and {len(self.offsets)} "
                "offsets do not belong together"
            )
            return [Fault("shape", full, None, message)]
        if min((0, *self.slots, *self.offsets)) < 0:
            return [Fault("bounds", full, None, "a slot or an offset is below zero")]
        found: list[Fault] = []
        for index, slot in enumerate(self.slots):
            low, high = self.bounds[index], self.bounds[index + 1]
            if high < low:
                message = f"flat segment {index} ends at {high} before its start {low}"
                found.append(Fault("bounds", full, slot, message))
        if self.bounds[-1] > numel or self.bounds[0] < 0:
            message = (
                f"flat bounds run from {self.bounds[0]} to {self.bounds[-1]}, "
                f"the tensor has {numel} elements"
            )
            found.append(Fault("bounds", full, self.slots[-1] if self.slots else None, message))
        if found:
            return found
        for low, high in ((0, self.bounds[0]), (self.bounds[-1], numel)):
            message = f"no rank holds the flat elements {low} to {high - 1}"
            found += [Fault("gap", box, None, message) for box in flat_boxes(self.shape, low, high)]
        return found

    def used_slots(self) -> Sequence[int]:
        held = zip(self.slots, self.bounds, self.bounds[1:], strict=False)
        return tuple(sorted({slot for slot, low, high in held if high > low}))

    def to_json(self) -> dict[str, Any]:
        return {
            "node": "flat_ranges",
            "shape": list(self.shape),
            "bounds": list(self.bounds),
            "slots": list(self.slots),
            "offsets": list(self.offsets),
        }
