"""Checkpoints in DeepSpeed's schema without a training run, for sizes that no run here can afford.

A plain second implementation of DeepSpeed's layout formulas on whole torch tensors: join, pad, split.
It shares no code with the reader.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Checkpoint:
    """What to write; every group is a dict of parameters in flat order.

    `values` maps a state (``fp32``, ``exp_avg``, ...) to the tensors of all parameters.
    """

    groups: list[dict[str, tuple[int, ...]]]
    ranks: int
    stage: int = 1
    states: Sequence[str] = ("exp_avg", "exp_avg_sq")
    dtype: torch.dtype = torch.float32
    align: bool = False
    sub_group_size: int = 10**9
    prefix: str = ""
    seed: int = 0
    declared_paddings: Sequence[Sequence[int]] | None = None
    steps: Sequence[float] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Tensors] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.values = {
            state: {
                name: torch.randn(shape, generator=generator)
                for group in self.groups
                for name, shape in group.items()
            }
            for state in ("fp32", *self.states)
        }

    def write(self, folder: Path, tag: str = "global_step7") -> Path:
        """Write a `save_dir`; returns the folder of the tag."""
        target = folder / tag
        target.mkdir(parents=True)
        (folder / "latest").write_text(tag)
        if self.stage == 3:
            self._write_stage3(target)
        else:
            self._write_stage12(target)
        return target

    def _write_stage12(self, folder: Path) -> None:
        flats = [self._flatten(group) for group in self.groups]
        module = OrderedDict(
            (name, self.values["fp32"][name].to(torch.bfloat16))
            for group in self.groups
            for name in group
        )
        torch.save(self._model_file(module, self.groups), folder / "mp_rank_00_model_states.pt")
        for rank in range(self.ranks):
            name = f"{self.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save(self._stage12_file(flats, rank), folder / name)

    def _flatten(self, group: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Join the parameters of a group, pad, and split over the ranks."""
        pads = []
        cursor = 0
        for position, shape in enumerate(group.values()):
            cursor += math.prod(shape)
            itemsize = torch.empty(0, dtype=self.dtype).element_size()
            last = position == len(group) - 1
            pad = 0 if last or not self.align else -cursor % (16 // math.gcd(16, itemsize))
            pads.append(pad)
            cursor += pad
        parts: dict[str, Sequence[torch.Tensor]] = {}
        for state, tensors in self.values.items():
            pieces = []
            for name, pad in zip(group, pads, strict=True):
                pieces += [tensors[name].flatten(), torch.zeros(pad)]
            flat = torch.cat([*pieces, torch.zeros(-cursor % (2 * self.ranks))])
            parts[state] = flat.to(self.dtype).chunk(self.ranks)
        return {"parts": parts, "numel": cursor, "pads": pads}

    def _stage12_file(self, flats: list[dict[str, Any]], rank: int) -> dict[str, Any]:
        masters, paddings, state, groups, mappings = [], [], {}, [], []
        for index, (group, flat) in enumerate(zip(self.groups, flats, strict=True)):
            mine = flat["parts"]["fp32"][rank]
            left = rank * len(mine)
            true = max(0, min(len(mine), left + len(mine) - flat["numel"]))
            declared = (
                true if self.declared_paddings is None else self.declared_paddings[index][rank]
            )
            paddings.append(declared)
            masters.append(mine[: len(mine) - declared].clone())
            state[index] = {name: flat["parts"][name][rank].clone() for name in self.states}
            step = 7.0 if self.steps is None else self.steps[index]
            state[index]["step"] = torch.tensor(step)
            groups.append({"lr": 0.1 * (index + 1), "weight_decay": 0.01, "params": [index]})
            mappings.append(self._mapping(group, flat["pads"], left, left + len(mine)))
        body = {
            **self._common_entries(),
            "clip_grad": 1.0,
            "base_optimizer_state": {"state": state, "param_groups": groups},
            "single_partition_of_fp32_groups": masters,
            "zero_stage": stage_member(self.stage),
            "group_paddings": paddings,
            "param_alignment_paddings": [flat["pads"] for flat in flats],
            "partition_count": [self.ranks] * len(self.groups),
            "ds_version": "0.19.8",
            "param_slice_mappings": mappings,
            **self.optim,
        }
        body = {key: value for key, value in body.items() if value is not ...}
        return {"optimizer_state_dict": body, "ds_config": {}, "ds_version": "0.19.8"}

    def _mapping(
        self, group: Mapping[str, tuple[int, ...]], pads: Sequence[int], left: int, right: int
    ) -> OrderedDict[str, Any]:
        from deepspeed.utils.tensor_fragment import fragment_address

        found: OrderedDict[str, Any] = OrderedDict()
        at = 0
        for (name, shape), pad in zip(group.items(), pads, strict=True):
            first, last = max(at, left), min(at + math.prod(shape), right)
            if first < last:
                found[name] = fragment_address(start=first - left, numel=last - first)
            at += math.prod(shape) + pad
        return found

    def sub_groups(self) -> list[list[dict[str, tuple[int, ...]]]]:
        """Per group, its sub-groups: closed as soon as they hold `sub_group_size` elements a rank."""
        found = []
        for group in self.groups:
            inside: list[dict[str, tuple[int, ...]]] = [{}]
            size = 0
            for name, shape in group.items():
                if size >= self.sub_group_size:
                    inside.append({})
                    size = 0
                inside[-1][name] = shape
                size += math.ceil(math.prod(shape) / self.ranks)
            found.append(inside)
        return found

    def _write_stage3(self, folder: Path) -> None:
        sub_groups = self.sub_groups()
        everything = [sub for group in sub_groups for sub in group]
        placeholder = torch.empty(0, dtype=torch.bfloat16)
        module = OrderedDict((name, placeholder) for group in self.groups for name in group)
        for rank in range(self.ranks):
            start = f"zero_pp_rank_{rank}_mp_rank_00"
            torch.save(self._model_file(module, everything), folder / f"{start}_model_states.pt")
            masters, state, groups = [], {}, []
            for index, sub in enumerate(everything):
                parts = {
                    name: torch.cat([self._part(tensors[p], rank) for p in sub])
                    for name, tensors in self.values.items()
                }
                masters.append(parts.pop("fp32"))
                step = 7.0 if self.steps is None else self.steps[index]
                state[index] = {**parts, "step": torch.tensor(step)}
            first = 0
            for index, group in enumerate(sub_groups):
                members = list(range(first, first + len(group)))
                groups.append({"lr": 0.1 * (index + 1), "weight_decay": 0.01, "params": members})
                first += len(group)
            body = {
                "zero_stage": stage_member(3),
                **self._common_entries(),
                "partition_count": self.ranks,
                "optimizer_state_dict": {"state": state, "param_groups": groups},
                "fp32_flat_groups": masters,
                **self.optim,
            }
            torch.save(
                {"optimizer_state_dict": body, "ds_config": {}, "ds_version": "0.19.8"},
                folder / f"{self.prefix}{start}_optim_states.pt",
            )

    def _part(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """One rank's part of a parameter; what lies past its end is garbage, never zeros."""
        width = math.ceil(tensor.numel() / self.ranks)
        part = tensor.flatten()[rank * width : (rank + 1) * width]
        return torch.cat([part, torch.full((width - len(part),), math.nan)]).to(self.dtype)

    def _common_entries(self) -> dict[str, Any]:
        from deepspeed.runtime.fp16.loss_scaler import LossScaler

        return {
            "loss_scaler": LossScaler(scale=1.0),
            "dynamic_loss_scale": False,
            "overflow": False,
        }

    def _model_file(
        self,
        module: Mapping[str, torch.Tensor],
        shapes: Sequence[Mapping[str, tuple[int, ...]]],
    ) -> dict[str, Any]:
        content = {
            "module": module,
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [
                OrderedDict((name, torch.Size(shape)) for name, shape in group.items())
                for group in shapes
            ],
            "frozen_param_shapes": OrderedDict() if self.stage > 1 else None,
            "frozen_param_fragments": OrderedDict() if self.stage > 1 else None,
            "shared_params": {},
            "lr_scheduler": {"last_batch_iteration": 6},
            "skipped_steps": 0,
            "global_steps": 7,
            "global_samples": 56,
            "dp_world_size": self.ranks,
            "mp_world_size": 1,
            "ds_config": {"train_batch_size": 8},
            "ds_version": "0.19.8",
            **self.model,
        }
        return {key: value for key, value in content.items() if value is not ...}


def stage_member(stage: int) -> Any:
    """The enum member that DeepSpeed pickles."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return ZeroStageEnum(stage)


def edit(path: Path, change: Any, **options: Any) -> None:
    """Load a file with torch, let `change` alter the object, and save it again."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path, **options)
