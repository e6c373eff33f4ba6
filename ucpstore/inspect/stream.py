"""States and the blocks in which they are streamed, shared by everything that reads whole checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ucpstore.contracts import CommonState, Source, StateSpec
from ucpstore.dtypes import itemsize
from ucpstore.layout.region import Region
from ucpstore.layout.tiles import iter_blocks, tile_shape

__all__ = ["all_states", "blocks", "in_parallel"]

_LOCAL_BLOCK = 1 << 20
_REMOTE_BLOCK = 32 << 20
_MAX_THREADS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


def all_states(source: Source) -> Iterator[tuple[str, StateSpec]]:
    """Every state of every parameter, then the common tensors, in the source's order."""
    for fqn, parameter in source.parameters.items():
        for spec in parameter.states.values():
            yield fqn, spec
    for spec in source.common.tensors.values():
        yield CommonState.FQN, spec


def block_bytes(source: Source) -> int:
    """How much to read at once: cache-sized locally, request-sized remotely."""
    return _LOCAL_BLOCK if source.is_local else _REMOTE_BLOCK


def blocks(spec: StateSpec, nbytes: int) -> Iterator[Region]:
    """Regions that tile a state in whole rows of tiles, in C order."""
    size = itemsize(spec.dtype)
    tile = tile_shape(spec.shape, size)
    yield from iter_blocks(Region.full(spec.shape), tile, size, block_bytes=nbytes)


def in_parallel(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Map on a few threads (reads and hashes release the interpreter lock), results in order."""
    count = min(os.cpu_count() or 1, _MAX_THREADS)
    with ThreadPoolExecutor(count, thread_name_prefix="ucpstore") as pool:
        return list(pool.map(function, items))
