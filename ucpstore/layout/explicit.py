"""`Explicit`: a layout that no rule describes, box by box, for one number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ucpstore.errors import Kind, PatternError
from ucpstore.layout.geometry import Block, Blocks, Copies, Geometry
from ucpstore.layout.kinds import Pattern, unfit
from ucpstore.layout.region import Region

__all__ = ["Explicit"]

_Shape = tuple[int, ...]
Box = tuple[_Shape, _Shape, _Shape]
"""Offsets in the tensor, offsets in the rank's local tensor, sizes."""


@dataclass(frozen=True, slots=True)
class Explicit(Pattern):
    """Boxes of the tensor and where they lie in the ranks' local tensors.

    It is bound to one shape and one number of ranks. Equal boxes on several ranks are replicas. DeepSpeed
    0.19.8 describes layouts so (``checkpoint/affine.py``).

    Attributes
    ----------
    shape : tuple of int
        Of the whole tensor.
    local : tuple of tuple of int
        Per rank, the shape that it holds.
    boxes : tuple of tuple of Box
        Per rank: (offsets in the tensor, offsets in the local tensor, sizes).
    """

    shape: _Shape
    local: tuple[_Shape, ...]
    boxes: tuple[tuple[Box, ...], ...]
    name: ClassVar[str] = "explicit"

    def __post_init__(self) -> None:
        if len(self.local) != len(self.boxes):
            raise unfit(
                f"explicit: {len(self.local)} local shapes and the boxes of {len(self.boxes)} ranks."
            )
        for rank, (local, boxes) in enumerate(zip(self.local, self.boxes, strict=True)):
            for at, inner, sizes in boxes:
                if not (
                    len(at) == len(sizes) == len(self.shape)
                    and len(inner) == len(local) == len(sizes)
                    and min(*at, *inner, *sizes, 0) >= 0
                    and Region.full(self.shape).contains(Region(at, sizes))
                    and Region.full(local).contains(Region(inner, sizes))
                ):
                    raise unfit(
                        f"explicit: a box of {list(sizes)} at {list(at)} of shape {list(self.shape)} and at"
                        f" {list(inner)} of the {list(local)} of rank {rank} lies outside of them."
                    )

    def split(self, shape: _Shape, size: int) -> tuple[_Shape | None, ...]:
        if shape != self.shape or size != len(self.local):
            raise unfit(
                f"explicit: the boxes are those of shape {list(self.shape)} on {len(self.local)} ranks, found"
                f" {list(shape)} on {size}."
            )
        return self.local

    def join(self, shape: _Shape, parts: Sequence[Geometry | None]) -> Geometry:
        held = [part for part in parts if part is not None]
        if self.split(shape, len(held)) != tuple(part.shape for part in held):
            raise unfit(f"explicit: the ranks hold {[list(part.shape) for part in held]}.")
        holders: dict[Region, list[Geometry]] = {}
        for part, boxes in zip(held, self.boxes, strict=True):
            for at, inner, sizes in boxes:
                holders.setdefault(Region(at, sizes), []).append(_window(part, inner, sizes))
        blocks = []
        for region, copies in holders.items():
            child = copies[0] if len(copies) == 1 else Copies(tuple(copies), "equal")
            blocks.append(Block(region, child, (0,) * region.ndim))
        return Blocks(shape, tuple(blocks))

    def __str__(self) -> str:
        return f"explicit({sum(map(len, self.boxes))} boxes on {len(self.local)} ranks)"

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Explicit:
        """The pattern of a normal form.

        Raises
        ------
        PatternError
            The document is none.
        """
        try:
            if document.keys() != {"pattern", "shape", "local", "boxes"}:
                raise TypeError(f"its fields are {', '.join(map(str, document))}")  # noqa: TRY301
            boxes = tuple(
                tuple((_ints(at), _ints(inner), _ints(sizes)) for at, inner, sizes in rank)
                for rank in document["boxes"]
            )
            local = tuple(_ints(shape) for shape in document["local"])
            return cls(_ints(document["shape"]), local, boxes)
        except (TypeError, ValueError) as error:
            raise PatternError(
                f"pattern document {document!r:.80}: {error}.", kind=Kind.MALFORMED
            ) from error


def _ints(values: Any) -> _Shape:
    if not isinstance(values, list | tuple) or any(type(value) is not int for value in values):
        raise TypeError(f"found {values!r:.40}, expected integers")
    return tuple(values)


def _window(child: Geometry, offsets: _Shape, sizes: _Shape) -> Geometry:
    """The part of ``child`` inside a box, as a tensor of its own."""
    if sizes == child.shape:
        return child
    return Blocks(sizes, (Block(Region.full(sizes), child, offsets),))
