"""What a layout leaves to the source, decided; and what DeepSpeed cannot have, refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ucpstore.contracts import Source
from ucpstore.errors import PlanError, listing
from ucpstore.formats.deepspeed.groups import source_dtype
from ucpstore.formats.deepspeed.pipelining import is_pipeline
from ucpstore.formats.deepspeed.ranks import SUB_GROUP_SIZE
from ucpstore.formats.deepspeed.wrapper import (
    accumulation_of,
    require_loadable,
    section,
    uses_fused_adam,
)
from ucpstore.layout.parallel import Layout

__all__ = ["decide"]


def decide(
    source: Source, common: Mapping[str, Any], layout: Layout, config: Mapping[str, Any]
) -> tuple[Layout, list[str]]:
    """Fill in what the layout leaves to the source; and warnings.

    Parameters
    ----------
    source : Source
    common : mapping
        The decoded common document.
    layout : Layout
    config : mapping
        The source's DeepSpeed configuration.

    Raises
    ------
    PlanError
        No run of DeepSpeed can have the layout, it is not written yet, or it says too little.
    """
    dtype = layout.dtype or source_dtype(source, config)
    size = layout.sub_group_size or section(config, "zero_optimization").get("sub_group_size")
    if layout.zero_stage == 3:
        numeric = size if isinstance(size, int | float) else 0
        size = int(numeric) if 1 <= numeric < math.inf else SUB_GROUP_SIZE
    else:
        size = layout.sub_group_size
    warnings = []
    accumulation = layout.grad_accum_dtype or accumulation_of(config)
    if layout.zero_stage == 0 and layout.grad_accum_dtype is None and accumulation != dtype:
        if accumulation is not None:
            warnings.append(
                f"the source's configuration has grad_accum_dtype {accumulation}, with which DeepSpeed does not run"
                f" {dtype} without ZeRO: leave it out of the new configuration."
            )
        accumulation = None
    fused = layout.fused_adam
    if layout.zero_stage == 0 and dtype != "float32" and fused is None:
        own = str(source.parallelism.get("optimizer_class"))
        fused = uses_fused_adam(own, common["param_groups"], config)
    pipeline = layout.pipeline
    if pipeline is None:
        facts = common["framework"].get("pipeline")
        was = is_pipeline(source.parameters, source.parallelism, facts)
        pipeline = layout.pp > 1 or (was and layout.zero_stage <= 1)
    layout = replace(
        layout,
        pipeline=pipeline,
        dtype=dtype,
        sub_group_size=size,
        grad_accum_dtype=accumulation,
        fused_adam=None if dtype == "float32" else fused,
    )
    require_loadable(layout, pipeline=pipeline)
    _check(layout)
    return layout, warnings


def _check(layout: Layout) -> None:
    if layout.zero_stage != 0 and layout.fused_adam is not None:
        raise PlanError(
            f"layout fused_adam={str(layout.fused_adam).lower()}: found stage {layout.zero_stage}, expected 0: with"
            " ZeRO all optimizers have the same files."
        )
    if layout.zero_stage != 3 and layout.sub_group_size is not None:
        raise PlanError(
            f"layout sub_group_size={layout.sub_group_size}: only stage 3 has sub-groups."
        )
    if layout.pipeline and layout.zero_stage > 1:
        raise PlanError(
            f"layout zero_stage={layout.zero_stage} with a pipeline of {layout.pp} stages: DeepSpeed's PipelineEngine"
            " takes stages 0 and 1 only.",
            hint="Choose zero_stage=1, or for a model that is no PipelineModule pp=1.",
        )
    if layout.pp > 1 and not layout.pipeline:
        raise PlanError(
            f"layout pp={layout.pp} with pipeline=False: only a PipelineModule has stages."
        )
    given = [name for name in _OF_PIPELINES if getattr(layout, name) is not None]
    if given and not layout.pipeline:
        raise PlanError(
            f"layout {listing(given)}: only a pipeline has layers.",
            hint="Say pipeline=true if the model is a PipelineModule.",
        )


_OF_PIPELINES = ("layers", "stages", "partition", "tied")
