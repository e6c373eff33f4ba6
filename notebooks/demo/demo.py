"""The main job, end to end: train, open virtually, convert, look, verify, reshape, go on training.

Run it with ``make demo``. Everything is made in ``demo-run/``.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

RUN = Path("demo-run")
SOURCE = RUN / "deepspeed"
STORE = RUN / "step-00000010"
RESHAPED = RUN / "zero3"
FQN = "model.layers.0.mlp.up_proj.weight"


def title(text: str) -> None:
    print(f"\n\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def train(*options: str) -> None:
    """Two gloo ranks of unmodified DeepSpeed, bf16 with fp32 masters."""
    script = Path(__file__).with_name("train.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "OMP_NUM_THREADS": "1",
    }
    log = RUN / "train.log"
    with log.open("w") as errors:
        done = subprocess.run(
            [*command, str(script), *options], env=environment, stderr=errors, check=False
        )
    if done.returncode:
        sys.exit(f"training ended with {done.returncode}; see {log}:\n{log.read_text()[-3000:]}")


def cli(*arguments: str) -> None:
    print(f"$ ucpstore {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "ucpstore", *arguments], check=True)


def main() -> None:
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir()
    title("1. Train a small LLaMA-like model with DeepSpeed ZeRO-1 on two ranks")
    train(str(SOURCE), "--stage", "1")

    title("2. Open the checkpoint as it is: a lazy mapping, no conversion, no torch")
    cli("inspect", str(SOURCE))
    import ucpstore

    virtual = ucpstore.open(SOURCE)
    print(virtual[FQN])
    print(f"{FQN} adam_v[10:12, :4] =\n{virtual[FQN].adam_v[10:12, :4]}")

    title("3. Convert it into an atomic Zarr checkpoint")
    cli("plan", str(SOURCE), str(STORE))
    cli("convert", str(SOURCE), str(STORE))
    cli("tree", str(STORE))

    title("4. The same slice from the store")
    store = ucpstore.open(STORE)
    print(f"{FQN} adam_v[10:12, :4] =\n{store[FQN].adam_v[10:12, :4]}")
    for name in ("fp32", "adam_m", "adam_v"):
        if (store[FQN][name][...] != virtual[FQN][name][...]).any():
            sys.exit(f"{name} differs between the source and the store")
    groups = [(g["lr"], g["weight_decay"], len(g["params"])) for g in store.common["param_groups"]]
    print(f"param groups (lr, weight decay, parameters): {groups}")

    title("5. Verify every byte, then against the source")
    cli("verify", str(STORE), "--against", str(SOURCE))
    cli("diff", str(SOURCE), str(STORE))

    title("6. Reshape it to ZeRO-3 and go on training in unmodified DeepSpeed")
    cli("convert", str(STORE), str(RESHAPED), "--to", "deepspeed", "--layout", "dp=2,zero_stage=3")
    train(str(RUN / "continued"), "--stage", "3", "--load", str(RESHAPED), "--steps", "3")
    print(f"\nAll of it is in {RUN}/: try `ucpstore ls {STORE}`.")


if __name__ == "__main__":
    logging.disable(logging.INFO)
    main()
