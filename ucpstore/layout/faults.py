"""What can be wrong with the cover of a tensor, and the precise boxes that are missing or doubled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, pairwise
from typing import Literal

from ucpstore.layout.region import Region

__all__ = ["Fault", "overlaps", "uncovered"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One reason why a geometry does not cover its tensor exactly once.

    Attributes
    ----------
    kind : {"gap", "overlap", "shape", "bounds"}
        Elements that nothing holds; elements that two parts hold; parts whose shapes do not fit
        together; addresses that no buffer can have.
    region : Region
        The box concerned, in the coordinates of the geometry that reported it.
    slot : int or None
        The slot that should hold the box, where one can be named.
    message : str
        What was found and what was expected, without the box.
    """

    kind: Literal["gap", "overlap", "shape", "bounds"]
    region: Region
    slot: int | None
    message: str

    def moved(self, used: Region, delta: tuple[int, ...]) -> Fault | None:
        """The fault as seen by a parent that uses ``used`` of this geometry, moved by ``delta``."""
        if self.region.ndim != used.ndim:
            return replace(self, region=used.shift(delta))
        common = self.region.intersect(used)
        return None if common is None else replace(self, region=common.shift(delta))


def uncovered(region: Region, boxes: Sequence[Region]) -> list[Region]:
    """The part of ``region`` that no box covers, as disjoint boxes.

    A sweep along the first dim; every slab between two box edges is solved in the dims that remain.
    Equal neighbouring slabs are merged.
    """
    if region.volume == 0:
        return []
    clipped = [box for box in map(region.intersect, boxes) if box is not None]
    return [Region(o, s) for o, s in _gaps(region, clipped, 0)]


_Box = tuple[tuple[int, ...], tuple[int, ...]]


def _gaps(region: Region, boxes: Sequence[Region], dim: int) -> list[_Box]:
    """Gaps in the dims from ``dim`` on, as (offsets, sizes) of those dims."""
    if not boxes:
        return [(region.offsets[dim:], region.sizes[dim:])]
    if dim == region.ndim:
        return []
    low, high = region.offsets[dim], region.offsets[dim] + region.sizes[dim]
    starting: dict[int, list[int]] = {}
    ending: dict[int, list[int]] = {}
    for index, box in enumerate(boxes):
        starting.setdefault(box.offsets[dim], []).append(index)
        ending.setdefault(box.offsets[dim] + box.sizes[dim], []).append(index)
    edges = sorted({low, high, *starting, *ending})
    active: dict[int, None] = {}
    found: list[_Box] = []
    open_slab: list[_Box] = []
    open_at = low
    for edge, end in pairwise(edges):
        for index in ending.get(edge, ()):
            active.pop(index, None)
        active.update(dict.fromkeys(starting.get(edge, ())))
        slab = _gaps(region, [boxes[index] for index in active], dim + 1)
        if slab != open_slab:
            found += [((open_at, *o), (edge - open_at, *s)) for o, s in open_slab]
            open_slab, open_at = slab, edge
        if end == high:
            found += [((open_at, *o), (high - open_at, *s)) for o, s in open_slab]
    return found


def overlaps(boxes: Sequence[Region], *, limit: int = 100) -> list[tuple[int, int, Region]]:
    """Pairs of boxes that share elements: ``(i, j, common box)`` with ``i < j``.

    Parameters
    ----------
    boxes : sequence of Region
    limit : int
        Stop after this many pairs; hostile input could have n**2 of them.
    """
    live = [index for index, box in enumerate(boxes) if box.volume]
    if not live or boxes[live[0]].ndim == 0:
        return [(i, j, boxes[i]) for i, j in islice(combinations(live, 2), limit)]
    ndim = boxes[live[0]].ndim
    dim = max(range(ndim), key=lambda d: len({boxes[index].offsets[d] for index in live}))
    live.sort(key=lambda index: boxes[index].offsets[dim])
    found: list[tuple[int, int, Region]] = []
    active: list[int] = []
    for index in live:
        box = boxes[index]
        active = [i for i in active if boxes[i].stops[dim] > box.offsets[dim]]
        for other in active:
            common = box.intersect(boxes[other])
            if common is not None:
                found.append((min(index, other), max(index, other), common))
                if len(found) == limit:
                    return found
        active.append(index)
    return found
