"""Stand-ins for tests: a source made of numpy arrays, and storage that dies on demand."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ucpstore.contracts import (
    Arrays,
    CommonState,
    Fragment,
    ParameterSpec,
    Role,
    SourceFile,
    StateSpec,
)
from ucpstore.io.base import Files, FileStat, Sink
from ucpstore.layout.region import Region

__all__ = ["ArraySource", "CrashingFiles", "Killed"]

_ROLES = {
    "fp32": Role.MASTER_WEIGHT,
    "adam_m": Role.FIRST_MOMENT,
    "adam_v": Role.SECOND_MOMENT,
    "weight": Role.MODEL_WEIGHT,
    "buffer": Role.BUFFER,
}

Cuts = Mapping[tuple[str, str], tuple[tuple[int, ...], ...]]


class ArraySource:
    """A `ucpstore.contracts.Source` over arrays in memory; counts the elements that were read."""

    format = "arrays"
    is_local = True

    def __init__(
        self,
        arrays: Mapping[str, Mapping[str, Arrays]],
        common: Mapping[str, Any] | None = None,
        *,
        cuts: Cuts | None = None,
        tensors: Mapping[str, Arrays] | None = None,
        specs: Mapping[str, Mapping[str, Any]] | None = None,
        parallelism: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = "arrays://"
        self.parallelism: Mapping[str, Any] = parallelism or {"dp": 1}
        self.warnings: Sequence[str] = ()
        self._arrays = {
            (fqn, state): a for fqn, states in arrays.items() for state, a in states.items()
        }
        self._arrays |= {(CommonState.FQN, name): a for name, a in (tensors or {}).items()}
        self._cuts = cuts or {}
        self.parameters: Mapping[str, ParameterSpec] = {
            fqn: ParameterSpec(
                fqn,
                {name: _spec(name, array) for name, array in states.items()},
                **(specs or {}).get(fqn, {}),
            )
            for fqn, states in arrays.items()
        }
        self.common = CommonState(
            common or {}, {name: _spec(name, array) for name, array in (tensors or {}).items()}
        )
        self.elements_read = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def files(self) -> Sequence[SourceFile]:
        return [SourceFile("arrays", sum(a.nbytes for a in self._arrays.values()), "1")]

    def current_files(self) -> Sequence[SourceFile]:
        return self.files()

    def read(
        self, fqn: str, state: str, region: Region, out: Arrays, *, compare: bool = False
    ) -> None:
        array = self._arrays[fqn, state]
        assert out.dtype == array.dtype
        assert out.shape == region.sizes
        out[...] = array[region.slices]
        with self._lock:
            self.elements_read += region.volume

    def cuts(self, fqn: str, state: str) -> tuple[tuple[int, ...], ...]:
        return self._cuts.get((fqn, state), ((),) * self._arrays[fqn, state].ndim)

    def fragments(self, fqn: str, state: str, region: Region) -> Sequence[Fragment]:
        return [Fragment(region, "arrays", 0, region.volume * self._arrays[fqn, state].itemsize)]

    def count_reads(self, fqn: str, state: str) -> int:
        return 1

    def digest(self, fqn: str, state: str) -> str | None:
        return None

    def joint_digests(self) -> Mapping[tuple[tuple[str, str], ...], str]:
        return {}


def _spec(name: str, array: Arrays) -> StateSpec:
    return StateSpec(name, _ROLES.get(name, Role.OTHER), array.shape, str(array.dtype))


class Killed(BaseException):
    """The process is dead: nothing that it would do next happens."""


class CrashingFiles:
    """Storage that kills its process around the n-th effect.

    Parameters
    ----------
    files : Files
    crash_at : int
        Number of the effect (sink close, write, create, sync, delete, move) that is the last one; from 1.
    after : bool
        Die right after the effect rather than right before it.
    """

    def __init__(self, files: Files, crash_at: int, *, after: bool = False) -> None:
        self._files = files
        self.url, self.is_local, self.options = files.url, files.is_local, files.options
        self._left = crash_at
        self._after = after
        self.dead = False
        self.unsynced: set[str] = set()

    def _effect(self, act: Any) -> Any:
        self.alive()
        self._left -= 1
        if self._left <= 0 and not self._after:
            self.dead = True
            raise Killed
        result = act()
        if self._left <= 0:
            self.dead = True
            raise Killed
        return result

    def alive(self) -> None:
        if self.dead:
            raise Killed

    def lose_power(self) -> None:
        """What was never synced is lost: the names are there, the bytes are not."""
        for name in self.unsynced:
            path = os.path.join(self.url, name)
            if os.path.exists(path):
                size = os.path.getsize(path)
                with open(path, "wb") as file:
                    file.truncate(size)
        self.unsynced.clear()

    def list(self, prefix: str = "", *, recursive: bool = True) -> list[FileStat]:
        self.alive()
        return self._files.list(prefix, recursive=recursive)

    def folders(self, prefix: str = "") -> list[str]:
        self.alive()
        return self._files.folders(prefix)

    def stat(self, name: str) -> FileStat | None:
        self.alive()
        return self._files.stat(name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        self.alive()
        return self._files.read(name, offset, nbytes)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self.alive()
        self._files.read_into(name, offset, buffers)

    def write(self, name: str, data: bytes) -> FileStat:
        return self._effect(lambda: self._files.write(name, data))

    def create(self, name: str, data: bytes) -> bool:
        return self._effect(lambda: self._files.create(name, data))

    def sync(self) -> None:
        def act() -> None:
            self._files.sync()
            self.unsynced.clear()

        self._effect(act)

    def delete(self, names: Iterable[str]) -> None:
        self._effect(lambda: self._files.delete(names))

    def move(self, name: str, to: str) -> bool:
        def act() -> bool:
            moved: bool = self._files.move(name, to)  # type: ignore[attr-defined]
            if moved:
                self.unsynced = {
                    to + old.removeprefix(name) if f"{old}/".startswith(f"{name}/") else old
                    for old in self.unsynced
                }
            return moved

        return bool(self._effect(act))

    def creates_exclusively(self) -> bool:
        self.alive()
        return self._files.creates_exclusively()

    def sink(self, name: str, nbytes: int, **keywords: Any) -> Sink:
        self.alive()
        return _CrashingSink(self, self._files.sink(name, nbytes, **keywords), name)


class _CrashingSink:
    def __init__(self, files: CrashingFiles, sink: Sink, name: str) -> None:
        self._files, self._sink, self._name = files, sink, name

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        self._files.alive()
        self._sink.write(buffers)

    def close(self) -> FileStat:
        def act() -> FileStat:
            self._files.unsynced.add(self._name)
            return self._sink.close()

        return self._files._effect(act)

    def abort(self) -> None:
        self._files.alive()
        self._sink.abort()


def random_array(shape: tuple[int, ...], dtype: str = "float32", *, seed: int = 0) -> Arrays:
    """Values of any bit pattern that is not a NaN's."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return (values * 100).astype(dtype)
