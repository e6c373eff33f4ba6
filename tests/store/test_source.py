"""`StoreSource`: what was committed comes back bit by bit, and damage is an error, never data."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import ArraySource
from tests.store.stores import convert, make_target, small_arrays, small_source
from ucpstore.checkpoint import Checkpoint
from ucpstore.contracts import CommonState
from ucpstore.digest import digest_array
from ucpstore.errors import (
    FormatVersionError,
    IntegrityError,
    Kind,
    LayoutError,
    ParameterNotFoundError,
    StorageError,
    UcpStoreError,
    UncommittedError,
    UnrecognizedSourceError,
)
from ucpstore.io import open_files
from ucpstore.io.local import LocalFiles
from ucpstore.layout.region import Region
from ucpstore.store.arrays import ArraySpec
from ucpstore.store.hierarchy import checksum
from ucpstore.store.remote import split_region
from ucpstore.store.source import StoreFormat, StoreSource
from ucpstore.store.target import ZarrTarget
from ucpstore.store.tensorstore_ import translate

ORIGINAL = small_source()


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> LocalFiles:
    files = LocalFiles(str(tmp_path_factory.mktemp("store") / "dest"))
    convert(make_target(files), small_source())
    return files


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, committed: LocalFiles) -> Iterator[StoreSource]:
    if request.param == "file":
        yield StoreSource(committed)
        return
    files = open_files("memory://test-source")
    for stat in committed.list():
        files.write(stat.name, committed.read(stat.name))
    yield StoreSource(files)
    files.delete([stat.name for stat in files.list()])


@pytest.fixture
def damaged(committed: LocalFiles, tmp_path: Path) -> LocalFiles:
    shutil.copytree(committed.url, tmp_path / "dest")
    return LocalFiles(str(tmp_path / "dest"))


def states(source: ArraySource) -> list[tuple[str, str]]:
    return list(source._arrays)


def expected_array(source: ArraySource, fqn: str, state: str) -> Any:
    """16-bit optimizer states come back as float32, everything else as it was."""
    array = source._arrays[fqn, state]
    return array.astype(np.float32) if fqn == "half" else array


def read(source: StoreSource, fqn: str, state: str, region: Region | None = None) -> Any:
    tensors = source.common.tensors if fqn == CommonState.FQN else source.parameters[fqn].states
    spec = tensors[state]
    region = region or Region.full(spec.shape)
    dtype = getattr(ml_dtypes, spec.dtype, None) or np.dtype(spec.dtype)
    out = np.empty(region.sizes, dtype)
    source.read(fqn, state, region, out)
    return out


def test_everything_comes_back(store: StoreSource) -> None:
    for fqn, state in states(ORIGINAL):
        expected = expected_array(ORIGINAL, fqn, state)
        found = read(store, fqn, state)
        assert found.dtype == expected.dtype
        assert found.tobytes() == np.ascontiguousarray(expected).tobytes(), (fqn, state)


def test_description_comes_back_in_order(store: StoreSource) -> None:
    assert list(store.parameters) == list(ORIGINAL.parameters)
    for fqn, expected in ORIGINAL.parameters.items():
        found = store.parameters[fqn]
        assert list(found.states) == list(expected.states)
        if fqn != "half":
            assert found == expected
    assert store.parameters["half"].states["adam_m"].dtype == "float32"
    assert store.common == ORIGINAL.common
    assert store.parallelism == {"tp": 2, "dp": 3}
    assert store.attributes.step == 7
    assert store.format == "ucpstore"


def test_pickles_and_reads_from_threads_and_views(store: StoreSource) -> None:
    again = pickle.loads(pickle.dumps(store))
    expected = ORIGINAL._arrays["z.weight", "fp32"]
    assert read(again, "z.weight", "fp32").tobytes() == expected.tobytes()
    view = Checkpoint(store)["tied"]["fp32"]
    assert np.array_equal(view[3:9, ::4], expected[3:9, ::4])
    assert "13" in repr(store)


@pytest.mark.parametrize(
    ("fqn", "state"), [("z.weight", "fp32"), ("b/c d", "weight"), ("experts.2.w", "fp32")]
)
@given(data=st.data())
def test_any_region_into_any_strides(
    committed: LocalFiles, fqn: str, state: str, data: st.DataObject
) -> None:
    source = StoreSource(committed)
    expected = ORIGINAL._arrays[fqn, state]
    offsets = tuple(data.draw(st.integers(0, n)) for n in expected.shape)
    sizes = tuple(
        data.draw(st.integers(0, n - o)) for n, o in zip(expected.shape, offsets, strict=True)
    )
    region = Region(offsets, sizes)
    kind = data.draw(st.sampled_from(["C", "F", "step", "reverse", "swapped"]))
    out: Any = np.zeros(sizes, expected.dtype)
    if kind == "F":
        out = np.zeros(sizes, expected.dtype, order="F")
    elif kind == "step":
        out = np.zeros([2 * n + 1 for n in sizes], expected.dtype)[1::2, 1::2]
    elif kind == "reverse":
        out = out[::-1, ::-1]
    elif kind == "swapped" and expected.dtype == np.float32:
        out = out.astype(">f4")
    source.read(fqn, state, region, out)
    assert np.array_equal(np.array(out), expected[region.slices])


def test_unaligned_memory_is_filled(committed: LocalFiles) -> None:
    raw = bytearray(13 * 22 * 4 + 1)
    out = np.frombuffer(raw, np.float32, offset=1).reshape(13, 22)
    assert not out.flags.aligned
    StoreSource(committed).read("z.weight", "fp32", Region.full((13, 22)), out)
    assert raw[1:] == ORIGINAL._arrays["z.weight", "fp32"].tobytes()


def test_misuse_is_refused(store: StoreSource) -> None:
    out = np.zeros((13, 22), np.float32)
    with pytest.raises(ParameterNotFoundError, match=r"z\.weight"):
        store.read("z.weigh", "fp32", Region.full((13, 22)), out)
    with pytest.raises(ParameterNotFoundError, match="adam_m"):
        store.read("z.weight", "adam_x", Region.full((13, 22)), out)
    with pytest.raises(LayoutError):
        store.read("z.weight", "fp32", Region((0, 0), (14, 22)), np.zeros((14, 22), np.float32))
    with pytest.raises(LayoutError):
        store.read("z.weight", "fp32", Region((0, 0), (2, 2)), out)


def test_digests_are_those_of_the_plain_definition(tmp_path: Path) -> None:
    """With the tiles of the real grid (one tile up to 256 KiB)."""
    rng = np.random.default_rng(0)
    arrays = {
        "small": {"fp32": rng.standard_normal((30, 40)).astype(np.float32)},
        "bits": {"weight": rng.standard_normal((8, 8)).astype(ml_dtypes.bfloat16)},
        "empty": {"fp32": np.zeros((0, 4), np.float32)},
    }
    source, files = ArraySource(arrays), LocalFiles(str(tmp_path / "dest"))
    whole = [
        ArraySpec(a.path, a.shape, a.dtype, a.source_dtype, t, t, a.members, a.role)
        for a in small_arrays(source)
        for t in [tuple(max(1, n) for n in a.shape)]
    ]
    convert(ZarrTarget(files, whole, source=source), source)
    store = StoreSource(files)
    for (fqn, state), array in source._arrays.items():
        assert store.digest(fqn, state) == str(digest_array(array))


def test_fragments_tile_the_region_and_cuts_are_shard_borders(store: StoreSource) -> None:
    for fqn, state in states(ORIGINAL):
        shape = ORIGINAL._arrays[fqn, state].shape
        parts = store.fragments(fqn, state, Region.full(shape))
        covered = np.zeros(shape, int)
        for part in parts:
            covered[part.region.slices] += 1
        assert (covered == 1).all()
        assert store.count_reads(fqn, state) == len(parts)
        cuts = store.cuts(fqn, state)
        assert len(cuts) == len(shape)
        for dim, points in enumerate(cuts):
            starts = {part.region.offsets[dim] for part in parts} - {0}
            assert set(points) == starts
    box = Region((5, 0), (2, 22))
    assert {part.file for part in store.fragments("z.weight", "fp32", box)} == {
        f"params/z.weight/fp32/c.{row}.{column}" for row in (0, 1) for column in range(4)
    }


def test_opening_reads_the_root_once_and_nothing_else(committed: LocalFiles) -> None:
    calls: list[str] = []

    class Spy(LocalFiles):
        def __getattribute__(self, name: str) -> Any:
            if name in {"list", "folders", "stat", "read", "read_into", "write", "create", "sink"}:
                calls.append(name)
            return super().__getattribute__(name)

    source = StoreSource(Spy(committed.url))
    assert calls == ["read"]
    source.fragments("z.weight", "fp32", Region.full((13, 22)))
    assert source.digest("z.weight", "fp32")
    assert calls == ["read"]
    assert [file.name for file in source.files()] == ["zarr.json"]
    assert source.files() == source.current_files()


DAMAGES = {
    "deleted": lambda path, data: os.remove(path),
    "truncated": lambda path, data: path.write_bytes(data[:-5]),
    "emptied": lambda path, data: path.write_bytes(b""),
    "zeroed": lambda path, data: path.write_bytes(bytes(len(data))),
    "first byte": lambda path, data: path.write_bytes(bytes([data[0] ^ 1]) + data[1:]),
    "last byte": lambda path, data: path.write_bytes(data[:-1] + bytes([data[-1] ^ 128])),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("backend", ["file", "memory"])
@pytest.mark.parametrize(
    ("fqn", "state", "key"),
    [
        ("z.weight", "fp32", "params/z.weight/fp32/c.1.2"),
        ("a", "fp32", "params/a/fp32/c.0"),
        ("a", "step_size", "params/a/step_size/c"),
        ("experts.2.w", "fp32", "params/experts.(0-3).w/fp32/c.1.0.0"),
        (CommonState.FQN, "rng", "common/rng/c.0"),
    ],
)
def test_lost_and_damaged_objects_are_errors(
    damaged: LocalFiles, fqn: str, state: str, key: str, damage: str, backend: str
) -> None:
    path = Path(damaged.url, key)
    DAMAGES[damage](path, path.read_bytes())
    files: Any = damaged
    if backend == "memory":
        files = open_files("memory://test-damage")
        for stat in damaged.list():
            files.write(stat.name, damaged.read(stat.name))
    source = StoreSource(files)
    with pytest.raises(IntegrityError) as caught:
        read(source, fqn, state)
    error = caught.value
    assert error.kind is (Kind.LOST_OBJECT if damage == "deleted" else Kind.CHECKSUM)
    assert error.context["objects"] == [key]
    assert error.context["fqn"] == fqn
    assert key in str(error)
    assert repr(fqn) in str(error)
    if fqn == "z.weight":  # the other objects are still good
        box = Region((0, 0), (6, 22))
        assert np.array_equal(
            read(source, fqn, state, box), ORIGINAL._arrays[fqn, state][box.slices]
        )
    if backend == "memory":
        files.delete([stat.name for stat in files.list()])


def test_foreign_and_damaged_roots(tmp_path: Path, damaged: LocalFiles) -> None:
    empty = LocalFiles(str(tmp_path / "nothing"))
    assert not StoreFormat().detect(empty).matches
    with pytest.raises(UnrecognizedSourceError):
        StoreSource(empty)
    assert StoreFormat().detect(damaged).matches
    root = json.loads(damaged.read("zarr.json"))

    def with_root(change: Any) -> LocalFiles:
        document = json.loads(json.dumps(root))
        change(document)
        damaged.write("zarr.json", json.dumps(document).encode())
        return damaged

    with pytest.raises(FormatVersionError, match=r"2\.0"):
        StoreSource(with_root(lambda d: d["attributes"]["ucpstore"].update(version="2.0")))

    def renew(document: Any) -> None:
        attributes = document["attributes"]["ucpstore"]
        attributes.update(version="1.99", new=[1])
        nodes = document["consolidated_metadata"]["metadata"]
        attributes["checksum"] = checksum(attributes, sorted(nodes.items()))

    newer = StoreSource(with_root(renew))
    assert read(newer, "a", "fp32").shape == (4,)
    for change in (
        lambda d: d.pop("consolidated_metadata"),
        lambda d: d["consolidated_metadata"]["metadata"].pop("common"),
        lambda d: d["consolidated_metadata"]["metadata"]["params/a"]["attributes"].clear(),
        lambda d: d["consolidated_metadata"]["metadata"]["params/a/fp32"].pop("codecs"),
        lambda d: d["consolidated_metadata"].update(metadata=[]),
        lambda d: d["attributes"]["ucpstore"].pop("num_objects"),
    ):
        with pytest.raises((FormatVersionError, IntegrityError)):
            StoreSource(with_root(change))
    damaged.write("zarr.json", b'{"zarr_format"')
    with pytest.raises(UnrecognizedSourceError, match="not JSON"):
        StoreSource(damaged)


def test_a_root_that_changed_is_refused(damaged: LocalFiles) -> None:
    """Names, shapes and hyper-parameters are under no chunk's checksum."""
    root = damaged.read("zarr.json")
    document = json.loads(root)
    changed = 0
    for path in list(_leaves(document)):
        node = copied = json.loads(root)
        for key in path[:-1]:
            node = node[key]
        if path[:1] in ((), ("zarr_format",), ("node_type",)) or "must_understand" in path[:2]:
            continue
        if path[:2] in (("attributes",), ("consolidated_metadata", "kind")) or len(path) < 3:
            continue
        if isinstance(node[path[-1]], dict | list) and node[path[-1]]:
            continue
        node[path[-1]] = "x" if node[path[-1]] != "x" else "y"
        damaged.write("zarr.json", json.dumps(copied).encode())
        with pytest.raises(
            (IntegrityError, FormatVersionError, UncommittedError, UnrecognizedSourceError)
        ):
            StoreSource(damaged)
        changed += 1
    assert changed > 100
    damaged.write("zarr.json", json.dumps(document, indent=2).encode())
    assert read(StoreSource(damaged), "a", "fp32").shape == (4,)


def test_a_root_that_zarr_wrote_again_opens(damaged: LocalFiles) -> None:
    import zarr

    before = damaged.read("zarr.json")
    zarr.open_group(damaged.url, mode="a").attrs["note"] = "looked at"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        zarr.consolidate_metadata(damaged.url)
    assert damaged.read("zarr.json") != before
    assert read(StoreSource(damaged), "a", "fp32").shape == (4,)


def test_a_store_that_was_made_anew_has_changed(damaged: LocalFiles) -> None:
    source = StoreSource(damaged)
    planned = source.files()
    damaged.write("zarr.json", damaged.read("zarr.json"))
    assert source.files() == planned
    assert source.current_files() != planned


def _leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(node, dict | list):
        for key in node if isinstance(node, dict) else range(len(node)):
            yield from _leaves(node[key], (*path, key))


JUNK = st.sampled_from(
    [None, -1, 0, 3, 2**70, 1.5, "", "x", "../../x", [], [0], [5, 3], {}, True, {"a": 1}]
)


@given(data=st.data())
def test_any_change_of_the_root_is_read_or_refused(
    committed: LocalFiles, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A root from a stranger: no hang, no crash, no look outside the folder."""
    document = json.loads(committed.read("zarr.json"))
    document["attributes"]["ucpstore"].pop("checksum")  # a stranger would make it right
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(list(_leaves(document))[1:]))
        node = document
        for key in path[:-1]:
            node = node[key]
        if isinstance(node, dict) and data.draw(st.booleans()):
            node[data.draw(st.sampled_from(["../../x", "params/w/fp32", "fqn"]))] = node.pop(
                path[-1]
            )
        else:
            node[path[-1]] = data.draw(JUNK)

    class Changed(LocalFiles):
        def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
            if name == "zarr.json":
                return json.dumps(document).encode()
            return super().read(name, offset, nbytes)

    try:
        source = StoreSource(Changed(committed.url))
    except UcpStoreError:
        return
    for fqn, parameter in source.parameters.items():
        for state, spec in parameter.states.items():
            with contextlib.suppress(UcpStoreError):
                if spec.nbytes < 1 << 20:
                    read(source, fqn, state)
                corner = Region((0,) * len(spec.shape), tuple(min(1, n) for n in spec.shape))
                source.fragments(fqn, state, corner)
                source.digest(fqn, state)


def test_escape_hatches(committed: LocalFiles) -> None:
    source = StoreFormat().open(committed)
    expected = ORIGINAL._arrays["z.weight", "fp32"]
    found = source.tensorstore("z.weight", "fp32")
    assert isinstance(found, ts.TensorStore)
    assert np.array_equal(found[2:4].read().result(), expected[2:4])
    member = source.tensorstore("experts.1.w", "fp32")
    assert np.array_equal(member.read().result(), ORIGINAL._arrays["experts.1.w", "fp32"])
    with pytest.raises(ValueError, match="not support writing"):
        found[0].write(1.0).result()
    group = source.zarr_group()
    assert group.read_only
    assert np.array_equal(group["params/z.weight/fp32"][2:4], expected[2:4])
    with pytest.raises(UnrecognizedSourceError):
        StoreFormat().open(committed, tag="global_step1")


@given(
    shape=st.lists(st.integers(1, 30), min_size=0, max_size=3),
    data=st.data(),
    limit=st.integers(1, 400),
)
def test_requests_tile_the_region_at_tile_borders(
    shape: list[int], data: st.DataObject, limit: int
) -> None:
    tile = tuple(data.draw(st.integers(1, n)) for n in shape)
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    region = Region(offsets, sizes)
    boxes = list(split_region(region, tile, 4, limit))
    covered = np.zeros(shape, int)
    for box in boxes:
        covered[box.slices] += 1
        assert box.volume * 4 <= max(limit, int(np.prod(tile)) * 4)
        for dim, start in enumerate(box.offsets):
            assert start == region.offsets[dim] or start % tile[dim] == 0
    assert (covered[region.slices] == 1).all()
    assert covered.sum() == region.volume
    array = ArraySpec("p", tuple(shape), "float32", "float32", tile, tile, (("f", "s"),))
    hit = {i for i in range(array.num_objects) if array.object_region(i).intersect(region)}
    assert set(array.objects_in(region)) == hit


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        ("PERMISSION_DENIED", Kind.PERMISSION, False),
        ("UNAUTHENTICATED", Kind.PERMISSION, False),
        ("UNAVAILABLE", Kind.IO, True),
        ("ABORTED", Kind.IO, True),
        ("DEADLINE_EXCEEDED", Kind.IO, True),
        ("UNIMPLEMENTED", Kind.IO, False),
    ],
)
def test_storage_failures_say_whether_to_try_again(
    status: str, kind: Kind, retryable: bool
) -> None:
    error = translate(ValueError(f"{status}: it broke [spec='secret']"), "cannot read 'w'")
    assert isinstance(error, StorageError)
    assert (error.kind, error.retryable) == (kind, retryable)
    assert "secret" not in str(error)
    assert isinstance(translate(ValueError("OUT_OF_RANGE: x"), "cannot read"), LayoutError)
    assert isinstance(translate(ValueError("DATA_LOSS: x"), "cannot read"), IntegrityError)
