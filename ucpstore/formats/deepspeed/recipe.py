"""What a native checkpoint is made of: read from a source, checked, and put into the target's words."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ucpstore.contracts import CommonState, ParameterSpec, Role, Source
from ucpstore.errors import Kind, PlanError, UnsupportedSourceError, listing
from ucpstore.formats.deepspeed.states import MASTER, name_and_role
from ucpstore.formats.deepspeed.ucpinfo import Member, UcpInfo, deal, undeal
from ucpstore.formats.torchwrite import Part, Tensor
from ucpstore.layout.parallel import Layout
from ucpstore.tagged import StubObject, TensorName, decode

__all__ = ["Group", "Recipe", "make_recipe", "tensors_in"]

SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default (``runtime/zero/config.py``)."""

_FLOATS = ("float32", "bfloat16", "float16")
_OLDEST = "0.3.17"
_PADDED = {"float32": "f", "float64": "d", "int64": "q", "int32": "i"}


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group: hyper-parameters, parameters in flat order, names of the optimizer's states."""

    hyper: Mapping[str, Any]
    members: tuple[Member, ...]
    states: Mapping[str, str]
    """The optimizer's name of a state -> ours."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that the files of all ranks hold.

    Attributes
    ----------
    source : str
        URL, for messages.
    layout : Layout
        With its dtype and sub-group size decided.
    groups : tuple of Group
    info : UcpInfo
    parameters : mapping of str to ParameterSpec
    common : mapping
        The decoded common document.
    tensors : mapping of str to StateSpec
        Of the common state.
    tag : str
    warnings : tuple of str
    """

    source: str
    layout: Layout
    groups: tuple[Group, ...]
    info: UcpInfo
    parameters: Mapping[str, ParameterSpec]
    common: Mapping[str, Any]
    tensors: Mapping[str, Any]
    tag: str
    warnings: tuple[str, ...]

    @property
    def dtype(self) -> str:
        """Element type of the model's weights."""
        return self.layout.dtype or "float32"

    @property
    def prefix(self) -> str:
        """Of optimizer files: the engine's dtype decides (``_get_zero_ckpt_prefix``)."""
        return "bf16_" if self.dtype == "bfloat16" else ""

    @property
    def framework(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.common["framework"]
        return found

    @property
    def zero_version(self) -> str:
        return str(self.framework.get("version") or _OLDEST)

    def step(self, members: Sequence[Member]) -> Any:
        """The step of a flat buffer as the optimizer keeps it, or None where it has none."""
        where = self.framework.get("optimizer", {}).get("step", {})
        if "state" not in where.get("kept_in", ()):
            return None
        steps = {self.common["steps"].get(member.fqn) for member in members}
        if len(steps) != 1:
            raise UnsupportedSourceError(
                f"{self.source}: parameters that share a flat buffer have different steps"
                f" ({listing(sorted(steps, key=str))}), expected one."
            )
        (step,) = steps
        kind = next(iter(where.get("types", ())), "")
        if step is None or kind not in _PADDED:
            return step
        number = float(step) if kind.startswith("float") else int(step)
        return Tensor(kind, (), data=struct.pack("<" + _PADDED[kind], number))


def tensors_in(value: Any, recipe: Recipe) -> Any:
    """``value`` with the names of common tensors replaced by tensors that are read from the source."""
    if isinstance(value, TensorName):
        spec = recipe.tensors[value.name]
        part = Part(CommonState.FQN, value.name, spec.shape, 0, spec.nbytes, 0)
        return Tensor(spec.dtype, spec.shape, (part,))
    if isinstance(value, StubObject):
        return StubObject(
            value.module,
            value.qualname,
            tuple(tensors_in(item, recipe) for item in value.args),
            tensors_in(value.state, recipe),
            tensors_in(value.contents, recipe),
        )
    if isinstance(value, dict):
        return {key: tensors_in(item, recipe) for key, item in value.items()}
    if isinstance(value, list):
        return [tensors_in(item, recipe) for item in value]
    if isinstance(value, tuple):
        return tuple(tensors_in(item, recipe) for item in value)
    return value


def make_recipe(source: Source, layout: Layout) -> Recipe:
    """Check that ``source`` can be written in ``layout``, and decide everything that the layout leaves open.

    Raises
    ------
    PlanError
        The layout is not one that is written yet, or says too little.
    UnsupportedSourceError
        The source lacks something that DeepSpeed needs, or has states without a native form.
    """
    _check_layout(layout)
    document, warnings = _without_lost(source.common.document)
    common = decode(document)
    framework = common.get("framework")
    if not isinstance(framework, dict) or framework.get("name") != "deepspeed":
        raise UnsupportedSourceError(
            f"{source.url}: its common state is not of a DeepSpeed run; native DeepSpeed checkpoints are only"
            " written from such."
        )
    config = framework.get("ds_config")
    config = config if isinstance(config, dict) else {}
    layout = _decide(source, layout, config)
    groups = tuple(_groups(source, common, config, layout))
    info = UcpInfo.of(
        [group.members for group in groups],
        layout.zero_stage,
        layout.dp,
        layout.sub_group_size or SUB_GROUP_SIZE,
    )
    warnings += _rng_warnings(common, layout) + _order_warnings(source)
    tag = source.parallelism.get("tag")
    if not isinstance(tag, str) or not tag:
        tag = f"global_step{common['counters'].get('global_steps', 0)}"
    return Recipe(
        source=source.url,
        layout=layout,
        groups=groups,
        info=info,
        parameters=source.parameters,
        common=common,
        tensors=source.common.tensors,
        tag=tag,
        warnings=tuple(warnings),
    )


def _check_layout(layout: Layout) -> None:
    if layout.tp != 1 or layout.pp != 1:
        raise PlanError(
            f"layout tp={layout.tp}, pp={layout.pp}: native DeepSpeed checkpoints are only written for tp=1 and"
            " pp=1 yet."
        )
    if layout.zero_stage == 0:
        raise PlanError(
            "layout zero_stage=0: native DeepSpeed checkpoints are only written for stages 1, 2 and 3 yet."
        )
    if layout.zero_stage != 3 and layout.sub_group_size is not None:
        raise PlanError(
            f"layout sub_group_size={layout.sub_group_size}: only stage 3 has sub-groups."
        )


def _without_lost(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The document without client entries that hold something that the source could not keep."""
    client = document.get("client") or {}
    lost = sorted(key for key, value in client.items() if _has_lost(value))
    warnings = [f"the client's entry {key!r} could not be kept and is left out." for key in lost]
    kept = {key: value for key, value in client.items() if key not in lost}
    return {**document, "client": kept}, warnings


def _has_lost(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "$opaque" in value or any(_has_lost(item) for item in value.values())
    return isinstance(value, list) and any(_has_lost(item) for item in value)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _decide(source: Source, layout: Layout, config: Mapping[str, Any]) -> Layout:
    """Fill in what the layout leaves to the source."""
    own = _source_dtype(source, config)
    dtype = layout.dtype or own
    if dtype == "float16" != own:
        raise PlanError(
            f"layout dtype=fp16: the source is of {own}, and has no loss scale to go on with.",
            hint="Choose bf16 or fp32.",
        )
    size = layout.sub_group_size or _section(config, "zero_optimization").get("sub_group_size")
    if layout.zero_stage == 3:
        size = int(size) if isinstance(size, int | float) and size >= 1 else SUB_GROUP_SIZE
    else:
        size = None
    return Layout(layout.dp, 1, 1, layout.zero_stage, dtype, size)


def _source_dtype(source: Source, config: Mapping[str, Any]) -> str:
    if str(source.parallelism.get("file_prefix", "")).startswith("bf16"):
        return "bfloat16"
    if _section(config, "bf16").get("enabled") is True:
        return "bfloat16"
    return "float16" if _section(config, "fp16").get("enabled") is True else "float32"


def _groups(
    source: Source, common: Mapping[str, Any], config: Mapping[str, Any], layout: Layout
) -> list[Group]:
    groups = []
    for index, entry in enumerate(common["param_groups"]):
        hyper = {key: value for key, value in entry.items() if key != "params"}
        if "lr" not in hyper or hyper.get("use_muon"):
            found = "Muon's group" if hyper.get("use_muon") else "no hyper-parameters"
            raise UnsupportedSourceError(
                f"{source.url}: parameter group {index} has {found}; it cannot be written natively yet."
            )
        members = [_member(source, fqn) for fqn in entry["params"]]
        members = _reorder(source, config, layout, members)
        groups.append(Group(hyper, tuple(members), _states(source, index, members)))
    owned = {member.fqn for group in groups for member in group.members}
    astray = [
        f for f, p in source.parameters.items() if p.trainable and _is_param(p) and f not in owned
    ]
    if astray or not owned:
        raise UnsupportedSourceError(
            f"{source.url}: parameter groups list {len(owned)} parameters, but not {listing(astray)}; expected"
            " every trainable one."
        )
    if any(entry for entry in common["framework"].get("optimizer", {}).get("scalars", ())):
        raise UnsupportedSourceError(
            f"{source.url}: the optimizer keeps numbers besides the step; they have no native form yet."
        )
    return groups


def _is_param(parameter: ParameterSpec) -> bool:
    return all(spec.role is not Role.BUFFER for spec in parameter.states.values())


def _member(source: Source, fqn: str) -> Member:
    parameter = source.parameters.get(fqn)
    spec = parameter.states.get(MASTER) if parameter else None
    if spec is None or spec.dtype not in _FLOATS:
        found = "no such state" if spec is None else spec.dtype
        raise UnsupportedSourceError(
            f"{source.url}: master weights ({MASTER}) of {fqn}: found {found}, expected one of"
            f" {', '.join(_FLOATS)}.",
            kind=Kind.MISSING_KEY,
        )
    return Member(fqn, spec.shape)


def _reorder(
    source: Source, config: Mapping[str, Any], layout: Layout, members: list[Member]
) -> list[Member]:
    """Flat order of the target: ``round_robin_gradients`` deals parameters out by the number of ranks."""
    if _section(config, "zero_optimization").get("round_robin_gradients") is not True:
        return members
    if source.parallelism.get("mapping_reorders"):
        raise UnsupportedSourceError(
            f"{source.url}: round_robin_gradients has dealt its parameters out by their number and order, and the"
            " mapping changed them; the order in which an optimizer would get them is not known."
        )
    if source.parallelism.get("optimizer_class") == "DeepSpeedZeroOptimizer":
        members = undeal(members, int(source.parallelism["dp"]))
    accumulate = _section(config, "data_types").get("grad_accum_dtype")
    bf16_optimizer = (
        layout.zero_stage == 1 and layout.dtype == "bfloat16" and accumulate in ("fp32", "float32")
    )
    return members if layout.zero_stage == 3 or bf16_optimizer else deal(members, layout.dp)


def _states(source: Source, index: int, members: Sequence[Member]) -> dict[str, str]:
    """The optimizer states that all parameters of a group have: the optimizer's name -> ours."""
    held: list[dict[str, str]] = []
    for member in members:
        specs = source.parameters[member.fqn].states
        names = [n for n, s in specs.items() if n != MASTER and s.role is not Role.MODEL_WEIGHT]
        held.append({_native(name): name for name in names})
        for name in names:
            if specs[name].shape != member.shape or specs[name].dtype not in _FLOATS:
                raise UnsupportedSourceError(
                    f"{source.url}: {name} of {member.fqn} has shape {specs[name].shape} and elements of"
                    f" {specs[name].dtype}, expected {member.shape} and floats."
                )
    if any(names != held[0] for names in held):
        raise UnsupportedSourceError(
            f"{source.url}: some parameters of group {index} have optimizer states that others lack; one flat"
            " buffer cannot hold that."
        )
    return held[0] if held else {}


_NATIVE = {name_and_role(state)[0]: state for state in ("exp_avg", "exp_avg_sq")}


def _native(name: str) -> str:
    return _NATIVE.get(name, name)


def _rng_warnings(common: Mapping[str, Any], layout: Layout) -> list[str]:
    ranks = len(common.get("rng") or {})
    wanted = layout.dp if layout.zero_stage == 3 else 1
    if ranks and ranks < wanted:
        text = (
            f"random number generators were saved by {ranks} ranks, the layout has {wanted} files for them: the"
            " further ranks get the first one's."
        )
        return [text]
    return []


def _order_warnings(source: Source) -> list[str]:
    """Flat buffers know no names: a mapped model is right only if its optimizer gets this order."""
    if "mapping" not in source.parallelism or source.parallelism.get("mapping_ordered"):
        return []
    text = (
        "the mapping gives no order: the optimizer of the run that loads this must be given the parameters in the order"
        " of the source's (a fused one at its first member's place), as DeepSpeed finds them by position, not by name."
    )
    return [text]
