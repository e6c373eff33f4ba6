"""Promise: the command line may be killed or interrupted at any moment, and be repeated until it is done."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import ucpstore
from tests.deepspeed_runs import deepspeed_run
from ucpstore import Layout
from ucpstore.errors import CheckpointNotFoundError, SourceError, UncommittedError

DEATHS = 10
ROOT = Path(__file__).parents[2]
LAYOUT = Layout(dp=8, zero_stage=3)
TAG = "global_step3"


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that DeepSpeed sees."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and ".ucpstore" not in file.parts
    }


def attempt(source: Path, dest: Path, sent: signal.Signals, rng: random.Random) -> tuple[int, str]:
    """The command, which gets a signal a moment after its first events; (return code, stage it was in)."""
    command = [sys.executable, "-m", "ucpstore", "convert", str(source), str(dest), "--json"]
    layout = ["--to", "deepspeed", "--layout", f"dp={LAYOUT.dp},zero_stage={LAYOUT.zero_stage}"]
    last, events = "", rng.choice((1, 1, 2, 3, 5, 8, 13, 19))
    with subprocess.Popen(
        [*command, *layout, "--threads", "1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for number, line in enumerate(process.stdout, 1):
            last = json.loads(line)["event"]
            if number == events or last == "published":
                time.sleep(rng.choice((0, 0.001, 0.005, 0.02)))
                process.send_signal(sent)
                break
        process.stdout.read()
        errors = process.stderr.read()
    if sent is signal.SIGINT and process.returncode not in (0, -sent):
        assert process.returncode == 130, errors
        assert "run the same command again" in errors
    return process.returncode, last


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_the_command_is_killed_until_it_is_done(sent: signal.Signals, tmp_path: Path) -> None:
    source, rng = deepspeed_run("s2-bf16-dp2").path, random.Random(5)
    ucpstore.convert(source, tmp_path / "whole", to="deepspeed", layout=LAYOUT)
    whole = contents(tmp_path / "whole")
    without_latest = {name: data for name, data in whole.items() if name != "latest"}
    deaths: Counter[str] = Counter()
    for chain in range(40):
        dest = tmp_path / str(chain)
        for _ in range(3):
            code, stage = attempt(source, dest, sent, rng)
            deaths[stage] += code in (-signal.SIGKILL, 130)
            seen = contents(dest)
            assert seen in ({}, without_latest, whole)
            if seen != whole:
                with pytest.raises((UncommittedError, SourceError, CheckpointNotFoundError)):
                    ucpstore.open(dest)
        report = ucpstore.convert(source, dest, to="deepspeed", layout=LAYOUT)
        assert report.committed
        assert contents(dest) == whole
        assert ucpstore.open(dest).source.parallelism["dp"] == LAYOUT.dp
        assert not list((dest / ".ucpstore").glob("tmp/*"))
        if sum(deaths.values()) >= DEATHS and len(+deaths) > 1:
            break
    assert sum(deaths.values()) >= DEATHS, f"too few processes really died: {deaths}"
    assert len(+deaths) > 1, f"they died at too few moments: {deaths}"
