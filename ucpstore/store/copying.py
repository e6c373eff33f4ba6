"""`CopyTarget`: a committed checkpoint becomes the same checkpoint elsewhere, object by object.

Names and bytes are those of the source, and so is the root document, which is written last. The steps are
those of every target (`ucpstore.commit`): claims, done records and a seal at the destination, so that a
copy may be killed, run again, spread over workers and raced.

Nothing damaged is passed on: while an object streams through, the crc32c of every chunk is checked, the
index of a shard is compared with the one that it must have, and the recorded digest of every array is
computed anew before the commit. Metadata of nodes is written from the root document, whose checksum
covers it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from ucpstore.contracts import Record, Source, Task
from ucpstore.digest import hash_tile, merge
from ucpstore.errors import (
    AlreadyExistsError,
    CheckpointNotFoundError,
    CorruptSourceError,
    IntegrityError,
    Kind,
    UnsupportedSourceError,
    listing,
)
from ucpstore.io.base import Files, Sink
from ucpstore.io.rate import RateLimit
from ucpstore.io.serverside import can_copy_inside, copy_inside
from ucpstore.layout.tiles import iter_tiles
from ucpstore.store.arrays import CRC_BYTES, ArraySpec
from ucpstore.store.damage import damaged_objects, lost_objects
from ucpstore.store.documents import ROOT, RootAttributes, load_json, root_attributes
from ucpstore.store.encoder import encode_index
from ucpstore.store.hierarchy import check_root, children_of_root
from ucpstore.store.protocol import CommitLog, read_root
from ucpstore.store.source import StoreSource
from ucpstore.store.target import ZarrTarget

__all__ = ["CopyTarget", "stream_object"]

_LOCAL_RANGE = 1 << 20
"""Bytes that are read at once from a file: they stay in the processor's cache until they are written."""
_REMOTE_RANGE = 160 << 20
"""Bytes of a ranged GET: objects of the usual size are read by one."""
_LIMITED_RANGE = 4 << 20
"""The same under a rate limit, so that bytes trickle instead of coming in bursts."""
_RANGE_COPIES = 2  # TensorStore's and ours

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CopyTarget(ZarrTarget):
    """A committed checkpoint to be written again. Picklable; `write` is safe to call from many threads.

    Parameters
    ----------
    files : Files
        The destination.
    origin : StoreSource
        What is copied.
    rate : RateLimit, optional
        For the bytes that pass through this process.
    server_side : bool
        Let the object store copy inside itself where it can.
    check : bool
        Read back what the server copied. Without, its word is taken where the ETags are equal; what
        streams through this process is checked in any case.

    Raises
    ------
    UnsupportedSourceError
        Arrays are encoded in another way than ours.
    """

    _log: _CopyLog

    def __init__(
        self,
        files: Files,
        origin: StoreSource,
        *,
        rate: RateLimit | None = None,
        server_side: bool = True,
        check: bool = True,
    ) -> None:
        arrays = origin.array_specs()
        _require_own_encoding(origin, arrays)
        super().__init__(files, arrays, source=origin, step=origin.attributes.step)
        self._origin = origin.storage
        self._rate = rate
        self._inside = server_side and can_copy_inside(origin.storage, files)
        self._trusts = self._inside and not check
        self._root = _same_root(origin)
        self._log = _CopyLog(files, origin.attributes)
        found = {array.path: array.attributes.get("digest") for array in arrays}
        self._expected = {} if self._trusts else {p: d for p, d in found.items() if d is not None}

    def __repr__(self) -> str:
        return f"<CopyTarget {self._origin.url!r} -> {self.url!r}: {self._starts[-1]} objects>"

    @property
    def digest(self) -> str:
        """Digest of the plan: of the root document alone, so that equal checkpoints at different URLs
        are the same copy. A copy that trusts the server keeps records of its own.
        """
        content = hashlib.sha256(b"trusted copy\0" if self._trusts else b"copy\0")
        content.update(self._root)
        return f"sha256:{content.hexdigest()}"

    def document(self) -> Mapping[str, Any]:
        """See `ucpstore.contracts.Target.document`."""
        return {"target": "copy", "digest": self.digest}

    def task_memory(self) -> int:
        """Bytes that one `write` in flight needs: a range, and at a remote destination the object."""
        largest = max((a.object_nbytes(0) for a in self._arrays if a.num_objects), default=0)
        needed = 2 * max((a.tile_nbytes for a in self._arrays), default=0)
        if self._origin.is_local:
            needed += _LOCAL_RANGE
        else:
            needed += _RANGE_COPIES * min(largest, _REMOTE_RANGE)
        if not self.is_local and not self._inside:
            needed += super().task_memory()
        return needed

    def _encode(self, task: Task, source: Source, sink: Sink) -> int:
        array, index = self._locate(task.index)
        return stream_object(self._origin, array, index, sink, rate=self._rate)

    def _write(self, task: Task, source: Source) -> Record:
        if not self._inside:
            return super()._write(task, source)
        self._log.check()
        try:
            stat, same = copy_inside(self._origin, self._files, task.key)
        except CheckpointNotFoundError as error:
            raise lost_objects(f"cannot copy {self._origin.url}", [task.key], str(error)) from error
        array, index = self._locate(task.index)
        if stat.nbytes != task.nbytes:
            raise damaged_objects(
                f"cannot copy {self._origin.url}",
                [task.key],
                f"found {stat.nbytes} bytes, expected {task.nbytes}",
            )
        if same and self._trusts:
            return Record(task.index, stat.nbytes, stat.token, 0)
        digest = stream_object(self._files, array, index, _Nowhere(), rate=self._rate)
        return Record(task.index, stat.nbytes, stat.token, 0 if self._trusts else digest)

    def _reveal(self, records: Mapping[int, Record]) -> None:
        self._write_children(list(children_of_root(load_json(self._root))))
        self._log.write_root(self._root)


class _CopyLog(CommitLog):
    """A commit is the root of the source, whatever plan wrote that."""

    def __init__(self, files: Files, origin: RootAttributes) -> None:
        super().__init__(files)
        self._origin = origin

    def _committed(self, digest: str) -> bool:
        attributes = self._attributes()
        if attributes is None:
            return super()._committed(digest)
        if attributes == self._origin:
            return True
        raise AlreadyExistsError(
            f"{self._files.url} holds another committed checkpoint: found {attributes.plan_digest}, expected"
            f" {self._origin.plan_digest}.",
            hint="Choose another destination: a checkpoint is never overwritten in place.",
            url=self._files.url,
        )


def _same_root(origin: StoreSource) -> bytes:
    """The bytes of the root document that ``origin`` was opened from."""
    data = read_root(origin.storage)
    name = f"{origin.url}/{ROOT}"
    document = {} if data is None else load_json(data)
    if data is None or root_attributes(document, name) != origin.attributes:
        raise IntegrityError(
            f"{name} changed while it was being opened.", kind=Kind.SOURCE_CHANGED, name=name
        )
    check_root(document, name)
    return data


def _require_own_encoding(origin: StoreSource, arrays: list[ArraySpec]) -> None:
    others = [array.path for array in arrays if not origin.is_own_encoding(array)]
    if others:
        raise UnsupportedSourceError(
            f"cannot copy {origin.url}: {len(others)} arrays are encoded in another way than ucpstore does it, so"
            f" that their objects cannot be checked: {listing(others, cap=3)}.",
            hint="Convert it instead: ucpstore convert SOURCE DEST.",
            url=origin.url,
        )


class _Nowhere:
    """A sink for bytes that are only checked."""

    def write(self, buffers: Any) -> None:
        """Drop them."""


def stream_object(
    files: Files,
    array: ArraySpec,
    index: int,
    sink: Sink | _Nowhere,
    *,
    rate: RateLimit | None = None,
) -> int:
    """Pass a stored object on to ``sink``, checking every byte of it on the way.

    Parameters
    ----------
    files : Files
        Where the object is.
    array : ArraySpec
        In our own encoding.
    index : int
        Object in C order of the grid.
    sink : Sink
        The caller closes or aborts it.
    rate : RateLimit, optional

    Returns
    -------
    int
        Partial digest, as `ucpstore.store.encoder.encode_object` returned it.

    Raises
    ------
    IntegrityError
        The object is lost (``LOST_OBJECT``) or damaged (``CHECKSUM``); nothing of a damaged chunk
        was passed on.
    """
    key, checker = array.object_key(index), _Checker.of(array, index)
    what = f"cannot copy {files.url}"
    try:
        for data in _ranges(files, key, array, index, rate=rate):
            checker.add(data)
            sink.write([data.data])
    except CheckpointNotFoundError as error:
        raise lost_objects(what, [key], "there is no such object") from error
    except (CorruptSourceError, _DamageError) as error:
        raise damaged_objects(what, [key], str(error).rstrip(".")) from error
    return merge(checker.partials)


class _DamageError(Exception):
    """An object is not as it was written."""


class _Scratch(threading.local):
    """The buffer of one thread, reused from object to object."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        if self._bytes.nbytes < nbytes:
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes[:nbytes]


_scratch = _Scratch()


def _ranges(
    files: Files, key: str, array: ArraySpec, index: int, *, rate: RateLimit | None
) -> Iterator[Bytes]:
    """The object's bytes in ranges of whole chunks, the index by itself or after the last of them."""
    chunk, nbytes = array.tile_nbytes + CRC_BYTES, array.object_nbytes(index)
    limit = _LOCAL_RANGE if files.is_local else _REMOTE_RANGE if rate is None else _LIMITED_RANGE
    chunks = math.prod(array.object_tiles(index)) * chunk
    step = max(1, limit // chunk) * chunk
    borders = [*range(0, chunks, step), nbytes]
    if nbytes - borders[-2] > max(limit, chunk):
        borders.insert(-1, chunks)
    for start, stop in itertools.pairwise(borders):
        if rate is not None:
            rate.take(stop - start)
        if files.is_local:
            data = _scratch.take(stop - start)
            files.read_into(key, start, [data.data])
        else:
            data = np.frombuffer(files.read(key, start, stop - start), np.uint8)
            if data.nbytes != stop - start:
                raise _DamageError(
                    f"it ends at byte {start + data.nbytes}, expected {nbytes} bytes"
                )
        yield data


@dataclass(slots=True)
class _Checker:
    """Checks the bytes of one object from front to back, in pieces of whole chunks."""

    array: ArraySpec
    tiles: Iterator[tuple[int, Any]]
    left: int
    index: bytes
    partials: list[int]

    @classmethod
    def of(cls, array: ArraySpec, index: int) -> _Checker:
        tiles = array.object_tiles(index)
        encoded = b"".join(map(bytes, encode_index(array, tiles))) if array.sharded else b""
        boxes = iter_tiles(array.shape, array.tile, array.object_region(index))
        return cls(array, boxes, math.prod(tiles), encoded, [])

    def add(self, data: Bytes) -> None:
        """Check the next bytes.

        Raises
        ------
        _DamageError
        """
        nbytes = self.array.tile_nbytes
        chunk = nbytes + CRC_BYTES
        count = min(self.left, data.nbytes // chunk)
        for start in range(0, count * chunk, chunk):
            self._add_chunk(data[start : start + nbytes], data[start + nbytes : start + chunk])
        self.left -= count
        if self.left == 0 and (rest := data[count * chunk :].tobytes()) != self.index:
            if count and not rest:
                return  # the index comes by itself
            raise _DamageError("the index of the shard is not the one that was written")

    def _add_chunk(self, data: Bytes, crc: Bytes) -> None:
        tile, box = next(self.tiles)
        if google_crc32c.value(data) != int.from_bytes(crc.tobytes(), "little"):
            raise _DamageError(f"the crc32c of the chunk at {box.offsets} differs")
        if box.sizes != self.array.tile:
            whole = data.view(self.array.dtype).reshape(self.array.tile)
            data = (
                np.ascontiguousarray(whole[tuple(map(slice, box.sizes))]).reshape(-1).view(np.uint8)
            )
        self.partials.append(hash_tile(tile, data))
