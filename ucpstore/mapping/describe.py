"""Where parts lie: their pieces that are boxes on both sides, and the points where a target is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ucpstore.layout.region import Region
from ucpstore.mapping.affine import Part, View

__all__ = ["boxes", "moved_region", "view_cuts"]


def boxes(part: Part) -> Iterator[Part]:
    """The part in pieces that are boxes on either side, with one dim of each for one of the other."""
    spread = {axis.source for axis in part.axes}, {axis.target for axis in part.axes}
    if any(axis.source_step != 1 or axis.target_step != 1 for axis in part.axes) or any(
        len(dims) < len(part.axes) for dims in spread
    ):
        if part.volume:
            for half in part.halves():
                yield from boxes(half)
        return
    yield part


def moved_region(part: Part, region: Region) -> Region:
    """A box of the source inside a piece of `boxes`, in the target's coordinates."""
    offsets, sizes = list(part.target_offsets), [1] * len(part.target_offsets)
    for axis in part.axes:
        offsets[axis.target] += region.offsets[axis.source] - part.source_offsets[axis.source]
        sizes[axis.target] = region.sizes[axis.source]
    return Region(tuple(offsets), tuple(sizes))


def view_cuts(
    view: View, cuts_of: Callable[[str], tuple[tuple[int, ...], ...]]
) -> tuple[tuple[int, ...], ...]:
    """Cut points where the members meet, and their own where a dim is taken as it is."""
    found: list[set[int]] = [set() for _ in view.shape]
    for part in view.parts:
        own = cuts_of(part.source)
        for dim, first in enumerate(part.target_offsets):
            axes = [axis for axis in part.axes if axis.target == dim and axis.size > 1]
            span = sum((axis.size - 1) * axis.target_step for axis in axes) + 1
            if span == math.prod(axis.size for axis in axes):
                found[dim] |= {first, first + span}
            if len(axes) == 1 and axes[0].source_step == axes[0].target_step == 1:
                shift = first - part.source_offsets[axes[0].source]
                found[dim] |= {
                    cut + shift for cut in own[axes[0].source] if first < cut + shift < first + span
                }
    return tuple(
        tuple(sorted(cut for cut in cuts if 0 < cut < size))
        for cuts, size in zip(found, view.shape, strict=True)
    )
