"""Byte objects in the memory of this process: ``memory://``."""

from __future__ import annotations

import builtins
import io
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from ucpstore.io.base import FileStat
from ucpstore.io.fsspecerrors import fsspec_errors
from ucpstore.io.objects import ObjectFiles
from ucpstore.io.traffic import count_read

__all__ = ["MemoryFiles"]

_LOCK = threading.RLock()  # fsspec iterates over one dict for all, without a lock of its own


class MemoryFiles(ObjectFiles):
    """Objects of the process-wide ``memory://`` file system of fsspec."""

    def create(self, name: str, data: bytes) -> bool:
        """See `ucpstore.io.base.Files.create`: exclusive among the threads of this process."""
        path = self._path(name)
        with fsspec_errors("create", self._show(name)), _LOCK:
            if self._filesystem().isfile(path):
                return False
            self._filesystem().pipe_file(path, data)
            return True

    def delete(self, names: Iterable[str]) -> None:
        """See `ucpstore.io.base.Files.delete`."""
        filesystem = self._filesystem()
        for name in names:
            with _LOCK:
                filesystem.store.pop(filesystem._strip_protocol(self._path(name)), None)

    def _filesystem(self) -> Any:
        def make() -> Any:
            from fsspec.implementations.memory import MemoryFileSystem

            return MemoryFileSystem()

        return self._client("fsspec", make)

    def _entries(
        self, prefix: str, *, recursive: bool
    ) -> tuple[str, builtins.list[Mapping[str, Any]]]:
        with _LOCK:
            return super()._entries(prefix, recursive=recursive)

    def _info(self, path: str) -> Mapping[str, Any]:
        with _LOCK:
            found: Mapping[str, Any] = self._filesystem().info(path)
        if found["type"] == "file":
            return {**found, "created": found["created"].timestamp()}
        return found

    def _token(self, entry: Mapping[str, Any]) -> str:
        return f"{entry['created']:.6f}"

    def _get(self, name: str, offset: int, nbytes: int | None) -> bytes | None:
        end = None if nbytes is None else offset + nbytes
        try:
            data: bytes = self._filesystem().cat_file(self._path(name), start=offset, end=end)
        except FileNotFoundError:
            return None
        count_read(len(data))
        return data if nbytes is None or len(data) == nbytes else None

    def _put(self, name: str, content: io.BytesIO) -> FileStat:
        path = self._path(name)
        with fsspec_errors("write", self._show(name)), _LOCK:
            self._filesystem().pipe_file(path, content.getvalue())
            content.close()
            entry = self._info(path)
        return FileStat(name, entry["size"], self._token(entry))
