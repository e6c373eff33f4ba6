"""Kills real processes with SIGKILL at every stage of a conversion, and runs the same command again.

Forks, so that a trial costs milliseconds: this process starts no thread and loads neither TensorStore
nor zarr. Prints one JSON line per trial; any violated promise ends it with a traceback.

    python -m tests.engine.kill_matrix FOLDER TRIALS_PER_STAGE SEED
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.fakes import ArraySource
from ucpstore.engine.plan import Plan, make_plan
from ucpstore.engine.run import Report, Workers, run
from ucpstore.engine.worker import Settings
from ucpstore.errors import UncommittedError, UnrecognizedSourceError
from ucpstore.io.base import Files, FileStat, Sink
from ucpstore.io.local import LocalFiles
from ucpstore.store.grid import plan_arrays
from ucpstore.store.source import StoreSource
from ucpstore.store.target import ZarrTarget

STAGES = ("claim", "data", "data_write", "before_done", "after_done", "children", "root")


def stage_of(effect: str, name: str) -> str | None:
    """Which stage of the protocol an effect on an object belongs to."""
    if effect == "write":
        return "data_write" if name.startswith(("params/", "common/")) else None
    if name.startswith(".ucpstore/claims/"):
        return "claim"
    if name.startswith(".ucpstore/done/"):
        return "after_done"
    if effect == "sync":
        return "before_done"
    if name == "zarr.json":
        return "root"
    if name.endswith("zarr.json"):
        return "children"
    return "data" if effect == "close" else None


class KillingFiles:
    """Storage of a process that kills itself before (or after) the n-th effect of one stage."""

    is_local = True

    def __init__(self, files: LocalFiles, stage: str, moment: int, *, after: bool) -> None:
        self._files = files
        self.url, self.options = files.url, files.options
        self._stage, self._left, self._after = stage, moment, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def effect(self, effect: str, name: str, act: Callable[[], Any]) -> Any:
        here = stage_of(effect, name) == self._stage
        self._left -= here
        if here and self._left == 0 and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = act()
        if here and self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def create(self, name: str, data: bytes) -> bool:
        return bool(self.effect("create", name, lambda: self._files.create(name, data)))

    def write(self, name: str, data: bytes) -> FileStat:
        return self.effect("create", name, lambda: self._files.write(name, data))

    def sync(self) -> None:
        self.effect("sync", "", self._files.sync)

    def delete(self, names: Iterable[str]) -> None:
        self._files.delete(names)

    def sink(self, name: str, nbytes: int) -> Sink:
        return KillingSink(self, self._files.sink(name, nbytes), name)


class KillingSink:
    def __init__(self, files: KillingFiles, sink: Sink, name: str) -> None:
        self._files, self._sink, self._name = files, sink, name

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        self._files.effect("write", self._name, lambda: self._sink.write(buffers))

    def close(self) -> FileStat:
        return self._files.effect("close", self._name, self._sink.close)

    def abort(self) -> None:
        self._sink.abort()


def make_source() -> ArraySource:
    """A matrix of several shards, small tensors, a bfloat16 one, and common tensors."""
    rng = np.random.default_rng(7)
    arrays = {
        f"layers.{i}.weight": {
            state: rng.standard_normal((96, 1024), dtype=np.float32)
            for state in ("fp32", "adam_m", "adam_v")
        }
        for i in range(3)
    }
    wide = {
        state: rng.standard_normal((20_000, 1024), dtype=np.float32) for state in ("fp32", "adam_m")
    }
    arrays["embedding.weight"] = wide
    arrays["norm.weight"] = {"fp32": rng.standard_normal(1024, dtype=np.float32)}
    common = {"counters": {"global_steps": 3}, "steps": {"norm.weight": 3}}
    return ArraySource(arrays, common, tensors={"rng": rng.integers(0, 255, 5000, dtype=np.uint8)})


def convert(source: ArraySource, files: Files, keys: list[str] | None = None) -> Report:
    """One run of the engine, as `ucpstore.api.convert` wires it; ``keys`` collects the objects written."""
    arrays = plan_arrays(source)
    target = ZarrTarget(files, arrays, source=source)
    plan: Plan = make_plan(
        source, target, states=[member for array in arrays for member in array.members]
    )

    def listen(event: Any) -> None:
        if keys is not None and hasattr(event, "key"):
            keys.append(event.key)

    return run(
        (source, target),
        plan,
        workers=Workers(threads=1),
        opener=lambda: (plan.digest, source, target),
        settings=Settings(threads=1, publish_nbytes=24 << 20),
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


def done_keys(folder: Path, keys: dict[int, str]) -> set[str]:
    """Objects that have a done record."""
    found = set()
    for path in (folder / ".ucpstore" / "done").glob("*.json"):
        found |= {keys[record[0]] for record in json.loads(path.read_bytes())["records"]}
    return found


def must(condition: bool, promise: str) -> None:
    if not condition:
        raise SystemExit(f"broken promise: {promise}")


def trial(
    folder: Path,
    source: ArraySource,
    reference: dict[str, bytes],
    task_keys: dict[int, str],
    choice: tuple[str, int, bool],
) -> dict[str, Any]:
    stage, moment, after = choice
    shutil.rmtree(folder, ignore_errors=True)

    def dies() -> None:
        convert(source, KillingFiles(LocalFiles(str(folder)), stage, moment, after=after))

    killed, _ = in_child(dies)
    recorded = done_keys(folder, task_keys)
    visible = (folder / "zarr.json").exists()
    if not visible:
        try:
            StoreSource(LocalFiles(str(folder)))
            must(False, f"{choice}: something uncommitted opened")
        except UncommittedError:
            pass
        except UnrecognizedSourceError:
            claims = list(folder.glob(".ucpstore/claims/*"))
            must(not claims, f"{choice}: an unfinished conversion is not recognised as one")
        must(
            not list(folder.glob("params/**/zarr.json")) or stage in ("children", "root"),
            f"{choice}: early metadata",
        )

    def resumes() -> dict[str, Any]:
        keys: list[str] = []
        report = convert(source, LocalFiles(str(folder)), keys)
        return {"keys": keys, "resumed": report.tasks_resumed, "committed": report.committed}

    _, second = in_child(resumes)
    must(second["committed"], f"{choice}: the second run did not commit")
    must(not recorded & set(second["keys"]), f"{choice}: tasks with a done record were redone")
    must(tree(folder) == reference, f"{choice}: the bytes differ from those of an undisturbed run")
    must(not any((folder / ".ucpstore" / "tmp").glob("*")), f"{choice}: unfinished files are left")
    return {
        "stage": stage,
        "moment": moment,
        "after": after,
        "killed": killed == signal.SIGKILL,
        "resumed": second["resumed"],
    }


def main(base: Path, trials: int, seed: int) -> None:
    source = make_source()
    reference_folder = base / "reference"
    in_child(lambda: convert(source, LocalFiles(str(reference_folder))).to_json())
    reference = tree(reference_folder)
    tasks = ZarrTarget(LocalFiles(str(base / "none")), plan_arrays(source), source=source).tasks()
    task_keys = {task.index: task.key for task in tasks}
    counts = {
        "claim": 1,
        "data": len(tasks),
        "data_write": len(tasks) * 4,
        "before_done": 4,
        "after_done": 4,
        "children": sum(name.endswith("zarr.json") for name in reference) - 1,
        "root": 1,
    }
    rng = random.Random(seed)
    for stage in STAGES:
        for _ in range(trials):
            choice = (stage, rng.randint(1, counts[stage]), rng.random() < 0.5)
            print(
                json.dumps(trial(base / "trial", source, reference, task_keys, choice)), flush=True
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
