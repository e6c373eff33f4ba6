"""The stages of a pipeline beside each other: their param groups matched, their parameters told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ucpstore.errors import CorruptSourceError, Kind, UnsupportedSourceError
from ucpstore.formats.deepspeed.module import Model
from ucpstore.formats.deepspeed.shards import Shard
from ucpstore.formats.deepspeed.stage0 import Stage0
from ucpstore.formats.deepspeed.units import GroupUnit, Shapes, Unit, WholeUnit

__all__ = ["align_groups", "align_stages", "require_stages"]

_TIED = "tied_modules."


def align_groups(
    models: Sequence[Model], shards: Sequence[Sequence[Shard]]
) -> tuple[list[Model], list[list[Shard]]]:
    """Give all stages the same param groups: those that a stage left out become empty.

    DeepSpeed removes groups without parameters (``runtime/engine.py``, ``_configure_optimizer``), so that
    a stage that is only an embedding has no group for vectors. Which one is missing is told by the
    hyper-parameters of those that are there.

    Parameters
    ----------
    models : sequence of Model
        By model-parallel rank.
    shards : sequence of sequence of Shard
        By model-parallel rank.

    Raises
    ------
    UnsupportedSourceError
        Hyper-parameters do not tell which groups a stage has.
    """
    longest = max((group[0] for group in shards), key=lambda shard: len(shard.masters))
    aligned_models: list[Model] = []
    aligned: list[list[Shard]] = []
    for model, group in zip(models, shards, strict=True):
        if all(len(shard.masters) == len(longest.masters) for shard in group):
            aligned_models.append(model)
            aligned.append(list(group))
            continue
        places = _places(group[0], longest, len(group[0].masters))
        mine = [_spread(shard, longest, places) for shard in group]
        count = len(longest.masters)
        if model.shapes and len(model.shapes) == len(places):
            shapes = _at(model.shapes, places, [{} for _ in range(count)])
            model = replace(model, shapes=shapes)
        aligned_models.append(model)
        aligned.append(mine)
    return aligned_models, aligned


def _places(shard: Shard, longest: Shard, count: int) -> list[int]:
    """Which groups of the stage with the most a stage with ``count`` groups has."""
    theirs = [_hyper(group) for group in longest.groups or ()]
    places = []
    for group in shard.groups or ():
        fitting = [index for index, hyper in enumerate(theirs) if hyper == _hyper(group)]
        if len(fitting) == 1:
            places += fitting
    if len(places) != count or places != sorted(set(places)):
        raise UnsupportedSourceError(
            f"{shard.name} has {count} param groups and {longest.name} {len(theirs)}: a pipeline"
            " stage without parameters of a group leaves it out, and the hyper-parameters do not tell which."
        )
    return places


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _spread(shard: Shard, longest: Shard, places: Sequence[int]) -> Shard:
    """The same with an empty unit for every group that the stage left out."""
    count = len(longest.masters)
    if len(shard.masters) != len(places):
        raise CorruptSourceError(
            f"{shard.name} has {len(shard.masters)} param groups, expected {len(places)} as on the other ranks of its"
            " pipeline stage."
        )
    return replace(
        shard,
        masters=tuple(_at(shard.masters, places, [None] * count)),
        states=tuple(_at(shard.states, places, [{} for _ in range(count)])),
        scalars=tuple(_at(shard.scalars, places, [{} for _ in range(count)])),
        groups=tuple(_at(shard.groups or (), places, list(longest.groups or ()))),
        group_units=longest.group_units,
        counts=tuple(_at(shard.counts, places, [max(shard.counts)] * count)),
        pads=None if shard.pads is None else _at(shard.pads, places, [[] for _ in range(count)]),
        mappings=None
        if shard.mappings is None
        else tuple(_at(shard.mappings, places, [{} for _ in range(count)])),
    )


def _at(items: Sequence[Any], places: Sequence[int], into: list[Any]) -> list[Any]:
    for place, item in zip(places, items, strict=True):
        into[place] = item
    return into


def align_stages(ranks: Sequence[Stage0], names: Sequence[Sequence[str]] | None) -> list[Stage0]:
    """Give all ranks of a pipeline without ZeRO the same groups and units.

    Those of another stage's parameters are empty.

    Parameters
    ----------
    ranks : sequence of Stage0
        By model-parallel rank.
    names : sequence of sequence of str, optional
        Parameters by group, where somebody told them.

    Raises
    ------
    UnsupportedSourceError
        Hyper-parameters do not tell which groups a stage has.
    """
    shards = [rank.shard for rank in ranks]
    longest = max(shards, key=lambda shard: len(shard.groups or ()))
    places = [_told_places(rank, longest, names) for rank in ranks]
    count = 1 + max(place for mine in places for place in mine)
    groups: list[dict[str, Any]] = [{} for _ in range(count)]
    members: list[dict[str, None]] = [{} for _ in range(count)]
    for rank, mine in zip(ranks, places, strict=True):
        for place, group, shapes in zip(
            mine, rank.shard.groups or (), rank.model.shapes, strict=True
        ):
            groups[place] = groups[place] or dict(group)
            members[place].update(dict.fromkeys(shapes))
    for place, group in enumerate(groups):
        if "param_names" in group:
            group["param_names"] = list(members[place])
    return [
        _spread_units(rank, mine, groups, members) for rank, mine in zip(ranks, places, strict=True)
    ]


def _told_places(
    rank: Stage0, longest: Shard, names: Sequence[Sequence[str]] | None
) -> Sequence[int]:
    """Which of the model's groups a rank has: DeepSpeed drops those without parameters."""
    count = len(rank.shard.groups or ())
    if names is not None:
        listed = [set(group) for group in names if group]
        firsts = [next(iter(shapes), "") for shapes in rank.model.shapes]
        return [next(i for i, group in enumerate(listed) if name in group) for name in firsts]
    if count == len(longest.groups or ()):
        return range(count)
    return _places(rank.shard, longest, count)


def _spread_units(
    rank: Stage0,
    places: Sequence[int],
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Mapping[str, None]],
) -> Stage0:
    """The same rank with all groups, its own where it has them, and with the units of all ranks."""
    shard = rank.shard
    flat = any(isinstance(unit, GroupUnit) for unit in rank.units)
    own: dict[tuple[int, str], int] = {}
    shapes: list[Shapes] = [{} for _ in groups]
    hyper = [dict(group) for group in groups]
    for index, place in enumerate(places):
        mine, numbers = rank.model.shapes[index], shard.group_units[index]
        shapes[place] = mine
        hyper[place].update((shard.groups or ())[index])  # the reader compares them
        if "param_names" in groups[place]:
            hyper[place]["param_names"] = groups[place]["param_names"]
        keys = [""] if flat else list(mine)
        own.update(((place, key), number) for key, number in zip(keys, numbers, strict=True))
    units = [(g, key) for g, names in enumerate(members) for key in ([""] if flat else names)]
    found = [own.get(unit) for unit in units]
    starts = [sum(g < group for g, _ in units) for group in range(len(groups) + 1)]
    files = shard.master_files or ()
    aligned = replace(
        shard,
        masters=tuple(None if n is None else shard.masters[n] for n in found),
        states=tuple({} if n is None else shard.states[n] for n in found),
        scalars=tuple({} if n is None else shard.scalars[n] for n in found),
        groups=tuple(hyper),
        group_units=tuple(tuple(range(a, b)) for a, b in pairwise(starts)),
        counts=(1,) * len(units),
        master_files=tuple(shard.name if n is None else files[n] for n in found),
    )
    empty: Unit = GroupUnit.of({}, 1, None) if flat else WholeUnit({})
    laid = [empty if n is None else rank.units[n] for n in found]
    return Stage0(replace(rank.model, shapes=shapes), aligned, laid, rank.warnings)


def require_stages(models: Sequence[Model], tp: int) -> None:
    """Stages hold parameters of different layers; only tied modules may be on several.

    Parameters
    ----------
    models : sequence of Model
        By model-parallel rank: stage times ``tp`` plus tensor-parallel rank.
    tp : int

    Raises
    ------
    CorruptSourceError
        A layer is on two stages, or copies of a tied module have different shapes.
    """
    seen: dict[str, tuple[Model, tuple[int, ...]]] = {}
    for rank in range(tp):
        seen.clear()
        for model in models[rank::tp]:
            for name, shape in model.trainable.items():
                first, expected = seen.setdefault(name, (model, shape))
                if first is model:
                    continue
                if not name.startswith(_TIED):
                    raise CorruptSourceError(
                        f"{model.name} and {first.name} do not belong together: both hold {name!r}, but a layer"
                        " is on one pipeline stage.",
                        hint="Take all files of a checkpoint from one save.",
                        fqn=name,
                    )
                if shape != expected:
                    raise CorruptSourceError(
                        f"{model.name}: {name!r} has shape {list(shape)} in param_shapes, but {list(expected)} in"
                        f" {first.name}.",
                        kind=Kind.SHAPE,
                        fqn=name,
                    )
