"""The layout that must not blow up: ZeRO-3 over 2,000 ranks and 47,000 expert matrices."""

from __future__ import annotations

import math
import tracemalloc

from ucpstore.layout.geometry import FlatEven, Stack, geometry_from_json
from ucpstore.layout.region import Region

RANKS = 2000
MATRICES = 47_000


def expert(index: int, base: int) -> FlatEven:
    shape = (2048, 1408) if index % 3 else (1408, 2048 + index % 7)
    return FlatEven(shape, 0, -(-math.prod(shape) // RANKS), base, slots=RANKS)


def test_47000_matrices_over_2000_ranks():
    tracemalloc.start()
    try:
        geometries = []
        base = 0
        for index in range(MATRICES):
            geometries.append(expert(index, base))
            base += geometries[-1].width
        assert not any(geometry.faults() for geometry in geometries)
        ranges = sum(geometry.count() for geometry in geometries)
        assert MATRICES * (RANKS - 2) < ranges <= MATRICES * RANKS
        assert all(len(geometry.used_slots()) in (RANKS, RANKS - 1) for geometry in geometries)
        for index in range(0, MATRICES, 97):
            geometry = geometries[index]
            region = Region((700, 300), (1, 500))
            pieces = list(geometry.query(region))
            assert 1 <= len(pieces) <= 2
            assert sum(piece.region.volume for piece in pieces) == region.volume
            flat = 700 * geometry.shape[1] + 300
            assert pieces[0].slot == flat // geometry.width
            assert pieces[0].offset == geometry.base + flat % geometry.width
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 100e6
    finally:
        tracemalloc.stop()


def test_the_same_as_one_stack():
    same = expert(1, 0)
    stack = Stack(tuple(FlatEven(same.shape, 0, same.width, i, slots=RANKS) for i in range(5000)))
    assert stack.faults() == []
    assert stack.shape == (5000, 2048, 1408)
    assert stack.count() == 5000 * same.count()
    assert stack.used_slots() == range(RANKS)
    assert len(stack.cuts()[0]) == 4999
    (piece,) = stack.query(Region((4321, 0, 0), (1, 1, 1408)))
    assert (piece.slot, piece.offset) == (0, 4321)


def test_a_layout_of_2000_ranks_is_a_line_of_json():
    geometry = expert(1, 12345)
    document = geometry.to_json()
    assert len(str(document)) < 200
    assert geometry_from_json(document) == geometry


def test_a_column_of_a_matrix_with_a_rank_for_every_row():
    geometry = FlatEven((2048, 1408), 0, 1442, slots=RANKS)
    pieces = list(geometry.query(Region((0, 0), (2048, 10))))
    assert sum(piece.region.volume for piece in pieces) == 20480
    assert len(pieces) <= 2 * 2048


def test_ranks_that_a_region_misses_cost_nothing():
    """Rows much longer than a rank's part: only the ranks under the column are looked up."""
    looked: list[int] = []

    class Watched(FlatEven):
        def _locate(self, flat: int) -> tuple[int, int, int]:
            looked.append(flat)
            return super()._locate(flat)

    geometry = Watched((10, 1_000_000), 0, 5000, slots=RANKS)
    pieces = list(geometry.query(Region((0, 0), (10, 5))))
    assert [piece.slot for piece in pieces] == [200 * row for row in range(10)]
    assert len(looked) <= 20
