"""What a rank of a live DeepSpeed run holds, in the words of `ucpstore.save_rank`.

Sources (DeepSpeed 0.19.8): ``runtime/zero/stage_1_and_2.py`` (``round_robin_bit16_groups`` and ``_offsets``:
order and place of parameters in a group's flat buffer; ``single_partition_of_fp32_groups``: this rank's even
part of it), ``runtime/zero/stage3.py`` (``grad_position``: where a parameter's partition begins in
``fp32_partitioned_groups_flat``), ``runtime/zero/partition_parameters.py`` (``ds_shape``, ``ds_tensor``: ranks
hold ``ceil(n / ranks)`` elements each).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ucpstore.contracts import Role
from ucpstore.errors import Kind, UnsupportedSourceError
from ucpstore.formats.deepspeed.states import MASTER, name_and_role
from ucpstore.parts.held import Held
from ucpstore.tagged import encode

__all__ = ["deepspeed_parts"]

_ZERO12, _ZERO3 = "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True, slots=True, eq=False)
class _Slice:
    """The part of a trainable parameter that lies in this rank's flat buffer of masters."""

    fqn: str
    shape: tuple[int, ...]
    start: int
    count: int
    flat: Any
    offset: int


def deepspeed_parts(engine: Any) -> dict[str, Any]:
    """Arguments for `ucpstore.save_rank` that save what this rank of a DeepSpeed run holds.

    Master weights and optimizer states as ZeRO cuts them, frozen parameters, buffers, and the common state: param
    groups, steps, counters, scheduler and configuration. Nothing is gathered or copied. The checkpoint is opened,
    loaded and converted to other layouts like one that was converted from DeepSpeed's own files.

    Parameters
    ----------
    engine : deepspeed.DeepSpeedEngine
        With ZeRO stage 1, 2 or 3, and data parallelism only.

    Returns
    -------
    dict
        ``parts``, ``rank``, ``world``, ``common``, ``parallelism``, ``aliases``, ``order``.

    Raises
    ------
    UnsupportedSourceError
        Another optimizer, tensor or pipeline parallelism.

    Examples
    --------
    >>> ucpstore.save_rank("s3://b/run/step-100", **deepspeed_parts(engine))     # doctest: +SKIP
    """
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    if kind not in (_ZERO12, _ZERO3) or engine.world_size != engine.dp_world_size:
        raise UnsupportedSourceError(
            f"cannot save the live engine: found {kind} on {engine.world_size} ranks, {engine.dp_world_size} of them"
            f" data-parallel; expected {_ZERO12} or {_ZERO3} with data parallelism only.",
            kind=Kind.UNSUPPORTED,
            hint="Let DeepSpeed save it, and convert that.",
        )
    names, aliases = _names(engine.module)
    groups: dict[int, list[str]] = {}
    slices = list((_slices3 if kind == _ZERO3 else _slices12)(optimizer, names, groups))
    parts = [part for piece in slices for part in _states(optimizer, piece)]
    parts += _frozen(engine.module, names)
    if engine.global_rank == 0:
        parts += _buffers(engine.module)
    return {
        "parts": parts,
        "rank": engine.global_rank,
        "world": engine.world_size,
        "aliases": aliases,
        "order": _order(engine.module),
        **({"common": _common(engine, groups, slices)} if engine.global_rank == 0 else {}),
        "parallelism": _parallelism(engine, kind),
    }


def _names(module: Any) -> tuple[dict[Any, str], dict[str, list[str]]]:
    """Every parameter's first name, and the others that it has."""
    names: dict[Any, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(parameter, name)
        if first != name:
            aliases.setdefault(first, []).append(name)
    return names, aliases


def _order(module: Any) -> list[str]:
    """Parameters and persistent buffers as in the model's state dict, under their first names."""
    found: dict[str, None] = {}
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        named = [*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)]
        for name, value in named:
            if id(value) not in seen and name not in child._non_persistent_buffers_set:
                seen.add(id(value))
                found[f"{prefix}.{name}" if prefix else name] = None
    return list(found)


def _rank_in(group: Any) -> int:
    return int(sys.modules["torch"].distributed.get_rank(group=group))


def _slices12(
    optimizer: Any, names: Mapping[Any, str], groups: dict[int, list[str]]
) -> Iterator[_Slice]:
    """Stages 1 and 2: a group's parameters lie one behind the other, and the buffer is cut evenly."""
    for index, members in enumerate(optimizer.round_robin_bit16_groups):
        flat = optimizer.single_partition_of_fp32_groups[index]
        low = _rank_in(optimizer.real_dp_process_group[index]) * flat.numel()
        groups[index] = [names[member] for member in members]
        offsets = optimizer.round_robin_bit16_offsets[index]
        for member, offset in zip(members, offsets, strict=True):
            first = max(low - offset, 0)
            count = min(low + flat.numel() - offset, member.numel()) - first
            if count > 0:
                place = offset + first - low
                yield _Slice(names[member], tuple(member.shape), first, count, flat, place)


def _slices3(
    optimizer: Any, names: Mapping[Any, str], groups: dict[int, list[str]]
) -> Iterator[_Slice]:
    """Stage 3: every parameter is cut evenly, and a rank's parts lie one behind the other."""
    for index, members in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[index]
        rank = _rank_in(optimizer.sub_group_process_groups[index])
        mine = groups.setdefault(optimizer.sub_group_to_group_id[index], [])
        for member in members:
            mine.append(names[member])
            first, count = _share(member, rank)
            _, offset, _ = optimizer.grad_position[optimizer.get_param_id(member)]
            if count > 0:
                shape = tuple(member.ds_shape)
                yield _Slice(names[member], shape, first, count, flat, int(offset))


def _share(parameter: Any, rank: int) -> tuple[int, int]:
    """First element and number of elements of a rank's part of a parameter at stage 3."""
    size = int(parameter.ds_tensor.ds_numel)
    first = min(rank * size, int(parameter.ds_numel))
    return first, min(int(parameter.ds_numel) - first, size)


def _states(optimizer: Any, piece: _Slice) -> Iterator[Held]:
    """The master weight's and every state's part."""
    state = optimizer.optimizer.state.get(piece.flat, {})
    alike = {
        key: value
        for key, value in state.items()
        if getattr(value, "shape", None) == piece.flat.shape
    }
    for key, flat in {"": piece.flat, **alike}.items():
        name, role = name_and_role(key) if key else (MASTER, Role.MASTER_WEIGHT)
        data = flat.detach()[piece.offset : piece.offset + piece.count]
        yield Held(piece.fqn, name, data, piece.shape, start=piece.start, role=role)


def _frozen(module: Any, names: Mapping[Any, str]) -> Iterator[Held]:
    for parameter, name in names.items():
        if parameter.requires_grad:
            continue
        role = Role.MODEL_WEIGHT
        if not hasattr(parameter, "ds_id"):
            yield Held(name, "weight", parameter.detach(), tuple(parameter.shape), role=role)
            continue
        first, count = _share(parameter, _rank_in(parameter.ds_process_group))
        data = parameter.ds_tensor.detach().reshape(-1)[: max(count, 0)]
        yield Held(name, "weight", data, tuple(parameter.ds_shape), start=first, role=role)


def _buffers(module: Any) -> Iterator[Held]:
    """Persistent buffers; ranks may differ in them, and the first one's count, as in DeepSpeed's own files."""
    for prefix, child in module.named_modules():
        for name, value in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                path = f"{prefix}.{name}" if prefix else name
                yield Held(path, "buffer", value.detach(), tuple(value.shape), role=Role.BUFFER)


def _common(engine: Any, groups: Mapping[int, list[str]], slices: list[_Slice]) -> dict[str, Any]:
    inner = engine.optimizer.optimizer
    steps: dict[str, Any] = {}
    kinds: dict[str, None] = {}
    by_group = {fqn: index for index, members in groups.items() for fqn in members}
    found: dict[int, Any] = {}
    for piece in slices:
        step = inner.state.get(piece.flat, {}).get("step")
        if step is not None:
            found.setdefault(by_group[piece.fqn], step)
    for index, members in groups.items():
        step = found.get(index)
        if step is not None:
            number = step.item() if hasattr(step, "item") else step
            kinds[str(step.dtype).removeprefix("torch.") if hasattr(step, "dtype") else ""] = None
            steps.update(dict.fromkeys(members, number))
    hyper = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
    scheduler = engine.lr_scheduler
    return {
        "param_groups": [
            {**encode(values, path="param_groups"), "params": groups.get(index, [])}
            for index, values in enumerate(hyper)
        ],
        "steps": steps,
        "scheduler": encode(scheduler.state_dict()) if hasattr(scheduler, "state_dict") else None,
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "rng": {},
        "framework": {
            "name": "deepspeed",
            "version": _version(),
            "zero_stage": engine.zero_optimization_stage(),
            "ds_config": encode(engine.config),
            "optimizer": {
                "class": type(engine.optimizer).__name__,
                "step": {"kept_in": ["state"], "types": list(kinds)},
            },
        },
    }


def _parallelism(engine: Any, kind: str) -> dict[str, Any]:
    return {
        "framework": "deepspeed",
        "version": _version(),
        "zero_stage": engine.zero_optimization_stage(),
        "dp": engine.dp_world_size,
        "tp": 1,
        "pp": 1,
        "optimizer_class": kind,
        "dp_world_size": engine.dp_world_size,
        "mp_world_size": 1,
    }


def _version() -> str | None:
    version = getattr(sys.modules.get("deepspeed"), "__version__", None)
    return None if version is None else str(version)
