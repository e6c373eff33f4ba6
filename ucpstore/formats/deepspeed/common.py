"""The common state: everything that is not per element."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ucpstore.contracts import CommonState, Role, StateSpec
from ucpstore.errors import CorruptSourceError
from ucpstore.formats.deepspeed.module import Model
from ucpstore.formats.deepspeed.shards import Shard
from ucpstore.formats.deepspeed.units import Unit
from ucpstore.formats.torchfile import TensorRef, read_tensor
from ucpstore.io.base import Files
from ucpstore.layout.geometry import Strided
from ucpstore.pieces import Bound, Buffer
from ucpstore.tagged import encode

__all__ = ["NO_SCHEDULER", "Common", "Tensors", "collect_common"]

NO_SCHEDULER = (
    "the checkpoint has no lr_scheduler state: whoever owns the scheduler must restore it."
)

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_RNG = ("rng_state", "rng_states")
_ENGINE = (
    "checkpoint_parallel_dimensions",
    "data_sampler",
    "dp_world_size",
    "ds_autoep_layers",
    "ds_config",
    "mp_world_size",
    "num_experts",
    "random_ltd",
    "sparse_tensor_module_names",
    "universal_checkpoint_info",
)


@dataclass(slots=True)
class Tensors:
    """Tensors that the common state refers to by name.

    Attributes
    ----------
    file_of : callable
        Index in the file table of a file's name.
    specs : dict of str to StateSpec
    bound : dict of (fqn, name) to Bound
    """

    file_of: Callable[[str], int]
    specs: dict[str, StateSpec] = field(default_factory=dict)
    bound: dict[tuple[str, str], Bound] = field(default_factory=dict)

    def taker(self, file: str, big_endian: bool) -> Callable[[Any], str | None]:
        """What `ucpstore.tagged.encode` asks about objects of one file."""

        def take(value: Any) -> str | None:
            if not isinstance(value, TensorRef):
                return None
            name = f"tensor_{len(self.specs):04d}"
            buffer = Buffer(self.file_of(file), value.offset, value.span)
            strides = None if value.is_contiguous else value.strides
            geometry = Strided(value.shape, 0, 0, strides)
            self.specs[name] = StateSpec(name, Role.OTHER, value.shape, value.dtype)
            self.bound[CommonState.FQN, name] = Bound(geometry, (buffer,), value.dtype, big_endian)
            return name

        return take


@dataclass(frozen=True, slots=True)
class Common:
    """The document, the tensors beside it, and what could not be kept."""

    document: dict[str, Any]
    tensors: Tensors
    warnings: list[str]


def collect_common(
    files: Files,
    models: Mapping[str, Model],
    stages: Sequence[tuple[Shard, Sequence[Unit]]],
    *,
    layers: Sequence[Model] = (),
    complete: Model | None = None,
    file_of: Callable[[str], int],
) -> Common:
    """Common state of a checkpoint.

    Parameters
    ----------
    files : Files
    models : mapping of str to Model
        Model files by the label of their rank; the first is the one that counts where all agree.
    stages : sequence of (Shard, sequence of Unit)
        Per pipeline stage the first rank's optimizer file and units; the first stage's file counts where all
        agree.
    layers : sequence of Model
        Layer files of a pipeline.
    complete : Model, optional
        Of a stage that has all param groups: its scheduler has a number for each. By default the first.
    file_of : callable
        Index in the file table of a file's name.
    """
    tensors = Tensors(file_of)
    warnings: list[str] = []
    first = next(iter(models.values()))
    shard = stages[0][0]
    model = _Encoder(tensors.taker(first.name, first.big_endian), warnings)
    optimizer = _Encoder(tensors.taker(shard.name, shard.big_endian), warnings)
    numbers = [[_numbers(files, holder, entry) for entry in holder.scalars] for holder, _ in stages]
    # a stage may have no parameters of a group
    scalars: list[Mapping[str, tuple[Any, str]]] = [
        next((entry for entry in per_stage if entry), {})
        for per_stage in zip(*numbers, strict=True)
    ]
    steps, where = _all_steps(stages, numbers)
    complete = complete or first
    scheduler = complete.rest.get("lr_scheduler")
    if scheduler is None:
        warnings.append(NO_SCHEDULER)
    rest = dict(shard.rest)
    loss_scaler = rest.pop("loss_scaler", None)
    if shard.patterns is not None:
        rest["universal_checkpoint_info"] = shard.patterns
    framework = {
        "name": "deepspeed",
        "version": first.rest.get("ds_version") or rest.get("ds_version"),
        "zero_stage": shard.stage,
        **model("", {key: first.rest[key] for key in _ENGINE if key in first.rest}),
        "buffer_names": sorted({name for m in models.values() for name in m.buffer_names}),
        "optimizer": {
            "class": shard.optimizer_class,
            "step": where,
            **optimizer("optimizer", rest),
            "scalars": [
                {key: value for key, (value, _) in entry.items() if key != "step"}
                for entry in (optimizer.pairs(entry) for entry in scalars)
            ],
        },
    }
    for holder in (first, *layers):
        if holder.extras:
            extras = _Encoder(tensors.taker(holder.name, holder.big_endian), warnings)
            found = extras("module", dict(holder.extras))
            framework["module_extras"] = {**framework.get("module_extras", {}), **found}
    document = {
        "param_groups": _groups(shard, [units for _, units in stages], optimizer),
        "steps": steps,
        "scheduler": _Encoder(tensors.taker(complete.name, complete.big_endian), warnings)(
            "lr_scheduler", scheduler
        ),
        "loss_scaler": optimizer("loss_scaler", loss_scaler),
        "counters": model("", {k: first.rest[k] for k in _COUNTERS if k in first.rest}),
        "rng": _rng(models, tensors, warnings),
        "framework": framework,
        **_client(models, tensors, warnings),
    }
    return Common(document, tensors, warnings)


@dataclass(frozen=True, slots=True)
class _Encoder:
    """`ucpstore.tagged.encode` for the values of one file."""

    take: Callable[[Any], str | None]
    warnings: list[str]

    def __call__(self, path: str, value: Any) -> Any:
        return encode(value, tensors=self.take, warnings=self.warnings, path=path)

    def pairs(self, entry: Mapping[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
        return {key: (self(key, value), kind) for key, (value, kind) in entry.items()}


def _numbers(files: Files, shard: Shard, entry: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Value and element type of every scalar; one-element tensors are read, they are a few bytes."""
    found: dict[str, tuple[Any, str]] = {}
    for key, value in entry.items():
        if isinstance(value, TensorRef) and value.numel == 1:
            array = read_tensor(files, shard.name, value, big_endian=shard.big_endian)
            found[key] = (array.reshape(-1)[0].item(), value.dtype)
        else:
            found[key] = (value, "")
    return found


def _steps(
    shard: Shard, units: Sequence[Unit], scalars: Sequence[Mapping[str, tuple[Any, str]]]
) -> tuple[dict[str, int | float], dict[str, Any]]:
    """Step of every parameter, and where the optimizer keeps it.

    torch keeps it in the state, apex in the param group; DeepSpeed's FusedAdam has both and never
    updates the group's, so the state's counts.
    """
    steps: dict[str, int | float] = {}
    places: dict[str, None] = {}
    kinds: dict[str, None] = {}
    group_of = {unit: g for g, members in enumerate(shard.group_units) for unit in members}
    for index, (unit, numbers) in enumerate(zip(units, scalars, strict=True)):
        group = shard.groups[group_of[index]] if shard.groups is not None else {}
        value, kind = numbers.get("step", (None, ""))
        if value is not None:
            places["state"] = None
            kinds[kind or type(value).__name__] = None
        if group.get("step") is not None:
            places["param_groups"] = None
            value = group["step"] if value is None else value
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CorruptSourceError(
                f"{shard.name}: step of unit {index}: found {type(value).__name__}, expected a number."
            )
        steps.update(dict.fromkeys(unit.shapes, value))
    return steps, {"kept_in": list(places), "types": list(kinds)}


def _all_steps(
    stages: Sequence[tuple[Shard, Sequence[Unit]]],
    numbers: Sequence[Sequence[Mapping[str, tuple[Any, str]]]],
) -> tuple[dict[str, int | float], dict[str, Any]]:
    """Steps of all pipeline stages; a tied parameter has one step on all of them."""
    steps, where = _steps(*stages[0], numbers[0])
    for (shard, units), mine in zip(stages[1:], numbers[1:], strict=True):
        for fqn, step in _steps(shard, units, mine)[0].items():
            if steps.setdefault(fqn, step) != step:
                raise CorruptSourceError(
                    f"{shard.name}: step of {fqn!r} is {step}, but {steps[fqn]} on another pipeline stage.",
                    fqn=fqn,
                )
    return steps, where


def _groups(
    shard: Shard, stages: Sequence[Sequence[Unit]], encoder: _Encoder
) -> list[dict[str, Any]]:
    """Groups of all stages are one by their position; their hyper-parameters were compared."""
    groups = []
    for index, members in enumerate(shard.group_units):
        names = [name for units in stages for unit in members for name in units[unit].shapes]
        names = [*dict.fromkeys(names)]  # tied parameters are on several stages
        hyper = dict(shard.groups[index]) if shard.groups is not None else {}
        hyper.pop("params", None)
        groups.append({**encoder(f"param_groups[{index}]", hyper), "params": names})
    return groups


def _rng(models: Mapping[str, Model], tensors: Tensors, warnings: list[str]) -> dict[str, Any]:
    """States of random number generators by the label of the rank that saved them."""
    found = {}
    for label, model in models.items():
        mine = {key: model.rest[key] for key in _RNG if key in model.rest}
        if mine:
            take = tensors.taker(model.name, model.big_endian)
            found[label] = encode(mine, tensors=take, warnings=warnings, path=f"rng[{label}]")
    return found


def _client(models: Mapping[str, Model], tensors: Tensors, warnings: list[str]) -> dict[str, Any]:
    """The client's entries of the first rank, and those of other ranks where they differ.

    Tensors are not read when a checkpoint is opened, so an entry that has any counts as different.
    """
    first: dict[str, Any] = {}
    others: dict[str, dict[str, Any]] = {}
    for position, (label, model) in enumerate(models.items()):
        take = tensors.taker(model.name, model.big_endian)
        for key, value in model.client.items():
            if key in _RNG:
                continue
            lost: list[str] = []
            before = len(tensors.specs)
            encoded = encode(value, tensors=take, warnings=lost, path=str(key))
            if position == 0:
                first[str(key)] = encoded
                warnings += lost
            elif len(tensors.specs) > before or key not in first or first[key] != encoded:
                others.setdefault(label, {})[str(key)] = encoded
                warnings += [f"{label}: {text}" for text in lost]
    return {"client": first, **({"client_by_rank": others} if others else {})}
