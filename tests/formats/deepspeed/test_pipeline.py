"""Pipelines: stages united, tied layers compared, weights from layer files; nothing missing in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ucpstore
from tests.deepspeed_runs import PIPELINE_CASES, Run, copy_run, deepspeed_run
from tests.formats.deepspeed.synthetic import Checkpoint, edit
from tests.formats.deepspeed.test_real_runs import OURS, bits, open_run, read
from ucpstore.errors import (
    CorruptSourceError,
    IncompleteSourceError,
    IntegrityError,
    Kind,
    PatternError,
    UnsupportedSourceError,
)
from ucpstore.formats.deepspeed import FORMAT
from ucpstore.io import open_files
from ucpstore.layout.region import Region
from ucpstore.tagged import decode

EMBED = "tied_modules.embed.weight"
PLAIN = "pp2-s1-fp32-dp2"
STAGE0 = "pp2-s0-bf16opt-dp2"
BOTH = "pp2-tp2-bf16opt-dp2"


def told(name: str, folder: Path) -> Run:
    """A run, with the layers of its tied module written beside where no file tells them."""
    run = deepspeed_run(name)
    case = run.case
    if case.stage or case.dtype != "fp32" or case.named:
        return run
    run = copy_run(run, folder)
    (run.tag_path / "parameter_names.json").write_text('{"tied_modules": {"embed": [0, 7]}}')
    return run


def truth_of(run: Run) -> Iterator[tuple[str, str, np.ndarray]]:
    """Parameter, our state's name and value, once for every stage that has it."""
    for stage, facts in enumerate(run.facts["stages"]):
        for fqn, entry in facts["parameters"].items():
            own = run.case.stage == 0 and run.case.dtype == "fp32"  # weights are the masters
            for state in ("fp32", *entry["states"], *(() if own else ("weight",))):
                yield fqn, OURS.get(state, state), run.full(state, fqn, stage=stage)
        for fqn in facts["frozen"]:
            yield fqn, "weight", run.full("weight", fqn, stage=stage)
        for fqn in facts["buffers"]:
            yield fqn, "buffer", run.full("buffer", fqn, stage=stage)


def parallel_dimensions(run: Run) -> tuple[int, int, int]:
    return run.case.pp, run.case.tp, run.case.dp


@pytest.mark.parametrize("name", PIPELINE_CASES)
def test_states_equal_the_live_engines(name: str, tmp_path: Path) -> None:
    run = told(name, tmp_path)
    source = open_run(run)
    random = np.random.default_rng(7)
    expected = set()
    for fqn, state, truth in truth_of(run):
        expected.add((fqn, state))
        assert bits(read(source, fqn, state)) == bits(truth), (fqn, state)
        offsets = tuple(int(random.integers(0, size)) for size in truth.shape)
        sizes = [
            int(random.integers(1, n - o + 1)) for n, o in zip(truth.shape, offsets, strict=True)
        ]
        region = Region(offsets, tuple(sizes))
        assert bits(read(source, fqn, state, region)) == bits(truth[region.slices])
    assert {(f, s) for f, p in source.parameters.items() for s in p.states} == expected
    assert {"fp32", "adam_m", "adam_v"} <= set(source.parameters[EMBED].states)
    found = source.parallelism
    assert (found["pp"], found["tp"], found["dp"]) == parallel_dimensions(run)


@pytest.mark.parametrize("name", PIPELINE_CASES)
def test_store_equals_the_live_engines(name: str, tmp_path: Path) -> None:
    run = told(name, tmp_path)
    states = sorted({state for _, state, _ in truth_of(run)})
    assert ucpstore.convert(run.path, tmp_path / "store", states=states).committed
    verification = ucpstore.verify(tmp_path / "store", against=run.path)
    assert verification.ok, verification.summary()
    store = ucpstore.open(tmp_path / "store")
    for fqn, state, truth in truth_of(run):
        value = store[fqn][state][...]
        assert (value.dtype, value.shape) == (truth.dtype, truth.shape)
        assert value.tobytes() == truth.tobytes(), (fqn, state)


@pytest.mark.parametrize("name", PIPELINE_CASES)
def test_groups_and_steps_of_all_stages(name: str, tmp_path: Path) -> None:
    run = told(name, tmp_path)
    document = decode(open_run(run).common.document)
    stages = run.facts["stages"]
    groups = {group["weight_decay"]: group for group in document["param_groups"]}
    assert len(document["param_groups"]) == len(groups) == 2
    expected: dict[float, set[str]] = {0.1: set(), 0.0: set()}
    for group in (group for stage in stages for group in stage["groups"]):
        hyper = group["hyper"]
        expected[hyper["weight_decay"]].update(group["names"])
        for key, value in hyper.items():
            if key == "param_names":  # of all stages
                assert sorted(groups[hyper["weight_decay"]][key]) == sorted(
                    groups[hyper["weight_decay"]]["params"]
                )
                continue
            found = groups[hyper["weight_decay"]][key]
            assert (list(found) if isinstance(found, tuple) else found) == value
    for decay, names in expected.items():
        assert sorted(groups[decay]["params"]) == sorted(names)
    steps = {fqn: p["step"] for stage in stages for fqn, p in stage["parameters"].items()}
    assert document["steps"] == steps
    assert set(document["steps"].values()) == {3.0}
    buffers = {fqn for stage in stages for fqn in stage["buffers"]}
    assert set(document["framework"]["buffer_names"]) == buffers


def test_a_stage_without_parameters_of_a_group() -> None:
    run = deepspeed_run("pp4-bf16opt-dp1")
    assert [len(stage["groups"]) for stage in run.facts["stages"]] == [1, 2, 2, 2]


def test_parameters_are_in_the_order_of_the_layers_and_ids_have_gaps() -> None:
    source = open_run(deepspeed_run(PLAIN))
    prefixes = [fqn.partition(".")[0] for fqn in source.parameters]
    assert [*dict.fromkeys(prefixes)] == ["tied_modules", "2", "3", "5", "6"]


def test_tied_layers_have_copies_and_others_have_one() -> None:
    source = open_run(deepspeed_run(PLAIN))
    assert source.parameters[EMBED].pattern == "pp: replicate, dp: flat"
    for fqn, parameter in source.parameters.items():
        for state in parameter.states:
            assert source.bound(fqn, state).geometry.copies == (2 if fqn == EMBED else 1)


def test_a_function_over_a_tied_layer_has_no_file() -> None:
    source = open_run(deepspeed_run("pp2-s1-bf16-dp2"))
    assert source.bound(EMBED, "weight").geometry.copies == 1
    assert source.bound(EMBED, "fp32").geometry.copies == 2


def test_tensor_parallel_patterns_on_every_stage() -> None:
    source = open_run(deepspeed_run(BOTH))
    patterns = {fqn: p.pattern for fqn, p in source.parameters.items()}
    assert patterns["2.up.weight"] == patterns["5.up.bias"] == "tp: shard(0), dp: flat"
    assert patterns["5.down.weight"] == "tp: shard(1), dp: flat"
    assert patterns["6.weight"] == "tp: replicate, dp: flat"
    assert patterns[EMBED] == "pp: replicate, tp: replicate, dp: flat"
    assert source.bound(EMBED, "weight").geometry.copies == 4


def optimizer_files(run: Run, rank: int) -> list[Path]:
    return sorted(run.tag_path.glob(f"*_mp_rank_{rank:02d}_optim_states.pt"))


@pytest.mark.parametrize(("name", "rank"), [(PLAIN, 1), (BOTH, 3), (BOTH, 1), (STAGE0, 1)])
def test_copies_of_a_tied_layer_that_differ_are_an_error(
    tmp_path: Path, name: str, rank: int
) -> None:
    """The embedding comes first in the first group of the last stage too."""
    run = copy_run(deepspeed_run(name), tmp_path)

    def nudge(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[0] += 1e-3

    edit(optimizer_files(run, rank)[0], nudge)
    source = open_run(run)
    with pytest.raises(IntegrityError, match=rf"{EMBED}.*mp_rank_0{rank}") as caught:
        read(source, EMBED, "fp32")
    assert caught.value.kind == Kind.REPLICAS_DIFFER
    with pytest.raises(IntegrityError, match=EMBED):
        ucpstore.convert(run.path, tmp_path / "store")


def test_layer_files_of_a_tied_layer_that_differ_are_an_error(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(PLAIN), tmp_path)
    edit(run.tag_path / "layer_07-model_states.pt", lambda layer: layer["weight"].data.add_(1))
    with pytest.raises(IntegrityError, match=rf"{EMBED}.*layer_07"):
        read(open_run(run), EMBED, "weight")


@pytest.mark.parametrize("name", [PLAIN, BOTH, STAGE0])
@pytest.mark.parametrize("layer", [2, 5, 6])
def test_a_missing_layer_is_named(tmp_path: Path, name: str, layer: int) -> None:
    run = copy_run(deepspeed_run(name), tmp_path)
    paths = sorted(run.tag_path.glob(f"layer_0{layer}-*"))
    for path in paths:
        path.unlink()
    with pytest.raises(IncompleteSourceError) as caught:
        open_run(run)
    assert [Path(name).name for name in caught.value.context["missing"]] == [
        path.name for path in paths
    ]
    assert all(path.name in str(caught.value) for path in paths)


def test_a_missing_layer_of_one_tensor_parallel_rank_is_named(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(BOTH), tmp_path)
    (run.tag_path / "layer_05-model_01-model_states.pt").unlink()
    with pytest.raises(IncompleteSourceError, match=r"layer_05-model_01-model_states.pt"):
        open_run(run)


def test_a_missing_tied_layer(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("pp2-s1-fp32-dp1"), tmp_path)
    (run.tag_path / "layer_00-model_states.pt").unlink()
    with pytest.raises(IncompleteSourceError, match=f"'{EMBED}'.*tied module"):
        open_run(run)


def test_no_layer_file_at_all(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(PLAIN), tmp_path)
    for path in run.tag_path.glob("layer_*"):
        path.unlink()
    with pytest.raises(IncompleteSourceError, match="layer files"):
        open_run(run)


@pytest.mark.parametrize(("name", "lost"), [(PLAIN, "*_mp_rank_01_*"), (PLAIN, "*mp_rank_01_*")])
def test_a_missing_stage_is_named(tmp_path: Path, name: str, lost: str) -> None:
    run = copy_run(deepspeed_run(name), tmp_path)
    paths = list(run.tag_path.glob(lost))
    assert len(paths) in (2, 3)
    for path in paths:
        path.unlink()
    with pytest.raises(IncompleteSourceError) as caught:
        open_run(run)
    assert {Path(name).name for name in caught.value.context["missing"]} == {
        path.name for path in paths
    }


def test_a_missing_optimizer_file_of_one_stage_is_named(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(PLAIN), tmp_path)
    (run.tag_path / "zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(IncompleteSourceError, match=r"zero_pp_rank_1_mp_rank_01_optim_states.pt"):
        open_run(run)


def test_only_layer_files(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(PLAIN), tmp_path)
    for path in [*run.tag_path.glob("mp_rank*"), *run.tag_path.glob("*optim*")]:
        path.unlink()
    with pytest.raises(IncompleteSourceError, match=r"mp_rank_00_model_states.pt"):
        open_run(run)


def test_renamed_layers_are_refused(tmp_path: Path) -> None:
    """Two blocks have the same local names and shapes: only the record in the zip tells."""
    run = copy_run(deepspeed_run(PLAIN), tmp_path)
    one, two = (run.tag_path / f"layer_0{layer}-model_states.pt" for layer in (2, 5))
    one.rename(tmp_path / "kept")
    two.rename(one)
    (tmp_path / "kept").rename(two)
    with pytest.raises(CorruptSourceError, match="exchanged or renamed"):
        open_run(run)


def test_one_stage_twice_is_refused(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(PLAIN), tmp_path)
    first = torch.load(run.tag_path / "mp_rank_00_model_states.pt", weights_only=False)
    torch.save(first, run.tag_path / "mp_rank_01_model_states.pt")
    with pytest.raises(CorruptSourceError, match=r"both hold '2\.up\.weight'"):
        open_run(run)


def test_stages_of_other_steps_or_hyper_parameters_are_refused(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(PLAIN), tmp_path)

    def other(content: dict[str, Any]) -> None:
        groups = content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
        groups[1]["lr"] *= 2

    for path in optimizer_files(run, 1):
        edit(path, other)
    with pytest.raises(CorruptSourceError, match=r"do not belong together: 'lr' of group 1"):
        open_run(run)


def test_groups_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    """Equal hyper-parameters do not say which group the first stage left out."""
    run = copy_run(deepspeed_run("pp4-bf16opt-dp1"), tmp_path)

    def equal(content: dict[str, Any]) -> None:
        for group in content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            group.update(lr=0.1, weight_decay=0.1)

    for path in run.tag_path.glob("*optim_states.pt"):
        edit(path, equal)
    with pytest.raises(UnsupportedSourceError, match=r"has 1 param groups and .* 2"):
        open_run(run)


def test_a_layer_of_another_shape_is_refused(tmp_path: Path) -> None:
    for name in (PLAIN, STAGE0):
        run = copy_run(deepspeed_run(name), tmp_path / name)
        edit(
            run.tag_path / "layer_02-model_states.pt",
            lambda layer: layer.update({"up.weight": torch.zeros(3, 5)}),
        )
        with pytest.raises(CorruptSourceError, match=r"'2\.up\.weight' has shape \[3, 5\]"):
            open_run(run)


def test_mappings_that_leave_holes_are_refused_at_stage_0(tmp_path: Path) -> None:
    """There the order of the flat buffers is known from the mappings alone."""
    run = copy_run(deepspeed_run(STAGE0), tmp_path)
    content = torch.load(run.tag_path / "mp_rank_00_model_states.pt", weights_only=False)
    assert content["param_shapes"] is None

    def shift(content: dict[str, Any]) -> None:
        for address in content["optimizer_state_dict"]["param_slice_mappings"][1].values():
            address.start += 1

    edit(optimizer_files(run, 0)[0], shift)
    with pytest.raises(CorruptSourceError, match="param_slice_mappings of group 1"):
        open_run(run)


def test_tensor_parallel_pipelines_without_patterns_ask_for_them(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(BOTH), tmp_path)
    for path in run.tag_path.glob("mp_rank*"):
        edit(path, lambda content: content.pop("universal_checkpoint_info"))
    with pytest.raises(PatternError, match="2 tensor-parallel ranks") as caught:
        open_run(run)
    assert "tp_replicated_parameter_patterns" in caught.value.hint


def test_dimensions_come_from_the_layer_files_where_they_are_not_recorded(tmp_path: Path) -> None:
    """DeepSpeed before 2026 did not write checkpoint_parallel_dimensions."""
    run = copy_run(deepspeed_run(BOTH), tmp_path)
    for path in run.tag_path.glob("mp_rank*"):
        edit(path, lambda content: content.pop("checkpoint_parallel_dimensions"))
    source = open_run(run)
    assert (source.parallelism["pp"], source.parallelism["tp"]) == (2, 2)
    for fqn, state, truth in truth_of(run):
        assert bits(read(source, fqn, state)) == bits(truth)


def test_a_frozen_parameter_has_its_weight_only() -> None:
    parameter = open_run(deepspeed_run(PLAIN)).parameters["3.adapter"]
    assert not parameter.trainable
    assert [*parameter.states] == ["weight"]


def test_a_model_file_of_a_pipeline_alone(tmp_path: Path) -> None:
    Checkpoint([{"a": (4,)}], ranks=2, model={"module": None}).write(tmp_path)
    with pytest.raises(IncompleteSourceError, match="pipeline"):
        FORMAT.open(open_files(tmp_path))


def test_stages_that_no_file_is_of(tmp_path: Path) -> None:
    dimensions = {"checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": 1}}
    Checkpoint([{"a": (4,)}], ranks=2, model=dimensions).write(tmp_path)
    with pytest.raises(CorruptSourceError, match="2 pipeline stages"):
        FORMAT.open(open_files(tmp_path))
