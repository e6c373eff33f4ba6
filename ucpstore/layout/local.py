"""Local tensors: what one rank holds of a logical tensor, as boxes, for whoever writes the ranks' files.

The inverse view of a `Geometry`: there, a box of the logical tensor is looked up in the ranks' buffers;
here, a rank's buffer says which box of the logical tensor lies in each of its boxes. Whatever is in none is
padding.

Examples
--------
>>> from ucpstore.layout.patterns import Axis, Shard
>>> first, second = local_tensors((3, 4), (Axis("tp", 2, Shard(0)),))
>>> second.shape, [(str(w.local), w.origin) for w in second.windows]
((1, 4), [('[0:1, 0:4]', (2, 0))])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ucpstore.errors import Kind, PatternError
from ucpstore.layout.flat import flat_boxes
from ucpstore.layout.geometry import Geometry, Piece, Strided
from ucpstore.layout.patterns import Axis, compose
from ucpstore.layout.region import Region, row_major_strides

__all__ = ["Local", "Window", "local_tensors"]


@dataclass(frozen=True, slots=True)
class Window:
    """A box of a local tensor that holds a box of the logical tensor.

    Attributes
    ----------
    local : Region
        In the coordinates of the local tensor.
    origin : tuple of int
        First index of the box in the logical tensor; its sizes are those of ``local``.
    """

    local: Region
    origin: tuple[int, ...]

    @property
    def logical(self) -> Region:
        """The box in the coordinates of the logical tensor."""
        return Region(self.origin, self.local.sizes)


@dataclass(frozen=True, slots=True)
class Local:
    """The local tensor of one rank.

    Attributes
    ----------
    shape : tuple of int
        Padding included.
    windows : tuple of Window
        Disjoint; elements in none are padding, whose value is zero.
    """

    shape: tuple[int, ...]
    windows: tuple[Window, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Local:
        """A rank that holds the logical tensor as it is."""
        return cls(shape, (Window(Region.full(shape), (0,) * len(shape)),))

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        return math.prod(self.shape)

    @property
    def padding(self) -> int:
        """Number of elements that are in no window."""
        return self.numel - sum(window.local.volume for window in self.windows)

    def runs(self, start: int, count: int) -> Iterator[tuple[int, Region, list[Window]]]:
        """What a run of elements of the flattened local tensor is made of.

        Parameters
        ----------
        start, count : int, elements

        Yields
        ------
        position : int, elements
            Where a box of the run begins, counted from the run's first element.
        box : Region
            In the coordinates of the local tensor; its elements lie in row-major order.
        windows : list of Window
            Parts of windows inside the box, in the coordinates of the box.
        """
        position = 0
        for box in flat_boxes(self.shape, start, start + count):
            inside = []
            for window in self.windows:
                common = window.local.intersect(box)
                if common is not None:
                    origin = common.within(window.local).shift(window.origin).offsets
                    inside.append(Window(common.within(box), origin))
            yield position, box, inside
            position += box.volume

    def to_json(self) -> dict[str, Any]:
        """The local shape and, per window, ``[first index here, first index there, sizes]``."""
        return {
            "shape": list(self.shape),
            "windows": [
                [list(w.local.offsets), list(w.origin), list(w.local.sizes)] for w in self.windows
            ],
        }


def local_tensors(shape: tuple[int, ...], axes: Sequence[Axis]) -> tuple[Local, ...]:
    """What every rank of a mesh holds of a tensor.

    Parameters
    ----------
    shape : tuple of int
        Of the whole tensor as the ranks hold it together, padding included; see
        `ucpstore.layout.patterns.compose`.
    axes : sequence of Axis
        Patterns that leave the number of dims as it is; a `Pad` may be among them.

    Returns
    -------
    tuple of Local
        In row-major order of the axes that are no padding.

    Raises
    ------
    PatternError
        A pattern does not fit, a rank holds no part, or what it holds has another number of dims.
    """
    held: list[Local] = []

    def leaf(coords: dict[str, int], local: tuple[int, ...]) -> Geometry:
        if len(local) != len(shape):
            raise PatternError(
                f"a tensor of shape {list(shape)} would be held as one of {list(local)} by the rank at {coords}:"
                f" expected a slice with {len(shape)} dims.",
                kind=Kind.SHAPE,
            )
        held.append(Local(local, ()))
        return Strided(local, len(held) - 1)

    geometry = compose(shape, axes, leaf)
    ranks = math.prod(size for _, size, _ in axes)
    if len(held) != ranks:
        raise PatternError(
            f"{len(held)} of {ranks} ranks hold a part of a tensor of shape {list(shape)}, expected all of them.",
            kind=Kind.SHAPE,
        )
    windows: list[list[Window]] = [[] for _ in held]
    full = Region.full(geometry.shape)
    for copy in range(geometry.copies):
        for piece in geometry.query(full, copy):
            local = held[piece.slot]
            windows[piece.slot].append(_window(piece, local.shape))
    return tuple(Local(local.shape, tuple(mine)) for local, mine in zip(held, windows, strict=True))


def _window(piece: Piece, shape: tuple[int, ...]) -> Window:
    """Where a piece lies in its C-contiguous local tensor."""
    offsets = []
    rest = piece.offset
    for step in row_major_strides(shape):
        index, rest = divmod(rest, step)
        offsets.append(index)
    return Window(Region(tuple(offsets), piece.region.sizes), piece.region.offsets)
