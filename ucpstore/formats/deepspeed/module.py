"""The model file: weights, buffers, tied names and frozen parameters.

Written by ``_common_checkpoint_state`` of DeepSpeed's ``runtime/engine.py``. At stage 3 ``module`` has
placeholders of shape ``(0,)`` (older versions: ``(1,)``) where the parameters were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ucpstore.errors import (
    CorruptSourceError,
    IncompleteSourceError,
    Kind,
    UnsupportedSourceError,
    listing,
)
from ucpstore.formats.deepspeed.checks import integers, mapping_of, named, sequence_of
from ucpstore.formats.deepspeed.units import Shapes, read_shapes
from ucpstore.formats.torchfile import TensorRef, TorchFile

__all__ = ["ENGINE_KEYS", "Census", "Model", "is_placeholder", "read_model", "take_census"]

_PLACEHOLDERS = ((0,), (1,))
ENGINE_KEYS = frozenset(
    {
        "checkpoint_parallel_dimensions",
        "data_sampler",
        "dp_world_size",
        "ds_autoep_layers",
        "ds_config",
        "ds_version",
        "global_samples",
        "global_steps",
        "lr_scheduler",
        "mp_world_size",
        "num_experts",
        "random_ltd",
        "skipped_steps",
        "sparse_tensor_module_names",
        "universal_checkpoint_info",
    }
)
"""What DeepSpeed itself puts beside the tensors; all other keys are the client's."""

_USED = {
    "buffer_names",
    "frozen_param_fragments",
    "frozen_param_shapes",
    "module",
    "optimizer",
    "param_shapes",
    "shared_params",
}


@dataclass(frozen=True, slots=True)
class Model:
    """One model file.

    Attributes
    ----------
    name : str
        Of the file.
    big_endian : bool
    module : dict
        Tensors by name, in the model's order.
    extras : dict
        What ``module`` holds besides tensors (extra states).
    shapes : list of mapping
        Local shapes of the trainable parameters per group or sub-group, in flat order.
    buffer_names : frozenset of str
    frozen_shapes : mapping or None
        Full local shapes of the parameters that no optimizer owns; ``None`` where they were not saved.
    fragments : mapping
        Their values: whole at stage 2, this rank's part at stage 3.
    shared : mapping of str to str
        ``shared_params``: further name -> first name.
    rest : dict
        All other entries.
    optimizer : object
        The optimizer's state, which is here without ZeRO only.
    stage0 : bool
        There are no ``param_shapes``: the engine ran without ZeRO, or without an optimizer. A pipeline's
        BF16_Optimizer, which has files of its own, does not count.
    """

    name: str
    big_endian: bool
    module: Mapping[str, TensorRef]
    extras: Mapping[str, Any]
    shapes: list[Shapes]
    buffer_names: frozenset[str]
    frozen_shapes: Shapes | None
    fragments: Mapping[str, TensorRef]
    shared: Mapping[str, str]
    rest: Mapping[str, Any]
    optimizer: Any = None
    stage0: bool = False

    @property
    def trainable(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all trainable parameters."""
        return {name: shape for shapes in self.shapes for name, shape in shapes.items()}

    @property
    def client(self) -> dict[str, Any]:
        """What the training loop handed to ``save_checkpoint``."""
        return {key: value for key, value in self.rest.items() if key not in ENGINE_KEYS}

    def without_module(self) -> Model:
        """The same without the tensors that all data-parallel ranks have in common."""
        return replace(self, module={}, extras={}, shapes=[])


def is_placeholder(ref: TensorRef, shape: tuple[int, ...] | None) -> bool:
    """Whether a tensor of ``module`` only stands for a parameter of ``shape`` that lies elsewhere."""
    return ref.shape in _PLACEHOLDERS and ref.shape != shape


def read_model(file: TorchFile, *, pipeline: bool = False) -> Model:
    """Take a model file apart.

    Parameters
    ----------
    file : TorchFile
    pipeline : bool
        There are layer files, which have the tensors.

    Raises
    ------
    CorruptSourceError
        Keys are missing or of another type.
    IncompleteSourceError
        It belongs to a pipeline, but there are no layer files.
    UnsupportedSourceError
        It belongs to an MoE model.
    """
    name = file.stat.name
    root = mapping_of(file.root, name)
    for key in ("ds_autoep_layers", "autoep_layers", "num_experts"):
        if root.get(key):
            raise UnsupportedSourceError(f"{name}: MoE checkpoints ({key}) are not supported yet.")
    if "module" not in root:
        raise CorruptSourceError(
            f"{name}: no key 'module' among {listing(root)}: this is no DeepSpeed model file.",
            kind=Kind.MISSING_KEY,
        )
    if root["module"] is None and not pipeline:
        raise IncompleteSourceError(
            f"{name}: 'module' is empty: the weights of a pipeline are in layer files, and no layer_*-model_states.pt"
            " is there.",
            hint="Copy them from the nodes that wrote them.",
        )
    if root["module"] is not None and pipeline:
        raise UnsupportedSourceError(
            f"{name}: 'module' holds tensors, but there are layer files of a pipeline in the same folder.",
            hint="Remove the files of the older run.",
            kind=Kind.AMBIGUOUS,
        )
    stage0 = root.get("param_shapes") is None and (not pipeline or _is_whole(root.get("optimizer")))
    module = named(root["module"] or {}, f"{name}: module")
    frozen = root.get("frozen_param_shapes")
    what = f"{name}: frozen_param_shapes"
    fragments = mapping_of(
        root.get("frozen_param_fragments") or {}, f"{name}: frozen_param_fragments"
    )
    unknown = [key for key in fragments if not isinstance(frozen, Mapping) or key not in frozen]
    if unknown:
        raise CorruptSourceError(
            f"{name}: frozen_param_fragments holds {listing(map(repr, unknown), cap=3)}, expected only names of"
            " frozen_param_shapes.",
            kind=Kind.MISSING_KEY,
        )
    shared = named(root.get("shared_params") or {}, f"{name}: shared_params")
    return Model(
        name=name,
        big_endian=file.big_endian,
        module={key: value for key, value in module.items() if isinstance(value, TensorRef)},
        extras={key: value for key, value in module.items() if not isinstance(value, TensorRef)},
        shapes=read_shapes(root.get("param_shapes") or [], f"{name}: param_shapes"),
        buffer_names=frozenset(
            _texts(sequence_of(root.get("buffer_names") or [], f"{name}: buffer_names"), name)
        ),
        frozen_shapes=None
        if frozen is None
        else {key: integers(shape, what) for key, shape in named(frozen, what).items()},
        fragments=fragments,
        shared=dict(zip(shared, _texts(shared.values(), f"{name}: shared_params"), strict=True)),
        rest={key: value for key, value in root.items() if key not in _USED},
        optimizer=root.get("optimizer"),
        stage0=stage0,
    )


def _is_whole(optimizer: object) -> bool:
    """Whether the model file of a pipeline holds the optimizer's state.

    Without ZeRO it does, but for BF16_Optimizer it holds a copy of one rank's file only (``_save_checkpoint``
    of ``runtime/engine.py``).
    """
    return isinstance(optimizer, Mapping) and "single_partition_of_fp32_groups" not in optimizer


def _texts(values: Iterable[object], what: str) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str):
            raise CorruptSourceError(f"{what}: found the name {value!r:.60}, expected a text.")
        yield value


@dataclass(slots=True)
class Census:
    """What every name in a model file stands for.

    Attributes
    ----------
    aliases : dict of str to str
        Further name -> the name that has the values.
    frozen : dict of str to tuple of int
        Local shapes of parameters that no optimizer owns.
    buffers : dict of str to str
        Buffers, and tensors that are neither parameter nor buffer, with a note on the latter.
    warnings : list of str
    """

    aliases: dict[str, str] = field(default_factory=dict)
    frozen: dict[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def take_census(model: Model, stage: int) -> Census:
    """Say what every name of the model file stands for.

    Parameters
    ----------
    model : Model
        The file of the first data-parallel rank.
    stage : int
        ZeRO stage.
    """
    census = Census()
    known = {**model.trainable, **(model.frozen_shapes or {})}
    _add_recorded_aliases(model, known, census)
    _add_shared_memory(model, known, census)
    census.frozen.update(model.frozen_shapes or {})
    lost = []
    for name, ref in model.module.items():
        if name in known or name in census.aliases:
            continue
        if name in model.buffer_names:
            census.buffers[name] = ""
        elif stage == 3 and is_placeholder(ref, None):
            lost.append(name)
        elif stage < 2 and ref.dtype.startswith(("float", "bfloat", "complex")):
            # stages 0 and 1 keep frozen parameters in `module` only
            census.frozen[name] = ref.shape
        else:
            census.buffers[name] = "neither a parameter nor a buffer of the module"
    _report_absent(model, census, stage)
    if lost:
        census.warnings.append(
            f"{model.name} has only ZeRO-3 placeholders for {len(lost)} parameters that no optimizer file holds"
            f" either ({listing(lost, cap=3)}): frozen parameters that were not saved."
        )
    if stage >= 2 and model.frozen_shapes is None:
        census.warnings.append(
            f"{model.name} was saved without its frozen parameters (exclude_frozen_parameters): if the model has"
            " any, their base weights must come from elsewhere."
        )
    if model.extras:
        census.warnings.append(
            f"{model.name}: 'module' holds {len(model.extras)} entries that are no tensors"
            f" ({listing(model.extras, cap=3)}); they are kept in the common state."
        )
    return census


def _report_absent(model: Model, census: Census, stage: int) -> None:
    """Warn of what should be in ``module`` and is not."""
    absent = sorted(model.buffer_names.difference(model.module, model.extras, census.aliases))
    if absent:
        census.warnings.append(
            f"{model.name}: 'module' lacks {len(absent)} of the buffers that buffer_names lists"
            f" ({listing(absent, cap=3)}); their values were not saved."
        )
    weights = [name for name in model.trainable if name not in model.module]
    if weights and stage < 3:
        census.warnings.append(
            f"{model.name}: 'module' lacks {len(weights)} trainable parameters ({listing(weights, cap=3)}); they have"
            " master weights only."
        )
    frozen = [n for n in census.frozen if n not in model.module and n not in model.fragments]
    if frozen:
        census.warnings.append(
            f"{model.name}: the values of {len(frozen)} frozen parameters ({listing(frozen, cap=3)}) were not saved;"
            " they are left out."
        )


def _add_recorded_aliases(model: Model, known: Shapes, census: Census) -> None:
    """Aliases of ``shared_params``, unless they contradict the rest of the file.

    DeepSpeed compares data pointers, and every empty tensor has the same one: such a map names one
    parameter as the origin of everything. One contradiction discredits all entries with that origin.
    """
    wrong: dict[str, list[str]] = {}
    plausible: dict[str, str] = {}
    for alias, origin in model.shared.items():
        first = origin
        if alias in known and origin not in known:
            alias, first = origin, alias  # the optimizer knows the other name
        if alias in known or not _fits(model, alias, first, known):
            wrong.setdefault(origin, []).append(alias)
        else:
            plausible[alias] = first
    apart = []
    for alias, first in plausible.items():
        if first in wrong:
            continue
        census.aliases[alias] = first
        if _are_apart(model.module.get(alias), model.module.get(first)):
            apart.append(alias)
    if apart:
        census.warnings.append(
            f"{model.name}: {listing(map(repr, apart), cap=3)} is another name of a parameter by shared_params, but"
            " 'module' holds two tensors; the one with the further name is not read."
        )
    for origin, names in wrong.items():
        census.warnings.append(
            f"{model.name}: shared_params says that {listing(map(repr, names), cap=3)} are other names of"
            f" {origin!r}, but shapes or param_shapes contradict it; entries with that origin were ignored."
        )


def _are_apart(one: TensorRef | None, other: TensorRef | None) -> bool:
    """Whether two tensors with values lie in different places of the file."""
    if one is None or other is None or one.shape != other.shape or not one.numel:
        return False
    return (one.storage, one.start) != (other.storage, other.start)


def _fits(model: Model, alias: str, first: str, known: Shapes) -> bool:
    """Whether two names can be one tensor."""
    other, ref = model.module.get(alias), model.module.get(first)
    shape = known.get(first)
    if shape is None:
        if ref is None:
            return False
        shape = ref.shape
    return other is None or other.shape == shape or is_placeholder(other, shape)


def _add_shared_memory(model: Model, known: Shapes, census: Census) -> None:
    """Names that view the same memory of the file as a parameter, whatever ``shared_params`` says."""
    owners: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], str] = {}
    candidates = []
    for name, ref in model.module.items():
        if not ref.numel:
            continue
        key = (id(ref.storage), ref.start, ref.shape, ref.strides)
        if name in known:
            owners[key] = name
        elif name not in census.aliases and name not in model.buffer_names:
            candidates.append((key, name))
    for key, name in candidates:
        owner = owners.setdefault(key, name)
        if owner != name:
            census.aliases[name] = owner
