"""What the tests of tiles, digests, the grid and the encoder share: data, a sink, two readers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
import zarr
from hypothesis import strategies as st

from ucpstore.contracts import Role
from ucpstore.dtypes import numpy_dtype
from ucpstore.io.base import FileStat
from ucpstore.layout.region import Region
from ucpstore.layout.tiles import BLOCK_BYTES, tile_shape
from ucpstore.store.arrays import ArraySpec, storage_dtype
from ucpstore.store.encoder import encode_object
from ucpstore.store.grid import shard_shape

Array = np.ndarray[Any, Any]

DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float32",
    "float64",
    "complex64",
)


class MemorySink:
    """A sink that keeps what it gets and checks that reused buffers do not change it."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.calls = 0

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        self.calls += 1
        for buffer in buffers:
            self.data += buffer

    def close(self) -> FileStat:
        return FileStat("", len(self.data), "")

    def abort(self) -> None:
        self.data.clear()


def random_array(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Random bits of a dtype, so also NaNs with payloads, denormals and negative zeros."""
    element = numpy_dtype(dtype)
    raw = np.random.default_rng(seed).bytes(math.prod(shape) * element.itemsize)
    values = np.frombuffer(raw, np.uint8)
    return (values & 1 if dtype == "bool" else values).view(element).reshape(shape)


def bits(array: Array) -> bytes:
    """Bytes of the elements in C order."""
    return np.ascontiguousarray(array).tobytes()


def spec_of(
    shape: tuple[int, ...],
    dtype: str,
    *,
    role: Role = Role.BUFFER,
    cuts: tuple[tuple[int, ...], ...] | None = None,
    tile: tuple[int, ...] | None = None,
    shard: tuple[int, ...] | None = None,
) -> ArraySpec:
    """The array that a state becomes; tile and shard can be chosen."""
    stored = storage_dtype(dtype, role)
    size = np.dtype(stored).itemsize
    tile = tile or tile_shape(shape, size)
    shard = shard or shard_shape(shape, tile, size, cuts or ((),) * len(shape))
    return ArraySpec("params/w/s", shape, stored, dtype, tile, shard, (("w", "s"),), role)


def encode(
    spec: ArraySpec, values: Array, index: int, *, block_bytes: int = BLOCK_BYTES
) -> tuple[bytes, int]:
    """One object's bytes, and its partial digest."""

    def read(region: Region, out: Array) -> None:
        assert out.shape == region.sizes
        assert out.dtype == values.dtype
        assert out.flags.c_contiguous
        out[...] = values[region.slices]

    sink = MemorySink()
    partial = encode_object(spec, index, read, sink, block_bytes=block_bytes)
    return bytes(sink.data), partial


def write(
    root: Path, spec: ArraySpec, values: Array, *, block_bytes: int = BLOCK_BYTES
) -> list[int]:
    """Write a whole array under ``root``; returns the partial digests."""
    folder = root / spec.path
    folder.mkdir(parents=True)
    (folder / "zarr.json").write_text(json.dumps(spec.metadata()))
    partials = []
    for index in range(spec.num_objects):
        data, partial = encode(spec, values, index, block_bytes=block_bytes)
        (root / spec.object_key(index)).write_bytes(data)
        partials.append(partial)
    return partials


def read_tensorstore(root: Path, spec: ArraySpec) -> Array:
    """The whole array as TensorStore reads it; a missing object is an error."""
    kvstore = {"driver": "file", "path": f"{root / spec.path}/"}
    store = ts.open(
        {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
    ).result()
    return np.asarray(store.read().result())


def read_zarr(root: Path, spec: ArraySpec) -> Array:
    """The whole array as zarr-python reads it."""
    array = zarr.open_array(str(root / spec.path), mode="r", zarr_format=3)
    return np.asarray(array[...])


@st.composite
def grids(draw: st.DrawFn, *, max_dims: int = 4) -> tuple[tuple[int, ...], ...]:
    """Shape, tile and shard of a small array, edges of every kind included."""
    ndim = draw(st.integers(0, max_dims))
    most = (1, 60, 20, 9, 6)[ndim]
    shape = draw(st.tuples(*[st.integers(0 if ndim > 1 else 1, most)] * ndim))
    tile = draw(st.tuples(*[st.integers(1, 5)] * ndim))
    times = draw(st.tuples(*[st.integers(1, 3)] * ndim))
    return shape, tile, tuple(t * n for t, n in zip(tile, times, strict=True))
