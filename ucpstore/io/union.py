"""Several roots as one: the files of a checkpoint that its nodes wrote to storage of their own."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ucpstore.errors import CheckpointNotFoundError, IntegrityError, Kind, StorageError, listing
from ucpstore.io.base import Files, FileStat
from ucpstore.io.readonly import ReadOnly

__all__ = ["UnionFiles"]

_BLOCK = 4 << 20


class UnionFiles(ReadOnly):
    """Files under any of several roots, by the same relative names. Read-only; picklable.

    A file that lies in several roots is the same file: of the same size, and of the same time of change (or
    ETag) or else of the same bytes. This is looked at when the file is used for the first time, so that files
    that nobody asks for may differ.

    Parameters
    ----------
    roots : sequence of Files
        The first that holds a file is the one that it is read from.
    """

    def __init__(self, roots: Sequence[Files]) -> None:
        self.roots = tuple(roots)
        self.url = f"{{{','.join(root.url for root in roots)}}}"
        self.is_local = all(root.is_local for root in roots)
        self.options: Mapping[str, Any] = roots[0].options
        self._homes: dict[str, Files] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<UnionFiles {self.url}>"

    def __getstate__(self) -> dict[str, Any]:
        return {"roots": self.roots}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        UnionFiles.__init__(self, state["roots"])

    def folders(self, prefix: str = "") -> list[str]:
        """See `ucpstore.io.base.Files.folders`."""
        return sorted({name for root in self.roots for name in root.folders(prefix)})

    def list(self, prefix: str = "", *, recursive: bool = True) -> list[FileStat]:
        """See `ucpstore.io.base.Files.list`."""
        found: dict[str, FileStat] = {}
        for root in self.roots:
            for stat in root.list(prefix, recursive=recursive):
                found.setdefault(stat.name, stat)
        return sorted(found.values(), key=lambda stat: stat.name)

    def stat(self, name: str) -> FileStat | None:
        """See `ucpstore.io.base.Files.stat`."""
        home = self._home(name)
        return None if home is None else home.stat(name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `ucpstore.io.base.Files.read`."""
        return self._require(name).read(name, offset, nbytes)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `ucpstore.io.base.Files.read_into`."""
        self._require(name).read_into(name, offset, buffers)

    # ------------------------------------------------------------------ internal

    def _home(self, name: str) -> Files | None:
        """The root that a file is read from, once its copies in others are known to be the same."""
        with self._lock:
            if name not in self._homes:
                held = [(root, stat) for root in self.roots if (stat := root.stat(name))]
                if not held:
                    return None
                for other in held[1:]:
                    _require_same(held[0], other)
                self._homes[name] = held[0][0]
            return self._homes[name]

    def _require(self, name: str) -> Files:
        home = self._home(name)
        if home is None:
            raise CheckpointNotFoundError(
                f"{name} is in none of the roots {listing(root.url for root in self.roots)}.",
                name=name,
            )
        return home

    def _refuse(self, name: str) -> NoReturn:
        raise StorageError(
            f"cannot write {name} to {self.url}: several roots are only read from.",
            kind=Kind.UNSUPPORTED,
        )


def _require_same(first: tuple[Files, FileStat], other: tuple[Files, FileStat]) -> None:
    """Refuse copies of one file that differ."""
    (one, mine), (two, theirs) = first, other
    if mine.nbytes != theirs.nbytes:
        found = f"{mine.nbytes} and {theirs.nbytes} bytes"
    elif mine.modified == theirs.modified and (mine.modified or mine.token == theirs.token):
        return
    else:
        place = _first_difference(one, two, mine.name, mine.nbytes)
        if place is None:
            return
        found = f"{mine.nbytes} bytes each, other times of change, and they differ at byte {place}"
    raise IntegrityError(
        f"{mine.name} is not the same in {one.url} and in {two.url}: found {found}; expected one file, or copies"
        " of it.",
        hint="Are these roots of one save? Remove the file that does not belong to it.",
        kind=Kind.REPLICAS_DIFFER,
        file=mine.name,
        roots=[one.url, two.url],
    )


def _first_difference(one: Files, two: Files, name: str, nbytes: int) -> int | None:
    """Where two files of equal size begin to differ."""
    for start in range(0, nbytes, _BLOCK):
        size = min(_BLOCK, nbytes - start)
        left, right = one.read(name, start, size), two.read(name, start, size)
        if left != right:
            pairs = enumerate(zip(left, right, strict=False))
            return start + next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
    return None
