"""The tile grid of a tensor: the unit of range reads, of checksums and of digests.

The tile depends on shape and element size alone, so that digests of the same tensor in different
files can be compared. It is part of the store's format: a changed rule needs a new name of the digest.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

from ucpstore.layout.region import Region

__all__ = [
    "BLOCK_BYTES",
    "TILE_BYTES",
    "iter_blocks",
    "iter_tiles",
    "num_tiles",
    "tile_grid",
    "tile_shape",
]

TILE_BYTES = 256 * 1024
"""Size in bytes that a tile comes near to, and up to which a tensor is one tile."""

BLOCK_BYTES = 2 * 1024 * 1024
"""Default size in bytes of the row-blocks of tiles that are read at once."""

_PARTS = 8  # slices of rows and columns that should be whole tiles: TP degrees 2, 4 and 8
_MIN_COLUMN_BYTES = 1024
_MAX_KERNEL = 32  # longest dim that passes for a convolution kernel's
_MAX_PADDING = 1 / 2048  # of a dim; two dims stay below 0.1 %


@functools.lru_cache(maxsize=65536)
def tile_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Shape of a tensor's tiles.

    * Up to 256 KiB, and 0-d: the whole tensor.
    * Matrices: an eighth of the columns but at least 1 KiB of them, and as many rows as come nearest
      to 256 KiB; exact divisors of an eighth, a quarter, half or all of the rows where there are any
      within a factor of two, else an even split with at most 0.05 % of padding.
    * Vectors: as rows of a matrix with one column.
    * More dims: the last two are the matrix if it fills a tile, and all before them (layers, experts)
      are split to 1. Otherwise trailing dims of up to 32 are a convolution's kernel and stay whole,
      and the two before them are the matrix. If that does not fill a tile either, a tile is a run of
      the C order.

    Parameters
    ----------
    shape : tuple of int
    itemsize : int, bytes

    Returns
    -------
    tuple of int
        At least 1 along every dim.

    Examples
    --------
    >>> tile_shape((4096, 4096), 4), tile_shape((64, 2048, 1408), 4)
    ((128, 512), (1, 256, 352))
    >>> tile_shape((1280, 1280, 3, 3), 4)
    (40, 160, 3, 3)
    """
    if math.prod(shape) * itemsize <= TILE_BYTES:
        return tuple(max(1, n) for n in shape)
    for kernel_dims in range(len(shape) - 1):
        kernel = shape[len(shape) - kernel_dims :]
        if any(n > _MAX_KERNEL for n in kernel):
            break
        *stack, rows, columns = shape[: len(shape) - kernel_dims]
        element = math.prod(kernel) * itemsize
        if rows * columns * element >= TILE_BYTES:
            return (1,) * len(stack) + _matrix_tile(rows, columns, element) + kernel
    return _run_tile(shape, itemsize)


def _matrix_tile(rows: int, columns: int, element: int) -> tuple[int, int]:
    """Tile of a matrix whose elements have ``element`` bytes."""
    width = _column_split(columns, element)
    return _row_split(rows, TILE_BYTES / (width * element)), width


def _column_split(columns: int, element: int) -> int:
    """Width of the column tiles: an eighth, unless that is below 1 KiB or above a tile."""
    nbytes = columns * element
    most = _PARTS * max(1, -(-nbytes // (_PARTS * TILE_BYTES)))
    most = min(most, max(1, nbytes // _MIN_COLUMN_BYTES), columns)
    exact = [parts for parts in range(most, 0, -1) if 2 * parts >= most and columns % parts == 0]
    powers = [parts for parts in exact if parts & (parts - 1) == 0]
    for parts in (*powers, *exact):
        return columns // parts
    least = min(most, -(-nbytes // (2 * TILE_BYTES)))
    widths = [-(-columns // parts) for parts in range(most, least - 1, -1)]
    for width in widths:
        if _padding(columns, width) <= columns * _MAX_PADDING:
            return width
    return columns if least <= 1 else min(widths, key=lambda width: _padding(columns, width))


def _row_split(rows: int, target: float) -> int:
    """Number of rows near ``target``; divides an eighth (quarter, half) of ``rows`` if possible."""
    if rows <= max(1.0, target / 2):
        return rows
    low, high = max(1, math.ceil(target / 2)), min(rows, max(1, math.floor(target * 2)))
    for share in (_PARTS, 4, 2, 1):
        if rows % share == 0:
            divisors = [d for d in _divisors(rows // share) if low <= d <= high]
            if divisors:
                return min(divisors, key=lambda d: (max(d / target, target / d), d))
    centre = min(high, max(low, round(target)))
    for step in range(high - low + 1):
        for candidate in (centre - step, centre + step):
            if low <= candidate <= high and _padding(rows, candidate) <= rows * _MAX_PADDING:
                return candidate
    return min(range(low, high + 1), key=lambda candidate: (_padding(rows, candidate), candidate))


def _run_tile(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """A contiguous run of the C order: trailing dims whole, one dim split, 1 before it."""
    dim = len(shape) - 1
    inner = itemsize
    while inner * shape[dim] <= TILE_BYTES:
        inner *= shape[dim]
        dim -= 1
    return (1,) * dim + (_row_split(shape[dim], TILE_BYTES / inner),) + shape[dim + 1 :]


def _divisors(number: int) -> set[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return {*small, *(number // d for d in small)}


def _padding(extent: int, part: int) -> int:
    """Elements past ``extent`` in the last of the equal parts."""
    return -extent % part


def tile_grid(shape: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, ...]:
    """Number of tiles along every dim."""
    return tuple(-(-n // t) for n, t in zip(shape, tile, strict=True))


def num_tiles(shape: tuple[int, ...], tile: tuple[int, ...]) -> int:
    """Number of tiles of a tensor; tile ``i`` is the ``i``-th of the grid in C order."""
    return math.prod(tile_grid(shape, tile))


def iter_tiles(
    shape: tuple[int, ...], tile: tuple[int, ...], region: Region
) -> Iterator[tuple[int, Region]]:
    """Tiles of a region whose borders are tile borders (or the tensor's end), in C order.

    Yields
    ------
    (int, Region)
        Index of the tile in the whole tensor's grid, and its box clipped to the tensor.
    """
    grid = tile_grid(shape, tile)
    first = tuple(o // t for o, t in zip(region.offsets, tile, strict=True))
    last = tuple(-(-s // t) for s, t in zip(region.stops, tile, strict=True))
    for position in itertools.product(*map(range, first, last)):
        index = 0
        for place, extent in zip(position, grid, strict=True):
            index = index * extent + place
        offsets = tuple(p * t for p, t in zip(position, tile, strict=True))
        sizes = tuple(min(t, n - o) for t, n, o in zip(tile, shape, offsets, strict=True))
        yield index, Region(offsets, sizes)


def iter_blocks(
    region: Region, tile: tuple[int, ...], itemsize: int, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[Region]:
    """Cut a region into blocks of whole tiles, which follow each other in C order of its tile grid.

    Whole rows of tiles where one fits into twice ``block_bytes``, since they are contiguous in a
    row-major source; a block is never smaller than a tile.

    Parameters
    ----------
    region : Region
        Starts at a tile border and ends at one or at the tensor's end.
    tile : tuple of int
    itemsize : int, bytes
    block_bytes : int
        Size in bytes that a block should have at most.
    """
    if region.volume == 0:
        return
    extent = list(tile)
    nbytes = one = math.prod(tile) * itemsize
    for dim in reversed(range(region.ndim)):
        count = -(-region.sizes[dim] // tile[dim])
        limit = 2 * block_bytes if dim > 0 and nbytes == one else block_bytes
        whole = nbytes * count <= limit
        fit = count if whole else max(1, block_bytes // nbytes)
        extent[dim] *= fit
        nbytes *= fit
        if not whole:
            break
    starts = (range(0, size, step) for size, step in zip(region.sizes, extent, strict=True))
    for start in itertools.product(*starts):
        sizes = tuple(min(e, s - o) for e, s, o in zip(extent, region.sizes, start, strict=True))
        yield Region(tuple(map(sum, zip(region.offsets, start, strict=True))), sizes)
