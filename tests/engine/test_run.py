"""The engine over a real Zarr target: executors, retries, limits, resuming, sharing, racing."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes import ArraySource
from tests.schemas import validate
from ucpstore.contracts import Arrays, Record, Source, SourceFile, Task
from ucpstore.engine.plan import Plan, make_plan
from ucpstore.engine.run import Report, Workers, run
from ucpstore.engine.worker import Settings
from ucpstore.errors import (
    AlreadyExistsError,
    IntegrityError,
    Kind,
    PlanError,
    StorageError,
    UncommittedError,
    WorkerError,
)
from ucpstore.events import (
    Committed,
    Event,
    Published,
    Resumed,
    Started,
    TaskDone,
    TaskRetried,
    to_json,
)
from ucpstore.io.local import LocalFiles
from ucpstore.layout.region import Region
from ucpstore.store.grid import plan_arrays
from ucpstore.store.source import StoreSource
from ucpstore.store.target import ZarrTarget

SHAPES = {"a.weight": (300, 700), "b.weight": (1000, 513), "c.bias": (77,), "d.scale": ()}
STATES = ("fp32", "adam_m", "adam_v")


def make_source() -> ArraySource:
    rng = np.random.default_rng(3)
    return ArraySource(
        {
            fqn: {state: rng.standard_normal(shape).astype(np.float32) for state in STATES}
            for fqn, shape in SHAPES.items()
        },
        {"counters": {"global_steps": 5}},
    )


def open_job(folder: str, source: Source | None = None) -> tuple[Plan, Source, ZarrTarget]:
    source = source or make_source()
    arrays = plan_arrays(source)
    target = ZarrTarget(LocalFiles(folder), arrays, source=source)
    members = [member for array in arrays for member in array.members]
    return make_plan(source, target, states=members), source, target


def reopen(folder: str) -> tuple[str, Source, ZarrTarget]:
    plan, source, target = open_job(folder)
    return plan.digest, source, target


def convert(
    folder: Path,
    source: Source | None = None,
    *,
    workers: Workers | None = None,
    settings: Settings | None = None,
    emit: Callable[[Event], None] | None = None,
    target: ZarrTarget | None = None,
) -> Report:
    plan, opened, made = open_job(str(folder), source)
    return run(
        (opened, target or made),
        plan,
        workers=workers or Workers(threads=2),
        opener=partial(reopen, str(folder)),
        settings=settings or Settings(threads=2, retry_delay=0.001),
        emit=emit,
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".ucpstore" not in path.parts
    }


class Serial(Executor):
    """The smallest executor there is."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*pickle.loads(pickle.dumps(args)), **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("reference") / "store"
    convert(folder, workers=Workers(threads=1))
    return tree(folder)


def test_store_holds_the_source(tmp_path: Path) -> None:
    source = make_source()
    report = convert(tmp_path / "s", source)
    assert report.committed
    assert report.tasks == report.tasks_done == len(SHAPES) * len(STATES)
    store = StoreSource(LocalFiles(str(tmp_path / "s")))
    for fqn, shape in SHAPES.items():
        for state in STATES:
            expected, found = np.empty(shape, np.float32), np.empty(shape, np.float32)
            source.read(fqn, state, Region.full(shape), expected)
            store.read(fqn, state, Region.full(shape), found)
            assert expected.tobytes() == found.tobytes()


@pytest.mark.parametrize(
    "workers",
    [
        Workers(threads=1),
        Workers(threads=7),
        Workers(executor=Serial(), threads=1),
        Workers(workers=2, threads=1),
    ],
    ids=["one thread", "threads", "serial executor", "processes"],
)
def test_same_bytes_whoever_works(
    tmp_path: Path, reference: dict[str, bytes], workers: Workers
) -> None:
    report = convert(tmp_path / "s", workers=workers)
    assert report.committed
    assert report.tasks_done == report.tasks
    assert tree(tmp_path / "s") == reference


def test_thread_pool_as_executor(tmp_path: Path, reference: dict[str, bytes]) -> None:
    with ThreadPoolExecutor(3) as pool:
        convert(tmp_path / "s", workers=Workers(executor=pool, workers=3, threads=1))
    assert tree(tmp_path / "s") == reference


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_an_executor_serve_one_destination_after_the_other(
    tmp_path: Path, reference: dict[str, bytes], method: str
) -> None:
    """The plans are the same: the worker may not take the second destination for the first."""
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        for name in ("a", "b"):
            assert convert(tmp_path / name, workers=Workers(executor=pool, threads=1)).committed
            assert tree(tmp_path / name) == reference


def test_conversions_share_an_executor_at_the_same_time(
    tmp_path: Path, reference: dict[str, bytes]
) -> None:
    folders = [tmp_path / name for name in "abc"]
    with ThreadPoolExecutor(3) as pool, ThreadPoolExecutor(3) as callers:
        workers = Workers(executor=pool, workers=2, threads=1)
        reports = list(callers.map(lambda folder: convert(folder, workers=workers), folders))
    assert all(report.committed for report in reports)
    assert all(tree(folder) == reference for folder in folders)


class Counted(ThreadPoolExecutor):
    """Knows how many batches were in flight at most."""

    def __init__(self) -> None:
        super().__init__(8)
        self.now = self.most = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.now += 1
        self.most = max(self.most, self.now)

        def leave(future: Future[Any]) -> None:
            self.now -= 1

        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(leave)
        return future


def test_only_as_many_batches_are_in_flight_as_the_memory_was_divided_by(tmp_path: Path) -> None:
    with Counted() as pool:
        convert(tmp_path / "s", workers=Workers(executor=pool, workers=2, threads=1))
        assert pool.most == 2
        report = convert(tmp_path / "t", workers=Workers(executor=pool, threads=1))
        assert (report.workers, pool.most <= 8) == (8, True)


def test_dead_workers_are_an_error_and_the_next_run_continues(
    tmp_path: Path, reference: dict[str, bytes]
) -> None:
    def kill(event: Event) -> None:
        for child in active_children():
            os.kill(child.pid or 0, signal.SIGKILL)

    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    pool.submit(os._exit, 9)
    with pytest.raises(WorkerError, match="a worker died") as caught:
        convert(tmp_path / "s", workers=Workers(executor=pool, threads=1))
    assert caught.value.kind is Kind.WORKER
    pool.shutdown()
    with pytest.raises(WorkerError, match="a worker died"):
        convert(tmp_path / "s", workers=Workers(workers=2, threads=1), emit=kill)
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    with pytest.raises(WorkerError, match="took no work"):
        convert(tmp_path / "s", workers=Workers(executor=ended, threads=1))
    with pytest.raises(UncommittedError):
        StoreSource(LocalFiles(str(tmp_path / "s")))
    assert convert(tmp_path / "s").committed
    assert tree(tmp_path / "s") == reference


COORDINATOR = """
import sys, time
from pathlib import Path
from multiprocessing import active_children
from tests.engine.test_run import Workers, convert
def tell(event):
    if type(event).__name__ == "TaskDone":
        print(*(child.pid for child in active_children()), flush=True)
        time.sleep(60)
convert(Path(sys.argv[1]), workers=Workers(workers=2, threads=1), emit=tell)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_do_not_outlive_their_coordinator(
    tmp_path: Path, reference: dict[str, bytes], sent: signal.Signals
) -> None:
    command = [sys.executable, "-c", COORDINATOR, str(tmp_path / "s")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.send_signal(sent)
        process.wait(60)
    deadline = time.monotonic() + 60
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)
    assert convert(tmp_path / "s").committed
    assert tree(tmp_path / "s") == reference


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_worker_that_comes_too_late_does_nothing(tmp_path: Path) -> None:
    from ucpstore.engine import worker

    plan, _, _ = open_job(str(tmp_path / "s"))
    convert(tmp_path / "s")
    before = {path: path.stat().st_ino for path in (tmp_path / "s").rglob("c*")}
    opener = partial(reopen, str(tmp_path / "s"))
    assert worker.run_remote_batch("late", plan.digest, opener, [0, 1], Settings(threads=1)) == []
    assert before == {path: path.stat().st_ino for path in (tmp_path / "s").rglob("c*")}


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_of_listeners_reach_the_caller(tmp_path: Path, workers: int) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, TaskDone):
            raise RuntimeError("the listener's own")

    with pytest.raises(RuntimeError, match="the listener's own"):
        convert(tmp_path / "s", workers=Workers(workers=workers, threads=1), emit=fail)
    assert convert(tmp_path / "s").committed


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"workers": -1},
        {"workers": "2"},
        {"workers": True},
        {"threads": 0},
        {"threads": 1.5},
        {"executor": 3},
        {"share": (2, 2)},
        {"share": (-1, 2)},
        {"share": (0, 0)},
        {"share": (0,)},
        {"share": "0/2"},
        {"share": (0.5, 2)},
        {"share": (False, True)},
    ],
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="cannot convert"):
        Workers(**wrong)


def test_shares_of_independent_workers(tmp_path: Path, reference: dict[str, bytes]) -> None:
    folder = tmp_path / "s"
    first = convert(folder, workers=Workers(threads=1, share=(2, 3)))
    second = convert(folder, workers=Workers(threads=1, share=(0, 3)))
    assert not first.committed
    assert not second.committed
    with pytest.raises(UncommittedError):
        StoreSource(LocalFiles(str(folder)))
    last = convert(folder, workers=Workers(threads=1, share=(1, 3)))
    assert last.committed
    done = [report.tasks_done for report in (first, second, last)]
    assert sum(done) == last.tasks
    assert all(done)
    assert tree(folder) == reference


def test_again_does_nothing(tmp_path: Path) -> None:
    convert(tmp_path / "s")
    source = make_source()
    events: list[Event] = []
    report = convert(tmp_path / "s", source, emit=events.append)
    assert report.already_committed
    assert report.tasks_done == 0
    assert source.elements_read == 0
    assert events == [Committed(str(tmp_path / "s"), already=True)]


def test_other_source_is_refused(tmp_path: Path) -> None:
    convert(tmp_path / "s")
    other = ArraySource({"x": {"fp32": np.zeros(3, np.float32)}})
    before = tree(tmp_path / "s")
    with pytest.raises(AlreadyExistsError):
        convert(tmp_path / "s", other)
    assert tree(tmp_path / "s") == before


def test_events_tell_the_whole_story(tmp_path: Path) -> None:
    events: list[Event] = []
    report = convert(tmp_path / "s", emit=events.append)
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Committed)
    done = [event for event in events if isinstance(event, TaskDone)]
    assert len({event.key for event in done}) == report.tasks
    assert sum(event.nbytes for event in done) == report.nbytes_written == events[0].nbytes
    published = [event for event in events if isinstance(event, Published)]
    assert sum(event.tasks for event in published) == report.tasks
    for event in events:
        validate(to_json(event), "event")


class Flaky(ZarrTarget):
    """Storage that fails ``failures`` times per object before it works."""

    failures = 0
    retryable = True

    def write(self, task: Task, source: Source) -> Record:
        tries = self.__dict__.setdefault("tries", {})
        tries[task.index] = tries.get(task.index, 0) + 1
        if tries[task.index] <= self.failures:
            raise StorageError("slow down", retryable=self.retryable)
        return super().write(task, source)


def flaky(folder: Path, failures: int, *, retryable: bool = True) -> Flaky:
    source = make_source()
    target = Flaky(LocalFiles(str(folder)), plan_arrays(source), source=source)
    target.failures, target.retryable = failures, retryable
    return target


def test_retryable_failures_are_retried(tmp_path: Path, reference: dict[str, bytes]) -> None:
    events: list[Event] = []
    settings = Settings(threads=2, retries=3, retry_delay=0.001)
    folder = tmp_path / "s"
    convert(folder, settings=settings, emit=events.append, target=flaky(folder, 3))
    retried = [event for event in events if isinstance(event, TaskRetried)]
    assert len(retried) == 3 * len(SHAPES) * len(STATES)
    for event in retried:
        validate(to_json(event), "event")
    assert tree(folder) == reference


@pytest.mark.parametrize(("failures", "retryable", "tries"), [(4, True, 4), (1, False, 1)])
def test_lasting_failures_end_the_run(
    tmp_path: Path, failures: int, retryable: bool, tries: int
) -> None:
    folder = tmp_path / "s"
    target = flaky(folder, failures, retryable=retryable)
    with pytest.raises(StorageError, match="slow down"):
        convert(
            folder,
            workers=Workers(threads=1),
            settings=Settings(threads=1, retries=3, retry_delay=0.001),
            target=target,
        )
    assert max(target.__dict__["tries"].values()) == tries
    with pytest.raises(UncommittedError):
        StoreSource(LocalFiles(str(folder)))


def test_work_before_a_failure_is_kept(tmp_path: Path, reference: dict[str, bytes]) -> None:
    class Dies(ZarrTarget):
        written = 0

        def write(self, task: Task, source: Source) -> Record:
            if self.written == 5:
                raise StorageError("disk on fire")
            self.written += 1
            return super().write(task, source)

    folder, source = tmp_path / "s", make_source()
    target = Dies(LocalFiles(str(folder)), plan_arrays(source), source=source)
    with pytest.raises(StorageError):
        convert(folder, workers=Workers(threads=1), target=target)
    events: list[Event] = []
    report = convert(folder, emit=events.append)
    assert report.tasks_resumed == 5
    assert report.tasks_done == report.tasks - 5
    (resumed,) = [event for event in events if isinstance(event, Resumed)]
    assert resumed.tasks == 5
    validate(to_json(resumed), "event")
    assert tree(folder) == reference


def test_memory_limit_below_one_task_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="too small") as caught:
        convert(tmp_path / "s", workers=Workers(memory_limit=1000))
    assert caught.value.kind is Kind.MEMORY_LIMIT
    assert not (tmp_path / "s").exists()


def test_memory_limit_bounds_the_threads(tmp_path: Path) -> None:
    plan, _, target = open_job(str(tmp_path / "s"))
    limit = 3 * target.task_memory()
    assert convert(tmp_path / "s", workers=Workers(threads=50, memory_limit=limit)).threads == 3
    assert plan.min_memory == target.task_memory()


class Changing(ArraySource):
    """A source that something writes to during the conversion."""

    changed = False

    def read(
        self, fqn: str, state: str, region: Region, out: Arrays, *, compare: bool = False
    ) -> None:
        super().read(fqn, state, region, out, compare=compare)
        self.changed = True

    def current_files(self) -> Sequence[SourceFile]:
        return [SourceFile("arrays", 1, "2")] if self.changed else super().current_files()


def test_source_that_changes_is_refused(tmp_path: Path) -> None:
    source = Changing({"x": {"fp32": np.ones(9, np.float32)}})
    with pytest.raises(IntegrityError, match="changed while") as caught:
        convert(tmp_path / "s", source)
    assert caught.value.kind is Kind.SOURCE_CHANGED
    with pytest.raises(UncommittedError):
        StoreSource(LocalFiles(str(tmp_path / "s")))


def test_worker_that_sees_another_source_is_refused(tmp_path: Path) -> None:
    plan, source, target = open_job(str(tmp_path / "s"))

    def elsewhere() -> tuple[str, Source, ZarrTarget]:
        return "sha256:other", source, target

    from ucpstore.engine import worker

    with pytest.raises(IntegrityError, match="this worker plans"):
        worker.run_remote_batch("a run", plan.digest, elsewhere, [0], Settings(threads=1))


def test_racing_converters_cooperate(tmp_path: Path, reference: dict[str, bytes]) -> None:
    reports: list[Report] = []
    barrier = threading.Barrier(3)

    def race() -> None:
        barrier.wait()
        reports.append(convert(tmp_path / "s", workers=Workers(threads=1)))

    threads = [threading.Thread(target=race) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 3
    assert all(report.committed for report in reports)
    assert tree(tmp_path / "s") == reference


def test_plan_digest_follows_what_matters(tmp_path: Path) -> None:
    plan, _, _ = open_job(str(tmp_path / "s"))
    again, _, _ = open_job(str(tmp_path / "elsewhere"))
    assert plan.digest == again.digest, "the destination's place is not part of the plan"
    other = ArraySource({"a.weight": {"fp32": np.zeros((300, 700), np.float32)}})
    assert open_job(str(tmp_path / "s"), other)[0].digest != plan.digest


def test_plan_refuses_a_full_destination(tmp_path: Path) -> None:
    _, source, target = open_job(str(tmp_path / "s"))
    states = [("a.weight", "fp32")]
    with pytest.raises(PlanError, match="free") as caught:
        make_plan(source, target, states=states, free_space=(1000, 10**9)).check_space()
    assert caught.value.kind is Kind.NO_SPACE
    with pytest.raises(PlanError, match="inodes"):
        make_plan(source, target, states=states, free_space=(10**12, 3)).check_space()
    make_plan(source, target, states=states, free_space=(10**12, 10**9)).check_space()


def test_refused_for_lack_of_space_leaves_nothing_and_earlier_objects_count(
    tmp_path: Path, reference: dict[str, bytes]
) -> None:
    folder = tmp_path / "s"
    plan, source, target = open_job(str(folder))

    def attempt(free: int) -> Report:
        return run(
            (source, target),
            replace(plan, free_nbytes=free, free_inodes=10**9),
            workers=Workers(threads=1),
            opener=partial(reopen, str(folder)),
        )

    with pytest.raises(PlanError, match="more"):
        attempt(plan.object_nbytes // 2)
    assert not folder.exists()
    # A full disk: most objects are there, none could be recorded.
    target.begin(plan.digest)
    for task in target.tasks()[:8]:
        target.write(task, source)
    left = sum(task.nbytes for task in target.tasks()[8:])
    with pytest.raises(PlanError, match="more"):
        attempt(left // 2)
    assert attempt(left * 2).committed
    assert tree(folder) == reference
