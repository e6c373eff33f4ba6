"""A run moves from one cluster to another: two real S3 servers, a copy that is killed twice, another layout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ucpstore
from tests.deepspeed_runs import deepspeed_run
from tests.deepspeed_runs.compare import differences
from tests.deepspeed_runs.resume import continue_run, resume_run
from tests.servers import (  # noqa: F401
    S3Server,
    run_seaweedfs_server,
    seaweedfs_server,
)
from ucpstore import Layout
from ucpstore.errors import CheckpointNotFoundError, UncommittedError
from ucpstore.io import open_files

ROOT = Path(__file__).parents[1]
KEY, SECRET = "AKIAANOTHERCLUSTER00", "anotherFAKEsecretFAKEsecretFAKEsecret00"
CASE = "s1-fp32-dp2"


@pytest.fixture(scope="module")
def there() -> Iterator[S3Server]:
    """The other cluster, with credentials of its own."""
    yield from run_seaweedfs_server(KEY, SECRET)


def puts(server: S3Server) -> int:
    """Objects of the checkpoint that have arrived since requests were forgotten."""
    return sum(r.method == "PUT" and "/params/" in r.path for r in server.requests())


def copy(source: str, dest: str, sides: tuple[S3Server, S3Server]) -> subprocess.Popen[bytes]:
    """The command, slow enough to be killed on its way."""
    options = [
        part
        for side, server in zip(("source", "dest"), sides, strict=True)
        for name, value in server.options.items()
        for part in (f"--{side}-option", f"{name}={value}")
    ]
    command = [sys.executable, "-m", "ucpstore", "copy", source, dest, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, "--threads", "1", "--max-rate", "30kB"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_run_moves_to_another_cluster(
    seaweedfs_server: S3Server,  # noqa: F811
    there: S3Server,
    tmp_path: Path,
) -> None:
    here = seaweedfs_server
    run = deepspeed_run(CASE)
    bucket_a, bucket_b = f"{here.new_bucket()}/run", f"{there.new_bucket()}/run"
    ucpstore.convert(run.path, bucket_a, dest_options=here.options)
    objects = len(open_files(bucket_a, here.options).list("params"))
    for wanted in (5, 20):
        there.forget_requests()
        process = copy(bucket_a, bucket_b, (here, there))
        while puts(there) < wanted and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        output = process.communicate()
        assert process.returncode == -signal.SIGKILL, output
        assert wanted <= puts(there) < objects
        with pytest.raises((UncommittedError, CheckpointNotFoundError)):
            ucpstore.open(bucket_b, storage_options=there.options)
    report = ucpstore.copy(
        bucket_a, bucket_b, source_options=here.options, dest_options=there.options
    )
    assert report.committed
    assert ucpstore.verify(
        bucket_b,
        against=bucket_a,
        storage_options=there.options,
        against_options=here.options,
    ).ok
    ucpstore.convert(
        bucket_b,
        tmp_path / "native",
        to="deepspeed",
        layout=Layout(dp=3, zero_stage=3),
        source_options=there.options,
    )
    resumed = resume_run(
        CASE, tmp_path / "native", tmp_path / "resumed", world=3, stage=3, dtype="fp32"
    )
    assert differences(run, resumed, continue_run(CASE), rtol=1e-5) == {}
