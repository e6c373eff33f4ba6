"""Translation of the errors of fsspec, s3fs and gcsfs into this package's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ucpstore.errors import CheckpointNotFoundError, Kind, StorageError, UcpStoreError
from ucpstore.io.oserrors import translate_os_error

__all__ = ["fsspec_errors"]

_TYPES = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
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
_HINT = "Check the credentials and what they are allowed to do there."


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
        if not isinstance(error, _types()):
            raise
        raise _translate(error, action, url) from error


def _translate(error: Exception, action: str, url: str) -> UcpStoreError:
    name = type(error).__name__
    text = " ".join(str(error).split())[:300] or name
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return CheckpointNotFoundError(f"cannot {action} {url!r}: {text}.", url=url)
    if isinstance(error, PermissionError) or name in _NO_CREDENTIALS or status in (401, 403):
        return StorageError(
            f"cannot {action} {url!r}: {text}.", kind=Kind.PERMISSION, hint=_HINT, url=url
        )
    if isinstance(error, OSError) and error.errno and error.strerror and status is None:
        return translate_os_error(error, action, url)
    # What is left is a server or a network in trouble, unless the server blames the request.
    refused = status is not None and 400 <= status < 500 and status not in (408, 429)
    return StorageError(
        f"cannot {action} {url!r}: {text} ({name}).", retryable=not refused, url=url
    )


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
