"""Native checkpoints: read back bit by bit, and loaded by unmodified DeepSpeed into a model full of noise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ucpstore
from tests.deepspeed_runs import Run, deepspeed_run
from tests.deepspeed_runs.resume import Resumed, continue_run, resume_run
from tests.schemas import validate
from ucpstore import Layout
from ucpstore.cli.main import main
from ucpstore.errors import (
    AlreadyExistsError,
    PatternError,
    PlanError,
    SourceError,
    UncommittedError,
    UnsupportedSourceError,
)
from ucpstore.formats.deepspeed.writer import DeepSpeedTarget

RELATIVE = {"fp32": 1e-5, "bf16": 1e-3}
"""How far losses may be off where ranks or arithmetic differ; bf16 has 8 bits, DeepSpeed's stage 3 replaces
`linear`, and gradients are summed in another order."""


def convert(source: Path, dest: Path, layout: Layout, *, store: bool = False) -> Path:
    """Convert, directly or through our store."""
    if store:
        ucpstore.convert(source, dest.with_name("store"))
        source = dest.with_name("store")
    report = ucpstore.convert(source, dest, to="deepspeed", layout=layout)
    assert report.committed
    assert report.tasks_done == report.tasks > 0
    return dest


def differences(run: Run, resumed: Resumed, losses: tuple[float, ...], rtol: float) -> set[str]:
    """What of a resumed run is not as the original engine had it: the test that controls must fail."""
    found = set()
    here, there = run.tensors(), resumed.run.tensors()
    for key, value in here.items():
        if not key.startswith("client:"):
            other = there.get(key)
            if (
                other is None
                or other.dtype != value.dtype
                or other.shape != value.shape
                or other.tobytes() != value.tobytes()
            ):
                found.add(key.partition(":")[0])
    extra = {key for key in there.keys() - here.keys() if not key.startswith("client:")}
    found |= {f"extra {key}" for key in extra}
    facts, now = run.facts, resumed.run.facts
    if [g["hyper"] for g in facts["groups"]] != [g["hyper"] for g in now["groups"]]:
        found.add("hyper")
    for name in ("scheduler", "aliases", "frozen"):
        if facts[name] != now[name]:
            found.add(name)
    for name in ("global_steps", "skipped_steps", "global_samples"):
        if facts["counters"][name] != now["counters"][name]:
            found.add(name)
    for fqn, entry in facts["parameters"].items():
        if entry["step"] != now["parameters"][fqn]["step"]:
            found.add("step")
    if not facts["client_state"].items() <= now["client_state"].items():
        found.add("client_state")
    if losses and not np.allclose(resumed.losses, losses, rtol=rtol, atol=0):
        found.add("losses")
    return found


def read_back(run: Run, path: Path, stage: int) -> None:
    """Our reader sees the same bits."""
    left, right = ucpstore.open(run.path), ucpstore.open(path)
    derived = {
        (fqn, name)
        for checkpoint in (left, right)
        for fqn, parameter in checkpoint.source.parameters.items()
        for name, spec in parameter.states.items()
        if spec.derived
    }
    states = [
        {(fqn, name) for fqn, p in checkpoint.items() for name in p} - derived
        for checkpoint in (left, right)
    ]
    assert states[0] == states[1]
    for fqn, name in states[0]:
        a, b = left[fqn][name][...], right[fqn][name][...]
        # 16-bit masters and moments are widened, which is exact.
        assert np.array_equal(
            a.astype(b.dtype).view(f"u{b.dtype.itemsize}"), b.view(f"u{b.dtype.itemsize}")
        ), (fqn, name)
    assert right.source.parallelism["zero_stage"] == stage
    for key in ("param_groups", "scheduler", "counters", "steps"):
        ours, theirs = (c.source.common.document[key] for c in (left, right))
        if key == "param_groups":
            for group in (*ours, *theirs):
                group["params"].sort()
        assert ours == theirs, key


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["s2-bf16-dp2", "s3-fp32-dp2", "s1-fp32-dp2"])
def test_deepspeed_goes_on_as_if_it_had_never_stopped(
    name: str, stage: int, dp: int, tmp_path: Path
) -> None:
    run = deepspeed_run(name)
    same = (stage, dp) == (run.case.stage, run.case.dp)  # there, nothing is converted directly
    path = convert(run.path, tmp_path / "c", Layout(dp=dp, zero_stage=stage), store=same)
    read_back(run, path, stage)
    resumed = resume_run(
        name, path, tmp_path / "resumed", world=dp, stage=stage, dtype=run.case.dtype
    )
    exact = dp == run.case.dp and (stage == 3) == (run.case.stage == 3)
    rtol = 0.0 if exact else RELATIVE[run.case.dtype]
    assert differences(run, resumed, continue_run(name), rtol) == set()


CASES: list[tuple[str, int, int, bool]] = [
    ("s3-bf16-dp2", 3, 2, True),
    ("tied-reverse-s2-fp32-dp2", 3, 2, True),
    ("tied-s3-fp32-dp2", 2, 3, False),
    ("tied-bf16opt-dp4", 2, 2, False),
    ("frozen-s3-bf16-dp3", 2, 2, True),
    ("frozen-s3-bf16-dp3", 1, 2, False),
    ("frozen-s1-fp32-dp2", 3, 3, False),
    ("frozen-s2-bf16-dp2", 3, 2, True),
    ("bf16opt-dp2", 1, 3, True),
    ("bf16opt-dp2", 3, 2, False),
    ("subgroups-s3-fp32-dp2", 3, 3, False),
    ("roundrobin-s2-fp32-dp2", 2, 3, True),
    ("roundrobin-s2-bf16-dp3", 1, 2, False),
    ("roundrobin-s2-fp32-dp2", 3, 2, True),
    ("aligned-s1-fp32-dp2", 2, 3, False),
    ("aligned-roundrobin-s2-fp32-dp2", 2, 3, False),
    ("legacy-s2-fp32-dp2", 3, 2, False),
    ("bf16states-s2-dp2", 2, 3, False),
    ("sgd-s1-fp32-dp2", 3, 3, True),
    ("rmsprop-s2-fp32-dp3", 1, 2, True),
    ("unstepped-s1-fp32-dp2", 3, 2, False),
    ("client-s2-bf16-dp2", 3, 2, True),
    ("client-s3-fp32-dp2", 2, 3, True),
    ("noscheduler-s1-fp32-dp2", 2, 3, False),
    ("s1-fp32-dp4", 2, 6, False),
    ("tp2-s1-fp32-dp2", 3, 2, True),
]


@pytest.mark.parametrize(("name", "stage", "dp", "store"), CASES)
def test_special_runs_go_on(name: str, stage: int, dp: int, store: bool, tmp_path: Path) -> None:
    run = deepspeed_run(name)
    path = convert(run.path, tmp_path / "c", Layout(dp=dp, zero_stage=stage), store=store)
    if run.case.tp > 1:  # its truth is per tensor-parallel rank: only full tensors compare
        resumed = resume_run(name, path, tmp_path / "r", world=dp, stage=stage, dtype="fp32")
        for key, value in resumed.run.tensors().items():
            state, _, fqn = key.partition(":")
            assert value.tobytes() == run.full(state, fqn).tobytes(), key
        return
    read_back(run, path, stage)
    resumed = resume_run(
        name, path, tmp_path / "resumed", world=dp, stage=stage, dtype=run.case.dtype
    )
    losses = continue_run(name) if run.case.world in (1, 2, 3, 6) else ()
    assert differences(run, resumed, losses, RELATIVE[run.case.dtype]) == set()


def test_another_sub_group_size(tmp_path: Path) -> None:
    run = deepspeed_run("s1-fp32-dp2")
    layout = Layout(dp=2, zero_stage=3, sub_group_size=50)
    path = convert(run.path, tmp_path / "c", layout)
    plan = ucpstore.plan(run.path, tmp_path / "p", to="deepspeed", layout=layout)
    assert len(plan.target["layout"]["ucp_info"]["ranks"][0]["buffers"]) > 10
    zero = {"sub_group_size": 50}
    resumed = resume_run(
        "s1-fp32-dp2", path, tmp_path / "r", world=2, stage=3, dtype="fp32", zero=zero
    )
    assert differences(run, resumed, continue_run("s1-fp32-dp2"), 1e-5) == set()


def test_another_dtype_keeps_masters_and_rounds_weights(tmp_path: Path) -> None:
    import ml_dtypes

    run = deepspeed_run("frozen-s1-fp32-dp2")
    path = convert(run.path, tmp_path / "c", Layout(dp=2, zero_stage=2, dtype="bf16"))
    resumed = resume_run("frozen-s1-fp32-dp2", path, tmp_path / "r", world=2, stage=2, dtype="bf16")
    for fqn in run.facts["parameters"]:
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            assert resumed.run.tensor(state, fqn).tobytes() == run.tensor(state, fqn).tobytes()
    for fqn in (*run.facts["parameters"], *run.facts["frozen"]):
        rounded = run.tensor("weight", fqn).astype(ml_dtypes.bfloat16)
        assert resumed.run.tensor("weight", fqn).tobytes() == rounded.tobytes(), fqn


# ------------------------------------------------------------------- negative controls


def zero_second_moments(state: dict[str, Any]) -> None:
    for entry in state["state"].values():
        entry["exp_avg_sq"].zero_()


def swap_moments(state: dict[str, Any]) -> None:
    for entry in state["state"].values():
        entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"], entry["exp_avg"]


def change_weight_decay(state: dict[str, Any]) -> None:
    state["param_groups"][0]["weight_decay"] = 0.0


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (zero_second_moments, {"exp_avg_sq", "losses"}),
        (swap_moments, {"exp_avg", "exp_avg_sq", "losses"}),
        (change_weight_decay, {"hyper", "losses"}),
    ],
)
def test_the_comparison_notices_damage(
    damage: Callable[[dict[str, Any]], None], expected: set[str], stage: int, tmp_path: Path
) -> None:
    import torch

    run = deepspeed_run("s1-fp32-dp2")
    path = convert(run.path, tmp_path / "c", Layout(dp=2, zero_stage=stage))
    for file in sorted((path / "global_step3").glob("*optim_states.pt")):
        root = torch.load(file, weights_only=False)
        inner = root["optimizer_state_dict"]
        damage(inner["optimizer_state_dict" if stage == 3 else "base_optimizer_state"])
        torch.save(root, file)
    resumed = resume_run(
        "s1-fp32-dp2", path, tmp_path / "resumed", world=2, stage=stage, dtype="fp32"
    )
    assert differences(run, resumed, continue_run("s1-fp32-dp2"), 1e-5) == expected


def test_zero_to_fp32_reads_the_result(tmp_path: Path) -> None:
    names = {1: "s2-bf16-dp2", 2: "tied-s3-fp32-dp2", 3: "frozen-s2-bf16-dp2"}
    folders = []
    for stage, name in names.items():
        path = tmp_path / str(stage) / "c"
        folders.append(str(convert(deepspeed_run(name).path, path, Layout(dp=3, zero_stage=stage))))
    code = (
        "import sys, numpy as np\n"
        "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as read\n"
        "for path in sys.argv[1:]:\n"
        "    values = {k: v.float() if v.is_floating_point() else v for k, v in read(path).items()}\n"
        "    np.savez(path + '.npz', **{k: v.numpy() for k, v in values.items()})\n"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(
        [sys.executable, "-c", code, *folders], check=True, env=environment, capture_output=True
    )
    for name, folder in zip(names.values(), folders, strict=True):
        run = deepspeed_run(name)
        found = np.load(folder + ".npz")
        for fqn in run.facts["parameters"]:
            assert found[fqn].tobytes() == run.tensor("fp32", fqn).tobytes(), fqn
        for fqn in run.facts["frozen"]:
            assert np.array_equal(found[fqn], run.tensor("weight", fqn).astype(found[fqn].dtype))
        for alias, fqn in run.facts["aliases"].items():
            assert np.array_equal(found[alias], found[fqn])


# ------------------------------------------------------------------- requests


def test_a_source_that_has_the_layout_is_left_alone(tmp_path: Path) -> None:
    run = deepspeed_run("s2-bf16-dp2")
    layout = Layout(dp=2, zero_stage=2)
    report = ucpstore.convert(run.path, tmp_path / "c", to="deepspeed", layout=layout)
    assert (report.tasks, report.nbytes_written, report.url) == (0, 0, str(run.path))
    assert any("has this layout already" in text for text in report.warnings)
    assert not (tmp_path / "c").exists()
    other = Layout(dp=2, zero_stage=2, dtype="fp32")
    assert ucpstore.convert(run.path, tmp_path / "c", to="deepspeed", layout=other).tasks == 3


def test_command_line(tmp_path: Path) -> None:
    run = deepspeed_run("s2-bf16-dp2")
    request = [str(run.path), str(tmp_path / "c"), "--to", "deepspeed"]
    layout = ["--layout", "dp=3,zero_stage=3"]
    done = CliRunner().invoke(main, ["plan", *request, *layout, "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    validate(plan, "plan")
    info = plan["target"]["layout"]["ucp_info"]
    held = sum(
        part[2] for rank in info["ranks"] for flat in rank["buffers"] for part in flat["parts"]
    )
    assert held == 11063 + 211
    assert not (tmp_path / "c").exists()
    done = CliRunner().invoke(main, ["convert", *request, *layout])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "c" / "latest").read_text() == "global_step3"
    assert not any((tmp_path / "c" / ".ucpstore" / "files").rglob("*"))
    read_back(run, tmp_path / "c", 3)
    for wrong in (["--layout", "dp=x"], ["--layout", "ranks=2"], []):
        done = CliRunner().invoke(main, ["convert", *request, *wrong])
        assert done.exit_code != 0


@pytest.mark.parametrize(
    ("name", "layout", "error", "match"),
    [
        ("s2-bf16-dp2", Layout(tp=2), PatternError, "2 tensor-parallel ranks"),
        ("s2-bf16-dp2", Layout(pp=2), PlanError, "no name of a PipelineModule"),
        ("s2-bf16-dp2", Layout(fused_adam=True), PlanError, "expected 0"),
        ("s2-bf16-dp2", Layout(dtype="fp16"), PlanError, "loss scale"),
        ("s2-bf16-dp2", Layout(sub_group_size=9), PlanError, "stage 3"),
        ("elastic-s2-fp32-dp2", Layout(), UnsupportedSourceError, "no hyper-parameters"),
        ("muon-bf16opt-dp2", Layout(), UnsupportedSourceError, "Muon"),
    ],
)
def test_what_cannot_be_written_is_refused(
    name: str, layout: Layout, error: type[Exception], match: str, tmp_path: Path
) -> None:
    run = deepspeed_run(name)
    with pytest.raises(error, match=match):
        ucpstore.convert(run.path, tmp_path / "c", to="deepspeed", layout=layout)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "text", ["dp", "dp=0", "dp=-1", "dp=1,dp=2", "zero_stage=4", "dtype=int8", "ranks=2", "dp=1.5"]
)
def test_layouts_that_make_no_sense_are_refused(text: str) -> None:
    assert Layout.parse("dp=2, zero_stage=3, dtype=bf16") == Layout(
        dp=2, zero_stage=3, dtype="bfloat16"
    )
    with pytest.raises(PlanError, match="layout"):
        Layout.parse(text)


def test_requests_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    path = deepspeed_run("s2-bf16-dp2").path
    layout = Layout(dp=2)
    for match, request in {
        "expected 'zarr' or 'deepspeed'": {"to": "hdf5"},
        "no layout of ranks": {"layout": layout},
        "expected a Layout": {"to": "deepspeed"},
        "selection": {"to": "deepspeed", "layout": layout, "only": "*"},
    }.items():
        with pytest.raises(PlanError, match=match):
            ucpstore.convert(path, tmp_path / "c", **request)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="local folder"):
        ucpstore.convert(path, "memory://native/x", to="deepspeed", layout=layout)


# ------------------------------------------------------------------- commit


def contents(path: Path) -> dict[str, bytes]:
    """Everything that DeepSpeed sees."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and ".ucpstore" not in file.parts
    }


DIE = {
    "after two files": (
        "write = DeepSpeedTarget.write\n"
        "def dying(self, task, source):\n"
        "    if len(self._objects()) == 2: os._exit(9)\n"
        "    record = write(self, task, source); self.publish([record]); return record\n"
        "DeepSpeedTarget.write = dying\n"
    ),
    "before the move": "DeepSpeedTarget._settle = lambda self: os._exit(9)\n",
    "after the move": "DeepSpeedLog.finish = lambda self, tag: os._exit(9)\n",
    "before latest": (
        "create = LocalFiles.create\n"
        "LocalFiles.create = lambda self, name, data: os._exit(9) if name == 'latest'"
        " else create(self, name, data)\n"
    ),
}


@pytest.mark.parametrize("moment", DIE)
def test_a_killed_conversion_is_invisible_and_finished_by_the_same_command(
    moment: str, tmp_path: Path
) -> None:
    run = deepspeed_run("s2-bf16-dp2")
    layout = Layout(dp=3, zero_stage=3)
    whole = contents(convert(run.path, tmp_path / "whole", layout))
    code = (
        "import os, sys, ucpstore\n"
        "from ucpstore.io.local import LocalFiles\n"
        "from ucpstore.formats.deepspeed.commit import DeepSpeedLog\n"
        "from ucpstore.formats.deepspeed.writer import DeepSpeedTarget\n"
        f"{DIE[moment]}"
        "ucpstore.convert(sys.argv[1], sys.argv[2], to='deepspeed', threads=1,"
        " layout=ucpstore.Layout(dp=3, zero_stage=3))\n"
    )
    dest = tmp_path / "c"
    killed = subprocess.run([sys.executable, "-c", code, str(run.path), str(dest)], check=False)
    assert killed.returncode == 9
    assert not (dest / "latest").exists()
    with pytest.raises(UncommittedError if moment != "before latest" else SourceError):
        ucpstore.open(dest)
    with pytest.raises(AlreadyExistsError):
        ucpstore.convert(run.path, dest, to="deepspeed", layout=Layout(dp=2, zero_stage=3))
    report = ucpstore.convert(run.path, dest, to="deepspeed", layout=layout)
    assert report.committed
    assert report.tasks_resumed == (2 if moment == "after two files" else 6)
    assert contents(dest) == whole
    again = ucpstore.convert(run.path, dest, to="deepspeed", layout=layout)
    assert again.already_committed


def test_an_abandoned_plan_leaves_nothing_in_the_next(tmp_path: Path) -> None:
    run = deepspeed_run("s2-bf16-dp2")
    share = ucpstore.convert(
        run.path, tmp_path / "c", to="deepspeed", layout=Layout(dp=3, zero_stage=3), share=(0, 2)
    )
    assert not share.committed
    assert ucpstore.abandon(tmp_path / "c") == share.plan_digest
    path = convert(run.path, tmp_path / "c", Layout(dp=1, zero_stage=3))
    assert contents(path) == contents(convert(run.path, tmp_path / "d", Layout(zero_stage=3)))
    assert not any((path / ".ucpstore" / "files").rglob("*"))


def test_workers_write_the_same_bytes(tmp_path: Path) -> None:
    run = deepspeed_run("frozen-s3-bf16-dp3")
    layout = Layout(dp=2, zero_stage=2)
    one = convert(run.path, tmp_path / "one", layout)
    ucpstore.convert(run.path, tmp_path / "two", to="deepspeed", layout=layout, workers=2)
    for index in (0, 1):
        report = ucpstore.convert(
            run.path, tmp_path / "shared", to="deepspeed", layout=layout, share=(index, 2)
        )
        assert report.committed == (index == 1)
    assert contents(one) == contents(tmp_path / "two") == contents(tmp_path / "shared")


def test_a_lost_file_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = deepspeed_run("s2-bf16-dp2")
    commit = DeepSpeedTarget.commit

    def lose(self: DeepSpeedTarget, records: Any) -> None:
        (victim,) = (tmp_path / "c").rglob("zero_pp_rank_1_*model_states.pt")
        victim.write_bytes(b"x" * victim.stat().st_size)
        commit(self, records)

    monkeypatch.setattr(DeepSpeedTarget, "commit", lose)
    layout = Layout(dp=3, zero_stage=3)
    with pytest.raises(ucpstore.UcpStoreError, match="zero_pp_rank_1_mp_rank_00_model_states"):
        ucpstore.convert(run.path, tmp_path / "c", to="deepspeed", layout=layout)
    assert not (tmp_path / "c" / "latest").exists()
    monkeypatch.undo()
    assert ucpstore.convert(run.path, tmp_path / "c", to="deepspeed", layout=layout).tasks_done == 1
