"""Object-store servers for tests. Import the fixture where it is used::

from tests.servers import s3_server  # noqa: F401
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

__all__ = ["Request", "S3Server", "run_s3_server", "s3_server"]

_LINE = re.compile(r'"(?P<method>[A-Z]+) (?P<path>\S+) HTTP/[\d.]+" (?P<status>\d+)')
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request that the server answered."""

    method: str
    path: str
    status: int


class _Recorder(logging.Handler):
    """Reads the server's access log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.requests: list[Request] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = _LINE.search(_COLOURS.sub("", record.getMessage()))
        if found:
            self.requests.append(Request(found["method"], found["path"], int(found["status"])))


@dataclass(slots=True)
class S3Server:
    """A running S3 server.

    Attributes
    ----------
    endpoint : str
    options : mapping
        Storage options for `ucpstore.io.open_files`; credentials come from the environment.
    """

    endpoint: str
    options: Mapping[str, Any]
    _recorder: _Recorder = field(repr=False)

    def new_bucket(self) -> str:
        """URL of a new, empty bucket."""
        import botocore.session

        name = f"test-{uuid.uuid4().hex[:12]}"
        client = botocore.session.Session().create_client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1"
        )
        client.create_bucket(Bucket=name)
        client.close()
        return f"s3://{name}"

    def forget_requests(self) -> None:
        self._recorder.requests.clear()

    def requests(self, method: str | None = None) -> list[Request]:
        """Requests since `forget_requests`."""
        return [r for r in self._recorder.requests if method in (None, r.method)]


def run_s3_server() -> Iterator[S3Server]:
    """Run moto in a thread of this process, with dummy credentials and without any AWS settings."""
    from moto.server import ThreadedMotoServer

    recorder = _Recorder()
    log = logging.getLogger("werkzeug")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        patch.setattr(log, "propagate", False)
        patch.setattr(log, "level", logging.INFO)
        log.addHandler(recorder)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        try:
            yield S3Server(endpoint, {"endpoint_url": endpoint}, recorder)
        finally:
            server.stop()
            log.removeHandler(recorder)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One S3 server for the whole session."""
    yield from run_s3_server()
