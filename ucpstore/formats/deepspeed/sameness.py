"""Whether a source already is what is asked for: UCP converts only when a layout changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ucpstore.contracts import Source
from ucpstore.formats.deepspeed.ranks import Slices
from ucpstore.formats.deepspeed.recipe import Recipe, known_patterns, make_recipe
from ucpstore.layout.parallel import Layout
from ucpstore.layout.rules import Patterns

__all__ = ["same_layout"]


def same_layout(source: Source, layout: Layout, patterns: Patterns | None = None) -> bool:
    """Whether ``source`` is a DeepSpeed checkpoint that has this layout, so that nothing need be done.

    Degrees, stage and element type must be the same, and each rank must hold the same parts. Sequence-parallel
    ranks count as data-parallel ones: the files do not differ.
    """
    facts = source.parallelism
    if source.format != "deepspeed" or facts.get("zero_stage") not in (0, 1, 2, 3):
        return False
    if (layout.tp, layout.pp) != (facts.get("tp"), facts.get("pp")):
        return False
    recipe = make_recipe(source, layout, patterns)
    own = make_recipe(
        source,
        replace(
            layout,
            dp=facts.get("dp", 1),
            sp=1,
            zero_stage=facts["zero_stage"],
            **_OPEN,
            **({} if facts["zero_stage"] <= 1 else _NO_PIPELINE),
        ),
        patterns,
    )
    return _shape(recipe) == _shape(own) and _holds(source, recipe, patterns)


_OPEN: Mapping[str, Any] = {
    "dtype": None,
    "sub_group_size": None,
    "grad_accum_dtype": None,
    "fused_adam": None,
    "loss_scale": None,
    "initial_scale_power": None,
}
_NO_PIPELINE: Mapping[str, Any] = {
    "pipeline": None,
    "layers": None,
    "stages": None,
    "partition": None,
    "tied": None,
}


def _shape(recipe: Recipe) -> tuple[Any, ...]:
    layout = recipe.layout
    rest = [getattr(layout, name) for name in _OPEN]
    return layout.zero_ranks, layout.zero_stage, *rest


def _holds(source: Source, recipe: Recipe, patterns: Patterns | None) -> bool:
    """Whether the source's model-parallel ranks hold what those of the target will hold."""
    padded = {fqn: [*held.shape] for fqn, held in recipe.slices.held.items() if held.is_padded}
    if padded != source.parallelism.get("padded", {}):
        return False
    facts = recipe.framework.get("pipeline")
    if (recipe.pipeline is not None) != isinstance(facts, Mapping):
        return False
    if recipe.pipeline is not None and isinstance(facts, Mapping):
        stages = [
            [layer for layer in own if recipe.pipeline.stage_of(layer) != stage]
            for stage, own in enumerate(facts["stages"])
        ]
        holders = {
            key: tuple(entry["stages"])
            for key, entry in facts["tied"].items()
            if f"tied_modules.{key}." in recipe.pipeline.holders
        }
        wanted = {p.split(".")[1]: found for p, found in recipe.pipeline.holders.items()}
        if any(stages) or holders != wanted:
            return False
    if recipe.layout.tp == 1:
        return True
    if known_patterns(source, None) is None:
        return False
    own = Slices(source.parameters, known_patterns(source, None), recipe.layout.tp)
    return all(own.all(fqn) == recipe.slices.all(fqn) for fqn in source.parameters)
