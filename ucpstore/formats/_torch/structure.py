"""Makes sure that an unpickled structure can be walked by simple recursive code."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ucpstore.errors import CorruptSourceError, UnsupportedSourceError
from ucpstore.formats._torch.refs import TensorRef
from ucpstore.tagged import NumpyArray, StubObject

__all__ = ["MAX_DEPTH", "MAX_VALUES", "check_structure"]

MAX_DEPTH = 64
"""Levels that simple recursive code can go down, whatever calls it; a checkpoint has about ten."""

MAX_VALUES = 10_000_000
"""Values of a structure, shared parts counted each time."""

_OPEN = (-1, -1)
_CONTAINERS = frozenset(
    {dict, OrderedDict, list, tuple, set, frozenset, StubObject, NumpyArray, TensorRef}
)


def check_structure(root: Any, where: str) -> None:
    """Refuse cycles, deep nesting, and sharing that unfolds exponentially ("billion laughs").

    Raises
    ------
    UnsupportedSourceError
        A container holds itself.
    CorruptSourceError
        The structure is deeper than `MAX_DEPTH`, or has more than `MAX_VALUES` values when a shared
        part is counted as often as it is met.
    """
    measured: dict[int, tuple[int, int]] = {}
    pending: list[tuple[Any, bool]] = [(root, False)] if type(root) in _CONTAINERS else []
    while pending:
        value, done = pending.pop()
        key = id(value)
        if done:
            values, children = _inside(value)
            below = [measured[id(child)] for child in children]
            size = values + sum(count for count, _ in below)
            depth = 1 + max((level for _, level in below), default=0)
            if size > MAX_VALUES or depth > MAX_DEPTH:
                raise CorruptSourceError(
                    f"{where}: the pickled structure unfolds to {size} values in {depth} levels, "
                    f"expected at most {MAX_VALUES} in {MAX_DEPTH}",
                    file=where,
                )
            measured[key] = (size, depth)
        elif key not in measured:
            measured[key] = _OPEN
            pending.append((value, True))
            pending.extend((child, False) for child in _inside(value)[1])
        elif measured[key] is _OPEN:
            raise UnsupportedSourceError(
                f"{where}: a {type(value).__name__} of the pickled structure contains itself",
                file=where,
            )


def _inside(value: Any) -> tuple[int, list[Any]]:
    """Number of values directly inside ``value``, and those of them that are containers."""
    kind = type(value)
    items: list[Any]
    if kind is dict or kind is OrderedDict:
        items = [*value.keys(), *value.values()]
        if kind is OrderedDict and value.__dict__:
            items.extend(value.__dict__.values())
    elif kind is StubObject:
        items = [value.args, value.state, value.contents]
    elif kind is NumpyArray:
        items = [value.data]
    elif kind is TensorRef:
        items = [value.attributes]
    else:
        items = list(value)
    return len(items), [item for item in items if type(item) in _CONTAINERS]
