"""A limit on how fast bytes move, shared by the threads of a process."""

from __future__ import annotations

import threading
import time
from typing import Any

__all__ = ["RateLimit"]


class RateLimit:
    """Lets ``nbytes_per_second`` pass on average. Picklable: every process counts for itself.

    Time that nobody used is not saved up, so that no burst follows a pause.

    Parameters
    ----------
    nbytes_per_second : float
    """

    def __init__(self, nbytes_per_second: float) -> None:
        self.nbytes_per_second = nbytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"nbytes_per_second": self.nbytes_per_second}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["nbytes_per_second"])  # type: ignore[misc]

    def reserve(self, nbytes: int) -> float:
        """Seconds to wait before ``nbytes`` may move."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self.nbytes_per_second
            return start - now

    def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may move."""
        time.sleep(self.reserve(nbytes))
