"""Ground truth of a run, from the live framework's own getters, never from its files.

`truth.safetensors` holds tensors named ``STATE:FQN``; `truth.json` the rest. The states:

``fp32:FQN`` ``exp_avg:FQN`` ...
    Full masters and optimizer states under the optimizer's own state names, from
    `safe_get_full_fp32_param` and `safe_get_full_optimizer_state`.
``weight:FQN``
    The model's own weights (16 or 32 bit), trainable and frozen.
``buffer:FQN``
    Buffers, the persistent ones.
``client:KEY``
    Tensors of the client's state.

Two places where DeepSpeed's getters need care, both of its own making:

* `DeepSpeedZeroOptimizer` (stages 1 and 2) links the parameters to their optimizer states after
  the *first group's* first step, when other groups have no states yet, and never again, so the
  getter raises for every later group. We let the optimizer make the same links once more, after
  training (`relink`): its own method, on states that exist by then.
* With `round_robin_gradients` (and without `parameter_alignment`) the getter's links assume the
  original order while the flat buffer has the round-robin order, so the getters return *other
  parameters' values*. There the oracle is `gather_flat`: an all-gather of every rank's live flat
  partition, cut by the live optimizer's list of parameters and offsets. In every other run of
  `DeepSpeedZeroOptimizer` both oracles must agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file

from tests.deepspeed_runs.cases import Case

Tensors = dict[str, torch.Tensor]


def record_truth(
    engine: Any, case: Case, folder: Path, *, facts: dict[str, Any], tensors: Tensors
) -> None:
    """Write the truth of the trained `engine`; every rank must call this."""
    optimizer = engine.optimizer
    if case.stage == 0 and not hasattr(optimizer, "bf16_groups"):
        record_stage0(engine, case, folder, facts=facts, tensors=tensors)
        return
    relink(optimizer)
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    states, opaque = agreed_states(optimizer, names)
    parameters: dict[str, Any] = {}
    found: Tensors = {}
    for parameter, name in names.items():
        if not parameter.requires_grad:
            continue
        group, flat = live_buffer(optimizer, parameter)
        state = optimizer.optimizer.state.get(flat, {})
        found[f"fp32:{name}"] = full(safe_get_full_fp32_param(parameter), parameter, flat.dtype)
        for key in states[name]:
            value = safe_get_full_optimizer_state(parameter, key)
            found[f"{key}:{name}"] = full(value, parameter, state[key].dtype)
        parameters[name] = {
            "group": group,
            "states": states[name],
            "step": number(state.get("step")),
        }
    oracle = "getters"
    if hasattr(optimizer, "round_robin_bit16_groups"):
        gathered = gather_flat(optimizer, names, states)
        if optimizer.round_robin_gradients:
            found = gathered
            oracle = "gather_flat"
        else:
            must_agree(found, gathered)
    tensors = {**tensors, **found, **model_tensors(engine, case)}
    facts = {
        **facts,
        "oracle": oracle,
        "parameters": parameters,
        "opaque_states": opaque,
        "groups": group_facts(optimizer.optimizer, parameters),
    }
    write(engine, case, folder, tensors=tensors, facts=facts)


def record_stage0(
    engine: Any, case: Case, folder: Path, *, facts: dict[str, Any], tensors: Tensors
) -> None:
    """Write the truth without ZeRO: live masters and states, found by the parameters themselves.

    In fp32 DeepSpeed leaves the optimizer as it is, so its parameters are the model's; in 16 bit
    `FP16_UnfusedOptimizer` keeps pairs of a model's parameter and its master, and `FP16_Optimizer`
    flattens a group with torch's function, whose inverse finds the parameters again.
    """
    wrapper = engine.optimizer
    optimizer = getattr(wrapper, "optimizer", wrapper)
    flat = hasattr(wrapper, "fp32_groups_flat")
    masters: dict[torch.nn.Parameter, tuple[int, torch.Tensor, dict[str, Any]]] = {}
    for index, group in enumerate(optimizer.param_groups):
        own = wrapper.fp16_groups[index] if wrapper is not optimizer else group["params"]
        states = [optimizer.state.get(master, {}) for master in group["params"]]
        values = [{"": m, **state} for m, state in zip(group["params"], states, strict=True)]
        if flat:
            (whole,) = values
            cut = {
                key: torch._utils._unflatten_dense_tensors(value, own)
                if torch.is_tensor(value)
                else [value] * len(own)
                for key, value in whole.items()
            }
            values = [{key: parts[i] for key, parts in cut.items()} for i in range(len(own))]
        for parameter, found in zip(own, values, strict=True):
            masters[parameter] = (index, found.pop(""), found)
    parameters: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter not in masters:
            continue
        index, master, state = masters[parameter]
        keys = sorted(k for k, v in state.items() if torch.is_tensor(v) and k != "step")
        tensors = {**tensors, f"fp32:{name}": master.detach().clone()}
        tensors.update((f"{key}:{name}", state[key].detach().clone()) for key in keys)
        parameters[name] = {"group": index, "states": keys, "step": number(state.get("step"))}
    facts = {
        **facts,
        "oracle": "live optimizer",
        "parameters": parameters,
        "opaque_states": [],
        "groups": group_facts(optimizer, parameters),
    }
    write(engine, case, folder, tensors={**tensors, **model_tensors(engine, case)}, facts=facts)


def relink(optimizer: Any) -> None:
    """Let a stage-1/2 optimizer link parameters to states again, now that all states exist."""
    if hasattr(optimizer, "_hp_optimizer_states_linked") and optimizer.optimizer.state:
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def live_buffer(optimizer: Any, parameter: torch.nn.Parameter) -> tuple[int, torch.Tensor]:
    """Return the parameter's group index and this rank's flat buffer of masters for it."""
    if hasattr(parameter, "ds_id"):  # stage 3
        sub_group = optimizer.grad_position[optimizer.get_param_id(parameter)][0]
        flat = optimizer.fp32_partitioned_groups_flat[sub_group]
        return optimizer.sub_group_to_group_id[sub_group], flat
    if hasattr(optimizer, "bf16_groups"):
        groups, flats = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
    else:
        groups, flats = optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups
    for index, members in enumerate(groups):
        if any(parameter is member for member in members):
            return index, flats[index]
    raise RuntimeError("a trainable parameter is in no group of the optimizer")


def agreed_states(
    optimizer: Any, names: dict[torch.nn.Parameter, str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return each trainable parameter's states, and the names of states in a layout of their own.

    A state counts where it is cut like the masters on every rank. Others (Muon's momentum at
    stages 1 and 2) have no getter; they are only named.
    """
    mine: dict[str, tuple[set[str], set[str]]] = {}
    for parameter, name in names.items():
        if parameter.requires_grad:
            _, flat = live_buffer(optimizer, parameter)
            state = optimizer.optimizer.state.get(flat, {})
            shapes = {k: v.shape for k, v in state.items() if torch.is_tensor(v) and v.dim()}
            alike = {key for key, shape in shapes.items() if shape == flat.shape}
            mine[name] = (alike, shapes.keys() - alike)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    opaque = set[str]().union(
        *(rank[name][1] for rank in everyone for name in mine if name in rank)
    )
    states = {
        name: sorted(set.intersection(*(r[name][0] for r in everyone if name in r)) - opaque)
        for name in mine
    }
    return states, sorted(opaque)


def number(value: Any) -> float | None:
    """Return a step, which frameworks keep as a number or a 0-d tensor."""
    return None if value is None else float(value)


def full(
    value: torch.Tensor | None, parameter: torch.nn.Parameter, dtype: torch.dtype
) -> torch.Tensor:
    """Return a getter's answer in the parameter's shape and the live buffer's dtype."""
    if value is None:
        raise RuntimeError("a getter of DeepSpeed returned nothing for a trainable parameter")
    shape = getattr(parameter, "ds_shape", parameter.shape)
    answer = value.detach().clone().reshape(shape)
    exact = answer.to(dtype)  # the stage-1/2 getters answer in fp32 whatever the buffer's dtype
    if not torch.equal(exact.to(answer.dtype), answer):
        raise RuntimeError(f"a getter of DeepSpeed returned values that {dtype} cannot hold")
    return exact


def gather_flat(
    optimizer: Any, names: dict[torch.nn.Parameter, str], states: dict[str, list[str]]
) -> Tensors:
    """Return masters and states from every rank's live partition, in the live buffer's order."""
    found: Tensors = {}
    for index, members in enumerate(optimizer.round_robin_bit16_groups):
        mine = optimizer.single_partition_of_fp32_groups[index]
        group = optimizer.real_dp_process_group[index]
        state = optimizer.optimizer.state.get(mine, {})
        keys = states[names[members[0]]]
        for key, value in {"fp32": mine.detach(), **{key: state[key] for key in keys}}.items():
            parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, value.contiguous(), group=group)
            flat = torch.cat(parts)
            offsets = optimizer.round_robin_bit16_offsets[index]
            for parameter, offset in zip(members, offsets, strict=True):
                piece = flat[offset : offset + parameter.numel()]
                found[f"{key}:{names[parameter]}"] = piece.reshape(parameter.shape).clone()
    return found


def must_agree(getters: Tensors, gathered: Tensors) -> None:
    """Refuse a truth about which the two oracles differ."""
    if getters.keys() != gathered.keys():
        raise RuntimeError(f"oracles name other states: {getters.keys() ^ gathered.keys()}")
    for key, value in getters.items():
        if not torch.equal(value, gathered[key]):
            raise RuntimeError(f"oracles differ for {key}")


def model_tensors(engine: Any, case: Case) -> Tensors:
    """Return the model's weights (canonical names) and its persistent buffers."""
    module = engine.module
    parameters = list(module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=case.stage == 3):
        found = {
            f"weight:{name}": parameter.detach().clone()
            for name, parameter in module.named_parameters()
        }
    for name, buffer, persistent in buffers(module):
        if persistent:
            found[f"buffer:{name}"] = buffer.detach().clone()
    return found


def buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield name, value and persistence of every buffer."""
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            path = f"{prefix}.{name}" if prefix else name
            yield path, buffer, name not in child._non_persistent_buffers_set


def find_tp_dims(module: torch.nn.Module, case: Case, initial: Tensors) -> dict[str, int | None]:
    """Return how TP ranks' shards make up each parameter, found without DeepSpeed's metadata.

    Before the first step the shards still are pieces of the randomly initialised model: the
    answer is the dimension along which they concatenate to it, or None where each rank holds all.
    """
    if case.tp == 1:
        return {}
    group = deepspeed.utils.groups.get_tensor_model_parallel_group()
    if dist.get_rank(group=group) != dist.get_rank() % case.tp:
        raise RuntimeError("the rank in the TP group is not the fast part of the global rank")
    found: dict[str, int | None] = {}
    for name, parameter in module.named_parameters():
        shards: list[Any] = [None] * case.tp
        with deepspeed.zero.GatheredParameters(parameter, enabled=case.stage == 3):
            mine = parameter.detach().clone()
        dist.all_gather_object(shards, mine, group=group)
        whole = initial[name].to(parameter.dtype)
        if all(torch.equal(shard, whole) for shard in shards):
            found[name] = None
            continue
        for dim in range(whole.dim()):
            others = [size for i, size in enumerate(whole.shape) if i != dim]
            fits = all([n for i, n in enumerate(s.shape) if i != dim] == others for s in shards)
            if fits and torch.equal(torch.cat(shards, dim), whole):
                found[name] = dim
        if name not in found:
            raise RuntimeError(f"shards of {name} do not concatenate to the initial parameter")
    return found


def aliases(module: torch.nn.Module) -> dict[str, str]:
    """Return further name -> first name for every parameter that has several."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    everything = module.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in everything if first[parameter] != name}


def group_facts(optimizer: Any, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each group's live hyper-parameters and the names of its parameters."""
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        hyper = {key: value for key, value in group.items() if key != "params"}
        members = [name for name, facts in parameters.items() if facts["group"] == index]
        groups.append({"hyper": hyper, "names": members})
    return groups


def stage_facts(module: torch.nn.Module, case: Case, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is a pipeline stage's own, of every stage's first rank."""
    mine = {
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
        "buffers": [name for name, _, persistent in buffers(module) if persistent],
        **{key: facts[key] for key in ("parameters", "groups", "tp_dims")},
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone[:: case.dp * case.tp]


def write(
    engine: Any, case: Case, folder: Path, *, tensors: Tensors, facts: dict[str, Any]
) -> None:
    """Write the files: tensors on one rank per model-parallel rank, facts on rank 0."""
    pp_rank, place = divmod(dist.get_rank(), case.dp * case.tp)
    dp_rank, tp_rank = divmod(place, case.tp)
    if dp_rank == 0:
        save_file(
            {key: value.contiguous() for key, value in tensors.items()},
            folder / f"truth-{pp_rank * case.tp + tp_rank}.safetensors",
        )
    module = engine.module
    if case.model == "pipeline":
        facts = {**facts, "stages": stage_facts(module, case, facts)}
    if dist.get_rank() != 0:
        return
    everything = {
        "case": case.name,
        "tag": f"global_step{engine.global_steps}",
        "optimizer": type(getattr(engine.optimizer, "optimizer", engine.optimizer)).__name__,
        "zero_optimizer": type(engine.optimizer).__name__,
        "clip_grad": engine.gradient_clipping(),
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
        "aliases": aliases(module),
        "buffers": [name for name, _, persistent in buffers(module) if persistent],
        "nonpersistent_buffers": [name for name, _, stays in buffers(module) if not stays],
        "counters": {
            "global_steps": engine.global_steps,
            "skipped_steps": engine.skipped_steps,
            "global_samples": engine.global_samples,
            "dp_world_size": engine.seq_dp_world_size,
            "mp_world_size": engine.mp_world_size,
        },
        "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__},
        **facts,
    }
    (folder / "truth.json").write_text(json.dumps(everything, indent=1))
