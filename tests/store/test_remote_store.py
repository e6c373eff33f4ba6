"""The same store in an S3 bucket: equal bytes, and no more requests than it takes."""

from __future__ import annotations

import pickle
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import zarr

from tests.fakes import CrashingFiles, Killed
from tests.servers import S3Server, s3_server, seaweedfs_server  # noqa: F401
from tests.store.stores import contents, convert, make_target, small_source
from ucpstore.errors import AlreadyExistsError, IntegrityError, Kind, UncommittedError
from ucpstore.io import Files, open_files
from ucpstore.io.local import LocalFiles
from ucpstore.layout.region import Region
from ucpstore.store.source import StoreSource


@pytest.fixture(params=["s3_server", "seaweedfs_server"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def bucket(server: S3Server) -> Files:
    return open_files(f"{server.new_bucket()}/run/step-1", server.options)


def test_same_bytes_as_locally_and_one_put_per_object(
    bucket: Files,
    server: S3Server,
    memory_path: Path,
) -> None:
    source, local = small_source(), LocalFiles(str(memory_path))
    convert(make_target(local), source)
    server.forget_requests()
    target = make_target(bucket)
    convert(target, source)
    puts = [unquote(request.path) for request in server.requests("PUT")]
    puts = [path for path in puts if "/.ucpstore/probe/" not in path]
    gets = [unquote(request.path) for request in server.requests("GET")]
    for task in target.tasks():
        assert sum(path.endswith(f"/{task.key}") for path in puts) == 1
        assert not any(path.endswith(f"/{task.key}") for path in gets)
    assert len(puts) == len(bucket.list())
    assert contents(bucket) == contents(local)
    server.forget_requests()
    assert convert(make_target(bucket), source) == set()
    assert server.requests("PUT") == []


def test_reading_costs_one_get_per_open_and_per_whole_object(
    bucket: Files,
    server: S3Server,
) -> None:
    origin = small_source()
    convert(make_target(bucket), origin)
    server.forget_requests()
    source = StoreSource(bucket)
    assert [r.method for r in server.requests()] == ["GET"]
    expected = origin._arrays["z.weight", "fp32"]
    out = np.empty_like(expected)
    server.forget_requests()
    source.read("z.weight", "fp32", Region.full(expected.shape), out)
    assert np.array_equal(out, expected)
    objects = source.count_reads("z.weight", "fp32")
    assert len(server.requests()) <= objects + 4  # ragged objects take their index first
    server.forget_requests()
    again = pickle.loads(pickle.dumps(source))
    assert server.requests() == []
    box = Region((2, 0), (1, 6))
    again.read("z.weight", "fp32", box, out[2:3, :6])
    assert 1 <= len(server.requests()) <= 3
    group = zarr.open_group(
        bucket.url, mode="r", zarr_format=3, storage_options=dict(bucket.options)
    )
    assert np.array_equal(group["params/z.weight/fp32"][...], expected)
    assert np.array_equal(source.tensorstore("z.weight", "fp32").read().result(), expected)


def test_crashes_lost_objects_and_abandoned_claims(bucket: Files) -> None:
    source = small_source()
    with pytest.raises(Killed):
        convert(make_target(CrashingFiles(bucket, 30)), source)
    with pytest.raises(UncommittedError):
        StoreSource(bucket)
    with pytest.raises(AlreadyExistsError):
        convert(make_target(bucket), source, digest="other")
    written = convert(make_target(bucket), source)
    assert 0 < len(written) < len(make_target(bucket).tasks())
    key = "params/z.weight/fp32/c.1.2"
    data = bucket.read(key)
    store = StoreSource(bucket)
    out = np.empty((13, 22), np.float32)
    bucket.write(key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(IntegrityError) as caught:
        store.read("z.weight", "fp32", Region.full((13, 22)), out)
    assert (caught.value.kind, caught.value.context["objects"]) == (Kind.CHECKSUM, [key])
    bucket.delete([key])
    with pytest.raises(IntegrityError) as caught:
        store.read("z.weight", "fp32", Region.full((13, 22)), out)
    assert (caught.value.kind, caught.value.context["objects"]) == (Kind.LOST_OBJECT, [key])
