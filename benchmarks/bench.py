"""What every row of the table runs, and what it runs on."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.object_store import BUCKET, CREDENTIALS
from benchmarks.process import Measurement, measure
from benchmarks.worker import tensors

__all__ = ["BASE", "DEEPSPEED", "MEMORY_LIMIT", "OBJECT_STORE", "Bench", "Group", "Row"]

BASE = "copy, 256 KiB blocks"
OBJECT_STORE = "convert() to S3"
MEMORY_LIMIT = 512 * 2**20
DEEPSPEED = {"DS_ACCELERATOR": "cpu"}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a title, and what it does once per round.

    ``warm_up`` runs once, unmeasured, before the first round: no round then pays for reading a
    program's own files from the disk.
    """

    title: str
    run: Callable[[], Measurement]
    warm_up: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Rows whose rounds are interleaved, and what they need besides the inputs: made before, emptied after."""

    title: str
    rows: list[Row]
    prepare: Callable[[], object] = lambda: None
    release: Callable[[], object] = lambda: None


class Bench:
    """Inputs and rows of one run of the benchmark.

    Parameters
    ----------
    work : Path
        Folder for inputs and outputs. Inputs stay there and are used again.
    model : str
        Name in `benchmarks.dims.MODELS`.
    """

    def __init__(self, work: Path, model: str) -> None:
        self.work = work
        self.model = model
        self.source = self._input(model, 4)
        self.other = self._input("tiny", 2)
        self.state_bytes = sum(length for _, _, length in tensors(self.source))
        self.store = work / f"store-{model}"
        self.out = work / "out"
        self.trash = work / "trash"
        self.clean()
        self.out.mkdir()

    def write_rows(self) -> list[Row]:
        """Copies and conversions."""
        return [
            Row(BASE, self.base),
            Row("copy, 32 MiB blocks", lambda: self.copy(32 * 2**20)),
            Row("convert()", self._convert),
            Row("convert(), 1 worker x 1 thread", lambda: self._convert(workers=1, threads=1)),
            Row("convert(), 2 processes x 1 thread", lambda: self._convert(workers=2, threads=1)),
            Row(
                "ucpstore convert (command)",
                lambda: self._command(self.source),
                lambda: self._command(self.other),
            ),
            Row(
                "ds_to_universal (command)",
                lambda: self._universal(self.source),
                lambda: self._universal(self.other),
            ),
        ]

    def read_rows(self) -> list[Row]:
        """Opening and reading, the source and the store of `make_store`."""
        source, store, read = self.source, self.store, self._read
        return [
            Row("open the source", self._open),
            Row("source slices", lambda: read("slices", source, state="adam_v")),
            Row("store slices", lambda: read("slices", store, state="adam_v")),
            Row("store, preadv, reused buffer", lambda: read("raw_read", store, how="preadv")),
            Row("store, all states, reused buffer", lambda: read("read_all", store, fresh=False)),
            Row("store, numpy.fromfile", lambda: read("raw_read", store, how="fromfile")),
            Row("store, all states, fresh arrays", lambda: read("read_all", store, fresh=True)),
        ]

    def object_store_rows(self, endpoint: str) -> list[Row]:
        """Conversions to an S3 server at a memory limit, also of a model with a matrix above the limit."""
        wide = self._input("wide", 2)
        title = f"{OBJECT_STORE}, {MEMORY_LIMIT >> 20} MiB limit"
        return [
            Row(title, lambda: self._to_object_store(endpoint, self.source)),
            Row(f"{title}, 573 MB matrix", lambda: self._to_object_store(endpoint, wide)),
        ]

    def make_store(self) -> None:
        """Convert the source, unmeasured, into the store that the read rows use."""
        self.worker("convert", [self.source], self.paths() | {"dest": str(self.store)})

    def clean(self) -> None:
        """Remove everything but the inputs."""
        own = self.work.glob("own-*")
        for folder in (self.out, self.store, self.trash, self.work / "s3", *own):
            shutil.rmtree(folder, ignore_errors=True)

    def _input(self, model: str, dp: int) -> Path:
        folder = self.work / f"zero1-{model}-dp{dp}"
        if not folder.exists():
            half = folder.with_suffix(".half")
            shutil.rmtree(half, ignore_errors=True)
            command = [sys.executable, "-m", "benchmarks.make_zero1_355m", str(half)]
            measure([*command, "--model", model, "--dp", str(dp)], env=DEEPSPEED)
            half.rename(folder)
        return folder

    @property
    def dest(self) -> str:
        """Where the command of a row writes."""
        return str(self.out / "written")

    def paths(self) -> dict[str, Any]:
        """What every conversion is told."""
        return {
            "source": str(self.source),
            "dest": self.dest,
            "other": str(self.other),
            "scratch": str(self.out / "tiny"),
        }

    def base(self) -> Measurement:
        """The base of the ratios."""
        return self.copy(256 * 2**10)

    def copy(self, block: int) -> Measurement:
        """One thread copies the states."""
        options = {"source": str(self.source), "dest": self.dest, "block": block}
        return self.worker("copy", [self.source], options)

    def _convert(self, **options: Any) -> Measurement:
        return self.worker("convert", [self.source], self.paths() | options)

    def _command(self, source: Path) -> Measurement:
        return self._run(self.command(source), [source])[0]

    def command(self, source: Path, *options: str) -> list[str]:
        """Our own converter, whole."""
        return [sys.executable, "-m", "ucpstore", "convert", str(source), self.dest, *options]

    def _universal(self, source: Path) -> Measurement:
        return self._run(self.universal_command(source), [source], env=DEEPSPEED)[0]

    def universal_command(self, source: Path) -> list[str]:
        """DeepSpeed's own converter."""
        tag = (source / "latest").read_text()
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--input_folder", str(source / tag), "--output_folder", self.dest]
        command += ["--num_extract_workers", "4", "--num_merge_workers", "2"]
        return [*command, "--inject_missing_state"]

    def _open(self) -> Measurement:
        return self.worker(
            "open_checkpoint", [self.source], {"url": str(self.source), "other": str(self.other)}
        )

    def _read(self, operation: str, url: Path, **options: Any) -> Measurement:
        return self.worker(operation, [url], {"url": str(url), **options})

    def _to_object_store(self, endpoint: str, source: Path) -> Measurement:
        options = self.paths() | {
            "source": str(source),
            "dest": f"s3://{BUCKET}/{os.urandom(4).hex()}",
            "memory_limit": MEMORY_LIMIT,
            "dest_options": {"endpoint_url": endpoint},
        }
        return self.worker("convert", [source], options, env=CREDENTIALS)

    def worker(
        self,
        operation: str,
        inputs: Sequence[Path],
        options: Mapping[str, Any],
        env: Mapping[str, str] | None = None,
        *,
        keep: bool = False,
    ) -> Measurement:
        """Measure a call of `benchmarks.worker`; with ``keep`` what it wrote stays for the next step."""
        module = "benchmarks.native_load" if operation == "native_load" else "benchmarks.worker"
        name = [] if operation == "native_load" else [operation]
        command = [sys.executable, "-m", module, *name, json.dumps(options)]
        whole, output = (self.step if keep else self._run)(command, inputs, env)
        call = json.loads(output.splitlines()[-1])
        own = {key: call.pop(key) for key in ("wall", "cpu", "read", "written") if key in call}
        return replace(whole, **own, extra=call)

    def step(
        self, command: Sequence[str], inputs: Sequence[Path], env: Mapping[str, str] | None = None
    ) -> tuple[Measurement, str]:
        """Measure in one and the same state of the machine. What the command wrote stays."""
        for folder in inputs:
            _warm(folder)
        os.sync()
        _touch_free_memory(int(2.5 * self.state_bytes))
        measurement, output = measure(command, env)
        written = [path for path in Path(self.dest).rglob("*") if path.is_file()]
        return replace(measurement, files=len(written)), output

    def _run(
        self, command: Sequence[str], inputs: Sequence[Path], env: Mapping[str, str] | None = None
    ) -> tuple[Measurement, str]:
        """`step`, and remove what the command wrote."""
        result = self.step(command, inputs, env)
        self.retire()
        return result

    def retire(self, folder: Path | None = None) -> None:
        """Empty what the row wrote (or ``folder``), but delete it only in the end.

        For a minute or more ext4 does not use the inodes of deleted files again (``recently_deleted`` in
        fs/ext4/ialloc.c): with thousands of them every new file costs a long search, of up to a
        millisecond, which the next row would pay for what the last one wrote.
        """
        folder = folder or self.out
        for path in folder.rglob("*"):
            if path.is_file():
                os.truncate(path, 0)
        self.trash.mkdir(exist_ok=True)
        folder.rename(self.trash / f"{time.time_ns():x}")
        self.out.mkdir(exist_ok=True)


def _touch_free_memory(most: int) -> None:
    """Use free memory once and give it back, so that the row finds pages that are really there.

    A virtual machine may return free pages to its host (free page reporting), which makes the next
    use of each several times dearer: a copy took 2 or 12 s, depending on what had run before it.
    """
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemFree"].split()[0]) * 1024
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, max(min(most, int(0.8 * free)), mmap.PAGESIZE), flags=flags).close()


def _warm(folder: Path) -> None:
    """Bring every file of a folder into the page cache."""
    buffer = bytearray(256 * 2**10)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass
