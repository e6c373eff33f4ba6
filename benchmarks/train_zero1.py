"""Train a small model for a few steps with unmodified DeepSpeed ZeRO-1 in bf16 on CPU, and save it.

``DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 -m benchmarks.train_zero1 tiny OUT``
"""

from __future__ import annotations

import argparse

import deepspeed
import torch

from benchmarks.dims import MODELS, STEPS, ds_config, llama, param_groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("out")
    args = parser.parse_args()
    dims = MODELS[args.model]
    torch.manual_seed(0)
    deepspeed.init_distributed(dist_backend="gloo")
    model = llama(dims)
    groups = [{"params": list(params.values()), **hyper} for hyper, params in param_groups(model)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config())
    for _ in range(STEPS):
        tokens = torch.randint(0, dims.vocab, (1, 16))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(args.out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
