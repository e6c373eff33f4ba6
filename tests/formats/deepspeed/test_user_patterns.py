"""The user's own rules for a DeepSpeed checkpoint: in the reader, the API and the CLI."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ucpstore
from tests.deepspeed_runs import Run, copy_run, deepspeed_run
from tests.formats.deepspeed.synthetic import edit
from tests.formats.deepspeed.test_real_runs import bits, read, truth_of
from tests.formats.deepspeed.test_tensor_parallel import change_info
from tests.schemas import validate
from ucpstore.cli.main import main
from ucpstore.errors import IntegrityError, Kind, PatternError, UnrecognizedSourceError
from ucpstore.formats.deepspeed import FORMAT
from ucpstore.io import open_files
from ucpstore.layout.rules import Patterns
from ucpstore.store.source import StoreFormat

NORM = "model.norm.weight"


def rules(text: str) -> Patterns:
    return Patterns.parse(text)


def without_info(name: str, path: Path) -> Run:
    run = copy_run(deepspeed_run(name), path)
    change_info(run.tag_path, lambda holder: holder.pop("universal_checkpoint_info"))
    return run


@pytest.fixture
def differing(tmp_path: Path) -> Run:
    """The second tensor-parallel rank's vectors are 1e-3 larger (case 46)."""
    run = copy_run(deepspeed_run("tp2-s1-fp32-dp2"), tmp_path)

    def nudge(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].data.add_(1e-3)

    for rank in range(2):
        edit(run.tag_path / f"zero_pp_rank_{rank}_mp_rank_01_optim_states.pt", nudge)
    return run


def test_without_info_one_rank_needs_no_rule(tmp_path: Path) -> None:
    """Case 17: Accelerate and the Trainer write no universal_checkpoint_info."""
    run = deepspeed_run("s1-fp32-dp4")
    assert not [
        file
        for file in run.tag_path.glob("*.pt")
        if b"universal_checkpoint_info" in file.read_bytes()
    ]
    source = FORMAT.open(open_files(run.path))
    for fqn, state, value in truth_of(run):
        assert bits(read(source, fqn, state)) == bits(value)
    assert "patterns" not in source.common.document
    users = Patterns.preset("hf-llama")  # for a target with more ranks
    assert Patterns.from_json(ucpstore.open(run.path, patterns=users).common["patterns"]) == users


def test_without_info_two_ranks_need_a_rule(tmp_path: Path) -> None:
    run = without_info("tp2-s1-fp32-dp2", tmp_path)
    with pytest.raises(PatternError, match="has no universal_checkpoint_info") as caught:
        ucpstore.open(run.path)
    for word in ("patterns=", "--patterns", "[[rule]]", "hf-llama", "megatron-gpt"):
        assert word in caught.value.hint
    assert caught.value.kind == Kind.UNMATCHED
    result = CliRunner().invoke(main, ["inspect", str(run.path)])
    assert result.exit_code == 3
    assert "--patterns" in result.output
    result = CliRunner().invoke(main, ["inspect", str(run.path), "--patterns", "hf-llama"])
    assert result.exit_code == 0, result.output


def test_equal_vectors_are_never_joined(tmp_path: Path) -> None:
    """Case 3 (DeepSpeed 6503): norms that no pattern names are an error, and one rule mends it."""
    run = copy_run(deepspeed_run("tp2-s1-fp32-dp2"), tmp_path)

    def forget(holder: dict[str, Any]) -> None:
        info = holder["universal_checkpoint_info"]
        del info["affine_map"]
        info["tp_replicated_parameter_patterns"] = []

    change_info(run.tag_path, forget)
    with pytest.raises(
        PatternError, match=r"does not say how 'model\..*norm.weight'.*\[24\], \[24\]"
    ):
        FORMAT.open(open_files(run.path))
    users = rules('[[rule]]\nmatch = ["**norm.weight", "**.embed_tokens.weight"]\ntp = "replicate"')
    source = FORMAT.open(open_files(run.path), patterns=users)
    for fqn, state, value in truth_of(run):
        assert bits(read(source, fqn, state)) == bits(value)


def test_replicas_that_differ(differing: Run) -> None:
    """Case 46: an error that says how much, or the first, or the mean."""
    files = open_files(differing.path)
    with pytest.raises(IntegrityError, match=r"bytes of \[0:24\] differ, by at most 0.001\.") as e:
        read(FORMAT.open(files), NORM, "fp32")
    assert e.value.kind == Kind.REPLICAS_DIFFER
    assert "replicate(first)" in e.value.hint
    first = differing.tensor("fp32", NORM, tp_rank=0)
    text = '[[rule]]\nmatch = "**norm.weight"\ntp = "{}"'
    source = FORMAT.open(files, patterns=rules(text.format("replicate(first)")))
    assert bits(read(source, NORM, "fp32")) == bits(first)
    assert source.parameters[NORM].pattern == "tp: replicate(first), dp: flat"
    source = FORMAT.open(files, patterns=rules(text.format("partial")))
    second = read(FORMAT.open(files, rank=1), NORM, "fp32")
    assert not np.array_equal(first, second)
    assert bits(read(source, NORM, "fp32")) == bits((first + second) / np.float32(2))
    assert bits(read(source, NORM, "adam_m")) == bits(differing.tensor("exp_avg", NORM, tp_rank=0))


def test_the_local_tensors_of_a_rank() -> None:
    run = deepspeed_run("tp2-uneven-s1-fp32-dp2")
    known = FORMAT.open(open_files(run.path)).common.document["patterns"]
    for rank in range(2):
        source = FORMAT.open(open_files(run.path), rank=rank)
        assert source.common.document["patterns"] == known  # what is known of the whole parameters
        for fqn in run.facts["tp_dims"]:
            for state, name in {
                "fp32": "fp32",
                "exp_avg": "adam_m",
                "exp_avg_sq": "adam_v",
            }.items():
                value = run.tensor(state, fqn, tp_rank=rank)
                assert bits(read(source, fqn, name)) == bits(value), (fqn, state)
            assert source.parameters[fqn].pattern == "dp: flat"
    with pytest.raises(PatternError, match="tensor-parallel rank 2: there are 2"):
        FORMAT.open(open_files(run.path), rank=2)


def test_rules_of_the_user_come_first_and_are_all_needed(tmp_path: Path) -> None:
    run = deepspeed_run("tp2-s1-fp32-dp2")
    users = rules(
        '[[rule]]\nmatch = "lm_head.weight"\ntp = "shard(1)"\n[[rule]]\nmatch = "typo.*"\ntp = "replicate"'
    )
    source = FORMAT.open(open_files(run.path), patterns=users)
    plain = FORMAT.open(open_files(run.path))
    rows, columns = plain.parameters["lm_head.weight"].states["fp32"].shape
    assert source.parameters["lm_head.weight"].states["fp32"].shape == (rows // 2, columns * 2)
    assert [text for text in source.warnings if "typo" in text] == [
        "the rule for typo.* (replicate) is for no parameter of the checkpoint."
    ]
    assert not [text for text in plain.warnings if "rule" in text]
    kept = Patterns.from_json(source.common.document["patterns"])
    assert kept.rules[: len(users.rules)] == users.rules
    wrong = rules('[[rule]]\nmatch = "lm_head.weight"\ntp = "shard(2)"')
    with pytest.raises(PatternError, match=r"'lm_head.weight' do not fit together as shard\(2\)"):
        FORMAT.open(open_files(run.path), patterns=wrong)


def test_the_store_keeps_the_rules(tmp_path: Path) -> None:
    run = without_info("tp2-uneven-s1-fp32-dp2", tmp_path / "run")
    dest = tmp_path / "store"
    ucpstore.convert(run.path, dest, patterns="hf-llama", workers=2)  # they open it themselves
    store = ucpstore.open(dest)
    document = validate(store.common["patterns"], "patterns")
    patterns = Patterns.from_json(json.loads(json.dumps(document)))
    for fqn in run.facts["tp_dims"]:
        held = patterns.held(fqn, store[fqn].fp32.shape, 2)
        part = held.tp.split(held.shape, 2)
        assert list(part) == [run.tensor("fp32", fqn, tp_rank=rank).shape for rank in range(2)]
    # What the ranks hold is not state: nothing differs, whatever rules are in force.
    assert ucpstore.diff(dest, run.path, patterns="hf-llama").equal
    assert not ucpstore.verify(dest, against=run.path, patterns="hf-llama").findings
    own = rules('[[rule]]\nmatch = "**"\ntp = "replicate"')
    opened = ucpstore.open(dest, patterns=own).source
    assert Patterns.from_json(opened.common.document["patterns"]) == own + patterns
    assert pickle.loads(pickle.dumps(opened)).common == opened.common
    with pytest.raises(UnrecognizedSourceError, match="no ranks: found rank 1"):
        StoreFormat().open(open_files(dest), rank=1)


def test_the_plan_depends_on_the_rules(differing: Run, tmp_path: Path) -> None:
    files = {
        name: tmp_path / f"{name}.toml" for name in ("replicate(first)", "partial", "replicate")
    }
    for name, path in files.items():
        path.write_text(f'[[rule]]\nmatch = "**norm.weight"\ntp = "{name}"')
    dest = tmp_path / "store"
    plans = [ucpstore.plan(differing.path, dest, patterns=path) for path in files.values()]
    plans += [ucpstore.plan(differing.path, dest, patterns=Patterns.read(files["partial"]))]
    digests = [plan.digest for plan in plans]
    assert len(set(digests)) == 3
    assert digests[1] == digests[3]


def test_the_command_line(differing: Run, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('[[rule]]\nmatch = "**norm.weight"\ntp = "replicate(first)"')
    source, dest = str(differing.path), str(tmp_path / "store")
    run = CliRunner().invoke
    assert run(main, ["verify", source]).exit_code == 1
    chosen = ["--patterns", str(path)]
    for command in (["verify", source], ["ls", source], ["tree", source], ["plan", source, dest]):
        result = run(main, [*command, *chosen])
        assert result.exit_code == 0, result.output
    assert run(main, ["convert", source, dest, *chosen]).exit_code == 0
    assert run(main, ["diff", source, dest, *chosen]).exit_code == 0
    assert run(main, ["verify", dest, "--against", source, *chosen]).exit_code == 0
    result = run(main, ["ls", source, "--patterns", "hf-lama"])
    assert result.exit_code == 3
    assert "'hf-llama'" in result.output
