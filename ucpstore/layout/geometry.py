"""Geometries: where the elements of a logical tensor are stored, without listing them.

Every sharding of every framework is a small expression of the nodes below, and every operation is a
`Geometry.query` of it. Nothing is enumerated: ZeRO-3 over 2,000 ranks is a handful of integers.

============ =====================================================================================
`Strided`    one stored tensor
`FlatEven`   a flattened tensor in a space cut evenly over ranks (ZeRO)
`FlatRanges` a flattened tensor cut at explicit places
`Concat`     slices of children along a dim (TP, fused sections, padding)
`Blocks`     explicit boxes of children (affine maps)
`Stack`      children under a new leading axis (experts, layers)
`Copies`     replicas, or partial values to average
============ =====================================================================================

Examples
--------
>>> from ucpstore.layout.region import Region
>>> halves = Concat((4, 6), 1, (Part(3, Strided((4, 3), 0)), Part(3, Strided((4, 3), 1))))
>>> [(str(p.region), p.slot, p.offset, p.strides) for p in halves.query(Region((1, 2), (2, 3)))]
[('[1:3, 2:3]', 0, 5, (3, 1)), ('[1:3, 3:5]', 1, 3, (3, 1))]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ucpstore.errors import Kind, LayoutError
from ucpstore.layout.blocks import Block, Blocks
from ucpstore.layout.composite import Concat, Copies, Part, Stack
from ucpstore.layout.flat import FlatEven, FlatRanges
from ucpstore.layout.node import Geometry, Piece, Rule, Strided
from ucpstore.layout.region import Region

__all__ = [
    "Block",
    "Blocks",
    "Concat",
    "Copies",
    "FlatEven",
    "FlatRanges",
    "Geometry",
    "Part",
    "Piece",
    "Rule",
    "Stack",
    "Strided",
    "geometry_from_json",
]

_DEEPEST = 50


def geometry_from_json(document: Mapping[str, Any]) -> Geometry:
    """The geometry that `Geometry.to_json` described.

    Raises
    ------
    LayoutError
        The document is not such a description.
    """
    return _read(document, 0)


def _read(document: Any, depth: int) -> Geometry:
    if depth > _DEEPEST:
        raise LayoutError(
            f"geometry document is nested more than {_DEEPEST} deep.", kind=Kind.MALFORMED
        )
    try:
        return _READERS[document["node"]](document, depth + 1)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, LayoutError):
            raise
        raise LayoutError(
            f"geometry document {_short(document)} cannot be read: {type(error).__name__}: "
            f"{error}; expected one of the nodes {', '.join(_READERS)} with its fields.",
            kind=Kind.MALFORMED,
        ) from error


def _short(document: Any) -> str:
    text = repr(document)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(_int(value) for value in values)


def _index(value: Any) -> int:
    index = _int(value)
    if index < 0:
        raise IndexError(f"child {index} does not exist")
    return index


def _children(document: Mapping[str, Any], depth: int) -> tuple[Geometry, ...]:
    return tuple(_read(child, depth) for child in document["children"])


def _strided(document: Mapping[str, Any], _: int) -> Geometry:
    strides = document.get("strides")
    return Strided(
        _ints(document["shape"]),
        _int(document["slot"]),
        _int(document["offset"]),
        None if strides is None else _ints(strides),
    )


def _flat_even(document: Mapping[str, Any], _: int) -> Geometry:
    names = ("start", "width", "base", "first_slot", "slots")
    return FlatEven(_ints(document["shape"]), *(_int(document[name]) for name in names))


def _flat_ranges(document: Mapping[str, Any], _: int) -> Geometry:
    return FlatRanges(*(_ints(document[name]) for name in ("shape", "bounds", "slots", "offsets")))


def _concat(document: Mapping[str, Any], depth: int) -> Geometry:
    children = _children(document, depth)
    parts = tuple(
        Part(_int(width), children[_index(index)], _int(origin))
        for width, index, origin in document["parts"]
    )
    return Concat(_ints(document["shape"]), _int(document["dim"]), parts)


def _blocks(document: Mapping[str, Any], depth: int) -> Geometry:
    children = _children(document, depth)
    blocks = tuple(
        Block(Region(_ints(offsets), _ints(sizes)), children[_index(index)], _ints(origin))
        for offsets, sizes, index, origin in document["blocks"]
    )
    return Blocks(_ints(document["shape"]), blocks)


def _stack(document: Mapping[str, Any], depth: int) -> Geometry:
    return Stack(_children(document, depth))


def _copies(document: Mapping[str, Any], depth: int) -> Geometry:
    return Copies(_children(document, depth), document["rule"])


_READERS: dict[str, Callable[[Mapping[str, Any], int], Geometry]] = {
    "strided": _strided,
    "flat_even": _flat_even,
    "flat_ranges": _flat_ranges,
    "concat": _concat,
    "blocks": _blocks,
    "stack": _stack,
    "copies": _copies,
}
