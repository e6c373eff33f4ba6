"""What object stores mean by their error codes, for whichever client received them.

Codes of S3 and of servers like it (Amazon S3 API reference, "Error responses"; MinIO's ``XMinio...``; Ceph's
``QuotaExceeded``), and reasons of GCS ("HTTP status and error codes for JSON").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ucpstore.errors import Kind

__all__ = ["AGAIN", "CREDENTIALS", "Refusal", "plain", "refusal"]

AGAIN = "Try again once the store answers; a conversion goes on where it stopped."
CREDENTIALS = (
    "Check the credentials (missing, wrong or expired?) and what they are allowed to do there."
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The meaning of an error code.

    Attributes
    ----------
    code : str
    kind : Kind
    hint : str
    retryable : bool
    """

    code: str
    kind: Kind
    hint: str
    retryable: bool = False


def _table() -> dict[str, Refusal]:
    groups = (
        (
            "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired InvalidToken",
            Kind.PERMISSION,
            (
                "The credentials have expired: renew them and run the same command again, it goes on"
                " where it stopped."
            ),
            False,
        ),
        (
            "InvalidAccessKeyId SignatureDoesNotMatch AccessDenied Unauthorized authError",
            Kind.PERMISSION,
            CREDENTIALS,
            False,
        ),
        (
            "RequestTimeTooSkewed",
            Kind.PERMISSION,
            "The clocks of this machine and of the store differ: set this one's.",
            False,
        ),
        (
            (
                "InsufficientStorage QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded"
                " StorageFull storageQuotaExceeded"
            ),
            Kind.NO_SPACE,
            (
                "The store is full, or its quota is used up: free space there and run the same command"
                " again, it goes on where it stopped."
            ),
            False,
        ),
        (
            (
                "RequestTimeout SlowDown ServiceUnavailable InternalError TooManyRequests Throttling"
                " ThrottlingException RequestLimitExceeded BandwidthLimitExceeded OperationAborted"
                " rateLimitExceeded userRateLimitExceeded backendError"
            ),
            Kind.IO,
            AGAIN,
            True,
        ),
    )
    return {
        code: Refusal(code, kind, hint, retryable)
        for codes, kind, hint, retryable in groups
        for code in codes.split()
    }


_REFUSALS = _table()
_WORD = re.compile(r"(?<![\w/.-])(?:" + "|".join(_REFUSALS) + r")(?![\w/.-])")


_CLIENTS = re.compile(r"All \d+ retry attempts failed: | \(reached max retries: \d+\)")


def plain(text: str) -> str:
    """An error's text in one line, without what clients say of retries that they do not make."""
    return " ".join(_CLIENTS.sub("", text).split())


def refusal(text: str, status: int | None = None) -> Refusal | None:
    """The known code in an error's text, or what the HTTP status alone says."""
    found = _WORD.search(text)
    if found is not None:
        return _REFUSALS[found.group()]
    return _REFUSALS["InsufficientStorage"] if status == 507 else None
