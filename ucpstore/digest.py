"""Digest of a tensor: mergeable over its parts, whatever their order, objects and codecs.

Over all tiles (`ucpstore.layout.tiles`): the sum, mod 2**128, of xxh3_128 of the tile's elements,
clipped to the tensor, in C order and little-endian, with the tile's index as the seed. It guards
against accidents, not against adversaries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from ucpstore.dtypes import itemsize, numpy_dtype
from ucpstore.errors import FormatVersionError
from ucpstore.layout.region import Region
from ucpstore.layout.tiles import BLOCK_BYTES, iter_blocks, iter_tiles, tile_shape

__all__ = ["TileDigest", "digest_array", "digest_reads", "hash_tile", "merge"]

_ALGORITHM = "xxh3-128-tiles"
_MODULUS = 1 << 128
_SEEDS = 1 << 64
_PATTERN = re.compile(rf"{_ALGORITHM}:(\w+):\[((?:\d+(?:,\d+)*)?)\]:([0-9a-f]{{32}})")


@dataclass(frozen=True, slots=True)
class TileDigest:
    """Digest of a whole tensor.

    Attributes
    ----------
    dtype : str
        Element type. bfloat16 and float8 count as themselves, not as the integers that hold their
        bits.
    shape : tuple of int
    value : int
        Sum over the tiles, mod 2**128.

    Examples
    --------
    >>> str(TileDigest("float32", (2, 3), 255))
    'xxh3-128-tiles:float32:[2,3]:000000000000000000000000000000ff'
    """

    dtype: str
    shape: tuple[int, ...]
    value: int

    def __str__(self) -> str:
        return f"{_ALGORITHM}:{self.dtype}:[{','.join(map(str, self.shape))}]:{self.value:032x}"

    @classmethod
    def parse(cls, text: str) -> TileDigest:
        """Read what ``str`` wrote.

        Raises
        ------
        FormatVersionError
            The text is of another algorithm or form.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise FormatVersionError(
                f"digest {text!r} has another form, "
                f"expected '{_ALGORITHM}:<dtype>:[<shape>]:<32 hex digits>'."
            )
        dtype, shape, value = match.groups()
        return cls(dtype, tuple(int(n) for n in shape.split(",") if n), int(value, 16))


def hash_tile(index: int, data: Any) -> int:
    """What one tile adds to the sum.

    Parameters
    ----------
    index : int
        Position of the tile in the tensor's grid, in C order.
    data : contiguous buffer
        Bytes of its elements.
    """
    return xxhash.xxh3_128_intdigest(data, seed=index % _SEEDS)


def merge(partials: Iterable[int]) -> int:
    """Sum of partial digests of disjoint sets of tiles."""
    return sum(partials) % _MODULUS


def digest_reads(
    shape: tuple[int, ...],
    dtype: str,
    read: Callable[[Region, Any], None],
    *,
    block_bytes: int = BLOCK_BYTES,
) -> TileDigest:
    """Digest a tensor that is read block by block into one reused buffer.

    Parameters
    ----------
    shape : tuple of int
    dtype : str
    read : callable
        ``read(region, out)`` fills the array ``out``, of the region's shape, with its elements.
    block_bytes : int
        Size of a block, in bytes; at least a tile is read at once.
    """
    tile = tile_shape(shape, itemsize(dtype))
    element = numpy_dtype(dtype)
    buffer = np.empty(0, element)
    partials = []
    for block in iter_blocks(Region.full(shape), tile, element.itemsize, block_bytes=block_bytes):
        if buffer.size < block.volume:
            buffer = np.empty(block.volume, element)
        values = buffer[: block.volume].reshape(block.sizes)
        read(block, values)
        for index, box in iter_tiles(shape, tile, block):
            partials.append(hash_tile(index, _bytes(values[box.within(block).slices])))
    return TileDigest(dtype, shape, merge(partials))


def digest_array(array: np.ndarray[Any, Any]) -> TileDigest:
    """Digest an array in memory: the plain definition.

    Parameters
    ----------
    array : ndarray
        Of a dtype that `ucpstore.dtypes` names.
    """
    shape, dtype = array.shape, array.dtype.name
    tile = tile_shape(shape, itemsize(dtype))
    tiles = iter_tiles(shape, tile, Region.full(shape))
    partials = (hash_tile(index, _bytes(array[box.slices])) for index, box in tiles)
    return TileDigest(dtype, shape, merge(partials))


def _bytes(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Elements in C order and little-endian."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8)
