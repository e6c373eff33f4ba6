"""One change to a real checkpoint: the result is right, or an error or warning names what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.deepspeed_runs import Run, copy_run, deepspeed_run
from tests.formats.deepspeed.synthetic import Checkpoint, edit
from tests.formats.deepspeed.test_real_runs import bits, open_run, read, truth_of
from tests.formats.deepspeed.test_silent_failures import FOUR, optimizer_file
from ucpstore.errors import (
    CheckpointNotFoundError,
    CorruptSourceError,
    IntegrityError,
    Kind,
    PatternError,
    SourceError,
    UcpStoreError,
)
from ucpstore.formats.deepspeed import FORMAT
from ucpstore.io import open_files

Change = Callable[[dict[str, Any]], None]


def optims(run: Run) -> list[Path]:
    """Optimizer files of the first model-parallel rank, by data-parallel rank."""
    ranks = range(run.case.dp)
    return [next(run.tag_path.glob(f"*_rank_{d}_mp_rank_00_optim_states.pt")) for d in ranks]


def models(run: Run) -> list[Path]:
    return sorted(run.tag_path.glob("*_model_states.pt"))


def exchange(one: Path, other: Path) -> None:
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def base_of(content: dict[str, Any]) -> dict[str, Any]:
    """The state dict of the optimizer that DeepSpeed wraps."""
    body = content["optimizer_state_dict"]
    base: dict[str, Any] = body.get("base_optimizer_state") or body["optimizer_state_dict"]
    return base


def equals_truth(run: Run) -> bool:
    source = open_run(run)
    return all(bits(read(source, fqn, s)) == bits(value) for fqn, s, value in truth_of(run))


# ------------------------------------------------------------------ ranks that were exchanged


@pytest.mark.parametrize("name", ["s1-fp32-dp4", "s3-fp32-dp4", "bf16opt-dp3"])
def test_exchanged_optimizer_files(tmp_path: Path, name: str) -> None:
    """Nothing in a stage-3 file says its rank, but the name under which torch wrote it does."""
    run = copy_run(deepspeed_run(name), tmp_path)
    first, second, *_ = optims(run)
    exchange(first, second)
    with pytest.raises(CorruptSourceError, match="exchanged or renamed") as caught:
        open_run(run)
    assert f"{first.name}: its content was saved as {second.name}" in str(caught.value)


@pytest.mark.parametrize("name", ["frozen-s3-fp32-dp2", "tp2-s1-fp32-dp2"])
def test_exchanged_model_files(tmp_path: Path, name: str) -> None:
    run = copy_run(deepspeed_run(name), tmp_path)
    exchange(*models(run)[:2])
    with pytest.raises(CorruptSourceError, match="exchanged or renamed"):
        open_run(run)


@pytest.mark.parametrize("name", ["s1-fp32-dp4", "bf16opt-dp3"])
def test_exchanged_files_without_their_names_are_known_from_the_mappings(
    tmp_path: Path, name: str
) -> None:
    run = copy_run(deepspeed_run(name), tmp_path)
    first, second, *_ = optims(run)
    exchange(first, second)
    for path in (first, second):
        edit(path, lambda _: None)
    with pytest.raises(CorruptSourceError, match=r"this is what rank 1 should hold"):
        open_run(run)


def test_exchanged_partitions_that_end_where_parameters_end(tmp_path: Path) -> None:
    """The exchanged mappings are then those of another order, but not of a round-robin one."""
    group: dict[str, tuple[int, ...]] = {"a": (4, 2), "b": (4, 2)}
    folder = Checkpoint([group], ranks=2).write(tmp_path)
    exchange(optimizer_file(folder, 0), optimizer_file(folder, 1))
    for rank in range(2):
        edit(optimizer_file(folder, rank), lambda _: None)
    with pytest.raises(CorruptSourceError, match="param_slice_mappings"):
        FORMAT.open(open_files(tmp_path))


def test_file_names_that_only_differ_in_spelling(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s1-bf16-dp2"), tmp_path)
    for path in optims(run):
        path.rename(path.with_name(path.name.removeprefix("bf16_")))
    assert equals_truth(run)


# ------------------------------------------------------------------ files of another save


def set_step(content: dict[str, Any]) -> None:
    for state in base_of(content)["state"].values():
        state["step"] = torch.tensor(2.0) if torch.is_tensor(state["step"]) else 2


def halve_lr(content: dict[str, Any]) -> None:
    for group in base_of(content)["param_groups"]:
        group["lr"] /= 2


@pytest.mark.parametrize("name", ["s1-fp32-dp4", "s3-fp32-dp4", "bf16opt-dp3"])
@pytest.mark.parametrize(
    ("change", "words"),
    [(set_step, "step of unit 0 is 2.0 and 3.0"), (halve_lr, "'lr' of group 0 is")],
)
def test_a_rank_of_another_step(tmp_path: Path, name: str, change: Change, words: str) -> None:
    run = copy_run(deepspeed_run(name), tmp_path)
    path = optims(run)[1]
    edit(path, change)
    with pytest.raises(CorruptSourceError, match="do not belong together") as caught:
        open_run(run)
    assert words in str(caught.value)
    assert path.name in str(caught.value)


def test_a_stage_3_model_file_of_another_step(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s3-fp32-dp4"), tmp_path)
    edit(models(run)[0], lambda content: content.update(global_steps=7))
    with pytest.raises(CorruptSourceError, match="global_steps is 3 and 7"):
        open_run(run)


def test_a_tensor_parallel_model_file_with_other_names(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("tp2-s1-fp32-dp2"), tmp_path)
    edit(models(run)[1], lambda content: content["module"].update(extra=torch.zeros(2)))
    with pytest.raises(CorruptSourceError, match="module names 'extra' in only one of them"):
        open_run(run)


def test_a_model_file_whose_steps_the_optimizer_did_not_take(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s1-fp32-dp4"), tmp_path)
    edit(models(run)[0], lambda content: content.update(global_steps=9, skipped_steps=2))
    assert any("counts 3 steps, but" in text for text in open_run(run).warnings)
    edit(models(run)[0], lambda content: content.update(global_steps=5, skipped_steps=2))
    assert not any("counts 3 steps" in text for text in open_run(run).warnings)


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("s1-fp32-dp2", "s1-bf16-dp2", "bf16.enabled"),
        ("s2-fp32-dp2", "roundrobin-s2-fp32-dp2", "zero_optimization.round_robin_gradients"),
        ("s3-fp32-dp2", "s3-bf16-dp2", "bf16.enabled"),
        ("s2-fp32-dp2", "s1-fp32-dp2", "zero_optimization.stage"),
    ],
)
@pytest.mark.parametrize("kind", ["optimizer", "model"])
def test_a_file_of_another_run_of_the_same_model(
    tmp_path: Path, name: str, other: str, words: str, kind: str
) -> None:
    """Same shapes, same step, same rank: the configuration that both files record tells."""
    run = copy_run(deepspeed_run(name), tmp_path)
    find = models if kind == "model" else optims
    rank = 0 if kind == "model" else 1
    find(run)[rank].write_bytes(find(deepspeed_run(other))[rank].read_bytes())
    with pytest.raises(CorruptSourceError, match=f"do not belong together: ds_config {words}"):
        open_run(run)


def test_configurations_may_differ_in_what_is_local(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s1-fp32-dp2"), tmp_path)
    edit(optims(run)[1], lambda c: c["ds_config"].update(tensorboard={"job_name": "rank1"}))
    edit(optims(run)[1], lambda c: c["ds_config"]["zero_optimization"].update(overlap_comm=False))
    assert equals_truth(run)


# ------------------------------------------------------------------ order and shapes


def reverse_shapes(content: dict[str, Any]) -> None:
    shapes = content["param_shapes"]
    shapes[0] = type(shapes[0])(reversed(shapes[0].items()))


@pytest.mark.parametrize("name", ["s2-bf16-dp2", "legacy-s2-fp32-dp2", "roundrobin-s2-fp32-dp2"])
def test_another_order_of_param_shapes(tmp_path: Path, name: str) -> None:
    """Round robin explains a disagreement with the mappings only if it yields this very order."""
    run = copy_run(deepspeed_run(name), tmp_path)
    edit(models(run)[0], reverse_shapes)
    with pytest.raises(CorruptSourceError, match="param_slice_mappings of group 0 records"):
        open_run(run)


def test_another_order_in_one_stage_3_model_file(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s3-fp32-dp4"), tmp_path)
    edit(models(run)[0], reverse_shapes)
    with pytest.raises(CorruptSourceError, match="param_shapes has other shapes or another order"):
        open_run(run)


@pytest.mark.parametrize("bad", [7, "", "\ud800"])
def test_names_that_nothing_can_store(tmp_path: Path, bad: Any) -> None:
    run = copy_run(deepspeed_run("s1-fp32-dp2"), tmp_path)
    edit(models(run)[0], lambda content: content["module"].update({bad: torch.zeros(1)}))
    with pytest.raises(CorruptSourceError, match=r"module: found the name"):
        open_run(run)


# ------------------------------------------------------------------ groups and states


def swap_groups(content: dict[str, Any]) -> None:
    base_of(content)["param_groups"].reverse()


def swap_members(content: dict[str, Any]) -> None:
    first, *_, last = base_of(content)["param_groups"]
    first["params"], last["params"] = last["params"], first["params"]


def repeat_group(content: dict[str, Any]) -> None:
    groups = base_of(content)["param_groups"]
    groups[-1] = dict(groups[0])


@pytest.mark.parametrize("change", [swap_groups, swap_members, repeat_group])
@pytest.mark.parametrize("stage", [1, 3])
def test_groups_in_another_order(tmp_path: Path, stage: int, change: Change) -> None:
    """Two groups of one size: lengths tell nothing, moments would silently change owners."""
    groups: list[dict[str, tuple[int, ...]]] = [{"a": (5, 3)}, {"b": (3, 5)}]
    folder = Checkpoint(groups, ranks=2, stage=stage).write(tmp_path)
    for rank in range(2):
        edit(optimizer_file(folder, rank), change)
    with pytest.raises(CorruptSourceError, match="expected 0 to 1 in order"):
        FORMAT.open(open_files(tmp_path))


@pytest.mark.parametrize("name", ["s1-fp32-dp4", "s3-fp32-dp4"])
def test_a_state_that_no_group_owns(tmp_path: Path, name: str) -> None:
    run = copy_run(deepspeed_run(name), tmp_path)

    def add(content: dict[str, Any]) -> None:
        state = base_of(content)["state"]
        state[99] = state[0]

    edit(optims(run)[1], add)
    with pytest.raises(CorruptSourceError, match=r"\[99\], which are in no group"):
        open_run(run)


def test_what_an_optimizer_keeps_beside_its_states_is_kept(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s1-fp32-dp2"), tmp_path)

    def add(content: dict[str, Any]) -> None:
        base_of(content)["clock"] = 5
        base_of(content)["state"]["shared"] = {"k": 2}

    for path in optims(run):
        edit(path, add)
    optimizer = open_run(run).common.document["framework"]["optimizer"]
    assert optimizer["state_dict"] == {"clock": 5, "shared": {"k": 2}}


@pytest.mark.parametrize("name", ["s1-fp32-dp4", "s3-fp32-dp4"])
def test_moments_that_all_ranks_lack_in_one_group(tmp_path: Path, name: str) -> None:
    run = copy_run(deepspeed_run(name), tmp_path)
    for path in optims(run):
        edit(path, lambda content: base_of(content)["state"].pop(1))
    (warning,) = [t for t in open_run(run).warnings if "the optimizer has no exp_avg" in t]
    assert "group 1 (model.layers.0.self_attn.q_proj.bias" in warning


def test_master_weights_that_are_no_floats(tmp_path: Path) -> None:
    folder = Checkpoint([FOUR], ranks=2).write(tmp_path)

    def cast(content: dict[str, Any]) -> None:
        masters = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        masters[:] = [flat.to(torch.int32) for flat in masters]

    for rank in range(2):
        edit(optimizer_file(folder, rank), cast)
    with pytest.raises(CorruptSourceError, match="found elements of int32, expected floats"):
        FORMAT.open(open_files(tmp_path))


@pytest.mark.parametrize(("stage", "claimed"), [(1, 0), (1, 7), (3, 2)])
def test_a_stage_that_the_keys_contradict(tmp_path: Path, stage: int, claimed: int) -> None:
    folder = Checkpoint([FOUR], ranks=2, stage=stage, optim={"zero_stage": claimed}).write(tmp_path)
    with pytest.raises(CorruptSourceError, match=f"zero_stage is {claimed}, but") as caught:
        FORMAT.open(open_files(tmp_path))
    assert optimizer_file(folder).name in str(caught.value)


# ------------------------------------------------------------------ frozen, buffers, aliases


def test_a_frozen_fragment_without_a_shape(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("frozen-s2-bf16-dp2"), tmp_path)
    frozen = run.facts["frozen"][0]
    edit(models(run)[0], lambda content: content["frozen_param_shapes"].pop(frozen))
    with pytest.raises(CorruptSourceError, match=f"frozen_param_fragments holds '{frozen}'"):
        open_run(run)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_fragment_that_one_rank_lacks(tmp_path: Path, rank: int) -> None:
    run = copy_run(deepspeed_run("frozen-s3-fp32-dp2"), tmp_path)
    path = models(run)[rank]
    edit(path, lambda content: content["frozen_param_fragments"].pop(run.facts["frozen"][0]))
    with pytest.raises(CorruptSourceError, match=path.name) as caught:
        open_run(run)
    assert caught.value.kind == Kind.MISSING_KEY


@pytest.mark.parametrize("name", ["frozen-s2-bf16-dp2", "frozen-s3-fp32-dp2"])
def test_frozen_values_that_are_nowhere(tmp_path: Path, name: str) -> None:
    run = copy_run(deepspeed_run(name), tmp_path)
    frozen = run.facts["frozen"][0]

    def lose(content: dict[str, Any]) -> None:
        content["module"].pop(frozen)
        content["frozen_param_fragments"].pop(frozen)

    for path in models(run):
        edit(path, lose)
    assert any(frozen in text and "not saved" in text for text in open_run(run).warnings)


def test_entries_that_module_lacks_are_reported(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s2-fp32-dp2"), tmp_path)
    weight = next(iter(run.facts["parameters"]))

    def lose(content: dict[str, Any]) -> None:
        content["module"].pop("model.causal_mask")
        content["module"].pop(weight)

    edit(models(run)[0], lose)
    source = open_run(run)
    assert any("buffers" in text and "model.causal_mask" in text for text in source.warnings)
    assert any("trainable" in text and weight in text for text in source.warnings)
    assert bits(read(source, weight, "fp32")) == bits(run.full("fp32", weight))


def test_an_alias_with_values_of_its_own_is_reported(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("tied-s1-bf16-dp3"), tmp_path)
    (alias,) = run.facts["aliases"]
    assert not any("two tensors" in text for text in open_run(run).warnings)
    edit(models(run)[0], lambda c: c["module"].update({alias: c["module"][alias].clone()}))
    assert any(f"'{alias}'" in text and "two tensors" in text for text in open_run(run).warnings)


# ------------------------------------------------------------------ tensor parallelism


def change_map(run: Run, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> str:
    """Apply `change` to the affine map of one sharded matrix, in every file; returns its name."""
    fqn = "model.layers.0.self_attn.q_proj.weight"

    def find(content: dict[str, Any]) -> None:
        for holder in (content, content.get("optimizer_state_dict") or {}):
            info = holder.get("universal_checkpoint_info")
            if info:
                maps = info["affine_map"]["params"]
                key = next(key for key in maps if "layers\\.0\\.self_attn\\.q_proj\\.w" in key)
                change(maps[key], maps[key]["ranks"][0]["pieces"][0])

    for path in run.tag_path.glob("*.pt"):
        edit(path, find)
    return fqn


def split(entry: dict[str, Any], piece: dict[str, Any], places: tuple[int, int]) -> None:
    """Cut the first rank's piece in two halves of rows, and put them at `places` of the shard."""
    rows, columns = piece["shape"]
    halves = []
    for source, dest in zip((0, rows // 2), places, strict=True):
        half = copy.deepcopy(piece)
        half["shape"] = [rows // 2, columns]
        half["source"] = [piece["source"][0] + source * columns, piece["source"][1]]
        half["dest"] = [piece["dest"][0] + dest * columns, piece["dest"][1]]
        halves.append(half)
    entry["ranks"][0]["pieces"] = halves


def test_pieces_that_share_a_place_in_the_shard(tmp_path: Path) -> None:
    """The logical tensor is covered, but rows of it would be read twice and others never."""
    run = copy_run(deepspeed_run("tp2-s1-bf16-dp1"), tmp_path)
    fqn = change_map(run, lambda entry, piece: split(entry, piece, (0, 0)))
    with pytest.raises(PatternError, match="in none and another box in two") as caught:
        open_run(run)
    assert fqn in str(caught.value)
    assert caught.value.kind == Kind.OVERLAP


def test_pieces_that_leave_a_part_of_the_shard_out(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("tp2-s1-bf16-dp1"), tmp_path)

    def shorten(entry: dict[str, Any], piece: dict[str, Any]) -> None:
        piece["shape"][0] -= 1

    change_map(run, shorten)
    with pytest.raises(PatternError, match=r"each of the 288 elements of rank 0 .* they hold 264"):
        open_run(run)


def test_twenty_thousand_pieces_end_soon(tmp_path: Path) -> None:
    """The same piece over and over: it must not become as many copies to compare."""
    run = copy_run(deepspeed_run("tp2-s1-bf16-dp1"), tmp_path)
    change_map(run, lambda e, piece: e["ranks"][0].update(pieces=[piece] * 20_000))
    with pytest.raises(PatternError, match="they hold 5760000"):
        open_run(run)


def test_pieces_in_another_order_are_fine(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("tp2-s1-bf16-dp1"), tmp_path)
    change_map(run, lambda entry, piece: split(entry, piece, (0, piece["shape"][0] // 2)))
    assert equals_truth(run)


@pytest.mark.parametrize("dimensions", [True, False])
def test_one_of_two_tensor_parallel_ranks(tmp_path: Path, dimensions: bool) -> None:
    """Files that deny the second rank: the other records of its existence are believed."""
    run = copy_run(deepspeed_run("tp2-s1-fp32-dp2"), tmp_path)

    def deny(content: dict[str, Any]) -> None:
        content["mp_world_size"] = 1
        if not dimensions:
            content.pop("checkpoint_parallel_dimensions", None)

    for path in models(run):
        edit(path, deny)
    for path in run.tag_path.glob("*mp_rank_01*"):
        path.unlink()
    words = "tp_degree" if dimensions else r"describes the ranks \[0, 1\], but there are 1"
    with pytest.raises((SourceError, PatternError), match=words):
        open_run(run)


# ------------------------------------------------------------------ files that change afterwards


def save_in_place(path: Path) -> None:
    edit(path, set_step)


def save_and_rename(path: Path) -> None:
    aside = path.with_name("aside.pt")
    aside.write_bytes(path.read_bytes())
    edit(aside, set_step)
    aside.replace(path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (save_in_place, IntegrityError),
        (save_and_rename, IntegrityError),
        (Path.unlink, CheckpointNotFoundError),
    ],
)
def test_a_file_that_changes_after_opening(
    tmp_path: Path, change: Callable[[Path], None], error: type[UcpStoreError]
) -> None:
    """The size may be the same and every offset valid: the values would be those of another step."""
    run = copy_run(deepspeed_run("s1-fp32-dp2"), tmp_path)
    source = open_run(run)
    path = optims(run)[0]
    change(path)
    with pytest.raises(error, match=path.name) as caught:
        read(source, "model.embed_tokens.weight", "fp32")
    assert caught.value.kind in (Kind.SOURCE_CHANGED, Kind.NOT_FOUND)
    other = read(source, "model.causal_mask", "buffer")
    assert np.array_equal(other, run.full("buffer", "model.causal_mask"))


def test_tags_and_latest_by_hand(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s1-fp32-dp2"), tmp_path)
    FORMAT.open(open_files(run.path), tag=f"{run.facts['tag']}/")
    (run.path / "latest").write_bytes(f"{run.facts['tag']}\r\n".encode())
    assert equals_truth(run)
    (run.path / "latest").write_text("x" * 300)
    with pytest.raises(CorruptSourceError, match="latest"):
        open_run(run)


# ------------------------------------------------------------------ sequence parallelism


@pytest.mark.parametrize("name", ["s1-fp32-dp2", "s3-fp32-dp2"])
def test_sequence_parallel_degree_recorded_as_tensor_parallel(name: str, tmp_path: Path) -> None:
    """DeepSpeed's own mpu for sequence parallelism answers tp_degree with its degree."""
    run = copy_run(deepspeed_run(name), tmp_path)
    dimensions = {"pp_degree": 1, "tp_degree": 2}
    for path in models(run):
        edit(path, lambda content: content.update(checkpoint_parallel_dimensions=dimensions))
    source = open_run(run)
    assert any("sequence parallelism" in text for text in source.warnings)
    assert source.parallelism["tp"] == 1
    assert equals_truth(run)


def test_tensor_parallel_ranks_that_are_denied_stay_an_error(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("tp2-s1-bf16-dp1"), tmp_path)
    for path in run.tag_path.glob("*mp_rank_01*"):
        path.unlink()
    edit(models(run)[0], lambda content: content.update(mp_world_size=1))
    with pytest.raises(SourceError):
        open_run(run)


def test_sequence_parallel_ranks_that_share_files_are_told(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s1-fp32-dp2"), tmp_path)

    def configure(content: dict[str, Any]) -> None:
        content["ds_config"] |= {"data_parallel_size": 2, "sequence_parallel_size": 2}

    for path in [*models(run), *optims(run)]:
        edit(path, configure)
    assert any("the last one wins" in text for text in open_run(run).warnings)
    assert not any(
        "last one wins" in text for text in open_run(deepspeed_run("s1-fp32-dp2")).warnings
    )
