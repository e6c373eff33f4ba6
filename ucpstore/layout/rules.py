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
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ucpstore.errors import Kind, PatternError, listing
from ucpstore.layout.geometry import Geometry
from ucpstore.layout.matching import Matcher, PrefixRegex, exact_name, exactly, numbered
from ucpstore.layout.names import Template
from ucpstore.layout.patterns import Axis, Replicate
from ucpstore.layout.presets import ORIGIN, preset_document, preset_names
from ucpstore.layout.rule import AXIS, Held, Padding, Rule, United
from ucpstore.layout.ruletext import rule_from_json

__all__ = ["Held", "Padding", "Patterns", "PrefixRegex", "Rule", "United"]

VERSION = "1.0"
_Shape = tuple[int, ...]


@dataclass(frozen=True)
class Patterns:
    """An ordered list of rules: the first that matches counts.

    Attributes
    ----------
    rules : tuple of Rule
    """

    rules: tuple[Rule, ...] = ()
    _exact: dict[str, list[tuple[int, Matcher]]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _general: list[tuple[int, Matcher]] = field(
        init=False, repr=False, compare=False, default_factory=list
    )

    def __post_init__(self) -> None:
        for index, rule in enumerate(self.rules):
            for one in rule.match:
                name = exact_name(one)
                if name is None:
                    self._general.append((index, one))
                else:
                    self._exact.setdefault(name, []).append((index, one))

    def __bool__(self) -> bool:
        return bool(self.rules)

    def __add__(self, other: Patterns) -> Patterns:
        """These rules, and where none of them matches, the others."""
        return Patterns(self.rules + other.rules)

    def matching(self, fqn: str) -> list[tuple[Rule, Matcher]]:
        """Everything that matches a name, in order of the rules; exact names cost no scan."""
        found = [(index, one) for index, one in self._general if one.match(fqn) is not None]
        found = sorted([*self._exact.get(fqn, ()), *found], key=lambda entry: entry[0])
        return [(self.rules[index], one) for index, one in found]

    def find(self, fqn: str, ndim: int) -> Rule | None:
        """The rule of a parameter."""
        return next((rule for rule, _ in self.matching(fqn) if ndim >= rule.min_ndim), None)

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

        On one rank no rule is needed.

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

    def unused(self, names: Mapping[str, int]) -> list[Rule]:
        """Rules that are for none of the parameters (name -> number of dims)."""
        used = {id(self.find(fqn, ndim)) for fqn, ndim in names.items()}
        return [rule for rule in self.rules if id(rule) not in used]

    def warnings(self, names: Mapping[str, int]) -> list[str]:
        """Rules of a user's that are for none of the parameters; a preset must be for some of them only."""
        unused = self.unused(names)
        origins = {rule.origin for rule in self.rules if rule not in unused}
        return [
            f"the rule for {listing([str(one) for one in rule.match], cap=3)} ({rule.tp}) is for no parameter of the"
            " checkpoint."
            for rule in unused
            if not (rule.origin.startswith(ORIGIN) and rule.origin in origins)
        ]

    def compact(self, names: Mapping[str, int]) -> Patterns:
        """The same rules for the parameters (name -> number of dims), exact names by layer number.

        ``layers.0.norm.weight``, ``layers.1.norm.weight``, ... become ``layers.{n}.norm.weight`` where all
        parameters of such a name follow one rule. AutoTP lists every parameter of a model.
        """
        owners: dict[Template, set[int]] = {}
        for fqn, ndim in names.items():
            template, rule = numbered(fqn), self.find(fqn, ndim)
            if template is not None:
                owners.setdefault(template, set()).add(id(rule))
        return Patterns(tuple(_compact(rule, owners, names) for rule in self.rules))

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
        _require_known(document, ("version", "rules"))
        rules = document.get("rules", ())
        if not isinstance(rules, list | tuple):
            raise PatternError(
                f"patterns: rules are {rules!r:.80}, expected a list.", kind=Kind.MALFORMED
            )
        return cls(
            tuple(
                rule_from_json(rule, f"rule {number}") for number, rule in enumerate(rules, start=1)
            )
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
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise PatternError(f"patterns: no TOML: {error}.", kind=Kind.MALFORMED) from error
        _require_known(document, ("version", "rule"))
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
        except (ValueError, RecursionError) as error:
            raise PatternError(
                f"patterns {os.fspath(path)!r}: no JSON: {error}.", kind=Kind.MALFORMED
            ) from error

    @classmethod
    def preset(cls, name: str) -> Patterns:
        """Rules that come with the package, for a family of models; see `ucpstore.layout.presets`.

        Parameters
        ----------
        name : str
            One of `presets`, with the values of its variables: ``hf-phi3,group=4``.

        Raises
        ------
        PatternError
            There is none of this name, or a variable lacks a value.
        """
        return cls.from_json(preset_document(name))

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names of all presets."""
        return preset_names()

    @classmethod
    def of(cls, value: Patterns | str | os.PathLike[str] | None) -> Patterns:
        """Rules that a user gave: `Patterns`, a file (`read`) or the name of a preset; none for None.

        Raises
        ------
        PatternError
            The file cannot be read, or there is no such preset.
        """
        if value is None or isinstance(value, Patterns):
            return value or cls()
        if not isinstance(value, str | os.PathLike):
            raise PatternError(
                f"patterns are {type(value).__name__}, expected Patterns, a file or the name of a preset."
            )
        text = os.fspath(value)
        if isinstance(value, str) and "." not in text and os.sep not in text:
            return cls.preset(text)
        return cls.read(text)


def _require_known(document: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Rules under a misspelt key would count for nothing."""
    unknown = [key for key in document if key not in keys]
    if unknown:
        raise PatternError(
            f"patterns: found {listing([f'{key!r:.40}' for key in unknown], cap=3)}, expected {' and '.join(keys)}.",
            kind=Kind.MALFORMED,
        )


def _compact(rule: Rule, owners: Mapping[Template, set[int]], names: Mapping[str, int]) -> Rule:
    found: dict[Matcher, None] = {}
    for one in rule.match:
        name = exact_name(one)
        if name is not None:
            template = numbered(name) if name in names else None
            one = exactly(name) if template is None or owners[template] != {id(rule)} else template
        found[one] = None
    return replace(rule, match=tuple(found))
