"""Discovery: which files belong to a checkpoint, and what is said when some do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deepspeed_runs import copy_run, deepspeed_run
from tests.formats.deepspeed.synthetic import Checkpoint, edit
from tests.formats.deepspeed.test_silent_failures import FOUR, check_values, optimizer_file
from ucpstore.errors import (
    CheckpointNotFoundError,
    CorruptSourceError,
    IncompleteSourceError,
    Kind,
    UnrecognizedSourceError,
    UnsupportedSourceError,
)
from ucpstore.formats.deepspeed import FORMAT
from ucpstore.io import open_files
from ucpstore.pieces import PieceSource


def open_path(path: Path, tag: str | None = None) -> PieceSource:
    return FORMAT.open(open_files(path), tag=tag)


def test_latest_a_tag_or_the_folder_itself(tmp_path: Path) -> None:
    old = Checkpoint([FOUR], ranks=2, seed=1)
    old.write(tmp_path, "global_step5")
    (tmp_path / "latest").unlink()
    new = Checkpoint([FOUR], ranks=3, seed=2)
    folder = new.write(tmp_path, "global_step10")
    check_values(open_path(tmp_path), new)
    check_values(open_path(tmp_path, "global_step5"), old)
    check_values(open_path(folder), new)
    check_values(open_path(folder, "global_step10"), new)
    (tmp_path / "latest").write_text("global_step5\n")
    check_values(open_path(tmp_path), old)
    with pytest.raises(CheckpointNotFoundError, match="global_step50") as caught:
        open_path(tmp_path, "global_step50")
    assert "Did you mean 'global_step5'" in str(caught.value)


def test_latest_that_leads_nowhere(tmp_path: Path) -> None:
    Checkpoint([FOUR], ranks=2).write(tmp_path)
    (tmp_path / "latest").write_text("global_step8")
    with pytest.raises(IncompleteSourceError, match=r"'global_step8'.*global_step7"):
        open_path(tmp_path)
    for hostile in ("../elsewhere", "/etc", "", "a\0b", "x" * 5000):
        (tmp_path / "latest").write_text(hostile)
        with pytest.raises(CorruptSourceError, match="latest"):
            open_path(tmp_path)
    (tmp_path / "latest").unlink()
    with pytest.raises(UnrecognizedSourceError, match="global_step7"):
        open_path(tmp_path)


def test_detection(tmp_path: Path) -> None:
    assert not FORMAT.detect(open_files(tmp_path)).matches
    folder = Checkpoint([FOUR], ranks=2).write(tmp_path)
    assert FORMAT.detect(open_files(tmp_path)).matches
    assert FORMAT.detect(open_files(folder)).matches
    (tmp_path / "latest").write_text("global_step9")
    detection = FORMAT.detect(open_files(tmp_path))
    assert not detection.matches
    assert "global_step9" in detection.evidence


@pytest.mark.parametrize("stage", [1, 3])
def test_a_hole_in_the_ranks_is_named(tmp_path: Path, stage: int) -> None:
    folder = Checkpoint([FOUR], ranks=4, stage=stage).write(tmp_path)
    optimizer_file(folder, 2).unlink()
    with pytest.raises(IncompleteSourceError) as caught:
        open_path(tmp_path)
    assert caught.value.context["missing"] == [
        "global_step7/zero_pp_rank_2_mp_rank_00_optim_states.pt"
    ]


@pytest.mark.parametrize("stage", [1, 3])
def test_missing_last_ranks_are_known_from_the_partition_count(tmp_path: Path, stage: int) -> None:
    folder = Checkpoint([FOUR], ranks=4, stage=stage).write(tmp_path)
    for rank in (2, 3):
        optimizer_file(folder, rank).unlink()
        if stage == 3:
            (folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteSourceError, match="4 data-parallel ranks") as caught:
        open_path(tmp_path)
    missing = caught.value.context["missing"]
    assert [name.count("optim") for name in missing].count(1) == 2
    assert len(missing) == (4 if stage == 3 else 2)


def test_missing_model_files_are_named(tmp_path: Path) -> None:
    folder = Checkpoint([FOUR], ranks=2, stage=3).write(tmp_path)
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteSourceError, match=r"zero_pp_rank_1_mp_rank_00_model_states.pt"):
        open_path(tmp_path)
    (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteSourceError, match=r"mp_rank_00_model_states.pt"):
        open_path(tmp_path)


def test_missing_tensor_parallel_rank_is_named(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("tp2-s1-fp32-dp2"), tmp_path)
    for path in run.tag_path.glob("*mp_rank_01*"):
        path.unlink()
    with pytest.raises(IncompleteSourceError) as caught:
        open_path(run.path)
    names = {name.rsplit("/", 1)[-1] for name in caught.value.context["missing"]}
    assert names == {
        "mp_rank_01_model_states.pt",
        "zero_pp_rank_0_mp_rank_01_optim_states.pt",
        "zero_pp_rank_1_mp_rank_01_optim_states.pt",
    }


def test_no_optimizer_file(tmp_path: Path) -> None:
    folder = Checkpoint([FOUR], ranks=2).write(tmp_path)
    for rank in range(2):
        optimizer_file(folder, rank).unlink()
    with pytest.raises(IncompleteSourceError, match=r"no optimizer file .*zero_pp_rank_1_mp_rank"):
        open_path(tmp_path)


def test_files_of_an_older_larger_run_are_ignored_with_a_warning(tmp_path: Path) -> None:
    Checkpoint([FOUR], ranks=4, seed=1).write(tmp_path / "old")
    written = Checkpoint([FOUR], ranks=2, seed=2)
    folder = written.write(tmp_path / "new")
    for rank in (2, 3):
        source = optimizer_file(tmp_path / "old" / "global_step7", rank)
        source.rename(optimizer_file(folder, rank))
    opened = open_path(tmp_path / "new")
    check_values(opened, written)
    assert any("ranks 2 to 3" in text for text in opened.warnings)


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    Checkpoint([FOUR], ranks=3).write(tmp_path / "old")
    folder = Checkpoint([FOUR], ranks=2).write(tmp_path / "new")
    optimizer_file(tmp_path / "old" / "global_step7", 1).replace(optimizer_file(folder, 1))
    with pytest.raises(CorruptSourceError, match="do not belong together"):
        open_path(tmp_path / "new")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layer_01-model_00-model_states.pt", "layer files of a pipeline"),
        ("layer_03-model_states.pt", "layer files of a pipeline"),
        ("layer_0_expert_2_mp_rank_00_model_states.pt", "MoE expert files"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "MoE expert files"),
        ("offloaded_tensors/rank00/t.swp", "NVMe"),
        ("zero/emb/fp32.pt", "universal checkpoint"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "several engines"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "ZeRO 1/2 and of ZeRO 3"),
        ("zero_pp_rank_0_mp_rank_0_optim_states.pt", "two files claim"),
    ],
)
def test_other_kinds_of_files_are_refused_by_name(tmp_path: Path, name: str, words: str) -> None:
    folder = Checkpoint([FOUR], ranks=2).write(tmp_path)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    with pytest.raises(UnsupportedSourceError, match=words):
        open_path(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"param_shapes": None}, "stage 0"),
        ({"num_experts": [4]}, "MoE"),
        ({"ds_autoep_layers": [{}]}, "MoE"),
    ],
)
def test_other_kinds_of_model_files_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    Checkpoint([FOUR], ranks=2, model=change).write(tmp_path)
    with pytest.raises(UnsupportedSourceError, match=words):
        open_path(tmp_path)


def test_a_state_of_another_length_is_refused(tmp_path: Path) -> None:
    """Muon of some versions keeps whole matrices; nothing may be guessed about such a state."""
    folder = Checkpoint([FOUR, {"bias": (18,)}], ranks=2).write(tmp_path)

    def grow(content: dict[str, Any]) -> None:
        state = content["optimizer_state_dict"]["base_optimizer_state"]["state"]
        state[1]["momentum_buffer"] = torch.zeros(17)

    for rank in range(2):
        edit(optimizer_file(folder, rank), grow)
    with pytest.raises(UnsupportedSourceError, match=r"momentum_buffer of group 1 \(bias\) has 17"):
        open_path(tmp_path)


def test_a_state_that_one_rank_lacks_is_named(tmp_path: Path) -> None:
    folder = Checkpoint([FOUR], ranks=2).write(tmp_path)

    def drop(content: dict[str, Any]) -> None:
        del content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]

    edit(optimizer_file(folder, 1), drop)
    with pytest.raises(IncompleteSourceError, match=r"zero_pp_rank_1.*'exp_avg'") as caught:
        open_path(tmp_path)
    assert caught.value.kind == Kind.MISSING_KEY


def test_groups_may_have_different_states(tmp_path: Path) -> None:
    folder = Checkpoint([FOUR, {"bias": (18,)}], ranks=2).write(tmp_path)

    def trade(content: dict[str, Any]) -> None:
        state = content["optimizer_state_dict"]["base_optimizer_state"]["state"]
        state[0]["momentum_buffer"] = state[0].pop("exp_avg")
        del state[0]["exp_avg_sq"]

    for rank in range(2):
        edit(optimizer_file(folder, rank), trade)
    source = open_path(tmp_path)
    assert list(source.parameters["emb"].states) == ["fp32", "momentum_buffer", "weight"]
    assert list(source.parameters["bias"].states) == ["fp32", "adam_m", "adam_v", "weight"]


def test_mappings_are_not_needed(tmp_path: Path) -> None:
    """Old fp16 files have no `param_slice_mappings` (Bigscience #343)."""
    written = Checkpoint([FOUR], ranks=3, optim={"param_slice_mappings": ...})
    written.write(tmp_path)
    check_values(open_path(tmp_path), written)


def test_partly_saved_client_state_is_kept_per_rank(tmp_path: Path) -> None:
    folder = Checkpoint([FOUR], ranks=3, stage=3, model={"iteration": 7, "note": "a"}).write(
        tmp_path
    )
    path = folder / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    edit(path, lambda content: content.update(note="b", extra=(1, 2)))
    document = open_path(tmp_path).common.document
    assert document["client"] == {"iteration": 7, "note": "a"}
    assert document["client_by_rank"] == {"dp_2_mp_0": {"note": "b", "extra": {"$tuple": [1, 2]}}}


def test_entries_of_the_module_that_are_neither_parameter_nor_buffer(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s2-fp32-dp2"), tmp_path)

    def add(content: dict[str, Any]) -> None:
        content["module"]["norm._extra_state"] = {"amax": [1.0, 2.0]}
        content["module"]["stray"] = torch.arange(3)

    edit(run.tag_path / "mp_rank_00_model_states.pt", add)
    source = open_path(run.path)
    assert source.parameters["stray"].states["buffer"].dtype == "int64"
    assert "neither" in source.parameters["stray"].attributes["note"]
    extras = source.common.document["framework"]["module_extras"]
    assert extras == {"norm._extra_state": {"amax": [1.0, 2.0]}}
    assert any("norm._extra_state" in text for text in source.warnings)


@pytest.mark.parametrize("name", ["exclude-frozen-s2-fp32-dp2", "exclude-frozen-s3-bf16-dp2"])
def test_excluded_frozen_parameters_are_reported(name: str) -> None:
    source = open_path(deepspeed_run(name).path)
    assert any("exclude_frozen_parameters" in text for text in source.warnings)


@pytest.mark.parametrize("name", ["unstepped-s1-fp32-dp2", "unstepped-s3-bf16-dp2"])
def test_an_optimizer_that_never_stepped(name: str) -> None:
    source = open_path(deepspeed_run(name).path)
    assert any("never took a step" in text for text in source.warnings)


def test_a_missing_scheduler_is_reported() -> None:
    source = open_path(deepspeed_run("noscheduler-s1-fp32-dp2").path)
    assert any("lr_scheduler" in text for text in source.warnings)
    assert source.common.document["scheduler"] is None


def test_model_files_of_an_older_larger_run_are_ignored_with_a_warning(tmp_path: Path) -> None:
    written = Checkpoint([FOUR], ranks=2)
    folder = written.write(tmp_path)
    for path in list(folder.iterdir()):
        (folder / path.name.replace("mp_rank_00", "mp_rank_01")).write_bytes(b"stale")
    source = open_path(tmp_path)
    check_values(source, written)
    assert source.parallelism["tp"] == 1
    assert any("ranks 1 to 1" in text and "model-parallel" in text for text in source.warnings)


@pytest.mark.parametrize(
    ("key", "value"), [("mp_world_size", 10**30), ("mp_world_size", 3), ("dp_world_size", 10**30)]
)
def test_world_sizes_that_the_files_contradict(tmp_path: Path, key: str, value: int) -> None:
    """`dp_world_size` counts other things too (MiCS) and is never relied on."""
    written = Checkpoint([FOUR], ranks=2, model={key: value})
    written.write(tmp_path)
    if key == "dp_world_size":
        check_values(open_path(tmp_path), written)
        return
    expected = IncompleteSourceError if value < 100 else CorruptSourceError
    with pytest.raises(expected, match="model-parallel"):
        open_path(tmp_path)


def test_quantized_frozen_parameters_are_refused(tmp_path: Path) -> None:
    model = {
        "frozen_param_shapes": {"ice": torch.Size([3])},
        "frozen_param_fragments": {"ice": torch.zeros(2, dtype=torch.int8)},
        "ds_config": {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
    }
    Checkpoint([FOUR], ranks=2, stage=3, model=model).write(tmp_path)
    with pytest.raises(UnsupportedSourceError, match="quantized"):
        open_path(tmp_path)


def test_a_frozen_fragment_of_another_length_is_refused(tmp_path: Path) -> None:
    model = {
        "frozen_param_shapes": {"ice": torch.Size([3])},
        "frozen_param_fragments": {"ice": torch.zeros(1)},
    }
    Checkpoint([FOUR], ranks=2, stage=3, model=model).write(tmp_path)
    with pytest.raises(UnsupportedSourceError, match=r"'ice' is stored .* expected shape \[2\]"):
        open_path(tmp_path)


def test_zenflow_is_reported(tmp_path: Path) -> None:
    config = {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}
    Checkpoint([FOUR], ranks=2, model={"ds_config": config}).write(tmp_path)
    assert any("ZenFlow" in text for text in open_path(tmp_path).warnings)
