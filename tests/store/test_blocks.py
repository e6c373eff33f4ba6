"""The block reader: the same elements as other readers see, and never an element of damaged bytes."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts
import zarr
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes_io import CountingFiles
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
from ucpstore.errors import IntegrityError, Kind, StorageError
from ucpstore.io import open_files
from ucpstore.io.local import LocalFiles
from ucpstore.layout.region import Region
from ucpstore.store import blocks, sharing
from ucpstore.store.arrays import ArraySpec
from ucpstore.store.blocks import BlockReader
from ucpstore.store.reading import ArrayReader

ABSENT = 2**64 - 1


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@contextlib.contextmanager
def tiny_blocks(nbytes: int) -> Iterator[None]:
    """Blocks of ``nbytes``, shared by threads from the second on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_BLOCK_BYTES", nbytes)
        patch.setattr(blocks, "_SHARE_BYTES", nbytes)
        patch.setattr(blocks, "_buffer", blocks._Buffer())
        patch.setattr(sharing, "MAX_THREADS", 3)
        yield


def read(files: Any, spec: ArraySpec, region: Region | None = None, out: Any = None) -> Any:
    region = region or Region.full(spec.shape)
    out = np.empty(region.sizes, spec.dtype) if out is None else out
    BlockReader(files).read(spec, region, out, what="cannot read 'w' (s)", fqn="w", state="s")
    return out


def memory(sizes: tuple[int, ...], dtype: str, kind: str) -> Any:
    """An array of the shape in memory of another order."""
    if kind == "F":
        return np.zeros(sizes, dtype, order="F")
    if kind == "step":
        return np.zeros([2 * n + 1 for n in sizes], dtype)[(*[slice(1, None, 2)] * len(sizes), ...)]
    if kind == "reverse":
        return np.zeros(sizes, dtype)[(*[slice(None, None, -1)] * len(sizes), ...)]
    if kind == "wide":
        return np.zeros((*sizes, 3), dtype)[..., 1]
    return np.zeros(sizes, dtype)


@given(
    grid=grids(),
    dtype=st.sampled_from([*DTYPES, "complex128"]),
    kind=st.sampled_from(["C", "F", "step", "reverse", "wide"]),
    nbytes=st.integers(1, 1024),
    data=st.data(),
)
def test_any_region_into_any_memory(
    grid: tuple[tuple[int, ...], ...], dtype: str, kind: str, nbytes: int, data: st.DataObject
) -> None:
    shape, tile, shard = grid
    spec = spec_of(shape, dtype, tile=tile, shard=shard)
    values = random_array(shape, dtype)
    offsets = tuple(data.draw(st.integers(0, n)) for n in shape)
    sizes = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
    region = Region(offsets, sizes)
    with folder() as root, tiny_blocks(nbytes):
        write(root, spec, values)
        files = LocalFiles(str(root))
        out = memory(sizes, spec.dtype, kind)
        base = out if out.base is None else out.base
        outside = base.copy()
        read(files, spec, region, out)
        assert bits(out) == bits(values[region.slices])
        out[...] = 0
        assert bits(base) == bits(outside)  # nothing beside the array was touched
        whole = read(files, spec)
        assert bits(whole) == bits(values)
        if math.prod(shape):
            assert bits(whole) == bits(read_tensorstore(root, spec)) == bits(read_zarr(root, spec))


@given(
    grid=grids(max_dims=3),
    dtype=st.sampled_from(["uint8", "float32", "float64"]),
    by=st.sampled_from(["zarr", "tensorstore"]),
)
def test_the_index_tells_where_chunks_are(
    grid: tuple[tuple[int, ...], ...], dtype: str, by: str
) -> None:
    """Other writers put chunks in another order (zarr-python: Morton)."""
    shape, tile, shard = grid
    spec = spec_of(shape, dtype, tile=tile, shard=shard)
    values = random_array(shape, dtype)
    with folder() as root:
        write(root, spec, np.zeros_like(values))
        if by == "zarr":
            with zarr.config.set({"array.write_empty_chunks": True}):
                zarr.open_array(str(root / spec.path), mode="r+", zarr_format=3)[...] = values
        else:
            kvstore = {"driver": "file", "path": f"{root / spec.path}/"}
            store = {"driver": "zarr3", "kvstore": kvstore, "store_data_equal_to_fill_value": True}
            ts.open(store).result().write(values).result()
        assert bits(read(LocalFiles(str(root)), spec)) == bits(values)


SHARDED = spec_of((7, 9), "float32", tile=(3, 4), shard=(6, 12))
SINGLE = spec_of((5, 3), "float64", tile=(5, 3), shard=(5, 3))


def expect(files: Any, spec: ArraySpec, kind: Kind, region: Region | None = None) -> str:
    with pytest.raises(IntegrityError) as caught:
        read(files, spec, region)
    error = caught.value
    key = spec.object_key(0)
    assert error.kind is kind, str(error)
    assert error.context["objects"] == [key]
    assert (error.context["fqn"], error.context["state"]) == ("w", "s")
    assert error.context["url"] == files.url
    assert str(error).startswith("cannot read 'w' (s) [")
    assert f"stored in {key}: " in str(error)
    return str(error)


@pytest.mark.parametrize("backend", ["file", "memory"])
@pytest.mark.parametrize("spec", [SHARDED, SINGLE], ids=["shard", "chunk"])
def test_every_byte_and_every_length_counts(tmp_path: Path, spec: ArraySpec, backend: str) -> None:
    write(tmp_path, spec, random_array(spec.shape, spec.dtype))
    files: Any = LocalFiles(str(tmp_path))
    key = spec.object_key(0)
    good = files.read(key)
    if backend == "memory":
        local, files = files, open_files("memory://test-blocks")
        for stat in local.list():
            files.write(stat.name, local.read(stat.name))

    def put(data: bytes) -> None:
        if backend == "file":
            (tmp_path / key).write_bytes(data)
        else:
            files.write(key, data)

    read(files, spec)
    for place in range(len(good)):
        put(good[:place] + bytes([good[place] ^ (1 << place % 8)]) + good[place + 1 :])
        expect(files, spec, Kind.CHECKSUM)
        put(good[:place])
        expect(files, spec, Kind.CHECKSUM)
    for other in (good + b"\0", b"\0" + good, bytes(len(good)), b"\xff" * len(good)):
        put(other)
        expect(files, spec, Kind.CHECKSUM)
    files.delete([key])
    assert "the object is lost" in expect(files, spec, Kind.LOST_OBJECT)
    put(good)
    read(files, spec)
    files.delete([stat.name for stat in files.list()])


def test_damage_elsewhere_does_not_matter(tmp_path: Path) -> None:
    values = random_array(SHARDED.shape, "float32")
    write(tmp_path, SHARDED, values)
    path = tmp_path / SHARDED.object_key(0)
    data = bytearray(path.read_bytes())
    data[0] ^= 1  # tile [0:3, 0:4]
    path.write_bytes(data)
    files = LocalFiles(str(tmp_path))
    for box in (Region((0, 4), (3, 5)), Region((3, 0), (4, 9))):
        assert bits(read(files, SHARDED, box)) == bits(values[box.slices])
    message = expect(files, SHARDED, Kind.CHECKSUM, Region((2, 3), (1, 6)))
    assert "[2:3, 3:4]" in message
    assert "crc32c of an inner chunk is" in message


def with_index(good: bytes, change: Callable[[Any], object]) -> bytes:
    """The shard with another index, under a right checksum."""
    size = math.prod(SHARDED.shard_grid) * 16
    entries = np.frombuffer(good[-size - 4 : -4], "<u8").reshape(*SHARDED.shard_grid, 2).copy()
    change(entries)
    index = entries.tobytes()
    return good[: -size - 4] + index + google_crc32c.value(index).to_bytes(4, "little")


LIES: dict[str, Callable[[Any], object]] = {
    "beyond the chunks": lambda e: e.__setitem__((1, 2, 0), 6 * 52),
    "last byte outside": lambda e: e.__setitem__((1, 2, 0), 5 * 52 + 1),
    "huge": lambda e: e.__setitem__((0, 0, 0), 2**63),
    "wraps around": lambda e: e.__setitem__((0, 0, 0), 2**64 - 52),
    "offset only absent": lambda e: e.__setitem__((0, 0, 0), ABSENT),
    "size only absent": lambda e: e.__setitem__((0, 0, 1), ABSENT),
    "same chunk twice": lambda e: e.__setitem__((0, 1), e[0, 0]),
    "overlap": lambda e: e.__setitem__((0, 0, 0), 1),
    "short": lambda e: e.__setitem__((0, 0, 1), 51),
    "long": lambda e: e.__setitem__((0, 0, 1), 53),
    "empty": lambda e: e.__setitem__((0, 0, 1), 0),
    "all zero": lambda e: e.fill(0),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    write(tmp_path, SHARDED, random_array(SHARDED.shape, "float32"))
    path = tmp_path / SHARDED.object_key(0)
    path.write_bytes(with_index(path.read_bytes(), LIES[lie]))
    expect(LocalFiles(str(tmp_path)), SHARDED, Kind.CHECKSUM)


def test_absent_chunks_are_lost(tmp_path: Path) -> None:
    write(tmp_path, SHARDED, random_array(SHARDED.shape, "float32"))
    path, files = tmp_path / SHARDED.object_key(0), LocalFiles(str(tmp_path))
    good = path.read_bytes()
    path.write_bytes(with_index(good, lambda e: e.__setitem__((1, 1), ABSENT)))
    assert "absent" in expect(files, SHARDED, Kind.LOST_OBJECT)
    empty = with_index(good, lambda e: e.fill(ABSENT))
    for data in (empty, empty[6 * 52 :]):
        path.write_bytes(data)
        expect(files, SHARDED, Kind.LOST_OBJECT)


def test_what_happens_after_the_index_was_read(tmp_path: Path) -> None:
    write(tmp_path, SHARDED, random_array(SHARDED.shape, "float32"))
    path = tmp_path / SHARDED.object_key(0)
    good = path.read_bytes()
    reader, out = BlockReader(LocalFiles(str(tmp_path))), np.empty(SHARDED.shape, np.float32)

    def again() -> None:
        reader.read(SHARDED, Region.full(SHARDED.shape), out, what="cannot read 'w'")

    again()
    for data in (good[:100], b"", bytes(len(good))):
        path.write_bytes(data)
        with pytest.raises(IntegrityError) as caught:
            again()
        assert caught.value.kind is Kind.CHECKSUM
    path.unlink()
    with pytest.raises(IntegrityError) as caught:
        again()
    assert caught.value.kind is Kind.LOST_OBJECT
    path.write_bytes(good)
    again()


def test_failing_storage_is_not_damage(tmp_path: Path) -> None:
    write(tmp_path, SHARDED, random_array(SHARDED.shape, "float32"))

    class Failing(LocalFiles):
        def read_into(self, name: str, offset: int, buffers: Any) -> None:
            raise StorageError("cannot read it: EIO.", retryable=True, errno_code=5)

    with pytest.raises(StorageError) as caught:
        read(Failing(str(tmp_path)), SHARDED)
    error = caught.value
    assert error.retryable
    assert (error.context["fqn"], error.context["errno_code"]) == ("w", 5)
    assert SHARDED.object_key(0) in str(error)
    assert "EIO" in str(error)


def test_indexes_are_read_once_and_runs_in_one_call(tmp_path: Path) -> None:
    spec = spec_of((64, 32), "float32", tile=(8, 8), shard=(64, 32))
    values = random_array(spec.shape, "float32")
    write(tmp_path, spec, values)
    files = CountingFiles(LocalFiles(str(tmp_path)))
    reader, out = BlockReader(files), np.empty((64, 32), np.float32)
    reader.read(spec, Region.full(spec.shape), out, what="cannot read")
    assert (files.calls["stat"], files.calls["read"], files.calls["read_into"]) == (1, 1, 1)
    assert files.bytes_read == spec.object_nbytes(0)
    files.reset()
    reader.read(spec, Region((8, 0), (16, 32)), out[:16], what="cannot read")
    assert (files.calls["stat"], files.calls["read"], files.calls["read_into"]) == (0, 0, 1)
    files.reset()
    reader.read(spec, Region((9, 9), (1, 1)), out[:1, :1], what="cannot read")
    assert files.bytes_read == 8 * 8 * 4 + 4
    assert out[0, 0] == values[9, 9]


def test_whole_rows_are_read_where_they_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks._buffer, "take", None)  # no copy
    for spec in (
        spec_of((100,), "int64", tile=(10,), shard=(50,)),
        spec_of((40, 6), "float32", tile=(5, 6), shard=(20, 6)),
        spec_of((), "float32"),
    ):
        values = random_array(spec.shape, spec.dtype)
        root = tmp_path / str(len(spec.shape))
        write(root, spec, values)
        assert bits(read(LocalFiles(str(root)), spec)) == bits(values)


def test_many_threads_read_large_arrays_at_once(tmp_path: Path) -> None:
    spec = spec_of((1030, 2100), "float32", tile=(128, 256), shard=(512, 2304))
    values = random_array(spec.shape, "float32")
    write(tmp_path, spec, values)
    reader = BlockReader(LocalFiles(str(tmp_path)))

    def one(number: int) -> bool:
        box = Region((number, 0), (1000, 2100))
        out = np.empty(box.sizes, np.float32)
        reader.read(spec, box, out, what="cannot read")
        return bits(out) == bits(values[box.slices])

    before = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(16)))
    assert threading.active_count() <= before + sharing.MAX_THREADS
    path = tmp_path / spec.object_key(2)
    path.write_bytes(path.read_bytes()[:-1])
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(one, number) for number in range(25, 30)]:
            assert isinstance(future.exception(), IntegrityError)


def test_buffers_stay_small(tmp_path: Path) -> None:
    spec = spec_of((2048, 2048), "float32")
    write(tmp_path, spec, random_array(spec.shape, "float32"))
    blocks._buffer.__init__()  # type: ignore[misc]
    read(LocalFiles(str(tmp_path)), spec)
    assert 0 < blocks._buffer._bytes.nbytes <= 2 << 20


def test_work_is_shared_once_each_and_nested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MAX_THREADS", 4)
    done: list[int] = []

    def outer(number: int) -> None:
        sharing.share_work(lambda i: done.append(100 * number + i), range(20), threads=4)

    sharing.share_work(outer, range(50), threads=4)
    assert sorted(done) == [100 * n + i for n in range(50) for i in range(20)]


@pytest.mark.parametrize("place", ["function", "items"])
def test_an_error_ends_the_work(place: str) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for i in range(10_000):
            if place == "items" and i == 10:
                raise KeyError("broken")
            yield i

    def work(i: int) -> None:
        taken.append(i)
        if place == "function" and i == 10:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        sharing.share_work(work, items(), threads=4)
    assert len(taken) < 100


def test_forked_children_read(tmp_path: Path) -> None:
    spec = spec_of((1024, 2048), "float32")
    write(tmp_path, spec, random_array(spec.shape, "float32"))
    script = f"""
import os, threading
import numpy as np
from tests.store.encoding import bits, random_array, spec_of
from ucpstore.io.local import LocalFiles
from ucpstore.layout.region import Region
from ucpstore.store.blocks import BlockReader
spec = spec_of((1024, 2048), "float32")
reader = BlockReader(LocalFiles({str(tmp_path)!r}))
def read():
    out = np.empty(spec.shape, np.float32)
    reader.read(spec, Region.full(spec.shape), out, what="cannot read")
    return bits(out) == bits(random_array(spec.shape, "float32"))
assert read()
busy = threading.Thread(target=lambda: [read() for _ in range(10)])
busy.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        os._exit(0 if read() else 1)
    assert os.waitpid(child, 0)[1] == 0
busy.join()
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "fine\n", done.stderr


def test_other_codecs_are_left_to_tensorstore(tmp_path: Path) -> None:
    spec = spec_of((30, 20), "float32", tile=(30, 20), shard=(30, 20))
    values = random_array(spec.shape, "float32")
    metadata = spec.metadata()
    metadata["codecs"] = [
        {"name": "bytes", "configuration": {"endian": "big"}},
        {"name": "gzip", "configuration": {"level": 1}},
    ]
    path = tmp_path / spec.path
    path.mkdir(parents=True)
    (path / "zarr.json").write_text(json.dumps(metadata))
    store = ts.open({"driver": "zarr3", "kvstore": f"file://{path}/"}).result()
    store.write(values).result()
    out = np.empty(spec.shape, np.float32)
    reader = ArrayReader(LocalFiles(str(tmp_path)), {spec.path: metadata})
    reader.read(spec, Region.full(spec.shape), out, what="cannot read")
    assert bits(out) == bits(values)
    plain = ArrayReader(LocalFiles(str(tmp_path)))
    with pytest.raises(IntegrityError):
        plain.read(spec, Region.full(spec.shape), out, what="cannot read")


def test_digest_of_an_object_is_that_of_the_encoder(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16", "int64"):
        spec = spec_of((70, 50), dtype, tile=(16, 8), shard=(32, 24))
        values = random_array(spec.shape, dtype)
        root = tmp_path / dtype
        partials = write(root, spec, values)
        reader = ArrayReader(LocalFiles(str(root)))
        assert [reader.digest_object(spec, i) for i in range(spec.num_objects)] == partials
        data, partial = encode(spec, values, 0)
        assert partial == partials[0]
        (root / spec.object_key(0)).write_bytes(data[:-1])
        with pytest.raises(IntegrityError):
            ArrayReader(LocalFiles(str(root))).digest_object(spec, 0)
