"""Presets: rules for families of models that come with the package, as TOML files in ``ucpstore/presets``.

A preset may have variables, numbers that the names of a model do not tell: ``hf-phi3,group=4``. In the file they
are tables ``required``, ``default`` (with values) and ``optional`` (padding that mentions one that is not given
is left out); a rule refers to them as ``"$name"``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from ucpstore.errors import Kind, PatternError, close_names

__all__ = ["ORIGIN", "preset_document", "preset_names"]

ORIGIN = "preset "
"""What the origin of a preset's rules begins with."""
_FOLDER = "presets"
_VARIABLE = re.compile(r"(?P<name>[a-z_]+)=(?P<value>\d{1,12})")


@cache
def preset_names() -> tuple[str, ...]:
    """Names of all presets."""
    names = (entry.name for entry in (resources.files("ucpstore") / _FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def preset_document(text: str) -> dict[str, Any]:
    """Normal form of a preset's rules.

    Parameters
    ----------
    text : str
        Its name, then the values of variables: ``megatron-gpt,vocab=50257``.

    Raises
    ------
    PatternError
        There is no such preset or variable, or a variable needs a value.
    """
    name, *parts = text.split(",")
    if name not in preset_names():
        raise PatternError(
            f"no preset of patterns is called {name!r}: there are {', '.join(preset_names())}.",
            kind=Kind.NOT_FOUND,
            hint=close_names(name, preset_names())
            or "The path of a file contains a dot or a slash.",
        )
    file = resources.files("ucpstore") / _FOLDER / f"{name}.toml"
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    values = _values(name, content, parts)
    rules = [_filled(rule, values) for rule in content["rule"]]
    return {"rules": [{**rule, "origin": f"{ORIGIN}{text}"} for rule in rules]}


def _values(name: str, content: Mapping[str, Any], parts: list[str]) -> dict[str, int]:
    required, optional = content.get("required", {}), content.get("optional", {})
    values = dict(content.get("default", {}))
    known = {**required, **values, **optional}
    for part in parts:
        variable = _VARIABLE.fullmatch(part.strip())
        if variable is None or variable["name"] not in known:
            raise PatternError(
                f"preset {name} with {part.strip()!r:.80}: expected {_words(known)}.",
                kind=Kind.MALFORMED,
            )
        values[variable["name"]] = int(variable["value"])
    lacking = [variable for variable in required if variable not in values]
    if lacking:
        raise PatternError(
            f"preset {name} needs {lacking[0]}= ({required[lacking[0]]}).",
            kind=Kind.MISSING_KEY,
            hint=f"Give it as {name},{lacking[0]}=1 and alike.",
        )
    return values


def _words(known: Mapping[str, Any]) -> str:
    return " or ".join(f"{variable}=NUMBER" for variable in known) or "no variables"


def _filled(rule: Mapping[str, Any], values: Mapping[str, int]) -> dict[str, Any]:
    filled = {key: _fill(value, values) for key, value in rule.items() if key != "pad"}
    pad = rule.get("pad", {})
    if pad and all(str(value).lstrip("$") in values for value in pad.values() if _is_one(value)):
        filled["pad"] = _fill(pad, values)
    return filled


def _is_one(value: object) -> bool:
    return isinstance(value, str) and value.startswith("$")


def _fill(value: Any, values: Mapping[str, int]) -> Any:
    if isinstance(value, dict):
        return {key: _fill(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, values) for item in value]
    return values[value[1:]] if _is_one(value) else value
