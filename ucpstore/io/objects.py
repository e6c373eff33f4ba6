"""What buckets and memory have in common: whole objects, listed through fsspec."""

from __future__ import annotations

import builtins
import datetime
import io
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ucpstore.errors import CheckpointNotFoundError, CorruptSourceError, Kind, StorageError
from ucpstore.io.base import FileStat, check_name, folder_prefix
from ucpstore.io.fsspecerrors import fsspec_errors
from ucpstore.io.retries import retried
from ucpstore.io.urls import Location

__all__ = ["MAX_OBJECT_BYTES", "ObjectFiles", "ObjectSink"]

MAX_OBJECT_BYTES = 5 << 30
"""What S3 takes in one PUT."""

Buffer = bytes | bytearray | memoryview


class ObjectFiles(ABC):
    """`ucpstore.io.base.Files` over an fsspec file system.

    Clients are made on first use in every process. A pickle carries the storage options, secrets
    included, since a worker needs them; ``repr`` and errors show the URL only.

    Parameters
    ----------
    location : Location
    options : mapping
        Checked storage options.
    """

    is_local = False

    def __init__(self, location: Location, options: Mapping[str, Any]) -> None:
        self.location = location
        self.url = location.url
        self.options: Mapping[str, Any] = dict(options)
        self._clients: dict[tuple[str, int], Any] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["location"], state["options"])  # type: ignore[misc]

    # ------------------------------------------------------------------ look

    def folders(self, prefix: str = "") -> list[str]:
        """See `ucpstore.io.base.Files.folders`."""
        base, entries = self._entries(prefix, recursive=False)
        found = {entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"}
        return sorted(name.removeprefix(base) for name in found if name.startswith(base))

    def list(self, prefix: str = "", *, recursive: bool = True) -> list[FileStat]:
        """See `ucpstore.io.base.Files.list`. Keys that end in ``/`` are not objects."""
        base, entries = self._entries(prefix, recursive=recursive)
        inner = folder_prefix(prefix)
        return sorted(
            (
                self._file_stat(inner + entry["name"].removeprefix(base), entry)
                for entry in entries
                if entry["type"] == "file"
                and entry["name"].startswith(base)
                and entry["name"] != base
                and not entry["name"].endswith("/")
            ),
            key=lambda stat: stat.name,
        )

    def stat(self, name: str) -> FileStat | None:
        """See `ucpstore.io.base.Files.stat`."""
        path = self._path(name)

        def look() -> Mapping[str, Any] | None:
            with fsspec_errors("look at", self._show(name)):
                try:
                    return self._info(path)
                except FileNotFoundError:
                    return None

        entry = retried(look)
        if entry is None or entry["type"] != "file":
            return None
        return self._file_stat(name, entry)

    def free_space(self) -> tuple[int, int] | None:
        """``None``: a bucket has no limit."""
        return None

    # ------------------------------------------------------------------ read

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `ucpstore.io.base.Files.read`. One request, unless the object ends early."""
        check_name(name)
        if nbytes != 0:
            data = self._get(name, offset, nbytes)
            if data is not None:
                return data
        found = self.stat(name)
        if found is None:
            raise CheckpointNotFoundError(
                f"cannot read {self._show(name)!r}: there is no such object.",
                url=self.url,
                name=name,
            )
        if nbytes == 0 or offset >= found.nbytes:
            return b""
        return self._get(name, offset, found.nbytes - offset) or b""

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `ucpstore.io.base.Files.read_into`. Holds the range twice while it is received."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if buffer.nbytes]
        expected = sum(view.nbytes for view in views)
        data = memoryview(self.read(name, offset, expected))
        if data.nbytes != expected:
            raise CorruptSourceError(
                f"{self._show(name)!r} is truncated: found {data.nbytes} bytes from offset"
                f" {offset}, expected {expected} bytes.",
                kind=Kind.TRUNCATED,
                url=self.url,
                name=name,
                offset=offset,
                expected=expected,
            )
        done = 0
        for view in views:
            view[:] = data[done : done + view.nbytes]
            done += view.nbytes

    # ----------------------------------------------------------------- write

    def write(self, name: str, data: bytes) -> FileStat:
        """See `ucpstore.io.base.Files.write`."""
        check_name(name)
        return self._put(name, io.BytesIO(data))

    def creates_exclusively(self) -> bool:
        """See `ucpstore.io.base.Files.creates_exclusively`."""
        return True

    def sink(
        self, name: str, nbytes: int, *, guard: Callable[[], object] | None = None
    ) -> ObjectSink:
        """See `ucpstore.io.base.Files.sink`, and `ObjectSink` for the memory that it needs."""
        check_name(name)
        if nbytes > MAX_OBJECT_BYTES:
            raise StorageError(
                f"cannot write {self._show(name)!r}: found {nbytes} bytes, expected at most"
                f" {MAX_OBJECT_BYTES} bytes in one request.",
                kind=Kind.UNSUPPORTED,
                url=self.url,
                name=name,
            )
        return ObjectSink(self, name, nbytes, guard)

    def sync(self) -> None:  # noqa: B027 (a default, not an oversight)
        """Nothing to do: an object store answers a put when the object is durable."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """See `ucpstore.io.base.Files.create`."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """See `ucpstore.io.base.Files.delete`."""

    # ---------------------------------------------------- what a backend gives

    @abstractmethod
    def _filesystem(self) -> Any:
        """The fsspec file system of this process."""

    @abstractmethod
    def _info(self, path: str) -> Mapping[str, Any]:
        """One object's entry as fsspec has it, by one request."""

    @abstractmethod
    def _token(self, entry: Mapping[str, Any]) -> str:
        """`FileStat.token` from an fsspec entry."""

    @abstractmethod
    def _get(self, name: str, offset: int, nbytes: int | None) -> bytes | None:
        """A range; ``None`` where the object is missing or ends before ``offset + nbytes``."""

    @abstractmethod
    def _put(self, name: str, content: io.BytesIO) -> FileStat:
        """Write a whole object; takes ``content`` over and closes it."""

    def _place(
        self, name: str, content: io.BytesIO, guard: Callable[[], object] | None
    ) -> FileStat:
        """`_put` of a sink; see `ucpstore.io.base.Files.sink` for ``guard``."""
        if guard is not None:
            guard()
        return self._put(name, content)

    # -------------------------------------------------------------- internal

    def _client(self, kind: str, make: Any) -> Any:
        """A client of this process: event loops and TensorStore's threads do not survive forks."""
        key = kind, os.getpid()
        client = self._clients.get(key)
        if client is None:
            with _Making.lock:
                client = self._clients.get(key)
                if client is None:
                    client = self._clients[key] = make()
        return client

    def _file_stat(self, name: str, entry: Mapping[str, Any]) -> FileStat:
        return FileStat(name, entry["size"], self._token(entry), changed_at=_changed_at(entry))

    def _path(self, name: str) -> str:
        return f"{self.location.path}/{check_name(name)}"

    def _show(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _entries(
        self, prefix: str, *, recursive: bool
    ) -> tuple[str, builtins.list[Mapping[str, Any]]]:
        """Path of a folder as fsspec has it, with a ``/`` at the end, and the entries below."""
        inner = folder_prefix(prefix)
        base = f"{self.location.path}/{inner}".lstrip("/")

        def look() -> builtins.list[Mapping[str, Any]]:
            with fsspec_errors("list", self._show(inner)):
                filesystem = self._filesystem()
                try:
                    if recursive:
                        found = filesystem.find(base.rstrip("/"), detail=True).values()
                    else:
                        found = filesystem.ls(base.rstrip("/"), detail=True, refresh=True)
                except FileNotFoundError:
                    return []
                return [{**entry, "name": entry["name"].lstrip("/")} for entry in found]

        return base, retried(look)


class ObjectSink:
    """One object that is collected in memory and put at `close`.

    Memory: the declared size once, from the start to the end of the put. On GCS three times for the
    moment in which TensorStore takes the put over, then twice.
    """

    def __init__(
        self,
        files: ObjectFiles,
        name: str,
        nbytes: int,
        guard: Callable[[], object] | None = None,
    ) -> None:
        self._files = files
        self._name = name
        self._nbytes = nbytes
        self._guard = guard
        self._written = 0
        # BytesIO adopts the bytes without a copy as long as nobody else refers to them.
        self._content = io.BytesIO(bytes(nbytes))

    def write(self, buffers: Sequence[Buffer]) -> None:
        """See `ucpstore.io.base.Sink.write`."""
        for buffer in buffers:
            self._written += memoryview(buffer).nbytes
            if self._written > self._nbytes:
                raise self._wrong_size()
            self._content.write(buffer)

    def close(self) -> FileStat:
        """See `ucpstore.io.base.Sink.close`.

        Raises
        ------
        StorageError
            Also where fewer or more bytes were written than declared; nothing is put then.
        """
        if self._written != self._nbytes:
            self.abort()
            raise self._wrong_size()
        return self._files._place(self._name, self._content, self._guard)

    def abort(self) -> None:
        """See `ucpstore.io.base.Sink.abort`."""
        self._content.close()

    def _wrong_size(self) -> StorageError:
        return StorageError(
            f"cannot write {self._files._show(self._name)!r}: {self._written} bytes were written,"
            f" expected {self._nbytes} bytes.",
            url=self._files.url,
            name=self._name,
        )


def _changed_at(entry: Mapping[str, Any]) -> float | None:
    """Seconds since 1970, from what s3fs, gcsfs and fsspec's memory call it."""
    found = entry.get("LastModified") or entry.get("mtime") or entry.get("created")
    if isinstance(found, datetime.datetime):
        return found.timestamp()
    return float(found) if isinstance(found, int | float) else None


class _Making:
    """One client at a time is made: eight threads that start together need one, not eight."""

    lock = threading.RLock()


def _forget_lock() -> None:
    _Making.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)
