"""`ZarrTarget`: complete, deterministic, crash-safe, readable by everyone."""

from __future__ import annotations

import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tensorstore as ts
import zarr

from tests.fakes import ArraySource, CrashingFiles, Killed, random_array
from tests.store.stores import (
    contents,
    convert,
    digest_of,
    make_target,
    small_arrays,
    small_source,
)
from ucpstore.contracts import Record
from ucpstore.errors import (
    AlreadyExistsError,
    IntegrityError,
    Kind,
    PlanError,
    UncommittedError,
    UnrecognizedSourceError,
)
from ucpstore.io import open_files
from ucpstore.io.local import LocalFiles
from ucpstore.store.source import StoreSource
from ucpstore.store.target import ZarrTarget

SCHEMAS = Path(__file__).parents[2] / "schemas"


@pytest.fixture
def files(memory_path: Path) -> LocalFiles:
    return LocalFiles(str(memory_path / "dest"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> LocalFiles:
    """A store that was converted without any trouble."""
    files = LocalFiles(str(tmp_path_factory.mktemp("reference") / "dest"))
    convert(make_target(files), small_source())
    return files


def tiny_source() -> ArraySource:
    """Fewer objects, for tests that convert it hundreds of times."""
    arrays = {
        "w": {"fp32": random_array((13, 7)), "adam_m": random_array((13, 7), seed=1)},
        "b": {"fp32": random_array((3,), seed=2)},
    }
    return ArraySource(arrays, {"steps": {"w": 1}}, tensors={"rng": np.arange(9, dtype=np.uint8)})


def test_tasks_are_every_object_once_and_sized_exactly(reference: LocalFiles) -> None:
    target = make_target(reference)
    tasks = target.tasks()
    assert [task.index for task in tasks] == list(range(len(tasks)))
    assert list(tasks) == [tasks[i] for i in range(len(tasks))] == tasks[:]
    assert tasks[-1] == tasks[len(tasks) - 1]
    with pytest.raises(IndexError):
        tasks[len(tasks)]
    stored = {s.name: s.nbytes for s in reference.list() if not s.name.endswith(".json")}
    assert stored == {task.key: task.nbytes for task in tasks}
    assert target.task_memory() > 0


@pytest.mark.filterwarnings("ignore:Object at .ucpstore is not recognized")
def test_zarr_python_and_tensorstore_read_everything_equal(reference: LocalFiles) -> None:
    source = small_source()
    group = zarr.open_group(reference.url, mode="r", zarr_format=3)
    assert group.metadata.consolidated_metadata is not None
    plain = zarr.open_group(reference.url, mode="r", zarr_format=3, use_consolidated=False)
    for array in small_arrays(source):
        expected = np.stack([source._arrays[member] for member in array.members])
        expected = expected if array.stacked else expected[0]
        if array.dtype != array.source_dtype:
            widened = array.dtype == "float32"
            expected = expected.astype(array.dtype) if widened else expected.view(array.dtype)
        driver = {"driver": "file", "path": f"{reference.url}/{array.path}/"}
        store = ts.open({"driver": "zarr3", "kvstore": driver}).result()
        found = [group[array.path][...], plain[array.path][...], store.read().result()]
        for values in found:
            values = np.asarray(values)
            assert values.dtype == np.dtype(array.dtype)
            assert values.shape == expected.shape
            assert values.tobytes() == np.ascontiguousarray(expected).tobytes()
    assert dict(group["common"].attrs) == source.common.document
    assert group["params/z.weight"].attrs["ucpstore"]["aliases"] == ["tied"]
    members = {path for path, _ in group.members(max_depth=None)}
    assert members == {path for path, _ in plain.members(max_depth=None)}


def test_documents_match_their_schemas(reference: LocalFiles) -> None:
    def check(name: str, value: object) -> None:
        schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.Draft202012Validator(schema).validate(value)

    root = json.loads(reference.read("zarr.json"))
    check("root", root["attributes"]["ucpstore"])
    names = [stat.name for stat in reference.list(".ucpstore")]
    assert any("/claims/" in name for name in names)
    assert any("/done/" in name for name in names)
    for name in names:
        check("claim" if "/claims/" in name else "done", json.loads(reference.read(name)))
    with pytest.raises(jsonschema.ValidationError):
        check("claim", {"version": "1.0", "plan_digest": "A"})
    with pytest.raises(jsonschema.ValidationError):
        check("root", {**root["attributes"]["ucpstore"], "version": "2.0"})


def test_root_describes_the_store_and_its_attributes_are_small(reference: LocalFiles) -> None:
    target = make_target(reference)
    attributes = json.loads(reference.read("zarr.json"))["attributes"]["ucpstore"]
    assert attributes == {
        "version": "1.0",
        "format": "ucpstore",
        "plan_digest": digest_of(target),
        "num_objects": len(target.tasks()),
        "num_arrays": len(small_arrays(small_source())),
        "num_parameters": 13,
        "nbytes": sum(task.nbytes for task in target.tasks()),
        "source": {"format": "arrays", "parallelism": {"tp": 2, "dp": 3}},
        "step": 7,
        "checksum": attributes["checksum"],
    }
    assert attributes["checksum"].startswith("xxh3-128:")
    source = ArraySource({}, parallelism={"ranks": ["x" * 100] * 1000})
    with pytest.raises(PlanError, match="root document"):
        ZarrTarget(reference, [], source=source)


def test_order_of_tasks_and_batches_does_not_change_a_byte(
    files: LocalFiles, reference: LocalFiles
) -> None:
    source, target = small_source(), make_target(files)
    assert target.begin(digest_of(target))
    tasks = list(target.tasks())
    np.random.default_rng(0).shuffle(tasks)  # type: ignore[arg-type]
    with ThreadPoolExecutor(4) as pool:
        records = list(pool.map(lambda task: target.write(task, source), tasks))
    target.publish(records[::2])
    target.publish(records[1::2])
    target.commit({record.task: record for record in records})
    assert contents(files) == contents(reference)


def test_nothing_opens_before_the_commit(files: LocalFiles) -> None:
    source, target = small_source(), make_target(files)
    with pytest.raises(UnrecognizedSourceError):
        StoreSource(files)
    target.begin(digest_of(target))
    records = [target.write(task, source) for task in target.tasks()]
    target.publish(records)
    with pytest.raises(UncommittedError, match=r"same .* command"):
        StoreSource(files)
    with pytest.raises(FileNotFoundError):
        zarr.open_group(files.url, mode="r", zarr_format=3)
    driver = {"driver": "file", "path": f"{files.url}/params/a/fp32/"}
    with pytest.raises(ValueError, match="NOT_FOUND"):
        ts.open({"driver": "zarr3", "kvstore": driver}).result()
    target.commit({record.task: record for record in records})
    assert StoreSource(files).attributes.plan_digest == digest_of(target)


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power-lost"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_crash_at_every_step_then_the_same_command(
    memory_path: Path, after: bool, power: bool
) -> None:
    source, calm = tiny_source(), LocalFiles(str(memory_path / "calm"))
    everything = convert(make_target(calm, source), source)
    expected = contents(calm)
    for step in range(1, 1000):
        files = LocalFiles(str(memory_path / str(step)))
        crashing = CrashingFiles(files, step, after=after)
        try:
            convert(make_target(crashing, source), source)
            finished = True
        except Killed:
            finished = False
        if power:
            crashing.lose_power()
        recorded = everything if finished else durable_tasks(files)
        if files.stat("zarr.json") is None:
            with pytest.raises((UncommittedError, UnrecognizedSourceError)):
                StoreSource(files)
        assert convert(make_target(files, source), source) in (everything - recorded, set())
        assert contents(files) == expected
        assert files.list(".ucpstore/tmp") == []
        if finished:
            break
    assert step > len(everything) + 10


def durable_tasks(files: LocalFiles) -> set[int]:
    """Tasks in done records, read without the code under test."""
    return {
        row[0]
        for stat in files.list(".ucpstore/done")
        for row in json.loads(files.read(stat.name))["records"]
    }


def test_crash_again_and_again(memory_path: Path, reference: LocalFiles) -> None:
    """Run after run dies, each a little later; nothing that was recorded is done again."""
    files, source = LocalFiles(str(memory_path / "dest")), small_source()
    written: list[int] = []
    for run in range(200):
        before = durable_tasks(files)
        try:
            crashing = CrashingFiles(files, 3 + run, after=bool(run % 2))
            written += sorted(convert(make_target(crashing), source, batch=2))
            break
        except Killed:
            assert durable_tasks(files) >= before
    else:
        pytest.fail("200 runs did not finish the work")
    assert run > 10
    assert not set(written) & before
    assert contents(files) == contents(reference)


def test_resume_trusts_only_records_whose_object_is_unchanged(
    files: LocalFiles, reference: LocalFiles
) -> None:
    source, target = small_source(), make_target(files)
    target.begin(digest_of(target))
    done = [target.write(task, source) for task in target.tasks()[:10]]
    target.publish(done[:6])
    keys = [task.key for task in target.tasks()[:6]]
    files.delete([keys[0]])
    files.write(keys[1], files.read(keys[1])[:-1])
    files.write(keys[2], files.read(keys[2]))  # same bytes, another token
    again = make_target(files)
    again.begin(digest_of(again))
    assert set(again.records()) == {3, 4, 5}
    assert convert(make_target(files), source) == set(range(len(target.tasks()))) - {3, 4, 5}
    assert contents(files) == contents(reference)


def test_commit_needs_every_record_and_every_object(files: LocalFiles) -> None:
    source, target = small_source(), make_target(files)
    target.begin(digest_of(target))
    tasks = target.tasks()
    records = {task.index: target.write(task, source) for task in tasks}
    target.publish(list(records.values())[:-1])
    without = {i: r for i, r in records.items() if i != len(tasks) - 1}
    good = files.read(tasks[0].key)

    def fails(records: dict[int, Record], key: str) -> None:
        with pytest.raises(IntegrityError, match="same command") as caught:
            target.commit(records)
        assert caught.value.kind is Kind.LOST_OBJECT
        assert caught.value.context["objects"] == [key]
        assert files.stat("zarr.json") is None
        assert files.stat("params/zarr.json") is None

    fails(without, tasks[-1].key)
    for bad in (None, good[:-1], good + b"\0", bytes(len(good)), good[:4] + b"\xff" + good[5:]):
        files.delete([tasks[0].key]) if bad is None else files.write(tasks[0].key, bad)
        fails(records, tasks[0].key)
    files.write(tasks[0].key, good)  # replaced, but by the same bytes
    target.commit(records)
    assert StoreSource(files).attributes.num_objects == len(tasks)


def test_zombie_of_an_abandoned_plan_is_fenced_and_its_traces_are_swept(
    files: LocalFiles, reference: LocalFiles
) -> None:
    source = small_source()
    other = ArraySource(
        {"dead": {"fp32": random_array((40, 40))}, "a": {"fp32": random_array((4,))}}
    )
    zombie = ZarrTarget(files, small_like(other), source=other)
    zombie.begin("zombie")
    zombie.publish([zombie.write(zombie.tasks()[0], other)])
    with pytest.raises(AlreadyExistsError) as caught:
        convert(make_target(files), source)
    assert caught.value.kind is Kind.CLAIMED
    heir = make_target(files)
    assert heir.abandon() == "zombie"
    convert(heir, source)
    for act in (
        lambda: zombie.write(zombie.tasks()[1], other),
        lambda: zombie.publish([Record(0, 1, "t", 1)]),
    ):
        with pytest.raises(AlreadyExistsError) as caught:
            act()
        assert caught.value.kind is Kind.ABANDONED
    assert contents(files) == contents(reference)
    assert heir.abandon() is None


def small_like(source: ArraySource) -> list:  # type: ignore[type-arg]
    from tests.store.stores import _array

    return [
        _array(f"params/{fqn}/{state}", (fqn, state), source)
        for fqn, spec in source.parameters.items()
        for state in spec.states
    ]


def test_zombie_that_overwrites_a_shard_is_found_at_commit(files: LocalFiles) -> None:
    """It passed its check before the abandon and replaced the object after it."""
    source, other = small_source(), small_source()
    other._arrays = {
        key: array * 2 if array.dtype == np.float32 else array
        for key, array in source._arrays.items()
    }
    zombie, heir = make_target(files), make_target(files)
    zombie.begin("zombie")
    heir.abandon()
    heir.begin("heir")
    records = {task.index: heir.write(task, source) for task in heir.tasks()}
    heir.publish(list(records.values()))
    zombie._log.check = lambda **_: None  # type: ignore[method-assign]
    zombie.write(zombie.tasks()[0], other)
    with pytest.raises(IntegrityError) as caught:
        heir.commit(records)
    assert caught.value.context["objects"] == [heir.tasks()[0].key]
    assert convert(make_target(files), source, digest="heir") == {0}


def test_zombie_that_overwrites_a_shard_during_the_commit_is_found(files: LocalFiles) -> None:
    """Its unfinished file was not swept yet when the heir had compared all objects."""
    source, target = small_source(), make_target(files)
    target.begin("heir")
    records = {task.index: target.write(task, source) for task in target.tasks()}
    target.publish(list(records.values()))
    key = target.tasks()[0].key
    settle = target._settle

    def wake_then_sweep() -> None:
        late = files.sink(key, records[0].nbytes)
        late.write([bytes(records[0].nbytes)])
        late.close()
        settle()

    target._settle = wake_then_sweep  # type: ignore[method-assign]
    with pytest.raises(IntegrityError) as caught:
        target.commit(records)
    assert caught.value.context["objects"] == [key]
    with pytest.raises(UncommittedError):
        StoreSource(files)
    assert convert(make_target(files), source, digest="heir") == {0}


def test_abandon_between_check_and_commit_wins_or_loses_as_a_whole(files: LocalFiles) -> None:
    source, target = small_source(), make_target(files)
    target.begin("A")
    records = {task.index: target.write(task, source) for task in target.tasks()}
    target.publish(list(records.values()))
    assert make_target(files).abandon() == "A"
    with pytest.raises(AlreadyExistsError) as caught:
        target.commit(records)
    assert caught.value.kind is Kind.ABANDONED
    assert files.stat("params/zarr.json") is None
    assert convert(make_target(files), source, digest="A") == set()  # its records are still good


@pytest.mark.parametrize("round_", range(4))
def test_two_converters_of_one_plan_cooperate(
    files: LocalFiles, reference: LocalFiles, round_: int
) -> None:
    source, start, errors = small_source(), threading.Barrier(3), []

    def run() -> None:
        target = make_target(LocalFiles(files.url))
        start.wait()
        try:
            convert(target, source, batch=3)
        except Exception as error:  # collected for the main thread
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert contents(files) == contents(reference)


def test_writer_whose_unfinished_files_are_swept_does_its_work_again(
    files: LocalFiles, reference: LocalFiles
) -> None:
    """A commit of the same plan takes them for leftovers, between any two steps of the writer."""
    source, slow, fast = small_source(), make_target(files), make_target(files)
    slow.begin(digest_of(slow))
    records = {task.index: slow.write(task, source) for task in slow.tasks()}
    slow.publish(list(records.values()))
    task, swept = slow.tasks()[0], []

    class Sweeping(ArraySource):
        def read(self, *args: Any, **kwargs: Any) -> None:
            if not swept:
                swept.extend(files.list(".ucpstore/tmp"))
                fast.begin(digest_of(fast))
                fast.commit(fast.records())
            source.read(*args, **kwargs)

    assert slow.write(task, Sweeping({})).digest == records[0].digest
    assert len(swept) == 1
    slow.publish([records[0]])
    slow.commit(records)
    assert contents(files) == contents(reference)
    assert files.list(".ucpstore/tmp") == []


def test_workers_share_the_tasks_and_anyone_commits(
    files: LocalFiles, reference: LocalFiles
) -> None:
    source = small_source()
    for worker in range(3):
        target = pickle.loads(pickle.dumps(make_target(files)))
        target.begin(digest_of(target))
        target = pickle.loads(pickle.dumps(target))
        target.publish([target.write(task, source) for task in target.tasks()[worker::3]])
    last = make_target(files)
    last.begin(digest_of(last))
    last.commit(last.records())
    assert contents(files) == contents(reference)


def test_a_group_made_by_zarr_is_replaced_and_a_used_one_is_not(
    files: LocalFiles, reference: LocalFiles
) -> None:
    zarr.open_group(files.url, mode="a", zarr_format=3)
    with pytest.raises(UnrecognizedSourceError, match="attributes"):
        StoreSource(files)
    convert(make_target(files), small_source())
    assert contents(files) == contents(reference)

    used = LocalFiles(files.url + "-used")
    zarr.open_group(used.url, mode="a", zarr_format=3).create_array("x", shape=(3,), dtype="f4")
    before = contents(used)
    with pytest.raises(AlreadyExistsError, match="not empty"):
        convert(make_target(used), small_source())
    assert contents(used) == before


def test_committed_plan_is_not_written_again(reference: LocalFiles) -> None:
    source = small_source()
    assert convert(make_target(reference), source) == set()
    assert source.elements_read == 0
    with pytest.raises(AlreadyExistsError):
        convert(make_target(reference), source, digest="another")


def test_plan_document_follows_everything_that_decides_bytes(files: LocalFiles) -> None:
    source = small_source()
    arrays = small_arrays(source)
    base = digest_of(ZarrTarget(files, arrays, source=source))
    assert digest_of(ZarrTarget(LocalFiles("/elsewhere"), arrays, source=source)) == base
    wider = replace(arrays[0], shard=(12, 12))
    assert digest_of(ZarrTarget(files, [wider, *arrays[1:]], source=source)) != base
    assert digest_of(ZarrTarget(files, arrays[1:], source=source)) != base
    assert digest_of(ZarrTarget(files, arrays, source=source, step=1)) != base
    source.common.document["steps"]["a"] = 8
    assert digest_of(ZarrTarget(files, arrays, source=source)) != base
    source.common.document["steps"]["a"] = float("nan")
    with pytest.raises(PlanError, match="JSON"):
        digest_of(ZarrTarget(files, arrays, source=source))
    source.common.document["steps"]["a"] = 7


def test_memory_urls_work_the_same(reference: LocalFiles) -> None:
    files = open_files("memory://test-target")
    try:
        convert(make_target(files), small_source())
        assert contents(files) == contents(reference)
    finally:
        files.delete([stat.name for stat in files.list()])
