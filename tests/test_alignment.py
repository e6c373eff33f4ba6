"""The point of the format: shards align with the source's slices, are written once, and are read in part."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

import ucpstore
from tests.deepspeed_runs import deepspeed_run
from tests.engine.test_run import convert
from tests.fakes_io import CountingFiles
from tests.servers import S3Server, s3_server  # noqa: F401
from ucpstore.contracts import CommonState, ParameterSpec, Role, Source, SourceFile, StateSpec
from ucpstore.io import open_files
from ucpstore.io.local import LocalFiles
from ucpstore.layout.geometry import Concat, FlatEven, Geometry, Part
from ucpstore.layout.region import Region
from ucpstore.pieces import Bound, Buffer, PieceSource
from ucpstore.store import grid
from ucpstore.store.arrays import ArraySpec
from ucpstore.store.grid import plan_arrays
from ucpstore.store.source import StoreSource
from ucpstore.store.target import ZarrTarget

TP, DP = 4, 3
SHAPES = {"mlp.up_proj.weight": ((11008, 4096), 0), "mlp.down_proj.weight": ((4096, 11008), 1)}


def tp_source(folder: Path) -> PieceSource:
    """Column- and row-parallel weights over TP, each slice flat over ZeRO ranks; a file per rank."""
    files = LocalFiles(str(folder))
    table, buffers = [], []
    rng = np.random.default_rng(1)
    for rank in range(TP * DP):
        nbytes = (
            sum(-(-rows * columns // (TP * DP)) * 4 for (rows, columns), _ in SHAPES.values()) + 64
        )
        data = rng.integers(0, 255, nbytes, dtype=np.uint8)
        table.append(SourceFile.of(files.write(f"rank_{rank}.bin", data.tobytes())))
        buffers.append(Buffer(rank, 0, nbytes))
    parameters, bound, base = {}, {}, 0
    for fqn, (shape, dim) in SHAPES.items():
        local = tuple(n // TP if d == dim else n for d, n in enumerate(shape))
        width = -(-local[0] * local[1] // DP)
        slices = [FlatEven(local, 0, width, base, first_slot=t * DP, slots=DP) for t in range(TP)]
        geometry: Geometry = Concat(shape, dim, tuple(Part(local[dim], child) for child in slices))
        spec = StateSpec("fp32", Role.MASTER_WEIGHT, shape, "float32")
        parameters[fqn] = ParameterSpec(fqn, {"fp32": spec})
        bound[fqn, "fp32"] = Bound(geometry, buffers, "float32")
        base += width
    return PieceSource(
        format="test",
        files=files,
        file_table=table,
        parameters=parameters,
        common=CommonState({}),
        parallelism={"tp": TP, "dp": DP},
        warnings=(),
        bound=bound,
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> PieceSource:
    return tp_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def stored(
    source: PieceSource, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, CountingFiles]:
    folder = tmp_path_factory.mktemp("target") / "store"
    files = CountingFiles(LocalFiles(str(folder)))
    target = ZarrTarget(files, plan_arrays(source), source=source)
    convert(folder, source, target=target)
    return folder, files


def assert_aligned(array: ArraySpec, source: Source) -> None:
    """Every interior shard boundary is a source cut, or lies inside one source slice."""
    (fqn, state), *_ = array.members
    for dim, cuts in enumerate(source.cuts(fqn, state)):
        boundaries = set(range(array.shard[dim], array.shape[dim], array.shard[dim]))
        if boundaries:
            missed = [cut for cut in cuts if cut not in boundaries and array.shard[dim] < cut]
            slices = list(itertools.pairwise([0, *cuts, array.shape[dim]]))
            shards = [
                (b, min(b + array.shard[dim], array.shape[dim])) for b in (0, *sorted(boundaries))
            ]
            for start, stop in shards:
                inside = any(a <= start and stop <= b for a, b in slices)
                union = start in (0, *cuts) and stop in (*cuts, array.shape[dim])
                assert inside or union, (fqn, dim, (start, stop), cuts, missed)


def test_shards_align_with_tp_slices(source: PieceSource) -> None:
    arrays = plan_arrays(source)
    assert all(max(array.grid_shape) > 1 for array in arrays), "nothing would be shown"
    for array in arrays:
        assert_aligned(array, source)
        assert array.num_objects >= TP


def test_shards_align_for_a_real_tensor_parallel_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the size limits of shards divided by 64, since a real run of that size is too large for a test."""
    for name in ("_MIN_BYTES", "_TARGET_BYTES", "_MAX_BYTES", "_SMALLEST_BYTES"):
        monkeypatch.setattr(grid, name, getattr(grid, name) // 64)
    monkeypatch.setattr(grid, "shard_shape", grid.shard_shape.__wrapped__)  # not from its cache
    checkpoint = ucpstore.open(deepspeed_run("tp2-large-s1-fp32-dp1").path)
    aligned = 0
    for array in plan_arrays(checkpoint.source):
        assert_aligned(array, checkpoint.source)
        cuts = checkpoint.source.cuts(*array.members[0])
        aligned += any(cuts) and array.num_objects > 1
    assert aligned >= 9, "the up, gate and down projections must be cut by AutoTP and into shards"


def test_every_object_is_written_once_and_nothing_is_read_back(
    stored: tuple[Path, CountingFiles],
) -> None:
    folder, files = stored
    objects = [name for name in files.names["close"] if not name.endswith("zarr.json")]
    on_disk = [str(p.relative_to(folder)) for p in (folder / "params").rglob("c.*")]
    assert sorted(objects) == sorted(on_disk)
    touched = [*files.names.get("read", []), *files.names.get("read_into", [])]
    assert not [name for name in touched if name.startswith(("params/", "common/"))]


def bytes_read(action: Any) -> int:
    def count() -> int:
        metrics = ts.experimental_collect_matching_metrics("/tensorstore/")
        found = [m for m in metrics if m["name"].endswith("file/bytes_read")]
        return sum(int(v["value"]) for m in found for v in m["values"])

    before = count()
    action()
    return count() - before


@pytest.mark.parametrize("fqn", SHAPES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("eighth", [0, 3, 7])
def test_an_eighth_reads_an_eighth(
    source: PieceSource, stored: tuple[Path, CountingFiles], fqn: str, dim: int, eighth: int
) -> None:
    shape = SHAPES[fqn][0]
    sizes = tuple(n // 8 if d == dim else n for d, n in enumerate(shape))
    region = Region(tuple(eighth * s if d == dim else 0 for d, s in enumerate(sizes)), sizes)
    out, expected = np.empty(sizes, np.float32), np.empty(sizes, np.float32)
    StoreSource(LocalFiles(str(stored[0]))).read(fqn, "fp32", region, out)
    source.read(fqn, "fp32", region, expected)
    assert out.tobytes() == expected.tobytes()
    files = CountingFiles(LocalFiles(str(stored[0])))
    ours = StoreSource(files)
    files.reset()
    ours.read(fqn, "fp32", region, out)
    assert 0.99 * out.nbytes <= files.bytes_read <= 1.1 * out.nbytes
    kvstore = {"driver": "file", "path": f"{stored[0]}/params/{fqn}/fp32/"}
    plain = ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
    nbytes = bytes_read(lambda: plain[region.slices].read().result())
    assert 0.99 * out.nbytes <= nbytes <= 1.1 * out.nbytes


def test_one_put_per_shard_and_no_get_on_an_object_store(
    source: PieceSource,
    s3_server: S3Server,  # noqa: F811
) -> None:
    url = f"{s3_server.new_bucket()}/run/step-1"
    files = open_files(url, s3_server.options)
    narrow = PieceSource(
        format="test",
        files=source._files,
        file_table=source._table,
        parameters={k: v for k, v in source.parameters.items() if "up" in k},
        common=CommonState({}),
        parallelism={},
        warnings=(),
        bound={key: bound for key, bound in source._bound.items() if "up" in key[0]},
    )
    target = ZarrTarget(files, plan_arrays(narrow), source=narrow)
    target.begin("sha256:" + "0" * 64)
    s3_server.forget_requests()
    records = [target.write(task, narrow) for task in target.tasks()]
    puts = [r for r in s3_server.requests("PUT") if "/params/" in r.path]
    gets = [r for r in s3_server.requests("GET") if "/params/" in r.path]
    assert len(puts) == len(records) == len(target.tasks()) >= TP
    assert not gets
    target.publish(records)
    target.commit({record.task: record for record in records})
    s3_server.forget_requests()
    store = StoreSource(open_files(url, s3_server.options))
    assert len(s3_server.requests("GET")) == 1, "one GET opens everything"
    region = Region((2752, 0), (64, 4096))
    out, expected = np.empty(region.sizes, np.float32), np.empty(region.sizes, np.float32)
    store.read("mlp.up_proj.weight", "fp32", region, out)
    narrow.read("mlp.up_proj.weight", "fp32", region, expected)
    assert out.tobytes() == expected.tobytes()
