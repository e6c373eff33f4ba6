"""What one optimizer file holds, in the same words for every ZeRO stage.

The flat buffers of a file are called *units* here: one per parameter group at stages 1 and 2
(``runtime/zero/stage_1_and_2.py`` and ``runtime/bf16_optimizer.py``, ``state_dict``), one per
sub-group at stage 3 (``runtime/zero/stage3.py``, ``_rigid_state_dict``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ucpstore.errors import CorruptSourceError, Kind, UnsupportedSourceError
from ucpstore.formats.deepspeed.checks import integer, integers, mapping_of, sequence_of
from ucpstore.formats.deepspeed.stubs import plain
from ucpstore.formats.torchfile import TensorRef, TorchFile

__all__ = ["Shard", "read_shard"]

_MASTERS = "single_partition_of_fp32_groups"
_MASTERS3 = "fp32_flat_groups"
_USED = {
    "base_optimizer_state",
    "fp32_flat_groups",
    "group_paddings",
    "optimizer_state_dict",
    "param_alignment_paddings",
    "param_slice_mappings",
    "partition_count",
    "single_partition_of_fp32_groups",
    "universal_checkpoint_info",
    "zero_stage",
}


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's optimizer file.

    Attributes
    ----------
    name : str
        Of the file.
    big_endian : bool
    stage : int
        0 to 3.
    optimizer_class : str
        The DeepSpeed optimizer that wrote it.
    masters : tuple of TensorRef or None
        Flat master weights per unit; ``None`` where a pipeline stage has no parameters of a group.
    states : tuple of dict
        Flat tensor states per unit, by the optimizer's own names.
    scalars : tuple of dict
        Everything else that the optimizer keeps per unit: ``step``, 0-d tensors.
    groups : tuple of dict, or None
        ``param_groups``; ``None`` in elastic checkpoints, which have none.
    group_units : tuple of tuple of int
        The units of every group.
    counts : tuple of int
        Ranks that every unit is cut over.
    pads : sequence of sequence of int, or None
        ``param_alignment_paddings``: unused elements after every parameter, per unit.
    mappings : tuple of dict, or None
        ``param_slice_mappings``: name -> (start in the partition, number of elements), per unit.
    patterns : mapping or None
        ``universal_checkpoint_info``.
    rest : dict
        All other entries: loss scaler, clipping, ...
    root : mapping
        What lies beside the optimizer's state dict: ``ds_config`` and ``ds_version``.
    master_files : tuple of str, optional
        The files of the masters, where they are not in this one: without ZeRO the masters of a pipeline in fp32
        are the weights in its layer files.
    """

    name: str
    big_endian: bool
    stage: int
    optimizer_class: str
    masters: tuple[TensorRef | None, ...]
    states: tuple[Mapping[str, TensorRef], ...]
    scalars: tuple[Mapping[str, Any], ...]
    groups: tuple[Mapping[str, Any], ...] | None
    group_units: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    pads: Sequence[Sequence[int]] | None
    mappings: tuple[Mapping[str, tuple[int, int]], ...] | None
    patterns: Mapping[str, Any] | None
    rest: Mapping[str, Any]
    root: Mapping[str, Any]
    master_files: tuple[str, ...] | None = None

    def file_of(self, unit: int, *, master: bool) -> str:
        """Name of the file that holds the master weights, or a state, of a unit."""
        return self.master_files[unit] if master and self.master_files else self.name


def read_shard(file: TorchFile, *, like: Shard | None = None) -> Shard:
    """Take an optimizer file apart.

    Parameters
    ----------
    file : TorchFile
    like : Shard, optional
        Another rank's file: what is long and equal is shared with it, so that many ranks of many
        parameters fit into memory.

    Raises
    ------
    CorruptSourceError
        Keys are missing or of another type.
    UnsupportedSourceError
        The file is of a kind that is not read.
    """
    name = file.stat.name
    body = mapping_of(mapping_of(file.root, name).get("optimizer_state_dict"), name)
    if "ds_zero_partition_groups" in body:
        raise UnsupportedSourceError(
            f"{name}: AutoEP checkpoints (ds_zero_partition_groups) are not supported yet."
        )
    if _MASTERS3 in body:
        return _read_stage3(file, body, like)
    if _MASTERS in body:
        return _read_stage12(file, body, like)
    raise UnsupportedSourceError(
        f"{name}: found neither {_MASTERS} (ZeRO 1 and 2) nor {_MASTERS3} (ZeRO 3) among the keys"
        f" {', '.join(map(str, body))}.",
        kind=Kind.MISSING_KEY,
    )


def _read_stage12(file: TorchFile, body: Mapping[str, Any], like: Shard | None) -> Shard:
    name = file.stat.name
    masters = _masters(body[_MASTERS], name)
    units = len(masters)
    # BF16_Optimizer writes neither a stage nor a loss scaler; it is a stage-1 optimizer.
    stage = integer(body.get("zero_stage", 1), f"{name}: zero_stage")
    if stage not in (1, 2):
        raise CorruptSourceError(
            f"{name}: zero_stage is {stage}, but {_MASTERS} is a key of stages 1 and 2."
        )
    bf16_optimizer = "zero_stage" not in body and "loss_scaler" not in body
    base = body.get("base_optimizer_state")
    groups: tuple[Mapping[str, Any], ...] | None = None
    if isinstance(
        base, list
    ):  # elastic: per group a bare state, without padding and without groups
        per_unit = [mapping_of(entry, f"{name}: base_optimizer_state") for entry in base]
        step = body.get("base_optimizer_state_step")
        if step is not None:
            per_unit = [{"step": step, **entry} for entry in per_unit]
    else:
        base = mapping_of(base, f"{name}: base_optimizer_state")
        groups = _groups(base, name)
        state = mapping_of(base.get("state"), f"{name}: state")
        # torch numbers the parameters through all groups; here every group has exactly one
        indices = [_one_unit(group, name) for group in groups]
        _require_in_order(indices, name)
        _require_owned(state, indices, name)
        per_unit = [mapping_of(state.get(index, {}), f"{name}: state") for index in indices]
    if len(per_unit) != units:
        raise CorruptSourceError(
            f"{name}: {len(per_unit)} groups of optimizer state, but {units} flat master weights."
        )
    states, scalars = _split(per_unit, name)
    pads = body.get("param_alignment_paddings")
    if like is not None and pads == like.pads:
        pads = like.pads
    elif pads is not None:
        pads = _paddings(pads, name, units)
    mappings = body.get("param_slice_mappings")
    return Shard(
        name=name,
        big_endian=file.big_endian,
        stage=stage,
        optimizer_class="BF16_Optimizer" if bf16_optimizer else "DeepSpeedZeroOptimizer",
        masters=masters,
        states=states,
        scalars=scalars,
        groups=groups,
        group_units=tuple((unit,) for unit in range(units)),
        counts=_counts(body, name, units),
        pads=pads,
        mappings=None if mappings is None else _mappings(mappings, name, units),
        patterns=body.get("universal_checkpoint_info"),
        rest={**_rest(body), **_beside(body.get("base_optimizer_state"))},
        root=_root(file, like),
    )


def _read_stage3(file: TorchFile, body: Mapping[str, Any], like: Shard | None) -> Shard:
    name = file.stat.name
    masters = _masters(body[_MASTERS3], name)
    base = mapping_of(body.get("optimizer_state_dict"), f"{name}: optimizer_state_dict")
    groups = _groups(base, name)
    state = mapping_of(base.get("state"), f"{name}: state")
    _require_owned(state, range(len(masters)), name)
    per_unit = [mapping_of(state.get(unit, {}), f"{name}: state") for unit in range(len(masters))]
    states, scalars = _split(per_unit, name)
    group_units = tuple(integers(group.get("params"), f"{name}: params") for group in groups)
    if [unit for units in group_units for unit in units] != list(range(len(masters))):
        raise CorruptSourceError(
            f"{name}: the groups hold the sub-groups {group_units!r:.80}, expected 0 to {len(masters) - 1} in order."
        )
    if body.get("zero_stage", 3) != 3:
        raise CorruptSourceError(
            f"{name}: zero_stage is {body['zero_stage']!r:.40}, but {_MASTERS3} is a key of stage 3."
        )
    return Shard(
        name=name,
        big_endian=file.big_endian,
        stage=3,
        optimizer_class="DeepSpeedZeroOptimizer_Stage3",
        masters=masters,
        states=states,
        scalars=scalars,
        groups=groups,
        group_units=group_units,
        counts=_counts(body, name, len(masters)),
        pads=None,
        mappings=None,
        patterns=body.get("universal_checkpoint_info"),
        rest={**_rest(body), **_beside(base)},
        root=_root(file, like),
    )


def _masters(value: object, name: str) -> tuple[TensorRef, ...]:
    what = f"{name}: flat master weights"
    masters = tuple(_flat(item, what) for item in sequence_of(value, what))
    for ref in masters:
        if "float" not in ref.dtype:
            raise CorruptSourceError(f"{what}: found elements of {ref.dtype}, expected floats.")
    return masters


def _groups(base: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], ...]:
    what = f"{name}: param_groups"
    return tuple(mapping_of(item, what) for item in sequence_of(base.get("param_groups"), what))


def _one_unit(group: Mapping[str, Any], name: str) -> int:
    params = sequence_of(group.get("params"), f"{name}: params of a group", length=1)
    return integer(params[0], f"{name}: params of a group")


def _require_in_order(indices: Sequence[int], name: str) -> None:
    """Parameters are numbered from 0 through all groups; very old versions by address."""
    count = len(indices)
    numbered = all(0 <= index < count for index in indices)
    if len(set(indices)) < count or (numbered and list(indices) != list(range(count))):
        raise CorruptSourceError(
            f"{name}: the groups hold the flat parameters {list(indices)!r:.80}, expected 0 to {count - 1} in order."
        )


def _require_owned(state: Mapping[Any, Any], indices: Sequence[int], name: str) -> None:
    """Every numbered entry of the optimizer's state must belong to a group."""
    others = [key for key in state if isinstance(key, int) and key not in indices]
    if others:
        raise CorruptSourceError(
            f"{name}: the optimizer has a state for the flat parameters {others!r:.80}, which are in no group:"
            f" expected {list(indices)!r:.80}."
        )


def _beside(base: object) -> dict[str, Any]:
    """What an optimizer's state dict holds besides the states and groups of torch, if anything."""
    if not isinstance(base, Mapping):
        return {}
    found = {key: value for key, value in base.items() if key not in ("state", "param_groups")}
    state = base.get("state")
    if isinstance(state, Mapping):
        found.update((key, value) for key, value in state.items() if not isinstance(key, int))
    return {"state_dict": found} if found else {}


def _split(
    per_unit: list[Mapping[str, Any]], name: str
) -> tuple[tuple[Mapping[str, TensorRef], ...], tuple[Mapping[str, Any], ...]]:
    """Tensor states and everything else. A 0-d tensor, and ``step`` in any form, is a scalar."""
    states, scalars = [], []
    for entry in per_unit:
        tensors: dict[str, TensorRef] = {}
        others: dict[str, Any] = {}
        for key, value in entry.items():
            if isinstance(value, TensorRef) and value.shape and key != "step":
                tensors[key] = _flat(value, f"{name}: optimizer state {key!r}")
            else:
                others[key] = value
        states.append(tensors)
        scalars.append(others)
    return tuple(states), tuple(scalars)


def _flat(value: object, what: str) -> TensorRef:
    if not isinstance(value, TensorRef):
        raise CorruptSourceError(f"{what}: found {type(value).__name__}, expected a flat tensor.")
    if len(value.shape) != 1 or not value.is_contiguous:
        raise UnsupportedSourceError(
            f"{what}: found a tensor of shape {list(value.shape)} and strides {list(value.strides)}, expected a"
            " flat one."
        )
    return value


def _counts(body: Mapping[str, Any], name: str, units: int) -> tuple[int, ...]:
    what = f"{name}: partition_count"
    value = body.get("partition_count")
    counts = (value,) * units if isinstance(value, int) else value
    counts = integers(counts, what)
    if len(counts) != units or 0 in counts:
        raise CorruptSourceError(
            f"{what}: found {list(counts)}, expected a number of ranks for each of {units} flat buffers."
        )
    return counts


def _paddings(value: object, name: str, units: int) -> list[list[int]]:
    what = f"{name}: param_alignment_paddings"
    return [list(integers(item, what)) for item in sequence_of(value, what, length=units)]


def _mappings(value: object, name: str, units: int) -> tuple[Mapping[str, tuple[int, int]], ...]:
    """``fragment_address(numel, start)`` by name (``utils/tensor_fragment.py``)."""
    what = f"{name}: param_slice_mappings"
    found = []
    for item in sequence_of(value, what, length=units):
        entries: dict[str, tuple[int, int]] = {}
        for fqn, address in mapping_of(item, what).items():
            fields = mapping_of(plain(address), what)
            entries[fqn] = (integer(fields.get("start"), what), integer(fields.get("numel"), what))
        found.append(entries)
    return tuple(found)


def _root(file: TorchFile, like: Shard | None) -> Mapping[str, Any]:
    root = {key: file.root.get(key) for key in ("ds_config", "ds_version")}
    return like.root if like is not None and root == like.root else root


def _rest(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in _USED}
