"""A `Source` made of pieces: what every framework reader builds, and the one way to its bytes.

Reading a region is: query the geometry for pieces, turn every piece into contiguous byte ranges, and
scatter each range straight into the caller's array (UCP's *Extract* and *Union* in one step, with no
temporary copy).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ucpstore.contracts import (
    Arrays,
    CommonState,
    Fragment,
    ParameterSpec,
    SourceFile,
    StateSpec,
)
from ucpstore.dtypes import itemsize
from ucpstore.errors import (
    CorruptSourceError,
    IntegrityError,
    Kind,
    LayoutError,
    ParameterNotFoundError,
    close_names,
)
from ucpstore.io.base import Files
from ucpstore.layout.coverage import require_covered
from ucpstore.layout.geometry import Geometry, Piece
from ucpstore.layout.region import Region

__all__ = ["Bound", "Buffer", "PieceSource", "joined"]

_LOCAL_GAP = 4 << 10
_REMOTE_GAP = 1 << 20
"""Bytes: neighbouring ranges of one file whose gap is at most this are read as one. Remotely that is what a
connection carries in the time that a request takes, so that reading through is never slower."""
_REMOTE_SPAN = 32 << 20
"""Bytes that one such request may take: it is held in memory while it is taken apart."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A stored run of bytes: one tensor storage inside one file.

    Attributes
    ----------
    file : int
        Index into the source's file table.
    offset : int, bytes
        Where the run starts in the file; need not be aligned.
    nbytes : int
    """

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bound:
    """A state's geometry bound to real buffers: slot ``i`` of the geometry is ``buffers[i]``.

    ``buffers`` is shared between the states that lie in the same files, never copied per parameter.
    """

    geometry: Geometry
    buffers: Sequence[Buffer]
    dtype: str
    big_endian: bool = False


class PieceSource:
    """A checkpoint whose states are pieces of other people's files.

    Parameters
    ----------
    format : str
        Name of the format that built it.
    files : Files
    file_table : sequence of SourceFile
        Every file that the checkpoint depends on; `Buffer.file` indexes it.
    parameters : mapping of str to ParameterSpec
    common : CommonState
    parallelism : mapping
        Facts about the layout that wrote the checkpoint.
    warnings : sequence of str
    bound : mapping of (fqn, state) to Bound
        One entry per state of every parameter, and one per common tensor under `CommonState.FQN`.
    """

    def __init__(
        self,
        *,
        format: str,  # noqa: A002
        files: Files,
        file_table: Sequence[SourceFile],
        parameters: Mapping[str, ParameterSpec],
        common: CommonState,
        parallelism: Mapping[str, Any],
        warnings: Sequence[str],
        bound: Mapping[tuple[str, str], Bound],
    ) -> None:
        self.format = format
        self.url = files.url
        self.is_local = files.is_local
        self.parameters = parameters
        self.common = common
        self.parallelism = parallelism
        self.warnings = warnings
        self._files = files
        self._table = tuple(file_table)
        self._bound = bound
        self._prove()

    def _prove(self) -> None:
        """Every state is covered exactly once, by buffers that exist; a shared geometry is proven once.

        Raises
        ------
        LayoutError
        """
        proven: set[int] = set()
        for (fqn, state), bound in self._bound.items():
            geometry, buffers = bound.geometry, bound.buffers
            if geometry.shape != self.spec(fqn, state).shape:
                raise LayoutError(
                    f"{fqn!r} ({state}) has shape {list(self.spec(fqn, state).shape)}, its pieces make"
                    f" one of {list(geometry.shape)}.",
                    fqn=fqn,
                    state=state,
                )
            used = geometry.used_slots()
            if used and used[-1] >= len(buffers):
                raise LayoutError(
                    f"{fqn!r} ({state}): pieces lie in slot {used[-1]}, expected one of"
                    f" {len(buffers)} buffers.",
                    fqn=fqn,
                    state=state,
                )
            if id(geometry) not in proven:
                proven.add(id(geometry))
                names = functools.partial(self._holder, buffers)
                require_covered(geometry, fqn=fqn, state=state, slot_names=names)

    def _holder(self, buffers: Sequence[Buffer], slot: int) -> str:
        return self._table[buffers[slot].file].name if slot < len(buffers) else f"slot {slot}"

    def __repr__(self) -> str:
        return f"<PieceSource {self.format} {self.url!r}: {len(self.parameters)} parameters, {len(self._table)} files>"

    def files(self) -> Sequence[SourceFile]:
        return sorted(self._table, key=lambda file: file.name)

    def current_files(self) -> Sequence[SourceFile]:
        found = []
        for file in self.files():
            stat = self._files.stat(file.name)
            found.append(SourceFile(file.name, -1, "") if stat is None else SourceFile.of(stat))
        return found

    def spec(self, fqn: str, state: str) -> StateSpec:
        """The state's spec.

        Raises
        ------
        ParameterNotFoundError
        """
        states = self.common.tensors if fqn == CommonState.FQN else None
        if states is None and fqn in self.parameters:
            states = self.parameters[fqn].states
        if states is None:
            raise ParameterNotFoundError(
                f"{self.url}: no parameter {fqn!r}",
                hint=close_names(fqn, list(self.parameters)),
                fqn=fqn,
            )
        if state not in states:
            raise ParameterNotFoundError(
                f"{self.url}: parameter {fqn!r} has no state {state!r}; it has {', '.join(states)}.",
                fqn=fqn,
                state=state,
            )
        return states[state]

    def bound(self, fqn: str, state: str) -> Bound:
        """The state's geometry and buffers."""
        self.spec(fqn, state)
        return self._bound[fqn, state]

    def read(
        self, fqn: str, state: str, region: Region, out: Arrays, *, compare: bool = False
    ) -> None:
        bound = self.bound(fqn, state)
        if not Region.full(bound.geometry.shape).contains(region) or out.shape != region.sizes:
            raise LayoutError(
                f"cannot read {fqn!r} ({state}) {region} into an array of shape {out.shape}: the state has shape"
                f" {bound.geometry.shape}.",
                fqn=fqn,
                state=state,
            )
        if not region.volume:
            return
        if bound.geometry.rule == "average" and bound.geometry.copies > 1:
            self._read_average(bound, region, out)
            return
        used = set()
        filled = 0
        for piece in bound.geometry.query(region):
            self._fill(bound, piece, out[piece.region.within(region).slices])
            used.add(bound.buffers[piece.slot].file)
            filled += piece.region.volume
        if filled != region.volume:
            raise LayoutError(
                f"{fqn!r} ({state}) {region}: the pieces hold {filled} of {region.volume} elements.",
                kind=Kind.GAP,
                fqn=fqn,
                state=state,
            )
        self._require_unchanged(used)
        if compare and bound.geometry.rule == "equal":
            for copy in range(1, bound.geometry.copies):
                self._compare(bound, region, out, copy=copy, name=f"{fqn!r} ({state})")

    def _compare(self, bound: Bound, region: Region, out: Arrays, *, copy: int, name: str) -> None:
        for piece in bound.geometry.query(region, copy=copy):
            first = np.ascontiguousarray(out[piece.region.within(region).slices])
            other = np.empty_like(first)
            self._fill(bound, piece, other)
            self._require_unchanged({bound.buffers[piece.slot].file})
            differs = first.reshape(-1).view(np.uint8) != other.reshape(-1).view(np.uint8)
            if differs.any():
                file = self._table[bound.buffers[piece.slot].file].name
                index = np.unravel_index(int(differs.argmax()) // first.itemsize, first.shape)
                at = tuple(int(i) + o for i, o in zip(index, piece.region.offsets, strict=True))
                raise IntegrityError(
                    f"replicas of {name} differ: copy {copy} in {file} has {other[index]!s} at {at}, the first"
                    f" copy has {first[index]!s}; {int(differs.sum())} bytes of {piece.region} differ"
                    f"{_by_how_much(first, other)}.",
                    hint="Say which copy counts with patterns=: tp = 'replicate(first)', or 'partial' for the mean.",
                    kind=Kind.REPLICAS_DIFFER,
                )

    def _read_average(self, bound: Bound, region: Region, out: Arrays) -> None:
        """Mean of the copies in fp32, summed in rank order; bit-equal copies are kept as they are."""
        copies = []
        for copy in range(bound.geometry.copies):
            values = np.empty(region.sizes, out.dtype)
            for piece in bound.geometry.query(region, copy=copy):
                self._fill(bound, piece, values[piece.region.within(region).slices])
                self._require_unchanged({bound.buffers[piece.slot].file})
            copies.append(values)
        if all(values.tobytes() == copies[0].tobytes() for values in copies[1:]):
            out[...] = copies[0]
            return
        total = copies[0].astype(np.float32)
        for values in copies[1:]:
            total += values.astype(np.float32)
        out[...] = total / np.float32(len(copies))

    def held(self, fqn: str, state: str, region: Region) -> dict[str, int]:
        """Bytes of a region, replicas included, by the file that holds them."""
        bound = self.bound(fqn, state)
        found: dict[str, int] = {}
        for piece in _all_pieces(bound.geometry, region):
            name = self._table[bound.buffers[piece.slot].file].name
            found[name] = found.get(name, 0) + piece.region.volume * itemsize(bound.dtype)
        return found

    def ranges(
        self, fqn: str, state: str, region: Region, files: Container[str]
    ) -> list[tuple[str, int, int]]:
        """Byte ranges (file, start, stop) of some files that reading a region, or a part of it, touches.

        Replicas are included. Sorted, disjoint, and joined like reads: whatever `read` reads at once lies in
        one of them.
        """
        bound = self.bound(fqn, state)
        size = itemsize(bound.dtype)
        runs = []
        for piece in _all_pieces(bound.geometry, region):
            buffer = bound.buffers[piece.slot]
            name = self._table[buffer.file].name
            if name in files:
                start = buffer.offset + piece.offset * size
                for offset, count in _stored_runs(piece):
                    runs.append((name, start + offset * size, start + (offset + count) * size))
        return joined(runs, self._gap)

    def cuts(self, fqn: str, state: str) -> tuple[tuple[int, ...], ...]:
        return self.bound(fqn, state).geometry.cuts()

    def fragments(self, fqn: str, state: str, region: Region) -> Sequence[Fragment]:
        bound = self.bound(fqn, state)
        size = itemsize(bound.dtype)
        found = []
        for piece in bound.geometry.query(region):
            buffer = bound.buffers[piece.slot]
            found.append(
                Fragment(
                    piece.region,
                    self._table[buffer.file].name,
                    buffer.offset + piece.offset * size,
                    piece.region.volume * size,
                )
            )
        return found

    def count_reads(self, fqn: str, state: str) -> int:
        return self.bound(fqn, state).geometry.count()

    def digest(self, fqn: str, state: str) -> str | None:
        self.spec(fqn, state)
        return None

    def joint_digests(self) -> Mapping[tuple[tuple[str, str], ...], str]:
        return {}

    @property
    def _gap(self) -> int:
        return _LOCAL_GAP if self.is_local else _REMOTE_GAP

    def _fill(self, bound: Bound, piece: Piece, view: Arrays) -> None:
        """Scatter the bytes of one piece into ``view``."""
        size = view.itemsize
        buffer = bound.buffers[piece.slot]
        name = self._table[buffer.file].name
        sizes = piece.region.sizes
        last = piece.offset + sum((n - 1) * s for n, s in zip(sizes, piece.strides, strict=True))
        if (last + 1) * size > buffer.nbytes:
            raise CorruptSourceError(
                f"{name}: elements {piece.offset}-{last} are needed of a stored tensor of {buffer.nbytes // size}.",
                kind=Kind.TRUNCATED,
            )
        start = buffer.offset + piece.offset * size
        span = sys.maxsize if self.is_local else _REMOTE_SPAN
        for offset, parts in _merged(_runs(view, piece.strides), self._gap, span):
            self._files.read_into(name, start + offset, parts)
        if bound.big_endian and size > 1:
            view[...] = view.byteswap()

    def _require_unchanged(self, used: Iterable[int]) -> None:
        """What was read must still be the files that were indexed: offsets mean nothing in others.

        Only where looking costs microseconds; elsewhere a conversion compares `current_files` at its
        end.
        """
        if not self.is_local:
            return
        for file in [self._table[index] for index in used]:
            stat = self._files.stat(file.name)
            if stat is None or SourceFile.of(stat) != file:
                now = (
                    "it is gone"
                    if stat is None
                    else f"it has {stat.nbytes} and another time of change"
                )
                raise IntegrityError(
                    f"{file.name} changed since the checkpoint was opened: it had {file.nbytes} bytes, now {now}.",
                    hint="Open the checkpoint again when nothing writes there.",
                    kind=Kind.SOURCE_CHANGED,
                    file=file.name,
                )


def joined(runs: Iterable[tuple[str, int, int]], gap: int) -> list[tuple[str, int, int]]:
    """Byte ranges (file, start, stop), sorted; those of a file with at most ``gap`` bytes between are one."""
    found: list[tuple[str, int, int]] = []
    for name, start, stop in sorted(runs):
        if found and found[-1][0] == name and start - found[-1][2] <= gap:
            found[-1] = (name, found[-1][1], max(stop, found[-1][2]))
        else:
            found.append((name, start, stop))
    return found


def _all_pieces(geometry: Geometry, region: Region) -> Iterator[Piece]:
    if region.volume:
        for copy in range(geometry.copies):
            yield from geometry.query(region, copy=copy)


def _stored_runs(piece: Piece) -> Iterator[tuple[int, int]]:
    """Contiguous runs of a piece in its buffer: (elements from its first, number of elements)."""
    sizes, count = piece.region.sizes, 1
    split = len(sizes)
    while split and (sizes[split - 1] == 1 or piece.strides[split - 1] == count):
        split -= 1
        count *= sizes[split]
    for index in np.ndindex(sizes[:split]):
        yield sum(i * s for i, s in zip(index, piece.strides, strict=False)), count


def _by_how_much(first: Arrays, other: Arrays) -> str:
    with np.errstate(all="ignore"):
        largest = np.abs(other.astype(np.float64) - first.astype(np.float64)).max()
    return f", by at most {largest:.3g}" if np.isfinite(largest) else ""


def _runs(view: Arrays, strides: tuple[int, ...]) -> Iterator[tuple[int, memoryview]]:
    """Byte offset (from the piece's start) and destination of every run contiguous in both places."""
    size = view.itemsize
    split = view.ndim
    expected = 1
    while split and (
        view.shape[split - 1] == 1
        or (strides[split - 1] == expected and view.strides[split - 1] == expected * size)
    ):
        split -= 1
        expected *= view.shape[split]
    if split == 0:
        yield 0, _bytes_of(view)
        return
    outer = tuple(s * size for s in strides[:split])
    for index in np.ndindex(view.shape[:split]):
        yield sum(i * s for i, s in zip(index, outer, strict=True)), _bytes_of(view[(*index, ...)])


def _bytes_of(view: Arrays) -> memoryview:
    flat = view.reshape(-1)  # contiguous, so that this never copies
    return memoryview(flat.view(np.uint8))


def _merged(
    runs: Iterator[tuple[int, memoryview]], limit: int, span: int
) -> Iterator[tuple[int, list[memoryview]]]:
    """Join runs that follow each other in the file with gaps of at most ``limit`` bytes, ``span`` bytes at most."""
    first = end = 0
    parts: list[memoryview] = []
    waste = None
    for offset, part in runs:
        gap = offset - end
        if parts and 0 <= gap <= limit and offset + len(part) - first <= span:
            if gap:
                waste = waste or memoryview(bytearray(limit))
                parts.append(waste[:gap])
        else:
            if parts:
                yield first, parts
            first, parts = offset, []
        parts.append(part)
        end = offset + len(part)
    if parts:
        yield first, parts
