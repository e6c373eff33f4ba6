"""Geometries against brute force: every element's address listed one by one."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.reference import Ranks, actual_ranges, gather, numbered, partitions, regions
from ucpstore.errors import Kind, LayoutError
from ucpstore.layout.coverage import Fault
from ucpstore.layout.flat import flat_boxes
from ucpstore.layout.geometry import (
    Block,
    Blocks,
    Concat,
    Copies,
    FlatEven,
    FlatRanges,
    Geometry,
    Part,
    Piece,
    Stack,
    Strided,
    geometry_from_json,
)
from ucpstore.layout.region import Region

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=4).map(tuple)


def addresses(pieces: Iterator[Piece]) -> dict[tuple[int, ...], tuple[int, int]]:
    """Logical index -> (slot, offset) of every element; fails where pieces overlap."""
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    for piece in pieces:
        for index in itertools.product(*map(range, piece.region.sizes)):
            at = tuple(map(int.__add__, piece.region.offsets, index))
            assert at not in found
            found[at] = (piece.slot, piece.offset + sum(map(int.__mul__, index, piece.strides)))
    return found


def elements(region: Region) -> set[tuple[int, ...]]:
    return set(
        itertools.product(*(range(a, b) for a, b in zip(region.offsets, region.stops, strict=True)))
    )


@given(shapes, st.integers(0, 30), st.integers(1, 12), st.integers(0, 5), st.data())
def test_flat_even(shape: tuple[int, ...], start: int, width: int, base: int, data: st.DataObject):
    numel = math.prod(shape)
    geometry = FlatEven(shape, start, width, base, first_slot=2, slots=-(-(start + numel) // width))
    region = data.draw(regions(shape))
    found = addresses(geometry.query(region))
    assert set(found) == elements(region)
    for index, address in found.items():
        position = start + int(np.ravel_multi_index(index, shape)) if shape else start
        assert address == (2 + position // width, base + position % width)
    assert geometry.faults() == []
    assert geometry.count(region) >= actual_ranges(geometry.query(region))
    used = {slot for slot, _ in addresses(geometry.query(Region.full(shape))).values()}
    assert set(geometry.used_slots()) == used
    assert list(geometry.query(region, copy=1)) == []
    assert geometry.cuts() == ((),) * len(shape)


@given(shapes, st.integers(1, 6), st.data())
def test_flat_ranges(shape: tuple[int, ...], ranks: int, data: st.DataObject):
    numel = math.prod(shape)
    widths = data.draw(partitions(numel, ranks))
    bounds = tuple(itertools.accumulate(widths, initial=0))
    slots = tuple(data.draw(st.permutations(range(ranks))))
    offsets = tuple(data.draw(st.integers(0, 9)) for _ in range(ranks))
    geometry = FlatRanges(shape, bounds, slots, offsets)
    region = data.draw(regions(shape))
    found = addresses(geometry.query(region))
    assert set(found) == elements(region)
    for index, address in found.items():
        flat = int(np.ravel_multi_index(index, shape)) if shape else 0
        rank = max(r for r in range(ranks) if bounds[r] <= flat < bounds[r + 1])
        assert address == (slots[rank], offsets[rank] + flat - bounds[rank])
    assert geometry.faults() == []
    assert geometry.count(region) >= actual_ranges(geometry.query(region))
    assert set(geometry.used_slots()) == {s for s, w in zip(slots, widths, strict=True) if w}


@given(shapes, st.data())
def test_flat_boxes_are_few_and_exact(shape: tuple[int, ...], data: st.DataObject):
    numel = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    boxes = flat_boxes(shape, start, stop)
    hits = np.zeros(shape, int)
    for box in boxes:
        hits[box.slices] += 1
    assert hits.reshape(-1).tolist() == [int(start <= k < stop) for k in range(numel)]
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@given(shapes, st.integers(1, 40), st.integers(0, 40), st.data())
def test_a_region_in_one_segment_is_one_piece(
    shape: tuple[int, ...], width: int, start: int, data: st.DataObject
):
    geometry = FlatEven(shape, start, width, slots=10_000)
    region = data.draw(regions(shape))
    pieces = list(geometry.query(region))
    slots = Counter(piece.slot for piece in pieces)
    if region.volume == 0:
        assert pieces == []
    if len(slots) == 1:
        assert [piece.region for piece in pieces] == [region]
    if region == Region.full(shape):
        assert max(slots.values(), default=0) <= max(2 * len(shape) - 1, 1)


def test_a_piece_for_every_block_of_a_whole_rank():
    shape = (4096, 1024)
    geometry = FlatEven(shape, start=0, width=math.prod(shape), slots=1)
    for row in range(0, 4096, 512):
        (piece,) = geometry.query(Region((row, 0), (512, 1024)))
        assert piece == Piece(Region((row, 0), (512, 1024)), 0, row * 1024, (1024, 1))


@st.composite
def tilings(draw: st.DrawFn, region: Region) -> list[Region]:
    """The region cut into boxes by recursive halving along random dims."""
    wide = [d for d, size in enumerate(region.sizes) if size > 1]
    if not wide or not draw(st.integers(0, 3)):
        return [region]
    dim = draw(st.sampled_from(wide))
    cut = draw(st.integers(1, region.sizes[dim] - 1))
    offsets, sizes = list(region.offsets), list(region.sizes)
    sizes[dim] = cut
    first = Region(tuple(offsets), tuple(sizes))
    offsets[dim] += cut
    sizes[dim] = region.sizes[dim] - cut
    return draw(tilings(first)) + draw(tilings(Region(tuple(offsets), tuple(sizes))))


@given(shapes.filter(lambda shape: shape and math.prod(shape)), st.data())
def test_blocks(shape: tuple[int, ...], data: st.DataObject):
    x = numbered(shape)
    ranks = Ranks()
    blocks = []
    for box in data.draw(tilings(Region.full(shape)).flatmap(st.permutations)):
        origin = tuple(data.draw(st.integers(0, 2)) for _ in shape)
        held = np.pad(x[box.slices], [(o, 1) for o in origin], constant_values=-9)
        blocks.append(Block(box, ranks.store(held), origin))
    geometry = Blocks(shape, tuple(blocks))
    region = data.draw(regions(shape))
    assert geometry.faults() == []
    assert np.array_equal(ranks.gather(geometry, region), x[region.slices])
    assert geometry.count(region) >= actual_ranges(geometry.query(region))
    for dim, cuts in enumerate(geometry.cuts()):
        edges = {e for b in blocks for e in (b.region.offsets[dim], b.region.stops[dim])}
        assert cuts == tuple(sorted(edges - {0, shape[dim]}))
    assert geometry_from_json(json.loads(json.dumps(geometry.to_json()))) == geometry
    assert pickle.loads(pickle.dumps(geometry)) == geometry
    assert list(geometry.used_slots()) == list(range(len(blocks)))


def test_blocks_of_flat_children():
    """Hybrid: a tensor-parallel grid of boxes, each cut flat over data-parallel ranks."""
    x = numbered((6, 8))
    blocks, buffers = [], []
    for row, column in itertools.product((0, 3), (0, 4)):
        part = x[row : row + 3, column : column + 4].ravel()
        blocks.append(
            Block(
                Region((row, column), (3, 4)),
                FlatEven((3, 4), 0, 5, first_slot=len(buffers), slots=3),
                (0, 0),
            )
        )
        buffers += [part[:5], part[5:10], part[10:]]
    geometry = Blocks((6, 8), tuple(blocks))
    assert geometry.faults() == []
    assert geometry.cuts() == ((3,), (4,))
    assert list(geometry.used_slots()) == list(range(12))
    for region in (Region.full((6, 8)), Region((2, 3), (2, 3)), Region((5, 7), (1, 1))):
        assert np.array_equal(gather(geometry.query(region), buffers, region), x[region.slices])


def test_copies_are_counted_one_after_the_other():
    shape = (4,)
    two = Copies((Strided(shape, 0), Strided(shape, 1)))
    three = Copies((two, Strided(shape, 2)))
    full = Region.full(shape)
    assert three.copies == 3
    assert [[p.slot for p in three.query(full, k)] for k in range(4)] == [[0], [1], [2], []]
    assert list(three.used_slots()) == [0, 1, 2]
    joined = Concat((10,), 0, (Part(4, two), Part(2, Strided((2,), 9)), Part(4, three)))
    assert joined.copies == 3
    assert [[p.slot for p in joined.query(Region.full((10,)), k)] for k in range(4)] == [
        [0, 9, 0], [1, 1], [2], [],
    ]  # fmt: skip
    assert [str(p.region) for p in joined.query(Region.full((10,)), 1)] == ["[0:4]", "[6:10]"]
    assert joined.count() == 3
    assert Stack((three, two)).copies == 3
    assert Stack((two, two)).copies == 2
    assert Blocks(shape, (Block(full, two, (0,)),)).copies == 2


def test_one_rule_for_a_tensor():
    shape = (2,)
    leaf = Strided(shape, 0)
    average = Copies((leaf, leaf), "average")
    assert Concat((4,), 0, (Part(2, average), Part(2, leaf))).rule == "average"
    assert Stack((Copies((leaf, leaf), "first"),)).rule == "first"
    assert Stack((leaf, leaf)).rule == "equal"
    assert Copies((average, leaf)).rule == "average"
    assert Copies((Copies((leaf, leaf), "first"), leaf)).rule == "first"
    assert Copies((Copies((leaf, leaf)), leaf), "average").rule == "average"
    mixed = Stack((average, Copies((leaf, leaf))))
    with pytest.raises(LayoutError, match="average, equal"):
        _ = mixed.rule
    with pytest.raises(LayoutError, match="'mean'"):
        Copies((leaf,), "mean")


@pytest.mark.parametrize(
    "geometry",
    [
        Strided((), 3, 7),
        FlatEven((), 5, 4, 2, 1, 3),
        FlatRanges((), (0, 0, 1), (0, 1), (5, 6)),
        Blocks((), (Block(Region((), ()), Strided((), 4), ()),)),
        Copies((Strided((), 0), Strided((), 1))),
        Strided((3, 0, 2), 0),
        FlatEven((0,), 0, 0, slots=4),
        FlatEven((4, 0), 8, 3, slots=4),
        FlatRanges((0, 2), (0, 0, 0), (0, 1), (0, 0)),
        FlatRanges((0, 2), (0,), (), ()),
        Concat((0, 3), 0, (Part(0, Strided((0, 3), 0)), Part(0, Strided((5, 3), 1), 2))),
        Concat((2, 0), 0, (Part(1, Strided((1, 0), 0)), Part(1, Strided((1, 0), 1)))),
        Blocks((0,), ()),
        Stack((Strided((0,), 0), Strided((0,), 1))),
    ],
)
def test_scalars_and_empty_tensors(geometry: Geometry):
    full = Region.full(geometry.shape)
    assert geometry.faults() == []
    assert len(list(geometry.query(full))) == full.volume
    assert geometry.count() == full.volume
    assert len(geometry.used_slots()) == full.volume * geometry.copies
    assert len(geometry.cuts()) == len(geometry.shape)
    assert geometry_from_json(geometry.to_json()) == geometry


def test_scalars_know_their_place():
    assert list(FlatEven((), 5, 4, 2, 1, 3).query(Region((), ()))) == [
        Piece(Region((), ()), 2, 3, ())
    ]
    assert list(FlatRanges((), (0, 0, 1), (0, 1), (5, 6)).query(Region((), ()))) == [
        Piece(Region((), ()), 1, 6, ())
    ]


@pytest.mark.parametrize(
    "region",
    [Region((0,), (4,)), Region((0, 0), (5, 6)), Region((-1, 0), (2, 2)), Region((3, 0), (2, -1))],
)
def test_regions_outside_are_refused(region: Region):
    with pytest.raises(LayoutError, match="not inside"):
        Strided((4, 6), 0).query(region)


class Watched(Geometry):
    """A stored tensor that counts how often it is asked."""

    def __init__(self, shape: tuple[int, ...], slot: int, asked: Counter[int]) -> None:
        self.shape = shape
        self.slot = slot
        self.asked = asked

    def _pieces(self, region: Region, copy: int) -> Iterator[Piece]:
        self.asked[self.slot] += 1
        return Strided(self.shape, self.slot)._pieces(region, copy)

    def _count(self, region: Region) -> int:
        return 1

    def faults(self) -> list[Fault]:
        return []

    def used_slots(self) -> Sequence[int]:
        return (self.slot,)

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError


class CountingTuple(tuple[Any, ...]):
    """A tuple that counts its look-ups."""

    __slots__ = ()
    reads = 0

    def __getitem__(self, index: Any) -> Any:
        CountingTuple.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["concat", "blocks"])
def test_queries_of_interleaved_layouts_look_only_where_they_must(kind: str):
    """GLU over 32 ranks with 28 sections each: 896 x 2 parts of 8 rows; a query meets two of them."""
    asked: Counter[int] = Counter()
    children = [Watched((56 * 8, 16), slot, asked) for slot in range(32)]
    places = [(section, rank) for section in range(56) for rank in range(32)]
    assert len(places) == 1792
    if kind == "concat":
        parts = CountingTuple(Part(8, children[rank], 8 * section) for section, rank in places)
        geometry: Geometry = Concat((1792 * 8, 16), 0, parts)
    else:
        geometry = Blocks(
            (1792 * 8, 16),
            CountingTuple(
                Block(Region((8 * i, 0), (8, 16)), children[rank], (8 * section, 0))
                for i, (section, rank) in enumerate(places)
            ),
        )
    CountingTuple.reads = 0
    pieces = list(geometry.query(Region((8 * 701 + 4, 2), (8, 3))))
    assert [(p.slot, p.region.offsets[0], p.region.sizes) for p in pieces] == [
        (701 % 32, 8 * 701 + 4, (4, 3)),
        (702 % 32, 8 * 702, (4, 3)),
    ]
    assert pieces[0].offset == ((701 // 32) * 8 + 4) * 16 + 2
    assert sum(asked.values()) == 2
    assert CountingTuple.reads <= 4
    assert geometry.count() == 1792
    assert geometry.faults() == []


def test_documents_share_children():
    children = [Strided((56 * 8, 16), slot) for slot in range(32)]
    parts = tuple(Part(8, children[i % 32], 8 * (i // 32)) for i in range(1792))
    document = Concat((1792 * 8, 16), 0, parts).to_json()
    assert len(document["children"]) == 32
    again = geometry_from_json(document)
    assert isinstance(again, Concat)
    assert again.parts[0].child is again.parts[32].child
    assert again == Concat((1792 * 8, 16), 0, parts)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"node": "nope"},
        {"node": "strided", "shape": [2]},
        {"node": "strided", "shape": [2.0], "slot": 0, "offset": 0},
        {"node": "strided", "shape": [2], "slot": True, "offset": 0},
        {"node": "concat", "shape": [2], "dim": 0, "children": [], "parts": [[1, 0, 0]]},
        {
            "node": "concat",
            "shape": [2],
            "dim": 0,
            "children": [Strided((2,), 0).to_json()],
            "parts": [[2, -1, 0]],
        },
        {"node": "concat", "shape": [2], "dim": 1, "children": [], "parts": []},
        {"node": "stack", "children": []},
        {"node": "copies", "children": [], "rule": "equal"},
        {"node": ["strided"]},
        [],
        None,
    ],
)
def test_documents_that_cannot_be_read(document: Any):
    with pytest.raises(LayoutError):
        geometry_from_json(document)


def test_deep_documents_are_refused():
    document: dict[str, Any] = Strided((1,), 0).to_json()
    for _ in range(60):
        document = {"node": "stack", "children": [document]}
    with pytest.raises(LayoutError, match="nested") as caught:
        geometry_from_json(document)
    assert caught.value.kind is Kind.MALFORMED
