"""Comparing two checkpoints of any format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from ucpstore.contracts import Arrays, CommonState, Source, StateSpec
from ucpstore.dtypes import numpy_dtype
from ucpstore.inspect.stream import block_bytes, blocks, in_parallel
from ucpstore.layout.region import Region
from ucpstore.text import printable

__all__ = ["Diff", "StateDiff", "compare_common", "compare_states", "diff_sources"]

DIFF_VERSION = "1.0"
Status = Literal["equal", "changed", "added", "removed", "shape", "dtype"]
_WIDENED = {("bfloat16", "float32"), ("float16", "float32")}
_MISSING = object()


@dataclass(frozen=True, slots=True)
class StateDiff:
    """How one state compares.

    Attributes
    ----------
    fqn, state : str
    status : str
        ``equal`` (bit for bit; a 16-bit optimizer state equals its exact float32 copy), ``changed``,
        ``added`` (only right), ``removed`` (only left), ``shape``, ``dtype``.
    changed : int
        Elements whose bits differ.
    elements : int
    first : tuple of int, optional
        Index of the first of them in C order.
    max_abs : float, optional
        Largest absolute difference among elements that are numbers on both sides.
    detail : str
    """

    fqn: str
    state: str
    status: Status
    changed: int = 0
    elements: int = 0
    first: tuple[int, ...] | None = None
    max_abs: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Diff:
    """Comparison of two checkpoints.

    Attributes
    ----------
    left, right : str
        URLs.
    states : tuple of StateDiff
    common : tuple of str
        Paths in the common state whose values differ.
    """

    left: str
    right: str
    states: tuple[StateDiff, ...]
    common: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether everything is equal."""
        return not self.common and all(state.status == "equal" for state in self.states)

    def to_json(self) -> dict[str, Any]:
        """As JSON values (``schemas/diff.schema.json``)."""
        return {
            "version": DIFF_VERSION,
            "left": self.left,
            "right": self.right,
            "equal": self.equal,
            "counts": self.counts(),
            "states": [
                {
                    **asdict(s),
                    "first": None if s.first is None else list(s.first),
                    "max_abs": _finite(s.max_abs),
                }
                for s in self.states
                if s.status != "equal"
            ],
            "common": list(self.common),
        }

    def counts(self) -> dict[str, int]:
        """Number of states by status."""
        found: dict[str, int] = {}
        for state in self.states:
            found[state.status] = found.get(state.status, 0) + 1
        return dict(sorted(found.items()))

    def summary(self, *, show_all: bool = False) -> str:
        """Worst first, as text."""
        shown = [s for s in self.states if show_all or s.status != "equal"]
        shown.sort(
            key=lambda s: (s.status == "equal", -(s.changed / max(s.elements, 1)), s.fqn, s.state)
        )
        lines = [_line(state) for state in shown]
        lines += [f"common   {printable(path)}" for path in self.common]
        counts = ", ".join(f"{count} {status}" for status, count in self.counts().items())
        common = f"{len(self.common)} differences" if self.common else "equal"
        return "\n".join([*lines, f"states: {counts or 'none'}; common state: {common}"])


def _line(state: StateDiff) -> str:
    text = f"{state.status:<8} {printable(state.fqn)} {printable(state.state)}"
    if state.status == "changed":
        text += f": {state.changed} of {state.elements} elements, first at {state.first}"
        text += "" if state.max_abs is None else f", max |difference| {state.max_abs:.3g}"
    return f"{text}: {state.detail}" if state.detail else text


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def diff_sources(left: Source, right: Source) -> Diff:
    """Compare every state and the common state of two open checkpoints.

    Derived states (16-bit copies of masters) count only where both sides hold them.
    """
    pairs = list(_pairs(left, right))
    states = in_parallel(lambda pair: compare_states(left, right, *pair), pairs)
    return Diff(
        left=left.url,
        right=right.url,
        states=tuple(states),
        common=tuple(compare_common(left.common, right.common)),
    )


_Pair = tuple[str, str, StateSpec | None, StateSpec | None]


def _pairs(left: Source, right: Source) -> Iterator[_Pair]:
    sides = [_specs(left), _specs(right)]
    for fqn, state in dict.fromkeys([*sides[0], *sides[1]]):
        a, b = (side.get((fqn, state)) for side in sides)
        lone = b if a is None else a if b is None else None
        if lone is None or not lone.derived:
            yield fqn, state, a, b


def _specs(source: Source) -> dict[tuple[str, str], StateSpec]:
    found = {
        (fqn, name): spec
        for fqn, parameter in source.parameters.items()
        for name, spec in parameter.states.items()
    }
    return found | {(CommonState.FQN, name): spec for name, spec in source.common.tensors.items()}


def compare_states(
    left: Source, right: Source, fqn: str, state: str, a: StateSpec | None, b: StateSpec | None
) -> StateDiff:
    """Compare one state, streaming both sides in blocks."""
    if a is None or b is None:
        return StateDiff(fqn, state, "added" if a is None else "removed")
    if a.shape != b.shape:
        return StateDiff(fqn, state, "shape", detail=f"{list(a.shape)} against {list(b.shape)}")
    if (
        a.dtype != b.dtype
        and (a.dtype, b.dtype) not in _WIDENED
        and (b.dtype, a.dtype) not in _WIDENED
    ):
        return StateDiff(fqn, state, "dtype", detail=f"{a.dtype} against {b.dtype}")
    elements = math.prod(a.shape)
    digests = left.digest(fqn, state), right.digest(fqn, state)
    if digests[0] is not None and digests[0] == digests[1]:
        return StateDiff(fqn, state, "equal", elements=elements)
    changed, first, largest = 0, None, None
    for region in blocks(a, min(block_bytes(left), block_bytes(right))):
        values = [_read(side, fqn, spec, region) for side, spec in ((left, a), (right, b))]
        if a.dtype != b.dtype:
            values = [v.astype(np.float32) for v in values]
        different = _bits(values[0]) != _bits(values[1])
        count = int(different.sum())
        if count:
            if first is None:
                at = np.unravel_index(int(different.argmax()), region.sizes)
                first = tuple(int(i) + o for i, o in zip(at, region.offsets, strict=True))
            changed += count
            largest = _max_abs(values, largest)
    if not changed:
        return StateDiff(fqn, state, "equal", elements=elements)
    return StateDiff(fqn, state, "changed", changed, elements, first, largest)


def _read(source: Source, fqn: str, spec: StateSpec, region: Region) -> Arrays:
    out = np.empty(region.sizes, numpy_dtype(spec.dtype))
    source.read(fqn, spec.name, region, out)
    return out


def _bits(values: Arrays) -> Arrays:
    """One opaque word per element, so that NaN equals NaN and -0.0 differs from 0.0."""
    words = np.ascontiguousarray(values).reshape(-1)
    if words.itemsize <= 8:
        return words.view(f"u{words.itemsize}")
    return words.view(f"V{words.itemsize}")


def _max_abs(values: list[Arrays], largest: float | None) -> float | None:
    kind = values[0].dtype.kind
    if kind in "bc":
        return largest
    wide = [v.astype(np.float64) for v in values]
    with np.errstate(invalid="ignore"):
        gaps = np.abs(wide[0] - wide[1])
    gaps = gaps[np.isfinite(gaps)]
    if not gaps.size:
        return largest
    return max(float(gaps.max()), 0.0 if largest is None else largest)


def compare_common(left: CommonState, right: CommonState) -> Iterator[str]:
    """Paths at which two common states differ; how parameters lie on ranks is not state."""
    mine, theirs = (
        {key: value for key, value in common.document.items() if key != "patterns"}
        for common in (left, right)
    )
    yield from compare_documents(mine, theirs)


def compare_documents(left: Any, right: Any, path: str = "") -> Iterator[str]:
    """Paths at which two JSON values differ, each with both values."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in dict.fromkeys([*left, *right]):
            inner = f"{path}.{key}" if path else str(key)
            yield from compare_documents(left.get(key, _MISSING), right.get(key, _MISSING), inner)
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            yield from compare_documents(a, b, f"{path}[{index}]")
    elif type(left) is not type(right) or left != right:
        yield f"{path}: {_short(left)} against {_short(right)}"


def _short(value: Any) -> str:
    text = "absent" if value is _MISSING else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
