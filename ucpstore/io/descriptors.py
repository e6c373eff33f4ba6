"""Open read descriptors, shared by threads and bounded in number."""

from __future__ import annotations

import errno
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Descriptors", "OpenFile", "open_file"]

_MAX_IDLE = 256
_MIN_IDLE = 4


@dataclass(slots=True, eq=False)
class OpenFile:
    """A descriptor and how many borrow it."""

    fd: int
    users: int = 0
    cached: bool = True


class Descriptors:
    """Least-recently-used cache of descriptors opened for reading.

    A descriptor is counted while it is borrowed and is closed by whoever lets go of it last, so
    that eviction never closes a file under another thread. More files than ``capacity`` may be open
    while more threads than that read at once. A file that was deleted or replaced is opened anew.

    Parameters
    ----------
    capacity : int, optional
        Descriptors that stay open while nobody uses them; by default a fair share of what the process
        may have open, since many checkpoints may be open at once.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenFile] = OrderedDict()
        with _all_lock:
            _ALL.add(self)
        # Nobody borrows any more by then, as a borrower holds a reference: so no lock is needed, and
        # none may be waited for while garbage is collected.
        weakref.finalize(self, _close_all, self._open)

    @property
    def capacity(self) -> int:
        """Descriptors that may stay open now."""
        if self._capacity is not None:
            return self._capacity
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        idle = _MAX_IDLE if soft == resource.RLIM_INFINITY else min(_MAX_IDLE, soft // 4)
        return max(_MIN_IDLE, idle // max(1, len(_ALL)))

    def __len__(self) -> int:
        return len(self._open)

    def take(self, path: str) -> OpenFile:
        """Descriptor of ``path``, open until it is given back to `release`.

        Raises
        ------
        OSError
            The file cannot be opened.
        """
        with self._lock:
            entry = self._open.get(path)
            if entry is not None:
                entry.users += 1
                self._open.move_to_end(path)
        if entry is not None:
            if os.fstat(entry.fd).st_nlink > 0:
                return entry
            self.release(entry)
            self.forget(path)
        # Opened outside the lock: a slow server must not hold up other threads. Two threads may
        # open the same file at once; the loser's descriptor lives for one use.
        opened = OpenFile(open_file(path, os.O_RDONLY), users=1)
        closing: list[int] = []
        with self._lock:
            if path in self._open:
                opened.cached = False
            else:
                self._open[path] = opened
                capacity = self.capacity
                while len(self._open) > capacity:
                    oldest, entry = next(iter(self._open.items()))
                    closing += self._evict(oldest, entry)
        _close(closing)
        return opened

    def release(self, entry: OpenFile) -> None:
        """Give a descriptor back."""
        with self._lock:
            entry.users -= 1
            close = entry.users == 0 and not entry.cached
        if close:
            os.close(entry.fd)

    def forget(self, path: str) -> None:
        """Open ``path`` anew the next time."""
        with self._lock:
            entry = self._open.get(path)
            closing = [] if entry is None else self._evict(path, entry)
        _close(closing)

    def close(self) -> None:
        """Close all descriptors that are not borrowed, and the others when they are returned."""
        with self._lock:
            closing = [
                fd for path, entry in [*self._open.items()] for fd in self._evict(path, entry)
            ]
        _close(closing)

    def _evict(self, path: str, entry: OpenFile) -> list[int]:
        """Drop from the cache (locked); descriptors to close now."""
        del self._open[path]
        entry.cached = False
        return [] if entry.users else [entry.fd]

    def _after_fork(self) -> None:
        """In a forked child the lock may be held, and users counted, by threads that are gone."""
        self._lock = threading.Lock()
        closing = [entry.fd for entry in self._open.values()]
        self._open.clear()  # the same mapping, since the finalizer holds it
        _close(closing)


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def _close_all(entries: Mapping[str, OpenFile]) -> None:
    _close([entry.fd for entry in entries.values()])


def open_file(path: str, flags: int, mode: int = 0o666) -> int:
    """`os.open`; where the process may open no more, it first closes what all caches keep unused.

    Raises
    ------
    OSError
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    with _all_lock:
        caches = list(_ALL)
    for cache in caches:
        cache.close()
    return os.open(path, flags | os.O_CLOEXEC, mode)


_all_lock = threading.Lock()
_ALL: weakref.WeakSet[Descriptors] = weakref.WeakSet()


def _reset_all() -> None:
    global _all_lock
    _all_lock = threading.Lock()
    for cache in list(_ALL):
        cache._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
