"""Trains a small LLaMA-like model with unmodified DeepSpeed ZeRO on CPU ranks and saves a checkpoint.

python -m torch.distributed.run --nproc_per_node 2 notebooks/demo/train.py FOLDER --stage 1
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

# DeepSpeed would compile its shared-memory collectives for this CPU; plain gloo needs no compiler.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--load", help="checkpoint folder to go on from")
    arguments = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,  # grouped-query attention
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-3
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": arguments.stage},
            "zero_allow_untested_optimizer": True,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        },
    )
    done = 0
    if arguments.load:
        folder, _ = engine.load_checkpoint(arguments.load)
        if folder is None:
            parser.error(f"DeepSpeed found no checkpoint in {arguments.load}")
        done = engine.global_steps
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for step in range(done + arguments.steps):
        tokens = torch.randint(0, config.vocab_size, (4, 64), generator=generator)
        if step < done:
            continue  # the data that the first run has seen
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {step + 1:2d}  loss {loss.item():.4f}", flush=True)
    engine.save_checkpoint(arguments.folder)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
