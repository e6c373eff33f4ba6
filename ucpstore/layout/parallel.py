"""`Layout`: how a training run will be spread over ranks, in the user's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ucpstore.errors import PlanError

__all__ = ["Layout"]

_DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """The degrees of parallelism of a run, and what else decides what each rank holds.

    Attributes
    ----------
    dp, tp, pp : int
        Data-, tensor- and pipeline-parallel degrees.
    zero_stage : int
        Stage of ZeRO: 1, 2 or 3.
    dtype : str, optional
        Element type of the model's weights, ``fp32``, ``bf16`` or ``fp16``; by default the source's.
    sub_group_size : int, optional
        ZeRO-3's ``sub_group_size``; by default that of the source's configuration, else DeepSpeed's.

    Raises
    ------
    PlanError
        A value is out of range.

    Examples
    --------
    >>> Layout.parse("dp=2,zero_stage=3")
    Layout(dp=2, tp=1, pp=1, zero_stage=3, dtype=None, sub_group_size=None)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 1
    dtype: str | None = None
    sub_group_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "sub_group_size"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and value >= 1):
                raise PlanError(f"layout: {name} is {value!r}, expected a whole number from 1.")
        if type(self.zero_stage) is not int or self.zero_stage not in (0, 1, 2, 3):
            raise PlanError(f"layout: zero_stage is {self.zero_stage!r}, expected 0, 1, 2 or 3.")
        if self.dtype is not None:
            if self.dtype not in _DTYPES:
                raise PlanError(
                    f"layout: dtype is {self.dtype!r}, expected one of {', '.join(_DTYPES)}."
                )
            object.__setattr__(self, "dtype", _DTYPES[self.dtype])

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``name=value`` pairs with commas between them.

        Raises
        ------
        PlanError
            A pair is not one, or its name is not known.
        """
        known = [field.name for field in fields(cls)]
        values: dict[str, Any] = {}
        for pair in filter(None, (part.strip() for part in text.split(","))):
            name, separator, value = (part.strip() for part in pair.partition("="))
            if not separator or name not in known or name in values:
                raise PlanError(
                    f"layout {text!r}: found {pair!r}, expected name=value with each of"
                    f" {', '.join(known)} at most once."
                )
            if name != "dtype" and not (value.isascii() and value.isdigit()):
                raise PlanError(f"layout: {name} is {value!r}, expected a whole number.")
            values[name] = value if name == "dtype" else int(value)
        return cls(**values)

    def to_json(self) -> Mapping[str, Any]:
        """The layout as JSON values."""
        return asdict(self)
