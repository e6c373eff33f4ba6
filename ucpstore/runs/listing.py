"""What lies in a run: committed steps, unfinished and superseded attempts, a framework's tags.

Listings, the head of every root document and claims are all that is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ucpstore.claims import COMMIT, DELETION, VERSION, current_claim
from ucpstore.contracts import Format
from ucpstore.engine.sizes import format_bytes
from ucpstore.errors import CheckpointNotFoundError, UcpStoreError, UncommittedError, listing
from ucpstore.io import open_files
from ucpstore.io.base import Files, FileStat
from ucpstore.runs.names import StepName, pointer_step, read_pointer, step_folder
from ucpstore.store.documents import FORMAT, ROOT, RootAttributes, load_json, root_attributes

__all__ = [
    "Status",
    "Step",
    "Steps",
    "find_step",
    "is_current",
    "list_steps",
    "look_at",
    "open_folder",
    "peek_root",
    "pointers",
]

_HEAD_BYTES = 64 * 1024
_HEAD = b'{"attributes":{"' + FORMAT.encode() + b'":'
_THREADS = 16
_LATEST = "latest"
_LATEST_LIMIT = 4096


class Status(StrEnum):
    """What a folder of a run holds."""

    COMMITTED = "committed"
    SUPERSEDED = "superseded"
    """Committed, but the step's pointer names another attempt."""
    UNFINISHED = "unfinished"
    """Claimed: somebody writes it, or was interrupted; the same command finishes it."""
    SEALED = "sealed"
    """All objects are written and checked, only metadata is missing; the same command finishes it."""
    ABANDONED = "abandoned"
    DELETING = "deleting"
    """A gc took it and has not come to the end."""
    UNREADABLE = "unreadable"
    """A root document or claim that is not one of ours."""
    FOUND = "found"
    """A checkpoint of a framework; whether it is whole, only opening it tells."""


@dataclass(frozen=True, slots=True)
class Step:
    """A folder of a run.

    Attributes
    ----------
    name : str
        Of the folder, which is also its tag.
    step : int or None
        From the folder's name, else from its root document.
    url : str
    format : str
    status : Status
    current : bool
        The folder is what the run has for this step.
    num_objects, nbytes : int or None
        Of a committed checkpoint as recorded, otherwise of what is stored.
    plan_digest : str or None
    changed_at : float or None
        When the root document, or else the newest object, was written: seconds since 1970 by the storage's
        clock.
    """

    name: str
    step: int | None
    url: str
    format: str
    status: Status
    current: bool
    num_objects: int | None
    nbytes: int | None
    plan_digest: str | None
    changed_at: float | None


@dataclass(frozen=True, slots=True)
class Steps:
    """Everything that lies in a run, in order of steps.

    Attributes
    ----------
    url : str
    latest : str or None
        Folder that `ucpstore.open` of the run opens.
    steps : tuple of Step
    """

    url: str
    latest: str | None
    steps: tuple[Step, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON values (``schemas/steps.schema.json``)."""
        return {
            "version": VERSION,
            "url": self.url,
            "latest": self.latest,
            "steps": [asdict(step) for step in self.steps],
        }

    def rows(self) -> list[tuple[str, ...]]:
        """For a table: name, step, status, objects, bytes, format, plan digest."""
        return [
            (
                step.name + (" *" if step.name == self.latest else ""),
                "-" if step.step is None else str(step.step),
                str(step.status),
                "-" if step.num_objects is None else str(step.num_objects),
                "-" if step.nbytes is None else format_bytes(step.nbytes),
                step.format,
                "-" if step.plan_digest is None else step.plan_digest[:19],
            )
            for step in self.steps
        ]


def open_folder(files: Files, folder: str) -> Files:
    """The folder of a run as files of its own."""
    return open_files(f"{files.url.rstrip('/')}/{folder}", files.options)


def peek_root(files: Files, stat: FileStat) -> RootAttributes | None:
    """What the root document ``stat`` says of the checkpoint, by a read of at most 64 KiB as a rule."""
    name = f"{files.url}/{ROOT}"
    head = files.read(ROOT, 0, min(stat.nbytes, _HEAD_BYTES))
    if stat.nbytes > _HEAD_BYTES and head.startswith(_HEAD):
        try:
            # The attributes come first, and are shorter.
            found, _ = json.JSONDecoder().raw_decode(head.decode("utf-8", "ignore"), len(_HEAD))
            return root_attributes({"attributes": {FORMAT: found}}, name)
        except ValueError:
            pass
    document = load_json(head if stat.nbytes <= _HEAD_BYTES else files.read(ROOT))
    return root_attributes(document, name) if isinstance(document, dict) else None


def pointers(files: Files) -> dict[int, str]:
    """Folder by step, of the run's pointers."""
    names = [stat.name for stat in files.list("", recursive=False)]
    return {
        step: read_pointer(files, name).folder
        for name in names
        if (step := pointer_step(name)) is not None
    }


def is_current(folder: str, pointed: Mapping[int, str]) -> bool:
    """Whether the folder is what the run has for its step."""
    name = StepName.parse(folder)
    if name is None:
        return True
    return pointed.get(name.step, step_folder(name.step)) == folder


def list_steps(files: Files, formats: Sequence[Format]) -> Steps:
    """Look at every folder of the run.

    Parameters
    ----------
    files : Files
        The run.
    formats : sequence of Format
        Frameworks whose checkpoints are told as well.

    Raises
    ------
    CheckpointNotFoundError
        There are no checkpoints.
    """
    pointed, latest_tag = pointers(files), _latest_tag(files)
    folders = [name for name in files.folders() if not name.startswith(".")]

    def look(folder: str) -> Step | None:
        inner = open_folder(files, folder)
        return look_at(inner, folder, pointed) or _foreign(inner, folder, formats, latest_tag)

    with ThreadPoolExecutor(_THREADS) as pool:
        steps = [step for step in pool.map(look, folders) if step is not None]
    if not steps:
        raise CheckpointNotFoundError(
            f"{files.url} holds no checkpoints: looked at {len(folders)} folders.",
            hint="Give the folder of the run, such as run with run/step-00001000 in it.",
            url=files.url,
        )
    steps.sort(key=lambda step: (step.step is None, step.step or 0, step.name))
    own = [s for s in steps if s.status == Status.COMMITTED and StepName.parse(s.name)]
    latest = own[-1].name if own else None
    if latest is None and any(step.name == latest_tag for step in steps):
        latest = latest_tag
    return Steps(files.url, latest, tuple(steps))


def look_at(files: Files, folder: str, pointed: Mapping[int, str]) -> Step | None:
    """What a folder holds of ours; None where that is nothing."""
    parsed = StepName.parse(folder)
    stats = {stat.name: stat for stat in files.list("", recursive=False)}
    step = None if parsed is None else parsed.step
    current = is_current(folder, pointed)

    def found(status: Status, **facts: Any) -> Step:
        known = {
            "num_objects": None,
            "nbytes": None,
            "plan_digest": None,
            "changed_at": None,
            **facts,
        }
        return Step(
            name=folder,
            step=step,
            url=files.url,
            format=FORMAT,
            status=status,
            current=current,
            **known,
        )

    try:
        root = stats.get(ROOT)
        attributes = peek_root(files, root) if root is not None else None
        if root is not None and attributes is not None:
            step = attributes.step if step is None else step
            return found(
                Status.COMMITTED if current else Status.SUPERSEDED,
                num_objects=attributes.num_objects,
                nbytes=attributes.nbytes,
                plan_digest=attributes.plan_digest,
                changed_at=root.changed_at,
            )
        number, claim = current_claim(files)
        if not number or claim is None or COMMIT in (s.name for s in files.list(".ucpstore")):
            return None
        stored = files.list()
        objects = [stat for stat in stored if stat.name.startswith(("params/", "common/"))]
        if claim.plan_digest is None and not objects:
            return None  # a tombstone
        times = [stat.changed_at for stat in stored if stat.changed_at is not None]
        return found(
            _claim_status(claim.plan_digest, sealed=claim.sealed),
            num_objects=len(objects),
            nbytes=sum(stat.nbytes for stat in objects),
            plan_digest=None if claim.plan_digest == DELETION else claim.plan_digest,
            changed_at=max(times, default=None),
        )
    except CheckpointNotFoundError:
        return None  # deleted while it was looked at
    except (UcpStoreError, ValueError) as error:
        if isinstance(error, OSError):
            raise
        return found(Status.UNREADABLE)


def _claim_status(plan_digest: str | None, *, sealed: bool) -> Status:
    if plan_digest is None:
        return Status.ABANDONED
    if plan_digest == DELETION:
        return Status.DELETING
    return Status.SEALED if sealed else Status.UNFINISHED


def _foreign(
    files: Files, folder: str, formats: Sequence[Format], latest: str | None
) -> Step | None:
    """A framework's checkpoint, told by the names of its files."""
    for format_ in formats:
        if format_.detect(files).matches:
            stored = [s for s in files.list() if not s.name.startswith(".ucpstore/")]
            times = [stat.changed_at for stat in stored if stat.changed_at is not None]
            number = re.search(r"(\d{1,18})\Z", folder)
            return Step(
                name=folder,
                step=None if number is None else int(number[1]),
                url=files.url,
                format=format_.name,
                status=Status.FOUND,
                current=folder == latest,
                num_objects=len(stored),
                nbytes=sum(stat.nbytes for stat in stored),
                plan_digest=None,
                changed_at=max(times, default=None),
            )
    return None


def _latest_tag(files: Files) -> str | None:
    """What a framework's ``latest`` names."""
    try:
        return files.read(_LATEST)[:_LATEST_LIMIT].decode("utf-8", "replace").strip()
    except CheckpointNotFoundError:
        return None


def find_step(files: Files, tag: str | None = None) -> str | None:
    """Folder of the latest committed step of a run, or of the step ``tag``; None where this is no run.

    Parameters
    ----------
    files : Files
    tag : str, optional
        Number of a step, or name of a folder of the run (also one that its pointer does not name).

    Raises
    ------
    CheckpointNotFoundError
        The run has no such step.
    UncommittedError
        The run has no committed step.
    """
    folders = {name: parsed for name in files.folders() if (parsed := StepName.parse(name))}
    if not folders:
        return None
    if tag is not None and tag in folders:
        return tag
    pointed = pointers(files)
    current = {parsed.step: name for name, parsed in folders.items() if is_current(name, pointed)}
    if tag is not None:
        if tag.isascii() and tag.isdigit() and int(tag) in current:
            return current[int(tag)]
        raise CheckpointNotFoundError(
            f"{files.url} has no step {tag!r}; it has {listing(map(str, sorted(current)))}.",
            hint="List them with `ucpstore steps RUN`.",
            url=files.url,
        )
    for step in sorted(current, reverse=True):
        found = look_at(open_folder(files, current[step]), current[step], pointed)
        if found is not None and found.status == Status.COMMITTED:
            return found.name
    raise UncommittedError(
        f"{files.url} has no committed step among {len(current)}.",
        hint="List them with `ucpstore steps RUN`.",
        url=files.url,
    )
