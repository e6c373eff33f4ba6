"""What every storage backend offers: named byte objects under one URL prefix.

Nothing here knows tensors. Names are relative, ``/``-separated and never leave the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ucpstore.errors import Kind, StorageError

__all__ = ["FileStat", "Files", "Folder", "Sink", "check_name", "folder_prefix"]


@dataclass(frozen=True, slots=True)
class FileStat:
    """One object.

    Attributes
    ----------
    name : str
        Relative to the prefix.
    nbytes : int
        Size in bytes.
    token : str
        Changes whenever the content is replaced: mtime in nanoseconds and inode locally, ETag or
        generation on object stores.
    modified : str
        The part of ``token`` that is the same on every host that sees the file, and in a copy that keeps
        times; empty where that is the token itself.
    changed_at : float, optional
        When the object was last written, in seconds since 1970 by the storage's own clock, where it tells.
    """

    name: str
    nbytes: int
    token: str
    modified: str = ""
    changed_at: float | None = field(default=None, compare=False)


class Sink(Protocol):
    """One object that is being written from front to back; invisible until ``close``."""

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        """Append ``buffers``. They may be reused as soon as this returns."""

    def close(self) -> FileStat:
        """Make the object visible under its name, whole. Replaces an older object."""

    def abort(self) -> None:
        """Drop everything; the name is left as it was."""


class Files(Protocol):
    """Byte objects under one URL prefix. Instances are picklable and safe to share between threads.

    All methods raise `ucpstore.errors.StorageError` (``retryable`` set), and
    `ucpstore.errors.CheckpointNotFoundError` where an object that is read does not exist.
    """

    url: str
    is_local: bool
    options: Mapping[str, Any]

    def folders(self, prefix: str = "") -> list[str]:
        """Names of the direct sub-folders of ``prefix``, sorted."""

    def list(self, prefix: str = "", *, recursive: bool = True) -> list[FileStat]:
        """Objects whose name starts with the folder ``prefix``, sorted by name.

        A missing folder is an empty listing.
        """

    def stat(self, name: str) -> FileStat | None:
        """The object's stat, or ``None`` where it does not exist."""

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """A byte range (to the end by default). Shorter only where the object ends."""

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` one after another from the contiguous range that starts at ``offset``.

        Raises `ucpstore.errors.CorruptSourceError` where the object ends before that.
        """

    def write(self, name: str, data: bytes) -> FileStat:
        """Write a whole object atomically and durably, replacing an older one."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a whole object if and only if the name is free.

        Atomic among racing writers, and durable. Returns whether this call created it.
        """

    def creates_exclusively(self) -> bool:
        """Whether `create` keeps its promise here: an object store is asked, with objects of its own."""

    def sink(self, name: str, nbytes: int, *, guard: Callable[[], object] | None = None) -> Sink:
        """Start writing an object of ``nbytes`` bytes; durable only after `sync`.

        On object stores ``guard`` is called before an object with other bytes is replaced, and may
        raise. An object that appears between the guard and the request is not replaced unseen.
        """

    def sync(self) -> None:
        """Make everything that finished sinks wrote durable."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; missing ones are fine."""

    def free_space(self) -> tuple[int, int] | None:
        """Bytes and inodes that may still be used; ``None`` where storage has no such limit."""


class Folder(Files, Protocol):
    """Files in a real folder, which a loader other than ours may look into."""

    def move(self, name: str, to: str) -> bool:
        """Give a file, or a folder with all that is in it, another name; at once and durably.

        Returns
        -------
        bool
            False where nothing was moved: ``name`` is not there, or ``to`` is a folder that holds
            something.
        """


def check_name(name: str) -> str:
    """Refuse a name that is absolute, empty or could leave the prefix."""
    if "\0" in name or "\\" in name or {"", ".", ".."} & set(name.split("/")):
        raise StorageError(
            f"object name {name!r} is not a plain relative path", kind=Kind.NAME, name=name
        )
    return name


def folder_prefix(prefix: str) -> str:
    """``prefix`` with one ``/`` at the end; empty for the root. It may not leave the root."""
    prefix = prefix.rstrip("/")
    return check_name(prefix) + "/" if prefix else ""
