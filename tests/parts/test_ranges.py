"""What a read touches lies in the ranges that are staged for it, however reads are joined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucpstore.contracts import CommonState, ParameterSpec, Role, SourceFile, StateSpec
from ucpstore.errors import CorruptSourceError, StorageError
from ucpstore.io.base import FileStat
from ucpstore.layout.geometry import Concat, Copies, FlatEven, Geometry, Part, Strided
from ucpstore.layout.region import Region
from ucpstore.parts.files import Extent, SharedFiles
from ucpstore.pieces import Bound, Buffer, PieceSource

FILES = 3


class Recorder(SharedFiles):
    """Files of zeros, and every range that was read of them."""

    def __init__(self) -> None:
        stats = {f"f{i}": FileStat(f"f{i}", 1 << 24, "t") for i in range(FILES)}
        super().__init__("recorded", self, mine=(), stats=stats)
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self.reads.append((name, offset, offset + sum(buffer.nbytes for buffer in buffers)))
        for buffer in buffers:
            buffer[:] = bytes(buffer.nbytes)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    rows, columns = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    shape = (rows, columns)
    kind = draw(st.sampled_from(("strided", "transposed", "flat", "joined", "copies")))
    if kind == "strided":
        return Strided(shape, 1, draw(st.integers(0, 9)), (columns * draw(st.integers(1, 40)), 1))
    if kind == "transposed":
        return Strided(shape, 2, 0, (1, rows * draw(st.integers(1, 40))))
    if kind == "flat":
        return FlatEven(shape, draw(st.integers(0, 50)), 1 + rows * columns // 2 + 50, slots=FILES)
    cut = draw(st.integers(0, columns))
    parts = (
        Part(cut, Strided((rows, cut), 0)),
        Part(columns - cut, Strided((rows, columns - cut), 1)),
    )
    joined = Concat(shape, 1, tuple(part for part in parts if part.width))
    return joined if kind == "joined" else Copies((joined, Strided(shape, 2, 5)), "equal")


def source_of(geometry: Geometry, files: SharedFiles) -> PieceSource:
    spec = StateSpec("fp32", Role.MASTER_WEIGHT, geometry.shape, "float32")
    return PieceSource(
        format="test",
        files=files,
        file_table=[SourceFile(f"f{i}", 1 << 24, "t") for i in range(FILES)],
        parameters={"w": ParameterSpec("w", {"fp32": spec})},
        common=CommonState({}),
        parallelism={},
        warnings=[],
        bound={
            ("w", "fp32"): Bound(geometry, [Buffer(i, 7, 1 << 20) for i in range(FILES)], "float32")
        },
    )


def boxes(draw: Any, outer: Region) -> Region:
    offsets = [
        draw(st.integers(o, o + s - 1)) for o, s in zip(outer.offsets, outer.sizes, strict=True)
    ]
    sizes = [draw(st.integers(1, e - o)) for o, e in zip(offsets, outer.stops, strict=True)]
    return Region(tuple(offsets), tuple(sizes))


@given(geometries(), st.data())
def test_reads_lie_in_the_ranges_of_a_larger_region(
    geometry: Geometry, data: st.DataObject
) -> None:
    files = Recorder()
    source = source_of(geometry, files)
    outer = boxes(data.draw, Region.full(geometry.shape))
    inner = boxes(data.draw, outer)
    names = [f"f{i}" for i in range(FILES)]
    ranges = source.ranges("w", "fp32", outer, names)
    assert ranges == sorted(ranges)
    for (one, _, stop), (two, start, _) in pairwise(ranges):
        assert one < two or stop < start
    source.read("w", "fp32", inner, np.zeros(inner.sizes, np.float32), compare=True)
    assert files.reads
    for name, start, stop in files.reads:
        assert any(n == name and a <= start and stop <= b for n, a, b in ranges)
    held = source.held("w", "fp32", outer)
    assert sum(held.values()) == 4 * math.prod(outer.sizes) * geometry.copies
    assert {name for name, _, _ in ranges} == set(held)
    only = source.ranges("w", "fp32", outer, ["f1"])
    assert only == [one for one in ranges if one[0] == "f1"]


def test_only_what_was_staged_can_be_read() -> None:
    stats = {"f0": FileStat("f0", 100, "t")}
    files = SharedFiles("two nodes", None, mine=(), stats=stats)  # type: ignore[arg-type]
    fetched: list[tuple[int, int]] = []

    def fetch(task: int, rank: int) -> bytes:
        fetched.append((task, rank))
        return bytes(range(40))

    files.attach([Extent("f0", 0, 4, b"head")])
    files.attach(
        [Extent("f0", 10, 30, (5, 1)), Extent("f0", 50, 70, (5, 1), 20)], fetch=fetch, memory=40
    )
    assert files.read("f0", 0, 4) == b"head"
    assert files.read("f0", 12, 3) == bytes([2, 3, 4])
    assert files.read("f0", 50, 20) == bytes(range(20, 40))
    assert fetched == [(5, 1)]
    for start, size in ((3, 2), (29, 2), (30, 1), (69, 2)):
        with pytest.raises(StorageError, match="on another node"):
            files.read("f0", start, size)
    with pytest.raises(CorruptSourceError):
        files.read_into("f0", 99, [memoryview(bytearray(2))])
