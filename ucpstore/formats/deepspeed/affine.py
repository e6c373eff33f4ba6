"""``affine_map`` of DeepSpeed 0.19.8 (``checkpoint/affine.py``) as patterns.

``source`` and ``dest`` of a piece are `torch.as_strided` arguments, in elements, into the full tensor and into
the shard; ``shard = full * scale``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ucpstore.errors import Kind, PatternError, UnsupportedSourceError
from ucpstore.formats.deepspeed.checks import integer, integers, mapping_of, sequence_of
from ucpstore.layout.coverage import uncovered
from ucpstore.layout.explicit import Explicit
from ucpstore.layout.patterns import Pattern, Replicate, Shard, ShardNC
from ucpstore.layout.region import Region, row_major_strides

__all__ = ["affine_maps", "pattern_of"]

_VERSION = 1
_Shape = tuple[int, ...]
_Pieces = Sequence[tuple[Region, Region]]
"""Of one rank: box in the full tensor, box in the shard."""


def affine_maps(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """The maps of an info by the regex of their parameters.

    Raises
    ------
    UnsupportedSourceError
        They are of a later version.
    """
    affine = mapping_of(info.get("affine_map") or {}, "affine_map")
    version = affine.get("version", _VERSION)
    if version != _VERSION:
        raise UnsupportedSourceError(
            f"affine_map of universal_checkpoint_info has version {version!r}, expected {_VERSION}."
        )
    return mapping_of(affine.get("params", {}), "affine_map")


def pattern_of(fqn: str, entry: object, shapes: Sequence[_Shape]) -> Pattern:
    """The pattern of a map: replicate, shard or shard_nc where it is one, else its boxes.

    Parameters
    ----------
    fqn : str
    entry : object
        The parameter's map.
    shapes : sequence of tuple of int
        Of the local tensors of all ranks.

    Raises
    ------
    PatternError
        The map does not fit the local tensors, or does not place each of their elements once.
    UnsupportedSourceError
        A piece is scaled, or is no box.
    """
    what = f"affine map of {fqn!r}"
    entry = mapping_of(entry, what)
    shape = integers(entry.get("logical_shape"), what)
    ranks = {
        integer(rank, what): value for rank, value in mapping_of(entry.get("ranks"), what).items()
    }
    if set(ranks) != set(range(len(shapes))):
        raise PatternError(
            f"the {what} describes the ranks {sorted(ranks)}, but there are {len(shapes)}.",
            fqn=fqn,
        )
    pieces = []
    for rank, held in enumerate(shapes):
        value = mapping_of(ranks[rank], what)
        local = integers(value.get("shard_shape"), what)
        if local != held:
            raise PatternError(
                f"the {what} says that rank {rank} holds {list(local)}, but it holds {list(held)}.",
                fqn=fqn,
            )
        pieces.append(list(_pieces(what, value, shape, local)))
        _require_tiled(what, rank, [dest for _, dest in pieces[-1]], local)
    return _recognised(shape, tuple(shapes), pieces) or Explicit(
        shape,
        tuple(shapes),
        tuple(
            tuple((at.offsets, inner.offsets, at.sizes) for at, inner in boxes) for boxes in pieces
        ),
    )


def _recognised(
    shape: _Shape, shapes: tuple[_Shape, ...], pieces: Sequence[_Pieces]
) -> Pattern | None:
    full = Region.full(shape)
    if all([at for at, _ in boxes] == [full] for boxes in pieces):
        return Replicate()
    for dim in range(len(shape)):
        widths = _sections(dim, shape, pieces)
        if widths is None:
            continue
        found = (
            Shard(dim, widths[0])
            if len(widths) == 1
            else ShardNC(dim, tuple(map(sum, widths)), widths)
        )
        if (
            found.split(shape, len(shapes)) == shapes
        ):  # empty slices tell the dim by their shapes only
            return found
    return None


def _sections(
    dim: int, shape: _Shape, pieces: Sequence[_Pieces]
) -> tuple[tuple[int, ...], ...] | None:
    """Per section, the width of every rank, if every rank's tensor is its slice of each section."""
    counts = {len(boxes) for boxes in pieces}
    if counts == {0, 1}:  # ranks without any part
        blank = Region((0,) * len(shape), (0,) * len(shape))
        pieces = [boxes or [(blank, blank)] for boxes in pieces]
    elif len(counts) > 1 or counts == {0}:
        return None
    widths = []
    position, inner = 0, [0] * len(pieces)
    for section in zip(*pieces, strict=True):
        for rank, (at, dest) in enumerate(section):
            width = at.sizes[dim]
            whole = (*shape[:dim], width, *shape[dim + 1 :])
            here = tuple(position if d == dim else 0 for d in range(len(shape)))
            there = tuple(inner[rank] if d == dim else 0 for d in range(len(shape)))
            if width and (at.sizes, at.offsets, dest.offsets) != (whole, here, there):
                return None
            position += width
            inner[rank] += width
        widths.append(tuple(at.sizes[dim] for at, _ in section))
    return tuple(widths) if position == shape[dim] else None


def _require_tiled(what: str, rank: int, boxes: Sequence[Region], local: _Shape) -> None:
    """Every element of the shard must be in exactly one piece, as `ParamAffineMap.validate` demands."""
    full = Region.full(local)
    total = sum(box.volume for box in boxes)
    holes = uncovered(full, boxes) if total == full.volume else []
    if total != full.volume or holes:
        where = f"{holes[0]} is in none and another box in two" if holes else f"they hold {total}"
        raise PatternError(
            f"the {what} should place each of the {full.volume} elements of rank {rank} in one piece, but {where}.",
            kind=Kind.OVERLAP if holes or total > full.volume else Kind.GAP,
        )


def _pieces(
    what: str, rank: Mapping[str, Any], shape: _Shape, local: _Shape
) -> Iterator[tuple[Region, Region]]:
    """Box in the full tensor and box in the shard of every piece that has elements."""
    for item in sequence_of(rank.get("pieces"), what):
        piece = mapping_of(item, what)
        if piece.get("scale", 1.0) != 1.0:
            raise UnsupportedSourceError(
                f"the {what} scales a piece by {piece['scale']}: a scaled copy cannot be read exactly."
            )
        sizes = integers(piece.get("shape"), what)
        if math.prod(sizes):
            yield (
                _box(what, sizes, piece.get("source"), shape),
                _box(what, sizes, piece.get("dest"), local),
            )


def _box(what: str, sizes: _Shape, view: object, shape: _Shape) -> Region:
    """The box of a tensor of ``shape`` that an `as_strided` view is."""
    offset, strides = sequence_of(view, what, length=2)
    offset, strides = integer(offset, what), integers(strides, what)
    steps = row_major_strides(shape)
    plain = len(sizes) == len(shape) == len(strides) and all(
        size <= 1 or stride == step
        for size, stride, step in zip(sizes, strides, steps, strict=True)
    )
    offsets = []
    rest = offset
    for step in steps:
        index, rest = divmod(rest, step)
        offsets.append(index)
    box = Region(tuple(offsets), sizes) if plain else None
    if box is None or rest or offset < 0 or not Region.full(shape).contains(box):
        raise UnsupportedSourceError(
            f"the {what} has a piece of shape {list(sizes)} at offset {offset} with strides {list(strides)}: that"
            f" is no box of a tensor of shape {list(shape)}."
        )
    return box
