"""Templates of fully qualified names: one small language for rules, selections and renames.

============= =====================================================================
``text``      itself; a dot is a dot
``*``         one or more characters of one segment (no dot)
``**``        one or more characters, dots included
``{n}``       a whole number, called ``n``: layer and expert numbers
``{name*}``   like ``*``, called ``name``
``{name**}``  like ``**``, called ``name``
============= =====================================================================

A template matches a whole name. What it captured can be put into another template, numbers with an offset:
``{n-3}``. A template without unnamed wildcards can be turned around.

Examples
--------
>>> template = Template("{n}.mlp.{rest**}")
>>> template.match("3.mlp.dense.weight")
{'n': '3', 'rest': 'dense.weight'}
>>> Template("layers.{n-3}.mlp.{rest}").fill(template.match("3.mlp.dense.weight"))
'layers.0.mlp.dense.weight'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from ucpstore.errors import Kind, PatternError

__all__ = ["Template"]

_TOKEN = re.compile(
    r"(?P<wild>\*{1,2})"
    r"|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<kind>\*{0,2})(?P<offset>[+-]\d{1,9})?\}"
)
_REGEXES = {"": r"\d{1,9}", "*": r"[^.]+", "**": r".+"}
_MAX_FREE = 3
"""Wildcards over several segments: matching is at most cubic in the length of a name, whoever wrote it."""
_MAX_LENGTH = 1000


class _Hole(NamedTuple):
    """A variable or an unnamed wildcard (no name)."""

    name: str
    kind: str
    offset: int


class Template:
    """A template, parsed.

    Raises
    ------
    PatternError
        The text is not a template (``MALFORMED``).
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not 0 < len(text) <= _MAX_LENGTH:
            raise PatternError(
                f"template of names {text!r:.80}: expected 1 to {_MAX_LENGTH} characters.",
                kind=Kind.MALFORMED,
            )
        self.text = text
        self._parts: list[str | _Hole] = []
        end = 0
        for token in _TOKEN.finditer(text):
            self._literal(text[end : token.start()])
            name, kind = token["name"] or "", token["kind"] or token["wild"] or ""
            self._parts.append(_Hole(name, kind, int(token["offset"] or 0)))
            end = token.end()
        self._literal(text[end:])
        holes = self.holes
        if sum(hole.kind == "**" for hole in holes) > _MAX_FREE:
            raise PatternError(
                f"template of names {text!r}: found more than {_MAX_FREE} wildcards over several segments.",
                kind=Kind.UNSUPPORTED,
            )
        names = [hole.name for hole in holes if hole.name]
        if len(set(names)) < len(names):
            raise PatternError(
                f"template of names {text!r}: a variable occurs twice, expected every one once.",
                kind=Kind.MALFORMED,
            )

    def _literal(self, text: str) -> None:
        if "{" in text or "}" in text:
            raise PatternError(
                f"template of names {self.text!r}: found a brace in {text!r} that is no variable, expected such as"
                " {n}, {name*} or {name**}.",
                kind=Kind.MALFORMED,
            )
        if text:
            self._parts.append(text)

    @property
    def holes(self) -> list[_Hole]:
        """Variables and wildcards, in order."""
        return [part for part in self._parts if isinstance(part, _Hole)]

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables."""
        return frozenset(hole.name for hole in self.holes if hole.name)

    @property
    def is_literal(self) -> bool:
        """Whether it matches one name only."""
        return not self.holes

    @property
    def is_invertible(self) -> bool:
        """Whether `fill` can make every name that matches: there are no unnamed wildcards."""
        return all(hole.name for hole in self.holes)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        pieces = [
            re.escape(part)
            if isinstance(part, str)
            else f"(?P<{part.name}>{_REGEXES[part.kind]})"
            if part.name
            else _REGEXES[part.kind]
            for part in self._parts
        ]
        return re.compile("".join(pieces), re.DOTALL | re.ASCII)

    def match(self, name: str) -> dict[str, str] | None:
        """Values of the variables if the template matches the whole of ``name``.

        An offset counts: ``{n+1}`` matches ``4`` with ``n`` = 3.
        """
        if self.is_literal:
            return {} if name == self.text else None
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        values = found.groupdict()
        for hole in self.holes:
            if hole.name and hole.kind == "":
                number = int(values[hole.name]) - hole.offset
                if number < 0 or str(int(values[hole.name])) != values[hole.name]:
                    return None  # no layer is called 007, and none is negative
                values[hole.name] = str(number)
        return values

    def fill(self, values: Mapping[str, str]) -> str:
        """The name that the template makes of the values of its variables.

        Raises
        ------
        PatternError
            A value is missing, there is an unnamed wildcard, or a number falls below zero.
        """
        pieces = []
        for part in self._parts:
            if isinstance(part, str):
                pieces.append(part)
                continue
            value = values.get(part.name) if part.name else None
            if value is None:
                what = f"variable {part.name!r}" if part.name else "an unnamed wildcard"
                raise PatternError(
                    f"template of names {self.text!r} has {what}, which has no value: found"
                    f" {', '.join(sorted(values)) or 'none'}.",
                    kind=Kind.MALFORMED,
                )
            if part.offset:
                number = int(value) + part.offset if value.isdecimal() else -1
                if number < 0:
                    raise PatternError(
                        f"template of names {self.text!r}: {part.name} is {value!r}, with the offset"
                        f" {part.offset:+d} expected a number from 0.",
                        kind=Kind.MALFORMED,
                    )
                value = str(number)
            pieces.append(value)
        return "".join(pieces)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Template({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Template) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)
