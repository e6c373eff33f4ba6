"""`ZarrTarget`: a source becomes one Zarr hierarchy, object by object, and visible at once.

The steps are those of `ucpstore.commit`, and the root document is the commit. Committed bytes hold no
timestamps, host names, paths or URLs: the same inputs give the same bytes, whatever the number of workers,
the order of tasks and the crashes on the way.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, overload

from ucpstore.claims import PARTS, STAGING
from ucpstore.commit import LoggedTarget
from ucpstore.contracts import Arrays, ParameterSpec, Record, Source, Task
from ucpstore.digest import TileDigest, merge
from ucpstore.errors import IntegrityError, Kind, PlanError, listing
from ucpstore.io.base import Files, FileStat, Sink
from ucpstore.layout.region import Region
from ucpstore.store.arrays import ArraySpec
from ucpstore.store.documents import ROOT, VERSION, RootAttributes, encode
from ucpstore.store.encoder import encode_object, encoder_memory
from ucpstore.store.hierarchy import COMMON, PARAMS, child_documents, root_document
from ucpstore.store.protocol import CommitLog
from ucpstore.store.reading import ArrayReader

__all__ = ["ZarrTarget"]

_ROOT_LIMIT = 64 * 1024  # bytes of the root document without its consolidated part
_PUT_THREADS = 16
_PUT_COPIES = 3
"""Copies of an object in memory around a put: the sink's, TensorStore's while it sends, and that of the
put before it, which its HTTP client lets go of late (measured: 196 MiB for objects of 64 MiB)."""


def _facts(source: Source, arrays: Sequence[ArraySpec]) -> dict[str, Any]:
    """Facts about the source; ``left_out`` counts states that a selection left out, now or before."""
    facts = dict(source.parallelism)
    stored = {member for array in arrays for member in array.members}
    left_out = sum(
        not spec.derived and (fqn, state) not in stored
        for fqn, parameter in source.parameters.items()
        for state, spec in parameter.states.items()
    )
    before = facts.get("left_out", 0)
    if left_out:
        facts["left_out"] = left_out + (before if isinstance(before, int) else 0)
    return facts


class ZarrTarget(LoggedTarget):
    """A Zarr hierarchy to be written. Picklable; `write` is safe to call from many threads.

    Parameters
    ----------
    files : Files
        The destination.
    arrays : sequence of ArraySpec
        Arrays to write; those of the common state lie under ``common/``.
    source : Source
        Described, not kept: parameters, common document, format and parallelism.
    step : int, optional
        Training step.

    Raises
    ------
    PlanError
        The common state or the attributes hold something that JSON lacks.
    """

    format = "zarr"
    _log: CommitLog

    def __init__(
        self, files: Files, arrays: Sequence[ArraySpec], *, source: Source, step: int | None = None
    ) -> None:
        super().__init__(files, CommitLog(files))
        self._arrays = tuple(arrays)
        self._starts = (0, *itertools.accumulate(array.num_objects for array in arrays))
        self._parameters: Mapping[str, ParameterSpec] = source.parameters
        self._common = dict(source.common.document)
        self._source = {"format": source.format, "parallelism": _facts(source, arrays)}
        self._step = step
        self._expected = _recorded_digests(arrays, source)
        size = len(encode(self._attributes("0" * 64, 0)))
        if size >= _ROOT_LIMIT:
            raise PlanError(
                f"the description of the source takes {size} bytes of the root document, "
                f"expected less than {_ROOT_LIMIT}."
            )

    def __repr__(self) -> str:
        return f"<ZarrTarget {self.url!r}: {len(self._arrays)} arrays, {self._starts[-1]} objects>"

    # ------------------------------------------------------------------ plan

    def document(self) -> Mapping[str, Any]:
        """Everything that decides the target's bytes.

        The metadata of all nodes (paths, shapes, dtypes, tiles, shards, members, the parameters'
        attributes, the common document) goes in as one hash, so that its size is independent of
        the number of arrays.
        """
        nodes = hashlib.sha256()
        for path, document in child_documents(self._arrays, self._parameters, self._common):
            nodes.update(path.encode() + b"\0" + document)
        return {
            "target": "zarr",
            "version": VERSION,
            "num_arrays": len(self._arrays),
            "num_objects": self._starts[-1],
            "nodes_sha256": nodes.hexdigest(),
            "source": self._source,
            "step": self._step,
        }

    def tasks(self) -> Sequence[Task]:
        """All objects to write; made when they are looked at, since there may be very many."""
        return _Tasks(self._arrays, self._starts)

    def needs(self, task: int) -> list[tuple[str, str, Region]]:
        """What the object of a task is made of: (fqn, state, region of the state)."""
        array, index = self._locate(task)
        region = array.object_region(index)
        if not array.stacked:
            return [(*array.members[0], region)]
        inner = Region(region.offsets[1:], region.sizes[1:])
        return [(*member, inner) for member in array.members[region.offsets[0] : region.stops[0]]]

    def committed(self) -> bool:
        """Whether the plan that was begun is visible.

        Raises
        ------
        AlreadyExistsError
            It is not, and never will be: the destination was abandoned (``ABANDONED``).
        """
        if self._log.committed():
            return True
        self._log.check()
        return False

    def task_memory(self) -> int:
        """Bytes that one `write` in flight needs: the encoder's buffers, and remotely the object too."""
        buffers = max(map(encoder_memory, self._arrays), default=0)
        if self.is_local:
            return buffers
        # Objects at the start of the grid are whole, so that no other one is larger.
        largest = max((a.object_nbytes(0) for a in self._arrays if a.num_objects), default=0)
        return buffers + _PUT_COPIES * largest

    def stored_nbytes(self) -> int:
        """Bytes of the objects that are at the destination, of any attempt."""
        return sum(stat.nbytes for stat in self._objects().values())

    def records(self) -> Mapping[int, Record]:
        """See `ucpstore.commit.LoggedTarget.records`; without those of arrays that were read damaged.

        A byte that was changed on the way from the source is found by the digest that the source recorded.
        What was written of it is durable, and would be found at every further attempt: it is read anew.
        """
        found = dict(super().records())
        for array, start, stop in zip(self._arrays, self._starts, self._starts[1:], strict=False):
            expected = self._expected.get(array.path)
            tasks = range(start, stop)
            if expected is None or not all(task in found for task in tasks):
                continue
            value = merge(found[task].digest for task in tasks)
            if str(TileDigest(array.logical_dtype, array.shape, value)) != expected:
                for task in tasks:
                    del found[task]
        return found

    # -------------------------------------------------------------- internal

    def _attributes(self, digest: str, nbytes: int) -> RootAttributes:
        stored = {fqn for array in self._arrays for fqn, _ in array.members}
        return RootAttributes(
            version=VERSION,
            plan_digest=digest,
            num_objects=self._starts[-1],
            num_arrays=len(self._arrays),
            num_parameters=len(stored & self._parameters.keys()),
            nbytes=nbytes,
            source=self._source,
            step=self._step,
        )

    def _locate(self, task: int) -> tuple[ArraySpec, int]:
        """The array that task ``task`` belongs to, and the object's index in it."""
        position = bisect.bisect_right(self._starts, task) - 1
        return self._arrays[position], task - self._starts[position]

    def _objects(self) -> dict[str, FileStat]:
        found = self._files.list(PARAMS) + self._files.list(COMMON)
        return {stat.name: stat for stat in found}

    def _encode(self, task: Task, source: Source, sink: Sink) -> int:
        array, index = self._locate(task.index)
        return encode_object(array, index, functools.partial(_read, array, source), sink)

    def _read_back(self, task: Task, name: str) -> int | None:
        array, index = self._locate(task.index)
        try:
            return ArrayReader(self._files).digest_object(array, index)
        except IntegrityError:
            return None

    def _check(self, records: Mapping[int, Record]) -> Mapping[int, Record]:
        """Also against the digests that the source recorded."""
        chosen = super()._check(records)
        digests = self._digests(chosen)
        damaged = [path for path, digest in self._expected.items() if digests[path] != digest]
        if damaged:
            raise IntegrityError(
                f"{self.url} cannot be committed: what was read of {len(damaged)} arrays does not have the"
                f" digest that the source recorded: {listing(damaged)}.",
                kind=Kind.CHECKSUM,
                hint="Run the same command again, which reads them anew. If it says so again, the source is"
                " damaged: run `ucpstore verify` on it.",
                url=self.url,
            )
        return chosen

    def _digests(self, records: Mapping[int, Record]) -> dict[str, str]:
        """Digest of every array, by path."""
        digests = {}
        for array, start, stop in zip(self._arrays, self._starts, self._starts[1:], strict=False):
            value = merge(records[task].digest for task in range(start, stop))
            digests[array.path] = str(TileDigest(array.logical_dtype, array.shape, value))
        return digests

    def _strays(self) -> Sequence[str]:
        wanted = {task.key for task in self.tasks()}
        wanted |= {f"{array.path}/{ROOT}" for array in self._arrays}
        strays = [
            name for name in self._objects() if name not in wanted and not name.endswith(f"/{ROOT}")
        ]
        if self.is_local:
            strays += [stat.name for stat in self._files.list(STAGING)]
        return strays + [stat.name for stat in self._files.list(PARTS)]

    def _reveal(self, records: Mapping[int, Record]) -> None:
        digests = self._digests(records)
        children = list(
            child_documents(self._arrays, self._parameters, self._common, digests=digests)
        )
        self._write_children(children)
        nbytes = sum(task.nbytes for task in self.tasks())
        attributes = self._attributes(self._log.digest, nbytes)
        self._log.write_root(root_document(attributes, children))

    def _write_children(self, children: Sequence[tuple[str, bytes]]) -> None:
        def write(child: tuple[str, bytes]) -> None:
            path, document = child
            sink = self._files.sink(f"{path}/{ROOT}", len(document))
            try:
                sink.write([document])
                sink.close()
            except BaseException:
                sink.abort()
                raise

        if self.is_local:
            for child in children:
                write(child)
        else:
            with ThreadPoolExecutor(_PUT_THREADS) as pool:
                for _ in pool.map(write, children):
                    pass
        self._files.sync()


def _read(array: ArraySpec, source: Source, region: Region, out: Arrays) -> None:
    """Fill ``out`` with a region of the array from the states that it is made of."""
    if not array.stacked:
        fqn, state = array.members[0]
        source.read(fqn, state, region, out, compare=True)
        return
    inner = Region(region.offsets[1:], region.sizes[1:])
    members = array.members[region.offsets[0] : region.stops[0]]
    for (fqn, state), part in zip(members, out, strict=True):
        source.read(fqn, state, inner, part, compare=True)


def _recorded_digests(arrays: Sequence[ArraySpec], source: Source) -> dict[str, str]:
    """Digests that a source recorded for what the arrays will hold as it is, by path."""
    joint = source.joint_digests()
    found = {}
    for array in arrays:
        if array.logical_dtype == array.source_dtype:
            alone = source.digest(*array.members[0]) if not array.stacked else None
            recorded = joint.get(array.members) if array.stacked else alone
            if recorded is not None:
                found[array.path] = recorded
    return found


class _Tasks(Sequence[Task]):
    """The tasks of all arrays, made one at a time."""

    def __init__(self, arrays: Sequence[ArraySpec], starts: Sequence[int]) -> None:
        self._arrays = arrays
        self._starts = starts

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = operator.index(index)
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        position = bisect.bisect_right(self._starts, index) - 1
        array, inner = self._arrays[position], index - self._starts[position]
        return Task(index, array.object_key(inner), array.object_nbytes(inner))

    def __iter__(self) -> Iterator[Task]:
        for array, start in zip(self._arrays, self._starts, strict=False):
            for inner in range(array.num_objects):
                yield Task(start + inner, array.object_key(inner), array.object_nbytes(inner))
