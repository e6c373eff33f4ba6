"""Load a checkpoint in unmodified DeepSpeed and time just that: ``python -m benchmarks.native_load JSON``.

Frameworks are imported once; then the ranks are forked, meet over gloo and start their engines on a model
that was never initialised. The clock runs from one barrier to another around `engine.load_checkpoint`.
Afterwards every rank digests what its engine holds: rows that load the same states in the same layout must
agree, however the files came about.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
import xxhash

from benchmarks.dims import MODELS, ds_config, llama, param_groups
from benchmarks.process import Sampler, cpu_of, tree_anonymous

# DeepSpeed would compile its shared-memory collectives for this CPU first; plain gloo does the same.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

Options = Mapping[str, Any]
"""``model``, ``load`` (folder), ``stage``, ``world``, ``universal``, and where to ``save`` (or null)."""


def run_ranks(options: Options) -> dict[str, Any]:
    """Fork the ranks and wait for them.

    Returns
    -------
    dict
        ``wall`` (the slowest rank's), ``cpu`` (of all), ``increment`` (bytes of anonymous memory that loading
        took, the highest rank's) and ``digests`` by rank.
    """
    model_class = llama(MODELS["tiny"]).__class__  # imported before the fork
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for rank in range(options["world"]):
            pid = os.fork()
            if pid == 0:
                _end_as(rank, options, Path(folder))
            children[pid] = rank
        failed = []
        while children:
            pid, status = os.wait()
            rank = children.pop(pid)
            if status:
                failed.append(rank)
                for other in children:
                    os.kill(other, 9)
        if failed:
            raise RuntimeError(f"rank {failed[0]} of a {model_class.__name__} ended with an error")
        facts = [
            json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options["world"])
        ]
    return {
        "wall": max(fact["wall"] for fact in facts),
        "cpu": sum(fact["cpu"] for fact in facts),
        "increment": max(fact["increment"] for fact in facts),
        "digests": [fact["digest"] for fact in facts],
    }


def _end_as(rank: int, options: Options, folder: Path) -> None:
    """Be one rank, and end the process."""
    status = 1
    try:
        sys.stdout = sys.stderr  # DeepSpeed prints; stdout is for the result
        facts = _be_rank(rank, options, folder)
        (folder / f"{rank}.json").write_text(json.dumps(facts))
        status = 0
    except BaseException:  # a forked rank must end here whatever happened
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _be_rank(rank: int, options: Options, folder: Path) -> dict[str, Any]:
    world = options["world"]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # unused: the ranks meet at a file
    )
    deepspeed.init_distributed(
        dist_backend="gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=600),
        verbose=False,
    )
    engine = _engine(options)
    gc.collect()
    dist.barrier()
    pid = os.getpid()
    cpu, anonymous = cpu_of(pid), tree_anonymous(pid)
    sampler = Sampler(pid)
    sampler.start()
    begin = time.perf_counter()
    found, _ = engine.load_checkpoint(options["load"])
    dist.barrier()
    wall = time.perf_counter() - begin
    sampler.stop()
    cpu, after = cpu_of(pid) - cpu, tree_anonymous(pid)
    if found is None:
        raise RuntimeError(f"DeepSpeed found no checkpoint in {options['load']}")
    digest = xxhash.xxh3_128()
    for name, tensor in _held(engine, options["stage"]):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    if options.get("save"):
        engine.save_checkpoint(options["save"])
    dist.barrier()
    dist.destroy_process_group()
    return {
        "wall": wall,
        "cpu": cpu,
        "increment": max(sampler.peak, after) - anonymous,
        "digest": digest.hexdigest(),
    }


def _engine(options: Options) -> Any:
    with torch.device("meta"):
        model = llama(MODELS[options["model"]])
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()  # to_empty gave every place memory of its own
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)  # what the checkpoint does not restore is wrong
    groups = [{"params": list(params.values()), **hyper} for hyper, params in param_groups(model)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    config = ds_config()
    config["zero_optimization"]["stage"] = options["stage"]
    if options["universal"]:
        config["checkpoint"] = {"load_universal": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def _held(engine: Any, stage: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Model weights, master weights and moments of this rank, as the engine holds them.

    The models of the benchmark are cut without padding, so flat buffers can be compared as they are.
    """
    zero = engine.optimizer
    for name, parameter in engine.module.named_parameters():
        yield name, parameter.ds_tensor if stage == 3 else parameter
    flats = (
        zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    )
    for index, flat in enumerate(flats):
        yield f"master {index}", flat
        state = zero.optimizer.state[flat]
        for name in ("exp_avg", "exp_avg_sq"):
            yield f"{name} {index}", state[name]


if __name__ == "__main__":
    print(json.dumps(run_ranks(json.loads(sys.argv[1]))))
