"""The common document and the facts that a target is made from: checked once, since a store is untrusted input.

What is kept as it is (the client's entries, the configuration, hyper-parameters) may be anything that
`ucpstore.tagged` can say; here is what is looked into.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ucpstore.contracts import Source
from ucpstore.errors import CorruptSourceError, Kind, UnsupportedSourceError
from ucpstore.formats.deepspeed.checks import integer, mapping_of, named, sequence_of
from ucpstore.tagged import decode

__all__ = ["checked_common", "checked_facts"]

_SECTIONS = ("client", "client_by_rank", "counters", "rng", "steps")
_BY_RANK = ("client_by_rank", "rng")
_DEGREES = ("dp", "pp", "tp")


def checked_common(source: Source, document: Mapping[str, Any]) -> dict[str, Any]:
    """The decoded common document.

    Parameters
    ----------
    source : Source
    document : mapping
        Encoded.

    Raises
    ------
    UnsupportedSourceError
        It is not of a DeepSpeed run.
    CorruptSourceError
        A part is not what a reader makes of one.
    """
    common = decode(dict(document))
    framework = common.get("framework") if isinstance(common, dict) else None
    if not isinstance(framework, dict) or framework.get("name") != "deepspeed":
        raise UnsupportedSourceError(
            f"{source.url}: its common state is not of a DeepSpeed run; native DeepSpeed checkpoints are only"
            " written from such."
        )
    sections = {name: mapping_of(common.get(name) or {}, name) for name in _SECTIONS}
    for name in _BY_RANK:
        for label, entries in sections[name].items():
            mapping_of(entries, f"{name} of {label}")
    integer(sections["counters"].get("global_steps", 0), "counters: global_steps")
    for fqn, step in sections["steps"].items():
        number = isinstance(step, int | float) and not isinstance(step, bool)
        if step is not None and not (number and math.isfinite(step)):
            raise CorruptSourceError(f"steps of {fqn}: found {step!r:.60}, expected a number.")
    _check_groups(common.get("param_groups"))
    _check_framework(framework)
    return {**common, **sections}


def _check_groups(groups: object) -> None:
    seen: set[str] = set()
    for index, group in enumerate(sequence_of(groups, "param_groups")):
        what = f"param_groups: group {index}"
        for fqn in sequence_of(mapping_of(group, what).get("params"), f"{what}: params"):
            if not isinstance(fqn, str) or fqn in seen:
                raise CorruptSourceError(
                    f"{what}: params: found {fqn!r:.60}, expected names, every one once.",
                    kind=Kind.NAME,
                )
            seen.add(fqn)


def _check_framework(framework: Mapping[str, Any]) -> None:
    named(framework.get("module_extras") or {}, "module_extras")
    optimizer = mapping_of(framework.get("optimizer", {}), "optimizer")
    for entry in sequence_of(optimizer.get("scalars", []), "optimizer: scalars"):
        mapping_of(entry, "optimizer: scalars")
    step = mapping_of(optimizer.get("step", {}), "optimizer: step")
    for name in ("kept_in", "types"):
        for item in sequence_of(step.get(name, []), f"optimizer: step: {name}"):
            if not isinstance(item, str):
                raise CorruptSourceError(
                    f"optimizer: step: {name}: found {item!r:.60}, expected texts."
                )


def checked_facts(source: Source) -> Mapping[str, Any]:
    """The source's degrees and stage, where it tells them.

    Raises
    ------
    CorruptSourceError
    """
    facts = source.parallelism
    for name in (*_DEGREES, "zero_stage"):
        least = 0 if name == "zero_stage" else 1
        if name in facts and integer(facts[name], f"parallelism: {name}") < least:
            raise CorruptSourceError(
                f"parallelism: {name}: found {facts[name]}, expected a number from {least}."
            )
    return facts
