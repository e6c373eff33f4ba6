"""TensorStore: specs of our arrays on every storage, and its errors in our words.

TensorStore raises ``ValueError`` for nearly everything; the kind of failure is the prefix of the message
(``NOT_FOUND: ...``, the names of ``absl::StatusCode``). This module alone knows them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorstore as ts

from ucpstore.errors import Kind, LayoutError, StorageError, UcpStoreError
from ucpstore.io.base import Files
from ucpstore.io.kvstore import kvstore_spec
from ucpstore.io.refusals import AGAIN, CREDENTIALS, refusal
from ucpstore.io.urls import parse_url
from ucpstore.store.damage import damaged_objects, locate, lost_objects

__all__ = ["array_spec", "folder_spec", "make_context", "translate", "translated"]

_STATUS = re.compile(r"^([A-Z_]+): ")
_RETRYABLE = frozenset(
    {
        "ABORTED",
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "INTERNAL",
        "RESOURCE_EXHAUSTED",
        "UNAVAILABLE",
        "UNKNOWN",
    }
)
_REFUSED = frozenset({"PERMISSION_DENIED", "UNAUTHENTICATED"})
_DAMAGED = frozenset({"DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT"})


def make_context() -> ts.Context:
    """Shared resources of a source's arrays.

    Nothing is cached: every stored chunk is read once, into the caller's array. Local files are mapped
    for those who read them with TensorStore themselves, which saves a copy; committed objects never
    change, so that no mapping shrinks under a reader.
    """
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_mode": {"mode": "memmap"}})


def array_spec(
    kvstore: Mapping[str, Any], path: str, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Spec that opens a stored array without a single request.

    Parameters
    ----------
    kvstore : mapping
        Spec of the checkpoint's folder.
    path : str
        The array, relative to the folder.
    metadata : mapping
        Its ``zarr.json``, from the root document.
    """
    zarr = {key: value for key, value in metadata.items() if key != "attributes"}
    return {
        "driver": "zarr3",
        "kvstore": {**kvstore, "path": f"{kvstore.get('path', '')}{path}/"},
        "metadata": zarr,
        "open": True,
        "assume_metadata": True,
        "fill_missing_data_reads": False,
        "recheck_cached_metadata": False,
        "recheck_cached_data": False,
    }


def translate(
    error: Exception, what: str, keys: Sequence[str] = (), **context: Any
) -> UcpStoreError:
    """The error of this package that says the same.

    Parameters
    ----------
    error : Exception
        What TensorStore raised.
    what : str
        The operation and its object: ``cannot read 'fqn' (state) [0:4]``.
    keys : sequence of str
        Stored objects that the operation touches; the message tells which of them it is about.
    **context
        Kept in the error's ``context``.
    """
    text = str(error)
    match = _STATUS.match(text)
    status = match.group(1) if match else ""
    detail = text.removeprefix(f"{status}: ").partition(" [")[0]
    known = refusal(text)
    named = [key for key in keys if key + '"' in text or key + "'" in text] or list(keys)
    if status == "NOT_FOUND":
        return lost_objects(what, named, detail, **context)
    if known is not None:  # before the rest: S3 gives many reasons with the status of a bad request
        return StorageError(
            f"{locate(what, named)}: {detail}.",
            kind=known.kind,
            hint=known.hint,
            retryable=known.retryable,
            **context,
        )
    if status in _DAMAGED or isinstance(error, OverflowError):
        return damaged_objects(what, named, detail, **context)
    where = locate(what, named)
    if status == "OUT_OF_RANGE":
        return LayoutError(f"{where}: {detail}.", **context)
    if status in _REFUSED:
        return StorageError(
            f"{where}: storage refused it ({detail}).",
            kind=Kind.PERMISSION,
            hint=CREDENTIALS,
            **context,
        )
    retryable = status in _RETRYABLE
    return StorageError(
        f"{where}: {detail}.", hint=AGAIN if retryable else "", retryable=retryable, **context
    )


@contextmanager
def translated(what: str, keys: Sequence[str] = (), **context: Any) -> Iterator[None]:
    """Raise `translate`'s error for whatever TensorStore raises inside the block."""
    try:
        yield
    except (ValueError, OverflowError, OSError, NotImplementedError) as error:
        if isinstance(error, UcpStoreError):
            raise
        raise translate(error, what, keys, **context) from error


def folder_spec(files: Files) -> dict[str, Any] | None:
    """TensorStore's spec of the folder, or ``None`` where it knows no such storage.

    It is only good in this process, see `ucpstore.io.kvstore.kvstore_spec`.
    """
    location = parse_url(files.url)
    return None if location.scheme == "memory" else kvstore_spec(location, files.options)
