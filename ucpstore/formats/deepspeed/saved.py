"""The optimizer's state in a model file of ZeRO stage 0: its schemas in the same words.

What DeepSpeed's ``engine.py`` (``_configure_optimizer``, ``_do_optimizer_sanity_check``) makes of the user's
optimizer decides on the schema:

- fp32: torch's own ``state_dict``. The masters are the module's weights.
- fp16 and bf16: ``FP16_UnfusedOptimizer`` with torch's ``state_dict`` and ``fp32_groups``, the masters in
  their parameters' shapes (``fp16/unfused_optimizer.py``, ``state_dict``).
- fp16 and bf16 with DeepSpeed's or Apex's FusedAdam: ``FP16_Optimizer`` with ``fp32_groups_flat``, one flat
  master per group without padding, and states like it (``fp16/fused_optimizer.py``, ``state_dict``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ucpstore.errors import CorruptSourceError, Kind, UnsupportedSourceError, listing
from ucpstore.formats.deepspeed.checks import integer, mapping_of, named, sequence_of
from ucpstore.formats.deepspeed.module import Model
from ucpstore.formats.deepspeed.states import name_and_role
from ucpstore.formats.torchfile import TensorRef

__all__ = ["SavedOptimizer", "read_optimizer"]

_SCALER = (
    "dynamic_loss_scale",
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "scale_factor",
    "scale_window",
)


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """An optimizer's state, whichever class saved it.

    Attributes
    ----------
    optimizer_class : str
    flat : bool
        What torch takes for a parameter is a whole group, flattened.
    groups : tuple of dict
        ``param_groups``.
    members : list of list of int
        By group, its parameters' positions in the lists that follow.
    masters : list of TensorRef or None
        ``None`` where the module's weights are the masters.
    states, scalars : list of dict
        Tensors, and everything else, by the optimizer's own names.
    rest : dict
        All other entries: loss scaler, clipping, ...
    """

    optimizer_class: str
    flat: bool
    groups: tuple[Mapping[str, Any], ...]
    members: list[list[int]]
    masters: list[TensorRef | None]
    states: list[dict[str, TensorRef]]
    scalars: list[dict[str, Any]]
    rest: dict[str, Any]


def read_optimizer(model: Model) -> SavedOptimizer:
    where = f"{model.name}: optimizer"
    body = mapping_of(model.optimizer, where)
    kept = next((key for key in ("fp32_groups", "fp32_groups_flat") if key in body), "")
    flat = kept == "fp32_groups_flat"
    if kept:
        base = mapping_of(body.get("optimizer_state_dict"), f"{where}: optimizer_state_dict")
        owner = "FP16_Optimizer" if flat else "FP16_UnfusedOptimizer"
        used = {kept, "optimizer_state_dict"}
    elif "state" in body and "param_groups" in body:
        base, owner, used = body, "torch.optim.Optimizer", {"state", "param_groups"}
    else:
        raise UnsupportedSourceError(
            f"{where}: found the keys {listing(map(str, body), cap=8)}, expected those of a torch optimizer (state,"
            " param_groups) or of FP16_UnfusedOptimizer or FP16_Optimizer (optimizer_state_dict, and fp32_groups or"
            " fp32_groups_flat).",
            kind=Kind.MISSING_KEY,
        )
    groups, keys = _groups(base, where)
    members, order = _number(keys)
    state = mapping_of(base.get("state"), f"{where}: state")
    owned = set(order)
    others = [key for key in state if isinstance(key, int) and key not in owned]
    if others:
        raise CorruptSourceError(
            f"{where}: there are states of the parameters {listing(others, cap=5)}, which are in no group."
        )
    masters: list[TensorRef | None] = [None] * len(order)
    if kept:
        saved = sequence_of(body[kept], f"{where}: {kept}", length=len(keys))
        lists = [[item] for item in saved] if flat else saved
        masters = list(_masters(lists, [len(k) for k in keys], f"{where}: {kept}", flat=flat))
    rest = {key: value for key, value in body.items() if key not in used}
    scaler = {key: rest.pop(key) for key in _SCALER if key in rest}
    beside = {key: value for key, value in base.items() if key not in ("state", "param_groups")}
    beside.update((key, value) for key, value in state.items() if not isinstance(key, int))
    if beside and base is not body:
        rest["state_dict"] = beside
    split = [
        _split(named(state.get(key, {}), f"{where}: state"), master, f"{where}: state {key}")
        for key, master in zip(order, masters, strict=True)
    ]
    return SavedOptimizer(
        optimizer_class=owner,
        flat=flat,
        groups=groups,
        members=members,
        masters=masters,
        states=[states for states, _ in split],
        scalars=[scalars for _, scalars in split],
        rest={**rest, **({"loss_scaler": scaler} if scaler else {})},
    )


def _groups(
    base: Mapping[str, Any], where: str
) -> tuple[tuple[Mapping[str, Any], ...], list[list[int]]]:
    """``param_groups``, and the keys of their parameters in ``state``."""
    what = f"{where}: param_groups"
    groups = tuple(mapping_of(item, what) for item in sequence_of(base.get("param_groups"), what))
    keys = [[integer(k, what) for k in sequence_of(g.get("params"), what)] for g in groups]
    flat = [key for group in keys for key in group]
    if len(set(flat)) != len(flat):
        raise CorruptSourceError(f"{what}: a parameter is in two places, expected each once.")
    return groups, keys


def _number(keys: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """Number parameters through the groups; very old versions of torch use addresses as keys."""
    flat = [key for group in keys for key in group]
    number = {key: index for index, key in enumerate(flat)}
    return [[number[key] for key in group] for group in keys], flat


def _masters(
    groups: Sequence[Any], lengths: Sequence[int], what: str, *, flat: bool
) -> list[TensorRef]:
    found: list[TensorRef] = []
    for group, length in zip(groups, lengths, strict=True):
        for ref in sequence_of(group, what, length=length):
            if not isinstance(ref, TensorRef) or "float" not in ref.dtype:
                raise CorruptSourceError(
                    f"{what}: found {type(ref).__name__}, expected tensors of floats."
                )
            if flat and (len(ref.shape) != 1 or not ref.is_contiguous):
                raise CorruptSourceError(
                    f"{what}: found a tensor of shape {list(ref.shape)}, expected a flat one.",
                    kind=Kind.SHAPE,
                )
            found.append(ref)
    return found


def _split(
    entry: Mapping[str, Any], master: TensorRef | None, what: str
) -> tuple[dict[str, TensorRef], dict[str, Any]]:
    """Tensor states and everything else. ``step``, and 0-d tensors that are no moments, are scalars."""
    states: dict[str, TensorRef] = {}
    scalars: dict[str, Any] = {}
    for key, value in entry.items():
        moment = name_and_role(key)[0] != key
        if isinstance(value, TensorRef) and key != "step" and (value.shape or moment):
            if value.shape or master is None or not master.shape:
                states[key] = value
                continue
            raise UnsupportedSourceError(
                f"{what}: {key!r} is a single number, but its parameter has shape {list(master.shape)}.",
                kind=Kind.SHAPE,
            )
        scalars[key] = value
    return states, scalars
