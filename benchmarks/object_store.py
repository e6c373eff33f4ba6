"""A local S3 server for the object store rows: SeaweedFS, as the tests start it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.seaweedfs import run_seaweedfs, s3_client

__all__ = ["BUCKET", "CREDENTIALS", "s3_server"]

BUCKET = "bench"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark-secret",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Run a server that keeps its data in ``folder``, with the empty bucket `BUCKET`; yields its endpoint."""
    keys = CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
    with run_seaweedfs(folder, *keys) as endpoint:
        client = s3_client(endpoint, *keys)
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield endpoint
