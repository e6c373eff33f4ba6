"""How a store is committed: claims and done records (`ucpstore.claims`), then the root document.

**Root**: ``zarr.json`` with ``attributes.ucpstore.plan_digest`` is the commit, written last. A root
without it, such as zarr-python leaves behind after ``open_group(url, mode="a")``, is not one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ucpstore.claims import ClaimLog, current_claim
from ucpstore.errors import AlreadyExistsError, CheckpointNotFoundError
from ucpstore.io.base import Files
from ucpstore.store.documents import ROOT, RootAttributes, load_json, root_attributes

__all__ = ["CommitLog", "current_claim", "read_root"]


def read_root(files: Files) -> bytes | None:
    """The root document as stored, or ``None`` where there is none."""
    try:
        return files.read(ROOT)
    except CheckpointNotFoundError:
        return None


class CommitLog(ClaimLog):
    """The claims of a store, and its root document."""

    ignored = frozenset({ROOT})

    def write_root(self, document: bytes) -> None:
        """Commit. Only under a seal, with every other document of the checkpoint durable.

        Raises
        ------
        AlreadyExistsError
            The seal is no longer the last claim: the checkpoint was committed by somebody else and has
            been deleted since (``ABANDONED``).
        """
        self.check(cached=False)
        if self._files.create(ROOT, document) or self.committed():
            return
        # What is there is the empty group that was there when the plan began; only writers of this
        # plan's bytes get here, because the claim is sealed.
        self._files.write(ROOT, document)

    def _attributes(self) -> RootAttributes | None:
        """What the root says, where it is a commit."""
        return _attributes(read_root(self._files), self._files.url)

    def _is_visible(self) -> bool:
        return self._attributes() is not None

    def _committed(self, digest: str) -> bool:
        document = read_root(self._files)
        attributes = _attributes(document, self._files.url)
        if attributes is not None:
            if attributes.plan_digest == digest:
                return True
            raise AlreadyExistsError(
                f"{self._files.url} holds a committed checkpoint of another plan: "
                f"found {attributes.plan_digest}, expected {digest}.",
                hint="Choose another destination: a checkpoint is never overwritten in place.",
                url=self._files.url,
            )
        if document is not None and not _is_empty_group(document):
            raise AlreadyExistsError(
                f"{self._files.url}/{ROOT} belongs to something else: expected no root document or an "
                "empty Zarr group without attributes.",
                hint="Choose another destination.",
                url=self._files.url,
            )
        return False


def _attributes(document: bytes | None, url: str) -> RootAttributes | None:
    value = _parse(document)
    return None if value is None else root_attributes(value, f"{url}/{ROOT}")


def _parse(document: bytes | None) -> Mapping[str, Any] | None:
    if document is None:
        return None
    try:
        value = load_json(document)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _is_empty_group(document: bytes) -> bool:
    """Whether the root is a Zarr group without attributes and (consolidated) children."""
    value = _parse(document)
    if value is None or value.get("node_type") != "group" or value.get("attributes"):
        return False
    consolidated = value.get("consolidated_metadata") or {}
    return isinstance(consolidated, dict) and not consolidated.get("metadata")
