"""How the local tensors of tensor-parallel ranks make up the parameters of one checkpoint.

What counts, in this order: the user's rules; the checkpoint's ``affine_map`` (0.19.8, for one number of ranks);
the rules that its lists stand for (`ucpstore.formats.deepspeed.universal`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any

from ucpstore.errors import Kind, PatternError, UnsupportedSourceError
from ucpstore.formats.deepspeed.affine import affine_maps, pattern_of
from ucpstore.formats.deepspeed.checks import mapping_of
from ucpstore.formats.deepspeed.universal import DEFAULT, VOCABULARY, prefixes, rules_of
from ucpstore.layout.explicit import Explicit
from ucpstore.layout.geometry import Geometry
from ucpstore.layout.matching import Matcher, exactly
from ucpstore.layout.patterns import Partial, Pattern, Replicate, Shard, ShardNC
from ucpstore.layout.rule import Held, Padding, Rule, for_any_degree
from ucpstore.layout.rules import Patterns

__all__ = ["Merged", "OneRank", "TensorParallel"]

_REFUSED = "autotp_unsupported_parameter_patterns"


@dataclass(frozen=True, slots=True)
class Merged:
    """A parameter put together from its tensor-parallel slices.

    Attributes
    ----------
    geometry : Geometry
        Of the logical tensor.
    pattern : str
        In words: ``"replicate"``, ``"shard(0)"``, ``"shard-nc(0)"``, ``"partial"``, ``"blocks"``.
    stages : int
        Pipeline stages that have a copy.
    """

    geometry: Geometry
    pattern: str
    stages: int = 1


class TensorParallel:
    """The rules of one checkpoint.

    Parameters
    ----------
    info : mapping or None
        ``universal_checkpoint_info`` of the model file.
    degree : int
        Tensor-parallel ranks.
    patterns : Patterns
        The user's: they come first.
    client : mapping, optional
        The client's state; Megatron's has its ``args``.

    Raises
    ------
    UnsupportedSourceError
        The affine map is of a later version.
    PatternError
        A pattern is not a regular expression, or sub-parameters are not described well enough.
    """

    def __init__(
        self,
        info: Mapping[str, Any] | None,
        degree: int,
        *,
        patterns: Patterns = Patterns(),  # noqa: B008 - frozen
        client: Mapping[str, Any] | None = None,
    ) -> None:
        self._info = mapping_of(info or {}, "universal_checkpoint_info")
        self._degree = degree
        self._users = patterns
        self._maps = affine_maps(self._info)
        self._by_map = _listed("affine_map", {"affine_map": self._maps})
        self._refused = _listed(_REFUSED, self._info)
        self._lists = rules_of(self._info, degree, client)
        self._unpadded = Patterns(tuple(rule for rule in self._lists.rules if rule.pad is None))
        self._in_force = patterns + self._lists
        self._names: dict[str, int] = {}
        self._seen: dict[str, tuple[Held, Padding | None]] = {}

    def merge(self, fqn: str, children: Sequence[Geometry]) -> Merged:
        """Put the slices of all ranks together.

        Parameters
        ----------
        fqn : str
        children : sequence of Geometry
            The local tensor of every tensor-parallel rank, in rank order.

        Raises
        ------
        PatternError
            No rule or several rules apply to the parameter, or the rule does not fit its slices.
        UnsupportedSourceError
            The rule cannot be followed exactly (scaled pieces, layouts that DeepSpeed itself refuses).
        """
        self._names[fqn] = len(children[0].shape)
        rule = self._rule(fqn, children)
        if self._degree == 1 and (rule is None or rule.pad is None):
            return Merged(children[0], "")
        if rule is None:
            raise self._unknown(fqn, children)
        united = rule.unite(fqn, children)
        self._seen[fqn] = (united.held, rule.pad)
        return Merged(united.geometry, _words(united.held))

    def merge_buffer(self, fqn: str, children: Sequence[Geometry]) -> Merged:
        """Put a module's buffer together: tensor parallelism does not cut buffers, all ranks hold it.

        Raises
        ------
        PatternError
            The ranks hold tensors of different shapes.
        """
        if self._degree == 1:
            return Merged(children[0], "")
        rule = self._users.find(fqn, len(children[0].shape))
        if rule is None or not isinstance(rule.tp, Replicate | Partial):
            rule = Rule((), Replicate())
        else:
            self._names[fqn] = len(children[0].shape)
        united = rule.unite(fqn, children)
        return Merged(united.geometry, _words(united.held))

    def patterns(self) -> Patterns:
        """Normal form of the rules in force, for any number of ranks where that is known.

        Parameters that lie otherwise than a general rule would cut them (whole attention heads dealt out
        unevenly, affine maps) get rules of their own.
        """
        exact: dict[tuple[Pattern, Padding | None], list[Matcher]] = {}
        for fqn, (held, pad) in self._seen.items():
            shape = _true_shape(held, pad)
            rule = self._in_force.find(fqn, len(shape))
            if rule is None or not _agrees(rule, fqn, shape, held):
                key = (for_any_degree(held.tp), pad)
                exact.setdefault(key, []).append(exactly(fqn))
        own = tuple(Rule(tuple(names), tp, pad) for (tp, pad), names in exact.items())
        return (Patterns(own) + self._in_force).compact(self._names)

    def padded(self) -> dict[str, list[int]]:
        """Shapes of what the ranks hold together of padded parameters, padding included."""
        return {fqn: list(held.shape) for fqn, (held, _) in self._seen.items() if held.is_padded}

    def warnings(self) -> list[str]:
        """Rules of the user's that are for no parameter."""
        return self._users.warnings(self._names)

    def _rule(self, fqn: str, children: Sequence[Geometry]) -> Rule | None:
        shapes = [child.shape for child in children]
        rule = self._users.find(fqn, len(shapes[0]))
        if rule is not None:
            return rule
        mapped = _match(self._by_map, fqn)
        if mapped is not None:
            tp = pattern_of(fqn, self._maps[mapped], shapes)
            return Rule((exactly(fqn),), tp, origin="affine_map")
        refused = None if self._degree == 1 else _match(self._refused, fqn)
        if refused is not None:
            reason = mapping_of(self._info[_REFUSED], _REFUSED)[refused]
            raise UnsupportedSourceError(
                f"the tensor-parallel layout of {fqn!r} is not described in the checkpoint: {reason}.",
                hint="Say how it lies with patterns=.",
            )
        return self._listed(fqn, shapes)

    def _listed(self, fqn: str, shapes: Sequence[tuple[int, ...]]) -> Rule | None:
        """The rule of the lists; what one of them says of the vocabulary comes on top of the others."""
        if self._degree > 1:
            _match(self._lists, fqn)
        rule = self._lists.find(fqn, len(shapes[0]))
        if rule is None or rule.pad is None:
            return rule
        base = self._unpadded.find(fqn, len(shapes[0]))
        if base is None:
            if self._degree > 1:
                return None
            base = changed(rule, pad=None)
        whole = base.observed(fqn, shapes).shape
        # Other tables than the vocabulary may be listed, too: only what has the padded size is padded.
        return changed(base, pad=rule.pad) if whole and whole[0] == rule.pad.size else base

    def _unknown(self, fqn: str, children: Sequence[Geometry]) -> PatternError:
        found = "does not say" if self._info else "has no universal_checkpoint_info: nothing says"
        shapes = ", ".join(str(list(child.shape)) for child in children)
        presets = ", ".join(Patterns.presets())
        return PatternError(
            f"the checkpoint {found} how {fqn!r} lies on {self._degree} tensor-parallel ranks: found local"
            f" shapes {shapes}.",
            kind=Kind.UNMATCHED,
            hint=f"Give rules with patterns= (--patterns): a TOML file with such as [[rule]] match = {fqn!r},"
            f' tp = "replicate" (norms), "shard(0)" or "shard(1)" (row-parallel weights), or a preset ({presets}).'
            " The saving run can record them as tp_replicated_parameter_patterns and its like.",
            fqn=fqn,
        )


class OneRank:
    """Instead of `TensorParallel`: what one tensor-parallel rank holds, as it is.

    Parameters
    ----------
    rank, degree : int
    rules : TensorParallel
        Tried on every parameter, so that `patterns` tells what is known of the whole ones.

    Raises
    ------
    PatternError
        There is no such rank.
    """

    def __init__(self, rank: int, degree: int, rules: TensorParallel) -> None:
        if not 0 <= rank < degree:
            raise PatternError(
                f"cannot open the local tensors of tensor-parallel rank {rank}: there are {degree}.",
                kind=Kind.NOT_FOUND,
            )
        self._rank, self._rules = rank, rules

    def merge(self, fqn: str, children: Sequence[Geometry]) -> Merged:
        """The rank's local tensor."""
        with suppress(
            PatternError, UnsupportedSourceError
        ):  # it need not be known how they fit together
            self._rules.merge(fqn, children)
        return Merged(children[self._rank], "")

    def merge_buffer(self, fqn: str, children: Sequence[Geometry]) -> Merged:
        """The rank's own buffer."""
        return Merged(children[self._rank], "")

    def patterns(self) -> Patterns:
        """The rules that are known, though nothing is put together."""
        return self._rules.patterns()

    def padded(self) -> dict[str, list[int]]:
        """None: padding is part of what a rank holds."""
        return {}

    def warnings(self) -> list[str]:
        """None."""
        return []


def _listed(key: str, info: Mapping[str, Any]) -> Patterns:
    """A list of names whose rules do not matter."""
    match = prefixes(info, key)
    return Patterns((Rule(match, Replicate(), origin=key),) if match else ())


def _match(lists: Patterns, fqn: str) -> str | None:
    """The regex that matches, if any.

    Raises
    ------
    PatternError
        Several of one list do, which DeepSpeed refuses, too (``AMBIGUOUS``).
    """
    found: dict[str, list[str]] = {}
    for rule, one in lists.matching(fqn):
        if rule.origin != DEFAULT:
            found.setdefault(rule.origin, []).append(str(one))
    first = next((key for key in found if key != VOCABULARY), VOCABULARY)
    for key in (first, VOCABULARY):
        same = found.get(key, ())
        if len(same) > 1:
            raise PatternError(
                f"{len(same)} patterns of {key} match {fqn!r}: {', '.join(map(repr, same))}.",
                kind=Kind.AMBIGUOUS,
                fqn=fqn,
            )
    return next(iter(found.get(first, ())), None)


def _true_shape(held: Held, pad: Padding | None) -> tuple[int, ...]:
    if pad is None or not held.is_padded:
        return held.shape
    return (*held.shape[: pad.dim], pad.true_size, *held.shape[pad.dim + 1 :])


def _agrees(rule: Rule, fqn: str, shape: tuple[int, ...], held: Held) -> bool:
    """Whether the rule, which knows no widths, would put the same elements on every rank."""
    size = held.axes[-1].size
    try:
        return rule.held(fqn, shape, size).resolved() == held.resolved()
    except PatternError:
        return False


def _words(held: Held) -> str:
    tp = held.tp
    if held.axes[-1].size == 1:
        words = ""
    elif isinstance(tp, Shard):
        words = f"shard({tp.dim})"
    elif isinstance(tp, ShardNC):
        words = f"shard-nc({tp.dim})"
    else:
        words = "blocks" if isinstance(tp, Explicit) else str(tp)
    return f"{words} pad(0)".strip() if held.is_padded else words
