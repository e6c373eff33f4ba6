"""Parameters and their states, put together from what the files hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from ucpstore.contracts import ParameterSpec, Role, StateSpec
from ucpstore.errors import CorruptSourceError, Kind, UnsupportedSourceError, listing
from ucpstore.formats.deepspeed.autotp import Merged, OneRank, TensorParallel
from ucpstore.formats.deepspeed.module import Census, Model, is_placeholder
from ucpstore.formats.deepspeed.shards import Shard
from ucpstore.formats.deepspeed.states import (
    MASTER,
    UnitState,
    collect_unit,
    name_and_role,
    unit_words,
)
from ucpstore.formats.deepspeed.units import Unit
from ucpstore.formats.torchfile import TensorRef
from ucpstore.layout.geometry import Copies, FlatEven, Geometry, Strided
from ucpstore.pieces import Bound, Buffer

__all__ = ["Assembly"]

WEIGHT = "weight"
BUFFER = "buffer"


class Assembly:
    """Collects parameters; `bound` and `parameters` are the result.

    Parameters
    ----------
    tp : TensorParallel or OneRank
    census : Census
        What the names in ``module`` stand for.
    file_of : callable
        Index in the file table of a file's name.

    Attributes
    ----------
    bound : dict of (fqn, state) to Bound
    stepped : bool
        Some unit has optimizer states.
    warnings : list of str
    """

    def __init__(
        self, tp: TensorParallel | OneRank, census: Census, *, file_of: Callable[[str], int]
    ) -> None:
        self.bound: dict[tuple[str, str], Bound] = {}
        self.stepped = False
        self.warnings: list[str] = []
        self._tp = tp
        self._census = census
        self._file_of = file_of
        self._states: dict[str, dict[str, StateSpec]] = {}
        self._patterns: dict[str, str] = {}
        self._attributes: dict[str, dict[str, str]] = {}
        self._trainable: set[str] = set()

    def add_trainable(
        self, units: Sequence[Sequence[Unit]], shards: Sequence[Sequence[Shard]], tp: int
    ) -> None:
        """Masters and optimizer states of all parameters that the optimizer owns.

        Parameters
        ----------
        units, shards : per model-parallel rank
            Stage by stage of a pipeline, its tensor-parallel ranks.
        tp : int
        """
        held: list[tuple[str, frozenset[str]]] = []
        slots = list(accumulate((len(group) for group in shards), initial=0))
        for index, per_rank in enumerate(zip(*units, strict=True)):
            states = collect_unit(index, list(zip(per_rank, shards, strict=True)), self._file_of)
            self.stepped = self.stepped or len(states) > 1
            holder = next((unit for unit in per_rank if unit.shapes), per_rank[0])
            held.append((unit_words(index, holder), frozenset(states)))
            copies: dict[str, list[Merged]] = {}
            for first in range(0, len(per_rank), tp):
                stage = list(zip(per_rank, slots, strict=False))[first : first + tp]
                if any(list(unit.shapes) != list(stage[0][0].shapes) for unit, _ in stage):
                    raise UnsupportedSourceError(
                        f"group {index} holds other parameters, or in another order, on some tensor-parallel ranks"
                        f" than on the first ({listing(stage[0][0].shapes, cap=3)})."
                    )
                children = [unit.geometries(slot) for unit, slot in stage]
                for entries in zip(*children, strict=True):
                    fqn = entries[0][0]
                    merged = self._tp.merge(fqn, [geometry for _, geometry in entries])
                    copies.setdefault(fqn, []).append(merged)
            for fqn, merges in copies.items():
                united = _unite(fqn, merges)
                self._add_states(fqn, united, states)
                if shards[0][0].stage == 0:  # every rank has it all
                    self._patterns[fqn] = _pattern(united, "dp: replicate")
        self._report_less(held)

    def _report_less(self, held: Sequence[tuple[str, frozenset[str]]]) -> None:
        """Warn of units that have some of another's states and lack others."""
        for words, states in held:
            more = max((other for _, other in held if other > states), key=len, default=states)
            if more - states:
                self.warnings.append(
                    f"the optimizer has no {listing(sorted(more - states))} of {words}, but of other parameters: it"
                    " never stepped these, or the files are incomplete."
                )

    def _add_states(self, fqn: str, merged: Merged, states: Mapping[str, UnitState]) -> None:
        if fqn in self._trainable:
            raise UnsupportedSourceError(
                f"{fqn!r} is in different param groups on the stages that hold it; its copies cannot be compared.",
                fqn=fqn,
            )
        self._trainable.add(fqn)
        self._patterns[fqn] = _pattern(merged, "dp: flat")
        for state, unit in states.items():
            name, role = name_and_role(state)
            bound = Bound(merged.geometry, unit.buffers, unit.dtype, unit.big_endian)
            self._add(fqn, name, role, bound)

    def add_modules(self, replicas: Sequence[Sequence[Model]], stage: int) -> None:
        """16-bit weights and buffers from the model files, or from the files of one layer.

        Parameters
        ----------
        replicas : sequence of sequence of Model
            Copies of the same tensors (tied layers of a pipeline), each one file per tensor-parallel rank.
        stage : int
        """
        models = [model for copy in replicas for model in copy]
        first = models[0]
        shapes = [model.trainable for model in models]
        for fqn in first.module:
            if fqn in self._census.aliases or (
                fqn in self._census.frozen and fqn in first.fragments
            ):
                continue
            refs = [model.module.get(fqn) for model in models]
            local = [per_rank.get(fqn) for per_rank in shapes]
            if fqn in self._trainable:
                # a rank whose slice is empty has what looks like a placeholder, and is
                if stage == 3 and all(
                    ref is None or ref.numel == 0 or is_placeholder(ref, shape)
                    for ref, shape in zip(refs, local, strict=True)
                ):
                    continue
                if self._is_master(fqn, first, refs[0]):
                    continue
                self._require_shapes(fqn, models, local)
                bound, merged = self._whole(fqn, replicas, refs)
                self._add(fqn, WEIGHT, Role.MODEL_WEIGHT, bound, derived=True)
            elif fqn in self._census.buffers:
                bound, merged = self._whole(fqn, replicas, refs, buffer=True)
                self._add(fqn, BUFFER, Role.BUFFER, bound)
                self._patterns[fqn] = _pattern(merged, "dp: replicate")
                if self._census.buffers[fqn]:
                    self._attributes[fqn] = {"note": self._census.buffers[fqn]}
            elif fqn in self._census.frozen and not self._is_lost(fqn, refs[0], stage):
                bound, merged = self._whole(fqn, replicas, refs)
                self._add(fqn, WEIGHT, Role.MODEL_WEIGHT, bound)
                self._patterns[fqn] = _pattern(merged, "dp: replicate")

    def add_frozen(self, models: Mapping[tuple[int, int], Model], stage: int) -> None:
        """Frozen parameters from ``frozen_param_fragments``: whole at stage 2, cut at stage 3.

        Parameters
        ----------
        models : mapping of (mp rank, dp rank) to Model
        stage : int
        """
        degree = 1 + max(mp for mp, _ in models)
        first = models[0, 0]
        for fqn in self._census.frozen:
            if not any(fqn in model.fragments for model in models.values()):
                continue
            _fragment(first, fqn)
            if stage == 3:
                children: list[Geometry] = []
                used: list[tuple[Model, TensorRef]] = []
                for mp in range(degree):
                    group = [models[key] for key in sorted(models) if key[0] == mp]
                    geometry, refs = _fragments(fqn, group, first_slot=len(used))
                    children.append(geometry)
                    used += zip(group, refs, strict=True)
                merged = self._tp.merge(fqn, children)
                bound = self._bind(fqn, merged, used)
                text = "dp: flat"
            else:
                whole = [models[mp, 0] for mp in range(degree)]
                refs = [_fragment(model, fqn) for model in whole]
                for model, ref in zip(whole, refs, strict=True):
                    shape = (model.frozen_shapes or {}).get(fqn)
                    if shape is not None and ref.shape != shape:
                        raise _not_plain(model, fqn, ref, list(shape))
                bound, merged = self._whole(fqn, [whole], refs)
                text = "dp: replicate"
            self._add(fqn, WEIGHT, Role.MODEL_WEIGHT, bound)
            self._patterns[fqn] = _pattern(merged, text)

    def parameters(self, order: Iterable[str]) -> dict[str, ParameterSpec]:
        """All parameters and buffers, those in ``order`` first."""
        others: dict[str, list[str]] = {}
        for alias, fqn in self._census.aliases.items():
            others.setdefault(fqn, []).append(alias)
        first = [fqn for fqn in order if fqn in self._states]
        fqns = dict.fromkeys([*first, *self._states])
        return {
            fqn: ParameterSpec(
                fqn=fqn,
                states=self._states[fqn],
                trainable=fqn in self._trainable,
                aliases=tuple(others.get(fqn, ())),
                pattern=self._patterns.get(fqn, "unique"),
                attributes=self._attributes.get(fqn, {}),
            )
            for fqn in fqns
        }

    def _add(
        self, fqn: str, state: str, role: Role, bound: Bound, *, derived: bool = False
    ) -> None:
        spec = StateSpec(state, role, bound.geometry.shape, bound.dtype, derived)
        self._states.setdefault(fqn, {})[state] = spec
        self.bound[fqn, state] = bound

    def _require_shapes(
        self, fqn: str, models: Sequence[Model], shapes: Sequence[tuple[int, ...] | None]
    ) -> None:
        """The weight in ``module`` must have the shape that ``param_shapes`` says."""
        for model, shape in zip(models, shapes, strict=True):
            ref = model.module.get(fqn)
            if ref is None or ref.shape == shape:
                continue
            if is_placeholder(ref, shape):
                raise UnsupportedSourceError(
                    f"{model.name}: {fqn!r} is a ZeRO-3 placeholder of shape {list(ref.shape)}, expected its weights"
                    f" of shape {list(shape or ())}.",
                    kind=Kind.PLACEHOLDER,
                    hint="The weights are in the optimizer files of the ZeRO-3 run.",
                    fqn=fqn,
                )
            raise CorruptSourceError(
                f"{model.name}: {fqn!r} has shape {list(ref.shape)} in 'module', but {list(shape or ())} in"
                " param_shapes.",
                kind=Kind.SHAPE,
                fqn=fqn,
            )

    def _is_master(self, fqn: str, model: Model, ref: TensorRef | None) -> bool:
        """Whether the weight in ``module`` is the master itself: fp32 without ZeRO."""
        if ref is None:
            return False
        buffer = Buffer(self._file_of(model.name), ref.offset, ref.nbytes)
        return buffer in self.bound[fqn, MASTER].buffers

    def _is_lost(self, fqn: str, ref: TensorRef | None, stage: int) -> bool:
        """A frozen parameter of stage 3 whose fragments were not saved."""
        lost = ref is None or (stage == 3 and is_placeholder(ref, self._census.frozen[fqn]))
        if lost:
            self.warnings.append(
                f"the values of the frozen parameter {fqn!r} were not saved; it is left out."
            )
        return lost

    def _whole(
        self,
        fqn: str,
        replicas: Sequence[Sequence[Model]],
        refs: Sequence[TensorRef | None],
        *,
        buffer: bool = False,
    ) -> tuple[Bound, Merged]:
        """A tensor that every model-parallel rank has whole, or its slice of."""
        models = [model for copy in replicas for model in copy]
        used: list[tuple[Model, TensorRef]] = []
        children: list[Geometry] = []
        for slot, (model, ref) in enumerate(zip(models, refs, strict=True)):
            if ref is None:
                raise CorruptSourceError(
                    f"{model.name}: {fqn!r} is missing in 'module', but {models[0].name} has it.",
                    kind=Kind.MISSING_KEY,
                    fqn=fqn,
                )
            used.append((model, ref))
            strides = None if ref.is_contiguous else ref.strides
            children.append(Strided(ref.shape, slot, 0, strides))
        merge = self._tp.merge_buffer if buffer else self._tp.merge
        tp = len(replicas[0])
        merged = _unite(
            fqn, [merge(fqn, children[at : at + tp]) for at in range(0, len(children), tp)]
        )
        return self._bind(fqn, merged, used), merged

    def _bind(self, fqn: str, merged: Merged, used: Sequence[tuple[Model, TensorRef]]) -> Bound:
        """Bind a geometry whose slot ``i`` is the i-th tensor."""
        first_model, first = used[0]
        for model, ref in used:
            if (ref.dtype, model.big_endian) != (first.dtype, first_model.big_endian):
                raise UnsupportedSourceError(
                    f"{model.name}: {fqn!r} has elements of {ref.dtype}, in {first_model.name} of {first.dtype} (or"
                    " another byte order).",
                    fqn=fqn,
                )
        buffers = tuple(
            Buffer(self._file_of(model.name), ref.offset, ref.span) for model, ref in used
        )
        return Bound(merged.geometry, buffers, first.dtype, first_model.big_endian)


def _fragments(
    fqn: str, models: Sequence[Model], *, first_slot: int
) -> tuple[Geometry, list[TensorRef]]:
    """A frozen parameter cut evenly over data-parallel ranks (``partition_parameters.py``)."""
    shape = (models[0].frozen_shapes or {}).get(fqn)
    if shape is None:
        raise CorruptSourceError(
            f"{models[0].name}: {fqn!r} has a fragment but no shape in frozen_param_shapes.",
            kind=Kind.MISSING_KEY,
            fqn=fqn,
        )
    width = -(-math.prod(shape) // len(models))
    refs = []
    for model in models:
        ref = _fragment(model, fqn)
        if ref.numel != width or not ref.is_contiguous:
            raise _not_plain(model, fqn, ref, [width])
        refs.append(ref)
    return FlatEven(shape, 0, max(width, 1), 0, first_slot, len(models)), refs


def _fragment(model: Model, fqn: str) -> TensorRef:
    ref = model.fragments.get(fqn)
    if not isinstance(ref, TensorRef):
        raise CorruptSourceError(
            f"{model.name}: frozen_param_fragments has no tensor for {fqn!r}.",
            kind=Kind.MISSING_KEY,
            fqn=fqn,
        )
    return ref


def _not_plain(
    model: Model, fqn: str, ref: TensorRef, expected: list[int]
) -> UnsupportedSourceError:
    return UnsupportedSourceError(
        f"{model.name}: the frozen parameter {fqn!r} is stored as {ref.dtype} of shape {list(ref.shape)}, expected"
        f" shape {expected}: quantized or offloaded fragments cannot be read exactly.",
        kind=Kind.SHAPE,
        fqn=fqn,
    )


def _unite(fqn: str, copies: Sequence[Merged]) -> Merged:
    """Copies of a tied parameter on several pipeline stages: they must be equal."""
    first = copies[0]
    if len(copies) == 1:
        return first
    shapes = [list(copy.geometry.shape) for copy in copies]
    if any(shape != shapes[0] for shape in shapes):
        raise CorruptSourceError(
            f"{fqn!r} has different shapes on the pipeline stages that hold it: {shapes}.",
            kind=Kind.SHAPE,
            fqn=fqn,
        )
    geometry = Copies(tuple(copy.geometry for copy in copies), "equal")
    return Merged(geometry, first.pattern, stages=len(copies))


def _pattern(merged: Merged, dp: str) -> str:
    text = f"tp: {merged.pattern}, {dp}" if merged.pattern else dp
    return f"pp: replicate, {text}" if merged.stages > 1 else text
