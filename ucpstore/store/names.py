"""Names of parameters and states as single path segments, and back.

Segments keep case: names that differ only in case need a case-sensitive file system, as object
stores and Linux have.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from ucpstore.errors import Kind, PlanError

__all__ = ["MAX_SEGMENT_BYTES", "decode_name", "encode_name", "encode_siblings"]

MAX_SEGMENT_BYTES = 250
"""Longest path segment: file systems allow 255 bytes, and a writer may append a suffix."""

_RESERVED = frozenset({"", ".", "..", "zarr.json", "c"})


def encode_name(name: str) -> str:
    """Write a name as one path segment.

    ASCII letters, digits, ``.``, ``_``, ``-`` and ``~`` stay; the UTF-8 bytes of anything else
    become ``%XX``.

    Raises
    ------
    PlanError
        Kind ``NAME``: the name is reserved in a Zarr hierarchy or too long.

    Examples
    --------
    >>> encode_name("decoder.layers.0/self_attn.weight")
    'decoder.layers.0%2Fself_attn.weight'
    """
    return _check(_quote(name), name)


def encode_siblings(prefix: str, numbers: range, suffix: str) -> str:
    """Write the names ``prefix + number + suffix`` of stacked siblings as one path segment.

    No encoded name is equal to it, since those hold no parentheses.

    Raises
    ------
    PlanError
        Kind ``NAME``: the segment is reserved in a Zarr hierarchy or too long.

    Examples
    --------
    >>> encode_siblings("layers.0.experts.", range(64), ".w1")
    'layers.0.experts.(0-63).w1'
    """
    run = f"({numbers[0]}-{numbers[-1]})"
    return _check(f"{_quote(prefix)}{run}{_quote(suffix)}", f"{prefix}{run}{suffix}")


def _quote(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")


def _check(segment: str, name: str) -> str:
    if segment in _RESERVED or segment.startswith("__"):
        raise PlanError(
            f"cannot store {name!r}: {segment!r} is reserved in a Zarr hierarchy.",
            kind=Kind.NAME,
            hint="Rename it or leave it out.",
            name=name,
        )
    if len(segment) > MAX_SEGMENT_BYTES:
        raise PlanError(
            f"cannot store {name!r}: its path segment has {len(segment)} bytes, "
            f"expected at most {MAX_SEGMENT_BYTES}.",
            kind=Kind.NAME,
            hint="Rename it or leave it out.",
            name=name,
        )
    return segment


def decode_name(segment: str) -> str:
    """Undo `encode_name`.

    Raises
    ------
    PlanError
        Kind ``NAME``: no name is written as this segment.
    """
    try:
        name = unquote(segment, errors="surrogatepass")
        canonical = encode_name(name) == segment
    except UnicodeError:
        canonical = False
    if not canonical:
        raise PlanError(
            f"path segment {segment!r} is no encoded name: "
            "expected letters, digits, '.', '_', '-', '~' and %XX.",
            kind=Kind.NAME,
            segment=segment,
        )
    return name
