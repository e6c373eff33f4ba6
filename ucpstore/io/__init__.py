"""Byte objects behind a URL: listing, ranged reads, whole-object writes and exclusive creation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ucpstore.errors import Kind, StorageError
from ucpstore.io.base import Files, FileStat, Sink
from ucpstore.io.urls import check_options, parse_url

__all__ = ["FileStat", "Files", "Sink", "Url", "open_files", "open_roots", "root_urls"]

Url = str | os.PathLike[str]


def open_files(url: Url, options: Mapping[str, Any] | None = None) -> Files:
    """Files under a URL prefix. Nothing is read or created.

    Parameters
    ----------
    url : str or path
        A plain path (``~`` is expanded), ``file://``, ``memory://``, ``s3://BUCKET/FOLDER`` or
        ``gs://BUCKET/FOLDER`` (``gcs://``).
    options : mapping, optional
        Storage options in fsspec's words. S3: ``key``, ``secret``, ``token``, ``profile``,
        ``anon``, ``endpoint_url``, ``requester_pays``, ``client_kwargs`` (``region_name``). GCS:
        ``token``, ``project``, ``endpoint_url``, ``requester_pays``. Both: ``unsafe_commit``, to write
        to a store that ignores the conditions of writes. Two conversions that begin there at the same
        time can mix; nothing else changes, and one conversion with all its workers is safe.

    Raises
    ------
    StorageError
        The scheme or an option is unknown; the message names the valid ones.
    """
    location = parse_url(url)
    options = dict(options or {})
    check_options(location.scheme, options)
    if location.scheme == "file":
        from ucpstore.io.local import LocalFiles

        return LocalFiles(location.path)
    if location.scheme == "memory":
        from ucpstore.io.memory import MemoryFiles

        return MemoryFiles(location, options)
    from ucpstore.io.remote import RemoteFiles

    return RemoteFiles(location, options)


def root_urls(source: Url | Sequence[Url]) -> tuple[str, ...]:
    """The root or roots of a source, in full and each once.

    Raises
    ------
    StorageError
        There is none, or one is no URL.
    """
    roots = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not roots:
        raise StorageError(
            "cannot open a source without a root: expected one URL or several.", kind=Kind.NAME
        )
    return tuple(dict.fromkeys(parse_url(root).url for root in roots))


def open_roots(source: Url | Sequence[Url], options: Mapping[str, Any] | None = None) -> Files:
    """Files under one root, or under any of several; see `open_files` and `ucpstore.io.union`."""
    roots = root_urls(source)
    if len(roots) == 1:
        return open_files(roots[0], options)
    from ucpstore.io.union import UnionFiles

    return UnionFiles([open_files(root, options) for root in roots])
