"""Patterns: what they split, they join again, bit for bit, alone and nested."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from tests.layout.reference import Ranks, actual_ranges, layouts, numbered, regions
from ucpstore.errors import Kind, PatternError
from ucpstore.layout import geometry as nodes
from ucpstore.layout.geometry import Geometry, Strided, geometry_from_json
from ucpstore.layout.patterns import (
    Axis,
    Flat,
    Hy,
    Pad,
    Partial,
    Replicate,
    Shard,
    ShardNC,
    Stacked,
    Unique,
    compose,
    describe,
    even_widths,
    local_shape,
    pattern_from_json,
)
from ucpstore.layout.region import Region

NAMES = {name: getattr(nodes, name) for name in nodes.__all__} | {"Region": Region}


def composed(x: np.ndarray, axes: list[Axis]) -> tuple[Geometry, Ranks]:
    """The geometry of ``x`` and the buffers of its ranks, split by plain numpy."""
    ranks = Ranks()
    stored = ranks.build(x, axes)

    def leaf(coords: dict[str, int], shape: tuple[int, ...]) -> Strided:
        node = stored[tuple(0 if isinstance(p, Pad) else coords[name] for name, _, p in axes)]
        assert node.shape == shape
        return node

    return compose(x.shape, axes, leaf), ranks


@given(layouts(), st.data())
def test_union_of_split_is_the_tensor(case: tuple[np.ndarray, list[Axis]], data: st.DataObject):
    x, axes = case
    geometry, ranks = composed(x, axes)
    assert geometry.shape == x.shape
    assert geometry.faults() == []
    full = Region.full(x.shape)
    for copy in range(geometry.copies):
        got = ranks.gather(geometry, full, copy)
        assert copy > 0 or np.array_equal(got, x)
        assert np.array_equal(got[got != 0], x[got != 0])
    assert not list(geometry.query(full, geometry.copies))
    region = data.draw(regions(x.shape))
    assert np.array_equal(ranks.gather(geometry, region), x[region.slices])
    assert geometry.count(region) >= actual_ranges(geometry.query(region))
    slots = {p.slot for c in range(geometry.copies) for p in geometry.query(full, c)}
    assert slots <= set(geometry.used_slots()) <= set(range(len(ranks.buffers)))


@given(layouts())
def test_round_trips(case: tuple[np.ndarray, list[Axis]]):
    geometry, _ = composed(*case)
    document = json.loads(json.dumps(geometry.to_json()))
    assert geometry_from_json(document) == geometry
    assert geometry_from_json(document).shape == geometry.shape
    assert eval(repr(geometry), NAMES) == geometry
    again = pickle.loads(pickle.dumps(geometry))
    assert again == geometry
    assert hash(again) == hash(geometry)
    full = Region.full(geometry.shape)
    assert list(again.query(full)) == list(geometry.query(full))
    for _, _, pattern in case[1]:
        assert pattern_from_json(json.loads(json.dumps(pattern.to_json()))) == pattern
        assert eval(repr(pattern)) == pattern


@given(layouts())
def test_local_shape_agrees_with_the_ranks(case: tuple[np.ndarray, list[Axis]]):
    x, axes = case
    stored = Ranks().build(x, axes)
    for at in np.ndindex(*(axis.size for axis in axes)):
        coords = dict(zip((axis.name for axis in axes), at, strict=True))
        held = local_shape(x.shape, axes, coords)
        assert held == (stored[at].shape if at in stored else None)


@given(layouts(), st.data())
def test_padding_is_left_out(case: tuple[np.ndarray, list[Axis]], data: st.DataObject):
    x, axes = case
    if x.ndim == 0:
        return
    dim = data.draw(st.integers(0, x.ndim - 1))
    true_size = data.draw(st.integers(0, x.shape[dim]))
    geometry, ranks = composed(x, [Axis("", 1, Pad(dim, true_size)), *axes])
    expected = np.take(x, range(true_size), axis=dim)
    assert geometry.faults() == []
    assert np.array_equal(ranks.gather(geometry, Region.full(expected.shape)), expected)


def test_padding_of_every_rank():
    x = numbered((8, 3))
    geometry, ranks = composed(x, [Axis("tp", 2, Shard(0)), Axis("", 1, Pad(0, 3))])
    expected = x[[0, 1, 2, 4, 5, 6]]
    assert np.array_equal(ranks.gather(geometry, Region.full((6, 3))), expected)


def test_every_kind_is_drawn():
    """The strategy above reaches every pattern, inside and outside of others."""
    seen: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}

    def look(case: tuple[np.ndarray, list[Axis]]) -> None:
        for depth, (_, _, pattern) in enumerate(case[1]):
            seen[depth].add(type(pattern).__name__)

    for number in range(20):
        seed(number)(given(layouts())(look))()
        if len(seen[0]) == 8 and len(seen[1]) >= 7 and len(seen[2]) >= 5:
            break
    assert seen[0] == {
        "Unique", "Replicate", "Partial", "Shard", "ShardNC", "Hy", "Flat", "Stacked",
    }  # fmt: skip
    assert len(seen[1]) >= 7
    assert len(seen[2]) >= 5


@given(st.integers(0, 50), st.integers(1, 9))
def test_even_widths_give_the_remainder_to_the_first(length: int, parts: int):
    widths = even_widths(length, parts)
    assert widths == tuple(len(a) for a in np.array_split(np.arange(length), parts))


def test_autotp_and_zero3_widths():
    assert even_widths(10, 4) == (3, 3, 2, 2)
    assert Flat().split((7, 3), 4) == ((6,), (6,), (6,), (3,))
    assert Flat().split((3,), 8) == ((1,), (1,), (1,), (0,), (0,), (0,), (0,), (0,))
    assert Flat(start=5, width=8).split((9,), 3) == ((3,), (6,), (0,))
    assert Flat(align=4).split((9,), 2) == ((8,), (1,))


def test_fused_qkv_of_unequal_heads():
    axes = [Axis("tp", 2, ShardNC(0, (8, 2, 2), ((4, 4), (1, 1), (2, 0))))]
    x = numbered((12, 2))
    geometry, ranks = composed(x, axes)
    assert [s.shape for s in ranks.build(x, axes).values()] == [(7, 2), (5, 2)]
    assert np.array_equal(ranks.gather(geometry, Region.full((12, 2))), x)
    assert geometry.cuts() == ((4, 8, 9, 10), ())


def test_cuts_of_nested_axes():
    axes = [
        Axis("ep", 2, Stacked()),
        Axis("tp", 3, Shard(1)),
        Axis("pp", 4, Unique(1)),
        Axis("dp", 5, Flat()),
    ]
    geometry = compose((2, 4, 7), axes, lambda at, shape: Strided(shape, at["dp"]))
    assert geometry.cuts() == ((1,), (), (3, 5))
    assert describe(axes) == "ep: stack, tp: shard(1), dp: flat"
    assert describe([Axis("pp", 4, Unique()), Axis("tp", 1, Shard(0))]) == "unique"
    vocabulary = [Axis("", 1, Pad(0, 50257)), Axis("tp", 2, Shard(0, (25632, 24672)))]
    assert describe(vocabulary) == "pad(0: 50257), tp: shard(0: 25632, 24672)"


def test_rules_of_copies():
    def copies(*axes: Axis) -> Geometry:
        return compose((4,), axes, lambda at, shape: Strided(shape, sum(at.values())))

    assert copies(Axis("dp", 2, Replicate())).rule == "equal"
    assert copies(Axis("dp", 2, Replicate("first"))).rule == "first"
    assert copies(Axis("tp", 3, Partial()), Axis("dp", 2, Flat())).rule == "average"
    assert copies(Axis("tp", 3, Partial())).copies == 3
    assert copies(Axis("tp", 2, Shard(0)), Axis("dp", 3, Replicate())).copies == 3
    assert copies(Axis("dp", 1, Partial())).copies == 1
    hybrid = copies(Axis("dp", 2, Flat()), Axis("rep", 3, Replicate()))
    assert (hybrid.copies, hybrid.rule) == (3, "equal")


@pytest.mark.parametrize(
    ("shape", "size", "pattern"),
    [
        ((4, 4), 2, Shard(2)),
        ((), 2, Shard(0)),
        ((4, 4), 2, Shard(0, (1, 2))),
        ((4, 4), 2, Shard(0, (5, -1))),
        ((4, 4), 3, Shard(0, (2, 2))),
        ((4, 4), 2, ShardNC(0, (1, 2))),
        ((4, 4), 2, ShardNC(0, (2, 2), ((1, 1),))),
        ((4, 4), 2, ShardNC(0, (2, 2), ((1, 1), (2, 1)))),
        ((4, 4), 2, Unique(2)),
        ((4, 4), 2, Stacked()),
        ((), 1, Stacked()),
        ((4, 4), 3, Hy(((0, 2), (1, 2)))),
        ((4, 4), 2, Pad(0, 3)),
        ((4, 4), 1, Pad(0, 5)),
        ((4, 4), 2, Flat(width=7)),
        ((4, 4), 2, Flat(start=1, width=8)),
        ((4, 4), 2, Flat(widths=(15, 2))),
        ((4, 4), 0, Replicate()),
    ],
)
def test_patterns_that_do_not_fit(shape: tuple[int, ...], size: int, pattern: object):
    with pytest.raises(PatternError) as caught:
        compose(shape, [Axis("tp", size, pattern)], lambda at, s: Strided(s, 0))
    assert caught.value.kind is Kind.SHAPE


def test_flat_of_a_strided_range_is_refused():
    with pytest.raises(PatternError, match="stride 2"):
        compose((6,), [Axis("dp", 2, Flat())], lambda at, s: Strided(s, at["dp"], 0, (2,)))


def test_axes_need_different_names():
    axes = [Axis("tp", 2, Shard(0)), Axis("tp", 2, Shard(1))]
    with pytest.raises(PatternError, match="different names"):
        compose((4, 4), axes, lambda at, s: Strided(s, 0))


def test_local_shape_needs_every_axis():
    with pytest.raises(PatternError, match="'tp' has 2 ranks: None"):
        local_shape((4,), [Axis("tp", 2, Shard(0))], {})


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"pattern": "nope"},
        {"pattern": "shard"},
        {"pattern": "shard", "dim": "0"},
        {"pattern": "shard", "dim": True},
        {"pattern": "shard", "dim": 0, "more": 1},
        {"pattern": "shard", "dim": 0, "widths": [1, "2"]},
        {"pattern": "shard_nc", "dim": 0, "sections": 3},
        {"pattern": "hy", "grid": [1, 2]},
        {"pattern": ["shard"]},
        {"pattern": "replicate", "rule": "average"},
        [],
    ],
)
def test_pattern_documents_that_cannot_be_read(document: object):
    with pytest.raises(PatternError):
        pattern_from_json(document)


def test_normal_form_leaves_defaults_out():
    assert Shard(0).to_json() == {"pattern": "shard", "dim": 0}
    assert Flat().to_json() == {"pattern": "flat"}
    assert ShardNC(1, (2, 2), ((1, 1), (2, 0))).to_json() == {
        "pattern": "shard_nc",
        "dim": 1,
        "sections": [2, 2],
        "widths": [[1, 1], [2, 0]],
    }


def test_a_flat_of_megabytes_makes_one_piece_inside_a_rank():
    shape = (512, 1024)
    axes = [Axis("dp", 4, Flat())]
    geometry = compose(shape, axes, lambda at, s: Strided(s, at["dp"]))
    pieces = list(geometry.query(Region((130, 0), (100, 1024))))
    assert len(pieces) == 1
    assert pieces[0].offset == 130 * 1024 - math.prod(shape) // 4
