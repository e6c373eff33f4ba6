"""The ground truth itself: complete, plausible, and equal to a plain torch run where one exists."""

from __future__ import annotations

import itertools
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.deepspeed_runs import CASES, Case, Run, copy_run, deepspeed_run

GRID = [name for name in CASES if name.split("-")[0] in {"s1", "s2", "s3"}]
ADAM = ["exp_avg", "exp_avg_sq"]
OPTIMIZER_STATES = {
    "adamw": ADAM,
    "fused": ADAM,
    "sgd": ["momentum_buffer"],
    "rmsprop": ["grad_avg", "square_avg"],
}


@pytest.fixture(params=CASES)
def run(request: pytest.FixtureRequest) -> Run:
    return deepspeed_run(request.param)


def partition(sizes: list[int], world: int) -> tuple[int, int]:
    """Return the size of a rank's partition of a ZeRO-1/2 group, and the padding in all."""
    total = sum(sizes)
    width = math.ceil(total / (2 * world)) * 2
    return width, width * world - total


def group_sizes(run: Run, group: int) -> list[int]:
    names = run.facts["groups"][group]["names"]
    return [run.tensor("fp32", name).size for name in names]


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Compare on the scale of the whole array: moments are tiny, and small elements noisy."""
    wide = expected.astype(np.float64)
    assert found.shape == wide.shape
    assert np.abs(found.astype(np.float64) - wide).max() <= tolerance * np.abs(wide).max()


def test_the_cases_are_pairwise_complete() -> None:
    grid = [CASES[name] for name in GRID]
    for stage, dtype in itertools.product((1, 2, 3), ("fp32", "bf16")):
        assert any((case.stage, case.dtype) == (stage, dtype) for case in grid)
    for stage, dp in itertools.product((1, 2, 3), (2, 3, 4)):
        assert any((case.stage, case.dp) == (stage, dp) for case in grid)
    for dtype, dp in itertools.product(("fp32", "bf16"), (2, 3, 4)):
        assert any((case.dtype, case.dp) == (dtype, dp) for case in grid)


def test_every_parameter_has_its_states(run: Run) -> None:
    facts, case, tensors = run.facts, run.case, run.tensors(tp_rank=run.case.tp - 1)
    weights = {key.removeprefix("weight:") for key in tensors if key.startswith("weight:")}
    assert weights
    assert weights == facts["parameters"].keys() | set(facts["frozen"])
    assert {name for group in facts["groups"] for name in group["names"]} == facts[
        "parameters"
    ].keys()
    for name, parameter in facts["parameters"].items():
        first = initial_steps(case)
        stepped = case.steps + first > 0
        assert parameter["states"] == expected_states(case, parameter["group"], facts, stepped)
        assert parameter["step"] == (case.steps + first if has_step(parameter["states"]) else None)
        for state in ["fp32", *parameter["states"]]:
            array = tensors[f"{state}:{name}"]
            assert array.shape == tensors[f"weight:{name}"].shape
            assert array.dtype == (
                ml_dtypes.bfloat16 if case.name.startswith("bf16states") else np.float32
            )
            assert np.isfinite(array.astype(np.float32)).all()


def initial_steps(case: Case) -> int:
    """Return how often the 16-bit optimizers of stage 0 step, without gradients, to make states."""
    return int(case.stage == 0 and case.dtype == "bf16")


def expected_states(case: Case, group: int, facts: Mapping[str, Any], stepped: bool) -> list[str]:
    if not stepped:
        return []
    if case.optimizer == "muon":
        if not facts["groups"][group]["hyper"]["use_muon"]:
            return ADAM
        return [] if facts["opaque_states"] else ["momentum_buffer"]
    return OPTIMIZER_STATES[case.optimizer]


def has_step(states: list[str]) -> bool:
    return bool({"exp_avg", "square_avg"} & set(states))


def test_moments_are_not_trivial(run: Run) -> None:
    if not run.case.steps:
        return  # moments that were made without gradients are zeros
    for name, parameter in run.facts["parameters"].items():
        for state in parameter["states"]:
            moment = run.full(state, name)
            assert np.count_nonzero(moment) > 0, (state, name)
            if state in {"exp_avg_sq", "square_avg"}:
                assert (moment.astype(np.float32) >= 0).all()


def test_weights_are_the_rounded_masters(run: Run) -> None:
    for rank in range(run.case.tp):
        for name in run.facts["parameters"]:
            weight = run.tensor("weight", name, tp_rank=rank)
            master = run.tensor("fp32", name, tp_rank=rank)
            bf16 = run.case.dtype == "bf16"
            assert weight.dtype == (ml_dtypes.bfloat16 if bf16 else np.float32)
            np.testing.assert_array_equal(master.astype(weight.dtype), weight, strict=True)


def test_files_are_those_of_deepspeed(run: Run) -> None:
    case, files = run.case, {path.name for path in run.tag_path.iterdir()}
    prefix = "bf16_" if case.dtype == "bf16" else ""
    ranks = itertools.product(range(case.dp), range(case.tp))
    optimizer = {f"{prefix}zero_pp_rank_{d}_mp_rank_{t:02d}_optim_states.pt" for d, t in ranks}
    if case.stage == 3:
        model = {name.removeprefix(prefix).replace("optim", "model") for name in optimizer}
    else:
        model = {f"mp_rank_{t:02d}_model_states.pt" for t in range(case.tp)}
    if case.stage == 0:
        optimizer = set()
    assert files == optimizer | model
    assert (run.path / "latest").read_text() == run.facts["tag"] == f"global_step{case.steps}"
    zipped = {zipfile.is_zipfile(run.tag_path / name) for name in files}
    assert zipped == {not case.name.startswith("legacy")}


def test_counters_and_groups(run: Run) -> None:
    facts, case = run.facts, run.case
    assert facts["counters"] == {
        "global_steps": case.steps,
        "skipped_steps": 0,
        "global_samples": case.steps * case.world,  # DeepSpeed counts AutoTP's ranks too
        "dp_world_size": case.dp,
        "mp_world_size": case.tp,
    }
    assert facts["clip_grad"] == 1.0
    assert len(facts["losses"]) == case.steps
    if case.scheduler == "warmup":
        assert facts["scheduler"] == {"last_batch_iteration": case.steps - 1}
    else:
        assert (facts["scheduler"] is None) == (case.scheduler == "none")
    hypers = [group["hyper"] for group in facts["groups"]]
    if case.single_group:
        assert [hyper["weight_decay"] for hyper in hypers] == [0.1]
    elif case.optimizer != "muon":
        assert [hyper["weight_decay"] for hyper in hypers] == [0.1, 0.0]
        assert hypers[0]["lr"] != hypers[1]["lr"]


@pytest.mark.parametrize("name", GRID)
def test_groups_need_padding_and_parameters_straddle_ranks(name: str) -> None:
    run = deepspeed_run(name)
    dp = run.case.dp
    if run.case.stage == 3:
        sizes = [n for group in (0, 1) for n in group_sizes(run, group)]
        assert any(n % dp for n in sizes)
        return
    for group in (0, 1):
        sizes = group_sizes(run, group)
        width, padding = partition(sizes, dp)
        assert padding > 0
        ends = list(itertools.accumulate(sizes))
        inner = [width * rank for rank in range(1, dp)]
        assert any(end - n < cut < end for cut in inner for n, end in zip(sizes, ends, strict=True))


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("roundrobin-s2-fp32-dp2", "s2-fp32-dp2"),
        ("aligned-roundrobin-s2-fp32-dp2", "s2-fp32-dp2"),
        ("aligned-s1-fp32-dp2", "s1-fp32-dp2"),
        ("elastic-s2-fp32-dp2", "s2-fp32-dp2"),
        ("legacy-s2-fp32-dp2", "s2-fp32-dp2"),
        ("subgroups-s3-fp32-dp2", "s3-fp32-dp2"),
        ("legacy-s3-bf16-dp2", "s3-bf16-dp2"),
        ("elastic-s1-bf16-dp3", "s1-bf16-dp3"),
        ("s2-fp32-dp2", "s1-fp32-dp2"),
        ("s0-fp32-dp2", "s1-fp32-dp2"),
    ],
)
def test_layout_options_do_not_change_the_values(name: str, plain: str) -> None:
    """So the oracle of `round_robin_gradients` agrees with the getters of a run without it."""
    other = deepspeed_run(plain).tensors()
    mine = deepspeed_run(name).tensors()
    assert mine.keys() == other.keys()
    for key, array in mine.items():
        assert_close(array, other[key], 2e-5)


@pytest.mark.parametrize("name", ["noscheduler-s1-fp32-dp2", "client-s3-fp32-dp2"])
def test_truth_equals_a_plain_torch_run(name: str) -> None:
    """Ties every name to its own moments without any code of DeepSpeed."""
    import torch

    from tests.deepspeed_runs import model as models
    from tests.deepspeed_runs import recipe

    run = deepspeed_run(name)
    case = run.case
    model = models.build_model(case)
    optimizer = recipe.build_optimizer(model, case)
    scheduler = recipe.build_scheduler(optimizer, case)
    for step in range(case.steps):
        optimizer.zero_grad()
        for rank in range(case.dp):
            loss = recipe.loss_of(model, recipe.batch(case, step, rank), case)
            torch.autograd.backward(loss / case.dp)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.CLIP)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    for fqn, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for key, value in {"fp32": parameter.detach(), **state}.items():
            if key != "step":
                assert_close(run.tensor(key, fqn), value.numpy(), 1e-4)


def test_buffers_keep_values_that_floats_cannot_hold() -> None:
    run = deepspeed_run("s2-bf16-dp2")
    counter = run.tensor("buffer", "model.tokens_seen")
    assert counter.dtype == np.int64
    assert counter.tolist() == [2**24 + 1, -3]
    assert run.tensor("buffer", "model.causal_mask").dtype == np.bool_
    assert run.facts["nonpersistent_buffers"] == ["model.inv_freq"]
    assert "buffer:model.inv_freq" not in run.tensors()


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("tied-")])
def test_tied_parameters_have_one_name_and_one_alias(name: str) -> None:
    run = deepspeed_run(name)
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    if run.case.tied == "reverse":
        names.reverse()
    first, alias = names
    assert run.facts["aliases"] == {alias: first}
    assert first in run.facts["parameters"]
    assert alias not in run.facts["parameters"]


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].frozen])
def test_frozen_parameters_have_weights_only(name: str) -> None:
    run = deepspeed_run(name)
    assert run.facts["frozen"] == [
        "model.layers.0.self_attn.o_proj.weight",
        "model.adapter.weight",
    ]
    for fqn in run.facts["frozen"]:
        assert f"fp32:{fqn}" not in run.tensors()
    assert run.tensor("weight", "model.adapter.weight").size == 7


def test_tiny_groups_leave_ranks_with_nothing_but_padding() -> None:
    run = deepspeed_run("tiny-s1-fp32-dp8")
    assert [sum(group_sizes(run, group)) for group in (0, 1)] == [3, 1]
    assert partition(group_sizes(run, 0), 8) == (2, 13)


@pytest.mark.parametrize("name", ["wide-s1-fp32-dp12", "wide-s3-bf16-dp12"])
def test_a_parameter_lies_over_ranks_nine_to_eleven(name: str) -> None:
    run = deepspeed_run(name)
    names, sizes = run.facts["groups"][0]["names"], group_sizes(run, 0)
    assert names[-1] == "late.weight"
    width, _ = partition(sizes, 12)
    assert sum(sizes[:-1]) // width == 9
    assert (sum(sizes) - 1) // width == 11


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].tp > 1])
def test_tensor_parallel_shards_join_to_the_whole_model(name: str) -> None:
    run = deepspeed_run(name)
    sizes, dims = dict(run.case.sizes), run.facts["tp_dims"]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    head = hidden // sizes["num_attention_heads"]
    expected = {
        "self_attn.q_proj": ((hidden, hidden), 0),
        "self_attn.k_proj": ((sizes["num_key_value_heads"] * head, hidden), 0),
        "self_attn.v_proj": ((sizes["num_key_value_heads"] * head, hidden), 0),
        "self_attn.o_proj": ((hidden, hidden), 1),
        "mlp.gate_proj": ((inner, hidden), 0),
        "mlp.up_proj": ((inner, hidden), 0),
        "mlp.down_proj": ((hidden, inner), 1),
        "input_layernorm": ((hidden,), None),
    }
    for module, (shape, dim) in expected.items():
        fqn = f"model.layers.0.{module}.weight"
        assert dims[fqn] == dim
        for state in ["fp32", "exp_avg", "exp_avg_sq", "weight"]:
            assert run.full(state, fqn).shape == shape
            if dim is None:
                for rank in range(run.case.tp):
                    copy = run.tensor(state, fqn, tp_rank=rank)
                    np.testing.assert_array_equal(copy, run.tensor(state, fqn))


def test_uneven_tensor_parallel_widths() -> None:
    run = deepspeed_run("tp2-uneven-s1-fp32-dp2")
    prefix = "model.layers.0."

    def rows(module: str) -> list[int]:
        parts = [run.tensor("fp32", f"{prefix}{module}.weight", tp_rank=rank) for rank in (0, 1)]
        return [part.shape[0] for part in parts]

    assert rows("mlp.gate_proj") == [19, 18]
    assert rows("self_attn.k_proj") == [8, 4]
    assert rows("self_attn.q_proj") == [16, 8]


def test_a_copy_is_independent(tmp_path: Path) -> None:
    run = deepspeed_run("s1-fp32-dp2")
    copied = copy_run(run, tmp_path)
    (copied.path / "latest").write_text("other")
    assert (run.path / "latest").read_text() == "global_step3"
    assert copied.tag_path.is_dir()
    assert deepspeed_run("s1-fp32-dp2") == run


def test_truth_is_read_only() -> None:
    array = deepspeed_run("s1-fp32-dp2").tensor("fp32", "lm_head.weight")
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 0.0
