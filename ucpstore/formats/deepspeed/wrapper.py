"""Which class of DeepSpeed's will load a target: it decides on the files' schema.

``runtime/engine.py`` of DeepSpeed 0.19.8, ``_do_optimizer_sanity_check`` and ``_configure_optimizer``:

=====  ============  ====================  =========================================
stage  model         gradients             class
=====  ============  ====================  =========================================
0      fp32          fp32                  the user's own optimizer
0      fp16, bf16    as the model          `FP16_Optimizer` for a FusedAdam, else
                                           `FP16_UnfusedOptimizer`
0      bf16          bf16, in a pipeline   `BF16_Optimizer`
0      any           another than the      refused by DeepSpeed
                     model's
1      bf16          fp32                  `BF16_Optimizer`, unless the optimizer is
                                           offloaded to the CPU
1-3    any           else                  `DeepSpeedZeroOptimizer`, at stage 3
                                           `DeepSpeedZeroOptimizer_Stage3`
=====  ============  ====================  =========================================

`BF16_Optimizer` and `DeepSpeedZeroOptimizer` cut alike and each skips the keys that only the other reads
(``bf16_optimizer.py`` and ``zero/stage_1_and_2.py``, ``_load_legacy_checkpoint``), so one file serves both;
but only the latter deals parameters out under ``round_robin_gradients``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ucpstore.errors import PlanError
from ucpstore.layout.parallel import Layout

__all__ = [
    "BF16",
    "FUSED",
    "TORCH",
    "UNFUSED",
    "ZERO",
    "ZERO3",
    "accumulation_of",
    "clip_in",
    "engine_class",
    "require_loadable",
    "section",
    "uses_fused_adam",
]

TORCH = "torch.optim.Optimizer"
UNFUSED = "FP16_UnfusedOptimizer"
FUSED = "FP16_Optimizer"
BF16 = "BF16_Optimizer"
ZERO = "DeepSpeedZeroOptimizer"
ZERO3 = "DeepSpeedZeroOptimizer_Stage3"

# The names of ``runtime/config.py``, `DtypeEnum`.
_ACCUMULATION = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "float16"),
}
_TORCH_KEYS = frozenset({"amsgrad", "dampening", "differentiable", "foreach", "maximize"})
"""Hyper-parameters of torch's own optimizers, one of which each has, whatever its age."""
_FUSED_KEYS = frozenset(
    {"bias_correction", "betas", "eps", "initial_lr", "lr", "step", "weight_decay"}
)
"""Hyper-parameters of FusedAdam (``ops/adam/fused_adam.py``; Apex's has the same)."""


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a DeepSpeed configuration; empty where there is none."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def accumulation_of(config: Mapping[str, Any]) -> str | None:
    """``grad_accum_dtype`` of a configuration as an element type; None where it follows the model."""
    value = section(config, "data_types").get("grad_accum_dtype")
    return _ACCUMULATION.get(value) if isinstance(value, str) else None


def clip_in(framework: Mapping[str, Any]) -> Any:
    """The gradient norm to clip to, as a source's optimizer or configuration has it; else None."""
    clip = section(framework, "optimizer").get("clip_grad")
    return section(framework, "ds_config").get("gradient_clipping") if clip is None else clip


def engine_class(layout: Layout, config: Mapping[str, Any], *, pipeline: bool = False) -> str:
    """Class that will load checkpoints of a layout.

    Parameters
    ----------
    layout : Layout
        With dtype, and at stage 0 `fused_adam`, decided.
    config : mapping
        The run's DeepSpeed configuration.
    pipeline : bool
        The model is a ``PipelineModule``.
    """
    if layout.zero_stage == 0:
        if layout.dtype == "float32":
            return TORCH
        if layout.dtype == "bfloat16" and pipeline:
            return BF16
        return FUSED if layout.fused_adam else UNFUSED
    if layout.zero_stage == 3:
        return ZERO3
    offload = section(section(config, "zero_optimization"), "offload_optimizer").get("device")
    bf16 = layout.zero_stage == 1 and layout.dtype == "bfloat16" and offload != "cpu"
    return BF16 if bf16 and layout.grad_accum_dtype == "float32" else ZERO


def require_loadable(layout: Layout, *, pipeline: bool = False) -> None:
    """Refuse what no engine of DeepSpeed could load.

    Raises
    ------
    PlanError
        Stage 0 with gradients of another type than the model's; or a bf16 pipeline at stage 0, for which
        DeepSpeed 0.19.8 writes files (of `BF16_Optimizer`), but looks for them in the model file instead.
    """
    if layout.zero_stage != 0:
        return
    if layout.grad_accum_dtype not in (None, layout.dtype):
        raise PlanError(
            f"layout zero_stage=0, grad_accum_dtype={layout.grad_accum_dtype}: found weights of {layout.dtype};"
            " DeepSpeed runs without ZeRO only where gradients are of the same type.",
            hint="Leave grad_accum_dtype out, or choose stage 1.",
        )
    if pipeline and layout.dtype == "bfloat16":
        raise PlanError(
            "layout zero_stage=0, dtype=bf16: found a pipeline, for which DeepSpeed cannot load an optimizer.",
            hint="Choose stage 1 with grad_accum_dtype=fp32: the same optimizer, which can. For a model that is no"
            " PipelineModule say pipeline=false.",
        )


def uses_fused_adam(
    source_class: str, groups: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> bool:
    """Whether a run's optimizer is FusedAdam, from the class that saved it, its groups or its configuration.

    Raises
    ------
    PlanError
        Nothing tells.
    """
    if source_class in (FUSED, UNFUSED):
        return source_class == FUSED
    keys = {key for group in groups for key in group if key not in ("params", "param_names")}
    if "bias_correction" not in keys and keys & _TORCH_KEYS:
        return False
    if {"bias_correction", "betas"} <= keys <= _FUSED_KEYS:
        return True
    # DeepSpeed's CPU Adam, say, whose place FusedAdam takes where nothing is offloaded
    # (``get_optimizer_configuration``)
    optimizer = section(config, "optimizer")
    name = optimizer.get("type")
    if isinstance(name, str) and name:
        torch_adam = section(optimizer, "params").get("torch_adam") is True
        return name.lower() in ("adam", "adamw") and not torch_adam
    raise PlanError(
        "layout zero_stage=0 in 16 bit: whether the optimizer is DeepSpeed's or Apex's FusedAdam cannot be told"
        f" from its hyper-parameters ({', '.join(sorted(keys))}).",
        hint="Say fused_adam=true or fused_adam=false in the layout.",
    )
