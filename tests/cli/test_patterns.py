"""``ucpstore patterns``: what users see, JSON by schema, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import invoke, json_of
from tests.deepspeed_runs import Run, copy_run, deepspeed_run
from tests.formats.deepspeed.synthetic import edit
from tests.inspect.test_infer_runs import strip
from tests.schemas import validate
from ucpstore.layout.rules import Patterns

DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that does not say how it was cut."""
    found = copy_run(deepspeed_run("tp2-s1-fp32-dp2"), tmp_path_factory.mktemp("run"))
    strip(found)
    return found


@pytest.fixture(scope="module")
def drifted(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with norms that differ over the ranks."""
    copied = copy_run(run, tmp_path_factory.mktemp("drifted"))

    def nudge(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].data.add_(1e-3)

    for path in copied.tag_path.glob("zero_pp_rank_*_mp_rank_01_optim_states.pt"):
        edit(path, nudge)
    return copied.path


def test_infer_then_convert(run: Run, tmp_path: Path) -> None:
    """The way through: infer to a file, look at it, convert with it."""
    rules, store = tmp_path / "rules.toml", tmp_path / "store"
    assert invoke("convert", run.path, store).exit_code == 3
    result = invoke("patterns", "infer", run.path, "--output", rules)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "5 rules, 0 open questions" in result.stderr
    assert invoke("patterns", "check", run.path, rules).exit_code == 0
    assert invoke("convert", run.path, store, "--patterns", rules).exit_code == 0
    whole = deepspeed_run("tp2-s1-fp32-dp2")
    # only that it does not say how it was cut is another
    compared = invoke("diff", whole.path, store).stdout
    assert compared.endswith("states: 63 equal; common state: 1 differences\n")


def test_infer_prints_toml(run: Run) -> None:
    result = invoke("patterns", "infer", run.path)
    patterns = Patterns.parse(result.stdout)
    assert len(patterns.rules) == 5
    assert "# presets that fit: hf-llama" in result.stdout
    document = json_of("patterns", "infer", run.path)
    assert validate(document, "inference")["toml"] == result.stdout
    assert Patterns.from_json(document["patterns"]) == patterns


def test_infer_asks(drifted: Path) -> None:
    result = invoke("patterns", "infer", drifted)
    assert result.exit_code == 1
    assert "# QUESTION, 5 parameters: Did copies drift apart" in result.stdout
    assert '# tp = "replicate(first)"' in result.stdout
    document = validate(json_of("patterns", "infer", drifted, code=1), "inference")
    assert document["counts"] == {"certain": 15, "likely": 1, "ambiguous": 5}


def test_infer_with_rules_that_are_known(drifted: Path, tmp_path: Path) -> None:
    rules = tmp_path / "norms.toml"
    rules.write_text(
        '[[rule]]\nmatch = "**norm.weight"\ntp = {pattern = "replicate", rule = "first"}'
    )
    document = json_of("patterns", "infer", drifted, "--patterns", rules)
    assert document["covered"] == 5
    assert json_of("patterns", "infer", drifted, "--patterns", "hf-llama")["proposals"] == []


def test_explain(run: Run) -> None:
    result = invoke("patterns", "explain", run.path, DOWN)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:5] == [
        DOWN,
        "  pattern     shard(1) (certain)",
        "  origin      inferred",
        "  ranks hold  2 x 24x18",
        "  whole       24x36",
    ]
    table = invoke("patterns", "explain", run.path).stdout.splitlines()
    assert table[0].split() == ["FQN", "PATTERN", "CONFIDENCE", "ORIGIN", "RANKS", "HOLD", "WHOLE"]
    assert len(table) == 22
    document = validate(json_of("patterns", "explain", run.path), "explanation")
    assert (document["ok"], len(document["parameters"])) == (True, 21)


def test_explain_finds_rules_that_contradict(run: Run, tmp_path: Path) -> None:
    rules = tmp_path / "wrong.json"
    rules.write_text(json.dumps({"rules": [{"match": ["**"], "tp": "shard(0)"}]}))
    result = invoke("patterns", "explain", run.path, DOWN, "--patterns", rules)
    assert result.exit_code == 1
    assert "  problem     the rule says shard(0), the evidence shard(1)" in result.stdout
    missing = invoke("patterns", "explain", run.path, "nothing.weight")
    assert missing.exit_code == 3


def test_check(run: Run, drifted: Path, tmp_path: Path) -> None:
    assert invoke("patterns", "check", run.path, "hf-llama").stdout.endswith("nothing wrong\n")
    result = invoke("patterns", "check", drifted, "hf-llama")
    assert result.exit_code == 1
    assert result.stdout.count("replicas_differ") == 5
    assert "24 of 24 elements differ, first at (0,), max |difference| 0.001." in result.stdout
    # without rules, those of the checkpoint: this one has none
    document = validate(json_of("patterns", "check", run.path, code=1), "patterncheck")
    assert {finding["kind"] for finding in document["findings"]} == {"unmatched"}
    assert len(document["findings"]) == 21
    whole = deepspeed_run("tp2-s1-fp32-dp2").path
    assert json_of("patterns", "check", whole)["ok"]


def test_exit_codes(run: Run, tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[[rule]]\nmatch = 3")
    assert invoke("patterns", "check", run.path, broken).exit_code == 3
    assert invoke("patterns", "check", run.path, tmp_path / "absent.toml").exit_code == 3
    assert invoke("patterns", "check", run.path, "no-such-preset").exit_code == 3
    assert invoke("patterns", "infer", tmp_path / "nothing").exit_code == 3
    assert invoke("patterns", "infer", run.path, "-o", tmp_path / "no" / "dir").exit_code == 4
    assert invoke("patterns", "check").exit_code == 2
    assert invoke("patterns", "explain", "--no-such-option").exit_code == 2


def test_our_own_store_has_no_ranks(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert invoke("convert", deepspeed_run("tp2-s1-fp32-dp2").path, store).exit_code == 0
    document = json_of("patterns", "infer", store, code=3)
    assert "holds whole parameters and no ranks" in document["error"]["message"]
