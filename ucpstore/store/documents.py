"""The JSON documents of a store: root attributes, claims and done records.

Their schemas are ``schemas/{root,claim,done}.schema.json``. Every document carries ``version`` as
``"major.minor"``: readers accept any minor version (unknown fields are ignored) and refuse an unknown
major one. Encoding is deterministic: sorted keys, no timestamps, no host names, no paths.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ucpstore.contracts import Record
from ucpstore.errors import FormatVersionError, IntegrityError, Kind, PlanError

__all__ = [
    "FORMAT",
    "ROOT",
    "VERSION",
    "Claim",
    "Done",
    "RootAttributes",
    "claim_name",
    "claim_number",
    "decode",
    "done_name",
    "dump_json",
    "encode",
    "load_json",
    "root_attributes",
]

FORMAT = "ucpstore"
VERSION = "1.0"
ROOT = "zarr.json"
CLAIMS = ".ucpstore/claims"
DONE = ".ucpstore/done"

_Document = TypeVar("_Document", bound="Claim | Done | RootAttributes")


class RootAttributes(msgspec.Struct, frozen=True, kw_only=True):
    """``attributes.ucpstore`` of the root group: its presence is what commits a checkpoint.

    Attributes
    ----------
    version, format : str
    plan_digest : str
        Digest of the plan that wrote the checkpoint.
    num_objects, num_arrays, num_parameters : int
    nbytes : int
        Bytes of all stored objects, metadata not counted.
    source : mapping
        What it was made from: ``format`` and ``parallelism``.
    step : int, optional
        Training step, where the source tells one.
    checksum : str
        Over these attributes and all consolidated metadata, see `ucpstore.store.hierarchy.checksum`;
        empty in checkpoints that were written without.
    """

    version: str
    plan_digest: str
    num_objects: int
    num_arrays: int
    num_parameters: int
    nbytes: int
    source: Mapping[str, Any]
    format: str = FORMAT
    step: int | None = None
    checksum: str = ""


class Claim(msgspec.Struct, frozen=True):
    """Who may write to a destination: the claim with the highest number is the current one.

    Attributes
    ----------
    version : str
    plan_digest : str or None
        The plan that owns the destination; ``None``: its owner was declared dead, it is free.
    epoch : int
        Number of the claim that opened this ownership.
    sealed : bool
        Every object was checked and the root document is about to be written; from here on the
        claim cannot be abandoned, only finished.
    """

    version: str
    plan_digest: str | None
    epoch: int
    sealed: bool = False


class Done(msgspec.Struct, frozen=True):
    """A batch of finished tasks whose objects are durable.

    ``records`` holds ``[task, nbytes, token, digest]`` with the partial digest as 32 hex digits.
    """

    version: str
    plan_digest: str
    epoch: int
    records: tuple[tuple[int, int, str, str], ...]

    @classmethod
    def of(cls, digest: str, epoch: int, records: Sequence[Record]) -> Done:
        """The document for ``records``, in task order so that equal batches are equal bytes."""
        rows = sorted((r.task, r.nbytes, r.token, f"{r.digest:032x}") for r in records)
        return cls(VERSION, digest, epoch, tuple(rows))

    def to_records(self) -> list[Record]:
        return [
            Record(task, nbytes, token, int(digest, 16))
            for task, nbytes, token, digest in self.records
        ]


def claim_name(number: int) -> str:
    """Object name of claim ``number`` (1, 2, ...)."""
    return f"{CLAIMS}/{number:06d}.json"


def claim_number(name: str) -> int | None:
    """Number of the claim with this object name; ``None`` for any other object."""
    stem = name.removeprefix(f"{CLAIMS}/").removesuffix(".json")
    return (
        int(stem) if stem.isascii() and stem.isdigit() and claim_name(int(stem)) == name else None
    )


def done_name(epoch: int, content: bytes) -> str:
    """Object name of a done document: the same batch always has the same name."""
    return f"{DONE}/{epoch:06d}-{hashlib.sha256(content).hexdigest()[:24]}.json"


def dump_json(value: Any, what: str) -> bytes:
    """``value`` as deterministic JSON (sorted keys, ASCII, one trailing newline).

    Raises
    ------
    PlanError
        ``value`` holds something that JSON lacks: NaN, an infinity, or a Python object.
    """
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"{what} cannot be written as JSON: {error}; expected JSON values only.",
            hint="Tag other values as ucpstore.tagged does.",
        ) from error
    return text.encode("ascii") + b"\n"


def load_json(data: bytes) -> Any:
    """Parse JSON: fast, and also where strings hold lone surrogates, which msgspec refuses.

    Raises
    ------
    ValueError
        Not JSON, or nested too deeply.
    """
    try:
        return msgspec.json.decode(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(data)


def encode(document: Claim | Done | RootAttributes) -> bytes:
    """The bytes of a document."""
    return dump_json(msgspec.to_builtins(document), type(document).__name__)


def decode(data: bytes, cls: type[_Document], name: str) -> _Document:
    """Parse the document with object name ``name``.

    Raises
    ------
    FormatVersionError
        Written by another major version.
    IntegrityError
        Not a document of this kind.
    """
    try:
        value = load_json(data)
    except ValueError as error:
        raise _malformed(name, error) from error
    return _convert(value, cls, name)


def root_attributes(document: Mapping[str, Any], name: str) -> RootAttributes | None:
    """What makes a root document a commit; ``None`` where it is a foreign group."""
    attributes = document.get("attributes")
    ours = attributes.get(FORMAT) if isinstance(attributes, dict) else None
    if not isinstance(ours, dict) or "plan_digest" not in ours:
        return None
    return _convert(ours, RootAttributes, name)


def _convert(value: Any, cls: type[_Document], name: str) -> _Document:
    version = value.get("version") if isinstance(value, dict) else None
    if isinstance(version, str) and version.split(".")[0] != VERSION.split(".")[0]:
        raise FormatVersionError(
            f"{name} has format version {version!r}: expected {VERSION.split('.')[0]}.x.",
            hint="Read it with a release of ucpstore that knows this version.",
            name=name,
        )
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        raise _malformed(name, error) from error


def _malformed(name: str, error: Exception) -> IntegrityError:
    return IntegrityError(
        f"{name} is not a ucpstore document: {error}.", kind=Kind.MALFORMED, name=name
    )
