"""What `tests.engine.kill_matrix` converts, and what loaders would find of it."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tests.deepspeed_runs import deepspeed_run
from tests.fakes import ArraySource
from ucpstore import Layout
from ucpstore.contracts import Source, Target
from ucpstore.engine.plan import Plan, make_plan
from ucpstore.errors import (
    CheckpointNotFoundError,
    SourceError,
    UncommittedError,
    UnrecognizedSourceError,
)
from ucpstore.formats.deepspeed.reader import DeepSpeedFormat
from ucpstore.formats.deepspeed.writer import DeepSpeedTarget
from ucpstore.io.base import Files
from ucpstore.io.local import LocalFiles
from ucpstore.store.copying import CopyTarget
from ucpstore.store.grid import plan_arrays
from ucpstore.store.source import StoreSource
from ucpstore.store.target import ZarrTarget


class Subject(ABC):
    """A conversion that is killed."""

    stages: ClassVar[tuple[str, ...]]
    publish_nbytes: ClassVar[int]
    crowd_moment: ClassVar[int]
    """Write at which the other plan dies: in its second object or later."""

    @abstractmethod
    def job(self, files: Files, *, other: bool = False) -> tuple[Source, Target, Plan]:
        """The conversion, or the one of another plan."""

    @abstractmethod
    def is_data(self, name: str) -> bool:
        """Whether an object is one of the plan's."""

    @abstractmethod
    def stage_of_document(self, name: str) -> str | None:
        """The stage that writes this document of the commit."""

    @abstractmethod
    def visible(self, folder: Path) -> bool:
        """Whether a loader finds something."""

    @abstractmethod
    def look(self, folder: Path, reference: Mapping[str, bytes], what: Any) -> None:
        """Look as loaders do at what a killed process left."""

    def stage_of(self, effect: str, name: str) -> str | None:
        """Which stage of the protocol an effect on an object belongs to."""
        if effect == "write":
            return "data_write" if self.is_data(name) else None
        if effect in ("delete", "move"):
            return {"delete": "sweep", "move": "move"}[effect]
        if name.startswith(".ucpstore/claims/"):
            return "claim"
        if name.startswith(".ucpstore/done/"):
            return "after_done"
        if effect == "sync":
            return "before_done"
        if (stage := self.stage_of_document(name)) is not None:
            return stage
        return "data" if effect == "close" else None


class ZarrSubject(Subject):
    stages = (
        "claim", "data", "data_write", "before_done", "after_done", "sweep", "children", "root",
    )  # fmt: skip
    publish_nbytes = 24 << 20
    crowd_moment = 9

    def __init__(self) -> None:
        self._source, self._other = make_source(0), make_source(1)

    def job(self, files: Files, *, other: bool = False) -> tuple[Source, Target, Plan]:
        source = self._other if other else self._source
        arrays = plan_arrays(source)
        target = ZarrTarget(files, arrays, source=source)
        members = [member for array in arrays for member in array.members]
        return source, target, make_plan(source, target, states=members)

    def is_data(self, name: str) -> bool:
        return name.startswith(("params/", "common/")) and not name.endswith("zarr.json")

    def stage_of_document(self, name: str) -> str | None:
        if name == "zarr.json":
            return "root"
        return "children" if name.endswith("zarr.json") else None

    def visible(self, folder: Path) -> bool:
        return (folder / "zarr.json").exists()

    def look(self, folder: Path, reference: Mapping[str, bytes], what: Any) -> None:
        if self.visible(folder):
            return
        try:
            StoreSource(LocalFiles(str(folder)))
            raise SystemExit(f"broken promise: {what}: something uncommitted opened")
        except UncommittedError:
            pass
        except UnrecognizedSourceError:
            require_unclaimed(folder, what)
        if list(folder.glob("params/**/zarr.json")) and not is_sealed(folder):
            raise SystemExit(f"broken promise: {what}: early metadata")


class CopySubject(ZarrSubject):
    """A committed store that is copied; the other plan copies another one."""

    crowd_moment = 4

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.mkdtemp(prefix="ucpstore-copied-")
        atexit.register(_remove, self._folder, os.getpid())

    def job(self, files: Files, *, other: bool = False) -> tuple[Source, Target, Plan]:
        origin = LocalFiles(os.path.join(self._folder, "other" if other else "one"))
        if origin.stat("zarr.json") is None:
            source, target, plan = super().job(origin, other=other)
            target.begin(plan.digest)
            records = {task.index: target.write(task, source) for task in target.tasks()}
            target.publish(list(records.values()))
            target.commit(records)
        opened = StoreSource(origin)
        copied = CopyTarget(files, opened)
        members = [member for array in opened.array_specs() for member in array.members]
        plan = make_plan(opened, copied, states=members)
        return opened, copied, replace(plan, digest=copied.digest)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


class NativeSubject(Subject):
    stages = (
        "claim", "data", "data_write", "before_done", "after_done", "move", "sweep", "commit.json",
        "latest",
    )  # fmt: skip
    publish_nbytes = 60_000
    crowd_moment = 70

    def __init__(self) -> None:
        run = deepspeed_run("s2-bf16-dp2")
        self._source = DeepSpeedFormat().open(LocalFiles(str(run.path)))
        self._tag = run.tag_path.name

    def job(self, files: Files, *, other: bool = False) -> tuple[Source, Target, Plan]:
        target = DeepSpeedTarget(files, self._source, Layout(dp=2 if other else 3, zero_stage=3))
        return self._source, target, make_plan(self._source, target, states=target.states)

    def is_data(self, name: str) -> bool:
        return name.startswith(".ucpstore/files/")

    def stage_of_document(self, name: str) -> str | None:
        return {".ucpstore/commit.json": "commit.json", "latest": "latest"}.get(name)

    def visible(self, folder: Path) -> bool:
        return (folder / "latest").exists()

    def look(self, folder: Path, reference: Mapping[str, bytes], what: Any) -> None:
        """By ``latest``, by the tag, and at its own folder: complete, or not there."""
        files = LocalFiles(str(folder))
        names = {stat.name for stat in files.list() if not stat.name.startswith(".ucpstore/")}
        moved = self._tag in files.folders()
        expected = set(reference) - (set() if self.visible(folder) else {"latest"})
        if names != (expected if moved else set()):
            raise SystemExit(f"broken promise: {what}: a part is visible: {names}")
        if any(files.read(name) != reference[name] for name in names):
            raise SystemExit(f"broken promise: {what}: other bytes are visible")
        if moved and not is_sealed(folder):
            raise SystemExit(f"broken promise: {what}: moved before it was sealed")
        for tag, opens in ((None, self.visible(folder)), (self._tag, moved)):
            try:
                DeepSpeedFormat().open(files, tag=tag)
                opened = True
            except (SourceError, CheckpointNotFoundError):
                opened = False
            if opened != opens:
                raise SystemExit(f"broken promise: {what}: opened {tag!r}: {opened}")
        if not moved:
            try:
                StoreSource(files)
            except UncommittedError:
                return
            except UnrecognizedSourceError:
                require_unclaimed(folder, what)


def is_sealed(folder: Path) -> bool:
    claims = folder.glob(".ucpstore/claims/*.json")
    return any(json.loads(claim.read_bytes()).get("sealed") for claim in claims)


def require_unclaimed(folder: Path, what: Any) -> None:
    if list(folder.glob(".ucpstore/claims/*")):
        raise SystemExit(f"broken promise: {what}: an unfinished conversion is not seen as one")


def make_source(other: int) -> ArraySource:
    """A matrix of several shards, small tensors, a bfloat16 one, and common tensors."""
    rng = np.random.default_rng(7 + other)
    arrays = {
        f"layers.{i}.weight": {
            state: rng.standard_normal((96, 1024), dtype=np.float32)
            for state in ("fp32", "adam_m", "adam_v")
        }
        for i in range(3 + other)
    }
    if not other:
        wide = {
            state: rng.standard_normal((20_000, 1024), dtype=np.float32)
            for state in ("fp32", "adam_m")
        }
        arrays["embedding.weight"] = wide
    arrays["norm.weight"] = {"fp32": rng.standard_normal(1024, dtype=np.float32)}
    common = {"counters": {"global_steps": 3}, "steps": {"norm.weight": 3}}
    return ArraySource(arrays, common, tensors={"rng": rng.integers(0, 255, 5000, dtype=np.uint8)})


SUBJECTS: dict[str, type[ZarrSubject | NativeSubject]] = {
    "zarr": ZarrSubject,
    "copy": CopySubject,
    "native": NativeSubject,
}
