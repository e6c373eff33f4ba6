"""`Layout`: how a training run will be spread over ranks, in the user's words."""

from __future__ import annotations

import math
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
_BOOLS = {"true": True, "false": False}
_LARGEST_POWER = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """The degrees of parallelism of a run, and what else decides what each rank holds.

    Attributes
    ----------
    dp, tp, pp : int
        Data-, tensor- and pipeline-parallel degrees.
    zero_stage : int
        Stage of ZeRO: 0, 1, 2 or 3; 0 is none.
    dtype : str, optional
        Element type of the model's weights, ``fp32``, ``bf16`` or ``fp16``; by default the source's.
    sub_group_size : int, optional
        ZeRO-3's ``sub_group_size``; by default that of the source's configuration, else DeepSpeed's.
    grad_accum_dtype : str, optional
        DeepSpeed's ``data_types.grad_accum_dtype``: fp32 makes a bf16 run at stage 1 use another optimizer;
        by default that of the source's configuration.
    fused_adam : bool, optional
        Whether the run's optimizer is DeepSpeed's or Apex's FusedAdam, whose files are others at stage 0 in
        16 bit; by default as in the source.
    loss_scale, initial_scale_power : float and int, optional
        Loss scale of an fp16 run, in DeepSpeed's words: a static one, or the exponent of 2 where a dynamic
        one starts; by default the source's.

    Raises
    ------
    PlanError
        A value is out of range.

    Examples
    --------
    >>> layout = Layout.parse("dp=2,zero_stage=3")
    >>> layout.dp, layout.tp, layout.zero_stage
    (2, 1, 3)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 1
    dtype: str | None = None
    sub_group_size: int | None = None
    grad_accum_dtype: str | None = None
    fused_adam: bool | None = None
    loss_scale: float | None = None
    initial_scale_power: int | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "sub_group_size"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and value >= 1):
                raise PlanError(f"layout: {name} is {value!r}, expected a whole number from 1.")
        if type(self.zero_stage) is not int or self.zero_stage not in (0, 1, 2, 3):
            raise PlanError(f"layout: zero_stage is {self.zero_stage!r}, expected 0, 1, 2 or 3.")
        for name in ("dtype", "grad_accum_dtype"):
            value = getattr(self, name)
            if value is not None:
                if value not in _DTYPES:
                    raise PlanError(
                        f"layout: {name} is {value!r}, expected one of {', '.join(_DTYPES)}."
                    )
                object.__setattr__(self, name, _DTYPES[value])
        if self.fused_adam not in (None, True, False):
            raise PlanError(f"layout: fused_adam is {self.fused_adam!r}, expected true or false.")
        self._check_scale()

    def _check_scale(self) -> None:
        scale, power = self.loss_scale, self.initial_scale_power
        if scale is not None and not (
            type(scale) in (int, float) and math.isfinite(scale) and scale > 0
        ):
            raise PlanError(f"layout: loss_scale is {scale!r}, expected a number above 0.")
        if power is not None and not (type(power) is int and 0 <= power <= _LARGEST_POWER):
            raise PlanError(
                f"layout: initial_scale_power is {power!r}, expected 0 to {_LARGEST_POWER}."
            )
        if scale is not None and power is not None:
            raise PlanError(
                "layout: found both loss_scale, a static one, and initial_scale_power, of a dynamic one."
            )

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
            values[name] = _value(name, value)
        return cls(**values)

    def to_json(self) -> Mapping[str, Any]:
        """The layout as JSON values."""
        return asdict(self)


def _value(name: str, text: str) -> Any:
    """The value that ``text`` stands for."""
    if name.endswith("dtype"):
        return text
    if name == "fused_adam":
        return _BOOLS.get(text, text)
    if name == "loss_scale":
        try:
            return float(text)
        except ValueError as error:
            raise PlanError(f"layout: {name} is {text!r}, expected a number.") from error
    if not (text.isascii() and text.isdigit()):
        raise PlanError(f"layout: {name} is {text!r}, expected a whole number.")
    return int(text)
