"""Make runs on demand, keep them, and read their truth."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from tests.deepspeed_runs.cases import Case, find_case

PACKAGE = Path(__file__).parent
ROOT = PACKAGE.parent.parent
SCRIPTS = ("model.py", "pipeline.py", "recipe.py", "sequence.py", "train.py", "truth.py")


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: the checkpoint as DeepSpeed left it, and the truth about it.

    Attributes
    ----------
    case : Case
        What was trained.
    path : Path
        The `save_dir` of DeepSpeed; holds `latest`.
    truth_path : Path
        The folder with `truth.json` and ``truth-RANK.safetensors`` per model-parallel rank.
    """

    case: Case
    path: Path
    truth_path: Path

    @property
    def tag_path(self) -> Path:
        """The checkpoint folder that `latest` names."""
        return self.path / str(self.facts["tag"])

    @property
    def facts(self) -> Mapping[str, Any]:
        """Everything of the truth that is not a tensor."""
        return _facts(self.truth_path)

    def tensors(self, *, tp_rank: int = 0, stage: int = 0) -> Mapping[str, np.ndarray]:
        """Return all tensors of one TP rank of a pipeline stage, keyed ``STATE:FQN``."""
        return _tensors(self.truth_path, stage * self.case.tp + tp_rank)

    def tensor(self, state: str, fqn: str, *, tp_rank: int = 0, stage: int = 0) -> np.ndarray:
        """Return one tensor of one TP rank in full over the data-parallel ranks."""
        return self.tensors(tp_rank=tp_rank, stage=stage)[f"{state}:{fqn}"]

    def full(self, state: str, fqn: str, *, stage: int = 0) -> np.ndarray:
        """Return one tensor joined over TP ranks: concatenated, or the one copy they all hold."""
        ranks = range(self.case.tp)
        parts = [self.tensor(state, fqn, tp_rank=rank, stage=stage) for rank in ranks]
        dim = self.stages[stage]["tp_dims"].get(fqn)
        return parts[0] if dim is None else np.concatenate(parts, axis=dim)

    @property
    def stages(self) -> Sequence[Mapping[str, Any]]:
        """The facts that are a pipeline stage's own; without a pipeline, those of the one stage."""
        stages: Sequence[Mapping[str, Any]] = self.facts.get("stages") or [self.facts]
        return stages


def deepspeed_run(name: str) -> Run:
    """Return the run of case `name`, made now if the cache does not have it."""
    case = find_case(name)
    root = cache_root()
    folder = root / f"{name}-{_digest(case)}"
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        (root / ".gitignore").write_text("*\n")
        with FileLock(root / f"{name}.lock"):
            if not folder.exists():
                _make(case, folder)
    return Run(case=case, path=folder / "checkpoint", truth_path=folder)


def copy_run(run: Run, folder: Path) -> Run:
    """Copy the checkpoint of `run` into `folder`, for tests that change it."""
    path = folder / "checkpoint"
    shutil.copytree(run.path, path)
    return replace(run, path=path)


def cache_root() -> Path:
    """Return the folder that keeps the runs."""
    return Path(os.environ.get("UCPSTORE_TEST_CACHE", PACKAGE.parent / ".cache")) / "deepspeed"


def _digest(case: Case) -> str:
    """Return a digest of all that the run depends on."""
    parts = [case.to_json(), _environment()]
    if case.model == "hf":
        parts.append(f"transformers={version('transformers')}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@functools.cache
def _environment() -> str:
    """Return what all runs depend on; read once, as the trainer reads it once."""
    versions = [f"{name}={version(name)}" for name in ("torch", "deepspeed")]
    return "\0".join([*versions, *((PACKAGE / script).read_text() for script in SCRIPTS)])


def _make(case: Case, folder: Path) -> None:
    """Train `case` in a temporary folder and give that its final name."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{case.name}-tmp-") as temporary:
        attempt = Path(temporary) / "run"
        ask_trainer(case.name, attempt)
        attempt.rename(folder)
    for other in folder.parent.glob(f"{case.name}-{'[0-9a-f]' * 12}"):
        if other != folder:  # made by other versions of the scripts or frameworks
            shutil.rmtree(other, ignore_errors=True)


def ask_trainer(name: str, folder: Path, *request: str) -> None:
    """Let the trainer make case `name` (or carry out a request about it) in `folder`."""
    trainer = _trainer()
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    trainer.stdin.write("\t".join([name, str(folder), *request]) + "\n")
    trainer.stdin.flush()
    if trainer.stdout.readline().strip() != "ok":
        _trainer.cache_clear()
        log = Path(f"{folder}.log")
        tail = log.read_text()[-4000:] if log.exists() else "the trainer did not start"
        raise RuntimeError(f"could not make DeepSpeed case {name}:\n{tail}")


@functools.cache
def _trainer() -> subprocess.Popen[str]:
    """Start the process that makes cases; it ends with its standard input."""
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_COMPILE_DISABLE": "1",  # Muon's only; compiling takes longer than all cases
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.deepspeed_runs.train"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_stop, process)
    return process


def _stop(process: subprocess.Popen[str]) -> None:
    """End the trainer by closing its input, and wait for it."""
    process.communicate(timeout=60)


@functools.lru_cache(maxsize=64)
def _facts(truth_path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((truth_path / "truth.json").read_text())
    return facts


@functools.lru_cache(maxsize=64)
def _tensors(truth_path: Path, rank: int) -> dict[str, np.ndarray]:
    import ml_dtypes
    import torch
    from safetensors.torch import load_file

    arrays = {}
    for key, value in load_file(truth_path / f"truth-{rank}.safetensors").items():
        if value.dtype == torch.bfloat16:
            array = value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        else:
            array = value.numpy()
        array.flags.writeable = False
        arrays[key] = array
    return arrays
