"""Optimizer states of all ranks, brought together unit by unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ucpstore.contracts import Role
from ucpstore.errors import (
    CorruptSourceError,
    IncompleteSourceError,
    Kind,
    UnsupportedSourceError,
    listing,
)
from ucpstore.formats.deepspeed.shards import Shard
from ucpstore.formats.deepspeed.units import GroupUnit, Unit, WholeUnit
from ucpstore.formats.torchfile import TensorRef
from ucpstore.pieces import Buffer

__all__ = ["UnitState", "collect_unit", "compare_mappings", "name_and_role", "unit_words"]

MASTER = "fp32"

_Slices: TypeAlias = Mapping[str, tuple[int, int]]
"""Name -> start in a rank's partition and number of elements."""

_NAMES = {
    "exp_avg": ("adam_m", Role.FIRST_MOMENT),
    "exp_avg_sq": ("adam_v", Role.SECOND_MOMENT),
    "momentum_buffer": ("momentum_buffer", Role.MOMENTUM),
    MASTER: (MASTER, Role.MASTER_WEIGHT),
}
_RESERVED = {MASTER, "weight", "buffer", "adam_m", "adam_v"}


@dataclass(frozen=True, slots=True)
class UnitState:
    """One state of one unit on all ranks.

    Attributes
    ----------
    buffers : tuple of Buffer
        By rank: the data-parallel ranks of the first model-parallel rank, then of the next.
    dtype : str
    big_endian : bool
    """

    buffers: tuple[Buffer, ...]
    dtype: str
    big_endian: bool


def name_and_role(state: str) -> tuple[str, Role]:
    """Our name and the role of an optimizer's state; names are data and any is accepted."""
    return _NAMES.get(state, (state, Role.OTHER))


def collect_unit(
    index: int,
    ranks: Sequence[tuple[Unit, Sequence[Shard]]],
    file_of: Callable[[str], int],
) -> dict[str, UnitState]:
    """All states of one unit, checked for presence, length and element type on every rank.

    Parameters
    ----------
    index : int
        Of the unit in its files.
    ranks : sequence of (Unit, sequence of Shard)
        Per model-parallel rank: the unit there, and the files of its data-parallel ranks.
    file_of : callable
        Index in the file table of a file's name.

    Raises
    ------
    CorruptSourceError, UnsupportedSourceError
        A flat tensor has another length or element type than the others.
    IncompleteSourceError
        A rank lacks a state that the others have.
    """
    names: dict[str, None] = {}
    for _, shards in ranks:
        for shard in shards:
            names.update(dict.fromkeys(shard.states[index]))
    taken = sorted(_RESERVED.intersection(names))
    if taken:
        raise UnsupportedSourceError(
            f"{ranks[0][1][0].name}: the optimizer calls a state {taken[0]!r}, a name that is reserved."
        )
    found = {MASTER: _collect(index, MASTER, ranks, file_of)}
    for name in names:
        found[name] = _collect(index, name, ranks, file_of)
    return found


def _collect(
    index: int,
    state: str,
    ranks: Sequence[tuple[Unit, Sequence[Shard]]],
    file_of: Callable[[str], int],
) -> UnitState:
    buffers: list[Buffer] = []
    kind: tuple[str, bool] | None = None
    for unit, shards in ranks:
        for rank, shard in enumerate(shards):
            ref = shard.masters[index] if state == MASTER else shard.states[index].get(state)
            file = file_of(shard.file_of(index, master=state == MASTER))
            if ref is None:
                if unit.holds(rank):
                    raise _lacks(shard, index, state, unit)
                buffers.append(Buffer(file, 0, 0))
                continue
            _check_length(shard, index, state, unit=unit, rank=rank, ref=ref)
            kind = kind or (ref.dtype, shard.big_endian)
            if kind != (ref.dtype, shard.big_endian):
                raise UnsupportedSourceError(
                    f"{shard.name}: {state} of {unit_words(index, unit)} has elements of {ref.dtype}, other ranks have"
                    f" {kind[0]} (or another byte order)."
                )
            buffers.append(Buffer(file, ref.offset, ref.nbytes))
    dtype, big_endian = kind or ("float32", False)
    return UnitState(tuple(buffers), dtype, big_endian)


def _check_length(
    shard: Shard, index: int, state: str, *, unit: Unit, rank: int, ref: TensorRef
) -> None:
    expected = unit.lengths(rank)
    # The paddings that old versions declared were wrong where padding fills whole ranks, so what
    # such a rank holds may have any length.
    if ref.numel in expected or (not unit.holds(rank) and ref.numel <= max(expected)):
        return
    wanted = " or ".join(str(n) for n in sorted(set(expected), reverse=True))
    kind = CorruptSourceError if state == MASTER else UnsupportedSourceError
    raise kind(
        f"{shard.name}: {state} of {unit_words(index, unit)} has {ref.numel} elements, expected {wanted}: it is not"
        " laid out like the master weights.",
        kind=Kind.SHAPE,
        state=state,
        rank=rank,
    )


def _lacks(shard: Shard, index: int, state: str, unit: Unit) -> IncompleteSourceError:
    return IncompleteSourceError(
        f"{shard.name}: optimizer state {state!r} of {unit_words(index, unit)} is missing; other ranks have it.",
        kind=Kind.MISSING_KEY,
        state=state,
    )


def unit_words(index: int, unit: Unit) -> str:
    """What to call a unit in messages: its kind, number and first parameters."""
    what = "group" if isinstance(unit, GroupUnit) else "sub-group"
    what = "parameter" if isinstance(unit, WholeUnit) else what
    return f"{what} {index} ({listing(unit.shapes, cap=2)})"


def compare_mappings(units: Sequence[Unit], shards: Sequence[Shard]) -> list[str]:
    """Check ``param_slice_mappings`` against ``param_shapes``, which is what counts.

    With ``round_robin_gradients`` DeepSpeed computes the mappings in another order than that of the
    flat buffer (``stage_1_and_2.py``, ``_round_robin_reorder``), and its own converter then reads other
    parameters' values. That is the one disagreement with an explanation; it is warned of.

    Raises
    ------
    CorruptSourceError
        They disagree in any other way: ranks were exchanged, or the model file is of another run.
    """
    different: dict[str, None] = {}
    for index, unit in enumerate(units):
        recorded = [None if s.mappings is None else s.mappings[index] for s in shards]
        if not isinstance(unit, GroupUnit) or not any(recorded):
            continue
        expected = unit.slices()
        wrong = [rank for rank, r in enumerate(recorded) if r is not None and r != expected[rank]]
        if wrong and not _is_round_robin(unit, recorded):
            raise _contradiction(shards, index, wrong[0], expected)
        for rank in wrong:
            mine, theirs = expected[rank], recorded[rank] or {}
            names = {**mine, **theirs}
            different.update((n, None) for n in names if mine.get(n) != theirs.get(n))
    if not different:
        return []
    return [
        (
            f"param_slice_mappings contradicts param_shapes for {len(different)} parameters"
            f" ({listing(different, cap=3)}), as round_robin_gradients makes DeepSpeed do; param_shapes, the order"
            " of the flat buffers, is followed."
        )
    ]


def _is_round_robin(unit: GroupUnit, recorded: Sequence[_Slices | None]) -> bool:
    """Whether the mappings are those of the order from which round robin made the unit's."""
    names = dict.fromkeys(name for slices in recorded for name in slices or ())
    filled = [name for name, shape in unit.shapes.items() if math.prod(shape)]
    if set(names) != set(filled):
        return False
    order = list(names)
    before = GroupUnit.of({name: unit.shapes[name] for name in order}, unit.ranks, None)
    dealt = [name for rank in range(unit.ranks) for name in order[rank :: unit.ranks]]
    agrees = all(r is None or r == e for r, e in zip(recorded, before.slices(), strict=True))
    return agrees and dealt == filled


def _contradiction(
    shards: Sequence[Shard], index: int, rank: int, expected: Sequence[_Slices]
) -> CorruptSourceError:
    recorded = (shards[rank].mappings or ())[index]
    mine = expected[rank]
    name = next(n for n in {**recorded, **mine} if recorded.get(n) != mine.get(n))
    found, wanted = (
        "no slice" if cut is None else f"{cut[1]} elements at {cut[0]}"
        for cut in (recorded.get(name), mine.get(name))
    )
    owner = [r for r, slices in enumerate(expected) if slices == recorded]
    text = f": this is what rank {owner[0]} should hold." if owner else "."
    return CorruptSourceError(
        f"{shards[rank].name}: param_slice_mappings of group {index} records {found} of {name!r}, expected"
        f" {wanted} by the model file's param_shapes{text}",
        hint="This file, or the model file, is of another rank or run.",
        fqn=name,
    )
