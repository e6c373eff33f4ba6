"""What every tensor-parallel rank holds, side by side: local shapes, and contents bit by bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ucpstore.contracts import Arrays, ParameterSpec, Role, Source, StateSpec
from ucpstore.dtypes import numpy_dtype
from ucpstore.errors import Kind, PlanError
from ucpstore.inspect.stream import block_bytes, blocks
from ucpstore.layout.region import Region

__all__ = ["Contents", "Difference", "RankViews"]

_Shape = tuple[int, ...]
_CLOSE = 0.25
"""Independent values differ by as much as they are large; copies that drifted apart by far less."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What the bits of one parameter on all ranks say.

    Attributes
    ----------
    states : tuple of str
        States that were compared.
    classes : tuple of tuple of int
        Ranks whose bits are the same in every state.
    informative : tuple of str
        States in which some ranks are the same and hold more than one value: a tensor full of ones or zeros is
        the same everywhere, however it is cut.
    differs : str
        The first state that tells ranks apart.
    max_abs : float, optional
        Largest absolute difference to the first rank in the block that tells them apart.
    close : bool
        That is small beside the values, as of copies that drifted apart.
    """

    states: tuple[str, ...]
    classes: tuple[tuple[int, ...], ...]
    informative: tuple[str, ...] = ()
    differs: str = ""
    max_abs: float | None = None
    close: bool = False

    @property
    def equal(self) -> bool:
        """Whether all ranks hold the same bits."""
        return len(self.classes) == 1

    @property
    def partly(self) -> bool:
        """Whether some, but not all ranks hold the same bits, and these bits say something."""
        return 1 < len(self.classes) < sum(map(len, self.classes)) and bool(self.informative)


@dataclass(frozen=True, slots=True)
class Difference:
    """How the state of one rank differs from the first rank's.

    Attributes
    ----------
    state : str
    rank : int
    changed, elements : int
    first : tuple of int
        Index of the first element whose bits differ, in C order.
    max_abs : float, optional
        Among elements that are numbers on both ranks.
    """

    state: str
    rank: int
    changed: int
    elements: int
    first: _Shape
    max_abs: float | None


class RankViews:
    """The local tensors of all tensor-parallel ranks.

    Parameters
    ----------
    sources : sequence of Source
        One for every tensor-parallel rank, in rank order, with what that rank holds.

    Raises
    ------
    PlanError
        There is none, or their degree of tensor parallelism is not their number.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        if not sources:
            raise PlanError("no tensor-parallel rank was given, expected one source for each.")
        degree = sources[0].parallelism.get("tp", len(sources))
        if degree != len(sources):
            raise PlanError(
                f"{sources[0].url} is of {degree} tensor-parallel ranks: found {len(sources)} sources, expected one"
                " for each.",
                kind=Kind.SHAPE,
            )
        self.url = sources[0].url
        self._shapes: dict[str, tuple[_Shape | None, ...]] = {}

    @property
    def degree(self) -> int:
        """Number of tensor-parallel ranks."""
        return len(self._sources)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Parameters of any rank, in their order; buffers are not cut, and are none."""
        found = dict.fromkeys(name for source in self._sources for name in source.parameters)
        return tuple(name for name in found if not self._is_buffer(name))

    def _is_buffer(self, fqn: str) -> bool:
        states = [spec for one in self._specs(fqn) if one for spec in one.states.values()]
        return all(spec.role is Role.BUFFER for spec in states)

    def _specs(self, fqn: str) -> list[ParameterSpec | None]:
        return [source.parameters.get(fqn) for source in self._sources]

    def shapes(self, fqn: str) -> tuple[_Shape | None, ...]:
        """Local shape on every rank; None where a rank lacks the parameter."""
        found = self._shapes.get(fqn)
        if found is None:
            specs = self._specs(fqn)
            found = tuple(None if spec is None else _main(spec.states).shape for spec in specs)
            self._shapes[fqn] = found
        return found

    def ndim(self, fqn: str) -> int:
        """Number of dims, on the first rank that has it."""
        return next(len(shape) for shape in self.shapes(fqn) if shape is not None)

    def _states(self, fqn: str) -> dict[str, list[StateSpec]]:
        """States that all ranks hold, without those that follow from others."""
        specs = [spec for spec in self._specs(fqn) if spec is not None]
        shared = [name for name in specs[0].states if all(name in spec.states for spec in specs)]
        kept = [name for name in shared if not specs[0].states[name].derived] or shared
        return {name: [spec.states[name] for spec in specs] for name in kept}

    def contents(self, fqn: str) -> Contents:
        """Compare all ranks' bits; reads until they are told apart, a block at a time."""
        ranks = [rank for rank, spec in enumerate(self._specs(fqn)) if spec is not None]
        classes = [tuple(ranks)]
        informative, differs = [], ""
        apart: _Comparison | None = None
        states = self._states(fqn)
        for name, specs in states.items():
            by_rank = dict(zip(ranks, specs, strict=True))
            found = _Comparison(self._sources, fqn, by_rank)
            before, classes = classes, [c for group in classes for c in found.split(group)]
            if len(classes) > len(before) and not differs:
                differs, apart = name, found
            if found.informative:
                informative.append(name)
            if len(classes) == len(ranks):
                break
        return Contents(
            tuple(states),
            tuple(classes),
            tuple(informative),
            differs,
            None if apart is None else apart.max_abs,
            apart is not None and apart.close,
        )

    def differences(self, fqn: str) -> list[Difference]:
        """Where the ranks' copies differ from the first rank's: every state, read to the end."""
        found = []
        for specs in self._states(fqn).values():
            for rank in range(1, len(specs)):
                if specs[rank].shape == specs[0].shape and specs[rank].dtype == specs[0].dtype:
                    one = self._difference(fqn, specs[0], rank)
                    found += [one] if one else []
        return found

    def _difference(self, fqn: str, spec: StateSpec, rank: int) -> Difference | None:
        changed, first, largest = 0, None, None
        for region in blocks(spec, block_bytes(self._sources[0]) // 2):
            mine, other = (_read(self._sources[r], fqn, spec, region) for r in (0, rank))
            different = _bits(mine) != _bits(other)
            count = int(different.sum())
            if not count:
                continue
            if first is None:
                at = np.unravel_index(int(different.argmax()), region.sizes)
                first = tuple(int(i) + o for i, o in zip(at, region.offsets, strict=True))
            changed += count
            largest = _max_abs(mine, other, largest)
        if first is None:
            return None
        return Difference(spec.name, rank, changed, math.prod(spec.shape), first, largest)


class _Comparison:
    """Telling the ranks apart by one state."""

    def __init__(self, sources: Sequence[Source], fqn: str, specs: Mapping[int, StateSpec]) -> None:
        self._sources, self._fqn, self._specs = sources, fqn, specs
        self.informative = False
        self.max_abs: float | None = None
        self._scale = 0.0

    @property
    def close(self) -> bool:
        """Whether differences are small beside the values."""
        return self.max_abs is not None and self.max_abs <= _CLOSE * self._scale

    def split(self, group: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The classes of equal bits among ranks that were equal so far."""
        kinds: dict[tuple[_Shape, str], list[int]] = {}
        for rank in group:
            spec = self._specs[rank]
            kinds.setdefault((spec.shape, spec.dtype), []).append(rank)
        return [found for ranks in kinds.values() for found in self._split(tuple(ranks))]

    def _split(self, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        classes = [ranks]
        seen: dict[int, tuple[Arrays, bool]] = {}  # first value, and whether others followed
        spec = self._specs[ranks[0]]
        for region in blocks(spec, block_bytes(self._sources[0]) // len(ranks)):
            if all(len(one) == 1 for one in classes):
                break
            refined = []
            for one in classes:
                held: list[tuple[Arrays, Arrays, list[int]]] = []
                for rank in one if len(one) > 1 else ():
                    values = _read(self._sources[rank], self._fqn, spec, region)
                    self._place(held, values, rank)
                value, several = seen.get(one[0], (None, False))
                for _, words, members in held:
                    known = words[:1] if value is None else value
                    seen[members[0]] = known, several or bool((words != known).any())
                refined += [tuple(members) for _, _, members in held] or [one]
            classes = refined
        if any(len(one) > 1 and seen.get(one[0], (None, False))[1] for one in classes):
            self.informative = True
        return classes

    def _place(
        self, held: list[tuple[Arrays, Arrays, list[int]]], values: Arrays, rank: int
    ) -> None:
        words = _bits(values)
        for _, known, members in held:
            if np.array_equal(known, words):
                members.append(rank)
                return
        if held:
            self.max_abs = _max_abs(held[0][0], values, self.max_abs)
            zeros = np.zeros_like(values)
            for one in (held[0][0], values):
                self._scale = _max_abs(one, zeros, self._scale) or 0.0
        held.append((values, words, [rank]))


def _main(states: Mapping[str, StateSpec]) -> StateSpec:
    """The state whose shape is the parameter's."""
    for role in (Role.MASTER_WEIGHT, Role.MODEL_WEIGHT):
        for spec in states.values():
            if spec.role is role:
                return spec
    return next(iter(states.values()))


def _read(source: Source, fqn: str, spec: StateSpec, region: Region) -> Arrays:
    out = np.empty(region.sizes, numpy_dtype(spec.dtype))
    source.read(fqn, spec.name, region, out)
    return out


def _bits(values: Arrays) -> Arrays:
    """One word per element, so that NaN equals NaN and -0.0 differs from 0.0."""
    words = np.ascontiguousarray(values).reshape(-1)
    return words.view(f"u{words.itemsize}" if words.itemsize <= 8 else f"V{words.itemsize}")


def _max_abs(left: Arrays, right: Arrays, largest: float | None) -> float | None:
    if left.dtype.kind in "bc":
        return largest
    with np.errstate(invalid="ignore"):
        gaps = np.abs(left.astype(np.float64) - right.astype(np.float64))
    gaps = gaps[np.isfinite(gaps)]
    if not gaps.size:
        return largest
    return max(float(gaps.max()), 0.0 if largest is None else largest)
