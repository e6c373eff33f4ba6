"""Committed checkpoints after their conversion: moved (`copy`), listed (`steps`), and deleted (`gc`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ucpstore.api import DEFAULT_MEMORY_LIMIT
from ucpstore.engine.plan import Plan, make_plan
from ucpstore.engine.run import Report, Workers, run
from ucpstore.engine.sizes import parse_bytes
from ucpstore.engine.worker import Settings
from ucpstore.errors import PlanError, UnsupportedSourceError
from ucpstore.events import Listener
from ucpstore.io import Url, open_files
from ucpstore.io.rate import RateLimit
from ucpstore.io.serverside import same_storage
from ucpstore.io.urls import parse_url
from ucpstore.opening import find_checkpoint, formats

if TYPE_CHECKING:
    from ucpstore.runs.gc import Swept
    from ucpstore.runs.listing import Steps
    from ucpstore.store.copying import CopyTarget
    from ucpstore.store.source import StoreSource

__all__ = ["copy", "gc", "steps", "use_attempt"]


def copy(
    source: Url,
    dest: Url,
    *,
    tag: str | None = None,
    max_rate: float | str | None = None,
    server_side: bool = True,
    check: bool = True,
    executor: Executor | None = None,
    workers: int | None = None,
    threads: int | None = None,
    share: tuple[int, int] | None = None,
    memory_limit: float | str | None = None,
    retries: int = 4,
    source_options: Mapping[str, Any] | None = None,
    dest_options: Mapping[str, Any] | None = None,
    on_event: Listener | None = None,
) -> Report:
    """Copy a committed checkpoint to another URL: the same names and bytes, the root document last.

    Every object is checked while it passes: the crc32c of its chunks, and before the commit the recorded digest
    of every array. A damaged or lost object is an error that names it, and is never copied. Nothing is
    visible at ``dest`` before everything is there. After a crash the same call continues; racing calls
    co-operate.

    Parameters
    ----------
    source : str or path
        A checkpoint of our own, or a run of them: then its latest step, or the one of ``tag``. Framework
        checkpoints are refused, since nothing in them tells whether a file is whole: convert them.
    dest : str or path
        Where nothing is yet.
    tag : str, optional
        Step of a run: ``"1000"`` or the folder's name.
    max_rate : number or str, optional, bytes per second
        For what passes through this call's processes, on average, such as ``"100MB"``.
    server_side : bool
        Where both sides are S3 with the same options, the server copies and this process only reads the copy
        back for the check.
    check : bool
        False takes the server's word for what it copied (equal ETags) instead of reading it back; what passes
        through this process is checked in any case. Use `ucpstore.verify` later.
    executor, workers, threads, share, memory_limit, retries, on_event
        As for `ucpstore.convert`.
    source_options, dest_options : mapping, optional
        Storage options of the two sides, in fsspec's words.

    Returns
    -------
    Report

    Raises
    ------
    IntegrityError
        An object of the source is lost or damaged, or the source changed meanwhile.
    UnsupportedSourceError
        The source is not one of our own checkpoints.
    UncommittedError
        It is not finished.
    AlreadyExistsError
        ``dest`` holds, or is claimed for, something else.
    PlanError
        The memory limit, the free space or ``dest`` do not allow it; nothing was written.
    WorkerError, StorageError
    """
    chosen = Workers(
        executor=executor,
        workers=workers,
        threads=threads,
        share=share,
        memory_limit=DEFAULT_MEMORY_LIMIT if memory_limit is None else parse_bytes(memory_limit),
    )
    found = find_checkpoint(open_files(os.fspath(source), source_options), tag=tag)
    request = _Request(
        source=found.url,
        dest=parse_url(dest).url,
        rate=_rate(max_rate, chosen.count),
        server_side=server_side,
        check=check,
        source_options=dict(source_options or {}),
        dest_options=dict(dest_options or {}),
    )
    plan, opened, target = request.open()
    opened.require_objects()
    return run(
        (opened, target),
        plan,
        workers=chosen,
        opener=partial(_open_job, request),
        settings=Settings(threads=1, retries=retries),
        emit=on_event,
    )


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Everything that decides a copy, so that a worker process can open it again."""

    source: str
    dest: str
    rate: RateLimit | None
    server_side: bool
    check: bool
    source_options: Mapping[str, Any] = field(repr=False)
    dest_options: Mapping[str, Any] = field(repr=False)

    def open(self) -> tuple[Plan, StoreSource, CopyTarget]:
        """Open both sides and plan; reads metadata only."""
        from ucpstore.store.copying import CopyTarget
        from ucpstore.store.source import StoreFormat, StoreSource

        origin = open_files(self.source, self.source_options)
        detection = StoreFormat().detect(origin)
        if not detection.matches:
            raise UnsupportedSourceError(
                f"cannot copy {self.source}: {detection.evidence}; expected a checkpoint that ucpstore committed.",
                hint="Convert it to the destination (ucpstore convert SOURCE DEST): that checks what it reads.",
                url=self.source,
            )
        source = StoreSource(origin)
        files = open_files(self.dest, self.dest_options)
        inside = f"{files.url}/".startswith(f"{origin.url.rstrip('/')}/")
        if inside and files.url != origin.url and same_storage(origin, files):
            raise PlanError(
                f"{files.url} is inside the source {origin.url}, expected a destination outside of it.",
                hint="Choose another destination.",
            )
        target = CopyTarget(
            files, source, rate=self.rate, server_side=self.server_side, check=self.check
        )
        members = [member for array in source.array_specs() for member in array.members]
        plan = make_plan(source, target, states=members, free_space=files.free_space())
        return replace(plan, digest=target.digest), source, target


def _open_job(request: _Request) -> tuple[str, StoreSource, CopyTarget]:
    plan, source, target = request.open()
    return plan.digest, source, target


def _rate(max_rate: float | str | None, workers: int) -> RateLimit | None:
    """The share of one worker in what all may move."""
    if max_rate is None:
        return None
    nbytes = parse_bytes(max_rate)
    if nbytes < 1:
        raise PlanError(
            f"cannot copy with max_rate={max_rate!r}: expected at least one byte a second."
        )
    return RateLimit(nbytes / workers)


def steps(url: Url, *, storage_options: Mapping[str, Any] | None = None) -> Steps:
    """List what lies in a run: ``RUN/step-00001000/`` and so on, or a framework's tags.

    Committed steps, attempts that are unfinished, abandoned or superseded, with sizes and plan digests. Reads
    listings, claims and the heads of root documents.

    Raises
    ------
    CheckpointNotFoundError
        There are none.
    """
    from ucpstore.runs.listing import list_steps

    return list_steps(open_files(os.fspath(url), storage_options), list(formats().values()))


def use_attempt(url: Url, folder: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Make a committed folder of a run, such as ``step-00001000-b``, what the run has for its step.

    A checkpoint is never overwritten: another attempt at a step is saved beside the first, and the pointer
    ``step-00001000.json`` is swapped then. `gc` deletes what nothing points to any more.

    Raises
    ------
    PlanError
        The folder is not named as a step.
    UncommittedError, UnrecognizedSourceError
        There is no committed checkpoint in it.
    """
    from ucpstore.runs.listing import open_folder
    from ucpstore.runs.names import Pointer, StepName, write_pointer
    from ucpstore.store.source import StoreSource

    name = StepName.parse(folder)
    if name is None:
        raise PlanError(
            f"{folder!r} is not named as a step: expected step-00001000 or step-00001000-b."
        )
    files = open_files(os.fspath(url), storage_options)
    attributes = StoreSource(open_folder(files, folder)).attributes
    write_pointer(files, Pointer(step=name.step, folder=folder, plan_digest=attributes.plan_digest))


def gc(
    url: Url,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    grace: float | str = "1d",
    dry_run: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Swept:
    """Delete what a run no longer needs: old steps, dead attempts, stray objects. By default only tells.

    Safe beside savers and readers: a folder is claimed before it is touched, its root document goes first, and
    whoever still reads it gets an error. Only folders named as steps that prove to be ours, and in them only
    objects with our names, are deleted.

    Parameters
    ----------
    url : str or path
        Folder of the run.
    keep_last : int, optional
        Keep this many of the latest committed steps. Without it and ``keep_every`` all of them stay.
    keep_every : int, optional
        Keep steps that are multiples of this, besides.
    grace : number or str, seconds
        Attempts and strays younger than this stay: ``"90s"``, ``"12h"``, ``"1d"``. It must be longer than any
        saver's pause between two objects.
    dry_run : bool
    storage_options : mapping, optional

    Returns
    -------
    Swept
    """
    from ucpstore.runs.gc import Policy, collect, parse_seconds

    policy = Policy(keep_last=keep_last, keep_every=keep_every, grace=parse_seconds(grace))
    return collect(open_files(os.fspath(url), storage_options), policy, dry_run=dry_run)
