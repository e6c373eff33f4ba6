"""Every error that ``ucpstore`` raises on purpose.

::

    UcpStoreError
    ├── SourceError                     the checkpoint that is being read
    │   ├── UnrecognizedSourceError     no format recognises it
    │   ├── IncompleteSourceError       files or keys that should be there are missing
    │   ├── CorruptSourceError          a file is truncated or malformed
    │   ├── UnsafePickleError           a pickle asks for a global outside the allow-list
    │   └── UnsupportedSourceError      recognised, but holds something that cannot be read faithfully
    ├── PatternError (ValueError)       a sharding rule is unmatched, ambiguous or unused
    ├── LayoutError (ValueError)        pieces leave a gap, overlap or have the wrong shape
    ├── PlanError (ValueError)          the request cannot be carried out as asked (memory, space, selection)
    ├── NotFoundError (KeyError)
    │   ├── CheckpointNotFoundError (FileNotFoundError)
    │   └── ParameterNotFoundError
    ├── AlreadyExistsError (FileExistsError)   another plan owns or committed the destination
    ├── IndexingError (IndexError)      an index does not fit the tensor
    ├── UncommittedError                the destination has no committed root document
    ├── FormatVersionError              written by an unknown major version
    ├── IntegrityError                  a checksum differs, replicas differ, an object is lost
    ├── StorageError (OSError)          reading or writing storage failed; ``retryable`` says whether to try again
    ├── WorkerError                     a worker died or could not be started; what was recorded is kept
    └── MissingExtraError (ImportError)

A message reads *what failed on which object: what was found, what was expected. What to do.*  The last
sentence is also available as ``hint``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

__all__ = [
    "AlreadyExistsError",
    "CheckpointNotFoundError",
    "CorruptSourceError",
    "FormatVersionError",
    "IncompleteSourceError",
    "IndexingError",
    "IntegrityError",
    "Kind",
    "LayoutError",
    "MissingExtraError",
    "NotFoundError",
    "ParameterNotFoundError",
    "PatternError",
    "PlanError",
    "SourceError",
    "StorageError",
    "UcpStoreError",
    "UncommittedError",
    "UnrecognizedSourceError",
    "UnsafePickleError",
    "UnsupportedSourceError",
    "WorkerError",
    "close_names",
    "listing",
]


class Kind(StrEnum):
    """Exact cause of an error. Append only: values are part of the JSON output."""

    OTHER = "other"
    UNRECOGNIZED = "unrecognized"
    MISSING_FILE = "missing_file"
    MISSING_KEY = "missing_key"
    TRUNCATED = "truncated"
    MALFORMED = "malformed"
    UNSAFE_GLOBAL = "unsafe_global"
    PLACEHOLDER = "placeholder"
    UNSUPPORTED = "unsupported"
    UNMATCHED = "unmatched"
    AMBIGUOUS = "ambiguous"
    UNUSED = "unused"
    GAP = "gap"
    OVERLAP = "overlap"
    SHAPE = "shape"
    MEMORY_LIMIT = "memory_limit"
    NO_SPACE = "no_space"
    SELECTION = "selection"
    NAME = "name"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    CLAIMED = "claimed"
    ABANDONED = "abandoned"
    UNCOMMITTED = "uncommitted"
    VERSION = "version"
    CHECKSUM = "checksum"
    REPLICAS_DIFFER = "replicas_differ"
    LOST_OBJECT = "lost_object"
    DELETED = "deleted"
    SOURCE_CHANGED = "source_changed"
    IO = "io"
    PERMISSION = "permission"
    MISSING_EXTRA = "missing_extra"
    WORKER = "worker"


class UcpStoreError(Exception):
    """Base of all errors of this package.

    Parameters
    ----------
    message : str
        What failed on which object, what was found, what was expected.
    kind : Kind
        Exact cause, stable across releases.
    hint : str, optional
        What to do next; appended to the message.
    **context
        Values with the message's names: ``fqn``, ``state``, ``rank``, ``url``, ...
    """

    default_kind = Kind.OTHER

    def __init__(
        self, message: str, *, kind: Kind | None = None, hint: str = "", **context: Any
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind or self.default_kind
        self.hint = hint
        self.context = context

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            type(self),
            self.message,
            self.kind,
            self.hint,
            self.context,
            self._extra(),
        )

    def _extra(self) -> dict[str, Any]:
        """Attributes beyond the common ones, for pickling."""
        return {}


def _rebuild(
    cls: type[UcpStoreError],
    message: str,
    kind: Kind,
    hint: str,
    context: dict[str, Any],
    extra: dict[str, Any],
) -> UcpStoreError:
    return cls(message, kind=kind, hint=hint, **extra, **context)


class SourceError(UcpStoreError):
    """The checkpoint that is being read cannot be used."""


class UnrecognizedSourceError(SourceError):
    """No format recognises the URL; the message lists what each detector saw."""

    default_kind = Kind.UNRECOGNIZED


class IncompleteSourceError(SourceError):
    """Rank files or keys that the checkpoint should hold are missing; they are named."""

    default_kind = Kind.MISSING_FILE


class CorruptSourceError(SourceError):
    """A source file is truncated or malformed."""

    default_kind = Kind.MALFORMED


class UnsafePickleError(SourceError):
    """A pickle asks for a global outside the allow-list. Nothing was executed."""

    default_kind = Kind.UNSAFE_GLOBAL


class UnsupportedSourceError(SourceError):
    """The source holds something that cannot be read faithfully."""

    default_kind = Kind.UNSUPPORTED


class PatternError(UcpStoreError, ValueError):
    """A sharding rule is unmatched, ambiguous or unused."""

    default_kind = Kind.UNMATCHED


class LayoutError(UcpStoreError, ValueError):
    """Pieces leave a gap, overlap or have the wrong shape."""

    default_kind = Kind.SHAPE


class PlanError(UcpStoreError, ValueError):
    """The request cannot be carried out as asked; nothing was written."""

    default_kind = Kind.SELECTION


class NotFoundError(UcpStoreError, KeyError):
    """Something that was asked for by name does not exist."""

    default_kind = Kind.NOT_FOUND

    __str__ = UcpStoreError.__str__  # KeyError would print the repr


class CheckpointNotFoundError(NotFoundError, FileNotFoundError):
    """Nothing is at the URL."""


class ParameterNotFoundError(NotFoundError):
    """No such parameter or state in the checkpoint."""


class IndexingError(UcpStoreError, IndexError):
    """An index does not fit the tensor, or is of a kind that is not read lazily."""

    default_kind = Kind.SHAPE


class AlreadyExistsError(UcpStoreError, FileExistsError):
    """Another plan has committed or claimed the destination."""

    default_kind = Kind.ALREADY_EXISTS


class UncommittedError(UcpStoreError):
    """The destination has no committed root document: an unfinished or foreign hierarchy."""

    default_kind = Kind.UNCOMMITTED


class FormatVersionError(UcpStoreError):
    """The document was written by an unknown major version of the format."""

    default_kind = Kind.VERSION


class IntegrityError(UcpStoreError):
    """Bytes are not what the checkpoint says they are."""

    default_kind = Kind.CHECKSUM


class StorageError(UcpStoreError, OSError):
    """Storage refused or failed an operation.

    Attributes
    ----------
    retryable : bool
        Whether the same operation may succeed when it is tried again.
    """

    default_kind = Kind.IO

    def __init__(
        self,
        message: str,
        *,
        kind: Kind | None = None,
        hint: str = "",
        retryable: bool = False,
        **context: Any,
    ) -> None:
        super().__init__(message, kind=kind, hint=hint, **context)
        self.retryable = retryable

    def _extra(self) -> dict[str, Any]:
        return {"retryable": self.retryable}


class WorkerError(UcpStoreError):
    """A worker died or could not be started. What was recorded before is kept: run again to continue."""

    default_kind = Kind.WORKER


class MissingExtraError(UcpStoreError, ImportError):
    """An optional dependency is not installed; the hint names the extra."""

    default_kind = Kind.MISSING_EXTRA


def listing(items: Iterable[object], *, cap: int = 10) -> str:
    """Join ``items`` for a message; past ``cap`` only their count is given."""
    texts = [str(item) for item in items]
    head = ", ".join(texts[:cap])
    return head if len(texts) <= cap else f"{head} and {len(texts) - cap} more"


def close_names(name: str, names: Sequence[str]) -> str:
    """Sentence that offers the names closest to ``name`` (empty if none is close)."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
