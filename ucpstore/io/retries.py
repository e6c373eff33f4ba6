"""How long storage is asked again: one policy for every client of an object store.

botocore, s3fs and TensorStore each retry by rules of their own, in two cases one inside the other: a
store that dropped every connection was asked 50 times for one stat. Here they are told to ask once, and
`retried` asks again. Only reads of arrays, which are many requests each, leave it to TensorStore, with
the same numbers.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ucpstore.errors import StorageError

__all__ = ["Patience", "patience", "retried"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Patience:
    """The policy.

    Attributes
    ----------
    attempts : int
        Of one request, the first included.
    first_delay, max_delay : float, seconds
        Before the second attempt; doubles each time, with jitter. A ``Retry-After`` that asks for more
        gets it.
    total_seconds : float
        After the start of the first attempt; no other begins later.
    connect_seconds, idle_seconds : float
        An attempt is given up after so long without a connection, without a byte.
    """

    attempts: int = 5
    first_delay: float = 0.5
    max_delay: float = 8.0
    total_seconds: float = 60.0
    connect_seconds: float = 10.0
    idle_seconds: float = 20.0

    def delay(self, failed: int, retry_after: float = 0.0) -> float:
        """Seconds to wait after ``failed`` attempts."""
        delay: float = min(self.first_delay * 2 ** (failed - 1), self.max_delay)
        return max(delay * random.uniform(0.5, 1.0), retry_after)  # noqa: S311 - jitter

    def for_tensorstore(self) -> dict[str, object]:
        """The same in TensorStore's words, whose timeouts are settings of the process."""
        settings = {
            "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": self.connect_seconds,
            "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": self.idle_seconds,
            "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": 1,
        }
        for name, value in settings.items():
            os.environ.setdefault(name, str(max(1, round(value))))
        return {
            "max_retries": self.attempts - 1,
            "initial_delay": f"{self.first_delay}s",
            "max_delay": f"{self.max_delay}s",
        }


_patience = Patience()


def patience() -> Patience:
    """The policy of this process."""
    return _patience


def retried(call: Callable[[], _Result]) -> _Result:
    """What ``call`` returns; it is called again after a retryable `StorageError`, within the policy.

    Raises
    ------
    StorageError
        The last one, or the first that says that another attempt is of no use.
    """
    policy, started, failed = patience(), time.monotonic(), 0
    while True:
        try:
            return call()
        except StorageError as error:
            failed += 1
            delay = policy.delay(failed, error.context.get("retry_after", 0.0))
            late = time.monotonic() - started + delay > policy.total_seconds
            if not error.retryable or failed >= policy.attempts or late:
                raise
        time.sleep(delay)
