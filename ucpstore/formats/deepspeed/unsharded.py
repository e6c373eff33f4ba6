"""What DeepSpeed saves without ZeRO: the whole optimizer state in the model file, in one of three schemas.

- fp32: torch's own ``state_dict``; parameters are numbered through the groups.
- `FP16_UnfusedOptimizer` (``fp16/unfused_optimizer.py``, ``state_dict``): the same beside ``fp32_groups``, the
  masters in their parameters' shapes.
- `FP16_Optimizer` (``fp16/fused_optimizer.py``): one flat master per group without padding, states like it;
  the module's weights are views of one tensor per group, by which their order in it is known.

The two 16-bit classes save the loss scaler as numbers. `FP16_Optimizer` leaves them out for bf16 since
2026; older versions read them, newer ones skip them: they are always written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ucpstore.formats.deepspeed.groups import native_states
from ucpstore.formats.deepspeed.pipelining import TIED
from ucpstore.formats.deepspeed.ranks import ModelRank
from ucpstore.formats.deepspeed.recipe import Recipe
from ucpstore.formats.deepspeed.states import MASTER
from ucpstore.formats.deepspeed.ucpinfo import Flat
from ucpstore.formats.deepspeed.wrapper import FUSED, TORCH, clip_in
from ucpstore.formats.torchwrite import View
from ucpstore.gather import Tensor

__all__ = ["clip_of", "flat_weights", "names_file", "stage0_optimizer"]


def stage0_optimizer(recipe: Recipe, rank: ModelRank) -> dict[str, Any]:
    """``optimizer`` of a model-parallel rank's model file."""
    flats = rank.info.rank(0)
    base = _state_dict(recipe, rank, flats)
    if recipe.wrapper == TORCH:
        return base
    found = {**recipe.scaler.of_stage0(), "optimizer_state_dict": base}
    masters = [_tensor(recipe, flat, MASTER) for flat in flats]
    if recipe.wrapper == FUSED:
        return {**found, "fp32_groups_flat": masters, "clip_grad": clip_of(recipe) or 0.0}
    groups: list[list[Tensor]] = [[] for _ in rank.groups]
    for flat, master in zip(flats, masters, strict=True):
        groups[flat.group].append(master)
    return {**found, "fp32_groups": groups}


def _state_dict(recipe: Recipe, rank: ModelRank, flats: Sequence[Flat]) -> dict[str, Any]:
    """The torch optimizer's ``state_dict``; a parameter that it never stepped has no state."""
    state: dict[int, dict[str, Any]] = {}
    numbers: list[list[int]] = [[] for _ in rank.groups]
    for index, (flat, (_, members)) in enumerate(zip(flats, rank.info.units, strict=True)):
        numbers[flat.group].append(index)
        entry: dict[str, Any] = {}
        names = native_states(recipe.parameters[members[0].fqn])
        if names and (step := recipe.step(members)) is not None:
            entry["step"] = step
        entry.update((native, _tensor(recipe, flat, ours)) for native, ours in names.items())
        if entry:
            state[index] = entry
    groups = [
        {**group.hyper, "params": params}
        for group, params in zip(rank.groups, numbers, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _tensor(recipe: Recipe, flat: Flat, state: str) -> Tensor:
    """A state of a unit: of one parameter in its shape, or of a flat group."""
    shape = (flat.numel,) if recipe.wrapper == FUSED else flat.parts[0].shape
    return Tensor("float32", shape, flat.of(state))


def flat_weights(recipe: Recipe, rank: ModelRank) -> dict[str, View]:
    """A rank's weights where they are views of one tensor per group; else nothing."""
    found: dict[str, View] = {}
    if recipe.wrapper != FUSED:
        return found
    for flat in rank.info.rank(0):
        base = Tensor(recipe.dtype, (flat.numel,), flat.of(MASTER))
        found.update((part.fqn, View(base, part.offset, part.shape)) for part in flat.parts)
    return found


def names_file(recipe: Recipe) -> bytes:
    """`ucpstore.formats.deepspeed.stage0.NAMES_FILE`, which DeepSpeed ignores: the file itself names none.

    Groups without parameters are in no file (see `ModelRank`), so not here either.
    """
    filled = [group for group in recipe.groups if group.members]
    names: Any = [[member.fqn for member in group.members] for group in filled]
    if recipe.pipeline is not None:
        tied: dict[str, list[int]] = {}
        for layer, prefix in recipe.pipeline.files.items():
            if prefix.startswith(TIED):
                tied.setdefault(prefix.split(".")[1], []).append(layer)
        names = {"groups": names, "tied_modules": tied}
    return json.dumps(names, indent=1).encode()


def clip_of(recipe: Recipe) -> Any:
    """The gradient norm to clip to, as the source's optimizer or configuration has it; else None."""
    return clip_in(recipe.framework)
