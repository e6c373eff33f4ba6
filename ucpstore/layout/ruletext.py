"""Rules from documents: the normal form, and what people write in TOML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ucpstore.errors import Kind, PatternError, listing
from ucpstore.layout.matching import PrefixRegex
from ucpstore.layout.names import Template
from ucpstore.layout.patterns import Pattern, pattern_from_json
from ucpstore.layout.rule import Padding, Rule

__all__ = ["rule_from_json"]

_SHORT = re.compile(r"(?P<name>[a-z_]+)(?:\((?P<argument>\d{1,3}|first|equal)\))?")


def rule_from_json(document: object, what: str) -> Rule:
    """The rule of a normal form, or of a table that people write.

    Raises
    ------
    PatternError
        The document is none; ``what`` names it.
    """
    if not isinstance(document, Mapping):
        raise PatternError(f"{what} is {document!r:.80}, expected a table.", kind=Kind.MALFORMED)
    unknown = document.keys() - {"match", "regex", "tp", "pad", "min_ndim", "origin"}
    if unknown:
        raise PatternError(
            f"{what}: unknown {listing(sorted(map(str, unknown)))}.", kind=Kind.MALFORMED
        )
    match = [Template(text) for text in _texts(document.get("match", ()), what)]
    regexes = [PrefixRegex(text) for text in _texts(document.get("regex", ()), what)]
    if not match and not regexes:
        raise PatternError(f"{what} matches no name: expected match = ...", kind=Kind.MALFORMED)
    ndim, origin = document.get("min_ndim", 0), document.get("origin", "")
    if type(ndim) is not int or not isinstance(origin, str):
        raise PatternError(
            f"{what}: min_ndim is {ndim!r:.80}, origin {origin!r:.80}; expected a number and a text.",
            kind=Kind.MALFORMED,
        )
    tp, pad = _pattern(document.get("tp"), what), _padding(document.get("pad"), what)
    return Rule((*match, *regexes), tp, pad, ndim, origin)


def _pattern(value: object, what: str) -> Pattern:
    """A pattern from its normal form, or from words such as ``shard(1)`` and ``replicate(first)``."""
    if isinstance(value, str):
        short = _SHORT.fullmatch(value)
        if short is None:
            raise PatternError(
                f"{what}: tp is {value!r:.80}, expected such as 'replicate' or 'shard(0)', or a table.",
                kind=Kind.MALFORMED,
            )
        argument = short["argument"]
        fields: dict[str, Any] = {}
        if argument is not None:
            fields = {"dim": int(argument)} if argument.isdecimal() else {"rule": argument}
        value = {"pattern": short["name"], **fields}
    if not isinstance(value, Mapping):
        raise PatternError(f"{what}: tp is {value!r:.80}, expected a pattern.", kind=Kind.MALFORMED)
    return pattern_from_json(value)


def _padding(value: object, what: str) -> Padding | None:
    if value is None:
        return None
    numbers = value.values() if isinstance(value, Mapping) else ()
    if not isinstance(value, Mapping) or any(type(number) is not int for number in numbers):
        raise PatternError(f"{what}: pad is {value!r:.80}, expected sizes.", kind=Kind.MALFORMED)
    try:
        return Padding(**value)
    except TypeError as error:
        raise PatternError(f"{what}: pad: {error}.", kind=Kind.MALFORMED) from error


def _texts(value: object, what: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise PatternError(f"{what} matches {value!r:.80}, expected names.", kind=Kind.MALFORMED)
    return list(texts)
