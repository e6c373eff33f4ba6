"""URLs and storage options: what they may be, and their translation to drivers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from ucpstore.errors import Kind, StorageError, close_names, listing

__all__ = ["OWN_OPTIONS", "Location", "check_options", "parse_url"]

SCHEMES = ("file", "memory", "s3", "gs")

_OPTIONS: dict[str, tuple[str, ...]] = {
    "file": (),
    "memory": (),
    "s3": (
        "anon",
        "client_kwargs",
        "endpoint_url",
        "key",
        "profile",
        "requester_pays",
        "secret",
        "token",
        "unsafe_commit",
    ),
    "gs": ("endpoint_url", "project", "requester_pays", "token", "unsafe_commit"),
}
OWN_OPTIONS = ("unsafe_commit",)
"""Storage options that are ours and not fsspec's."""
_CLIENT_KWARGS = ("endpoint_url", "region_name")


@dataclass(frozen=True, slots=True)
class Location:
    """A URL taken apart.

    Attributes
    ----------
    scheme : str
        ``file``, ``memory``, ``s3`` or ``gs``.
    path : str
        Absolute folder; or ``bucket/prefix`` (``prefix`` on memory), without slashes at the ends.
    """

    scheme: str
    path: str

    @property
    def url(self) -> str:
        """Normal form: an absolute path or ``scheme://path``."""
        return self.path if self.scheme == "file" else f"{self.scheme}://{self.path}"

    @property
    def bucket(self) -> str:
        return self.path.partition("/")[0]

    @property
    def prefix(self) -> str:
        """Key of the folder within the bucket, with a ``/`` at the end unless it is empty."""
        inner = self.path.partition("/")[2]
        return inner + "/" if inner else ""


def parse_url(url: str | os.PathLike[str]) -> Location:
    """Take a plain path or a ``file://``, ``memory://``, ``s3://`` or ``gs://`` URL apart.

    Raises
    ------
    StorageError
        It is empty, the scheme is unknown, or a bucket is missing.
    """
    text = os.fsdecode(url)
    if not text or "\0" in text:
        raise StorageError(
            f"cannot open {text!r}: expected a path or a URL.", kind=Kind.NAME, url=text
        )
    if "://" not in text:
        return Location("file", os.path.abspath(os.path.expanduser(text)))
    scheme, _, rest = text.partition("://")
    scheme = {"gcs": "gs", "s3a": "s3"}.get(scheme.lower(), scheme.lower())
    if scheme not in SCHEMES:
        raise StorageError(
            f"cannot open {redact(text)!r}: found the scheme {scheme!r}, expected a plain path or"
            f" one of {listing(name + '://' for name in SCHEMES)}.",
            kind=Kind.NAME,
            hint=close_names(scheme, SCHEMES),
        )
    if scheme == "file":
        return Location("file", _file_path(text, rest))
    path = "/".join(part for part in rest.split("/") if part)
    if {".", ".."} & set(path.split("/")) or "@" in path.partition("/")[0]:
        raise StorageError(
            f"cannot open {redact(text)!r}: expected {scheme}://BUCKET/FOLDER without credentials,"
            " '.' or '..'.",
            kind=Kind.NAME,
        )
    if scheme != "memory" and not path:
        raise StorageError(
            f"cannot open {text!r}: it names no bucket, expected {scheme}://BUCKET/FOLDER.",
            kind=Kind.NAME,
        )
    return Location(scheme, path)


def _file_path(text: str, rest: str) -> str:
    if rest.startswith("~"):
        return os.path.abspath(os.path.expanduser(rest))
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise StorageError(
            f"cannot open {text!r}: found the host {parts.netloc!r}, expected file:///ABSOLUTE/PATH.",
            kind=Kind.NAME,
        )
    return os.path.abspath(unquote(rest.removeprefix("localhost")))


def redact(url: str) -> str:
    """``url`` without user name and password."""
    scheme, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}" if mark else url


def check_options(scheme: str, options: Mapping[str, Any]) -> None:
    """Refuse storage options that a scheme does not know, naming those it does.

    Raises
    ------
    StorageError
    """
    _refuse_unknown(f"{scheme} storage option", options, _OPTIONS[scheme])
    inner = options.get("client_kwargs") or {}
    if not isinstance(inner, Mapping):
        raise StorageError(
            f"storage option 'client_kwargs': found {type(inner).__name__}, expected a mapping.",
            kind=Kind.UNSUPPORTED,
        )
    _refuse_unknown("entry of the storage option 'client_kwargs'", inner, _CLIENT_KWARGS)


def _refuse_unknown(what: str, found: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in found:
        if name not in known:
            expected = f"expected one of {listing(known)}" if known else "expected none"
            raise StorageError(
                f"unknown {what} {name!r}: {expected}.",
                kind=Kind.UNSUPPORTED,
                hint=close_names(name, known),
            )
