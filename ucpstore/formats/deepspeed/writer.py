"""`DeepSpeedTarget`: a checkpoint that unmodified DeepSpeed loads as if it had saved it itself.

What is in its files is here; how they come into being is in `ucpstore.formats.deepspeed.commit`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ucpstore.contracts import Source, Task
from ucpstore.formats.deepspeed.commit import FolderTarget
from ucpstore.formats.deepspeed.contents import alike, content, files_of, likeness
from ucpstore.formats.deepspeed.recipe import Recipe, make_recipe
from ucpstore.formats.deepspeed.sameness import same_layout
from ucpstore.formats.torchwrite import BytesWriter, TorchWriter
from ucpstore.gather import BLOCK
from ucpstore.io.base import Files, Sink
from ucpstore.layout.parallel import Layout
from ucpstore.layout.rules import Patterns

__all__ = ["DeepSpeedTarget", "same_layout"]

_VERSION = "1.0"
_BLOCKS = 4
"""Blocks that one task may hold: the target's, and what reading and casting take."""

_PER_PICKLED = 24
_PER_PART = 900
"""Bytes that making a file's content takes at its peak, per byte of its pickle and per part of a tensor: half as
much again as was measured."""


class DeepSpeedTarget(FolderTarget):
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
        self._recipe = make_recipe(source, layout, patterns)
        super().__init__(files, self._recipe.tag)
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

    # -------------------------------------------------------------- internal

    def _lay_out(self) -> None:
        """Sizes and contents of all files, one file in memory at a time; files that are alike count once."""
        tasks = []
        contents = hashlib.sha256()
        states: set[tuple[str, str]] = set()
        known: dict[Hashable, int] = {}
        firsts = alike(self._recipe)
        for fqn, held in self._recipe.slices.held.items():
            contents.update(repr((fqn, held)).encode())
        largest = 0
        for index, file in enumerate(self._contained):
            # The name is in the file, before every tensor: its length moves them.
            kind = (likeness(self._recipe, file, firsts), len(file.name))
            if kind not in known:
                writer = self._writer(index)
                known[kind] = writer.nbytes
                contents.update(repr(kind).encode() + writer.pickle_digest.encode())
                for tensor in writer.tensors:
                    contents.update(
                        repr((tensor.dtype, tensor.shape, tensor.parts, tensor.data)).encode()
                    )
                    states.update((part.fqn, part.state) for part in tensor.parts)
                parts = sum(len(tensor.parts) for tensor in writer.tensors)
                needed = _PER_PICKLED * writer.pickle_nbytes + _PER_PART * parts
                largest = max(largest, needed)
            tasks.append(Task(index, f"{self._recipe.tag}/{file.name}", known[kind]))
        self._tasks = tuple(tasks)
        self._memory = _BLOCKS * BLOCK + largest
        self._states = tuple(sorted(states))
        self._contents = contents.hexdigest()

    def _writer(self, index: int) -> TorchWriter | BytesWriter:
        file = self._contained[index]
        found = content(self._recipe, file)
        if isinstance(found, bytes):
            return BytesWriter(found)
        return TorchWriter(found, file.name.removesuffix(".pt"))

    def _encode(self, task: Task, source: Source, sink: Sink) -> int:
        return self._writer(task.index).write(source, sink)
