"""The JSON documents of a store: root attributes, claims and done records.

Their schemas are ``schemas/{root,claim,done}.schema.json``. Every document carries ``version`` as
``"major.minor"``: readers accept any minor version (unknown fields are ignored) and refuse an unknown
major one. Encoding is deterministic: sorted keys, no timestamps, no host names, no paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ucpstore.claims import (
    CLAIMS,
    DONE,
    VERSION,
    Claim,
    Done,
    claim_name,
    claim_number,
    convert,
    decode,
    done_name,
    dump_json,
    encode,
    load_json,
)

__all__ = [
    "CLAIMS",
    "DONE",
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
ROOT = "zarr.json"


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


def root_attributes(document: Mapping[str, Any], name: str) -> RootAttributes | None:
    """What makes a root document a commit; ``None`` where it is a foreign group."""
    attributes = document.get("attributes")
    ours = attributes.get(FORMAT) if isinstance(attributes, dict) else None
    if not isinstance(ours, dict) or "plan_digest" not in ours:
        return None
    return convert(ours, RootAttributes, name)
