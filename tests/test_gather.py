"""Runs of a target's tensor: complete, bounded, and no tile of the source is read for two of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ucpstore
from tests.deepspeed_runs import deepspeed_run
from ucpstore import Layout, gather
from ucpstore.contracts import Role, StateSpec
from ucpstore.formats import torchwrite
from ucpstore.gather import Part, Tensor, blocks
from ucpstore.io.traffic import traffic
from ucpstore.layout.local import local_tensors
from ucpstore.layout.patterns import Axis, Shard
from ucpstore.layout.tiles import tile_shape

BLOCK = 4 << 20

shapes = st.one_of(
    st.tuples(st.integers(1, 10**7)),
    st.tuples(st.integers(1, 4000), st.integers(1, 4000)),
    st.tuples(st.integers(1000, 4000), st.integers(500, 4000)),
    st.tuples(st.integers(1, 5), st.integers(1, 900), st.integers(1, 900)),
)


@st.composite
def tensors(draw: Any) -> tuple[Any, Tensor]:
    """A source's specs, and a tensor of several parts of its states, with gaps."""
    parameters, parts = {}, []
    offset = 0
    for index in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        parameters[f"p{index}"] = SimpleNamespace(
            states={"s": StateSpec("s", Role.OTHER, shape, "float32")}
        )
        local = None
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0 and shape[dim] >= 3:
            axes = (Axis("tp", 3, Shard(dim)),)
            local = draw(st.sampled_from(local_tensors(shape, axes)))
            shape = local.shape
        numel = Tensor("float32", shape).numel
        start = draw(st.integers(0, numel - 1)) if draw(st.booleans()) else 0
        count = draw(st.integers(1, numel - start)) if draw(st.booleans()) else numel - start
        offset += draw(st.sampled_from([0, 0, 7]))
        parts.append(Part(f"p{index}", "s", shape, start, count, offset, local))
        offset += count
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    total = offset + draw(st.sampled_from([0, 3]))
    return SimpleNamespace(parameters=parameters), Tensor(dtype, (total,), tuple(parts))


def rows_of_tiles(source: Any, part: Part, start: int, count: int) -> set[tuple[int, ...]]:
    """What lies side by side in a run's elements: tiles without their place along the columns."""
    shape = source.parameters[part.fqn].states[part.state].shape
    tile = tile_shape(shape, 4)
    dim = next((d for d, size in enumerate(tile) if size > 1), len(tile) - 1)
    found = set()
    for _, _, windows in part.runs(start, count):
        for window in windows:
            box = window.logical
            spans = [
                range(o // t, -(-s // t))
                for o, s, t in zip(
                    box.offsets[: dim + 1], box.stops[: dim + 1], tile[: dim + 1], strict=True
                )
            ]
            found |= set(itertools.product(*spans))
    return found


@given(tensors())
def test_no_row_of_tiles_is_in_two_runs(given_: tuple[Any, Tensor]) -> None:
    source, tensor = given_
    runs = list(blocks(source, tensor, BLOCK))
    size = 4 if tensor.dtype == "float32" else 2
    assert [start for start, _ in runs] == [0, *(stop for _, stop in runs[:-1])]
    assert runs[-1][1] == tensor.numel
    assert all(0 < (stop - start) * size <= BLOCK for start, stop in runs)
    for part in tensor.parts:
        shape = source.parameters[part.fqn].states[part.state].shape
        tile = tile_shape(shape, 4)
        dim = next((d for d, n in enumerate(tile) if n > 1), len(tile) - 1)
        local = part.local.shape if part.local else shape
        if Tensor("float32", (tile[dim], *local[dim + 1 :])).nbytes > BLOCK:
            continue  # a row of tiles does not fit
        seen: set[tuple[int, ...]] = set()
        for start, stop in runs:
            low, high = max(start, part.offset), min(stop, part.offset + part.count)
            if low < high:
                rows = rows_of_tiles(source, part, part.start + low - part.offset, high - low)
                assert not rows & seen, (part, start, stop)
                seen |= rows


def test_a_store_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By loads and by conversions, though blocks are no multiples of rows of tiles."""
    run = deepspeed_run("tp2-large-s1-fp32-dp1")
    ucpstore.convert(run.path, tmp_path / "store")
    for module in (gather, torchwrite):
        monkeypatch.setattr(module, "BLOCK", 900 << 10)
    # two ranks read the tiles of matrices that are one
    for layout, most in ((Layout(zero_stage=2), 1.001), (Layout(tp=2, zero_stage=3), 1.04)):
        moved = ucpstore.load(tmp_path / "store", layout, 0).load()
        assert moved.needed_nbytes > 10 << 20
        assert moved.amplification < most, layout
    checkpoint = ucpstore.open(tmp_path / "store")
    stored = sum(tensor.nbytes for states in checkpoint.values() for tensor in states.values())
    masters = sum(states["fp32"].nbytes for states in checkpoint.values())
    before = traffic()
    ucpstore.convert(
        tmp_path / "store", tmp_path / "native", to="deepspeed", layout=Layout(zero_stage=2)
    )
    assert traffic().since(before).nbytes < 1.001 * (stored + masters)  # the weights, too
