"""Trials of stock tools, each in a process group of its own: ``python -m benchmarks.stock_server``.

The frameworks are imported once; every trial is then forked, limited in time and killed as a group, so that
neither a crash nor a hang of a framework reaches the next trial. A request is a line of JSON, the answer too.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.stock_trial import Trial, to_universal, train_and_save
from tests.deepspeed_runs import train
from tests.deepspeed_runs.cases import Case, find_case

# ------------------------------------------------------------------- trials and their errors


def describe(error: BaseException) -> dict[str, Any]:
    """Return type, message and place of an error, and whether somebody foresaw it.

    ``foreseen`` is whether a statement ``raise`` or ``assert`` with a message of some words was reached, not
    an operation that happened to fail.
    """
    failures = getattr(error, "failures", None)  # DCP's, which hides the causes of the ranks
    stack: Sequence[traceback.FrameSummary]
    if failures:
        inner, stack = failures[min(failures)]
    else:
        inner, stack = error, traceback.extract_tb(error.__traceback__)
    message = str(inner).strip()
    while inner.__cause__ is not None and not failures:
        inner = inner.__cause__
    frames = [f for f in stack if "site-packages/" in f.filename and "_ops" not in f.filename]
    last = frames[-1] if frames else (stack[-1] if stack else None)
    line = last.line or "" if last is not None else ""
    return {
        "type": type(inner).__name__,
        "message": message.splitlines()[0][:300] if message else "",
        "where": (
            f"{last.filename.rpartition('site-packages/')[2]}:{last.lineno}" if last else "unknown"
        ),
        "line": line,
        "foreseen": line.startswith(("raise", "assert")) and len(message.split()) >= 4,
        "time": time.time(),
    }


def guarded(task: train.Task) -> train.Task:
    """Leave a rank's error in the folder."""

    def run(case: Case, folder: Path) -> None:
        try:
            task(case, folder)
        except BaseException as error:  # DCP's exceptions are not of class Exception
            text = json.dumps(describe(error))
            (folder / f"error-{os.environ['RANK']}.json").write_text(text)
            raise

    return run


def carry_out(request: Mapping[str, Any]) -> None:
    """Do one trial in this process (the leader of a group of its own)."""
    folder = Path(request["folder"])
    kind = request["kind"]
    if kind == "universal":
        folder.mkdir(parents=True, exist_ok=True)
        try:
            to_universal(Path(request["source"]), Path(request["target"]), request["flags"])
        except BaseException as error:
            (folder / "error-0.json").write_text(json.dumps(describe(error)))
            raise
    elif kind == "save":
        task = train_and_save(request["route"], Path(request["target"]))
        train.run_case(find_case(request["name"]), folder, guarded(task))
    elif kind == "resume":
        trial = Trial(**request["trial"])
        train.run_case(trial.case(find_case(trial.name)), folder, guarded(trial))
    elif kind == "sleep":  # what the harness's own test needs, as the next
        time.sleep(request["seconds"])
    elif kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    else:
        raise ValueError(f"request of kind {kind!r}, expected universal, save or resume")


def attempt(request: Mapping[str, Any]) -> dict[str, Any]:
    """Fork, wait, and say how it ended: ``ok``, ``error`` or ``hang``."""
    folder = Path(request["folder"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        in_child(lambda: carry_out(request), Path(f"{folder}.log"))
    lead_group(pid)
    done, status = 0, 0
    while not done and time.monotonic() - begin < request["limit"]:
        time.sleep(0.02)
        done, status = os.waitpid(pid, os.WNOHANG)
    with suppress(ProcessLookupError):  # nobody is left of the group, as it should be
        os.killpg(pid, signal.SIGKILL)
    seconds = round(time.monotonic() - begin, 1)
    if not done:
        os.waitpid(pid, 0)
        return {"ended": "hang", "seconds": seconds}
    if status == 0:
        return {"ended": "ok", "seconds": seconds}
    unknown = {"type": "", "message": "a process ended without an error", "where": "unknown"}
    errors = [json.loads(path.read_text()) for path in folder.glob("error-*.json")]
    first = min(errors, key=lambda error: error["time"], default={**unknown, "foreseen": False})
    return {"ended": "error", "seconds": seconds, "error": first}


def lead_group(pid: int) -> None:
    """Make process `pid` the leader of a group of its own; parent and child both do, whoever is first."""
    with suppress(OSError):
        os.setpgid(pid, pid)


def in_child(task: Callable[[], None], log: Path) -> None:
    """Carry out `task` as the leader of a new group, and end."""
    status = 1
    try:
        lead_group(os.getpid())
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        task()
        status = 0
    except BaseException:  # the fork must end here whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    for module in (*train.IMPORT_BEFORE_FORK, "torch.distributed.checkpoint.state_dict"):
        importlib.import_module(module)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(attempt(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
