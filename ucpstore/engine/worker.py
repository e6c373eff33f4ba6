"""What runs inside a worker: a batch of tasks on a few threads, made durable before it returns."""

from __future__ import annotations

import queue
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ucpstore.contracts import Record, Source, Target, Task
from ucpstore.errors import IntegrityError, Kind, PlanError, StorageError
from ucpstore.events import Event, Listener, Published, TaskDone, TaskRetried

__all__ = ["Job", "Opener", "Settings", "run_batch", "run_remote_batch", "shared"]

Opener = Callable[[], tuple[str, Source, Target]]
"""Opens the job again in another process: (plan digest, source, target). Picklable."""

_MAX_DELAY = 30.0


@dataclass(frozen=True, slots=True)
class Job:
    """An open source and target under one plan."""

    digest: str
    source: Source
    target: Target


@dataclass(frozen=True, slots=True)
class Settings:
    """How a batch is run.

    Attributes
    ----------
    threads : int
        Tasks in flight in this worker.
    retries : int
        Further attempts after a retryable `StorageError`.
    retry_delay : float, seconds
        Before the first of them; doubles each time, with jitter. A store's ``Retry-After`` gets its time.
    retry_seconds : float
        After the start of a task no further attempt begins: storage has retried by itself before.
    publish_nbytes : int
        Bytes after which finished tasks are made durable and recorded.
    publish_seconds : float
        The same, in seconds.
    """

    threads: int
    retries: int = 4
    retry_delay: float = 0.5
    retry_seconds: float = 60.0
    publish_nbytes: int = 2 << 30
    publish_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not (type(self.retries) is int and self.retries >= 0):
            raise PlanError(
                f"cannot convert with retries={self.retries!r}: expected a whole number from 0."
            )


_shared: dict[str, Job] = {}
_opened: dict[str, Job | None] = {}
_jobs_lock = threading.Lock()


@contextmanager
def shared(job: Job) -> Iterator[str]:
    """Let batches that run in this process use an already open job.

    Yields
    ------
    str
        Name of this run. The plan's digest would not do: it says nothing about where the target lies,
        and a later run may find another source there.
    """
    name = uuid.uuid4().hex
    _shared[name] = job
    try:
        yield name
    finally:
        del _shared[name]


def run_remote_batch(
    name: str, digest: str, opener: Opener, indexes: Sequence[int], settings: Settings
) -> list[Record]:
    """Run a batch of the run ``name`` in a worker, which opens the job itself on first use.

    Returns
    -------
    list of Record
        None where the plan was committed by somebody else in the meantime.

    Raises
    ------
    IntegrityError
        The worker sees another source than the planner did.
    """
    job = _shared.get(name) or _open_once(name, digest, opener)
    if job is None:
        return []
    tasks = job.target.tasks()
    return run_batch(job, [tasks[index] for index in indexes], settings)


def _open_once(name: str, digest: str, opener: Opener) -> Job | None:
    with _jobs_lock:
        if name not in _opened:
            found, source, target = opener()
            if found != digest:
                raise IntegrityError(
                    f"{source.url}: this worker plans {found}, the coordinator planned {digest}.",
                    hint="The source changed, or the worker sees other files. Run the command again.",
                    kind=Kind.SOURCE_CHANGED,
                )
            job = Job(digest, source, target) if target.begin(digest) else None
            _opened.clear()  # one job at a time: an opened source of a large model is not small
            _opened[name] = job
        return _opened[name]


def run_batch(
    job: Job, tasks: Sequence[Task], settings: Settings, emit: Listener | None = None
) -> list[Record]:
    """Write ``tasks`` on ``settings.threads`` threads and return their durable records.

    The first error stops the others after their current task; what was finished by then is still
    published, so that the next attempt need not redo it.
    """
    todo: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        todo.put(task)
    done: queue.SimpleQueue[tuple[Task, Record] | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    notify = emit or _ignore

    def loop() -> None:
        try:
            while not stop.is_set():
                try:
                    task = todo.get_nowait()
                except queue.Empty:
                    break
                done.put((task, _write(job, task, settings, notify, stop)))
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            stop.set()
            done.put(error)
        finally:
            done.put(None)

    count = max(1, min(settings.threads, len(tasks)))
    threads = [
        threading.Thread(target=loop, name=f"ucpstore-{i}", daemon=True) for i in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        return _collect(job, done, count, settings, notify)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _collect(
    job: Job,
    done: queue.SimpleQueue[tuple[Task, Record] | BaseException | None],
    threads: int,
    settings: Settings,
    notify: Listener,
) -> list[Record]:
    """Take results as they come and publish them in batches; raise the first error at the end."""
    records: list[Record] = []
    pending: list[Record] = []
    error: BaseException | None = None
    published = time.monotonic()

    def publish() -> None:
        nonlocal published
        if pending:
            job.target.publish(pending)
            notify(Published(len(pending), sum(record.nbytes for record in pending)))
            records.extend(pending)
            pending.clear()
        published = time.monotonic()

    while threads:
        item = done.get()
        if item is None:
            threads -= 1
        elif isinstance(item, BaseException):
            error = error or item
        else:
            task, record = item
            pending.append(record)
            notify(TaskDone(task.index, task.key, record.nbytes))
            if (
                sum(record.nbytes for record in pending) >= settings.publish_nbytes
                or time.monotonic() - published >= settings.publish_seconds
            ):
                publish()
    if error is None or isinstance(error, Exception):
        publish()
    if error is not None:
        raise error
    return records


def _write(
    job: Job, task: Task, settings: Settings, notify: Listener, stop: threading.Event
) -> Record:
    """Write one task, again after retryable storage errors."""
    attempt, started = 0, time.monotonic()
    while True:
        try:
            return job.target.write(task, job.source)
        except StorageError as error:
            attempt += 1
            if not error.retryable or attempt > settings.retries or stop.is_set():
                raise
            delay = min(settings.retry_delay * 2 ** (attempt - 1), _MAX_DELAY)
            delay *= random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not cryptography
            delay = max(delay, float(error.context.get("retry_after", 0.0)))
            if time.monotonic() - started + delay > settings.retry_seconds:
                raise
            notify(TaskRetried(task.index, task.key, attempt, round(delay, 3), str(error)))
            stop.wait(delay)


def _ignore(event: Event) -> None:
    """Nobody listens."""
