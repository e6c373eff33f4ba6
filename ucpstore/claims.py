"""How writers of one destination agree: claims and done records.

Everything rests on one primitive, `Files.create` (an object comes into being whole, once, for one
winner), so POSIX file systems and object stores follow the same code and no lock is ever held.

**Claims** are objects ``.ucpstore/claims/000001.json``, ``000002.json``, ...; the highest number is the
current claim. Creating number N+1 *is* the compare-and-swap on N. A claim names the digest of the plan
that owns the destination, or none once its owner was declared dead (`abandon`). Writers of the same plan
join a claim; any other plan is refused.

**Fencing**: before an object becomes visible, and before a done record, a writer looks whether its claim
is still there (somebody may have deleted the destination and begun anew) and whether claim N+1 exists.
A writer that sleeps through that instant can still replace an object after its claim was lost;
the commit (`ucpstore.commit.LoggedTarget`) compares all objects with their records, and so finds it.
On object stores a request may be on its way for much longer, beyond the commit, too. So each put names the
object that it expects to replace (`Files.sink`): that of a writer which lost its claim is refused, unless its
heir left that very object (on S3 also one of equal bytes) in place.

**Probe**: an object store is claimed only after it was seen to refuse a create of an object that exists.

**Done records** ``.ucpstore/done/<epoch>-<content hash>.json`` are written once `Files.sync` has made
their objects durable. A resumed run trusts them and nothing else.

**Seal**: before the first metadata document is written, the committer creates one more claim, marked
``sealed``. It races with `abandon` for the same number, and one of them wins: either the destination is
free and nothing of the dead plan can be committed any more, or the commit goes through (whoever runs the
same command next finishes it). Without it, a commit that was overtaken by an abandon could publish
objects that the next plan is overwriting.

**Deletion** of a checkpoint or of an attempt (`ucpstore.runs.gc`) begins with a claim of its own, which
fences writers as an abandon does, and ends with a free one.

What makes a commit visible is the target's: a store's root document, DeepSpeed's ``latest``.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from ucpstore.contracts import Record
from ucpstore.errors import (
    AlreadyExistsError,
    CheckpointNotFoundError,
    FormatVersionError,
    IntegrityError,
    Kind,
    PlanError,
    StorageError,
    listing,
)
from ucpstore.io.base import Files

__all__ = [
    "CLAIMS",
    "COMMIT",
    "DELETION",
    "DONE",
    "INDEX",
    "PARTS",
    "STAGING",
    "VERSION",
    "Claim",
    "ClaimLog",
    "Done",
    "claim_name",
    "claim_number",
    "convert",
    "current_claim",
    "decode",
    "done_name",
    "dump_json",
    "encode",
    "load_json",
]

VERSION = "1.0"
CLAIMS = ".ucpstore/claims"
DONE = ".ucpstore/done"
COMMIT = ".ucpstore/commit.json"
"""Of targets in a framework's own format: which plan is committed there."""
PARTS = ".ucpstore/parts"
"""Bytes that participants stage for each other (`ucpstore.parts`); a folder per plan."""
INDEX = ".ucpstore/index"
"""What such participants hold, and which of it they agreed on."""
STAGING = ".ucpstore/files"
"""Where such targets keep their files out of sight; a folder per plan."""

DELETION = "deletion"
"""In place of a plan's digest in a claim: a checkpoint or an attempt is being deleted (`ucpstore.runs.gc`)."""

_RECHECK_SECONDS = 2.0
"""How long a look at the claim stays good on object stores, where it costs a request."""

_Document = TypeVar("_Document", bound=msgspec.Struct)


class Claim(msgspec.Struct, frozen=True):
    """Who may write to a destination: the claim with the highest number is the current one.

    Attributes
    ----------
    version : str
    plan_digest : str or None
        The plan that owns the destination; ``None``: its owner was declared dead, it is free.
    epoch : int
        Number of the claim that opened this ownership.
    sealed : bool
        Every object was checked and the root document is about to be written; from here on the
        claim cannot be abandoned, only finished.
    """

    version: str
    plan_digest: str | None
    epoch: int
    sealed: bool = False


class Done(msgspec.Struct, frozen=True):
    """A batch of finished tasks whose objects are durable.

    ``records`` holds ``[task, nbytes, token, digest]`` with the partial digest as 32 hex digits.
    """

    version: str
    plan_digest: str
    epoch: int
    records: tuple[tuple[int, int, str, str], ...]

    @classmethod
    def of(cls, digest: str, epoch: int, records: Sequence[Record]) -> Done:
        """The document for ``records``, in task order so that equal batches are equal bytes."""
        rows = sorted((r.task, r.nbytes, r.token, f"{r.digest:032x}") for r in records)
        return cls(VERSION, digest, epoch, tuple(rows))

    def to_records(self) -> list[Record]:
        return [
            Record(task, nbytes, token, int(digest, 16))
            for task, nbytes, token, digest in self.records
        ]


def claim_name(number: int) -> str:
    """Object name of claim ``number`` (1, 2, ...)."""
    return f"{CLAIMS}/{number:06d}.json"


def claim_number(name: str) -> int | None:
    """Number of the claim with this object name; ``None`` for any other object."""
    stem = name.removeprefix(f"{CLAIMS}/").removesuffix(".json")
    return (
        int(stem) if stem.isascii() and stem.isdigit() and claim_name(int(stem)) == name else None
    )


def done_name(epoch: int, content: bytes) -> str:
    """Object name of a done document: the same batch always has the same name."""
    return f"{DONE}/{epoch:06d}-{hashlib.sha256(content).hexdigest()[:24]}.json"


def dump_json(value: Any, what: str) -> bytes:
    """``value`` as deterministic JSON (sorted keys, ASCII, one trailing newline).

    Raises
    ------
    PlanError
        ``value`` holds something that JSON lacks: NaN, an infinity, or a Python object.
    """
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"{what} cannot be written as JSON: {error}; expected JSON values only.",
            hint="Tag other values as ucpstore.tagged does.",
        ) from error
    return text.encode("ascii") + b"\n"


def load_json(data: bytes) -> Any:
    """Parse JSON: fast, and also where strings hold lone surrogates, which msgspec refuses.

    Raises
    ------
    ValueError
        Not JSON, or nested too deeply.
    """
    try:
        return msgspec.json.decode(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(data)


def encode(document: msgspec.Struct) -> bytes:
    """The bytes of a document."""
    return dump_json(msgspec.to_builtins(document), type(document).__name__)


def decode(data: bytes, cls: type[_Document], name: str) -> _Document:
    """Parse the document with object name ``name``.

    Raises
    ------
    FormatVersionError
        Written by another major version.
    IntegrityError
        Not a document of this kind.
    """
    try:
        value = load_json(data)
    except ValueError as error:
        raise _malformed(name, error) from error
    return convert(value, cls, name)


def convert(value: Any, cls: type[_Document], name: str) -> _Document:
    """A parsed document, checked; raises as `decode` does."""
    version = value.get("version") if isinstance(value, dict) else None
    if isinstance(version, str) and version.split(".")[0] != VERSION.split(".")[0]:
        raise FormatVersionError(
            f"{name} has format version {version!r}: expected {VERSION.split('.')[0]}.x.",
            hint="Read it with a release of ucpstore that knows this version.",
            name=name,
        )
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        raise _malformed(name, error) from error


def _malformed(name: str, error: Exception) -> IntegrityError:
    return IntegrityError(
        f"{name} is not a ucpstore document: {error}.", kind=Kind.MALFORMED, name=name
    )


def current_claim(files: Files) -> tuple[int, Claim | None]:
    """Number and content of the current claim; ``(0, None)`` where nobody ever claimed."""
    gone = 0
    while True:
        numbers = [claim_number(stat.name) for stat in files.list(CLAIMS, recursive=False)]
        number = max((n for n in numbers if n is not None), default=0)
        try:
            return number, _read_claim(files, number) if number else None
        except CheckpointNotFoundError:
            if number == gone:
                raise
            gone = number  # a gc deleted it after it was listed


def _read_claim(files: Files, number: int) -> Claim:
    name = claim_name(number)
    return decode(files.read(name), Claim, name)


class ClaimLog(ABC):
    """One writer's view of a destination. Picklable; safe to share between threads.

    What a commit looks like is the target's own: a subclass says how to recognise one.

    Parameters
    ----------
    files : Files
        The destination.
    """

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Names that may lie in a destination that nobody claimed."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._digest: str | None = None
        self._number = 0
        self._epoch = 0
        self._sealed = False
        self._checked = -_RECHECK_SECONDS

    @property
    def digest(self) -> str:
        """The plan that was begun.

        Raises
        ------
        PlanError
            `begin` was not called.
        """
        if self._digest is None:
            raise PlanError(
                f"{self._files.url} was not claimed before it was written to.",
                hint="Call begin() first.",
            )
        return self._digest

    @property
    def sealed(self) -> bool:
        """Whether the claim was sealed when it was last looked at."""
        return self._sealed

    def begin(self, digest: str) -> bool:
        """Claim the destination for the plan ``digest``, or join its claim.

        Returns
        -------
        bool
            False if the plan is committed already: there is nothing to do.

        Raises
        ------
        AlreadyExistsError
            Another plan committed (``ALREADY_EXISTS``) or claimed (``CLAIMED``) the destination, or it
            holds something that is not ours.
        """
        if self._committed(digest):
            return False
        while True:
            number, claim = current_claim(self._files)
            if claim is None and (foreign := self._foreign_content()):
                if current_claim(self._files)[0]:
                    continue  # not foreign: another writer claimed and began in the meantime
                raise AlreadyExistsError(
                    f"{self._files.url} is not empty: found {listing(foreign)}, expected nothing.",
                    hint="Choose another destination.",
                    url=self._files.url,
                )
            if claim is None or claim.plan_digest is None:
                self._require_exclusive()
                number, claim = number + 1, Claim(VERSION, digest, number + 1)
                if not self._files.create(claim_name(number), encode(claim)):
                    continue
            elif claim.plan_digest != digest:
                raise self._claimed(claim.plan_digest, digest)
            self._digest, self._number = digest, number
            self._epoch, self._sealed = claim.epoch, claim.sealed
            # Read again: since the first look, a whole plan may have been claimed and committed.
            return not self._committed(digest)

    def check(self, *, cached: bool = True) -> None:
        """Refuse to go on once the claim was lost.

        Parameters
        ----------
        cached : bool
            On object stores, a look that is at most two seconds old is good enough.

        Raises
        ------
        AlreadyExistsError
            The destination was abandoned or deleted (``ABANDONED``).
        """
        digest, now = self.digest, time.monotonic()
        if cached and not self._files.is_local and now - self._checked < _RECHECK_SECONDS:
            return
        number, sealed = self._number, self._sealed
        try:
            held: Claim | None = _read_claim(self._files, number)
        except CheckpointNotFoundError:
            held = None
        if held is None or (held.plan_digest, held.epoch) != (digest, self._epoch):
            found = "is gone" if held is None else "is another run's"
            raise self._lost(f"claim {number} {found}: the destination was deleted meanwhile")
        while self._files.stat(claim_name(number + 1)) is not None:
            number += 1
            claim = _read_claim(self._files, number)
            if (claim.plan_digest, claim.epoch) != (digest, self._epoch):
                raise self._lost(f"claim {number} follows claim {self._epoch}, which was abandoned")
            sealed = claim.sealed
        self._number, self._sealed, self._checked = number, sealed, now

    def publish(self, records: Sequence[Record]) -> None:
        """Make the objects of ``records`` durable, then record them."""
        if not records:
            return
        self._files.sync()
        self.check(cached=False)
        content = encode(Done.of(self.digest, self._epoch, records))
        self._files.create(done_name(self._epoch, content), content)

    def records(self) -> list[Record]:
        """Everything that was recorded under this plan, by any run, not compared with the objects."""
        found: list[Record] = []
        for stat in self._files.list(DONE, recursive=False):
            done = decode(self._files.read(stat.name), Done, stat.name)
            if done.plan_digest == self.digest:
                found += done.to_records()
        return found

    def seal(self) -> None:
        """Make sure that the claim can no longer be abandoned.

        Raises
        ------
        AlreadyExistsError
            It was abandoned before (``ABANDONED``).
        """
        self.check(cached=False)
        while not self._sealed:
            claim = Claim(VERSION, self.digest, self._epoch, sealed=True)
            self._files.create(claim_name(self._number + 1), encode(claim))
            self.check(cached=False)

    def committed(self) -> bool:
        """Whether this plan's root document is there."""
        return self._committed(self.digest)

    def abandon(self) -> str | None:
        """Free a claim whose owner is dead.

        Returns
        -------
        str or None
            The digest that held it; ``None`` where nothing was held.

        Raises
        ------
        AlreadyExistsError
            The claim is sealed: the checkpoint is complete but for its metadata.
        """
        if self._is_visible():
            return None
        number, held = current_claim(self._files)
        while held is not None and held.plan_digest is not None:
            if held.sealed:
                raise AlreadyExistsError(
                    f"{self._files.url} cannot be abandoned: all its objects are written and checked, "
                    "only the metadata is missing.",
                    kind=Kind.CLAIMED,
                    hint="Run the same command again to finish it, or delete the destination.",
                    url=self._files.url,
                )
            free = encode(Claim(VERSION, None, number + 1))
            if self._files.create(claim_name(number + 1), free):
                return held.plan_digest
            # Lost to a seal; or freed by another abandon, or by this one's put whose answer was lost.
            number, now = current_claim(self._files)
            if now is None or now.epoch != held.epoch:
                return held.plan_digest
            held = now
        return None

    @abstractmethod
    def _committed(self, digest: str) -> bool:
        """Whether the plan ``digest`` is committed.

        Raises
        ------
        AlreadyExistsError
            The destination holds something else.
        """

    @abstractmethod
    def _is_visible(self) -> bool:
        """Whether any plan is committed."""

    def _require_exclusive(self) -> None:
        """Refuse a store where two claims could both win.

        Raises
        ------
        StorageError
        """
        if self._files.options.get("unsafe_commit") or self._files.creates_exclusively():
            return
        raise StorageError(
            f"{self._files.url} cannot be claimed: its store replaced an object in a write on the condition"
            " that there is none, expected that it refuses.",
            kind=Kind.UNSUPPORTED,
            hint="Write to a store with conditional writes, as S3 and GCS have them. Or make sure that nobody else"
            " writes there, and give the destination's storage option unsafe_commit=true.",
            url=self._files.url,
        )

    def _foreign_content(self) -> list[str]:
        """What lies in a destination that nobody claimed; hidden names do not count."""
        names = [stat.name for stat in self._files.list("", recursive=False)] + self._files.folders(
            ""
        )
        return sorted(
            name for name in names if not name.startswith(".") and name not in self.ignored
        )

    def _lost(self, found: str) -> AlreadyExistsError:
        return AlreadyExistsError(
            f"{self._files.url} no longer belongs to this run: {found}.",
            kind=Kind.ABANDONED,
            hint="Nothing more was written. Run the command again to claim it anew.",
            url=self._files.url,
        )

    def _claimed(self, found: str, digest: str) -> AlreadyExistsError:
        if found == DELETION:
            return AlreadyExistsError(
                f"{self._files.url} is being deleted: found the claim of a gc, expected none.",
                kind=Kind.CLAIMED,
                hint="Run `ucpstore gc` on the run again, which finishes that, or choose another destination.",
                url=self._files.url,
            )
        return AlreadyExistsError(
            f"{self._files.url} is claimed by another plan: found {found}, expected {digest}.",
            kind=Kind.CLAIMED,
            hint="Finish that plan with its own command, or free the destination: "
            "`ucpstore abandon URL` (Python: ucpstore.abandon).",
            url=self._files.url,
        )
