"""Presets: mapping documents that come with the package, with parameters such as numbers of heads.

A preset is TOML with a table ``[preset]`` (``about``, and ``parameters``: name to its meaning; those of
``defaults`` may be left out). In its strings ``${layers+2}`` stands for a number; a string that is nothing
else becomes one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from ucpstore.errors import Kind, PatternError, close_names

__all__ = ["descriptions", "load", "parse_toml"]

_PLACE = re.compile(r"\$\{([a-z_0-9+-]+)\}")
_TERM = re.compile(r"([+-]?)([a-z_][a-z_0-9]*|\d+)")


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Parse TOML.

    Raises
    ------
    PatternError
        It is none (``MALFORMED``).
    """
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PatternError(f"{name} is no TOML: {error}.", kind=Kind.MALFORMED) from error


def _documents() -> dict[str, str]:
    folder = files("ucpstore.mapping") / "documents"
    found = sorted(folder.iterdir(), key=lambda path: path.name)
    return {
        path.name.removesuffix(".toml"): path.read_text(encoding="utf-8")
        for path in found
        if path.name.endswith(".toml")
    }


def descriptions() -> dict[str, str]:
    """Names of the presets, and what each is for, with its parameters."""
    found = {}
    for name, text in _documents().items():
        head = parse_toml(text, name)["preset"]
        defaults = head.get("defaults", {})
        words = [
            f"{key} ({meaning}{f'; {defaults[key]} by default' if key in defaults else ''})"
            for key, meaning in head.get("parameters", {}).items()
        ]
        found[name] = head["about"] + (f" Parameters: {', '.join(words)}." if words else "")
    return found


def load(name: str, parameters: Mapping[str, int]) -> dict[str, Any]:
    """The document of a preset, with its parameters put in.

    Raises
    ------
    PatternError
        There is no such preset (``NOT_FOUND``), or parameters are missing or unknown.
    """
    known = _documents()
    if name not in known:
        raise PatternError(
            f"no preset {name!r}: there are {', '.join(known)}.",
            hint=close_names(name, list(known)),
            kind=Kind.NOT_FOUND,
        )
    document = parse_toml(known[name], name)
    head = document.pop("preset")
    wanted: dict[str, str] = head.get("parameters", {})
    values = {**head.get("defaults", {}), **parameters}
    wrong = [key for key, value in values.items() if type(value) is not int or value < 0]
    missing = [key for key in wanted if key not in values]
    unknown = [key for key in values if key not in wanted]
    if missing or unknown or wrong:
        parts = [
            f"{what} {', '.join(keys)}"
            for what, keys in (
                ("missing", missing),
                ("unknown", unknown),
                ("no whole number from 0:", wrong),
            )
            if keys
        ]
        raise PatternError(
            f"preset {name}: parameters {'; '.join(parts)}. Expected:"
            f" {', '.join(f'{key} ({meaning})' for key, meaning in wanted.items()) or 'none'}.",
            kind=Kind.MALFORMED,
        )
    found: dict[str, Any] = _filled(document, values)
    return found


def _filled(value: Any, values: Mapping[str, int]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, values) for item in value]
    if not isinstance(value, str):
        return value
    if whole := _PLACE.fullmatch(value):
        return _number(whole[1], values)
    return _PLACE.sub(lambda place: str(_number(place[1], values)), value)


def _number(text: str, values: Mapping[str, int]) -> int:
    """``first+layers+1``."""
    return sum(
        (-1 if sign == "-" else 1) * (int(term) if term.isdigit() else values[term])
        for sign, term in _TERM.findall(text)
    )
