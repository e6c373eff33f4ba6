"""Server processes that do not outlive the tests, however those end."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["start_process"]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """As `subprocess.Popen`; on Linux the process is killed when the thread that started it is gone."""
    return subprocess.Popen(command, preexec_fn=_die_with_the_parent, **options)


def _die_with_the_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
