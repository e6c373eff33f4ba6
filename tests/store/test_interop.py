"""Every object that the encoder writes is read bit-exactly by zarr-python and by TensorStore."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.encoding import (
    DTYPES,
    bits,
    encode,
    grids,
    random_array,
    read_tensorstore,
    read_zarr,
    spec_of,
    write,
)
from ucpstore.contracts import Role
from ucpstore.digest import digest_array, merge
from ucpstore.dtypes import numpy_dtype
from ucpstore.errors import FormatVersionError
from ucpstore.store.arrays import ArraySpec, storage_dtype
from ucpstore.store.names import encode_name


@settings(max_examples=60, deadline=None)
@given(grids(), st.sampled_from(DTYPES), st.integers(0, 2**32), st.integers(1, 2000))
def test_both_readers_see_the_bits(
    grid: tuple[tuple[int, ...], ...], dtype: str, seed: int, block_bytes: int
) -> None:
    shape, tile, shard = grid
    spec = spec_of(shape, dtype, tile=tile, shard=shard)
    values = random_array(shape, dtype, seed)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), spec, values, block_bytes=block_bytes)
        for found in (read_tensorstore(Path(folder), spec), read_zarr(Path(folder), spec)):
            assert found.shape == shape
            assert found.dtype == np.dtype(spec.dtype)
            assert bits(found) == bits(values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("grid", [((), (), ()), ((37,), (5,), (10,)), ((9, 11), (2, 3), (4, 6))])
def test_widened_states(tmp_path: Path, grid: tuple[tuple[int, ...], ...], dtype: str) -> None:
    shape, tile, shard = grid
    spec = spec_of(shape, dtype, role=Role.SECOND_MOMENT, tile=tile, shard=shard)
    values = random_array(shape, dtype, 7)
    write(tmp_path, spec, values)
    with np.errstate(invalid="ignore"):  # signaling NaNs
        expected = values.astype(np.float64).astype(np.float32)
    for found in (read_tensorstore(tmp_path, spec), read_zarr(tmp_path, spec)):
        assert found.dtype == np.float32
        assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "cuts"),
    [
        ((), "int64", ()),
        ((1024,), "float32", ((),)),
        ((100_003,), "float64", ((),)),
        ((512, 1024), "float32", ((), ())),
        ((1009, 1013), "float32", ((), ())),
        ((320, 64, 3, 3), "float32", ((), (), (), ())),
        ((6, 256, 512), "bfloat16", ((2, 4), (), ())),
        ((8192, 2048), "float32", ((4096,), ())),
        ((2048, 8192), "float32", ((), (4096,))),
    ],
)
def test_grid_of_the_rules(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, cuts: tuple[tuple[int, ...], ...]
) -> None:
    spec = spec_of(shape, dtype, cuts=cuts)
    values = random_array(shape, dtype)
    partials = write(tmp_path, spec, values)
    assert merge(partials) == digest_array(values).value
    assert bits(read_tensorstore(tmp_path, spec)) == bits(values)
    assert bits(read_zarr(tmp_path, spec)) == bits(values)
    if max(map(len, cuts), default=0) and spec.nbytes >= 64 << 20:
        assert spec.num_objects == 2


@pytest.mark.parametrize("shape", [(0,), (0, 7), (5, 0, 3)])
def test_empty_arrays_have_no_objects(tmp_path: Path, shape: tuple[int, ...]) -> None:
    spec = spec_of(shape, "float32")
    assert write(tmp_path, spec, random_array(shape, "float32")) == []
    assert read_tensorstore(tmp_path, spec).shape == read_zarr(tmp_path, spec).shape == shape


def test_zeros_are_stored_and_a_lost_object_is_an_error(tmp_path: Path) -> None:
    spec = spec_of((40, 40), "int64", tile=(10, 10), shard=(20, 20))
    write(tmp_path, spec, np.zeros((40, 40), np.int64))
    assert all((tmp_path / spec.object_key(i)).stat().st_size for i in range(4))
    (tmp_path / spec.object_key(2)).unlink()
    with pytest.raises(ValueError, match=r"NOT_FOUND|missing"):
        read_tensorstore(tmp_path, spec)


def test_lost_floats_are_nan_in_zarr(tmp_path: Path) -> None:
    spec = spec_of((4, 4), "float32", tile=(2, 2), shard=(2, 4))
    write(tmp_path, spec, np.ones((4, 4), np.float32))
    (tmp_path / spec.object_key(0)).unlink()
    assert np.isnan(read_zarr(tmp_path, spec)[:2]).all()


@pytest.mark.parametrize("shard", [(2, 3), (4, 6)])
def test_any_changed_byte_is_noticed(tmp_path: Path, shard: tuple[int, ...]) -> None:
    spec = spec_of((3, 5), "float32", tile=(2, 3), shard=shard)
    values = random_array((3, 5), "float32")
    write(tmp_path, spec, values)
    for index in range(spec.num_objects):
        file = tmp_path / spec.object_key(index)
        good = file.read_bytes()
        for place in range(len(good)):
            file.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
            with pytest.raises(ValueError, match=r"crc|CRC|checksum|DATA_LOSS"):
                read_tensorstore(tmp_path, spec)
        for length in range(len(good)):
            file.write_bytes(good[:length])
            with pytest.raises(ValueError, match=r"DATA_LOSS|FAILED_PRECONDITION|OUT_OF_RANGE"):
                read_tensorstore(tmp_path, spec)
        file.write_bytes(good)
    assert bits(read_tensorstore(tmp_path, spec)) == bits(values)


def test_zarr_notices_a_changed_element(tmp_path: Path) -> None:
    spec = spec_of((3, 5), "float32", tile=(2, 3), shard=(4, 6))
    write(tmp_path, spec, random_array((3, 5), "float32"))
    file = tmp_path / spec.object_key(0)
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        read_zarr(tmp_path, spec)


def test_group_with_odd_names_opens_in_zarr(tmp_path: Path) -> None:
    names = ["a/b", "layers.0.w", "späß", "50%", "a b*?", "..x", "\\\0", "model.C"]
    for number, name in enumerate(names):
        spec = spec_of((3,), "bfloat16" if number % 2 else "float32")
        folder = tmp_path / "params" / encode_name(name)
        folder.mkdir(parents=True)
        group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
        (folder / "zarr.json").write_text(json.dumps(group))
        data, _ = encode(spec, random_array((3,), spec.source_dtype, number), 0)
        (folder / "s").mkdir()
        (folder / "s" / "zarr.json").write_text(json.dumps(spec.metadata()))
        (folder / "s" / "c.0").write_bytes(data)
    for folder in (tmp_path, tmp_path / "params"):
        (folder / "zarr.json").write_text(json.dumps(group))
    root = zarr.open_group(str(tmp_path), mode="r", zarr_format=3)
    for number, name in enumerate(names):
        dtype = "bfloat16" if number % 2 else "float32"
        array = root[f"params/{encode_name(name)}/s"]
        assert isinstance(array, zarr.Array)
        assert bits(np.asarray(array[...])) == bits(random_array((3,), dtype, number))


@given(grids(), st.sampled_from(DTYPES), st.sampled_from(list(Role)))
def test_metadata_round_trip(grid: tuple[tuple[int, ...], ...], dtype: str, role: Role) -> None:
    shape, tile, shard = grid
    stored = storage_dtype(dtype, role)
    spec = ArraySpec("params/w/s", shape, stored, dtype, tile, shard, (("w", "s"),), role)
    text = json.dumps(spec.metadata({"digest": "x"}))
    found = ArraySpec.from_metadata("params/w/s", json.loads(text))
    assert json.dumps(found.metadata()) == text
    assert found.metadata()["attributes"]["ucpstore"].pop("digest") == "x"
    assert (found.shape, found.tile, found.shard, found.dtype) == (shape, tile, shard, stored)
    assert (found.members, found.role, found.source_dtype) == (spec.members, role, dtype)
    assert numpy_dtype(found.logical_dtype).itemsize == numpy_dtype(stored).itemsize


def test_stacked_members_are_in_the_metadata() -> None:
    stack = {"prefix": "experts.", "first": 3, "count": 2, "suffix": ".w"}
    members = (("experts.3.w", "s"), ("experts.4.w", "s"))
    spec = ArraySpec(
        "p", (2, 5), "float32", "float32", (2, 5), (2, 5), members, attributes={"stack": stack}
    )
    found = ArraySpec.from_metadata("p", spec.metadata())
    assert found == spec
    assert found.stacked


@pytest.mark.parametrize(
    "change",
    [
        {"attributes": {}},
        {"attributes": {"ucpstore": {}}},
        {"codecs": []},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 1]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [5]}}},
        {"shape": [3]},
        {"shape": None},
        {"shape": [-1, 3]},
    ],
)
def test_foreign_metadata_is_refused(change: dict[str, object]) -> None:
    spec = spec_of((3, 5), "float32", tile=(2, 3), shard=(4, 6))
    with pytest.raises(FormatVersionError, match="'elsewhere'"):
        ArraySpec.from_metadata("elsewhere", {**spec.metadata(), **change})
