"""S3 in fsspec's words: endpoint, region and the clients that storage options ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ucpstore.errors import Kind, StorageError
from ucpstore.io.retries import patience
from ucpstore.io.urls import OWN_OPTIONS

__all__ = ["s3_client", "s3_endpoint", "s3_filesystem", "s3_region"]

_ONCE = {"mode": "standard", "total_max_attempts": 1}  # see `ucpstore.io.retries`
_CONNECTIONS = 64  # per client: more threads than that wait


def s3_endpoint(options: Mapping[str, Any]) -> str | None:
    """Endpoint URL from the options or, as botocore does it, from the environment."""
    found = options.get("endpoint_url") or (options.get("client_kwargs") or {}).get("endpoint_url")
    found = found or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return str(found).rstrip("/") if found else None


def s3_region(options: Mapping[str, Any]) -> str | None:
    """Region from the options, the environment or the profile; ``us-east-1`` for other servers.

    Raises
    ------
    StorageError
        There is no such profile.
    """
    found = (options.get("client_kwargs") or {}).get("region_name") or os.environ.get("AWS_REGION")
    if not found:
        found = _session(options).get_config_variable("region")
    if not found and s3_endpoint(options):
        found = "us-east-1"
    return str(found) if found else None


def s3_filesystem(options: Mapping[str, Any]) -> Any:
    """An s3fs file system that caches nothing."""
    import s3fs

    endpoint, region = s3_endpoint(options), s3_region(options)
    patient: dict[str, Any] = {"connect_timeout": patience().connect_seconds}
    patient |= {"read_timeout": patience().idle_seconds, "retries": _ONCE}
    elsewhere = ("client_kwargs", "endpoint_url", *OWN_OPTIONS)
    given = {k: v for k, v in options.items() if k not in elsewhere}
    filesystem = s3fs.S3FileSystem(
        **given,
        endpoint_url=endpoint,
        client_kwargs={"region_name": region} if region else {},
        config_kwargs={**_addressing(endpoint), **patient},
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    filesystem.retries = 1
    return filesystem


def s3_client(options: Mapping[str, Any]) -> Any:
    """A botocore client, for puts: it sends a body from where it lies, in the calling thread."""
    import botocore
    from botocore.config import Config

    endpoint = s3_endpoint(options)
    config = Config(
        **_addressing(endpoint),
        max_pool_connections=_CONNECTIONS,
        connect_timeout=patience().connect_seconds,
        read_timeout=patience().idle_seconds,
        retries=_ONCE,
        # Every chunk carries a crc32c; not every server knows the newer checksum headers.
        request_checksum_calculation="when_required",
        signature_version=botocore.UNSIGNED if options.get("anon") else None,
    )
    return _session(options).create_client(
        "s3",
        region_name=s3_region(options),
        endpoint_url=endpoint,
        aws_access_key_id=options.get("key"),
        aws_secret_access_key=options.get("secret"),
        aws_session_token=options.get("token"),
        config=config,
    )


def _addressing(endpoint: str | None) -> dict[str, Any]:
    """``http://host/bucket/key`` for servers other than AWS, as TensorStore has it."""
    return {"s3": {"addressing_style": "path"}} if endpoint else {}


def _session(options: Mapping[str, Any]) -> Any:
    import botocore.exceptions
    import botocore.session

    session = botocore.session.Session(profile=options.get("profile"))
    try:
        session.get_config_variable("region")
    except botocore.exceptions.ProfileNotFound as error:
        raise StorageError(
            f"storage option 'profile': found {options.get('profile')!r}, expected a profile of the"
            " AWS configuration files.",
            kind=Kind.NAME,
        ) from error
    return session
