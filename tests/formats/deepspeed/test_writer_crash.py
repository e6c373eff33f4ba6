"""Native targets under crashes, races, full disks and other people's checkpoints: whole, or not there."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ucpstore
from tests.deepspeed_runs import copy_run, deepspeed_run
from tests.fakes import CrashingFiles, Killed
from ucpstore import Layout
from ucpstore.contracts import Record, Source
from ucpstore.engine.plan import Plan, make_plan
from ucpstore.engine.run import Report, Workers, run
from ucpstore.engine.worker import Settings
from ucpstore.errors import (
    AlreadyExistsError,
    IntegrityError,
    Kind,
    StorageError,
    UncommittedError,
)
from ucpstore.formats.deepspeed.reader import DeepSpeedFormat
from ucpstore.formats.deepspeed.writer import DeepSpeedTarget
from ucpstore.io.base import Files, Sink
from ucpstore.io.local import LocalFiles

LAYOUT = Layout(dp=3, zero_stage=3)
OTHER = Layout(dp=2, zero_stage=3)
TAG = "global_step3"


@pytest.fixture(scope="module")
def source() -> Source:
    return DeepSpeedFormat().open(LocalFiles(str(deepspeed_run("s2-bf16-dp2").path)))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, dict[str, bytes]]:
    """What undisturbed conversions give."""
    base, path = tmp_path_factory.mktemp("reference"), deepspeed_run("s2-bf16-dp2").path
    for layout in (LAYOUT, OTHER):
        ucpstore.convert(path, base / str(layout.dp), to="deepspeed", layout=layout)
    return {layout: contents(base / str(layout.dp)) for layout in (LAYOUT, OTHER)}


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that DeepSpeed sees."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and ".ucpstore" not in file.parts
    }


def job(source: Source, files: Files, layout: Layout = LAYOUT) -> tuple[DeepSpeedTarget, Plan]:
    target = DeepSpeedTarget(files, source, layout)
    return target, make_plan(source, target, states=target.states)


def convert(
    source: Source, files: Files, layout: Layout = LAYOUT, *, publish_nbytes: int = 60_000
) -> Report:
    """The engine with one thread, that records often."""
    target, plan = job(source, files, layout)
    return run(
        (source, target),
        plan,
        workers=Workers(threads=1),
        opener=lambda: (plan.digest, source, target),
        settings=Settings(threads=1, retry_delay=0.001, publish_nbytes=publish_nbytes),
    )


def written(source: Source, files: Files, layout: Layout = LAYOUT) -> DeepSpeedTarget:
    """A target whose files are all written and recorded, before its commit."""
    target, plan = job(source, files, layout)
    assert target.begin(plan.digest)
    target.publish([target.write(task, source) for task in target.tasks()])
    return target


def require_tidy(folder: Path) -> None:
    """Nothing unfinished is left, of any plan."""
    for name in ("tmp", "files"):
        assert not list((folder / ".ucpstore" / name).rglob("*"))


def require_invisible(folder: Path) -> None:
    assert contents(folder) == {}
    with pytest.raises(UncommittedError):
        ucpstore.open(folder)


# ------------------------------------------------------------------- crashes


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power-lost"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_crash_at_every_step_then_the_same_command(
    source: Source,
    reference: dict[Layout, dict[str, bytes]],
    tmp_path: Path,
    after: bool,
    power: bool,
) -> None:
    tasks = len(job(source, LocalFiles(str(tmp_path / "none")))[0].tasks())
    for step in range(1, 1000):
        folder = tmp_path / str(step)
        files = LocalFiles(str(folder))
        crashing = CrashingFiles(files, step, after=after)
        finished = True
        try:
            convert(source, crashing)
        except Killed:
            finished = False
        if power:
            crashing.lose_power()
        seen = contents(folder)
        latest = seen.pop("latest", None)
        assert latest in (None, TAG.encode())
        whole = {**reference[LAYOUT]}
        del whole["latest"]
        assert seen == whole if seen or latest else True
        recorded = sum(
            len(json.loads(files.read(stat.name))["records"])
            for stat in files.list(".ucpstore/done")
        )
        report = convert(source, files)
        assert report.tasks_done == (0 if report.already_committed else tasks - recorded)
        assert contents(folder) == reference[LAYOUT]
        require_tidy(folder)
        if finished:
            break
    assert step > 2 * tasks


@pytest.fixture
def moved(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversion that died between the move and ``latest``."""

    def dies(self: DeepSpeedTarget, records: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(DeepSpeedTarget, "_reveal", dies)
        with pytest.raises(Killed):
            convert(source, LocalFiles(str(tmp_path / "c")))
    assert (tmp_path / "c" / TAG).is_dir()
    return tmp_path / "c"


def test_a_file_that_was_lost_after_the_move_is_written_again(
    source: Source, reference: dict[Layout, dict[str, bytes]], moved: Path
) -> None:
    victim = next((moved / TAG).iterdir())
    victim.unlink()
    report = convert(source, LocalFiles(str(moved)))
    assert (report.tasks_done, report.committed) == (1, True)
    assert contents(moved) == reference[LAYOUT]
    require_tidy(moved)


def test_a_folder_that_was_lost_after_the_move_is_written_again(
    source: Source, reference: dict[Layout, dict[str, bytes]], moved: Path
) -> None:
    shutil.rmtree(moved / TAG)
    assert convert(source, LocalFiles(str(moved))).committed
    assert contents(moved) == reference[LAYOUT]


def test_a_file_that_was_damaged_after_the_move_is_not_replaced_unasked(
    source: Source, reference: dict[Layout, dict[str, bytes]], moved: Path
) -> None:
    victim = next((moved / TAG).iterdir())
    damaged = bytes(victim.stat().st_size)
    victim.write_bytes(damaged)
    for _ in range(2):
        with pytest.raises(IntegrityError, match=victim.name) as caught:
            convert(source, LocalFiles(str(moved)))
        assert caught.value.kind is Kind.LOST_OBJECT
        assert "Delete" in caught.value.hint
        assert victim.read_bytes() == damaged
        assert not (moved / "latest").exists()
    victim.unlink()
    assert convert(source, LocalFiles(str(moved))).committed
    assert contents(moved) == reference[LAYOUT]


def test_a_strange_file_in_the_folder_is_not_committed(source: Source, moved: Path) -> None:
    """`zero_to_fp32` would take it for a rank's."""
    stray = moved / TAG / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
    stray.write_bytes(b"precious")
    with pytest.raises(AlreadyExistsError, match="rank_3_mp"):
        convert(source, LocalFiles(str(moved)))
    assert not (moved / "latest").exists()
    assert stray.read_bytes() == b"precious"
    stray.unlink()
    assert convert(source, LocalFiles(str(moved))).committed


# ------------------------------------------------------------------- races


class JitteryFiles:
    """Storage whose effects take random times, so that racing writers meet everywhere."""

    is_local = True

    def __init__(self, folder: Path, seed: int) -> None:
        self._files = LocalFiles(str(folder))
        self._random = random.Random(seed)
        self.url = self._files.url

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        if name not in {"create", "write", "sync", "delete", "move", "list", "stat"}:
            return found

        def late(*arguments: Any, **options: Any) -> Any:
            time.sleep(self._random.choice((0, 0, 0.0005, 0.003)))
            return found(*arguments, **options)

        return late

    def sink(self, name: str, nbytes: int, **keywords: Any) -> Sink:
        time.sleep(self._random.choice((0, 0, 0.0005, 0.003)))
        return self._files.sink(name, nbytes, **keywords)


def race(acts: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results or errors of what starts at once."""
    start, results = threading.Barrier(len(acts)), [None] * len(acts)

    def work(index: int) -> None:
        start.wait()
        try:
            results[index] = acts[index]()
        except Exception as error:  # looked at by the test
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("seed", range(12))
def test_writers_of_one_plan_end_well(
    source: Source, reference: dict[Layout, dict[str, bytes]], tmp_path: Path, seed: int
) -> None:
    files = [JitteryFiles(tmp_path / "c", 10 * seed + i) for i in range(3)]
    reports = race([lambda own=own: convert(source, own) for own in files])
    assert [getattr(report, "committed", report) for report in reports] == [True] * 3
    assert contents(tmp_path / "c") == reference[LAYOUT]


@pytest.mark.parametrize("seed", range(6))
def test_of_two_plans_one_is_refused(
    source: Source, reference: dict[Layout, dict[str, bytes]], tmp_path: Path, seed: int
) -> None:
    layouts = [LAYOUT, OTHER]
    acts = [
        lambda layout=layout: convert(source, JitteryFiles(tmp_path / "c", seed), layout)
        for layout in layouts
    ]
    results = race(acts)
    (winner,) = [i for i, result in enumerate(results) if isinstance(result, Report)]
    loser = results[1 - winner]
    assert isinstance(loser, AlreadyExistsError), loser
    assert loser.kind in (Kind.CLAIMED, Kind.ALREADY_EXISTS)
    assert contents(tmp_path / "c") == reference[layouts[winner]]
    require_tidy(tmp_path / "c")


@pytest.mark.parametrize("same", [True, False], ids=["same plan", "another plan"])
def test_two_processes(
    reference: dict[Layout, dict[str, bytes]], tmp_path: Path, same: bool
) -> None:
    layouts = ["dp=3,zero_stage=3", "dp=3,zero_stage=3" if same else "dp=2,zero_stage=3"]
    path = str(deepspeed_run("s2-bf16-dp2").path)
    command = [sys.executable, "-m", "ucpstore", "convert", path, str(tmp_path / "c")]
    processes = [
        subprocess.Popen(
            [*command, "--to", "deepspeed", "--layout", layout], stderr=subprocess.PIPE, text=True
        )
        for layout in layouts
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    codes = [process.returncode for process in processes]
    if same:
        assert codes == [0, 0], errors
        assert contents(tmp_path / "c") == reference[LAYOUT]
        return
    assert sorted(codes) == [0, 3], errors
    assert "another plan" in errors[codes.index(3)]
    assert contents(tmp_path / "c") == reference[(LAYOUT, OTHER)[codes.index(0)]]


class Interrupting:
    """A source that does something once, in the middle of a read, as soon as ``files`` were written."""

    def __init__(
        self, source: Source, act: Callable[[], Any], folder: Path, *, files: int = 1
    ) -> None:
        self._source, self._act, self._folder, self._files = source, act, folder, files
        self._done = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, *arguments: Any, **options: Any) -> None:
        written = list((self._folder / ".ucpstore" / "files").rglob("*.pt"))
        if not self._done and len(written) >= self._files:
            self._done = True
            self._act()
        self._source.read(*arguments, **options)


def test_abandoned_while_it_runs(
    source: Source, reference: dict[Layout, dict[str, bytes]], tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    freed: list[str | None] = []
    live: Any = Interrupting(source, lambda: freed.append(ucpstore.abandon(folder)), folder)
    with pytest.raises(AlreadyExistsError, match="no longer belongs") as caught:
        convert(live, LocalFiles(str(folder)))
    assert caught.value.kind is Kind.ABANDONED
    assert freed[0] is not None
    require_invisible(folder)
    assert convert(source, LocalFiles(str(folder)), OTHER).tasks_resumed == 0
    assert contents(folder) == reference[OTHER]
    require_tidy(folder)


def test_a_writer_that_slept_through_the_abandon_changes_nothing(
    source: Source, reference: dict[Layout, dict[str, bytes]], tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    zombie, plan = job(source, LocalFiles(str(folder)))
    assert zombie.begin(plan.digest)
    assert ucpstore.abandon(folder) == plan.digest
    assert convert(source, LocalFiles(str(folder)), OTHER).committed
    zombie._log.check = lambda **_: None  # type: ignore[method-assign]
    zombie.write(zombie.tasks()[0], source)
    assert contents(folder) == reference[OTHER]
    del zombie._log.check
    for act in (
        lambda: zombie.write(zombie.tasks()[1], source),
        lambda: zombie.publish([Record(0, 1, "t", 1)]),
        lambda: zombie.commit({}),
    ):
        with pytest.raises(AlreadyExistsError):
            act()
    assert contents(folder) == reference[OTHER]


@pytest.mark.parametrize("seed", range(8))
def test_abandon_and_commit_race_for_the_whole(
    source: Source, reference: dict[Layout, dict[str, bytes]], tmp_path: Path, seed: int
) -> None:
    folder = tmp_path / "c"
    target = written(source, JitteryFiles(folder, seed))
    results = race([lambda: target.commit(target.records()), lambda: ucpstore.abandon(folder)])
    if results[0] is None:
        assert contents(folder) == reference[LAYOUT]
        assert results[1] is None or isinstance(results[1], AlreadyExistsError)
        return
    assert isinstance(results[0], AlreadyExistsError)
    assert results[0].kind is Kind.ABANDONED
    require_invisible(folder)
    assert convert(source, LocalFiles(str(folder)), OTHER).committed
    assert contents(folder) == reference[OTHER]


# ------------------------------------------------------------------- other people's checkpoints


@pytest.mark.parametrize("tag", [TAG, "global_step9"])
def test_a_run_of_deepspeed_is_neither_replaced_nor_added_to(
    source: Source, tmp_path: Path, tag: str
) -> None:
    run = copy_run(deepspeed_run("s2-bf16-dp2"), tmp_path)
    if tag != TAG:
        (run.path / TAG).rename(run.path / tag)
        (run.path / "latest").write_text(tag)
    before = contents(run.path)
    with pytest.raises(AlreadyExistsError, match=f"`latest` that names '{tag}'") as caught:
        convert(source, LocalFiles(str(run.path)))
    assert "another destination" in caught.value.hint
    (run.path / "latest").unlink()
    with pytest.raises(AlreadyExistsError, match=tag):
        convert(source, LocalFiles(str(run.path)))
    assert not (run.path / ".ucpstore").exists()
    (run.path / "latest").write_text(tag)
    assert contents(run.path) == before


def test_a_converted_checkpoint_is_not_replaced_and_can_be_moved_into_a_run(
    source: Source, reference: dict[Layout, dict[str, bytes]], tmp_path: Path
) -> None:
    """What the hint says."""
    convert(source, LocalFiles(str(tmp_path / "c")))
    with pytest.raises(AlreadyExistsError, match="another plan"):
        convert(source, LocalFiles(str(tmp_path / "c")), OTHER)
    assert contents(tmp_path / "c") == reference[LAYOUT]
    run = copy_run(deepspeed_run("s2-bf16-dp2"), tmp_path)
    (run.path / TAG).rename(run.path / "global_step2")
    (tmp_path / "c" / TAG).rename(run.path / TAG)
    (run.path / "latest").write_text(TAG)
    assert ucpstore.open(run.path).source.parallelism["dp"] == 3
    assert ucpstore.open(run.path, tag="global_step2").source.parallelism["dp"] == 2


def test_training_goes_on_in_a_converted_folder(source: Source, tmp_path: Path) -> None:
    """It is committed, whatever `latest` names later."""
    folder = tmp_path / "c"
    convert(source, LocalFiles(str(folder)))
    shutil.copytree(folder / TAG, folder / "global_step4")
    (folder / "latest").write_text("global_step4")
    before = contents(folder)
    assert convert(source, LocalFiles(str(folder))).already_committed
    assert ucpstore.abandon(folder) is None
    assert contents(folder) == before


@pytest.mark.parametrize("tag", [TAG, "global_step9"])
@pytest.mark.parametrize("latest", [True, False], ids=["saved", "still being saved"])
@pytest.mark.parametrize("late", [False, True], ids=["while files are written", "under the seal"])
def test_a_checkpoint_that_is_saved_meanwhile_is_not_replaced(
    source: Source,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tag: str,
    late: bool,
    latest: bool,
) -> None:
    """DeepSpeed writes the folder's files one by one, and `latest` last."""
    folder = tmp_path / "c"
    saved = {f"{tag}/mp_rank_00_model_states.pt": b"precious"}
    if latest:
        saved["latest"] = tag.encode()

    def save() -> None:
        (folder / tag).mkdir()
        for name, data in saved.items():
            (folder / name).write_bytes(data)

    live: Any = source
    if late:
        settle = DeepSpeedTarget._settle

        def settle_late(self: DeepSpeedTarget) -> None:
            save()
            settle(self)

        monkeypatch.setattr(DeepSpeedTarget, "_settle", settle_late)
    else:
        live = Interrupting(source, save, folder)
    if not latest and tag != TAG:  # it is in nobody's way
        assert convert(live, LocalFiles(str(folder))).committed
        assert {name: contents(folder)[name] for name in saved} == saved
        return
    with pytest.raises(AlreadyExistsError, match="belongs to something else"):
        convert(live, LocalFiles(str(folder)))
    found = contents(folder)
    if not late or tag == TAG:
        assert found == saved
    if not late:
        assert ucpstore.abandon(folder) is not None
    assert {name: found[name] for name in saved} == saved


def test_a_tag_that_was_taken_away_is_made_again(
    source: Source, reference: dict[Layout, dict[str, bytes]], tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    for _ in range(2):
        assert convert(source, LocalFiles(str(folder))).tasks_done == 6
        assert contents(folder) == reference[LAYOUT]
        shutil.rmtree(folder / TAG)
    (folder / "latest").write_text("global_step4")
    with pytest.raises(AlreadyExistsError, match="global_step4"):
        convert(source, LocalFiles(str(folder)))
    assert contents(folder) == {"latest": b"global_step4"}


# ------------------------------------------------------------------- what dead plans leave


def test_the_space_of_a_dead_plan_is_freed_before_anything_is_written(
    source: Source, reference: dict[Layout, dict[str, bytes]], tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    files = LocalFiles(str(folder))
    written(source, files)
    unfinished = files.sink(".ucpstore/files/x/y", 10)
    unfinished.write([b"12345"])
    with pytest.raises(AlreadyExistsError, match="claimed"):
        convert(source, files, OTHER)
    assert len(list((folder / ".ucpstore/files").rglob("*.pt"))) == 6
    assert ucpstore.abandon(folder)
    target, plan = job(source, files, OTHER)
    stored = target.stored_nbytes()
    assert stored > 0
    assert target.begin(plan.digest)
    assert not list((folder / ".ucpstore/files").rglob("*.pt"))
    assert convert(source, files, OTHER).committed
    assert contents(folder) == reference[OTHER]
    require_tidy(folder)


def test_the_same_plan_goes_on_with_what_it_left_when_it_was_abandoned(
    source: Source, reference: dict[Layout, dict[str, bytes]], tmp_path: Path
) -> None:
    files = LocalFiles(str(tmp_path / "c"))
    written(source, files)
    assert ucpstore.abandon(tmp_path / "c")
    report = convert(source, files)
    assert (report.tasks_done, report.tasks_resumed) == (0, 6)
    assert contents(tmp_path / "c") == reference[LAYOUT]


def test_a_store_is_made_where_a_native_plan_was_abandoned(source: Source, tmp_path: Path) -> None:
    written(source, LocalFiles(str(tmp_path / "c")))
    assert ucpstore.abandon(tmp_path / "c")
    path = deepspeed_run("s2-bf16-dp2").path
    for name in ("c", "d"):
        assert ucpstore.convert(path, tmp_path / name).committed
    assert contents(tmp_path / "c") == contents(tmp_path / "d")
    require_tidy(tmp_path / "c")


def test_files_that_were_moved_count_as_stored(source: Source, moved: Path) -> None:
    """Else a full disk would refuse a run that has nothing left to write."""
    target, _ = job(source, LocalFiles(str(moved)))
    assert target.stored_nbytes() == sum(task.nbytes for task in target.tasks())


# ------------------------------------------------------------------- full disks


class FullDisk:
    """A disk that holds so many bytes."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._folder, self._nbytes = folder, nbytes
        self._writev = os.writev

    def __call__(self, fd: int, buffers: Any) -> int:
        used = 0
        for parent, _, names in os.walk(self._folder):
            for name in names:
                with suppress(FileNotFoundError):
                    used += os.stat(os.path.join(parent, name)).st_size
        if used >= self._nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._writev(fd, [memoryview(buffers[0])[: self._nbytes - used]])


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 0.98, 1.0])
def test_a_full_disk_is_one_error_and_the_next_run_goes_on(
    source: Source,
    reference: dict[Layout, dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
) -> None:
    folder = tmp_path / "c"
    total = sum(map(len, reference[LAYOUT].values()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", FullDisk(folder, int(total * share)))
        with pytest.raises(StorageError, match="cannot") as caught:
            convert(source, LocalFiles(str(folder)))
        assert caught.value.kind is Kind.NO_SPACE
        assert not caught.value.retryable
        assert "Free space" in caught.value.hint
    assert "latest" not in contents(folder)
    assert not list(folder.glob(".ucpstore/tmp/*")), "half a file keeps the disk full"
    report = convert(source, LocalFiles(str(folder)))
    assert report.committed
    assert report.tasks_resumed > 0 or share < 0.5
    assert contents(folder) == reference[LAYOUT]
    require_tidy(folder)


def test_a_disk_that_is_really_full(
    reference: dict[Layout, dict[str, bytes]], tmp_path: Path
) -> None:
    script = """
set -u
mkdir -p "$1"
mount -t tmpfs -o size="$2" none "$1" || exit 77
"$3" -m ucpstore convert "$4" "$1/c" --to deepspeed --layout dp=3,zero_stage=3 --threads 1 2>"$5/first"
echo $? >"$5/code"
ls "$1/c" >"$5/seen"
mount -o remount,size=1g "$1"
"$3" -m ucpstore convert "$4" "$1/c" --to deepspeed --layout dp=3,zero_stage=3 2>"$5/second"
echo $? >>"$5/code"
cp -r "$1/c" "$5/c"
"""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    # Enough for the bytes, as the look at free space before the work finds, but not for whole pages.
    size = str(sum(map(len, reference[LAYOUT].values())) + 4096)
    path = str(deepspeed_run("s2-bf16-dp2").path)
    arguments = [str(tmp_path / "disk"), size, sys.executable, path, str(tmp_path)]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *arguments], capture_output=True, check=False
    )
    if done.returncode != 0 and not (tmp_path / "code").exists():
        pytest.skip(f"cannot mount here: {done.stderr.decode()[-200:]}")
    first, second = (tmp_path / "code").read_text().split()
    message = (tmp_path / "first").read_text()
    assert first == "4", message
    assert "ENOSPC" in message
    assert "Free space there" in message
    assert "Traceback" not in message
    assert (tmp_path / "seen").read_text().split() == []
    assert second == "0", (tmp_path / "second").read_text()
    assert contents(tmp_path / "c") == reference[LAYOUT]


# ------------------------------------------------------------------- the source changes


@pytest.mark.parametrize("files", [0, 1, 5])
def test_a_source_that_changes_meanwhile(tmp_path: Path, files: int) -> None:
    run = copy_run(deepspeed_run("s2-bf16-dp2"), tmp_path)
    opened = DeepSpeedFormat().open(LocalFiles(str(run.path)))
    victim = next(run.tag_path.glob("*optim_states.pt"))

    def replace() -> None:
        copy = victim.with_suffix(".new")
        copy.write_bytes(victim.read_bytes())
        copy.replace(victim)

    folder = tmp_path / "c"
    live: Any = Interrupting(opened, replace, folder, files=files)
    with pytest.raises(IntegrityError, match=r"changed (while|since)") as caught:
        convert(live, LocalFiles(str(folder)))
    assert caught.value.kind is Kind.SOURCE_CHANGED
    require_invisible(folder)
    again = DeepSpeedFormat().open(LocalFiles(str(run.path)))
    with pytest.raises(AlreadyExistsError, match="claimed by another plan"):
        convert(again, LocalFiles(str(folder)))
    assert ucpstore.abandon(folder)
    assert convert(again, LocalFiles(str(folder))).tasks_resumed == 0
    require_tidy(folder)
