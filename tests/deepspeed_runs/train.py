"""Make the checkpoints: train each case with unmodified DeepSpeed on gloo ranks, and save.

Run by `tests.deepspeed_runs` as ``python -m tests.deepspeed_runs.train`` in a process of its own,
which makes one case after another on request (see `serve`).

The frameworks are imported once; every case then gets freshly forked ranks, so that no state of
DeepSpeed's module globals passes from one case to the next. Of each case remain the folder
`checkpoint/` just as DeepSpeed wrote it, and beside it the ground truth (see `truth.py`).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import os
import random
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from tests.deepspeed_runs import pipeline, sequence
from tests.deepspeed_runs.cases import MICRO_BATCHES, Case, find_case
from tests.deepspeed_runs.model import build_model
from tests.deepspeed_runs.recipe import (
    CLIP,
    batch,
    build_optimizer,
    build_scheduler,
    loss_of,
)
from tests.deepspeed_runs.truth import find_tp_dims, record_truth

# DeepSpeed would compile its shared-memory collectives for this CPU when it starts the process
# group; plain gloo does the same work. This is the registry of usable ops that it consults.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

# What torch and DeepSpeed import only when first used: seconds on every rank of every case.
IMPORT_BEFORE_FORK = ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer")


Task = Callable[[Case, Path], None]
"""What a rank does for a case, and the folder where it leaves its results."""


def ds_config(case: Case) -> dict[str, Any]:
    """Return the DeepSpeed configuration of `case`."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.dtype == "bf16"},
        "zero_optimization": {"stage": case.stage, **case.zero},
        "steps_per_print": 10**9,
    }
    if case.optimizer == "muon":
        config["optimizer"] = {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    if case.micro_batched:
        config["gradient_accumulation_steps"] = MICRO_BATCHES
    if case.model == "pipeline":
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    elif case.tp > 1:
        config["tensor_parallel"] = {"autotp_size": case.tp}
    if case.scheduler == "warmup":
        count = 1 if case.single_group else 2
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": [1e-3, 2e-3][:count],
                "warmup_max_lr": [1e-2, 3e-2][:count],
                "warmup_num_steps": 10,
            },
        }
    return {**config, **case.config}


def client_state(case: Case) -> dict[str, Any]:
    """Return what a user's training loop hands to `save_checkpoint`."""
    state: dict[str, Any] = {"iteration": case.steps, "tokens": 2**40 + 5, "note": "tiny run"}
    if case.patterns or (case.model == "pipeline" and case.tp > 1):
        state["universal_checkpoint_info"] = pipeline.UNIVERSAL_INFO
    if case.rich_client_state:
        # As Megatron-DeepSpeed does it.
        generator = torch.Generator().manual_seed(77)
        state["args"] = argparse.Namespace(hidden_size=21, lr=1e-2, data_path=["a", "b"], tp=None)
        state["checkpoint_version"] = 3.0
        state["rng_state"] = [
            {
                "random_rng_state": random.Random(77).getstate(),
                "np_rng_state": np.random.RandomState(77).get_state(),
                "torch_rng_state": generator.get_state(),
                "rng_tracker_states": {},
            }
        ]
        state["ema_loss"] = torch.tensor([1.5, math.pi], dtype=torch.float64)
    return state


def build(case: Case) -> torch.nn.Module:
    """Return the model of `case` on this rank; with sequence parallelism, prepared for it."""
    if case.model == "pipeline":
        return pipeline.build_pipeline(case)
    if case.model == "twin":
        return pipeline.Twin(case)
    model = build_model(case)
    if case.sp > 1:
        sequence.share_sequences(model, case.sp)
    return model


def data_rank(case: Case) -> int:
    """Return which of the data-parallel ranks this is: those that share a sequence are one."""
    return dist.get_rank() // case.tp % case.dp // case.sp


def find_dims(engine: Any, case: Case, initial: dict[str, torch.Tensor]) -> dict[str, int | None]:
    """Return the dimension along which each parameter of this rank is cut."""
    if case.model == "pipeline":
        return pipeline.tp_dims(engine.module, case)
    return find_tp_dims(engine.module, case, initial)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def start_engine(model: torch.nn.Module, case: Case) -> tuple[Any, Any]:
    """Return DeepSpeed's engine and scheduler around `model`."""
    optimizer = build_optimizer(model, case) if case.optimizer != "muon" else None
    engine, _, _, scheduler = deepspeed.initialize(
        model=model,
        model_parameters=None if optimizer else list(model.parameters()),
        optimizer=optimizer,
        lr_scheduler=build_scheduler(optimizer, case),
        mpu=sequence.mpu() if case.sp > 1 else None,
        config=ds_config(case),
    )
    return engine, scheduler


def train_step(engine: Any, case: Case, step: int, samples: Sequence[int]) -> torch.Tensor:
    """Do a step on this rank's share of the global batch and return the share's loss."""
    if case.micro_batched:
        micro_batches = pipeline.batches(step, samples)
        if case.model == "pipeline":
            loss: torch.Tensor = engine.train_batch(micro_batches)
            return loss
        parts = []
        for tokens, labels in micro_batches:
            parts.append(engine(tokens, labels))
            engine.backward(parts[-1])
            engine.step()
        return torch.stack(parts).mean()
    tokens = torch.cat([batch(case, step, sample) for sample in samples])
    loss = (
        sequence.loss(engine, tokens, case.sp)
        if case.model == "ulysses"
        else loss_of(engine, tokens, case)
    )
    engine.backward(loss)
    engine.step()
    return loss


def train_steps(engine: Any, case: Case, dp_rank: int) -> list[float]:
    """Do the steps of `case` and return this rank's losses."""
    mine = range(10 * dp_rank, 10 * dp_rank + MICRO_BATCHES)
    samples = mine if case.micro_batched else [dp_rank]
    losses = [train_step(engine, case, step, samples).item() for step in range(case.steps)]
    if not all(math.isfinite(loss) for loss in losses):
        raise RuntimeError(f"case {case.name}: losses are {losses}, expected finite numbers")
    return losses


def train(case: Case, folder: Path) -> None:
    """Train `case` on this rank and leave checkpoint and truth in `folder`."""
    model = build(case)
    initial = values(model)
    engine, scheduler = start_engine(model, case)
    tp_dims = find_dims(engine, case, initial)
    losses = train_steps(engine, case, data_rank(case))
    state = client_state(case)
    engine.save_checkpoint(
        str(folder / "checkpoint"),
        client_state=state,
        exclude_frozen_parameters=case.exclude_frozen,
    )
    record_truth(
        engine,
        case,
        folder,
        facts={
            "client_state": {k: v for k, v in state.items() if isinstance(v, int | str | float)},
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "losses": losses,
            "tp_dims": tp_dims,
        },
        tensors={f"client:{k}": v for k, v in state.items() if isinstance(v, torch.Tensor)},
    )


def run_rank(case: Case, folder: Path, rank: int, task: Task) -> None:
    """Be rank `rank` of `case` (in a forked process)."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(case.world),
        LOCAL_WORLD_SIZE=str(case.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # unused: the ranks meet at a file
    )
    meeting = f"file://{folder / 'rendezvous'}"
    deepspeed.init_distributed(
        dist_backend="gloo",
        init_method=meeting,
        rank=rank,
        world_size=case.world,
        timeout=timedelta(seconds=120),
        verbose=False,
    )
    task(case, folder)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_case(case: Case, folder: Path, task: Task = train) -> None:
    """Fork the ranks of `case` and wait for them; the first failure ends the others."""
    if case.model == "hf":
        importlib.import_module("transformers.models.llama.modeling_llama")
    gc.freeze()  # the ranks collect garbage often, and need not look through all imports
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    children: dict[int, int] = {}
    for rank in range(case.world):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run_rank(case, folder, rank, task)
                status = 0
            except BaseException:  # the rank must end here whatever happened
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children[pid] = rank
    failed: list[int] = []
    while children:
        pid, status = os.wait()
        rank = children.pop(pid)
        if status != 0:
            failed.append(rank)
            for other in children:
                os.kill(other, 9)
    if failed:
        raise RuntimeError(f"case {case.name}: rank {failed[0]} ended with an error")
    (folder / "rendezvous").unlink(missing_ok=True)


def serve() -> None:
    """Make cases on request until standard input ends.

    A request is a line ``CASE<tab>FOLDER``, or ``CASE<tab>FOLDER<tab>REQUEST`` to go on from a
    checkpoint (see `resume.py`); the answer is the line ``ok`` or ``failed``. What the case prints
    goes to ``FOLDER.log``.
    """
    from tests.deepspeed_runs.resume import Request

    for module in IMPORT_BEFORE_FORK:
        importlib.import_module(module)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    for line in sys.stdin:
        name, folder, *rest = line.rstrip("\n").split("\t")
        with open(f"{folder}.log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            case = find_case(name)
            if rest:
                request = Request.from_json(rest[0])
                run_case(request.case(case), Path(folder), request)
            else:
                run_case(case, Path(folder))
        except RuntimeError as error:
            print(error, flush=True)
            answers.write("failed\n")
        else:
            answers.write("ok\n")
        answers.flush()


if __name__ == "__main__":
    serve()
