"""Who writes which object, who needs bytes of whom, and the run that follows from it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from ucpstore.contracts import Task
from ucpstore.engine.plan import Plan
from ucpstore.engine.run import Report, Workers, fitting_threads, run
from ucpstore.engine.schedule import batches
from ucpstore.engine.worker import Settings
from ucpstore.errors import StorageError
from ucpstore.events import Listener
from ucpstore.io.base import Files
from ucpstore.layout.region import Region
from ucpstore.parts.exchange import Exchange
from ucpstore.parts.files import Extent, SharedFiles
from ucpstore.pieces import PieceSource
from ucpstore.store.target import ZarrTarget

__all__ = ["Division", "divide", "run_parts"]

_BLOCK = 4 << 20
_GROUP = 32 << 20
"""Bytes of the objects that others stage for together: small tensors are too many for an object each."""
_MAX_DELAY = 30.0

Range = tuple[str, int, int]
"""File, first byte, first byte behind."""


@dataclass(frozen=True, slots=True)
class Division:
    """What one participant does. Objects are staged for in groups, named by their first task.

    Attributes
    ----------
    mine : list of int
        Tasks whose objects it writes.
    groups : mapping of int to sequence of int
        Tasks of each group of its own.
    outgoing : mapping of int to sequence of Range
        What it stages, by others' groups.
    incoming : mapping of (int, int) to sequence of Range
        What others stage for it, by group and participant.
    """

    mine: list[int] = field(default_factory=list)
    groups: dict[int, Sequence[int]] = field(default_factory=dict)
    outgoing: dict[int, Sequence[Range]] = field(default_factory=dict)
    incoming: dict[tuple[int, int], Sequence[Range]] = field(default_factory=dict)

    @property
    def part_memory(self) -> int:
        """Largest sum of what is staged for one group, in bytes."""
        sums: dict[int, int] = {}
        for (group, _), ranges in self.incoming.items():
            sums[group] = sums.get(group, 0) + _size(ranges)
        return max(sums.values(), default=0)


def divide(
    source: PieceSource, target: ZarrTarget, holders: Mapping[str, int], *, rank: int, world: int
) -> Division:
    """Divide the objects of ``target``: each is written by one of those that hold most of its bytes.

    All participants come to the same result, each for itself.

    Parameters
    ----------
    source : PieceSource
    target : ZarrTarget
    holders : mapping of str to int
        Which participant holds a file.
    rank, world : int
    """
    owned: list[list[Task]] = [[] for _ in range(world)]
    loads = [0] * world
    shared = set()
    for task in target.tasks():
        counts: dict[int, int] = {}
        for need in target.needs(task.index):
            for name, nbytes in source.held(*need).items():
                counts[holders[name]] = counts.get(holders[name], 0) + nbytes
        owner = _owner(counts, loads)
        loads[owner] += task.nbytes
        owned[owner].append(task)
        if rank in counts and len(counts) > 1:
            shared.add(task.index)
    found = Division(mine=[task.index for task in owned[rank]])
    mine = {name for name, who in holders.items() if who == rank}
    for owner, tasks in enumerate(owned):
        # In the order of the run, so that what was read for one object serves the next.
        ordered = sorted(tasks, key=lambda task: (-task.nbytes, task.index))
        for group in batches(ordered, _GROUP):
            first = group[0].index
            needs = [n for task in group if task.index in shared for n in target.needs(task.index)]
            if owner != rank:
                if ranges := _ranges(source, needs, mine):
                    found.outgoing[first] = ranges
                continue
            found.groups[first] = [task.index for task in group]
            staged: dict[tuple[int, int], list[Range]] = {}
            for one in _ranges(source, needs, holders.keys() - mine):
                staged.setdefault((first, holders[one[0]]), []).append(one)
            found.incoming.update(staged)
    return found


def _owner(counts: Mapping[int, int], loads: Sequence[int]) -> int:
    """Who writes an object: of those that hold most of it, or at least half as much, the least busy one."""
    most = max(counts.values(), default=0)
    able = [who for who, nbytes in counts.items() if 2 * nbytes >= most] or range(len(loads))
    return min(able, key=lambda who: (loads[who], -counts.get(who, 0), who))


def _ranges(
    source: PieceSource, needs: Sequence[tuple[str, str, Region]], files: Container[str]
) -> list[Range]:
    return [found for need in needs for found in source.ranges(*need, files)]


def run_parts(
    job: tuple[PieceSource, ZarrTarget],
    plan: Plan,
    division: Division,
    *,
    exchange: Exchange,
    files: SharedFiles,
    workers: Workers,
    settings: Settings,
    wait: bool,
    emit: Listener | None,
) -> Report:
    """Stage what others need, write the own objects, and commit if everything is there.

    Parameters
    ----------
    job : (PieceSource, ZarrTarget)
    plan : Plan
    division : Division
    exchange : Exchange
    files : SharedFiles
        What the source reads from.
    workers : Workers
        Threads and memory.
    settings : Settings
        Retries.
    wait : bool
        Until the checkpoint is visible, whoever commits it.
    emit : callable, optional

    Returns
    -------
    Report
    """
    source, target = job
    plan = replace(plan, min_memory=plan.min_memory + division.part_memory)
    threads = fitting_threads(plan, workers)
    owned: Sequence[int] = division.mine
    if target.begin(plan.digest):
        known = target.records()
        todo = {task for task in owned if task not in known}
        if len(known) < len(target.tasks()) and not exchange.has_staged(plan.digest):
            _stage(
                files, target, plan, division, exchange=exchange, threads=threads, settings=settings
            )
        needed = {group for group, tasks in division.groups.items() if todo & set(tasks)}
        incoming = {key: ranges for key, ranges in division.incoming.items() if key[0] in needed}
        files.attach(
            [extent for key, ranges in incoming.items() for extent in _extents(key, ranges)],
            fetch=lambda group, who: exchange.read_part(
                plan.digest, group, who, _size(incoming[group, who])
            ),
            memory=threads * division.part_memory,
        )
        ranks = {who for _, who in incoming}
        exchange.wait_for_parts(plan.digest, ranks, committed=target.committed)
    report = run(
        (source, target),
        plan,
        workers=workers,
        opener=_no_processes,
        settings=settings,
        emit=emit,
        owned=owned,
    )
    if wait and not report.committed:
        exchange.wait_for_commit(target.committed)
        report = replace(report, committed=True)
    return report


def _stage(
    files: Files,
    target: ZarrTarget,
    plan: Plan,
    division: Division,
    *,
    exchange: Exchange,
    threads: int,
    settings: Settings,
) -> None:
    """Write what this participant holds of others' objects."""

    def stage(group: int) -> None:
        ranges = division.outgoing[group]
        _retrying(
            lambda: exchange.stage(plan.digest, group, _size(ranges), _blocks(files, ranges)),
            settings,
        )

    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(stage, division.outgoing):
                pass
        _retrying(lambda: exchange.staged(plan.digest), settings)
    except StorageError:
        if not target.committed():  # whoever committed has swept what nobody needs any more
            raise


def _retrying(act: Callable[[], None], settings: Settings) -> None:
    """Do ``act``, again after retryable storage errors."""
    attempt = 0
    while True:
        try:
            act()
        except StorageError as error:
            attempt += 1
            if not error.retryable or attempt > settings.retries:
                raise
            delay = min(settings.retry_delay * 2 ** (attempt - 1), _MAX_DELAY)
            time.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not cryptography
        else:
            return


def _blocks(files: Files, ranges: Sequence[Range]) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_BLOCK, max(stop - start for _, start, stop in ranges))))
    for name, start, stop in ranges:
        for at in range(start, stop, _BLOCK):
            block = buffer[: min(_BLOCK, stop - at)]
            files.read_into(name, at, [block])
            yield block


def _extents(key: tuple[int, int], ranges: Sequence[Range]) -> Iterator[Extent]:
    """Where the bytes of the ranges lie in the part that is made of them."""
    offset = 0
    for name, start, stop in ranges:
        yield Extent(name, start, stop, key, offset)
        offset += stop - start


def _size(ranges: Sequence[Range]) -> int:
    return sum(stop - start for _, start, stop in ranges)


def _no_processes() -> tuple[str, PieceSource, ZarrTarget]:
    raise NotImplementedError("what a participant holds cannot be opened again by another process")
