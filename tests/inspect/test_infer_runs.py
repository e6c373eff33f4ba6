"""Real tensor-parallel runs that do not say how they were cut: inferred, opened, and equal to the live engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucpstore
from tests.deepspeed_runs import CASES, PIPELINE_CASES, Run, copy_run, deepspeed_run
from tests.formats.deepspeed import test_pipeline
from tests.formats.deepspeed.synthetic import edit
from tests.formats.deepspeed.test_real_runs import bits, read, truth_of
from ucpstore import inferring
from ucpstore.errors import PatternError
from ucpstore.formats.deepspeed import FORMAT
from ucpstore.inspect.infer.known import alike
from ucpstore.io import open_files
from ucpstore.layout.patterns import Pattern, Replicate, Shard
from ucpstore.layout.rules import Patterns

RUNS = [name for name in (*CASES, *PIPELINE_CASES) if "tp2" in name or "tp4" in name]
KEY = "universal_checkpoint_info"


def strip(run: Run) -> None:
    """Take away what says how the run was cut."""

    def alter(content: dict[str, Any]) -> None:
        content.pop(KEY, None)
        content.get("optimizer_state_dict", {}).pop(KEY, None)

    for path in run.tag_path.glob("*.pt"):
        edit(path, alter)


@pytest.fixture(params=RUNS)
def stripped(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    run = copy_run(deepspeed_run(request.param), tmp_path)
    strip(run)
    return run


def truths(run: Run) -> Iterator[tuple[str, str, np.ndarray]]:
    return test_pipeline.truth_of(run) if run.case.model == "pipeline" else truth_of(run)


def true_pattern(run: Run, fqn: str) -> Pattern:
    facts = run.facts.get("stages", [run.facts])
    dims = {dim for stage in facts for name, dim in stage["tp_dims"].items() if name == fqn}
    dim = dims.pop() if dims else None
    return Replicate() if dim is None else Shard(dim)


def test_inferred_rules_open_the_run(stripped: Run, tmp_path: Path) -> None:
    with pytest.raises(PatternError):
        FORMAT.open(open_files(str(stripped.path)))
    found = inferring.infer_patterns(stripped.path)
    for one in found.proposals:
        for name in one.parameters:
            true = true_pattern(stripped, name)
            answers = one.alternatives if one.pattern is None else (one.pattern,)
            assert any(alike(answer, true) for answer in answers)
    answers = Patterns(
        tuple(one.answered(true_pattern(stripped, one.parameters[0])) for one in found.questions)
    )
    file = tmp_path / "rules.toml"
    file.write_text(found.toml())
    patterns = Patterns.read(file) + answers
    assert inferring.check_patterns(stripped.path, patterns).ok
    source = FORMAT.open(open_files(str(stripped.path)), patterns=patterns)
    for fqn, state, truth in truths(stripped):
        assert bits(read(source, fqn, state)) == bits(truth)


@pytest.mark.parametrize("stripped", [n for n in RUNS if n in CASES], indirect=True)
def test_llamas_leave_nothing_open(stripped: Run) -> None:
    """What AutoTP cuts is certain; that a trained embedding is whole is likely, as no name says it."""
    found = inferring.infer_patterns(stripped.path)
    assert not found.questions
    likely = [n for one in found.proposals for n in one.parameters if one.confidence == "likely"]
    assert likely == ["model.embed_tokens.weight"]
    # q to up, o and down, norms, the head, the embedding; and per size of heads that are dealt out unevenly
    assert len(found.patterns.rules) == (8 if stripped.case.name.startswith("tp2-uneven") else 5)


def test_heads_that_stay_together_are_seen_in_uneven_widths(tmp_path: Path) -> None:
    """Three key-value heads of four rows on two ranks: on three ranks one each."""
    run = copy_run(deepspeed_run("tp2-uneven-s1-fp32-dp2"), tmp_path)
    strip(run)
    patterns = inferring.infer_patterns(run.path).patterns
    at = "model.layers.0.self_attn."
    for name, shape, units in (
        ("k_proj.weight", (12, 24), ((4, 24),) * 3),
        ("q_proj.weight", (24, 24), ((8, 24),) * 3),
        ("o_proj.weight", (24, 24), ((24, 8),) * 3),
    ):
        held = patterns.held(at + name, shape, 3)
        assert held.axes[-1].pattern.split(held.shape, 3) == units


def test_complete_information_agrees_with_the_inference() -> None:
    run = deepspeed_run("tp2-s1-fp32-dp2")
    found = inferring.explain_patterns(run.path)
    assert found.ok
    assert {one.fqn: one.pattern for one in found.parameters} == {
        fqn: true_pattern(run, fqn) for fqn in run.facts["tp_dims"]
    }
    for one in found.parameters:
        assert one.whole == run.full("fp32", one.fqn).shape
        assert one.origin != "inferred"
    assert inferring.check_patterns(run.path).ok


def test_incomplete_information_is_completed(tmp_path: Path) -> None:
    """Lists without row-parallel names: DeepSpeed's converter would join them along dim 0."""
    run = copy_run(deepspeed_run("tp2-s1-fp32-dp2"), tmp_path)

    def alter(content: dict[str, Any]) -> None:
        for holder in (content, content.get("optimizer_state_dict", {})):
            info = holder.get(KEY, {})
            info.pop("parameter_with_row_parallelism_patterns", None)
            info.pop("affine_map", None)

    for path in run.tag_path.glob("*.pt"):
        edit(path, alter)
    assert ucpstore.open(run.path)["model.layers.0.mlp.down_proj.weight"].fp32.shape == (48, 18)
    found = inferring.infer_patterns(run.path)
    assert not found.questions
    assert found.covered
    source = FORMAT.open(open_files(str(run.path)), patterns=found.patterns)
    for fqn, state, truth in truth_of(run):
        assert bits(read(source, fqn, state)) == bits(truth)
    explained = inferring.explain_patterns(run.path, ["model.layers.0.mlp.down_proj.weight"])
    assert not explained.ok
    assert "evidence shard(1)" in explained.parameters[0].problem


def test_copies_that_drifted_are_found_with_their_place(tmp_path: Path) -> None:
    """Megatron-DeepSpeed issue 223: norms of tensor-parallel ranks that really differ."""
    run = copy_run(deepspeed_run("tp2-s1-fp32-dp2"), tmp_path)

    def nudge(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].data.add_(1e-3)

    for path in run.tag_path.glob("zero_pp_rank_*_mp_rank_01_optim_states.pt"):
        edit(path, nudge)
    found = inferring.check_patterns(run.path)
    assert {one.kind for one in found.findings} == {"replicas_differ"}
    vectors = [n for n, dim in run.facts["tp_dims"].items() if "norm" in n and dim is None]
    assert {one.subject for one in found.findings} == set(vectors)
    assert "fp32 of ranks 0 and 1" in found.findings[0].message
    assert "24 of 24 elements differ, first at (0,), max |difference| 0.001" in (
        found.findings[0].message
    )
    strip(run)
    asked = {
        name for one in inferring.infer_patterns(run.path).questions for name in one.parameters
    }
    assert asked == set(vectors)
