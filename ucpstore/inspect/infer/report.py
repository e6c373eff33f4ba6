"""What was inferred: rules and open questions, as TOML and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ucpstore.contracts import Source
from ucpstore.inspect.infer.check import is_default
from ucpstore.inspect.infer.conventions import Name
from ucpstore.inspect.infer.decide import Confidence, Decider, Verdict
from ucpstore.inspect.infer.grouping import Group
from ucpstore.inspect.infer.known import fitting_presets, with_presets
from ucpstore.inspect.infer.views import RankViews
from ucpstore.layout.names import Template
from ucpstore.layout.patterns import Pattern, Shard
from ucpstore.layout.rules import Patterns, PrefixRegex, Rule
from ucpstore.text import printable

__all__ = ["Inference", "Proposal", "infer_sources", "proposals"]

VERSION = "1.0"
_ORDER: dict[Confidence, int] = {"certain": 0, "likely": 1, "ambiguous": 2}


class Entry(NamedTuple):
    """Names of a rule, and why it is for them."""

    match: Template | PrefixRegex
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A rule that is proposed, or an open question about parameters.

    Attributes
    ----------
    entries : tuple of Entry
    parameters : tuple of str
        What it was inferred from.
    pattern : Pattern or None
        None while the question is open.
    confidence : {"certain", "likely", "ambiguous"}
    alternatives : tuple of Pattern
        What an open question could be answered with.
    question, note : str
    """

    entries: tuple[Entry, ...]
    parameters: tuple[str, ...]
    pattern: Pattern | None
    confidence: Confidence
    alternatives: tuple[Pattern, ...] = ()
    question: str = ""
    note: str = ""

    @property
    def match(self) -> tuple[Template | PrefixRegex, ...]:
        """Names of all entries."""
        return tuple(entry.match for entry in self.entries)

    @property
    def rule(self) -> Rule | None:
        """The rule, unless the question is open."""
        if self.pattern is None:
            return None
        return Rule(self.match, self.pattern, origin=f"inferred: {self.confidence}")

    def answered(self, pattern: Pattern) -> Rule:
        """The rule that an answer to an open question is."""
        return Rule(self.match, pattern, origin="answered")

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "names": [
                {
                    "regex" if isinstance(match, PrefixRegex) else "match": match.text,
                    "evidence": list(evidence),
                }
                for match, evidence in self.entries
            ],
            "parameters": len(self.parameters),
            "tp": None if self.pattern is None else self.pattern.to_json(),
            "confidence": self.confidence,
            "alternatives": [one.to_json() for one in self.alternatives],
            "question": self.question,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Inference:
    """Rules that were inferred for a checkpoint.

    Attributes
    ----------
    url : str
    degree : int
        Tensor-parallel ranks.
    covered : int
        Parameters that have a rule already.
    proposals : tuple of Proposal
        Rules first, open questions last.
    presets : tuple of str
        Presets that have a rule for every parameter and contradict nothing.
    """

    url: str
    degree: int
    covered: int
    proposals: tuple[Proposal, ...]
    presets: tuple[str, ...] = ()

    @property
    def patterns(self) -> Patterns:
        """The rules, certain and likely, without what is open."""
        rules = (proposal.rule for proposal in self.proposals)
        return Patterns(tuple(rule for rule in rules if rule is not None))

    @property
    def questions(self) -> tuple[Proposal, ...]:
        """What is open."""
        return tuple(one for one in self.proposals if one.pattern is None)

    def counts(self) -> dict[str, int]:
        """Parameters by confidence."""
        found = dict.fromkeys(_ORDER, 0)
        for one in self.proposals:
            found[one.confidence] += len(one.parameters)
        return {str(name): count for name, count in found.items()}

    def to_json(self) -> dict[str, Any]:
        """As JSON values (``schemas/inference.schema.json``)."""
        return {
            "version": VERSION,
            "url": self.url,
            "tp": self.degree,
            "covered": self.covered,
            "counts": self.counts(),
            "presets": list(self.presets),
            "proposals": [one.to_json() for one in self.proposals],
            "patterns": self.patterns.to_json(),
            "toml": self.toml(),
        }

    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{count} {name}" for name, count in self.counts().items())
        known = f", {self.covered} have a rule" if self.covered else ""
        rules = len(self.proposals) - len(self.questions)
        return (
            f"tensor parallelism {self.degree}: {rules} rules, {len(self.questions)} open questions"
            f" (parameters: {counts}{known})"
        )

    def toml(self) -> str:
        """The rules as `Patterns.parse` reads them, with their evidence; open questions are comments."""
        lines = [f"# {printable(self.url)}", f"# {self.summary()}"]
        if self.presets:
            lines.append(f"# presets that fit: {', '.join(self.presets)}")
        for one in self.proposals:
            lines += ["", *(_question(one) if one.pattern is None else _rule(one, one.pattern))]
        return "\n".join(lines) + "\n"


def infer_sources(sources: Sequence[Source], *, known: Patterns | None = None) -> Inference:
    """Infer rules for the parameters that none of the ``known`` rules is for.

    Contents are read until the ranks differ: to the end where they hold the same bits.

    Parameters
    ----------
    sources : sequence of Source
        One for every tensor-parallel rank, in rank order, with that rank's local tensors.
    known : Patterns, optional
        Rules in force, such as those that the checkpoint records. One for every name (``**``) is a default and
        no knowledge.
    """
    views = RankViews(sources)
    rules = Patterns(tuple(rule for rule in (known or Patterns()).rules if not is_default(rule)))
    open_ = [name for name in views.names if rules.find(name, views.ndim(name)) is None]
    found: list[Proposal] = []
    presets: dict[str, Patterns] = {}
    if views.degree > 1:
        wanted = set(open_)
        decider = Decider(views)
        presets = fitting_presets(views, decider.decide())
        decided = with_presets(views, decider.decide(open_), presets)
        kept = [(group.only(wanted), verdict) for group, verdict in decided]
        found = proposals(views, [(group, verdict) for group, verdict in kept if group.members])
    covered = len(views.names) - len(open_)
    return Inference(views.url, views.degree, covered, tuple(found), tuple(presets))


def proposals(views: RankViews, decided: Iterable[tuple[Group, Verdict]]) -> list[Proposal]:
    """One proposal for all groups of the same verdict and evidence, so that few rules come out."""
    by_template: dict[str, list[tuple[Group, Verdict]]] = {}
    for group, verdict in decided:
        by_template.setdefault(group.template or group.members[0], []).append((group, verdict))
    alike: dict[object, list[Proposal]] = {}
    for parts in by_template.values():
        for one in _of_template(views, parts):
            key = (one.pattern, one.confidence, one.alternatives, one.question, one.note)
            alike.setdefault(key, []).append(one)
    found = [
        replace(
            group[0],
            entries=tuple(entry for one in group for entry in one.entries),
            parameters=tuple(name for one in group for name in one.parameters),
        )
        for group in alike.values()
    ]
    return sorted(found, key=lambda one: _ORDER[one.confidence])


def _of_template(views: RankViews, parts: Sequence[tuple[Group, Verdict]]) -> list[Proposal]:
    """Proposals for the groups of one template: it stands for all of them, or every name for itself."""
    answers = {(verdict.pattern, verdict.alternatives) for _, verdict in parts}
    template = parts[0][0].template
    if template is not None and len(answers) == 1:
        # The least certain speaks for all.
        group, verdict = max(parts, key=lambda part: _ORDER[part[1].confidence])
        members = tuple(name for one, _ in parts for name in one.members)
        return [_proposal(views, group, verdict, [Template(template)], members)]
    return [
        _proposal(views, group, verdict, map(_exactly, group.members), group.members)
        for group, verdict in parts
    ]


def _proposal(
    views: RankViews,
    group: Group,
    verdict: Verdict,
    names: Iterable[Template | PrefixRegex],
    members: tuple[str, ...],
) -> Proposal:
    return Proposal(
        tuple(Entry(name, verdict.evidence) for name in names),
        members,
        verdict.pattern,
        verdict.confidence,
        verdict.alternatives,
        verdict.question,
        _note(views, group, verdict),
    )


def _exactly(fqn: str) -> Template | PrefixRegex:
    """What matches one name."""
    if any(char in fqn for char in "*{}") or not 0 < len(fqn) <= 1000:
        return PrefixRegex(f"^{re.escape(fqn)}$")
    return Template(fqn)


def _note(views: RankViews, group: Group, verdict: Verdict) -> str:
    name = group.hint
    if name is None or name.name is not Name.VOCABULARY or verdict.pattern != Shard(0):
        return ""
    rows = sum(shape[0] for shape in group.local())
    return (
        f"padded? add: pad = {{dim = 0, true_size = ROWS, multiple = M}}; {rows} rows are a multiple of"
        f" {views.degree} M"
    )


def _text(value: str) -> str:
    """A TOML string: JSON's escapes without pairs of surrogates, and DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _pattern(pattern: Pattern) -> str:
    """A pattern as a TOML value."""
    document = pattern.to_json()
    name = document.pop("pattern")
    if not document:
        return _text(name)
    if set(document) == {"dim"}:
        return _text(f"{name}({document['dim']})")
    if document == {"rule": "first"}:
        return _text(f"{name}(first)")
    fields = {"pattern": name, **document}
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in fields.items()) + "}"


def _names(one: Proposal) -> list[str]:
    """The names of a rule, each after the evidence for it."""
    lines = []
    for key, kind in (("match", Template), ("regex", PrefixRegex)):
        entries = [entry for entry in one.entries if isinstance(entry.match, kind)]
        if not entries:
            continue
        lines.append(f"{key} = [")
        told: tuple[str, ...] = ()
        for entry in entries:
            if entry.evidence != told:
                told = entry.evidence
                lines += [f"    # {printable(text)}" for text in told]
            lines.append(f"    {_text(entry.match.text)},")
        lines.append("]")
    return lines


def _rule(one: Proposal, pattern: Pattern) -> list[str]:
    note = [f"# {one.note}"] if one.note else []
    return [
        f"# {one.confidence}, {_many(one)}",
        *note,
        "[[rule]]",
        *_names(one),
        f"tp = {_pattern(pattern)}",
        f'origin = "inferred: {one.confidence}"',
    ]


def _question(one: Proposal) -> list[str]:
    title = f"# QUESTION, {_many(one)}: {one.question}"
    if not one.alternatives:
        return [title, *(f"# {text}" for text in _names(one))]
    several = len(one.alternatives) > 1
    how = "# Uncomment the rule" + (", with one of the lines tp:" if several else ":")
    body = ["[[rule]]", *_names(one), *(f"tp = {_pattern(p)}" for p in one.alternatives)]
    return [title, how, *(f"# {text}" for text in body)]


def _many(one: Proposal) -> str:
    count = len(one.parameters)
    return f"{count} parameter" + ("" if count == 1 else "s")
