"""`PieceSource`: the one way from pieces to bytes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucpstore.contracts import CommonState, ParameterSpec, Role, SourceFile, StateSpec
from ucpstore.errors import (
    CorruptSourceError,
    IntegrityError,
    Kind,
    LayoutError,
    ParameterNotFoundError,
)
from ucpstore.io.local import LocalFiles
from ucpstore.layout.geometry import Concat, Copies, FlatEven, Geometry, Part, Strided
from ucpstore.layout.region import Region
from ucpstore.pieces import _REMOTE_GAP, _REMOTE_SPAN, Bound, Buffer, PieceSource, _merged


def make(
    folder: Path,
    geometry: Geometry,
    contents: list[bytes],
    dtype: str = "float32",
    *,
    lead: int = 3,
    big_endian: bool = False,
) -> PieceSource:
    """One parameter ``p`` with state ``fp32``; slot i is file i, after ``lead`` bytes of something else."""
    files = LocalFiles(str(folder))
    table, buffers = [], []
    for index, content in enumerate(contents):
        stat = files.write(f"rank_{index}.bin", b"\xee" * lead + content + b"\xdd" * 5)
        table.append(SourceFile.of(stat))
        buffers.append(Buffer(index, lead, len(content)))
    spec = StateSpec("fp32", Role.MASTER_WEIGHT, geometry.shape, dtype)
    return PieceSource(
        format="test",
        files=files,
        file_table=table,
        parameters={"p": ParameterSpec("p", {"fp32": spec})},
        common=CommonState({}),
        parallelism={},
        warnings=(),
        bound={("p", "fp32"): Bound(geometry, buffers, dtype, big_endian=big_endian)},
    )


def read(source: PieceSource, region: Region | None = None, **options: Any) -> np.ndarray[Any, Any]:
    spec = source.spec("p", "fp32")
    region = region or Region.full(spec.shape)
    from ucpstore.dtypes import numpy_dtype

    out = np.full(region.sizes, 77).astype(numpy_dtype(spec.dtype))
    source.read("p", "fp32", region, out, **options)
    return out


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    sizes = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
    return Region(offsets, sizes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple),
    ranks=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "int64", "uint8", "bfloat16", "float16"]),
)
def test_any_region_into_any_array(
    tmp_path: Path, data: st.DataObject, shape: tuple[int, ...], ranks: int, dtype: str
) -> None:
    from ucpstore.dtypes import numpy_dtype

    numel = int(np.prod(shape))
    full = np.arange(numel).astype(numpy_dtype(dtype)).reshape(shape)
    width = -(-numel // ranks)
    flat = np.concatenate([full.reshape(-1), np.full(width * ranks - numel, 99).astype(full.dtype)])
    parts = [flat[r * width : (r + 1) * width].tobytes() for r in range(ranks)]
    source = make(tmp_path, FlatEven(shape, 0, width, slots=ranks), parts, dtype)
    region = data.draw(boxes(shape))
    expected = np.asarray(full[region.slices])
    order = data.draw(st.permutations(range(len(shape))))
    big = np.full([2 * n + 1 for n in region.sizes], 55).astype(full.dtype).transpose(order)
    inverse = np.argsort(order) if order else []
    strided = big.transpose(inverse)[(*(slice(1, None, 2) for _ in shape), ...)]
    assert strided.shape == region.sizes
    source.read("p", "fp32", region, strided)
    assert strided.tobytes() == expected.tobytes()
    untouched = big.transpose(inverse)[(*(slice(0, None, 2) for _ in shape), ...)]
    if shape:
        assert (untouched.astype(np.float32) == 55).all()


def test_column_slices_of_sharded_columns(tmp_path: Path) -> None:
    full = np.arange(600, dtype=np.float32).reshape(20, 30)
    geometry = Concat((20, 30), 1, tuple(Part(10, Strided((20, 10), s)) for s in range(3)))
    parts = [np.ascontiguousarray(full[:, 10 * s : 10 * s + 10]).tobytes() for s in range(3)]
    source = make(tmp_path, geometry, parts)
    region = Region((3, 7), (9, 15))
    assert (read(source, region) == full[region.slices]).all()
    assert source.cuts("p", "fp32") == ((), (10, 20))
    found = source.fragments("p", "fp32", region)
    assert [f.file for f in found] == ["rank_0.bin", "rank_1.bin", "rank_2.bin"]
    assert sum(f.region.volume for f in found) == region.volume


def test_far_apart_rows_are_read_one_by_one(tmp_path: Path) -> None:
    full = np.arange(8 * 50_000, dtype=np.float32).reshape(8, 50_000)
    source = make(tmp_path, Strided(full.shape, 0), [full.tobytes()])
    region = Region((0, 10), (8, 20))
    assert (read(source, region) == full[region.slices]).all()


def test_big_endian(tmp_path: Path) -> None:
    full = np.arange(12, dtype=np.float32).reshape(3, 4)
    source = make(tmp_path, Strided((3, 4), 0), [full.astype(">f4").tobytes()], big_endian=True)
    assert (read(source) == full).all()


def test_zero_strides_repeat_one_element(tmp_path: Path) -> None:
    source = make(tmp_path, Strided((3, 4), 0, 1, (0, 0)), [np.float32([5, 6]).tobytes()])
    assert (read(source) == np.full((3, 4), 6, np.float32)).all()


def copies(tmp_path: Path, rule: Any, *values: list[float]) -> PieceSource:
    geometry = Copies(tuple(Strided((4,), slot) for slot in range(len(values))), rule)
    return make(tmp_path, geometry, [np.float32(v).tobytes() for v in values])


def test_replicas_that_differ_are_an_error_that_says_where(tmp_path: Path) -> None:
    source = copies(tmp_path, "equal", [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 9, 4])
    assert (read(source) == np.float32([1, 2, 3, 4])).all()
    with pytest.raises(IntegrityError, match=r"rank_2\.bin has 9.0 at \(2,\)") as caught:
        read(source, compare=True)
    assert caught.value.kind is Kind.REPLICAS_DIFFER


def test_equal_replicas_pass(tmp_path: Path) -> None:
    nan = float("nan")
    source = copies(tmp_path, "equal", [1, nan, 3, 4], [1, nan, 3, 4])
    assert np.isnan(read(source, compare=True)[1])


def test_first_copy_counts_where_the_rule_says_so(tmp_path: Path) -> None:
    source = copies(tmp_path, "first", [1, 2, 3, 4], [9, 9, 9, 9])
    assert (read(source, compare=True) == np.float32([1, 2, 3, 4])).all()


def test_average_is_the_fp32_mean_in_rank_order(tmp_path: Path) -> None:
    values = [[0.1, 1, 1e8, 4], [0.2, 2, 1, 4], [0.3, 3, -1e8, 4]]
    expected = (np.float32(values[0]) + np.float32(values[1]) + np.float32(values[2])) / np.float32(
        3
    )
    assert read(copies(tmp_path, "average", *values)).tobytes() == expected.tobytes()


def test_average_of_equal_copies_keeps_their_bits(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 1e-42, 7.7]
    source = copies(tmp_path, "average", values, values, values)
    assert read(source).tobytes() == np.float32(values).tobytes()


def test_stored_tensor_that_is_too_short(tmp_path: Path) -> None:
    source = make(tmp_path, Strided((4,), 0), [np.zeros(3, np.float32).tobytes()])
    with pytest.raises(CorruptSourceError, match="stored tensor of 3"):
        read(source)


def test_file_that_ends_early(tmp_path: Path) -> None:
    source = make(tmp_path, Strided((4,), 0), [np.zeros(4, np.float32).tobytes()])
    (tmp_path / "rank_0.bin").write_bytes(b"short")
    with pytest.raises(CorruptSourceError, match="truncated"):
        read(source)


@pytest.mark.parametrize(
    ("region", "shape"), [(Region((0,), (5,)), (5,)), (Region((0,), (4,)), (3,))]
)
def test_region_and_array_must_fit(tmp_path: Path, region: Region, shape: tuple[int, ...]) -> None:
    source = make(tmp_path, Strided((4,), 0), [np.zeros(4, np.float32).tobytes()])
    with pytest.raises(LayoutError):
        source.read("p", "fp32", region, np.empty(shape, np.float32))


def test_unknown_names_offer_close_ones(tmp_path: Path) -> None:
    source = make(tmp_path, Strided((4,), 0), [np.zeros(4, np.float32).tobytes()])
    with pytest.raises(ParameterNotFoundError, match="has no state 'adam_m'; it has fp32"):
        source.spec("p", "adam_m")
    with pytest.raises(ParameterNotFoundError, match="Did you mean 'p'"):
        source.spec("pp", "fp32")


def test_changed_files_show(tmp_path: Path) -> None:
    source = make(tmp_path, Strided((4,), 0), [np.zeros(4, np.float32).tobytes()])
    assert source.current_files() == source.files()
    (tmp_path / "rank_0.bin").write_bytes(b"other")
    assert source.current_files() != source.files()
    (tmp_path / "rank_0.bin").unlink()
    assert source.current_files()[0].nbytes == -1


def test_pickles(tmp_path: Path) -> None:
    source = make(tmp_path, Strided((2, 2), 0), [np.arange(4, dtype=np.float32).tobytes()])
    assert (read(pickle.loads(pickle.dumps(source))) == [[0, 1], [2, 3]]).all()


@pytest.mark.parametrize(
    ("geometry", "text"),
    [
        (FlatEven((3, 4), 0, 5, slots=2), "rank_1|rank"),
        (Concat((4,), 0, (Part(3, Strided((3,), 0)),)), "gap|widths|cover|hold"),
        (Strided((4,), 7), "slot 7"),
    ],
)
def test_gaps_are_found_before_anything_is_read(
    tmp_path: Path, geometry: Geometry, text: str
) -> None:
    contents = [np.zeros(12, np.float32).tobytes()] * 2
    with pytest.raises(LayoutError, match=text):
        make(tmp_path, geometry, contents)


def test_a_geometry_of_another_shape_is_refused(tmp_path: Path) -> None:
    source = make(tmp_path, Strided((4,), 0), [np.zeros(4, np.float32).tobytes()])
    with pytest.raises(LayoutError, match="its pieces make"):
        PieceSource(
            format="test",
            files=source._files,
            file_table=source._table,
            parameters=source.parameters,
            common=CommonState({}),
            parallelism={},
            warnings=(),
            bound={("p", "fp32"): Bound(Strided((2, 2), 0), [Buffer(0, 0, 16)], "float32")},
        )


def test_pieces_that_leave_something_out_are_never_read_as_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PieceSource, "_prove", lambda self: None)
    source = make(tmp_path, FlatEven((10,), 0, 4, slots=2), [np.zeros(4, np.float32).tobytes()] * 2)
    with pytest.raises(LayoutError, match="hold 8 of 10 elements") as caught:
        read(source)
    assert caught.value.kind is Kind.GAP


def test_remote_strides_are_read_through_within_a_span() -> None:
    """8 KiB of every 64 KiB: a gap is read through, in stretches of at most the span."""
    part, stride, count = 8 << 10, 64 << 10, 4000
    runs = [(i * stride, memoryview(bytes(part))) for i in range(count)]
    found = list(_merged(iter(runs), _REMOTE_GAP, _REMOTE_SPAN))
    sizes = [sum(view.nbytes for view in parts) for _, parts in found]
    assert max(sizes) <= _REMOTE_SPAN
    assert len(found) == -(-count * stride // _REMOTE_SPAN)
    starts = [offset for offset, _ in found]
    assert all(start % stride == 0 for start in starts)
    kept = {id(view) for _, parts in found for view in parts}
    assert kept >= {id(view) for _, view in runs}


def test_remote_runs_far_apart_are_requests_of_their_own() -> None:
    runs = [(i * 3 * _REMOTE_GAP, memoryview(bytes(16))) for i in range(5)]
    found = list(_merged(iter(runs), _REMOTE_GAP, _REMOTE_SPAN))
    assert [(offset, sum(view.nbytes for view in parts)) for offset, parts in found] == [
        (offset, 16) for offset, _ in runs
    ]


def test_a_long_run_is_one_request() -> None:
    run = memoryview(bytes(3 * _REMOTE_GAP))
    found = list(_merged(iter([(7, run)]), _REMOTE_GAP, _REMOTE_GAP))
    assert found == [(7, [run])]
