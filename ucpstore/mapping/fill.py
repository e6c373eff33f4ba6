"""Reading parts into an array: by views of it where they are boxes there too, else through a small block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ucpstore.layout.region import Region
from ucpstore.mapping.affine import Part

__all__ = ["BLOCK", "LOCAL_WASTE", "Filler"]

Arrays = Any  # numpy arrays of a dtype that is only known at run time

BLOCK = 256 << 10
"""Bytes of the block through which elements go that the target has in another order."""
LOCAL_WASTE = 4 << 10
"""Bytes: boxes of at most this are read whole even where only some of their elements are needed."""


@dataclass(frozen=True, slots=True)
class Filler:
    """Fills an array with parts of other tensors.

    Attributes
    ----------
    read : callable
        ``(name, region of that tensor, array)``.
    region : Region
        Of the target, what the array holds.
    out : numpy.ndarray
    waste : int, bytes
        Boxes of at most this size may be read for some of their elements.
    """

    read: Callable[[str, Region, Arrays], None]
    region: Region
    out: Arrays
    waste: int

    def fill(self, part: Part) -> None:
        """Read a part: into the array itself where it is a box there too, else through a block."""
        box = part.source_region
        dense = box.volume == part.volume
        nbytes = box.volume * self.out.itemsize
        if dense and (view := self._direct(part)) is not None:
            self.read(part.source, box, view)
        elif nbytes <= BLOCK if dense else nbytes <= self.waste:
            block = np.empty(box.sizes, self.out.dtype)
            self.read(part.source, box, block)
            start = (0,) * block.ndim
            self._axes(part)[...] = _strided(
                block,
                start,
                [axis.size for axis in part.axes],
                [axis.source_step * block.strides[axis.source] for axis in part.axes],
            )
        else:
            for half in part.halves():
                self.fill(half)

    def _start(self, part: Part) -> tuple[int, ...]:
        return tuple(
            offset - first
            for offset, first in zip(part.target_offsets, self.region.offsets, strict=True)
        )

    def _axes(self, part: Part) -> Arrays:
        """The part's place in the array, one dim per axis."""
        strides = [axis.target_step * self.out.strides[axis.target] for axis in part.axes]
        return _strided(self.out, self._start(part), [axis.size for axis in part.axes], strides)

    def _direct(self, part: Part) -> Arrays | None:
        """The part's place in the array with the dims of the source, or None where it has no such view."""
        sizes = part.source_region.sizes
        strides = []
        for dim in range(len(sizes)):
            axes = [axis for axis in part.axes if axis.source == dim and axis.size > 1]
            axes.sort(key=lambda axis: axis.source_step)
            size, stride = 1, self.out.itemsize
            for axis in axes:
                own = axis.target_step * self.out.strides[axis.target]
                if size == 1:
                    stride = own
                elif own != stride * size:
                    return None
                size *= axis.size
            strides.append(stride)
        inner = [stride for stride, size in zip(strides, sizes, strict=True) if size > 1]
        if inner and inner[-1] != self.out.itemsize:
            return None  # element by element: a block is faster
        return _strided(self.out, self._start(part), sizes, strides)


def _strided(
    array: Arrays, start: Sequence[int], sizes: Sequence[int], strides: Sequence[int]
) -> Arrays:
    """A view from an element on; strides in bytes."""
    raw = array.view(f"V{array.itemsize}")[(*(slice(first, None) for first in start), ...)]
    return as_strided(raw, sizes, strides).view(array.dtype)
