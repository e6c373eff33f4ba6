"""The commands as users meet them, and killed in the middle of a copy between two servers."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import ucpstore
from tests.runs.places import Place, commit, commit_planned, save
from tests.schemas import validate
from tests.servers import S3Server
from tests.store.stores import contents
from ucpstore.cli.main import main
from ucpstore.cli.output import EXIT_FINDINGS, EXIT_INTEGRITY, EXIT_SOURCE
from ucpstore.errors import UncommittedError, UnrecognizedSourceError

ROOT = Path(__file__).parents[2]


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)


def json_of(*arguments: str | Path, code: int = 0) -> Any:
    result = invoke(*arguments, "--json")
    assert result.exit_code == code, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save(Place(str(tmp_path / "run")), step)
    return tmp_path / "run"


def test_copy(run: Path, tmp_path: Path) -> None:
    events = json_of("copy", run, tmp_path / "b", "--tag", "20", "--max-rate", "1GB")
    for event in events[:-1]:
        validate(event, "event")
    assert validate(events[-1], "report")["committed"]
    result = invoke("copy", run / "step-00000020", tmp_path / "b")
    assert result.exit_code == 0
    assert "already complete" in result.stdout
    assert invoke("copy", tmp_path, tmp_path / "c").exit_code == EXIT_SOURCE
    (tmp_path / "b" / "params" / "a" / "fp32" / "c.0").write_bytes(b"x")
    result = invoke("copy", tmp_path / "b", tmp_path / "c")
    assert result.exit_code == EXIT_INTEGRITY
    assert "params/a/fp32/c.0" in result.stderr


def test_quick_verify(tmp_path: Path) -> None:
    commit_planned(Place(str(tmp_path / "a")).files())
    (found,) = json_of("verify", tmp_path / "a", "--quick")
    assert validate(found, "verification")["quick"]
    (tmp_path / "a" / "params" / "a" / "fp32" / "c.0").unlink()
    (found,) = json_of("verify", tmp_path / "a", "--quick", code=EXIT_FINDINGS)
    assert [f["kind"] for f in found["findings"]] == ["lost_object"]
    assert invoke("verify", tmp_path / "a", "--quick", "--against", "x").exit_code == EXIT_SOURCE


def test_steps_and_gc(run: Path) -> None:
    (found,) = json_of("steps", run)
    assert validate(found, "steps")["latest"] == "step-00000030"
    lines = invoke("steps", run).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "NAME", "step-00000010", "step-00000020", "step-00000030",
    ]  # fmt: skip
    result = invoke("gc", run, "--keep-last", "1", "--keep-every", "20")
    assert "would delete step-00000010: old" in result.stdout
    assert "--yes" in result.stderr
    assert ucpstore.open(run, step=10)
    (found,) = json_of("gc", run, "--keep-last", "1", "--keep-every", "20", "--yes")
    assert [d["name"] for d in validate(found, "gc")["deletions"]] == ["step-00000010"]
    commit(Place(str(run / "step-00000020-b")).files(), 7)
    assert "step-00000020-b" in invoke("steps", run, "--use", "step-00000020-b").stdout
    assert ucpstore.open(run, step=20).url.endswith("-b")
    assert invoke("gc", run, "--grace", "soon").exit_code == EXIT_SOURCE


def test_killed_between_two_clusters(tmp_path: Path, server: S3Server) -> None:
    """A file system and a bucket: killed after some of its objects, as often as it takes to end."""
    source, dest = Place(str(tmp_path / "a")), Place(server.new_bucket(), server.options).at("b")
    commit(source.files())
    rng, killed = random.Random(2), 0
    endpoint = f"endpoint_url={server.endpoint}"
    command = [sys.executable, "-m", "ucpstore", "copy", source.url, dest.url, "--json"]
    for _ in range(3):
        with subprocess.Popen(
            [*command, "--dest-option", endpoint, "--threads", "1"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        ) as process:
            assert process.stdout is not None
            wanted = rng.randint(2, 30)
            for number, _line in enumerate(process.stdout):
                if number == wanted:
                    process.send_signal(signal.SIGKILL)
                    break
        killed += process.returncode == -signal.SIGKILL
        if dest.files().stat("zarr.json") is None:
            with pytest.raises((UncommittedError, UnrecognizedSourceError)):
                ucpstore.open(dest.url, format="ucpstore", storage_options=dest.options)
    assert killed
    report = ucpstore.copy(source.url, dest.url, dest_options=dest.options)
    assert report.committed
    assert contents(dest.files()) == contents(source.files())
