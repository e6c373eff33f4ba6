"""Ranks of a real DeepSpeed run that save what they hold live: ``python -m tests.parts.live_job REQUEST``.

The request is JSON: ``case``, ``folder``, ``url``, ``options`` (of the storage), and ``kill``: which rank (or
whichever is the first) kills itself after which step, so that a save is left without it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ucpstore
from tests.deepspeed_runs import train
from tests.deepspeed_runs.cases import Case, find_case
from tests.deepspeed_runs.truth import record_truth
from ucpstore.claims import ClaimLog
from ucpstore.parts.exchange import Exchange


def killer(where: str) -> None:
    """Let this process die by SIGKILL when it has done the step of the save that is named."""
    home: type = Exchange if hasattr(Exchange, where) else ClaimLog
    step: Callable[..., Any] = getattr(home, where)

    def die(self: Any, *args: Any, **options: Any) -> Any:
        step(self, *args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(home, where, die)


def live_save(case: Case, folder: Path, request: dict[str, Any]) -> None:
    """Train on this rank, record the truth and DeepSpeed's own files, and save."""
    model = train.build(case)
    engine, scheduler = train.start_engine(model, case)
    train.train_steps(engine, case, train.data_rank(case))
    engine.save_checkpoint(str(folder / "checkpoint"), client_state={})
    record_truth(
        engine,
        case,
        folder,
        facts={"scheduler": scheduler.state_dict() if scheduler is not None else None},
        tensors={},
    )
    kill = request.get("kill")
    if kill is not None and kill["rank"] in (None, engine.global_rank):
        killer(kill["after"])
    report = ucpstore.save_rank(
        request["url"],
        **ucpstore.deepspeed_parts(engine),
        storage_options=request.get("options"),
        timeout=request.get("timeout", 120),
    )
    if not report.committed:
        raise RuntimeError(f"rank {engine.global_rank}: {report.summary()}")


def main() -> None:
    request = json.loads(sys.argv[1])
    for module in train.IMPORT_BEFORE_FORK:
        importlib.import_module(module)
    case = find_case(request["case"])
    folder = Path(request["folder"])
    train.run_case(case, folder, lambda case, folder: live_save(case, folder, request))


if __name__ == "__main__":
    main()
