"""Byte amounts as people write them."""

from __future__ import annotations

import re

from ucpstore.errors import Kind, PlanError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}iB": 1024**_power, _letter: 1024**_power}
_UNITS["kB"] = 1000


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"512MB"``, ``"8GiB"``, ``"64 M"`` (binary) or a plain number.

    Raises
    ------
    PlanError
        The text is not an amount.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B?)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise PlanError(
            f"{text!r} is not an amount of bytes.",
            hint="Write 512MB, 8GiB or a number.",
            kind=Kind.SELECTION,
        )
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(amount: float) -> str:
    """``4.26 GB``: decimal units, three significant digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(amount) < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.3g} {unit}"
