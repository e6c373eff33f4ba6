"""Targets without ZeRO, for BF16_Optimizer and in fp16: loaded by unmodified DeepSpeed into noise.

CPUs have no instructions for fp16, so DeepSpeed refuses it; torch computes it all the same. Where a run is in
fp16, the one question that DeepSpeed asks about this is answered with yes, and everything else is its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import ucpstore
from tests.deepspeed_runs import copy_run, deepspeed_run
from tests.deepspeed_runs.resume import Resumed, continue_run, resume_run, train_run
from tests.formats.deepspeed.test_writer import (
    RELATIVE,
    change_weight_decay,
    contents,
    convert,
    differences,
    read_back,
    swap_moments,
    zero_second_moments,
)
from tests.schemas import validate
from ucpstore import Layout
from ucpstore.cli.main import main
from ucpstore.errors import PlanError
from ucpstore.formats.deepspeed.wrapper import engine_class, require_loadable, uses_fused_adam

MODEL = "mp_rank_00_model_states.pt"
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
OWN_GRADIENTS: dict[str, Any] = {"data_types": {}}


def load(path: Path, name: str = MODEL) -> dict[str, Any]:
    import torch

    (file,) = path.glob(f"global_step*/{name}")
    found: dict[str, Any] = torch.load(file, weights_only=False)
    return found


def unlike(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Places where two loaded files differ: keys, types, values, element types, bits."""
    import torch

    if torch.is_tensor(theirs):
        same = (
            torch.is_tensor(ours)
            and ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and torch.equal(ours.detach(), theirs.detach())
        )
        return [] if same else [where]
    if isinstance(theirs, dict):
        if not isinstance(ours, dict) or ours.keys() != theirs.keys():
            return [where]
        return [text for key in theirs for text in unlike(ours[key], theirs[key], f"{where}/{key}")]
    if isinstance(theirs, list | tuple):
        if type(ours) is not type(theirs) or len(ours) != len(theirs):
            return [where]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [text for i, (a, b) in pairs for text in unlike(a, b, f"{where}/{i}")]
    return [] if type(ours) is type(theirs) and ours == theirs else [where]


# ------------------------------------------------------------------- from and to ZeRO

TO_STAGE0: list[tuple[str, int, bool]] = [
    ("s1-fp32-dp2", 2, False),
    ("s2-bf16-dp2", 2, True),
    ("s2-bf16-dp2", 1, False),
    ("s3-bf16-dp2", 3, False),
    ("s3-fp32-dp2", 3, True),
    ("tied-s3-fp32-dp2", 2, True),
    ("tied-reverse-s3-bf16-dp2", 2, False),
    ("frozen-s1-fp32-dp2", 2, False),
    ("frozen-s2-bf16-dp2", 2, True),
    ("bf16opt-dp2", 2, False),
    ("roundrobin-s2-bf16-dp3", 3, True),
    ("aligned-s1-fp32-dp2", 1, False),
    ("subgroups-s3-fp32-dp2", 2, False),
    ("sgd-s3-bf16-dp2", 2, False),
    ("rmsprop-s2-fp32-dp3", 2, True),
    ("unstepped-s3-bf16-dp2", 2, False),
    ("client-s2-bf16-dp2", 2, True),
    ("noscheduler-s1-fp32-dp2", 2, False),
]


@pytest.mark.parametrize(("name", "dp", "store"), TO_STAGE0)
def test_zero_goes_on_without_zero(name: str, dp: int, store: bool, tmp_path: Path) -> None:
    run = deepspeed_run(name)
    path = convert(run.path, tmp_path / "c", Layout(dp=dp, zero_stage=0), store=store)
    names = {file.name for file in path.glob("global_step*/*")}
    assert names == {MODEL, "parameter_names.json"}
    read_back(run, path, 0)
    resumed = resume_run(
        name,
        path,
        tmp_path / "r",
        world=dp,
        stage=0,
        dtype=run.case.dtype,
        config=OWN_GRADIENTS,
        save=str(tmp_path / "own"),
    )
    wrapper = "AdamW" if run.case.dtype == "fp32" else "FP16_UnfusedOptimizer"
    if run.case.optimizer == "adamw":
        assert resumed.run.facts["zero_optimizer"] == wrapper
    found = differences(run, resumed, continue_run(name), RELATIVE[run.case.dtype])
    assert found == set()
    # what the engine saves of what it loaded is, key by key and bit by bit, what it was given
    ours, theirs = load(path), load(tmp_path / "own")
    assert unlike(ours["optimizer"], theirs["optimizer"]) == []
    assert unlike(ours["module"], theirs["module"]) == []
    client = run.facts["client_state"].keys() | {"args", "ema_loss", "rng_state"}
    assert ours.keys() == theirs.keys()
    for key in theirs.keys() - client - {"optimizer", "module", "ds_config", "lr_scheduler"}:
        assert unlike(ours[key], theirs[key], key) == []


FROM_STAGE0: list[tuple[str, int, int, bool]] = [
    ("s0-fp32-dp2", 1, 2, False),
    ("s0-fp32-dp2", 3, 3, True),
    ("tied-s0-fp32-dp2", 2, 2, True),
    ("frozen-s0-fp32-dp1", 3, 2, False),
    ("reversed-s0-bf16-dp1", 3, 2, False),
    ("named-s0-fp32-dp2", 2, 3, True),
    ("sgd-s0-fp32-dp1", 3, 1, False),
    ("s0-bf16-dp2", 1, 3, False),
    ("s0-bf16-dp2", 2, 2, True),
    ("s0-bf16-dp2", 3, 2, False),
    ("frozen-tied-s0-bf16-dp2", 3, 2, True),
    ("crossed-s0-bf16-dp2", 2, 1, False),
    ("fused-s0-bf16-dp2", 1, 2, False),
    ("fused-s0-bf16-dp2", 3, 3, True),
    ("crossed-fused-s0-bf16-dp1", 2, 2, False),
]


@pytest.mark.parametrize(("name", "stage", "dp", "store"), FROM_STAGE0)
def test_stage0_goes_on_with_zero(
    name: str, stage: int, dp: int, store: bool, tmp_path: Path
) -> None:
    run = deepspeed_run(name)
    if name == "frozen-s0-fp32-dp1":  # nothing else tells its parameters apart
        run = copy_run(run, tmp_path)
        names = [group["names"] for group in run.facts["groups"]]
        (run.tag_path / "parameter_names.json").write_text(json.dumps(names))
    path = convert(run.path, tmp_path / "c", Layout(dp=dp, zero_stage=stage), store=store)
    read_back(run, path, stage)
    resumed = resume_run(name, path, tmp_path / "r", world=dp, stage=stage, dtype=run.case.dtype)
    found = differences(run, resumed, continue_run(name), RELATIVE[run.case.dtype])
    assert found == set()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "name", ["s0-fp32-dp2", "named-s0-fp32-dp2", "crossed-s0-bf16-dp2", "fused-s0-bf16-dp2"]
)
def test_there_and_back_the_losses_are_the_same_to_the_last_bit(
    name: str, stage: int, tmp_path: Path
) -> None:
    run = deepspeed_run(name)
    between = convert(run.path, tmp_path / "a", Layout(dp=3, zero_stage=stage), store=True)
    path = convert(between, tmp_path / "b", Layout(dp=2, zero_stage=0))
    resumed = resume_run(name, path, tmp_path / "r", world=2, stage=0, dtype=run.case.dtype)
    assert differences(run, resumed, (), 0) == set()
    assert resumed.losses == continue_run(name)
    # DeepSpeed's own file of the run, key by key and bit by bit
    ours, theirs = load(path), load(run.path)
    optimizer = dict(theirs["optimizer"])
    if name.startswith("fused"):  # 0.19.8 leaves out the scaler in bf16; older versions need it
        scaler = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 3}
        optimizer = {**scaler, **optimizer}
    assert unlike(ours["optimizer"], optimizer) == []
    assert unlike(ours["module"], theirs["module"]) == []
    assert ours.keys() == theirs.keys()


def test_the_weights_of_a_flat_group_share_their_memory(tmp_path: Path) -> None:
    run = deepspeed_run("fused-s0-bf16-dp2")
    between = convert(run.path, tmp_path / "a", Layout(dp=1, zero_stage=2))
    path = convert(between, tmp_path / "b", Layout(dp=2, zero_stage=0))
    module = load(path)["module"]
    storages = {module[fqn].untyped_storage().data_ptr() for fqn in run.facts["parameters"]}
    assert len(storages) == len(run.facts["groups"]) == 2


def test_fp32_without_zero_from_bf16(tmp_path: Path) -> None:
    run = deepspeed_run("s2-bf16-dp2")
    path = convert(run.path, tmp_path / "c", Layout(dp=2, zero_stage=0, dtype="fp32"))
    resumed = resume_run("s2-bf16-dp2", path, tmp_path / "r", world=2, stage=0, dtype="fp32")
    for fqn in run.facts["parameters"]:
        assert resumed.run.tensor("weight", fqn).tobytes() == run.tensor("fp32", fqn).tobytes()
        for state in ("exp_avg", "exp_avg_sq"):
            assert resumed.run.tensor(state, fqn).tobytes() == run.tensor(state, fqn).tobytes()


@pytest.mark.parametrize("name", ["tp2-s3-fp32-dp2", "tp2-s0-bf16-dp1"])
def test_tensor_parallel_runs_go_on_whole(name: str, tmp_path: Path) -> None:
    run = deepspeed_run(name)
    path = convert(run.path, tmp_path / "c", Layout(dp=2, zero_stage=0))
    resumed = resume_run(name, path, tmp_path / "r", world=2, stage=0, dtype=run.case.dtype)
    for key, value in resumed.run.tensors().items():
        state, _, fqn = key.partition(":")
        assert value.tobytes() == run.full(state, fqn).tobytes(), key
    here = {key for key in run.tensors() if not key.startswith("client:")}
    assert {key for key in resumed.run.tensors() if not key.startswith("client:")} == here


# ------------------------------------------------------------------- BF16_Optimizer


@pytest.mark.parametrize(
    ("name", "dp"),
    [
        ("bf16opt-dp2", 3),
        ("s1-bf16-dp2", 3),
        ("s3-bf16-dp2", 2),
        ("s0-bf16-dp2", 2),
        ("tied-reverse-s3-bf16-dp2", 3),
    ],
)
def test_one_checkpoint_serves_both_classes_of_stage_1(name: str, dp: int, tmp_path: Path) -> None:
    run = deepspeed_run(name)
    path = convert(run.path, tmp_path / "c", Layout(dp=dp, zero_stage=1, dtype="bf16"))
    held = {}
    for wrapper, config in {
        "BF16_Optimizer": FP32_GRADIENTS,
        "DeepSpeedZeroOptimizer": OWN_GRADIENTS,
    }.items():
        resumed = resume_run(
            name,
            path,
            tmp_path / wrapper,
            world=dp,
            stage=1,
            dtype="bf16",
            config=config,
            save=str(tmp_path / f"{wrapper}-own"),
        )
        assert resumed.run.facts["zero_optimizer"] == wrapper
        found = differences(run, resumed, continue_run(name), RELATIVE["bf16"])
        assert found == set()
        held[wrapper] = load(tmp_path / f"{wrapper}-own", "bf16_zero_pp_rank_0_*")
    ours = load(path, "bf16_zero_pp_rank_0_*")["optimizer_state_dict"]
    for own in held.values():
        theirs = own["optimizer_state_dict"]
        theirs.pop("param_alignment_paddings", None)
        assert ours.keys() >= theirs.keys()
        for key in theirs.keys() - {"loss_scaler", "zero_stage", "single_partition_of_fp32_groups"}:
            assert unlike(ours[key], theirs[key], key) == []
        masters = "single_partition_of_fp32_groups"
        for mine, full in zip(ours[masters], theirs[masters], strict=True):
            assert unlike(mine, full[: len(mine)].clone()) == []
            assert not full[len(mine) :].any()


@pytest.mark.parametrize("accumulate", ["bf16", "fp32"])
def test_round_robin_deals_by_the_class_that_will_load(accumulate: str, tmp_path: Path) -> None:
    """Under ``round_robin_gradients`` the order tells the classes of stage 1 apart, so the layout must."""
    run = deepspeed_run("roundrobin-s2-bf16-dp3")
    layout = Layout(dp=2, zero_stage=1, grad_accum_dtype=accumulate)
    path = convert(run.path, tmp_path / "c", layout)
    config = {"data_types": {"grad_accum_dtype": accumulate}}
    assert load(path)["ds_config"]["data_types"] == config["data_types"]
    read_back(run, path, 1)
    other = {"data_types": {"grad_accum_dtype": {"bf16": "fp32", "fp32": "bf16"}[accumulate]}}
    for index, (chosen, good) in enumerate([(config, True), (other, False)]):
        resumed = resume_run(
            "roundrobin-s2-bf16-dp3",
            path,
            tmp_path / f"r{index}",
            world=2,
            stage=1,
            dtype="bf16",
            config=chosen,
        )
        losses = continue_run("roundrobin-s2-bf16-dp3")
        assert (differences(run, resumed, losses, RELATIVE["bf16"]) == set()) == good
    # the order is known again when it is read
    onward = convert(path, tmp_path / "d", Layout(dp=3, zero_stage=2))
    ours, theirs = (
        load(p, "bf16_zero_pp_rank_1_*")["optimizer_state_dict"] for p in (onward, run.path)
    )
    for key in ("base_optimizer_state", "single_partition_of_fp32_groups"):
        assert unlike(ours[key], theirs[key]) == []


# ------------------------------------------------------------------- fp16

DYNAMIC = {"fp16": {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}
STATIC = {"fp16": {"loss_scale": 64}}
UNSCALED = {"fp16": {"loss_scale": 1}}
OVERFLOW = {"fp16": {"initial_scale_power": 22, "hysteresis": 2}}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Resumed]:
    """Runs in fp16, each trained once."""
    made: dict[str, Resumed] = {}

    def make(name: str, stage: int, config: dict[str, Any]) -> Resumed:
        key = json.dumps([name, stage, config])
        if key not in made:
            folder = tmp_path_factory.mktemp("fp16") / "run"
            made[key] = train_run(name, folder, world=2, stage=stage, dtype="fp16", config=config)
        return made[key]

    return make


@pytest.mark.parametrize(
    ("name", "source", "target", "config"),
    [
        ("s0-fp32-dp2", 2, 0, DYNAMIC),
        ("s0-fp32-dp2", 3, 0, STATIC),
        ("s0-fp32-dp2", 1, 0, OVERFLOW),
        ("s0-fp32-dp2", 0, 1, DYNAMIC),
        ("s0-fp32-dp2", 0, 3, STATIC),
        ("s0-fp32-dp2", 0, 2, OVERFLOW),
        ("s0-fp32-dp2", 1, 3, DYNAMIC),
        ("s0-fp32-dp2", 0, 2, UNSCALED),
        ("s0-fp32-dp2", 3, 0, UNSCALED),
        ("fused-s0-bf16-dp2", 1, 0, UNSCALED),
        ("fused-s0-bf16-dp2", 0, 2, DYNAMIC),
        ("fused-s0-bf16-dp2", 3, 0, DYNAMIC),
        ("fused-s0-bf16-dp2", 0, 1, STATIC),
    ],
)
def test_fp16_goes_on(
    name: str,
    source: int,
    target: int,
    config: dict[str, Any],
    half: Callable[..., Resumed],
    tmp_path: Path,
) -> None:
    before = half(name, source, config)
    run = before.run
    path = convert(run.path, tmp_path / "c", Layout(dp=2, zero_stage=target), store=source == 0)
    read_back(run, path, target)
    resumed = resume_run(
        name, path, tmp_path / "r", world=2, stage=target, dtype="fp16", config=config
    )
    # see test_deepspeed_does_not_scale_the_loss_without_zero
    apart = config is not UNSCALED and (source == 0) != (target == 0)
    assert differences(run, resumed, () if apart else before.losses, 1e-3) == set()
    was, now = run.facts["scaler"], resumed.run.facts["scaler"]
    assert (was["cur_scale"] == 1) == (config is UNSCALED)
    for key in was.keys() & now.keys():
        if key != "cur_hysteresis":
            assert now[key] == was[key], key
    # and back again, to the last bit
    back = convert(path, tmp_path / "d", Layout(dp=2, zero_stage=source))
    name_of = MODEL if source == 0 else "*zero_pp_rank_1_*optim*"
    entry = "optimizer" if source == 0 else "optimizer_state_dict"
    ours, theirs = load(back, name_of)[entry], load(run.path, name_of)[entry]
    theirs.pop("param_alignment_paddings", None)
    for own in (ours, theirs):
        own["zero_stage"] = 0  # an enum's member and a number
        own.pop("fp32_flat_groups", None)  # its padding is whatever was in memory
        if target == 0:
            own.pop("overflow", None)  # not known without ZeRO
    objects = [vars(sd.pop("loss_scaler")) for sd in (ours, theirs) if "loss_scaler" in sd]
    for values in objects if target == 0 else []:
        values.pop("cur_hysteresis", None)  # nor this
    assert objects[:1] == objects[1:]
    assert unlike(ours, theirs) == []
    if config is OVERFLOW and target == 0:
        return  # the next overflow is waited for once more
    again = resume_run(
        name, back, tmp_path / "b", world=2, stage=source, dtype="fp16", config=config
    )
    assert again.losses == before.losses


def test_deepspeed_does_not_scale_the_loss_without_zero(
    half: Callable[..., Resumed], tmp_path: Path
) -> None:
    """Gradients are divided by the scale all the same: no checkpoint can hide this."""
    sizes = {}
    for stage in (0, 1):
        run = half("s0-fp32-dp2", stage, {**STATIC, "gradient_clipping": 0.0}).run
        values = [run.tensor("exp_avg", fqn) for fqn in run.facts["parameters"]]
        sizes[stage] = sum(float(np.abs(value).sum()) for value in values)
        report = ucpstore.convert(
            run.path,
            tmp_path / f"c{stage}",
            to="deepspeed",
            layout=Layout(dp=2, zero_stage=1 - stage),
        )
        assert any("divides gradients" in text for text in report.warnings)
    assert np.isclose(sizes[0] * 64, sizes[1], rtol=0.05)


def test_hysteresis_that_is_lost_is_told(half: Callable[..., Resumed], tmp_path: Path) -> None:
    run = half("s0-fp32-dp2", 1, OVERFLOW).run
    assert run.facts["counters"]["skipped_steps"] > 0
    report = ucpstore.convert(
        run.path, tmp_path / "c", to="deepspeed", layout=Layout(dp=2, zero_stage=0)
    )
    assert any("hysteresis" in text for text in report.warnings)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"loss_scale": 128}, {"cur_scale": 128.0}),
        ({"initial_scale_power": 9}, {"cur_scale": 512.0, "scale_window": 1000}),
    ],
)
def test_fp16_from_bf16_takes_the_layouts_scale(
    words: dict[str, Any], expected: dict[str, Any], stage: int, tmp_path: Path
) -> None:
    run = deepspeed_run("s2-bf16-dp2")
    layout = Layout(dp=2, zero_stage=stage, dtype="fp16", **words)
    path = convert(run.path, tmp_path / "c", layout)
    assert load(path, "*mp_rank_00_model_states.pt" if stage < 3 else "*rank_0_*model*")[
        "ds_config"
    ]["fp16"] == {"enabled": True}
    config = {"fp16": {"initial_scale_power": 4}}  # what the file says counts
    resumed = resume_run(
        "s2-bf16-dp2", path, tmp_path / "r", world=2, stage=stage, dtype="fp16", config=config
    )
    assert resumed.run.facts["scaler"].items() >= expected.items()
    for fqn in run.facts["parameters"]:
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            assert resumed.run.tensor(state, fqn).tobytes() == run.tensor(state, fqn).tobytes()
        rounded = run.tensor("fp32", fqn).astype(np.float16)
        assert resumed.run.tensor("weight", fqn).tobytes() == rounded.tobytes()
    assert np.allclose(resumed.losses, continue_run("s2-bf16-dp2"), rtol=2e-2)


def test_bf16_from_fp16_scales_no_loss(half: Callable[..., Resumed], tmp_path: Path) -> None:
    run = half("s0-fp32-dp2", 2, DYNAMIC).run
    path = convert(run.path, tmp_path / "c", Layout(dp=2, zero_stage=1, dtype="bf16"))
    resumed = resume_run("s0-fp32-dp2", path, tmp_path / "r", world=2, stage=1, dtype="bf16")
    assert resumed.run.facts["scaler"]["cur_scale"] == 1
    for fqn in run.facts["parameters"]:
        assert resumed.run.tensor("fp32", fqn).tobytes() == run.tensor("fp32", fqn).tobytes()
        rounded = run.tensor("fp32", fqn).astype(ml_dtypes.bfloat16)
        assert resumed.run.tensor("weight", fqn).tobytes() == rounded.tobytes()


# ------------------------------------------------------------------- which class loads


def test_the_class_is_the_one_that_deepspeed_chooses() -> None:
    """DeepSpeed's own function, asked for every configuration that a layout can describe."""
    code = (
        "import itertools, json, types, torch\n"
        "from deepspeed.runtime import engine as module\n"
        "from deepspeed.runtime.engine import DeepSpeedEngine as Engine\n"
        "module.is_zero_supported_optimizer = lambda optimizer: True\n"
        "types_of = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}\n"
        "found = []\n"
        "for stage, model, gradients, pipeline, offload in itertools.product(\n"
        "    range(4), types_of, [None, *types_of], [False, True], [False, True]\n"
        "):\n"
        "    engine = types.SimpleNamespace(\n"
        "        get_data_types=lambda: (types_of[model], types_of[gradients or model]),\n"
        "        zero_optimization=lambda: stage > 0, zero_optimization_stage=lambda: stage,\n"
        "        zero_allow_untested_optimizer=lambda: True, global_rank=1,\n"
        "        zero_cpu_offload=lambda: offload, zero_compute_grad_norm=lambda: True,\n"
        "        pipeline_parallelism=pipeline)\n"
        "    try:\n"
        "        chosen = Engine._do_optimizer_sanity_check(engine, None)\n"
        "    except NotImplementedError:\n"
        "        chosen = 'refused'\n"
        "    found.append([stage, model, gradients, pipeline, offload, chosen])\n"
        "print(json.dumps(found))\n"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True
    )
    answers = json.loads(done.stdout.splitlines()[-1])
    assert len(answers) == 4 * 3 * 4 * 2 * 2
    words = {
        None: {"torch.optim.Optimizer"},
        "fp16": {"FP16_UnfusedOptimizer"},
        "ddp_bf16": {"FP16_UnfusedOptimizer"},
        "bf16": {"BF16_Optimizer"},
        "zero_optimization": {"DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"},
    }
    seen = set()
    for stage, model, gradients, pipeline, offload, chosen in answers:
        layout = Layout(zero_stage=stage, dtype=model, grad_accum_dtype=gradients)
        seen.add(chosen)
        if chosen == "refused":
            with pytest.raises(PlanError, match="gradients are of the same type"):
                require_loadable(layout, pipeline=pipeline)
            continue
        zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
        found = engine_class(layout, {"zero_optimization": zero}, pipeline=pipeline)
        key = chosen.lower() if isinstance(chosen, str) else None
        assert found in words[key], (stage, model, gradients, pipeline, offload, chosen)
    assert len(seen) == len(words) + 1


@pytest.mark.parametrize(
    ("source_class", "hyper", "config", "expected"),
    [
        ("FP16_Optimizer", {}, {}, True),
        ("FP16_UnfusedOptimizer", {"bias_correction": 1}, {}, False),
        ("DeepSpeedZeroOptimizer", {"optimizer": 1}, {"optimizer": {"type": "AdamW"}}, True),
        ("x", {}, {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, False),
        ("x", {}, {"optimizer": {"type": "Lion"}}, False),
        ("x", {"bias_correction": 1, "amsgrad": 0}, {"optimizer": {"type": "AdamW"}}, True),
        ("x", {"betas": 0, "foreach": None}, {"optimizer": {"type": "AdamW"}}, False),
        ("x", dict.fromkeys(("lr", "betas", "eps", "weight_decay", "amsgrad")), {}, False),
        ("x", dict.fromkeys(("lr", "momentum", "dampening", "nesterov", "params")), {}, False),
        ("x", dict.fromkeys(("lr", "bias_correction", "betas", "eps", "weight_decay")), {}, True),
        ("x", dict.fromkeys(("lr", "bias_correction", "betas", "max_coeff")), {}, None),
        ("x", dict.fromkeys(("lr", "bias_correction", "betas", "amsgrad")), {}, None),
        ("x", dict.fromkeys(("lr", "mine")), {}, None),
    ],
)
def test_which_optimizer_is_told_or_asked(
    source_class: str, hyper: dict[str, Any], config: dict[str, Any], expected: bool | None
) -> None:
    if expected is None:
        with pytest.raises(PlanError, match="fused_adam=true"):
            uses_fused_adam(source_class, [hyper], config)
    else:
        assert uses_fused_adam(source_class, [hyper], config) is expected


@pytest.mark.parametrize(
    ("name", "layout", "match"),
    [
        ("s2-bf16-dp2", Layout(zero_stage=0, grad_accum_dtype="fp32"), "same type"),
        ("s2-bf16-dp2", Layout(zero_stage=0, dtype="fp16"), "initial_scale_power=16"),
        ("s2-bf16-dp2", Layout(dtype="fp16"), "loss_scale=1024"),
        ("s2-bf16-dp2", Layout(loss_scale=8), "expected fp16"),
        ("s2-bf16-dp2", Layout(zero_stage=0, initial_scale_power=8), "expected fp16"),
        ("s2-bf16-dp2", Layout(zero_stage=3, fused_adam=False), "expected 0"),
        ("s2-bf16-dp2", Layout(zero_stage=0, sub_group_size=8), "stage 3"),
    ],
)
def test_what_deepspeed_would_not_load_is_refused(
    name: str, layout: Layout, match: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=match):
        ucpstore.convert(deepspeed_run(name).path, tmp_path / "c", to="deepspeed", layout=layout)
    assert not (tmp_path / "c").exists()


def test_bf16_pipelines_without_zero_are_refused() -> None:
    """DeepSpeed 0.19.8 ends with ``KeyError: 0`` when it loads its own: it takes the model file's for a list."""
    with pytest.raises(PlanError, match="found a pipeline"):
        require_loadable(Layout(zero_stage=0, dtype="bf16"), pipeline=True)
    require_loadable(Layout(zero_stage=0, dtype="fp32"), pipeline=True)
    require_loadable(Layout(zero_stage=1, dtype="bf16"), pipeline=True)


def test_other_gradients_without_zero_are_told(tmp_path: Path) -> None:
    run = deepspeed_run("bf16opt-dp2")
    report = ucpstore.convert(
        run.path, tmp_path / "c", to="deepspeed", layout=Layout(dp=2, zero_stage=0)
    )
    assert any("grad_accum_dtype float32" in text for text in report.warnings)
    assert load(tmp_path / "c")["ds_config"]["data_types"]["grad_accum_dtype"] is None


def test_the_layout_overrules_the_source(tmp_path: Path) -> None:
    run = deepspeed_run("fused-s0-bf16-dp2")
    path = convert(run.path, tmp_path / "c", Layout(dp=2, zero_stage=0, fused_adam=False))
    assert ucpstore.open(path).source.parallelism["optimizer_class"] == "FP16_UnfusedOptimizer"
    read_back(run, path, 0)
    run = deepspeed_run("s0-bf16-dp2")
    path = convert(run.path, tmp_path / "d", Layout(dp=2, zero_stage=0, fused_adam=True))
    assert ucpstore.open(path).source.parallelism["optimizer_class"] == "FP16_Optimizer"
    read_back(run, path, 0)


def test_frozen_parameters_in_fp32_are_told(tmp_path: Path) -> None:
    """Nobody takes them out of the optimizer's groups there, if the user put them in."""
    path = deepspeed_run("frozen-s1-fp32-dp2").path
    for dtype, told in {"fp32": True, "bf16": False}.items():
        layout = Layout(dp=2, zero_stage=0, dtype=dtype)
        report = ucpstore.convert(path, tmp_path / dtype, to="deepspeed", layout=layout)
        assert any("frozen parameters are in no group" in w for w in report.warnings) == told


def test_layouts_are_read_from_text() -> None:
    text = "zero_stage=0, dtype=fp16, grad_accum_dtype=fp16, fused_adam=true, loss_scale=0.5"
    assert Layout.parse(text) == Layout(
        zero_stage=0, dtype="float16", grad_accum_dtype="float16", fused_adam=True, loss_scale=0.5
    )
    assert Layout.parse("initial_scale_power=0").initial_scale_power == 0
    for wrong in (
        "fused_adam=1",
        "fused_adam=yes",
        "loss_scale=0",
        "loss_scale=nan",
        "loss_scale=x",
        "initial_scale_power=65",
        "initial_scale_power=-1",
        "grad_accum_dtype=int8",
        "loss_scale=8,initial_scale_power=3",
    ):
        with pytest.raises(PlanError, match="layout"):
            Layout.parse(wrong)


def test_nothing_is_done_for_the_same_layout(tmp_path: Path) -> None:
    for name in ("s0-fp32-dp2", "s0-bf16-dp2", "fused-s0-bf16-dp2"):
        path = deepspeed_run(name).path
        report = ucpstore.convert(
            path, tmp_path / "c", to="deepspeed", layout=Layout(dp=2, zero_stage=0)
        )
        assert (report.tasks, report.url) == (0, str(path))


def test_plans_and_workers(tmp_path: Path) -> None:
    run = deepspeed_run("s2-bf16-dp2")
    request = ["plan", str(run.path), str(tmp_path / "c"), "--to", "deepspeed", "--json"]
    done = CliRunner().invoke(main, [*request, "--layout", "dp=2,zero_stage=0,fused_adam=false"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    validate(plan, "plan")
    for rank in plan["target"]["layout"]["ucp_info"]["ranks"]:
        assert sum(part[2] for flat in rank["buffers"] for part in flat["parts"]) == 11063 + 211
    layout = Layout(dp=2, zero_stage=0)
    one = contents(convert(run.path, tmp_path / "one", layout))
    ucpstore.convert(run.path, tmp_path / "two", to="deepspeed", layout=layout, workers=2)
    assert sorted(one) == [
        f"global_step3/{MODEL}",
        "global_step3/parameter_names.json",
        "latest",
    ]
    assert contents(tmp_path / "two") == one


# ------------------------------------------------------------------- negative controls


def swap_two_parameters(state: dict[str, Any]) -> None:
    entries = state["state"]
    shapes: dict[Any, int] = {}
    for index, entry in entries.items():
        other = shapes.setdefault(entry["exp_avg"].shape, index)
        if other != index:
            entries[index], entries[other] = entries[other], entries[index]
            return
    raise AssertionError("no two parameters have the same shape")


@pytest.mark.parametrize("name", ["s1-fp32-dp2", "s2-bf16-dp2"])
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (zero_second_moments, {"exp_avg_sq", "losses"}),
        (swap_moments, {"exp_avg", "exp_avg_sq", "losses"}),
        (swap_two_parameters, {"exp_avg", "exp_avg_sq", "losses"}),
        (change_weight_decay, {"hyper", "losses"}),
    ],
)
def test_the_comparison_notices_damage(
    damage: Callable[[dict[str, Any]], None], expected: set[str], name: str, tmp_path: Path
) -> None:
    import torch

    run = deepspeed_run(name)
    path = convert(run.path, tmp_path / "c", Layout(dp=2, zero_stage=0))
    root = load(path)
    optimizer = root["optimizer"]
    damage(optimizer.get("optimizer_state_dict", optimizer))
    torch.save(root, path / "global_step3" / MODEL)
    dtype = run.case.dtype
    resumed = resume_run(name, path, tmp_path / "r", world=2, stage=0, dtype=dtype)
    if dtype == "bf16" and damage is change_weight_decay:
        expected = {"hyper"}  # five steps of it are below bf16's precision
    assert differences(run, resumed, continue_run(name), RELATIVE[dtype]) == expected
