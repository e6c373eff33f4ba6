"""Where every parameter lies in the flat buffers of the optimizer files.

A *unit* is one flat buffer cut over the data-parallel ranks: a parameter group at stages 1 and 2, a
sub-group at stage 3. The order of parameters in it is that of ``param_shapes`` in the model file,
which DeepSpeed takes from the live flat buffer, round-robin order included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeAlias

from ucpstore.errors import CorruptSourceError
from ucpstore.formats.deepspeed.checks import integers, named, sequence_of
from ucpstore.layout.geometry import FlatEven, Geometry, Strided

__all__ = ["GroupUnit", "Shapes", "SubGroupUnit", "Unit", "WholeUnit", "read_shapes"]

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_ALIGNMENT = 2
"""``nccl_start_alignment_factor``: a group's length is a multiple of this times its ranks."""


class Unit(Protocol):
    """What is common to the units of all stages; lengths and offsets are in elements."""

    @property
    def shapes(self) -> Shapes:
        """Local shapes of the parameters, in flat order."""

    @property
    def ranks(self) -> int:
        """How many ranks the unit is cut over."""

    def lengths(self, rank: int) -> tuple[int, ...]:
        """Lengths that a flat tensor of ``rank`` may have: with and without padding."""

    def holds(self, rank: int) -> bool:
        """Whether the rank holds anything but padding."""

    def geometries(self, first_slot: int) -> Iterator[tuple[str, Geometry]]:
        """Name and geometry of every parameter; rank ``r`` is slot ``first_slot + r``."""


@dataclass(frozen=True, slots=True)
class GroupUnit:
    """A parameter group of ZeRO 1, ZeRO 2 or BF16_Optimizer: flattened as a whole, then cut evenly.

    Attributes
    ----------
    shapes : mapping of str to tuple of int
    offsets : tuple of int, elements
        Where every parameter starts in the flat buffer.
    numel : int, elements
        Length of the flat buffer without the padding at its end.
    ranks : int
    width : int, elements
        Length of one rank's partition.
    """

    shapes: Shapes
    offsets: tuple[int, ...]
    numel: int
    ranks: int
    width: int

    @classmethod
    def of(cls, shapes: Shapes, ranks: int, pads: Sequence[int] | None) -> GroupUnit:
        """Lay parameters out as ``DeepSpeedZeroOptimizer.__init__`` does.

        Parameters
        ----------
        shapes : mapping of str to tuple of int
            In flat order.
        ranks : int
        pads : sequence of int, elements, optional
            Unused elements after every parameter (``param_alignment_paddings``).
        """
        numels = [math.prod(shape) for shape in shapes.values()]
        steps = numels if pads is None else [n + pad for n, pad in zip(numels, pads, strict=True)]
        offsets = tuple(accumulate(steps, initial=0))
        align = _ALIGNMENT * ranks
        padded = -(-offsets[-1] // align) * align
        return cls(shapes, offsets[:-1], offsets[-1], ranks, padded // ranks)

    def used(self, rank: int) -> int:
        """Elements of the rank's partition that are not padding at the group's end."""
        return min(max(self.numel - rank * self.width, 0), self.width)

    def lengths(self, rank: int) -> tuple[int, ...]:
        return (self.width, self.used(rank))

    def holds(self, rank: int) -> bool:
        return self.used(rank) > 0

    def geometries(self, first_slot: int) -> Iterator[tuple[str, Geometry]]:
        width = max(self.width, 1)
        for (name, shape), start in zip(self.shapes.items(), self.offsets, strict=True):
            yield name, FlatEven(shape, start, width, 0, first_slot, self.ranks)

    def slices(self) -> list[dict[str, tuple[int, int]]]:
        """Per rank, name -> (start in the partition, number of elements): ``param_slice_mappings``."""
        found: list[dict[str, tuple[int, int]]] = [{} for _ in range(self.ranks)]
        for (name, shape), start in zip(self.shapes.items(), self.offsets, strict=True):
            stop = start + math.prod(shape)
            if stop == start:
                continue
            for rank in range(start // self.width, -(-stop // self.width)):
                first = max(start, rank * self.width)
                last = min(stop, (rank + 1) * self.width)
                found[rank][name] = (first - rank * self.width, last - first)
        return found


@dataclass(frozen=True, slots=True)
class SubGroupUnit:
    """A sub-group of ZeRO 3: every parameter is cut evenly by itself, then a rank's parts are joined.

    Attributes
    ----------
    shapes : mapping of str to tuple of int
    widths : tuple of int, elements
        What one rank holds of every parameter, padding included: ``ceil(numel / ranks)``.
    ranks : int
    length : int, elements
        Of the whole on every rank.
    """

    shapes: Shapes
    widths: tuple[int, ...]
    ranks: int
    length: int

    @classmethod
    def of(cls, shapes: Shapes, ranks: int) -> SubGroupUnit:
        """Lay parameters out as ``partition_parameters.py`` and ``stage3.py`` do."""
        widths = tuple(-(-math.prod(shape) // ranks) for shape in shapes.values())
        return cls(shapes, widths, ranks, sum(widths))

    def lengths(self, rank: int) -> tuple[int, ...]:
        return (self.length,)

    def holds(self, rank: int) -> bool:
        return bool(self.widths)

    def geometries(self, first_slot: int) -> Iterator[tuple[str, Geometry]]:
        base = 0
        for (name, shape), width in zip(self.shapes.items(), self.widths, strict=True):
            yield name, FlatEven(shape, 0, max(width, 1), base, first_slot, self.ranks)
            base += width


@dataclass(frozen=True, slots=True)
class WholeUnit:
    """One parameter without ZeRO: every rank has it whole, in its own shape, and one rank saved it.

    Attributes
    ----------
    shapes : mapping of str to tuple of int
        Of the one parameter; none where it is another pipeline stage's.
    strides : tuple of int, elements, or None
        Where it is not row-major.
    """

    shapes: Shapes
    strides: tuple[int, ...] | None = None

    @property
    def ranks(self) -> int:
        return 1

    def lengths(self, rank: int) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes.values())

    def holds(self, rank: int) -> bool:
        return bool(self.shapes)

    def geometries(self, first_slot: int) -> Iterator[tuple[str, Geometry]]:
        for name, shape in self.shapes.items():
            yield name, Strided(shape, first_slot, 0, self.strides)


def read_shapes(value: object, what: str) -> list[Shapes]:
    """``param_shapes`` of a model file: per group or sub-group, name -> shape in flat order.

    Raises
    ------
    CorruptSourceError
        It has another structure, or a name occurs twice.
    """
    if isinstance(value, Mapping):  # one group, written as its dict (DeepSpeed before 0.4)
        value = [value]
    found: list[Shapes] = []
    seen: set[str] = set()
    for group in sequence_of(value, what):
        shapes = {name: integers(shape, what) for name, shape in named(group, what).items()}
        twice = seen.intersection(shapes)
        if twice:
            raise CorruptSourceError(f"{what}: {min(twice)!r} is in two groups.")
        seen.update(shapes)
        found.append(shapes)
    return found
