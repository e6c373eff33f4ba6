from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.store.encoding import grids
from ucpstore.layout.region import Region
from ucpstore.layout.tiles import (
    TILE_BYTES,
    iter_blocks,
    iter_tiles,
    num_tiles,
    tile_grid,
    tile_shape,
)

TYPICAL = [
    (50257, 1024),
    (32000, 4096),
    (151936, 896),
    (128256, 4096),
    (129280, 7168),
    (4096, 11008),
    (14336, 4096),
    (8192, 28672),
    (3072, 1024),
    (768, 768),
    (1024,),
    (151936,),
    (320, 320, 3, 3),
    (768, 3, 32, 32),
    (64, 2048, 1408),
    (64, 256, 128),
    (8192, 1, 4),
    (10007, 1009),
    (1024, 50257),
]

shapes = (
    st.lists(st.integers(1, 4000), max_size=5).map(tuple).filter(lambda s: math.prod(s) < 1 << 40)
)
sizes = st.sampled_from([1, 2, 4, 8, 16])


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shape", TYPICAL)
def test_padding_of_typical_tensors(shape: tuple[int, ...], itemsize: int) -> None:
    tile = tile_shape(shape, itemsize)
    padded = num_tiles(shape, tile) * math.prod(tile)
    assert padded <= 1.001 * math.prod(shape)
    if num_tiles(shape, tile) > 1:
        assert 128 * 1024 <= math.prod(tile) * itemsize <= 512 * 1024


@given(shapes, sizes)
@example((1009, 10007), 4)
@example((512, 1009, 32, 32), 4)
@example((1, 10_000_001), 4)
@example((3, 3, 32, 32, 32, 32), 4)
@example((1 << 36,), 1)
def test_tiles_are_bounded(shape: tuple[int, ...], itemsize: int) -> None:
    tile = tile_shape(shape, itemsize)
    assert len(tile) == len(shape)
    assert all(1 <= t <= n for t, n in zip(tile, shape, strict=True))
    nbytes = math.prod(tile) * itemsize
    if math.prod(shape) * itemsize <= TILE_BYTES:
        assert tile == shape
    else:
        assert nbytes <= 3 * TILE_BYTES
        assert num_tiles(shape, tile) * nbytes <= 1.2 * math.prod(shape) * itemsize


def test_small_and_empty_tensors_are_one_tile() -> None:
    assert tile_shape((), 8) == ()
    assert num_tiles((), ()) == 1
    assert tile_shape((256, 256), 4) == (256, 256)
    assert tile_shape((0, 5), 4) == (1, 5)
    assert num_tiles((0, 5), (1, 5)) == 0
    assert list(iter_blocks(Region.full((0, 5)), (1, 5), 4)) == []


def test_stack_axes_are_split_and_kernels_kept() -> None:
    assert tile_shape((64, 2048, 1408), 4)[0] == 1
    assert tile_shape((48, 8, 4096, 1024), 4)[:2] == (1, 1)
    assert tile_shape((1280, 1280, 3, 3), 4)[2:] == (3, 3)
    assert tile_shape((64, 256, 128), 4) == (2, 256, 128)


MATRICES = [
    (rows, columns)
    for rows in (4096, 5120, 8192, 11008, 14336, 28672, 32000, 128256, 151936)
    for columns in (2048, 2560, 4096, 5120, 7168, 8192, 11008, 28672)
]


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("shape", MATRICES)
def test_slices_of_large_matrices_read_their_bytes(shape: tuple[int, int], parts: int) -> None:
    tile = tile_shape(shape, 4)
    for size, extent in zip(shape, tile, strict=True):
        for part in range(parts):
            low, high = size * part // parts, size * (part + 1) // parts
            touched = (-(-high // extent) - low // extent) * extent
            assert touched <= 1.1 * (high - low)


@given(grids(), st.integers(1, 5000), st.data())
def test_blocks_follow_the_tiles(
    grid: tuple[tuple[int, ...], ...], block_bytes: int, data: st.DataObject
) -> None:
    shape, tile, _ = grid
    counts = tile_grid(shape, tile)
    first = [data.draw(st.integers(0, max(0, n - 1))) for n in counts]
    last = [data.draw(st.integers(f, n)) for f, n in zip(first, counts, strict=True)]
    offsets = tuple(min(f * t, n) for f, t, n in zip(first, tile, shape, strict=True))
    stops = tuple(min(s * t, n) for s, t, n in zip(last, tile, shape, strict=True))
    region = Region(offsets, tuple(s - o for s, o in zip(stops, offsets, strict=True)))
    expected = list(iter_tiles(shape, tile, region))
    blocks = list(iter_blocks(region, tile, 4, block_bytes=block_bytes))
    assert [t for block in blocks for t in iter_tiles(shape, tile, block)] == expected
    for block in blocks:
        assert region.contains(block)
        nbytes = 4 * block.volume
        assert nbytes <= max(2 * block_bytes, 4 * math.prod(tile))
    seen = np.zeros(shape, np.int8)
    for _, box in expected:
        seen[box.slices] += 1
    assert (seen[region.slices] == 1).all()
    assert seen.sum() == region.volume
    assert [index for index, _ in iter_tiles(shape, tile, Region.full(shape))] == list(
        range(num_tiles(shape, tile))
    )


def test_blocks_are_whole_rows_of_tiles() -> None:
    region = Region((512, 0), (512, 4096))
    blocks = list(iter_blocks(region, (128, 512), 4))
    assert [block.sizes for block in blocks] == [(128, 4096)] * 4
    assert [block.sizes for block in iter_blocks(region, (128, 512), 4, block_bytes=1 << 30)] == [
        (512, 4096)
    ]
