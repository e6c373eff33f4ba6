"""What every geometry has in common, and the simplest one: a stored tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import Any, Literal

from ucpstore.errors import LayoutError
from ucpstore.layout.faults import Fault
from ucpstore.layout.region import Region, row_major_strides

__all__ = ["Geometry", "Piece", "Rule", "Strided", "contiguous_runs"]

Rule = Literal["equal", "first", "average"]
"""How copies combine: they must be bit-equal; the first counts; their mean counts."""

# Equal shapes are common (layers, experts), and the strides of one are needed on every query.
strides_of = lru_cache(maxsize=4096)(row_major_strides)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the logical tensor and where its elements are stored.

    Attributes
    ----------
    region : Region
        In the coordinates of the geometry that was queried.
    slot : int
        Which buffer.
    offset : int, elements
        Position in that buffer of the region's first element.
    strides : tuple of int, elements, >= 0
        Steps in the buffer along each dim of the region.
    """

    region: Region
    slot: int
    offset: int
    strides: tuple[int, ...]


class Geometry(ABC):
    """Where the elements of a logical tensor are stored: a compact description that yields pieces.

    Geometries are immutable, hashable and picklable; ``eval(repr(g)) == g`` and
    ``geometry_from_json(g.to_json()) == g``.

    Attributes
    ----------
    shape : tuple of int
        Shape of the logical tensor.
    """

    __slots__ = ()

    shape: tuple[int, ...]

    @property
    def copies(self) -> int:
        """Largest number of copies that any element has."""
        return 1

    @property
    def rule(self) -> Rule:
        """How copies combine; ``"equal"`` where there is one copy."""
        return "equal"

    def query(self, region: Region, copy: int = 0) -> Iterator[Piece]:
        """Disjoint pieces that tile ``region``; the work grows with their number, not the ranks.

        Parameters
        ----------
        region : Region
            In the coordinates of this geometry, inside its shape.
        copy : int
            0 asks for the first copy of every element. ``k > 0`` asks for the k-th further replica:
            what has fewer copies yields nothing.

        Raises
        ------
        LayoutError
            The region is not inside the shape.
        """
        if len(region.sizes) != len(self.shape) or not all(
            offset >= 0 and 0 <= size <= length - offset
            for offset, size, length in zip(region.offsets, region.sizes, self.shape, strict=True)
        ):
            raise LayoutError(
                f"region {region} is not inside the tensor: its shape is {list(self.shape)}."
            )
        return iter(()) if 0 in region.sizes else self._pieces(region, copy)

    @abstractmethod
    def _pieces(self, region: Region, copy: int) -> Iterator[Piece]:
        """`query` of a non-empty region that is known to be inside the shape."""

    @abstractmethod
    def _count(self, region: Region) -> int:
        """`count` of a non-empty region."""

    @abstractmethod
    def faults(self) -> list[Fault]:
        """Why this geometry does not cover its shape exactly once (empty where it does)."""

    @abstractmethod
    def used_slots(self) -> Sequence[int]:
        """The slots that hold elements, sorted: a range or a tuple."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """JSON object that `ucpstore.layout.geometry.geometry_from_json` reads."""

    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """Per dim, sorted interior cut points of TP, EP and stack slices; flat cuts make none."""
        return ((),) * len(self.shape)

    def count(self, region: Region | None = None) -> int:
        """Upper bound of the contiguous stored ranges of one copy of ``region``; default: of all.

        It is computed, never enumerated.
        """
        region = Region.full(self.shape) if region is None else region
        return self._count(region) if region.volume else 0


@dataclass(frozen=True, slots=True)
class Strided(Geometry):
    """One stored tensor.

    Attributes
    ----------
    shape : tuple of int
    slot : int
    offset : int, elements
        Position of the first element in the slot's buffer.
    strides : tuple of int, elements, optional
        Default: C-contiguous.
    """

    shape: tuple[int, ...]
    slot: int
    offset: int = 0
    strides: tuple[int, ...] | None = None

    def _pieces(self, region: Region, copy: int) -> Iterator[Piece]:
        if copy == 0:
            strides = strides_of(self.shape) if self.strides is None else self.strides
            offset = self.offset + sum(map(mul, region.offsets, strides))
            yield Piece(region, self.slot, offset, strides)

    def _count(self, region: Region) -> int:
        return contiguous_runs(region.sizes, self.strides or strides_of(self.shape))

    def faults(self) -> list[Fault]:
        full = Region.full(self.shape)
        strides = () if self.strides is None else self.strides
        if self.strides is not None and len(strides) != len(self.shape):
            message = f"{len(strides)} strides for {len(self.shape)} dims"
            return [Fault("shape", full, self.slot, message)]
        if min((self.offset, self.slot, *strides, *self.shape)) < 0:
            message = f"slot {self.slot}, offset {self.offset} or a stride or size is below zero"
            return [Fault("bounds", full, self.slot, message)]
        return []

    def used_slots(self) -> Sequence[int]:
        return range(self.slot, self.slot + 1) if math.prod(self.shape) else ()

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"node": "strided", "shape": list(self.shape), "slot": self.slot}
        document["offset"] = self.offset
        if self.strides is not None:
            document["strides"] = list(self.strides)
        return document


def contiguous_runs(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Number of contiguous runs that a strided box falls into (dims in stored order)."""
    expected = 1
    for dim in range(len(sizes) - 1, -1, -1):
        if sizes[dim] == 1:
            continue
        if strides[dim] != expected:
            return math.prod(sizes[: dim + 1])
        expected *= sizes[dim]
    return 1 if math.prod(sizes) else 0
