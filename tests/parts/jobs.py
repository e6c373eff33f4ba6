"""Jobs whose ranks are threads, and how tensors are spread over them."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ucpstore import Held
from ucpstore.layout.region import Region


def together(world: int, act: Callable[[int], Any]) -> list[Any]:
    """What ``act(rank)`` returned or raised, by rank, all of them at once."""
    found: list[Any] = [None] * world

    def be(rank: int) -> None:
        try:
            found[rank] = act(rank)
        except Exception as error:  # the test looks at it
            found[rank] = error

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def flat_parts(name: str, state: str, values: np.ndarray[Any, Any], world: int) -> list[Held]:
    """Rank ``i`` holds the ``i``-th of even flat ranges."""
    width = -(-values.size // world)
    flat = values.reshape(-1)
    return [
        Held(name, state, flat[start : start + width], values.shape, start=start)
        for start in (min(rank * width, values.size) for rank in range(world))
    ]


def spread(
    tensors: dict[tuple[str, str], np.ndarray[Any, Any]], world: int, seed: int
) -> list[list[Held]]:
    """Every tensor spread in another way: whole, replicated, by rows, by columns and then flat."""
    chance = random.Random(seed)
    ranks: list[list[Held]] = [[] for _ in range(world)]
    for (name, state), values in tensors.items():
        way = chance.choice(("one", "all", "flat", "ragged", "boxes"))
        if way == "one":
            ranks[chance.randrange(world)].append(Held(name, state, values, values.shape))
        elif way == "all":
            for rank in ranks:
                rank.append(Held(name, state, values.copy(), values.shape))
        elif way == "flat":
            for rank, part in zip(ranks, flat_parts(name, state, values, world), strict=True):
                rank.append(part)
        elif way == "ragged":
            cuts = sorted(chance.randint(0, values.size) for _ in range(world - 1))
            _ragged(ranks, Held(name, state, values, values.shape), [0, *cuts, values.size])
        else:
            _boxes(ranks, name, state, values, chance)
    return ranks


def _ragged(ranks: Sequence[list[Held]], whole: Held, bounds: Sequence[int]) -> None:
    box = whole.place
    flat = np.ascontiguousarray(whole.data).reshape(-1)
    for rank, low, high in zip(ranks, bounds, bounds[1:], strict=False):
        part = flat[low:high]
        rank.append(Held(whole.fqn, whole.state, part, whole.shape, box=box, start=low))


def _boxes(
    ranks: Sequence[list[Held]],
    name: str,
    state: str,
    values: np.ndarray[Any, Any],
    chance: random.Random,
) -> None:
    """Halves along a dim, and each a flat tensor that is cut over all ranks."""
    if not values.ndim or max(values.shape) < 2:
        ranks[0].append(Held(name, state, values, values.shape))
        return
    dim = max(range(values.ndim), key=lambda d: values.shape[d])
    middle = chance.randrange(1, values.shape[dim])
    for low, high in ((0, middle), (middle, values.shape[dim])):
        offsets = tuple(low if d == dim else 0 for d in range(values.ndim))
        sizes = tuple(high - low if d == dim else n for d, n in enumerate(values.shape))
        box = Region(offsets, sizes)
        numel = math.prod(sizes)
        cuts = sorted(chance.randint(0, numel) for _ in range(len(ranks) - 1))
        part = Held(name, state, values[box.slices], values.shape, box=box)
        _ragged(ranks, part, [0, *cuts, numel])
