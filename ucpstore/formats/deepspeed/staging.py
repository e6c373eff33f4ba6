"""Which pipeline stage holds which layers, told by what the stages' optimizers hold.

Without ZeRO the model files of a pipeline name no parameters at all. Stages hold consecutive layers
(``PipelineModule._partition_layers`` of DeepSpeed's ``runtime/pipe/module.py``), and every stage's optimizer
has states in the shapes of its layers' parameters, and in those of the tied modules that it uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

__all__ = ["Amounts", "Held", "Stage", "assign"]

Amounts: TypeAlias = Counter[Hashable]
"""How many parameters there are of every shape; of flat groups, how many elements."""

_TIED = 12
"""Tied modules whose combinations are tried."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the optimizer of a stage holds.

    Attributes
    ----------
    amounts : Counter
    unknown : int
        Parameters without states, whose shapes are not known.
    """

    amounts: Amounts
    unknown: int = 0

    def may_hold(self, parts: Amounts) -> bool:
        """Whether it can hold these, and maybe more."""
        return (parts - self.amounts).total() <= self.unknown

    def holds(self, parts: Amounts) -> bool:
        """Whether it can hold just these."""
        more = (parts - self.amounts).total()
        return more == self.unknown and not self.amounts - parts


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers with names of their own, and keys of tied modules."""

    layers: tuple[int, ...]
    tied: tuple[str, ...]


def assign(
    held: Sequence[Held],
    layers: Mapping[int, Amounts],
    tied: Mapping[str, Amounts],
    fixed: Mapping[int, int],
) -> list[tuple[Stage, ...]]:
    """Ways to give all layers to the stages: none, the only one, or two of several.

    Parameters
    ----------
    held : sequence of Held
        By stage.
    layers : mapping of int to Counter
        What the layers with names of their own hold; those that hold nothing are left out.
    tied : mapping of str to Counter
        The same of tied modules, which any number of stages may hold.
    fixed : mapping of int to int
        The stage of layers where it is known.

    Examples
    --------
    >>> one, two = Counter({(2, 3): 1}), Counter({(2, 3): 2})
    >>> assign([Held(one), Held(two)], {0: one, 1: one, 4: one}, {}, {})
    [(Stage(layers=(0,), tied=()), Stage(layers=(1, 4), tied=()))]
    """
    order = sorted(layer for layer, amounts in layers.items() if amounts.total())
    subsets = [*_subsets([key for key, amounts in tied.items() if amounts.total()])]
    sums = {keys: sum((tied[key] for key in keys), Counter()) for keys in subsets}
    steps: list[dict[int, list[tuple[int, tuple[str, ...]]]]] = []
    reached = {0}
    for stage, mine in enumerate(held):
        here: dict[int, list[tuple[int, tuple[str, ...]]]] = {}
        for first in reached:
            following = [(n, layers[n]) for n in order[first:] if fixed.get(n, stage) == stage]
            here[first] = [
                (first + count, keys)
                for count, own in _spans(mine, following, order[first:])
                for keys in subsets
                if mine.holds(own + sums[keys])
            ]
        steps.append(here)
        reached = {end for found in here.values() for end, _ in found}
    ways: dict[int, list[tuple[Stage, ...]]] = {len(order): [()]}
    for here in reversed(steps):
        ways = {
            first: [
                (Stage(tuple(order[first:end]), keys), *others)
                for end, keys in found
                for others in ways.get(end, ())
            ][:2]
            for first, found in here.items()
        }
    return ways.get(0, [])


def _spans(
    held: Held, may: Sequence[tuple[int, Amounts]], order: Sequence[int]
) -> Iterator[tuple[int, Amounts]]:
    """How many of the layers in ``order`` a stage may hold, and what these hold."""
    own: Amounts = Counter()
    yield 0, own
    for count, (layer, amounts) in enumerate(may):
        own = own + amounts
        if layer != order[count] or not held.may_hold(own):
            return
        yield count + 1, own


def _subsets(keys: Sequence[str]) -> Iterable[tuple[str, ...]]:
    sizes = range(len(keys) + 1) if len(keys) <= _TIED else (0, len(keys))
    for size in sizes:
        yield from combinations(keys, size)
