"""Memory is bounded by the stated budget: anonymous memory of the whole process tree, sampled from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.servers import S3Server, s3_server  # noqa: F401

ROOT = Path(__file__).parents[1]
MB = 1_000_000
SCRIPT = """
import json, sys
from ucpstore.contracts import CommonState, ParameterSpec, Role, SourceFile, StateSpec
from ucpstore.engine.plan import make_plan
from ucpstore.engine.run import Workers, run
from ucpstore.io import open_files
from ucpstore.layout.geometry import FlatEven
from ucpstore.pieces import Bound, Buffer, PieceSource
from ucpstore.store.grid import plan_arrays
from ucpstore.store.target import ZarrTarget

folder, dest, options, limit, shapes = json.loads(sys.argv[1])
files = open_files(folder)
RANKS = 3
stats = [files.stat(f"rank_{r}.bin") for r in range(RANKS)]
parameters, bound, base = {}, {}, 0
for index, shape in enumerate(map(tuple, shapes)):
    width = -(-shape[0] * shape[1] // RANKS)
    spec = StateSpec("fp32", Role.MASTER_WEIGHT, shape, "float32")
    parameters[f"p{index}"] = ParameterSpec(f"p{index}", {"fp32": spec})
    buffers = [Buffer(r, 0, stats[r].nbytes) for r in range(RANKS)]
    bound[f"p{index}", "fp32"] = Bound(FlatEven(shape, 0, width, base, slots=RANKS), buffers, "float32")
    base += width
source = PieceSource(
    format="test", files=files, file_table=[SourceFile.of(s) for s in stats], parameters=parameters,
    common=CommonState({}), parallelism={}, warnings=(), bound=bound,
)
arrays = plan_arrays(source)
target = ZarrTarget(open_files(dest, options), arrays, source=source)
plan = make_plan(source, target, states=[m for a in arrays for m in a.members])
report = run(
    (source, target), plan, workers=Workers(threads=8, memory_limit=limit),
    opener=lambda: (plan.digest, source, target),
)
print(json.dumps(report.to_json()))
"""


def make_files(folder: Path, shapes: list[tuple[int, int]]) -> int:
    """Sparse rank files: their holes read as zeros, which costs neither disk nor time. Returns the bytes."""
    nbytes = sum(-(-rows * columns // 3) * 4 for rows, columns in shapes)
    for rank in range(3):
        with open(folder / f"rank_{rank}.bin", "wb") as file:
            file.truncate(nbytes)
    return nbytes * 3


def anonymous(process: psutil.Process) -> int:
    """Resident anonymous bytes of a process and its descendants."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            status = Path(f"/proc/{member.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(
            int(line.split()[1]) * 1024
            for line in status.splitlines()
            if line.startswith("RssAnon")
        )
    return total


def peak_of(arguments: object) -> tuple[int, dict[str, object]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watched = psutil.Process(process.pid)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous(watched))
        time.sleep(0.01)
    output, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return peak, json.loads(output)


def test_local_conversion_needs_little_whatever_the_size(tmp_path: Path) -> None:
    shapes = [(60_000, 4096), (3000, 3000)]
    nbytes = make_files(tmp_path, shapes)
    peak, report = peak_of((str(tmp_path), str(tmp_path / "store"), None, None, shapes))
    assert report["committed"]
    assert nbytes > 1000 * MB, "the tensor must be far larger than the bound"
    assert peak <= 300 * MB


@pytest.mark.parametrize("limit", [256 * MB, 512 * MB])
def test_object_store_conversion_keeps_to_the_limit(
    tmp_path: Path,
    s3_server: S3Server,  # noqa: F811
    limit: int,
) -> None:
    shapes = [(36_000, 4096), (3000, 3000)]
    nbytes = make_files(tmp_path, shapes)
    url = f"{s3_server.new_bucket()}/store"
    peak, report = peak_of((str(tmp_path), url, dict(s3_server.options), limit, shapes))
    assert report["committed"]
    assert nbytes > limit, "one tensor is larger than the limit"
    assert peak <= limit + 200 * MB
