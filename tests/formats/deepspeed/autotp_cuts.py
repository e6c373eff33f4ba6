"""What DeepSpeed's AutoTP cuts of models of transformers: ``python -m torch.distributed.run autotp_cuts.py OUT``.

It writes ``OUT/MODEL.pt``: the shapes of all parameters, what every rank holds of them, and the
``universal_checkpoint_info``. The elements of a whole parameter are 0, 1, 2, ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import collect_autotp_universal_checkpoint_info
from transformers import AutoConfig, AutoModelForCausalLM

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
UNEVEN = {**LLAMA, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}
NEOX = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "head_dim")}
SECTIONS = [  # AutoTP refuses the plan of Phi-3's own configuration
    {
        "patterns": [r".*\.qkv_proj\.weight$"],
        "partition_type": "column",
        "shape": [[32, 16, 16], -1],
    },
    {"patterns": [r".*\.gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1]},
    {"patterns": [r".*\.(o_proj|down_proj)\.weight$"], "partition_type": "row"},
    {"patterns": [r"^lm_head\.weight$"], "partition_type": "column", "gather_output": True},
]
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}, {}),
    "uneven": ("llama", {**UNEVEN, "head_dim": 4}, {}),
    "qwen3": ("qwen3", LLAMA, {}),
    "gpt_neox": ("gpt_neox", NEOX, {}),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 4}, {}),
    "phi3": (
        "phi3",
        {**{k: v for k, v in LLAMA.items() if k != "head_dim"}, "pad_token_id": 0},
        {"partition_config": {"use_default_specs": False, "layer_specs": SECTIONS}},
    ),
}


def cut(name: str, out: Path) -> None:
    kind, sizes, options = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=64, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data = torch.arange(parameter.numel(), dtype=torch.float32).reshape(
            parameter.shape
        )
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {"autotp_size": dist.get_world_size(), **options},
        },
    )
    mine = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    info = collect_autotp_universal_checkpoint_info(engine.module)
    if dist.get_rank() == 0:
        torch.save({"shapes": shapes, "ranks": everyone, "info": info}, out / f"{name}.pt")


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    for each in MODELS:
        cut(each, Path(sys.argv[1]))
    dist.destroy_process_group()
