"""What a mapping can do with tensors: from the shapes of its members to the parts of the target.

Every transform is data, has an inverse where the document says enough, and is applied to all states of
a parameter alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ucpstore.errors import LayoutError
from ucpstore.mapping.affine import Axis, Part, View

__all__ = [
    "Fuse",
    "Identity",
    "Rotary",
    "Split",
    "Stack",
    "Transform",
    "Transpose",
    "Unstack",
    "cut_sizes",
]

Shape = tuple[int, ...]
Members = Sequence[tuple[str, Shape]]
"""Names and shapes of the source tensors, in the entry's order."""


class Transform(Protocol):
    """How one target tensor is made of its members."""

    def view(self, members: Members) -> View:
        """The target's shape and parts.

        Raises
        ------
        LayoutError
            The shapes do not fit the transform.
        """


@dataclass(frozen=True, slots=True)
class Identity:
    """One tensor as it is."""

    def view(self, members: Members) -> View:
        ((name, shape),) = members
        return View(shape, (Part.whole(name, shape),))


def cut_sizes(
    total: int, ratio: Sequence[int], *, groups: int, unit: int | None, what: str
) -> list[int]:
    """Indices that each member has per group, of a dim of ``total`` indices.

    Raises
    ------
    LayoutError
        They are no whole numbers, or not ``unit`` times the ratio.
    """
    shares = groups * sum(ratio)
    scale, rest = divmod(total, shares)
    if rest:
        raise LayoutError(
            f"{what} has {total} indices, expected a multiple of {shares}:"
            f" {groups} groups of {'+'.join(map(str, ratio))}."
        )
    if unit is not None and scale != unit:
        raise LayoutError(
            f"{what} has {total} indices, expected {shares * unit}:"
            f" {groups} groups of {'+'.join(map(str, ratio))} times {unit}."
        )
    return [share * scale for share in ratio]


def _strip(
    name: str,
    shape: Shape,
    dim: int,
    *,
    groups: int,
    target: tuple[int, int],
    source: tuple[int, int],
    size: int,
) -> Part:
    """``groups`` runs of ``size`` indices of a dim; ``source`` and ``target`` are (first, step of groups)."""
    axes = [Axis(n, d, 1, d, 1) for d, n in enumerate(shape) if d != dim]
    axes += [Axis(groups, dim, source[1], dim, target[1]), Axis(size, dim, 1, dim, 1)]
    offsets = [
        tuple(first if d == dim else 0 for d in range(len(shape)))
        for first in (source[0], target[0])
    ]
    return Part(name, tuple(axes), offsets[0], offsets[1])


def _require_dim(name: str, shape: Shape, dim: int) -> None:
    if dim >= len(shape):
        raise LayoutError(f"{name!r} has shape {list(shape)}, expected one with dim {dim}.")


@dataclass(frozen=True, slots=True)
class Fuse:
    """Members joined along a dim: one after the other, or group by group.

    Attributes
    ----------
    dim : int
    groups : int
        Every member is cut into so many equal runs; a group is one run of every member in order.
    ratio : tuple of int, optional
        Sizes of the members in proportion; checked, and what makes the fusion invertible.
    unit : int, optional
        Indices that 1 in the ratio stands for, per group; checked.
    """

    dim: int = 0
    groups: int = 1
    ratio: tuple[int, ...] | None = None
    unit: int | None = None

    def view(self, members: Members) -> View:
        dim = self.dim
        sizes = []
        first = members[0][1]
        for name, shape in members:
            _require_dim(name, shape, dim)
            if shape[:dim] + shape[dim + 1 :] != first[:dim] + first[dim + 1 :]:
                raise LayoutError(
                    f"{name!r} has shape {list(shape)}, {members[0][0]!r} has {list(first)}: to be fused they"
                    f" may differ in dim {dim} only."
                )
            if shape[dim] % self.groups:
                raise LayoutError(
                    f"{name!r} has {shape[dim]} indices along dim {dim}, expected a multiple of the"
                    f" {self.groups} groups."
                )
            sizes.append(shape[dim] // self.groups)
        total = sum(sizes)
        if self.ratio is not None:
            what = f"dim {dim} of {', '.join(repr(name) for name, _ in members)} together"
            expected = cut_sizes(
                total * self.groups, self.ratio, groups=self.groups, unit=self.unit, what=what
            )
            if sizes != expected:
                raise LayoutError(
                    f"{what}: found {'+'.join(map(str, sizes))} indices per group, expected"
                    f" {'+'.join(map(str, expected))}."
                )
        parts = []
        start = 0
        for (name, shape), size in zip(members, sizes, strict=True):
            parts.append(
                _strip(
                    name,
                    shape,
                    dim,
                    groups=self.groups,
                    target=(start, total),
                    source=(0, size),
                    size=size,
                )
            )
            start += size
        return View((*first[:dim], total * self.groups, *first[dim + 1 :]), tuple(parts))


@dataclass(frozen=True, slots=True)
class Split:
    """One member of a fused tensor: the inverse of `Fuse`.

    Attributes
    ----------
    index : int
        Which member.
    """

    index: int
    ratio: tuple[int, ...]
    dim: int = 0
    groups: int = 1
    unit: int | None = None

    def view(self, members: Members) -> View:
        ((name, shape),) = members
        dim = self.dim
        _require_dim(name, shape, dim)
        what = f"dim {dim} of {name!r}"
        sizes = cut_sizes(shape[dim], self.ratio, groups=self.groups, unit=self.unit, what=what)
        size = sizes[self.index]
        part = _strip(
            name,
            shape,
            dim,
            groups=self.groups,
            target=(0, size),
            source=(sum(sizes[: self.index]), sum(sizes)),
            size=size,
        )
        return View((*shape[:dim], size * self.groups, *shape[dim + 1 :]), (part,))


@dataclass(frozen=True, slots=True)
class Stack:
    """Siblings of equal shape as one tensor with a leading dim."""

    def view(self, members: Members) -> View:
        shape = members[0][1]
        different = [name for name, other in members if other != shape]
        if different:
            raise LayoutError(
                f"{different[0]!r} has another shape than {members[0][0]!r}, which has {list(shape)}: they cannot"
                " be stacked."
            )
        axes = tuple(Axis(n, d, 1, d + 1, 1) for d, n in enumerate(shape))
        zeros = (0,) * len(shape)
        parts = tuple(Part(name, axes, zeros, (i, *zeros)) for i, (name, _) in enumerate(members))
        return View((len(members), *shape), parts)


@dataclass(frozen=True, slots=True)
class Unstack:
    """One index of the leading dim."""

    index: int

    def view(self, members: Members) -> View:
        ((name, shape),) = members
        _require_dim(name, shape, 0)
        axes = tuple(Axis(n, d + 1, 1, d, 1) for d, n in enumerate(shape[1:]))
        zeros = (0,) * (len(shape) - 1)
        return View(shape[1:], (Part(name, axes, (self.index, *zeros), zeros),))


@dataclass(frozen=True, slots=True)
class Transpose:
    """Dims in another order: dim ``d`` of the target is dim ``dims[d]`` of the source."""

    dims: tuple[int, ...]

    def view(self, members: Members) -> View:
        ((name, shape),) = members
        if len(shape) != len(self.dims):
            raise LayoutError(
                f"{name!r} has shape {list(shape)}, expected one of {len(self.dims)} dims to be transposed."
            )
        axes = tuple(Axis(shape[dim], dim, 1, d, 1) for d, dim in enumerate(self.dims))
        zeros = (0,) * len(shape)
        return View(tuple(shape[dim] for dim in self.dims), (Part(name, axes, zeros, zeros),))


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rows of every head's rotary part from pairs to halves, or back.

    Rotary embeddings turn two rows together: neighbours (``2 i``, ``2 i + 1``: Meta's LLaMA, GPT-J), or rows
    half a head apart (``i``, ``i + d / 2``: Hugging Face, GPT-NeoX, Megatron).

    Attributes
    ----------
    heads : int
        Heads along dim 0.
    to : {"halves", "pairs"}
    rotary_dim : int, optional
        Rows of each head that are turned, the first ones; all by default.
    """

    heads: int
    to: str
    rotary_dim: int | None = None

    def view(self, members: Members) -> View:
        ((name, shape),) = members
        _require_dim(name, shape, 0)
        head, rest = divmod(shape[0], self.heads)
        turned = head if self.rotary_dim is None else self.rotary_dim
        if rest or turned % 2 or turned > head:
            raise LayoutError(
                f"{name!r} has {shape[0]} rows, expected {self.heads} heads of an even number of rows"
                + ("." if self.rotary_dim is None else f", at least {self.rotary_dim} each.")
            )
        others = tuple(Axis(n, d, 1, d, 1) for d, n in enumerate(shape) if d)
        zeros = (0,) * len(shape)
        pair, half = (2, 1), (1, turned // 2)  # steps of (position, member) in either order
        source, target = (pair, half) if self.to == "halves" else (half, pair)
        axes = (
            Axis(self.heads, 0, head, 0, head),
            Axis(turned // 2, 0, source[0], 0, target[0]),
            Axis(2, 0, source[1], 0, target[1]),
            *others,
        )
        parts = [Part(name, axes, zeros, zeros)]
        if turned < head:
            kept = (Axis(self.heads, 0, head, 0, head), Axis(head - turned, 0, 1, 0, 1), *others)
            offsets = (turned, *zeros[1:])
            parts.append(Part(name, kept, offsets, offsets))
        return View(shape, tuple(parts))
