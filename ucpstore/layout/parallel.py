"""`Layout`: how a training run will be spread over ranks, in the user's words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
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
_DEGREES = ("dp", "tp", "pp", "sp")
_PARTITIONS = ("parameters", "uniform")
_BOOLS = {"true": True, "false": False}
_LARGEST_POWER = 64
_MOST_DIGITS = 18
"""Of a number in a text: more than any degree or size has."""

Tied = tuple[tuple[str, tuple[int, ...]], ...]


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
    sp : int
        Sequence-parallel degree (Ulysses): it cuts no weights, but ZeRO cuts over ``dp * sp`` ranks.
    pipeline : bool, optional
        The model is a ``PipelineModule``, whose weights are in files of layers. By default where ``pp``
        is above 1, and where the source is one's checkpoint and the stage is at most 1.
    layers : int, optional
        Entries of the ``PipelineModule``, functions included: no checkpoint knows those at its end.
    stages : tuple of int, optional
        The first layer of every pipeline stage, ``(0, 3, 6)``.
    partition : str, optional
        Instead of ``stages``: ``PipelineModule``'s ``partition_method``, ``parameters`` or ``uniform``. By
        default the stages of a source of as many; else the method that made the source's stages; else
        ``parameters``, DeepSpeed's own default.
    tied : mapping of str to sequence of int, optional
        The layers that use a tied module, by its key: no checkpoint knows those that are functions over
        one.
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
    >>> layout = Layout.parse("dp=2,pp=3,stages=0:3:6,tied=embed:0:7")
    >>> layout.pp, layout.stages, layout.tied
    (3, (0, 3, 6), (('embed', (0, 7)),))
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 1
    dtype: str | None = None
    sub_group_size: int | None = None
    sp: int = 1
    pipeline: bool | None = None
    layers: int | None = None
    stages: tuple[int, ...] | None = None
    partition: str | None = None
    tied: Tied | Mapping[str, Sequence[int]] | None = None
    grad_accum_dtype: str | None = None
    fused_adam: bool | None = None
    loss_scale: float | None = None
    initial_scale_power: int | None = None

    def __post_init__(self) -> None:
        for name in (*_DEGREES, "sub_group_size", "layers"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and value >= 1):
                raise PlanError(f"layout: {name} is {value!r}, expected a whole number from 1.")
        if type(self.zero_stage) is not int or self.zero_stage not in (0, 1, 2, 3):
            raise PlanError(f"layout: zero_stage is {self.zero_stage!r}, expected 0, 1, 2 or 3.")
        for name in ("dtype", "grad_accum_dtype"):
            value = getattr(self, name)
            if value is not None:
                if not isinstance(value, str) or value not in _DTYPES:
                    raise PlanError(
                        f"layout: {name} is {value!r}, expected one of {', '.join(_DTYPES)}."
                    )
                object.__setattr__(self, name, _DTYPES[value])
        for name in ("fused_adam", "pipeline"):
            if not isinstance(getattr(self, name), bool | None):
                raise PlanError(
                    f"layout: {name} is {getattr(self, name)!r}, expected true or false."
                )
        self._check_scale()
        if self.partition is not None and self.partition not in _PARTITIONS:
            raise PlanError(
                f"layout: partition is {self.partition!r}, expected one of {', '.join(_PARTITIONS)}."
            )
        if self.stages is not None:
            object.__setattr__(self, "stages", self._checked_stages())
        if self.tied is not None:
            object.__setattr__(self, "tied", _tied(self.tied))

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

    def _checked_stages(self) -> tuple[int, ...]:
        stages = _layers("stages", self.stages)
        if len(stages) != self.pp or stages[0] != 0 or any(b <= a for a, b in pairwise(stages)):
            raise PlanError(
                f"layout: stages are {list(stages)}, expected the first layers of {self.pp} stages, rising from 0."
            )
        if self.partition is not None:
            raise PlanError("layout: expected stages or partition, found both.")
        return stages

    @property
    def uses(self) -> dict[str, tuple[int, ...]]:
        """`tied` as a dict."""
        return {} if self.tied is None else dict(_tied(self.tied))

    @property
    def zero_ranks(self) -> int:
        """Ranks that ZeRO cuts over: data- and sequence-parallel ones."""
        return self.dp * self.sp

    @property
    def model_ranks(self) -> int:
        """Model-parallel ranks: DeepSpeed's ``mp_world_size``."""
        return self.tp * self.pp

    @property
    def world(self) -> int:
        """All ranks."""
        return self.model_ranks * self.zero_ranks

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Pipeline stage, rank among those that ZeRO cuts over, and tensor-parallel rank of a global rank.

        Tensor-parallel ranks are neighbours, stages are farthest apart, as in Megatron-LM and in
        DeepSpeed's ``PipeModelDataParallelTopology`` (``runtime/pipe/topology.py``).

        Raises
        ------
        PlanError
            There is no such rank.
        """
        if type(rank) is not int or not 0 <= rank < self.world:
            raise PlanError(f"rank is {rank!r}, expected one of the {self.world} ranks from 0.")
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.zero_ranks)
        return pp, dp, tp

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``name=value`` pairs with commas between them.

        Lists of layers are written ``stages=0:3:6`` and ``tied=embed:0:7`` (several keys:
        ``tied=embed:0:7;head:2:5``).

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
            values[name] = _parsed(name, value)
        return cls(**values)

    def to_json(self) -> Mapping[str, Any]:
        """The layout as JSON values."""
        found = asdict(self)
        if self.stages is not None:
            found["stages"] = list(self.stages)
        if self.tied is not None:
            found["tied"] = {key: list(layers) for key, layers in self.uses.items()}
        return found


def _layers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise PlanError(f"layout: {name} is {value!r}, expected numbers of layers.")
    if any(type(layer) is not int or layer < 0 for layer in value):
        raise PlanError(f"layout: {name} is {value!r}, expected numbers of layers.")
    return tuple(value)


def _tied(value: Any) -> Tied:
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        found = [(str(key), tuple(sorted({*_layers("tied", layers)}))) for key, layers in pairs]
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"layout: tied is {value!r}, expected keys with the numbers of their layers."
        ) from error
    if len(dict(found)) < len(found):
        raise PlanError(f"layout: tied is {value!r}, expected every key once.")
    return tuple(sorted(found))


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS):
        raise PlanError(f"layout: {name} is {value!r:.80}, expected a whole number.")
    return int(value)


def _parsed(name: str, text: str) -> Any:
    """The value that ``text`` stands for."""
    if name == "partition" or name.endswith("dtype"):
        return text
    if name in ("fused_adam", "pipeline"):
        return _BOOLS.get(text, text)
    if name == "loss_scale":
        try:
            return float(text)
        except ValueError as error:
            raise PlanError(f"layout: {name} is {text!r}, expected a number.") from error
    if name == "stages":
        return tuple(_number(name, layer) for layer in text.split(":"))
    if name == "tied":
        entries = [entry.split(":") for entry in text.split(";")]
        return tuple((key, tuple(_number(name, n) for n in layers)) for key, *layers in entries)
    return _number(name, text)
