"""Presets of ``universal_checkpoint_info``: DeepSpeed's lists of regexes as rules for any number of ranks.

DeepSpeed records categories of names (``checkpoint/constants.py``) that ``merge_tp_slices`` of
``checkpoint/ds_to_universal.py`` tries in a fixed order with `re.match`: replicated, to average, two
sub-parameters, sub-parameters, row-parallel, and by default slices along dim 0. Padded vocabularies are cut
afterwards. Versions: 0.1 (BLOOM), 0.2 and 0.3 (sub-parameters are equal, their number or sizes are given), 0.4
(the widths on every rank are given). AutoTP writes one exact name per parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ucpstore.errors import CorruptSourceError, PatternError
from ucpstore.formats.deepspeed.checks import integer, integers, mapping_of, sequence_of
from ucpstore.formats.deepspeed.stubs import plain
from ucpstore.layout.matching import PrefixRegex
from ucpstore.layout.names import Template
from ucpstore.layout.patterns import Partial, Pattern, Replicate, Shard, ShardNC
from ucpstore.layout.rule import Padding, Rule, for_any_degree
from ucpstore.layout.rules import Patterns

__all__ = ["DEFAULT", "VOCABULARY", "prefixes", "rules_of"]

DEFAULT = "universal_checkpoint_info"
"""Origin of the rule for matrices that no list names."""
_UNEVEN_VERSION = 0.4
"""First ``universal_checkpoint_version`` that records the widths of sub-parameters."""
_MAX_SUB_PARAMETERS = 100_000
_Info = Mapping[str, Any]

_LISTS: Mapping[str, Pattern] = {
    "tp_replicated_parameter_patterns": Replicate(),
    "parameter_to_average_patterns": Partial(),
    "parameter_with_2_sub_params_cat_dim_0": ShardNC(0, ratio=(1, 1)),
}
_FUSED = "parameter_with_sub_params"
_ROWS = "parameter_with_row_parallelism_patterns"
VOCABULARY = "vocabulary_parameter_patterns"


def rules_of(info: _Info, degree: int, client: _Info | None = None) -> Patterns:
    """The rules that an info stands for, in DeepSpeed's order.

    Parameters
    ----------
    info : mapping
        ``universal_checkpoint_info``, of any version.
    degree : int
        Tensor-parallel ranks of the run that saved it. Megatron writes no lists on one rank: there is no
        default rule then.
    client : mapping, optional
        The client's state: Megatron's ``args`` tell to what multiple a vocabulary is padded.

    Raises
    ------
    PatternError
        A pattern is no regular expression, or sub-parameters are not described well enough.
    CorruptSourceError
        An entry is not what DeepSpeed writes.
    """
    rules = []
    for key, tp in _LISTS.items():
        rules += _rule(prefixes(info, key), tp, key)
    rules += _fused(info, degree)
    rules += _rule(prefixes(info, _ROWS), Shard(1), _ROWS)
    pad = _padding(info, degree, client or {})
    vocabulary = prefixes(info, VOCABULARY)
    if pad is not None and vocabulary:
        rules.insert(0, Rule(vocabulary, Shard(0), pad, min_ndim=1, origin=VOCABULARY))
    if info and (degree > 1 or any(info.get(key) for key in (*_LISTS, _FUSED, _ROWS))):
        # Vectors that no list names are only cut where the lists are complete enough to name norms: DeepSpeed
        # joins them all (issue 6503).
        ndim = 1 if info.get("tp_replicated_parameter_patterns") else 2
        rules.append(Rule((Template("**"),), Shard(0), min_ndim=ndim, origin=DEFAULT))
    return Patterns(tuple(rules))


def prefixes(info: _Info, key: str) -> tuple[PrefixRegex, ...]:
    """The regexes of one list.

    Raises
    ------
    PatternError
        One is no regular expression, or could take very long to match.
    """
    listed = info.get(key) or ()
    return _prefixes(key, listed if isinstance(listed, Mapping) else sequence_of(listed, key))


def _prefixes(key: str, patterns: Iterable[Any]) -> tuple[PrefixRegex, ...]:
    found = []
    for pattern in patterns:
        try:
            found.append(PrefixRegex(pattern))
        except PatternError as error:
            raise PatternError(f"{key}: {error.message}", kind=error.kind) from error
    return tuple(found)


def _rule(match: tuple[PrefixRegex, ...], tp: Pattern, key: str) -> list[Rule]:
    return [Rule(match, tp, origin=key)] if match else []


def _fused(info: _Info, degree: int) -> list[Rule]:
    """Rules of sub-parameters: entries that say the same become one."""
    widths = mapping_of(info.get("sub_param_shard_widths") or {}, "sub_param_shard_widths")
    version = info.get("universal_checkpoint_version", 0.0)
    if not isinstance(version, int | float):
        raise CorruptSourceError(
            f"universal_checkpoint_version is {version!r:.40}, expected a number."
        )
    found: dict[Pattern, list[PrefixRegex]] = {}
    for item in sequence_of(info.get(_FUSED) or (), _FUSED):
        entry = mapping_of(item, _FUSED)
        for regex in _prefixes(_FUSED, sequence_of(entry.get("patterns"), _FUSED)):
            recorded = widths.get(regex.text)
            if recorded is not None:
                tp = _by_widths(entry, recorded, regex)
            else:
                tp = _by_sizes(entry, regex, degree=degree, version=version)
            found.setdefault(tp, []).append(regex)
    return [Rule(tuple(match), tp, origin=_FUSED) for tp, match in found.items()]


def _by_widths(entry: _Info, recorded: object, regex: PrefixRegex) -> Pattern:
    """Version 0.4: per section (sub-parameter), the width that every rank holds."""
    what = f"sub_param_shard_widths of {regex.text!r}"
    widths = tuple(integers(section, what) for section in sequence_of(recorded, what))
    dim = integer(entry.get("partition_dim", 0), "partition_dim")
    if not widths or len({len(section) for section in widths}) > 1 or not widths[0]:
        raise CorruptSourceError(f"{what} are {recorded!r:.80}, expected a width for every rank.")
    tp = ShardNC(dim, tuple(map(sum, widths)), widths)
    loose = for_any_degree(tp)
    return ShardNC(dim, tp.sections, widths, units=getattr(loose, "units", None))


def _by_sizes(entry: _Info, regex: PrefixRegex, *, degree: int, version: float) -> Pattern:
    """Before 0.4: the sizes of the sections, or the number of equal ones, cut evenly."""
    dim = integer(entry.get("partition_dim", 0), "partition_dim")
    shape = sequence_of(entry.get("shape", ()), f"shape of {_FUSED}")
    if dim >= len(shape) or (degree > 1 and version >= _UNEVEN_VERSION):
        raise PatternError(
            f"{regex.text!r} has several sub-parameters, but no sub_param_shard_widths are recorded for it"
            f" (universal_checkpoint_version {version})."
        )
    sizes = shape[dim]
    if isinstance(sizes, int):
        if not 1 <= sizes <= _MAX_SUB_PARAMETERS:
            raise CorruptSourceError(
                f"{regex.text!r} has {sizes} sub-parameters, expected 1 or more."
            )
        return ShardNC(dim, ratio=(1,) * sizes)
    sections = integers(sizes, f"sub-parameters of {regex.text!r}")
    uneven = [size for size in sections if size % degree]
    if uneven:
        raise PatternError(
            f"{regex.text!r}: sub-parameters of {uneven} indices do not divide by {degree} ranks, and their widths per"
            " rank are not recorded."
        )
    return ShardNC(dim, sections)


def _padding(info: _Info, degree: int, client: _Info) -> Padding | None:
    """Padding of the vocabulary, where both sizes are recorded; AutoTP never pads."""
    padded, true = info.get("padded_vocab_size"), info.get("original_vocab_size")
    if type(padded) is not int or type(true) is not int or not 0 < true < padded:
        return None
    arguments = plain(client.get("args"))
    multiple = (
        arguments.get("make_vocab_size_divisible_by") if isinstance(arguments, Mapping) else None
    )
    if type(multiple) is not int or multiple < 1:
        return Padding(0, true, size=padded)
    pad = Padding(0, true, multiple=multiple, size=padded)
    return pad if pad.padded("vocabulary", degree) == padded else Padding(0, true, size=padded)
