"""Go on with a run in unmodified DeepSpeed: from a checkpoint, or without ever having stopped.

A resumed run starts from a model whose every parameter and buffer was overwritten with noise, so that
nothing that the checkpoint fails to restore can be right by chance. What the engine holds after loading
is recorded by its own getters (`truth.py`). Then both kinds of run do the same further steps on the same
global batches, whatever the number of ranks.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.deepspeed_runs.cache import Run, ask_trainer
from tests.deepspeed_runs.cases import MICRO_BATCHES, Case, find_case

__all__ = ["Request", "Resumed", "continue_run", "resume_run", "train_run"]

SAMPLES = 6  # of a global batch without micro-batches: as many for each of 1, 2, 3 and 6 ranks


@dataclass(frozen=True, slots=True)
class Request:
    """What to do: ``load`` is the folder to resume from; None trains from the start instead.

    The layout (number of ranks, degrees, ZeRO stage, dtype, further ZeRO and other options) is that of the
    resuming run. ``model`` is that of the resuming run where it is not the case's: a plain twin of a
    pipeline, or a pipeline; ``wrap`` names one of `renamed.WRAPS`, the model's other form; ``thaw`` names
    parameters that the resuming run trains though the case froze them. ``node`` is how many ranks share a
    machine, where these are several: what counts for `LOCAL_RANK`. ``tag`` is asked for as Accelerate does
    it, and ``trainer`` loads by the function of transformers' Trainer. ``save`` is where the engine saves before
    the further steps.
    """

    load: str | None
    world: int = 1
    stage: int = 1
    dtype: str = "fp32"
    tp: int = 1
    pp: int = 1
    sp: int = 1
    partition: str = "uniform"
    model: str | None = None
    wrap: str = ""
    thaw: tuple[str, ...] = ()
    node: int | None = None
    tag: str | None = None
    trainer: bool = False
    further: int = 5
    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    save: str | None = None

    @classmethod
    def from_json(cls, text: str) -> Request:
        return cls(**json.loads(text))

    def case(self, case: Case) -> Case:
        """`case` with this run's layout, and global batches of as many samples."""
        layout: dict[str, Any] = {
            "world": self.world,
            "stage": self.stage,
            "dtype": self.dtype,
            "tp": self.tp,
            "pp": self.pp,
            "sp": self.sp,
            "partition": self.partition,
            "model": self.model or case.model,
        }
        config = {**case.config, **self.config}
        if self.dtype == "fp16":  # in the words of the scripts, an fp32 run with a section more
            layout["dtype"] = "fp32"
            config["fp16"] = {**config.get("fp16", {}), "enabled": True}
        resuming = replace(case, **layout, zero={**case.zero, **self.zero})
        if case.micro_batched:
            config["gradient_accumulation_steps"] = len(share(case, resuming, 0))
        return replace(resuming, config=config)

    def __call__(self, case: Case, folder: Path) -> None:
        """Be one rank of it."""
        import torch
        import torch.distributed as dist

        from tests.deepspeed_runs import train

        source = find_case(case.name)
        if self.node is not None:
            machine = {"LOCAL_RANK": dist.get_rank() % self.node, "LOCAL_WORLD_SIZE": self.node}
            os.environ.update({key: str(value) for key, value in machine.items()})
        model = train.build(case)
        if self.wrap:
            from tests.deepspeed_runs.renamed import WRAPS

            model = WRAPS[self.wrap](model)
        for fqn in self.thaw:
            model.get_parameter(fqn).requires_grad_(True)
        if self.load is not None:
            self._prepare(model)
        initial = train.values(model)
        if self.dtype == "fp16":
            _let_cpus_compute_fp16()
        engine, scheduler = train.start_engine(model, case)
        tp_dims = train.find_dims(engine, case, initial)
        client: dict[str, Any] = {}
        if self.load is None:
            train.train_steps(engine, case, train.data_rank(case))
        else:
            client = self._load(engine, case)
        if self.load is not None or self.save is not None:
            facts = {
                "client_state": {
                    k: v for k, v in client.items() if isinstance(v, int | str | float)
                },
                "scheduler": scheduler.state_dict() if scheduler is not None else None,
                "scaler": _scaler(engine.optimizer),
                "tp_dims": tp_dims,
            }
            train.record_truth(engine, case, folder, facts=facts, tensors={})
        if self.save is not None:
            # with the client's entries DeepSpeed hands back some of its own, and refuses to take those again
            kept = {key: client[key] for key in train.client_state(case) if key in client}
            engine.save_checkpoint(self.save, client_state=kept)
        losses = []
        samples = share(source, case, train.data_rank(case))
        for step in range(self.further):
            loss = train.train_step(engine, case, 100 + step, samples).detach().double().cpu()
            dist.all_reduce(loss)
            losses.append(loss.item() / dist.get_world_size())
        if dist.get_rank() == 0:
            (folder / "losses.json").write_text(json.dumps(losses))
        torch.distributed.barrier()

    def _prepare(self, model: Any) -> None:
        """Change the model before the engine gets it: nothing of it may survive the loading."""
        _overwrite(model)

    def _load(self, engine: Any, case: Case) -> dict[str, Any]:
        """Load into the engine of `case`, and return the client's state."""
        if self.trainer:
            from transformers.integrations.deepspeed import deepspeed_load_checkpoint

            deepspeed_load_checkpoint(engine, self.load)
            return {}
        found, client = engine.load_checkpoint(self.load, self.tag)
        if found is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {self.load}")
        return dict(client)


def share(source: Case, case: Case, rank: int) -> range:
    """Return the samples of a data-parallel rank of `case`, of the global batch of a `source` run.

    With micro-batches (of one sample) the batch is as large as the source's own was.
    """
    samples = MICRO_BATCHES * source.dp if source.micro_batched else SAMPLES
    size = samples // (case.dp // case.sp)
    return range(rank * size, (rank + 1) * size)


def _overwrite(model: Any) -> None:
    """Noise instead of every value."""
    import torch

    torch.manual_seed(99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            owner = model.get_submodule(name.rpartition(".")[0])
            if name.rpartition(".")[2] in owner._non_persistent_buffers_set:
                continue  # no checkpoint has these; the model makes them
            if buffer.is_floating_point():
                buffer.copy_(torch.randn_like(buffer))
            else:
                buffer.zero_()


def _scaler(optimizer: Any) -> dict[str, Any]:
    """The live loss scaler of any of DeepSpeed's classes."""
    found = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    plain = vars(found) if found is not None else {}
    return {key: value for key, value in plain.items() if isinstance(value, int | float)}


def _let_cpus_compute_fp16() -> None:
    """DeepSpeed asks whether this CPU has instructions for fp16; torch computes it without, too."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


@dataclass(frozen=True, slots=True)
class Resumed:
    """A resumed run: losses of its steps, and what the engine held before the first of them."""

    losses: tuple[float, ...]
    run: Run


def resume_run(name: str, load: Path, folder: Path, **layout: Any) -> Resumed:
    """Resume case `name` from the checkpoint in `load`, with the layout given (see `Request`)."""
    request = Request(load=str(load), **layout)
    ask_trainer(name, folder, json.dumps(asdict(request)))
    run = Run(case=request.case(find_case(name)), path=load, truth_path=folder)
    return Resumed(tuple(json.loads((folder / "losses.json").read_text())), run)


def train_run(name: str, folder: Path, **layout: Any) -> Resumed:
    """Train case `name` in another layout, save to ``folder/checkpoint``, and go on (see `Request`)."""
    folder.mkdir()
    request = Request(load=None, save=str(folder / "checkpoint"), **layout)
    ask_trainer(name, folder / "truth", json.dumps(asdict(request)))
    case, truth = request.case(find_case(name)), folder / "truth"
    run = Run(case=case, path=folder / "checkpoint", truth_path=truth)
    return Resumed(tuple(json.loads((truth / "losses.json").read_text())), run)


@functools.cache
def continue_run(name: str, further: int = 5) -> tuple[float, ...]:
    """Losses of the steps that the original engine of case `name` does after its save."""
    case = find_case(name)
    layout = ("world", "stage", "dtype", "tp", "pp", "sp", "partition")
    own = {name: getattr(case, name) for name in layout}
    request = Request(load=None, further=further, **own)
    with tempfile.TemporaryDirectory(prefix=f"ucpstore-{os.getpid()}-") as temporary:
        folder = Path(temporary) / "run"
        ask_trainer(name, folder, json.dumps(asdict(request)))
        return tuple(json.loads((folder / "losses.json").read_text()))
