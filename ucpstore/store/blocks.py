"""Reads of arrays in local files (or in memory), without TensorStore and without mapping a file.

The bytes are those of `ucpstore.store.encoder`. A large read is cut into blocks of neighbouring tiles,
which a few threads share. A block is read by one call per contiguous run of inner chunks: into a small
buffer that stays in the processor's cache, or straight into the caller's memory where a tile lies there
in one piece. Every chunk's crc32c is checked before its elements are copied.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import local
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from ucpstore.contracts import Arrays
from ucpstore.errors import CheckpointNotFoundError, CorruptSourceError, StorageError, UcpStoreError
from ucpstore.io.base import Files
from ucpstore.layout.region import Region
from ucpstore.store.arrays import CRC_BYTES, INDEX_ENTRY_BYTES, ArraySpec
from ucpstore.store.damage import damaged_objects, locate, lost_objects
from ucpstore.store.sharing import share_work

__all__ = ["BlockReader"]

_BLOCK_BYTES = 2 << 20
"""Bytes of tiles that are read at once, and of a thread's buffer. With smaller ones the interpreter lock
is passed on too often, with larger ones the processor's cache is too small."""

_SHARE_BYTES = 2 << 20  # of a read, for every thread
_ALIGNMENT = 64  # of tiles in the buffer
_CACHED_INDEXES = 256
_CACHED_CHUNKS = 1 << 14  # of an index that is cached, at most: 128 KiB
_ABSENT = (1 << 64) - 1

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Offsets = np.ndarray[Any, np.dtype[np.int64]]


class _Span(NamedTuple):
    """Along one dim: neighbouring tiles, of which a region has the same part."""

    position: int  # of the first tile, in the object's grid
    tiles: int  # more than one only where the region has all of them
    inside: slice  # of each tile
    outside: slice  # of the region


Block = tuple[_Span, ...]


class _DamageError(Exception):
    """An object is not as it was written."""

    def __init__(self, detail: str, *, lost: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.lost = lost


class _Buffer(local):
    """Memory of one thread, reused from block to block."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        if nbytes > _BLOCK_BYTES:
            return np.empty(nbytes, np.uint8)
        if not self._bytes.size:
            self._bytes = np.empty(_BLOCK_BYTES, np.uint8)
        return self._bytes[:nbytes]


_buffer = _Buffer()


class BlockReader:
    """Reads boxes of stored arrays. Safe between threads and in forked children.

    Parameters
    ----------
    files : Files
        The checkpoint's folder. Its objects never change, so the indexes of shards are kept.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._offsets = functools.partial(_read_offsets, files)
        self._kept_offsets = functools.lru_cache(_CACHED_INDEXES)(self._offsets)

    def read(
        self, array: ArraySpec, region: Region, out: Arrays, *, what: str, **context: Any
    ) -> None:
        """Fill ``out``: shape ``region.sizes``, stored dtype, any strides.

        Raises
        ------
        IntegrityError
            An object or a chunk of it is lost (``LOST_OBJECT``) or damaged (``CHECKSUM``).
        StorageError
            Storage refused or failed the read.
        """
        job = _Job(self._files, array, region, out, what, context)
        blocks = (block for index in array.objects_in(region) for block in self._blocks(job, index))
        threads = max(1, region.volume * out.itemsize // _SHARE_BYTES)
        share_work(job.read, blocks, threads=threads)

    def _blocks(self, job: _Job, index: int) -> Iterator[tuple[str, Offsets, Block]]:
        """Name of an object, where its chunks lie, and one of its blocks after the other."""
        array, region = job.array, job.region
        key, whole = array.object_key(index), array.object_region(index)
        tiles = array.object_tiles(index)
        grid = array.shard_grid if array.sharded else None
        keep = array.sharded and math.prod(tiles) <= _CACHED_CHUNKS
        read = self._kept_offsets if keep else self._offsets
        try:
            offsets = read(key, tiles, grid, array.tile_nbytes + CRC_BYTES)
        except (_DamageError, UcpStoreError) as error:
            raise job.error(error, whole.intersect(region) or whole, key) from error
        limit = max(1, _BLOCK_BYTES // _slot(array.tile_nbytes))
        for block in itertools.product(*_spans(region, whole, array.tile, limit)):
            yield key, offsets, block


@dataclass(frozen=True, slots=True)
class _Job:
    """One read, as all its threads see it."""

    files: Files
    array: ArraySpec
    region: Region
    out: Arrays
    what: str
    context: Mapping[str, Any]

    def read(self, work: tuple[str, Offsets, Block]) -> None:
        """Fill one block's part of ``out``."""
        key, offsets, block = work
        try:
            self._read(key, offsets, block)
        except (_DamageError, UcpStoreError) as error:
            starts = tuple(span.outside.start for span in block)
            stops = tuple(span.outside.stop for span in block)
            box = Region(starts, tuple(b - a for a, b in zip(starts, stops, strict=True)))
            raise self.error(error, box.shift(self.region.offsets), key) from error

    def _read(self, key: str, offsets: Offsets, block: Block) -> None:
        nbytes, tile, ndim = self.array.tile_nbytes, self.array.tile, len(block)
        slot = _slot(nbytes)
        grid = tuple([span.tiles for span in block])
        insides = [span.inside for span in block]
        where = tuple([slice(span.position, span.position + span.tiles) for span in block])
        places = offsets[where].ravel().tolist()
        # The block's part of ``out`` with the axes of the grid before those of a tile.
        sizes = [inside.stop - inside.start for inside in insides]
        pairs = [n for pair in zip(grid, sizes, strict=True) for n in pair]
        part = self.out[(*[span.outside for span in block], ...)].reshape(pairs)
        part = part.transpose((*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)))
        first = part[(*[0] * ndim, ...)]
        direct = first.shape == tile and first.flags.c_contiguous
        if direct:
            tiles = [part[(*at, ...)].reshape(-1).view(np.uint8) for at in np.ndindex(grid)]
        else:
            buffer = _buffer.take(slot * len(places))
            tiles = [buffer[start : start + nbytes] for start in range(0, buffer.size, slot)]
        self._fill(key, places, tiles)
        if not direct:
            chunks = buffer.reshape(*grid, slot)[..., :nbytes].view(part.dtype)
            np.copyto(part, chunks.reshape(grid + tile)[(*[slice(None)] * ndim, *insides)])

    def _fill(self, key: str, places: list[int], tiles: list[Bytes]) -> None:
        """Read the chunks at ``places`` into ``tiles``, and check them."""
        crcs = np.empty(len(places), "<u4")
        buffers: list[memoryview] = []
        for tile, crc in zip(tiles, crcs.view(np.uint8).reshape(-1, CRC_BYTES), strict=True):
            buffers += (tile.data, crc.data)
        step = tiles[0].size + CRC_BYTES
        first = 0
        for last, place in enumerate(places, 1):
            if last == len(places) or places[last] != place + step:
                self.files.read_into(key, places[first], buffers[2 * first : 2 * last])
                first = last
        for tile, expected in zip(tiles, crcs.tolist(), strict=True):
            found = google_crc32c.value(tile)
            if found != expected:
                raise _DamageError(
                    f"crc32c of an inner chunk is {found:08x}, expected {expected:08x}"
                )

    def error(self, error: Exception, box: Region, key: str) -> UcpStoreError:
        """What to raise for an error at a box of the array."""
        what, context = f"{self.what} {box}", {**self.context, "url": self.files.url}
        if isinstance(error, CheckpointNotFoundError):
            return lost_objects(what, [key], "there is no such object", **context)
        if isinstance(error, CorruptSourceError):
            return damaged_objects(what, [key], error.message.rstrip("."), **context)
        if isinstance(error, _DamageError):
            make = lost_objects if error.lost else damaged_objects
            return make(what, [key], error.detail, **context)
        if isinstance(error, StorageError):
            return StorageError(
                f"{locate(what, [key])}: {error.message}",
                kind=error.kind,
                hint=error.hint,
                retryable=error.retryable,
                **{**error.context, **context},
            )
        raise error


def _slot(nbytes: int) -> int:
    """Bytes that a tile of ``nbytes`` takes in the buffer."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _spans(region: Region, whole: Region, tile: tuple[int, ...], limit: int) -> list[list[_Span]]:
    """Per dim, the tiles of an object that a region touches, in spans of blocks.

    Parameters
    ----------
    region : Region
    whole : Region
        The object's.
    tile : tuple of int
    limit : int
        Number of tiles that a block has at most: whole rows where they fit.
    """
    axes = []
    for dim in reversed(range(len(tile))):
        size, origin, base = tile[dim], whole.offsets[dim], region.offsets[dim]
        start, stop = max(base, origin), min(region.stops[dim], whole.stops[dim])
        spans = []
        while start < stop:
            position, skipped = divmod(start - origin, size)
            count = 1 if skipped else min(limit, max(1, (stop - start) // size))
            end = min(stop, start - skipped + count * size)
            inside = slice(skipped, min(size, end - start + skipped))
            spans.append(_Span(position, count, inside, slice(start - base, end - base)))
            start = end
        axes.append(spans)
        limit = max(1, limit // max(span.tiles for span in spans))
    return axes[::-1]


def _read_offsets(
    files: Files, key: str, tiles: tuple[int, ...], grid: tuple[int, ...] | None, nbytes: int
) -> Offsets:
    """Where an object's chunks lie: the index of a shard (Zarr v3, codec ``sharding_indexed``).

    Nothing of it is taken on trust: every chunk has the size that it must have, lies in the object and
    overlaps no other.

    Parameters
    ----------
    tiles : tuple of int
        Chunks along every dim that hold elements of the array.
    grid : tuple of int or None
        Chunks along every dim that the index lists; ``None`` for an object that is one chunk.
    nbytes : int
        Size of a chunk and its checksum.
    """
    stat = files.stat(key)
    if stat is None:
        raise _DamageError("there is no such object", lost=True)
    if grid is None:
        if stat.nbytes != nbytes:
            raise _DamageError(f"the object has {stat.nbytes} bytes, expected {nbytes}")
        return np.zeros(tiles, np.int64)
    size = math.prod(grid) * INDEX_ENTRY_BYTES
    end = stat.nbytes - size - CRC_BYTES
    if end < 0:
        raise _DamageError(
            f"the object has {stat.nbytes} bytes, expected more than the {size + CRC_BYTES} of its index"
        )
    data = files.read(key, end, size + CRC_BYTES)
    index, crc = data[:size], data[size:]
    if len(crc) != CRC_BYTES or google_crc32c.value(index) != int.from_bytes(crc, "little"):
        raise _DamageError("crc32c of the shard's index differs from the stored one")
    entries = np.frombuffer(index, "<u8").reshape(*grid, 2)[tuple(map(slice, tiles))]
    offsets, sizes = entries[..., 0], entries[..., 1]
    if (entries == _ABSENT).all(-1).any():
        raise _DamageError("the shard's index lists an inner chunk as absent", lost=True)
    ordered = np.sort(offsets, axis=None)
    if (
        (sizes != nbytes).any()
        or int(ordered[-1]) + nbytes > end
        or (np.diff(ordered) < nbytes).any()
    ):
        raise _DamageError(
            f"the shard's index lists chunks that are not {nbytes} bytes of their own"
        )
    return offsets.astype(np.int64)
