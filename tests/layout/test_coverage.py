"""Coverage: planted gaps and overlaps are found, to the element; sound layouts have none."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.layout.reference import regions
from tests.layout.test_geometry import shapes, tilings
from ucpstore.errors import Kind, LayoutError
from ucpstore.layout.coverage import Fault, faults_of, overlaps, require_covered, uncovered
from ucpstore.layout.geometry import (
    Block,
    Blocks,
    Concat,
    Copies,
    FlatEven,
    FlatRanges,
    Geometry,
    Part,
    Stack,
    Strided,
)
from ucpstore.layout.region import Region


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[list[Region]]:
    return st.lists(regions(shape), max_size=6)


@given(shapes, st.data())
def test_uncovered_is_exact(shape: tuple[int, ...], data: st.DataObject):
    boxes = data.draw(boxes_in(shape))
    region = data.draw(regions(shape))
    covered = np.zeros(shape, bool)
    for box in boxes:
        covered[box.slices] = True
    gaps = uncovered(region, boxes)
    hits = np.zeros(shape, int)
    for gap in gaps:
        assert gap.volume > 0
        assert region.contains(gap)
        hits[gap.slices] += 1
    inside = np.zeros(shape, bool)
    inside[region.slices] = True
    assert np.array_equal(hits, (inside & ~covered).astype(int))


@given(shapes, st.data())
def test_overlaps_are_exact(shape: tuple[int, ...], data: st.DataObject):
    boxes = data.draw(boxes_in(shape))
    expected = {
        (i, j, common)
        for j, b in enumerate(boxes)
        for i, a in enumerate(boxes[:j])
        if (common := a.intersect(b)) is not None
    }
    found = overlaps(boxes)
    assert set(found) == expected
    assert len(found) == len(expected)


@given(shapes.filter(lambda shape: shape and math.prod(shape)), st.data())
def test_a_missing_box_is_named(shape: tuple[int, ...], data: st.DataObject):
    tiles = data.draw(tilings(Region.full(shape)))
    lost = data.draw(st.integers(0, len(tiles) - 1))
    blocks = [Block(box, Strided(box.sizes, k), (0,) * len(shape)) for k, box in enumerate(tiles)]
    geometry = Blocks(shape, tuple(b for k, b in enumerate(blocks) if k != lost))
    assert [(f.kind, f.region) for f in geometry.faults()] == [("gap", tiles[lost])]
    whole = Blocks(shape, tuple(blocks))
    assert [(f.kind, f.region, f.slot) for f in faults_of(whole, missing=[lost, 999])] == [
        ("gap", tiles[lost], lost)
    ]
    assert faults_of(whole) == []


@given(shapes.filter(lambda shape: shape and math.prod(shape)), st.data())
def test_a_doubled_box_is_named(shape: tuple[int, ...], data: st.DataObject):
    tiles = data.draw(tilings(Region.full(shape)))
    extra = data.draw(regions(shape))
    assume(extra.volume)
    blocks = [Block(box, Strided(box.sizes, 0), (0,) * len(shape)) for box in [*tiles, extra]]
    faults = Blocks(shape, tuple(blocks)).faults()
    assert {f.kind for f in faults} == {"overlap"}
    assert {f.region for f in faults} == {t.intersect(extra) for t in tiles} - {None}


def test_many_boxes():
    """A 50 x 50 grid that lacks one box and has another one twice."""
    grid = [Region((4 * i, 7 * j), (4, 7)) for i in range(50) for j in range(50)]
    assert uncovered(Region.full((200, 350)), grid) == []
    assert overlaps(grid) == []
    boxes = [*grid[:1234], *grid[1235:], Region((0, 0), (1, 8))]
    assert uncovered(Region.full((200, 350)), boxes) == [grid[1234]]
    assert {common for _, _, common in overlaps(boxes)} == {
        Region((0, 0), (1, 7)),
        Region((0, 7), (1, 1)),
    }
    assert len(overlaps([grid[0]] * 1000)) == 100


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        (FlatEven((3, 4), 2, 4, slots=3), [("gap", Region((2, 2), (1, 2)))]),
        (FlatEven((3, 4), 0, 0, slots=3), [("gap", Region.full((3, 4)))]),
        (FlatEven((3, 4), 20, 4, slots=3), [("gap", Region.full((3, 4)))]),
        (FlatEven((3, 4), -1, 4, slots=9), [("bounds", Region.full((3, 4)))]),
        (
            FlatRanges((3, 4), (1, 6, 10), (0, 1), (0, 0)),
            [("gap", Region((0, 0), (1, 1))), ("gap", Region((2, 2), (1, 2)))],
        ),
        (
            FlatRanges((3, 4), (0, 8, 6, 12), (0, 1, 2), (0, 0, 0)),
            [("bounds", Region.full((3, 4)))],
        ),
        (FlatRanges((3, 4), (0, 13), (0,), (0,)), [("bounds", Region.full((3, 4)))]),
        (FlatRanges((3, 4), (0, 12), (0, 1), (0,)), [("shape", Region.full((3, 4)))]),
        (FlatRanges((3, 4), (0, 12), (0,), (-1,)), [("bounds", Region.full((3, 4)))]),
        (Strided((3, 4), 0, 0, (4,)), [("shape", Region.full((3, 4)))]),
        (Strided((3, 4), 0, 0, (4, -1)), [("bounds", Region.full((3, 4)))]),
        (Strided((3, 4), 0, -1), [("bounds", Region.full((3, 4)))]),
        (Concat((5, 2), 0, (Part(3, Strided((3, 2), 0)),)), [("gap", Region((3, 0), (2, 2)))]),
        (Concat((2, 2), 0, (Part(3, Strided((3, 2), 0)),)), [("shape", Region((0, 0), (2, 2)))]),
        (
            Concat((5, 2), 0, (Part(2, Strided((2, 2), 0)), Part(3, Strided((4, 2), 1), 2))),
            [("gap", Region((4, 0), (1, 2)))],
        ),
        (Concat((2, 2), 0, (Part(2, Strided((2, 3), 0)),)), [("shape", Region((0, 0), (2, 2)))]),
        (Concat((2, 2), 0, (Part(2, Strided((2,), 0)),)), [("shape", Region((0, 0), (2, 2)))]),
        (
            Concat((2, 2), 0, (Part(2, Strided((2, 2), 0), -1),)),
            [("bounds", Region((0, 0), (2, 2)))],
        ),
        (
            Stack((Strided((2,), 0), Strided((3,), 1))),
            [("shape", Region((1, 0), (1, 2)))],
        ),
        (Copies((Strided((2,), 0), Strided((3,), 1))), [("shape", Region((0,), (2,)))]),
        (
            Blocks((4,), (Block(Region((2,), (4,)), Strided((4,), 0), (0,)),)),
            [("bounds", Region((2,), (4,))), ("gap", Region((0,), (2,)))],
        ),
        (
            Blocks((4,), (Block(Region((0,), (4,)), Strided((4,), 0), (1,)),)),
            [("bounds", Region((0,), (4,)))],
        ),
    ],
)
def test_faults_of_every_node(geometry: Geometry, expected: list[tuple[str, Region]]):
    assert [(fault.kind, fault.region) for fault in geometry.faults()] == expected


def test_faults_inside_children_are_seen_from_outside():
    short = FlatEven((4, 3), 0, 3, first_slot=5, slots=3)  # the last row is missing
    assert [f.region for f in short.faults()] == [Region((3, 0), (1, 3))]
    part = Concat((9, 3), 0, (Part(1, Strided((1, 3), 0)), Part(4, short), Part(4, short)))
    assert [f.region for f in part.faults()] == [Region((4, 0), (1, 3)), Region((8, 0), (1, 3))]
    used = Concat((3, 3), 0, (Part(3, short),))  # padding may be missing
    assert used.faults() == []
    blocks = Blocks((4, 2), (Block(Region.full((4, 2)), short, (0, 1)),))
    assert [f.region for f in blocks.faults()] == [Region((3, 0), (1, 2))]
    assert [f.region for f in Stack((short, short)).faults()] == [
        Region((0, 3, 0), (1, 1, 3)),
        Region((1, 3, 0), (1, 1, 3)),
    ]
    assert len(Copies((short, short)).faults()) == 2


def test_the_error_names_parameter_box_and_file():
    parts = (Part(2, Strided((2, 8), 3)), Part(2, Strided((1, 8), 4)))
    geometry = Concat((4, 8), 0, parts)
    with pytest.raises(LayoutError) as caught:
        require_covered(
            geometry,
            fqn="layers.3.mlp.w1",
            state="adam_m",
            slot_names=lambda slot: f"rank {slot} (zero_pp_rank_{slot}.pt)",
        )
    text = str(caught.value)
    assert "'layers.3.mlp.w1' (adam_m) of shape [4, 8]" in text
    assert "gap: box [3:4, 0:8] (8 elements) should be in rank 4 (zero_pp_rank_4.pt)" in text
    assert "the part has 1 indices along dim 0, expected 2" in text
    assert caught.value.kind is Kind.GAP
    assert caught.value.context["faults"] == geometry.faults()
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_the_error_lists_ten_and_counts_the_rest():
    geometry = FlatEven((50, 4), 0, 8, slots=25)
    require_covered(geometry, fqn="w", state="fp32")
    with pytest.raises(LayoutError) as caught:
        require_covered(geometry, fqn="w", state="fp32", missing=range(3, 17))
    text = str(caught.value)
    assert text.count("gap: box") == 10
    assert "gap: box [6:8, 0:4] (8 elements) should be in slot 3: its buffer is missing" in text
    assert "; and 4 more." in text
    assert len(caught.value.context["faults"]) == 14


def test_missing_copies_are_gaps_too():
    geometry = Copies((Strided((2,), 0), Strided((2,), 1)))
    assert [f.slot for f in faults_of(geometry, missing=[0])] == [0]
    assert [f.slot for f in faults_of(geometry, missing=[1])] == [1]


def test_kinds_become_error_kinds():
    doubled = Blocks((1,), (Block(Region((0,), (1,)), Strided((1,), 0), (0,)),) * 2)
    for geometry, kind in ((doubled, Kind.OVERLAP), (Strided((1,), 0, -1), Kind.SHAPE)):
        with pytest.raises(LayoutError) as caught:
            require_covered(geometry, fqn="w", state="fp32")
        assert caught.value.kind is kind


def test_mixed_rules_are_found_before_reading():
    leaf = Strided((1,), 0)
    mixed = Stack((Copies((leaf, leaf)), Copies((leaf, leaf), "average")))
    with pytest.raises(LayoutError, match="one rule"):
        require_covered(mixed, fqn="w", state="fp32")


def test_faults_compare_by_value():
    fault = Fault("gap", Region((0,), (1,)), 3, "m")
    assert fault == Fault("gap", Region((0,), (1,)), 3, "m")
    assert fault.moved(Region((0,), (1,)), (5,)) == Fault("gap", Region((5,), (1,)), 3, "m")
    assert fault.moved(Region((1,), (1,)), (5,)) is None
