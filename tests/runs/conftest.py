from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runs.places import Place, new_place
from tests.servers import S3Server, run_s3_server


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    yield from run_s3_server()


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Place]:
    """Makes empty places: ``file``, ``memory``, ``s3``."""

    def make(kind: str) -> Place:
        server = request.getfixturevalue("server") if kind == "s3" else None
        return new_place(kind, tmp_path, server)

    return make


@pytest.fixture(params=["file", "memory", "s3"])
def run(request: pytest.FixtureRequest, place: Callable[[str], Place]) -> Place:
    """An empty run on every kind of storage."""
    return place(request.param).at("run")
