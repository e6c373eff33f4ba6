"""Which names of a source become which names of a target; everything that is wrong is told at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ucpstore.errors import Kind, PatternError, close_names
from ucpstore.mapping.entries import DropEntry, Entry, template
from ucpstore.mapping.mapping import Pass
from ucpstore.mapping.transforms import Transform

__all__ = ["Made", "Named", "Problem", "Resolution", "resolve"]


class Named(NamedTuple):
    """What `resolve` needs to know of a source's parameter."""

    shape: tuple[int, ...]
    aliases: tuple[str, ...]


class Problem(NamedTuple):
    """Something that keeps a mapping from being applied."""

    kind: Kind
    text: str


@dataclass(slots=True)
class Made:
    """A parameter of the target.

    Attributes
    ----------
    fqn : str
    members : tuple of str
        The source's parameters that it is made of.
    transform : Transform
    aliases : list of str
    """

    fqn: str
    members: tuple[str, ...]
    transform: Transform
    aliases: list[str]


@dataclass(frozen=True, slots=True)
class Resolution:
    """The target's parameters, in the order of their first members; and what was left out."""

    made: tuple[Made, ...]
    dropped: tuple[str, ...]
    problems: tuple[Problem, ...]


class _Claim(NamedTuple):
    where: str
    entry: Entry
    slot: int
    values: dict[str, str]


def resolve(entries: Pass, parameters: Mapping[str, Named]) -> Resolution:
    """Apply the names of a pass to the parameters of a source.

    Problems are collected, not raised: a name that no entry takes, or several; an entry that takes nothing;
    two parameters with one name; groups with missing members; aliases that go another way than their
    parameter.
    """
    run = _Run(entries, parameters)
    return run.resolution()


class _Run:
    def __init__(self, entries: Pass, parameters: Mapping[str, Named]) -> None:
        self._pass = entries
        self._parameters = parameters
        self._problems: list[Problem] = []
        self._position = {name: index for index, name in enumerate(parameters)}
        self._claims: dict[str, _Claim] = {}
        self._broken: set[str] = set()
        """Names whose problem was told: what follows from it is not told, too."""

    def resolution(self) -> Resolution:
        self._claim()
        made = [*self._one_to_one(), *self._joined(), *self._parted()]
        made.sort(key=lambda one: min(self._position[name] for name in one.members))
        dropped = [n for n in self._parameters if self._is(n, DropEntry)]
        self._map_aliases(made)
        self._add_aliases(made)
        self._check_unique(made)
        made = self._ordered(made)
        return Resolution(tuple(made), tuple(dropped), tuple(self._problems))

    def _report(self, kind: Kind, text: str) -> None:
        self._problems.append(Problem(kind, text))

    def _is(self, name: str, kind: type[Entry]) -> bool:
        return name in self._claims and isinstance(self._claims[name].entry, kind)

    # ------------------------------------------------------------------ who takes what

    def _claim(self) -> None:
        aliases = [a for named in self._parameters.values() for a in named.aliases]
        names = dict.fromkeys([*self._parameters, *aliases])
        found: dict[str, list[_Claim]] = {name: [] for name in names}
        for where, entry in self._pass.entries():
            for slot, text in enumerate(entry.sources):
                matched = False
                match = template(text).match
                for name in names:
                    values = match(name)
                    if values is not None:
                        found[name].append(_Claim(where, entry, slot, values))
                        matched = True
                if not (matched or entry.optional):
                    hint = close_names(text, list(names)) if template(text).is_literal else ""
                    self._report(Kind.UNUSED, f"{where} matches nothing: {text} {hint}".rstrip())
        for name, claims in found.items():
            if len(claims) == 1:
                self._claims[name] = claims[0]
                continue
            self._broken.add(name)
            if claims:
                places = ", ".join(claim.where for claim in claims)
                self._report(
                    Kind.AMBIGUOUS, f"{name!r} is matched by {len(claims)} entries: {places}"
                )
            else:
                self._report(Kind.UNMATCHED, f"{name!r} is matched by no entry")

    def _renamed(self, claim: _Claim, name: str) -> str | None:
        return name if claim.entry.keeps_name else self._fill(claim, claim.entry.targets[0])

    def _fill(self, claim: _Claim, text: str, extra: Mapping[str, str] | None = None) -> str | None:
        try:
            return template(text).fill({**claim.values, **(extra or {})})
        except PatternError as error:
            self._report(Kind.NAME, f"{claim.where}: {error}".rstrip("."))
            return None

    # ------------------------------------------------------------------ parameters

    def _one_to_one(self) -> list[Made]:
        found = []
        for name in self._parameters:
            claim = self._claims.get(name)
            if claim is None or not _is_one_to_one(claim.entry):
                continue
            target = self._renamed(claim, name)
            if target is not None:
                found.append(Made(target, (name,), claim.entry.transform(), []))
        return found

    def _joined(self) -> list[Made]:
        """Fused and stacked parameters."""
        groups: dict[tuple[str, tuple[tuple[str, str], ...]], dict[int, str]] = {}
        entries: dict[str, Entry] = {}
        for name in self._parameters:
            claim = self._claims.get(name)
            if claim is None or not _is_joining(claim.entry):
                continue
            over = claim.entry.over
            place = claim.slot if over is None else int(claim.values[over])
            key = tuple(sorted((k, v) for k, v in claim.values.items() if k != over))
            members = groups.setdefault((claim.where, key), {})
            entries[claim.where] = claim.entry
            if place in members:
                self._report(
                    Kind.AMBIGUOUS,
                    f"{claim.where}: {members[place]!r} and {name!r} are the same member of one parameter",
                )
            members[place] = name
        found = []
        for (where, _), members in groups.items():
            entry = entries[where]
            wanted = range(len(entry.sources) if entry.over is None else max(members) + 1)
            missing = [place for place in wanted if place not in members]
            first = next(iter(members.values()))
            claim = self._claims[first]
            if missing:
                self._report(
                    Kind.UNMATCHED, f"{where}: {first!r} has no {self._sibling(claim, missing[0])}"
                )
                continue
            target = self._fill(claim, entry.targets[0])
            if target is not None:
                names = tuple(members[place] for place in wanted)
                found.append(Made(target, names, entry.transform(), []))
        return found

    @staticmethod
    def _sibling(claim: _Claim, place: int) -> str:
        """What to call a member that is not there."""
        entry = claim.entry
        if entry.over is not None:
            values = {**claim.values, entry.over: str(place)}
            return f"sibling {template(entry.sources[0]).fill(values)!r}"
        text = entry.sources[place]
        filled = template(text).fill(claim.values) if template(text).is_invertible else text
        return f"partner {filled!r}"

    def _parted(self) -> list[Made]:
        """Split and unstacked parameters."""
        found = []
        for name, named in self._parameters.items():
            claim = self._claims.get(name)
            if claim is None or not _is_parting(claim.entry):
                continue
            entry = claim.entry
            targets: list[tuple[str, dict[str, str]]]
            if entry.over is None:
                targets = [(text, {}) for text in entry.targets]
            else:
                count = named.shape[0] if named.shape else 0
                targets = [(entry.targets[0], {entry.over: str(index)}) for index in range(count)]
                if not count:
                    self._report(
                        Kind.SHAPE,
                        f"{claim.where}: {name!r} has shape {list(named.shape)}: no rows",
                    )
            for index, (text, extra) in enumerate(targets):
                target = self._fill(claim, text, extra)
                if target is None:
                    break
                found.append(Made(target, (name,), entry.transform(index), []))
        return found

    # ------------------------------------------------------------------ other names

    def _map_aliases(self, made: Sequence[Made]) -> None:
        """Further names of a parameter go the way of the parameter, or are dropped."""
        targets: dict[str, list[Made]] = {}
        for one in made:
            for member in one.members:
                targets.setdefault(member, []).append(one)
        for name, named in self._parameters.items():
            for alias in named.aliases:
                if alias in self._parameters or self._is(alias, DropEntry):
                    continue
                claim = self._claims.get(alias)
                if claim is None or name in self._broken:
                    continue
                mine = targets.get(name, [])
                if not (
                    len(mine) == 1
                    and mine[0].members == (name,)
                    and _is_one_to_one(claim.entry)
                    and claim.entry.transform() == mine[0].transform
                ):
                    self._report(
                        Kind.NAME,
                        f"{alias!r} is another name of {name!r}, but {claim.where} does not take it where"
                        f" {self._where(name)} takes the parameter; rename both alike, or drop the alias",
                    )
                    continue
                target = self._renamed(claim, alias)
                if target is not None:
                    mine[0].aliases.append(target)

    def _where(self, name: str) -> str:
        return self._claims[name].where if name in self._claims else "no entry"

    def _add_aliases(self, made: Sequence[Made]) -> None:
        by_name = {one.fqn: one for one in made}
        for index, entry in enumerate(self._pass.alias):
            if entry.of in by_name:
                by_name[entry.of].aliases.append(entry.name)
            else:
                self._report(
                    Kind.UNUSED,
                    f"alias[{index}]: no parameter of the target is called {entry.of!r}",
                )

    def _check_unique(self, made: Sequence[Made]) -> None:
        holders: dict[str, list[str]] = {}
        for one in made:
            for name in (one.fqn, *one.aliases):
                holders.setdefault(name, []).append(repr(one.members[0]))
        for name, members in holders.items():
            if len(members) > 1:
                self._report(
                    Kind.NAME, f"{len(members)} names become {name!r}: of {', '.join(members)}"
                )

    def _ordered(self, made: list[Made]) -> list[Made]:
        order = {name: index for index, name in enumerate(self._pass.order)}
        if not order:
            return made
        twice = [name for name, count in Counter(self._pass.order).items() if count > 1]
        if twice:
            self._report(Kind.NAME, f"order: names occur twice: {', '.join(twice)}")
        names = {one.fqn for one in made}
        for name in self._pass.order:
            if name not in names:
                self._report(Kind.UNUSED, f"order: no parameter of the target is called {name!r}")
        # Buffers are no optimizer's business, so an order need not name them: the rest follows as it was.
        return sorted(made, key=lambda one: order.get(one.fqn, len(order)))


def _is_one_to_one(entry: Entry) -> bool:
    return len(entry.sources) == len(entry.targets) == 1 and entry.over is None


def _is_joining(entry: Entry) -> bool:
    if entry.over is not None:
        return entry.over in template(entry.sources[0]).variables
    return len(entry.sources) > 1


def _is_parting(entry: Entry) -> bool:
    if entry.over is not None:
        return entry.over in template(entry.targets[0]).variables
    return len(entry.targets) > 1
