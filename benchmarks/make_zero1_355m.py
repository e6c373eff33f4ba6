"""Write a ZeRO-1 bf16 checkpoint in DeepSpeed's schema, with random values, without training.

Four real ranks of 355 million parameters do not fit into a small machine, so the files are written one rank
at a time from DeepSpeed's own classes and layout rules (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and
runtime/engine.py). ``python -m benchmarks.check_schema`` compares every key of a small checkpoint made here
with one that DeepSpeed saved. At most one rank's partitions and the bf16 weights are in memory.

``python -m benchmarks.make_zero1_355m OUT [--model 355m] [--dp 4]``
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from benchmarks.dims import MODELS, STEPS, ModelDims, ds_config, llama, param_groups

TAG = f"global_step{STEPS}"


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """One param group as ZeRO-1 flattens it over ``dp`` ranks (stage_1_and_2.py:392-530).

    Attributes
    ----------
    hyper : dict
        Hyper-parameters that differ between groups.
    shapes : OrderedDict of str to torch.Size
        Parameters in flat order.
    dp : int
        Ranks that share the group.
    """

    hyper: dict[str, Any]
    shapes: OrderedDict[str, torch.Size]
    dp: int

    @property
    def numel(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def partition(self) -> int:
        """Elements of one rank, padding included: the whole is a multiple of 2 * dp."""
        return math.ceil(self.numel / (2 * self.dp)) * 2

    def padding(self, rank: int) -> int:
        """Elements at the end of the rank's partition that belong to no parameter."""
        return min(max((rank + 1) * self.partition - self.numel, 0), self.partition)

    def mapping(self, rank: int) -> OrderedDict[str, fragment_address]:
        """What the rank's partition holds of which parameter: ``start`` counts from the partition's begin."""
        first, stop = rank * self.partition, (rank + 1) * self.partition
        fragments: OrderedDict[str, fragment_address] = OrderedDict()
        offset = 0
        for name, shape in self.shapes.items():
            begin, end = max(offset, first), min(offset + shape.numel(), stop)
            if begin < end:
                fragments[name] = fragment_address(numel=end - begin, start=begin - first)
            offset += shape.numel()
        return fragments


def write_checkpoint(out: Path, dims: ModelDims, dp: int) -> None:
    """Write ``out/latest`` and ``out/global_step2/`` with ``dp`` optimizer files and one model file."""
    with torch.device("meta"):
        model = llama(dims)
    groups = [
        FlatGroup(hyper, OrderedDict((name, p.shape) for name, p in params.items()), dp)
        for hyper, params in param_groups(model)
    ]
    folder = out / TAG
    folder.mkdir(parents=True)
    halves = [torch.zeros(group.partition * dp, dtype=torch.bfloat16) for group in groups]
    for rank in range(dp):
        state = {
            "optimizer_state_dict": _optimizer_state(groups, rank, halves),
            "ds_config": ds_config(),
            "ds_version": deepspeed.__version__,
        }
        torch.save(state, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        del state
    torch.save(_model_state(model, groups, halves), folder / "mp_rank_00_model_states.pt")
    for script in ("zero_to_fp32.py", "zero_to_torch.py"):
        source = Path(deepspeed.__file__).parent / "utils" / script
        shutil.copyfile(source, out / script)
        (out / script).chmod(0o744)
    (out / "latest").write_text(TAG)


def _optimizer_state(
    groups: list[FlatGroup], rank: int, halves: list[torch.Tensor]
) -> dict[str, Any]:
    """`DeepSpeedZeroOptimizer.state_dict()` of one rank; its part of the bf16 weights goes to ``halves``."""
    masters, flats = [], []
    for index, group in enumerate(groups):
        generator = torch.Generator().manual_seed(1000 * index + rank)
        used = group.partition - group.padding(rank)
        master, moment, square = (torch.zeros(group.partition) for _ in range(3))
        master[:used].normal_(0.0, 0.02, generator=generator)
        moment[:used].normal_(0.0, 1e-3, generator=generator)
        square[:used].normal_(0.0, 1e-3, generator=generator).square_()
        halves[index].narrow(0, rank * group.partition, group.partition).copy_(master)
        flat = torch.nn.Parameter(master)
        flats.append(
            (flat, {"step": torch.tensor(float(STEPS)), "exp_avg": moment, "exp_avg_sq": square})
        )
        # As DeepSpeed cuts the padding off: a view that still wants gradients, of the whole storage.
        masters.append(flat[:used])
    return {
        "loss_scaler": LossScaler(scale=1.0),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": ds_config()["gradient_clipping"],
        "base_optimizer_state": _adam(groups, flats).state_dict(),
        "single_partition_of_fp32_groups": masters,
        "zero_stage": ZeroStageEnum.optimizer_states,
        "group_paddings": [group.padding(rank) for group in groups],
        "param_alignment_paddings": [[0] * len(group.shapes) for group in groups],
        "partition_count": [group.dp for group in groups],
        "ds_version": deepspeed.__version__,
        "param_slice_mappings": [group.mapping(rank) for group in groups],
    }


def _adam(
    groups: list[FlatGroup], flats: list[tuple[torch.nn.Parameter, dict[str, Any]]]
) -> torch.optim.AdamW:
    """The rank's AdamW: one flat parameter per group, with the learning rate of the scheduler's last step."""
    pairs = zip(flats, groups, strict=True)
    optimizer = torch.optim.AdamW(
        [{"params": [flat], **group.hyper} for (flat, _), group in pairs],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    scheduler = WarmupLR(optimizer, **ds_config()["scheduler"]["params"])
    for _ in range(STEPS):
        scheduler.step()
    for flat, state in flats:
        optimizer.state[flat] = state
    return optimizer


def _model_state(
    model: torch.nn.Module, groups: list[FlatGroup], halves: list[torch.Tensor]
) -> dict[str, Any]:
    """`DeepSpeedEngine._common_checkpoint_state()`: the weights are views of each group's flat bf16 buffer."""
    views: dict[str, torch.Tensor] = {}
    for group, flat in zip(groups, halves, strict=True):
        offset = 0
        for name, shape in group.shapes.items():
            views[name] = flat.narrow(0, offset, shape.numel()).view(shape)
            offset += shape.numel()
    first_name: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = first_name.setdefault(id(parameter), name)
        if canonical != name:
            shared[name] = canonical
    module = model.state_dict()  # keeps the order and torch's _metadata
    for name in module:
        module[name] = views[shared.get(name, name)]
    dp = groups[0].dp
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [group.shapes for group in groups],
        "frozen_param_shapes": None,
        "shared_params": shared,
        "frozen_param_fragments": None,
        "lr_scheduler": {"last_batch_iteration": STEPS - 1},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": STEPS,
        "global_samples": STEPS * dp * ds_config()["train_micro_batch_size_per_gpu"],
        "dp_world_size": dp,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": ds_config(),
        "ds_version": deepspeed.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=sorted(MODELS), default="355m")
    parser.add_argument("--dp", type=int, default=4, help="data-parallel ranks")
    args = parser.parse_args()
    write_checkpoint(args.out, MODELS[args.model], args.dp)


if __name__ == "__main__":
    main()
