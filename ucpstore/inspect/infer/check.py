"""Trying rules on a checkpoint: everything that does not fit is found and named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ucpstore.contracts import Source
from ucpstore.errors import PatternError, listing
from ucpstore.inspect.infer.views import Difference, RankViews
from ucpstore.inspect.stream import in_parallel
from ucpstore.layout.patterns import Replicate
from ucpstore.layout.rules import Patterns, Rule
from ucpstore.text import printable

__all__ = ["CheckFinding", "PatternCheck", "check_sources", "is_default", "rule_words"]

VERSION = "1.0"
Problem = Literal["unmatched", "unused", "shadowed", "missing", "shape", "replicas_differ"]


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """Something that does not fit.

    Attributes
    ----------
    kind : str
        ``unmatched``: no rule is for the parameter. ``unused``: the rule matches nothing. ``shadowed``: earlier
        rules take all that it matches. ``missing``: some ranks lack the parameter. ``shape``: the local shapes do
        not fit the rule. ``replicas_differ``: the copies are not the same bits.
    subject : str
        The parameter, or the names of the rule.
    message : str
    """

    kind: Problem
    subject: str
    message: str


@dataclass(frozen=True, slots=True)
class PatternCheck:
    """Rules that were tried on a checkpoint.

    Attributes
    ----------
    url : str
    degree : int
        Tensor-parallel ranks.
    rules, parameters, replicas : int
        What was looked at; ``replicas`` are the parameters whose copies were compared, all their states.
    findings : tuple of CheckFinding
    """

    url: str
    degree: int
    rules: int
    parameters: int
    replicas: int
    findings: tuple[CheckFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether everything fits."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """As JSON values (``schemas/patterncheck.schema.json``)."""
        return {
            "version": VERSION,
            "url": self.url,
            "tp": self.degree,
            "rules": self.rules,
            "parameters": self.parameters,
            "replicas": self.replicas,
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def summary(self) -> str:
        """As text: the findings, then one line."""
        lines = [
            f"{found.kind:<16} {printable(found.subject)}: {printable(found.message)}"
            for found in self.findings
        ]
        verdict = "nothing wrong" if self.ok else f"{len(self.findings)} findings"
        lines.append(
            f"{self.url}: tried {self.rules} rules on {self.parameters} parameters of {self.degree} tensor-parallel"
            f" ranks, compared the copies of {self.replicas}: {verdict}"
        )
        return "\n".join(lines)


def rule_words(rule: Rule) -> str:
    """The names of a rule, for people."""
    return listing(one.text for one in rule.match)


def check_sources(sources: Sequence[Source], patterns: Patterns) -> PatternCheck:
    """Try ``patterns`` on a checkpoint; copies that should be the same are read to the end.

    Parameters
    ----------
    sources : sequence of Source
        One for every tensor-parallel rank, in rank order, with that rank's local tensors.
    patterns : Patterns
    """
    views = RankViews(sources)
    ndims = [(name, views.ndim(name)) for name in views.names]
    findings = list(_idle(patterns, ndims))
    copies = []
    for name, ndim in ndims:
        rule = patterns.find(name, ndim)
        problem = _problem(views, name, rule)
        if problem is not None:
            findings.append(problem)
        elif rule is not None and views.degree > 1 and rule.tp == Replicate():
            copies.append(name)
    for name, found in zip(copies, in_parallel(views.differences, copies), strict=True):
        findings += [_differ(name, one) for one in found]
    return PatternCheck(
        views.url, views.degree, len(patterns.rules), len(ndims), len(copies), tuple(findings)
    )


def _idle(patterns: Patterns, names: Sequence[tuple[str, int]]) -> Iterable[CheckFinding]:
    """Rules that decide nothing."""
    used = {id(patterns.find(name, ndim)) for name, ndim in names}
    presets = {rule.origin for rule in patterns.rules if id(rule) in used and _of_preset(rule)}
    for idle in patterns.rules:
        # A preset is for several models, and a default need not be needed.
        if id(idle) in used or idle.origin in presets or is_default(idle):
            continue
        taken = [(name, ndim) for name, ndim in names if idle.matches(name, ndim)]
        if not taken:
            said = f"the rule ({idle.tp}) matches no parameter of the checkpoint."
            yield CheckFinding("unused", rule_words(idle), said)
            continue
        name, ndim = taken[0]
        first = patterns.find(name, ndim)
        by = "" if first is None else f", {name!r} by {rule_words(first)} ({first.tp})"
        said = f"the rule ({idle.tp}) decides nothing: earlier rules take all {len(taken)} names that it matches{by}."
        yield CheckFinding("shadowed", rule_words(idle), said)


def _of_preset(rule: Rule) -> bool:
    return rule.origin.startswith("preset ")


def is_default(rule: Rule) -> bool:
    """Whether the rule is for all that no other rule is for, as that of DeepSpeed's converter."""
    return any(one.text == "**" for one in rule.match)


def _problem(views: RankViews, name: str, rule: Rule | None) -> CheckFinding | None:
    shapes = views.shapes(name)
    lacking = [str(rank) for rank, shape in enumerate(shapes) if shape is None]
    if lacking:
        said = (
            f"tensor-parallel ranks {listing(lacking)} do not hold it, expected all {len(shapes)}."
        )
        return CheckFinding("missing", name, said)
    held = [shape for shape in shapes if shape is not None]
    if rule is None:
        if views.degree == 1:
            return None  # nothing is cut
        said = f"no rule is for it; local shapes {', '.join(str(list(shape)) for shape in held)}."
        return CheckFinding("unmatched", name, said)
    try:
        rule.observed(name, held)
    except PatternError as error:
        return CheckFinding("shape", name, str(error))
    return None


def _differ(name: str, found: Difference) -> CheckFinding:
    size = "" if found.max_abs is None else f", max |difference| {found.max_abs:.3g}"
    said = (
        f"{found.state} of ranks 0 and {found.rank} should be the same, but {found.changed} of"
        f" {found.elements} elements differ, first at {found.first}{size}."
    )
    return CheckFinding("replicas_differ", name, said)
