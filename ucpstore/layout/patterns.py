"""Patterns: how a parameter lies on one mesh axis, and how patterns of several axes compose.

A pattern splits a tensor's shape over the ranks of an axis and joins what the ranks hold into one
geometry again: UCP's patterns (Universal Checkpointing, ATC'25) and ``Flat``, ``Stacked``, ``Pad``.

=========== ==============================================================================
`Unique`    one rank holds it
`Replicate` all ranks hold the same bits
`Partial`   all ranks hold their own version; the mean counts (``params_to_average``)
`Shard`     contiguous slices along a dim (the paper's V and H)
`ShardNC`   one slice of every section of a dim: fused q|k|v, gate|up (NC)
`Hy`        slices along several dims at once (Hy)
`Flat`      ranges of the flattened tensor: ZeRO, FSDP1
`Stacked`   rank ``i`` holds index ``i`` of the leading axis: experts
`Pad`       what is held is longer than the tensor: padded vocabularies
`Explicit`  boxes, one by one, for one number of ranks
=========== ==============================================================================

Examples
--------
>>> from ucpstore.layout.geometry import Strided
>>> axes = (Axis("tp", 2, Shard(0)), Axis("dp", 2, Flat()))
>>> held = compose((4, 3), axes, lambda at, shape: Strided(shape, at["tp"] * 2 + at["dp"]))
>>> describe(axes), held.cuts(), local_shape((4, 3), axes, {"tp": 1, "dp": 0})
('tp: shard(0), dp: flat', ((2,), ()), (3,))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ucpstore.errors import Kind, PatternError, listing
from ucpstore.layout.explicit import Explicit
from ucpstore.layout.geometry import Geometry
from ucpstore.layout.kinds import (
    Flat,
    Hy,
    Pad,
    Partial,
    Pattern,
    Replicate,
    Shard,
    ShardNC,
    Stacked,
    Unique,
    even_widths,
    unfit,
)

__all__ = [
    "Axis",
    "Explicit",
    "Flat",
    "Hy",
    "Pad",
    "Partial",
    "Pattern",
    "Replicate",
    "Shard",
    "ShardNC",
    "Stacked",
    "Unique",
    "compose",
    "describe",
    "even_widths",
    "local_shape",
    "pattern_from_json",
]

_Shape = tuple[int, ...]


class Axis(NamedTuple):
    """A pattern on a mesh axis of ``size`` ranks."""

    name: str
    size: int
    pattern: Pattern


_Axes = Sequence[tuple[str, int, Pattern]]


def compose(
    shape: _Shape, axes: _Axes, leaf: Callable[[dict[str, int], _Shape], Geometry]
) -> Geometry:
    """Geometry of a tensor that is laid out over several mesh axes.

    Parameters
    ----------
    shape : tuple of int
        Of the whole tensor as the ranks hold it together, padding included.
    axes : sequence of Axis
        In the order in which the framework applies them: each splits what the one before left.
    leaf : callable
        ``leaf(coords, local_shape)`` is the geometry of what the rank at ``coords`` (axis name ->
        index) stores, usually a `Strided`.

    Raises
    ------
    PatternError
        A pattern does not fit the shape or the axis.
    """
    names = [name for name, _, pattern in axes if not isinstance(pattern, Pad)]
    if len(set(names)) < len(names):
        raise unfit(f"the mesh axes {listing(names)} must have different names.")
    return _compose(tuple(shape), tuple(axes), {}, leaf)


def _compose(
    shape: _Shape,
    axes: _Axes,
    coords: dict[str, int],
    leaf: Callable[[dict[str, int], _Shape], Geometry],
) -> Geometry:
    if not axes:
        return leaf(coords, shape)
    (name, size, pattern), *inner = axes
    parts: list[Geometry | None] = []
    for index, local in enumerate(_split(shape, name, size, pattern)):
        at = coords if isinstance(pattern, Pad) else {**coords, name: index}
        parts.append(None if local is None else _compose(local, inner, at, leaf))
    return pattern.join(shape, parts)


def local_shape(shape: _Shape, axes: _Axes, coords: Mapping[str, int]) -> _Shape | None:
    """Shape of what the rank at ``coords`` holds; ``None`` if it holds no part.

    Raises
    ------
    PatternError
        A pattern does not fit, or ``coords`` lacks an axis or lies outside of it.
    """
    held: _Shape | None = tuple(shape)
    for name, size, pattern in axes:
        if held is None:
            return None
        index = 0 if isinstance(pattern, Pad) else coords.get(name, -1)
        if not 0 <= index < size:
            raise unfit(f"axis {name!r} has {size} ranks: {coords.get(name)} is not one of them.")
        held = _split(held, name, size, pattern)[index]
    return held


def describe(axes: _Axes) -> str:
    """The axes in words, as in ``"tp: shard(0), dp: flat"``; axes that do nothing are left out."""
    words = [
        str(pattern) if isinstance(pattern, Pad) else f"{name}: {pattern}"
        for name, size, pattern in axes
        if isinstance(pattern, Pad) or (size > 1 and not isinstance(pattern, Unique))
    ]
    return ", ".join(words) or "unique"


def pattern_from_json(document: Mapping[str, Any]) -> Pattern:
    """The pattern that `Pattern.to_json` described.

    Raises
    ------
    PatternError
        The document is not such a description.
    """
    kind_name = document.get("pattern") if isinstance(document, Mapping) else None
    kind = _PATTERNS.get(kind_name) if isinstance(kind_name, str) else None
    if kind is None:
        raise PatternError(
            f"pattern document {document!r:.80}: expected 'pattern' to be one of "
            f"{', '.join(_PATTERNS)}.",
            kind=Kind.MALFORMED,
        )
    if kind is Explicit:
        return Explicit.from_json(document)
    values = {key: value for key, value in document.items() if key != "pattern"}
    try:
        checked = {key: _checked(key, value) for key, value in values.items()}
        return kind(**checked)
    except TypeError as error:
        raise PatternError(
            f"pattern document {document!r:.80}: {error}.", kind=Kind.MALFORMED
        ) from error


_PATTERNS: dict[str, type[Pattern]] = {
    kind.name: kind
    for kind in (Unique, Replicate, Partial, Shard, ShardNC, Hy, Flat, Stacked, Pad, Explicit)
}
# How deep the integers of a field are nested; every other field is one integer.
_NESTING = {"widths": (1, 2), "sections": (1,), "ratio": (1,), "units": (1,), "grid": (2,)}


def _checked(key: str, value: Any) -> Any:
    """A field of a pattern document with lists as tuples."""
    if key == "rule" and isinstance(value, str):
        return value
    found, depth = value, 0
    while isinstance(found, (list, tuple)) and found:
        found, depth = found[0], depth + 1
    if depth not in _NESTING.get(key, (0,)):
        raise TypeError(f"field {key!r} is {value!r:.40}")
    return _tuples(key, value, depth)


def _tuples(key: str, value: Any, depth: int) -> Any:
    if depth and isinstance(value, (list, tuple)):
        return tuple(_tuples(key, item, depth - 1) for item in value)
    if depth or type(value) is not int:
        raise TypeError(f"field {key!r} holds {value!r:.40}, which is not an integer")
    return value


def _split(shape: _Shape, name: str, size: int, pattern: Pattern) -> tuple[_Shape | None, ...]:
    if size < 1:
        raise unfit(f"mesh axis {name!r} has {size} ranks: at least one is expected.")
    return pattern.split(shape, size)
