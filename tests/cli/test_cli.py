"""The command line as users meet it: output, JSON by schema, exit codes."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.deepspeed_runs import deepspeed_run
from tests.schemas import validate
from ucpstore.cli.main import main
from ucpstore.cli.output import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_SOURCE, EXIT_STORAGE

CASE = "s2-bf16-dp2"


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)


def json_of(*arguments: str | Path, code: int = 0) -> Any:
    result = invoke(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def source() -> Path:
    return deepspeed_run(CASE).path


@pytest.fixture(scope="module")
def store(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "store"
    assert invoke("convert", source, folder).exit_code == 0
    return folder


@pytest.fixture(params=["source", "store"])
def either(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def test_inspect(either: Path) -> None:
    info = validate(json_of("inspect", either), "info")
    assert {"fp32", "adam_m", "adam_v"} <= set(info["states"])
    text = invoke("inspect", either).stdout
    assert "adam_v" in text
    assert "parameters" in text


def test_ls(either: Path) -> None:
    rows = validate(json_of("ls", either, "--state", "adam_m", "--fqn", "*norm*"), "listing")
    assert rows
    assert {row["state"] for row in rows} == {"adam_m"}
    lines = invoke("ls", either, "--state", "adam_m", "--fqn", "*norm*").stdout.splitlines()
    assert lines[0].split() == ["FQN", "STATE", "SHAPE", "DTYPE", "BYTES", "PATTERN"]
    assert len(lines) == 1 + len(rows)


def test_tree(either: Path) -> None:
    document = json_of("tree", either)
    text = invoke("tree", either, "--max-nodes", "5").stdout.splitlines()
    assert text[:5] == document["tree"][:5]
    assert len(text) == 6


def test_plan_writes_nothing(source: Path, tmp_path: Path) -> None:
    plan = validate(json_of("plan", source, tmp_path / "none"), "plan")
    dry = json_of("convert", source, tmp_path / "none", "--dry-run")
    assert {**dry, "free_nbytes": 0, "free_inodes": 0} == {
        **plan,
        "free_nbytes": 0,
        "free_inodes": 0,
    }
    assert plan["amplification"] < 1.1
    assert "objects" in invoke("plan", source, tmp_path / "none").stdout
    assert not (tmp_path / "none").exists()


def test_convert_speaks_json_lines(source: Path, tmp_path: Path) -> None:
    result = invoke("convert", source, tmp_path / "s", "--json", "-v")
    *events, report = [json.loads(line) for line in result.stdout.splitlines()]
    for event in events:
        validate(event, "event")
    validate(report, "report")
    assert report["committed"]
    assert events[0]["event"] == "started"
    assert events[-1]["event"] == "committed"
    again = json.loads(invoke("convert", source, tmp_path / "s", "--json").stdout.splitlines()[-1])
    assert again["already_committed"]
    assert "nothing to do" in invoke("convert", source, tmp_path / "s").stdout


def test_convert_keeps_stdout_for_the_result(source: Path, tmp_path: Path) -> None:
    result = invoke("convert", source, tmp_path / "s")
    assert result.stdout.count("\n") == 1
    assert "complete" in result.stdout
    assert "objects" in result.stderr
    quiet = invoke("convert", source, tmp_path / "q", "--quiet")
    assert quiet.stderr == ""


def test_shares(source: Path, tmp_path: Path) -> None:
    assert "other workers" in invoke("convert", source, tmp_path / "s", "--worker", "0/2").stdout
    assert "complete;" in invoke("convert", source, tmp_path / "s", "--worker", "1/2").stdout


def test_verify_and_diff(source: Path, store: Path) -> None:
    found = validate(json_of("verify", store, "--against", source), "verification")
    assert found["ok"]
    assert found["digests"] == found["states"] > 10
    assert validate(json_of("diff", source, store), "diff")["equal"]
    assert "nothing wrong" in invoke("verify", store).stdout


def test_findings_exit_with_1(source: Path, tmp_path: Path) -> None:
    invoke("convert", source, tmp_path / "s")
    (victim,) = (tmp_path / "s" / "params").glob("*embed*/adam_v/c*")
    data = bytearray(victim.read_bytes())
    data[10] ^= 4
    victim.write_bytes(data)
    result = invoke("verify", tmp_path / "s")
    assert result.exit_code == EXIT_FINDINGS
    assert "adam_v" in result.stdout
    assert not validate(json_of("verify", tmp_path / "s", code=EXIT_FINDINGS), "verification")["ok"]
    other = deepspeed_run("s2-fp32-dp2").path
    assert invoke("diff", source, other).exit_code == EXIT_FINDINGS
    validate(json_of("diff", source, other, code=EXIT_FINDINGS), "diff")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["inspect", "{tmp}/nothing"], "nothing is at"),
        (["inspect", "{tmp}"], "no checkpoint that is known here"),
        (["convert", "{source}", "{tmp}/s", "--memory-limit", "1kB"], "too small"),
        (["convert", "{source}", "{tmp}/s", "--memory-limit", "lots"], "amount of bytes"),
        (["convert", "{source}", "{tmp}/s", "--only", "no.such.*"], "no.such"),
        (["ls", "{source}", "--tag", "no-such-tag"], "no-such-tag"),
        (["inspect", "{source}", "--format", "paper"], "paper"),
    ],
)
def test_bad_requests_exit_with_3(
    source: Path, tmp_path: Path, arguments: list[str], text: str
) -> None:
    (tmp_path / "readme.txt").write_text("hello")
    filled = [a.format(tmp=tmp_path, source=source) for a in arguments]
    result = invoke(*filled)
    assert result.exit_code == EXIT_SOURCE, result.output
    assert result.stderr.startswith("error: ")
    assert text in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "s").exists()
    document = json.loads(invoke(*filled, "--json").stdout)
    validate(document, "error")
    assert "Traceback" in invoke(*filled, "-vv").stderr


def test_usage_errors_exit_with_2(source: Path) -> None:
    assert invoke("convert", source).exit_code == 2
    assert invoke("convert", source, "x", "--worker", "3/3").exit_code == 2
    assert invoke("ls", source, "--storage-option", "nonsense").exit_code == 2
    assert invoke("conquer").exit_code == 2


def test_unsafe_pickles_are_refused_by_name(source: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(source, tmp_path / "evil")
    (victim,) = (tmp_path / "evil").glob("*/mp_rank_00_model_states.pt")

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/owned",)

    import torch

    torch.save({"module": Evil()}, victim, pickle_module=pickle)
    result = invoke("inspect", tmp_path / "evil")
    assert result.exit_code == EXIT_SOURCE
    assert "system" in result.stderr
    assert not (tmp_path / "owned").exists()


def test_storage_errors_exit_with_4(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = invoke("convert", source, tmp_path / "file" / "store")
    assert result.exit_code == EXIT_STORAGE, result.output
    result = invoke("inspect", "gopher://x")
    assert result.exit_code == EXIT_STORAGE, result.output
    assert "gopher" in result.stderr


def test_another_plan_is_refused_until_it_is_abandoned(source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "s"
    assert invoke("convert", source, dest, "--worker", "0/2").exit_code == 0
    result = invoke("convert", source, dest, "--state", "fp32")
    assert result.exit_code == EXIT_SOURCE
    assert "ucpstore abandon" in result.stderr
    assert invoke("ls", dest).exit_code == EXIT_SOURCE
    freed = json_of("abandon", dest)
    assert freed["abandoned"].startswith("sha256:")
    assert invoke("convert", source, dest, "--state", "fp32").exit_code == 0
    assert {row["state"] for row in json_of("ls", dest)} == {"fp32"}
    assert "no open claim" in invoke("abandon", tmp_path / "never").stdout


def test_interrupt_exits_with_130_and_resumes(source: Path, tmp_path: Path) -> None:
    script = (
        "import time, ucpstore.store.target as t\n"
        "write = t.ZarrTarget.write\n"
        "t.ZarrTarget.write = lambda *a: (time.sleep(0.2), write(*a))[1]\n"
        "from ucpstore.cli.main import main\n"
        "main()\n"
    )
    command = [
        sys.executable,
        "-c",
        script,
        "convert",
        str(source),
        str(tmp_path / "s"),
        "--threads",
        "1",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "s").glob("params/*/*/c*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED, errors
    assert "run the same command again" in errors
    assert invoke("convert", source, tmp_path / "s").exit_code == 0
    assert invoke("verify", tmp_path / "s", "--against", source).exit_code == 0


def test_env() -> None:
    facts = json_of("env")
    assert facts["torch"] != "not installed"
    assert "deepspeed" in facts["formats"]


def test_module_entry_point(source: Path) -> None:
    command = [sys.executable, "-m", "ucpstore", "--version"]
    assert "0.1.0" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
