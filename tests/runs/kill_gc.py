"""Kills a gc with SIGKILL before or after one of its effects, looks at what is left, and runs it again.

Forks: this process keeps no thread and loads no TensorStore. Prints one JSON line per trial.

    python -m tests.runs.kill_gc FOLDER TRIALS SEED
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ucpstore
from tests.engine.kill_matrix import in_child, must, tree
from tests.runs.places import Place, save
from ucpstore.errors import UcpStoreError
from ucpstore.io import local


class Killer:
    """Counts deletions and creations of files, and dies around the n-th."""

    def __init__(self, moment: int | None, *, after: bool) -> None:
        self.seen = 0
        self._moment, self._after = moment, after

    def wrap(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.seen += 1
            here = self.seen == self._moment
            if here and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return act(*arguments, **named)
            finally:
                if here:
                    os.kill(os.getpid(), signal.SIGKILL)

        return wrapped


def collect(run: Path, moment: int | None = None, *, after: bool = False) -> int:
    """One gc; the number of its effects."""
    killer = Killer(moment, after=after)
    local.os.unlink = killer.wrap(os.unlink)  # type: ignore[assignment]
    local.LocalFiles.create = killer.wrap(local.LocalFiles.create)  # type: ignore[method-assign]
    ucpstore.gc(run, keep_last=1, dry_run=False)
    return killer.seen


def opens(folder: Path) -> bool:
    try:
        ucpstore.open(folder, format="ucpstore")
    except UcpStoreError:
        return False
    return True


def trial(template: Path, run: Path, moment: int, *, after: bool) -> dict[str, Any]:
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(template, run)
    kept, old = run / "step-00000020", run / "step-00000010"
    before, whole = tree(kept), tree(old)
    killed, _ = in_child(lambda: collect(run, moment, after=after))
    left = tree(old)
    opened = opens(old)
    must(not opened or left == whole, f"{moment}: a half-deleted checkpoint opens")
    must(tree(kept) == before, f"{moment}: the step that stays was touched")
    in_child(lambda: collect(run))
    must(not tree(old), f"{moment}: something is left: {sorted(tree(old))}")
    must(tree(kept) == before, f"{moment}: the step that stays was touched")
    in_child(lambda: save(Place(str(run)), 10) and None)
    must(tree(old) == whole, f"{moment}: the step cannot be saved again")
    return {"moment": moment, "after": after, "killed": killed == signal.SIGKILL, "opens": opened}


def main(base: Path, trials: int, seed: int) -> None:
    template, run = base / "template", base / "run"
    in_child(lambda: [save(Place(str(template)), step) and None for step in (10, 20)])
    shutil.copytree(template, run)
    effects = in_child(lambda: collect(run))[1]
    rng = random.Random(seed)
    for number in range(trials):
        # The first effects are where something still opens.
        moment = number // 2 + 1 if number < 12 else rng.randint(1, effects - 2)
        print(json.dumps(trial(template, run, moment, after=bool(number % 2))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
