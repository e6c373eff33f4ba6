"""Which worker does which tasks: balanced by bytes, deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from ucpstore.contracts import Task

__all__ = ["balance", "batches"]


def balance(tasks: Iterable[Task], workers: int) -> list[list[Task]]:
    """Spread tasks over ``workers`` lists of nearly equal bytes, the largest tasks first.

    The longest-processing-time rule: every task goes to the list with the fewest bytes so far. The
    result depends on nothing but the arguments, so that independent workers agree on it.
    """
    parts: list[list[Task]] = [[] for _ in range(workers)]
    heap = [(0, worker) for worker in range(workers)]
    for task in sorted(tasks, key=lambda task: (-task.nbytes, task.index)):
        load, worker = heapq.heappop(heap)
        parts[worker].append(task)
        heapq.heappush(heap, (load + task.nbytes, worker))
    return parts


def batches(tasks: Iterable[Task], nbytes: int) -> list[list[Task]]:
    """Cut tasks, in their order, into batches of about ``nbytes`` bytes (at least one task each)."""
    found: list[list[Task]] = []
    size = 0
    for task in tasks:
        if not found or size >= nbytes:
            found.append([])
            size = 0
        found[-1].append(task)
        size += task.nbytes
    return found
