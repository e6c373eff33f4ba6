"""``universal_checkpoint_info`` of a target: the source's, with what depends on the degree made anew.

The lists of patterns hold for any tensor-parallel degree. ``affine_map`` (``checkpoint/affine.py``),
``sub_param_shard_widths`` and ``padded_vocab_size`` (``checkpoint/constants.py``) do not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ucpstore.errors import PatternError
from ucpstore.formats.deepspeed.checks import mapping_of, sequence_of
from ucpstore.formats.deepspeed.pipelining import TIED
from ucpstore.formats.deepspeed.ranks import Slices
from ucpstore.formats.deepspeed.universal import VOCABULARY, prefixes, rules_of
from ucpstore.layout.kinds import Pad, Partial, Replicate, Shard, ShardNC
from ucpstore.layout.local import Local, local_tensors
from ucpstore.layout.region import Region, row_major_strides
from ucpstore.layout.rules import Patterns, PrefixRegex

__all__ = ["UNIVERSAL", "describe_slices", "entry_for", "universal_info"]

UNIVERSAL = "universal_checkpoint_info"
_AFFINE = "affine_map"
_WIDTHS = "sub_param_shard_widths"
_PADDED = "padded_vocab_size"
_FUSED = "parameter_with_sub_params"
_AUTOTP = "autotp_unsupported_parameter_patterns"
"""Only AutoTP writes this; with it (from 0.19.8 on) an affine map of every parameter."""
_AFFINE_VERSION = 1
_VERSION = 0.4


def entry_for(framework: Mapping[str, Any], slices: Slices) -> dict[str, Any] | None:
    """``universal_checkpoint_info``: the source's where it fits the slices, else one made from them."""
    found = framework.get(UNIVERSAL)
    optimizer = framework.get("optimizer")
    if not isinstance(found, dict) and isinstance(optimizer, dict):
        found = optimizer.get(UNIVERSAL)
    if not isinstance(found, dict):
        return describe_slices(slices) if slices.degree > 1 or _is_padded(slices) else None
    info = universal_info(found, slices)
    return info if _describes(info, slices) else {**info, **describe_slices(slices)}


def universal_info(info: Mapping[str, Any], slices: Slices) -> dict[str, Any]:
    """The entry for the degree of ``slices``; on one rank there are no slices to describe."""
    found = {key: value for key, value in info.items() if key not in (_AFFINE, _WIDTHS)}
    if _PADDED in info:
        for fqn in _matching(prefixes(info, VOCABULARY), slices.held):
            found[_PADDED] = slices.held[fqn].shape[0]
    if slices.degree == 1:
        return found
    widths = _shard_widths(info, slices)
    if widths or _WIDTHS in info:
        found[_WIDTHS] = widths
    if _AFFINE in info or _AUTOTP in info:
        maps = {
            _exactly(fqn): _affine(held.shape, slices.all(fqn))
            for fqn, held in slices.held.items()
            if not any(local.padding for local in slices.all(fqn))
        }
        found[_AFFINE] = {"version": _AFFINE_VERSION, "params": maps}
    return found


def _describes(info: Mapping[str, Any], slices: Slices) -> bool:
    """Whether who follows the lists puts the slices together to what they were cut from."""
    if slices.degree == 1 and not _is_padded(slices):
        return True
    try:
        rules = rules_of(info, slices.degree)
        refused = _matching(prefixes(info, _AUTOTP), slices.held)
        return not refused and all(_fits(rules, fqn, slices.all(fqn)) for fqn in slices.held)
    except PatternError:
        return False


def _is_padded(slices: Slices) -> bool:
    """Whether there are rows that whoever reads the files could take for true ones."""
    return any(local.padding for fqn in slices.held for local in slices.all(fqn))


def _fits(rules: Patterns, fqn: str, locals_: tuple[Local, ...]) -> bool:
    rule = rules.find(fqn, len(locals_[0].shape))
    if rule is None:
        return False
    held = rule.observed(fqn, [local.shape for local in locals_])
    return local_tensors(held.shape, held.axes) == locals_


def describe_slices(slices: Slices) -> dict[str, Any]:
    """An entry made from nothing but the slices, as AutoTP makes its own: one exact pattern per parameter.

    See ``collect_autotp_universal_checkpoint_info`` of ``module_inject/layers.py``.
    """
    lists: dict[str, list[str]] = {
        "parameter_with_row_parallelism_patterns": [],
        "tp_replicated_parameter_patterns": [],
        "parameter_to_average_patterns": [],
        "vocabulary_parameter_patterns": [],
    }
    fused = []
    vocabulary: dict[str, int] = {}
    for fqn, held in slices.held.items():
        name = _exactly(fqn)
        kind = held.axes[-1].pattern
        if isinstance(kind, Replicate):
            lists["tp_replicated_parameter_patterns"].append(name)
        elif isinstance(kind, Partial):
            lists["parameter_to_average_patterns"].append(name)
        elif isinstance(kind, Shard) and kind.dim == 1:
            lists["parameter_with_row_parallelism_patterns"].append(name)
        elif isinstance(kind, ShardNC):
            shape: list[Any] = list(held.shape)
            shape[kind.dim] = kind.sizes(held.shape[kind.dim])
            fused.append({"patterns": [name], "shape": shape, "partition_dim": kind.dim})
        for axis in held.axes[:-1]:
            if isinstance(axis.pattern, Pad) and axis.pattern.dim == 0:
                lists["vocabulary_parameter_patterns"].append(name)
                vocabulary = {
                    "original_vocab_size": axis.pattern.true_size,
                    _PADDED: held.shape[0],
                }
    tied = [_exactly(fqn) for fqn in slices.held if fqn.startswith(TIED)]
    if tied:
        lists["pipeline_replicated_parameter_patterns"] = tied
    found = {"universal_checkpoint_version": _VERSION, **lists, _FUSED: fused}
    return universal_info({**found, _AUTOTP: {}, **vocabulary}, slices)


def _exactly(fqn: str) -> str:
    return f"^{re.escape(fqn)}$"


def _matching(regexes: Collection[PrefixRegex], names: Iterable[str]) -> list[str]:
    return [name for name in names if any(regex.match(name) is not None for regex in regexes)]


def _shard_widths(info: Mapping[str, Any], slices: Slices) -> dict[str, list[list[int]]]:
    """Per pattern of fused parameters and sub-parameter, the width that every rank holds."""
    found: dict[str, list[list[int]]] = {}
    for item in sequence_of(info.get(_FUSED) or (), _FUSED):
        entry = mapping_of(item, _FUSED)
        for pattern in sequence_of(entry.get("patterns"), f"{_FUSED}: patterns"):
            for fqn in _matching([PrefixRegex(pattern)], slices.held):
                kind = slices.axes(fqn)[-1].pattern
                if isinstance(kind, ShardNC):
                    sections = kind.sizes(slices.held[fqn].shape[kind.dim])
                    found[pattern] = _widths(kind.dim, sections, slices.all(fqn))
                    break
    return found


def _widths(dim: int, sections: Iterable[int], locals_: Iterable[Local]) -> list[list[int]]:
    widths = []
    start = 0
    for size in sections:
        widths.append(
            [
                sum(
                    window.local.sizes[dim]
                    for window in local.windows
                    if start <= window.origin[dim] < start + size
                )
                for local in locals_
            ]
        )
        start += size
    return widths


def _affine(shape: tuple[int, ...], locals_: tuple[Local, ...]) -> dict[str, Any]:
    """``ParamAffineMap.to_dict``: every box of every rank, and which ranks hold the same one."""
    steps = row_major_strides(shape)
    holders: dict[Region, list[int]] = {}
    for rank, local in enumerate(locals_):
        for window in local.windows:
            holders.setdefault(window.logical, []).append(rank)
    ranks = {}
    for rank, local in enumerate(locals_):
        inner = row_major_strides(local.shape)
        pieces = [
            {
                "shape": list(window.local.sizes),
                "source": [_offset(window.origin, steps), list(steps)],
                "dest": [_offset(window.local.offsets, inner), list(inner)],
                "locations": holders[window.logical],
            }
            for window in local.windows
        ]
        ranks[rank] = {"shard_shape": list(local.shape), "pieces": pieces}
    return {"logical_shape": list(shape), "ranks": ranks}


def _offset(index: tuple[int, ...], steps: tuple[int, ...]) -> int:
    return sum(i * step for i, step in zip(index, steps, strict=True))
