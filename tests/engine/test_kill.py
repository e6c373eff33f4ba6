"""Promise: kill -9 at any moment, then the same command, gives the same bytes and redoes nothing recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.kill_subjects import SUBJECTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "trials"), [("zarr", 6), ("copy", 4), ("native", 8)])
def test_kill_matrix(name: str, trials: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engine.kill_matrix"]
    done = subprocess.run(
        [*command, name, str(tmp_path), str(trials), "11"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    stages = SUBJECTS[name].stages
    # Every single process really died, at each stage before and after its effect.
    killed = Counter(trial["stage"] for trial in found if trial["killed"])
    assert killed == dict.fromkeys(stages, trials)
    sides = {(trial["stage"], trial["after"]) for trial in found}
    assert sides == {(stage, after) for stage in stages for after in (False, True)}
    assert {trial["crowded"] for trial in found} == {False, True}
    assert any(trial["runs"] > 1 for trial in found)
    assert any(trial["resumed"] for trial in found), "no run ever resumed: nothing was proven"
