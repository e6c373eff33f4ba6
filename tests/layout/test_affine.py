"""Boxes behind as_strided addresses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from tests.layout.reference import numbered, regions
from ucpstore.errors import LayoutError
from ucpstore.layout.affine import box_of_strided
from ucpstore.layout.region import Region, row_major_strides

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@given(shapes, st.data())
def test_every_box_is_recognised(shape: tuple[int, ...], data: st.DataObject):
    box = data.draw(regions(shape).filter(lambda region: region.volume))
    strides = row_major_strides(shape)
    offset = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    assert box_of_strided(shape, box.sizes, offset=offset, strides=strides) == box
    sizes, steps = list(box.sizes), list(strides)
    for dim in range(len(sizes) - 2, -1, -1):  # merge dims that one walk covers
        if steps[dim] == steps[dim + 1] * sizes[dim + 1] and data.draw(st.booleans()):
            sizes[dim : dim + 2] = [sizes[dim] * sizes[dim + 1]]
            steps[dim : dim + 2] = [steps[dim + 1]]
    assert box_of_strided(shape, sizes, offset=offset, strides=steps) == box


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 13)), max_size=3),
)
def test_a_view_is_read_right_or_refused(
    shape: tuple[int, ...], offset: int, dims: list[tuple[int, int]]
):
    sizes, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    try:
        box = box_of_strided(shape, sizes, offset=offset, strides=strides)
    except LayoutError:
        return
    if math.prod(sizes) == 0:
        assert box.volume == 0
        return
    x = numbered(shape)
    view = as_strided(x.ravel()[offset:], sizes, tuple(8 * s for s in strides))
    assert np.array_equal(x[box.slices].ravel(), view.ravel())


@pytest.mark.parametrize(
    ("sizes", "strides", "offset"),
    [
        ((2, 3), (1, 4), 0),  # transposed
        ((2, 2), (4, 2), 0),  # every other column
        ((6,), (1,), 2),  # a run across rows
        ((2,), (0,), 0),  # one element twice
        ((2,), (5,), 0),  # a diagonal
        ((2,), (-1,), 3),
        ((1,), (1,), -1),
        ((13,), (1,), 0),  # longer than the tensor
        ((2,), (1, 1), 0),
    ],
)
def test_what_is_not_a_box_is_refused(
    sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
):
    with pytest.raises(LayoutError, match=r"of shape \[3, 4\]"):
        box_of_strided((3, 4), sizes, offset=offset, strides=strides)


def test_empty_and_scalar_views():
    assert box_of_strided((3, 4), (0, 4), offset=99, strides=(4, 1)).volume == 0
    assert box_of_strided((), (), offset=0, strides=()) == Region((), ())
    assert box_of_strided((0, 4), (0,), offset=0, strides=(1,)).volume == 0
    assert box_of_strided((3, 4), (), offset=6, strides=()) == Region((1, 2), (1, 1))
