"""Ranks of a job save what they hold, and nobody but the destination helps them."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ucpstore
from tests.parts.jobs import flat_parts, spread, together
from tests.schemas import validate
from tests.servers import S3Server, s3_server  # noqa: F401
from ucpstore import Held
from ucpstore.errors import (
    AlreadyExistsError,
    IntegrityError,
    Kind,
    LayoutError,
    PlanError,
    StorageError,
    UcpStoreError,
    WorkerError,
)
from ucpstore.layout.region import Region
from ucpstore.parts import work
from ucpstore.parts.exchange import Exchange

Tensors = dict[tuple[str, str], np.ndarray[Any, Any]]
COMMON = {"param_groups": [{"lr": 0.1, "params": ["big"]}], "counters": {"global_steps": 7}}


def tensors(seed: int = 0) -> Tensors:
    random = np.random.default_rng(seed)
    return {
        ("big", "fp32"): random.standard_normal((5000, 3001), np.float32),  # 58 MiB: two objects
        ("big", "adam_m"): random.standard_normal((5000, 3001), np.float32),
        ("small", "fp32"): random.standard_normal((7, 5), np.float32),
        ("small", "weight"): random.standard_normal((7, 5)).astype(ml_dtypes.bfloat16),
        ("scalar", "buffer"): np.array(3, np.int64),
        ("empty", "buffer"): np.zeros((0, 4), np.float32),
    }


def save(url: Any, ranks: list[list[Held]], **options: Any) -> list[Any]:
    options = {"timeout": 60.0, "common": COMMON, **options}
    return together(
        len(ranks),
        lambda rank: ucpstore.save_rank(url, ranks[rank], rank=rank, world=len(ranks), **options),
    )


def require_saved(url: Any, expected: Tensors, options: Any = None) -> None:
    checkpoint = ucpstore.open(url, storage_options=options)
    found = {(fqn, state) for fqn, states in checkpoint.items() for state in states}
    assert found == set(expected)
    for (fqn, state), values in expected.items():
        read = checkpoint[fqn][state][...]
        assert read.shape == values.shape
        wide = values.astype(np.float32) if read.dtype != values.dtype else values
        assert np.asarray(read).tobytes() == wide.tobytes(), (fqn, state)
    assert not ucpstore.verify(url, storage_options=options).findings


@pytest.mark.parametrize("world", [1, 3])
def test_every_way_of_holding(world: int, tmp_path: Path) -> None:
    expected = tensors()
    found = []
    for seed in range(2):
        url = tmp_path / f"step-{seed}"
        reports = save(url, spread(expected, world, seed))
        assert all(report.committed for report in reports), reports
        require_saved(url, expected)
        assert not list(url.glob(".ucpstore/parts/*/*"))
        assert ucpstore.open(url).common == COMMON
        published = list(url.glob(".ucpstore/index/*.json"))
        assert len(published) == world
        for path in published:
            validate(json.loads(path.read_bytes()), "rank")
        found.append(
            {p.relative_to(url): p.read_bytes() for p in url.rglob("c/**/*") if p.is_file()}
        )
    assert found[0] == found[1]  # objects do not depend on who held what


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(0, 2**32), st.sampled_from((1, 3000, 1 << 25)), st.data())
def test_any_tensors_on_any_ranks(world: int, seed: int, group: int, data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=4))
    random = np.random.default_rng(seed)
    expected = {
        (f"p{i}", "fp32"): random.standard_normal(shape).astype(np.float32)
        for i, shape in enumerate(shapes)
    }
    url = f"memory://{uuid.uuid4().hex}/step"
    with patch.object(work, "_GROUP", group):
        reports = save(url, spread(expected, world, seed), common=None)
    assert all(report.committed for report in reports), reports
    require_saved(url, expected)


def test_only_what_straddles_ranks_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[tuple[int, int]] = []
    stage = Exchange.stage

    def watch(self: Exchange, plan: str, task: int, nbytes: int, blocks: Any) -> None:
        staged.append((self.rank, nbytes))
        stage(self, plan, task, nbytes, blocks)

    monkeypatch.setattr(Exchange, "stage", watch)
    random = np.random.default_rng(1)
    expected = {(f"p{i}", "fp32"): random.standard_normal((64, 64), np.float32) for i in range(3)}
    one, two, both = (Held(n, s, v, v.shape) for (n, s), v in expected.items())
    flat = both.data.reshape(-1)
    first, second = (
        Held("p2", "fp32", part, (64, 64), start=start)
        for part, start in ((flat[:1000], 0), (flat[1000:], 1000))
    )
    reports = save(tmp_path / "step", [[one, first], [two, second]])
    assert [report.tasks_done for report in reports] == [1, 2]  # whoever holds most writes
    assert staged == [(0, 4000)]
    require_saved(tmp_path / "step", expected)


def test_replicas_are_divided_over_their_holders(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    expected = {(f"p{i}", "fp32"): random.standard_normal((64, 64), np.float32) for i in range(8)}
    ranks = [[Held(n, s, v.copy(), v.shape) for (n, s), v in expected.items()] for _ in range(4)]
    reports = save(tmp_path / "step", ranks)
    assert [report.tasks_done for report in reports] == [2, 2, 2, 2]
    require_saved(tmp_path / "step", expected)
    ranks[2][3].data[5, 5] += 1
    found = save(tmp_path / "other", ranks)
    assert all(
        isinstance(error, IntegrityError) and error.kind is Kind.REPLICAS_DIFFER for error in found
    )
    assert "'p3'" in str(found[0])
    assert "ranks 0 and 2" in str(found[0])
    assert not (tmp_path / "other" / "zarr.json").exists()


def test_torch_tensors(tmp_path: Path) -> None:
    values = torch.randn(6, 4).to(torch.bfloat16)
    column = values[:, 1:3]  # not contiguous
    parts = [
        Held("w", "weight", values, (6, 4)),
        Held("v", "fp32", column.float().t(), (2, 6)),
        Held("s", "buffer", torch.tensor(True), ()),
    ]
    assert save(tmp_path / "step", [parts])[0].committed
    checkpoint = ucpstore.open(tmp_path / "step")
    assert torch.equal(checkpoint["w"]["weight"].torch(), values)
    assert np.array_equal(checkpoint["v"]["fp32"][...], column.float().t().numpy())
    assert checkpoint["s"]["buffer"][()] == True  # noqa: E712


def test_on_s3(s3_server: S3Server) -> None:  # noqa: F811
    url = f"{s3_server.new_bucket()}/run/step"
    expected = tensors(3)
    reports = save(url, spread(expected, 3, 5), storage_options=s3_server.options)
    assert all(report.committed for report in reports), reports
    require_saved(url, expected, s3_server.options)


def test_requests(s3_server: S3Server) -> None:  # noqa: F811
    """Own objects are one PUT each and never read; what is staged is one PUT and one GET."""
    url = f"{s3_server.new_bucket()}/step"
    random = np.random.default_rng(1)
    values = {f"p{i}": random.standard_normal((64, 64), np.float32) for i in range(6)}
    ranks = [
        [Held(name, "fp32", values[name], (64, 64)) for name in list(values)[rank::2]]
        for rank in range(2)
    ]
    both = flat_parts("both", "fp32", random.standard_normal((64, 64), np.float32), 2)
    for rank, part in zip(ranks, both, strict=True):
        rank.append(part)
    s3_server.forget_requests()
    reports = save(url, ranks, storage_options=s3_server.options)
    assert all(report.committed for report in reports), reports

    def count(method: str, folder: str) -> int:
        return sum(
            folder in request.path and "?" not in request.path and "zarr.json" not in request.path
            for request in s3_server.requests(method)
        )

    assert count("PUT", "/params/") == 7
    assert count("GET", "/params/") == 0
    staged = re.compile(r"/parts/\w+/\d+-\d+")
    found = [request.method for request in s3_server.requests() if staged.search(request.path)]
    assert found == ["PUT", "GET", "DELETE"]


def words(found: list[Any], kind: type[UcpStoreError]) -> str:
    assert all(isinstance(error, kind) for error in found), found
    return str(found[0])


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    first, second = flat_parts("w", "fp32", values, 2)

    def held(data: Any, **where: Any) -> Held:
        return Held("w", "fp32", data, (3, 4), **where)

    flat = values.reshape(-1)
    url = tmp_path / "step"
    wrong = {
        "do not hold flat elements 6 to 6": [[first], [held(flat[7:], start=7)]],
        "both hold flat elements 5 to 5": [[first], [held(flat[5:], start=5)]],
        "no rank holds the flat elements 6 to 11": [[first], []],
        "is not the same tensor": [[first], [Held("w", "fp32", flat[6:], (4, 3), start=6)]],
        "float64": [[first], [held(flat[6:].astype(np.float64), start=6)]],
    }
    for text, ranks in wrong.items():
        assert text in words(save(url, ranks), LayoutError)
    alone = {
        "expected 12": [held(flat[:5])],
        "expected at most 2": [held(flat[:5], start=10)],
        "is not inside": [held(flat[:4], box=Region((2, 2), (1, 4)))],
        "found list": [held([1.0])],
    }
    for text, parts in alone.items():
        assert text in words(save(url, [parts]), LayoutError)
    different = together(
        2,
        lambda rank: ucpstore.save_rank(
            url, [(first, second)[rank]], rank=rank, world=2, common={"counters": rank}, timeout=20
        ),
    )
    assert "counters: 0 and 1" in words(different, LayoutError)
    with pytest.raises(PlanError, match="rank 2 of 2"):
        ucpstore.save_rank(url, [], rank=2, world=2)
    with pytest.raises(PlanError, match="JSON"):
        ucpstore.save_rank(url, [first], rank=0, world=1, common={"loss": float("nan")})
    assert not (url / "params").exists()
    assert not (url / ".ucpstore" / "claims").exists()
    assert all(report.committed for report in save(url, [[first], [second]]))
    require_saved(url, {("w", "fp32"): values})


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32)
    first, second, third = flat_parts("w", "fp32", values, 3)
    parts = [first, second]
    found = together(
        2,
        lambda rank: ucpstore.save_rank(
            tmp_path / "step", [parts[rank]], rank=rank, world=3, timeout=0.5
        ),
    )
    assert "participants 2 are missing" in words(found, WorkerError)
    assert not (tmp_path / "step" / "zarr.json").exists()
    # What the dead attempt published is not taken for the new one's, whoever comes first.
    new = np.arange(12, dtype=np.float32) + 100
    reports = save(tmp_path / "step", [[part] for part in flat_parts("w", "fp32", new, 3)])
    assert all(report.committed for report in reports), reports
    require_saved(tmp_path / "step", {("w", "fp32"): new})
    again = save(tmp_path / "step", [[first], [second], [third]])
    assert words(again, AlreadyExistsError)
    require_saved(tmp_path / "step", {("w", "fp32"): new})


def test_an_attempt_that_is_overtaken_stops(tmp_path: Path) -> None:
    old, new = np.zeros(12, np.float32), np.ones(12, np.float32)
    parts = {0: flat_parts("w", "fp32", old, 2), 1: flat_parts("w", "fp32", new, 2)}

    def be(index: int) -> Any:
        if index == 0:  # rank 0 of an attempt whose rank 1 died
            return ucpstore.save_rank(tmp_path / "step", [parts[0][0]], rank=0, world=2, timeout=30)
        import time

        time.sleep(0.5)
        rank = index - 1
        return ucpstore.save_rank(tmp_path / "step", [parts[1][rank]], rank=rank, world=2)

    found = together(3, be)
    assert isinstance(found[0], AlreadyExistsError)
    assert found[0].kind is Kind.ABANDONED
    assert [report.committed for report in found[1:]] == [True, True]
    require_saved(tmp_path / "step", {("w", "fp32"): new})


def test_a_rank_that_fails_tells_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(12, dtype=np.float32)
    staged = Exchange.staged

    def fail(self: Exchange, plan: str) -> None:
        if self.rank == 1:
            raise StorageError("the disk is full.", kind=Kind.NO_SPACE)
        staged(self, plan)

    monkeypatch.setattr(Exchange, "staged", fail)
    ranks = [[part] for part in flat_parts("w", "fp32", values, 3)]
    found = save(tmp_path / "step", ranks, timeout=300.0)
    assert isinstance(found[1], StorageError)
    for error in (found[0], found[2]):
        assert isinstance(error, WorkerError)
        assert "participant 1 of 3 failed: the disk is full." in str(error)
    monkeypatch.undo()
    assert all(report.committed for report in save(tmp_path / "step", ranks))
    require_saved(tmp_path / "step", {("w", "fp32"): values})


def test_ranks_that_wait_notice_an_abandon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(12, dtype=np.float32)

    def drop(self: Exchange, plan: str) -> None:
        if self.rank == 1:
            ucpstore.abandon(tmp_path / "step")

    monkeypatch.setattr(Exchange, "staged", drop)
    ranks = [[part] for part in flat_parts("w", "fp32", values, 2)]
    found = save(tmp_path / "step", ranks, timeout=300.0)
    assert isinstance(found[0], AlreadyExistsError | WorkerError)
    assert not (tmp_path / "step" / "zarr.json").exists()
