"""What every backend must do; the fixture runs it on all of them."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes_io import CountingFiles
from ucpstore.errors import CheckpointNotFoundError, CorruptSourceError, Kind, StorageError
from ucpstore.io import Files

PAYLOAD = bytes(range(256)) * 40
OUTSIDE = ["", "/etc/passwd", "../up", "a/../../up", "a//b", "./a", "a/", "a\\b", "a\0b", ".."]


def test_round_trip(files: Files, open_again: Callable[[], Files]) -> None:
    written = files.write("a/b/data.bin", PAYLOAD)
    assert (written.name, written.nbytes) == ("a/b/data.bin", len(PAYLOAD))
    other = open_again()
    assert other.read("a/b/data.bin") == PAYLOAD
    assert other.stat("a/b/data.bin") == written
    assert other.list() == [written]


def test_empty_object(files: Files) -> None:
    files.write("empty", b"")
    assert files.read("empty") == b""
    files.read_into("empty", 0, [])
    sink = files.sink("empty2", 0)
    sink.write([])
    assert sink.close().nbytes == 0
    assert [stat.nbytes for stat in files.list()] == [0, 0]


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, None), (0, 1), (17, 1000), (len(PAYLOAD) - 5, None), (len(PAYLOAD) - 5, 5), (3, 0)],
)
def test_ranges(files: Files, offset: int, nbytes: int | None) -> None:
    files.write("x", PAYLOAD)
    end = None if nbytes is None else offset + nbytes
    assert files.read("x", offset, nbytes) == PAYLOAD[offset:end]


@pytest.mark.parametrize("offset", [len(PAYLOAD) - 3, len(PAYLOAD), len(PAYLOAD) + 100])
@pytest.mark.parametrize("nbytes", [None, 10])
def test_read_is_short_only_at_the_end(files: Files, offset: int, nbytes: int | None) -> None:
    files.write("x", PAYLOAD)
    assert files.read("x", offset, nbytes) == PAYLOAD[offset:]


def test_read_into_scatters_over_buffers(files: Files) -> None:
    files.write("x", PAYLOAD)
    sizes = [1, 0, 7, 4096, 13]
    arrays = [bytearray(size) for size in sizes]
    files.read_into("x", 11, [memoryview(array) for array in arrays])
    assert b"".join(arrays) == PAYLOAD[11 : 11 + sum(sizes)]


def test_read_into_typed_buffers(files: Files) -> None:
    np = pytest.importorskip("numpy")
    expected = np.arange(60, dtype="<f4").reshape(3, 4, 5)
    files.write("x", b"head" + expected.tobytes())
    out = np.zeros_like(expected)
    files.read_into("x", 4, [memoryview(out[0]), memoryview(out[1:])])
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(("offset", "nbytes"), [(len(PAYLOAD) - 1, 2), (len(PAYLOAD) + 9, 1)])
def test_read_into_past_the_end(files: Files, offset: int, nbytes: int) -> None:
    files.write("dir/x", PAYLOAD)
    with pytest.raises(CorruptSourceError, match="dir/x") as caught:
        files.read_into("dir/x", offset, [memoryview(bytearray(nbytes))])
    assert caught.value.kind is Kind.TRUNCATED
    assert caught.value.context["offset"] == offset
    assert caught.value.context["expected"] == nbytes


def test_missing(files: Files) -> None:
    assert files.stat("nothing") is None
    assert files.list() == []
    assert files.list("no/folder") == []
    assert files.list("no/folder", recursive=False) == []
    assert files.folders() == []
    assert files.folders("no/folder") == []
    for read in (
        lambda: files.read("nothing"),
        lambda: files.read("nothing", 3, 5),
        lambda: files.read("nothing", 3, 0),
        lambda: files.read_into("nothing", 0, [memoryview(bytearray(1))]),
    ):
        with pytest.raises(CheckpointNotFoundError, match="nothing"):
            read()
    files.delete(["nothing", "no/folder/x"])


def test_folder_is_no_object(files: Files) -> None:
    files.write("a/b/c", b"1")
    assert files.stat("a") is None
    assert files.stat("a/b") is None


def test_listing(files: Files) -> None:
    names = ["a/b/2", "a/b/1", "a/c/3", "a/4", "ab/5", "6", "a/b[0]/w*?", "a/é ü%2F"]
    for name in names:
        files.write(name, name.encode())
    assert [stat.name for stat in files.list()] == sorted(names)
    assert [stat.nbytes for stat in files.list()] == [len(n.encode()) for n in sorted(names)]
    inside = sorted(name for name in names if name.startswith("a/"))
    assert [stat.name for stat in files.list("a")] == inside
    assert [stat.name for stat in files.list("a/")] == inside
    assert [stat.name for stat in files.list("a", recursive=False)] == ["a/4", "a/é ü%2F"]
    assert [stat.name for stat in files.list(recursive=False)] == ["6"]
    assert [name for name in files.folders() if name != ".ucpstore"] == ["a", "ab"]
    assert files.folders("a") == ["b", "b[0]", "c"]
    assert files.read("a/b[0]/w*?") == b"a/b[0]/w*?"
    files.delete(["a/b[0]/w*?", "a/é ü%2F"])
    assert files.stat("a/b[0]/w*?") is None
    assert files.stat("a/b/1") is not None


def test_listing_agrees_with_stat(files: Files) -> None:
    sink = files.sink("s", 4)
    sink.write([b"abcd"])
    stats = [files.write("w", b"abc"), sink.close()]
    assert files.create("c", b"ab")
    listed = {stat.name: stat for stat in files.list()}
    assert [listed["w"], listed["s"]] == stats
    assert listed == {name: files.stat(name) for name in listed}


def test_replacing_changes_token_and_content(files: Files, open_again: Callable[[], Files]) -> None:
    reader = open_again()
    first = files.write("x", b"one")
    assert reader.read("x") == b"one"
    second = files.write("x", b"two")
    assert first.token != second.token
    assert reader.read("x") == b"two"
    sink = files.sink("x", 5)
    sink.write([b"th", b"ree"])
    third = sink.close()
    assert third.token != second.token
    out = bytearray(5)
    reader.read_into("x", 0, [memoryview(out)])
    assert out == b"three"


def test_create_only_once(files: Files, open_again: Callable[[], Files]) -> None:
    assert files.create("deep/er/claim.json", b"first")
    assert not files.create("deep/er/claim.json", b"second")
    assert not open_again().create("deep/er/claim.json", b"third")
    assert files.read("deep/er/claim.json") == b"first"
    files.delete(["deep/er/claim.json"])
    assert files.create("deep/er/claim.json", b"fourth")
    assert files.read("deep/er/claim.json") == b"fourth"


def test_create_race_between_threads(open_again: Callable[[], Files]) -> None:
    writers, rounds = 8, 5
    opened = [open_again() for _ in range(writers)]
    barrier = threading.Barrier(writers)

    def race(writer: int, round_: int) -> bool:
        barrier.wait()
        return opened[writer].create(f"claims/{round_}", b"%d" % writer * 1000)

    with ThreadPoolExecutor(writers) as pool:
        for round_ in range(rounds):
            won = list(pool.map(race, range(writers), [round_] * writers))
            assert sum(won) == 1
            assert open_again().read(f"claims/{round_}") == b"%d" % won.index(True) * 1000


def test_sink_is_invisible_until_closed(files: Files, open_again: Callable[[], Files]) -> None:
    reader = open_again()
    sink = files.sink("a/b/object", len(PAYLOAD))
    block = bytearray(1000)
    for start in range(0, len(PAYLOAD), 1000):
        part = PAYLOAD[start : start + 1000]
        block[: len(part)] = part
        sink.write([memoryview(block)[: len(part)]])
        block[:] = bytes(1000)  # may be reused at once
    assert reader.stat("a/b/object") is None
    assert reader.list() == []
    stat = sink.close()
    files.sync()
    assert reader.read("a/b/object") == PAYLOAD
    assert reader.list() == [stat] == [reader.stat("a/b/object")]


def test_sink_takes_many_buffers(files: Files) -> None:
    buffers = [memoryview(PAYLOAD)[i : i + 1] for i in range(5000)]
    sink = files.sink("x", 5000)
    sink.write(buffers)
    sink.close()
    assert files.read("x") == PAYLOAD[:5000]


def test_abort_leaves_nothing(files: Files, open_again: Callable[[], Files]) -> None:
    files.write("old", b"old")
    for name in ("old", "new"):
        sink = files.sink(name, 100)
        sink.write([b"x" * 50])
        sink.abort()
        sink.abort()
    assert [stat.name for stat in open_again().list()] == ["old"]
    assert open_again().read("old") == b"old"


@pytest.mark.parametrize("written", [9, 11])
def test_sink_with_another_size_than_declared(files: Files, written: int) -> None:
    def write() -> None:
        sink.write([b"y" * written])
        sink.close()

    sink = files.sink("x", 10)
    with pytest.raises(StorageError, match=rf"{written} bytes were written, expected 10"):
        write()
    sink.abort()
    assert files.list() == []


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_could_escape_are_refused(files: Files, name: str) -> None:
    for use in (
        lambda: files.read(name),
        lambda: files.read_into(name, 0, [memoryview(bytearray(1))]),
        lambda: files.stat(name),
        lambda: files.write(name, b""),
        lambda: files.create(name, b""),
        lambda: files.sink(name, 1),
        lambda: files.delete([name]),
    ):
        with pytest.raises(StorageError) as caught:
            use()
        assert caught.value.kind is Kind.NAME


@pytest.mark.parametrize("prefix", ["..", "/etc", "a/../.."])
def test_prefixes_that_could_escape_are_refused(files: Files, prefix: str) -> None:
    with pytest.raises(StorageError):
        files.list(prefix)
    with pytest.raises(StorageError):
        files.folders(prefix)


def test_pickling(files: Files) -> None:
    files.write("x", PAYLOAD)
    files.read("x")  # clients and descriptors exist now, and stay behind
    again = pickle.loads(pickle.dumps(files))
    assert (again.url, again.is_local, again.options) == (files.url, files.is_local, files.options)
    assert again.read("x", 5, 6) == PAYLOAD[5:11]
    assert not again.create("x", b"")


def test_shared_between_threads(files: Files) -> None:
    names = [f"d{i % 3}/{i}" for i in range(24)]

    def work(name: str) -> bool:
        sink = files.sink(name, 6000)
        sink.write([name.encode().ljust(6000, b".")])
        sink.close()
        out = bytearray(3000)
        files.read_into(name, 0, [memoryview(out)])
        return out == name.encode().ljust(3000, b".")

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, names))
    assert [stat.name for stat in files.list()] == sorted(names)


def test_delete_removes_folders_too(files: Files, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["open_again"] == "seaweedfs":
        pytest.skip("SeaweedFS shows empty folders for a while")
    for name in ("a/b/1", "a/b/2", "a/3"):
        files.write(name, b"x")
    files.delete(["a/b/1", "a/b/2"])
    assert files.folders("a") == []
    files.delete(["a/3"])
    assert files.folders() == []
    files.write("a/b/1", b"y")
    assert files.read("a/b/1") == b"y"


def test_counting_wrapper(files: Files) -> None:
    counting = CountingFiles(files)
    sink = counting.sink("x", 3)
    sink.write([b"abc"])
    sink.close()
    assert (counting.puts, counting.reads, counting.nbytes["close"]) == (1, 0, 3)
    assert counting.read("x", 1) == b"bc"
    counting.read_into("x", 0, [memoryview(bytearray(3))])
    assert (counting.reads, counting.bytes_read) == (2, 5)
    assert counting.names == {"sink": ["x"], "close": ["x"], "read": ["x"], "read_into": ["x"]}
    assert pickle.loads(pickle.dumps(counting)).read("x") == b"abc"


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=6))
def test_any_way_to_cut_gives_the_same_bytes(files: Files, data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(edges)]
    sink = files.sink("x", len(data))
    sink.write(parts)
    sink.close()
    start = edges[len(edges) // 2]
    arrays = [bytearray(len(part)) for part in parts[len(edges) // 2 :]]
    files.read_into("x", start, [memoryview(array) for array in arrays])
    assert b"".join(arrays) == data[start:]
    assert files.read("x") == data
