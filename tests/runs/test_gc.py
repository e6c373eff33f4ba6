"""Promise: a gc deletes what the policy says and nothing else, whoever saves, reads, or kills it meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucpstore
from tests.deepspeed_runs import deepspeed_run
from tests.runs.places import Place, commit, save
from tests.runs.test_steps import begin, states
from tests.schemas import validate
from tests.store.stores import contents, convert, make_target, small_source
from ucpstore.errors import AlreadyExistsError, IntegrityError, Kind, PlanError, UncommittedError
from ucpstore.runs.gc import Policy, Swept, parse_seconds

ROOT = Path(__file__).parents[2]


def gc(run: Place, **arguments: Any) -> Swept:
    found = ucpstore.gc(run.url, storage_options=run.options, **{"dry_run": False, **arguments})
    validate(found.to_json(), "gc")
    return found


def went(found: Swept) -> dict[str, str]:
    return {deletion.name: deletion.reason for deletion in found.deletions if deletion.done}


def age(folder: Path, seconds: float = 10 * 86400) -> None:
    """Make everything in ``folder`` older."""
    then = time.time() - seconds
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


@pytest.fixture
def local(place: Callable[[str], Place]) -> Place:
    return place("file").at("run")


def test_policy() -> None:
    steps = [100, 150, 200, 250, 300]
    assert Policy().keeps(steps) == set(steps)
    assert Policy(keep_last=2).keeps(steps) == {250, 300}
    assert Policy(keep_last=1, keep_every=100).keeps(steps) == {100, 200, 300}
    assert Policy(keep_every=1000).keeps(steps) == {300}  # the last one always stays
    assert Policy(keep_last=9).keeps(steps) == set(steps)
    assert Policy(keep_last=2).keeps([]) == set()
    for wrong in ({"keep_last": 0}, {"keep_every": -1}, {"keep_last": True}, {"grace": -1.0}):
        with pytest.raises(PlanError):
            Policy(**wrong)  # type: ignore[arg-type]
    assert [parse_seconds(text) for text in ("90s", "30m", "12h", "1d", 5)] == [
        90, 1800, 43200, 86400, 5,
    ]  # fmt: skip
    with pytest.raises(PlanError):
        parse_seconds("tomorrow")


def test_old_steps_go_and_the_others_stay_as_they_are(run: Place) -> None:
    for step in (100, 150, 200):
        save(run, step)
    before = {stat.name: stat.token for stat in run.files().list()}
    told = ucpstore.gc(run.url, keep_last=1, keep_every=100, storage_options=run.options)
    assert told.dry_run
    assert [(d.name, d.reason, d.done) for d in told.deletions] == [("step-00000150", "old", False)]
    assert {stat.name: stat.token for stat in run.files().list()} == before
    found = gc(run, keep_last=1, keep_every=100)
    assert went(found) == {"step-00000150": "old"}
    assert found.kept == ("step-00000100", "step-00000200")
    left = {stat.name: stat.token for stat in run.files().list()}
    assert {n: t for n, t in left.items() if "00000150" not in n} == {
        n: t for n, t in before.items() if "00000150" not in n
    }
    tombstone = [name for name in left if "00000150" in name]
    assert len(tombstone) == 1
    assert ".ucpstore/claims/" in tombstone[0]
    assert set(states(run)) == {"step-00000100", "step-00000200"}
    with pytest.raises(UncommittedError):
        ucpstore.open(run.at("step-00000150").url, storage_options=run.options)
    save(run, 150)  # the place is free again
    assert ucpstore.open(run.url, step=150, storage_options=run.options)
    assert went(gc(run, keep_last=1, keep_every=100)) == {"step-00000150": "old"}
    assert went(gc(run, grace=0)) == {"step-00000150": "tombstone"}
    assert run.files("step-00000150").list() == []
    assert gc(run, grace=0).deletions == ()


def test_attempts_go_after_a_grace_period(local: Place) -> None:
    save(local, 10)
    begin(local.files("step-00000020"))
    begin(local.files("step-00000030")).abandon()
    begin(local.files("step-00000040")).seal()
    assert gc(local).deletions == ()
    for step in (20, 30, 40):
        age(Path(local.url) / f"step-{step:08d}")
    newest = next((Path(local.url) / "step-00000020").rglob("c*"))
    os.utime(newest)  # somebody still writes there
    assert went(gc(local)) == {"step-00000030": "abandoned"}
    age(Path(local.url) / "step-00000020")
    assert went(gc(local)) == {"step-00000020": "unfinished"}
    assert set(states(local)) == {"step-00000010", "step-00000040"}


def test_clocks_of_hosts_do_not_matter(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(local.files("step-00000020"))
    real = time.time
    monkeypatch.setattr("ucpstore.runs.gc.time.time", lambda: real() + 30 * 86400)
    assert gc(local).deletions == ()


def test_superseded_attempts_and_pointers(local: Place) -> None:
    save(local, 10, number=1)
    save(local, 10, "-b", number=2)
    save(local, 20)
    assert gc(local, grace=0).deletions == ()  # nothing points elsewhere: somebody's own folder
    ucpstore.use_attempt(local.url, "step-00000010-b")
    assert gc(local).deletions == ()
    age(Path(local.url) / "step-00000010")
    assert went(gc(local)) == {"step-00000010": "superseded"}
    assert ucpstore.open(local.url, step=10).url.endswith("-b")
    assert went(gc(local, keep_last=1)) == {
        "step-00000010-b": "old",
        "step-00000010.json": "pointer",
    }
    assert set(states(local)) == {"step-00000020"}


def test_a_dropped_step_does_not_come_back_by_its_older_attempt(local: Place) -> None:
    save(local, 10, number=1)
    save(local, 10, "-b", number=2)
    save(local, 20)
    ucpstore.use_attempt(local.url, "step-00000010-b")
    assert went(gc(local, keep_last=1)) == {"step-00000010-b": "old"}
    with pytest.raises(ucpstore.UcpStoreError):
        ucpstore.open(local.url, step=10)
    assert set(went(gc(local, keep_last=1, grace=0)).values()) == {
        "superseded", "tombstone", "pointer",
    }  # fmt: skip


def test_only_what_is_ours_goes(local: Place, tmp_path: Path) -> None:
    root = Path(local.url)
    for step in (10, 20, 30):
        save(local, step)
    old = root / "step-00000010"
    (old / "readme.txt").write_text("mine")
    (old / "params" / "a" / "notes.json").write_text("mine")
    # Links lead to what others use.
    elsewhere = tmp_path / "elsewhere"
    commit(Place(str(elsewhere / "whole")).files(), 5)
    (root / "step-00000005").symlink_to(elsewhere / "whole")
    shutil.move(root / "step-00000020" / "params", elsewhere / "params")
    (root / "step-00000020" / "params").symlink_to(elsewhere / "params")
    shutil.copytree(deepspeed_run("s2-bf16-dp2").path, root, dirs_exist_ok=True)
    (root / "step-00000007").mkdir()
    (root / "step-00000007" / "zarr.json").write_text('{"zarr_format":3,"node_type":"group"}')
    outside = {p: p.read_bytes() for p in elsewhere.rglob("*") if p.is_file()}
    tags = {p: p.read_bytes() for p in root.rglob("*.pt")}
    found = gc(local, keep_last=1, grace=0)
    assert went(found) == {"step-00000010": "old", "step-00000020": "old"}
    assert {d.note for d in found.deletions} >= {"2 objects are not ours and stay"}
    assert (old / "readme.txt").read_text() == "mine"
    assert (old / "params" / "a" / "notes.json").read_text() == "mine"
    assert {p: p.read_bytes() for p in elsewhere.rglob("*") if p.is_file()} == outside
    assert tags
    assert {p: p.read_bytes() for p in root.rglob("*.pt")} == tags
    assert (root / "step-00000007" / "zarr.json").exists()


def test_stray_objects_of_a_checkpoint_that_stays(local: Place) -> None:
    save(local, 10)
    folder = Path(local.url) / "step-00000010"
    before = contents(local.files("step-00000010"))
    (folder / "params" / "z.weight" / "fp32" / "c.9.9").write_bytes(b"stray")
    (folder / "params" / "z.weight" / "fp32" / "mine").write_bytes(b"mine")
    (folder / ".ucpstore" / "tmp").mkdir(exist_ok=True)
    (folder / ".ucpstore" / "tmp" / "1-ab.part").write_bytes(b"unfinished")
    assert gc(local).deletions == ()
    age(folder)
    found = gc(local)
    assert [(d.reason, d.num_objects, d.nbytes) for d in found.deletions] == [("strays", 2, 15)]
    (folder / "params" / "z.weight" / "fp32" / "mine").unlink()
    assert contents(local.files("step-00000010")) == before
    assert not (folder / ".ucpstore" / "tmp").exists()


@pytest.mark.parametrize("kind", ["file", "memory", "s3"])
def test_a_reader_of_a_deleted_step_is_told(place: Callable[[str], Place], kind: str) -> None:
    run = place(kind).at("run")
    save(run, 10)
    save(run, 20)
    opened = ucpstore.open(run.url, step=10, storage_options=run.options)
    gc(run, keep_last=1)
    with pytest.raises(IntegrityError, match="was deleted after it was opened") as caught:
        opened["z.weight"].fp32[...]
    assert caught.value.kind == Kind.DELETED


def test_writers_are_fenced(local: Place) -> None:
    attempt = local.files("step-00000010")
    target, source = make_target(attempt), small_source()
    target.begin("sha256:1")
    target.publish([target.write(target.tasks()[0], source)])
    age(Path(attempt.url))
    assert went(gc(local)) == {"step-00000010": "unfinished"}
    with pytest.raises(AlreadyExistsError) as caught:
        target.write(target.tasks()[1], source)
    assert caught.value.kind == Kind.ABANDONED
    # A gc that died in the middle holds the place until another one ends it.
    save(local, 20)
    save(local, 30)
    claims = Path(local.url) / "step-00000020" / ".ucpstore" / "claims"
    number = len(list(claims.iterdir())) + 1
    claim = {"version": "1.0", "plan_digest": "deletion", "epoch": number, "sealed": False}
    (claims / f"{number:06d}.json").write_text(json.dumps(claim))
    (Path(local.url) / "step-00000020" / "zarr.json").unlink()
    assert states(local)["step-00000020"] == "deleting"
    with pytest.raises(AlreadyExistsError, match="being deleted"):
        save(local, 20)
    with pytest.raises(UncommittedError, match="being deleted"):
        ucpstore.open(local.url, step=20)
    assert went(gc(local)) == {"step-00000020": "deleting"}
    save(local, 20)


def test_racing_gcs(local: Place) -> None:
    for step in range(10, 90, 10):
        save(local, step)
    found, start = [], threading.Barrier(3)

    def race() -> None:
        start.wait()
        found.append(gc(local, keep_last=2))

    threads = [threading.Thread(target=race) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    gc(local, keep_last=2)
    assert set(states(local)) == {"step-00000070", "step-00000080"}
    for step in (70, 80):
        read_all(ucpstore.open(local.url, step=step))


def read_all(checkpoint: Any) -> bytes:
    return b"".join(
        np.ascontiguousarray(tensor[...]).tobytes()
        for parameter in checkpoint.values()
        for tensor in parameter.values()
    )


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_beside_a_saver_and_readers(place: Callable[[str], Place], kind: str) -> None:
    """Steps are saved, read and collected at once: readers see whole steps or errors, the last two stay."""
    run, stop, errors = place(kind).at("run"), threading.Event(), []
    save(run, 1)
    truth = {}
    for step in range(1, 13):
        other = place("memory")
        commit(other.files(), step)
        truth[step] = read_all(ucpstore.open(other.url))
    read: list[int] = []

    def watch(act: Callable[[], None]) -> threading.Thread:
        def loop() -> None:
            try:
                while not stop.is_set():
                    act()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    def reads() -> None:
        try:
            opened = ucpstore.open(run.url)
            found = read_all(opened)
        except (IntegrityError, ucpstore.UcpStoreError) as error:
            if isinstance(error, IntegrityError) and error.kind != Kind.DELETED:
                raise
            return
        step = int(opened.url.rpartition("-")[2])
        assert found == truth[step]
        read.append(step)

    threads = [watch(reads), watch(reads), watch(lambda: gc(run, keep_last=2) and None)]
    try:
        for step in range(2, 13):
            save(run, step)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert read
    gc(run, keep_last=2)
    assert set(states(run)) == {"step-00000011", "step-00000012"}
    for step in (11, 12):
        assert read_all(ucpstore.open(run.url, step=step)) == truth[step]


def test_killed_anywhere_and_run_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runs.kill_gc", str(tmp_path), "40", "5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(trials) == 40
    assert sum(trial["killed"] for trial in trials) == 40
    assert {trial["opens"] for trial in trials} == {False, True}


def test_converting_again_into_a_place_that_was_deleted(local: Place) -> None:
    save(local, 10)
    save(local, 20)
    before = contents(local.files("step-00000010"))
    gc(local, keep_last=1)
    source = small_source()
    assert convert(make_target(local.files("step-00000010"), source), source)
    assert set(contents(local.files("step-00000010"))) == set(before)
