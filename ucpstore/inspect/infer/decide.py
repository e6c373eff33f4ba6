"""Deciding how a group of parameters lies on the ranks, from evidence that is named.

What each kind of evidence is worth:

* Shapes that differ over the ranks prove the dim. They do not tell one run of indices from a slice of each
  of several sections; a name, or a matrix that takes in exactly what this one gives out, does.
* Contents that differ disprove replication, unless the copies drifted apart.
* Contents that are the same never prove it: zero biases and ranks that were seeded alike are the same too.
* Certain is what two independent kinds of evidence agree on. What they contradict each other on stays open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ucpstore.errors import PatternError, listing
from ucpstore.inspect.infer.conventions import Name, Part
from ucpstore.inspect.infer.grouping import Group, Relatives, group_names
from ucpstore.inspect.infer.views import Contents, RankViews
from ucpstore.inspect.stream import in_parallel
from ucpstore.layout.patterns import Partial, Pattern, Replicate, Shard, ShardNC
from ucpstore.layout.rule import Rule, for_any_degree

__all__ = ["Confidence", "Decider", "Verdict"]

Confidence = Literal["certain", "likely", "ambiguous"]
_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a group of parameters lies on the ranks.

    Attributes
    ----------
    pattern : Pattern or None
        None while the question is open.
    confidence : {"certain", "likely", "ambiguous"}
    evidence : tuple of str
    alternatives : tuple of Pattern
        What an open question could be answered with.
    question : str
    """

    pattern: Pattern | None
    confidence: Confidence
    evidence: tuple[str, ...]
    alternatives: tuple[Pattern, ...] = ()
    question: str = ""


@dataclass(frozen=True, slots=True)
class Joint:
    """The contents of a group's members together.

    Attributes
    ----------
    equal, differ : int
        Members whose ranks hold the same bits, or not.
    informative : tuple of str
        States of equal members that hold more than one value.
    partly : bool
        Some member is the same on some ranks only.
    differs, drift : str
        The state that tells ranks apart, and how far apart they are.
    close : bool
        They differ by little everywhere.
    states : tuple of str
    """

    equal: int
    differ: int
    informative: tuple[str, ...]
    partly: tuple[tuple[int, ...], ...]
    differs: str
    drift: str
    close: bool
    states: tuple[str, ...]

    @classmethod
    def of(cls, contents: Mapping[str, Contents]) -> Joint:
        """Sum up the members."""
        differ = {name: one for name, one in contents.items() if not one.equal}
        partly = next((one.classes for one in contents.values() if one.partly), ())
        first = next(iter(differ.items()), None)
        drift = ""
        if first is not None and first[1].max_abs is not None:
            drift = f"by up to {first[1].max_abs:.3g} in {first[0]} (first block)"
        equal = [one for one in contents.values() if one.equal]
        return cls(
            len(equal),
            len(differ),
            tuple(dict.fromkeys(state for one in equal for state in one.informative)),
            partly,
            "" if first is None else first[1].differs,
            drift,
            bool(differ) and all(one.close for one in differ.values()),
            tuple(dict.fromkeys(state for one in contents.values() for state in one.states)),
        )


class Decider:
    """Decides for one checkpoint. Contents are read when they are first needed.

    Parameters
    ----------
    views : RankViews
    """

    def __init__(self, views: RankViews) -> None:
        self._views = views
        self._relatives = Relatives(views)
        self._groups = group_names(views, self._relatives)
        self._contents: dict[str, Contents] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._hidden = frozenset(
            length
            for group in self._groups
            if group.ndim == 1 and len(set(group.shapes)) == 1
            if group.hint is not None and group.hint.name is Name.NORM
            for (length,) in group.local()[:1]
        )

    def decide(self, names: Iterable[str] | None = None) -> list[tuple[Group, Verdict]]:
        """A verdict for every group that one of the names is in, by default for all.

        Groups whose members contradict each other are split.
        """
        wanted = set(self._views.names if names is None else names)
        chosen = [group for group in self._groups if wanted.intersection(group.members)]
        for group in chosen:
            if group.ndim == 1:
                weight = self._relatives.weight(group.members[0])
                wanted.update(() if weight is None else (weight,))
        chosen = [group for group in self._groups if wanted.intersection(group.members)]
        members = [n for group in chosen for n in group.members if n not in self._contents]
        self._contents.update(zip(members, in_parallel(self._views.contents, members), strict=True))
        groups = [part for group in chosen for part in self._parts(group)]
        found: dict[int, Verdict] = {}
        for index in sorted(range(len(groups)), key=lambda i: groups[i].ndim < 2):
            verdict = found[index] = self._verdict(groups[index])
            self._verdicts.update(dict.fromkeys(groups[index].members, verdict))
        return [(group, found[index]) for index, group in enumerate(groups)]

    @cached_property
    def _unlike(self) -> bool:
        """Whether some matrix differs over the ranks, so that they were not seeded alike."""
        for name in (name for group in self._groups if group.ndim > 1 for name in group.members):
            if name not in self._contents:
                self._contents[name] = self._views.contents(name)
            if not self._contents[name].equal:
                return True
        return False

    def _parts(self, group: Group) -> list[Group]:
        """Members whose equal bits say something go apart from those that differ."""
        found = {name: self._contents[name] for name in group.members}
        same = [name for name, one in found.items() if one.equal and one.informative]
        if not same or all(one.equal for one in found.values()):
            return [group]
        rest = [name for name in group.members if name not in set(same)]
        return [Group(group.template, tuple(part), group.shapes) for part in (rest, same)]

    def _verdict(self, group: Group) -> Verdict:
        lacking = [rank for rank, shape in enumerate(group.shapes) if shape is None]
        if lacking:
            return _open(
                [f"ranks {listing(map(str, lacking))} do not hold it"],
                (),
                "Why do only some ranks hold this? No rule for tensor parallelism says so.",
            )
        joint = Joint.of({name: self._contents[name] for name in group.members})
        if joint.partly:
            return _open(
                [
                    f"ranks {' = '.join('+'.join(map(str, one)) for one in joint.partly)} hold the same bits"
                ],
                (),
                "Do several ranks share a slice, such as a key-value head? No rule of this language says so.",
            )
        if len(set(group.shapes)) > 1:
            return self._uneven(group)
        if joint.differ:
            return self._cut(group, joint)
        return self._same(group, joint)

    # Shapes differ: the dim is known.

    def _uneven(self, group: Group) -> Verdict:
        shapes = group.local()
        words = f"local shapes {', '.join(str(list(shape)) for shape in shapes)}"
        dims = _differing(shapes)
        if len(dims) != 1:
            return _open(
                [f"{words} differ in {len(dims) or 'the number of'} dims"],
                (),
                "Which layout is this? No rule of this language cuts several dims over one axis.",
            )
        (dim,) = dims
        evidence = [f"{words} differ along dim {dim} only"]
        fused = self._sections(group, dim, evidence)
        if fused is not None:
            return fused
        support = self._plain(group, dim)
        if group.hint is not None:
            evidence.append(group.hint.words)
            if _named_dim(group) not in (None, dim) or group.hint.replicated:
                support = ["which would be cut otherwise"]
        sure = _named_dim(group) == dim and bool(support)
        pattern = for_any_degree(Shard(dim, tuple(shape[dim] for shape in shapes)))
        if isinstance(pattern, Shard) and pattern.unit > 1:
            support.append(f"whole units of {pattern.unit} give these widths")
        return Verdict(pattern, "certain" if sure else "likely", (*evidence, *support))

    def _plain(self, group: Group, dim: int) -> list[str]:
        """Evidence that a dim holds one run of indices, not several sections."""
        found = []
        name = group.hint
        if name is not None and name.name in (Name.COLUMN, Name.ROW, Name.VOCABULARY):
            found.append("one section by name")
        mirror = self._mirror(group, dim)
        if mirror is not None and mirror[1] == 1:
            found.append(f"{mirror[0]} takes in its rows, rank by rank")
        weight = self._weight(group)
        if weight is not None and isinstance(weight.pattern, Shard):
            found.append("it is cut along with its weight")
        return found

    def _mirror(self, group: Group, dim: int) -> tuple[str, int] | None:
        """A row-parallel neighbour whose columns are as long as this one's rows, or half of them."""
        if dim != 0 or group.ndim != 2:
            return None
        fqn = group.members[0]
        rows = [shape[0] for shape in group.local()]
        inner = {shape[1] for shape in group.local()}
        for name in self._relatives.block(fqn):
            shapes = self._views.shapes(name)
            if name == fqn or any(shape is None or len(shape) != 2 for shape in shapes):
                continue
            if {shape[0] for shape in shapes if shape} != inner:
                continue
            columns = [shape[1] for shape in shapes if shape]
            for sections in (1, 2):
                if rows == [sections * width for width in columns]:
                    return name.rpartition(".")[0].rpartition(".")[2], sections
        return None

    def _sections(self, group: Group, dim: int, evidence: Sequence[str]) -> Verdict | None:
        """The open question of several sections along a dim, where a name or an MLP's sizes raise it."""
        found, name = [*evidence], group.hint
        weight = self._weight(group)
        if weight is not None and len(weight.alternatives) > 1 and _along(weight, 0):
            found.append("it is cut along with its weight, which is an open question")
            return self._ask(group, found, weight.alternatives, weight.question)
        mirror = self._mirror(group, dim)
        if name is not None and name.fused:
            found.append(name.words)
        elif (
            mirror is not None
            and mirror[1] == 2
            and (name is None or name.name is Name.MAYBE_FUSED)
        ):
            found.append(f"every rank gives out twice what its {mirror[0]} takes in")
        else:
            return None
        plain: Pattern = Shard(dim)
        if name is not None and name.name is Name.QKV:
            nc: Pattern = self._qkv(group, dim)
            asked = (
                "a rank's slice one run of rows (Megatron, BLOOM, NeoX: per head), or [q | k | v]"
            )
            return self._ask(group, found, [plain, nc], f"Is {asked} of its heads?")
        nc = ShardNC(dim, ratio=(1, 1))
        asked = "Is a rank's slice [gate | up], or one run of rows (interleaved)?"
        return self._ask(group, found, [nc, plain], asked)

    def _qkv(self, group: Group, dim: int) -> ShardNC:
        """Sections of a fused query, key and value; the output projection tells how long the query is."""
        total = sum(shape[dim] for shape in group.local())
        for name in self._relatives.block(group.members[0]):
            shapes = self._views.shapes(name)
            if name in group.members or any(s is None or len(s) != 2 for s in shapes):
                continue
            query = sum(shape[1] for shape in shapes if shape)
            rest = total - query
            if query <= total and rest > 0 and rest % 2 == 0 and rest <= 2 * query:
                if query == rest // 2:
                    break
                return ShardNC(dim, (query, rest // 2, rest // 2))
        return ShardNC(dim, ratio=(1, 1, 1))

    # Shapes are the same, contents differ: cut, or copies that drifted.

    def _cut(self, group: Group, joint: Joint) -> Verdict:
        evidence = [f"ranks differ in {joint.differs}"]
        name, weight = group.hint, self._weight(group)
        dims = range(group.ndim)
        drifted = (Replicate("first"), Partial())
        copies = name is not None and name.replicated
        row = weight is not None and _row(weight)
        if not group.ndim or copies or row or joint.close:
            evidence += [joint.drift] if joint.drift else []
            evidence += ["which is little beside the values"] if joint.close else []
            evidence += [name.words] if name is not None else []
            evidence += ["its weight is cut along dim 1"] if row else []
            asked = "Did copies drift apart: does the first one count, or the mean? Or is it cut?"
            return self._ask(group, evidence, (*drifted, *map(Shard, dims)), asked)
        votes = self._votes(group)
        evidence += [words for _, words in votes]
        found = {dim for dim, _ in votes}
        if len(found) != 1:
            asked = "Along which dim is it cut" + (
                ", or did copies drift apart?" if group.ndim < 2 else "?"
            )
            return self._ask(group, evidence, (*map(Shard, dims), *drifted[1:]), asked)
        (dim,) = found
        fused = self._sections(group, dim, evidence)
        if fused is not None:
            return fused
        support = self._plain(group, dim)
        sure = len(votes) > 1 and bool(support)
        sure = sure and (weight is None or weight.confidence == "certain")
        return Verdict(Shard(dim), "certain" if sure else "likely", (*evidence, *support))

    def _votes(self, group: Group) -> list[tuple[int, str]]:
        """Kinds of evidence for the dim that is cut."""
        votes = []
        named = _named_dim(group)
        if group.hint is not None and named is not None:
            votes.append((named, group.hint.words))
        structural = self._structural(group)
        if structural is not None:
            votes.append(structural)
        weight = self._weight(group)
        if weight is not None and _along(weight, 0) and self._as_long(group):
            votes.append((0, "it is as long as its weight has rows, which are cut"))
        return votes

    def _structural(self, group: Group) -> tuple[int, str] | None:
        """The only dim of a matrix along which a cut leaves the other one, or the sum, a model dim."""
        if group.ndim != 2 or not self._hidden:
            return None
        shape = group.local()[0]
        fits = []
        for dim in (0, 1):
            other = shape[1 - dim]
            if other in self._hidden or self._views.degree * shape[dim] in self._hidden:
                fits.append(dim)
        if len(fits) != 1:
            return None
        (dim,) = fits
        if shape[1 - dim] in self._hidden:
            return dim, f"dim {1 - dim} is whole: as long as the norms ({shape[1 - dim]})"
        whole = self._views.degree * shape[dim]
        return dim, f"dim {dim} is cut: as long as the norms ({whole}) on all ranks together"

    # Shapes and contents are the same.

    def _same(self, group: Group, joint: Joint) -> Verdict:
        told = f"equal on all {self._views.degree} ranks"
        if joint.informative:
            evidence = [f"{told} in {listing(joint.informative)}"]
        else:
            evidence = [f"{told}, but each of {listing(joint.states)} is one value throughout"]
        name, weight = group.hint, self._weight(group)
        if not group.ndim:
            return Verdict(Replicate(), "certain", (*evidence, "a number cannot be cut"))
        sure: Confidence = "certain" if joint.informative and self._unlike else "likely"
        if name is not None and name.name is Name.HEAD_NORM and not joint.informative:
            return self._undecided(group, [*evidence, name.words])
        if name is not None and name.replicated:
            return Verdict(Replicate(), sure, (*evidence, name.words))
        if weight is not None and (_row(weight) or isinstance(weight.pattern, Replicate)):
            words = "its weight is cut along dim 1" if _row(weight) else "its weight is replicated"
            sure = sure if weight.confidence == "certain" else "likely"
            return Verdict(Replicate(), sure, (*evidence, words))
        if name is not None and name.name is not Name.VOCABULARY:
            return self._same_but_cut(group, joint, evidence, weight)
        if weight is not None and _along(weight, 0):
            return self._same_but_cut(group, joint, evidence, weight)
        if joint.informative and (group.ndim == 1 or self._unlike):
            words = "a vector" if group.ndim == 1 else "other matrices differ over the ranks"
            if joint.equal > 1:
                evidence.append(f"so are all {joint.equal} of this name")
            return Verdict(Replicate(), "likely", (*evidence, words))
        return self._undecided(group, evidence)

    def _same_but_cut(
        self, group: Group, joint: Joint, evidence: list[str], weight: Verdict | None
    ) -> Verdict:
        """A name or a weight says that it is cut, and the bits are the same."""
        if group.hint is not None:
            evidence = [*evidence, group.hint.words]
        if weight is None or joint.informative or not _along(weight, 0) or not self._as_long(group):
            return self._undecided(group, evidence)
        evidence = [*evidence, "it is as long as its weight has rows, which are cut"]
        if weight.pattern is None:
            return self._ask(group, evidence, weight.alternatives, weight.question)
        return Verdict(weight.pattern, "likely", tuple(evidence))

    def _undecided(self, group: Group, evidence: Sequence[str]) -> Verdict:
        dims = map(Shard, range(group.ndim))
        asked = "Do all ranks hold the same, or is it cut?"
        return self._ask(group, evidence, (Replicate(), *dims), asked)

    def _ask(
        self,
        group: Group,
        evidence: Sequence[str],
        alternatives: Iterable[Pattern],
        question: str,
    ) -> Verdict:
        """An open question, with the answers that fit the shapes."""
        fitting = []
        for pattern in alternatives:
            try:
                Rule((), pattern).observed(group.members[0], group.local())
            except PatternError:
                continue
            fitting.append(pattern)
        return _open(evidence, fitting, question)

    # Vectors and their matrices.

    def _weight(self, group: Group) -> Verdict | None:
        """The verdict on the matrix that a vector belongs to."""
        if group.ndim != 1 or (group.hint is not None and group.hint.part is not Part.BIAS):
            return None
        name = self._relatives.weight(group.members[0])
        return None if name is None else self._verdicts.get(name)

    def _as_long(self, group: Group) -> bool:
        """Whether a vector is as long as its matrix has rows on every rank."""
        name = self._relatives.weight(group.members[0])
        shapes = () if name is None else self._views.shapes(name)
        return [shape[:1] if shape else None for shape in shapes] == [*group.shapes]


def _open(evidence: Iterable[str], alternatives: Iterable[Pattern], question: str) -> Verdict:
    return Verdict(None, "ambiguous", tuple(evidence), tuple(alternatives), question)


def _named_dim(group: Group) -> int | None:
    """The dim that is cut by the convention of the name: of a matrix, or of a bias."""
    name = group.hint
    if name is None or group.ndim != (1 if name.part is Part.BIAS else 2):
        return None
    return name.dim


def _differing(shapes: Sequence[_Shape]) -> list[int]:
    """Dims along which shapes differ; none where they do not have the same number of dims."""
    if len({len(shape) for shape in shapes}) > 1:
        return []
    return [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]


def _row(weight: Verdict) -> bool:
    """Whether a matrix is cut along its columns, so that its bias is whole."""
    return isinstance(weight.pattern, Shard) and weight.pattern.dim == 1


def _along(weight: Verdict, dim: int) -> bool:
    """Whether a matrix is, or may be, cut along a dim and no other."""
    patterns = weight.alternatives if weight.pattern is None else (weight.pattern,)
    dims = {one.dim for one in patterns if isinstance(one, Shard | ShardNC)}
    return dims == {dim} and all(isinstance(one, Shard | ShardNC) for one in patterns)
