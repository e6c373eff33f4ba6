"""Running a plan: claim, write every object by its owner, record, commit."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    wait,
)
from dataclasses import asdict, dataclass, replace
from typing import Any

from ucpstore.contracts import Record, Source, Target, Task
from ucpstore.engine.plan import Plan
from ucpstore.engine.pool import process_pool
from ucpstore.engine.schedule import balance, batches
from ucpstore.engine.sizes import format_bytes
from ucpstore.engine.worker import Job, Opener, Settings, run_batch, run_remote_batch, shared
from ucpstore.errors import IntegrityError, Kind, PlanError, UcpStoreError, WorkerError, listing
from ucpstore.events import Committed, Listener, Published, Resumed, Started, TaskDone

__all__ = ["Report", "Workers", "fitting_threads", "nothing_to_do", "run"]

REPORT_VERSION = "1.0"
_BATCHES_PER_WORKER = 4
_MAX_THREADS = 16


@dataclass(frozen=True, slots=True)
class Workers:
    """Who does the work (UCP's two-level parallelism: workers, and I/O threads inside each).

    Attributes
    ----------
    executor : Executor, optional
        Anything with ``submit`` whose workers can reach source and destination. None: this process.
    workers : int, optional
        Batches in flight on the executor, by default as many as it says that it has workers; without
        an executor, more than 1 starts that many processes.
    threads : int, optional
        Tasks in flight per worker; the number of cores by default.
    share : (int, int), optional
        Do only part ``index`` of ``count`` of the tasks (``--worker I/N``); other processes do the rest.
    memory_limit : int, optional, bytes
        Anonymous memory that tasks in flight may need, over all workers.

    Raises
    ------
    PlanError
        A number is not one, or out of range.
    """

    executor: Executor | None = None
    workers: int | None = None
    threads: int | None = None
    share: tuple[int, int] | None = None
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "threads"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and value >= 1):
                raise PlanError(
                    f"cannot convert with {name}={value!r}: expected a whole number from 1."
                )
        if self.executor is not None and not callable(getattr(self.executor, "submit", None)):
            raise PlanError(
                f"cannot convert on {self.executor!r}: it has no method 'submit', expected a"
                " concurrent.futures.Executor."
            )
        if self.share is not None and not _is_share(self.share):
            raise PlanError(
                f"cannot convert the share {self.share!r}: expected (index, count) with"
                " 0 <= index < count."
            )

    @property
    def count(self) -> int:
        """Batches in flight."""
        if self.workers is not None:
            return self.workers
        # What the executors of concurrent.futures, loky and others call it.
        found = getattr(self.executor, "_max_workers", 1)
        return found if isinstance(found, int) and found >= 1 else 1


def _is_share(share: object) -> bool:
    match share:
        case (int(index), int(count)) if bool not in (type(index), type(count)):
            return 0 <= index < count
    return False


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did.

    Attributes
    ----------
    url, plan_digest : str
    committed : bool
        The checkpoint is visible. False only where other workers still have tasks to do.
    already_committed : bool
        It was visible before this run, which did nothing.
    tasks, tasks_done, tasks_resumed : int
        Objects in the plan, written by this run, and found durably done at its start.
    nbytes_written : int
    state_nbytes : int
    seconds : float
    workers, threads : int
    warnings : tuple of str
    """

    url: str
    plan_digest: str
    committed: bool
    already_committed: bool
    tasks: int
    tasks_done: int
    tasks_resumed: int
    nbytes_written: int
    state_nbytes: int
    seconds: float
    workers: int
    threads: int
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values (``schemas/report.schema.json``)."""
        return {"version": REPORT_VERSION, **asdict(self), "warnings": list(self.warnings)}

    def summary(self) -> str:
        """One line for people."""
        if self.already_committed:
            return f"{self.url}: already complete, nothing to do"
        rate = f", {format_bytes(self.nbytes_written / self.seconds)}/s" if self.seconds else ""
        resumed = f", {self.tasks_resumed} done before" if self.tasks_resumed else ""
        state = "complete" if self.committed else "not complete yet: other workers have tasks to do"
        return (
            f"{self.url}: {state}; wrote {self.tasks_done} of {self.tasks} objects{resumed},"
            f" {format_bytes(self.nbytes_written)} in {self.seconds:.1f} s{rate}"
        )


def run(
    job: tuple[Source, Target],
    plan: Plan,
    *,
    workers: Workers,
    opener: Opener,
    settings: Settings | None = None,
    emit: Listener | None = None,
    owned: Sequence[int] | None = None,
) -> Report:
    """Carry out ``plan``; the same call again after a crash finishes it.

    Parameters
    ----------
    job : (Source, Target)
    plan : Plan
    workers : Workers
    opener : callable
        How a worker process opens the job again.
    settings : Settings, optional
        Retries and publishing; ``threads`` is decided here.
    emit : callable, optional
        Receives every event.
    owned : sequence of int, optional
        Do only these tasks, instead of a share by bytes; other processes do the rest.

    Raises
    ------
    AlreadyExistsError
        Another plan has committed or claimed the destination.
    PlanError
        The memory limit is below what one task needs.
    IntegrityError
        A source changed meanwhile, or a written object is gone.
    WorkerError
        A worker died, or the executor takes no work.
    StorageError
    """
    source, target = job
    started = time.monotonic()
    notify = emit or (lambda event: None)
    threads = fitting_threads(plan, workers)
    settings = replace(settings or Settings(threads), threads=threads)
    tasks = target.tasks()
    report = Report(
        url=target.url,
        plan_digest=plan.digest,
        committed=True,
        already_committed=True,
        tasks=len(tasks),
        tasks_done=0,
        tasks_resumed=0,
        nbytes_written=0,
        state_nbytes=plan.state_nbytes,
        seconds=0.0,
        workers=workers.count,
        threads=threads,
        warnings=plan.warnings,
    )
    if plan.free_nbytes is not None:  # before the claim: a refusal leaves nothing behind
        plan.check_space(stored=target.stored_nbytes())
    if not target.begin(plan.digest):
        notify(Committed(target.url, already=True))
        return report
    known = target.records()
    mine = tasks if workers.share is None else balance(tasks, workers.share[1])[workers.share[0]]
    if owned is not None:
        mine = [tasks[index] for index in owned]
    notify(Started(plan.digest, len(mine), sum(task.nbytes for task in mine)))
    done = [known[task.index] for task in mine if task.index in known]
    if done:
        notify(Resumed(len(done), sum(record.nbytes for record in done)))
    todo = [task for task in mine if task.index not in known]
    _require_unchanged(source)
    opened = Job(plan.digest, source, target)
    written = _execute(opened, todo, workers=workers, settings=settings, opener=opener, emit=notify)
    committed = _commit(opened, {**known, **{record.task: record for record in written}}, notify)
    return replace(
        report,
        committed=committed,
        already_committed=False,
        tasks_done=len(written),
        tasks_resumed=len(known),
        nbytes_written=sum(record.nbytes for record in written),
        seconds=time.monotonic() - started,
    )


def nothing_to_do(source: Source, plan: Plan) -> Report:
    """The report where ``source`` already is what was asked for (UCP converts only when a layout changes)."""
    return Report(
        url=source.url,
        plan_digest=plan.digest,
        committed=True,
        already_committed=True,
        tasks=0,
        tasks_done=0,
        tasks_resumed=0,
        nbytes_written=0,
        state_nbytes=plan.state_nbytes,
        seconds=0.0,
        workers=0,
        threads=0,
        warnings=plan.warnings,
    )


def fitting_threads(plan: Plan, workers: Workers) -> int:
    """Tasks in flight per worker that the memory limit allows."""
    wanted = workers.threads or min(os.cpu_count() or 1, _MAX_THREADS)
    if workers.memory_limit is None:
        return wanted
    fit = workers.memory_limit // (plan.min_memory * workers.count)
    if fit < 1:
        raise PlanError(
            f"memory limit {format_bytes(workers.memory_limit)} is too small: {workers.count} worker(s) with one"
            f" task in flight need {format_bytes(plan.min_memory * workers.count)}.",
            hint="Raise the limit or use fewer workers.",
            kind=Kind.MEMORY_LIMIT,
        )
    return min(wanted, fit)


def _execute(
    job: Job,
    tasks: Sequence[Task],
    *,
    workers: Workers,
    settings: Settings,
    opener: Opener,
    emit: Listener,
) -> list[Record]:
    """Run tasks here, on the given executor, or on processes of our own."""
    if not tasks:
        return []
    ordered = sorted(tasks, key=lambda task: (-task.nbytes, task.index))
    if workers.executor is None and workers.count == 1:
        return run_batch(job, ordered, settings, emit)
    with shared(job) as name:
        submission = _Submission(name, job.digest, opener, settings)
        if workers.executor is not None:
            return _submit(workers.executor, submission, ordered, workers=workers, emit=emit)
        with process_pool(workers.count) as pool:
            return _submit(pool, submission, ordered, workers=workers, emit=emit)


@dataclass(frozen=True, slots=True)
class _Submission:
    """What every batch of a run takes along to its worker."""

    name: str
    digest: str
    opener: Opener
    settings: Settings

    def to(self, executor: Executor, batch: Sequence[Task]) -> Future[list[Record]]:
        """Submit a batch."""
        indexes = [task.index for task in batch]
        arguments = (self.name, self.digest, self.opener, indexes, self.settings)
        try:
            return executor.submit(run_remote_batch, *arguments)
        except UcpStoreError:
            raise
        except (RuntimeError, OSError) as error:
            raise _worker_error(error) from error


def _submit(
    executor: Executor,
    submission: _Submission,
    tasks: Sequence[Task],
    *,
    workers: Workers,
    emit: Listener,
) -> list[Record]:
    """Keep batches of nearly equal bytes in flight; after the first error nothing new starts."""
    total = sum(task.nbytes for task in tasks)
    share = -(-total // (workers.count * _BATCHES_PER_WORKER))
    waiting = iter(batches(tasks, max(min(submission.settings.publish_nbytes, share), 1)))
    futures = {submission.to(executor, batch) for batch in itertools.islice(waiting, workers.count)}
    keys = {task.index: task.key for task in tasks}
    records: list[Record] = []
    error: BaseException | None = None
    try:
        while futures:
            finished, futures = wait(futures, return_when=FIRST_COMPLETED)
            for future in finished:
                raised = CancelledError() if future.cancelled() else future.exception()
                error = error or raised
                if raised is None:
                    _announce(future.result(), keys, emit)
                    records.extend(future.result())
                if error is None and (batch := next(waiting, None)) is not None:
                    futures.add(submission.to(executor, batch))
    except BaseException as raised:
        running = [future for future in futures if not future.cancel()]
        if isinstance(raised, Exception):
            wait(running)
        raise
    if isinstance(error, BrokenExecutor | CancelledError):
        raise _worker_error(error) from error
    if error is not None:
        raise error
    return records


def _worker_error(error: BaseException) -> WorkerError:
    """The error for an executor that did not do its work; what it recorded before is kept."""
    if isinstance(error, BrokenExecutor):
        found = "a worker died"
        hint = "Was it killed, or out of memory? Run the same command again: it continues."
    else:
        found = "the executor took no work"
        hint = "Run the same command again with another executor, or without: it continues."
    return WorkerError(
        f"the conversion stopped: {found} ({type(error).__name__}: {error}).", hint=hint
    )


def _announce(records: Sequence[Record], keys: Mapping[int, str], emit: Listener) -> None:
    """Tell listeners about a batch that another process finished."""
    for record in records:
        emit(TaskDone(record.task, keys[record.task], record.nbytes))
    emit(Published(len(records), sum(record.nbytes for record in records)))


def _commit(job: Job, records: dict[int, Record], notify: Listener) -> bool:
    """Commit if every task has a record, of whichever worker."""
    if len(records) < len(job.target.tasks()):
        records = {**job.target.records(), **records}
    if len(records) < len(job.target.tasks()):
        return False
    _require_unchanged(job.source)
    job.target.commit(records)
    notify(Committed(job.target.url, already=False))
    return True


def _require_unchanged(source: Source) -> None:
    """Refuse a source whose files are not those that were planned."""
    planned = {file.name: file for file in source.files()}
    current = {file.name: file for file in source.current_files()}
    changed = []
    for name, file in planned.items():
        now = current[name]
        if now != file:
            found = "is gone" if now.nbytes < 0 else f"is {now.nbytes} bytes"
            changed.append(f"{name} (was {file.nbytes} bytes, {found})")
    if changed:
        raise IntegrityError(
            f"{source.url} changed while it was being converted: {listing(changed)}.",
            hint="Wait until nothing writes there, then convert again (use abandon to drop the unfinished attempt).",
            kind=Kind.SOURCE_CHANGED,
        )
