"""Kills real processes with SIGKILL at every stage of a conversion, and runs the same command again.

Forks, so that a trial costs milliseconds: this process keeps no thread and loads neither TensorStore
nor zarr. Prints one JSON line per trial; any violated promise ends it with a traceback.

    python -m tests.engine.kill_matrix zarr|copy|native FOLDER TRIALS_PER_STAGE SEED
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.engine.kill_subjects import SUBJECTS, Subject
from ucpstore.engine.run import Report, Workers, run
from ucpstore.engine.worker import Settings
from ucpstore.io.base import Files, FileStat, Sink
from ucpstore.io.local import LocalFiles


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a process dies: before or after the n-th effect of one stage.

    ``crowded``: another plan died in the same destination before, and was abandoned.
    """

    stage: str
    moment: int
    after: bool
    crowded: bool


class KillingFiles:
    """Storage of a process that kills itself before (or after) the n-th effect of one stage."""

    is_local = True

    def __init__(self, folder: Path, subject: Subject, choice: Choice | None = None) -> None:
        self._files = LocalFiles(str(folder))
        self.url, self.options = self._files.url, self._files.options
        self._subject = subject
        self._choice = choice
        self.seen: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def effect(self, effect: str, name: str, act: Callable[[], Any]) -> Any:
        stage = self._subject.stage_of(effect, name)
        choice, here = self._choice, False
        if stage is not None:
            self.seen[stage] += 1
            here = choice is not None and (stage, self.seen[stage]) == (choice.stage, choice.moment)
        if here and choice is not None and not choice.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = act()
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def create(self, name: str, data: bytes) -> bool:
        return bool(self.effect("create", name, lambda: self._files.create(name, data)))

    def write(self, name: str, data: bytes) -> FileStat:
        return self.effect("create", name, lambda: self._files.write(name, data))

    def sync(self) -> None:
        self.effect("sync", "", self._files.sync)

    def delete(self, names: Iterable[str]) -> None:
        self.effect("delete", "", lambda: self._files.delete(names))

    def move(self, name: str, to: str) -> bool:
        return bool(self.effect("move", to, lambda: self._files.move(name, to)))

    def sink(self, name: str, nbytes: int, **keywords: Any) -> Sink:
        return KillingSink(self, self._files.sink(name, nbytes, **keywords), name)


class KillingSink:
    def __init__(self, files: KillingFiles, sink: Sink, name: str) -> None:
        self._files, self._sink, self._name = files, sink, name

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        self._files.effect("write", self._name, lambda: self._sink.write(buffers))

    def close(self) -> FileStat:
        return self._files.effect("close", self._name, self._sink.close)

    def abort(self) -> None:
        self._sink.abort()


def convert(
    subject: Subject, files: Files, keys: list[str] | None = None, *, other: bool = False
) -> Report:
    """One run of the engine, as `ucpstore.api.convert` wires it; ``keys`` collects the objects written."""
    source, target, plan = subject.job(files, other=other)

    def listen(event: Any) -> None:
        if keys is not None and hasattr(event, "key"):
            keys.append(event.key)

    return run(
        (source, target),
        plan,
        workers=Workers(threads=1),
        opener=lambda: (plan.digest, source, target),
        settings=Settings(threads=1, publish_nbytes=subject.publish_nbytes),
        emit=listen,
    )


def in_child(work: Callable[[], Any]) -> tuple[int, Any]:
    """Run ``work`` in a forked process: (signal or 0, its JSON result)."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            os.write(write, json.dumps(work()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status), None
    if os.WEXITSTATUS(status):
        raise SystemExit(f"the child ended with {os.WEXITSTATUS(status)}")
    return 0, json.loads(answer)


def tree(folder: Path) -> dict[str, bytes]:
    """Committed bytes by name (not the protocol's own records)."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".ucpstore" not in path.parts
    }


def done_keys(folder: Path, digest: str, keys: Sequence[str]) -> set[str]:
    """Objects that have a done record of the plan."""
    found = set()
    for path in (folder / ".ucpstore" / "done").glob("*.json"):
        done = json.loads(path.read_bytes())
        if done["plan_digest"] == digest:
            found |= {keys[record[0]] for record in done["records"]}
    return found


def must(condition: bool, promise: str) -> None:
    if not condition:
        raise SystemExit(f"broken promise: {promise}")


def crowd(subject: Subject, folder: Path) -> None:
    """Another plan dies in ``folder``, with done work and an unfinished file, and is abandoned."""
    choice = Choice("data_write", subject.crowd_moment, after=True, crowded=False)
    killed, _ = in_child(
        lambda: convert(subject, KillingFiles(folder, subject, choice), other=True).to_json()
    )
    must(killed == signal.SIGKILL, "the other plan did not die")
    files = LocalFiles(str(folder))
    must(any(subject.is_data(stat.name) for stat in files.list()), "the other plan left no object")
    must(any((folder / ".ucpstore" / "tmp").iterdir()), "the other plan left no unfinished file")
    _, freed = in_child(lambda: subject.job(files, other=True)[1].abandon())
    must(freed is not None, "the other plan was not abandoned")


def undisturbed(subject: Subject, folder: Path, *, crowded: bool) -> dict[str, int]:
    """Convert, and count the effects of every stage."""
    if crowded:
        crowd(subject, folder)

    def work() -> dict[str, int]:
        files = KillingFiles(folder, subject)
        must(convert(subject, files).committed, "an undisturbed run did not commit")
        return dict(files.seen)

    counts: dict[str, int] = in_child(work)[1]
    return counts


def dies(subject: Subject, folder: Path, choice: Choice) -> bool:
    """One run that is killed; whether it was."""
    killed, _ = in_child(lambda: convert(subject, KillingFiles(folder, subject, choice)).to_json())
    return killed == signal.SIGKILL


def trial(
    subject: Subject, folder: Path, reference: dict[str, bytes], choices: Sequence[Choice]
) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    if choices[0].crowded:
        crowd(subject, folder)
    _, target, plan = subject.job(LocalFiles(str(folder)))
    keys = [task.key for task in target.tasks()]
    killed = []
    for choice in choices:
        killed.append(dies(subject, folder, choice))
        if subject.visible(folder):
            must(tree(folder) == reference, f"{choices}: something incomplete is visible")
        subject.look(folder, reference, choices)
    recorded = done_keys(folder, plan.digest, keys)

    def resumes() -> dict[str, Any]:
        written: list[str] = []
        report = convert(subject, LocalFiles(str(folder)), written)
        return {"keys": written, "resumed": report.tasks_resumed, "committed": report.committed}

    _, last = in_child(resumes)
    must(last["committed"], f"{choices}: the last run did not commit")
    must(not recorded & set(last["keys"]), f"{choices}: tasks with a done record were redone")
    must(tree(folder) == reference, f"{choices}: the bytes differ from those of an undisturbed run")
    # A run that found everything committed has nothing to tidy: its killed forerunner had.
    for name in ("tmp", "files"):
        left = list((folder / ".ucpstore" / name).glob("*"))
        must(not left, f"{choices}: unfinished files are left: {left}")
    return {
        **asdict(choices[0]),
        "runs": len(choices),
        "killed": killed[0],
        "resumed": last["resumed"],
    }


def main(subject: Subject, base: Path, trials: int, seed: int) -> None:
    counts = {
        crowded: undisturbed(subject, base / f"reference-{crowded}", crowded=crowded)
        for crowded in (False, True)
    }
    reference = tree(base / "reference-False")
    must(tree(base / "reference-True") == reference, "an abandoned plan changed the bytes")
    rng = random.Random(seed)

    def choose(stage: str, number: int) -> Choice:
        crowded = bool(number % 2) or not counts[False].get(stage)
        moment = rng.randint(1, counts[crowded][stage])
        return Choice(stage, moment, after=bool(number // 2 % 2), crowded=crowded)

    for stage in subject.stages:
        for number in range(trials):
            choices = [choose(stage, number)]
            if rng.random() < 0.5:  # and the run after it dies as well, if it comes that far
                choices.append(choose(rng.choice(subject.stages), rng.randrange(4)))
            print(json.dumps(trial(subject, base / "trial", reference, choices)), flush=True)


if __name__ == "__main__":
    main(SUBJECTS[sys.argv[1]](), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
