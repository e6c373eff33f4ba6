"""Half-open boxes in the coordinates of a logical tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import EllipsisType

__all__ = ["Region", "row_major_strides"]


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous tensor of ``shape``."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Region:
    """Half-open box: ``offsets[d] <= index[d] < offsets[d] + sizes[d]``, in elements.

    A 0-d region (no dims) holds exactly one element.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Region:
        """The region that covers a whole tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        """First index past the region along every dim."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice | EllipsisType, ...]:
        """The region as an index into an array of the logical shape.

        It ends with ``...``, so that numpy gives a view of a 0-d array, too, and not a copy of its element.
        """
        return (*(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True)), ...)

    def intersect(self, other: Region) -> Region | None:
        """The common box, or ``None`` where there is none (empty boxes have none)."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a, b) - o for a, b, o in zip(self.stops, other.stops, offsets, strict=True)
        )
        return Region(offsets, sizes) if all(s > 0 for s in sizes) else None

    def contains(self, other: Region) -> bool:
        """Whether every element of ``other`` is in this region."""
        return other.volume == 0 or self.intersect(other) == other

    def shift(self, delta: tuple[int, ...]) -> Region:
        """The region moved by ``delta``."""
        return Region(tuple(o + d for o, d in zip(self.offsets, delta, strict=True)), self.sizes)

    def within(self, outer: Region) -> Region:
        """The region in coordinates whose origin is the first element of ``outer``."""
        return self.shift(tuple(-o for o in outer.offsets))

    def __str__(self) -> str:
        return (
            "["
            + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True))
            + "]"
        )
