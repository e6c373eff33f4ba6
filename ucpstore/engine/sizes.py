"""Byte amounts as people write them."""

from __future__ import annotations

import math
import re

from ucpstore.errors import Kind, PlanError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}iB": 1024**_power, _letter: 1024**_power}
_UNITS["kB"] = 1000


def parse_bytes(amount: str | float) -> int:
    """Bytes of ``"512MB"``, ``"8GiB"``, ``"64 M"`` (binary) or a plain number.

    Raises
    ------
    PlanError
        It is not an amount.
    """
    found = math.nan
    if isinstance(amount, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B?)\s*", amount, re.ASCII)
        if match is not None and match[2] in _UNITS:
            found = float(match[1]) * _UNITS[match[2]]
    elif isinstance(amount, int | float) and not isinstance(amount, bool):
        found = amount
    if not 0 <= found < math.inf:
        raise PlanError(
            f"{amount!r} is not an amount of bytes.",
            hint="Write 512MB, 8GiB or a number.",
            kind=Kind.SELECTION,
        )
    return int(found)


def format_bytes(amount: float) -> str:
    """``4.26 GB``: decimal units, three significant digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(amount) < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.3g} {unit}"
