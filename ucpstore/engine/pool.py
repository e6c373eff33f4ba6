"""Worker processes of our own: they never outlive the process that they work for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import connection, current_process, get_context, parent_process
from typing import Any

from ucpstore.errors import WorkerError

__all__ = ["process_pool"]


@contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of fresh processes (TensorStore and threads do not survive a fork).

    A worker ends when its coordinator does, however that ends; a plain pool's workers would wait for
    work forever. After an interruption they end at once: what they had recorded counts, the rest is
    done again. An ordinary error lets running batches finish.

    Raises
    ------
    WorkerError
        This process may not have children.
    """
    if current_process().daemon:
        raise WorkerError(
            "cannot start worker processes: this process is a daemonic worker of multiprocessing itself,"
            " which may not have children.",
            hint="Use one worker here (threads still work in parallel), or an executor.",
        )
    context = get_context("forkserver")
    lifeline, held = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_bind, initargs=(lifeline,))
    try:
        yield pool
    except BaseException as error:
        if not isinstance(error, Exception):
            held.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        held.close()
        lifeline.close()


def _bind(lifeline: Any) -> None:
    """Leave Ctrl-C, which reaches the whole process group, to the coordinator; end when it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    watched = [lifeline] if parent is None else [lifeline, parent.sentinel]

    def watch() -> None:
        connection.wait(watched)
        os._exit(1)

    threading.Thread(target=watch, name="ucpstore-lifeline", daemon=True).start()
