"""The objects that DeepSpeed pickles into its files, made from a `Recipe`.

Keys and where they are read: ``runtime/engine.py`` (``_common_checkpoint_state``, ``_load_checkpoint``),
``runtime/zero/stage_1_and_2.py`` and ``stage3.py`` (``state_dict``, ``_load_legacy_checkpoint``,
``_rigid_load_state_dict``), ``utils/zero_to_fp32.py``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ucpstore.contracts import ParameterSpec, Role
from ucpstore.formats.deepspeed.recipe import Recipe, tensors_in
from ucpstore.formats.deepspeed.stage0 import NAMES_FILE
from ucpstore.formats.deepspeed.states import MASTER
from ucpstore.formats.deepspeed.ucpinfo import Flat
from ucpstore.formats.deepspeed.unsharded import clip_of, flat_weights, stage0_optimizer
from ucpstore.formats.deepspeed.wrapper import FUSED, accumulation_of, section
from ucpstore.formats.torchwrite import Part, Size, Tensor, View
from ucpstore.tagged import StubObject

__all__ = ["file_names", "model_file", "optimizer_file"]

_FLOATS = ("float32", "bfloat16", "float16", "float64")
_SHORT = {None: None, "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def file_names(recipe: Recipe) -> list[tuple[str, str, int]]:
    """``(file, kind, rank)`` of every file (``_get_ckpt_name``, ``_get_zero_ckpt_name``)."""
    ranks = range(recipe.layout.dp)
    if recipe.layout.zero_stage == 3:
        models = [(f"zero_pp_rank_{r}_mp_rank_00_model_states.pt", "model", r) for r in ranks]
    else:
        models = [("mp_rank_00_model_states.pt", "model", 0)]
    if recipe.layout.zero_stage == 0:  # flat groups need no names
        return models + [(NAMES_FILE, "names", 0)] * (recipe.wrapper != FUSED)
    stem = f"{recipe.prefix}zero_pp_rank_"
    return models + [(f"{stem}{r}_mp_rank_00_optim_states.pt", "optimizer", r) for r in ranks]


def _config(recipe: Recipe) -> Any:
    """The source's configuration with the target's stage: tools read it, loading does not."""
    config = recipe.framework.get("ds_config")
    if not isinstance(config, dict):
        return {}
    layout = recipe.layout
    zero = config.get("zero_optimization")
    zero = {**(zero if isinstance(zero, dict) else {}), "stage": layout.zero_stage}
    if layout.zero_stage == 3:
        zero["sub_group_size"] = layout.sub_group_size
    bf16 = config.get("bf16")
    bf16 = {**(bf16 if isinstance(bf16, dict) else {}), "enabled": recipe.dtype == "bfloat16"}
    kept = {key: value for key, value in config.items() if key != "tensor_parallel"}
    if isinstance(fp16 := kept.get("fp16"), dict):
        kept["fp16"] = {**fp16, "enabled": recipe.dtype == "float16"}
    elif recipe.dtype == "float16":
        kept["fp16"] = {"enabled": True}
    if accumulation_of(config) != layout.grad_accum_dtype:
        types = section(config, "data_types")
        kept["data_types"] = {**types, "grad_accum_dtype": _SHORT[layout.grad_accum_dtype]}
    return {**kept, "zero_optimization": zero, "bf16": bf16}


# ---------------------------------------------------------------------- model files


def _whole(fqn: str, state: str, shape: tuple[int, ...]) -> Part:
    return Part(fqn, state, shape, 0, math.prod(shape), 0)


def _weight(recipe: Recipe, parameter: ParameterSpec) -> tuple[str, tuple[int, ...], str]:
    """State that the model's weight is made from, its shape, and the target's element type."""
    state = MASTER if MASTER in parameter.states else "weight"
    spec = parameter.states[state]
    return state, spec.shape, recipe.dtype if spec.dtype in _FLOATS else spec.dtype


def _module(recipe: Recipe) -> OrderedDict[str, Tensor | View]:
    """``module``: weights, buffers and aliases; at stage 3 empty placeholders instead of weights."""
    module: OrderedDict[str, Tensor | View] = OrderedDict()
    views = flat_weights(recipe)
    tensor: Tensor | View
    for fqn, parameter in recipe.parameters.items():
        if fqn in views:
            tensor = views[fqn]
        elif buffer := _buffer(parameter):
            spec = parameter.states[buffer]
            tensor = Tensor(spec.dtype, spec.shape, (_whole(fqn, buffer, spec.shape),))
        else:
            state, shape, dtype = _weight(recipe, parameter)
            if recipe.layout.zero_stage == 3:
                tensor = Tensor(dtype, (0,))
            else:
                tensor = Tensor(dtype, shape, (_whole(fqn, state, shape),))
        for name in (fqn, *parameter.aliases):
            module[name] = tensor
    return module


def _buffer(parameter: ParameterSpec) -> str | None:
    return next((n for n, s in parameter.states.items() if s.role is Role.BUFFER), None)


def _frozen(recipe: Recipe) -> Iterator[tuple[str, ParameterSpec]]:
    for fqn, parameter in recipe.parameters.items():
        if MASTER not in parameter.states and _buffer(parameter) is None:
            yield fqn, parameter


def _fragments(recipe: Recipe, rank: int) -> OrderedDict[str, Tensor]:
    """``frozen_param_fragments``: whole at stage 2, this rank's ``ceil(n / dp)`` elements at stage 3."""
    found: OrderedDict[str, Tensor] = OrderedDict()
    for fqn, parameter in _frozen(recipe):
        state, shape, dtype = _weight(recipe, parameter)
        if recipe.layout.zero_stage != 3:
            found[fqn] = Tensor(dtype, shape, (_whole(fqn, state, shape),))
            continue
        numel = math.prod(shape)
        size = -(-numel // recipe.layout.dp)
        count = min(max(numel - rank * size, 0), size)
        parts = (Part(fqn, state, shape, rank * size, count, 0),) if count else ()
        found[fqn] = Tensor(dtype, (size,), parts)
    return found


def _client(recipe: Recipe, rank: int) -> dict[str, Any]:
    """The client's entries, and the states of random number generators of this rank."""
    common = recipe.common
    label = f"dp_{rank}_mp_0" if recipe.layout.zero_stage == 3 else "mp_0"
    rng = common.get("rng") or {}
    mine: dict[str, Any] = rng.get(label) or next(iter(rng.values()), {})
    others = (common.get("client_by_rank") or {}).get(label, {})
    return {**(common.get("client") or {}), **others, **mine}


def model_file(recipe: Recipe, rank: int) -> dict[str, Any]:
    """A model file (``mp_rank_00`` at stages 0, 1 and 2, one of every rank at stage 3)."""
    layout, framework = recipe.layout, recipe.framework
    frozen = layout.zero_stage >= 2
    shapes = [
        OrderedDict((member.fqn, Size(member.shape)) for member in members)
        for _, members in recipe.info.units
    ]
    shared = {
        alias: fqn for fqn, parameter in recipe.parameters.items() for alias in parameter.aliases
    }
    counters = recipe.common.get("counters") or {}
    engine = {
        "module": _module(recipe),
        "buffer_names": [f for f, p in recipe.parameters.items() if _buffer(p)],
        "optimizer": stage0_optimizer(recipe) if layout.zero_stage == 0 else None,
        "param_shapes": None if layout.zero_stage == 0 else shapes,
        "frozen_param_shapes": (
            OrderedDict((f, Size(_weight(recipe, p)[1])) for f, p in _frozen(recipe))
            if frozen
            else None
        ),
        "frozen_param_fragments": _fragments(recipe, rank) if frozen else None,
        "shared_params": None if layout.zero_stage == 0 else shared if rank == 0 else {},
        "lr_scheduler": recipe.common.get("scheduler"),
        "data_sampler": framework.get("data_sampler"),
        "random_ltd": framework.get("random_ltd"),
        "skipped_steps": counters.get("skipped_steps", 0),
        "global_steps": counters.get("global_steps", 0),
        "global_samples": counters.get("global_samples", 0),
        "dp_world_size": layout.dp,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _config(recipe),
        "ds_version": recipe.zero_version,
    }
    found: dict[str, Any] = tensors_in({**_client(recipe, rank), **engine}, recipe)
    return found


# ------------------------------------------------------------------ optimizer files


def _base_state(recipe: Recipe, flats: list[Flat]) -> dict[str, Any]:
    """The torch optimizer's ``state_dict``: one flat parameter per buffer."""
    state: dict[int, dict[str, Any]] = {}
    for index, (flat, (_, members)) in enumerate(zip(flats, recipe.info.units, strict=True)):
        entry: dict[str, Any] = {}
        names = recipe.groups[flat.group].states
        if names and (step := recipe.step(members)) is not None:
            entry["step"] = step
        for native, ours in names.items():
            entry[native] = Tensor("float32", (flat.numel,), flat.of(ours))
        if entry:
            state[index] = entry
    groups = [
        {**group.hyper, "params": [i for i, flat in enumerate(flats) if flat.group == position]}
        for position, group in enumerate(recipe.groups)
    ]
    return {"state": state, "param_groups": groups}


def optimizer_file(recipe: Recipe, rank: int) -> dict[str, Any]:
    """The optimizer file of a rank."""
    flats = recipe.info.rank(rank)
    base = _base_state(recipe, flats)
    if recipe.layout.zero_stage == 3:
        inner = {
            "zero_stage": 3,
            **recipe.scaler.of_zero(),
            "partition_count": recipe.layout.dp,
            "optimizer_state_dict": base,
            "fp32_flat_groups": [
                Tensor("float32", (flat.numel,), flat.of(MASTER)) for flat in flats
            ],
        }
    else:
        inner = {
            "zero_stage": recipe.layout.zero_stage,
            **recipe.scaler.of_zero(),
            **_clip(recipe),
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": [
                Tensor("float32", (flat.numel - flat.padding,), flat.of(MASTER)) for flat in flats
            ],
            "group_paddings": [flat.padding for flat in flats],
            "partition_count": [recipe.layout.dp] * len(flats),
            "ds_version": recipe.zero_version,
            "param_slice_mappings": [_mapping(flat) for flat in flats],
        }
    root = {
        "optimizer_state_dict": inner,
        "ds_config": _config(recipe),
        "ds_version": recipe.zero_version,
    }
    found: dict[str, Any] = tensors_in(root, recipe)
    return found


def _clip(recipe: Recipe) -> dict[str, Any]:
    clip = clip_of(recipe)
    return {} if clip is None else {"clip_grad": clip}


def _mapping(flat: Flat) -> OrderedDict[str, StubObject]:
    """``param_slice_mappings``: what of a parameter lies where in this partition."""
    return OrderedDict(
        (
            part.fqn,
            StubObject(
                "deepspeed.utils.tensor_fragment",
                "fragment_address",
                (),
                {"numel": part.count, "start": part.offset},
            ),
        )
        for part in flat.parts
    )
