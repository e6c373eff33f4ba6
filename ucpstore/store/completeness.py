"""Whether everything that a root document names is there, by listings alone: no object is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ucpstore.errors import IntegrityError, Kind, listing
from ucpstore.io.base import Files
from ucpstore.store.arrays import ArraySpec
from ucpstore.store.documents import ROOT
from ucpstore.store.hierarchy import COMMON, PARAMS

__all__ = ["Absence", "absent_objects", "require_objects"]


@dataclass(frozen=True, slots=True)
class Absence:
    """An object that is not there, or not of the size that it must have.

    Attributes
    ----------
    key : str
        Name under the checkpoint's URL.
    fqn, state : str
        What it belongs to; the path of a group, and ``zarr.json``.
    nbytes, expected : int or None
        Bytes found (None: there is no object), and expected (None: metadata, of any size).
    """

    key: str
    fqn: str
    state: str
    nbytes: int | None
    expected: int | None

    @property
    def message(self) -> str:
        if self.nbytes is None:
            return f"{self.key} is not there"
        return f"{self.key} has {self.nbytes} bytes, expected {self.expected}"


def absent_objects(
    files: Files, nodes: Iterable[str], metadata: Mapping[str, Mapping[str, Any]]
) -> list[Absence]:
    """Compare two listings with what the root document says.

    Parameters
    ----------
    files : Files
        The checkpoint's folder.
    nodes : iterable of str
        Paths of all groups and arrays below the root.
    metadata : mapping of str to mapping
        ``zarr.json`` of every array, by path.
    """
    sizes = {stat.name: stat.nbytes for top in (PARAMS, COMMON) for stat in files.list(top)}
    found = [
        Absence(f"{path}/{ROOT}", path, ROOT, None, None)
        for path in nodes
        if f"{path}/{ROOT}" not in sizes
    ]
    for path, document in metadata.items():
        array = ArraySpec.from_metadata(path, document)
        fqn, state = array.members[0]
        if document["codecs"] != array.metadata()["codecs"]:
            continue  # of another tool: it may leave objects out, and compress
        for index in range(array.num_objects):
            key, expected = array.object_key(index), array.object_nbytes(index)
            if sizes.get(key) != expected:
                found.append(Absence(key, fqn, state, sizes.get(key), expected))
    return found


def require_objects(url: str, absent: list[Absence]) -> None:
    """Refuse a checkpoint that lacks objects.

    Raises
    ------
    IntegrityError
        Kind ``LOST_OBJECT``; all of them are in the context.
    """
    if absent:
        raise IntegrityError(
            f"{url} is incomplete: {len(absent)} objects that its root document names are missing or of"
            f" another size: {listing((a.message for a in absent), cap=5)}.",
            kind=Kind.LOST_OBJECT,
            hint="If it is being copied, wait until that is done; else restore it from a copy.",
            url=url,
            objects=[a.key for a in absent],
        )
