"""Real DeepSpeed engines whose ranks save their live partitions, and what is then in the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucpstore
from tests.deepspeed_runs import Run
from tests.deepspeed_runs.cases import find_case
from tests.servers import S3Server, s3_server  # noqa: F401
from ucpstore import Layout

OURS = {"exp_avg": "adam_m", "exp_avg_sq": "adam_v"}


def run_job(case: str, folder: Path, url: Any, **request: Any) -> subprocess.CompletedProcess[str]:
    request = {"case": case, "folder": str(folder), "url": str(url), **request}
    return subprocess.run(
        [sys.executable, "-m", "tests.parts.live_job", json.dumps(request)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


def require_truth(url: Any, folder: Path, options: Any = None) -> None:
    """Every element is what DeepSpeed's own getters gave."""
    checkpoint = ucpstore.open(url, storage_options=options)
    run = Run(
        case=find_case(json.loads((folder / "truth.json").read_text())["case"]),
        path=folder,
        truth_path=folder,
    )
    seen = set()
    for key, values in run.tensors().items():
        state, _, fqn = key.partition(":")
        name = OURS.get(state, state)
        if fqn in checkpoint and name in checkpoint[fqn]:
            seen.add((fqn, name))
            found = checkpoint[fqn][name][...]
            assert np.asarray(found).tobytes() == values.tobytes(), key
        else:  # the weights of trained parameters are rounded masters
            assert (state, "fp32" in checkpoint[fqn]) == ("weight", True), key
    assert seen == {(fqn, state) for fqn, states in checkpoint.items() for state in states}
    assert not ucpstore.verify(url, storage_options=options).findings


def require_loads(url: Any, folder: Path, layout: Layout, options: Any = None) -> None:
    """A rank of another layout reads the same from the store as from DeepSpeed's own files."""
    for rank in range(layout.dp):
        mine = ucpstore.load(url, layout, rank, storage_options=options)
        theirs = ucpstore.load(folder / "checkpoint", layout, rank)
        assert [(t.fqn, t.name, t.start) for t in mine.tensors] == [
            (t.fqn, t.name, t.start) for t in theirs.tensors
        ]
        for left, right in zip(mine.tensors, theirs.tensors, strict=True):
            assert left.read().tobytes() == right.read().tobytes(), left


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("frozen-s1-fp32-dp2", Layout(dp=3, zero_stage=3)),
        ("roundrobin-s2-bf16-dp3", Layout(dp=2, zero_stage=2)),
        ("tied-s3-fp32-dp2", Layout(dp=3, zero_stage=1)),
        ("frozen-s3-bf16-dp3", Layout(dp=4, zero_stage=3)),
        ("subgroups-s3-bf16-dp3", Layout(dp=2, zero_stage=2)),
    ],
)
def test_live_partitions(case: str, layout: Layout, tmp_path: Path) -> None:
    url = tmp_path / "run" / "step-3"
    result = run_job(case, tmp_path / "job", url)
    assert result.returncode == 0, result.stderr[-3000:]
    require_truth(url, tmp_path / "job")
    found = ucpstore.diff(url, tmp_path / "job" / "checkpoint")
    assert all(state.status == "equal" for state in found.states), found.summary()
    require_loads(url, tmp_path / "job", layout)
    assert ucpstore.open(url).source.attributes.step == 3


def test_straight_to_s3_and_from_there(s3_server: S3Server, tmp_path: Path) -> None:  # noqa: F811
    url = f"{s3_server.new_bucket()}/run/step-3"
    options = dict(s3_server.options)
    result = run_job("s2-fp32-dp3", tmp_path / "job", url, options=options)
    assert result.returncode == 0, result.stderr[-3000:]
    require_truth(url, tmp_path / "job", options)
    require_loads(url, tmp_path / "job", Layout(dp=2, zero_stage=3), options)


@pytest.mark.parametrize(
    ("rank", "after"),
    [
        (1, "agree"),
        (0, "prepare"),
        (None, "stage"),
        (1, "staged"),
        (1, "wait_for_parts"),
        (1, "publish"),
        (None, "seal"),
    ],
)
def test_a_killed_rank_leaves_nothing_visible(rank: int | None, after: str, tmp_path: Path) -> None:
    url = tmp_path / "step"
    kill = {"rank": rank, "after": after}
    result = run_job("s2-fp32-dp3", tmp_path / "one", url, kill=kill, timeout=3)
    assert result.returncode != 0
    assert not (url / "zarr.json").exists()
    assert (url / ".ucpstore" / "index").is_dir()
    with pytest.raises(ucpstore.UcpStoreError):
        ucpstore.open(url)
    result = run_job("s2-fp32-dp3", tmp_path / "two", url)
    assert result.returncode == 0, result.stderr[-3000:]
    require_truth(url, tmp_path / "two")
