"""What a native checkpoint is made of: read from a source, checked, and put into the target's words."""

from __future__ import annotations

import math
import struct
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ucpstore.contracts import CommonState, ParameterSpec, Source
from ucpstore.errors import CorruptSourceError, Kind, PlanError, UnsupportedSourceError, listing
from ucpstore.formats.deepspeed.common import NO_SCHEDULER
from ucpstore.formats.deepspeed.decide import decide
from ucpstore.formats.deepspeed.document import checked_common, checked_facts
from ucpstore.formats.deepspeed.groups import is_dealt, read_groups, source_dtype
from ucpstore.formats.deepspeed.pipelining import Pipeline, make_pipeline
from ucpstore.formats.deepspeed.ranks import (
    Group,
    ModelRank,
    Slices,
    buffer_of,
    model_ranks,
)
from ucpstore.formats.deepspeed.scaler import Scaler, decide_scaler
from ucpstore.formats.deepspeed.states import MASTER
from ucpstore.formats.deepspeed.tpinfo import entry_for
from ucpstore.formats.deepspeed.ucpinfo import Member
from ucpstore.formats.deepspeed.wrapper import (
    FUSED,
    TORCH,
    UNFUSED,
    clip_in,
    engine_class,
    section,
)
from ucpstore.gather import Part, Tensor
from ucpstore.layout.parallel import Layout
from ucpstore.layout.rules import Patterns
from ucpstore.tagged import StubObject, TensorName

__all__ = ["Recipe", "known_patterns", "make_recipe", "tensors_in"]

_OLDEST = "0.3.17"
_MOST_LISTED = 200_000
"""Parts of ranks that a plan lists; further ranks are counted."""
_PADDED = {"float32": "f", "float64": "d", "int64": "q", "int32": "i"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that the files of all ranks hold.

    Attributes
    ----------
    source : str
        URL, for messages.
    layout : Layout
        With everything decided that it left open.
    wrapper : str
        The class of DeepSpeed's that will load the files (`ucpstore.formats.deepspeed.wrapper`).
    scaler : Scaler
    groups : tuple of Group
        With logical shapes.
    slices : Slices
        Which slice of every parameter the tensor-parallel ranks hold.
    pipeline : Pipeline or None
        Of a ``PipelineModule``.
    ranks : tuple of ModelRank
        By model-parallel rank.
    universal : mapping or None
        ``universal_checkpoint_info``, right for the target's degree.
    parameters : mapping of str to ParameterSpec
    common : mapping
        The decoded common document.
    tensors : mapping of str to StateSpec
        Of the common state.
    facts : mapping
        The source's own degrees.
    tag : str
    warnings : tuple of str
    """

    source: str
    layout: Layout
    wrapper: str
    scaler: Scaler
    groups: tuple[Group, ...]
    slices: Slices
    pipeline: Pipeline | None
    ranks: tuple[ModelRank, ...]
    universal: Mapping[str, Any] | None
    parameters: Mapping[str, ParameterSpec]
    common: Mapping[str, Any]
    tensors: Mapping[str, Any]
    facts: Mapping[str, Any]
    tag: str
    warnings: tuple[str, ...]

    @property
    def dtype(self) -> str:
        """Element type of the model's weights."""
        return self.layout.dtype or "float32"

    @property
    def group_count(self) -> int:
        """Parameter groups that have parameters."""
        return sum(bool(group.members) for group in self.groups)

    @property
    def prefix(self) -> str:
        """Of optimizer files: the engine's dtype decides (``_get_zero_ckpt_prefix``)."""
        return "bf16_" if self.dtype == "bfloat16" else ""

    @property
    def framework(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.common["framework"]
        return found

    @property
    def zero_version(self) -> str:
        return str(self.framework.get("version") or _OLDEST)

    @property
    def optimizer_facts(self) -> Mapping[str, Any]:
        """What the source's optimizer files had besides tensors."""
        return section(self.framework, "optimizer")

    def label(self, rank: ModelRank, dp: int) -> str | None:
        """The label, in the common state, of the source rank with the same coordinates."""
        labels = ChainMap(self.common.get("rng") or {}, self.common.get("client_by_rank") or {})
        return _label(self.facts, (rank.pp, rank.tp, dp), labels)

    def ucp_info(self) -> dict[str, Any]:
        """Which rank holds which parts (GenUcpMetadata of the UCP paper).

        ``ranks``: per rank and flat buffer, ``[fqn, first element, elements, offset in the buffer]`` of every
        part, in elements of the local tensor. ``slices``: per model-parallel rank, the shape of local
        tensors that are no whole parameters, and their boxes as ``[first index here, first index in the
        parameter, sizes]``.

        Thousands of ranks that each hold parts of thousands of parameters are not listed to the end:
        ``ranks_left_out`` says how many further ranks there are.
        """
        layout = self.layout
        ranks: list[dict[str, Any]] = []
        slices = []
        listed = 0
        for rank in self.ranks:
            if listed > _MOST_LISTED:
                break
            cut = {
                member.fqn: member.local.to_json()
                for group in rank.groups
                for member in group.members
                if member.local is not None
            }
            slices.append({"pp": rank.pp, "tp": rank.tp, "parameters": cut})
            listed += len(cut)
            for dp in range(layout.zero_ranks):
                if listed > _MOST_LISTED:
                    break
                buffers = rank.info.to_json(dp)
                listed += sum(len(buffer["parts"]) for buffer in buffers)
                ranks.append({"pp": rank.pp, "tp": rank.tp, "dp": dp, "buffers": buffers})
        found: dict[str, Any] = {
            "zero_stage": layout.zero_stage,
            "pp": layout.pp,
            "tp": layout.tp,
            "dp": layout.zero_ranks,
            "sub_group_size": layout.sub_group_size,
            "ranks": ranks,
            "slices": slices,
        }
        if len(ranks) < layout.world:
            found["ranks_left_out"] = layout.world - len(ranks)
        if self.pipeline is not None:
            found["pipeline"] = self.pipeline.to_json()
        return found

    def step(self, members: Sequence[Member]) -> Any:
        """The step of a flat buffer as the optimizer keeps it, or None where it has none."""
        where = self.framework.get("optimizer", {}).get("step", {})
        if "state" not in where.get("kept_in", ()):
            return None
        steps = {self.common["steps"].get(member.fqn) for member in members}
        if len(steps) != 1:
            raise UnsupportedSourceError(
                f"{self.source}: parameters that share a flat buffer have different steps"
                f" ({listing(sorted(steps, key=str))}), expected one."
            )
        (step,) = steps
        kind = next(iter(where.get("types", ())), "")
        if step is None or kind not in _PADDED:
            return step
        try:
            data = struct.pack("<" + _PADDED[kind], step if kind.startswith("float") else int(step))
        except (OverflowError, struct.error) as error:
            raise CorruptSourceError(
                f"{self.source}: a step is {step}, expected one that a tensor of {kind} can hold."
            ) from error
        return Tensor(kind, (), data=data)


def tensors_in(value: Any, recipe: Recipe) -> Any:
    """``value`` with the names of common tensors replaced by tensors that are read from the source."""
    if isinstance(value, TensorName):
        spec = recipe.tensors.get(value.name)
        if spec is None:
            raise CorruptSourceError(
                f"{recipe.source}: the common state names a tensor {value.name!r:.60}, which is not stored.",
                kind=Kind.MISSING_KEY,
            )
        part = Part(CommonState.FQN, value.name, spec.shape, 0, math.prod(spec.shape), 0)
        return Tensor(spec.dtype, spec.shape, (part,))
    if isinstance(value, StubObject):
        return StubObject(
            value.module,
            value.qualname,
            tuple(tensors_in(item, recipe) for item in value.args),
            tensors_in(value.state, recipe),
            tensors_in(value.contents, recipe),
        )
    if isinstance(value, dict):
        return {key: tensors_in(item, recipe) for key, item in value.items()}
    if isinstance(value, list):
        return [tensors_in(item, recipe) for item in value]
    if isinstance(value, tuple):
        return tuple(tensors_in(item, recipe) for item in value)
    return value


def make_recipe(source: Source, layout: Layout, patterns: Patterns | None = None) -> Recipe:
    """Check that ``source`` can be written in ``layout``, and decide everything that the layout leaves open.

    Parameters
    ----------
    source : Source
    layout : Layout
    patterns : Patterns, optional
        How parameters lie on tensor-parallel ranks; these rules come before the source's own.

    Raises
    ------
    PlanError
        The layout is not one that is written yet, contradicts the model, or says too little.
    PatternError
        No rule says how a parameter lies on the tensor-parallel ranks.
    UnsupportedSourceError
        The source lacks something that DeepSpeed needs, or has states without a native form.
    CorruptSourceError
        The common state is not what a reader makes of one.
    """
    document, warnings = _without_lost(source.common.document)
    common, facts = checked_common(source, document), checked_facts(source)
    framework = common["framework"]
    if left_out := source.parallelism.get("left_out"):
        raise UnsupportedSourceError(
            f"{source.url} is a selection: {left_out} states of what it was made from were left out; found a part of a"
            " model, expected all of it, as DeepSpeed loads whole models only.",
            kind=Kind.SELECTION,
            hint="Convert again without states, only and exclude.",
        )
    config = framework.get("ds_config")
    config = config if isinstance(config, dict) else {}
    layout, found = decide(source, common, layout, config)
    own = source_dtype(source, config)
    scaler = decide_scaler(common, layout, config=config, own_dtype=own)
    wrapper = engine_class(layout, config, pipeline=bool(layout.pipeline))
    slices = Slices(source.parameters, known_patterns(source, patterns), layout.tp)
    groups = tuple(
        read_groups(source, common, config, warnings, flat=wrapper not in (TORCH, UNFUSED))
    )
    pipeline = None
    if layout.pipeline:
        numels = _numels(source, slices, framework.get("module_extras") or {})
        pipeline = make_pipeline(numels, framework.get("pipeline"), layout)
        _require_together(source, pipeline)
        warnings += pipeline.warnings
    ranks = model_ranks(
        groups,
        source.parameters,
        slices,
        layout,
        pipeline=pipeline,
        dealt=is_dealt(config, layout),
        flat=wrapper == FUSED,
    )
    warnings += [
        *found,
        *_order_warnings(source),
        *_frozen_warnings(source, wrapper),
        *_scheduler_warnings(source, common),
        *scaler.warnings(facts.get("zero_stage", 1), layout.zero_stage),
        *_clip_warnings(source, layout, wrapper, clip_in(framework)),
    ]
    tag = facts.get("tag")
    if not isinstance(tag, str) or not tag:
        tag = f"global_step{common['counters'].get('global_steps', 0)}"
    recipe = Recipe(
        source=source.url,
        layout=layout,
        wrapper=wrapper,
        scaler=scaler,
        groups=groups,
        slices=slices,
        pipeline=pipeline,
        ranks=tuple(ranks),
        universal=entry_for(framework, slices),
        parameters=source.parameters,
        common=common,
        tensors=source.common.tensors,
        facts=facts,
        tag=tag,
        warnings=(),
    )
    return replace(recipe, warnings=(*warnings, *_rng_warnings(recipe)))


def known_patterns(source: Source, patterns: Patterns | None) -> Patterns | None:
    """The given rules, and after them the source's own; None where there are none."""
    document = source.common.document.get("patterns")
    own = Patterns() if document is None else Patterns.from_json(document)
    return (patterns or Patterns()) + own or None


def _numels(source: Source, slices: Slices, extras: Iterable[str]) -> dict[str, int]:
    """Trainable elements of everything that the layers hold, on the first tensor-parallel rank.

    A layer counts what it shares with another one, but a name inside itself only once.
    """
    found = dict.fromkeys(extras, 0)
    for fqn, parameter in source.parameters.items():
        numel = slices.local(fqn, 0).numel if MASTER in parameter.states else 0
        layer = fqn.partition(".")[0]
        found |= {a: 0 if a.partition(".")[0] == layer else numel for a in parameter.aliases}
        found[fqn] = numel
    return found


def _require_together(source: Source, pipeline: Pipeline) -> None:
    """A parameter that two layers share lies on one stage, unless its module is a tied one."""
    for fqn, parameter in source.parameters.items():
        for alias in parameter.aliases:
            here, there = pipeline.stages(fqn), pipeline.stages(alias)
            if here != there:
                raise PlanError(
                    f"{alias!r} is another name of {fqn!r}, but it is on stage {listing(there)}, the other on"
                    f" {listing(here)}: a parameter that stages share must be one of a tied module.",
                    hint="Choose stages= that hold both, or map the names to tied_modules.KEY.",
                )


def _without_lost(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The document without entries of client and module that hold what the source could not keep."""
    warnings: list[str] = []
    client = _kept(document.get("client") or {}, "the client's entry", warnings)
    found = {**document, "client": client}
    framework = document.get("framework")
    if isinstance(framework, Mapping) and "module_extras" in framework:
        extras = _kept(framework["module_extras"], "the module's entry", warnings)
        found["framework"] = {**framework, "module_extras": extras}
    return found, warnings


def _kept(entries: Any, what: str, warnings: list[str]) -> Any:
    if not isinstance(entries, Mapping):
        return entries
    lost = sorted(key for key, value in entries.items() if _has_lost(value))
    warnings += [f"{what} {key!r} could not be kept and is left out." for key in lost]
    return {key: value for key, value in entries.items() if key not in lost}


def _has_lost(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "$opaque" in value or any(_has_lost(item) for item in value.values())
    return isinstance(value, list) and any(_has_lost(item) for item in value)


def _frozen_warnings(source: Source, wrapper: str) -> list[str]:
    """Without ZeRO and in fp32 nobody takes frozen parameters out of the optimizer's groups."""
    frozen = [f for f, p in source.parameters.items() if not p.trainable and buffer_of(p) is None]
    if not frozen or wrapper != TORCH:
        return []
    text = (
        f"{len(frozen)} frozen parameters are in no group of the optimizer's state: an optimizer that is given them"
        " all the same does not load it."
    )
    return [text]


def _clip_warnings(source: Source, layout: Layout, wrapper: str, clip: Any) -> list[str]:
    """Pipelines without ZeRO clip gradients by another norm than all other runs.

    In fp32 `clip_grad_norm_` of ``runtime/utils.py`` takes what is not ``model_parallel`` from the first stage's
    first rank only (``get_model_parallel_rank`` of ``runtime/pipe/topology.py`` counts stages, too), and tied
    modules from every stage that marks them so; `FP16_UnfusedOptimizer` takes tied modules from all their stages.
    """
    plain = (TORCH, UNFUSED)
    before = int(source.parallelism.get("pp") or 1)
    before = before if source.parallelism.get("optimizer_class") in plain else 1
    after = layout.pp if wrapper in plain else 1
    if before == after or not isinstance(clip, int | float) or clip <= 0:
        return []
    text = (
        f"gradients are clipped to a norm of {clip}: DeepSpeed 0.19.8 computes the norm of a pipeline without ZeRO from"
        " other gradients than with ZeRO or with other stages (not all of the later stages' parameters, tied modules"
        " several times), so that the run goes on with other updates wherever gradients are clipped."
    )
    return [text]


def _label(
    facts: Mapping[str, Any], place: tuple[int, int, int], labels: Collection[str]
) -> str | None:
    """The source's label (``mp_M`` or ``dp_D_mp_M``) of the rank at (pp, tp, dp), if it saved anything."""
    pp, tp, dp = place
    degree = int(facts.get("tp") or 1)
    if pp >= int(facts.get("pp") or 1) or tp >= degree:
        return None
    mp = pp * degree + tp
    names = [f"dp_{dp}_mp_{mp}", *([f"mp_{mp}"] if dp == 0 else [])]
    return next((name for name in names if name in labels), None)


def _rng_warnings(recipe: Recipe) -> list[str]:
    """Ranks that get another one's random state, and saved states that no rank gets."""
    saved = recipe.common.get("rng") or {}
    if not saved:
        return []
    ranks = recipe.layout.zero_ranks if recipe.layout.zero_stage == 3 else 1
    wanted = [(rank.pp, rank.tp, dp) for rank in recipe.ranks for dp in range(ranks)]
    found = [_label(recipe.facts, place, saved) for place in wanted]
    alone = found.count(None)
    used = {next(iter(saved)) if label is None else label for label in found}
    told = []
    if alone:
        told.append(f"{alone} ranks without a counterpart in the source get the first one's")
    if left := saved.keys() - used:
        told.append(f"{len(left)} of {len(saved)} states have no counterpart and are left out")
    if not told:
        return []
    text = (
        f"random number generators were saved by {len(saved)} ranks, the layout has {len(wanted)} files for them:"
        f" {'; '.join(told)}."
    )
    return [text]


def _scheduler_warnings(source: Source, common: Mapping[str, Any]) -> list[str]:
    """A store no longer says what its source did."""
    lost = common.get("scheduler") is None and NO_SCHEDULER not in source.warnings
    return [NO_SCHEDULER] if lost else []


def _order_warnings(source: Source) -> list[str]:
    """Flat buffers know no names: a mapped model is right only if its optimizer gets this order."""
    if "mapping" not in source.parallelism or source.parallelism.get("mapping_ordered"):
        return []
    text = (
        "the mapping gives no order: the optimizer of the run that loads this must be given the parameters in the order"
        " of the source's (a fused one at its first member's place), as DeepSpeed finds them by position, not by name."
    )
    return [text]
