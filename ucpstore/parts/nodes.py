"""Converting rank files that lie on the disks of their nodes, by one process per node that sees only its own.

Every node publishes what opening its files needs: names, sizes, and the bytes of metadata. So all nodes open the
same checkpoint, make the same plan, and read tensors from their own files and from what others staged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ucpstore.claims import INDEX, VERSION, decode
from ucpstore.errors import IntegrityError, Kind, PlanError
from ucpstore.formats.deepspeed.files import LATEST, rank_of
from ucpstore.formats.deepspeed.stubs import index
from ucpstore.formats.torchfile import StubObject, TensorRef
from ucpstore.io.base import Files, FileStat
from ucpstore.parts.exchange import Exchange
from ucpstore.parts.files import Extent, SharedFiles

__all__ = ["Nodes", "meet"]

_SMALL_FILE = 64 << 10
"""Bytes up to which a file that is no rank file is published whole."""
_SMALL_TENSOR = 4 << 10
"""Bytes up to which a tensor is: steps, and what else is looked at to open a checkpoint."""


class _File(msgspec.Struct, frozen=True):
    """A file of a node, and those of its bytes that opening it needs."""

    name: str
    nbytes: int
    token: str
    modified: str
    ranges: tuple[tuple[int, bytes], ...]

    @property
    def stat(self) -> FileStat:
        return FileStat(self.name, self.nbytes, self.token, self.modified)


class _Node(msgspec.Struct, frozen=True):
    """What one node has."""

    version: str
    root: str
    files: tuple[_File, ...]


@dataclass(frozen=True, slots=True)
class Nodes:
    """All nodes of a conversion, as one of them sees them.

    Attributes
    ----------
    files : SharedFiles
        The files of all; of others' only the metadata, until they have staged more.
    holders : mapping of str to int
        Which node reads a file: the first that has it.
    exchange : Exchange
    """

    files: SharedFiles
    holders: Mapping[str, int]
    exchange: Exchange


def meet(
    own: Files, dest: Files, *, node: tuple[int, int], tag: str | None, timeout: float
) -> Nodes:
    """Publish this node's files at the destination, and wait for the others.

    Parameters
    ----------
    own : Files
        The root of this node.
    dest : Files
    node : (int, int)
        Which of how many nodes this is.
    tag : str, optional
        As for `ucpstore.open`.
    timeout : float, seconds

    Raises
    ------
    WorkerError
        A node did not come.
    IntegrityError
        Nodes have different files of the same name.
    SourceError
        A file cannot be read.
    """
    rank, count = node
    if not (type(rank) is int and type(count) is int and 0 <= rank < count):
        raise PlanError(f"cannot convert as node {node!r}: expected (index, count), index < count.")
    exchange = Exchange(dest, rank, count, timeout=timeout)
    mine = _Node(VERSION, own.url, tuple(_publish(own, tag)))
    documents = exchange.agree(msgspec.json.encode(mine))
    nodes = [decode(data, _Node, f"{INDEX}/{place}") for place, data in enumerate(documents)]
    holders: dict[str, int] = {}
    for place, one in enumerate(nodes):
        for file in one.files:
            first = holders.setdefault(file.name, place)
            if first != place:
                _require_same(nodes[first], one, file)
    files = SharedFiles(
        f"{{{','.join(one.root for one in nodes)}}}",
        own,
        mine=[name for name, place in holders.items() if place == rank],
        stats={
            file.name: file.stat
            for place, one in enumerate(nodes)
            for file in one.files
            if holders[file.name] == place
        },
    )
    files.attach(
        Extent(file.name, start, start + len(data), data)
        for place, one in enumerate(nodes)
        if place != rank
        for file in one.files
        if holders[file.name] == place
        for start, data in file.ranges
    )
    exchange.prepare(lambda: None)
    return Nodes(files, holders, exchange)


def _require_same(first: _Node, other: _Node, file: _File) -> None:
    """Copies of a file must be the same as far as opening looks at them; a zip's directory has all checksums."""
    one = next(mine for mine in first.files if mine.name == file.name)
    if (one.nbytes, one.ranges) != (file.nbytes, file.ranges):
        raise IntegrityError(
            f"{file.name} is not the same in {first.root} and in {other.root}: found {one.nbytes} and {file.nbytes}"
            " bytes, and other metadata; expected one file, or copies of it.",
            hint="Are these roots of one save? Remove the file that does not belong to it.",
            kind=Kind.REPLICAS_DIFFER,
            file=file.name,
        )


def _publish(own: Files, tag: str | None) -> Iterator[_File]:
    """What this node has of the checkpoint; of all where neither ``tag`` nor ``latest`` chooses one."""
    top = own.list(recursive=False)
    names = {stat.name for stat in top}
    if tag is None and LATEST in names:
        tag = own.read(LATEST, 0, _SMALL_FILE).decode("utf-8", "replace").strip()
    if any(rank_of(name) for name in names):
        stats = own.list()
    else:
        folders = own.folders() if tag is None else [tag.rstrip("/")]
        stats = [*top, *(stat for folder in folders for stat in own.list(folder))]
    reader = _Recorder(own, stats)
    for stat in stats:
        ranges: Sequence[tuple[int, bytes]] = ()
        if rank_of(stat.name) is not None:
            ranges = reader.metadata(stat.name)
        elif stat.nbytes <= _SMALL_FILE and not stat.name.endswith(".py"):
            ranges = [(0, own.read(stat.name))]
        yield _File(stat.name, stat.nbytes, stat.token, stat.modified, tuple(ranges))


class _Recorder(SharedFiles):
    """Files of this node, read as others will read them, and what was read."""

    def __init__(self, own: Files, stats: Sequence[FileStat]) -> None:
        super().__init__(own.url, own, mine=(), stats={stat.name: stat for stat in stats})
        self._read: dict[tuple[int, int], bytes] = {}

    def metadata(self, name: str) -> list[tuple[int, bytes]]:
        """What opening a rank file reads."""
        self._read = {}
        for tensor in _tensors(index(self, name).root):
            if 0 < tensor.span <= _SMALL_TENSOR:
                self.read(name, tensor.offset, tensor.span)
        return [(start, data) for (start, _), data in sorted(self._read.items())]

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = self._own.read(name, offset, nbytes)
        self._read[offset, len(data)] = data
        return data

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        data = memoryview(self.read(name, offset, sum(buffer.nbytes for buffer in buffers)))
        for buffer in buffers:
            buffer[: len(data)] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]


def _tensors(root: Any) -> Iterator[TensorRef]:
    """All tensors of a file's tree."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, TensorRef):
            yield value
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif isinstance(value, StubObject):
            waiting += [value.state, value.contents]
