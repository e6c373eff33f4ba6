"""How stock tools bring a checkpoint into an engine of another layout; see `benchmarks/stock.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deepspeed_runs.cases import Case, find_case
from tests.deepspeed_runs.resume import Request, share

__all__ = ["DCP_ROUTES", "NothingLoadedError", "Trial", "to_universal", "train_and_save"]

DCP_ROUTES = ("dcp", "dcp_by_rank", "dcp_get_state_dict")


class NothingLoadedError(RuntimeError):
    """`load_checkpoint` returned None: DeepSpeed only logs a warning, and training would start anew."""


@dataclass(frozen=True, slots=True)
class Trial(Request):
    """A resumed run whose checkpoint comes in by a stock tool.

    Attributes
    ----------
    name : str
        The case.
    route : str
        ``load`` for the engine's own `load_checkpoint`, or one of `DCP_ROUTES`.
    noise : bool
        Whether the model is overwritten with noise first. Otherwise it is as the source's was when it
        started, which hides what a tool does not restore and training does not change. DCP loads into what
        a step has made: there only frozen parameters and buffers are overwritten, after that step.
    """

    name: str = ""
    route: str = "load"
    noise: bool = True

    def _prepare(self, model: Any) -> None:
        if self.noise and self.route not in DCP_ROUTES:
            Request._prepare(self, model)

    def _load(self, engine: Any, case: Case) -> dict[str, Any]:
        from tests.deepspeed_runs import train

        if self.route in DCP_ROUTES:
            source = find_case(self.name)
            # Lazy optimizers have no states before a step, and DCP loads only what it is asked for.
            train.train_step(engine, case, 0, share(source, case, train.data_rank(case)))
            if self.noise:
                with gathered(engine):
                    self._overwrite_untrained(engine.module)
            return load_dcp(engine, self.route, Path(str(self.load)))
        found, client = engine.load_checkpoint(self.load)
        if found is None:
            raise NothingLoadedError("load_checkpoint returned None, with a warning in the log")
        return dict(client)

    def _overwrite_untrained(self, model: Any) -> None:
        trained = {p: p.detach().clone() for p in model.parameters() if p.requires_grad}
        Request._prepare(self, model)
        for parameter, value in trained.items():
            parameter.data.copy_(value)


# ------------------------------------------------------------------- DCP


def client_part(engine: Any) -> dict[str, Any]:
    """What a user of DCP has to keep beside model and optimizer."""
    return {
        "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler else {},
        "counters": {
            name: getattr(engine, name)
            for name in ("global_steps", "global_samples", "skipped_steps", "micro_steps")
        },
    }


def states_of(engine: Any, route: str) -> dict[str, Any]:
    """Return the state dict that is saved, or loaded into.

    ``dcp`` passes the engine's own state dicts; ``dcp_by_rank`` gives every rank keys of its own, as plain
    tensors under one key are taken for replicas; ``dcp_get_state_dict`` uses torch's own helper, which names
    optimizer states by parameters, on the optimizer inside DeepSpeed's (which is none to it).
    """
    if route == "dcp_get_state_dict":
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(engine.module, inner_optimizer(engine))
        return {"model": model, "optimizer": optimizer}
    with gathered(engine):
        model = {name: value.clone() for name, value in engine.module.state_dict().items()}
    own = {"model": model, "optimizer": engine.optimizer.state_dict()}
    if route == "dcp_by_rank":
        import torch.distributed as dist

        return {f"rank{dist.get_rank()}": own}
    return own


def gathered(engine: Any) -> AbstractContextManager[Any]:
    """Let the parameters be whole, which ZeRO-3 shards; what the first rank changes is kept."""
    import deepspeed

    parameters = list(engine.module.parameters())
    sharded = any(hasattr(parameter, "ds_id") for parameter in parameters)
    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        parameters, modifier_rank=0, enabled=sharded
    )
    return context


def inner_optimizer(engine: Any) -> Any:
    """Return the torch optimizer, which ZeRO makes hold flat partitions."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def save_dcp(engine: Any, case: Case, route: str, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from tests.deepspeed_runs import train

    client = {k: v for k, v in train.client_state(case).items() if isinstance(v, int | str | float)}
    states = states_of(engine, route)
    dcp.save({**states, "rest": {**client_part(engine), "client": client}}, checkpoint_id=path)


def load_dcp(engine: Any, route: str, path: Path) -> dict[str, Any]:
    """Load into the engine what `save_dcp` saved; return the client's state."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    client = {"iteration": 0, "tokens": 0, "note": ""}
    states = states_of(engine, route)
    rest = {**client_part(engine), "client": client}
    dcp.load({**states, "rest": rest}, checkpoint_id=path)
    if route == "dcp_get_state_dict":
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            engine.module,
            inner_optimizer(engine),
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )
    else:
        own = states.get(f"rank{dist.get_rank()}", states)
        with gathered(engine):
            engine.module.load_state_dict(own["model"])
        load_optimizer(engine.optimizer, own["optimizer"])
    if engine.lr_scheduler:
        engine.lr_scheduler.load_state_dict(rest["scheduler"])
    for name, value in rest["counters"].items():
        setattr(engine, name, value)
    return dict(rest["client"])


def load_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load as DeepSpeed's engine does: its ZeRO optimizers take the states of all ranks and pick theirs."""
    import torch
    import torch.distributed as dist

    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.load_state_dict(dict(state))
    elif hasattr(optimizer, "dp_process_group"):
        size = dist.get_world_size(optimizer.dp_process_group)
        optimizer.load_state_dict([state] * size, load_from_fp32_weights=True)
    else:
        optimizer.load_state_dict(state)
    if hasattr(optimizer, "checkpoint_event_epilogue"):
        optimizer.checkpoint_event_epilogue()


def train_and_save(route: str, path: Path) -> Callable[[Case, Path], None]:
    """Be a rank of the source's run, and save with DCP in the end."""
    from tests.deepspeed_runs import train

    def task(case: Case, folder: Path) -> None:
        engine, _ = train.start_engine(train.build(case), case)
        train.train_steps(engine, case, train.data_rank(case))
        save_dcp(engine, case, route, path)

    return task


# ------------------------------------------------------------------- DeepSpeed universal


def to_universal(source: Path, target: Path, flags: Sequence[str]) -> None:
    """Run DeepSpeed's converter, unmodified, in this process."""
    from deepspeed.checkpoint import ds_to_universal

    sys.argv = ["ds_to_universal", "--input_folder", str(source), "--output_folder", str(target)]
    sys.argv += ["--num_extract_workers", "1", "--num_merge_workers", "1", *flags]
    ds_to_universal.main(ds_to_universal.parse_arguments())
