"""How much this process read from storage: what a user pays for, and what tests count."""

from __future__ import annotations

import sys
import threading
from typing import NamedTuple

__all__ = ["Traffic", "count_read", "traffic"]

_lock = threading.Lock()
_requests = 0
_nbytes = 0


class Traffic(NamedTuple):
    """Reads since the process began.

    Attributes
    ----------
    requests : int
        Calls to the file system, or requests to an object store.
    nbytes : int
        Bytes that came back.
    """

    requests: int
    nbytes: int

    def since(self, before: Traffic) -> Traffic:
        """What was added after ``before``."""
        return Traffic(self.requests - before.requests, self.nbytes - before.nbytes)


def count_read(nbytes: int) -> None:
    """Count one read of our own (TensorStore counts its reads itself)."""
    global _requests, _nbytes
    with _lock:
        _requests += 1
        _nbytes += nbytes


def traffic() -> Traffic:
    """What was read until now, by all threads."""
    requests, nbytes = _tensorstore()
    with _lock:
        return Traffic(_requests + requests, _nbytes + nbytes)


def _tensorstore() -> tuple[int, int]:
    """TensorStore's own counters; it is not loaded for this."""
    library = sys.modules.get("tensorstore")
    if library is None:
        return 0, 0
    counts = {"read": 0, "bytes_read": 0}
    for metric in library.experimental_collect_matching_metrics("/tensorstore/kvstore/"):
        name = metric["name"].rpartition("/")[2]
        if name in counts:
            counts[name] += sum(int(entry["value"]) for entry in metric["values"])
    return counts["read"], counts["bytes_read"]
