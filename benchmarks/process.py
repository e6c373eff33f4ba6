"""Run one command and measure its whole process tree: time, CPU, anonymous memory, bytes read and written."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "CommandError",
    "Measurement",
    "Sampler",
    "bytes_of",
    "cpu_of",
    "descendants",
    "measure",
    "tree_anonymous",
]

INTERVAL = 0.05
"""Seconds between two looks at the memory of the tree."""


class CommandError(RuntimeError):
    """A measured command ended with an error."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one row cost in one round.

    Attributes
    ----------
    wall, cpu : float, seconds
        Elapsed; user + system time of the process and all its descendants.
    anonymous : int, bytes
        Largest sum of RssAnon over the tree. Pages that forked processes share count in each.
    read, written : int, bytes
        Through read and write calls of the tree (not through memory maps).
    files : int
        Files that the row left behind.
    extra : mapping
        Further facts that a row reports about itself.
    """

    wall: float
    cpu: float
    anonymous: int
    read: int
    written: int
    files: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)


def measure(
    command: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[Measurement, str]:
    """Run ``command`` to its end. Returns the measurement and what it wrote to stdout.

    CPU and bytes are the kernel's final accounts of the ended process, which include every descendant that
    was waited for; they are read before the process is reaped.

    Raises
    ------
    CommandError
        The command's exit status is not 0.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begin = time.perf_counter()
        process = subprocess.Popen(
            list(command), stdout=out, stderr=err, env={**os.environ, **(env or {})}
        )
        sampler = Sampler(process.pid)
        sampler.start()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        wall = time.perf_counter() - begin
        sampler.stop()
        read, written = bytes_of(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            err.seek(0)
            tail = err.read()[-4000:].decode(errors="replace")
            raise CommandError(f"{' '.join(command)} ended with {process.returncode}:\n{tail}")
        out.seek(0)
        cpu = usage.ru_utime + usage.ru_stime
        return Measurement(wall, cpu, sampler.peak, read, written), out.read().decode()


def descendants(root: int) -> Iterator[int]:
    """A process and all its living descendants, as far as they can be seen."""
    todo = [root]
    while todo:
        pid = todo.pop()
        yield pid
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between two looks


def tree_anonymous(root: int) -> int:
    """Sum of RssAnon, in bytes, of a process and all its descendants."""
    total = 0
    for pid in descendants(root):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # A process that has ended, but is not reaped, has no memory lines.
        lines = (line for line in status.splitlines() if line.startswith("RssAnon:"))
        total += sum(int(line.split()[1]) * 1024 for line in lines)
    return total


def bytes_of(pid: int) -> tuple[int, int]:
    """Bytes read and written by a process and the descendants that it waited for."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"]), int(fields["wchar"])


def cpu_of(pid: int) -> float:
    """User and system seconds of a process and the descendants that it waited for (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Sampler(threading.Thread):
    """Looks at the memory of a process tree until it is stopped.

    Attributes
    ----------
    peak : int, bytes
        Largest sum of RssAnon seen.
    """

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._root = root
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(INTERVAL):
            self.peak = max(self.peak, tree_anonymous(self._root))

    def stop(self) -> None:
        self._ended.set()
        self.join()
