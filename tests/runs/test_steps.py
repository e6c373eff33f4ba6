"""Promise: a run shows what lies in it and opens by its latest committed step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import ucpstore
from tests.deepspeed_runs import deepspeed_run
from tests.runs.places import Place, commit, save
from tests.schemas import validate
from tests.store.stores import make_target, small_source
from ucpstore.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    PlanError,
    UncommittedError,
    UnrecognizedSourceError,
)
from ucpstore.io import Files
from ucpstore.runs.listing import peek_root
from ucpstore.runs.names import StepName, step_folder
from ucpstore.store.protocol import CommitLog


def begin(files: Files, objects: int = 3, *, digest: str = "sha256:1") -> CommitLog:
    """An attempt that is not finished."""
    target, source = make_target(files), small_source()
    target.begin(digest)
    target.publish([target.write(task, source) for task in list(target.tasks())[:objects]])
    return target._log


def states(run: Place) -> dict[str, str]:
    found = ucpstore.steps(run.url, storage_options=run.options)
    validate(found.to_json(), "steps")
    return {step.name: str(step.status) for step in found.steps}


def test_every_kind_of_step(run: Place) -> None:
    save(run, 10)
    save(run, 20)
    begin(run.files("step-00000030"))
    begin(run.files("step-00000040")).abandon()
    begin(run.files("step-00000050")).seal()
    run.files().write("notes/readme.txt", b"mine")
    run.files().write("step-00000060/zarr.json", b"{damaged")
    assert states(run) == {
        "step-00000010": "committed",
        "step-00000020": "committed",
        "step-00000030": "unfinished",
        "step-00000040": "abandoned",
        "step-00000050": "sealed",
        "step-00000060": "unreadable",
    }
    found = ucpstore.steps(run.url, storage_options=run.options)
    assert found.latest == "step-00000020"
    first = found.steps[0]
    assert (first.step, first.num_objects) == (10, len(make_target(run.files()).tasks()))
    assert first.nbytes == sum(task.nbytes for task in make_target(run.files()).tasks())
    assert first.plan_digest == f"sha256:{10:064x}"
    assert all(step.changed_at is not None for step in found.steps[:5])
    assert found.steps[2].num_objects == 3
    checkpoint = ucpstore.open(run.url, storage_options=run.options)
    assert checkpoint.url == run.at("step-00000020").url


def test_steps_by_number_and_by_name(place: Callable[[str], Place]) -> None:
    run = place("memory").at("run")
    save(run, 5)
    save(run, 100)
    begin(run.files("step-00000200"))
    assert ucpstore.open(run.url).url.endswith("/step-00000100")
    assert ucpstore.open(run.url, step=5).url.endswith("/step-00000005")
    assert ucpstore.open(run.url, tag="step-00000005").url.endswith("/step-00000005")
    with pytest.raises(UncommittedError, match="unfinished"):
        ucpstore.open(run.url, step=200)
    with pytest.raises(CheckpointNotFoundError, match="it has 5, 100, 200"):
        ucpstore.open(run.url, step=7)
    with pytest.raises(PlanError, match="not both"):
        ucpstore.open(run.url, step=5, tag="5")
    assert ucpstore.diff(run.url, f"{run.url}/step-00000100").equal


def test_no_step_and_no_run(place: Callable[[str], Place]) -> None:
    run = place("memory").at("run")
    with pytest.raises(CheckpointNotFoundError):
        ucpstore.steps(run.url)
    begin(run.files("step-00000200"))
    with pytest.raises(UncommittedError, match="no committed step"):
        ucpstore.open(run.url)
    other = place("memory").at("other")
    other.files().write("folder/file", b"x")
    with pytest.raises(UnrecognizedSourceError):
        ucpstore.open(other.url)


def test_another_attempt_takes_the_place_of_a_step(run: Place) -> None:
    save(run, 10, number=1)
    save(run, 10, "-b", number=2)
    assert states(run) == {"step-00000010": "committed", "step-00000010-b": "superseded"}
    ucpstore.use_attempt(run.url, "step-00000010-b", storage_options=run.options)
    assert states(run) == {"step-00000010": "superseded", "step-00000010-b": "committed"}
    opened = ucpstore.open(run.url, storage_options=run.options)
    assert opened.url == run.at("step-00000010-b").url
    pointer = json.loads(run.files().read("step-00000010.json"))
    assert validate(pointer, "pointer")["plan_digest"] == f"sha256:{2:064x}"
    with pytest.raises(ucpstore.UcpStoreError):
        ucpstore.use_attempt(run.url, "step-00000010-c", storage_options=run.options)
    with pytest.raises(PlanError, match="not named as a step"):
        ucpstore.use_attempt(run.url, "../elsewhere", storage_options=run.options)


def test_a_pointer_cannot_lead_out_of_its_step(place: Callable[[str], Place]) -> None:
    run = place("memory").at("run")
    save(run, 10)
    for folder in ("../run2", "step-00000011", "step-00000010/../x", ""):
        text = f'{{"version":"1.0","step":10,"folder":"{folder}","plan_digest":"x"}}'
        run.files().write("step-00000010.json", text.encode())
        with pytest.raises(IntegrityError):
            ucpstore.open(run.url)


def test_tags_of_a_framework_are_listed(tmp_path: Path) -> None:
    folder = deepspeed_run("s2-bf16-dp2").path
    found = ucpstore.steps(folder)
    assert found.latest == found.steps[-1].name
    step = found.steps[-1]
    assert (step.format, str(step.status), step.current) == ("deepspeed", "found", True)
    files = [path for path in (folder / step.name).rglob("*") if path.is_file()]
    assert step.nbytes == sum(path.stat().st_size for path in files)


def test_the_head_of_a_root_is_enough(place: Callable[[str], Place]) -> None:
    files = place("memory").at("a").files()
    commit(files)
    root = files.read("zarr.json")
    expected = peek_root(files, files.list(recursive=False)[0])
    padded = root.rstrip()[:-1] + b',"more":"' + b"x" * 100_000 + b'"}'
    files.write("zarr.json", padded)
    stat = files.stat("zarr.json")
    assert stat is not None
    assert peek_root(files, stat) == expected
    files.write("zarr.json", b" " + padded)  # rewritten by somebody else: read in full
    stat = files.stat("zarr.json")
    assert stat is not None
    assert peek_root(files, stat) == expected


def test_names() -> None:
    assert StepName.parse(step_folder(1000)) == StepName(1000, "")
    assert StepName.parse("step-00001000-b.2") == StepName(1000, "b.2")
    for name in ("step-", "step-x", "step-1-", "step-1-/x", "global_step10", "step-1-.."):
        assert StepName.parse(name) is None
    with pytest.raises(PlanError):
        step_folder(-1)
