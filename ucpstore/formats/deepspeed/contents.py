"""The objects that DeepSpeed pickles into its files, made from a `Recipe`.

Keys and where they are read: ``runtime/engine.py`` (``_common_checkpoint_state``, ``_load_checkpoint``),
``runtime/zero/stage_1_and_2.py`` and ``stage3.py`` (``state_dict``, ``_load_legacy_checkpoint``,
``_rigid_load_state_dict``), ``utils/zero_to_fp32.py``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ucpstore.errors import PlanError
from ucpstore.formats.deepspeed.ranks import ModelRank, buffer_of, weight_of
from ucpstore.formats.deepspeed.recipe import Recipe, tensors_in
from ucpstore.formats.deepspeed.scheduler import of_groups
from ucpstore.formats.deepspeed.stage0 import NAMES_FILE
from ucpstore.formats.deepspeed.states import MASTER
from ucpstore.formats.deepspeed.tpinfo import UNIVERSAL
from ucpstore.formats.deepspeed.ucpinfo import Flat
from ucpstore.formats.deepspeed.unsharded import clip_of, flat_weights, names_file, stage0_optimizer
from ucpstore.formats.deepspeed.wrapper import FUSED, accumulation_of, section
from ucpstore.formats.torchwrite import Size, View
from ucpstore.gather import Part, Tensor
from ucpstore.layout.local import Local
from ucpstore.tagged import StubObject

__all__ = [
    "File",
    "alike",
    "content",
    "files_of",
    "layer_file",
    "likeness",
    "local_tensor",
    "local_weight",
    "model_file",
    "optimizer_file",
]

_FLOATS = ("float32", "bfloat16", "float16")
_SHORT = {None: None, "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class File:
    """A file of the checkpoint.

    Attributes
    ----------
    name : str
    kind : {"model", "optimizer", "layer", "names"}
    rank : ModelRank
        Whose it is.
    dp : int
        Data-parallel rank.
    layer : int
        Of a layer file.
    """

    name: str
    kind: Literal["model", "optimizer", "layer", "names"]
    rank: ModelRank
    dp: int = 0
    layer: int = 0


def files_of(recipe: Recipe) -> list[File]:
    """All files.

    Names: ``_get_ckpt_name`` and ``_get_zero_ckpt_name`` of ``runtime/engine.py``, and ``ckpt_layer_path`` of
    ``runtime/pipe/module.py``, which leaves out the tensor-parallel rank where the topology has none;
    ``ckpt_layer_path_list`` finds both spellings.
    """
    ranks = range(recipe.layout.zero_ranks)
    models, optimizers, layers = [], [], []
    for rank in recipe.ranks:
        mp = f"mp_rank_{rank.mp:02d}"
        if recipe.layout.zero_stage == 3:
            models += [
                File(f"zero_pp_rank_{dp}_{mp}_model_states.pt", "model", rank, dp) for dp in ranks
            ]
        else:
            models.append(File(f"{mp}_model_states.pt", "model", rank))
        if recipe.layout.zero_stage > 0:
            stem = f"{recipe.prefix}zero_pp_rank_"
            optimizers += [
                File(f"{stem}{dp}_{mp}_optim_states.pt", "optimizer", rank, dp) for dp in ranks
            ]
        if recipe.pipeline is not None:
            layers += [
                File(f"layer_{n:02d}-model_{rank.tp:02d}-model_states.pt", "layer", rank, layer=n)
                for n in recipe.pipeline.files
                if recipe.pipeline.stage_of(n) == rank.pp
            ]
    # weights that view flat groups tell their order; in layer files they do not
    if recipe.layout.zero_stage == 0 and (recipe.wrapper != FUSED or recipe.pipeline is not None):
        optimizers.append(File(NAMES_FILE, "names", recipe.ranks[0]))
    return models + layers + optimizers


def alike(recipe: Recipe) -> dict[int, int]:
    """Model-parallel rank -> the first of its pipeline stage that holds tensors of the same shapes."""
    firsts: dict[Hashable, int] = {}
    found = {}
    for rank in recipe.ranks:
        shapes = tuple(recipe.slices.local(fqn, rank.tp).shape for fqn in rank.names)
        found[rank.mp] = firsts.setdefault((rank.pp, shapes), rank.mp)
    return found


def likeness(recipe: Recipe, file: File, firsts: Mapping[int, int]) -> Hashable:
    """What tells files apart: those of one likeness differ only in which elements their tensors hold.

    Ranks with equal slices are such, and at stage 3 all data-parallel ranks, which have as many elements of
    every parameter, padding included: one of thousands need be laid out. Which elements these are follows
    from the rank.

    Parameters
    ----------
    recipe : Recipe
    file : File
    firsts : mapping of int to int
        See `alike`.
    """
    rank = file.rank
    if file.kind == "names" or (file.kind == "optimizer" and recipe.layout.zero_stage != 3):
        return file.name
    if file.kind == "model":
        label, first = recipe.label(rank, file.dp), rank.mp == file.dp == 0
        return file.kind, firsts[rank.mp], label, first
    return file.kind, firsts[rank.mp], file.layer


def content(recipe: Recipe, file: File) -> Any:
    """What is pickled into a file; bytes are written as they are."""
    if file.kind == "names":
        return names_file(recipe)
    if file.kind == "layer":
        return layer_file(recipe, file.rank, file.layer)
    make = model_file if file.kind == "model" else optimizer_file
    return make(recipe, file.rank, file.dp)


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
    kept = dict(config)
    if isinstance(autotp := kept.get("tensor_parallel"), dict):
        kept["tensor_parallel"] = {**autotp, "autotp_size": layout.tp}
    if isinstance(fp16 := kept.get("fp16"), dict):
        kept["fp16"] = {**fp16, "enabled": recipe.dtype == "float16"}
    elif recipe.dtype == "float16":
        kept["fp16"] = {"enabled": True}
    if accumulation_of(config) != layout.grad_accum_dtype:
        types = section(config, "data_types")
        kept["data_types"] = {**types, "grad_accum_dtype": _SHORT[layout.grad_accum_dtype]}
    return {**kept, "zero_optimization": zero, "bf16": bf16}


# ---------------------------------------------------------------------- model files


def local_tensor(fqn: str, state: str, local: Local, dtype: str) -> Tensor:
    """All that a rank holds of a state."""
    geometry = None if local == Local.whole(local.shape) else local
    part = Part(fqn, state, local.shape, 0, local.numel, 0, geometry)
    return Tensor(dtype, local.shape, (part,))


def local_weight(recipe: Recipe, fqn: str, tp: int) -> tuple[str, Local, str]:
    """State that the model's weight is made from, the rank's slice, and the target's element type.

    Raises
    ------
    PlanError
        The weight is of float64: DeepSpeed's engines make all floats one of the others, which would narrow it.
    """
    state, spec = weight_of(recipe.parameters[fqn])
    if spec.dtype == "float64":
        raise PlanError(
            f"{state} of {fqn}: found elements of float64, expected one of {', '.join(_FLOATS)}, as no run of DeepSpeed"
            " has others."
        )
    dtype = recipe.dtype if spec.dtype in _FLOATS else spec.dtype
    return state, recipe.slices.local(fqn, tp), dtype


def _module(recipe: Recipe, rank: ModelRank) -> OrderedDict[str, Any]:
    """Weights, buffers, aliases and entries that are no tensors; at stage 3 no weights but placeholders."""
    module: OrderedDict[str, Any] = OrderedDict()
    views = flat_weights(recipe, rank)
    tensor: Tensor | View
    for fqn in rank.names:
        parameter = recipe.parameters[fqn]
        if fqn in views:
            tensor = views[fqn]
        elif buffer := buffer_of(parameter):
            local = recipe.slices.local(fqn, rank.tp)
            tensor = local_tensor(fqn, buffer, local, parameter.states[buffer].dtype)
        else:
            state, local, dtype = local_weight(recipe, fqn, rank.tp)
            if recipe.layout.zero_stage == 3:
                tensor = Tensor(dtype, (0,))
            else:
                tensor = local_tensor(fqn, state, local, dtype)
        for name in (fqn, *parameter.aliases):
            module[name] = tensor
    extras = recipe.framework.get("module_extras") or {}
    for name, value in extras.items():
        if recipe.pipeline is None or rank.pp in recipe.pipeline.stages(name):
            module[name] = value
    return module


def layer_file(recipe: Recipe, rank: ModelRank, layer: int) -> OrderedDict[str, Any]:
    """A layer file: its state dict with local names (``save_state_dict`` of ``runtime/pipe/module.py``)."""
    prefix = recipe.pipeline.files[layer] if recipe.pipeline is not None else ""
    return OrderedDict(
        (name.removeprefix(prefix), tensors_in(value, recipe))
        for name, value in _module(recipe, rank).items()
        if name.startswith(prefix)
    )


def _frozen(recipe: Recipe, rank: ModelRank) -> Iterator[str]:
    for fqn in rank.names:
        parameter = recipe.parameters[fqn]
        if MASTER not in parameter.states and buffer_of(parameter) is None:
            yield fqn


def _fragments(recipe: Recipe, rank: ModelRank, dp: int) -> OrderedDict[str, Tensor]:
    """``frozen_param_fragments``: whole at stage 2, this rank's ``ceil(n / dp)`` elements at stage 3."""
    found: OrderedDict[str, Tensor] = OrderedDict()
    for fqn in _frozen(recipe, rank):
        state, local, dtype = local_weight(recipe, fqn, rank.tp)
        whole = local_tensor(fqn, state, local, dtype)
        if recipe.layout.zero_stage != 3:
            found[fqn] = whole
            continue
        size = -(-local.numel // recipe.layout.zero_ranks)
        count = min(max(local.numel - dp * size, 0), size)
        parts = tuple(replace(p, start=dp * size, count=count) for p in whole.parts if count)
        found[fqn] = Tensor(dtype, (size,), parts)
    return found


def _client(recipe: Recipe, rank: ModelRank, dp: int) -> dict[str, Any]:
    """The client's entries, and the states of random number generators of this rank."""
    common = recipe.common
    label = recipe.label(rank, dp)
    rng = common.get("rng") or {}
    mine: dict[str, Any] = rng.get(label) or next(iter(rng.values()), {})
    others = (common.get("client_by_rank") or {}).get(label, {})
    found = {**(common.get("client") or {}), **others, **mine}
    if recipe.universal is not None:
        found[UNIVERSAL] = recipe.universal
    return found


def model_file(recipe: Recipe, rank: ModelRank, dp: int) -> dict[str, Any]:
    """A model file: one of every model-parallel rank, at stage 3 of every rank."""
    layout, framework = recipe.layout, recipe.framework
    frozen = layout.zero_stage >= 2
    shapes = [
        OrderedDict((member.fqn, Size(member.shape)) for member in members)
        for _, members in rank.info.units
    ]
    counters = recipe.common.get("counters") or {}
    engine = {
        "module": None if recipe.pipeline is not None else _module(recipe, rank),
        "buffer_names": [fqn for fqn in rank.names if buffer_of(recipe.parameters[fqn])],
        "optimizer": stage0_optimizer(recipe, rank) if layout.zero_stage == 0 else None,
        "param_shapes": None if layout.zero_stage == 0 else shapes,
        "frozen_param_shapes": (
            OrderedDict(
                (f, Size(recipe.slices.local(f, rank.tp).shape)) for f in _frozen(recipe, rank)
            )
            if frozen
            else None
        ),
        "frozen_param_fragments": _fragments(recipe, rank, dp) if frozen else None,
        "shared_params": None if layout.zero_stage == 0 else _shared(recipe, rank, dp),
        "lr_scheduler": of_groups(recipe.common.get("scheduler"), rank.places, recipe.group_count),
        "data_sampler": framework.get("data_sampler"),
        "random_ltd": framework.get("random_ltd"),
        "skipped_steps": counters.get("skipped_steps", 0),
        "global_steps": counters.get("global_steps", 0),
        "global_samples": counters.get("global_samples", 0),
        "dp_world_size": layout.zero_ranks,
        "mp_world_size": layout.model_ranks,
        "checkpoint_parallel_dimensions": {"pp_degree": layout.pp, "tp_degree": layout.tp},
        "ds_config": _config(recipe),
        "ds_version": recipe.zero_version,
    }
    found: dict[str, Any] = tensors_in({**_client(recipe, rank, dp), **engine}, recipe)
    return found


def _shared(recipe: Recipe, rank: ModelRank, dp: int) -> dict[str, str]:
    """``shared_params``: alias -> name; only the very first rank records them."""
    if rank.mp != 0 or dp != 0:
        return {}
    return {alias: fqn for fqn in rank.names for alias in recipe.parameters[fqn].aliases}


# ------------------------------------------------------------------ optimizer files


def _base_state(recipe: Recipe, rank: ModelRank, flats: list[Flat]) -> dict[str, Any]:
    """The torch optimizer's ``state_dict``: one flat parameter per buffer."""
    state: dict[int, dict[str, Any]] = {}
    for index, (flat, (_, members)) in enumerate(zip(flats, rank.info.units, strict=True)):
        entry: dict[str, Any] = {}
        names = rank.groups[flat.group].states
        if names and (step := recipe.step(members)) is not None:
            entry["step"] = step
        for native, ours in names.items():
            entry[native] = Tensor("float32", (flat.numel,), flat.of(ours))
        if entry:
            state[index] = entry
    groups = [
        {**group.hyper, "params": [i for i, flat in enumerate(flats) if flat.group == position]}
        for position, group in enumerate(rank.groups)
    ]
    return {"state": state, "param_groups": groups}


def optimizer_file(recipe: Recipe, rank: ModelRank, dp: int) -> dict[str, Any]:
    """The optimizer file of a rank."""
    flats = rank.info.rank(dp)
    base = _base_state(recipe, rank, flats)
    ranks = recipe.layout.zero_ranks
    if recipe.layout.zero_stage == 3:
        inner = {
            "zero_stage": 3,
            **recipe.scaler.of_zero(),
            "partition_count": ranks,
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
            "partition_count": [ranks] * len(flats),
            "ds_version": recipe.zero_version,
            "param_slice_mappings": [_mapping(flat) for flat in flats],
        }
    if UNIVERSAL in recipe.optimizer_facts and recipe.universal is not None:
        inner[UNIVERSAL] = recipe.universal
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
