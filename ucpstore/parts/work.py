"""Who writes which object, who needs bytes of whom, and the run that follows from it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from ucpstore.engine.plan import Plan
from ucpstore.engine.run import Report, Workers, fitting_threads, run
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
_MAX_DELAY = 30.0

Range = tuple[str, int, int]
"""File, first byte, first byte behind."""


@dataclass(frozen=True, slots=True)
class Division:
    """What one participant does.

    Attributes
    ----------
    mine : list of int
        Tasks whose objects it writes.
    outgoing : mapping of int to sequence of Range
        What it stages, by task.
    incoming : mapping of (int, int) to sequence of Range
        What others stage for it, by task and participant.
    """

    mine: list[int] = field(default_factory=list)
    outgoing: dict[int, Sequence[Range]] = field(default_factory=dict)
    incoming: dict[tuple[int, int], Sequence[Range]] = field(default_factory=dict)

    @property
    def part_memory(self) -> int:
        """Largest sum of what is staged for one task, in bytes."""
        sums: dict[int, int] = {}
        for (task, _), ranges in self.incoming.items():
            sums[task] = sums.get(task, 0) + _size(ranges)
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
    found = Division()
    mine = {name for name, who in holders.items() if who == rank}
    others = holders.keys() - mine
    loads = [0] * world
    for task in target.tasks():
        counts: dict[int, int] = {}
        needs = target.needs(task.index)
        for need in needs:
            for name, nbytes in source.held(*need).items():
                counts[holders[name]] = counts.get(holders[name], 0) + nbytes
        owner = _owner(counts, loads)
        loads[owner] += task.nbytes
        if owner == rank:
            found.mine.append(task.index)
            staged: dict[tuple[int, int], list[Range]] = {}
            for one in _ranges(source, needs, others if len(counts) > 1 else ()):
                staged.setdefault((task.index, holders[one[0]]), []).append(one)
            found.incoming.update(staged)
        elif rank in counts:
            found.outgoing[task.index] = _ranges(source, needs, mine)
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
        todo = [task for task in owned if task not in known]
        if len(known) < len(target.tasks()) and not exchange.has_staged(plan.digest):
            _stage(
                files, target, plan, division, exchange=exchange, threads=threads, settings=settings
            )
        incoming = {key: ranges for key, ranges in division.incoming.items() if key[0] in todo}
        files.attach(
            [extent for key, ranges in incoming.items() for extent in _extents(key, ranges)],
            fetch=lambda task, who: exchange.read_part(
                plan.digest, task, who, _size(incoming[task, who])
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

    def stage(task: int) -> None:
        ranges = division.outgoing[task]
        _retrying(
            lambda: exchange.stage(plan.digest, task, _size(ranges), _blocks(files, ranges)),
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
