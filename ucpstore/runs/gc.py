"""Deleting what a run no longer needs: old steps, dead attempts, stray objects.

**What may go.** Only folders that are named as steps (`ucpstore.runs.names`) and that prove to be ours, by a root
document or claims; in them only objects with names that we give. The latest committed step always stays.

**How a folder goes.** First a claim of its own (`ucpstore.claims.DELETION`) that fences every writer; then
the root document, so that nothing opens any more; then objects; at last a free claim, so that the folder may be
written to again. That last claim stays behind as a tombstone until the next gc after the grace period. Once a
root is gone, a gc that dies is continued by the next one, of whatever arguments. Readers that have the
checkpoint open get an error that says so.

**Time** is the storage's own: an object that is written now tells it, so that clocks of hosts do not matter.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ucpstore.claims import (
    CLAIMS,
    DELETION,
    VERSION,
    Claim,
    claim_name,
    claim_number,
    current_claim,
    encode,
)
from ucpstore.engine.sizes import format_bytes
from ucpstore.errors import AlreadyExistsError, Kind, PlanError, StorageError
from ucpstore.io.base import Files, FileStat
from ucpstore.runs.listing import Status, Step, is_current, look_at, open_folder, pointers
from ucpstore.runs.names import StepName, pointer_name
from ucpstore.store.documents import ROOT
from ucpstore.store.source import StoreSource

__all__ = ["Deletion", "Policy", "Swept", "collect", "parse_seconds"]

_TEMPORARY = ".ucpstore/tmp"
_BATCH = 200
_PASSES = 3
_OBJECT = re.compile(r"(params|common)/(.+/)?(c(\.\d+)*|zarr\.json)")
_RECORDS = re.compile(
    r"\.ucpstore/(done/\d{6}-[0-9a-f]{24}\.json|tmp/[^/]+\.part|tmp/create\.lock)"
)


_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_seconds(duration: float | str) -> float:
    """Seconds of ``"90s"``, ``"30m"``, ``"12h"``, ``"1d"`` or a plain number.

    Raises
    ------
    PlanError
    """
    if isinstance(duration, int | float) and not isinstance(duration, bool):
        return float(duration)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(duration).strip(), re.ASCII)
    if match is None:
        raise PlanError(
            f"{duration!r} is not a duration.",
            hint="Write 90s, 30m, 12h, 1d or a number of seconds.",
        )
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True, slots=True)
class Policy:
    """What stays.

    Attributes
    ----------
    keep_last : int, optional
        This many of the latest committed steps. Without it and without ``keep_every`` all stay.
    keep_every : int, optional
        Besides, steps that are multiples of this.
    grace : float, seconds
        Attempts and strays that changed within this time stay: somebody may be at work there.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    grace: float = 86400.0

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and value >= 1):
                raise PlanError(
                    f"cannot collect with {name}={value!r}: expected a whole number from 1."
                )
        if not (isinstance(self.grace, int | float) and 0 <= self.grace < float("inf")):
            raise PlanError(f"cannot collect with grace={self.grace!r}: expected seconds from 0.")

    def keeps(self, steps: Sequence[int]) -> set[int]:
        """Which of the committed steps stay."""
        if self.keep_last is None and self.keep_every is None:
            return set(steps)
        kept = sorted(steps)[-(self.keep_last or 1) :]
        return {*kept, *(step for step in steps if self.keep_every and step % self.keep_every == 0)}


@dataclass(frozen=True, slots=True)
class Deletion:
    """One thing that goes.

    Attributes
    ----------
    name : str
        Folder (whole), or object of the run.
    reason : str
        ``old``, ``superseded``, ``abandoned``, ``unfinished``, ``deleting`` (begun by another gc), ``strays``
        (single objects of a checkpoint that stays), ``tombstone``, ``pointer``.
    step : int or None
    num_objects, nbytes : int
    done : bool
        It is gone; false in a dry run, or where somebody was faster: see ``note``.
    note : str
    """

    name: str
    reason: str
    step: int | None
    num_objects: int
    nbytes: int
    done: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Swept:
    """What a gc found, and did.

    Attributes
    ----------
    url : str
    dry_run : bool
    kept : tuple of str
        Committed folders that stay.
    deletions : tuple of Deletion
    """

    url: str
    dry_run: bool
    kept: tuple[str, ...]
    deletions: tuple[Deletion, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON values (``schemas/gc.schema.json``)."""
        return {
            "version": VERSION,
            "url": self.url,
            "dry_run": self.dry_run,
            "kept": list(self.kept),
            "deletions": [asdict(deletion) for deletion in self.deletions],
        }

    def summary(self) -> str:
        """A line for everything that goes, and one for all."""
        lines = [
            f"{'would delete' if self.dry_run else 'deleted' if d.done else 'kept'} {d.name}: {d.reason},"
            f" {d.num_objects} objects, {format_bytes(d.nbytes)}"
            + (f" ({d.note})" if d.note else "")
            for d in self.deletions
        ]
        total = sum(d.nbytes for d in self.deletions if d.done or self.dry_run)
        verb = "would free" if self.dry_run else "freed"
        lines.append(f"{self.url}: {verb} {format_bytes(total)}; {len(self.kept)} steps stay")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder that is named as a step, as it was found."""

    name: str
    step: int
    files: Files
    found: Step | None
    claim: int
    claimed: Claim | None
    stored: tuple[FileStat, ...]

    @property
    def changed_at(self) -> float | None:
        """When anything in it was last written; None where the storage does not tell."""
        times = [stat.changed_at for stat in self.stored]
        return max((t for t in times if t is not None), default=None) if None not in times else None

    @property
    def status(self) -> Status | None:
        return None if self.found is None else self.found.status


def collect(files: Files, policy: Policy, *, dry_run: bool = True) -> Swept:
    """Delete what ``policy`` does not keep; see the module's text.

    Parameters
    ----------
    files : Files
        The run.
    policy : Policy
    dry_run : bool
        Only tell.

    Raises
    ------
    StorageError
    """
    now = time.time() if dry_run else _storage_time(files)
    pointed = pointers(files)
    folders = [
        _look(files, name, parsed, pointed)
        for name in files.folders()
        if (parsed := StepName.parse(name)) and not _is_link(files, name)
    ]
    committed = [f for f in folders if f.status == Status.COMMITTED]
    kept = policy.keeps([folder.step for folder in committed])
    found = [*_choose(folders, kept, now - policy.grace, pointed)]
    done = []
    for deletion, folder in found:
        act = deletion if dry_run else _carry_out(files, deletion, folder, now - policy.grace)
        done.append(act)
    done += _pointers(files, pointed, folders, done, before=now - policy.grace, dry_run=dry_run)
    names = tuple(folder.name for folder in committed if folder.step in kept)
    return Swept(files.url, dry_run, names, tuple(done))


def _storage_time(files: Files) -> float:
    """Seconds since 1970 by the storage's clock."""
    name = f".ucpstore/gc-{uuid.uuid4().hex}.json"
    files.write(name, b"{}\n")
    try:
        stat = files.stat(name)
    finally:
        files.delete([name])
    return time.time() if stat is None or stat.changed_at is None else stat.changed_at


def _is_link(files: Files, folder: str) -> bool:
    """Links lead to what somebody else may use."""
    return files.is_local and Path(files.url, folder).is_symlink()


def _look(files: Files, name: str, parsed: StepName, pointed: Mapping[int, str]) -> _Folder:
    inner = open_folder(files, name)
    found = look_at(inner, name, pointed)
    number, claim = (
        current_claim(inner) if found is None or found.status != Status.UNREADABLE else (0, None)
    )
    stored = (*inner.list(), *(inner.list(_TEMPORARY) if inner.is_local else ()))
    return _Folder(name, parsed.step, inner, found, number, claim, stored)


def _choose(
    folders: Sequence[_Folder], kept: set[int], before: float, pointed: Mapping[int, str]
) -> Iterator[tuple[Deletion, _Folder]]:
    """What goes, and in which order: attempts before what their step's pointer names."""
    for folder in sorted(folders, key=lambda f: (f.step, is_current(f.name, pointed), f.name)):
        # A time that is unknown is never long ago.
        aged = folder.changed_at is not None and folder.changed_at <= before
        reason = ""
        match folder.status:
            case Status.COMMITTED if folder.step not in kept:
                reason = "old"
            case Status.SUPERSEDED if folder.step in pointed and aged:
                reason = "superseded"
            case Status.DELETING:
                reason = "deleting"
            case Status.ABANDONED | Status.UNFINISHED if aged:
                reason = str(folder.status)
            case None if aged and _is_tombstone(folder):
                reason = "tombstone"
        if reason:
            ours = [stat for stat in folder.stored if _is_ours(stat.name)]
            yield _deletion(folder, reason, ours), folder
        elif folder.status == Status.COMMITTED:
            strays = _strays(folder, before)
            if strays:
                yield _deletion(folder, "strays", strays), folder


def _deletion(folder: _Folder, reason: str, stats: Sequence[FileStat]) -> Deletion:
    return Deletion(folder.name, reason, folder.step, len(stats), sum(s.nbytes for s in stats))


def _is_ours(name: str) -> bool:
    """Whether the name is one that we give to an object of a checkpoint."""
    if name == ROOT or claim_number(name) is not None:
        return True
    return _OBJECT.fullmatch(name) is not None or _RECORDS.fullmatch(name) is not None


def _is_tombstone(folder: _Folder) -> bool:
    free = folder.claimed is not None and folder.claimed.plan_digest is None
    return free and all(claim_number(stat.name) is not None for stat in folder.stored)


def _strays(folder: _Folder, before: float) -> list[FileStat]:
    """Old objects with names of ours that a committed checkpoint does not name."""
    old = [
        stat
        for stat in folder.stored
        if stat.name != ROOT
        and stat.changed_at is not None
        and stat.changed_at <= before
        and (_OBJECT.fullmatch(stat.name) or stat.name.startswith(_TEMPORARY + "/"))
    ]
    if not old:
        return []
    named = StoreSource(folder.files).object_names()
    return [s for s in old if s.name not in named and _is_ours(s.name)]


def _carry_out(files: Files, deletion: Deletion, folder: _Folder, before: float) -> Deletion:
    """Delete it, unless somebody else has the better claim."""
    try:
        if deletion.reason == "strays":
            _delete(folder.files, [stat.name for stat in _strays(folder, before)])
        elif deletion.reason == "tombstone":
            _delete(folder.files, [stat.name for stat in folder.stored])
        elif note := _changed(files, deletion.reason, folder, before):
            return replace(deletion, note=note)
        else:
            _delete_folder(folder)
    except AlreadyExistsError as error:
        return replace(deletion, note=error.message)
    left = [stat.name for stat in folder.files.list() if not _is_ours(stat.name)]
    note = f"{len(left)} objects are not ours and stay" if left else ""
    return replace(deletion, done=True, note=note)


def _changed(files: Files, reason: str, folder: _Folder, before: float) -> str:
    """What speaks against the deletion since the folder was looked at; empty where nothing does."""
    pointed = pointers(files)
    if is_current(folder.name, pointed) != (folder.found is not None and folder.found.current):
        return "the step's pointer was changed meanwhile"
    if reason in ("old", "deleting"):
        return ""
    now = _look(files, folder.name, StepName(folder.step, ""), pointed)
    if now.claim != folder.claim or now.changed_at is None or now.changed_at > before:
        return "somebody writes there"
    return ""


def _delete_folder(folder: _Folder) -> None:
    """Fence writers, then the root, then everything else; leave a tombstone."""
    files, fence = folder.files, _claim_for_deletion(folder)
    _delete(files, [ROOT])
    unfinished = [stat.name for stat in folder.stored if stat.name.startswith(f"{_TEMPORARY}/")]
    for _ in range(_PASSES):
        listed = [*(stat.name for stat in files.list()), *unfinished]
        unfinished = []
        # Again where a writer that had passed the fence put one more object there.
        names = [n for n in listed if _is_ours(n) and claim_number(n) is None]
        if not names:
            break
        _delete(files, names, check=lambda: _check_fence(files, fence))
    _check_fence(files, fence)
    _create(files, claim_name(fence + 1), encode(Claim(VERSION, None, fence + 1)))
    _delete(files, [claim_name(number) for number in _claims(files) if number <= fence])


def _claim_for_deletion(folder: _Folder) -> int:
    """Number of the claim under which the folder is deleted.

    Raises
    ------
    AlreadyExistsError
        Somebody claimed it since it was looked at (``CLAIMED``).
    """
    if folder.claimed is not None and folder.claimed.plan_digest == DELETION:
        return folder.claim
    number = folder.claim + 1
    claim = Claim(VERSION, DELETION, number)
    if not _create(folder.files, claim_name(number), encode(claim)):
        now, found = current_claim(folder.files)
        if now == number and found is not None and found.plan_digest == DELETION:
            return number  # by another gc, or by this one's put whose answer was lost
        raise AlreadyExistsError(
            f"{folder.files.url} was claimed by somebody else meanwhile",
            kind=Kind.CLAIMED,
            url=folder.files.url,
        )
    return number


def _create(files: Files, name: str, data: bytes) -> bool:
    """Create an object, also where another gc swept the unfinished file of the first attempt."""
    try:
        return files.create(name, data)
    except StorageError:
        return files.create(name, data)


def _check_fence(files: Files, fence: int) -> None:
    """Stop where the folder was freed: another gc has finished, and a new checkpoint may lie there."""
    if fence not in (numbers := _claims(files)) or max(numbers) != fence:
        raise AlreadyExistsError(
            f"{files.url} was deleted by another gc meanwhile", kind=Kind.ABANDONED, url=files.url
        )


def _claims(files: Files) -> list[int]:
    numbers = (claim_number(stat.name) for stat in files.list(CLAIMS, recursive=False))
    return sorted(number for number in numbers if number is not None)


def _delete(files: Files, names: Iterable[str], *, check: Callable[[], None] | None = None) -> None:
    names = [name for name in names if not _leaves(files, name)]
    for start in range(0, len(names), _BATCH):
        if check is not None:
            check()
        files.delete(names[start : start + _BATCH])


def _leaves(files: Files, name: str) -> bool:
    """Whether a link leads out of the folder on the way to the object."""
    if not files.is_local:
        return False
    root = os.path.realpath(files.url)
    folder = os.path.realpath(os.path.dirname(os.path.join(files.url, name)))
    return os.path.commonpath([root, folder]) != root


def _pointers(
    files: Files,
    pointed: Mapping[int, str],
    folders: Sequence[_Folder],
    done: Sequence[Deletion],
    *,
    before: float,
    dry_run: bool,
) -> Iterator[Deletion]:
    """Pointers to what is gone: last, so that no older attempt takes the place of what it named."""
    gone = {d.name for d in done if d.reason != "strays" and (d.done or dry_run)}
    there = {folder.name for folder in folders if folder.status is not None} - gone
    left = {folder.step for folder in folders if folder.name in there}
    for step, name in pointed.items():
        pointer = pointer_name(step)
        stat = files.stat(pointer)
        aged = stat is not None and stat.changed_at is not None and stat.changed_at <= before
        if stat is None or name in there or step in left or not (name in gone or aged):
            continue
        if not dry_run:
            files.delete([pointer])
        yield Deletion(pointer, "pointer", step, 1, stat.nbytes, done=not dry_run)
