"""What a rank of a running job holds in memory: tensors, where they lie in the whole, and their bytes."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import xxhash

from ucpstore.contracts import Arrays, Role
from ucpstore.dtypes import itemsize
from ucpstore.errors import CheckpointNotFoundError, Kind, LayoutError
from ucpstore.io.base import FileStat
from ucpstore.layout.region import Region

__all__ = ["Held", "HeldBytes", "file_of", "memory_token"]

_ROLES = {
    "fp32": Role.MASTER_WEIGHT,
    "adam_m": Role.FIRST_MOMENT,
    "adam_v": Role.SECOND_MOMENT,
    "momentum_buffer": Role.MOMENTUM,
    "weight": Role.MODEL_WEIGHT,
    "buffer": Role.BUFFER,
}


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A part of a state that a rank holds: all of it, a box, or a flat range of a box.

    Attributes
    ----------
    fqn, state : str
        Such as ``fp32``, ``adam_m``, ``adam_v``, ``weight``, ``buffer``, or the optimizer's own name.
    data : numpy.ndarray or torch.Tensor
        The elements, in C order. They must not change before the save returns. What is not contiguous, or on
        another device, is copied into memory for as long as the save takes.
    shape : tuple of int
        Of the whole tensor.
    box : Region, optional
        What the rank's model-parallel neighbours leave it; by default all of the tensor.
    start : int, optional, elements
        ``data`` is a flat range of the flattened box, from here on, as ZeRO cuts it. By default it is the whole
        box.
    role : Role, optional
        What the state is for; by its name where it is a usual one.
    """

    fqn: str
    state: str
    data: Any = field(repr=False)
    shape: tuple[int, ...]
    box: Region | None = None
    start: int | None = None
    role: Role | None = None

    @property
    def place(self) -> Region:
        """The box, also where it is all of the tensor."""
        return Region.full(tuple(self.shape)) if self.box is None else self.box

    @property
    def purpose(self) -> Role:
        """The role."""
        return self.role or _ROLES.get(self.state, Role.OTHER)

    def array(self) -> tuple[Arrays, str]:
        """The elements' bytes, contiguous, and the name of their type.

        Raises
        ------
        LayoutError
            ``data`` is no array, or not as many elements as the box says.
        UnsupportedSourceError
            The element type is none that a checkpoint can hold.
        """
        library = sys.modules.get("torch")
        if library is not None and isinstance(self.data, library.Tensor):
            dtype = str(self.data.dtype).removeprefix("torch.")
            flat = self.data.detach().cpu().contiguous().reshape(-1)
            found = flat.view(library.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        elif isinstance(self.data, np.ndarray | np.generic):
            dtype = self.data.dtype.name
            itemsize(dtype)
            native = self.data.dtype.newbyteorder("=")
            found = np.ascontiguousarray(self.data, native).reshape(-1).view(np.uint8)
        else:
            raise LayoutError(
                f"{self.state} of {self.fqn!r}: found {type(self.data).__name__}, expected a numpy array or torch"
                " tensor."
            )
        self._check(found.nbytes // itemsize(dtype))
        return found, dtype

    def _check(self, count: int) -> None:
        what = f"{self.state} of {self.fqn!r}"
        box, whole = self.place, Region.full(tuple(self.shape))
        if box.ndim != whole.ndim or not whole.contains(box):
            raise LayoutError(
                f"{what}: box {box} is not inside of shape {list(self.shape)}.", kind=Kind.SHAPE
            )
        low, high = (0, box.volume) if self.start is None else (self.start, self.start + count)
        if count != high - low or not 0 <= low <= high <= box.volume:
            expected = f"{box.volume}" if self.start is None else f"at most {box.volume - low}"
            raise LayoutError(
                f"{what}: found {count} elements from element {low} of box {box} on, expected {expected}.",
                kind=Kind.SHAPE,
            )


def file_of(rank: int) -> str:
    """The name under which a rank's memory counts as a file."""
    return f"rank-{rank:06d}"


class HeldBytes:
    """The memory of one rank as a file: its tensors' bytes, one behind the other.

    Reads of a `ucpstore.io.base.Files`, and nothing else of it: it never leaves its process.

    Parameters
    ----------
    rank : int
    parts : iterable of Held

    Attributes
    ----------
    hashes : list of str
        xxh3_128 of every part.
    dtypes : list of str
    """

    def __init__(self, rank: int, parts: Iterable[Held]) -> None:
        found = [part.array() for part in parts]
        self.dtypes = [dtype for _, dtype in found]
        self._views = [memoryview(array).cast("B") for array, _ in found]
        self._starts = [0, *accumulate(view.nbytes for view in self._views)]
        self.hashes = [xxhash.xxh3_128_hexdigest(view) for view in self._views]
        self._name = file_of(rank)
        self._stat = FileStat(self._name, self._starts[-1], memory_token(self.hashes))

    def stat(self, name: str) -> FileStat | None:
        """See `ucpstore.io.base.Files.stat`."""
        return self._stat if name == self._name else None

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `ucpstore.io.base.Files.read`."""
        stop = self._starts[-1] if nbytes is None else min(offset + nbytes, self._starts[-1])
        found = bytearray(max(stop - offset, 0))
        self.read_into(name, offset, [memoryview(found)])
        return bytes(found)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `ucpstore.io.base.Files.read_into`."""
        end = offset + sum(buffer.nbytes for buffer in buffers)
        if name != self._name or end > self._starts[-1]:
            raise CheckpointNotFoundError(f"{self._name} has no bytes {offset} to {end} of {name}.")
        for buffer in buffers:
            filled = 0
            while filled < buffer.nbytes:
                index = bisect_right(self._starts, offset) - 1
                inner = offset - self._starts[index]
                count = min(self._views[index].nbytes - inner, buffer.nbytes - filled)
                buffer[filled : filled + count] = self._views[index][inner : inner + count]
                filled += count
                offset += count


def memory_token(hashes: Sequence[str]) -> str:
    """What identifies the content of a rank's memory."""
    return xxhash.xxh3_128_hexdigest("".join(hashes).encode())
