"""Running a plan: claim, write every object by its owner, record, commit."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

from ucpstore.contracts import Record, Source, Target, Task
from ucpstore.engine.plan import Plan
from ucpstore.engine.schedule import balance, batches
from ucpstore.engine.sizes import format_bytes
from ucpstore.engine.worker import Job, Opener, Settings, remember, run_batch, run_remote_batch
from ucpstore.errors import IntegrityError, Kind, PlanError, listing
from ucpstore.events import Committed, Listener, Published, Resumed, Started, TaskDone

__all__ = ["Report", "Workers", "run"]

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
    workers : int
        Batches in flight on the executor; without one, more than 1 starts that many processes.
    threads : int, optional
        Tasks in flight per worker; the number of cores by default.
    share : (int, int), optional
        Do only part ``index`` of ``count`` of the tasks (``--worker I/N``); other processes do the rest.
    memory_limit : int, optional, bytes
        Anonymous memory that tasks in flight may need, over all workers.
    """

    executor: Executor | None = None
    workers: int = 1
    threads: int | None = None
    share: tuple[int, int] | None = None
    memory_limit: int | None = None


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

    Raises
    ------
    AlreadyExistsError
        Another plan has committed or claimed the destination.
    PlanError
        The memory limit is below what one task needs.
    IntegrityError
        A source changed meanwhile, or a written object is gone.
    StorageError
    """
    source, target = job
    started = time.monotonic()
    notify = emit or (lambda event: None)
    threads = _threads(plan, workers)
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
        workers=workers.workers,
        threads=threads,
        warnings=plan.warnings,
    )
    if not target.begin(plan.digest):
        notify(Committed(target.url, already=True))
        return report
    known = target.records()
    if not known:
        plan.check_space()
    notify(Started(plan.digest, len(tasks), plan.object_nbytes))
    if known:
        notify(Resumed(len(known), sum(record.nbytes for record in known.values())))
    mine = tasks if workers.share is None else balance(tasks, workers.share[1])[workers.share[0]]
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


def _threads(plan: Plan, workers: Workers) -> int:
    """Tasks in flight per worker that the memory limit allows."""
    wanted = workers.threads or min(os.cpu_count() or 1, _MAX_THREADS)
    if workers.memory_limit is None:
        return wanted
    fit = workers.memory_limit // (plan.min_memory * workers.workers)
    if fit < 1:
        raise PlanError(
            f"memory limit {format_bytes(workers.memory_limit)} is too small: {workers.workers} worker(s) with one"
            f" task in flight need {format_bytes(plan.min_memory * workers.workers)}.",
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
    if workers.executor is None and workers.workers == 1:
        return run_batch(job, ordered, settings, emit)
    remember(job)
    if workers.executor is not None:
        return _submit(
            workers.executor,
            job,
            ordered,
            workers=workers,
            settings=settings,
            opener=opener,
            emit=emit,
        )
    with ProcessPoolExecutor(workers.workers, mp_context=get_context("forkserver")) as pool:
        return _submit(
            pool, job, ordered, workers=workers, settings=settings, opener=opener, emit=emit
        )


def _submit(
    executor: Executor,
    job: Job,
    tasks: Sequence[Task],
    *,
    workers: Workers,
    settings: Settings,
    opener: Opener,
    emit: Listener,
) -> list[Record]:
    """Submit batches of nearly equal bytes; after the first error nothing new starts."""
    total = sum(task.nbytes for task in tasks)
    size = min(settings.publish_nbytes, -(-total // (workers.workers * _BATCHES_PER_WORKER)))
    futures: set[Future[list[Record]]] = {
        executor.submit(
            run_remote_batch, job.digest, opener, [task.index for task in batch], settings
        )
        for batch in batches(tasks, max(size, 1))
    }
    keys = {task.index: task.key for task in tasks}
    records: list[Record] = []
    error: BaseException | None = None
    try:
        while futures:
            finished, futures = wait(futures, return_when=FIRST_COMPLETED)
            for future in finished:
                if future.cancelled():
                    continue
                if (raised := future.exception()) is not None:
                    error = error or raised
                    for waiting in futures:
                        waiting.cancel()
                    continue
                _announce(future.result(), keys, emit)
                records.extend(future.result())
    finally:
        for future in futures:
            future.cancel()
    if error is not None:
        raise error
    return records


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
