"""Which rank holds what: against buffers that are built, padded and cut as the framework does it."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ucpstore.formats.deepspeed.ucpinfo import Flat, Member, UcpInfo, deal, undeal

shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)
members = st.lists(shapes, min_size=1, max_size=7).map(
    lambda found: [Member(f"p{i}", shape) for i, shape in enumerate(found)]
)


def values(group: list[Member], start: int = 1) -> dict[str, np.ndarray]:
    """A number of its own for every element; 0 is padding."""
    found = {}
    for member in group:
        found[member.fqn] = np.arange(start, start + member.numel)
        start += member.numel
    return found


def filled(flat: Flat, source: dict[str, np.ndarray]) -> np.ndarray:
    out = np.zeros(flat.numel, int)
    for part in flat.parts:
        view = out[part.offset : part.offset + part.count]
        assert view.size == part.count
        assert not view.any()
        assert part.shape == () or math.prod(part.shape) == source[part.fqn].size
        view[:] = source[part.fqn][part.start : part.start + part.count]
    return out


@given(members, st.integers(1, 9), st.sampled_from([1, 2]))
def test_flat_groups(group: list[Member], dp: int, stage: int) -> None:
    source = values(group)
    whole = np.concatenate([source[member.fqn] for member in group])
    padded = np.pad(whole, (0, -whole.size % (2 * dp)))  # flatten_dense_tensors_aligned
    info = UcpInfo.of([group], stage, dp, 10**9)
    for rank, expected in enumerate(np.split(padded, dp)):
        (flat,) = info.rank(rank)
        assert np.array_equal(filled(flat, source), expected)
        assert flat.padding == np.count_nonzero(expected == 0)


@given(members, members, st.integers(1, 9), st.booleans())
def test_whole(first: list[Member], second: list[Member], dp: int, flat: bool) -> None:
    second = [Member(f"q{i}", member.shape) for i, member in enumerate(second)]
    source = {**values(first), **values(second, 10_000)}
    info = UcpInfo.whole([first, second], dp, flat=flat)
    order = [(group, member) for group, held in info.units for member in held]
    assert order == [(0, m) for m in first] + [(1, m) for m in second]
    for rank in range(dp):
        flats = info.rank(rank)
        assert len(flats) == (2 if flat else len(first) + len(second))
        found = np.concatenate([filled(each, source) for each in flats])
        assert np.array_equal(found, np.concatenate([*source.values()]))
        assert not any(each.padding for each in flats)


@given(members, members, st.integers(1, 9), st.integers(1, 40))
def test_sub_groups(first: list[Member], second: list[Member], dp: int, limit: int) -> None:
    second = [Member(f"q{i}", member.shape) for i, member in enumerate(second)]
    source = {**values(first), **values(second, 10_000)}
    info = UcpInfo.of([first, second], 3, dp, limit)
    order = [(group, member) for group, held in info.units for member in held]
    assert order == [(0, m) for m in first] + [(1, m) for m in second]
    for group, held in info.units:
        sizes = [-(-member.numel // dp) for member in held]
        assert sum(sizes[:-1]) < limit  # closed as soon as the limit is reached ...
        last = held[-1] in (first[-1], second[-1])
        assert sum(sizes) >= limit or last  # ... and not before, but at the group's end
        assert group in (0, 1)
    for rank in range(dp):
        for flat, (_, held) in zip(info.rank(rank), info.units, strict=True):
            cut = [
                np.pad(source[m.fqn], (0, -m.numel % dp)).reshape(dp, -1)[rank] for m in held
            ]  # partition_parameters.py: every parameter on its own
            assert np.array_equal(filled(flat, source), np.concatenate(cut))


@given(members, st.integers(1, 9))
def test_dealing_is_undone(group: list[Member], ranks: int) -> None:
    dealt = deal(group, ranks)
    assert undeal(dealt, ranks) == group
    assert dealt[: len(group[::ranks])] == group[::ranks]
