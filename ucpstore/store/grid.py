"""Which arrays a source becomes, and how each is cut into objects.

Shards follow the cut points of the source where that is cheap; nothing here depends on memory limits,
numbers of workers or ZeRO's flat cuts, so the same source always gets the same arrays.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from ucpstore.contracts import CommonState, ParameterSpec, Role, Source, StateSpec
from ucpstore.dtypes import itemsize
from ucpstore.errors import Kind, PlanError, close_names, listing
from ucpstore.layout.tiles import num_tiles, tile_grid, tile_shape
from ucpstore.store.arrays import NO_ATTRIBUTES, ArraySpec, storage_dtype
from ucpstore.store.names import encode_name, encode_siblings

__all__ = ["STACK_ABOVE", "plan_arrays", "shard_shape"]

STACK_ABOVE = 20_000
"""Number of arrays above which numbered siblings are stacked: the root document would be too large."""

_MIN_BYTES = 32 * 1024 * 1024
_TARGET_BYTES = 64 * 1024 * 1024
_MAX_BYTES = 128 * 1024 * 1024
_SMALLEST_BYTES = 4 * 1024 * 1024
"""Shards of less than this are too many objects: rather than that, they cross the source's cuts."""

Cuts = tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=65536)
def shard_shape(
    shape: tuple[int, ...], tile: tuple[int, ...], itemsize: int, cuts: Cuts
) -> tuple[int, ...]:
    """Shape of an array's objects: a multiple of the tile, 32 to 128 MiB where the array is that large.

    One slice of the source is one shard, if its borders can be tile borders. Larger slices are divided,
    the leading dims first (into parts down to 4 MiB where none of 32 to 128 MiB divides them); smaller ones
    are merged, the trailing dims first. So every shard lies in one slice or consists of whole ones. Two
    kinds of source are the exception: those whose cuts are no multiples of a tile, and slices above 128
    MiB that no part of 4 to 128 MiB divides.

    Parameters
    ----------
    shape, tile : tuple of int
    itemsize : int, bytes
        Of the stored elements.
    cuts : tuple of tuple of int
        Per dim, the interior cut points of the source's slices.

    Returns
    -------
    tuple of int
        ``tile`` itself where the array is one tile: it needs no sharding.
    """
    if num_tiles(shape, tile) <= 1:
        return tile
    whole = tuple(t * n for t, n in zip(tile, tile_grid(shape, tile), strict=True))
    extent = [
        _unit(n, t, points) or w for n, t, points, w in zip(shape, tile, cuts, whole, strict=True)
    ]
    for dim in reversed(range(len(shape))):
        missing = -(-_MIN_BYTES // (math.prod(extent) * itemsize))
        if missing > 1:
            extent[dim] = _merge(extent[dim], whole[dim], missing)
    for dim in range(len(shape)):
        nbytes = math.prod(extent) * itemsize
        if nbytes > _MAX_BYTES:
            cut = extent[dim] < whole[dim]
            extent[dim] = tile[dim] * _divide(extent[dim] // tile[dim], nbytes, cut=cut)
    return tuple(extent)


def _unit(size: int, tile: int, points: tuple[int, ...]) -> int | None:
    """Smallest extent whose multiples are cut points and tile borders, if it is inside the dim."""
    common = math.gcd(*points)
    if common < tile:
        return None
    unit = math.lcm(common, tile)
    return unit if unit < size else None


def _merge(extent: int, whole: int, times: int) -> int:
    """At least ``times`` units of ``extent``, in equal groups and at most ``whole``."""
    units = -(-whole // extent)
    groups = max(1, units // times)
    return min(whole, extent * -(-units // groups))


def _divide(tiles: int, nbytes: int, *, cut: bool) -> int:
    """Number of tiles, out of ``tiles`` that have ``nbytes``, that makes a shard of the target size.

    With ``cut``, the tiles are a slice of the source, and the shards should not cross its borders.
    """
    divisors = [
        part
        for part in range(1, tiles + 1)
        if tiles % part == 0 and nbytes * part <= _MAX_BYTES * tiles
    ]
    fitting = [part for part in divisors if nbytes * part >= _MIN_BYTES * tiles]
    if fitting:
        return min(
            fitting, key=lambda part: (abs(math.log(nbytes * part / tiles / _TARGET_BYTES)), part)
        )
    if cut and divisors and nbytes * divisors[-1] >= _SMALLEST_BYTES * tiles:
        return divisors[-1]
    return -(-tiles // min(tiles, round(nbytes / _TARGET_BYTES)))


@dataclass(frozen=True, slots=True)
class _Selected:
    """A parameter and the states of it that are to be written."""

    parameter: ParameterSpec
    states: tuple[StateSpec, ...]


def plan_arrays(
    source: Source,
    *,
    states: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    stack_above: int = STACK_ABOVE,
) -> list[ArraySpec]:
    """Arrays for the selected states of a source, and for all tensors of its common state.

    Parameters
    ----------
    source : Source
    states : sequence of str, optional
        Names of states. By default all but those that are derived from another one.
    only, exclude : sequence of str, optional
        Names of parameters to take or to leave out; ``*``, ``?`` and ``[...]`` as in a shell.
    stack_above : int
        With more arrays than this, siblings with consecutive numbers and equal states become one array
        with a leading axis.

    Returns
    -------
    list of ArraySpec
        In the order of the source; the same for the same source.

    Raises
    ------
    PlanError
        Nothing is selected, a name matches nothing, or a name cannot be a path.
    """
    selected = _select(source, states, only, exclude)
    if sum(len(s.states) for s in selected) > stack_above:
        groups = _group_siblings(source, selected)
    else:
        groups = [_Group((s,)) for s in selected]
    arrays = [array for group in groups for array in _group_arrays(source, group)]
    arrays += [_common_array(source, spec) for spec in source.common.tensors.values()]
    _check_paths(arrays)
    return arrays


def _select(
    source: Source,
    states: Sequence[str] | None,
    only: Sequence[str] | None,
    exclude: Sequence[str] | None,
) -> list[_Selected]:
    wanted = None if states is None else frozenset(states)
    if wanted is not None:
        known = {name for p in source.parameters.values() for name in p.states}
        _refuse_unknown("state", sorted(wanted - known), sorted(known))
    kept = None if only is None else _matching(only, source.parameters)
    dropped = _matching(exclude or (), source.parameters)
    selected = []
    for fqn, parameter in source.parameters.items():
        if fqn in dropped or (kept is not None and fqn not in kept):
            continue
        chosen = tuple(
            spec
            for name, spec in parameter.states.items()
            if (not spec.derived if wanted is None else name in wanted)
        )
        if chosen:
            selected.append(_Selected(parameter, chosen))
    if source.parameters and not selected:
        raise PlanError(
            f"nothing to write from {source.url!r}: the selection leaves none of its "
            f"{len(source.parameters)} parameters with a state.",
            kind=Kind.SELECTION,
            hint="Loosen states, only or exclude.",
            url=source.url,
        )
    return selected


def _matching(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    """Names that match any of the patterns; every pattern must match one."""
    names = list(names)
    matched: set[str] = set()
    unknown = []
    for pattern in patterns:
        match = re.compile(translate(pattern)).match
        hits = [name for name in names if name == pattern or match(name)]
        if not hits:
            unknown.append(pattern)
        matched.update(hits)
    _refuse_unknown("parameter", unknown, names)
    return matched


def _refuse_unknown(what: str, unknown: Sequence[str], known: Sequence[str]) -> None:
    if unknown:
        raise PlanError(
            f"cannot select {what} {listing(map(repr, unknown))}: no {what} of the source matches, "
            f"expected one of {listing(known)}.",
            kind=Kind.SELECTION,
            hint=close_names(unknown[0], known),
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters that share their arrays: one, or numbered siblings ``prefix + number + suffix``."""

    members: tuple[_Selected, ...]
    prefix: str = ""
    numbers: range = range(0)
    suffix: str = ""

    @property
    def stacked(self) -> bool:
        return len(self.members) > 1

    @property
    def segment(self) -> str:
        if self.stacked:
            return encode_siblings(self.prefix, self.numbers, self.suffix)
        return encode_name(self.members[0].parameter.fqn)


def _group_siblings(source: Source, selected: Sequence[_Selected]) -> list[_Group]:
    """Put every parameter into the longest run of siblings that it can be part of."""
    families: dict[tuple[Any, ...], dict[int, int]] = {}
    for place, one in enumerate(selected):
        signature = _signature(source, one)
        for position, prefix, number, suffix in _numbered(one.parameter.fqn):
            family = families.setdefault((position, prefix, suffix, signature), {})
            family[number] = place
    runs = [
        (key, run)
        for key, family in families.items()
        for run in _consecutive(sorted(family))
        if len(run) > 1
    ]
    runs.sort(key=lambda item: (-len(item[1]), -item[0][0], item[0][1], item[0][2], item[1][0]))
    taken: set[int] = set()
    groups: dict[int, _Group] = {}
    for key, run in runs:
        family, (_, prefix, suffix, _) = families[key], key
        for part in _consecutive([number for number in run if family[number] not in taken]):
            if len(part) > 1:
                members = tuple(selected[family[number]] for number in part)
                taken.update(family[number] for number in part)
                groups[family[part[0]]] = _Group(members, prefix, part, suffix)
    for place, one in enumerate(selected):
        if place not in taken:
            groups[place] = _Group((one,))
    return [groups[place] for place in sorted(groups)]


def _signature(source: Source, one: _Selected) -> tuple[Any, ...]:
    """What siblings must have in common."""
    fqn = one.parameter.fqn
    states = tuple((s.name, s.role, s.shape, s.dtype, source.cuts(fqn, s.name)) for s in one.states)
    return states, one.parameter.trainable, one.parameter.pattern


def _numbered(fqn: str) -> Iterator[tuple[int, str, int, str]]:
    """Position, prefix, number and suffix for every integer segment of a name."""
    segments = fqn.split(".")
    for position, segment in enumerate(segments):
        if (
            len(segment) < 10
            and segment.isascii()
            and segment.isdigit()
            and str(int(segment)) == segment
        ):
            head = "".join(f"{s}." for s in segments[:position])
            tail = "".join(f".{s}" for s in segments[position + 1 :])
            yield position, head, int(segment), tail


def _consecutive(numbers: Sequence[int]) -> Iterator[range]:
    """Runs of consecutive numbers in an ascending sequence."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield range(numbers[start], numbers[end - 1] + 1)
            start = end


def _group_arrays(source: Source, group: _Group) -> Iterator[ArraySpec]:
    first = group.members[0]
    segment = group.segment
    attributes = NO_ATTRIBUTES
    if group.stacked:
        attributes = {
            "stack": {
                "prefix": group.prefix,
                "first": group.numbers[0],
                "count": len(group.numbers),
                "suffix": group.suffix,
            }
        }
    for spec in first.states:
        cuts = source.cuts(first.parameter.fqn, spec.name)
        shape = spec.shape
        if group.stacked:
            shape, cuts = (len(group.members), *shape), ((), *cuts)
        yield _array(
            f"params/{segment}/{encode_name(spec.name)}",
            spec,
            storage_dtype(spec.dtype, spec.role),
            shape=shape,
            cuts=cuts,
            members=tuple((m.parameter.fqn, spec.name) for m in group.members),
            attributes=attributes,
        )


def _common_array(source: Source, spec: StateSpec) -> ArraySpec:
    return _array(
        f"common/{encode_name(spec.name)}",
        spec,
        storage_dtype(spec.dtype, Role.BUFFER),  # as it is, whatever it is for
        shape=spec.shape,
        cuts=source.cuts(CommonState.FQN, spec.name),
        members=((CommonState.FQN, spec.name),),
        attributes=NO_ATTRIBUTES,
    )


def _array(
    path: str,
    spec: StateSpec,
    dtype: str,
    *,
    shape: tuple[int, ...],
    cuts: Cuts,
    members: tuple[tuple[str, str], ...],
    attributes: Mapping[str, Any],
) -> ArraySpec:
    size = itemsize(dtype)
    tile = tile_shape(shape, size)
    shard = shard_shape(shape, tile, size, cuts)
    return ArraySpec(
        path,
        shape,
        dtype,
        spec.dtype,
        tile,
        shard,
        members,
        role=spec.role,
        attributes=attributes,
    )


def _check_paths(arrays: Sequence[ArraySpec]) -> None:
    twice = [path for path, count in Counter(a.path for a in arrays).items() if count > 1]
    if twice:
        raise PlanError(
            f"cannot write {len(twice)} arrays: {listing(twice)} would hold several tensors.",
            kind=Kind.NAME,
            hint="Rename one of the tensors.",
        )
