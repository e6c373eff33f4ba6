"""The pipeline of a target: which layers its stages hold, and where tied modules are used.

Names are those of a ``PipelineModule`` (``runtime/pipe/module.py``): ``"{layer}.{local}"``, and
``"tied_modules.{key}.{local}"`` for a module that several layers use; every stage of such a layer holds a
copy. Entries that are functions have a number, but no tensors: a checkpoint does not tell how many there
are at the end, nor which of them use a tied module (``TiedLayerSpec`` with a ``forward_fn``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ucpstore.errors import Kind, PlanError, listing
from ucpstore.formats.deepspeed.checks import integers, mapping_of, sequence_of
from ucpstore.layout import partition
from ucpstore.layout.parallel import Layout

__all__ = ["TIED", "Pipeline", "is_pipeline", "make_pipeline"]

TIED = "tied_modules."
_MAX_LAYERS = 10_000
_METHODS = ("parameters", "uniform")
_OF_TIED = ("layers", "stages")
_NAME = re.compile(r"(?P<prefix>(?P<layer>\d+)\.|tied_modules\.(?P<key>[^.]+)\.)(?P<local>.+)")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Layers, and the stages that hold them.

    Attributes
    ----------
    bounds : tuple of int
        The first layer of every stage, and the number of layers.
    files : mapping of int to str
        Layers that have a file: what the names of their tensors start with.
    holders : mapping of str to tuple of int
        Tied modules, by what their names start with: the stages that use them.
    warnings : tuple of str
    """

    bounds: tuple[int, ...]
    files: Mapping[int, str]
    holders: Mapping[str, tuple[int, ...]]
    warnings: tuple[str, ...] = ()

    def stage_of(self, layer: int) -> int:
        """The stage that holds a layer."""
        stages = len(self.bounds) - 1
        return next((s for s in range(stages) if layer < self.bounds[s + 1]), stages - 1)

    def stages(self, fqn: str) -> tuple[int, ...]:
        """The stages that hold a parameter or buffer."""
        prefix, layer = _split(fqn)
        return self.holders[prefix] if layer is None else (self.stage_of(layer),)

    def to_json(self) -> dict[str, Any]:
        """The stages' first layers, layers with files, and holders of tied modules."""
        return {
            "bounds": list(self.bounds),
            "layers": sorted(self.files),
            "tied": {p.split(".")[1]: list(stages) for p, stages in self.holders.items()},
        }


def _split(fqn: str) -> tuple[str, int | None]:
    """What a name starts with, and the number of its layer; None for a tied module."""
    found = _NAME.fullmatch(fqn)
    if found is None:
        raise PlanError(
            f"{fqn!r} is no name of a PipelineModule: expected 'N.local' or 'tied_modules.KEY.local'.",
            kind=Kind.NAME,
            hint="A model that is no PipelineModule is written with pp=1 and pipeline=False; to make it one, its"
            " parameters must be renamed.",
        )
    return found["prefix"], None if found["layer"] is None else int(found["layer"])


def is_pipeline(names: Iterable[str], parallelism: Mapping[str, Any], facts: object) -> bool:
    """Whether a source is a checkpoint of a ``PipelineModule``.

    Numbers at the start of names alone do not tell: those of a ``torch.nn.Sequential`` have them, too.
    """
    if "mapping" in parallelism:  # the source's pipeline was one of other names
        return any(name.startswith(TIED) for name in names)
    pp = parallelism.get("pp", 1)
    return (
        isinstance(facts, Mapping)
        or (isinstance(pp, int) and pp > 1)
        or any(name.startswith(TIED) for name in names)
    )


@dataclass(slots=True)
class _Known:
    """What is known of the layers.

    Attributes
    ----------
    own : dict of int to int
        Layers with names of their own: the number of trainable elements.
    tied : dict of str to int
        The same of tied modules, by key.
    stages : list of list of int
        The source's own layers per stage; empty where it does not tell.
    files, held : dict of str to tuple of int
        Per tied module, layers that had a file in the source, and stages that held it.
    """

    own: dict[int, int]
    tied: dict[str, int]
    stages: list[list[int]]
    files: dict[str, tuple[int, ...]]
    held: dict[str, tuple[int, ...]]

    def range_of(self, stage: int, layers: int) -> range:
        """Layers that a stage of the source may have had."""
        before = [layer for own in self.stages[:stage] for layer in own]
        after = [layer for own in self.stages[stage + 1 :] for layer in own]
        return range(max(before, default=-1) + 1, min(after, default=layers))

    def hidden(self, key: str) -> list[int]:
        """Stages of the source that held a tied module without a file of it: it was under a function."""
        if len(self.held.get(key, ())) < 2:
            return []
        far = 1 + max([*self.own, *self.files.get(key, ())], default=0)
        free = list(self.files.get(key, ()))
        hidden = []
        for stage in self.held[key]:
            fitting = next((layer for layer in free if layer in self.range_of(stage, far)), None)
            if fitting is None:
                hidden.append(stage)
            else:
                free.remove(fitting)
        return hidden


def _known(numels: Mapping[str, int], facts: object) -> _Known:
    own: dict[int, int] = {}
    tied: dict[str, int] = {}
    for fqn, numel in numels.items():
        prefix, layer = _split(fqn)
        if layer is None:
            key = prefix.split(".")[1]
            tied[key] = tied.get(key, 0) + numel
        else:
            own[layer] = own.get(layer, 0) + numel
    known = _Known(own, tied, [], {}, {})
    if facts is not None:
        found = mapping_of(facts, "pipeline")
        stages = sequence_of(found.get("stages"), "pipeline: stages")
        known.stages = [[*integers(stage, "pipeline: stages")] for stage in stages]
        for key, value in mapping_of(found.get("tied"), "pipeline: tied").items():
            entry = mapping_of(value, f"pipeline: tied: {key!r:.60}")
            layers, held = (integers(entry.get(n), f"pipeline: tied: {n}") for n in _OF_TIED)
            if key in tied:
                known.files[key], known.held[key] = layers, held
    return known


def make_pipeline(numels: Mapping[str, int], facts: object, layout: Layout) -> Pipeline:
    """Decide which stage holds what.

    Parameters
    ----------
    numels : mapping of str to int
        Every parameter and buffer: its trainable elements on the target's first tensor-parallel rank
        (``_count_layer_params`` counts these).
    facts : mapping or None
        What the source's reader saw: ``stages`` and ``tied`` of `Layers.facts`.
    layout : Layout

    Raises
    ------
    PlanError
        Names are not a pipeline's, the layout contradicts the layers, or says too little.
    """
    known = _known(numels, facts)
    uses = _uses(known, layout)
    layers = _count(known, uses, layout)
    last = layers - 1
    # None stands for the last layer, whose number is known by now
    placed = {k: tuple(sorted({last if u is None else u for u in v})) for k, v in uses.items()}
    bounds, warnings = _bounds(known, placed, layers, layout)
    files = {layer: f"{layer}." for layer in known.own}
    for key, where in placed.items():
        shown = None if key in layout.uses else known.files.get(key)
        for layer in shown or where:
            if layer in known.own:
                raise PlanError(
                    f"layer {layer} has parameters of its own, so it cannot use the tied module {key!r}.",
                    kind=Kind.AMBIGUOUS,
                    hint=f"Say which layers do, as in tied={key}:0:7.",
                )
            files[layer] = f"{TIED}{key}."
    found = Pipeline(bounds, dict(sorted(files.items())), {}, tuple(warnings))
    holders = {
        f"{TIED}{key}.": tuple(sorted({found.stage_of(layer) for layer in where}))
        for key, where in placed.items()
    }
    kept = layout.pp == len(known.stages)
    for key, layers_of in uses.items():
        held = holders[f"{TIED}{key}."]
        same = layout.pp == 1 or (kept and known.held.get(key) == held)
        if None in layers_of and not (same and key in known.files):
            told = listing([layer for layer in layers_of if layer is not None])
            warnings.append(
                f"the tied module {key!r} is taken to be used by layers {told} and the last one, as usual: no"
                f" checkpoint tells where functions use one. If that is wrong, say tied={key}:..."
            )
    return Pipeline(bounds, found.files, holders, tuple(warnings))


def _uses(known: _Known, layout: Layout) -> dict[str, list[int | None]]:
    """Layers that use every tied module; None stands for the last one, whose number may not be known."""
    unknown = [key for key in layout.uses if key not in known.tied]
    if unknown:
        raise PlanError(
            f"layout tied: there is no tied module {listing(unknown)}, expected some of"
            f" {listing(sorted(known.tied)) or 'none'}.",
            kind=Kind.NAME,
        )
    uses: dict[str, list[int | None]] = {}
    for key in known.tied:
        if key in layout.uses:
            uses[key] = list(layout.uses[key])
            continue
        files = list(known.files.get(key, ()))
        hidden = known.hidden(key)
        end = len(known.stages) - 1
        if layout.pp > 1 and any(stage != end for stage in hidden):
            raise PlanError(
                f"which layers use the tied module {key!r} is not known: stages {listing(known.held[key])} of the"
                f" source held it, but only layers {listing(files)} have a file of it.",
                hint=f"Say them all, as in tied={key}:0:7.",
            )
        at_end = len(known.stages) < 2 or end in known.held.get(key, (end,))
        if hidden or (len(files) < 2 and at_end):
            uses[key] = [*(files or [0]), None]
        else:
            uses[key] = list(files)
    return uses


def _count(known: _Known, uses: Mapping[str, Sequence[int | None]], layout: Layout) -> int:
    """Number of layers; a head without a file is one more."""
    numbers = [*known.own, *(u for found in uses.values() for u in found if u is not None)]
    least = 1 + max(numbers, default=0)
    if layout.layers is not None:
        if layout.layers < least:
            raise PlanError(
                f"layout layers={layout.layers}: layer {least - 1} has parameters, expected at least {least}."
            )
        least = layout.layers
    else:
        least += any(None in found for found in uses.values())
    if least > _MAX_LAYERS:
        raise PlanError(f"a pipeline of {least} layers: expected at most {_MAX_LAYERS}.")
    return least


def _bounds(
    known: _Known, uses: Mapping[str, Sequence[int]], layers: int, layout: Layout
) -> tuple[tuple[int, ...], list[str]]:
    if layout.stages is not None:
        if layout.stages[-1] >= layers:
            raise PlanError(
                f"layout stages: the last stage starts at layer {layout.stages[-1]}, but there are {layers} layers.",
                hint="If there are more, functions at the end, say layers=.",
            )
        return (*layout.stages, layers), []
    if layout.pp == 1:
        return (0, layers), []
    warnings = []
    method = layout.partition
    if method is None and len(known.stages) == layout.pp:
        kept = _kept(known, uses, layers)
        if kept is not None:
            return kept, []
    if method is None:
        fits = [m for m in _METHODS if _made_by(known, uses, layers, m)]
        method = fits[0] if fits else _METHODS[0]
        other = _METHODS[1 - _METHODS.index(method)]
        differ = _placed(known, uses, layers, layout.pp, method) != _placed(
            known, uses, layers, layout.pp, other
        )
        if not fits or (differ and len(fits) > 1):
            found = "both methods make" if fits else "neither method makes"
            found = f"{found} the source's stages" if len(known.stages) > 1 else "nothing tells"
            warnings.append(
                f"layers are spread over the stages by partition={method}, DeepSpeed's default ({found}): if the model"
                f" has another partition_method, its stages are others. Then say partition={other}, or stages=."
            )
    bounds = _by_method(known, uses, layers, layout.pp, method)
    if layout.layers is None:
        stages = [_placed(known, uses, layers + n, layout.pp, method) for n in range(4)]
        if any(other != stages[0] for other in stages):
            warnings.append(
                f"the model is taken to have {layers} layers: no checkpoint tells how many functions follow the last"
                " one with parameters, and other numbers would make other stages. If that is wrong, say layers=."
            )
    return bounds, warnings


def _stage(bounds: Sequence[int], layer: int) -> int:
    return sum(layer >= first for first in bounds[1:-1])


def _by_method(
    known: _Known, uses: Mapping[str, Sequence[int]], layers: int, stages: int, method: str
) -> tuple[int, ...]:
    if method == "uniform":
        return partition.uniform(layers, stages)
    weights = [known.own.get(layer, 0) for layer in range(layers)]
    for key, found in uses.items():
        for layer in found:
            weights[layer] += known.tied[key]
    return partition.balanced(weights, stages)


def _placed(
    known: _Known, uses: Mapping[str, Sequence[int]], layers: int, stages: int, method: str
) -> list[int]:
    """The stage of every layer with parameters; one that uses a tied module at the end is there anyway."""
    bounds = _by_method(known, uses, layers, stages, method)
    far = max(known.own, default=0)
    tied = {layer for found in uses.values() for layer in found if layer < far}
    return [_stage(bounds, layer) for layer in sorted({*known.own, *tied})]


def _made_by(known: _Known, uses: Mapping[str, Sequence[int]], layers: int, method: str) -> bool:
    """Whether a method makes the source's stages, as far as these are known."""
    if len(known.stages) < 2:
        return True
    bounds = _by_method(known, uses, layers, len(known.stages), method)
    return all(
        _stage(bounds, layer) == stage for stage, own in enumerate(known.stages) for layer in own
    )


def _kept(known: _Known, uses: Mapping[str, Sequence[int]], layers: int) -> tuple[int, ...] | None:
    """The source's stages: any cut between the layers of two of them will do."""
    for method in _METHODS:
        if _made_by(known, uses, layers, method) and _same_holders(known, uses, layers, method):
            return _by_method(known, uses, layers, len(known.stages), method)
    bounds = [0]
    for stage in range(1, len(known.stages)):
        here = [*known.stages[stage]]
        for key, held in known.held.items():
            if stage in held:
                here += [n for n in uses[key] if n in known.range_of(stage, layers)]
        if not here:
            return None
        bounds.append(min(here))
    return (*bounds, layers)


def _same_holders(
    known: _Known, uses: Mapping[str, Sequence[int]], layers: int, method: str
) -> bool:
    bounds = _by_method(known, uses, layers, len(known.stages), method)
    return all(
        {_stage(bounds, layer) for layer in uses[key]} == set(held)
        for key, held in known.held.items()
    )
