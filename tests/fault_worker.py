"""Processes that are cheap to start and to kill: forks of one that has all imports behind it.

The process that forks never uses a client or a thread, so that its children can. It listens on a socket; each
connection is one child, which sends its pid, reads one job, and sends the result. Nothing comes from a
child that was killed.

    python -m tests.fault_worker SOCKET
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["JOBS", "Child", "workers"]

_ROOT = Path(__file__).parents[1]
_SECONDS = 120


class Child:
    """One process. Its job begins at `start`."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_SECONDS)
        self._socket.connect(address)
        self._stream = self._socket.makefile("rw")
        self.pid = int(self._stream.readline())

    def start(self, job: str, **arguments: Any) -> None:
        self._stream.write(json.dumps({"job": job, "arguments": arguments}) + "\n")
        self._stream.flush()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def result(self) -> dict[str, Any] | None:
        """What the job returned; None where the process was killed."""
        try:
            line = self._stream.readline()
        except ConnectionResetError:
            line = ""
        finally:
            self._stream.close()
            self._socket.close()
        return json.loads(line) if line else None


@contextmanager
def workers(folder: Path) -> Iterator[Callable[[], Child]]:
    """Start the process that forks; yields what makes a child."""
    address = str(folder / "s")
    process = subprocess.Popen([sys.executable, "-m", "tests.fault_worker", address], cwd=_ROOT)
    try:
        until = time.monotonic() + _SECONDS
        while not os.path.exists(address):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the process that forks did not start")
            time.sleep(0.05)
        yield lambda: Child(address)
    finally:
        process.kill()
        process.wait()


# ------------------------------------------------------------------------- in the children


def _convert(source: str, dest: str, **options: Any) -> dict[str, Any]:
    """One conversion; the error, if there is one, must be ours."""
    import ucpstore
    from ucpstore.errors import UcpStoreError

    began = time.monotonic()
    try:
        report = ucpstore.convert(source, dest, threads=2, retries=2, **options)
        found: dict[str, Any] = {"committed": report.committed}
    except UcpStoreError as error:
        found = {
            "error": type(error).__name__,
            "kind": str(error.kind),
            "retryable": getattr(error, "retryable", False),
            "text": str(error),
        }
    return {**found, "seconds": time.monotonic() - began}


def _finish(
    source: str, dest: str, *, abandon: bool, reference: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What a run left: nothing visible, or everything; then the same command, and a full check."""
    import ucpstore
    from ucpstore.errors import AlreadyExistsError, UncommittedError, UnrecognizedSourceError

    side = {"storage_options": options}
    try:
        ucpstore.open(dest, **side)
        visible = True
    except (UncommittedError, UnrecognizedSourceError, FileNotFoundError):
        visible = False
    before = _hash(dest, options) if visible else ""
    abandoned = ""
    if abandon and not visible:
        try:
            abandoned = str(ucpstore.abandon(dest, **side))
        except AlreadyExistsError as error:  # sealed: it can only be finished
            abandoned = str(error.kind)
    report = ucpstore.convert(source, dest, source_options=options, dest_options=options, threads=2)
    findings = ucpstore.verify(dest, **side).findings
    return {
        "visible": visible,
        "whole": before in ("", reference),
        "abandoned": abandoned,
        "committed": report.committed,
        "resumed": report.tasks_resumed,
        "findings": [str(finding) for finding in findings],
        "hash": _hash(dest, options),
    }


def _hash(url: str, options: Mapping[str, Any]) -> str:
    """Of every committed byte."""
    from tests.store.stores import contents
    from ucpstore.io import open_files

    found = hashlib.sha256()
    for name, data in sorted(contents(open_files(url, options)).items()):
        found.update(f"{name}\0{len(data)}\0".encode() + data)
    return found.hexdigest()


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"convert": _convert, "finish": _finish}


def _child(connection: socket.socket) -> None:
    from ucpstore.io import retries

    logging.disable()
    # The policy in small: everything that it does happens, in a fiftieth of the time.
    retries._patience = retries.Patience(
        attempts=4,
        first_delay=0.01,
        max_delay=0.1,
        total_seconds=10.0,
        connect_seconds=2.0,
        idle_seconds=1.0,
    )
    stream = connection.makefile("rw")
    stream.write(f"{os.getpid()}\n")
    stream.flush()
    line = stream.readline()
    if not line:
        return
    request = json.loads(line)
    try:
        result = JOBS[request["job"]](**request["arguments"])
    except Exception:  # the test reads it
        result = {"crashed": traceback.format_exc()}
    stream.write(json.dumps(result) + "\n")
    stream.flush()


def _main(address: str) -> None:
    import botocore.session  # noqa: F401
    import gcsfs  # noqa: F401
    import s3fs  # noqa: F401
    import tensorstore  # noqa: F401

    import tests.store.stores  # noqa: F401
    import ucpstore.api
    import ucpstore.formats.deepspeed.reader
    import ucpstore.inspect.verify
    import ucpstore.io.remote
    import ucpstore.store.grid
    import ucpstore.store.remote
    import ucpstore.store.source
    import ucpstore.store.target  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address + ".new")
        server.listen(64)
        Path(address + ".new").rename(address)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                try:
                    server.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _child(connection)
                finally:
                    os._exit(0)
            connection.close()


if __name__ == "__main__":
    _main(sys.argv[1])
