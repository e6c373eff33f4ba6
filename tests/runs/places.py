"""Empty places on every kind of storage, and small checkpoints in them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.fakes import ArraySource, random_array
from tests.servers import S3Server
from tests.store.stores import convert, make_target, small_source
from ucpstore.contracts import CommonState
from ucpstore.io import Files, open_files
from ucpstore.store.grid import plan_arrays
from ucpstore.store.target import ZarrTarget

__all__ = ["Place", "commit", "commit_planned", "new_place", "save"]


@dataclass(frozen=True, slots=True)
class Place:
    """A URL with what it takes to open it."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def files(self, folder: str = "") -> Files:
        return open_files(f"{self.url}/{folder}" if folder else self.url, self.options)

    def at(self, folder: str) -> Place:
        return Place(f"{self.url}/{folder}", self.options)


def new_place(kind: str, tmp_path: Path, server: S3Server | None) -> Place:
    """An empty place: ``file``, ``memory`` or ``s3``."""
    name = uuid.uuid4().hex
    if kind == "file":
        return Place(str(tmp_path / name))
    if kind == "memory":
        return Place(f"memory://{name}")
    assert server is not None
    return Place(server.new_bucket(), server.options)


def commit(files: Files, number: int = 0) -> None:
    """A committed checkpoint of many small objects; another ``number``, another plan and other bytes.

    Its tiles are not those of the digest's definition, so that `ucpstore.verify` finds fault with it.
    """
    source = _source(number)
    convert(make_target(files, source), source, digest=f"sha256:{number:064x}")


def commit_planned(files: Files, number: int = 0) -> None:
    """A committed checkpoint as `ucpstore.convert` would lay it out; some objects have many tiles."""
    source = _source(number, random_array((900, 1024), seed=9))
    target = ZarrTarget(files, plan_arrays(source), source=source, step=7)
    convert(target, source, digest=f"sha256:{number:064x}")


def _source(number: int, large: Any = None) -> ArraySource:
    source = small_source()
    if large is not None:
        arrays: dict[str, dict[str, Any]] = {"large.weight": {"fp32": large}}
        for (fqn, state), array in source._arrays.items():
            if fqn != CommonState.FQN:
                arrays.setdefault(fqn, {})[state] = array
        tensors = {"rng": np.arange(5000, dtype=np.uint8)}
        source = ArraySource(arrays, source.common.document, tensors=tensors)
    for array in source._arrays.values():
        if array.size > 1:
            array[...] = np.roll(array, number)
    return source


def save(run: Place, step: int, suffix: str = "", *, number: int | None = None) -> Place:
    """A committed step of a run."""
    place = run.at(f"step-{step:08d}{suffix}")
    commit(place.files(), step if number is None else number)
    return place
