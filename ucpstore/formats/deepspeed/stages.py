"""The stages of a pipeline beside each other: their param groups matched, their parameters told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ucpstore.errors import CorruptSourceError, Kind, UnsupportedSourceError
from ucpstore.formats.deepspeed.module import Model
from ucpstore.formats.deepspeed.shards import Shard

__all__ = ["align_groups", "places_of", "require_stages"]

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
        places = places_of(group[0], longest, len(group[0].masters))
        mine = [_spread(shard, longest, places) for shard in group]
        count = len(longest.masters)
        if model.shapes and len(model.shapes) == len(places):
            shapes = _at(model.shapes, places, [{} for _ in range(count)])
            model = replace(model, shapes=shapes)
        aligned_models.append(model)
        aligned.append(mine)
    return aligned_models, aligned


def places_of(shard: Shard, longest: Shard, count: int) -> list[int]:
    """Which groups of the stage with the most a stage has.

    Parameters
    ----------
    shard, longest : Shard
        Of the stage, and of the one with the most groups.
    count : int
        Groups that the stage has.

    Raises
    ------
    UnsupportedSourceError
        Hyper-parameters do not tell.
    """
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
