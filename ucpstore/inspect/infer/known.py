"""Presets as evidence: a family of models whose rules are for every parameter and contradict nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ucpstore.errors import PatternError
from ucpstore.inspect.infer.decide import Verdict
from ucpstore.inspect.infer.grouping import Group
from ucpstore.inspect.infer.views import RankViews
from ucpstore.layout.patterns import Pattern, Replicate
from ucpstore.layout.rule import Rule
from ucpstore.layout.rules import Patterns

__all__ = ["alike", "fitting_presets", "with_presets"]

_Decided = Sequence[tuple[Group, Verdict]]


def alike(left: Pattern, right: Pattern | None) -> bool:
    """Whether two patterns cut alike, widths and units aside."""
    return type(left) is type(right) and getattr(left, "dim", None) == getattr(right, "dim", None)


def fitting_presets(views: RankViews, decided: _Decided) -> dict[str, Patterns]:
    """Presets with a rule for every parameter that fits its shapes and what was inferred."""
    verdicts = {name: verdict for group, verdict in decided for name in group.members}
    found = {}
    for preset in Patterns.presets():
        try:
            rules = Patterns.preset(preset)
        except PatternError:
            continue  # it needs numbers that only the model tells
        if all(_fits(views, rules, name, verdicts[name]) for name in verdicts):
            found[preset] = rules
    return found


def _fits(views: RankViews, rules: Patterns, name: str, verdict: Verdict) -> bool:
    rule = rules.find(name, views.ndim(name))
    shapes = [shape for shape in views.shapes(name) if shape is not None]
    if rule is None or len(shapes) < views.degree:
        return False
    try:
        rule.observed(name, shapes)
    except PatternError:
        return False
    answers = verdict.alternatives if verdict.pattern is None else (verdict.pattern,)
    return any(_says(rule, answer) for answer in answers)


def _says(rule: Rule, answer: Pattern) -> bool:
    """Whether an answer is the rule's; copies that drifted are no preset's business."""
    return rule.tp == answer if isinstance(answer, Replicate) else alike(answer, rule.tp)


def with_presets(
    views: RankViews, decided: _Decided, presets: Mapping[str, Patterns]
) -> Iterable[tuple[Group, Verdict]]:
    """Questions to which all presets that fit give the same answer become likely rules."""
    for group, verdict in decided:
        answers: set[Pattern] = set()
        drifted = Replicate("first") in verdict.alternatives
        for rules in presets.values():
            for name in group.members:
                rule = rules.find(name, views.ndim(name))
                answers |= {one for one in verdict.alternatives if rule and _says(rule, one)}
        if verdict.pattern is not None or drifted or len(answers) != 1:
            yield group, verdict
            continue
        words = f"so say the presets that fit the whole model: {', '.join(presets)}"
        yield (
            group,
            replace(
                verdict,
                pattern=answers.pop(),
                confidence="likely",
                evidence=(*verdict.evidence, words),
                alternatives=(),
                question="",
            ),
        )
