from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.encoding import DTYPES, MemorySink, bits, encode, grids, random_array, spec_of
from ucpstore.contracts import Role
from ucpstore.digest import digest_array, merge
from ucpstore.errors import PlanError
from ucpstore.layout.region import Region
from ucpstore.layout.tiles import iter_tiles
from ucpstore.store.arrays import ArraySpec
from ucpstore.store.encoder import _scratch, encode_object, encoder_memory, widen


@given(grids(), st.sampled_from(DTYPES), st.integers(1, 4096), st.integers(1, 4096))
def test_bytes_do_not_depend_on_the_block(
    grid: tuple[tuple[int, ...], ...], dtype: str, small: int, large: int
) -> None:
    shape, tile, shard = grid
    spec = spec_of(shape, dtype, tile=tile, shard=shard)
    values = random_array(shape, dtype)
    for index in range(spec.num_objects):
        data, partial = encode(spec, values, index)
        assert len(data) == spec.object_nbytes(index)
        assert encode(spec, values, index, block_bytes=small) == (data, partial)
        assert encode(spec, values, index, block_bytes=large) == (data, partial)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "float64"])
@pytest.mark.parametrize(
    "shape",
    [(), (5,), (900_001,), (1024, 1024), (1009, 1013), (6, 300, 511), (130, 33, 3, 3), (0, 3)],
)
def test_partials_merge_to_the_digest_of_the_whole(shape: tuple[int, ...], dtype: str) -> None:
    values = random_array(shape, dtype)
    tile = spec_of(shape, dtype).tile
    for shard in (None, tuple(2 * t for t in tile), tile):
        spec = spec_of(shape, dtype, shard=shard)
        partials = [encode(spec, values, index)[1] for index in range(spec.num_objects)]
        assert merge(reversed(partials)) == digest_array(values).value


def test_widened_states_digest_as_float32() -> None:
    values = random_array((700, 300), "bfloat16")
    spec = spec_of((700, 300), "bfloat16", role=Role.FIRST_MOMENT)
    assert (spec.dtype, spec.logical_dtype, spec.source_dtype) == ("float32", "float32", "bfloat16")
    wide = (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert merge(encode(spec, values, i)[1] for i in range(spec.num_objects)) == (
        digest_array(wide).value
    )


def test_widen_is_exact_for_every_16_bit_pattern() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(1 << 16, np.float32)
    widen(patterns.view("float16"), out)
    numbers = ~np.isnan(out)
    assert np.array_equal(out[numbers].astype(np.float16).view(np.uint16), patterns[numbers])
    assert np.array_equal(~numbers, (patterns & 0x7FFF) > 0x7C00)

    brain = random_array((0,), "bfloat16").dtype
    widen(patterns.view(brain), out)
    assert np.array_equal(out.view(np.uint32), patterns.astype(np.uint32) << 16)


def test_other_casts_are_refused() -> None:
    spec = ArraySpec("p", (3,), "float32", "float64", (3,), (3,), (("w", "s"),))
    with pytest.raises(PlanError, match="float64, and the array is float32"):
        encode(spec, np.zeros(3), 0)


def test_padding_is_the_fill_value() -> None:
    spec = spec_of((3,), "float32", tile=(2,), shard=(4,))
    data, _ = encode(spec, np.zeros(3, np.float32), 0)
    second = np.frombuffer(data[12:20], np.float32)
    assert second[0] == 0
    assert np.isnan(second[1])


def test_index_lists_chunks_in_order_and_marks_those_outside() -> None:
    spec = spec_of((3, 5), "uint8", tile=(2, 2), shard=(4, 8))
    data, _ = encode(spec, random_array((3, 5), "uint8"), 0)
    chunk = 4 + 4
    index = np.frombuffer(data[6 * chunk : -4], np.uint64).reshape(2, 4, 2)
    assert index[:, :3, 0].ravel().tolist() == [0, 8, 16, 24, 32, 40]
    assert (index[:, :3, 1] == chunk).all()
    assert (index[:, 3] == 2**64 - 1).all()


def test_reads_cover_the_object_once_in_bounded_blocks() -> None:
    spec = spec_of((2048, 1024), "float32", tile=(256, 256), shard=(1024, 1024))
    seen = np.zeros(spec.shape, np.uint8)
    sizes: list[int] = []

    def read(region: Region, out: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
        seen[region.slices] += 1
        sizes.append(out.nbytes)
        out[...] = 0

    encode_object(spec, 1, read, MemorySink(), block_bytes=1 << 20)
    assert (seen[1024:] == 1).all()
    assert not seen[:1024].any()
    assert max(sizes) <= 1 << 20


def test_few_calls_to_the_sink() -> None:
    spec = spec_of((4096, 1024), "float32", shard=(4096, 1024))
    sink = MemorySink()
    encode_object(spec, 0, lambda region, out: out.fill(0), sink)
    assert sink.calls <= spec.nbytes / (1 << 20) + 1


def test_memory_is_bounded_and_stated() -> None:
    shape = (4096, 4096)
    for role, dtype in [(Role.BUFFER, "float32"), (Role.OTHER, "bfloat16"), (Role.BUFFER, "bool")]:
        spec = spec_of(shape, dtype, role=role)
        _scratch._buffers.clear()
        encode_object(spec, 0, lambda region, out: out.fill(0), MemorySink())
        used = sum(buffer.nbytes for buffer in _scratch._buffers.values())
        assert used <= encoder_memory(spec) <= 8 << 20


def test_an_error_while_reading_leaves_the_next_object_intact() -> None:
    spec = spec_of((600, 300), "float32", tile=(100, 100), shard=(300, 300))
    values = random_array(spec.shape, "float32")
    expected = encode(spec, values, 1)

    def fail(region: Region, out: object) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        encode_object(spec, 0, fail, MemorySink())
    assert encode(spec, values, 1) == expected


@given(grids(max_dims=3))
def test_objects_tile_the_array(grid: tuple[tuple[int, ...], ...]) -> None:
    shape, tile, shard = grid
    spec = spec_of(shape, "uint8", tile=tile, shard=shard)
    seen = np.zeros(shape, np.uint8)
    keys = set()
    tiles = set()
    for index in range(spec.num_objects):
        seen[spec.object_region(index).slices] += 1
        keys.add(spec.object_key(index))
        inside = [i for i, _ in iter_tiles(shape, tile, spec.object_region(index))]
        assert len(inside) == math.prod(spec.object_tiles(index))
        tiles.update(inside)
    assert (seen == 1).all()
    assert len(keys) == spec.num_objects
    assert tiles == set(range(len(tiles)))
    assert bits(seen).count(1) == math.prod(shape)
    for index in (-1, spec.num_objects):
        with pytest.raises(IndexError):
            spec.object_region(index)
