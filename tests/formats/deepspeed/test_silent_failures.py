"""Checkpoints that today's tools get wrong without a word, or refuse for no reason.

The numbers are those of the catalogue of user failures that these tests come from; each quotes the
reports behind it.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.deepspeed_runs import copy_run, deepspeed_run
from tests.formats.deepspeed.synthetic import Checkpoint, edit
from tests.formats.deepspeed.test_real_runs import bits, open_run, read, truth_of
from ucpstore.errors import (
    CorruptSourceError,
    IncompleteSourceError,
    Kind,
    SourceError,
    UnsafePickleError,
    UnsupportedSourceError,
)
from ucpstore.formats.deepspeed import FORMAT
from ucpstore.io import open_files
from ucpstore.pieces import PieceSource

OURS = {"exp_avg": "adam_m", "exp_avg_sq": "adam_v"}
# The sizes of DeepSpeed's documented example: 66 + 42 + 35 + 30 = 173 elements.
FOUR = {"emb": (11, 6), "l1": (7, 6), "l2": (5, 7), "back": (6, 5)}


def open_path(path: Path) -> PieceSource:
    return FORMAT.open(open_files(path))


def check_values(source: PieceSource, written: Checkpoint) -> None:
    """Everything that was written is read back bit by bit, and nothing else."""
    for state, tensors in written.values.items():
        for fqn, tensor in tensors.items():
            value = tensor.to(written.dtype).numpy()
            assert bits(read(source, fqn, OURS.get(state, state))) == bits(value), (fqn, state)
    assert set(source.parameters) == {name for group in written.groups for name in group}


def optimizer_file(folder: Path, rank: int = 0) -> Path:
    return folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def test_case_09_more_than_ten_ranks(tmp_path: Path) -> None:
    """case-09 (DeepSpeed #5283): rank files sorted as text put rank 10 before rank 2."""
    written = Checkpoint([{"early": (16, 60), "late": (5, 60)}], ranks=12)
    written.write(tmp_path)
    source = open_path(tmp_path)
    slots = {fragment.file for fragment in source.fragments("late", "fp32", _full((5, 60)))}
    assert slots == {
        f"global_step7/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (9, 10, 11)
    }
    check_values(source, written)


def test_case_10_a_real_run_of_twelve_ranks() -> None:
    """case-10 (DeepSpeed #1999): garbage from runs with many files."""
    run = deepspeed_run("wide-s1-fp32-dp12")
    source = open_run(run)
    for fqn, state, value in truth_of(run):
        assert bits(read(source, fqn, state)) == bits(value)


@pytest.mark.parametrize("stage", [1, 3])
def test_case_11_rank_numbers_of_three_digits(tmp_path: Path, stage: int) -> None:
    """case-11 (Bigscience #388): a two-digit pattern loses the ranks from 100 on."""
    written = Checkpoint([{"w": (101, 7), "v": (301,)}], ranks=101, stage=stage)
    written.write(tmp_path)
    check_values(open_path(tmp_path), written)


@pytest.mark.parametrize("declared", ["last rank only", "none", "all"])
def test_case_12_padding_over_several_ranks(tmp_path: Path, declared: str) -> None:
    """case-12 (DeepSpeed #6918): declared paddings were wrong where padding fills whole ranks."""
    paddings = {"last rank only": [0] * 7 + [13], "none": [0] * 8, "all": [0, 1] + [2] * 6}
    written = Checkpoint([{"tiny": (3,)}], ranks=8, declared_paddings=[paddings[declared]])
    written.write(tmp_path)
    check_values(open_path(tmp_path), written)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("remainder", [0, 1, -1])
def test_case_13_alignment(tmp_path: Path, ranks: int, remainder: int) -> None:
    """case-13 (DeepSpeed #1317): the group's length is a multiple of twice the ranks."""
    numel = 8 * ranks + remainder
    written = Checkpoint([{"a": (numel - 3,), "b": (3,)}], ranks=ranks)
    written.write(tmp_path)
    source = open_path(tmp_path)
    check_values(source, written)
    width = math.ceil(numel / (2 * ranks)) * 2
    lengths = {b.nbytes // 4 for b in source.bound("a", "adam_m").buffers}
    assert lengths == {width}


@pytest.mark.parametrize("name", ["roundrobin-s2-fp32-dp2", "roundrobin-s2-bf16-dp3"])
def test_case_14_round_robin_order(name: str) -> None:
    """case-14 (DeepSpeed #1165): the mappings have another order than the flat buffer.

    `ds_to_universal` follows the mappings and writes other parameters' values without an error.
    """
    run = deepspeed_run(name)
    source = open_run(run)
    (warning,) = [text for text in source.warnings if "param_slice_mappings" in text]
    assert "round_robin_gradients" in warning
    for fqn, state, value in truth_of(run):
        assert bits(read(source, fqn, state)) == bits(value)


def test_case_14_without_disagreement_nothing_is_warned(tmp_path: Path) -> None:
    """case-14: the warning is no noise."""
    Checkpoint([FOUR, {"bias": (18,)}], ranks=3).write(tmp_path)
    assert open_path(tmp_path).warnings == []


def test_case_15_parameters_aligned_to_16_bytes(tmp_path: Path) -> None:
    """case-15 (DeepSpeed #8277): unused elements between parameters."""
    written = Checkpoint([FOUR, {"bias": (7,), "x": (5,), "y": (6,)}], ranks=2, align=True)
    folder = written.write(tmp_path)
    body = torch.load(optimizer_file(folder), weights_only=False)["optimizer_state_dict"]
    assert body["param_alignment_paddings"] == [[2, 2, 1, 0], [1, 3, 0]]
    source = open_path(tmp_path)
    check_values(source, written)
    assert source.warnings == []


def test_case_15_lost_alignment_is_noticed(tmp_path: Path) -> None:
    """case-15: without its list of paddings such a file does not fit, and says so."""
    written = Checkpoint([FOUR], ranks=2, align=True, optim={"param_alignment_paddings": ...})
    written.write(tmp_path)
    with pytest.raises(CorruptSourceError, match=r"has 90 elements, expected 88") as caught:
        open_path(tmp_path)
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt: fp32 of group 0 (emb, l1" in str(
        caught.value
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_case_16_sub_groups_of_several_groups(tmp_path: Path, ranks: int) -> None:
    """case-16 (DeepSpeed #7584): `param_shapes` has sub-groups, `param_groups` has groups."""
    groups = [FOUR, {"b1": (7,), "b2": (1,), "b3": (13,)}]
    written = Checkpoint(groups, ranks=ranks, stage=3, sub_group_size=10)
    written.write(tmp_path)
    assert [len(inside) for inside in written.sub_groups()] > [1, 0]
    source = open_path(tmp_path)
    check_values(source, written)
    found = source.common.document["param_groups"]
    assert [(g["lr"], g["params"]) for g in found] == [(0.1, list(FOUR)), (0.2, ["b1", "b2", "b3"])]


def test_case_24_views_of_far_larger_storages(tmp_path: Path) -> None:
    """case-24 (DeepSpeed #2389): a saved view drags its whole storage along."""
    written = Checkpoint([FOUR], ranks=2)
    folder = written.write(tmp_path)

    def bloat(content: dict[str, Any]) -> None:
        body = content["optimizer_state_dict"]
        (flat,) = body["single_partition_of_fp32_groups"]
        whole = torch.full((100 * len(flat),), math.nan)
        whole[40 * len(flat) : 41 * len(flat)] = flat
        body["single_partition_of_fp32_groups"] = [whole[40 * len(flat) : 41 * len(flat)]]

    for rank in range(2):
        edit(optimizer_file(folder, rank), bloat)
    source = open_path(tmp_path)
    check_values(source, written)
    assert sum(b.nbytes for b in source.bound("emb", "fp32").buffers) == 173 * 4


@pytest.mark.parametrize("name", ["frozen-s3-fp32-dp2", "frozen-s3-bf16-dp3"])
def test_case_26_frozen_parameters_of_stage_3(name: str) -> None:
    """case-26 (DeepSpeed #3090): frozen weights are cut over the ranks, 7 elements over 2 or 3."""
    run = deepspeed_run(name)
    source = open_run(run)
    fqn = "model.adapter.weight"
    parameter = source.parameters[fqn]
    assert not parameter.trainable
    assert parameter.states["weight"].shape == (1, 7)
    files = {fragment.file for fragment in source.fragments(fqn, "weight", _full((1, 7)))}
    assert len(files) == run.case.dp
    assert bits(read(source, fqn, "weight")) == bits(run.tensor("weight", fqn))


@pytest.mark.parametrize("name", ["tied-reverse-s2-fp32-dp2", "tied-reverse-s3-bf16-dp2"])
def test_case_27_tied_weights(name: str) -> None:
    """case-27 (DeepSpeed #1896, Lightning #15694): the second name of a tied weight was lost."""
    run = deepspeed_run(name)
    source = open_run(run)
    assert source.parameters["lm_head.weight"].aliases == ("model.embed_tokens.weight",)
    assert "model.embed_tokens.weight" not in source.parameters


def test_case_27_without_the_map_shared_memory_tells(tmp_path: Path) -> None:
    """case-27: `shared_params` is empty on some ranks, but both names view the same memory."""
    run = copy_run(deepspeed_run("tied-s1-bf16-dp3"), tmp_path)
    edit(run.tag_path / "mp_rank_00_model_states.pt", lambda c: c["shared_params"].clear())
    source = open_path(run.path)
    (alias,) = run.facts["aliases"]
    assert source.parameters[run.facts["aliases"][alias]].aliases == (alias,)


@pytest.mark.parametrize("name", ["s2-fp32-dp2", "tied-s1-bf16-dp3", "tied-s3-fp32-dp2"])
def test_case_28_absurd_aliases(tmp_path: Path, name: str) -> None:
    """case-28 (DeepSpeed #3033): empty tensors share a pointer, so all names became one."""
    run = copy_run(deepspeed_run(name), tmp_path)
    first = next(iter(run.facts["parameters"]))
    stage3 = run.case.stage == 3

    def alias_everything(content: dict[str, Any]) -> None:
        names = [n for group in content["param_shapes"] for n in group]
        content["shared_params"].update({n: first for n in names if n != first})

    for rank in range(run.case.dp if stage3 else 1):
        start = f"zero_pp_rank_{rank}_" if stage3 else ""
        edit(run.tag_path / f"{start}mp_rank_00_model_states.pt", alias_everything)
    source = open_path(run.path)
    assert any("shared_params" in text for text in source.warnings)
    assert set(run.facts["parameters"]) <= set(source.parameters)
    for fqn, state, value in truth_of(run):
        assert bits(read(source, fqn, state)) == bits(value)


def test_case_31_buffers_keep_their_type() -> None:
    """case-31 (DeepSpeed #8515): an int64 buffer went through float32: 16777217 became 16777216."""
    run = deepspeed_run("s2-bf16-dp2")
    source = open_run(run)
    counter = read(source, "model.tokens_seen", "buffer")
    assert counter.dtype == np.int64
    assert counter.tolist() == [2**24 + 1, -3]
    assert read(source, "model.causal_mask", "buffer").dtype == np.bool_
    assert not set(run.facts["nonpersistent_buffers"]) & set(source.parameters)


def test_case_32_no_stage_recorded(tmp_path: Path) -> None:
    """case-32 (DeepSpeed #3089): `unknown zero stage`; files without the key are of stage 1."""
    written = Checkpoint([FOUR], ranks=2, optim={"zero_stage": ...})
    written.write(tmp_path)
    source = open_path(tmp_path)
    check_values(source, written)
    assert source.parallelism["zero_stage"] == 1
    assert source.parallelism["optimizer_class"] == "DeepSpeedZeroOptimizer"
    run = deepspeed_run("bf16opt-dp3")
    assert open_run(run).parallelism["optimizer_class"] == "BF16_Optimizer"


@pytest.mark.parametrize(
    ("state", "group", "places"),
    [
        ({"step": torch.tensor(7.0)}, {}, ["state"]),
        ({"step": 7}, {}, ["state"]),
        ({}, {"step": 7}, ["param_groups"]),
        ({"step": 7}, {"step": 0}, ["state", "param_groups"]),
    ],
    ids=["torch", "DeepSpeedCPUAdam", "apex", "FusedAdam"],
)
def test_case_36_places_of_the_step(
    tmp_path: Path, state: dict[str, Any], group: dict[str, Any], places: list[str]
) -> None:
    """case-36 (DeepSpeed #5289): three optimizers keep the step in three places."""
    folder = Checkpoint([FOUR], ranks=2).write(tmp_path)

    def move_step(content: dict[str, Any]) -> None:
        base = content["optimizer_state_dict"]["base_optimizer_state"]
        del base["state"][0]["step"]
        base["state"][0].update(state)
        base["param_groups"][0].update(group)

    for rank in range(2):
        edit(optimizer_file(folder, rank), move_step)
    document = open_path(tmp_path).common.document
    assert document["steps"] == dict.fromkeys(FOUR, 7)
    assert document["framework"]["optimizer"]["step"]["kept_in"] == places
    assert document["param_groups"][0].get("step") == group.get("step")


def test_case_38_steps_per_sub_group(tmp_path: Path) -> None:
    """case-38 (DeepSpeed #1823): sub-groups of stage 3 count their own steps."""
    written = Checkpoint([FOUR], ranks=2, stage=3, sub_group_size=30, steps=[7.0, 5.0, 6.0])
    written.write(tmp_path)
    steps = open_path(tmp_path).common.document["steps"]
    assert steps == {"emb": 7.0, "l1": 5.0, "l2": 5.0, "back": 6.0}


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("file", ["model", "optim"])
def test_case_41_code_in_a_file(tmp_path: Path, file: str, legacy: bool) -> None:
    """case-41 (DeepSpeed #8500): pickles run code; the class that does is named, nothing runs."""
    folder = Checkpoint([FOUR], ranks=2).write(tmp_path)
    path = optimizer_file(folder) if file == "optim" else folder / "mp_rank_00_model_states.pt"
    trace = tmp_path / "executed"

    def plant(content: dict[str, Any]) -> None:
        content["ds_config"] = {"harmless": Bomb(f"touch {trace}")}

    edit(path, plant, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UnsafePickleError, match="system"):
        open_path(tmp_path)
    assert not trace.exists()


class CountingFiles:
    """Files that count the bytes that are read."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data: bytes = self._inner.read(name, offset, nbytes)
        self.nbytes += len(data)
        return data

    def read_into(self, name: str, offset: int, buffers: Any) -> None:
        self.nbytes += sum(len(buffer) for buffer in buffers)
        self._inner.read_into(name, offset, buffers)


def test_case_42_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """case-42 (DeepSpeed #4025): conversions that load every shard whole need terabytes."""
    written = Checkpoint([{"w": (2000, 1024), "v": (2000, 1024)}], ranks=2)
    written.write(tmp_path)
    files = CountingFiles(open_files(tmp_path))
    source = FORMAT.open(files)  # type: ignore[arg-type]
    assert files.nbytes < 400_000  # of 57 MB
    files.nbytes = 0
    region = _full((2000, 1024)).intersect(_box((990, 0), (20, 1024)))
    assert region is not None
    value = read(source, "v", "adam_v", region)
    assert files.nbytes == value.nbytes == 20 * 1024 * 4
    assert bits(value) == bits(written.values["exp_avg_sq"]["v"][990:1010].numpy())


@pytest.mark.parametrize("shape", [(0,), (1,)])
def test_case_43_placeholders(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """case-43 (DeepSpeed #1748): stage 3 writes tensors of size 0, or 1, for the parameters."""
    module = OrderedDict((name, torch.empty(shape)) for name in FOUR)
    module["count"] = torch.tensor([41], dtype=torch.int64)
    model = {"module": module, "buffer_names": ["count"]}
    written = Checkpoint([FOUR, {"one": (1,)}], ranks=2, stage=3, model=model)
    written.write(tmp_path)
    source = open_path(tmp_path)
    assert read(source, "count", "buffer").tolist() == [41]
    assert list(source.parameters["emb"].states) == ["fp32", "adam_m", "adam_v"]
    for fqn, tensor in written.values["fp32"].items():
        assert bits(read(source, fqn, "fp32")) == bits(tensor.numpy())


def test_case_44_secondary_partitions_leave_no_trace(tmp_path: Path) -> None:
    """case-44 (DeepSpeed #7606): hpZ's second copy is never saved; the format is plain stage 3."""
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    written = Checkpoint([FOUR], ranks=4, stage=3, model={"ds_config": config})
    written.write(tmp_path)
    source = open_path(tmp_path)
    check_values(source, written)
    assert source.common.document["framework"]["ds_config"] == config


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("legacy", [False, True])
def test_case_45_truncated_files(tmp_path: Path, stage: int, legacy: bool) -> None:
    """case-45 (Lightning #688): a crash during a save leaves short files; no cut goes unnoticed."""
    model = {"iteration": 7}
    folder = Checkpoint([FOUR], ranks=2, stage=stage, model=model).write(tmp_path)
    for path in sorted(folder.iterdir()):
        if legacy:
            edit(path, lambda _: None, _use_new_zipfile_serialization=False)
        whole = path.read_bytes()
        for tenth in range(10):
            path.write_bytes(whole[: len(whole) * tenth // 10])
            with pytest.raises(SourceError, match=path.name):
                open_path(tmp_path)
        path.write_bytes(whole[:-1])
        with pytest.raises(SourceError, match=path.name):
            open_path(tmp_path)
        path.write_bytes(whole)
    open_path(tmp_path)


@pytest.mark.parametrize("prefix", ["", "bf16_", "fp16_"])
@pytest.mark.parametrize("underscore", ["_", ""])
@pytest.mark.parametrize("stage", [1, 3])
def test_case_49_prefixes(tmp_path: Path, prefix: str, underscore: str, stage: int) -> None:
    """case-49 (DeepSpeed #4434): the optimizer files' names differ by engine and version."""
    written = Checkpoint([FOUR], ranks=2, stage=stage, prefix=prefix)
    folder = written.write(tmp_path)
    for path in folder.glob("*_optim_states.pt"):
        path.rename(str(path).replace("_optim_states", f"{underscore}optim_states"))
    check_values(open_path(tmp_path), written)


def test_case_50_placeholders_alone_are_no_weights(tmp_path: Path) -> None:
    """case-50 (transformers #20082): users load ZeRO-3's model file and get sizes of 0."""
    folder = Checkpoint([FOUR], ranks=2, stage=3).write(tmp_path)
    for path in folder.glob("*_optim_states.pt"):
        path.unlink()
    with pytest.raises(IncompleteSourceError, match="ZeRO-3 placeholders") as caught:
        open_path(tmp_path)
    assert caught.value.kind == Kind.PLACEHOLDER
    for rank in range(2):
        assert f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" in str(caught.value)


def test_case_50_a_placeholder_among_weights(tmp_path: Path) -> None:
    """case-50: a stage-3 model file beside stage-1 optimizer files."""
    module = OrderedDict((name, torch.empty(0)) for name in FOUR)
    Checkpoint([FOUR], ranks=2, model={"module": module}).write(tmp_path)
    with pytest.raises(UnsupportedSourceError, match="'emb' is a ZeRO-3 placeholder") as caught:
        open_path(tmp_path)
    assert caught.value.kind == Kind.PLACEHOLDER


def _full(shape: tuple[int, ...]) -> Any:
    from ucpstore.layout.region import Region

    return Region.full(shape)


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    from ucpstore.layout.region import Region

    return Region(offsets, sizes)
