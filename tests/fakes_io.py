"""Storage that counts what is asked of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ucpstore.io.base import Files, FileStat, Sink

__all__ = ["CountingFiles"]


class CountingFiles:
    """Passes everything on to ``files`` and counts calls and bytes by operation.

    Attributes
    ----------
    calls : Counter
        Calls by method name; ``close`` are the finished sinks: one put each on object stores.
    nbytes : Counter
        Bytes by method name: those read by ``read`` and ``read_into``, those written by ``write``,
        ``create`` and ``close``.
    names : mapping of str to list of str
        Object names by method name, in order.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self.url = files.url
        self.is_local = files.is_local
        self.options: Mapping[str, Any] = files.options
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.names: dict[str, list[str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["files"])  # type: ignore[misc]

    @property
    def reads(self) -> int:
        """Calls that read content."""
        return self.calls["read"] + self.calls["read_into"]

    @property
    def bytes_read(self) -> int:
        return self.nbytes["read"] + self.nbytes["read_into"]

    @property
    def puts(self) -> int:
        """Objects that were written."""
        return self.calls["write"] + self.calls["create"] + self.calls["close"]

    def _count(self, operation: str, name: str, nbytes: int = 0) -> None:
        with self._lock:
            self.calls[operation] += 1
            self.nbytes[operation] += nbytes
            self.names.setdefault(operation, []).append(name)

    def folders(self, prefix: str = "") -> list[str]:
        self._count("folders", prefix)
        return self.files.folders(prefix)

    def list(self, prefix: str = "", *, recursive: bool = True) -> list[FileStat]:
        self._count("list", prefix)
        return self.files.list(prefix, recursive=recursive)

    def stat(self, name: str) -> FileStat | None:
        self._count("stat", name)
        return self.files.stat(name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = self.files.read(name, offset, nbytes)
        self._count("read", name, len(data))
        return data

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self.files.read_into(name, offset, buffers)
        self._count("read_into", name, sum(buffer.nbytes for buffer in buffers))

    def write(self, name: str, data: bytes) -> FileStat:
        self._count("write", name, len(data))
        return self.files.write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self._count("create", name, len(data))
        return self.files.create(name, data)

    def creates_exclusively(self) -> bool:
        return self.files.creates_exclusively()

    def sink(self, name: str, nbytes: int, **keywords: Any) -> Sink:
        self._count("sink", name)
        return _CountingSink(self, name, self.files.sink(name, nbytes, **keywords))

    def sync(self) -> None:
        self._count("sync", "")
        self.files.sync()

    def delete(self, names: Iterable[str]) -> None:
        for name in (names := [*names]):
            self._count("delete", name)
        self.files.delete(names)

    def free_space(self) -> tuple[int, int] | None:
        return self.files.free_space()


class _CountingSink:
    def __init__(self, counter: CountingFiles, name: str, sink: Sink) -> None:
        self._counter = counter
        self._name = name
        self._sink = sink

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        self._sink.write(buffers)

    def close(self) -> FileStat:
        stat = self._sink.close()
        self._counter._count("close", self._name, stat.nbytes)
        return stat

    def abort(self) -> None:
        self._counter._count("abort", self._name)
        self._sink.abort()
