"""The checkpoints to make, as data: one `Case` is one training run and what to expect of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Tied = Literal["no", "forward", "reverse"]
Dtype = Literal["fp32", "bf16"]
ModelName = Literal["llama", "tiny", "wide", "hf", "pipeline", "twin", "ulysses"]
OptimizerName = Literal["adamw", "sgd", "rmsprop", "muon", "fused"]
SchedulerName = Literal["warmup", "lambda", "none"]
Grouping = Literal["decay", "reversed", "crossed"]

MICRO_BATCHES = 2
"""Micro-batches of a step of a pipeline, or of its plain twin; of one sample each."""


@dataclass(frozen=True, slots=True)
class Case:
    """One training run of unmodified DeepSpeed.

    Attributes
    ----------
    name : str
        Unique name; also the folder's.
    world : int
        Number of ranks (pp x dp x tp); the dp ranks include those of sequence parallelism.
    stage : int
        ZeRO stage, 0 to 3.
    dtype : {"fp32", "bf16"}
        Dtype of the model the engine trains.
    zero, config : mapping
        Additions to `zero_optimization` and to the whole DeepSpeed configuration.
    grouping : {"decay", "reversed", "crossed"}
        The optimizer's groups: matrices and vectors; the same, listed backwards; or every second
        matrix and vector, so that both groups hold parameters of the same shapes.
    named : bool
        The optimizer is given names, which torch then saves (``param_names``).
    tp : int
        AutoTP size; needs ``model="hf"`` with `sizes`. With a pipeline, the layers' own.
    pp : int
        Pipeline stages; a pipeline has a model of its own (`pipeline.py`).
    partition : str
        How `PipelineModule` cuts the layers into stages: its ``partition_method``.
    sp : int
        Ranks that share a sequence (DeepSpeed's Ulysses); needs ``model="ulysses"``.
    patterns : bool
        The client of a pipeline (or of its twin) tells how parameters are cut, also where none is.
    """

    name: str
    world: int
    stage: int
    dtype: Dtype
    model: ModelName = "llama"
    tied: Tied = "no"
    frozen: bool = False
    optimizer: OptimizerName = "adamw"
    scheduler: SchedulerName = "warmup"
    single_group: bool = False
    grouping: Grouping = "decay"
    named: bool = False
    steps: int = 3
    exclude_frozen: bool = False
    rich_client_state: bool = False
    tp: int = 1
    pp: int = 1
    partition: str = "uniform"
    sp: int = 1
    patterns: bool = False
    sizes: tuple[tuple[str, int], ...] = ()
    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dp(self) -> int:
        """Number of ranks that ZeRO shards over: data-parallel and sequence-parallel ones."""
        return self.world // (self.tp * self.pp)

    @property
    def micro_batched(self) -> bool:
        """Whether a step accumulates the gradients of several micro-batches."""
        return self.model in ("pipeline", "twin")

    def to_json(self) -> str:
        """Return a stable text of everything the run depends on."""
        return json.dumps(asdict(self), sort_keys=True)


# bf16 weights with fp32 gradient accumulation at stage 1: DeepSpeed picks its BF16_Optimizer.
_FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
# Masters and moments in bf16 too.
_BF16_STATES = {
    "bf16": {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }
}
_LEGACY_FILES = {"checkpoint": {"checkpoint_serialization": False}}

_HF = (
    ("vocab_size", 40),
    ("hidden_size", 24),
    ("intermediate_size", 36),
    ("num_hidden_layers", 2),
    ("num_attention_heads", 4),
    ("num_key_value_heads", 2),
    ("max_position_embeddings", 32),
)
# 3 key-value heads over 2 ranks (2 + 1) and 37 rows over 2 ranks (19 + 18).
_HF_UNEVEN = (
    *_HF[:1],
    ("hidden_size", 24),
    ("intermediate_size", 37),
    ("num_hidden_layers", 1),
    ("num_attention_heads", 6),
    ("num_key_value_heads", 3),
    *_HF[6:],
)
# 10 rows over 4 ranks: 3, 3, 2, 2.
_HF_TEN = (
    *_HF[:1],
    ("hidden_size", 16),
    ("intermediate_size", 10),
    ("num_hidden_layers", 1),
    ("num_attention_heads", 4),
    ("num_key_value_heads", 4),
    *_HF[6:],
)

# Matrices of several tiles, so that shards can be cut.
_HF_LARGE = (
    ("vocab_size", 512),
    ("hidden_size", 512),
    ("intermediate_size", 1408),
    ("num_hidden_layers", 1),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 2),
    *_HF[6:],
)


def _grid() -> list[Case]:
    """Return the pairwise cover of {stage} x {dtype} x {dp}; all six of dp=2."""
    chosen: list[tuple[int, Dtype, int]] = [
        (1, "fp32", 2),
        (2, "fp32", 2),
        (3, "fp32", 2),
        (1, "bf16", 2),
        (2, "bf16", 2),
        (3, "bf16", 2),
        (1, "bf16", 3),
        (2, "fp32", 3),
        (3, "bf16", 3),
        (1, "fp32", 4),
        (2, "bf16", 4),
        (3, "fp32", 4),
    ]
    return [Case(f"s{stage}-{dtype}-dp{dp}", dp, stage, dtype) for stage, dtype, dp in chosen]


def _structure() -> list[Case]:
    """Return the cases about the model: tied, frozen, tiny and wide parameters."""
    return [
        Case("tied-s1-bf16-dp3", 3, 1, "bf16", tied="forward"),
        Case("tied-s3-fp32-dp2", 2, 3, "fp32", tied="forward"),
        Case("tied-bf16opt-dp4", 4, 1, "bf16", tied="forward", config=_FP32_GRADIENTS),
        Case("tied-reverse-s2-fp32-dp2", 2, 2, "fp32", tied="reverse"),
        Case("tied-reverse-s3-bf16-dp2", 2, 3, "bf16", tied="reverse"),
        Case("frozen-s1-fp32-dp2", 2, 1, "fp32", frozen=True),
        Case("frozen-s2-bf16-dp2", 2, 2, "bf16", frozen=True),
        Case("frozen-s3-fp32-dp2", 2, 3, "fp32", frozen=True),
        Case("frozen-s3-bf16-dp3", 3, 3, "bf16", frozen=True),
        Case("frozen-bf16opt-dp2", 2, 1, "bf16", frozen=True, config=_FP32_GRADIENTS),
        Case("exclude-frozen-s2-fp32-dp2", 2, 2, "fp32", frozen=True, exclude_frozen=True),
        Case("exclude-frozen-s3-bf16-dp2", 2, 3, "bf16", frozen=True, exclude_frozen=True),
        Case("tiny-s1-fp32-dp8", 8, 1, "fp32", model="tiny"),
        Case("tiny-bf16opt-dp8", 8, 1, "bf16", model="tiny", config=_FP32_GRADIENTS),
        Case("tiny-s3-fp32-dp8", 8, 3, "fp32", model="tiny"),
        Case("wide-s1-fp32-dp12", 12, 1, "fp32", model="wide", single_group=True),
        Case("wide-s3-bf16-dp12", 12, 3, "bf16", model="wide", single_group=True),
    ]


def _engine() -> list[Case]:
    """Return the cases about DeepSpeed's own options and file layouts."""
    small = {"sub_group_size": 300}
    smaller = {"sub_group_size": 50}
    round_robin = {"round_robin_gradients": True}
    aligned = {"parameter_alignment": True}
    both = {**round_robin, **aligned}
    elastic = {"elastic_checkpoint": True}
    return [
        Case("bf16opt-dp2", 2, 1, "bf16", config=_FP32_GRADIENTS),
        Case("bf16opt-dp3", 3, 1, "bf16", config=_FP32_GRADIENTS),
        Case("subgroups-s3-fp32-dp2", 2, 3, "fp32", zero=small),
        Case("subgroups-s3-bf16-dp3", 3, 3, "bf16", zero=smaller),
        Case("roundrobin-s2-fp32-dp2", 2, 2, "fp32", zero=round_robin),
        Case("roundrobin-s2-bf16-dp3", 3, 2, "bf16", zero=round_robin),
        Case("aligned-s1-fp32-dp2", 2, 1, "fp32", zero=aligned),
        Case("aligned-s2-bf16-dp3", 3, 2, "bf16", zero=aligned),
        Case("aligned-roundrobin-s2-fp32-dp2", 2, 2, "fp32", zero=both),
        Case("elastic-s1-bf16-dp3", 3, 1, "bf16", zero=elastic),
        Case("elastic-s2-fp32-dp2", 2, 2, "fp32", zero=elastic),
        Case("legacy-s2-fp32-dp2", 2, 2, "fp32", config=_LEGACY_FILES),
        Case("legacy-s3-bf16-dp2", 2, 3, "bf16", config=_LEGACY_FILES),
        Case("bf16states-s2-dp2", 2, 2, "bf16", config=_BF16_STATES),
        Case("bf16states-s3-dp2", 2, 3, "bf16", config=_BF16_STATES),
    ]


def _loop() -> list[Case]:
    """Return the cases about the user's training loop: optimizer, scheduler, client state."""
    rich: dict[str, Any] = {"scheduler": "lambda", "rich_client_state": True}
    return [
        Case("sgd-s1-fp32-dp2", 2, 1, "fp32", optimizer="sgd"),
        Case("sgd-s3-bf16-dp2", 2, 3, "bf16", optimizer="sgd"),
        Case("rmsprop-s2-fp32-dp3", 3, 2, "fp32", optimizer="rmsprop"),
        Case("muon-bf16opt-dp2", 2, 1, "bf16", optimizer="muon", config=_FP32_GRADIENTS),
        Case("muon-s2-bf16-dp2", 2, 2, "bf16", optimizer="muon"),
        Case("unstepped-s1-fp32-dp2", 2, 1, "fp32", steps=0),
        Case("unstepped-s3-bf16-dp2", 2, 3, "bf16", steps=0),
        Case("unstepped-bf16opt-dp2", 2, 1, "bf16", steps=0, config=_FP32_GRADIENTS),
        Case("client-s2-bf16-dp2", 2, 2, "bf16", **rich),
        Case("client-s3-fp32-dp2", 2, 3, "fp32", **rich),
        Case("noscheduler-s1-fp32-dp2", 2, 1, "fp32", scheduler="none"),
    ]


def _stage0() -> list[Case]:
    """Return the cases without ZeRO: the optimizer's state is in the model file, without names."""
    return [
        Case("s0-fp32-dp2", 2, 0, "fp32"),
        Case("tied-s0-fp32-dp2", 2, 0, "fp32", tied="forward"),
        Case("frozen-s0-fp32-dp1", 1, 0, "fp32", frozen=True),
        Case("crossed-s0-fp32-dp1", 1, 0, "fp32", grouping="crossed"),
        Case("reversed-s0-fp32-dp1", 1, 0, "fp32", grouping="reversed"),
        Case("named-s0-fp32-dp2", 2, 0, "fp32", grouping="crossed", frozen=True, named=True),
        Case("sgd-s0-fp32-dp1", 1, 0, "fp32", optimizer="sgd"),
        Case("unstepped-s0-fp32-dp1", 1, 0, "fp32", steps=0, single_group=True),
        Case("legacy-s0-fp32-dp1", 1, 0, "fp32", config=_LEGACY_FILES, scheduler="none"),
        Case("s0-bf16-dp2", 2, 0, "bf16"),
        Case("frozen-tied-s0-bf16-dp2", 2, 0, "bf16", frozen=True, tied="reverse"),
        Case("crossed-s0-bf16-dp2", 2, 0, "bf16", grouping="crossed", frozen=True),
        Case("reversed-s0-bf16-dp1", 1, 0, "bf16", grouping="reversed"),
        Case("fused-s0-bf16-dp2", 2, 0, "bf16", optimizer="fused", tied="forward"),
        Case(
            "crossed-fused-s0-bf16-dp1",
            1,
            0,
            "bf16",
            optimizer="fused",
            frozen=True,
            grouping="crossed",
        ),
        Case("unstepped-s0-bf16-dp1", 1, 0, "bf16", steps=0),
    ]


def _tensor_parallel() -> list[Case]:
    """Return the AutoTP cases: a Hugging Face LLaMA with grouped-query attention."""
    hf: dict[str, Any] = {"model": "hf", "tp": 2, "sizes": _HF}
    uneven: dict[str, Any] = {"model": "hf", "tp": 2, "sizes": _HF_UNEVEN}
    ten: dict[str, Any] = {"model": "hf", "tp": 4, "sizes": _HF_TEN}
    return [
        Case("tp2-s1-bf16-dp1", 2, 1, "bf16", **hf),
        Case("tp2-large-s1-fp32-dp1", 2, 1, "fp32", model="hf", tp=2, sizes=_HF_LARGE),
        Case("tp2-s1-fp32-dp2", 4, 1, "fp32", **hf),
        Case("tp2-bf16opt-dp2", 4, 1, "bf16", config=_FP32_GRADIENTS, **hf),
        Case("tp2-s2-bf16-dp2", 4, 2, "bf16", **hf),
        Case("tp2-s3-fp32-dp2", 4, 3, "fp32", **hf),
        Case("tp2-uneven-s1-fp32-dp2", 4, 1, "fp32", **uneven),
        Case("tp4-uneven-s1-fp32-dp1", 4, 1, "fp32", **ten),
        Case("tp2-s0-bf16-dp1", 2, 0, "bf16", **hf),
    ]


CASES: Mapping[str, Case] = MappingProxyType(
    {
        case.name: case
        for case in [*_grid(), *_structure(), *_engine(), *_loop(), *_stage0(), *_tensor_parallel()]
    }
)


def _pipeline() -> list[Case]:
    """Return pipelines: ``tied`` says whether the head is a function over the tied layer."""
    two: dict[str, Any] = {"model": "pipeline", "pp": 2, "tied": "forward"}
    files: dict[str, Any] = {**two, "tied": "reverse"}
    four: dict[str, Any] = {**two, "pp": 4}
    spread = {"checkpoint": {"parallel_write": {"pipeline_stage": True}}}
    both = {**_FP32_GRADIENTS, **spread}
    return [
        Case("pp1-s1-fp32-dp2", 2, 1, "fp32", model="pipeline", tied="reverse"),
        Case("pp2-s1-fp32-dp1", 2, 1, "fp32", **two),
        Case("pp2-s1-fp32-dp2", 4, 1, "fp32", frozen=True, **files),
        Case("pp2-s1-bf16-dp2", 4, 1, "bf16", **two),
        Case("pp2-bf16opt-dp1", 2, 1, "bf16", config=_FP32_GRADIENTS, **files),
        Case("pp2-bf16opt-dp2", 4, 1, "bf16", config=both, **files),
        Case("pp2-s0-bf16opt-dp2", 4, 0, "bf16", **files),
        # the first stage is an embedding: no group for vectors (other optimizers hang then)
        Case("pp4-bf16opt-dp1", 4, 1, "bf16", scheduler="none", config=_FP32_GRADIENTS, **four),
        Case("pp2-tp2-bf16opt-dp2", 8, 1, "bf16", tp=2, config=_FP32_GRADIENTS, **files),
        Case("pp2-tp2-s1-fp32-dp1", 4, 1, "fp32", tp=2, frozen=True, **two),
        Case("pp2-s0-fp32-dp2", 4, 0, "fp32", **two),
        Case("pp2-tp2-s0-fp32-dp1", 4, 0, "fp32", tp=2, named=True, **files),
        Case("pp4-s0-fp32-dp1", 4, 0, "fp32", scheduler="none", **four),
        Case("pp2-named-s0-fp32-dp1", 2, 0, "fp32", grouping="crossed", named=True, **files),
        Case("pp2-frozen-s0-fp32-dp1", 2, 0, "fp32", frozen=True, **files),
        Case("pp2-fused-s1-fp32-dp1", 2, 1, "fp32", optimizer="fused", **files),
    ]


PIPELINE_CASES: Mapping[str, Case] = MappingProxyType({case.name: case for case in _pipeline()})
"""Pipelines; apart from `CASES`, as their truth is one per stage."""


def _matrix() -> list[Case]:
    """Return the sources of the resume matrix: one model in several layouts."""
    model: dict[str, Any] = {"tied": "reverse", "frozen": True, "patterns": True}
    pipe: dict[str, Any] = {"model": "pipeline", **model}
    whole: dict[str, Any] = {"tp": 2, "pp": 2, **pipe}
    # DeepSpeed's pipelines compute another norm without ZeRO than with it
    unclipped = {"gradient_clipping": 0.0}
    return [
        Case("3d-unclipped-s1-fp32-dp2", 8, 1, "fp32", config=unclipped, **whole),
        Case("3d-unclipped-s0-fp32-dp2", 8, 0, "fp32", named=True, config=unclipped, **whole),
        Case("3d-tp2-pp2-s0-fp32-dp2", 8, 0, "fp32", named=True, **whole),
        Case("3d-tp2-pp2-s1-fp32-dp2", 8, 1, "fp32", tp=2, pp=2, **pipe),
        Case("3d-pp2-s1-fp32-dp1", 2, 1, "fp32", pp=2, **pipe),
        Case("3d-s1-fp32-dp4", 4, 1, "fp32", **pipe),
        Case("twin-s3-fp32-dp2", 2, 3, "fp32", model="twin", **model),
        Case("sp2-s1-fp32-dp4", 4, 1, "fp32", model="ulysses", sp=2),
        Case("sp2-s3-fp32-dp4", 4, 3, "fp32", model="ulysses", sp=2),
    ]


MATRIX_CASES: Mapping[str, Case] = MappingProxyType({case.name: case for case in _matrix()})
"""Sources of the resume matrix (`tests/test_matrix.py`)."""


def find_case(name: str) -> Case:
    """Return the case of that name, of whichever list."""
    for cases in (CASES, PIPELINE_CASES, MATRIX_CASES):
        if name in cases:
            return cases[name]
    raise KeyError(name)
