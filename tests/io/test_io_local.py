"""What only the local backend promises: durability, crash safety, descriptors, error kinds."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ucpstore.errors import CheckpointNotFoundError, Kind, StorageError
from ucpstore.io import local, open_files
from ucpstore.io.descriptors import Descriptors
from ucpstore.io.local import LocalFiles
from ucpstore.io.oserrors import translate_os_error


@pytest.fixture
def files(tmp_path: Path) -> LocalFiles:
    return LocalFiles(str(tmp_path / "store"))


def objects(folder: Path) -> list[str]:
    """Everything that is on the disk, unfinished files included."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_reading_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"123")
    files = LocalFiles(str(tmp_path))
    files.read("x")
    files.stat("x")
    files.list()
    files.free_space()
    files.sync()
    assert objects(tmp_path) == ["x"]
    assert not (tmp_path / ".ucpstore").exists()
    LocalFiles(str(tmp_path / "absent")).list()
    assert not (tmp_path / "absent").exists()


def test_writing_leaves_only_the_objects(files: LocalFiles) -> None:
    files.write("a/1", b"x")
    files.create("a/2", b"x")
    files.create("a/2", b"y")
    sink = files.sink("a/3", 1)
    sink.write([b"z"])
    sink.close()
    files.sink("a/4", 1).abort()
    assert objects(Path(files.root)) == ["a/1", "a/2", "a/3"]
    files.delete(["a/1", "a/2", "a/3"])
    assert os.listdir(files.root) == []


def test_unfinished_objects_are_not_listed(files: LocalFiles) -> None:
    sink = files.sink("x", 1)
    outer = LocalFiles(os.path.dirname(files.root))
    assert len(objects(Path(files.root))) == 1
    assert files.list() == outer.list() == []
    assert files.folders(".ucpstore") == outer.folders("store/.ucpstore") == []
    assert [stat.nbytes for stat in files.list(".ucpstore/tmp")] == [0]  # to clean up by hand
    sink.abort()


RACE = """
import sys
from ucpstore.io.local import LocalFiles
root, writer, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
files = LocalFiles(root)
print("ready", flush=True)
sys.stdin.readline()
print(*[round for round in range(rounds) if files.create(f"claims/{round}", writer.encode() * 999)])
"""


@pytest.mark.parametrize("links", [True, False], ids=["hard-links", "locks"])
def test_create_race_between_processes(tmp_path: Path, links: bool) -> None:
    writers, rounds = 8, 40
    code = RACE
    if not links:
        code = RACE.replace(
            "files = ",
            "import errno, os\n"
            "def link(*a): raise OSError(errno.EOPNOTSUPP, 'no links here')\n"
            "os.link = link\n"
            "files = ",
        )
    processes = [start(code, tmp_path, writer, rounds) for writer in range(writers)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        won = [process.communicate(timeout=60)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * writers
    assert sorted(int(r) for rounds_won in won for r in rounds_won) == list(range(rounds))
    files = LocalFiles(str(tmp_path))
    for writer, rounds_won in enumerate(won):
        for round_ in rounds_won:
            assert files.read(f"claims/{round_}") == str(writer).encode() * 999


def test_create_without_links_or_locks_is_refused(
    files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StorageError, match="neither hard links nor file locks"):
        files.create("x", b"1")
    assert files.list() == []
    assert not [name for name in objects(Path(files.root)) if name.endswith(".part")]


KILLED = """
import os, sys, time
from ucpstore.io.local import LocalFiles
root, moment = sys.argv[1:]
files = LocalFiles(root)

def stop(*arguments, **keywords):
    print("stopped", flush=True)
    time.sleep(600)

if moment == "sink-write":
    sink = files.sink("a/object", 20 << 20)
    sink.write([bytes(10 << 20)])
    stop()
setattr(os, {"link": "link", "replace": "replace", "fsync": "fsync"}[moment.split("-")[1]], stop)
if moment.startswith("sink"):
    sink = files.sink("a/object", 4)
    sink.write([b"1234"])
    sink.close()
elif moment.startswith("create"):
    files.create("a/object", b"1234")
else:
    files.write("a/object", b"1234")
"""


@pytest.mark.parametrize(
    "moment", ["sink-write", "sink-replace", "create-fsync", "create-link", "write-replace"]
)
def test_killed_writer_leaves_nothing_visible(tmp_path: Path, moment: str) -> None:
    process = start(KILLED, tmp_path, moment)
    assert process.stdout is not None
    assert process.stdout.readline() == "stopped\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    files = LocalFiles(str(tmp_path))
    assert files.stat("a/object") is None
    assert files.list() == []
    assert files.create("a/object", b"whole")
    assert files.read("a/object") == b"whole"


def test_leftovers_are_swept_when_they_are_old(files: LocalFiles) -> None:
    files.write("x", b"")
    folder = Path(files.root, ".ucpstore/tmp")
    for name, age in (("1-old.part", 7200), ("2-new.part", 60), ("other", 7200)):
        (folder / name).write_bytes(b"1")
        then = (folder / name).stat().st_mtime - age
        os.utime(folder / name, (then, then))
    files.sink("y", 1).abort()
    assert sorted(os.listdir(folder)) == ["2-new.part", "other"]


def test_removed_temporary_file_is_reported(files: LocalFiles) -> None:
    sink = files.sink("x", 1)
    sink.write([b"1"])
    for path in Path(files.root, ".ucpstore/tmp").iterdir():
        path.unlink()
    with pytest.raises(StorageError, match="removed by somebody else") as caught:
        sink.close()
    assert caught.value.retryable


def test_writers_survive_that_folders_are_pruned(files: LocalFiles) -> None:
    files.write("a/b/1", b"1")
    sink = files.sink("a/b/2", 1)
    sink.write([b"2"])
    other = LocalFiles(files.root)
    other.delete(["a/b/1"])
    assert other.folders("a") == []
    sink.close()
    assert files.read("a/b/2") == b"2"
    other.delete(["a/b/2"])
    files.write("a/b/3", b"3")
    assert files.create("a/b/4", b"4")
    assert [stat.name for stat in files.list()] == ["a/b/3", "a/b/4"]


class _Spy:
    """Records the calls of ``os`` functions that decide about durability, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        self._monkeypatch = monkeypatch
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._on_fsync)
        for name in ("link", "replace"):
            self._wrap(name)

    def _on_fsync(self, fd: int) -> None:
        self.events.append(("fsync", str(Path(f"/proc/self/fd/{fd}").readlink())))
        self._fsync(fd)

    def _wrap(self, name: str) -> None:
        real = getattr(os, name)

        def call(source: str, target: str) -> None:
            real(source, target)
            self.events.append((name, target))

        self._monkeypatch.setattr(os, name, call)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("operation", "move"), [("create", "link"), ("write", "replace")])
def test_small_writes_are_durable(
    files: LocalFiles, monkeypatch: pytest.MonkeyPatch, operation: str, move: str
) -> None:
    spy = _Spy(monkeypatch)
    getattr(files, operation)("a/b/x", b"123")
    target = f"{files.root}/a/b/x"
    moved = spy.events.index((move, target))
    assert spy.events[0][0] == "fsync"
    assert spy.events[0][1].endswith(".part")
    parents = {event[1] for event in spy.events[1:moved]}
    assert {os.path.dirname(files.root), files.root, f"{files.root}/a"} <= parents
    assert spy.events[moved + 1 :] == [("fsync", f"{files.root}/a/b")]


@pytest.mark.skipif(sys.platform != "linux", reason="syncfs is Linux only")
def test_sync_covers_sinks_by_one_call(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        local,
        "sync_filesystem",
        lambda fd: synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())),
    )
    spy = _Spy(monkeypatch)
    for name in ("a/1", "a/2"):
        sink = files.sink(name, 1)
        sink.write([b"x"])
        sink.close()
    files.sync()
    assert synced == [files.root]
    assert [event[0] for event in spy.events] == ["replace", "replace"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_sync_without_syncfs(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "has_syncfs", lambda: False)
    spy = _Spy(monkeypatch)
    sink = files.sink("a/b/1", 1)
    sink.write([b"x"])
    sink.close()
    assert [event[0] for event in spy.events] == ["fsync", "replace"]
    del spy.events[:]
    files.sync()
    folders = {files.root, f"{files.root}/a", f"{files.root}/a/b"}
    assert folders <= {event[1] for event in spy.events}


def test_failed_sync_is_not_retryable(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(local, "sync_filesystem", lost)
    monkeypatch.setattr(local, "has_syncfs", lambda: True)
    sink = files.sink("x", 0)
    sink.close()
    with pytest.raises(StorageError, match="EIO") as caught:
        files.sync()
    assert not caught.value.retryable


def test_a_folder_is_moved_whole_and_never_onto_another(files: LocalFiles) -> None:
    for name in ("a/b/x", "a/b/y", "full/z"):
        files.write(name, name.encode())
    assert files.read("a/b/x") == b"a/b/x"
    assert not files.move("a/b", "full")
    assert not files.move("a/none", "new")
    os.mkdir(os.path.join(files.root, "empty"))
    assert files.move("a/b", "empty")
    assert [stat.name for stat in files.list()] == ["empty/x", "empty/y", "full/z"]
    assert "a" not in files.folders(), "a folder that became empty is left"
    assert files.move("empty", "new/place")
    assert files.read("new/place/x") == b"a/b/x"
    assert files.move("full/z", "new/place/z")
    assert files.read("new/place/z") == b"full/z"
    assert files.write("a/b/x", b"again").nbytes == 5
    with pytest.raises(StorageError, match="move"):
        files.move("new", "a/b/x")
    for names in (("../x", "y"), ("x", "/y")):
        with pytest.raises(StorageError, match="plain relative path"):
            files.move(*names)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk(files: LocalFiles, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    sink = files.sink("a/x", 1 << 20)
    real = os.writev
    room = [1000]

    def writev(fd: int, buffers: Any) -> int:
        if not room:
            raise OSError(code, os.strerror(code))
        return real(fd, [memoryview(buffers[0])[: room.pop()]])

    monkeypatch.setattr(os, "writev", writev)
    for write in (lambda: sink.write([bytes(1 << 20)]), lambda: files.write("a/y", b"123")):
        with pytest.raises(StorageError, match=r"a/[xy]") as caught:
            write()
        assert caught.value.kind is Kind.NO_SPACE
        assert not caught.value.retryable
        assert caught.value.hint
        assert pickle.loads(pickle.dumps(caught.value)).kind is Kind.NO_SPACE
    sink.abort()
    assert objects(Path(files.root)) == []


def test_short_transfers_are_continued(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, views: writev(fd, [views[0][:7]]))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:5]], at))
    data = bytes(range(100))
    files.write("x", data)
    parts = [bytearray(30), bytearray(1), bytearray(60)]
    files.read_into("x", 9, [memoryview(part) for part in parts])
    assert b"".join(parts) == data[9:]
    assert files.read("x") == data


@pytest.mark.parametrize(
    ("code", "kind", "retryable"),
    [
        (errno.EACCES, Kind.PERMISSION, False),
        (errno.EPERM, Kind.PERMISSION, False),
        (errno.EROFS, Kind.PERMISSION, False),
        (errno.ENAMETOOLONG, Kind.NAME, False),
        (errno.EIO, Kind.IO, True),
        (errno.ESTALE, Kind.IO, True),
        (errno.ETIMEDOUT, Kind.IO, True),
        (errno.EAGAIN, Kind.IO, True),
        (errno.EINVAL, Kind.IO, False),
        (errno.ENOSPC, Kind.NO_SPACE, False),
    ],
)
def test_error_kinds(code: int, kind: Kind, retryable: bool) -> None:
    error = translate_os_error(OSError(code, os.strerror(code)), "read", "/data/x")
    assert isinstance(error, StorageError)
    assert (error.kind, error.retryable) == (kind, retryable)
    assert "/data/x" in str(error)
    assert errno.errorcode[code] in str(error)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR])
def test_missing_paths_are_not_found(code: int) -> None:
    error = translate_os_error(OSError(code, os.strerror(code)), "read", "/data/x")
    assert isinstance(error, CheckpointNotFoundError)


def test_folder_read_as_object(files: LocalFiles) -> None:
    files.write("a/b", b"1")
    with pytest.raises(StorageError) as caught:
        files.read_into("a", 0, [memoryview(bytearray(1))])
    assert caught.value.kind is Kind.NAME


def test_object_where_a_folder_is_needed(files: LocalFiles) -> None:
    files.write("a", b"1")
    with pytest.raises(StorageError):
        files.write("a/b", b"1")
    assert files.stat("a/b") is None


def test_long_name(files: LocalFiles) -> None:
    with pytest.raises(StorageError) as caught:
        files.write("x" * 300, b"1")
    assert caught.value.kind is Kind.NAME


def test_links_in_a_source_are_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere/inner").mkdir(parents=True)
    (tmp_path / "elsewhere/inner/x").write_bytes(b"123")
    source = tmp_path / "source"
    source.mkdir()
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    (source / "file").symlink_to(tmp_path / "elsewhere/inner/x")
    (source / "dangling").symlink_to(tmp_path / "nowhere")
    (source / "ring").symlink_to(source)
    files = LocalFiles(str(source))
    assert [(s.name, s.nbytes) for s in files.list()] == [("file", 3), ("linked/inner/x", 3)]
    assert files.folders() == ["linked", "ring"]
    assert files.read("linked/inner/x") == b"123"
    assert files.stat("dangling") is None


def test_free_space(tmp_path: Path) -> None:
    space = LocalFiles(str(tmp_path / "not/yet/there")).free_space()
    assert space is not None
    found = os.statvfs(tmp_path)
    assert 0 < space[0] <= found.f_blocks * found.f_frsize
    assert space[1] > 0


def test_free_space_without_an_inode_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        f_bavail, f_frsize, f_files, f_favail = 10, 4096, 0, 0

    monkeypatch.setattr(os, "statvfs", lambda _: Found)
    assert LocalFiles(str(tmp_path)).free_space() == (40960, sys.maxsize)


def open_below(folder: Path) -> int:
    """Number of descriptors of this process that are open below ``folder``."""
    links = Path("/proc/self/fd")
    found = 0
    for name in os.listdir(links):
        with contextlib.suppress(OSError):
            found += os.readlink(links / name).startswith(str(folder))  # noqa: PTH115
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_descriptors_stay_bounded_under_threads(tmp_path: Path) -> None:
    count, threads, capacity = 60, 8, 10
    files = LocalFiles(str(tmp_path))
    files._descriptors = Descriptors(capacity)
    for i in range(count):
        (tmp_path / str(i)).write_bytes(bytes([i]) * 100)
    start_together = threading.Barrier(threads)

    def read_all(seed: int) -> tuple[int, int]:
        start_together.wait()
        wrong = highest = 0
        out = bytearray(100)
        for step in range(300):
            i = (seed * 13 + step * 7) % count
            files.read_into(str(i), 0, [memoryview(out)])
            wrong += out != bytes([i]) * 100
            if step % 50 == 0:
                highest = max(highest, open_below(tmp_path))
        return wrong, highest

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(read_all, range(threads)))
    assert sum(wrong for wrong, _ in results) == 0
    assert max(highest for _, highest in results) <= capacity + threads
    assert len(files._descriptors) == open_below(tmp_path) == capacity
    files._descriptors.close()
    assert open_below(tmp_path) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_dropped_instance_closes_its_descriptors(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    sink = files.sink("x", 1)
    sink.write([b"1"])
    sink.close()
    files.read("x")
    assert open_below(tmp_path) == 2  # the object, and the root for sync
    del files, sink
    gc.collect()
    assert open_below(tmp_path) == 0


MANY_OPEN = """
import os, resource, sys
from ucpstore.io.local import LocalFiles
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
opened = []
for round in range(6):
    files = LocalFiles(sys.argv[1])
    opened.append(files)
    for i in range(100):
        assert files.read(str(i)) == b"x"
held = len(os.listdir("/proc/self/fd"))
assert held < 56, held
blocked = []
try:
    while True:
        blocked.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
LocalFiles(sys.argv[1] + "/new").write("y", b"yy")
assert LocalFiles(sys.argv[1]).read("5") == b"x"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_many_open_folders_share_the_descriptors_of_the_process(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / str(i)).write_bytes(b"x")
    command = [sys.executable, "-c", MANY_OPEN, str(tmp_path)]
    subprocess.run(command, check=True)


def test_borrowed_descriptor_outlives_its_eviction(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(name.encode())
    cache = Descriptors(1)
    first = cache.take(str(tmp_path / "a"))
    cache.release(cache.take(str(tmp_path / "b")))
    cache.release(cache.take(str(tmp_path / "c")))
    assert os.pread(first.fd, 1, 0) == b"a"
    cache.release(first)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(first.fd)
    cache.close()


def test_cached_descriptor_of_a_replaced_file(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    (tmp_path / "x").write_bytes(b"old")
    assert files.read("x") == b"old"
    (tmp_path / "y").write_bytes(b"newer")
    (tmp_path / "y").rename(tmp_path / "x")
    assert files.read("x") == b"newer"
    (tmp_path / "x").unlink()
    with pytest.raises(CheckpointNotFoundError):
        files.read("x")


def test_instances_survive_a_fork(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from ucpstore.io.local import LocalFiles\n"
        "files = LocalFiles(sys.argv[1])\n"
        "files.write('x', b'123'); files.read('x')\n"
        "files._descriptors._lock.acquire()\n"  # as if another thread read at this moment
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if files.read('x') == b'123' else 1)\n"
        "files._descriptors._lock.release()\n"
        "sys.exit(os.waitpid(child, 0)[1])\n"
    )
    process = start(code, tmp_path)
    try:
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()


def test_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_files("~/runs").url == str(tmp_path / "runs")
    assert open_files("file://~/runs").url == str(tmp_path / "runs")


def test_a_link_to_itself_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_bytes(b"x")
    files = LocalFiles(str(tmp_path))
    assert [stat.name for stat in files.list()] == ["file"]
    assert files.folders() == []
