"""A pipeline of real `deepspeed.pipe` layers, with tensor-parallel blocks of its own.

The embedding is tied to the output head, so that the first and the last stage hold it; entries that are
plain functions have no layer file, so that the ids of layer files have gaps. Blocks are a norm and a
feed-forward: column-parallel, then row-parallel. Every tensor is initialised whole from the layer's
seed and then cut, so that the parts of tensor-parallel ranks join to it by construction; four ranks get 4, 4,
3 and 3 of the 14 rows.

`Twin` is the same model as a plain module, with the same names and the same arithmetic: DeepSpeed's
pipelines refuse ZeRO stages 2 and 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
)
from torch import nn
from torch.nn import functional

from tests.deepspeed_runs.cases import Case
from tests.deepspeed_runs.model import BIG_COUNTER, SEQUENCE, RMSNorm

VOCAB = 29
HIDDEN = 10
INNER = 14

TP_DIMS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
"""Dimension along which a block's parameters are cut; the others are whole on every rank."""

UNIVERSAL_INFO = {
    "universal_checkpoint_version": 0.4,
    "tp_replicated_parameter_patterns": [
        r"tied_modules.embed.weight",
        r"\d+.norm.weight",
        r"\d+.down.bias",
        r"\d+.adapter",
        r"6.weight",
    ],
    "parameter_with_row_parallelism_patterns": [r"\d+.down.weight"],
}
"""What a client with tensor parallelism of its own tells, as Megatron-DeepSpeed does."""


class _Enter(torch.autograd.Function):
    """Copy into the tensor-parallel region: gradients are summed over its ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    """Sum over the ranks of the tensor-parallel region."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class TiedEmbedding(nn.Module):
    """Embeds token ids; from hidden states it makes logits."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(99)
        self.weight = nn.Parameter(0.2 * torch.randn(VOCAB, HIDDEN, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ids (batch, length) or states (batch, length, HIDDEN)."""
        if x.dtype == torch.int64:
            return functional.embedding(x, self.weight)
        return functional.linear(x, self.weight)


def head(embedding: TiedEmbedding, x: torch.Tensor) -> torch.Tensor:
    """Logits by the tied weight; a function over a tied layer has no layer file."""
    return functional.linear(x, embedding.weight)


class Column(nn.Module):
    """Linear layer whose rows are cut over the tensor-parallel ranks."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)

    def forward(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        """Map (batch, length, HIDDEN) to this rank's part of (batch, length, INNER)."""
        if group is not None:
            x = _Enter.apply(x, group)
        return functional.linear(x, self.weight, self.bias)


class Row(nn.Module):
    """Linear layer whose columns are cut over the tensor-parallel ranks; the bias is whole."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)

    def forward(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        """Map this rank's part of (batch, length, INNER) to (batch, length, HIDDEN)."""
        out = functional.linear(x, self.weight)
        if group is not None:
            out = _Leave.apply(out, group)
        return out + self.bias


class Block(nn.Module):
    """Norm, column-parallel and row-parallel linear, with a residual."""

    def __init__(self, index: int, group: Any, *, frozen: bool) -> None:
        super().__init__()
        self.group = group
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        generator = torch.Generator().manual_seed(100 + index)
        whole = {
            "up.weight": torch.randn(INNER, HIDDEN, generator=generator),
            "up.bias": torch.randn(INNER, generator=generator),
            "down.weight": torch.randn(HIDDEN, INNER, generator=generator),
            "down.bias": torch.randn(HIDDEN, generator=generator),
        }
        parts = {
            name: 0.2
            * (value.tensor_split(size, TP_DIMS[name])[rank] if name in TP_DIMS else value)
            for name, value in whole.items()
        }
        self.norm = RMSNorm(HIDDEN)
        self.up = Column(parts["up.weight"], parts["up.bias"])
        self.down = Row(parts["down.weight"], parts["down.bias"])
        for name, parameter in self.named_parameters():
            # what DeepSpeed asks when it sums the gradient norm over ranks
            parameter.model_parallel = name in TP_DIMS  # type: ignore[attr-defined]
        self.adapter = (
            nn.Parameter(torch.linspace(-1, 1, 7), requires_grad=False) if frozen else None
        )
        self.register_buffer("seen", torch.tensor([BIG_COUNTER, index], dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, HIDDEN) to the same shape."""
        h = self.down(torch.tanh(self.up(self.norm(x), self.group)), self.group)
        if self.adapter is not None:
            h = h + 0.01 * self.adapter.sum()
        out: torch.Tensor = x + h
        return out


def scale(x: torch.Tensor) -> torch.Tensor:
    """An entry without parameters: it has an id but no layer file."""
    return 1.5 * x


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the labels."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def build_pipeline(case: Case) -> PipelineModule:
    """Return the pipeline of `case`: eight entries."""
    group = None
    if case.tp > 1:
        topology: Any = PipeModelDataParallelTopology(case.pp, case.tp, case.dp)
        for ranks in topology.get_axis_comm_lists("model"):
            made = dist.new_group(ranks)
            group = made if dist.get_rank() in ranks else group
    else:
        topology = PipeDataParallelTopology(case.pp, case.dp)
    # With a function of its own the head has no layer file; without one it has.
    forward_fn = head if case.tied == "forward" else None
    layers = [
        TiedLayerSpec("embed", TiedEmbedding),
        scale,
        LayerSpec(Block, 2, group, frozen=False),
        LayerSpec(Block, 3, group, frozen=case.frozen),
        scale,
        LayerSpec(Block, 5, group, frozen=False),
        LayerSpec(RMSNorm, HIDDEN),
        TiedLayerSpec("embed", TiedEmbedding, forward_fn=forward_fn),
    ]
    return PipelineModule(
        layers, topology=topology, loss_fn=loss_fn, partition_method=case.partition
    )


class Twin(nn.Module):
    """The pipeline's layers in a plain module, under the names that `PipelineModule` gives them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({"embed": TiedEmbedding()})
        for index in (2, 3, 5):
            self.add_module(str(index), Block(index, None, frozen=case.frozen and index == 3))
        self.add_module("6", RMSNorm(HIDDEN))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of token ids and labels (batch, length)."""
        layers = self._modules
        x = scale(self.tied_modules["embed"](tokens))
        x = scale(layers["3"](layers["2"](x)))  # type: ignore[misc]
        x = layers["6"](layers["5"](x))  # type: ignore[misc]
        return loss_fn(self.tied_modules["embed"](x), labels)


def batches(step: int, samples: Iterable[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and labels of a step's micro-batches, one sample each."""
    for sample in samples:
        generator = torch.Generator().manual_seed(1000 * step + sample)
        tokens = torch.randint(VOCAB, (1, SEQUENCE + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def tp_dims(module: nn.Module, case: Case) -> dict[str, int | None]:
    """Return the dimension along which each of this stage's parameters is cut."""
    if case.tp == 1:
        return {}
    return {name: TP_DIMS.get(name.partition(".")[2]) for name, _ in module.named_parameters()}
