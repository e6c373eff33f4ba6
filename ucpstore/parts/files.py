"""The files of all participants, as one of them sees them: its own, and what the others staged for it."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ucpstore.errors import CheckpointNotFoundError, CorruptSourceError, Kind, StorageError
from ucpstore.io.base import Files, FileStat, folder_prefix
from ucpstore.io.readonly import ReadOnly

__all__ = ["Extent", "SharedFiles"]

Fetch = Callable[[int, int], bytes]
"""Reads what was staged for a group of objects by a participant."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of another participant's file that can be read here.

    Attributes
    ----------
    name : str
        The file.
    start, stop : int
        Which of its bytes.
    part : (int, int) or bytes
        Group of objects and participant whose staged bytes hold them, or the bytes themselves.
    offset : int
        Where they begin in it.
    """

    name: str
    start: int
    stop: int
    part: tuple[int, int] | bytes
    offset: int = 0


class SharedFiles(ReadOnly):
    """Files of which this participant holds some. Read-only; safe to share between threads.

    Parameters
    ----------
    url : str
        What messages call them.
    own : Files
        Where this participant's files are read from.
    mine : collection of str
        Names of those.
    stats : mapping of str to FileStat
        Of all files, as their holders published them.
    """

    is_local = True  # how reads are joined must be the same for all participants
    options: Mapping[str, Any] = {}

    def __init__(
        self, url: str, own: Files, *, mine: Iterable[str], stats: Mapping[str, FileStat]
    ) -> None:
        self.url = url
        self._own = own
        self._mine = frozenset(mine)
        self._stats = dict(stats)
        self._extents: dict[str, list[Extent]] = {}
        self._starts: dict[str, list[int]] = {}
        self._longest: dict[str, int] = {}
        self._fetch: Fetch | None = None
        self._cache: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._limit = 0
        self._lock = threading.Lock()

    def attach(
        self, extents: Iterable[Extent], *, fetch: Fetch | None = None, memory: int = 0
    ) -> None:
        """Make bytes of other participants' files readable.

        Parameters
        ----------
        extents : iterable of Extent
        fetch : callable, optional
            Reads a staged part whole.
        memory : int, bytes
            Parts that are kept for further reads, besides the last one.
        """
        for extent in extents:
            self._extents.setdefault(extent.name, []).append(extent)
        for name, found in self._extents.items():
            found.sort(key=lambda extent: extent.start)
            self._starts[name] = [extent.start for extent in found]
            self._longest[name] = max(extent.stop - extent.start for extent in found)
        self._fetch, self._limit = fetch, memory

    def folders(self, prefix: str = "") -> list[str]:
        """See `ucpstore.io.base.Files.folders`."""
        prefix = folder_prefix(prefix)
        inside = [name.removeprefix(prefix) for name in self._stats if name.startswith(prefix)]
        return sorted({name.partition("/")[0] for name in inside if "/" in name})

    def list(self, prefix: str = "", *, recursive: bool = True) -> list[FileStat]:
        """See `ucpstore.io.base.Files.list`."""
        prefix = folder_prefix(prefix)
        return [
            stat
            for name, stat in sorted(self._stats.items())
            if name.startswith(prefix) and (recursive or "/" not in name.removeprefix(prefix))
        ]

    def stat(self, name: str) -> FileStat | None:
        """Of an own file as it is now, of another's as it was published."""
        return self._own.stat(name) if name in self._mine else self._stats.get(name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `ucpstore.io.base.Files.read`."""
        if name in self._mine:
            return self._own.read(name, offset, nbytes)
        stop = self._published(name).nbytes
        if nbytes is not None:
            stop = min(stop, offset + nbytes)
        found = bytearray(max(stop - offset, 0))
        self.read_into(name, offset, [memoryview(found)])
        return bytes(found)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `ucpstore.io.base.Files.read_into`."""
        if name in self._mine:
            self._own.read_into(name, offset, buffers)
            return
        size = sum(buffer.nbytes for buffer in buffers)
        if size == 0:
            return
        if offset + size > self._published(name).nbytes:
            raise CorruptSourceError(
                f"{name}: {size} bytes at {offset} are needed of {self._published(name).nbytes}.",
                kind=Kind.TRUNCATED,
            )
        extent = self._find(name, offset, offset + size)
        data = memoryview(extent.part if isinstance(extent.part, bytes) else self._part(extent))
        position = extent.offset + offset - extent.start
        for buffer in buffers:
            buffer[:] = data[position : position + buffer.nbytes]
            position += buffer.nbytes

    # ------------------------------------------------------------------ internal

    def _published(self, name: str) -> FileStat:
        if name not in self._stats:
            raise CheckpointNotFoundError(f"{self.url}: nobody holds {name}.", name=name)
        return self._stats[name]

    def _find(self, name: str, start: int, stop: int) -> Extent:
        """The extent that holds a range."""
        extents, longest = self._extents.get(name, []), self._longest.get(name, 0)
        for index in range(bisect_right(self._starts.get(name, []), start) - 1, -1, -1):
            if extents[index].start + longest < stop:
                break
            if stop <= extents[index].stop:
                return extents[index]
        raise StorageError(
            f"{self.url}: bytes {start} to {stop} of {name} are on another node, which staged others.",
            kind=Kind.UNSUPPORTED,
            hint="Convert from a place that sees the roots of all nodes.",
            name=name,
        )

    def _part(self, extent: Extent) -> bytes:
        """A staged part; the last ones are kept, since a part is read block by block."""
        if isinstance(extent.part, bytes) or self._fetch is None:
            raise StorageError(f"{self.url}: nothing was staged yet.", kind=Kind.UNSUPPORTED)
        with self._lock:
            if extent.part in self._cache:
                self._cache.move_to_end(extent.part)
                return self._cache[extent.part]
        data = self._fetch(*extent.part)
        with self._lock:
            self._cache[extent.part] = data
            while len(self._cache) > 1 and sum(map(len, self._cache.values())) > self._limit:
                self._cache.popitem(last=False)
        return data

    def _refuse(self, name: str) -> NoReturn:
        raise StorageError(
            f"cannot write {name} to {self.url}: it is only read from.", kind=Kind.UNSUPPORTED
        )
