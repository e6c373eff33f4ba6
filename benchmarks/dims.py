"""The models of the benchmark, and the one training configuration that real and written checkpoints share."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["MODELS", "STEPS", "ModelDims", "ds_config", "is_decayed", "llama", "param_groups"]

STEPS = 2
"""Optimizer steps behind every checkpoint of the benchmark."""


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Dimensions of a LLaMA model.

    Attributes
    ----------
    layers, hidden, ffn, heads, kv_heads, vocab : int
    tied : bool
        The output projection is the embedding.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = True


MODELS = {
    # As large as GPT-2 medium: 355 million parameters, 4.26 GB of fp32 weights and moments.
    "355m": ModelDims(layers=24, hidden=1024, ffn=2752, heads=16, kv_heads=16, vocab=50257),
    # 4.4 million parameters, 53 MB: tries the harness.
    "quick": ModelDims(layers=4, hidden=256, ffn=688, heads=8, kv_heads=4, vocab=5003),
    # Small enough to train anywhere; its param groups do not divide by 2 ranks: padding is not zero.
    "tiny": ModelDims(layers=2, hidden=18, ffn=27, heads=3, kv_heads=1, vocab=97),
    "tiny-untied": ModelDims(
        layers=2, hidden=18, ffn=27, heads=3, kv_heads=1, vocab=97, tied=False
    ),
    # One matrix of 573 MB per state: larger than the memory limit of the object store row.
    "wide": ModelDims(layers=1, hidden=1024, ffn=2752, heads=16, kv_heads=16, vocab=140_000),
}


def ds_config() -> dict[str, Any]:
    """DeepSpeed's configuration: bf16 and ZeRO-1 without fp32 gradient accumulation (`DeepSpeedZeroOptimizer`)."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 10},
        },
    }


def llama(dims: ModelDims) -> torch.nn.Module:
    """The transformers model of ``dims``, on torch's current default device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=dims.vocab,
        hidden_size=dims.hidden,
        intermediate_size=dims.ffn,
        num_hidden_layers=dims.layers,
        num_attention_heads=dims.heads,
        num_key_value_heads=dims.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=dims.tied,
    )
    return LlamaForCausalLM(config)


def is_decayed(shape: Iterable[int]) -> bool:
    """Matrices get weight decay, vectors none: the usual two param groups."""
    return len(tuple(shape)) > 1


def param_groups(
    model: torch.nn.Module,
) -> list[tuple[dict[str, Any], OrderedDict[str, torch.nn.Parameter]]]:
    """The two param groups: hyper-parameters, and trainable parameters by name in the model's order."""
    decayed: OrderedDict[str, torch.nn.Parameter] = OrderedDict()
    plain: OrderedDict[str, torch.nn.Parameter] = OrderedDict()
    for name, parameter in model.named_parameters():
        (decayed if is_decayed(parameter.shape) else plain)[name] = parameter
    return [({"weight_decay": 0.1}, decayed), ({"weight_decay": 0.0}, plain)]
