"""`DeepSpeedTarget`: a checkpoint that unmodified DeepSpeed loads as if it had saved it itself.

Files are written under ``.ucpstore/files``, out of any loader's sight. The commit moves the tag's folder
into place with one rename, then writes ``.ucpstore/commit.json``, and ``latest`` last.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import xxhash

from ucpstore.claims import COMMIT, ClaimLog, dump_json, load_json
from ucpstore.contracts import Record, Source, Task
from ucpstore.errors import (
    AlreadyExistsError,
    CheckpointNotFoundError,
    IntegrityError,
    Kind,
    PlanError,
    StorageError,
    listing,
)
from ucpstore.formats.deepspeed.contents import content, files_of
from ucpstore.formats.deepspeed.recipe import Recipe, make_recipe
from ucpstore.formats.deepspeed.sameness import same_layout
from ucpstore.formats.torchwrite import BLOCK, TorchWriter
from ucpstore.io.base import Files, FileStat, check_name
from ucpstore.layout.parallel import Layout
from ucpstore.layout.rules import Patterns

__all__ = ["DeepSpeedLog", "DeepSpeedTarget", "same_layout"]

LATEST = "latest"
STAGING = ".ucpstore/files"
_VERSION = "1.0"
_BLOCKS = 4
"""Blocks that one task may hold: the target's, and what reading and casting take."""


class DeepSpeedLog(ClaimLog):
    """The claims of a destination, and the commit that ``latest`` makes visible."""

    def _committed(self, digest: str) -> bool:
        found = self._plan()
        if found is None:
            return False
        if found != digest:
            raise AlreadyExistsError(
                f"{self._files.url} holds a committed checkpoint of another plan: found {found}, expected"
                f" {digest}.",
                hint="Choose another destination: a checkpoint is never overwritten in place.",
                url=self._files.url,
            )
        return self._files.stat(LATEST) is not None

    def _is_visible(self) -> bool:
        return self._plan() is not None and self._files.stat(LATEST) is not None

    def _plan(self) -> str | None:
        """The plan whose files lie in their place."""
        try:
            document = load_json(self._files.read(COMMIT))
        except CheckpointNotFoundError:
            return None
        except ValueError as error:
            raise IntegrityError(
                f"{self._files.url}/{COMMIT} is no JSON: {error}.", kind=Kind.MALFORMED
            ) from error
        return str(document.get("plan_digest")) if isinstance(document, dict) else ""

    def finish(self, tag: str) -> None:
        """Commit, once the tag's folder is in place. Only under a seal."""
        document = {
            "version": _VERSION,
            "format": "deepspeed",
            "plan_digest": self.digest,
            "tag": tag,
        }
        self._files.write(COMMIT, dump_json(document, COMMIT))
        self._files.write(LATEST, tag.encode())


class DeepSpeedTarget:
    """A native DeepSpeed checkpoint to be written. Picklable; `write` is safe to call from many threads.

    Parameters
    ----------
    files : Files
        The destination: a local folder, as DeepSpeed reads no other.
    source : Source
        Described, not kept.
    layout : Layout
    patterns : Patterns, optional
        How parameters lie on tensor-parallel ranks; these rules come before the source's own.

    Raises
    ------
    PlanError, PatternError, UnsupportedSourceError
        See `ucpstore.formats.deepspeed.recipe.make_recipe`.
    """

    format = "deepspeed"

    def __init__(
        self, files: Files, source: Source, layout: Layout, patterns: Patterns | None = None
    ) -> None:
        if not files.is_local:
            raise PlanError(
                f"{files.url}: a native DeepSpeed checkpoint is written to a local folder, as DeepSpeed reads no"
                " other; found an object store."
            )
        self.url = files.url
        self.is_local: bool = files.is_local
        self._files = files
        self._recipe = make_recipe(source, layout, patterns)
        if "/" in check_name(self._recipe.tag) or self._recipe.tag.startswith("."):
            raise PlanError(f"tag {self._recipe.tag!r} is no plain folder name.", kind=Kind.NAME)
        self._log = DeepSpeedLog(files)
        self._contained = files_of(self._recipe)
        self._lay_out()

    def __repr__(self) -> str:
        return f"<DeepSpeedTarget {self.url!r}: {len(self._tasks)} files>"

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    @property
    def warnings(self) -> Sequence[str]:
        """What is not carried over as it was."""
        return self._recipe.warnings

    @property
    def states(self) -> Sequence[tuple[str, str]]:
        """States of the source that the files hold."""
        return self._states

    def layout(self) -> Mapping[str, Any]:
        """Layout, and which rank holds which parts."""
        return {**self._recipe.layout.to_json(), "ucp_info": self._recipe.ucp_info()}

    def document(self) -> Mapping[str, Any]:
        """Everything that decides the target's bytes."""
        return {
            "target": "deepspeed",
            "version": _VERSION,
            "layout": self._recipe.layout.to_json(),
            "tag": self._recipe.tag,
            "files": [(task.key, task.nbytes) for task in self._tasks],
            "contents_sha256": self._contents,
        }

    def tasks(self) -> Sequence[Task]:
        """One per file."""
        return self._tasks

    def task_memory(self) -> int:
        return self._memory

    def stored_nbytes(self) -> int:
        return sum(stat.nbytes for stat in self._files.list(STAGING))

    def begin(self, digest: str) -> bool:
        """See `ucpstore.claims.ClaimLog.begin`."""
        return self._log.begin(digest)

    def records(self) -> Mapping[int, Record]:
        """Tasks that are durably done, and whose files are still as they were recorded."""
        objects = self._objects()
        return {
            record.task: record
            for record in self._log.records()
            if 0 <= record.task < len(self._tasks)
            and _matches(record, self._tasks[record.task], objects)
        }

    def write(self, task: Task, source: Source) -> Record:
        """Write one file, front to back."""
        self._log.check()
        sink = self._files.sink(f"{self._staging}/{task.key}", task.nbytes)
        try:
            digest = self._writer(task.index).write(source, sink)
            self._log.check()
            stat = sink.close()
        except BaseException:
            sink.abort()
            raise
        return Record(task.index, stat.nbytes, stat.token, digest)

    def publish(self, records: Sequence[Record]) -> None:
        """Make the files of ``records`` durable, then record them."""
        self._log.publish(records)

    def commit(self, records: Mapping[int, Record]) -> None:
        """Check every file, move them into place, and let ``latest`` name them.

        Raises
        ------
        IntegrityError
            Files are missing or differ from their records (``LOST_OBJECT``).
        AlreadyExistsError
            The destination was abandoned (``ABANDONED``).
        """
        if self._log.committed():
            return
        self._check(records)
        self._log.seal()
        self._move()
        self._check(records)
        self._log.finish(self._recipe.tag)

    def abandon(self) -> str | None:
        """See `ucpstore.claims.ClaimLog.abandon`."""
        return self._log.abandon()

    # -------------------------------------------------------------- internal

    def _lay_out(self) -> None:
        """Sizes and contents of all files, one file in memory at a time."""
        tasks = []
        contents = hashlib.sha256()
        states: set[tuple[str, str]] = set()
        largest = 0
        for index, file in enumerate(self._contained):
            writer = self._writer(index)
            tasks.append(Task(index, f"{self._recipe.tag}/{file.name}", writer.nbytes))
            contents.update(writer.pickle_digest.encode())
            for tensor in writer.tensors:
                contents.update(
                    repr((tensor.dtype, tensor.shape, tensor.parts, tensor.data)).encode()
                )
                states.update((part.fqn, part.state) for part in tensor.parts)
            largest = max(largest, writer.pickle_nbytes)
        self._tasks = tuple(tasks)
        self._memory = _BLOCKS * BLOCK + 2 * largest
        self._states = tuple(sorted(states))
        self._contents = contents.hexdigest()

    def _writer(self, index: int) -> TorchWriter:
        file = self._contained[index]
        return TorchWriter(content(self._recipe, file), file.name.removesuffix(".pt"))

    def _objects(self) -> dict[str, FileStat]:
        """Files by key, in their place or still out of sight."""
        tag = self._recipe.tag
        staged = self._files.list(f"{self._staging}/{tag}")
        found = {stat.name.removeprefix(f"{self._staging}/"): stat for stat in staged}
        return {**found, **{stat.name: stat for stat in self._files.list(tag)}}

    def _check(self, records: Mapping[int, Record]) -> None:
        objects = self._objects()
        chosen = {**{record.task: record for record in self._log.records()}, **records}
        lost = [t.key for t in self._tasks if not self._is_good(chosen.get(t.index), t, objects)]
        if lost:
            raise IntegrityError(
                f"{self.url} cannot be committed: {len(lost)} of {len(self._tasks)} files are missing, or are not"
                f" what was written: {listing(lost)}.",
                kind=Kind.LOST_OBJECT,
                hint="Run the same command again: it writes them anew.",
                url=self.url,
                objects=lost,
            )

    def _is_good(self, record: Record | None, task: Task, objects: Mapping[str, FileStat]) -> bool:
        """As recorded; or replaced by another writer of this plan with the same bytes."""
        if _matches(record, task, objects):
            return True
        stat = objects.get(task.key)
        if record is None or stat is None or stat.nbytes != task.nbytes:
            return False
        digest = xxhash.xxh3_128()
        for start in range(0, stat.nbytes, BLOCK):
            digest.update(self._files.read(stat.name, start, BLOCK))
        return digest.intdigest() == record.digest

    @property
    def _staging(self) -> str:
        """Where this plan's files wait: other plans' remains lie elsewhere."""
        return f"{STAGING}/{self._log.digest.rpartition(':')[2][:16]}"

    def _move(self) -> None:
        """Put the tag's folder in its place, whole: one rename. Then drop what other plans left."""
        final = os.path.join(self._files.url, self._recipe.tag)
        staged = os.path.join(self._files.url, self._staging, self._recipe.tag)
        try:
            if not os.path.isdir(final):
                os.replace(staged, final)
            for folder in (self._files.url, os.path.dirname(staged)):
                _sync_folder(folder)
        except OSError as error:
            if not os.path.isdir(final):  # else another writer of this plan was faster
                raise StorageError(
                    f"cannot move {staged!r} to {final!r}: {error.strerror or error}.", url=self.url
                ) from error
        self._files.delete([stat.name for stat in self._files.list(STAGING)])
        for folder in (os.path.dirname(staged), os.path.join(self._files.url, STAGING)):
            with suppress(OSError):  # gone, or in use by another writer of this plan
                os.rmdir(folder)  # noqa: PTH106


def _sync_folder(path: str) -> None:
    if os.path.isdir(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _matches(record: Record | None, task: Task, objects: Mapping[str, FileStat]) -> bool:
    stat = objects.get(task.key)
    return (
        record is not None
        and stat is not None
        and record.nbytes == stat.nbytes == task.nbytes
        and record.token == stat.token
    )
