"""Type checks for values that come out of a checkpoint's pickles, where anything may turn up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ucpstore.errors import CorruptSourceError

__all__ = ["integer", "integers", "mapping_of", "named", "sequence_of"]


def mapping_of(value: object, what: str) -> Mapping[Any, Any]:
    """``value`` as a mapping.

    Raises
    ------
    CorruptSourceError
        It is none; ``what`` names it.
    """
    if not isinstance(value, Mapping):
        raise CorruptSourceError(f"{what}: found {_kind(value)}, expected a dict.")
    return value


def named(value: object, what: str) -> Mapping[str, Any]:
    """``value`` as a mapping whose keys are names: texts that UTF-8 can write.

    Raises
    ------
    CorruptSourceError
    """
    found = mapping_of(value, what)
    for key in found:
        if not isinstance(key, str) or not key or not _is_unicode(key):
            raise CorruptSourceError(f"{what}: found the name {key!r:.60}, expected a text.")
    return found


def _is_unicode(text: str) -> bool:
    """Whether there are no lone surrogates, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def sequence_of(value: object, what: str, *, length: int | None = None) -> Sequence[Any]:
    """``value`` as a list or tuple, of ``length`` items where that is given.

    Raises
    ------
    CorruptSourceError
    """
    if not isinstance(value, list | tuple):
        raise CorruptSourceError(f"{what}: found {_kind(value)}, expected a list.")
    if length is not None and len(value) != length:
        raise CorruptSourceError(f"{what}: found {len(value)} items, expected {length}.")
    return value


def integer(value: object, what: str) -> int:
    """``value`` as an integer (enum members of integers count).

    Raises
    ------
    CorruptSourceError
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise CorruptSourceError(f"{what}: found {_kind(value)}, expected an integer.")
    return int(value)


def integers(value: object, what: str) -> tuple[int, ...]:
    """``value`` as a tuple of integers >= 0: a shape, offsets, widths.

    Raises
    ------
    CorruptSourceError
    """
    items = tuple(integer(item, what) for item in sequence_of(value, what))
    if any(item < 0 for item in items):
        raise CorruptSourceError(f"{what}: found {list(items)}, expected no negative number.")
    return items


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{value!r:.60} ({type(value).__name__})"
