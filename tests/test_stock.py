"""The harness that tries stock tools (`benchmarks/stock.py`) tells apart what works and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stock import Bench, Outcome, cell, classify

SOURCE = "s3-bf16-dp2"
SAME = {"dp": 2, "zero_stage": 3}
FEWER = {"dp": 1, "zero_stage": 3}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("stock"), limit=60)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("route", "target", "word", "wrong"),
    [
        ("ucpstore", FEWER, "works", set()),
        ("none", SAME, "works", set()),
        ("dcp_by_rank", SAME, "works", set()),
        # what DeepSpeed's converter leaves out, and the groups it gives the first one's settings
        ("universal", SAME, "silently wrong", {"buffer", "hyper", "losses"}),
        # plain tensors of two ranks under one name are one to DCP
        ("dcp", SAME, "silently wrong", {"exp_avg", "exp_avg_sq", "fp32", "losses", "weight"}),
    ],
)
def test_what_runs_to_its_end(
    bench: Bench, route: str, target: dict[str, Any], word: str, wrong: set[str]
) -> None:
    rtol = 0.0 if target is SAME else 1e-3
    outcome = bench.outcome(SOURCE, target, rtol, route)
    assert (outcome.word, outcome.wrong.keys()) == (word, wrong)
    assert cell(outcome).startswith(word)


@pytest.mark.parametrize(
    ("route", "step", "kind", "foreseen"),
    [
        ("none", "load", "ZeRORuntimeException", True),
        ("dcp_by_rank", "load", "ValueError", True),
        ("dcp_get_state_dict", "save", "KeyError", False),
    ],
)
def test_what_ends_with_an_error(
    bench: Bench, route: str, step: str, kind: str, foreseen: bool
) -> None:
    target = {"dp": 1, "zero_stage": 1} if route == "none" else FEWER
    source = "s2-bf16-dp2" if route == "none" else SOURCE
    outcome = bench.outcome(source, target, 1e-3, route)
    assert (outcome.word, outcome.step) == ("error", step)
    assert outcome.error is not None
    assert (outcome.error["type"], outcome.error["foreseen"]) == (kind, foreseen)
    assert ".py:" in outcome.error["where"]


def test_hangs_and_crashes_end_with_their_trial(bench: Bench, tmp_path: Path) -> None:
    request = {"folder": str(tmp_path / "trial"), "limit": 1.0}
    assert bench.server.ask({**request, "kind": "sleep", "seconds": 600})["ended"] == "hang"
    crashed = bench.server.ask({**request, "kind": "crash"})
    assert crashed["ended"] == "error"
    assert "without an error" in crashed["error"]["message"]
    assert bench.server.ask({**request, "kind": "sleep", "seconds": 0})["ended"] == "ok"


def test_words() -> None:
    assert classify({}) == "works"
    assert classify({"buffer": {"mask"}}) == "partly"
    assert classify({"buffer": {"mask"}, "losses": {"0"}}) == "silently wrong"
    assert cell(Outcome("partly", wrong={"buffer": 1, "hyper": 2}, of={"buffer": 3})) == (
        "partly: buffer 1/3, hyper"
    )
