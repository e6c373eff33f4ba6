"""What the layout algebra is checked against: plain numpy that splits and stores real arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ucpstore.layout.geometry import Geometry, Piece, Strided
from ucpstore.layout.patterns import (
    Axis,
    Flat,
    Hy,
    Pad,
    Partial,
    Pattern,
    Replicate,
    Shard,
    ShardNC,
    Stacked,
    Unique,
)
from ucpstore.layout.region import Region

Array = np.ndarray


def numbered(shape: Sequence[int]) -> Array:
    """A tensor whose elements are all different and none of them 0 or negative."""
    return np.arange(1, math.prod(shape) + 1, dtype=np.int64).reshape(shape)


def split_array(x: Array, size: int, pattern: Pattern) -> list[Array | None]:
    """What each rank of an axis holds of a real array."""
    match pattern:
        case Unique(rank=rank):
            return [x if index == rank else None for index in range(size)]
        case Replicate() | Partial() | Pad():
            return [x] * size
        case Shard(dim=dim, widths=widths):
            return _cut(x, dim, size, widths)
        case ShardNC(dim=dim, sections=sections, widths=widths):
            blocks = np.split(x, np.cumsum(sections)[:-1], axis=dim)
            cut = [_cut(b, dim, size, widths and widths[i]) for i, b in enumerate(blocks)]
            return [np.concatenate([c[rank] for c in cut], axis=dim) for rank in range(size)]
        case Hy(grid=grid):
            held = [x]
            for dim, parts in grid:
                held = [piece for h in held for piece in np.array_split(h, parts, axis=dim)]
            return list(held)
        case Flat(widths=None):
            flat = x.reshape(-1)
            width = pattern.width
            if width is None:
                width = math.ceil(math.ceil((pattern.start + x.size) / size) / pattern.align)
                width *= pattern.align
            ranks = (pattern.start + np.arange(x.size)) // max(width, 1)
            return [flat[ranks == rank] for rank in range(size)]
        case Flat(widths=widths):
            return list(np.split(x.reshape(-1), np.cumsum(widths)[:-1]))
        case Stacked():
            return list(x)
    raise AssertionError(pattern)


def _cut(x: Array, dim: int, size: int, widths: Sequence[int] | None) -> list[Array]:
    if widths is None:
        return np.array_split(x, size, axis=dim)
    return np.split(x, np.cumsum(widths)[:-1], axis=dim)


class Ranks:
    """Stored buffers, filled by `store`; every other tensor is stored transposed, all off zero."""

    def __init__(self) -> None:
        self.buffers: list[Array] = []

    def store(self, x: Array) -> Strided:
        slot = len(self.buffers)
        offset = slot % 3
        transposed = slot % 2 == 1 and x.ndim > 1
        stored = np.asfortranarray(x) if transposed else np.ascontiguousarray(x)
        self.buffers.append(np.concatenate([[-1] * offset, stored.ravel(order="K"), [-1, -1]]))
        strides = tuple(s // 8 for s in np.empty(x.shape, x.dtype, order="F").strides)
        return Strided(x.shape, slot, offset, strides if transposed else None)

    def build(self, x: Array, axes: Sequence[Axis]) -> dict[tuple[int, ...], Strided]:
        """Store what every rank holds: coordinates on the axes -> stored tensor."""
        held: dict[tuple[int, ...], Array] = {(): x}
        for _, size, pattern in axes:
            held = {
                (*at, rank): part
                for at, whole in held.items()
                for rank, part in enumerate(split_array(whole, size, pattern))
                if part is not None
            }
        return {at: self.store(part) for at, part in held.items()}

    def gather(self, geometry: Geometry, region: Region, copy: int = 0) -> Array:
        """Read a region through its pieces; elements that no piece holds are 0.

        Fails if two pieces overlap, one leaves the region, or an address leaves its buffer.
        """
        return gather(geometry.query(region, copy), self.buffers, region)


def gather(pieces: Iterable[Piece], buffers: Sequence[Array], region: Region) -> Array:
    out = np.zeros(region.sizes, np.int64)
    hits = np.zeros(region.sizes, np.int64)
    for piece in pieces:
        assert region.contains(piece.region)
        assert piece.region.volume > 0
        assert piece.offset >= 0
        buffer = buffers[piece.slot]
        sizes, strides = piece.region.sizes, piece.strides
        last = piece.offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        assert last < len(buffer)
        where = piece.region.within(region).slices
        out[where] = as_strided(buffer[piece.offset :], sizes, tuple(s * 8 for s in strides))
        hits[where] += 1
    assert hits.max(initial=0) <= 1, "pieces overlap"
    return out


def actual_ranges(pieces: Iterable[Piece]) -> int:
    """Contiguous stored ranges that pieces touch, found by listing every element's address."""
    addresses = sorted(
        {
            (piece.slot, piece.offset + sum(map(int.__mul__, index, piece.strides)))
            for piece in pieces
            for index in itertools.product(*map(range, piece.region.sizes))
        }
    )
    return sum(
        1
        for k, (slot, address) in enumerate(addresses)
        if k == 0 or addresses[k - 1] != (slot, address - 1)
    )


shapes = st.lists(st.integers(0, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Region(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))


def partitions(total: int, parts: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Widths >= 0, ``parts`` of them, that make up ``total``."""
    cuts = st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1).map(sorted)
    return cuts.map(lambda c: tuple(b - a for a, b in itertools.pairwise([0, *c, total])))


@st.composite
def axis_patterns(draw: st.DrawFn, held: set[tuple[int, ...]], size: int) -> Pattern:
    """A pattern that fits all the shapes that ranks hold."""
    ndim = len(next(iter(held)))
    kinds = ["unique", "replicate", "partial", "flat", "flat_start", "flat_widths"]
    kinds += ["shard", "shard_widths", "nc", "nc_widths", "hy"] if ndim else []
    kinds += ["stack"] if ndim and all(shape[0] == size for shape in held) else []
    kind = draw(st.sampled_from(kinds))
    numels = {math.prod(shape) for shape in held}
    if kind == "unique":
        return Unique(draw(st.integers(0, size - 1)))
    if kind == "replicate":
        return Replicate(draw(st.sampled_from(["equal", "first"])))
    if kind == "flat_start":
        start = draw(st.integers(0, 9))
        smallest = -(-(start + max(numels)) // size)
        return Flat(start, draw(st.integers(smallest, smallest + 3)))
    if kind == "flat_widths" and len(numels) == 1:
        return Flat(widths=draw(partitions(numels.pop(), size)))
    if kind in ("flat", "flat_widths"):
        return Flat(align=draw(st.integers(1, 3)))
    if kind in ("partial", "stack"):
        return Partial() if kind == "partial" else Stacked()
    if kind == "hy":
        dims = draw(st.lists(st.integers(0, ndim - 1), min_size=1, max_size=2))
        grid = (size,) if len(dims) == 1 else draw(st.sampled_from([(1, size), (size, 1)]))
        grid = (2, 2) if size == 4 and len(dims) == 2 else grid
        return Hy(tuple(zip(dims, grid, strict=True)))
    dim = draw(st.integers(0, ndim - 1))
    lengths = {shape[dim] for shape in held}
    if len(lengths) > 1 or kind == "shard":
        return Shard(dim)
    (length,) = lengths
    if kind == "shard_widths":
        return Shard(dim, draw(partitions(length, size)))
    sections = draw(partitions(length, draw(st.integers(1, 3))))
    if kind == "nc":
        return ShardNC(dim, sections)
    return ShardNC(dim, sections, tuple(draw(partitions(s, size)) for s in sections))


def _ranks_hold(held: set[tuple[int, ...]], size: int, pattern: Pattern) -> set[tuple[int, ...]]:
    parts = (split_array(numbered(shape), size, pattern) for shape in held)
    return {part.shape for part in itertools.chain.from_iterable(parts) if part is not None}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Array, list[Axis]]:
    """A tensor and up to three nested axes that fit it."""
    x = numbered(draw(shapes))
    axes: list[Axis] = []
    held = {x.shape}
    for name in ("pp", "tp", "dp")[: draw(st.integers(0, 3))]:
        size = draw(st.integers(1, 5))
        pattern = draw(axis_patterns(held, size))
        axes.append(Axis(name, size, pattern))
        held = _ranks_hold(held, size, pattern)
    return x, axes
