"""The patterns themselves: see `ucpstore.layout.patterns`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import accumulate
from typing import Any, ClassVar, Literal

from ucpstore.errors import Kind, PatternError, listing
from ucpstore.layout.geometry import Concat, Copies, FlatRanges, Geometry, Part, Stack
from ucpstore.layout.region import Region

__all__ = [
    "Flat",
    "Hy",
    "Pad",
    "Partial",
    "Pattern",
    "Replicate",
    "Shard",
    "ShardNC",
    "Stacked",
    "Unique",
    "even_widths",
    "unfit",
]

_Shape = tuple[int, ...]


def even_widths(length: int, parts: int) -> tuple[int, ...]:
    """Widths of an equal split: the first ``length % parts`` ranks get one more.

    This is AutoTP's rule (DeepSpeed ``module_inject/tp_shard.py``), not that of ``torch.chunk``.
    """
    width, extra = divmod(length, parts)
    return tuple(width + (rank < extra) for rank in range(parts))


def unfit(message: str) -> PatternError:
    """The error of a pattern that does not fit a shape or an axis."""
    return PatternError(message, kind=Kind.SHAPE)


class Pattern(ABC):
    """How a tensor lies on the ranks of one mesh axis.

    ``pattern.join(shape, parts)`` is the inverse of ``pattern.split(shape, size)``.
    """

    __slots__ = ()

    name: ClassVar[str]

    @abstractmethod
    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        """Shape of what each of ``size`` ranks holds; ``None`` where a rank has no part at all.

        Raises
        ------
        PatternError
            The pattern does not fit the shape or the number of ranks.
        """

    @abstractmethod
    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        """Geometry of the whole tensor of ``shape``, of which each rank holds its part."""

    def __str__(self) -> str:
        return self.name

    def to_json(self) -> dict[str, Any]:
        """Normal form: the pattern's name and the fields that differ from their defaults."""
        document: dict[str, Any] = {"pattern": self.name}
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if item.default is MISSING or value != item.default:
                document[item.name] = _lists(value)
        return document


@dataclass(frozen=True, slots=True)
class Unique(Pattern):
    """One rank of the axis holds the tensor, the others nothing: layers of a pipeline stage."""

    rank: int = 0
    name: ClassVar[str] = "unique"

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        if not 0 <= self.rank < size:
            raise unfit(f"unique on rank {self.rank}: the axis has {size} ranks.")
        return tuple(shape if rank == self.rank else None for rank in range(size))

    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        return _present(parts)[0]


@dataclass(frozen=True, slots=True)
class Replicate(Pattern):
    """Every rank holds the whole tensor.

    Attributes
    ----------
    rule : {"equal", "first"}
        Copies that differ are an error, or the first one counts.
    """

    rule: Literal["equal", "first"] = "equal"
    name: ClassVar[str] = "replicate"

    def __post_init__(self) -> None:
        if self.rule not in ("equal", "first"):
            raise unfit(f"replicate with rule {self.rule!r}: the rules are 'equal' and 'first'.")

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        return (shape,) * size

    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        held = _present(parts)
        return held[0] if len(held) == 1 else Copies(tuple(held), self.rule)

    def __str__(self) -> str:
        return self.name if self.rule == "equal" else f"{self.name}({self.rule})"


@dataclass(frozen=True, slots=True)
class Partial(Pattern):
    """Every rank has its own version; their mean is the tensor (UCP's ``params_to_average``)."""

    name: ClassVar[str] = "partial"

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        return (shape,) * size

    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        held = _present(parts)
        return held[0] if len(held) == 1 else Copies(tuple(held), "average")


@dataclass(frozen=True, slots=True)
class Shard(Pattern):
    """Contiguous slices along a dim.

    Attributes
    ----------
    dim : int
    widths : tuple of int, optional
        Of each rank. Default: `even_widths`.
    unit : int
        Indices that stay together, such as the rows of one attention head: whole units are dealt out.
    """

    dim: int
    widths: tuple[int, ...] | None = None
    unit: int = 1
    name: ClassVar[str] = "shard"

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        length = _length(self, shape)
        widths = self.widths
        if widths is None:
            widths = _unit_widths(f"{self} of shape {list(shape)}", length, size, self.unit)
        _check_widths(f"{self} of shape {list(shape)}", widths, size, length)
        return tuple(_resized(shape, self.dim, width) for width in widths)

    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        held = _present(parts)
        if len(held) == 1:
            return held[0]
        slices = tuple(Part(part.shape[self.dim], part) for part in held)
        whole = _resized(held[0].shape, self.dim, sum(part.width for part in slices))
        return Concat(whole, self.dim, slices)

    def __str__(self) -> str:
        widths = "" if self.widths is None else f": {', '.join(map(str, self.widths))}"
        return f"shard({self.dim}{widths})"


@dataclass(frozen=True, slots=True)
class ShardNC(Pattern):
    """A slice of every section of a dim: what a rank holds is not consecutive in the tensor.

    Rank ``r`` holds ``[q_r | k_r | v_r]`` of the fused ``[q | k | v]``.

    Attributes
    ----------
    dim : int
    sections : tuple of int
        Sizes of the sections, in order.
    widths : tuple of tuple of int, optional
        For each section the width of each rank. Default: `even_widths`.
    ratio : tuple of int, optional
        Instead of ``sections``: how long they are relative to each other, such as ``(1, 1)`` for gate|up. Every
        rank's slices are in this ratio too.
    units : tuple of int, optional
        For each section, the indices that stay together (see `Shard.unit`).
    """

    dim: int
    sections: tuple[int, ...] = ()
    widths: tuple[tuple[int, ...], ...] | None = None
    ratio: tuple[int, ...] | None = None
    units: tuple[int, ...] | None = None
    name: ClassVar[str] = "shard_nc"

    def __post_init__(self) -> None:
        if self.ratio is not None and (self.sections or min(self.ratio, default=0) < 1):
            raise unfit(
                f"shard_nc with sections {listing(self.sections)} and ratio {listing(self.ratio)}: expected one of"
                " them, a ratio of whole numbers from 1."
            )

    def sizes(self, length: int) -> tuple[int, ...]:
        """Sizes of the sections of a dim of ``length``.

        Raises
        ------
        PatternError
            They do not make up the dim.
        """
        if self.ratio is not None:
            unit, rest = divmod(length, sum(self.ratio))
            if rest:
                raise unfit(f"{self}: a dim of {length} cannot be cut in this ratio.")
            return tuple(unit * share for share in self.ratio)
        if sum(self.sections) != length:
            raise unfit(f"{self}: the sections are {sum(self.sections)} long, the dim {length}.")
        return self.sections

    def section_widths(self, shape: _Shape, size: int) -> tuple[tuple[int, ...], ...]:
        """Per section, the width of each rank.

        Raises
        ------
        PatternError
            The pattern does not fit the shape or the number of ranks.
        """
        sections = self.sizes(_length(self, shape))
        what = f"{self} of shape {list(shape)}"
        for given in (self.widths, self.units):
            if given is not None and len(given) != len(sections):
                raise unfit(f"{what}: widths or units of {len(given)} sections are given.")
        if self.widths is None:
            # Sections in a ratio keep it on every rank: what is dealt out is its unit.
            units = self.units or self.ratio or (1,) * len(sections)
            return tuple(
                _unit_widths(what, section, size, unit)
                for section, unit in zip(sections, units, strict=True)
            )
        for section, widths in zip(sections, self.widths, strict=True):
            _check_widths(what, widths, size, section)
        return self.widths

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        sections = self.section_widths(shape, size)
        ranks = zip(*sections, strict=True) if sections else [()] * size
        return tuple(_resized(shape, self.dim, sum(widths)) for widths in ranks)

    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        held = _present(parts)
        for part, expected in zip(held, self.split(shape, len(held)), strict=True):
            if part.shape != expected:
                raise unfit(
                    f"{self}: a rank holds {list(part.shape)}, expected {list(expected or ())}. "
                    "Apply padding before the sections are cut."
                )
        if len(held) == 1:
            return held[0]
        origins = [0] * len(held)
        slices = []
        for widths in self.section_widths(shape, len(held)):
            for rank, width in enumerate(widths):
                if width:
                    slices.append(Part(width, held[rank], origins[rank]))
                    origins[rank] += width
        return Concat(shape, self.dim, tuple(slices))

    def __str__(self) -> str:
        sections = self.sections if self.ratio is None else self.ratio
        return f"shard_nc({self.dim}: {'|'.join(map(str, sections))})"


@dataclass(frozen=True, slots=True)
class Hy(Pattern):
    """Slices along several dims on one axis, whose ranks form a grid.

    Attributes
    ----------
    grid : tuple of (dim, parts)
        Rank order is row-major: the last entry varies fastest. Equal splits by `even_widths`.
    """

    grid: tuple[tuple[int, int], ...]
    name: ClassVar[str] = "hy"

    def _levels(self, shape: _Shape) -> list[list[_Shape]]:
        """Shapes after 0, 1, 2, ... of the grid's splits."""
        levels = [[shape]]
        for dim, parts in self.grid:
            level = [s for outer in levels[-1] for s in Shard(dim).split(outer, parts)]
            levels.append([s for s in level if s is not None])
        return levels

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        ranks = math.prod(parts for _, parts in self.grid)
        if ranks != size or min((parts for _, parts in self.grid), default=1) < 1:
            raise unfit(f"{self}: the grid has {ranks} ranks, the axis {size}.")
        return tuple(self._levels(shape)[-1])

    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        held = _present(parts)
        outer = self._levels(shape)[:-1]
        for (dim, n), shapes in zip(reversed(self.grid), reversed(outer), strict=True):
            held = [Shard(dim).join(s, held[i * n : (i + 1) * n]) for i, s in enumerate(shapes)]
        return held[0]

    def __str__(self) -> str:
        return f"hy({', '.join(f'{dim}: {parts}' for dim, parts in self.grid)})"


@dataclass(frozen=True, slots=True)
class Flat(Pattern):
    """Ranges of the flattened tensor; ranks may hold nothing.

    Element ``k`` of the tensor lies at ``start + k`` of a flat space of which every rank holds
    ``width`` elements. The defaults are ZeRO-3's rule, ``ceil(numel / ranks)`` for every parameter;
    ZeRO-1/2 give the parameter's ``start`` in the group's buffer and the partition's ``width``.

    Attributes
    ----------
    start : int, elements
    width : int, elements, optional
        Default: ``ceil((start + numel) / ranks)`` rounded up to a multiple of ``align``.
    align : int, elements
    widths : tuple of int, optional
        Explicit number of elements on each rank, instead of the rule.
    """

    start: int = 0
    width: int | None = None
    align: int = 1
    widths: tuple[int, ...] | None = None
    name: ClassVar[str] = "flat"

    def __post_init__(self) -> None:
        if self.start < 0 or self.align < 1 or (self.width is not None and self.width < 0):
            raise unfit(
                f"flat with start {self.start}, align {self.align} and width {self.width}: "
                "none may be below zero, align not below one."
            )

    def _bounds(self, shape: _Shape, size: int) -> tuple[int, ...]:
        numel = math.prod(shape)
        if self.widths is not None:
            _check_widths(f"flat of shape {list(shape)}", self.widths, size, numel)
            return tuple(accumulate(self.widths, initial=0))
        width = self.width
        if width is None:
            width = -(-(self.start + numel) // (size * self.align)) * self.align
        if numel and self.start + numel > size * width:
            raise unfit(
                f"flat of shape {list(shape)}: {numel} elements from {self.start} on do not fit "
                f"into {size} ranks of {width}."
            )
        return tuple(min(max(rank * width - self.start, 0), numel) for rank in range(size + 1))

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        bounds = self._bounds(shape, size)
        return tuple((bounds[rank + 1] - bounds[rank],) for rank in range(size))

    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        held = [part for part in _present(parts) if part.shape != (0,)]
        copies = {part.copies for part in held} or {1}
        if len(copies) > 1:
            raise unfit("flat: the ranks hold different numbers of copies of their ranges.")
        flat = tuple(_flat(shape, held, copy) for copy in range(copies.pop()))
        return flat[0] if len(flat) == 1 else Copies(flat, held[0].rule)


@dataclass(frozen=True, slots=True)
class Stacked(Pattern):
    """Rank ``i`` holds index ``i`` of the leading axis."""

    name: ClassVar[str] = "stack"

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        if not shape or shape[0] != size:
            raise unfit(f"stack of shape {list(shape)}: the leading dim must be {size} long.")
        return (shape[1:],) * size

    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        return Stack(tuple(_present(parts)))


@dataclass(frozen=True, slots=True)
class Pad(Pattern):
    """What is held is longer along a dim than the tensor is; an axis of one rank.

    Shapes outside of it are those of the held tensor, padding included; the geometry that comes out
    has the true size.

    Attributes
    ----------
    dim : int
    true_size : int
        Indices that count; they come first.
    """

    dim: int
    true_size: int
    name: ClassVar[str] = "pad"

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        length = _length(self, shape)
        if size != 1 or not 0 <= self.true_size <= length:
            raise unfit(f"{self} of shape {list(shape)} on {size} ranks: it cannot be longer.")
        return (shape,)

    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        part = _present(parts)[0]
        whole = _resized(part.shape, self.dim, self.true_size)
        return Concat(whole, self.dim, (Part(self.true_size, part),))

    def __str__(self) -> str:
        return f"pad({self.dim}: {self.true_size})"


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


def _present(parts: Sequence[Geometry | None]) -> list[Geometry]:
    return [part for part in parts if part is not None]


def _resized(shape: _Shape, dim: int, length: int) -> _Shape:
    return (*shape[:dim], length, *shape[dim + 1 :])


def _length(pattern: Shard | ShardNC | Pad, shape: _Shape) -> int:
    if not 0 <= pattern.dim < len(shape):
        raise unfit(f"{pattern} does not fit shape {list(shape)}: there are {len(shape)} dims.")
    return shape[pattern.dim]


def _unit_widths(what: str, length: int, size: int, unit: int) -> tuple[int, ...]:
    """Whole units, dealt out evenly."""
    if unit < 1 or length % unit:
        raise unfit(f"{what}: {length} indices are no whole units of {unit}.")
    return tuple(unit * width for width in even_widths(length // unit, size))


def _check_widths(what: str, widths: Sequence[int], size: int, length: int) -> None:
    if len(widths) != size or sum(widths) != length or min(widths, default=0) < 0:
        raise unfit(
            f"{what}: widths {listing(widths)} were given, expected {size} widths >= 0 "
            f"that make up {length}."
        )


def _flat(shape: _Shape, parts: Sequence[Geometry], copy: int) -> FlatRanges:
    """One copy of 1-D ranges, end to end, as a tensor of ``shape``."""
    bounds, slots, offsets = [0], [], []
    for part in parts:
        for piece in sorted(
            part.query(Region.full(part.shape), copy), key=lambda piece: piece.region.offsets
        ):
            (length,) = piece.region.sizes
            if length > 1 and piece.strides != (1,):
                raise unfit(f"flat: a rank's range is stored with stride {piece.strides[0]}.")
            bounds.append(bounds[-1] + length)
            slots.append(piece.slot)
            offsets.append(piece.offset)
    return FlatRanges(shape, tuple(bounds), tuple(slots), tuple(offsets))
