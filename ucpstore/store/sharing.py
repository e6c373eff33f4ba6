"""A few threads of this process that large reads share."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["MAX_THREADS", "share_work"]

MAX_THREADS = min(os.cpu_count() or 1, 8)
"""Threads that work for one call, and helpers that work for all calls together."""

Item = TypeVar("Item")


def share_work(function: Callable[[Item], None], items: Iterable[Item], *, threads: int) -> None:
    """Call ``function`` with every item, on this thread and on helpers that are free.

    Nothing waits for a helper to become free, so calls may come from any thread, helpers included.
    All calls have ended on return. After an error no further item is taken.

    Parameters
    ----------
    function : callable
    items : iterable
        Taken one by one, under a lock.
    threads : int
        At most so many work at once, this one included.
    """
    feed = _Feed(function, items)
    helpers = []
    with suppress(RuntimeError):  # the interpreter is ending: no more helpers
        for _ in range(min(threads, MAX_THREADS) - 1):
            helpers.append(_helpers(os.getpid()).submit(feed.drain))  # noqa: PERF401 (may raise)
    try:
        feed.drain()
    finally:
        running = [helper for helper in helpers if not helper.cancel()]
        errors = [helper.exception() for helper in running]
    for error in filter(None, errors):
        raise error


@functools.cache
def _helpers(pid: int) -> ThreadPoolExecutor:
    """The pool of a process: a forked child has none of its parent's threads."""
    return ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="ucpstore-read")


class _End:
    """What follows the last item."""


_END = _End()


class _Feed(Generic[Item]):
    """Items that several threads take one after another."""

    def __init__(self, function: Callable[[Item], None], items: Iterable[Item]) -> None:
        self._function = function
        self._items = iter(items)
        self._lock = threading.Lock()

    def drain(self) -> None:
        """Take and work on items until there are none."""
        try:
            while True:
                with self._lock:
                    item = next(self._items, _END)
                if isinstance(item, _End):
                    return
                self._function(item)
        except BaseException:
            with self._lock:
                self._items = iter(())
            raise
