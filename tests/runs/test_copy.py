"""Promise: a copy has the bytes of its source, or it is not there and an error names what is wrong."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

import ucpstore
from tests.deepspeed_runs import deepspeed_run
from tests.fakes import CrashingFiles, Killed
from tests.runs.places import Place, commit, commit_planned
from tests.servers import S3Server
from tests.store.stores import contents, make_target, small_source
from ucpstore import moving
from ucpstore.engine.run import Workers, run
from ucpstore.engine.worker import Settings
from ucpstore.errors import (
    AlreadyExistsError,
    IntegrityError,
    Kind,
    PlanError,
    UncommittedError,
    UnrecognizedSourceError,
    UnsupportedSourceError,
)
from ucpstore.io import open_files
from ucpstore.io.rate import RateLimit
from ucpstore.store.copying import CopyTarget
from ucpstore.store.source import StoreSource

KINDS = ("file", "memory", "s3")
KEY = "params/z.weight/fp32/c.1.2"

Places = Callable[[str], Place]


def copy(source: Place, dest: Place, **arguments: Any) -> Any:
    return ucpstore.copy(
        source.url,
        dest.url,
        source_options=source.options,
        dest_options=dest.options,
        **arguments,
    )


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("source_kind", KINDS)
def test_names_and_bytes_are_those_of_the_source(place: Places, source_kind: str, to: str) -> None:
    source, dest = place(source_kind).at("run/step-00000007"), place(to).at("copy")
    commit(source.files())
    report = copy(source, dest)
    assert report.committed
    assert not report.already_committed
    assert report.tasks_done == report.tasks == len(make_target(source.files()).tasks())
    assert contents(dest.files()) == contents(source.files())
    found = ucpstore.diff(
        source.url, dest.url, left_options=source.options, right_options=dest.options
    )
    assert found.equal
    again = copy(source, dest)
    assert again.already_committed
    assert again.tasks_done == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_stands_every_check(place: Places, kind: str) -> None:
    source, dest = place("file").at("a"), place(kind).at("b")
    commit_planned(source.files())
    copy(source, dest)
    found = ucpstore.verify(
        dest.url, against=source.url, storage_options=dest.options, against_options={}
    )
    assert found.ok, found.summary()
    assert found.digests == found.states
    assert ucpstore.verify(dest.url, quick=True, storage_options=dest.options).ok


def test_an_object_is_one_get_and_one_put_between_servers(place: Places, server: S3Server) -> None:
    source, dest = place("s3").at("a"), place("s3").at("b")
    commit(source.files())
    keys = [task.key for task in make_target(source.files()).tasks()]
    server.forget_requests()
    copy(source, dest, server_side=False)
    gets = [unquote(request.path) for request in server.requests("GET")]
    puts = [unquote(request.path) for request in server.requests("PUT")]
    for key in keys:
        assert [path.endswith(f"/a/{key}") for path in gets].count(True) == 1
        assert [path.endswith(f"/b/{key}") for path in puts].count(True) == 1
        assert not any(path.endswith(f"/b/{key}") for path in gets)
    assert puts[-1].endswith("/b/zarr.json")


def test_inside_a_server_nothing_is_uploaded_and_what_arrived_is_read(
    place: Places, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, dest = place("s3").at("a"), place("s3").at("b")
    commit(source.files())
    keys = [task.key for task in make_target(source.files()).tasks()]
    sinks: list[str] = []
    sink = type(dest.files()).sink

    def watched(self: Any, name: str, nbytes: int) -> Any:
        sinks.append(name)
        return sink(self, name, nbytes)

    monkeypatch.setattr(type(dest.files()), "sink", watched)
    server.forget_requests()
    copy(source, dest)
    gets = [unquote(request.path) for request in server.requests("GET")]
    for key in keys:
        assert key not in sinks
        assert not any(path.endswith(f"/a/{key}") for path in gets)
        assert [path.endswith(f"/b/{key}") for path in gets].count(True) == 1
    server.forget_requests()
    trusted = place("s3").at("c")
    copy(source, trusted, check=False)
    gets = [unquote(request.path) for request in server.requests("GET")]
    assert not any(path.endswith(f"/{key}") for path in gets for key in keys)
    assert contents(trusted.files()) == contents(source.files())


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "first byte": lambda data: flip(data, 0),
    "checksum of the first chunk": lambda data: flip(data, 3 * 3 * 4 + 1),
    "index": lambda data: flip(data, len(data) - 20),
    "last byte": lambda data: flip(data, len(data) - 1),
    "shorter": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
}


@pytest.mark.parametrize(
    ("damage", "kind", "server_side"),
    [
        *((damage, "file", False) for damage in [*DAMAGE, "lost"]),
        ("last byte", "s3", False),
        ("longer", "s3", True),
    ],
)
def test_damage_is_named_and_never_copied(
    place: Places, kind: str, damage: str, server_side: bool
) -> None:
    source, dest = place(kind).at("a"), place(kind).at("b")
    commit(source.files())
    data = source.files().read(KEY)
    if damage == "lost":
        source.files().delete([KEY])
    else:
        source.files().write(KEY, DAMAGE[damage](data))
    with pytest.raises(IntegrityError) as caught:
        copy(source, dest, server_side=server_side)
    assert caught.value.context["objects"] == [KEY]
    assert KEY in str(caught.value)
    assert dest.files().stat("zarr.json") is None
    with pytest.raises((UncommittedError, UnrecognizedSourceError, ucpstore.UcpStoreError)):
        ucpstore.open(dest.url, format="ucpstore", storage_options=dest.options)
    source.files().write(KEY, data)  # restored: the same command ends it
    assert copy(source, dest, server_side=server_side).committed
    assert contents(dest.files()) == contents(source.files())


def test_objects_that_vanish_while_they_are_copied_are_named(
    place: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in KINDS:
        source, dest = place(kind).at("a"), place(kind).at("b")
        commit(source.files())
        monkeypatch.setattr(StoreSource, "require_objects", lambda self: None)
        source.files().delete([KEY])
        with pytest.raises(IntegrityError) as caught:
            copy(source, dest)
        assert caught.value.kind == Kind.LOST_OBJECT
        assert caught.value.context["objects"] == [KEY]


def test_good_objects_in_the_wrong_place_are_found_by_the_digests(place: Places) -> None:
    source, dest = place("file").at("a"), place("file").at("b")
    commit(source.files())
    one, other = "params/z.weight/fp32/c.0.0", "params/z.weight/fp32/c.0.1"
    first, second = source.files().read(one), source.files().read(other)
    assert len(first) == len(second)
    source.files().write(one, second)
    source.files().write(other, first)
    with pytest.raises(IntegrityError) as caught:
        copy(source, dest)
    assert "params/z.weight/fp32" in str(caught.value)
    assert dest.files().stat("zarr.json") is None


def test_metadata_is_written_anew_from_the_root(place: Places) -> None:
    source, dest = place("file").at("a"), place("file").at("b")
    commit(source.files())
    before = contents(source.files())
    source.files().write("params/zarr.json", b"damaged")
    copy(source, dest)
    assert contents(dest.files()) == before


def test_a_damaged_root_is_refused(place: Places) -> None:
    source, dest = place("file").at("a"), place("file").at("b")
    commit(source.files())
    root = source.files().read("zarr.json")
    source.files().write("zarr.json", root.replace(b'"shape":[13,22]', b'"shape":[22,13]', 1))
    with pytest.raises(IntegrityError):
        copy(source, dest)
    assert dest.files().list() == []


def test_what_cannot_be_copied(place: Places, tmp_path: Path) -> None:
    dest = place("file").at("b")
    framework = deepspeed_run("s2-bf16-dp2").path
    with pytest.raises(UnsupportedSourceError, match="Convert it"):
        ucpstore.copy(framework, dest.url)
    with pytest.raises(UnsupportedSourceError, match="Convert it"):
        ucpstore.copy(tmp_path / "nothing", dest.url)
    half = place("file").at("half")
    target, source = make_target(half.files()), small_source()
    target.begin("sha256:1")
    target.publish([target.write(target.tasks()[0], source)])
    with pytest.raises(UncommittedError):
        copy(half, dest)
    with pytest.raises(ucpstore.UcpStoreError, match="not a run"):
        copy(half, dest, tag="7")
    assert dest.files().list() == []


def test_destinations_that_are_refused(place: Places) -> None:
    source = place("file").at("a")
    commit(source.files())
    with pytest.raises(PlanError, match="inside the source"):
        copy(source, source.at("b"))
    foreign = place("file").at("foreign")
    foreign.files().write("mine.txt", b"x")
    with pytest.raises(AlreadyExistsError, match="not empty"):
        copy(source, foreign)
    assert [stat.name for stat in foreign.files().list()] == ["mine.txt"]
    other = place("file").at("other")
    commit(other.files(), 1)
    before = contents(other.files())
    with pytest.raises(AlreadyExistsError, match="another committed checkpoint"):
        copy(source, other)
    assert contents(other.files()) == before
    claimed = place("file").at("claimed")
    make_target(claimed.files()).begin("sha256:1")
    with pytest.raises(AlreadyExistsError, match="claimed by another plan"):
        copy(source, claimed)
    with pytest.raises(PlanError, match="memory limit"):
        copy(source, place("file"), memory_limit=10)
    with pytest.raises(PlanError, match="max_rate"):
        copy(source, place("file"), max_rate=0)


def test_two_sources_of_the_same_content_are_one_copy(place: Places) -> None:
    source, mirror, dest = place("file").at("a"), place("memory").at("a"), place("file").at("b")
    commit(source.files())
    copy(source, mirror)
    opened = moving._Request(
        source=source.url,
        dest=dest.url,
        rate=None,
        server_side=True,
        check=True,
        source_options={},
        dest_options={},
    ).open()
    plan, origin, target = opened
    target.begin(plan.digest)
    target.publish([target.write(task, origin) for task in list(target.tasks())[:20]])
    report = copy(mirror, dest)
    assert report.committed
    assert report.tasks_resumed == 20
    assert contents(dest.files()) == contents(source.files())


def test_worker_processes_and_shares(place: Places, tmp_path: Path) -> None:
    source, dest = place("file").at("a"), place("file").at("b")
    commit(source.files())
    assert copy(source, dest, workers=2).committed
    assert contents(dest.files()) == contents(source.files())
    shared = place("file").at("shared")
    assert not copy(source, shared, share=(0, 2)).committed
    assert copy(source, shared, share=(1, 2)).committed
    assert contents(shared.files()) == contents(source.files())


@pytest.mark.parametrize("kind", KINDS)
def test_racing_copies_co_operate(place: Places, kind: str) -> None:
    source, dest = place(kind).at("a"), place(kind).at("b")
    commit(source.files())
    reports, start = [], threading.Barrier(3)

    def race() -> None:
        start.wait()
        reports.append(copy(source, dest, threads=2))

    threads = [threading.Thread(target=race) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.committed for report in reports] == [True] * 3
    assert contents(dest.files()) == contents(source.files())


def _race(source: str, dest: str) -> bool:
    return bool(ucpstore.copy(source, dest, threads=1).committed)


def test_racing_processes_co_operate(place: Places) -> None:
    source, dest = place("file").at("a"), place("file").at("b")
    commit(source.files())
    with ProcessPoolExecutor(3, mp_context=get_context("forkserver")) as pool:
        runs = [pool.submit(_race, source.url, dest.url) for _ in range(3)]
        assert [run.result() for run in runs] == [True] * 3
    assert contents(dest.files()) == contents(source.files())


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_copy_that_dies_anywhere_is_continued(place: Places, kind: str) -> None:
    """Dies around an effect on the destination: it is not there, or it is whole; then it is finished."""
    source = place(kind).at("a")
    commit(source.files())
    expected, rng, resumed = contents(source.files()), random.Random(3), 0
    for trial in range(20 if kind == "memory" else 2):
        dest = place(kind).at("b")
        dying: Any = CrashingFiles(dest.files(), rng.randint(1, 75), after=bool(trial % 2))
        origin = StoreSource(source.files())
        request = moving._Request(
            source=source.url,
            dest=dest.url,
            rate=None,
            server_side=False,
            check=True,
            source_options=source.options,
            dest_options=dest.options,
        )
        plan = request.open()[0]
        target = CopyTarget(dying, origin, server_side=False)
        workers = Workers(threads=1)
        settings = Settings(threads=1, publish_nbytes=1500)
        with pytest.raises(Killed):
            run(
                (origin, target),
                plan,
                workers=workers,
                settings=settings,
                opener=lambda: (_ for _ in ()).throw(AssertionError),
            )
        if dest.files().stat("zarr.json") is not None:
            assert contents(dest.files()) == expected
        report = copy(source, dest, server_side=False)
        assert report.committed
        resumed += report.tasks_resumed
        assert contents(dest.files()) == expected
    assert resumed


def test_rate_limit_spreads_bytes_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("ucpstore.io.rate.time.monotonic", lambda: now)
    limit = RateLimit(1000)
    assert limit.reserve(500) == 0
    assert limit.reserve(1000) == pytest.approx(0.5)
    assert limit.reserve(1) == pytest.approx(1.5)
    now = 200.0  # what was not used is not saved up
    assert limit.reserve(2000) == 0
    assert limit.reserve(1) == pytest.approx(2.0)


def test_copy_keeps_to_its_rate(place: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("ucpstore.io.rate.time.monotonic", lambda: now[0])
    monkeypatch.setattr("ucpstore.io.rate.time.sleep", sleep)
    source, dest = place("memory").at("a"), place("memory").at("b")
    commit(source.files())
    nbytes = sum(task.nbytes for task in make_target(source.files()).tasks())
    copy(source, dest, max_rate=1000, threads=1)
    assert (nbytes - 2000) / 1000 < sum(slept) <= nbytes / 1000
    assert contents(dest.files()) == contents(source.files())


def test_a_step_of_a_run_is_copied(place: Places) -> None:
    run, dest = place("memory").at("run"), place("memory")
    for step in (10, 20):
        commit(run.files(f"step-{step:08d}"), step)
    copy(run, dest.at("latest"))
    assert contents(dest.files("latest")) == contents(run.files("step-00000020"))
    copy(run, dest.at("first"), tag="10")
    assert contents(dest.files("first")) == contents(run.files("step-00000010"))


def test_bits_survive(place: Places) -> None:
    source, dest = place("file").at("a"), place("memory").at("b")
    commit(source.files())
    copy(source, dest)
    for fqn, parameter in ucpstore.open(source.url).items():
        for name, tensor in parameter.items():
            left, right = tensor[...], ucpstore.open(dest.url)[fqn][name][...]
            assert np.array_equal(
                np.ascontiguousarray(left).view(np.uint8),
                np.ascontiguousarray(right).view(np.uint8),
            )
    assert open_files(dest.url).read("zarr.json") == source.files().read("zarr.json")
