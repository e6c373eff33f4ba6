"""Promise: kill -9 at any moment, then the same command, gives the same bytes and redoes nothing recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.engine.kill_matrix import STAGES

TRIALS = 6
ROOT = Path(__file__).parents[2]


def test_kill_matrix(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engine.kill_matrix", str(tmp_path), str(TRIALS), "11"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert Counter(trial["stage"] for trial in trials) == dict.fromkeys(STAGES, TRIALS)
    killed = Counter(trial["stage"] for trial in trials if trial["killed"])
    assert all(killed[stage] >= 5 for stage in STAGES), f"too few processes really died: {killed}"
    assert any(trial["resumed"] for trial in trials), "no run ever resumed: nothing was proven"
