"""Proof that the pieces of a geometry cover its tensor exactly once."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ucpstore.errors import Kind, LayoutError
from ucpstore.layout.faults import Fault, overlaps, uncovered
from ucpstore.layout.node import Geometry
from ucpstore.layout.region import Region

__all__ = ["Fault", "faults_of", "overlaps", "require_covered", "uncovered"]

_SHOWN = 10
_KINDS = {"gap": Kind.GAP, "overlap": Kind.OVERLAP, "shape": Kind.SHAPE, "bounds": Kind.SHAPE}


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
