"""`Rule`: how the parameters of some names lie on tensor-parallel ranks; see `ucpstore.layout.rules`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, NamedTuple

from ucpstore.errors import Kind, PatternError
from ucpstore.layout.explicit import Explicit
from ucpstore.layout.geometry import Geometry
from ucpstore.layout.matching import PrefixRegex
from ucpstore.layout.names import Template
from ucpstore.layout.patterns import (
    Axis,
    Pad,
    Partial,
    Pattern,
    Replicate,
    Shard,
    ShardNC,
    describe,
    even_widths,
)

__all__ = ["AXIS", "Held", "Padding", "Rule", "United", "for_any_degree"]

AXIS = "tp"
_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Padding:
    """Indices at the end of a dim that are no part of the tensor: padded vocabularies.

    Attributes
    ----------
    dim : int
    true_size : int
        Indices that count; they come first.
    multiple : int, optional
        The padded size is the next multiple of this times the tensor-parallel degree (Megatron's
        ``make_vocab_size_divisible_by``).
    size : int, optional
        The padded size, where it is known and no ``multiple`` is.
    """

    dim: int
    true_size: int
    multiple: int | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        numbers = (self.dim, self.true_size, self.multiple, self.size)
        if any(number is not None and number < 0 for number in numbers) or self.multiple == 0:
            raise PatternError(
                f"padding of {numbers}: expected dim, true_size and size from 0, multiple from 1.",
                kind=Kind.MALFORMED,
            )

    def padded(self, fqn: str, degree: int) -> int:
        """The padded size on ``degree`` ranks.

        Raises
        ------
        PatternError
            It is known for other degrees only.
        """
        if self.multiple is not None:
            step = self.multiple * degree
            return -(-self.true_size // step) * step
        size = self.true_size if self.size is None else self.size
        if size % degree or size < self.true_size:
            raise PatternError(
                f"the padded size of {fqn!r} on {degree} tensor-parallel ranks is not known: found {size} for"
                f" {self.true_size} indices, expected a multiple of {degree}.",
                kind=Kind.SHAPE,
                hint="Give its rule pad.multiple (make_vocab_size_divisible_by) or pad.size.",
                fqn=fqn,
            )
        return size


class Held(NamedTuple):
    """What the ranks hold of a tensor together.

    Attributes
    ----------
    shape : tuple of int
        Padding included: what `ucpstore.layout.patterns.compose` takes.
    axes : tuple of Axis
    """

    shape: _Shape
    axes: tuple[Axis, ...]

    @property
    def words(self) -> str:
        """As in ``"pad(0: 50257), tp: shard(0)"``."""
        return describe(self.axes)

    @property
    def tp(self) -> Pattern:
        """The pattern on the axis of the ranks."""
        return self.axes[-1].pattern

    @property
    def is_padded(self) -> bool:
        """Whether more is held than the tensor."""
        return len(self.axes) > 1

    def resolved(self) -> Held:
        """The same with explicit widths: equal for rules that put the same elements on every rank."""
        *outer, (name, size, tp) = self.axes
        return Held(self.shape, (*outer, Axis(name, size, _resolved(tp, self.shape, size))))


def _resolved(tp: Pattern, shape: _Shape, size: int) -> Pattern:
    if isinstance(tp, Shard):
        local = [part for part in tp.split(shape, size) if part is not None]
        return Shard(tp.dim, tuple(part[tp.dim] for part in local))
    if isinstance(tp, ShardNC):
        return ShardNC(tp.dim, tp.sizes(shape[tp.dim]), tp.section_widths(shape, size))
    return tp


def for_any_degree(tp: Pattern) -> Pattern:
    """The pattern without widths, where an equal split, or one of whole units, gives them."""
    if isinstance(tp, Shard) and tp.widths is not None:
        unit = _unit(tp.widths)
        return tp if unit is None else Shard(tp.dim, unit=unit)
    if isinstance(tp, ShardNC) and tp.widths is not None:
        units = [_unit(widths) for widths in tp.widths]
        known = tuple(unit for unit in units if unit is not None)
        if len(known) < len(units):
            return tp
        return ShardNC(tp.dim, tp.sections, units=None if set(known) == {1} else known)
    return tp


def _unit(widths: Sequence[int]) -> int | None:
    """Indices that must stay together for an equal split to give these widths."""
    total, size = sum(widths), len(widths)
    if even_widths(total, size) == tuple(widths):
        return 1
    unit = gcd(*widths)
    dealt = tuple(unit * width for width in even_widths(total // unit, size))
    return unit if dealt == tuple(widths) else None


class United(NamedTuple):
    """A tensor put together from what the ranks hold."""

    geometry: Geometry
    held: Held
    rule: Rule


@dataclass(frozen=True, slots=True)
class Rule:
    """How the parameters of some names lie on tensor-parallel ranks.

    Attributes
    ----------
    match : tuple of Template or PrefixRegex
        Names that the rule is for.
    tp : Pattern
        `Shard` and `ShardNC` fit any number of ranks; widths count on as many ranks as they are.
    pad : Padding, optional
    min_ndim : int
        The rule is for tensors of at least so many dims.
    origin : str
        Where the rule comes from, for people.
    """

    match: tuple[Template | PrefixRegex, ...]
    tp: Pattern
    pad: Padding | None = None
    min_ndim: int = 0
    origin: str = ""

    def matches(self, fqn: str, ndim: int) -> bool:
        """Whether the rule is for the parameter."""
        return ndim >= self.min_ndim and any(one.match(fqn) is not None for one in self.match)

    def held(self, fqn: str, shape: _Shape, degree: int) -> Held:
        """What ``degree`` ranks hold together of a tensor of ``shape``.

        Raises
        ------
        PatternError
            The rule does not fit.
        """
        tp, pad = _on(self.tp, degree), self.pad
        axes: tuple[Axis, ...] = (Axis(AXIS, degree, tp),)
        if pad is not None:
            if pad.dim >= len(shape) or shape[pad.dim] != pad.true_size:
                raise PatternError(
                    f"the rule of {fqn!r} pads dim {pad.dim} of {pad.true_size} indices, but the shape is"
                    f" {list(shape)}.",
                    kind=Kind.SHAPE,
                    fqn=fqn,
                )
            size = pad.padded(fqn, degree)
            if size > pad.true_size:
                shape = (*shape[: pad.dim], size, *shape[pad.dim + 1 :])
                axes = (Axis("pad", 1, Pad(pad.dim, pad.true_size)), *axes)
        try:
            tp.split(shape, degree)
        except PatternError as error:
            raise PatternError(
                f"{fqn!r} on {degree} tensor-parallel ranks: {error.message}",
                kind=error.kind,
                fqn=fqn,
            ) from error
        return Held(shape, axes)

    def observed(self, fqn: str, shapes: Sequence[_Shape]) -> Held:
        """What the ranks hold together, by the shapes of their local tensors, in rank order.

        Raises
        ------
        PatternError
            The rule does not fit the shapes.
        """
        tp, shape = _observed(fqn, _on(self.tp, len(shapes)), shapes)
        axis = Axis(AXIS, len(shapes), tp)
        if self.pad is None:
            return Held(shape, (axis,))
        size = shape[self.pad.dim] if self.pad.dim < len(shape) else -1
        sizes = {self.pad.true_size, size if self.pad.size is None else self.pad.size}
        if size < self.pad.true_size or (self.pad.multiple is None and size not in sizes):
            raise PatternError(
                f"the rule of {fqn!r} says that dim {self.pad.dim} has {self.pad.true_size} indices without padding"
                f"{'' if self.pad.size is None else f' and {self.pad.size} with it'}, but the ranks hold"
                f" {list(shape)} together: local shapes {_words(shapes)}.",
                kind=Kind.SHAPE,
                fqn=fqn,
            )
        if size == self.pad.true_size:
            return Held(shape, (axis,))
        return Held(shape, (Axis("pad", 1, Pad(self.pad.dim, self.pad.true_size)), axis))

    def unite(self, fqn: str, children: Sequence[Geometry]) -> United:
        """Put together the local tensors of all ranks, in rank order.

        Raises
        ------
        PatternError
            The rule does not fit the shapes.
        """
        held = self.observed(fqn, [child.shape for child in children])
        *outer, ranks = held.axes
        geometry = ranks.pattern.join(held.shape, list(children))
        for axis in outer:
            geometry = axis.pattern.join(held.shape, [geometry])
        return United(geometry, held, self)

    def to_json(self) -> dict[str, Any]:
        """Normal form."""
        templates = [one.text for one in self.match if isinstance(one, Template)]
        regexes = [one.text for one in self.match if isinstance(one, PrefixRegex)]
        document: dict[str, Any] = {}
        if templates:
            document["match"] = templates
        if regexes:
            document["regex"] = regexes
        document["tp"] = self.tp.to_json()
        if self.pad is not None:
            pad = {"dim": self.pad.dim, "true_size": self.pad.true_size}
            more = {"multiple": self.pad.multiple, "size": self.pad.size}
            document["pad"] = {**pad, **{k: v for k, v in more.items() if v is not None}}
        if self.min_ndim:
            document["min_ndim"] = self.min_ndim
        if self.origin:
            document["origin"] = self.origin
        return document


def _on(tp: Pattern, degree: int) -> Pattern:
    """The pattern on ``degree`` ranks: widths of another number of ranks do not count."""
    if isinstance(tp, Shard) and tp.widths is not None and len(tp.widths) != degree:
        return replace(tp, widths=None)
    if isinstance(tp, ShardNC) and tp.widths is not None and len(tp.widths[0]) != degree:
        return replace(tp, widths=None)
    return tp


def _words(shapes: Sequence[_Shape | None]) -> str:
    return ", ".join("nothing" if shape is None else str(list(shape)) for shape in shapes)


def _observed(fqn: str, tp: Pattern, shapes: Sequence[_Shape]) -> tuple[Pattern, _Shape]:
    """The pattern with the widths that the ranks have, and the shape of the whole."""
    if isinstance(tp, Replicate | Partial):
        if len(set(shapes)) > 1:
            raise _unfit(fqn, tp, shapes, "replicated ones, of the same shape on every rank")
        return tp, shapes[0]
    if isinstance(tp, Explicit):
        if tuple(shapes) != tp.local:
            raise _unfit(fqn, tp, shapes, _words(tp.local))
        return tp, tp.shape
    if not isinstance(tp, Shard | ShardNC):
        raise PatternError(
            f"{fqn!r}: pattern {tp} is no way to lie on tensor-parallel ranks; expected replicate, partial, shard,"
            " shard_nc or explicit.",
            kind=Kind.UNSUPPORTED,
            fqn=fqn,
        )
    dim = tp.dim
    if any(len(shape) <= dim for shape in shapes):
        raise _unfit(fqn, tp, shapes, f"tensors that have dim {dim}")
    if len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
        raise _unfit(fqn, tp, shapes, f"shapes that differ in dim {dim} only")
    local = [shape[dim] for shape in shapes]
    whole = (*shapes[0][:dim], sum(local), *shapes[0][dim + 1 :])
    if isinstance(tp, Shard):
        return Shard(dim, tuple(local)), whole
    if tp.ratio is not None:
        widths = tuple(zip(*(_shares(fqn, tp, tp.ratio, width) for width in local), strict=True))
        return ShardNC(dim, tuple(map(sum, widths)), widths), whole
    expected = tp.split(whole, len(shapes))
    if expected != tuple(shapes):
        raise _unfit(fqn, tp, shapes, _words(expected))
    return tp, whole


def _shares(fqn: str, tp: ShardNC, ratio: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Sections of one rank's slice. Two equal ones of an odd width as `torch.chunk` cuts them."""
    if ratio == (1, 1):
        return ((width + 1) // 2, width // 2)
    unit, rest = divmod(width, sum(ratio))
    if rest:
        raise PatternError(
            f"{fqn!r} should be {tp}, but a rank's {width} indices cannot be cut in this ratio.",
            kind=Kind.SHAPE,
            fqn=fqn,
        )
    return tuple(unit * share for share in ratio)


def _unfit(fqn: str, tp: Pattern, shapes: Sequence[_Shape], expected: str) -> PatternError:
    return PatternError(
        f"the local tensors of {fqn!r} do not fit together as {tp} on {len(shapes)} tensor-parallel ranks: found local"
        f" shapes {_words(shapes)}, expected {expected}.",
        kind=Kind.SHAPE,
        fqn=fqn,
    )
