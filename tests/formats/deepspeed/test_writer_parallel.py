"""Native targets of any tensor-, pipeline- and sequence-parallel degree."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ucpstore
from tests.deepspeed_runs import Run, copy_run, deepspeed_run
from tests.formats.deepspeed.native import differences, patterns_of, write
from tests.formats.deepspeed.synthetic import edit
from tests.formats.deepspeed.test_pipeline import told
from tests.formats.deepspeed.test_real_runs import bits, read
from tests.schemas import validate
from ucpstore import Layout
from ucpstore.contracts import CommonState, ParameterSpec, Role, Source, StateSpec
from ucpstore.errors import PatternError, PlanError, UnsupportedSourceError
from ucpstore.formats.deepspeed.autotp import TensorParallel
from ucpstore.formats.deepspeed.contents import model_file
from ucpstore.formats.deepspeed.pipelining import Pipeline, make_pipeline
from ucpstore.formats.deepspeed.ranks import Slices
from ucpstore.formats.deepspeed.recipe import make_recipe
from ucpstore.formats.deepspeed.sameness import same_layout
from ucpstore.formats.deepspeed.tpinfo import describe_slices
from ucpstore.formats.deepspeed.ucpinfo import Member, UcpInfo
from ucpstore.gather import Tensor, fill
from ucpstore.layout import partition
from ucpstore.layout.geometry import Strided
from ucpstore.layout.region import Region
from ucpstore.layout.rules import Patterns

UNWRITTEN = "/optimizer_state_dict/param_alignment_paddings"
"""DeepSpeed writes it whether or not it pads; without it the loader pads as it likes (`deepspeed.md`)."""
UNASKED = {
    f"/optimizer_state_dict/{key}"
    for key in ("dynamic_loss_scale", "loss_scaler", "overflow", "zero_stage")
}
"""Of other optimizers than BF16_Optimizer, which leaves them alone, and so can others read its files."""


def open_source(path: Path) -> Source:
    return ucpstore.open(path).source


def layout_of(run: Run, **changes: Any) -> Layout:
    case = run.case
    own = {"dp": case.dp, "tp": case.tp, "pp": case.pp, "zero_stage": case.stage}
    return Layout(**{**own, **changes})


def same_states(left: Source, right: Source) -> None:
    """Every state that is not made from another one has the same bits."""
    assert left.parameters.keys() == right.parameters.keys()
    for fqn, parameter in left.parameters.items():
        other = right.parameters[fqn].states
        kept = {n for n, spec in parameter.states.items() if not spec.derived}
        assert kept == {n for n, spec in other.items() if not spec.derived}, fqn
        for name in kept:
            assert bits(read(left, fqn, name)) == bits(read(right, fqn, name)), (fqn, name)
    for key in ("steps", "scheduler", "counters", "client"):
        assert left.common.document[key] == right.common.document[key], key
    groups = [
        [
            {**group, "params": sorted(group["params"])}
            for group in s.common.document["param_groups"]
        ]
        for s in (left, right)
    ]
    assert groups[0] == groups[1]


# ------------------------------------------------------------------- DeepSpeed's own files

OWN = [
    "tp2-s1-fp32-dp2",
    "tp2-s2-bf16-dp2",
    "tp2-s3-fp32-dp2",
    "tp2-uneven-s1-fp32-dp2",
    "tp4-uneven-s1-fp32-dp1",
    "tp2-bf16opt-dp2",
    "tp2-s0-bf16-dp1",
    "pp1-s1-fp32-dp2",
    "pp2-s1-fp32-dp2",
    "pp2-s1-bf16-dp2",
    "pp4-bf16opt-dp1",
    "pp2-tp2-bf16opt-dp2",
    "pp2-tp2-s1-fp32-dp1",
    "pp2-s0-fp32-dp2",
    "pp4-s0-fp32-dp1",
    "pp2-frozen-s0-fp32-dp1",
    "pp2-named-s0-fp32-dp1",
    "pp2-tp2-s0-fp32-dp1",
]


@pytest.mark.parametrize("name", OWN)
def test_written_in_its_own_layout_a_run_has_the_same_files(name: str, tmp_path: Path) -> None:
    run = told(name, tmp_path)
    ucpstore.convert(run.path, tmp_path / "store")
    source = open_source(tmp_path / "store")
    target = write(source, tmp_path / "ours", layout_of(run))
    found = differences(run.tag_path, tmp_path / "ours" / target.recipe.tag)
    if run.case.stage == 0:
        assert found == {}
    elif run.case.stage == 3:
        assert found.pop("/ds_config/zero_optimization/sub_group_size") == "extra"
    elif "bf16opt" in name:
        assert {found.pop(key, None) for key in UNASKED} <= {"extra", None}
        padded = [key for key in found if "single_partition_of_fp32_groups" in key]
        for key in padded:  # only BF16_Optimizer writes the padding, which it fills in by itself
            found.pop(key)
        assert len(padded) == (2 if "tp2" in name and "pp2" in name else 0)
        found.pop(UNWRITTEN, None)
    else:
        assert found.pop(UNWRITTEN) == "missing"
    assert found == {}


def test_the_comparison_with_real_files_notices_damage(tmp_path: Path) -> None:
    run = deepspeed_run("pp2-tp2-s1-fp32-dp1")
    target = write(open_source(run.path), tmp_path, layout_of(run), patterns_of(run.case))
    tag = tmp_path / target.recipe.tag
    layer = tag / "layer_03-model_01-model_states.pt"
    content = torch.load(layer, weights_only=False)
    content["up.weight"][0, 0] += 1
    torch.save(content, layer)
    optimizer = tag / "zero_pp_rank_0_mp_rank_02_optim_states.pt"
    content = torch.load(optimizer, weights_only=False)
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][7] = -1
    torch.save(content, optimizer)
    (tag / "mp_rank_03_model_states.pt").unlink()
    assert differences(run.tag_path, tag).keys() == {
        "/up.weight",
        "/optimizer_state_dict/base_optimizer_state/state/0/exp_avg",
        "mp_rank_03_model_states.pt",
        UNWRITTEN,
    }


# ------------------------------------------------------------------- other layouts, read back

OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("tp2-s1-fp32-dp2", {"tp": 1, "dp": 3, "zero_stage": 3}),
    ("tp2-s3-fp32-dp2", {"tp": 2, "dp": 3, "zero_stage": 2}),
    ("tp2-s2-bf16-dp2", {"tp": 3, "dp": 1, "zero_stage": 3}),  # a rank without heads
    ("tp4-uneven-s1-fp32-dp1", {"tp": 3, "dp": 2}),
    ("tp4-uneven-s1-fp32-dp1", {"tp": 2, "dp": 1, "sp": 2, "zero_stage": 3}),
    ("tp2-s1-fp32-dp2", {"tp": 2, "dp": 1, "zero_stage": 0}),
    ("tp2-s0-bf16-dp1", {"tp": 2, "dp": 2, "zero_stage": 3}),
    ("tp2-uneven-s1-fp32-dp2", {"tp": 3, "dp": 2, "zero_stage": 3}),
    ("pp2-s1-fp32-dp2", {"pp": 1, "dp": 2}),
    ("pp2-s1-fp32-dp2", {"pp": 3, "tp": 2, "dp": 1}),
    ("pp2-s1-bf16-dp2", {"pp": 1, "dp": 3, "zero_stage": 3}),  # no longer a PipelineModule
    ("pp1-s1-fp32-dp2", {"pp": 4, "dp": 1, "stages": (0, 3, 5, 6)}),
    ("pp4-bf16opt-dp1", {"pp": 2, "dp": 2, "sp": 2}),
    ("pp2-tp2-s1-fp32-dp1", {"pp": 1, "tp": 3, "dp": 2}),
    ("pp2-tp2-bf16opt-dp2", {"pp": 3, "tp": 1, "dp": 1}),
    ("pp2-tp2-bf16opt-dp2", {"pp": 1, "tp": 4, "dp": 1}),
    ("pp2-s1-fp32-dp2", {"pp": 2, "dp": 3, "zero_stage": 0}),
    ("pp2-tp2-s1-fp32-dp1", {"pp": 3, "tp": 4, "dp": 1, "zero_stage": 0}),
    ("pp1-s1-fp32-dp2", {"pp": 2, "dp": 1, "zero_stage": 0}),
    ("pp2-s0-fp32-dp2", {"pp": 3, "dp": 1, "zero_stage": 0}),
    ("pp2-s0-fp32-dp2", {"pp": 1, "dp": 3, "zero_stage": 1}),
    ("pp4-s0-fp32-dp1", {"pp": 1, "tp": 2, "dp": 1, "zero_stage": 0}),
    ("pp2-frozen-s0-fp32-dp1", {"pp": 2, "dp": 2, "zero_stage": 1}),
    ("pp2-tp2-s0-fp32-dp1", {"pp": 1, "dp": 2, "zero_stage": 3}),
]


@pytest.mark.parametrize(("name", "changes"), OTHERS)
def test_any_other_layout_holds_the_same_bits(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    run = told(name, tmp_path)
    source = open_source(run.path)
    layout = layout_of(run, **changes)
    given = layout.tp > 1 and "patterns" not in source.common.document
    target = write(source, tmp_path / "c", layout, patterns_of(run.case) if given else None)
    back = open_source(tmp_path / "c")
    same_states(source, back)
    assert back.parallelism["dp_world_size"] == layout.dp * layout.sp
    assert (back.parallelism["tp"], back.parallelism["pp"]) == (layout.tp, layout.pp)
    models = len(target.recipe.ranks) * (layout.zero_ranks if layout.zero_stage == 3 else 1)
    files = {path.name for path in (tmp_path / "c" / target.recipe.tag).glob("*.pt")}
    assert len([f for f in files if "mp_rank" in f and f.endswith("model_states.pt")]) == models
    layers = 0 if target.recipe.pipeline is None else len(target.recipe.pipeline.files)
    optimizers = layout.model_ranks * layout.zero_ranks if layout.zero_stage > 0 else 0
    assert len(files) == models + layers * layout.tp + optimizers


def test_there_and_back_gives_the_same_files(tmp_path: Path) -> None:
    """AutoTP 2 -> 1 -> 2: what depends on the degree is dropped, then made anew."""
    run = deepspeed_run("tp2-s1-fp32-dp2")
    write(open_source(run.path), tmp_path / "one", layout_of(run, tp=1, dp=1))
    one = torch.load(tmp_path / "one/global_step3/mp_rank_00_model_states.pt", weights_only=False)
    info = one["universal_checkpoint_info"]
    assert "affine_map" not in info
    assert info["parameter_with_row_parallelism_patterns"]
    write(open_source(tmp_path / "one"), tmp_path / "two", layout_of(run))
    found = differences(run.tag_path, tmp_path / "two" / "global_step3")
    assert found == {UNWRITTEN: "missing"}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["frozen-s2-bf16-dp2", "tied-s3-fp32-dp2"])
def test_frozen_and_tied_parameters_are_cut_too(name: str, stage: int, tmp_path: Path) -> None:
    source = open_source(deepspeed_run(name).path)
    patterns = Patterns.parse('[[rule]]\nmatch = "**"\ntp = "shard(0)"\n')
    target = write(source, tmp_path, Layout(tp=2, dp=2, zero_stage=stage), patterns)
    back = open_source(tmp_path)
    same_states(source, back)
    for fqn, parameter in source.parameters.items():
        assert back.parameters[fqn].aliases == parameter.aliases
        assert back.parameters[fqn].trainable == parameter.trainable
    frozen = [fqn for fqn, parameter in source.parameters.items() if not parameter.trainable]
    assert any("buffer" not in source.parameters[f].states for f in frozen) == ("frozen" in name)
    prefix = "zero_pp_rank_1_" if stage == 3 else ""
    file = tmp_path / target.recipe.tag / f"{prefix}mp_rank_01_model_states.pt"
    content = torch.load(file, weights_only=False)
    for fqn, shape in (content["frozen_param_shapes"] or {}).items():
        whole = source.parameters[fqn].states["weight"].shape
        assert tuple(shape) == (whole[0] // 2, *whole[1:])


def test_rows_that_pad_a_vocabulary_are_zero_and_dropped_again(tmp_path: Path) -> None:
    source = open_source(deepspeed_run("tp2-s1-fp32-dp2").path)
    pad = '[[rule]]\nmatch = "lm_head.weight"\ntp = "shard(0)"\n'
    pad += "pad = {dim = 0, true_size = 40, multiple = 16}\n"
    for stage in (1, 3):
        path = tmp_path / str(stage)
        layout = Layout(tp=2, dp=2, zero_stage=stage)
        target = write(source, path, layout, Patterns.parse(pad))
        assert target.recipe.universal is not None
        assert target.recipe.universal["padded_vocab_size"] == 64
        assert target.recipe.universal["original_vocab_size"] == 40
        assert "^lm_head\\.weight$" not in target.recipe.universal["affine_map"]["params"]
        same_states(source, open_source(path))
    weights = [
        torch.load(tmp_path / f"1/global_step3/mp_rank_0{rank}_model_states.pt", weights_only=False)
        for rank in (0, 1)
    ]
    last = weights[1]["module"]["lm_head.weight"]
    assert (weights[0]["module"]["lm_head.weight"].shape, last.shape) == ((32, 24), (32, 24))
    assert last[:8].ne(0).all()
    assert not last[8:].any()


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["s1-fp32-dp2", "tp2-s1-fp32-dp2"])
def test_rows_that_pad_a_vocabulary_are_told_on_one_rank_too(
    name: str, stage: int, tmp_path: Path
) -> None:
    """There nothing but the entry says which rows are true ones, whether or not the source has one."""
    source = open_source(deepspeed_run(name).path)
    rows = source.parameters["lm_head.weight"].states["fp32"].shape[0]
    pad = f'[[rule]]\nmatch = "lm_head.weight"\ntp = "shard(0)"\npad = {{dim = 0, true_size = {rows}, multiple = 64}}'
    write(source, tmp_path, Layout(dp=2, zero_stage=stage), Patterns.parse(pad))
    model = (
        "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    )
    content = torch.load(tmp_path / "global_step3" / model, weights_only=False)
    assert content["universal_checkpoint_info"]["original_vocab_size"] == rows
    if stage == 1:
        assert content["module"]["lm_head.weight"].shape[0] == 64
    same_states(source, open_source(tmp_path))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_without_rows_of_a_vector(stage: int, tmp_path: Path) -> None:
    """A slice of no elements looks like a ZeRO-3 placeholder."""
    source = open_source(deepspeed_run("s1-fp32-dp2").path)
    rules = '[[rule]]\nmatch = "**k_proj.*"\ntp = {pattern = "shard", dim = 0, unit = 12}\n'
    rules += '[[rule]]\nmatch = "**"\ntp = "replicate"\n'
    layout = Layout(tp=2, dp=2, zero_stage=stage)
    write(source, tmp_path / "c", layout, Patterns.parse(rules))
    same_states(source, open_source(tmp_path / "c"))
    if stage == 3:
        small = replace(layout, sub_group_size=50)
        write(source, tmp_path / "d", small, Patterns.parse(rules))
        with pytest.raises(UnsupportedSourceError, match=r"mp_rank_01_.* has \d+ sub-groups"):
            open_source(tmp_path / "d")


def test_entries_of_layers_that_are_no_tensors_are_kept(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("pp2-s1-fp32-dp2"), tmp_path)

    def add(content: dict[str, Any]) -> None:
        content["_extra_state"] = {"amax": [1.0, torch.arange(3)]}

    edit(run.tag_path / "layer_05-model_states.pt", add)
    target = write(open_source(run.path), tmp_path / "c", layout_of(run, pp=1))
    tag = tmp_path / "c" / target.recipe.tag
    content = torch.load(tag / "layer_05-model_00-model_states.pt", weights_only=False)
    assert content["_extra_state"]["amax"][0] == 1.0
    assert content["_extra_state"]["amax"][1].tolist() == [0, 1, 2]
    other = torch.load(tag / "layer_03-model_00-model_states.pt", weights_only=False)
    assert "_extra_state" not in other


# ------------------------------------------------------------------- random layouts


class ArraySource:
    """States in memory, as far as files are filled from them."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays
        self.parameters = {
            fqn: ParameterSpec(
                fqn, {"fp32": StateSpec("fp32", Role.MASTER_WEIGHT, array.shape, "float32")}
            )
            for fqn, array in arrays.items()
        }
        self.common = CommonState({})

    def read(
        self, fqn: str, state: str, region: Region, out: np.ndarray, *, compare: bool = False
    ) -> None:
        out[...] = self._arrays[fqn][region.slices]


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], Patterns]:
    """Parameters of random shapes, with a rule for each; no value is zero."""
    arrays = {}
    rules = []
    first = 1
    for index in range(draw(st.integers(1, 5))):
        shape = draw(shapes)
        count = math.prod(shape)
        arrays[f"p{index}"] = np.arange(first, first + count, dtype=np.float32).reshape(shape)
        first += count
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, shape[dim]))
        kinds: list[dict[str, Any]] = [
            {"pattern": "replicate"},
            {"pattern": "shard", "dim": dim},
            {"pattern": "shard_nc", "dim": dim, "sections": [cut, shape[dim] - cut]},
        ]
        rule: dict[str, Any] = {"match": [f"p{index}"], "tp": draw(st.sampled_from(kinds))}
        if draw(st.booleans()) and rule["tp"]["pattern"] == "shard":
            multiple = draw(st.integers(1, 5))
            rule["pad"] = {"dim": dim, "true_size": shape[dim], "multiple": multiple}
        rules.append(rule)
    return arrays, Patterns.from_json({"rules": rules})


@given(models(), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_random_models_lie_on_all_ranks_and_padding_is_zero(
    model: tuple[dict[str, np.ndarray], Patterns], tp: int, dp: int, stage: int
) -> None:
    arrays, patterns = model
    source = ArraySource(arrays)
    slices = Slices(source.parameters, patterns, tp)
    members = [Member(fqn, array.shape) for fqn, array in arrays.items()]
    local: list[dict[str, np.ndarray]] = []
    for rank in range(tp):
        mine = [slices.member(member, rank) for member in members]
        info = UcpInfo.of([mine], stage, dp, 7)
        flats = [info.rank(d) for d in range(dp)]
        buffers = []
        for held in flats:
            outs = []
            for flat in held:
                out = np.full(flat.numel, -1, np.float32)
                tensor = Tensor("float32", (flat.numel,), flat.of("fp32"))
                for start in range(0, flat.numel, 5):
                    fill(source, tensor, start, out[start : start + 5], compare=True)  # type: ignore[arg-type]
                outs.append(out)
            buffers.append(outs)
        found: dict[str, np.ndarray] = {}
        for unit, (_, owned) in enumerate(info.units):
            whole = np.concatenate([outs[unit] for outs in buffers])
            position = 0
            for member in owned:
                width = -(-member.numel // dp) if stage == 3 else member.numel
                if stage == 3:
                    parts = [outs[unit][position : position + width] for outs in buffers]
                    flat_member = np.concatenate(parts)
                    assert not flat_member[member.numel :].any()
                    flat_member = flat_member[: member.numel]
                else:
                    flat_member = whole[position : position + width]
                found[member.fqn] = flat_member.reshape(member.shape)
                position += width
            if stage != 3:
                assert not whole[position:].any()
        local.append(found)
    reader = TensorParallel(describe_slices(slices), tp)
    for fqn, array in arrays.items():
        expected = set(array.reshape(-1).tolist())
        held_values = [v for found in local for v in found[fqn].reshape(-1).tolist()]
        assert set(held_values) - {0} == expected
        if any(one.padding for one in slices.all(fqn)) or tp == 1:
            continue  # the reader strips the padding of vocabularies only
        merged = reader.merge(fqn, [Strided(found[fqn].shape, r) for r, found in enumerate(local)])
        out = np.zeros(array.shape, np.float32)
        for piece in merged.geometry.query(Region.full(array.shape)):
            stored = local[piece.slot][fqn].reshape(-1)
            view = np.lib.stride_tricks.as_strided(
                stored[piece.offset :], piece.region.sizes, [4 * s for s in piece.strides]
            )
            out[piece.region.slices] = view
        assert np.array_equal(out, array)


# ------------------------------------------------------------------- stages of pipelines


def test_partitions_are_deepspeeds_own() -> None:
    random = np.random.default_rng(3)
    cases = [
        ([int(n) for n in random.choice([0, 0, 1, 7, 7, 30], random.integers(1, 25))], stages)
        for stages in (1, 2, 3, 4, 5, 8)
        for _ in range(20)
    ]
    code = (
        "import json, sys\n"
        "from deepspeed.runtime.utils import partition_balanced, partition_uniform\n"
        "cases = json.load(sys.stdin)\n"
        "answer = [([int(x) for x in partition_uniform(len(w), n)],"
        " [int(x) for x in partition_balanced(w, n)]) for w, n in cases]\n"
        "print('ANSWER' + json.dumps(answer))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout.partition("ANSWER")[2])
    for (weights, stages), (even, fair) in zip(cases, answer, strict=True):
        assert list(partition.uniform(len(weights), stages)) == even
        assert list(partition.balanced(weights, stages)) == fair


NUMELS = {
    "tied_modules.embed.weight": 290,
    "2.weight": 150,
    "2.seen": 0,
    "3.weight": 150,
    "5.weight": 150,
    "6.weight": 10,
}


def facts(
    stages: list[list[int]], files: list[int], held: list[int], key: str = "embed"
) -> dict[str, Any]:
    return {"stages": stages, "tied": {key: {"layers": files, "stages": held}}}


def test_a_head_without_a_file_is_on_the_last_stage() -> None:
    made = make_pipeline(
        NUMELS,
        facts([[2, 3], [5, 6]], [0], [0, 1]),
        Layout(pp=4, partition="uniform", layers=8),
    )
    assert made.bounds == (0, 2, 4, 6, 8)
    assert made.holders == {"tied_modules.embed.": (0, 3)}
    assert list(made.files) == [0, 2, 3, 5, 6]
    assert made.stages("tied_modules.embed.weight") == (0, 3)
    assert made.stages("6.weight") == (3,)
    (warning,) = made.warnings
    assert "tied=embed" in warning


def test_a_pipeline_of_which_nothing_is_known_but_names() -> None:
    made = make_pipeline(NUMELS, None, Layout())
    assert made.files[0] == made.files[7] == "tied_modules.embed."
    assert any("tied=embed" in text for text in made.warnings)


def test_what_the_user_says_of_tied_layers_counts() -> None:
    layout = Layout(pp=4, partition="uniform", layers=8, tied={"embed": [0, 4]})
    made = make_pipeline(NUMELS, facts([[2, 3], [5, 6]], [0], [0, 1]), layout)
    assert made.holders == {"tied_modules.embed.": (0, 2)}
    assert made.files[4] == "tied_modules.embed."
    assert made.warnings == ()


def test_the_stages_of_the_source_are_kept() -> None:
    made = make_pipeline(NUMELS, facts([[2], [3, 5, 6]], [0], [0, 1]), Layout(pp=2))
    assert made.bounds == (0, 3, 8)
    assert made.holders == {"tied_modules.embed.": (0, 1)}
    assert made.warnings == ()


def test_the_method_that_made_the_sources_stages_makes_the_targets() -> None:
    known = facts([[2], [3, 5, 6]], [0, 7], [0, 1])  # no method makes these
    guess = make_pipeline(NUMELS, known, Layout(pp=3, layers=8))
    assert any("neither method makes" in text for text in guess.warnings)
    numels = {"0.w": 90, "1.w": 5, "2.w": 5, "3.w": 5, "4.w": 5}
    even = {"stages": [[0, 1, 2], [3, 4]], "tied": {}}
    assert make_pipeline(numels, even, Layout(pp=3, layers=5)).bounds == (0, 2, 4, 5)
    fair = {"stages": [[0], [1, 2, 3, 4]], "tied": {}}
    made = make_pipeline(numels, fair, Layout(pp=3, layers=5))
    assert made.bounds == partition.balanced(list(numels.values()), 3)
    assert made.warnings == ()


def test_a_number_of_layers_that_matters_is_told() -> None:
    numels = {f"{layer}.w": 5 for layer in range(4)}
    made = make_pipeline(numels, None, Layout(pp=2, partition="uniform"))
    assert made.bounds == (0, 2, 4)
    assert any("layers=" in text for text in made.warnings)
    told = make_pipeline(numels, None, Layout(pp=2, partition="uniform", layers=6))
    assert (told.bounds, told.warnings) == ((0, 3, 6), ())
    explicit = make_pipeline(numels, None, Layout(pp=2, stages=(0, 1)))
    assert (explicit.bounds, explicit.warnings) == ((0, 1, 4), ())


@pytest.mark.parametrize(
    ("known", "layout", "match"),
    [
        (None, Layout(pp=2, layers=5), "at least 7"),
        (None, Layout(pp=2, stages=(0, 9)), "starts at layer 9"),
        (None, Layout(pp=2, layers=10**9), "at most 10000"),
        (None, Layout(pp=2, tied={"head": [0, 1]}), "no tied module"),
        (None, Layout(pp=2, tied={"embed": [2, 7]}), "parameters of its own"),
        (facts([[2], [3], [5, 6]], [0], [0, 1]), Layout(pp=2), "which layers use"),
    ],
)
def test_stages_that_cannot_be_are_refused(known: object, layout: Layout, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        make_pipeline(NUMELS, known, layout)


@pytest.mark.parametrize(
    ("name", "layout", "error", "match"),
    [
        ("pp2-s1-fp32-dp2", Layout(pp=2, zero_stage=2), PlanError, "stages 0 and 1 only"),
        ("pp2-s1-fp32-dp2", Layout(pp=2, zero_stage=3), PlanError, "stages 0 and 1 only"),
        ("pp2-s1-bf16-dp2", Layout(pp=2, zero_stage=0), PlanError, "cannot load an optimizer"),
        ("pp2-s1-fp32-dp2", Layout(zero_stage=2, pipeline=True), PlanError, "stages 0 and 1"),
        ("pp2-s1-fp32-dp2", Layout(pp=2, pipeline=False), PlanError, "pipeline=False"),
        ("pp2-s1-fp32-dp2", Layout(pp=2, stages=(0, 7)), PlanError, "no trainable parameters|8"),
        ("pp2-s1-fp32-dp2", Layout(pp=3, stages=(0, 1, 2)), PlanError, "stage 1 of 3"),
        ("s2-bf16-dp2", Layout(stages=(0,)), PlanError, "only a pipeline"),
        ("s2-bf16-dp2", Layout(pp=2), PlanError, "no name of a PipelineModule"),
        ("s2-bf16-dp2", Layout(tp=2), PatternError, "2 tensor-parallel ranks"),
    ],
)
def test_layouts_that_deepspeed_cannot_have_are_refused(
    name: str, layout: Layout, error: type[Exception], match: str
) -> None:
    source = open_source(deepspeed_run(name).path)
    if layout.stages == (0, 7):  # the head's own stage: there it is all that the stage holds
        recipe = make_recipe(source, layout)
        assert [g.members[0].fqn for g in recipe.ranks[1].groups] == ["tied_modules.embed.weight"]
        return
    with pytest.raises(error, match=match):
        make_recipe(source, layout)


def test_a_rule_for_every_parameter_is_needed() -> None:
    source = open_source(deepspeed_run("s2-bf16-dp2").path)
    some = Patterns.parse('[[rule]]\nmatch = "**norm.weight"\ntp = "replicate"\n')
    with pytest.raises(PatternError, match="no rule says"):
        make_recipe(source, Layout(tp=2), some)


# ------------------------------------------------------------------- plans, lazy invocation, ranks


def test_the_plan_shows_every_rank() -> None:
    run = deepspeed_run("pp2-tp2-s1-fp32-dp1")
    recipe = make_recipe(open_source(run.path), layout_of(run, dp=2), patterns_of(run.case))
    info = json.loads(json.dumps(recipe.ucp_info()))
    assert [(r["pp"], r["tp"], r["dp"]) for r in info["ranks"]] == [
        (pp, tp, dp) for pp in (0, 1) for tp in (0, 1) for dp in (0, 1)
    ]
    assert info["pipeline"]["tied"] == {"embed": [0, 1]}
    down = info["slices"][1]["parameters"]["2.down.weight"]
    assert down == {"shape": [10, 7], "windows": [[[0, 0], [0, 7], [10, 7]]]}
    assert "2.norm.weight" not in info["slices"][1]["parameters"]
    held = [p for r in info["ranks"] for b in r["buffers"] for p in b["parts"]]
    for fqn, copies in {"2.down.weight": 1, "6.weight": 2, "tied_modules.embed.weight": 4}.items():
        numel = sum(count for name, _, count, _ in held if name == fqn)
        assert numel == copies * math.prod(run.tensor("fp32", fqn, stage=fqn[0] == "6").shape) * (
            2 if fqn == "2.down.weight" else 1
        )


def test_the_plan_of_the_command_line(tmp_path: Path) -> None:
    run = deepspeed_run("pp2-s1-fp32-dp2")
    plan = ucpstore.plan(
        run.path, tmp_path / "c", to="deepspeed", layout=Layout.parse("pp=2,dp=1,stages=0:3")
    ).to_json()
    validate(plan, "plan")
    assert plan["target"]["layout"]["stages"] == [0, 3]
    for name in ("tp2-s3-fp32-dp2", "pp2-tp2-s1-fp32-dp1"):
        path = deepspeed_run(name).path
        layout = Layout(tp=2, dp=3, zero_stage=1)
        other = ucpstore.plan(path, tmp_path / "c", to="deepspeed", layout=layout).to_json()
        validate(other, "plan")
        assert other["target"]["layout"]["ucp_info"]["slices"][1]["parameters"]
    assert plan["target"]["layout"]["ucp_info"]["pipeline"]["bounds"] == [0, 3, 8]


def test_nothing_is_done_for_the_layout_that_is_there(tmp_path: Path) -> None:
    run = deepspeed_run("pp2-s1-fp32-dp2")
    source = open_source(run.path)
    for layout in (Layout(pp=2, dp=2), Layout(pp=2, sp=2), Layout(pp=2, dp=2, stages=(0, 4))):
        assert same_layout(source, layout), layout
    for layout in (
        Layout(pp=2, dp=2, stages=(0, 3)),
        Layout(pp=2, dp=2, tied={"embed": [0, 1]}),
        Layout(pp=2, dp=1),
        Layout(pp=1, dp=4),
        Layout(pp=1, dp=2),
        Layout(pp=2, dp=2, dtype="bf16"),
    ):
        assert not same_layout(source, layout), layout
    report = ucpstore.convert(
        run.path, tmp_path / "c", to="deepspeed", layout=Layout(pp=2, dp=1, sp=2)
    )
    assert (report.tasks, report.url) == (0, str(run.path))
    one = open_source(deepspeed_run("pp1-s1-fp32-dp2").path)
    assert same_layout(one, Layout(dp=2))
    assert not same_layout(one, Layout(dp=2, pipeline=False))


def with_patterns(source: Source, patterns: Patterns) -> Any:
    """The source as a reader that knows its own patterns opens it."""
    document = {**source.common.document, "patterns": patterns.to_json()}
    return SimpleNamespace(
        **{name: getattr(source, name) for name in ("format", "url", "parameters", "parallelism")},
        common=replace(source.common, document=document),
    )


def test_tensor_parallel_sources_stay_if_their_slices_do() -> None:
    run = deepspeed_run("tp2-s1-fp32-dp2")
    source = with_patterns(open_source(run.path), patterns_of(run.case))
    assert same_layout(source, layout_of(run))
    assert not same_layout(source, layout_of(run, tp=1))
    assert not same_layout(source, layout_of(run, zero_stage=2))
    embedding = '[[rule]]\nmatch = "**embed_tokens.weight"\ntp = "shard(0)"\n'
    assert not same_layout(source, layout_of(run), Patterns.parse(embedding))
    recipe = make_recipe(source, layout_of(run), Patterns.parse(embedding))
    assert recipe.universal is not None
    replicated = recipe.universal["tp_replicated_parameter_patterns"]
    assert not any("embed_tokens" in pattern for pattern in replicated)
    # without patterns from the user the source's own do
    assert make_recipe(source, layout_of(run, tp=4)).ranks[3].tp == 3


def test_random_state_stays_with_ranks_that_have_a_counterpart() -> None:
    run = deepspeed_run("pp2-tp2-s1-fp32-dp1")
    source = with_patterns(open_source(run.path), patterns_of(run.case))
    document = source.common.document
    document["rng"] = {f"mp_{mp}": {"rng_state": [mp]} for mp in range(4)}
    document["client_by_rank"] = {"mp_3": {"note": "of the last"}}

    def states(layout: Layout) -> tuple[list[int], list[str], list[str]]:
        recipe = make_recipe(source, layout)
        files = [model_file(recipe, rank, 0) for rank in recipe.ranks]
        told = [text for text in recipe.warnings if "random number" in text]
        return [f["rng_state"][0] for f in files], [f["note"] for f in files], told

    same, notes, told = states(layout_of(run, dp=2))
    assert (same, told) == ([0, 1, 2, 3], [])
    assert notes == ["tiny run"] * 3 + ["of the last"]
    # stage 1 of tensor-parallel rank 0 was model-parallel rank 2
    fewer, notes, told = states(layout_of(run, tp=1))
    assert (fewer, notes) == ([0, 2], ["tiny run"] * 2)
    assert "2 of 4 states have no counterpart" in told[0]
    more, _, told = states(layout_of(run, tp=3))
    assert more == [0, 1, 0, 2, 3, 0]
    assert "2 ranks without a counterpart" in told[0]


def test_layouts_are_read_from_words() -> None:
    assert Layout.parse("pp=2,stages=0:3,tied=embed:7:0;b:1:2,sp=2") == Layout(
        pp=2, stages=(0, 3), tied={"b": (1, 2), "embed": (0, 7)}, sp=2
    )
    assert Layout.parse("pipeline=true").pipeline is True
    for text in ("stages=1:2,pp=2", "stages=0", "pp=2,stages=0:x", "pipeline=1", "partition=type"):
        if text == "stages=0":
            continue
        with pytest.raises(PlanError, match="layout"):
            Layout.parse(text)
    with pytest.raises(PlanError, match="stages or partition"):
        Layout(pp=2, stages=(0, 1), partition="uniform")
    with pytest.raises(PlanError, match="tied"):
        Layout(tied={"embed": []})
    assert isinstance(make_pipeline(NUMELS, None, Layout()), Pipeline)
