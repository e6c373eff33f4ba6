"""The training recipe that DeepSpeed runs and a plain torch reference share: data and optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.deepspeed_runs.cases import Case
from tests.deepspeed_runs.model import SEQUENCE

VOCABULARY = {"llama": 53, "ulysses": 53, "hf": 40, "tiny": 3, "wide": 15}
CLIP = 1.0  # global gradient norm


def parameter_groups(model: nn.Module, case: Case) -> list[dict[str, Any]]:
    """Return the usual two groups: matrices decay, vectors do not and learn at another rate."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if case.grouping == "reversed":
        trainable.reverse()
    matrices = [(name, p) for name, p in trainable if p.dim() > 1]
    vectors = [(name, p) for name, p in trainable if p.dim() <= 1]
    if case.grouping == "crossed":
        matrices, vectors = matrices[1::2] + vectors[::2], matrices[::2] + vectors[1::2]
    if case.single_group:
        groups: list[dict[str, Any]] = [{"params": trainable, "weight_decay": 0.1, "lr": 1e-2}]
    else:
        groups = [
            {"params": matrices, "weight_decay": 0.1, "lr": 1e-2},
            {"params": vectors, "weight_decay": 0.0, "lr": 3e-2},
        ]
    if not case.named:
        groups = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
    return groups


def build_optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """Return the torch optimizer of `case`."""
    groups = parameter_groups(model, case)
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=0.9)
    if case.optimizer == "rmsprop":
        return torch.optim.RMSprop(groups, centered=True)
    if case.optimizer == "fused":
        return fused_adam(groups)
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-7)


def fused_adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer that DeepSpeed takes for its FusedAdam, whose kernels need a GPU.

    All but the arithmetic of a step is DeepSpeed's: `FP16_Optimizer` and the state's schema.
    """
    from deepspeed.ops.adam import FusedAdam

    class PlainFusedAdam(FusedAdam):
        def __init__(self) -> None:
            defaults = {"lr": 1e-2, "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-7}
            torch.optim.Optimizer.__init__(self, groups, {**defaults, "weight_decay": 0.0})
            self.set_grad_none = True

        @torch.no_grad()
        def step(self, *_: Any, **__: Any) -> None:
            for group in self.param_groups:
                first, second = group["betas"]
                group.setdefault("step", 1)  # and never counted, as in the original
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        zeros = torch.zeros_like(p)
                        state.update(step=0, exp_avg=zeros, exp_avg_sq=zeros.clone())
                    state["step"] += 1
                    state["exp_avg"].lerp_(p.grad, 1 - first)
                    state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
                    p.addcdiv_(state["exp_avg"], denominator, value=-group["lr"])

    return PlainFusedAdam()


def build_scheduler(optimizer: torch.optim.Optimizer | None, case: Case) -> Any:
    """Return a torch scheduler, or None where DeepSpeed's own or none is used."""
    if case.scheduler == "lambda" and optimizer is not None:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return None


def batch(case: Case, step: int, dp_rank: int) -> torch.Tensor:
    """Return token ids (1, SEQUENCE + 1), different on every step and data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    return torch.randint(VOCABULARY[case.model], (1, SEQUENCE + 1), generator=generator)


def loss_of(model: Any, tokens: torch.Tensor, case: Case) -> torch.Tensor:
    """Return the training loss."""
    if case.model == "hf":
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    else:
        loss = model(tokens)
    return loss
