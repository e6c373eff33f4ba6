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

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.deepspeed_runs import deepspeed_run
from tests.schemas import validate
from ucpstore.cli.main import main
from ucpstore.cli.output import (
    EXIT_FINDINGS,
    EXIT_INTEGRITY,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_PIPE,
    EXIT_SOURCE,
    EXIT_STORAGE,
)

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
    document = validate(json_of("tree", either), "tree")
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
        (["inspect", "{tmp}/readme.txt"], "is a file, expected the folder"),
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
    freed = validate(json_of("abandon", dest), "abandoned")
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
    facts = validate(json_of("env"), "environment")
    assert facts["torch"] != "not installed"
    assert "deepspeed" in facts["formats"]


def test_module_entry_point(source: Path) -> None:
    command = [sys.executable, "-m", "ucpstore", "--version"]
    assert "0.1.0" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose names are terminal commands."""
    from tests.engine.test_run import convert
    from tests.fakes import ArraySource

    folder = tmp_path_factory.mktemp("odd") / "store"
    names = ["evil\n\x1b[2J", "rtl\u202e", "c1\x9b31m", "\u00fcni.\u2713", "lone\ud800"]
    arrays = {
        name: {"fp32": np.ones(3, np.float32), name: np.ones(3, np.float32)} for name in names
    }
    convert(folder, ArraySource(arrays, {"\x1b[1m": 1}))
    return folder


def run_command(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "ucpstore", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, env={**os.environ, **environment})


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_names_are_shown_and_never_obeyed(odd: Path, store: Path, encoding: str) -> None:
    for arguments in (
        ("ls", odd),
        ("tree", odd),
        ("inspect", odd),
        ("verify", odd, "--against", store),
        ("diff", odd, store),
        ("ls", str(odd) + "\x1b[1m\n"),
    ):
        for flags in ((), ("--json",)):
            done = run_command(*arguments, *flags, PYTHONIOENCODING=encoding)
            text = (done.stdout + done.stderr).decode(encoding)
            assert done.returncode in (0, EXIT_FINDINGS, EXIT_SOURCE), text
            assert "Traceback" not in text
            assert all(c.isprintable() or c == "\n" for c in text)
            if flags:
                assert all(isinstance(json.loads(x), dict | list) for x in done.stdout.splitlines())
    listed = run_command("ls", odd, PYTHONIOENCODING=encoding).stdout.splitlines()
    assert len(listed) == 1 + 2 * 5
    (row, *_) = json.loads(run_command("ls", odd, "--json").stdout)
    assert row["fqn"] == "evil\n\x1b[2J"


def test_a_reader_that_goes_away_is_not_success(source: Path, store: Path, tmp_path: Path) -> None:
    for arguments in (("ls", store), ("convert", source, tmp_path / "s", "--json")):
        command = [sys.executable, "-m", "ucpstore", *map(str, arguments)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            errors = process.stderr.read()
            assert process.wait(60) == EXIT_PIPE, errors
        assert b"Traceback" not in errors
    assert invoke("convert", source, tmp_path / "s").exit_code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_full_output_is_a_storage_error(store: Path, flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "ucpstore", "ls", str(store), *flags]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == EXIT_STORAGE
    assert done.stderr.startswith("error: cannot write the output")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.returncode == 0


def test_a_bug_is_no_finding(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucpstore.api.verify", lambda *a, **k: 1 / 0)
    result = invoke("verify", store, "--json")
    assert result.exit_code == EXIT_INTERNAL
    assert validate(json.loads(result.stdout), "error")["error"]["kind"] == "internal"
    assert "ZeroDivisionError" in result.stderr


def test_an_interruption_is_told_in_json_too(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ucpstore.api.verify", interrupt)
    result = invoke("verify", store, "--json")
    assert result.exit_code == EXIT_INTERRUPTED
    assert validate(json.loads(result.stdout), "error")["error"]["kind"] == "interrupted"


def test_an_interruption_between_two_commands_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main.commands["env"], "make_context", interrupt)
    result = invoke("env")
    assert result.exit_code == EXIT_INTERRUPTED
    assert "run the same command again" in result.stderr


def test_relative_paths_are_those_of_the_caller(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker processes start in another folder."""
    import ucpstore

    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    relative = os.path.relpath(source)
    assert ucpstore.convert(relative, "../s", workers=2, threads=1).committed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner", "s"]
    assert not list((tmp_path / "inner").iterdir())
    assert ucpstore.verify(tmp_path / "s", against=source).ok


@pytest.mark.parametrize("name", ["states", "only", "exclude"])
@pytest.mark.parametrize("odd", [[1], [None], b"fp32"])
def test_odd_selections_are_refused(source: Path, tmp_path: Path, name: str, odd: Any) -> None:
    import ucpstore
    from ucpstore.errors import PlanError

    with pytest.raises(PlanError, match=name):
        ucpstore.plan(source, tmp_path / "s", **{name: odd})


def damage(store: Path) -> None:
    victim = next((store / "params").glob("*embed*/adam_v/c*"))
    data = bytearray(victim.read_bytes())
    data[10] ^= 4
    victim.write_bytes(data)


def test_integrity_errors_exit_with_5(source: Path, tmp_path: Path) -> None:
    invoke("convert", source, tmp_path / "s")
    damage(tmp_path / "s")
    result = invoke("convert", tmp_path / "s", tmp_path / "copy")
    assert result.exit_code == EXIT_INTEGRITY
    assert "embed" in result.stderr
    document = json.loads(
        invoke("convert", tmp_path / "s", tmp_path / "copy", "--json").stdout.splitlines()[-1]
    )
    assert validate(document, "error")["error"]["kind"] == "checksum"


@pytest.mark.parametrize("arguments", [("--state", "nosuch"), ("--fqn", "nosuch*")])
def test_listing_of_what_is_not_there_is_an_error(source: Path, arguments: tuple[str, str]) -> None:
    result = invoke("ls", source, *arguments)
    assert result.exit_code == EXIT_SOURCE
    assert "nosuch" in result.stderr


def test_a_store_inside_a_store_is_refused(store: Path) -> None:
    before = sorted(store.rglob("*"))
    for inner in (store, store / "params" / "x"):
        result = invoke("convert", store, inner, "--state", "fp32")
        assert result.exit_code == EXIT_SOURCE, result.output
    assert sorted(store.rglob("*")) == before


def tree_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".ucpstore" not in path.parts
    }


SLOW = (
    "import time, ucpstore.store.target as t\n"
    "write = t.ZarrTarget.write\n"
    "t.ZarrTarget.write = lambda *a: (time.sleep(0.02), write(*a))[1]\n"
    "from ucpstore.cli.main import main\n"
    "main()\n"
)


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_commands_are_finished_by_the_same_command(
    source: Path, store: Path, tmp_path: Path
) -> None:
    killed = 0
    for attempt in range(5):
        process = start("convert", source, tmp_path / "s", "--threads", "1")
        seen = len(list((tmp_path / "s").glob("params/*/*/c*")))
        deadline = time.monotonic() + 60
        while (
            len(list((tmp_path / "s").glob("params/*/*/c*"))) <= seen + 3 * attempt
            and process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.005)
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        if (tmp_path / "s" / "zarr.json").exists():
            break
        assert invoke("ls", tmp_path / "s").exit_code == EXIT_SOURCE
    assert killed >= 2
    assert invoke("convert", source, tmp_path / "s").exit_code == 0
    assert tree_of(tmp_path / "s") == tree_of(store)


def test_racing_commands_cooperate(source: Path, store: Path, tmp_path: Path) -> None:
    racers = [start("convert", source, tmp_path / "s") for _ in range(3)]
    other = start("convert", source, tmp_path / "s", "--state", "fp32")
    errors = [process.communicate(timeout=120)[1] for process in [*racers, other]]
    codes = [process.returncode for process in [*racers, other]]
    assert sorted(set(codes)) == [0, EXIT_SOURCE], errors
    if codes[-1] == 0:  # the other plan was first
        assert codes[:3] == [EXIT_SOURCE] * 3
        assert {row["state"] for row in json_of("ls", tmp_path / "s")} == {"fp32"}
    else:
        assert codes[:3] == [0, 0, 0]
        assert tree_of(tmp_path / "s") == tree_of(store)
    assert invoke("verify", tmp_path / "s").exit_code == 0


def test_progress_on_a_terminal(source: Path, tmp_path: Path) -> None:
    import pty

    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "ucpstore", "convert", str(source), str(tmp_path / "s")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, text=True)
    os.close(follower)
    shown = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        shown += data
    os.close(leader)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "complete" in output
    assert b"converting" in shown
    assert b"100%" in shown or b"/s" in shown
