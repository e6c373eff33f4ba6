"""Translation of the errors of fsspec, s3fs and gcsfs into this package's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ucpstore.errors import CheckpointNotFoundError, Kind, StorageError, UcpStoreError
from ucpstore.io.oserrors import translate_os_error
from ucpstore.io.refusals import AGAIN, CREDENTIALS, plain, refusal

__all__ = ["fsspec_errors"]

_TYPES = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("botocore.parsers", "ResponseParserError"),
    ("urllib3.exceptions", "HTTPError"),
    ("aiohttp", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("requests.exceptions", "RequestException"),
)
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "RefreshError",
    "UnauthorizedSSOTokenError",
    "ProfileNotFound",
}
_MAX_RETRY_AFTER = 30.0


def _types() -> tuple[type[Exception], ...]:
    """Error types of the libraries that are in use; the others cannot have raised."""
    modules = ((sys.modules.get(module), name) for module, name in _TYPES)
    return (OSError, *(getattr(module, name) for module, name in modules if module is not None))


@contextmanager
def fsspec_errors(action: str, url: str) -> Iterator[None]:
    """Translate every storage error of the block.

    Raises
    ------
    StorageError, CheckpointNotFoundError, MissingExtraError
    """
    try:
        yield
    except UcpStoreError:
        raise
    except Exception as error:
        # gcsfs makes a ValueError of what a server answers with "invalid" in it.
        is_answer = isinstance(error, ValueError) and str(error).startswith("Bad Request")
        if not (is_answer or isinstance(error, _types())):
            raise
        raise _translate(error, action, url) from error


def _translate(error: Exception, action: str, url: str) -> UcpStoreError:
    name = type(error).__name__
    text = plain(str(error))[:300] or name
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return CheckpointNotFoundError(f"cannot {action} {url!r}: {text}.", url=url)
    if (known := refusal(f"{_code(error)} {text}", status)) is not None:
        return StorageError(
            f"cannot {action} {url!r}: {text}.",
            kind=known.kind,
            hint=known.hint,
            retryable=known.retryable,
            url=url,
            code=known.code,
            **_retry_after(error),
        )
    forbidden = isinstance(error, PermissionError) or text.startswith("Forbidden")
    if forbidden or name in _NO_CREDENTIALS or status in (401, 403):
        return StorageError(
            f"cannot {action} {url!r}: {text}.", kind=Kind.PERMISSION, hint=CREDENTIALS, url=url
        )
    if isinstance(error, OSError) and error.errno and error.strerror and status is None:
        return translate_os_error(error, action, url)
    # What is left is a server or a network in trouble, unless the server blames the request.
    refused = status is not None and 400 <= status < 500 and status not in (408, 429)
    refused = refused or text.startswith("Bad Request")
    # S3 answers HEAD without a reason; of expired credentials with this status.
    hint = CREDENTIALS if "Bad Request" in text else "" if refused else AGAIN
    return StorageError(
        f"cannot {action} {url!r}: {text} ({name}).",
        hint=hint,
        retryable=not refused,
        url=url,
        **_retry_after(error),
    )


def _code(error: BaseException | None) -> str:
    """S3's error code of an error or of what caused it."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


def _retry_after(error: BaseException | None) -> dict[str, Any]:
    """What the server asks for in ``Retry-After``, in seconds, as an error's context."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            asked = str(headers.get("retry-after", ""))
            return {"retry_after": min(float(asked), _MAX_RETRY_AFTER)} if asked.isdigit() else {}
        error = error.__cause__
    return {}


def _status(error: BaseException | None) -> int | None:
    """HTTP status of an error or of what caused it."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            found = getattr(response, "status_code", None) or getattr(error, "code", None)
        if isinstance(found, int) or (isinstance(found, str) and found.isdigit()):
            return int(found)
        error = error.__cause__
    return None
