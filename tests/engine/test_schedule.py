from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ucpstore.contracts import Task
from ucpstore.engine.schedule import balance, batches

sizes = st.lists(st.integers(0, 1 << 30), max_size=60)


def tasks_of(nbytes: list[int]) -> list[Task]:
    return [Task(index, f"object-{index}", size) for index, size in enumerate(nbytes)]


@given(sizes, st.integers(1, 9))
def test_every_task_has_exactly_one_owner(nbytes: list[int], workers: int) -> None:
    tasks = tasks_of(nbytes)
    parts = balance(tasks, workers)
    assert len(parts) == workers
    assert sorted((t for part in parts for t in part), key=lambda t: t.index) == tasks


@given(sizes, st.integers(1, 9))
def test_load_is_within_one_task_of_even(nbytes: list[int], workers: int) -> None:
    loads = [sum(t.nbytes for t in part) for part in balance(tasks_of(nbytes), workers)]
    assert max(loads) - min(loads) <= max(nbytes, default=0)


@given(sizes, st.integers(1, 9), st.randoms())
def test_workers_agree_whatever_the_order(nbytes: list[int], workers: int, random: object) -> None:
    tasks = tasks_of(nbytes)
    shuffled = list(tasks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert balance(shuffled, workers) == balance(tasks, workers)


@given(sizes, st.integers(1, 1 << 31))
def test_batches_keep_order_and_fill_up(nbytes: list[int], size: int) -> None:
    tasks = tasks_of(nbytes)
    cut = batches(tasks, size)
    assert [t for batch in cut for t in batch] == tasks
    assert all(batch for batch in cut)
    for batch in cut:
        assert sum(t.nbytes for t in batch[:-1]) < size
    for batch in cut[:-1]:
        assert sum(t.nbytes for t in batch) >= size
