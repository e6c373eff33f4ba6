"""Storage options as TensorStore key-value store specs, and TensorStore's errors as this package's.

Nothing here imports TensorStore: a spec is JSON, and its errors are told apart by their text.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ucpstore.errors import CheckpointNotFoundError, Kind, StorageError, UcpStoreError
from ucpstore.io.refusals import AGAIN, CREDENTIALS, plain, refusal
from ucpstore.io.retries import patience
from ucpstore.io.s3 import s3_endpoint, s3_region
from ucpstore.io.urls import Location

__all__ = ["check_fork", "kvstore_spec", "tensorstore_errors"]

_PROFILE = "ucpstore"

_held: dict[tuple[str, str, str], Any] = {}  # keeps files with explicit credentials alive


def kvstore_spec(location: Location, options: Mapping[str, Any]) -> dict[str, Any]:
    """Key-value store spec of a URL prefix.

    The spec holds no secret, but it is only good in this process: explicit S3 keys are handed over
    in an anonymous file. Send URL and options to other processes instead.

    Parameters
    ----------
    location : Location
    options : mapping
        Checked storage options, see `ucpstore.io.open_files`.

    Returns
    -------
    dict
        JSON value for ``tensorstore.KvStore.open`` or the ``kvstore`` member of a driver's spec.

    Raises
    ------
    StorageError
        TensorStore cannot see that storage, or cannot take an option.
    """
    if location.scheme == "file":
        return {"driver": "file", "path": location.path.rstrip("/") + "/"}
    if location.scheme == "s3":
        return _s3_spec(location, options)
    if location.scheme == "gs":
        return _gcs_spec(location, options)
    raise StorageError(
        f"cannot open {location.url!r} with TensorStore: found fsspec's memory, expected a path,"
        " s3:// or gs://.",
        kind=Kind.UNSUPPORTED,
        url=location.url,
    )


def _s3_spec(location: Location, options: Mapping[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "driver": "s3",
        "bucket": location.bucket,
        "path": location.prefix,
        "aws_credentials": _aws_credentials(options),
        "s3_request_retries": patience().for_tensorstore(),
        # Sends If-None-Match without asking first whether the server can do that.
        "use_conditional_write": True,
    }
    if endpoint := s3_endpoint(options):
        spec["endpoint"] = endpoint
    if region := s3_region(options):
        spec["aws_region"] = region
    if options.get("requester_pays"):
        spec["requester_pays"] = True
    return spec


def _aws_credentials(options: Mapping[str, Any]) -> dict[str, str]:
    """TensorStore's ``aws_credentials``: it takes no keys, but a profile of a given file."""
    key, secret, token = (str(options.get(name) or "") for name in ("key", "secret", "token"))
    if options.get("anon"):
        return {"type": "anonymous"}
    if key or secret:
        if not (key and secret):
            raise StorageError(
                "storage options 'key' and 'secret': found only one of them, expected both.",
                kind=Kind.UNSUPPORTED,
            )
        path = _credentials_file(key, secret, token)
        return _profile(_PROFILE, credentials=path, config=os.devnull)
    if profile := options.get("profile"):
        return _profile(
            str(profile),
            credentials=_aws_file("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
            config=_aws_file("AWS_CONFIG_FILE", "~/.aws/config"),
        )
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        # The default chain begins with it, and logs an error for every other provider that it makes.
        return {"type": "environment"}
    return {"type": "default"}


def _profile(name: str, *, credentials: str, config: str) -> dict[str, str]:
    # TensorStore 0.1.86 does not find either file by itself: it wants both paths.
    return {
        "type": "profile",
        "profile": name,
        "credentials_file": credentials,
        "config_file": config,
    }


def _aws_file(variable: str, default: str) -> str:
    path = os.path.expanduser(os.environ.get(variable) or default)
    return path if os.path.exists(path) else os.devnull


def _credentials_file(key: str, secret: str, token: str) -> str:
    """Path of a file that only this process sees (only this user, where there is no memfd)."""
    if any(character in key + secret + token for character in "\r\n"):
        raise StorageError(
            "storage options 'key', 'secret', 'token': found a line break, expected one line each.",
            kind=Kind.UNSUPPORTED,
        )
    lines = [f"[{_PROFILE}]", f"aws_access_key_id = {key}", f"aws_secret_access_key = {secret}"]
    lines += [f"aws_session_token = {token}"] if token else []
    content = ("\n".join(lines) + "\n").encode()
    held = _held.get((key, secret, token))
    if held is None:
        if hasattr(os, "memfd_create"):
            held = os.fdopen(os.memfd_create("ucpstore", os.MFD_CLOEXEC), "wb", buffering=0)
        else:
            held = tempfile.NamedTemporaryFile(prefix="ucpstore-", buffering=0)  # noqa: SIM115
        held.write(content)
        held = _held.setdefault((key, secret, token), held)
    return f"/proc/self/fd/{held.fileno()}" if hasattr(os, "memfd_create") else str(held.name)


def _gcs_spec(location: Location, options: Mapping[str, Any]) -> dict[str, Any]:
    """TensorStore keeps GCS endpoint and credentials per process, in environment variables."""
    if endpoint := options.get("endpoint_url"):
        _process_setting("TENSORSTORE_GCS_HTTP_URL", str(endpoint).rstrip("/"), "endpoint_url")
    token = options.get("token")
    if isinstance(token, str) and os.path.isfile(os.path.expanduser(token)):
        _process_setting("GOOGLE_APPLICATION_CREDENTIALS", os.path.expanduser(token), "token")
    elif token not in (None, "google_default", "cloud", "anon"):
        raise StorageError(
            f"storage option 'token': found a {type(token).__name__} that names no file, expected"
            " 'google_default', 'cloud', 'anon' or the path of a credentials file.",
            kind=Kind.UNSUPPORTED,
        )
    spec: dict[str, Any] = {
        "driver": "gcs",
        "bucket": location.bucket,
        "path": location.prefix,
        "gcs_request_retries": patience().for_tensorstore(),
    }
    if options.get("requester_pays"):
        project = options.get("project")
        if not project:
            raise StorageError(
                "storage option 'requester_pays': found no 'project', expected the one that pays.",
                kind=Kind.UNSUPPORTED,
            )
        spec["gcs_user_project"] = {"project_id": str(project)}
    return spec


def _process_setting(variable: str, value: str, option: str) -> None:
    found = os.environ.setdefault(variable, value)
    if found != value:
        raise StorageError(
            f"storage option {option!r}: found another value than that of the environment variable"
            f" {variable}, expected the same: TensorStore has one per process.",
            kind=Kind.UNSUPPORTED,
            hint="Use another process for the other server.",
        )


_KINDS = {
    "PERMISSION_DENIED": Kind.PERMISSION,
    "UNAUTHENTICATED": Kind.PERMISSION,
    "INVALID_ARGUMENT": Kind.UNSUPPORTED,
    "UNIMPLEMENTED": Kind.UNSUPPORTED,
}
_RETRYABLE = (
    "ABORTED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "UNKNOWN",
)


@contextmanager
def tensorstore_errors(action: str, url: str) -> Iterator[None]:
    """Translate TensorStore's errors: nearly all are a `ValueError` that begins with a status code.

    Raises
    ------
    StorageError, CheckpointNotFoundError
    """
    try:
        yield
    except UcpStoreError:
        raise
    except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
        # "from None": the original text holds whole HTTP responses, and signed headers with some.
        raise _translate(str(error), action, url) from None


def _translate(text: str, action: str, url: str) -> UcpStoreError:
    status, colon, detail = text.partition(": ")
    if not colon or not status.isupper():
        status, detail = "UNKNOWN", text
    detail = plain(detail.partition(" [")[0])[:300]
    if status == "NOT_FOUND":
        return CheckpointNotFoundError(f"cannot {action} {url!r}: {detail}.", url=url)
    known = refusal(text)
    kind = known.kind if known else _KINDS.get(status, Kind.IO)
    retryable = known.retryable if known else status in _RETRYABLE
    hint = CREDENTIALS if kind is Kind.PERMISSION else AGAIN if retryable else ""
    return StorageError(
        f"cannot {action} {url!r}: {detail} ({status}).",
        kind=kind,
        hint=known.hint if known else hint,
        retryable=retryable,
        url=url,
        status=status,
    )


_first_pid: int | None = None


def check_fork(url: str) -> None:
    """Refuse to use TensorStore in a forked child whose parent has used it: it would hang.

    Raises
    ------
    StorageError
        This process is such a child.
    """
    global _first_pid
    _first_pid = _first_pid or os.getpid()
    if _first_pid != os.getpid():
        raise StorageError(
            f"cannot open {url!r}: this process was forked from one that uses TensorStore, expected"
            " a fresh one.",
            hint="Start worker processes with the method 'forkserver' or 'spawn'.",
            url=url,
        )
