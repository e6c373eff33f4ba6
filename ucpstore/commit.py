"""`LoggedTarget`: the steps that every target takes around its objects, whatever they are.

Claim, write each object by its owner, record, check, seal, commit. Every step is idempotent, and a crash
anywhere is mended by the same command. Who may write is `ucpstore.claims`' business; what an object is,
where it lies meanwhile and what makes a checkpoint visible is the subclass's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from ucpstore.claims import ClaimLog
from ucpstore.contracts import Record, Source, Task
from ucpstore.errors import IntegrityError, Kind, StorageError, listing
from ucpstore.io.base import Files, FileStat, Sink

__all__ = ["LoggedTarget"]

TEMPORARY = ".ucpstore/tmp"
_SWEEPS = 3

_Result = TypeVar("_Result")


class LoggedTarget(ABC):
    """The half of a `ucpstore.contracts.Target` that keeps it whole. Picklable; `write` is safe to call
    from many threads.

    Parameters
    ----------
    files : Files
        The destination.
    log : ClaimLog
        Its claims and done records.
    """

    def __init__(self, files: Files, log: ClaimLog) -> None:
        self.url: str = files.url
        self.is_local: bool = files.is_local
        self._files = files
        self._log = log
        self._leftovers: tuple[str, ...] = ()

    @abstractmethod
    def tasks(self) -> Sequence[Task]:
        """All objects to write, in order of ``index``."""

    def begin(self, digest: str) -> bool:
        """See `ucpstore.claims.ClaimLog.begin`."""
        if not self._log.begin(digest):
            return False
        # Only what was there before this run began is swept: the rest belongs to running writers.
        self._leftovers = tuple(stat.name for stat in self._files.list(TEMPORARY))
        return True

    def records(self) -> Mapping[int, Record]:
        """Tasks that are durably done: recorded, and their objects are still as they were recorded."""
        tasks, objects = self.tasks(), self._objects()
        return {
            record.task: record
            for record in self._log.records()
            if 0 <= record.task < len(tasks) and _matches(record, tasks[record.task], objects)
        }

    def write(self, task: Task, source: Source) -> Record:
        """Gather the object's bytes from ``source`` and write it whole.

        Raises
        ------
        AlreadyExistsError
            The destination was abandoned in the meantime (``ABANDONED``).
        """
        return self._despite_sweeps(lambda: self._write(task, source))

    def _write(self, task: Task, source: Source) -> Record:
        self._log.check()
        guard = partial(self._log.check, cached=False)
        sink = self._files.sink(self._place(task), task.nbytes, guard=guard)
        try:
            digest = self._encode(task, source, sink)
            self._log.check()
            stat = sink.close()
        except BaseException:
            sink.abort()
            raise
        return Record(task.index, stat.nbytes, stat.token, digest)

    def publish(self, records: Sequence[Record]) -> None:
        """Make the objects of ``records`` durable, then record them."""
        self._despite_sweeps(lambda: self._log.publish(records))

    def commit(self, records: Mapping[int, Record]) -> None:
        """Check every object against its record and make the checkpoint visible.

        An object whose size is right but whose token is not was replaced after it was recorded: by
        another writer of this plan (the same bytes), or by one whose plan was abandoned. It is read
        back and must have the recorded digest.

        Raises
        ------
        IntegrityError
            Objects are missing or differ from their records (``LOST_OBJECT``), or the source recorded
            other digests (``CHECKSUM``).
        AlreadyExistsError
            The destination was abandoned (``ABANDONED``), or somebody else saved something there.
        """
        self._despite_sweeps(lambda: self._commit(records))

    def _commit(self, records: Mapping[int, Record]) -> None:
        if self._log.committed():
            return
        self._check(records)
        self._log.seal()
        self._settle()
        # Again: until its unfinished file was swept, a writer of an abandoned plan that slept through
        # the fence could still put it in place of an object.
        self._reveal(self._check(records))

    def abandon(self) -> str | None:
        """See `ucpstore.claims.ClaimLog.abandon`."""
        return self._log.abandon()

    # ------------------------------------------------------- what a subclass says

    @abstractmethod
    def _objects(self) -> Mapping[str, FileStat]:
        """Everything that lies where objects are written, by the key that a task would have."""

    @abstractmethod
    def _encode(self, task: Task, source: Source, sink: Sink) -> int:
        """Write the object to ``sink``; its digest."""

    @abstractmethod
    def _read_back(self, task: Task, name: str) -> int | None:
        """Digest of the object that is stored as ``name``; None where it cannot be read as one."""

    @abstractmethod
    def _reveal(self, records: Mapping[int, Record]) -> None:
        """Make the checkpoint visible. Only under a seal, and only for good ``records`` of all tasks."""

    def _place(self, task: Task) -> str:
        """Name under which the object is written."""
        return task.key

    def _find(self, task: Task) -> FileStat | None:
        """The object as it is now: a listing may miss a file that is being replaced."""
        return self._files.stat(task.key)

    def _strays(self) -> Sequence[str]:
        """Names of what a commit does not want to keep."""
        return ()

    def _lost_hint(self) -> str:
        """What to do about lost objects."""
        return "Run the same command again: it writes them anew."

    # ------------------------------------------------------------------ internal

    def _check(self, records: Mapping[int, Record]) -> Mapping[int, Record]:
        """The record of every task, once all objects are what was recorded."""
        objects, tasks = self._objects(), self.tasks()
        chosen = dict(records)
        if any(not _matches(chosen.get(task.index), task, objects) for task in tasks):
            for record in self._log.records():
                if 0 <= record.task < len(tasks) and _matches(record, tasks[record.task], objects):
                    chosen[record.task] = record
        lost = [
            task.key for task in tasks if not self._is_good(chosen.get(task.index), task, objects)
        ]
        if lost:
            raise IntegrityError(
                f"{self.url} cannot be committed: {len(lost)} of {len(tasks)} objects are missing, or "
                f"are not what was written: {listing(lost)}.",
                kind=Kind.LOST_OBJECT,
                hint=self._lost_hint(),
                url=self.url,
                objects=lost,
            )
        return chosen

    def _is_good(self, record: Record | None, task: Task, objects: Mapping[str, FileStat]) -> bool:
        if _matches(record, task, objects):
            return True
        stat = self._find(task)
        if record is None or stat is None or stat.nbytes != task.nbytes:
            return False
        return record.token == stat.token or self._read_back(task, stat.name) == record.digest

    def _settle(self) -> None:
        """Delete what dead writers left: unfinished files, and objects of an abandoned plan.

        A file that was unfinished when this run began may still belong to a running writer of the
        same plan. That writer finds the claim sealed and does its work again: `_despite_sweeps`.
        """
        names = [*self._strays(), *self._leftovers]
        if names:
            self._files.delete(names)

    def _despite_sweeps(self, act: Callable[[], _Result]) -> _Result:
        """Do ``act``, and do it again where a commit of the same plan swept or moved its file."""
        for _ in range(_SWEEPS):
            try:
                return act()
            except StorageError:
                self._log.check(cached=False)
                if not self._log.sealed:
                    raise
        return act()


def _matches(record: Record | None, task: Task, objects: Mapping[str, FileStat]) -> bool:
    """Whether the object is as it was right after the task was done."""
    stat = objects.get(task.key)
    return (
        record is not None
        and stat is not None
        and record.nbytes == stat.nbytes == task.nbytes
        and record.token == stat.token
    )
