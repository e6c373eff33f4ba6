"""Errors about stored objects, worded once for all ways of reading them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ucpstore.errors import IntegrityError, Kind, listing

__all__ = ["damaged_objects", "locate", "lost_objects"]


def locate(what: str, keys: Sequence[str]) -> str:
    """Beginning of a message: an operation on a box, and the objects that hold it."""
    return f"{what}, stored in {listing(keys)}" if keys else what


def lost_objects(what: str, keys: Sequence[str], detail: str, **context: Any) -> IntegrityError:
    """The error that says that something stored is not there (``LOST_OBJECT``)."""
    return IntegrityError(
        f"{locate(what, keys)}: the object is lost, expected it to be there ({detail}).",
        kind=Kind.LOST_OBJECT,
        hint="Restore it from a copy of the checkpoint, or convert the source again.",
        objects=list(keys),
        **context,
    )


def damaged_objects(what: str, keys: Sequence[str], detail: str, **context: Any) -> IntegrityError:
    """The error that says that stored bytes are not what was written (``CHECKSUM``)."""
    return IntegrityError(
        f"{locate(what, keys)}: the stored bytes are damaged ({detail}).",
        kind=Kind.CHECKSUM,
        hint="Restore the object from a copy of the checkpoint, or convert the source again.",
        objects=list(keys),
        **context,
    )
