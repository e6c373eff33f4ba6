"""Local tensors against numpy: slices of ranks, put together again, and padding that stays zero."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucpstore.errors import PatternError
from ucpstore.layout.flat import flat_boxes
from ucpstore.layout.geometry import Geometry, Strided
from ucpstore.layout.local import Local, local_tensors
from ucpstore.layout.patterns import (
    Axis,
    Flat,
    Pad,
    Partial,
    Replicate,
    Shard,
    ShardNC,
    Stacked,
    Unique,
    compose,
    even_widths,
)
from ucpstore.layout.region import Region


@st.composite
def layouts(draw: st.DrawFn, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Axis, ...]]:
    """A pattern on a number of ranks, with padding or without, for a tensor of ``sizes``."""
    degree = draw(st.integers(1, 4))
    dim = draw(st.integers(0, len(sizes) - 1))
    held = list(sizes)
    axes = []
    if draw(st.booleans()):
        padded = draw(st.integers(0, len(sizes) - 1))
        axes.append(Axis("pad", 1, Pad(padded, sizes[padded])))
        held[padded] += draw(st.integers(1, 5))
    first = draw(st.integers(0, held[dim]))
    tp = draw(
        st.sampled_from(
            [Replicate(), Partial(), Shard(dim), ShardNC(dim, (first, held[dim] - first))]
        )
    )
    return tuple(held), (*axes, Axis("tp", degree, tp))


def cut(whole: np.ndarray, held: tuple[int, ...], axes: tuple[Axis, ...]) -> list[np.ndarray]:
    """What ranks hold, by numpy alone."""
    full = np.pad(whole, [(0, h - s) for h, s in zip(held, whole.shape, strict=True)])
    _, degree, tp = axes[-1]
    if isinstance(tp, Shard | ShardNC):
        sections = tp.sections if isinstance(tp, ShardNC) else (held[tp.dim],)
        ends = np.cumsum(sections)[:-1]
        parts: list[list[np.ndarray]] = [[] for _ in range(degree)]
        for section in np.split(full, ends, tp.dim):
            widths = np.cumsum(even_widths(section.shape[tp.dim], degree))[:-1]
            for rank, part in enumerate(np.split(section, widths, tp.dim)):
                parts[rank].append(part)
        return [np.concatenate(part, tp.dim) for part in parts]
    return [full] * degree


def filled(local: Local, whole: np.ndarray, step: int) -> np.ndarray:
    """The local tensor, gathered run by run; every element of a window is written once."""
    out = np.zeros(local.numel, whole.dtype)
    for start in range(0, local.numel, step):
        for position, box, windows in local.runs(start, min(step, local.numel - start)):
            view = out[start + position : start + position + box.volume].reshape(box.sizes)
            for window in windows:
                assert not view[window.local.slices].any()
                view[window.local.slices] = whole[window.logical.slices]
    return out.reshape(local.shape)


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@given(st.data(), shapes, st.integers(1, 40))
def test_from_any_layout_to_any_other(
    data: st.DataObject, shape: tuple[int, ...], step: int
) -> None:
    whole = np.arange(1, math.prod(shape) + 1).reshape(shape)  # 0 is padding
    held, axes = data.draw(layouts(shape))
    ranks = [filled(local, whole, step) for local in local_tensors(held, axes)]
    expected = cut(whole, held, axes)
    assert len(ranks) == len(expected)
    for rank, mine in zip(ranks, expected, strict=True):
        assert np.array_equal(rank, mine)
    united = np.zeros(shape, int)
    counter = iter(range(len(ranks)))

    def leaf(coords: dict[str, int], local: tuple[int, ...]) -> Geometry:
        return Strided(local, next(counter))

    geometry = compose(held, axes, leaf)
    for piece in geometry.query(Region.full(shape)):
        flat = np.lib.stride_tricks.as_strided(
            ranks[piece.slot].reshape(-1)[piece.offset :],
            piece.region.sizes,
            [stride * 8 for stride in piece.strides],
        )
        united[piece.region.slices] = flat
    assert np.array_equal(united, whole)
    other, others = data.draw(layouts(shape))
    for local, mine in zip(local_tensors(other, others), cut(united, other, others), strict=True):
        assert np.array_equal(filled(local, united, step), mine)


@given(shapes, st.integers(0, 200), st.integers(0, 200))
def test_runs_of_a_whole_tensor_are_its_flat_boxes(
    shape: tuple[int, ...], start: int, count: int
) -> None:
    numel = math.prod(shape)
    start, count = min(start, numel), min(count, numel - min(start, numel))
    local = Local.whole(shape)
    assert local.padding == 0
    runs = list(local.runs(start, count))
    assert [box for _, box, _ in runs] == flat_boxes(shape, start, start + count)
    for _, box, windows in runs:
        assert [window.logical for window in windows] == [box]


def test_scalars_and_empty_slices() -> None:
    (one,) = local_tensors((), (Axis("tp", 1, Replicate()),))
    assert [box.volume for _, box, _ in one.runs(0, 1)] == [1]
    three = local_tensors((2, 3), (Axis("tp", 3, Shard(0)),))
    assert [local.shape for local in three] == [(1, 3), (1, 3), (0, 3)]
    assert three[2].windows == ()


@pytest.mark.parametrize("pattern", [Flat(), Stacked(), Unique()])
def test_what_is_no_slice_is_refused(pattern: object) -> None:
    with pytest.raises(PatternError):
        local_tensors((2, 3), (Axis("tp", 2, pattern),))  # type: ignore[arg-type]
