"""DeepSpeed's own sequence parallelism (Ulysses) around the attention of `model.py`.

Ranks of a group hold a slice of every sequence; around the attention they exchange slices for heads. The
weights are the same on all of them, and ZeRO shards over all ranks of the data- and sequence-parallel
groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

from tests.deepspeed_runs.model import SEQUENCE, Attention, attend

LENGTH = SEQUENCE - 1
"""Length of a sequence, which every number of ranks used here divides."""


def mpu() -> Any:
    """Return what DeepSpeed takes as ``mpu``."""
    return parallel_state_sp


class _Exchange:
    """Calls `DistributedAttention`, a module, without being a child of the model."""

    def __init__(self, group: Any) -> None:
        self.around = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)  # type: ignore[no-untyped-call]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
        return self.around(q, k, v, 0, None, *rest)


def share_sequences(model: nn.Module, ranks: int) -> None:
    """Make groups of `ranks` share sequences, in `model`."""
    parallel_state_sp.initialize_sequence_parallel(ranks)
    exchange = _Exchange(parallel_state_sp.get_sequence_parallel_group())  # type: ignore[no-untyped-call]
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = exchange


def loss(engine: Any, tokens: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the loss of this rank's slice of the tokens (batch, SEQUENCE + 1)."""
    width = LENGTH // ranks
    start = dist.get_rank() % ranks * width
    mean: torch.Tensor = engine(
        tokens[:, start : start + width], tokens[:, start + 1 : start + width + 1]
    )
    return mean
