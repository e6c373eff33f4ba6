"""What one rank of a DeepSpeed run holds in memory, made from a `Recipe`.

The model (``runtime/engine.py``): its local weights in the engine's element type, whole at stages 0 to 2 and
cut into ``ceil(n / ranks)`` elements at stage 3 (``partition_parameters.py``, ``ds_tensor``), and buffers.
The optimizer: master weights and states, flat ranges from stage 1 on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ucpstore.contracts import Role
from ucpstore.formats.deepspeed.contents import local_tensor, local_weight
from ucpstore.formats.deepspeed.groups import native_states
from ucpstore.formats.deepspeed.ranks import ModelRank, buffer_of
from ucpstore.formats.deepspeed.recipe import Recipe
from ucpstore.formats.deepspeed.states import MASTER
from ucpstore.gather import Tensor
from ucpstore.rankstate import Holding

__all__ = ["holdings"]

_STATE = "float32"
"""What the optimizers keep master weights and states in."""


def holdings(recipe: Recipe, rank: int) -> list[Holding]:
    """All tensors of a global rank: those of the optimizer by parameter, then the model's.

    Raises
    ------
    PlanError
        There is no such rank.
    """
    pp, dp, tp = recipe.layout.coordinates(rank)
    mine = recipe.ranks[pp * recipe.layout.tp + tp]
    return [*_optimizer(recipe, mine, dp), *_module(recipe, mine, dp)]


def _optimizer(recipe: Recipe, rank: ModelRank, dp: int) -> Iterator[Holding]:
    if recipe.layout.zero_stage == 0:
        for group in rank.groups:
            for member in group.members:
                names = native_states(recipe.parameters[member.fqn])
                for state in (MASTER, *names.values()):
                    local = recipe.slices.local(member.fqn, rank.tp)
                    tensor = local_tensor(member.fqn, state, local, _STATE)
                    role = recipe.parameters[member.fqn].states[state].role
                    yield Holding(member.fqn, state, role, "optimizer", tensor, local.shape)
        return
    for position, flat in enumerate(rank.info.rank(dp)):
        for part in flat.parts:
            specs = recipe.parameters[part.fqn].states
            for state in (MASTER, *rank.groups[flat.group].states.values()):
                mine = replace(part, state=state, offset=0)
                yield Holding(
                    part.fqn,
                    state,
                    specs[state].role,
                    "optimizer",
                    Tensor(_STATE, (part.count,), (mine,)),
                    part.shape,
                    part.start,
                    (position, part.offset),
                )


def _module(recipe: Recipe, rank: ModelRank, dp: int) -> Iterator[Holding]:
    for fqn in rank.names:
        parameter = recipe.parameters[fqn]
        local = recipe.slices.local(fqn, rank.tp)
        if buffer := buffer_of(parameter):
            tensor = local_tensor(fqn, buffer, local, parameter.states[buffer].dtype)
            yield Holding(fqn, buffer, Role.BUFFER, "module", tensor, local.shape)
            continue
        state, local, dtype = local_weight(recipe, fqn, rank.tp)
        whole = local_tensor(fqn, state, local, dtype)
        role = Role.MODEL_WEIGHT
        if recipe.layout.zero_stage < 3:
            yield Holding(fqn, "weight", role, "module", whole, local.shape)
            continue
        size = -(-local.numel // recipe.layout.zero_ranks)
        start = min(dp * size, local.numel)
        count = min(local.numel - start, size)
        parts = tuple(replace(p, start=start, count=count) for p in whole.parts if count)
        cut = Tensor(dtype, (count,), parts)
        yield Holding(fqn, "weight", role, "module", cut, local.shape, start)
