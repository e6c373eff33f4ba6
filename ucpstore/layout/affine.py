"""Boxes behind ``as_strided`` addresses, the form in which affine maps state their pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ucpstore.errors import LayoutError
from ucpstore.layout.node import strides_of
from ucpstore.layout.region import Region

__all__ = ["box_of_strided"]


def box_of_strided(
    shape: tuple[int, ...],
    piece_shape: Sequence[int],
    *,
    offset: int,
    strides: Sequence[int],
) -> Region:
    """The box of a row-major tensor that ``as_strided(piece_shape, strides, offset)`` walks.

    The view may have merged or split dims (a run of whole rows as one dim), as long as it walks the
    box's elements in row-major order.

    Parameters
    ----------
    shape : tuple of int
        Of the row-major tensor.
    piece_shape : sequence of int
        Sizes of the view.
    offset : int, elements
    strides : sequence of int, elements

    Raises
    ------
    LayoutError
        The view is not a box, not in row-major order, or leaves the tensor.
    """
    what = (
        f"view with sizes {list(piece_shape)}, strides {list(strides)} and offset {offset} "
        f"of a tensor of shape {list(shape)}"
    )
    if len(piece_shape) != len(strides):
        raise LayoutError(f"{what}: sizes and strides differ in number.")
    if 0 in piece_shape:
        return Region((0,) * len(shape), (0,) * len(shape))
    if min((offset, *piece_shape, *strides)) < 0:
        raise LayoutError(f"{what}: an address is below zero.")
    last = offset + sum((n - 1) * s for n, s in zip(piece_shape, strides, strict=True))
    if last >= math.prod(shape):
        raise LayoutError(f"{what} reaches element {last}: there are {math.prod(shape)}.")
    own = strides_of(shape)
    first = _index(offset, own)
    sizes = tuple(b - a + 1 for a, b in zip(first, _index(last, own), strict=True))
    if min(sizes, default=1) < 1 or _merged(sizes, own) != _merged(piece_shape, strides):
        raise LayoutError(f"{what} is not a box in row-major order, which is all that can be read.")
    return Region(first, sizes)


def _index(flat: int, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Index of a flat element of a row-major tensor."""
    index = []
    for stride in strides:
        position, flat = divmod(flat, stride)
        index.append(position)
    return tuple(index)


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and strides with dims of size 1 dropped and dims merged that form one even walk."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged
