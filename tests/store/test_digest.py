from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.store.encoding import DTYPES, Array, random_array
from ucpstore.digest import TileDigest, digest_array, digest_reads, hash_tile, merge
from ucpstore.errors import FormatVersionError
from ucpstore.layout.region import Region
from ucpstore.layout.tiles import tile_shape

SHAPES = [(), (1,), (0, 3), (7, 11), (300, 400), (1024, 1024), (1009, 1013), (5, 300, 511)]


def test_definition_is_pinned() -> None:
    """Digests are compared with those of older checkpoints: these values never change."""
    small = np.arange(6, dtype="<i4").reshape(2, 3)
    assert digest_array(small).value == xxhash.xxh3_128_intdigest(small.tobytes(), seed=0)
    assert str(digest_array(small)) == (
        "xxh3-128-tiles:int32:[2,3]:80d4f075dd52f924953f55f86e7d5e23"
    )
    large = np.arange(1009 * 1013, dtype="<f4").reshape(1009, 1013)
    assert str(digest_array(large)) == (
        "xxh3-128-tiles:float32:[1009,1013]:023458079aebbbd45f808d4628f12dd8"
    )


def test_sum_over_clipped_tiles() -> None:
    values = np.arange(512 * 1024, dtype=np.float32).reshape(512, 1024)
    assert tile_shape(values.shape, 4) == (128, 256)
    tiles = [
        values[i : i + 128, j : j + 256] for i in range(0, 512, 128) for j in range(0, 1024, 256)
    ]
    sums = sum(xxhash.xxh3_128_intdigest(t.tobytes(), seed=n) for n, t in enumerate(tiles))
    assert digest_array(values).value == sums % 2**128


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_streamed_is_the_definition(shape: tuple[int, ...], dtype: str) -> None:
    values = random_array(shape, dtype)
    largest = 0

    def read(region: Region, out: Array) -> None:
        nonlocal largest
        largest = max(largest, out.nbytes)
        out[...] = values[region.slices]

    expected = digest_array(values)
    assert expected.dtype == dtype
    assert digest_reads(shape, dtype, read) == expected
    assert digest_reads(shape, dtype, read, block_bytes=1) == expected
    assert largest <= 4 << 20


def test_memory_layout_and_byte_order_do_not_matter() -> None:
    values = random_array((300, 400), "float32")
    expected = digest_array(values)
    assert digest_array(np.asfortranarray(values)) == expected
    assert digest_array(values.astype(">f4")) == expected


@pytest.mark.parametrize("place", [0, 1, 511 * 1024 + 1023, 300_000])
def test_a_changed_bit_changes_it(place: int) -> None:
    values = random_array((512, 1024), "float32").copy()
    before = digest_array(values)
    values.view(np.uint32).reshape(-1)[place] ^= 1 << 31
    assert digest_array(values) != before


def test_swapped_tiles_change_it() -> None:
    values = random_array((512, 1024), "float32")
    swapped = np.concatenate([values[256:], values[:256]])
    assert digest_array(swapped) != digest_array(values)


def test_dtype_and_shape_count() -> None:
    values = random_array((6, 4), "uint16")
    brain = values.view(random_array((0,), "bfloat16").dtype)
    texts = {str(digest_array(v)) for v in (values, brain, values.reshape(4, 6))}
    assert len(texts) == 3


@given(st.lists(st.integers(0, 2**128 - 1)), st.randoms())
def test_merging_has_no_order(partials: list[int], random: object) -> None:
    middle = len(partials) // 2
    halves = (merge(partials[middle:]), merge(partials[:middle]))
    assert merge(halves) == merge(reversed(partials)) == sum(partials) % 2**128


def test_seed_of_a_large_index_wraps() -> None:
    assert hash_tile(2**64 + 3, b"x") == hash_tile(3, b"x")


@given(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 2**40)).map(tuple), st.integers(0, 2**128 - 1)
)
def test_text_round_trip(dtype: str, shape: tuple[int, ...], value: int) -> None:
    digest = TileDigest(dtype, shape, value)
    assert TileDigest.parse(str(digest)) == digest


@pytest.mark.parametrize(
    "text", ["", "md5:float32:[1]:00", "xxh3-128-tiles:float32:[1,]:" + "0" * 32, "0" * 32]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(FormatVersionError, match="expected 'xxh3-128-tiles"):
        TileDigest.parse(text)
