"""Which layers a stage of a pipeline holds: the rules of DeepSpeed's ``PipelineModule``.

``runtime/pipe/module.py`` (``_partition_layers``) with ``partition_uniform`` and ``partition_balanced`` of
``runtime/utils.py``, ties included: another choice among equally good ones would be another checkpoint.

Examples
--------
>>> uniform(8, 3), balanced((9, 0, 4, 4, 4, 9), 2)
((0, 3, 6, 8), (0, 4, 6))
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    total = np.concatenate(([0.0], np.cumsum(weights, dtype=float)))
    heaviest = np.full((layers + 1, stages + 1), np.inf)
    lightest = np.full((layers + 1, stages + 1), np.inf)
    start = np.zeros((layers + 1, stages + 1), int)
    heaviest[0, 0] = 0
    for stop in range(1, layers + 1):
        weight = total[stop] - total[:stop]  # of a stage that begins at any layer before
        for stage in range(1, min(stop, stages) + 1):
            most = np.maximum(heaviest[:stop, stage - 1], weight)
            least = np.minimum(lightest[:stop, stage - 1], weight)
            first = stop - 1 - int(np.argmin((most - least)[::-1]))  # the last of equals
            heaviest[stop, stage], lightest[stop, stage] = most[first], least[first]
            start[stop, stage] = first
    bounds = [layers]
    for stage in range(stages, 0, -1):
        bounds.append(int(start[bounds[-1], stage]))
    return tuple(reversed(bounds))
