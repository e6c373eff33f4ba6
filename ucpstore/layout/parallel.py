"""`Layout`: how a training run will be spread over ranks, in the user's words."""

from __future__ import annotations

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

Tied = tuple[tuple[str, tuple[int, ...]], ...]


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

    def __post_init__(self) -> None:
        for name in (*_DEGREES, "sub_group_size", "layers"):
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
        if self.pipeline not in (None, True, False):
            raise PlanError(f"layout: pipeline is {self.pipeline!r}, expected True or False.")
        if self.partition is not None and self.partition not in _PARTITIONS:
            raise PlanError(
                f"layout: partition is {self.partition!r}, expected one of {', '.join(_PARTITIONS)}."
            )
        if self.stages is not None:
            object.__setattr__(self, "stages", self._checked_stages())
        if self.tied is not None:
            object.__setattr__(self, "tied", _tied(self.tied))

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
        found = [(str(key), tuple(sorted(_layers("tied", layers)))) for key, layers in pairs]
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"layout: tied is {value!r}, expected keys with the numbers of their layers."
        ) from error
    return tuple(sorted(found))


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise PlanError(f"layout: {name} is {value!r}, expected a whole number.")
    return int(value)


def _parsed(name: str, value: str) -> Any:
    if name in ("dtype", "partition"):
        return value
    if name == "pipeline":
        words = {"true": True, "false": False}
        if value.lower() not in words:
            raise PlanError(f"layout: pipeline is {value!r}, expected true or false.")
        return words[value.lower()]
    if name == "stages":
        return tuple(_number(name, layer) for layer in value.split(":"))
    if name == "tied":
        entries = [entry.split(":") for entry in value.split(";")]
        return tuple((key, tuple(_number(name, n) for n in layers)) for key, *layers in entries)
    return _number(name, value)
