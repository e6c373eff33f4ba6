"""Tensors of a target, gathered from the states of a source: whole, local to a rank, or flat ranges of these."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ucpstore.contracts import Source, StateSpec
from ucpstore.dtypes import itemsize, numpy_dtype
from ucpstore.errors import PlanError
from ucpstore.layout.local import Local, Window
from ucpstore.layout.region import Region
from ucpstore.layout.tiles import tile_shape

__all__ = ["BLOCK", "Part", "Tensor", "blocks", "fill"]

BLOCK = 4 << 20
"""Bytes of a tensor that are gathered at a time."""

_CASTS = {"bfloat16", "float16", "float32"}


@dataclass(frozen=True, slots=True)
class Part:
    """A run of elements of a state that lies in a tensor of the target.

    Attributes
    ----------
    fqn, state : str
    shape : tuple of int
        Of the whole state, or of the local tensor.
    start, count : int, elements
        Which of its flattened elements.
    offset : int, elements
        Where they begin in the target's tensor.
    local : Local, optional
        The run is one of a rank's local tensor of the state, not of the state itself.
    """

    fqn: str
    state: str
    shape: tuple[int, ...]
    start: int
    count: int
    offset: int
    local: Local | None = None

    def runs(self, start: int, count: int) -> Iterator[tuple[int, Region, list[Window]]]:
        """What ``count`` of its elements from ``start`` on are made of; see `Local.runs`."""
        return (self.local or Local.whole(self.shape)).runs(start, count)

    @property
    def source_numel(self) -> int:
        """Elements that come from the state; the others are padding."""
        runs = self.runs(self.start, self.count)
        return sum(window.local.volume for _, _, windows in runs for window in windows)


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor to be written: parts of states, zeros between them; or given bytes.

    One object is one storage: where it occurs twice, the loaded tensors share their memory.

    Attributes
    ----------
    dtype : str
    shape : tuple of int
    parts : tuple of Part
        In order of their offsets.
    data : bytes, optional
        The elements, where they are known (little-endian).
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    data: bytes | None = field(default=None, repr=False)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)


def blocks(source: Source, tensor: Tensor, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut the elements of ``tensor`` into runs of at most ``nbytes``, for one `fill` each.

    A run ends, where it can, between two rows of tiles of the state that is read, so that a source that is
    stored in tiles reads none of them for two runs.

    Yields
    ------
    start, stop : int, elements
    """
    step, numel = nbytes // itemsize(tensor.dtype), tensor.numel
    offsets = [part.offset for part in tensor.parts]
    start = 0
    while start < numel:
        stop = min(start + step, numel)
        index = bisect_right(offsets, stop) - 1
        if stop < numel and index >= 0:
            part = tensor.parts[index]
            if stop < part.offset + part.count:
                border = part.offset + _border(source, part, part.start + stop - part.offset)
                border = max(border - part.start, part.offset)
                stop = border if border > start else stop
        yield start, stop
        start = stop


def _border(source: Source, part: Part, element: int) -> int:
    """The first element of the row of tiles in which one of a part's elements lies.

    Both count in the flattened (local) tensor. Where a rank's tensor is put together from several boxes,
    the one at the beginning of the element's row counts.
    """
    spec = _spec_of(source, part)
    tile = tile_shape(spec.shape, itemsize(spec.dtype))
    dim = next((dim for dim, size in enumerate(tile) if size > 1), None)
    if dim is None:
        return element
    local = part.local or Local.whole(part.shape)
    stride = math.prod(local.shape[dim + 1 :])
    plane = stride * local.shape[dim]
    row = element % plane // stride
    for window in local.windows:
        first = window.local.offsets[dim]
        if first <= row < first + window.local.sizes[dim]:
            skipped = (row - first + window.origin[dim]) % tile[dim]
            row -= min(skipped, row - first)
            break
    return element - element % plane + row * stride


def fill(
    source: Source, tensor: Tensor, start: int, out: np.ndarray[Any, Any], *, compare: bool
) -> None:
    """Fill ``out`` with the elements of ``tensor`` from ``start`` on.

    With ``compare`` every replica is read and must be bit-equal. Between float32 and 16-bit floats values are
    rounded to nearest even, or widened exactly; other differences of element type are refused.
    """
    if tensor.data is not None:
        size = itemsize(tensor.dtype)
        out[...] = np.frombuffer(tensor.data, out.dtype)[start : start + out.nbytes // size]
        return
    out.view(np.uint8)[...] = 0
    stop = start + out.size
    for part in tensor.parts:
        low, high = max(part.offset, start), min(part.offset + part.count, stop)
        if low >= high:
            continue
        first = part.start + low - part.offset
        for position, box, windows in part.runs(first, high - low):
            position += low - start
            view = out[position : position + box.volume].reshape(box.sizes)
            for window in windows:
                _read(source, part, window.logical, view[window.local.slices], compare=compare)


def _read(
    source: Source, part: Part, box: Region, view: np.ndarray[Any, Any], *, compare: bool
) -> None:
    dtype = _spec_of(source, part).dtype
    if numpy_dtype(dtype) == view.dtype:
        source.read(part.fqn, part.state, box, view, compare=compare)
        return
    if dtype not in _CASTS or str(view.dtype) not in _CASTS:
        raise PlanError(
            f"{part.state} of {part.fqn} has elements of {dtype}, which are not written as {view.dtype}."
        )
    values = np.empty(box.sizes, numpy_dtype(dtype))
    source.read(part.fqn, part.state, box, values, compare=compare)
    with np.errstate(over="ignore", invalid="ignore"):
        view[...] = values.astype(view.dtype)


def _spec_of(source: Source, part: Part) -> StateSpec:
    parameter = source.parameters.get(part.fqn)
    return parameter.states[part.state] if parameter else source.common.tensors[part.state]
