"""Which layers a stage of a pipeline holds: the rules of DeepSpeed's ``PipelineModule``.

``runtime/pipe/module.py`` (``_partition_layers``) with ``partition_uniform`` and ``partition_balanced`` of
``runtime/utils.py``, ties included: another choice among equally good ones would be another checkpoint.

Examples
--------
>>> uniform(8, 3), balanced((9, 0, 4, 4, 4, 9), 2)
((0, 3, 6, 8), (0, 4, 6))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["balanced", "uniform"]


def uniform(layers: int, stages: int) -> tuple[int, ...]:
    """First layer of every stage, and the number of layers, for stages of equal length.

    The first ``layers % stages`` stages get one more.
    """
    if layers <= stages:
        return tuple(min(stage, layers) for stage in range(stages + 1))
    length, extra = divmod(layers, stages)
    return tuple(stage * length + min(stage, extra) for stage in range(stages + 1))


def balanced(weights: Sequence[int], stages: int) -> tuple[int, ...]:
    """The same for stages whose heaviest and lightest differ least: the linear partition problem.

    Parameters
    ----------
    weights : sequence of int
        Per layer, the number of its trainable parameters.
    stages : int
    """
    layers = len(weights)
    if layers <= stages:
        return uniform(layers, stages)
    total = list(accumulate(weights, initial=0))
    width = stages + 1
    heaviest = [[math.inf] * width for _ in range(layers + 1)]
    lightest = [[math.inf] * width for _ in range(layers + 1)]
    cost = [[math.inf] * width for _ in range(layers + 1)]
    start = [[0] * width for _ in range(layers + 1)]
    heaviest[0][0] = cost[0][0] = 0
    for stop in range(1, layers + 1):
        for stage in range(1, min(stop, stages) + 1):
            for first in range(stop):
                weight = total[stop] - total[first]
                most = max(heaviest[first][stage - 1], weight)
                least = min(lightest[first][stage - 1], weight)
                if cost[stop][stage] >= most - least:
                    cost[stop][stage] = most - least
                    heaviest[stop][stage], lightest[stop][stage] = most, least
                    start[stop][stage] = first
    bounds = [layers]
    for stage in range(stages, 0, -1):
        bounds.append(start[bounds[-1]][stage])
    return tuple(reversed(bounds))
