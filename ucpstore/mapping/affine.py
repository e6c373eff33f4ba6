"""Affine parts: which elements of a source tensor make which elements of a target tensor.

Splitting, fusing (interleaved or not), stacking, transposing and permuting rotary halves are all the same
thing: reshape into logical axes, permute, slice. A `Part` states it with two addresses per axis, one on
either side, so that it can be cut to any box of either tensor without being enumerated.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ucpstore.errors import Kind, LayoutError
from ucpstore.layout.region import Region

__all__ = ["Axis", "Part", "View"]


@dataclass(frozen=True, slots=True)
class Axis:
    """A logical axis: a step along it is a step along one dim of either tensor.

    Attributes
    ----------
    size : int
    source, target : int
        Dims.
    source_step, target_step : int, indices of that dim
    """

    size: int
    source: int
    source_step: int
    target: int
    target_step: int

    def swapped(self) -> Axis:
        return Axis(self.size, self.target, self.target_step, self.source, self.source_step)


_Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of one source tensor and their places in a target tensor.

    Along a dim the axes are digits of a mixed radix: sorted by step, an axis steps over everything that
    the smaller ones reach.

    Attributes
    ----------
    source : str
        Fully qualified name.
    axes : tuple of Axis
    source_offsets, target_offsets : tuple of int
        Index of the first element on either side.
    """

    source: str
    axes: tuple[Axis, ...]
    source_offsets: tuple[int, ...]
    target_offsets: tuple[int, ...]

    @classmethod
    def whole(cls, source: str, shape: tuple[int, ...]) -> Part:
        """A tensor of ``shape`` as it is."""
        axes = tuple(Axis(size, dim, 1, dim, 1) for dim, size in enumerate(shape))
        return cls(source, axes, (0,) * len(shape), (0,) * len(shape))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def source_region(self) -> Region:
        """Smallest box of the source tensor that holds the part."""
        sizes = [1] * len(self.source_offsets)
        for axis in self.axes:
            sizes[axis.source] += (axis.size - 1) * axis.source_step
        return Region(self.source_offsets, tuple(sizes))

    @property
    def target_region(self) -> Region:
        """Smallest box of the target tensor that holds the part."""
        return self.swapped().source_region

    def swapped(self) -> Part:
        """The same with source and target exchanged."""
        axes = tuple(axis.swapped() for axis in self.axes)
        return Part(self.source, axes, self.target_offsets, self.source_offsets)

    def within(self, region: Region) -> Iterator[Part]:
        """The part cut to a box of the target; at most ``2 k - 1`` parts per dim of ``k`` axes."""
        order: list[int] = []
        per_dim = []
        for dim, (offset, start, size) in enumerate(
            zip(self.target_offsets, region.offsets, region.sizes, strict=True)
        ):
            own = [i for i, axis in enumerate(self.axes) if axis.target == dim]
            own.sort(key=lambda i: (-self.axes[i].target_step, -self.axes[i].size))
            digits = [(self.axes[i].size, self.axes[i].target_step) for i in own]
            cuts = list(_digit_ranges(digits, start - offset, start - offset + size))
            if not cuts:
                return
            order += own
            per_dim.append(cuts)
        for choice in itertools.product(*per_dim):
            ranges: list[_Range] = [(0, 0)] * len(order)
            for index, cut in zip(order, itertools.chain.from_iterable(choice), strict=True):
                ranges[index] = cut
            yield self._cut(ranges)

    def halves(self) -> tuple[Part, Part]:
        """The part in two, cut where the source is cut most coarsely; it has more than one element."""
        index = min(
            (i for i, axis in enumerate(self.axes) if axis.size > 1),
            key=lambda i: (self.axes[i].source, -self.axes[i].source_step),
        )
        ranges = [(0, axis.size) for axis in self.axes]
        middle = self.axes[index].size // 2
        first, second = list(ranges), list(ranges)
        first[index], second[index] = (0, middle), (middle, self.axes[index].size)
        return self._cut(first), self._cut(second)

    def _cut(self, ranges: Sequence[_Range]) -> Part:
        source, target = list(self.source_offsets), list(self.target_offsets)
        axes = []
        for axis, (start, stop) in zip(self.axes, ranges, strict=True):
            source[axis.source] += start * axis.source_step
            target[axis.target] += start * axis.target_step
            if stop - start > 1:
                axes.append(axis if stop - start == axis.size else replace(axis, size=stop - start))
        return Part(self.source, tuple(axes), tuple(source), tuple(target))


def _digit_ranges(
    digits: Sequence[tuple[int, int]], start: int, stop: int
) -> Iterator[tuple[_Range, ...]]:
    """Boxes of the digits (size, step) whose numbers lie in ``[start, stop)``.

    Digits come with falling steps. Where the first digit takes the others along whole it is one box; at
    either end of the range one value of it may be cut.
    """
    if not digits:
        if start <= 0 < stop:
            yield ()
        return
    (size, step), rest = digits[0], digits[1:]
    if not size or any(n == 0 for n, _ in rest):
        return
    if not rest:
        first, last = max(0, -(-start // step)), min(size, -(-stop // step))
        if first < last:
            yield ((first, last),)
        return
    width = 1 + sum((n - 1) * s for n, s in rest)
    touched = range(max(0, (start - width) // step + 1), min(size, -(-stop // step)))
    whole = range(
        max(touched.start, -(-start // step)), min(touched.stop, (stop - width) // step + 1)
    )
    if not whole:
        whole = range(touched.stop, touched.stop)
    for value in range(touched.start, whole.start):
        for cut in _digit_ranges(rest, start - value * step, stop - value * step):
            yield ((value, value + 1), *cut)
    if whole:
        yield ((whole.start, whole.stop), *((0, n) for n, _ in rest))
    for value in range(whole.stop, touched.stop):
        for cut in _digit_ranges(rest, start - value * step, stop - value * step):
            yield ((value, value + 1), *cut)


@dataclass(frozen=True, slots=True)
class View:
    """A target tensor: its shape and the parts that make it.

    Raises
    ------
    LayoutError
        The parts do not have as many elements as the tensor.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _stops: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found, expected = sum(part.volume for part in self.parts), math.prod(self.shape)
        if found != expected:
            raise LayoutError(
                f"parts have {found} elements, a tensor of shape {list(self.shape)} has {expected}.",
                kind=Kind.GAP,
            )
        regions = [part.target_region for part in self.parts] if self.shape else []
        starts = tuple(region.offsets[0] for region in regions)
        stops = tuple(region.stops[0] for region in regions)
        # There may be thousands of parts, one after the other: those of a box are found by bisection.
        is_sorted = all(list(found) == sorted(found) for found in (starts, stops))
        object.__setattr__(self, "_starts", starts if is_sorted else ())
        object.__setattr__(self, "_stops", stops if is_sorted else ())

    def query(self, region: Region) -> Iterator[Part]:
        """The parts cut to a box of the tensor."""
        first, last = 0, len(self.parts)
        if self._starts:
            first = bisect.bisect_right(self._stops, region.offsets[0])
            last = bisect.bisect_left(self._starts, region.stops[0])
        for part in self.parts[first:last]:
            yield from part.within(region)
