"""Ranged reads of one file."""

from __future__ import annotations

from ucpstore.errors import CorruptSourceError, Kind
from ucpstore.io.base import Files, FileStat

__all__ = ["FileRanges"]


class FileRanges:
    """Ranges of one file, of which the first and last block are read once and kept.

    Parameters
    ----------
    files : Files
    stat : FileStat
    block : int, bytes
        How much of the start and the end is read ahead.
    """

    def __init__(self, files: Files, stat: FileStat, block: int) -> None:
        self.stat = stat
        self.is_local = files.is_local
        self._files = files
        self._kept: list[tuple[int, bytes]] = []
        self._block = block

    def keep_head(self) -> bytes:
        """The first block of the file."""
        return self._keep(0)

    def keep_tail(self) -> None:
        """Read the last block of the file, unless the first one covers it."""
        start = max(0, self.stat.nbytes - self._block)
        if not any(at <= start and at + len(data) >= self.stat.nbytes for at, data in self._kept):
            self._keep(start)

    def _keep(self, start: int) -> bytes:
        data = self.read(start, min(self._block, self.stat.nbytes - start))
        self._kept.append((start, data))
        return data

    def read(self, start: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``start``.

        Raises
        ------
        CorruptSourceError
            The file ends before that.
        """
        for at, data in self._kept:
            if at <= start and start + nbytes <= at + len(data):
                return data[start - at : start - at + nbytes]
        if start < 0 or nbytes < 0 or start + nbytes > self.stat.nbytes:
            raise self._truncated(start, nbytes, self.stat.nbytes)
        data = self._start_of(start)
        if missing := nbytes - len(data):
            data += self._files.read(self.stat.name, start + len(data), missing)
        if len(data) != nbytes:
            raise self._truncated(start, nbytes, start + len(data))
        return data

    def _start_of(self, start: int) -> bytes:
        """What is kept of a range that goes on beyond it."""
        for at, data in self._kept:
            if at <= start < at + len(data):
                return data[start - at :]
        return b""

    def _truncated(self, start: int, nbytes: int, end: int) -> CorruptSourceError:
        name = self.stat.name
        return CorruptSourceError(
            f"{name} is truncated: bytes {start} to {start + nbytes} were expected, but it ends at {end}.",
            kind=Kind.TRUNCATED,
            hint="It was probably not written to its end: use an older checkpoint, or copy it again.",
            file=name,
        )
