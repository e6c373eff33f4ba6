"""What users of DeepSpeed saw when they resumed in another layout, and what must happen instead.

By the cases of ``formats/deepspeed.md`` section 6; their ids are in the docstrings. Other files have what they
need of these cases already:

=====  ===============================================================================================
case   tests elsewhere
=====  ===============================================================================================
1      ``test_writer.py::test_deepspeed_goes_on_as_if_it_had_never_stopped`` (2 ranks to 1, 2 and 3)
3      ``test_user_patterns.py::test_equal_vectors_are_never_joined``
4      ``test_files.py::test_mappings_are_not_needed``
5      ``tests/mapping/test_deepspeed.py`` (fused weights, other orders), ``tests/mapping/test_problems.py``
6      ``tests/test_matrix.py`` (3 key-value heads), ``tests/layout/test_rules.py`` (10 rows over 4 ranks)
17     ``test_user_patterns.py::test_without_info_one_rank_needs_no_rule`` and ``..._two_ranks_need_a_rule``
19     ``test_writer.py::test_special_runs_go_on`` (frozen parameters, buffers and tied weights, from noise)
33     ``test_stage0.py::test_case_33_no_optimizer_is_weights_only``; ``test_writer_stage0.py`` (with one)
37     ``test_stage0.py::test_case_37_no_scheduler_is_a_warning``
39     ``test_files.py`` (holes in the ranks, last ranks, tensor-parallel ranks), ``test_pipeline.py``
46     ``test_user_patterns.py::test_replicas_that_differ``
47     ``test_presets.py::test_swiglu_gate_and_up_never_mix``
48     ``test_writer_parallel.py::test_random_state_stays_with_ranks_that_have_a_counterpart``
=====  ===============================================================================================
"""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ucpstore
from tests.deepspeed_runs import Run, copy_run, deepspeed_run
from tests.deepspeed_runs.compare import differences
from tests.deepspeed_runs.renamed import UNPIPED
from tests.deepspeed_runs.resume import Resumed, continue_run, resume_run
from tests.formats.deepspeed.native import differences as file_differences
from tests.formats.deepspeed.synthetic import Checkpoint, edit
from tests.formats.deepspeed.test_tensor_parallel import change_info
from tests.test_matrix import CLOSE, convert, resume
from ucpstore import Layout, Mapping
from ucpstore.cli.main import main
from ucpstore.errors import (
    IncompleteSourceError,
    IntegrityError,
    Kind,
    PatternError,
    PlanError,
    UnsupportedSourceError,
)
from ucpstore.layout.rules import Patterns

PIPELINE = "3d-s1-fp32-dp4"
AUTOTP = "tp2-s1-fp32-dp2"


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def different(run: Run, resumed: Resumed, losses: tuple[float, ...] = ()) -> dict[str, set[str]]:
    """What of a resumed run is not as the original engine had it; without losses, before any step."""
    if not losses:  # the further steps of another number of samples cannot be compared
        resumed = Resumed((1.0,), resumed.run)
        losses = (1.0,)
    return differences(run, resumed, losses, rtol=CLOSE)


def test_used_a_dp_world_size_of_4_but_the_current_world_size_is_1(tmp_path: Path) -> None:
    """Case 1 (DeepSpeed #2898): DeepSpeed refuses its own files; the converted ones it loads."""
    for stage in (1, 2, 3):
        run = deepspeed_run({1: "s1-fp32-dp4", 2: "s2-bf16-dp4", 3: "s3-fp32-dp4"}[stage])
        folder = tmp_path / str(stage)
        folder.mkdir()
        options = {"world": 1, "stage": stage, "dtype": run.case.dtype, "further": 0}
        if stage == 1:
            with pytest.raises(
                RuntimeError, match=r"DP world size of 4 but the current world size"
            ):
                resume_run(run.case.name, run.path, folder / "refused", **options)
        path = convert(run.path, folder, {"dp": 1, "zero_stage": stage})
        resumed = resume_run(run.case.name, path, folder / "resumed", **options)
        assert different(run, resumed) == {}


# ------------------------------------------------------------------- case 2

FROZEN = ["model.layers.0.self_attn.o_proj.weight", "model.adapter.weight"]


@pytest.mark.parametrize(
    ("name", "stage", "dp"),
    [
        ("frozen-s1-fp32-dp2", 1, 2),
        ("frozen-s3-fp32-dp2", 3, 3),
        ("frozen-s2-bf16-dp2", 2, 1),
        ("frozen-s3-bf16-dp3", 1, 2),
        ("frozen-tied-s0-bf16-dp2", 2, 2),
        ("frozen-bf16opt-dp2", 1, 3),
    ],
)
def test_a_layer_is_unfrozen_at_load(name: str, stage: int, dp: int, tmp_path: Path) -> None:
    """Case 2 (DeepSpeed #2921): the optimizer lacks what was frozen; m and v of it are zero."""
    run = deepspeed_run(name)
    layout = Layout(dp=dp, zero_stage=stage)
    report = ucpstore.convert(
        run.path, tmp_path / "c", to="deepspeed", layout=layout, unfreeze={"*.o_proj.weight": 0}
    )
    (told,) = [text for text in report.warnings if "frozen parameters join" in text]
    assert told.startswith("1 frozen parameters join group 0 (weight_decay 0.1, lr ")
    step = 4 if "s0" in name else 3  # that class of DeepSpeed steps once without gradients
    assert f"zeros for adam_m, adam_v and its step {step}" in told
    thawed, kept = FROZEN
    options = {"world": dp, "stage": stage, "dtype": run.case.dtype}
    resumed = resume_run(name, tmp_path / "c", tmp_path / "r", thaw=[thawed], **options)
    found = different(run, resumed)
    # nothing but the one parameter has changed, and this only from frozen to trained
    for key in ("fp32", "exp_avg", "exp_avg_sq", "hyper", "step"):
        assert found.pop(key) == {thawed}, key
    (frozen,) = found.pop("frozen")
    assert frozen == f"{sorted(FROZEN)} became {[kept]}"
    assert found == {}
    now = resumed.run
    weight = run.tensor("weight", thawed)
    assert now.tensor("fp32", thawed).tobytes() == weight.astype(np.float32).tobytes()
    for state in ("exp_avg", "exp_avg_sq"):
        assert now.tensor(state, thawed).shape == weight.shape
        assert not now.tensor(state, thawed).any()
    parameters = now.facts["parameters"]
    assert parameters[thawed]["step"] == parameters["lm_head.weight"]["step"] == step
    assert [thawed in group["names"] for group in now.facts["groups"]] == [True, False]
    assert np.isfinite(resumed.losses).all()


def test_what_is_unfrozen_is_trained_alike_in_all_layouts(tmp_path: Path) -> None:
    """Case 2: losses of the steps after it do not depend on the layout, and differ from a frozen run's."""
    name = "frozen-s1-fp32-dp2"
    run = deepspeed_run(name)
    losses = []
    for stage, dp in ((1, 2), (3, 2), (0, 1)):
        path = tmp_path / f"{stage}"
        unfreeze = {"*o_proj.weight": 0, "*.adapter.*": 0}
        layout = Layout(dp=dp, zero_stage=stage)
        ucpstore.convert(run.path, path, to="deepspeed", layout=layout, unfreeze=unfreeze)
        options = {"world": dp, "stage": stage, "thaw": FROZEN}
        losses.append(resume_run(name, path, path / "r", **options).losses)
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=CLOSE)
    assert not np.allclose(losses[0], continue_run(name), rtol=1e-4)


def test_a_matrix_in_the_group_of_vectors_is_refused_by_deepspeed(tmp_path: Path) -> None:
    """Case 2: the group is the one that the run's optimizer has it in, else lengths do not fit."""
    run = deepspeed_run("frozen-s1-fp32-dp2")
    unfreeze = {FROZEN[0]: 1}
    path = tmp_path / "c"
    ucpstore.convert(run.path, path, to="deepspeed", layout=Layout(dp=2), unfreeze=unfreeze)
    with pytest.raises(RuntimeError, match="size"):
        resume_run(run.case.name, path, tmp_path / "r", world=2, thaw=FROZEN[:1], further=0)


def test_unfreeze_on_the_command_line_and_through_load(tmp_path: Path) -> None:
    """Case 2: the same files by every route; a plan with it is another plan."""
    run = deepspeed_run("frozen-s3-fp32-dp2")
    dest, layout = tmp_path / "cli", "dp=1,zero_stage=1"
    options = ["--to", "deepspeed", "--layout", layout, "--unfreeze", "*.adapter.*=0"]
    result = CliRunner().invoke(main, ["convert", str(run.path), str(dest), *options])
    assert result.exit_code == 0, result.output
    assert "frozen parameters join group 0" in result.output
    ucpstore.convert(run.path, tmp_path / "store")
    target: dict[str, Any] = {"to": "deepspeed", "layout": Layout.parse(layout)}
    unfreeze = {"model.adapter.weight": 0}
    ucpstore.convert(tmp_path / "store", tmp_path / "api", **target, unfreeze=unfreeze)
    assert file_differences(dest / "global_step3", tmp_path / "api" / "global_step3") == {}
    plans = [ucpstore.plan(run.path, tmp_path / "p", **target)]
    plans += [ucpstore.plan(run.path, tmp_path / "p", **target, unfreeze=unfreeze)]
    assert plans[0].digest != plans[1].digest
    state = ucpstore.load(run.path, target["layout"], 0, unfreeze=unfreeze)["model.adapter.weight"]
    assert not state["adam_v"].read().any()
    weight = run.tensor("weight", "model.adapter.weight")
    assert state["fp32"].read().tobytes() == weight.tobytes()
    assert "adam_m" not in ucpstore.load(run.path, target["layout"], 0)["model.adapter.weight"]
    result = CliRunner().invoke(
        main, ["load", str(run.path), "--layout", layout, "--rank", "0", *options[-2:], "--json"]
    )
    assert result.exit_code == 0, result.output
    assert any(
        (t["fqn"], t["state"]) == ("model.adapter.weight", "adam_m")
        for t in json.loads(result.stdout)["tensors"]
    )
    for text in ("*.adapter.*", "=0", "x=-1"):
        bad = [*options[:-1], text]
        assert CliRunner().invoke(main, ["plan", str(run.path), "x", *bad]).exit_code == 2


@pytest.mark.parametrize(
    ("unfreeze", "words"),
    [
        ({}, "expected globs over names"),
        ({"*.o_proj.weight": "0"}, "found '.*': '0'"),
        ({"*.o_proj.weight": -1}, "found '.*': -1"),
        ({"*.o_proj.weight": 2}, "names parameter group 2.*0: 1. parameters, weight_decay 0.1"),
        ({"*.norm.weight": 0}, r"none of the 2 frozen .*it matches model.norm.weight, which"),
        ({"*.causal_mask": 0}, "none of the 2 frozen"),
        ({"model.adaptor.weight": 0}, "none of the 2 frozen"),
        ({"*.adapter.*": 0, "model.*": 1}, "into the groups 0 and 1"),
    ],
)
def test_unfreezing_what_cannot_be(unfreeze: Any, words: str, tmp_path: Path) -> None:
    """Case 2: what the option cannot mean is refused before anything is written."""
    source = deepspeed_run("frozen-s2-bf16-dp2").path
    with pytest.raises(PlanError, match=words):
        ucpstore.convert(source, tmp_path / "c", to="deepspeed", layout=Layout(), unfreeze=unfreeze)
    assert not (tmp_path / "c").exists()


def test_unfreezing_needs_a_known_order_and_a_native_target(tmp_path: Path) -> None:
    """Case 2: flat buffers know no names, so that a guessed place would be a silent exchange."""
    target: dict[str, Any] = {"to": "deepspeed", "layout": Layout(), "unfreeze": {"*o_proj*": 0}}
    for name, error, words in (
        ("crossed-s0-bf16-dp2", PlanError, "not in the order of the model"),
        ("frozen-s2-bf16-dp2", PlanError, "native checkpoint"),
    ):
        target["to"] = "deepspeed" if "native" not in words else "zarr"
        layout = target["layout"] if target["to"] == "deepspeed" else None
        with pytest.raises(error, match=words):
            ucpstore.convert(
                deepspeed_run(name).path, tmp_path / "c", **{**target, "layout": layout}
            )


# ------------------------------------------------------------------- cases 3 to 8


def test_size_mismatch_in_layer_norm_after_tp_2_to_1(tmp_path: Path) -> None:
    """Case 3 (DeepSpeed #6503): no pattern names the norms; they are asked for, and never joined."""
    run = copy_run(deepspeed_run(AUTOTP), tmp_path)

    def forget(holder: dict[str, Any]) -> None:
        info = holder["universal_checkpoint_info"]
        del info["affine_map"]
        info["tp_replicated_parameter_patterns"] = []

    change_info(run.tag_path, forget)
    target = {"tp": 1, "dp": 2}
    with pytest.raises(PatternError, match=r"norm\.weight") as caught:
        convert(run.path, tmp_path, target)
    assert "--patterns" in caught.value.hint
    assert not (tmp_path / "native").exists()
    rules = '[[rule]]\nmatch = ["**norm.weight", "**.embed_tokens.weight"]\ntp = "replicate"'
    path = convert(run.path, tmp_path, target, patterns=Patterns.parse(rules))
    assert load(path / "global_step3/mp_rank_00_model_states.pt")["module"][
        "model.norm.weight"
    ].shape == (24,)
    resumed = resume(run, path, target, tmp_path / "resumed")
    assert differences(run, resumed, continue_run(AUTOTP), rtol=CLOSE) == {}


def without_mappings(name: str, folder: Path) -> Run:
    run = copy_run(deepspeed_run(name), folder)
    for file in run.tag_path.glob("*optim_states.pt"):
        edit(file, lambda content: content["optimizer_state_dict"].pop("param_slice_mappings"))
    return run


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("s2-bf16-dp2", {"dp": 3, "zero_stage": 1}),
        (AUTOTP, {"tp": 4, "dp": 1}),
        (PIPELINE, {"tp": 4, "dp": 1}),
    ],
)
def test_key_error_param_slice_mappings(name: str, target: dict[str, Any], tmp_path: Path) -> None:
    """Case 4 (Bigscience #343): what old files lack is derived, to the same files."""
    run = without_mappings(name, tmp_path / "old")
    old, new = (tmp_path / which for which in "on")
    ucpstore.convert(run.path, old, to="deepspeed", layout=Layout(**target))
    ucpstore.convert(deepspeed_run(name).path, new, to="deepspeed", layout=Layout(**target))
    assert file_differences(new / "global_step3", old / "global_step3") == {}


def test_tensor_parallel_ranks_cannot_grow(tmp_path: Path) -> None:
    """Case 4 (Bigscience #343): from one rank to four, of files without the mappings."""
    run = without_mappings(PIPELINE, tmp_path / "old")
    target = {"tp": 4, "dp": 1}
    path = convert(run.path, tmp_path, target)
    assert len([*path.glob("*/*_optim_states.pt")]) == 4
    resumed = resume(run, path, target, tmp_path / "resumed")
    assert differences(run, resumed, continue_run(PIPELINE), rtol=CLOSE) == {}


def test_the_loss_jumps_after_a_pipeline_is_renamed_by_hand(tmp_path: Path) -> None:
    """Case 5 (Megatron-DeepSpeed #405): a rename map with every name, or an error; the loss goes on."""
    run = deepspeed_run("3d-pp2-s1-fp32-dp1")
    rename = [
        {"from": f"{old}.{{rest**}}", "to": f"{new}.{{rest}}"} for old, new in UNPIPED.items()
    ]
    layout = Layout(dp=1, zero_stage=1, pipeline=False)
    less = Mapping.from_json({"rename": [entry for entry in rename if entry["from"][0] != "3"]})
    with pytest.raises(PatternError, match=r"'3\.norm\.weight' is matched by no entry") as caught:
        ucpstore.convert(run.path, tmp_path / "c", to="deepspeed", layout=layout, mapping=less)
    missed = {text.split("'")[1] for text in caught.value.context["problems"]}
    assert missed == {fqn for fqn in ucpstore.open(run.path) if fqn.startswith("3.")}
    assert not (tmp_path / "c").exists()
    mapping = Mapping.from_json({"rename": rename})
    ucpstore.convert(run.path, tmp_path / "c", to="deepspeed", layout=layout, mapping=mapping)
    resumed = resume_run(
        run.case.name, tmp_path / "c", tmp_path / "r", model="twin", wrap="unpiped"
    )
    back = {new: old for old, new in UNPIPED.items()}
    stages = {fqn: n for n, stage in enumerate(run.stages) for fqn in stage["parameters"]}
    seen = set()
    for key, value in resumed.run.tensors().items():
        state, _, fqn = key.partition(":")
        (new,) = [name for name in back if fqn.startswith(f"{name}.")]
        old = back[new] + fqn.removeprefix(new)
        stage = next(n for n in range(2) if f"{state}:{old}" in run.tensors(stage=n))
        assert value.tobytes() == run.full(state, old, stage=stage).tobytes(), key
        seen |= {old} if state == "exp_avg_sq" else set()
    assert seen == stages.keys()
    np.testing.assert_allclose(resumed.losses, continue_run(run.case.name), rtol=CLOSE)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("tp4-uneven-s1-fp32-dp1", {"tp": 2, "dp": 1}),
        ("tp2-uneven-s1-fp32-dp2", {"tp": 1, "dp": 3}),
    ],
)
def test_uneven_slices_at_another_tp_size(
    name: str, target: dict[str, Any], tmp_path: Path
) -> None:
    """Case 6 (DeepSpeed #8474): 10 rows over 4 ranks are 3, 3, 2, 2; 3 key-value heads over 2 are 2, 1."""
    run = deepspeed_run(name)
    fqn, rows = {
        4: ("model.layers.0.mlp.up_proj.weight", [3, 3, 2, 2]),
        2: ("model.layers.0.self_attn.k_proj.weight", [8, 4]),
    }[run.case.tp]
    held = [run.tensor("fp32", fqn, tp_rank=rank).shape[0] for rank in range(run.case.tp)]
    assert held == rows
    path = convert(run.path, tmp_path, target)
    resumed = resume(run, path, target, tmp_path / "resumed", further=0)
    assert different(run, resumed) == {}


def test_rank_11_gets_the_shard_of_rank_100(tmp_path: Path) -> None:
    """Case 7 (DeepSpeed #8452): numbers in names have two digits or more; 101 files, read and written."""
    info = {"universal_checkpoint_version": 0.4, "tp_replicated_parameter_patterns": ["norm"]}
    model = {
        "universal_checkpoint_info": info,
        "mp_world_size": 101,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 101},
    }
    folder = tmp_path / "run" / "global_step7"
    parts = []
    for rank in range(101):
        written = Checkpoint([{"rows": (1, 3), "norm": (2,)}], ranks=1, model=model, seed=rank)
        for tensors in written.values.values():
            tensors["norm"] = torch.ones(2)
        made = written.write(tmp_path / "one")
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("mp_rank_{}_model_states.pt", "zero_pp_rank_0_mp_rank_{}_optim_states.pt"):
            content = load(made / name.format("00"))
            torch.save(content, folder / name.format(f"{rank:02d}"))
        shutil.rmtree(tmp_path / "one")
        parts.append(written.values)
    (tmp_path / "run" / "latest").write_text("global_step7")
    opened = ucpstore.open(tmp_path / "run")
    for state, native in (("fp32", "fp32"), ("adam_m", "exp_avg"), ("adam_v", "exp_avg_sq")):
        expected = torch.cat([values[native]["rows"] for values in parts]).numpy()
        assert opened["rows"][state][...].tobytes() == expected.tobytes()
        assert opened["norm"][state].shape == (2,)
    ucpstore.convert(tmp_path / "run", tmp_path / "store")
    layout = Layout(tp=101, zero_stage=1)
    ucpstore.convert(tmp_path / "store", tmp_path / "native", to="deepspeed", layout=layout)
    for rank in (2, 10, 11, 99, 100):
        name = f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt"
        mine = load(tmp_path / "native" / "global_step7" / name)["optimizer_state_dict"]
        (flat,) = mine["single_partition_of_fp32_groups"]
        assert flat[:3].equal(parts[rank]["fp32"]["rows"][0])
    assert (tmp_path / "native/global_step7/mp_rank_100_model_states.pt").exists()
    back = ucpstore.open(tmp_path / "native")
    assert back["rows"].fp32[...].tobytes() == opened["rows"].fp32[...].tobytes()


@pytest.mark.parametrize("target", [{"dp": 4}, {"tp": 2, "dp": 2}])
def test_abnormal_loss_on_several_machines(target: dict[str, Any], tmp_path: Path) -> None:
    """Case 8 (DeepSpeed #7601): 2 machines of 2 ranks; what is cut by are ranks of groups, not of machines."""
    name = AUTOTP if "tp" in target else "s2-fp32-dp2"
    run = deepspeed_run(name)
    target = {**target, "zero_stage": 3}
    path = convert(run.path, tmp_path, target)
    resumed = resume(run, path, target, tmp_path / "resumed", node=2, further=0)
    assert different(run, resumed) == {}
    for rank in range(4):
        layout = Layout(**target)
        _, dp, tp = layout.coordinates(rank)
        file = path / "global_step3" / f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt"
        flat = load(file)["optimizer_state_dict"]["fp32_flat_groups"]
        for states in ucpstore.load(run.path, layout, rank).values():
            place = states["fp32"].buffer if "fp32" in states else None
            if place is not None:
                group, start = place
                value = states["fp32"].read()
                assert flat[group][start : start + value.size].numpy().tobytes() == value.tobytes()


# ------------------------------------------------------------------- cases 17 to 19


def hugging_face(run: Run, tag: str) -> Path:
    """What the Trainer and Accelerate keep beside the checkpoint, under the tag that they give it."""
    if tag != run.facts["tag"]:
        run.tag_path.rename(run.path / tag)
        (run.path / "latest").write_text(tag)
    for name in ("scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        torch.save({"state": 1}, run.path / name)
    (run.path / "trainer_state.json").write_text("{}")
    (run.path / "model.safetensors").write_bytes(b"\0" * 64)
    (run.path / "zero_to_fp32.py").write_text("")
    return run.path


@pytest.mark.parametrize(
    ("name", "stage", "tag"),
    [
        ("noscheduler-s1-fp32-dp2", 3, "global_step3"),
        ("noscheduler-s1-fp32-dp2", 2, "pytorch_model"),
        ("s3-bf16-dp2", 2, "global_step3"),
    ],
)
def test_the_trainer_cannot_load_a_universal_checkpoint(
    name: str, stage: int, tag: str, tmp_path: Path
) -> None:
    """Cases 17 and 18 (DeepSpeed #5430, #6470): no universal info, no flag, no other configuration."""
    run = copy_run(deepspeed_run(name), tmp_path)
    files = [*run.tag_path.glob("*model_states.pt")]
    assert not any("universal_checkpoint_info" in load(file) for file in files)
    hugging_face(run, tag)
    path = convert(run.path, tmp_path, {"dp": 3, "zero_stage": stage})
    assert (path / "latest").read_text() == tag
    assert {p.name for p in path.iterdir() if p.is_dir() and p.name[0] != "."} == {tag}
    asked: dict[str, Any] = {"trainer": True} if tag != "pytorch_model" else {"tag": tag}
    resumed = resume_run(
        name, path, tmp_path / "r", world=3, stage=stage, dtype=run.case.dtype, **asked
    )
    found = differences(run, resumed, continue_run(name), rtol=CLOSE if "fp32" in name else 2e-3)
    if "trainer" in asked:  # which throws the client's state away
        assert found.pop("client_state") == set(run.facts["client_state"])
    assert found == {}


def test_resumed_as_if_from_scratch_and_no_error(tmp_path: Path) -> None:
    """Case 19 (DeepSpeed #6691): after a load, everything is compared, and what is not there is loud."""
    run = deepspeed_run("frozen-s2-bf16-dp2")
    target = {"dp": 3, "zero_stage": 3}
    path = convert(run.path, tmp_path, target)
    saved = tmp_path / "saved"
    resumed = resume(run, path, target, tmp_path / "r", further=0, save=str(saved))  # into noise
    assert different(run, resumed) == {}
    # what the engine holds, by the user's own means
    assert {state.status for state in ucpstore.diff(saved, run.path).states} == {"equal"}
    for rank in range(3):  # an engine that left the frozen and the buffers as they were initialised

        def forget(content: dict[str, Any]) -> None:
            content["frozen_param_fragments"][FROZEN[0]].fill_(0.25)
            content["module"]["model.running_scale"].zero_()

        edit(saved / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", forget)
    damaged = ucpstore.diff(saved, run.path)
    assert not damaged.equal
    changed = {entry.fqn for entry in damaged.states if entry.status != "equal"}
    assert changed == {FROZEN[0], "model.running_scale"}
    (path / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(RuntimeError):
        resume(run, path, target, tmp_path / "again", further=0)
    with pytest.raises(IncompleteSourceError, match=r"zero_pp_rank_1_mp_rank_00_model_states\.pt"):
        ucpstore.open(path)


# ------------------------------------------------------------------- cases 33, 37, 39


def test_the_optimizer_state_of_a_bf16_run_is_gone(tmp_path: Path) -> None:
    """Case 33 (DeepSpeed #7571): weights only, which is told; no moments are made up for a native target."""
    run = copy_run(deepspeed_run("s0-bf16-dp2"), tmp_path)
    edit(
        run.tag_path / "mp_rank_00_model_states.pt", lambda content: content.update(optimizer=None)
    )
    report = ucpstore.convert(run.path, tmp_path / "store")
    assert any("weights only" in text for text in report.warnings)
    assert set(ucpstore.open(tmp_path / "store")["lm_head.weight"]) == {"weight"}
    for source in (run.path, tmp_path / "store"):
        with pytest.raises(UnsupportedSourceError, match="weights only"):
            ucpstore.convert(source, tmp_path / "c", to="deepspeed", layout=Layout(dp=1))
        assert not (tmp_path / "c").exists()


def test_the_learning_rate_starts_anew(tmp_path: Path) -> None:
    """Case 37 (DeepSpeed #3875): the client owns the scheduler; told by every route, and no crash."""
    run = deepspeed_run("noscheduler-s1-fp32-dp2")
    layout = Layout(dp=3, zero_stage=3)
    options: dict[str, Any] = {"to": "deepspeed", "layout": layout}
    for report in (
        ucpstore.convert(run.path, tmp_path / "store"),
        ucpstore.convert(run.path, tmp_path / "c", **options),
        ucpstore.convert(tmp_path / "store", tmp_path / "d", **options),
        ucpstore.plan(run.path, tmp_path / "e", **options),
        ucpstore.load(run.path, layout, 0),
    ):
        assert any("no lr_scheduler state" in text for text in report.warnings), report
    resumed = resume(run, tmp_path / "d", {"dp": 3, "zero_stage": 3}, tmp_path / "r")
    assert differences(run, resumed, continue_run(run.case.name), rtol=CLOSE) == {}
    (file,) = (tmp_path / "d").glob("*/zero_pp_rank_2_*_model_states.pt")
    assert load(file)["lr_scheduler"] is None


@pytest.mark.parametrize("stage", [1, 3])
def test_some_files_are_on_another_machine(stage: int, tmp_path: Path) -> None:
    """Case 39 (DeepSpeed #2319): every missing file is named, and nothing is written."""
    run = copy_run(deepspeed_run(f"s{stage}-fp32-dp4"), tmp_path)
    gone = [path for rank in (2, 3) for path in run.tag_path.glob(f"zero_pp_rank_{rank}_*")]
    assert len(gone) == (4 if stage == 3 else 2)
    for path in gone:
        path.unlink()
    choices: list[dict[str, Any]] = [{}, {"to": "deepspeed", "layout": Layout(dp=2)}]
    for options in choices:
        with pytest.raises(IncompleteSourceError) as caught:
            ucpstore.convert(run.path, tmp_path / "c", **options)
        names = {Path(name).name for name in caught.value.context["missing"]}
        assert names == {path.name for path in gone}
        assert all(name in str(caught.value) for name in names)
        assert not (tmp_path / "c").exists()
    result = CliRunner().invoke(main, ["convert", str(run.path), str(tmp_path / "c")])
    assert result.exit_code == 3
    assert gone[0].name in result.output


# ------------------------------------------------------------------- cases 46 to 48

NORMS = '[[rule]]\nmatch = "**norm.weight"\ntp = "{}"'


def test_norms_differ_between_ranks_under_sequence_parallelism(tmp_path: Path) -> None:
    """Case 46 (Megatron-DeepSpeed #223): an error that says by how much; the first or the mean if asked for."""
    run = copy_run(deepspeed_run(AUTOTP), tmp_path)

    def nudge(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].data.add_(1e-3)

    for rank in range(2):
        edit(run.tag_path / f"zero_pp_rank_{rank}_mp_rank_01_optim_states.pt", nudge)
    norm = "model.norm.weight"
    for layout in (Layout(tp=1, dp=2), Layout(tp=2, dp=1)):
        dest = tmp_path / f"tp{layout.tp}"
        with pytest.raises(IntegrityError, match=r"differ, by at most 0\.001") as caught:
            ucpstore.convert(run.path, dest, to="deepspeed", layout=layout)
        assert caught.value.kind == Kind.REPLICAS_DIFFER
        assert not (dest / "latest").exists()
    one = run.tensor("fp32", norm)
    mean = (one + (one + np.float32(1e-3))) / np.float32(2)
    for words, expected in (("replicate(first)", one), ("partial", mean)):
        path, rules = tmp_path / words, Patterns.parse(NORMS.format(words))
        layout = Layout(tp=1, dp=2)
        ucpstore.convert(run.path, path, to="deepspeed", layout=layout, patterns=rules)
        resumed = resume(run, path, {"tp": 1, "dp": 2}, path / "r", further=0)
        assert resumed.run.tensor("fp32", norm).tobytes() == expected.tobytes()
        vectors = {fqn for fqn in run.facts["parameters"] if fqn.endswith("norm.weight")}
        changed = {"fp32": vectors, "weight": vectors} if words == "partial" else {}
        assert different(run, resumed) == changed
    check = ucpstore.check_patterns(run.path)
    assert any("0.001" in str(finding) for finding in check.findings)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_swiglu_is_merged_wrongly(tp: int, tmp_path: Path) -> None:
    """Case 47 (Bigscience #338): 4 ranks with weight and bias of gate (positive) and up (negative)."""
    layer = "language_model.encoder.layers.0.mlp.dense_h_to_4h"
    gate = {"weight": torch.arange(1.0, 25.0).reshape(12, 2), "bias": torch.arange(1.0, 13.0)}
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_2_sub_params_cat_dim_0": [
            rf"language_model.encoder.layers.\d+.mlp.dense_h_to_4h.{kind}" for kind in gate
        ],
    }
    model = {
        "universal_checkpoint_info": info,
        "mp_world_size": 4,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 4},
    }
    folder = tmp_path / "run" / "global_step7"
    folder.mkdir(parents=True)
    for rank in range(4):
        parts = {
            f"{layer}.{kind}": torch.cat([v.chunk(4)[rank], -v.chunk(4)[rank]])
            for kind, v in gate.items()
        }
        written = Checkpoint([{n: tuple(v.shape) for n, v in parts.items()}], ranks=2, model=model)
        for factor, state in enumerate(written.values, 1):
            written.values[state] = {name: factor * value for name, value in parts.items()}
        made = written.write(tmp_path / "one")
        for file in made.iterdir():
            torch.save(load(file), folder / file.name.replace("mp_rank_00", f"mp_rank_0{rank}"))
        shutil.rmtree(tmp_path / "one")
    (tmp_path / "run" / "latest").write_text("global_step7")
    layout = Layout(tp=tp, dp=1, zero_stage=1)
    ucpstore.convert(tmp_path / "run", tmp_path / "c", to="deepspeed", layout=layout)
    for rank in range(tp):
        end = f"mp_rank_0{rank}_model_states.pt"
        module = load(tmp_path / "c" / "global_step7" / end)["module"]
        optimizer = load(
            tmp_path / "c" / "global_step7" / f"zero_pp_rank_0_{end.replace('model_', 'optim_')}"
        )["optimizer_state_dict"]
        at = 0
        for kind, value in gate.items():
            mine = value.tensor_split(tp)[rank]
            expected = torch.cat([mine, -mine])
            assert module[f"{layer}.{kind}"].float().equal(expected)
            moments = optimizer["base_optimizer_state"]["state"][0]["exp_avg_sq"]
            assert moments[at : at + expected.numel()].equal(3 * expected.flatten())
            at += expected.numel()
    back = ucpstore.open(tmp_path / "c")
    for kind, value in gate.items():
        whole = torch.cat([value, -value]).numpy()
        assert back[f"{layer}.{kind}"].fp32[...].tobytes() == whole.tobytes()


def test_mp_files_differ_only_in_their_random_state(tmp_path: Path) -> None:
    """Case 48 (Bigscience #380): kept where ranks match; what is lost or shared when they do not is told."""
    run = copy_run(deepspeed_run("pp2-tp2-s1-fp32-dp1"), tmp_path)
    trackers: list[dict[str, Any]] = []
    for rank in range(4):
        generator = torch.Generator().manual_seed(rank)
        states = OrderedDict({"model-parallel-rng": generator.get_state()})
        trackers.append({"torch_rng_state": generator.get_state(), "rng_tracker_states": states})

        def add(content: dict[str, Any], rank: int = rank) -> None:
            content["rng_state"] = [trackers[rank]]

        edit(run.tag_path / f"mp_rank_0{rank}_model_states.pt", add)

    def random_of(path: Path) -> list[int]:
        """Whose random state the files have, in the order of their ranks."""
        found = []
        for file in sorted(path.glob("*/mp_rank_*")):
            (state,) = load(file)["rng_state"]
            whose = [
                rank
                for rank, tracker in enumerate(trackers)
                if state["torch_rng_state"].equal(tracker["torch_rng_state"])
                and state["rng_tracker_states"]["model-parallel-rng"].equal(
                    tracker["rng_tracker_states"]["model-parallel-rng"]
                )
            ]
            found += whose
        return found

    layouts = [
        (Layout(dp=2, tp=2, pp=2), [0, 1, 2, 3], None),
        (Layout(dp=1, tp=3, pp=2), [0, 1, 0, 2, 3, 0], "2 ranks without a counterpart"),
        (Layout(dp=1, tp=1, pp=2), [0, 2], "2 of 4"),
        (Layout(dp=1, tp=2, pp=1), [0, 1], "2 of 4"),
    ]
    for number, (layout, expected, words) in enumerate(layouts):
        for source in (run.path, tmp_path / "store"):
            if not source.exists():
                ucpstore.convert(run.path, source)
            path = tmp_path / f"{number}-{source.name}"
            report = ucpstore.convert(source, path, to="deepspeed", layout=layout)
            assert random_of(path) == expected
            told = [text for text in report.warnings if "random number" in text]
            assert [words in text for text in told if words] == [True] * (words is not None)
            assert len(told) == (words is not None)
