"""Tensor-parallel slices are put together by the affine map, or by the pattern lists, or not at all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.deepspeed_runs import copy_run, deepspeed_run
from tests.formats.deepspeed.synthetic import edit
from tests.formats.deepspeed.test_real_runs import bits, open_run, read, truth_of
from tests.schemas import validate
from ucpstore.errors import (
    CorruptSourceError,
    IntegrityError,
    Kind,
    PatternError,
    UnsupportedSourceError,
)
from ucpstore.formats.deepspeed import FORMAT
from ucpstore.formats.deepspeed.autotp import TensorParallel
from ucpstore.io import open_files
from ucpstore.layout.coverage import require_covered
from ucpstore.layout.geometry import Geometry, Strided
from ucpstore.layout.region import Region

TP_RUNS = ["tp2-s1-fp32-dp2", "tp2-uneven-s1-fp32-dp2", "tp4-uneven-s1-fp32-dp1", "tp2-s2-bf16-dp2"]


def change_info(path: Path, change: Any) -> None:
    """Alter `universal_checkpoint_info` wherever it was saved."""

    def alter(content: dict[str, Any]) -> None:
        for holder in (content, content.get("optimizer_state_dict", {})):
            if "universal_checkpoint_info" in holder:
                change(holder)

    for file in path.glob("*.pt"):
        edit(file, alter)


@pytest.mark.parametrize("name", TP_RUNS)
def test_lists_alone_give_the_same(tmp_path: Path, name: str) -> None:
    """Before 0.19.8 there was no affine map."""
    run = copy_run(deepspeed_run(name), tmp_path)
    change_info(run.tag_path, lambda holder: holder["universal_checkpoint_info"].pop("affine_map"))
    source = FORMAT.open(open_files(run.path))
    for fqn, state, value in truth_of(run):
        assert bits(read(source, fqn, state)) == bits(value)
    whole = open_run(deepspeed_run(name))
    for fqn, parameter in source.parameters.items():
        assert parameter.pattern == whole.parameters[fqn].pattern


def test_autotps_exact_names_become_a_few_rules() -> None:
    source = open_run(deepspeed_run("tp2-s1-fp32-dp2"))
    document = validate(source.common.document["patterns"], "patterns")
    assert [rule["tp"] for rule in document["rules"]] == [
        {"pattern": "replicate"},
        {"pattern": "shard", "dim": 1},
        {"pattern": "shard", "dim": 0},
    ]
    assert document["rules"][1]["match"] == [
        "model.layers.{n}.mlp.down_proj.weight",
        "model.layers.{n}.self_attn.o_proj.weight",
    ]


@pytest.mark.parametrize("name", TP_RUNS)
def test_patterns_and_cuts(name: str) -> None:
    run = deepspeed_run(name)
    source = open_run(run)
    for fqn, dim in run.facts["tp_dims"].items():
        parameter = source.parameters[fqn]
        words = "replicate" if dim is None else f"shard({dim})"
        assert parameter.pattern == f"tp: {words}, dp: flat"
        ends = (
            [0]
            if dim is None
            else np.cumsum(
                [run.tensor("fp32", fqn, tp_rank=rank).shape[dim] for rank in range(run.case.tp)]
            ).tolist()
        )
        expected = tuple(
            tuple(ends[:-1]) if d == dim else () for d in range(len(parameter.states["fp32"].shape))
        )
        assert source.cuts(fqn, "fp32") == expected


def test_without_any_information_a_rule_is_asked_for(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("tp2-s1-fp32-dp2"), tmp_path)
    change_info(run.tag_path, lambda holder: holder.pop("universal_checkpoint_info"))
    with pytest.raises(
        PatternError, match=r"has no universal_checkpoint_info.*2 tensor-parallel"
    ) as e:
        FORMAT.open(open_files(run.path))
    assert "tp_replicated_parameter_patterns" in e.value.hint


def test_replicas_that_differ_are_an_error(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("tp2-s1-fp32-dp2"), tmp_path)

    def nudge(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].data.add_(1e-3)

    for rank in range(2):
        edit(run.tag_path / f"zero_pp_rank_{rank}_mp_rank_01_optim_states.pt", nudge)
    source = FORMAT.open(open_files(run.path))
    with pytest.raises(IntegrityError, match=r"model.norm.weight.*mp_rank_01") as caught:
        read(source, "model.norm.weight", "fp32")
    assert caught.value.kind == Kind.REPLICAS_DIFFER


def children(slices: list[np.ndarray]) -> list[Geometry]:
    return [Strided(part.shape, slot) for slot, part in enumerate(slices)]


def assemble(geometry: Geometry, slices: list[np.ndarray], copy: int = 0) -> np.ndarray:
    """Evaluate a geometry over in-memory slices."""
    require_covered(geometry, fqn="w", state="fp32")
    out = np.full(geometry.shape, -1, slices[0].dtype)
    for piece in geometry.query(Region.full(geometry.shape), copy):
        flat = slices[piece.slot].reshape(-1)
        view = np.lib.stride_tricks.as_strided(
            flat[piece.offset :],
            piece.region.sizes,
            tuple(stride * flat.itemsize for stride in piece.strides),
        )
        out[piece.region.slices] = view
    return out


def table(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape)


@pytest.mark.parametrize("degree", [2, 4])
def test_two_sub_parameters(degree: int) -> None:
    """SwiGLU: every slice holds its part of the gate, then of the up projection; also for the bias."""
    for whole in (table(8 * degree, 3), table(8 * degree)):
        gate, up = np.split(whole, 2)
        slices = [
            np.concatenate([g, u])
            for g, u in zip(np.split(gate, degree), np.split(up, degree), strict=True)
        ]
        info = {"parameter_with_2_sub_params_cat_dim_0": [r"\d+.mlp.dense_h_to_4h"]}
        merged = TensorParallel(info, degree).merge("3.mlp.dense_h_to_4h.weight", children(slices))
        assert merged.pattern == "shard-nc(0)"
        assert (assemble(merged.geometry, slices) == whole).all()


@pytest.mark.parametrize(
    "info",
    [
        {
            "universal_checkpoint_version": 0.4,
            "parameter_with_sub_params": [
                {"patterns": ["^qkv$"], "shape": [(8, 4, 4), -1], "partition_dim": 0}
            ],
            "sub_param_shard_widths": {"^qkv$": [[4, 4], [2, 2], [2, 2]]},
        },
        {
            "universal_checkpoint_version": 0.2,
            "parameter_with_sub_params": [
                {"patterns": ["^qkv$"], "shape": ((8, 4, 4), 5), "partition_dim": 0}
            ],
        },
    ],
)
def test_fused_qkv(info: dict[str, Any]) -> None:
    whole = table(16, 5)
    parts = [np.split(section, 2) for section in np.split(whole, [8, 12])]
    slices = [np.concatenate([section[rank] for section in parts]) for rank in range(2)]
    merged = TensorParallel(info, 2).merge("qkv", children(slices))
    assert (assemble(merged.geometry, slices) == whole).all()


def test_sub_parameters_counted_by_old_versions() -> None:
    info = {
        "universal_checkpoint_version": 0.3,
        "parameter_with_sub_params": [{"patterns": ["qkv"], "shape": (3, -1), "partition_dim": 0}],
    }
    whole = table(12, 2)
    parts = [np.split(section, 2) for section in np.split(whole, 3)]
    slices = [np.concatenate([section[rank] for section in parts]) for rank in range(2)]
    merged = TensorParallel(info, 2).merge("qkv", children(slices))
    assert (assemble(merged.geometry, slices) == whole).all()
    info["universal_checkpoint_version"] = 0.4
    with pytest.raises(PatternError, match="sub_param_shard_widths"):
        TensorParallel(info, 2).merge("qkv", children(slices))


def test_uneven_widths_of_sub_parameters() -> None:
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_sub_params": [
            {"patterns": ["^qkv$"], "shape": [(6, 3, 3), 2], "partition_dim": 0}
        ],
        "sub_param_shard_widths": {"^qkv$": [[4, 2], [2, 1], [2, 1]]},
    }
    whole = table(12, 2)
    q, k, v = np.split(whole, [6, 9])
    slices = [np.concatenate([q[:4], k[:2], v[:2]]), np.concatenate([q[4:], k[2:], v[2:]])]
    merged = TensorParallel(info, 2).merge("qkv", children(slices))
    assert (assemble(merged.geometry, slices) == whole).all()
    info["sub_param_shard_widths"] = {"^qkv$": [[3, 3], [2, 1], [2, 1]]}
    with pytest.raises(PatternError, match="do not fit together"):
        TensorParallel(info, 2).merge("qkv", children(slices))


def test_replicate_row_and_default() -> None:
    info = {
        "tp_replicated_parameter_patterns": [r"\d+.norm"],
        "parameter_with_row_parallelism_patterns": [r"\d+.down"],
    }
    rules = TensorParallel(info, 2)
    whole = table(4, 6)
    rows, columns = np.split(whole, 2), np.split(whole, 2, axis=1)
    assert (assemble(rules.merge("1.up", children(rows)).geometry, rows) == whole).all()
    merged = rules.merge("1.down", children(columns))
    assert (assemble(merged.geometry, columns) == whole).all()
    both = [whole, whole.copy()]
    merged = rules.merge("1.norm", children(both))
    assert merged.pattern == "replicate"
    assert (assemble(merged.geometry, both) == whole).all()
    assert merged.geometry.copies == 2
    with pytest.raises(PatternError, match="replicated"):
        rules.merge("1.norm", children([whole, rows[0]]))
    with pytest.raises(PatternError, match="dim 1"):
        rules.merge("1.down", children([table(3), table(3)]))


def test_parameters_to_average() -> None:
    rules = TensorParallel({"parameter_to_average_patterns": ["norm"]}, 2)
    merged = rules.merge("norm.weight", children([table(3), table(3)]))
    assert merged.geometry.rule == "average"
    assert merged.pattern == "partial"


def test_vectors_that_no_pattern_names_are_never_joined_silently() -> None:
    """DeepSpeed #6503: without patterns for norms, equal vectors were concatenated."""
    rules = TensorParallel({"parameter_with_row_parallelism_patterns": ["down"]}, 2)
    with pytest.raises(PatternError, match=r"'norm.weight'.*\[3\], \[3\]"):
        rules.merge("norm.weight", children([table(3), table(3)]))


def test_two_patterns_of_one_list() -> None:
    rules = TensorParallel({"tp_replicated_parameter_patterns": [r"a\.", "a.b"]}, 2)
    with pytest.raises(PatternError, match=r"2 patterns") as caught:
        rules.merge("a.b", children([table(3), table(3)]))
    assert caught.value.kind == Kind.AMBIGUOUS
    with pytest.raises(PatternError, match="regular expression"):
        TensorParallel({"tp_replicated_parameter_patterns": ["("]}, 2)


@pytest.mark.parametrize("degree", [1, 2])
def test_vocabulary_padding_is_stripped(degree: int) -> None:
    info = {
        "universal_checkpoint_version": 0.4,
        "original_vocab_size": 13,
        "padded_vocab_size": 16,
        "vocabulary_parameter_patterns": ["word_embeddings.weight"],
        "tp_replicated_parameter_patterns": ["norm"],
    }
    whole = table(16, 3)
    slices = np.split(whole, degree)
    merged = TensorParallel(info, degree).merge("word_embeddings.weight", children(slices))
    assert (assemble(merged.geometry, slices) == whole[:13]).all()
    assert "pad(0)" in merged.pattern
    # AutoTP lists every 2-d "embed" parameter but records the rows of the first one only
    del info["padded_vocab_size"]
    merged = TensorParallel(info, degree).merge("word_embeddings.weight", children(slices))
    assert (assemble(merged.geometry, slices) == whole).all()


def affine(name: str, shape: Any, *ranks: Any) -> dict[str, Any]:
    """Info with a map whose pieces are (shape, source, dest) per rank, after the shard's shape."""
    entry = {
        "logical_shape": list(shape),
        "ranks": {
            rank: {
                "shard_shape": list(local),
                "pieces": [
                    {"shape": s, "source": source, "dest": dest, "locations": [rank]}
                    for s, source, dest in pieces
                ],
            }
            for rank, (local, *pieces) in enumerate(ranks)
        },
    }
    pattern = rf"^{re.escape(name)}$"
    return {"affine_map": {"version": 1, "params": {pattern: entry}}}


def test_segments_that_are_partly_replicated() -> None:
    """GPTBigCode: query rows are cut, the key-value block is on every rank."""
    whole = table(10, 3)
    slices = [np.concatenate([whole[:4], whole[6:]]), np.concatenate([whole[4:6], whole[6:]])]
    info = affine(
        "attn.w",
        (10, 3),
        ((8, 3), ([4, 3], [0, [3, 1]], [0, [3, 1]]), ([4, 3], [18, [3, 1]], [12, [3, 1]])),
        ((6, 3), ([2, 3], [12, [3, 1]], [0, [3, 1]]), ([4, 3], [18, [3, 1]], [6, [3, 1]])),
    )
    merged = TensorParallel(info, 2).merge("attn.w", children(slices))
    assert (assemble(merged.geometry, slices) == whole).all()
    assert merged.geometry.copies == 2
    second = list(merged.geometry.query(Region.full((10, 3)), 1))
    assert [(piece.region, piece.slot) for piece in second] == [(Region((6, 0), (4, 3)), 1)]


def test_the_maps_of_deepspeed_itself() -> None:
    """Maps from DeepSpeed's own constructors; its own `extract` makes the slices."""
    import torch
    from deepspeed.checkpoint import affine as theirs

    maps = {
        "replicated": theirs.replicated_map((4, 6), 3),
        "rows": theirs.contiguous_split_map((10, 4), [4, 3, 3], 0),
        "columns": theirs.contiguous_split_map((4, 10), [3, 3, 4], 1),
        "empty": theirs.contiguous_split_map((2, 4), [1, 1, 0], 0),
        "fused": theirs.sub_param_map((12, 3), [6, 3, 3], [[2, 2, 2], [1, 1, 1], [1, 1, 1]], 0),
        "fused1": theirs.sub_param_map((2, 9), [6, 3], [[3, 2, 1], [1, 1, 1]], 1),
        "segments": theirs.segmented_map((9, 2), [(6, False), (3, True)], 0, 3, [[2, 2, 2]]),
        "gather": theirs.block_gather_map((12, 2), {0: [0, 3], 1: [1, 4], 2: [2, 5]}, 2, 0),
    }
    info = {
        "affine_map": {
            "version": 1,
            "params": {f"^{name}$": entry.to_dict() for name, entry in maps.items()},
        }
    }
    rules = TensorParallel(info, 3)
    for name, entry in maps.items():
        whole = table(*entry.logical_shape)
        slices = [entry.extract(torch.from_numpy(whole), rank).numpy() for rank in range(3)]
        merged = rules.merge(name, children(slices))
        assert (assemble(merged.geometry, slices) == whole).all(), name
    assert (
        rules.merge("columns", children([table(4, 3), table(4, 3), table(4, 4)])).pattern
        == "shard(1)"
    )


def test_maps_that_cannot_be_followed() -> None:
    slices = children([table(2, 3), table(2, 3)])
    good = affine(
        "w",
        (4, 3),
        ((2, 3), ([2, 3], [0, [3, 1]], [0, [3, 1]])),
        ((2, 3), ([2, 3], [6, [3, 1]], [0, [3, 1]])),
    )
    assert TensorParallel(good, 2).merge("w", slices).pattern == "shard(0)"
    ranks = good["affine_map"]["params"]["^w$"]["ranks"]

    ranks[1]["pieces"][0]["scale"] = 0.5
    with pytest.raises(UnsupportedSourceError, match=r"scales a piece by 0.5"):
        TensorParallel(good, 2).merge("w", slices)
    del ranks[1]["pieces"][0]["scale"]

    ranks[1]["pieces"][0]["source"] = [6, [1, 2]]
    with pytest.raises(UnsupportedSourceError, match="no box"):
        TensorParallel(good, 2).merge("w", slices)
    for offset in (-3, 7, 9, 10**30):
        ranks[1]["pieces"][0]["source"] = [offset, [3, 1]]
        with pytest.raises(UnsupportedSourceError, match="no box"):
            TensorParallel(good, 2).merge("w", slices)
    ranks[1]["pieces"][0]["source"] = "elsewhere"
    with pytest.raises(CorruptSourceError, match="expected a list"):
        TensorParallel(good, 2).merge("w", slices)

    ranks[1]["shard_shape"] = [3, 2]
    with pytest.raises(PatternError, match=r"holds \[3, 2\], but it holds \[2, 3\]"):
        TensorParallel(good, 2).merge("w", slices)
    del ranks[1]
    with pytest.raises(PatternError, match=r"describes the ranks \[0\]"):
        TensorParallel(good, 2).merge("w", slices)
    good["affine_map"]["version"] = 2
    with pytest.raises(UnsupportedSourceError, match="version 2"):
        TensorParallel(good, 2)


def test_layouts_that_deepspeed_itself_cannot_describe() -> None:
    info = {"autotp_unsupported_parameter_patterns": {"^w$": "its fused layout interleaves blocks"}}
    with pytest.raises(UnsupportedSourceError, match="interleaves blocks"):
        TensorParallel(info, 2).merge("w", children([table(2), table(2)]))


@pytest.mark.parametrize(
    "pattern", [r"(a+)+$", r"(a|a)*b", r".*.*.*.*x", r"(x{1,9}){1,9}", "a" * 2000]
)
def test_patterns_that_could_run_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match=r"tp_replicated_parameter_patterns: .*very long"):
        TensorParallel({"tp_replicated_parameter_patterns": [pattern]}, 2)


@pytest.mark.parametrize(
    "pattern",
    [r"\d+.input_layernorm.weight", r".*\.layers\.\d+\.mlp\..*weight", r"(a|b)\.c", r"a\+\(b\)\*"],
)
def test_patterns_that_frameworks_write_are_accepted(pattern: str) -> None:
    rules = TensorParallel({"tp_replicated_parameter_patterns": [pattern]}, 2)
    assert [str(one) for one in rules.patterns().rules[0].match] == [pattern]
