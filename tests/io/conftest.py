from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import S3Server, gcs_server, s3_server, seaweedfs_server  # noqa: F401
from ucpstore.io import Files, open_files


@pytest.fixture(scope="session")
def bucket(s3_server: S3Server) -> str:  # noqa: F811
    return s3_server.new_bucket()


@pytest.fixture(params=["local", "memory", "s3", "seaweedfs", "gcs"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Files]:
    """Opens the same empty prefix again and again, on every backend."""
    if request.param == "local":
        return lambda: open_files(tmp_path / "store")
    if request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}/store"
        return lambda: open_files(url)
    server = request.getfixturevalue(f"{request.param}_server")
    url = f"{server.new_bucket()}/{uuid.uuid4().hex}"
    return lambda: open_files(url, server.options)


@pytest.fixture
def files(open_again: Callable[[], Files]) -> Files:
    return open_again()
