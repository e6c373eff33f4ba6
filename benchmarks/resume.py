"""Rows about going on in another layout: convert and load in DeepSpeed, and what a rank's own load costs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.bench import BASE, DEEPSPEED, Bench, Group, Row
from benchmarks.process import Measurement

__all__ = ["LAYOUTS", "OWN", "Target", "groups"]

OWN = "DeepSpeed's own checkpoint"
TORCH = "torch.load, one rank's files of it"
DIRECT = "convert()"
COMMAND = "ucpstore convert (command)"
UNIVERSAL = "ds_to_universal (command)"


@dataclass(frozen=True, slots=True)
class Target:
    """A layout to go on in.

    Attributes
    ----------
    title : str
    stage, ranks : int
        Stage of ZeRO, data-parallel ranks.
    universal : bool
        DeepSpeed's universal checkpoint of the source can be loaded: one of ZeRO-1 does not load at stage 3.
    """

    title: str
    stage: int
    ranks: int
    universal: bool

    @property
    def layout(self) -> str:
        """In the words of ``--layout``."""
        return f"dp={self.ranks},zero_stage={self.stage}"


LAYOUTS = (Target("ZeRO-3 dp 2", 3, 2, False), Target("ZeRO-1 dp 2", 1, 2, True))


def groups(bench: Bench) -> list[Group]:
    """A group of rows per layout. They need `Bench.make_store`'s store."""
    return [_Resume(bench, target).group() for target in LAYOUTS]


class _Resume:
    """Rows of one layout, and DeepSpeed's own checkpoint in that layout."""

    def __init__(self, bench: Bench, target: Target) -> None:
        self._bench = bench
        self._target = target
        self._own = bench.work / f"own-{bench.model}-{target.layout}"
        self._digests: list[str] | None = None

    def group(self) -> Group:
        bench, source, layout = self._bench, self._bench.source, self._target.layout
        command = bench.command(source, "--to", "deepspeed", "--layout", layout)
        rank = {"layout": layout, "rank": 0}
        rows = [
            Row(BASE, bench.base),
            Row(DIRECT, lambda: self._call()),
            Row("convert() to the store and from it", lambda: self._call(self._through)),
            Row(COMMAND, lambda: self._commands(command)),
        ]
        if self._target.universal:
            rows.append(
                Row(
                    UNIVERSAL,
                    lambda: self._commands(bench.universal_command(source), universal=True),
                    lambda: self._warm_up(bench.universal_command(bench.other)),
                )
            )
        rows += [
            Row(OWN, lambda: self._load(self._own)),
            Row(TORCH, lambda: self._read("torch_load", self._own, folder=str(self._own), rank=0)),
            Row(
                "ucpstore.load(), one rank, from the store",
                lambda: self._read("rank_load", bench.store, url=str(bench.store), **rank),
            ),
            Row(
                "ucpstore.load(), one rank, from the source",
                lambda: self._read("rank_load", source, url=str(source), **rank),
            ),
        ]
        title = self._target.title
        named = [replace(row, title=f"{title}: {row.title}") for row in rows]
        return Group(title, named, self._prepare, self._release)

    @property
    def _through(self) -> str:
        return str(self._bench.out / "store")

    def _prepare(self) -> None:
        """Let DeepSpeed load the source in this layout, and save it again."""
        shutil.rmtree(self._own, ignore_errors=True)
        bench = self._bench
        options = bench.paths() | {"layout": self._target.layout}
        bench.worker("reshape", [bench.source], options, keep=True)
        self._load(Path(bench.dest), save=str(self._own))
        bench.retire()

    def _release(self) -> None:
        self._bench.retire(self._own)

    def _warm_up(self, command: list[str]) -> None:
        self._bench.step(command, [], DEEPSPEED)
        self._bench.retire()

    def _call(self, store: str | None = None) -> Measurement:
        bench = self._bench
        options = bench.paths() | {"layout": self._target.layout, "store": store}
        converted = bench.worker("reshape", [bench.source], options, keep=True)
        return self._then_load(converted, Path(bench.dest))

    def _commands(self, command: list[str], *, universal: bool = False) -> Measurement:
        bench = self._bench
        converted, _ = bench.step(command, [bench.source], DEEPSPEED)
        converted = replace(converted, extra={"steps": {"convert": converted.wall}})
        # `latest_universal` lies beside the output, which is its tag
        folder = bench.out if universal else Path(bench.dest)
        return self._then_load(converted, folder, universal=universal)

    def _then_load(
        self, converted: Measurement, folder: Path, *, universal: bool = False
    ) -> Measurement:
        """One measurement: the conversion's, with the load as a further step."""
        loaded = self._load(folder, universal=universal)
        self._bench.retire()
        steps = {**converted.extra["steps"], "load": loaded.wall}
        return replace(
            converted,
            wall=converted.wall + loaded.wall,
            cpu=converted.cpu + loaded.cpu,
            extra={**loaded.extra, "steps": steps},
        )

    def _load(
        self, folder: Path, *, universal: bool = False, save: str | None = None
    ) -> Measurement:
        """Load in DeepSpeed; whatever was loaded in this layout before must have been the same."""
        options = {
            "model": self._bench.model,
            "load": str(folder),
            "stage": self._target.stage,
            "world": self._target.ranks,
            "universal": universal,
            "save": save,
        }
        loaded = self._bench.worker("native_load", [folder], options, DEEPSPEED, keep=True)
        digests = loaded.extra["digests"]
        if self._digests not in (None, digests):
            raise RuntimeError(
                f"{self._target.title}: engines hold {digests} after loading {folder}, expected"
                f" {self._digests} as after the first load in this layout"
            )
        self._digests = digests
        return replace(loaded, extra={**loaded.extra, "steps": {"load": loaded.wall}})

    def _read(self, operation: str, read: Path, **options: Any) -> Measurement:
        return self._bench.worker(operation, [read], options, DEEPSPEED)
