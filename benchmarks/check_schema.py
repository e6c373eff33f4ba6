"""Compare the checkpoint writer of the benchmark, key by key, with a real DeepSpeed run.

Trains a small model on 2 gloo ranks with unmodified DeepSpeed ZeRO-1 (bf16), writes the same model with
`benchmarks.make_zero1_355m`, and describes both with the same function: files, containers, the order of
every dict, types, values, dtypes, shapes, strides, storage sizes and aliases. Only the numbers in tensors may
differ. Then the length formulas are checked on both, and on any further ``--checkpoint``.

``python -m benchmarks.check_schema [--work DIR] [--checkpoint DIR ...]``; exit 1 on a difference.
"""

from __future__ import annotations

import argparse
import enum
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from benchmarks.dims import MODELS
from benchmarks.make_zero1_355m import write_checkpoint

ATOMS = (bool, int, float, str, type(None))


def describe(folder: Path) -> dict[str, str]:
    """Every fact of a checkpoint's files but the numbers in tensors: path of the fact -> the fact."""
    facts: dict[str, str] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        facts[name] = f"file, mode {path.stat().st_mode & 0o777:o}"
        if path.suffix != ".pt":
            facts[f"{name}: content"] = path.read_text()
            continue
        facts.update(_container(path, name))
        # Both files were made a moment ago by this very command, so unpickling them is safe.
        facts.update(_walk(torch.load(path, weights_only=False, mmap=True), name, {}))
    return facts


def _container(path: Path, name: str) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            size = "" if entry.filename.endswith("data.pkl") else f", {entry.file_size} bytes"
            yield f"{name}: zip {entry.filename}", f"method {entry.compress_type}{size}"


def _walk(value: Any, path: str, storages: dict[int, int]) -> Iterator[tuple[str, str]]:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        yield path, f"{kind}: {_tensor(value, storages)}"
    elif isinstance(value, enum.Enum | torch.Size | torch.dtype) or type(value) in ATOMS:
        yield path, f"{kind}: {value!r}"
    elif isinstance(value, Mapping):
        yield path, f"{kind}: keys {list(value)}"
        for key, item in value.items():
            yield from _walk(item, f"{path}/{key}", storages)
    elif isinstance(value, list | tuple):
        yield path, f"{kind}: {len(value)} items"
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}/{index}", storages)
    elif not hasattr(value, "__dict__"):
        raise TypeError(f"{path} is a {kind}: this check does not know how to look into it")
    else:
        yield path, kind
    if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | enum.Enum | type(None)):
        yield from _walk(vars(value), f"{path}.__dict__", storages)


def _tensor(value: torch.Tensor, storages: dict[int, int]) -> str:
    storage = value.untyped_storage()
    number = storages.setdefault(storage.data_ptr(), len(storages))
    return (
        f"{value.dtype} {tuple(value.shape)} strides {value.stride()} offset {value.storage_offset()} "
        f"in storage {number} of {storage.nbytes()} bytes, requires_grad {value.requires_grad}"
    )


def differences(real: Mapping[str, str], written: Mapping[str, str]) -> list[str]:
    """One line per fact in which two descriptions differ."""
    lines = []
    for key in sorted(real.keys() | written.keys()):
        if real.get(key) != written.get(key):
            lines.append(f"{key}\n    real:    {real.get(key)}\n    written: {written.get(key)}")
    return lines


def length_faults(folder: Path) -> list[str]:
    """Where a ZeRO-1 checkpoint's partitions break the length formula that its ``param_shapes`` imply."""
    tag = folder / (folder / "latest").read_text()
    model = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=False, mmap=True)
    dp = model["dp_world_size"]
    faults = []
    for rank in range(dp):
        path = tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = torch.load(path, weights_only=False, mmap=True)["optimizer_state_dict"]
        for index, shapes in enumerate(model["param_shapes"]):
            total = sum(shape.numel() for shape in shapes.values())
            partition = -(-total // (2 * dp)) * 2
            padding = min(max((rank + 1) * partition - total, 0), partition)
            moments = state["base_optimizer_state"]["state"][index]
            mapped = state["param_slice_mappings"][index].values()
            found = {
                "fp32": state["single_partition_of_fp32_groups"][index].numel(),
                "exp_avg": moments["exp_avg"].numel(),
                "exp_avg_sq": moments["exp_avg_sq"].numel(),
                "group_paddings": state["group_paddings"][index],
                "mapped elements": sum(fragment.numel for fragment in mapped),
            }
            used = partition - padding
            wanted = dict(zip(found, (used, partition, partition, padding, used), strict=True))
            faults += [
                f"{path.name} group {index} {key}: found {found[key]}, expected {wanted[key]}"
                for key in found
                if found[key] != wanted[key]
            ]
    return faults


def train(model: str, out: Path, ranks: int = 2) -> None:
    """Let unmodified DeepSpeed train and save ``model`` on ``ranks`` gloo ranks."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
    ]
    command = [*launcher, "-m", "benchmarks.train_zero1", model, str(out)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"training {model} ended with {done.returncode}:\n{done.stderr[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, help="keep both small checkpoints here (default: a temporary folder)"
    )
    parser.add_argument(
        "--checkpoint", type=Path, action="append", default=[], help="check its lengths too"
    )
    args = parser.parse_args()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        for model in ("tiny", "tiny-untied"):
            real, written = work / model / "real", work / model / "written"
            train(model, real)
            write_checkpoint(written, MODELS[model], 2)
            facts = describe(real)
            found = differences(facts, describe(written))
            found += [f"real: {fault}" for fault in length_faults(real)]
            found += [f"written: {fault}" for fault in length_faults(written)]
            print(f"{model}: {len(facts)} facts of {real} compared, {len(found)} differences")
            faults += found
    for folder in args.checkpoint:
        found = length_faults(folder)
        print(f"{folder}: {len(found)} wrong lengths")
        faults += found
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
