"""Proof that pieces cover a tensor exactly once; precise boxes for what is missing or doubled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, pairwise
from typing import TYPE_CHECKING, Literal

from ucpstore.errors import Kind, LayoutError
from ucpstore.layout.region import Region

if TYPE_CHECKING:
    from ucpstore.layout.node import Geometry

__all__ = ["Fault", "faults_of", "overlaps", "require_covered", "uncovered"]

_SHOWN = 10
_KINDS = {"gap": Kind.GAP, "overlap": Kind.OVERLAP, "shape": Kind.SHAPE, "bounds": Kind.SHAPE}


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


def faults_of(geometry: Geometry, *, missing: Collection[int] = ()) -> list[Fault]:
    """All coverage problems, those of slots that should be there but are ``missing`` included.

    Parameters
    ----------
    geometry : Geometry
    missing : collection of int
        Slots whose buffer does not exist: rank files that were not found.
    """
    found = list(geometry.faults())
    lost = set(missing).intersection(geometry.used_slots()) if missing else set()
    if lost and not found:
        found += [
            Fault("gap", piece.region, piece.slot, "its buffer is missing")
            for copy in range(geometry.copies)
            for piece in geometry.query(Region.full(geometry.shape), copy)
            if piece.slot in lost
        ]
    return found


def require_covered(
    geometry: Geometry,
    *,
    fqn: str,
    state: str,
    slot_names: Callable[[int], str] = "slot {}".format,
    missing: Collection[int] = (),
) -> None:
    """Raise unless the geometry covers its shape exactly once.

    Parameters
    ----------
    geometry : Geometry
    fqn, state : str
        Named in the error.
    slot_names : callable of int
        Words for a slot: the rank and file behind it.
    missing : collection of int
        Slots whose buffer does not exist.

    Raises
    ------
    LayoutError
        Naming every fault (ten at most, then a count): the box, and the rank or file that
        should hold it. ``context["faults"]`` has them all.
    """
    found = faults_of(geometry, missing=missing)
    if not found:
        _ = geometry.rule  # raises where copies inside the tensor have different rules
        return
    shown = "; ".join(_words(fault, slot_names) for fault in found[:_SHOWN])
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    shape = list(geometry.shape)
    raise LayoutError(
        f"cannot assemble {fqn!r} ({state}) of shape {shape}: {shown}{more}.",
        kind=_KINDS[found[0].kind],
        hint="Check that every rank's file is there and that the sharding rule fits the parameter.",
        fqn=fqn,
        state=state,
        faults=found,
    )


def _words(fault: Fault, slot_names: Callable[[int], str]) -> str:
    volume = fault.region.volume
    size = f"{volume} element{'' if volume == 1 else 's'}"
    where = f"box {fault.region} ({size})"
    if fault.slot is not None:
        verb = "should be in" if fault.kind == "gap" else "of"
        where += f" {verb} {slot_names(fault.slot)}"
    return f"{fault.kind}: {where}: {fault.message}"
