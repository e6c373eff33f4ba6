"""The resume matrix tried with stock tools: ``python -m benchmarks.stock``. See benchmarks/README.md.

Every row of `tests/test_matrix.py` (a real run, a target layout) is tried with ucpstore, with DeepSpeed's own
universal checkpoints, with PyTorch's DCP, and without any conversion. What the resumed engine holds, and the
losses of its next five steps, are compared with the run that never stopped, as the test does it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ucpstore
from benchmarks.stock_trial import DCP_ROUTES, Trial
from tests.deepspeed_runs import Run, copy_run, deepspeed_run
from tests.deepspeed_runs.compare import differences, tensors_of
from tests.deepspeed_runs.resume import Resumed, continue_run
from tests.test_matrix import AUTOTP, CHAINS, EXACT, MATRIX, convert, settings, words
from ucpstore.errors import UcpStoreError
from ucpstore.layout.rules import Patterns

__all__ = ["ROUTES", "Bench", "Outcome", "classify", "main"]

ROOT = Path(__file__).parent.parent
ROUTES = ("ucpstore", "universal", *DCP_ROUTES, "none")
"""Ways from a checkpoint to the target layout; ``none`` is loading it as it is."""
CHAIN_ROUTES = ("ucpstore", "universal")
"""Those that get as far as the other layout."""
LAYER_01 = "a copy of the first layer's files named layer_01"
"""Without which `ds_to_universal` takes a pipeline whose second entry has no parameters for bogus: it counts
Megatron's ``layer_01`` files (`deepspeed_checkpoint.py`, `_validate_folder`). A user would have to invent it."""
CONVERTER_FLAGS = {
    "universal_checkpoint_info": "--inject_missing_state",
    "Unused patterns": "--no_strict",
}
"""Words of a message of `ds_to_universal` -> the flag that a user gives it then."""
LIMIT = 90.0
"""Seconds after which a trial counts as hanging; those that end take a few."""
PACKAGES = ("deepspeed", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one trial ended.

    Attributes
    ----------
    word : {"works", "partly", "silently wrong", "error", "hang"}
        ``works``: everything compared is equal, the losses within the row's tolerance. ``partly``: the
        losses are, something else is not. ``silently wrong``: no error, and other losses.
    wrong, of : mapping
        Category (as `differences` names them) to the number of names of it that differ; and state to the
        number of tensors there are.
    step : {"", "save", "convert", "load"}
        Where it ended, unless it ran to its end.
    error : mapping, optional
        Type, message and place of the first error, and whether it was ``foreseen``.
    flags : tuple of str
        What the converter of DeepSpeed had to be given.
    as_built : str
        The word of a second trial, whose model was not noise before the loading but as the source's when
        it started; only where the first one was wrong without an error.
    """

    word: str
    wrong: Mapping[str, int] = field(default_factory=dict)
    of: Mapping[str, int] = field(default_factory=dict)
    step: str = ""
    error: Mapping[str, Any] | None = None
    flags: tuple[str, ...] = ()
    as_built: str = ""
    seconds: float = 0.0


Prepared = tuple[Path, Outcome | None, tuple[str, ...]]
"""What the target loads; the outcome if making it failed already; the flags that a converter was given."""


def classify(found: Mapping[str, set[str]]) -> str:
    """Return the word for a trial without an error, from what differs."""
    if not found:
        return "works"
    return "silently wrong" if "losses" in found else "partly"


class Server:
    """The process that forks the trials."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONWARNINGS": "ignore",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.stock_server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Have one trial done."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the server was started without pipes")
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of trials ended with {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate(timeout=60)


class Bench:
    """Does trials in `work`; what a source needs once is kept for its other rows."""

    def __init__(self, work: Path, *, limit: float = LIMIT) -> None:
        self.work = work
        self.limit = limit
        self.server = Server()
        self._ready: dict[tuple[str, str], Prepared] = {}
        self._count = 0

    def ask(self, kind: str, **request: Any) -> dict[str, Any]:
        folder = self._folder()
        return self.server.ask(
            {"kind": kind, "folder": str(folder), "limit": self.limit, **request}
        )

    def _folder(self) -> Path:
        self._count += 1
        return self.work / f"trial-{self._count}"

    def outcome(self, name: str, target: Mapping[str, Any], rtol: float, route: str) -> Outcome:
        """Try one route for one row of the matrix."""
        run = deepspeed_run(name)
        path, failed, flags = self._prepared(run, target, route)
        if failed is not None:
            return failed
        outcome = with_second_trial(
            lambda noise: self._resume(run, path, target, rtol, route=route, noise=noise)
        )
        return replace(outcome, flags=flags)

    def chain(
        self, name: str, there: Mapping[str, Any], back: Mapping[str, Any], route: str
    ) -> Outcome:
        """Try one route there, let DeepSpeed save there, and try the same route back."""
        run = deepspeed_run(name)
        path, failed, flags = self._prepared(run, there, route)
        if failed is not None:
            return failed

        def attempt(noise: bool) -> Outcome:
            saved = self._folder()
            answer, _, _ = self._ask_resume(
                run, path, there, route=route, noise=noise, further=0, save=str(saved)
            )
            if answer["ended"] != "ok":
                return failure(answer, "load", flags)
            between = replace(run, path=saved)
            told: dict[str, Any] = {}
            if name == AUTOTP:  # which says how it cuts parameters only where it does
                rules = ucpstore.open(run.path).source.common.document["patterns"]
                told = {"patterns": Patterns.from_json(rules)}
            path_back, failed, more = (
                self._universal(between)
                if route == "universal"
                else self._ucpstore(between, back, **told)
            )
            if failed is not None:
                return failed
            outcome = self._resume(run, path_back, back, EXACT, route=route, noise=noise)
            return replace(outcome, flags=(*flags, *more))

        return with_second_trial(attempt)

    def _prepared(self, run: Run, target: Mapping[str, Any], route: str) -> Prepared:
        if route == "none":
            return run.path, None, ()
        if route == "ucpstore":
            return self._ucpstore(run, target)
        key = (run.case.name, route)
        if key not in self._ready:
            universal = route == "universal"
            self._ready[key] = self._universal(run) if universal else self._dcp(run, route)
        return self._ready[key]

    def _ucpstore(self, run: Run, target: Mapping[str, Any], **told: Any) -> Prepared:
        folder = self._folder()
        try:
            return convert(run.path, folder, target, **told), None, ()
        except UcpStoreError as error:
            described = {"type": type(error).__name__, "message": str(error), "foreseen": True}
            return folder, Outcome("error", step="convert", error=described), ()

    def _universal(self, run: Run) -> Prepared:
        copied = copy_run(run, self._folder())
        source, target = str(copied.tag_path), f"{copied.tag_path}_universal"
        answer = self.ask("universal", source=source, target=target, flags=[])
        given: tuple[str, ...] = ()
        if "layer_01" in message(answer):
            given = (LAYER_01,)
            for file in copied.tag_path.glob("layer_00*"):
                shutil.copy(file, file.with_name(file.name.replace("layer_00", "layer_01")))
            answer = self.ask("universal", source=source, target=target, flags=[])
        for reason, flag in CONVERTER_FLAGS.items():
            if reason in message(answer):
                given = (*given, flag)
                flags = [word for word in given if word.startswith("--")]
                answer = self.ask("universal", source=source, target=target, flags=flags)
        failed = None if answer["ended"] == "ok" else failure(answer, "convert", given)
        return copied.path, failed, given

    def _dcp(self, run: Run, route: str) -> Prepared:
        path = self._folder()
        answer = self.ask("save", name=run.case.name, route=route, target=str(path))
        return path, None if answer["ended"] == "ok" else failure(answer, "save"), ()

    def _resume(
        self,
        run: Run,
        path: Path,
        target: Mapping[str, Any],
        rtol: float,
        *,
        route: str,
        noise: bool,
    ) -> Outcome:
        answer, folder, trial = self._ask_resume(run, path, target, route=route, noise=noise)
        if answer["ended"] != "ok":
            return failure(answer, "load")
        resumed = Resumed(
            tuple(json.loads((folder / "losses.json").read_text())),
            Run(case=trial.case(run.case), path=path, truth_path=folder),
        )
        return compared(run, resumed, rtol, seconds=answer["seconds"])

    def _ask_resume(
        self,
        run: Run,
        path: Path,
        target: Mapping[str, Any],
        *,
        route: str,
        noise: bool,
        **more: Any,
    ) -> tuple[dict[str, Any], Path, Trial]:
        trial = Trial(
            load=str(path),
            name=run.case.name,
            route=route if route in DCP_ROUTES else "load",
            noise=noise,
            config={"checkpoint": {"load_universal": True}} if route == "universal" else {},
            **settings(run, target),
            **more,
        )
        folder = self._folder()
        request = {"kind": "resume", "folder": str(folder), "trial": asdict(trial)}
        return self.server.ask({**request, "limit": self.limit}), folder, trial

    def close(self) -> None:
        self.server.close()


def with_second_trial(attempt: Callable[[bool], Outcome]) -> Outcome:
    """Try with noise, and where that comes out wrong without an error, with the model as it was built."""
    first = attempt(True)
    if first.wrong:
        return replace(first, as_built=attempt(False).word)
    return first


def compared(run: Run, resumed: Resumed, rtol: float, *, seconds: float) -> Outcome:
    """Compare as the test of the matrix does; ranks that disagree are a difference too."""
    try:
        found = differences(run, resumed, continue_run(run.case.name), rtol=rtol)
    except AssertionError as error:
        found = {"ranks": {str(error).splitlines()[0]}, "losses": set()}
    counts = {category: len(names) for category, names in sorted(found.items())}
    totals: dict[str, int] = {}
    for state, _ in tensors_of(run):
        totals[state] = totals.get(state, 0) + 1
    return Outcome(classify(found), wrong=counts, of=totals, seconds=seconds)


def message(answer: Mapping[str, Any]) -> str:
    return str(answer.get("error", {}).get("message", ""))


def failure(answer: Mapping[str, Any], step: str, flags: tuple[str, ...] = ()) -> Outcome:
    """Return the outcome of a trial that did not end well."""
    error = answer.get("error")
    if error and error["type"] == "NothingLoadedError":
        return Outcome("silently wrong", step=step, error=error, seconds=answer["seconds"])
    word = "hang" if answer["ended"] == "hang" else "error"
    return Outcome(word, step=step, error=error, flags=flags, seconds=answer["seconds"])


# ------------------------------------------------------------------- report


def cell(outcome: Outcome) -> str:
    """One cell of the table."""
    text = outcome.word
    if outcome.wrong:
        text += ": " + ", ".join(
            f"{category} {count}/{outcome.of[category]}" if category in outcome.of else category
            for category, count in outcome.wrong.items()
        )
    if outcome.error:
        text += f" ({outcome.step}: {outcome.error['type']} {outcome.error['message'][:60]})"
    if outcome.as_built and outcome.as_built != outcome.word:
        text += f"; as built: {outcome.as_built}"
    return text.replace("|", "/")


def row_title(row: Mapping[str, Any]) -> str:
    steps = [row["source"], words(row["target"])]
    if "back" in row:
        steps.append(words(row["back"]))
    return " -> ".join(str(step) for step in steps)


def all_rows() -> list[dict[str, Any]]:
    """Return the rows of the matrix, and the chains there and back."""
    rows: list[dict[str, Any]] = [
        {"source": name, "target": target, "rtol": rtol} for name, target, rtol in MATRIX
    ]
    rows += [
        {"source": name, "target": there, "back": back, "rtol": EXACT}
        for name, there, back in CHAINS
    ]
    return rows


def report(rows: Sequence[Mapping[str, Any]], routes: Sequence[str]) -> str:
    """Return the table in Markdown."""
    lines = ["| source -> target | " + " | ".join(routes) + " |", "|---" * (len(routes) + 1) + "|"]
    for row in rows:
        cells = [cell(row["outcomes"][r]) if r in row["outcomes"] else "" for r in routes]
        lines.append(f"| {row_title(row)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def document(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what ``--json`` writes."""
    return {
        "versions": {name: version(name) for name in PACKAGES},
        "python": sys.version.split()[0],
        "limit_seconds": LIMIT,
        "rows": [
            {
                **row,
                "outcomes": {
                    route: {key: value for key, value in asdict(outcome).items() if value}
                    for route, outcome in row["outcomes"].items()
                },
            }
            for row in rows
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all outcomes here")
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    parser.add_argument("--only", default="", help="rows whose title contains this text")
    parser.add_argument("--work", type=Path, help="keep what is made, and the logs, here")
    args = parser.parse_args(arguments)
    if args.work and args.work.exists() and any(args.work.iterdir()):
        parser.error(f"--work {args.work}: there are files in it, of other trials perhaps")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ucpstore-stock-") as temporary:
        bench = Bench((args.work or Path(temporary)).resolve())
        for row in all_rows():
            if args.only not in row_title(row):
                continue
            outcomes = row["outcomes"] = {}
            rows.append(row)
            for route in args.routes:
                if "back" not in row:
                    outcomes[route] = bench.outcome(
                        row["source"], row["target"], row["rtol"], route
                    )
                elif route in CHAIN_ROUTES:
                    outcomes[route] = bench.chain(row["source"], row["target"], row["back"], route)
                else:
                    continue
                title = f"{row_title(row)}, {route}"
                print(f"{title}: {cell(outcomes[route])}", file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(document(rows), indent=1) + "\n")
        bench.close()
    print(report(rows, args.routes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
