from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import S3Server, s3_server  # noqa: F401
from ucpstore.io import Files, open_files


@pytest.fixture(scope="session")
def bucket(s3_server: S3Server) -> str:  # noqa: F811
    return s3_server.new_bucket()


@pytest.fixture(params=["local", "memory", "s3"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Files]:
    """Opens the same empty prefix again and again, on every backend."""
    if request.param == "local":
        return lambda: open_files(tmp_path / "store")
    if request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}/store"
        return lambda: open_files(url)
    server = request.getfixturevalue("s3_server")
    url = f"{request.getfixturevalue('bucket')}/{uuid.uuid4().hex}"
    return lambda: open_files(url, server.options)


@pytest.fixture
def files(open_again: Callable[[], Files]) -> Files:
    return open_again()
