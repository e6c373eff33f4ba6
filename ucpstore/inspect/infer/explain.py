"""Why a parameter is taken to lie on the ranks as it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ucpstore.contracts import Source
from ucpstore.errors import ParameterNotFoundError, PatternError, close_names
from ucpstore.inspect.infer.decide import Decider, Verdict
from ucpstore.inspect.infer.known import alike
from ucpstore.inspect.infer.views import RankViews
from ucpstore.layout.patterns import Pattern
from ucpstore.layout.rules import Patterns, Rule

__all__ = ["Explanation", "ParameterExplanation", "explain_sources"]

VERSION = "1.0"
_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterExplanation:
    """How a parameter lies on the ranks, and why.

    Attributes
    ----------
    fqn : str
    pattern : Pattern or None
        Of the rule in force, else what was inferred; None where that is an open question.
    rule : Rule or None
        The rule in force, with the one name or template of it that is for the parameter.
    shapes : tuple of (tuple of int or None)
        Local shape on every rank.
    whole : tuple of int, optional
        Shape without padding of what the ranks hold together; None where it is not known.
    inferred : Verdict or None
        What shapes, contents and names say; None where one rank holds all.
    problem : str
        Why the rule does not fit, or how it contradicts what was inferred.
    """

    fqn: str
    pattern: Pattern | None
    rule: Rule | None
    shapes: tuple[_Shape | None, ...]
    whole: _Shape | None
    inferred: Verdict | None
    problem: str

    @property
    def origin(self) -> str:
        """Where the pattern comes from."""
        if self.rule is not None:
            return self.rule.origin or "rules"
        return "inferred" if self.pattern is not None else "none"

    @property
    def confidence(self) -> str:
        """``certain``, ``likely`` or ``ambiguous``: how sure the inference is of the pattern in force."""
        if self.inferred is None:
            return "certain"
        agreed = self.pattern is None or alike(self.pattern, self.inferred.pattern)
        return self.inferred.confidence if agreed else "ambiguous"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        found = self.inferred
        return {
            "fqn": self.fqn,
            "tp": None if self.pattern is None else self.pattern.to_json(),
            "rule": None if self.rule is None else self.rule.to_json(),
            "origin": self.origin,
            "shapes": [None if shape is None else list(shape) for shape in self.shapes],
            "whole": None if self.whole is None else list(self.whole),
            "confidence": self.confidence,
            "evidence": [] if found is None else list(found.evidence),
            "alternatives": [] if found is None else [one.to_json() for one in found.alternatives],
            "question": "" if found is None else found.question,
            "problem": self.problem,
        }

    def _held(self) -> str:
        sizes = [_size(shape) for shape in self.shapes]
        return f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else " ".join(sizes)

    def row(self) -> tuple[str, ...]:
        """As a line of a table: name, pattern, confidence, origin, local shapes, whole shape."""
        whole = "not known" if self.whole is None else _size(self.whole)
        pattern = str(self.pattern or "open")
        return self.fqn, pattern, self.confidence, self.origin, self._held(), whole

    def words(self) -> list[str]:
        """As lines of text."""
        lines = [
            self.fqn,
            f"  pattern     {self.pattern or 'open'} ({self.confidence})",
            f"  origin      {self.origin}" + (f": {self.rule.match[0]}" if self.rule else ""),
            f"  ranks hold  {self._held()}",
            f"  whole       {'not known' if self.whole is None else _size(self.whole)}",
        ]
        if self.inferred is not None:
            lines += [f"  evidence    {text}" for text in self.inferred.evidence]
            if self.inferred.question and self.rule is None:
                answers = " | ".join(map(str, self.inferred.alternatives)) or "none"
                lines += [f"  question    {self.inferred.question}", f"  answers     {answers}"]
        return lines + ([f"  problem     {self.problem}"] if self.problem else [])


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanations of parameters of one checkpoint.

    Attributes
    ----------
    url : str
    degree : int
        Tensor-parallel ranks.
    parameters : tuple of ParameterExplanation
    """

    url: str
    degree: int
    parameters: tuple[ParameterExplanation, ...]

    @property
    def ok(self) -> bool:
        """Whether every parameter has a pattern that fits."""
        return all(one.pattern is not None and not one.problem for one in self.parameters)

    def to_json(self) -> dict[str, Any]:
        """As JSON values (``schemas/explanation.schema.json``)."""
        return {
            "version": VERSION,
            "url": self.url,
            "tp": self.degree,
            "ok": self.ok,
            "parameters": [one.to_json() for one in self.parameters],
        }


def explain_sources(
    sources: Sequence[Source], names: Sequence[str] = (), *, known: Patterns | None = None
) -> Explanation:
    """Explain parameters, by default all. Contents are read, of the parameters that matter for these.

    Parameters
    ----------
    sources : sequence of Source
        One for every tensor-parallel rank, in rank order, with that rank's local tensors.
    names : sequence of str
    known : Patterns, optional
        Rules in force.

    Raises
    ------
    ParameterNotFoundError
        No rank holds a name.
    """
    views = RankViews(sources)
    for name in names:
        if name not in views.names:
            raise ParameterNotFoundError(
                f"{views.url} holds no parameter {name!r}.",
                hint=close_names(name, views.names),
                fqn=name,
            )
    chosen = [*names] or [*views.names]
    verdicts: dict[str, Verdict] = {}
    if views.degree > 1:
        for group, verdict in Decider(views).decide(chosen):
            verdicts.update(dict.fromkeys(group.members, verdict))
    rules = known or Patterns()
    return Explanation(
        views.url,
        views.degree,
        tuple(_explain(views, name, rules, verdicts.get(name)) for name in chosen),
    )


def _explain(
    views: RankViews, name: str, rules: Patterns, verdict: Verdict | None
) -> ParameterExplanation:
    shapes = views.shapes(name)
    rule = rules.find(name, views.ndim(name))
    if rule is not None:
        rule = replace(
            rule, match=tuple(one for one in rule.match if one.match(name) is not None)[:1]
        )
    pattern = rule.tp if rule is not None else None if verdict is None else verdict.pattern
    held = [shape for shape in shapes if shape is not None]
    whole, problem = None, ""
    if verdict is None and rule is None:
        whole = held[0]
    elif pattern is not None and len(held) == len(shapes):
        try:
            whole = _whole(rule or Rule((), pattern), name, held)
        except PatternError as error:
            problem = str(error)
    if rule is not None and verdict is not None and verdict.confidence == "certain" and not problem:
        agreed = alike(rule.tp, verdict.pattern)
        problem = "" if agreed else f"the rule says {rule.tp}, the evidence {verdict.pattern}"
    return ParameterExplanation(name, pattern, rule, shapes, whole, verdict, problem)


def _whole(rule: Rule, name: str, shapes: Sequence[_Shape]) -> _Shape:
    """Shape without padding."""
    shape = rule.observed(name, shapes).shape
    if rule.pad is None:
        return shape
    return (*shape[: rule.pad.dim], rule.pad.true_size, *shape[rule.pad.dim + 1 :])


def _size(shape: _Shape | None) -> str:
    return "-" if shape is None else "x".join(map(str, shape)) or "0-d"
