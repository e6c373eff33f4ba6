"""Writes one object of an array, a shard or an unsharded chunk, from front to back in one pass.

The bytes are those of the codecs in `ArraySpec.metadata`: little-endian elements and their crc32c
per inner chunk, and behind a shard's chunks the index (Zarr v3, codec ``sharding_indexed``, version
1.0). The loop reads a block of tiles and takes one tile after the other through copy (only where it
does not lie in one piece, has padding or is widened), checksum, hash and write, while it is cached.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from ucpstore.digest import hash_tile, merge
from ucpstore.dtypes import itemsize, numpy_dtype
from ucpstore.errors import PlanError
from ucpstore.io.base import Sink
from ucpstore.layout.region import Region
from ucpstore.layout.tiles import BLOCK_BYTES, iter_blocks, iter_tiles
from ucpstore.store.arrays import CRC_BYTES, ArraySpec

__all__ = ["encode_index", "encode_object", "encoder_memory", "widen"]

Values = np.ndarray[Any, Any]
Chunk = bytes | bytearray | memoryview
Read = Callable[[Region, Values], None]

_GROUP_BYTES = 1024 * 1024  # tiles that go to the sink in one call
_ABSENT = (1 << 64) - 1  # index entry of a chunk outside the array


@dataclass(frozen=True, slots=True)
class _Tile:
    """A tile inside a block: its index relative to the block's first, and its place."""

    index: int
    place: tuple[Any, ...]
    sizes: tuple[int, ...]


class _Scratch(threading.local):
    """Buffers of one thread, reused from object to object."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}

    def take(self, name: str, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            self._buffers[name] = buffer = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]


_scratch = _Scratch()


def encode_object(
    array: ArraySpec, index: int, read: Read, sink: Sink, *, block_bytes: int = BLOCK_BYTES
) -> int:
    """Write the ``index``-th object of ``array`` to ``sink``; the caller closes or aborts the sink.

    Parameters
    ----------
    array : ArraySpec
    index : int
        Object in C order of the grid.
    read : callable
        ``read(region, out)`` fills ``out`` (C-contiguous, shape ``region.sizes``, dtype
        ``numpy_dtype(array.source_dtype)``) with the region's elements. Regions are in the
        coordinates of the array.
    sink : Sink
        Takes exactly ``array.object_nbytes(index)`` bytes.
    block_bytes : int
        Size of the regions that are read, in bytes; the written bytes do not depend on it. At
        least a tile is read at once, at most a row of tiles of twice this size.

    Returns
    -------
    int
        Partial digest: the sum over the object's tiles, of the elements as they are stored.
    """
    writer = _ChunkWriter(array, sink)
    source = numpy_dtype(array.source_dtype)
    region = array.object_region(index)
    plans: dict[tuple[int, ...], list[_Tile]] = {}
    for block in iter_blocks(region, array.tile, source.itemsize, block_bytes=block_bytes):
        buffer = _scratch.take("read", block.volume * source.itemsize)
        values = buffer.view(source).reshape(block.sizes)
        read(block, values)
        plan = plans.get(block.sizes)
        if plan is None:
            plan = plans[block.sizes] = list(_place_tiles(array, block))
        first = next(iter_tiles(array.shape, array.tile, block))[0]
        writer.add(values, first, plan)
    writer.flush()
    if array.sharded:
        sink.write(encode_index(array, array.object_tiles(index)))
    return merge(writer.partials)


def encoder_memory(array: ArraySpec, *, block_bytes: int = BLOCK_BYTES) -> int:
    """Bytes of the buffers that `encode_object` needs per thread for this array, at most."""
    read = max(2 * block_bytes, math.prod(array.tile) * itemsize(array.source_dtype))
    pack = max(_GROUP_BYTES, array.tile_nbytes)
    return read + pack + array.tile_nbytes


def widen(source: Values, out: Values) -> None:
    """Copy 16-bit floats into float32, exactly (a bfloat16 NaN keeps its payload).

    Parameters
    ----------
    source : ndarray of float16 or bfloat16
    out : ndarray of float32, same shape
    """
    if source.dtype.name == "bfloat16":
        bits = out.view(np.uint32)
        np.copyto(bits, source.view(np.uint16))
        np.left_shift(bits, 16, out=bits)
    else:
        with np.errstate(invalid="ignore"):  # some processors report signaling NaNs
            np.copyto(out, source, casting="safe")


def _place_tiles(array: ArraySpec, block: Region) -> Iterator[_Tile]:
    first: int | None = None
    for index, box in iter_tiles(array.shape, array.tile, block):
        first = index if first is None else first
        place = box.within(block).slices
        yield _Tile(index - first, place, box.sizes)


class _ChunkWriter:
    """Turns tiles into inner chunks and hands them to the sink in groups."""

    def __init__(self, array: ArraySpec, sink: Sink) -> None:
        self.partials: list[int] = []
        self._sink = sink
        self._tile = array.tile
        self._stored = np.dtype(array.dtype)
        self._widens = _must_widen(array)
        self._padding = _fill(array.dtype)
        self._nbytes = array.tile_nbytes
        self._slots = max(1, _GROUP_BYTES // max(1, self._nbytes))
        self._pack = _scratch.take("pack", self._slots * self._nbytes)
        self._packed = 0
        self._buffers: list[Chunk] = []
        self._chunks = 0

    def add(self, values: Values, first: int, plan: list[_Tile]) -> None:
        """Append the tiles of a block; ``values`` may be reused afterwards."""
        if not self._widens:
            values = values.view(self._stored)
        for tile in plan:
            part = values[tile.place]
            whole = tile.sizes == self._tile
            if whole and not self._widens and part.flags.c_contiguous:
                data = elements = part.reshape(-1).view(np.uint8)
            else:
                data, elements = self._copy(part, whole)
            self.partials.append(hash_tile(first + tile.index, elements))
            self._append(data)
        self.flush()  # what was not copied lies in the caller's block

    def _copy(self, part: Values, whole: bool) -> tuple[Values, Values]:
        """A tile in one piece, and its elements without padding, as bytes."""
        start = self._packed * self._nbytes
        data = self._pack[start : start + self._nbytes]
        self._packed += 1
        chunk = data.view(self._stored).reshape(self._tile)
        if whole:
            self._transfer(part, chunk)
            return data, data
        clipped = _scratch.take("edge", part.size * self._stored.itemsize)
        elements = clipped.view(self._stored).reshape(part.shape)
        self._transfer(part, elements)
        chunk.fill(self._padding)
        chunk[tuple(map(slice, part.shape))] = elements
        return data, clipped

    def _transfer(self, part: Values, out: Values) -> None:
        if self._widens:
            widen(part, out)
        else:
            np.copyto(out, part)

    def _append(self, data: Values) -> None:
        self._buffers += (data.data, google_crc32c.value(data).to_bytes(CRC_BYTES, "little"))
        self._chunks += 1
        if self._chunks == self._slots:
            self.flush()

    def flush(self) -> None:
        """Hand what has gathered to the sink."""
        if self._buffers:
            self._sink.write(self._buffers)
        self._buffers = []
        self._packed = self._chunks = 0


def _must_widen(array: ArraySpec) -> bool:
    """Whether elements change size on the way; any other change of dtype is refused."""
    if array.logical_dtype == array.source_dtype:
        return False
    if array.dtype == "float32" and array.source_dtype in {"float16", "bfloat16"}:
        return True
    raise PlanError(
        f"cannot store {array.path!r}: its elements are {array.source_dtype}, and the array is "
        f"{array.dtype}, expected the same or float32 for 16-bit floats.",
        path=array.path,
    )


def _fill(dtype: str) -> Any:
    """Padding of edge chunks: the array's fill value."""
    kind = np.dtype(dtype).kind
    return np.nan if kind == "f" else complex(np.nan, np.nan) if kind == "c" else 0


def encode_index(array: ArraySpec, tiles: tuple[int, ...]) -> list[Chunk]:
    """Index, with its crc32c, of a shard that stores the first ``tiles`` chunks of every dim."""
    nbytes = array.tile_nbytes + CRC_BYTES
    index = np.full((*array.shard_grid, 2), _ABSENT, np.dtype("<u8"))
    stored = index[tuple(map(slice, tiles))]
    stored[..., 0] = nbytes * np.arange(math.prod(tiles), dtype=np.uint64).reshape(tiles)
    stored[..., 1] = nbytes
    data = index.tobytes()
    return [data, google_crc32c.value(data).to_bytes(CRC_BYTES, "little")]
