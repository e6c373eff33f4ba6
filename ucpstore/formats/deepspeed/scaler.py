"""The loss scaler of a target, in the words of the class that loads it.

``runtime/fp16/loss_scaler.py``: with ZeRO an object is pickled; without, `LossScaleConfig` is saved as plain
numbers. What is loaded replaces what the engine made of its configuration, whether static or dynamic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ucpstore.errors import PlanError
from ucpstore.formats.deepspeed.wrapper import section
from ucpstore.layout.parallel import Layout
from ucpstore.tagged import StubObject, Symbol

__all__ = ["Scaler", "decide_scaler"]

_LARGEST_POWER = 64
_MODULE = "deepspeed.runtime.fp16.loss_scaler"


@dataclass(frozen=True, slots=True)
class Scaler:
    """A loss scaler.

    Attributes
    ----------
    dynamic : bool
    scale : float
        At the moment.
    cur_iter, last_overflow_iter : int
        Steps done; the last one that overflowed, -1 for none.
    factor, window, min_scale, hysteresis, left, consecutive : numbers
        Of a dynamic scaler: by what it grows, after how many steps; the least scale; overflows that it
        waits for, and those left; whether it counts only consecutive ones.
    overflow : bool
        The last step overflowed.
    saved : StubObject, optional
        The object of the source, to be kept as it was.
    """

    dynamic: bool
    scale: float
    cur_iter: int
    last_overflow_iter: int = -1
    factor: float = 2.0
    window: int = 1000
    min_scale: float = 1
    hysteresis: int = 2
    left: int = 2
    consecutive: bool = False
    overflow: bool = False
    saved: StubObject | None = None

    def of_zero(self) -> dict[str, Any]:
        """Entries of an optimizer file of stages 1, 2 and 3."""
        return {
            "loss_scaler": self.saved or self._object(),
            "dynamic_loss_scale": self.dynamic,
            "overflow": self.overflow,
        }

    def of_stage0(self) -> dict[str, Any]:
        """Entries of the optimizer in a model file of stage 0 in 16 bit."""
        found: dict[str, Any] = {
            "dynamic_loss_scale": self.dynamic,
            "cur_scale": self.scale,
            "cur_iter": self.cur_iter,
        }
        if self.dynamic:
            found["last_overflow_iter"] = self.last_overflow_iter
            found["scale_factor"] = self.factor
            found["scale_window"] = self.window
        return found

    def warnings(self, source: int, target: int) -> list[str]:
        """What is not carried over between stages of ZeRO, and what DeepSpeed does with the rest.

        At stage 0 `DeepSpeedEngine.backward` does not multiply the loss by the scale (``runtime/engine.py``
        of 0.19.8: only for a `ZeROOptimizer`), but gradients are divided by it.
        """
        found = []
        if target == 0 and self.dynamic and (self.left != self.hysteresis or self.consecutive):
            found.append(
                "without ZeRO the loss scaler knows no hysteresis: how many overflows it still waits for is not kept."
            )
        if self.scale != 1 and (source == 0) != (target == 0):
            found.append(
                f"the loss scale is {self.scale}: DeepSpeed 0.19.8 without ZeRO divides gradients by it without having"
                " multiplied the loss, so that gradients and moments are smaller by this factor than with ZeRO."
            )
        return found

    def _object(self) -> StubObject:
        state: dict[str, Any] = {"cur_scale": self.scale, "dynamic": self.dynamic}
        if not self.dynamic:
            return StubObject(_MODULE, "LossScaler", (), state)
        state |= {
            "cur_iter": self.cur_iter,
            "last_overflow_iter": self.last_overflow_iter,
            "scale_factor": self.factor,
            "scale_window": self.window,
            "min_scale": self.min_scale,
            "delayed_shift": self.hysteresis,
            "cur_hysteresis": self.left,
            "consecutive_hysteresis": self.consecutive,
            "raise_error_at_min_scale": True,
            "dtype": Symbol("torch", "float16"),
        }
        return StubObject(_MODULE, "DynamicLossScaler", (), state)


def decide_scaler(
    common: Mapping[str, Any], layout: Layout, *, config: Mapping[str, Any], own_dtype: str
) -> Scaler:
    """Loss scaler of a target: the layout's, else the source's, else that of its configuration.

    Parameters
    ----------
    common : mapping
        The decoded common document.
    layout : Layout
        With its dtype decided.
    config : mapping
        The source's DeepSpeed configuration.
    own_dtype : str
        Element type of the source's weights.

    Raises
    ------
    PlanError
        An fp16 target whose loss scale nothing tells; or a loss scale for another target.
    """
    steps = (common.get("counters") or {}).get("global_steps", 0)
    told = layout.loss_scale is not None or layout.initial_scale_power is not None
    if layout.dtype != "float16":
        if told:
            name = "initial_scale_power" if layout.loss_scale is None else "loss_scale"
            raise PlanError(
                f"layout {name}: found weights of {layout.dtype}, expected fp16: only its loss is scaled."
            )
        return Scaler(dynamic=False, scale=1.0, cur_iter=steps)
    fp16 = section(config, "fp16")
    if not told and own_dtype == "float16":
        facts = common["framework"].get("optimizer", {})
        found = _saved(common.get("loss_scaler"), fp16, steps, overflow=facts.get("overflow"))
        if found is not None:
            return found
    if layout.loss_scale is not None:
        return Scaler(dynamic=False, scale=float(layout.loss_scale), cur_iter=steps)
    if layout.initial_scale_power is not None:
        return _dynamic(2.0**layout.initial_scale_power, fp16)
    static, power = _number(fp16, "loss_scale"), _number(fp16, "initial_scale_power")
    if static:
        return Scaler(dynamic=False, scale=float(static), cur_iter=steps)
    if static is not None or power is not None:
        return _dynamic(2.0 ** _power(power), fp16)
    raise PlanError(
        f"layout dtype=fp16: the source is of {own_dtype}, and neither it nor its configuration (fp16) has a loss"
        " scale to go on with.",
        hint="Say initial_scale_power=16 in the layout (dynamic, DeepSpeed's default), or loss_scale=1024 (static).",
    )


def _power(value: float | None) -> float:
    """``initial_scale_power`` of a configuration."""
    if value is None:
        return 16
    if not 0 <= value <= _LARGEST_POWER:
        raise PlanError(
            f"fp16 of the source's configuration: initial_scale_power is {value}, expected 0 to {_LARGEST_POWER}.",
            hint="Say another one in the layout.",
        )
    return value


def _number(values: Mapping[str, Any], name: str) -> Any:
    value = values.get(name)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else None


def _dynamic(scale: float, fp16: Mapping[str, Any]) -> Scaler:
    """A scaler at its start, as DeepSpeed makes it from ``fp16`` (``dynamic_loss_scale_args``)."""
    window, least = _number(fp16, "loss_scale_window"), _number(fp16, "min_loss_scale")
    hysteresis = _number(fp16, "hysteresis")
    shift = 2 if hysteresis is None else int(hysteresis)
    return Scaler(
        dynamic=True,
        scale=scale,
        cur_iter=0,
        window=1000 if window is None else int(window),
        min_scale=1 if least is None else least,
        hysteresis=shift,
        left=shift,
        consecutive=fp16.get("consecutive_hysteresis") is True,
    )


def _saved(saved: Any, fp16: Mapping[str, Any], steps: int, *, overflow: Any) -> Scaler | None:
    """The source's scaler: an object of a ZeRO file, or the numbers of a stage-0 file."""
    stub = saved if isinstance(saved, StubObject) else None
    values = saved.state if isinstance(saved, StubObject) else saved
    if not isinstance(values, dict) or _number(values, "cur_scale") is None:
        return None
    dynamic = values.get("dynamic" if stub else "dynamic_loss_scale") is True
    start = _dynamic(1.0, fp16)

    def of(name: str, default: Any) -> Any:
        value = _number(values, name)
        return default if value is None else value

    return Scaler(
        dynamic=dynamic,
        scale=values["cur_scale"],
        cur_iter=of("cur_iter", steps),
        last_overflow_iter=of("last_overflow_iter", -1),
        factor=of("scale_factor", 2.0),
        window=of("scale_window", start.window),
        min_scale=of("min_scale", start.min_scale),
        hysteresis=of("delayed_shift", start.hysteresis),
        left=of("cur_hysteresis", start.left),
        consecutive=start.consecutive,
        overflow=overflow is True,
        saved=stub,
    )
