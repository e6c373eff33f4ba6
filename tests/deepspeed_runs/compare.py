"""What two runs hold, whatever their layouts: full tensors, hyper-parameters, steps, and their losses."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.deepspeed_runs.cache import Run
from tests.deepspeed_runs.resume import Resumed

__all__ = ["differences", "tensors_of"]

Key = tuple[str, str]


def tensors_of(run: Run) -> Mapping[Key, np.ndarray]:
    """Every tensor of `run` in full, keyed (state, fqn).

    Raises
    ------
    AssertionError
        Ranks that must hold the same values (of a tied layer, or of a parameter that is not cut) do not.
    """
    found: dict[Key, np.ndarray] = {}
    for stage, facts in enumerate(run.stages):
        keys = [
            (state, fqn)
            for fqn, entry in facts["parameters"].items()
            for state in ("fp32", "weight", *entry["states"])
        ]
        keys += [("weight", fqn) for fqn in facts["frozen"]]
        keys += [("buffer", fqn) for fqn in facts["buffers"]]
        for state, fqn in keys:
            value = run.full(state, fqn, stage=stage)
            copies = [found[state, fqn]] if (state, fqn) in found else []
            if facts["tp_dims"].get(fqn) is None:
                ranks = range(1, run.case.tp)
                copies += [run.tensor(state, fqn, tp_rank=r, stage=stage) for r in ranks]
            assert all(same(value, copy) for copy in copies), f"ranks differ on {state} of {fqn}"
            found[state, fqn] = value
    return found


def same(left: np.ndarray | None, right: np.ndarray | None) -> bool:
    """Whether both are there, of one dtype and shape, and equal bit by bit."""
    return (
        left is not None
        and right is not None
        and (left.dtype, left.shape) == (right.dtype, right.shape)
        and left.tobytes() == right.tobytes()
    )


def by_parameter(run: Run) -> Mapping[str, Mapping[str, Any]]:
    """Per category, what every parameter has: the hyper-parameters of its group, and its step.

    Names that torch keeps in a group (``param_names``) are those of one rank's parameters.
    """
    hyper, steps = {}, {}
    for facts in run.stages:
        for group in facts["groups"]:
            own = {key: value for key, value in group["hyper"].items() if key != "param_names"}
            hyper.update(dict.fromkeys(group["names"], own))
        steps.update({fqn: entry["step"] for fqn, entry in facts["parameters"].items()})
    return {"hyper": hyper, "step": steps}


def of_the_run(run: Run) -> Mapping[str, Any]:
    """Per category, what there is once: names as sets, counters, scheduler, client's state."""
    facts = run.facts
    counters = ("global_steps", "skipped_steps", "global_samples")
    return {
        "frozen": sorted({fqn for stage in run.stages for fqn in stage["frozen"]}),
        "aliases": facts["aliases"],
        "scheduler": facts["scheduler"],
        "counters": {name: facts["counters"][name] for name in counters},
    }


def differences(
    run: Run, resumed: Resumed, losses: Sequence[float], *, rtol: float
) -> dict[str, set[str]]:
    """What of a resumed run is not as the original engine had it.

    Returns
    -------
    dict of str to set of str
        Category (a state's name, ``hyper``, ``step``, ``scheduler``, ``losses``, ...) to names: of
        parameters, or of further steps whose loss is off by more than ``rtol`` of it. Empty where all is
        the same.
    """
    found: dict[str, set[str]] = defaultdict(set)
    here, there = tensors_of(run), tensors_of(resumed.run)
    for state, fqn in here.keys() | there.keys():
        if not same(here.get((state, fqn)), there.get((state, fqn))):
            found[state].add(fqn)
    mine, theirs = by_parameter(run), by_parameter(resumed.run)
    for category, values in mine.items():
        for fqn in values.keys() | theirs[category].keys():
            if fqn not in values or theirs[category].get(fqn, math.nan) != values[fqn]:
                found[category].add(fqn)
    now = of_the_run(resumed.run)
    for category, value in of_the_run(run).items():
        if now[category] != value:
            found[category].add(f"{value} became {now[category]}")
    client = resumed.run.facts["client_state"]
    for key, value in run.facts["client_state"].items():
        if key not in client or client[key] != value:
            found["client_state"].add(key)
    assert len(losses) == len(resumed.losses) > 0, "no losses to compare"
    for step, (expected, loss) in enumerate(zip(losses, resumed.losses, strict=True)):
        if not abs(loss - expected) <= rtol * abs(expected):
            found["losses"].add(str(step))
    return dict(found)
