"""Byte objects as files below one local (or network-mounted) folder."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ucpstore.errors import CorruptSourceError, Kind, StorageError
from ucpstore.io.base import FileStat, check_name, folder_prefix
from ucpstore.io.descriptors import Descriptors, open_file
from ucpstore.io.oserrors import os_errors, translate_os_error
from ucpstore.io.syscalls import has_syncfs, start_writeback, sync_filesystem
from ucpstore.io.traffic import count_read

__all__ = ["LocalFiles", "LocalSink"]

TEMPORARY = ".ucpstore/tmp"
"""Where unfinished objects lie; listed only when it is asked for by this very prefix."""

_IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))
_CHECKED_NAMES = 4096
_ABANDONED_SECONDS = 3600  # a file that nobody has written to for that long has lost its writer
_WRITEBACK_STEP = 8 << 20  # bytes between two hints to start write-back
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST}

Buffer = bytes | bytearray | memoryview


class LocalFiles:
    """`ucpstore.io.base.Files` over a folder.

    Every object becomes visible by one rename (or link) of a complete file, so that a process that
    dies leaves at most an unlisted file in ``.ucpstore/tmp``. Symbolic links are followed, since
    checkpoints are often assembled from them; names cannot leave the folder by themselves.

    Parameters
    ----------
    root : str
        Folder; it is created by the first write.

    Attributes
    ----------
    url : str
        Absolute path of the folder.
    """

    is_local = True

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))
        self.url = self.root
        self.options: Mapping[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self._descriptors = Descriptors()
        self._checked: dict[str, str] = {}  # paths of names that were found to be harmless
        self._made: set[str] = set()  # folders known to exist
        self._durable: set[str] = set()  # ... whose entry in their parent is on the disk
        self._dirty: set[str] = set()  # folders with new entries, where syncfs is not available
        self._root_fd: _RootDescriptor | None = None

    def __repr__(self) -> str:
        return f"LocalFiles({self.root!r})"

    def __getstate__(self) -> dict[str, str]:
        return {"root": self.root}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.root = self.url = state["root"]
        self.options = {}
        self._reset()

    # ------------------------------------------------------------------ look

    def folders(self, prefix: str = "") -> list[str]:
        """See `ucpstore.io.base.Files.folders`."""
        prefix = folder_prefix(prefix)
        with os_errors("list", self._show(prefix)):
            entries = _scan(os.path.join(self.root, prefix))
            return sorted(
                e.name
                for e in entries
                if _is_folder_entry(e) and not _is_temporary(prefix + e.name)
            )

    def list(self, prefix: str = "", *, recursive: bool = True) -> list[FileStat]:
        """See `ucpstore.io.base.Files.list`. Dangling links are not objects."""
        prefix = folder_prefix(prefix)
        with os_errors("list", self._show(prefix)):
            found = [
                _file_stat(name, stat) for name, stat in _walk(self.root, prefix, recursive, ())
            ]
        return sorted(found, key=lambda stat: stat.name)

    def stat(self, name: str) -> FileStat | None:
        """See `ucpstore.io.base.Files.stat`."""
        path = self._path(name)
        with os_errors("look at", path):
            try:
                stat = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return None if _is_folder(stat) else _file_stat(name, stat)

    def free_space(self) -> tuple[int, int] | None:
        """Bytes and inodes that an unprivileged process may still use on the file system."""
        folder = self.root
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        with os_errors("look at", folder):
            found = os.statvfs(folder)
        # btrfs and others have no inode table and report none
        inodes = found.f_favail if found.f_files else sys.maxsize
        return found.f_bavail * found.f_frsize, inodes

    # ------------------------------------------------------------------ read

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `ucpstore.io.base.Files.read`."""
        path = self._path(name)
        with os_errors("read", path):
            entry = self._descriptors.take(path)
            try:
                wanted = max(0, os.fstat(entry.fd).st_size - offset)
                if nbytes is not None:
                    wanted = min(wanted, nbytes)
                data = bytearray(wanted)
                done = _read_fully(entry.fd, _byte_views([data]), offset)
            finally:
                self._descriptors.release(entry)
        count_read(done)
        return bytes(memoryview(data)[:done])

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `ucpstore.io.base.Files.read_into`."""
        # No context managers here: this is called for every few hundred KiB.
        path = self._path(name)
        views = _byte_views(buffers)
        expected = sum([view.nbytes for view in views])
        try:
            entry = self._descriptors.take(path)
            try:
                done = _read_fully(entry.fd, views, offset)
                size = os.fstat(entry.fd).st_size if done != expected else 0
            finally:
                self._descriptors.release(entry)
        except OSError as error:
            raise translate_os_error(error, "read", path) from error
        count_read(done)
        if done != expected:
            raise CorruptSourceError(
                f"{path!r} is truncated: it ends at byte {size}, expected at least"
                f" {offset + expected} bytes ({expected} from offset {offset}).",
                kind=Kind.TRUNCATED,
                url=self.url,
                name=name,
                offset=offset,
                expected=expected,
                nbytes=size,
            )

    # ----------------------------------------------------------------- write

    def write(self, name: str, data: bytes) -> FileStat:
        """See `ucpstore.io.base.Files.write`."""
        path = self._path(name)
        with os_errors("write", path), self._temporary(data) as temporary:
            self._place(os.replace, temporary, path, durable=True)
            self._descriptors.forget(path)
            stat = os.stat(path)
        return _file_stat(name, stat)

    def create(self, name: str, data: bytes) -> bool:
        """See `ucpstore.io.base.Files.create`.

        A hard link decides between racing writers. Where the file system has none, a lock on
        ``.ucpstore/tmp/create.lock`` does, which is as good as the file system's locks: some
        network mounts keep them within one host.
        """
        path = self._path(name)
        with os_errors("create", path), self._temporary(data) as temporary:
            try:
                self._place(os.link, temporary, path, durable=True)
            except FileExistsError:
                # Who loses acts on what it found, so that must be on the disk as well.
                _sync_folder(os.path.dirname(path))
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._create_locked(temporary, path)
        return True

    def creates_exclusively(self) -> bool:
        """See `create`: always."""
        return True

    def sink(
        self, name: str, nbytes: int, *, guard: Callable[[], object] | None = None
    ) -> LocalSink:
        """See `ucpstore.io.base.Files.sink`. Nothing is reserved for ``nbytes`` in advance."""
        path = self._path(name)
        with os_errors("write", path):
            first = self._root_fd is None
            if first:
                os.makedirs(self.root, exist_ok=True)
                self._root_fd = _RootDescriptor(self.root)
            temporary = self._temporary_path()
            sink = LocalSink(self, name, nbytes, temporary)
            if first:
                _sweep(os.path.dirname(temporary), os.stat(temporary).st_mtime)
            return sink

    def sync(self) -> None:
        """See `ucpstore.io.base.Files.sync`.

        An error means that data which finished sinks wrote is lost: the kernel tells once, so that
        a second `sync` succeeds without it. It is never ``retryable``; write again instead.
        """
        if self._root_fd is None:
            return
        try:
            if has_syncfs():
                sync_filesystem(self._root_fd.fd)
            else:
                dirty, self._dirty = self._dirty, set()
                for folder in dirty:
                    _sync_folder(folder)
        except OSError as error:
            translated = translate_os_error(error, "sync", self.root)
            if isinstance(translated, StorageError):
                translated.retryable = False
            raise translated from error

    def delete(self, names: Iterable[str]) -> None:
        """See `ucpstore.io.base.Files.delete`. Folders that become empty disappear, as on S3."""
        parents = set()
        for name in names:
            path = self._path(name)
            with os_errors("delete", path), suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)
            self._descriptors.forget(path)
            parents.add(os.path.dirname(path))
        for folder in sorted(parents, key=len, reverse=True):
            self._prune(folder)
        _remove_if_empty(self.root, TEMPORARY, ".ucpstore")

    def move(self, name: str, to: str) -> bool:
        """See `ucpstore.io.base.Folder.move`."""
        old, new = self._path(name), self._path(to)
        with os_errors("move", old):
            try:
                self._place(os.rename, old, new, durable=True)
            except FileNotFoundError:
                return False
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
                return False
            _sync_folder(os.path.dirname(old))
            for path in (old, new):
                self._descriptors.forget(path)
                self._made.discard(path)
                self._durable.discard(path)
        self._prune(os.path.dirname(old))
        return True

    # -------------------------------------------------------------- internal

    def _path(self, name: str) -> str:
        path = self._checked.get(name)
        if path is None:
            path = os.path.join(self.root, check_name(name))
            if len(self._checked) >= _CHECKED_NAMES:
                self._checked.clear()
            self._checked[name] = path
        return path

    def _show(self, prefix: str) -> str:
        return os.path.join(self.root, prefix).rstrip("/") or "/"

    def _temporary_path(self) -> str:
        folder = os.path.join(self.root, TEMPORARY)
        self._make_folder(folder, durable=False)
        return os.path.join(folder, f"{os.getpid()}-{uuid.uuid4().hex}.part")

    @contextmanager
    def _temporary(self, data: bytes) -> Iterator[str]:
        """A durable temporary file with ``data``, removed at the end unless it was moved away."""
        path = self._temporary_path()
        fd = self._open_new(path)
        try:
            try:
                _write_fully(fd, _byte_views([memoryview(data)]))
                os.fsync(fd)
            finally:
                os.close(fd)
            yield path
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def _open_new(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return open_file(path, flags)
        except FileNotFoundError:  # the folder was pruned by somebody's delete
            self._make_folder(os.path.dirname(path), durable=False, again=True)
            return open_file(path, flags)

    def _place(self, move: Any, temporary: str, path: str, *, durable: bool) -> None:
        """Link or rename a finished file to its name, making its folder first where needed."""
        folder = os.path.dirname(path)
        self._make_folder(folder, durable=durable)
        try:
            move(temporary, path)
        except FileNotFoundError:  # the folder was pruned by somebody's delete
            self._make_folder(folder, durable=durable, again=True)
            move(temporary, path)
        if durable:
            _sync_folder(folder)
        elif not has_syncfs():
            self._dirty.add(folder)

    def _create_locked(self, temporary: str, path: str) -> bool:
        lock = os.path.join(self.root, TEMPORARY, "create.lock")
        fd = open_file(lock, os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                raise StorageError(
                    f"cannot create {path!r} exclusively: its file system has neither hard links"
                    f" nor file locks ({error.strerror}), expected one of them.",
                    hint="Write to another file system or an object store, and copy from there.",
                    url=self.url,
                ) from error
            if os.path.lexists(path):
                return False
            self._place(os.rename, temporary, path, durable=True)
            return True
        finally:
            os.close(fd)

    def _make_folder(self, folder: str, *, durable: bool, again: bool = False) -> None:
        if folder in (self._durable if durable else self._made) and not again:
            return
        os.makedirs(folder, exist_ok=True)
        self._made.add(folder)
        if not durable:
            if not has_syncfs():
                self._dirty.update(_chain(folder, self.root))
            return
        for inner in _chain(folder, self.root):
            if inner not in self._durable or again:
                _sync_folder(os.path.dirname(inner))
                self._durable.add(inner)

    def _prune(self, folder: str) -> None:
        while folder != self.root:
            _remove_if_empty(folder, TEMPORARY, ".ucpstore")
            if not _remove_if_empty(folder, ""):
                return
            self._made.discard(folder)
            self._durable.discard(folder)
            folder = os.path.dirname(folder)


class LocalSink:
    """One file that is being written; see `LocalFiles.sink`."""

    def __init__(self, files: LocalFiles, name: str, nbytes: int, temporary: str) -> None:
        self._files = files
        self._name = name
        self._path = files._path(name)
        self._nbytes = nbytes
        self._temporary = temporary
        self._fd = files._open_new(temporary)
        self._written = 0
        self._started = 0  # bytes for which write-back was asked
        self._starts = True

    def write(self, buffers: Sequence[Buffer]) -> None:
        """See `ucpstore.io.base.Sink.write`."""
        with os_errors("write", self._path):
            self._written += _write_fully(self._fd, _byte_views(buffers))
            if self._starts and self._written - self._started >= _WRITEBACK_STEP:
                self._starts = start_writeback(
                    self._fd, self._started, self._written - self._started
                )
                self._started = self._written

    def close(self) -> FileStat:
        """See `ucpstore.io.base.Sink.close`.

        Raises
        ------
        StorageError
            Also where fewer or more bytes were written than declared; nothing becomes visible then.
        """
        if self._written != self._nbytes:
            self.abort()
            raise StorageError(
                f"cannot write {self._path!r}: {self._written} bytes were written, expected"
                f" {self._nbytes} bytes.",
                url=self._files.url,
                name=self._name,
            )
        with os_errors("write", self._path):
            if not has_syncfs():
                os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)  # network file systems report a full disk here
            try:
                self._files._place(os.replace, self._temporary, self._path, durable=False)
            except FileNotFoundError as error:
                raise StorageError(
                    f"cannot write {self._path!r}: its temporary file {self._temporary!r} was removed"
                    " by somebody else.",
                    retryable=True,
                    url=self._files.url,
                    name=self._name,
                ) from error
            self._files._descriptors.forget(self._path)
            stat = os.stat(self._path)
        return _file_stat(self._name, stat)

    def abort(self) -> None:
        """See `ucpstore.io.base.Sink.abort`. Harmless after `close` and when called twice."""
        fd, self._fd = self._fd, -1
        with os_errors("write", self._path):
            try:
                if fd >= 0:
                    os.close(fd)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(self._temporary)


class _RootDescriptor:
    """Keeps the root open from the first write on, so that `sync` learns of every lost page."""

    def __init__(self, root: str) -> None:
        self.fd = open_file(root, os.O_RDONLY)
        weakref.finalize(self, os.close, self.fd)


def _file_stat(name: str, stat: os.stat_result) -> FileStat:
    modified = f"{stat.st_mtime_ns:x}"
    return FileStat(name, stat.st_size, f"{modified}-{stat.st_ino:x}", modified, stat.st_mtime)


def _is_temporary(name: str) -> bool:
    """Whether the folder holds unfinished objects, of this root or of one below it."""
    return name == TEMPORARY or name.endswith("/" + TEMPORARY)


def _is_folder(stat: os.stat_result) -> bool:
    return stat.st_mode & 0o170000 == 0o040000


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _walk(
    root: str, prefix: str, recursive: bool, above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, os.stat_result]]:
    """Files below ``root/prefix``. ``above``: the folders entered so far, as links may form rings."""
    folder = os.path.join(root, prefix)
    if recursive:
        try:
            stat = os.stat(folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        identity = stat.st_dev, stat.st_ino
        if identity in above:
            return
        above = (*above, identity)
    for entry in _scan(folder):
        name = prefix + entry.name
        if _is_folder_entry(entry):
            if recursive and not _is_temporary(name):
                yield from _walk(root, name + "/", recursive, above)
            continue
        try:
            stat = entry.stat()
        except OSError as error:  # deleted meanwhile, a dangling link or one to itself
            if error.errno in (errno.ENOENT, errno.ELOOP):
                continue
            raise
        if entry.is_file():
            yield name, stat


def _is_folder_entry(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself is no folder, as a dangling one is none
            return False
        raise


def _byte_views(buffers: Sequence[Buffer]) -> list[memoryview]:
    views = (memoryview(buffer) for buffer in buffers)
    return [
        view if view.format == "B" and view.ndim == 1 else view.cast("B")
        for view in views
        if view.nbytes
    ]


def _advance(views: list[memoryview], index: int, nbytes: int) -> int:
    """Step over ``nbytes`` that were transferred; the index of the first unfinished view."""
    while nbytes:
        size = views[index].nbytes
        if nbytes < size:
            views[index] = views[index][nbytes:]
            return index
        nbytes -= size
        index += 1
    return index


def _read_fully(fd: int, views: list[memoryview], offset: int) -> int:
    """Fill ``views`` from ``offset``; the bytes read, fewer only at the end of the file."""
    index = done = 0
    while index < len(views):
        count = os.preadv(fd, views[index : index + _IOV_MAX], offset + done)
        if count == 0:
            break
        done += count
        index = _advance(views, index, count)
    return done


def _write_fully(fd: int, views: list[memoryview]) -> int:
    index = done = 0
    while index < len(views):
        count = os.writev(fd, views[index : index + _IOV_MAX])
        done += count
        index = _advance(views, index, count)
    return done


def _sync_folder(folder: str) -> None:
    fd = open_file(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_if_empty(folder: str, *inner: str) -> bool:
    """Remove folders that hold nothing; whether all are gone."""
    try:
        for name in inner:
            os.rmdir(os.path.join(folder, name))  # noqa: PTH106
    except OSError:  # not empty, or somebody else was faster
        return False
    return True


def _sweep(folder: str, now: float) -> None:
    """Remove the unfinished files of processes that died, by the file system's own clock."""
    for entry in _scan(folder):
        with suppress(OSError):
            if entry.name.endswith(".part") and now - entry.stat().st_mtime > _ABANDONED_SECONDS:
                os.unlink(entry.path)


def _chain(folder: str, root: str) -> list[str]:
    """``folder`` and the folders above it, down to ``root``."""
    chain = [folder]
    while folder != root:
        folder = os.path.dirname(folder)
        chain.append(folder)
    return chain
