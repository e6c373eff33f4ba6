"""The learning-rate scheduler of a pipeline stage: its numbers per parameter group, of the groups that are there.

DeepSpeed removes groups without parameters before it makes the scheduler (``runtime/engine.py``,
``_configure_optimizer``), so that a stage without a group has no number for it. Which keys hold numbers per
group: ``torch/optim/lr_scheduler.py``. DeepSpeed's own schedulers (``runtime/lr_schedules.py``) save none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["of_groups"]

_PER_GROUP = frozenset(
    {
        "_last_lr",
        "base_lrs",
        "base_momentums",
        "last_lr",
        "lr_lambdas",
        "max_lrs",
        "max_momentums",
        "min_lrs",
    }
)
_INNER = "_schedulers"
"""States of the schedulers that `SequentialLR` and `ChainedScheduler` are made of."""


def of_groups(state: Any, places: Sequence[int], count: int) -> Any:
    """A scheduler's state for an optimizer that has only some of the groups.

    Parameters
    ----------
    state : Any
        As the common document has it.
    places : sequence of int
        Positions of the groups that are there, among all of them.
    count : int
        Number of all groups.
    """
    if not isinstance(state, dict) or len(places) == count:
        return state
    found = {}
    for key, value in state.items():
        if key in _PER_GROUP and isinstance(value, list | tuple) and len(value) == count:
            found[key] = type(value)(value[place] for place in places)
        elif key == _INNER and isinstance(value, list | tuple):
            found[key] = type(value)(of_groups(inner, places, count) for inner in value)
        else:
            found[key] = value
    return found
