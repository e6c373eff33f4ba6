"""Patterns: how a parameter lies on one mesh axis, and how patterns of several axes compose.

A pattern splits a tensor's shape over the ranks of an axis and joins what the ranks hold into one
geometry again: UCP's patterns (Universal Checkpointing, ATC'25) and ``Flat``, ``Stacked``, ``Pad``.

=========== ==============================================================================
`Unique`    one rank holds it
`Replicate` all ranks hold the same bits
`Partial`   all ranks hold their own version; the mean counts (``params_to_average``)
`Shard`     contiguous slices along a dim (the paper's V and H)
`ShardNC`   one slice of every section of a dim: fused q|k|v, gate|up (NC)
`Hy`        slices along several dims at once (Hy)
`Flat`      ranges of the flattened tensor: ZeRO, FSDP1
`Stacked`   rank ``i`` holds index ``i`` of the leading axis: experts
`Pad`       what is held is longer than the tensor: padded vocabularies
=========== ==============================================================================

Examples
--------
>>> from ucpstore.layout.geometry import Strided
>>> axes = (Axis("tp", 2, Shard(0)), Axis("dp", 2, Flat()))
>>> held = compose((4, 3), axes, lambda at, shape: Strided(shape, at["tp"] * 2 + at["dp"]))
>>> describe(axes), held.cuts(), local_shape((4, 3), axes, {"tp": 1, "dp": 0})
('tp: shard(0), dp: flat', ((2,), ()), (3,))
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple

from ucpstore.errors import Kind, PatternError, listing
from ucpstore.layout.geometry import Concat, Copies, FlatRanges, Geometry, Part, Stack
from ucpstore.layout.region import Region

__all__ = [
    "Axis",
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
    "compose",
    "describe",
    "even_widths",
    "local_shape",
    "pattern_from_json",
]

_Shape = tuple[int, ...]


def even_widths(length: int, parts: int) -> tuple[int, ...]:
    """Widths of an equal split: the first ``length % parts`` ranks get one more.

    This is AutoTP's rule (DeepSpeed ``module_inject/tp_shard.py``), not that of ``torch.chunk``.
    """
    width, extra = divmod(length, parts)
    return tuple(width + (rank < extra) for rank in range(parts))


def _error(message: str) -> PatternError:
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
            raise _error(f"unique on rank {self.rank}: the axis has {size} ranks.")
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
            raise _error(f"replicate with rule {self.rule!r}: the rules are 'equal' and 'first'.")

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        return (shape,) * size

    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        held = _present(parts)
        return held[0] if len(held) == 1 else Copies(tuple(held), self.rule)


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
    """

    dim: int
    widths: tuple[int, ...] | None = None
    name: ClassVar[str] = "shard"

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        length = _length(self, shape)
        widths = even_widths(length, size) if self.widths is None else self.widths
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
    """

    dim: int
    sections: tuple[int, ...]
    widths: tuple[tuple[int, ...], ...] | None = None
    name: ClassVar[str] = "shard_nc"

    def _widths(self, shape: _Shape, size: int) -> tuple[tuple[int, ...], ...]:
        """Per section, the width of each rank."""
        length = _length(self, shape)
        what = f"{self} of shape {list(shape)}"
        if sum(self.sections) != length:
            raise _error(f"{what}: the sections are {sum(self.sections)} long, the dim {length}.")
        if self.widths is None:
            return tuple(even_widths(section, size) for section in self.sections)
        if len(self.widths) != len(self.sections):
            raise _error(f"{what}: widths of {len(self.widths)} sections are given.")
        for section, widths in zip(self.sections, self.widths, strict=True):
            _check_widths(what, widths, size, section)
        return self.widths

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        ranks = zip(*self._widths(shape, size), strict=True) if self.sections else [()] * size
        return tuple(_resized(shape, self.dim, sum(widths)) for widths in ranks)

    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        held = _present(parts)
        for part, expected in zip(held, self.split(shape, len(held)), strict=True):
            if part.shape != expected:
                raise _error(
                    f"{self}: a rank holds {list(part.shape)}, expected {list(expected or ())}. "
                    "Apply padding before the sections are cut."
                )
        if len(held) == 1:
            return held[0]
        origins = [0] * len(held)
        slices = []
        for widths in self._widths(shape, len(held)):
            for rank, width in enumerate(widths):
                if width:
                    slices.append(Part(width, held[rank], origins[rank]))
                    origins[rank] += width
        return Concat(shape, self.dim, tuple(slices))

    def __str__(self) -> str:
        return f"shard_nc({self.dim}: {'|'.join(map(str, self.sections))})"


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
            raise _error(f"{self}: the grid has {ranks} ranks, the axis {size}.")
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
            raise _error(
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
            raise _error(
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
            raise _error("flat: the ranks hold different numbers of copies of their ranges.")
        flat = tuple(_flat(shape, held, copy) for copy in range(copies.pop()))
        return flat[0] if len(flat) == 1 else Copies(flat, held[0].rule)


@dataclass(frozen=True, slots=True)
class Stacked(Pattern):
    """Rank ``i`` holds index ``i`` of the leading axis."""

    name: ClassVar[str] = "stack"

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        if not shape or shape[0] != size:
            raise _error(f"stack of shape {list(shape)}: the leading dim must be {size} long.")
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
            raise _error(f"{self} of shape {list(shape)} on {size} ranks: it cannot be longer.")
        return (shape,)

    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        part = _present(parts)[0]
        whole = _resized(part.shape, self.dim, self.true_size)
        return Concat(whole, self.dim, (Part(self.true_size, part),))

    def __str__(self) -> str:
        return f"pad({self.dim}: {self.true_size})"


class Axis(NamedTuple):
    """A pattern on a mesh axis of ``size`` ranks."""

    name: str
    size: int
    pattern: Pattern


_Axes = Sequence[tuple[str, int, Pattern]]


def compose(
    shape: _Shape, axes: _Axes, leaf: Callable[[dict[str, int], _Shape], Geometry]
) -> Geometry:
    """Geometry of a tensor that is laid out over several mesh axes.

    Parameters
    ----------
    shape : tuple of int
        Of the whole tensor as the ranks hold it together, padding included.
    axes : sequence of Axis
        In the order in which the framework applies them: each splits what the one before left.
    leaf : callable
        ``leaf(coords, local_shape)`` is the geometry of what the rank at ``coords`` (axis name ->
        index) stores, usually a `Strided`.

    Raises
    ------
    PatternError
        A pattern does not fit the shape or the axis.
    """
    names = [name for name, _, pattern in axes if not isinstance(pattern, Pad)]
    if len(set(names)) < len(names):
        raise _error(f"the mesh axes {listing(names)} must have different names.")
    return _compose(tuple(shape), tuple(axes), {}, leaf)


def _compose(
    shape: _Shape,
    axes: _Axes,
    coords: dict[str, int],
    leaf: Callable[[dict[str, int], _Shape], Geometry],
) -> Geometry:
    if not axes:
        return leaf(coords, shape)
    (name, size, pattern), *inner = axes
    parts: list[Geometry | None] = []
    for index, local in enumerate(_split(shape, name, size, pattern)):
        at = coords if isinstance(pattern, Pad) else {**coords, name: index}
        parts.append(None if local is None else _compose(local, inner, at, leaf))
    return pattern.join(shape, parts)


def local_shape(shape: _Shape, axes: _Axes, coords: Mapping[str, int]) -> _Shape | None:
    """Shape of what the rank at ``coords`` holds; ``None`` if it holds no part.

    Raises
    ------
    PatternError
        A pattern does not fit, or ``coords`` lacks an axis or lies outside of it.
    """
    held: _Shape | None = tuple(shape)
    for name, size, pattern in axes:
        if held is None:
            return None
        index = 0 if isinstance(pattern, Pad) else coords.get(name, -1)
        if not 0 <= index < size:
            raise _error(f"axis {name!r} has {size} ranks: {coords.get(name)} is not one of them.")
        held = _split(held, name, size, pattern)[index]
    return held


def describe(axes: _Axes) -> str:
    """The axes in words, as in ``"tp: shard(0), dp: flat"``; axes that do nothing are left out."""
    words = [
        str(pattern) if isinstance(pattern, Pad) else f"{name}: {pattern}"
        for name, size, pattern in axes
        if isinstance(pattern, Pad) or (size > 1 and not isinstance(pattern, Unique))
    ]
    return ", ".join(words) or "unique"


def pattern_from_json(document: Mapping[str, Any]) -> Pattern:
    """The pattern that `Pattern.to_json` described.

    Raises
    ------
    PatternError
        The document is not such a description.
    """
    kind_name = document.get("pattern") if isinstance(document, Mapping) else None
    kind = _PATTERNS.get(kind_name) if isinstance(kind_name, str) else None
    if kind is None:
        raise PatternError(
            f"pattern document {document!r:.80}: expected 'pattern' to be one of "
            f"{', '.join(_PATTERNS)}.",
            kind=Kind.MALFORMED,
        )
    values = {key: value for key, value in document.items() if key != "pattern"}
    try:
        checked = {key: _checked(key, value) for key, value in values.items()}
        return kind(**checked)
    except TypeError as error:
        raise PatternError(
            f"pattern document {document!r:.80}: {error}.", kind=Kind.MALFORMED
        ) from error


_PATTERNS: dict[str, type[Pattern]] = {
    kind.name: kind for kind in (Unique, Replicate, Partial, Shard, ShardNC, Hy, Flat, Stacked, Pad)
}
# How deep the integers of a field are nested; every other field is one integer.
_NESTING = {"widths": (1, 2), "sections": (1,), "grid": (2,)}


def _checked(key: str, value: Any) -> Any:
    """A field of a pattern document with lists as tuples."""
    if key == "rule" and isinstance(value, str):
        return value
    found, depth = value, 0
    while isinstance(found, (list, tuple)) and found:
        found, depth = found[0], depth + 1
    if depth not in _NESTING.get(key, (0,)):
        raise TypeError(f"field {key!r} is {value!r:.40}")
    return _tuples(key, value, depth)


def _tuples(key: str, value: Any, depth: int) -> Any:
    if depth and isinstance(value, (list, tuple)):
        return tuple(_tuples(key, item, depth - 1) for item in value)
    if depth or type(value) is not int:
        raise TypeError(f"field {key!r} holds {value!r:.40}, which is not an integer")
    return value


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


def _split(shape: _Shape, name: str, size: int, pattern: Pattern) -> tuple[_Shape | None, ...]:
    if size < 1:
        raise _error(f"mesh axis {name!r} has {size} ranks: at least one is expected.")
    return pattern.split(shape, size)


def _present(parts: Sequence[Geometry | None]) -> list[Geometry]:
    return [part for part in parts if part is not None]


def _resized(shape: _Shape, dim: int, length: int) -> _Shape:
    return (*shape[:dim], length, *shape[dim + 1 :])


def _length(pattern: Shard | ShardNC | Pad, shape: _Shape) -> int:
    if not 0 <= pattern.dim < len(shape):
        raise _error(f"{pattern} does not fit shape {list(shape)}: there are {len(shape)} dims.")
    return shape[pattern.dim]


def _check_widths(what: str, widths: Sequence[int], size: int, length: int) -> None:
    if len(widths) != size or sum(widths) != length or min(widths, default=0) < 0:
        raise _error(
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
                raise _error(f"flat: a rank's range is stored with stride {piece.strides[0]}.")
            bounds.append(bounds[-1] + length)
            slots.append(piece.slot)
            offsets.append(piece.offset)
    return FlatRanges(shape, tuple(bounds), tuple(slots), tuple(offsets))
