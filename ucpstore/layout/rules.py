"""Rules: how the parameters of a model lie on tensor-parallel ranks, whatever their number.

A `Rule` says it for all names that its templates match, `Patterns` is an ordered list of rules: the first that
matches counts. The same rule reads and writes: from the local tensors of the ranks follows the whole one
(`Patterns.unite`, UCP's Union and StripPad), from the whole one what each rank of any degree holds
(`Patterns.held`).

People write TOML, the normal form is JSON (``schemas/patterns.schema.json``).

Examples
--------
>>> patterns = Patterns.parse('''
... [[rule]]
... match = ["*.norm.weight", "*.down.bias"]
... tp = "replicate"
...
... [[rule]]
... match = "*.down.weight"
... tp = "shard(1)"
...
... [[rule]]
... match = "*.gate_up.*"
... tp = {pattern = "shard_nc", dim = 0, ratio = [1, 1]}
...
... [[rule]]
... match = "embed.weight"
... tp = "shard(0)"
... pad = {dim = 0, true_size = 50257, multiple = 128}
... ''')
>>> patterns.held("embed.weight", (50257, 8), 4).shape
(50688, 8)
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ucpstore.errors import Kind, PatternError, listing
from ucpstore.layout.geometry import Geometry
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
    pattern_from_json,
)

__all__ = ["Held", "Padding", "Patterns", "PrefixRegex", "Rule", "United"]

VERSION = "1.0"
AXIS = "tp"
_Shape = tuple[int, ...]


class PrefixRegex:
    """A regular expression that matches the beginning of a name, as DeepSpeed applies its own.

    What is allowed is at most cubic in the length of a name: the expression may come from an untrusted file,
    and a backtracking matcher has no time limit.

    Raises
    ------
    PatternError
        It is none, or could take very long to match.
    """

    _MAX_LENGTH = 1000
    _MAX_UNBOUNDED = 3
    _QUANTIFIED_GROUP = re.compile(r"(?<!\\)\)[*+?{]")
    _UNBOUNDED = re.compile(r"(?<!\\)[*+]|(?<!\\)\{\d*,\d*\}")

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise PatternError(f"found {text!r:.80}, expected a regular expression.")
        self.text = text
        self._literal = _literal(text)
        if self._literal is not None:
            return
        if (
            len(text) > self._MAX_LENGTH
            or self._QUANTIFIED_GROUP.search(text)
            or len(self._UNBOUNDED.findall(text)) > self._MAX_UNBOUNDED
        ):
            raise PatternError(
                f"{text[:200]!r} could take very long to match: expected at most {self._MAX_UNBOUNDED} unbounded"
                " repeats, none of them of a group.",
                kind=Kind.UNSUPPORTED,
            )
        try:
            self._regex = re.compile(text)
        except re.error as error:
            raise PatternError(f"{text!r} is no regular expression: {error}.") from error

    @property
    def literal(self) -> str | None:
        """The one name that it matches, where it is ``^escaped name$``."""
        return self._literal

    def match(self, name: str) -> dict[str, str] | None:
        """Empty if it matches, None if not."""
        if self._literal is not None:
            return {} if name == self._literal else None
        return None if self._regex.match(name) is None else {}

    def __str__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixRegex) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


def _literal(pattern: str) -> str | None:
    """The one name that ``^escaped name$`` matches; AutoTP writes a pattern per parameter."""
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    body = pattern[1:-1]
    name = re.sub(r"\\(.)", r"\1", body)
    return name if re.escape(name) == body else None


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
        `Shard` and `ShardNC` fit any number of ranks unless they give widths.
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
        tp = self.tp
        widths = getattr(tp, "widths", None)
        if widths is not None:
            known = len(widths if isinstance(tp, Shard) else widths[0])
            if known != degree:
                tp = replace(tp, widths=None)  # type: ignore[type-var]
        axes = [Axis(AXIS, degree, tp)]
        if self.pad is None:
            return Held(shape, tuple(axes))
        if self.pad.dim >= len(shape) or shape[self.pad.dim] != self.pad.true_size:
            raise PatternError(
                f"the rule of {fqn!r} pads dim {self.pad.dim} of {self.pad.true_size} indices, but the shape is"
                f" {list(shape)}.",
                kind=Kind.SHAPE,
                fqn=fqn,
            )
        size = self.pad.padded(fqn, degree)
        padded = (*shape[: self.pad.dim], size, *shape[self.pad.dim + 1 :])
        if size == self.pad.true_size:
            return Held(shape, tuple(axes))
        return Held(padded, (Axis("pad", 1, Pad(self.pad.dim, self.pad.true_size)), *axes))

    def observed(self, fqn: str, shapes: Sequence[_Shape]) -> Held:
        """What the ranks hold together, by the shapes of their local tensors, in rank order.

        Raises
        ------
        PatternError
            The rule does not fit the shapes.
        """
        tp, shape = _observed(fqn, self.tp, shapes)
        axes = [Axis(AXIS, len(shapes), tp)]
        if self.pad is None or self.pad.dim >= len(shape):
            return Held(shape, tuple(axes))
        size = shape[self.pad.dim]
        if size < self.pad.true_size:
            raise PatternError(
                f"the rule of {fqn!r} says that dim {self.pad.dim} has {self.pad.true_size} indices without padding,"
                f" but the ranks hold {size}: local shapes {_words(shapes)}.",
                kind=Kind.SHAPE,
                fqn=fqn,
            )
        if size > self.pad.true_size:
            axes.insert(0, Axis("pad", 1, Pad(self.pad.dim, self.pad.true_size)))
        return Held(shape, tuple(axes))

    def unite(self, fqn: str, children: Sequence[Geometry]) -> United:
        """Put together the local tensors of all ranks, in rank order.

        Raises
        ------
        PatternError
            The rule does not fit the shapes.
        """
        held = self.observed(fqn, [child.shape for child in children])
        geometry: Geometry | None = None
        for axis in reversed(held.axes):
            parts = children if geometry is None else [geometry]
            geometry = axis.pattern.join(held.shape, list(parts))
        assert geometry is not None  # noqa: S101 - there is always the axis of the ranks
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


def _words(shapes: Sequence[_Shape]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def _observed(fqn: str, tp: Pattern, shapes: Sequence[_Shape]) -> tuple[Pattern, _Shape]:
    """The pattern with the widths that the ranks have, and the shape of the whole."""
    if not isinstance(tp, Shard | ShardNC):
        if isinstance(tp, Replicate | Partial) and len(set(shapes)) > 1:
            raise _unfit(fqn, tp, shapes, "the same shape on every rank")
        whole = shapes[0] if isinstance(tp, Replicate | Partial) else _whole(fqn, tp, shapes)
        return tp, whole
    dim = tp.dim
    if any(len(shape) <= dim for shape in shapes):
        raise _unfit(fqn, tp, shapes, f"at least {dim + 1} dims")
    if len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
        raise _unfit(fqn, tp, shapes, f"shapes that differ in dim {dim} only")
    local = [shape[dim] for shape in shapes]
    whole = (*shapes[0][:dim], sum(local), *shapes[0][dim + 1 :])
    if isinstance(tp, Shard):
        return replace(tp, widths=tuple(local)), whole
    if tp.ratio is not None:
        widths = tuple(zip(*(_shares(fqn, tp, tp.ratio, width) for width in local), strict=True))
        sections = tuple(map(sum, widths))
        return ShardNC(dim, sections, widths), whole
    if tp.split(whole, len(shapes)) != tuple(shapes):
        raise _unfit(fqn, tp, shapes, f"{_words([s for s in tp.split(whole, len(shapes)) if s])}")
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


def _whole(fqn: str, tp: Pattern, shapes: Sequence[_Shape]) -> _Shape:
    """Shape of the whole tensor where the pattern itself knows it."""
    shape: Callable[[Sequence[_Shape]], _Shape] | None = getattr(tp, "whole", None)
    if shape is None:
        raise PatternError(
            f"{fqn!r}: pattern {tp} is no way to lie on tensor-parallel ranks; expected replicate, partial, shard or"
            " shard_nc.",
            kind=Kind.UNSUPPORTED,
            fqn=fqn,
        )
    return shape(shapes)


def _unfit(fqn: str, tp: Pattern, shapes: Sequence[_Shape], expected: str) -> PatternError:
    return PatternError(
        f"{fqn!r} should be {tp} on {len(shapes)} tensor-parallel ranks: found local shapes {_words(shapes)}, expected"
        f" {expected}.",
        kind=Kind.SHAPE,
        fqn=fqn,
    )


_SHORT = re.compile(r"(?P<name>[a-z_]+)(?:\((?P<dim>\d{1,3})\))?")


def _pattern(value: object, what: str) -> Pattern:
    """A pattern from its normal form, or from words such as ``shard(1)``."""
    if isinstance(value, str):
        short = _SHORT.fullmatch(value)
        if short is None:
            raise PatternError(
                f"{what}: tp is {value!r}, expected such as 'replicate' or 'shard(0)', or a table.",
                kind=Kind.MALFORMED,
            )
        value = {"pattern": short["name"], **({"dim": int(short["dim"])} if short["dim"] else {})}
    if not isinstance(value, Mapping):
        raise PatternError(f"{what}: tp is {value!r:.80}, expected a pattern.", kind=Kind.MALFORMED)
    return pattern_from_json(value)


def _rule(document: object, what: str) -> Rule:
    if not isinstance(document, Mapping):
        raise PatternError(f"{what} is {document!r:.80}, expected a table.", kind=Kind.MALFORMED)
    unknown = document.keys() - {"match", "regex", "tp", "pad", "min_ndim", "origin"}
    if unknown:
        raise PatternError(f"{what}: unknown {listing(sorted(unknown))}.", kind=Kind.MALFORMED)
    match = [Template(text) for text in _texts(document.get("match", ()), what)]
    regexes = [PrefixRegex(text) for text in _texts(document.get("regex", ()), what)]
    if not match and not regexes:
        raise PatternError(f"{what} matches no name: expected match = ...", kind=Kind.MALFORMED)
    pad = document.get("pad")
    if pad is not None:
        numbers = pad.values() if isinstance(pad, Mapping) else ()
        if not numbers or any(type(number) is not int or number < 0 for number in numbers):
            raise PatternError(f"{what}: pad is {pad!r:.80}, expected sizes.", kind=Kind.MALFORMED)
        try:
            pad = Padding(**pad)
        except TypeError as error:
            raise PatternError(f"{what}: pad: {error}.", kind=Kind.MALFORMED) from error
    ndim, origin = document.get("min_ndim", 0), document.get("origin", "")
    if type(ndim) is not int or not isinstance(origin, str):
        raise PatternError(
            f"{what}: min_ndim is {ndim!r:.80}, origin {origin!r:.80}; expected a number and a text.",
            kind=Kind.MALFORMED,
        )
    return Rule((*match, *regexes), _pattern(document.get("tp"), what), pad, ndim, origin)


def _texts(value: object, what: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise PatternError(f"{what} matches {value!r:.80}, expected names.", kind=Kind.MALFORMED)
    return list(texts)


@dataclass(frozen=True)
class Patterns:
    """An ordered list of rules: the first that matches counts.

    Attributes
    ----------
    rules : tuple of Rule
    """

    rules: tuple[Rule, ...] = ()
    _exact: dict[str, list[int]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _general: list[int] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        for index, rule in enumerate(self.rules):
            for one in rule.match:
                name = one.literal if isinstance(one, PrefixRegex) else None
                if isinstance(one, Template) and one.is_literal:
                    name = one.text
                if name is not None:
                    self._exact.setdefault(name, []).append(index)
                elif not self._general or self._general[-1] != index:
                    self._general.append(index)

    def __bool__(self) -> bool:
        return bool(self.rules)

    def __add__(self, other: Patterns) -> Patterns:
        """These rules, and where none of them matches, the others."""
        return Patterns(self.rules + other.rules)

    def find(self, fqn: str, ndim: int) -> Rule | None:
        """The rule of a parameter."""
        indices = sorted([*self._exact.get(fqn, ()), *self._general])
        candidates = (self.rules[index] for index in indices)
        return next((rule for rule in candidates if rule.matches(fqn, ndim)), None)

    def rule(self, fqn: str, shape: _Shape) -> Rule:
        """The rule of a parameter.

        Raises
        ------
        PatternError
            There is none (``UNMATCHED``).
        """
        found = self.find(fqn, len(shape))
        if found is None:
            raise PatternError(
                f"no rule says how {fqn!r} of shape {list(shape)} lies on tensor-parallel ranks.",
                kind=Kind.UNMATCHED,
                hint='Give one, such as: [[rule]] match = "..." tp = "replicate" (or "shard(0)", "shard(1)").',
                fqn=fqn,
            )
        return found

    def held(self, fqn: str, shape: _Shape, degree: int) -> Held:
        """What ``degree`` ranks hold together of a parameter of ``shape``; see `Rule.held`.

        On one rank without padding no rule is needed.

        Raises
        ------
        PatternError
            There is no rule, or it does not fit.
        """
        found = self.find(fqn, len(shape))
        if degree == 1 and (found is None or found.pad is None):
            return Held(shape, (Axis(AXIS, 1, Replicate()),))
        return self.rule(fqn, shape).held(fqn, shape, degree)

    def unite(self, fqn: str, children: Sequence[Geometry]) -> United:
        """Put a parameter together from the local tensors of all ranks; see `Rule.unite`."""
        return self.rule(fqn, children[0].shape).unite(fqn, children)

    def unused(self, names: Iterable[tuple[str, int]]) -> list[Rule]:
        """Rules that are for none of the parameters (name, number of dims)."""
        used = {id(self.find(fqn, ndim)) for fqn, ndim in names}
        return [rule for rule in self.rules if id(rule) not in used]

    def to_json(self) -> dict[str, Any]:
        """Normal form: see ``schemas/patterns.schema.json``."""
        return {"version": VERSION, "rules": [rule.to_json() for rule in self.rules]}

    @classmethod
    def from_json(cls, document: object) -> Patterns:
        """The rules of a normal form.

        Raises
        ------
        PatternError
            The document is none.
        """
        if not isinstance(document, Mapping) or document.get("version", VERSION) != VERSION:
            raise PatternError(
                f"patterns: found {document!r:.80}, expected a document of version {VERSION}.",
                kind=Kind.MALFORMED,
            )
        rules = document.get("rules", ())
        if not isinstance(rules, list | tuple):
            raise PatternError(
                f"patterns: rules are {rules!r:.80}, expected a list.", kind=Kind.MALFORMED
            )
        return cls(
            tuple(_rule(rule, f"rule {number}") for number, rule in enumerate(rules, start=1))
        )

    @classmethod
    def parse(cls, text: str) -> Patterns:
        """The rules of a TOML document: ``[[rule]]`` tables with the normal form's keys.

        Raises
        ------
        PatternError
            The text is none.
        """
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PatternError(f"patterns: no TOML: {error}.", kind=Kind.MALFORMED) from error
        rules = document.get("rule", [])
        version = document.get("version", VERSION)
        return cls.from_json({"version": version, "rules": rules})

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Patterns:
        """The rules of a file: TOML, or JSON where its name ends in ``.json``.

        Raises
        ------
        PatternError
            The file cannot be read or is none.
        """
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise PatternError(f"patterns {os.fspath(path)!r}: {error}.") from error
        if not os.fspath(path).endswith(".json"):
            return cls.parse(text)
        try:
            return cls.from_json(json.loads(text))
        except json.JSONDecodeError as error:
            raise PatternError(
                f"patterns {os.fspath(path)!r}: no JSON: {error}.", kind=Kind.MALFORMED
            ) from error
