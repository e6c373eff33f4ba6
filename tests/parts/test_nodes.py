"""Rank files on the disks of their nodes, converted by one process per node that sees only its own."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ucpstore
from tests.deepspeed_runs import deepspeed_run
from tests.formats.deepspeed.test_roots import spread
from tests.parts.jobs import together
from tests.schemas import validate
from tests.servers import S3Server, s3_server  # noqa: F401
from ucpstore import Layout
from ucpstore.cli.main import main
from ucpstore.errors import (
    IncompleteSourceError,
    IntegrityError,
    Kind,
    PlanError,
    StorageError,
    WorkerError,
)
from ucpstore.parts.exchange import Exchange


def convert(roots: list[Path], dest: Any, **options: Any) -> list[Any]:
    options = {"timeout": 60.0, **options}
    nodes = len(roots)
    return together(
        nodes, lambda node: ucpstore.convert(roots[node], dest, node=(node, nodes), **options)
    )


def objects(store: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in store.rglob("*")
        if path.is_file() and ".ucpstore" not in path.parts
    }


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("s1-bf16-dp3", 3),
        ("s3-bf16-dp3", 2),
        ("frozen-s3-fp32-dp2", 2),
        ("tp2-s1-fp32-dp2", 2),
        ("client-s3-fp32-dp2", 2),
    ],
)
def test_the_same_bytes_as_from_one_place(name: str, nodes: int, tmp_path: Path) -> None:
    run = deepspeed_run(name)
    roots = spread(run, tmp_path, nodes=nodes)
    reports = convert(roots, tmp_path / "store")
    assert any(report.committed for report in reports), reports
    ucpstore.convert(run.path, tmp_path / "whole")
    assert ucpstore.diff(tmp_path / "store", run.path).equal
    assert objects(tmp_path / "store") == objects(tmp_path / "whole")
    assert not list((tmp_path / "store" / ".ucpstore" / "parts").rglob("*-*"))
    for path in (tmp_path / "store").glob(".ucpstore/index/*.json"):
        validate(json.loads(path.read_bytes()), "node")
    assert sum(report.tasks_done for report in reports) == reports[0].tasks


def test_nodes_read_nothing_but_their_own_roots(tmp_path: Path) -> None:
    """In processes of their own, each of which is told of its own root alone."""
    run = deepspeed_run("s2-fp32-dp3")
    roots = spread(run, tmp_path, nodes=2)
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(
            target=ucpstore.convert,
            args=(root, tmp_path / "store"),
            kwargs={"node": (node, 2), "timeout": 60.0, "threads": 1},
        )
        for node, root in enumerate(roots)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert ucpstore.diff(tmp_path / "store", run.path).equal


def test_through_s3(s3_server: S3Server, tmp_path: Path) -> None:  # noqa: F811
    run = deepspeed_run("s1-bf16-dp3")
    url = f"{s3_server.new_bucket()}/step"
    reports = convert(spread(run, tmp_path), url, dest_options=s3_server.options)
    assert any(report.committed for report in reports), reports
    assert ucpstore.diff(url, run.path, left_options=s3_server.options).equal


def test_a_node_that_fails_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = deepspeed_run("s1-bf16-dp3")
    roots = spread(run, tmp_path)
    staged = Exchange.staged

    def fail(self: Exchange, plan: str) -> None:
        if self.rank == 1:
            raise StorageError("the node lost power.", kind=Kind.NO_SPACE)
        staged(self, plan)

    monkeypatch.setattr(Exchange, "staged", fail)
    found = convert(roots, tmp_path / "store", timeout=1.0)
    assert isinstance(found[0], WorkerError)
    assert "participants 1 are missing" in str(found[0])
    assert isinstance(found[1], StorageError)
    assert not (tmp_path / "store" / "zarr.json").exists()
    monkeypatch.undo()
    reports = convert(roots, tmp_path / "store")
    assert any(report.committed for report in reports), reports
    assert ucpstore.diff(tmp_path / "store", run.path).equal


def test_missing_nodes_and_files(tmp_path: Path) -> None:
    run = deepspeed_run("s1-bf16-dp3")
    roots = spread(run, tmp_path, nodes=3)
    with pytest.raises(WorkerError, match="participants 1, 2 are missing"):
        ucpstore.convert(roots[0], tmp_path / "store", node=(0, 3), timeout=0.2)
    lost = roots[1] / run.tag_path.name / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if not lost.exists():
        lost = next((roots[1] / run.tag_path.name).glob("*zero_pp_rank_1*"))
    lost.unlink()
    found = convert(roots, tmp_path / "store")
    assert all(isinstance(error, IncompleteSourceError) for error in found), found
    assert lost.name in str(found[0])
    assert all(str(root) in str(found[0]) for root in roots)
    assert not (tmp_path / "store" / "params").exists()


def test_nodes_must_agree(tmp_path: Path) -> None:
    run = deepspeed_run("s1-bf16-dp3")
    roots = spread(run, tmp_path, latest=2)
    (roots[1] / "latest").write_text("global_step9")
    found = convert(roots, tmp_path / "store")
    assert all(isinstance(error, IntegrityError) for error in found), found
    assert "latest is not the same" in str(found[0])


def test_what_cannot_be_done_node_by_node(tmp_path: Path) -> None:
    for options in (
        {"to": "deepspeed", "layout": Layout(dp=2)},
        {"workers": 2},
        {"share": (0, 2)},
        {"format": "ucpstore"},
    ):
        with pytest.raises(PlanError, match="node by node"):
            ucpstore.convert(tmp_path, tmp_path / "store", node=(0, 2), **options)
    with pytest.raises(PlanError, match=r"node \(2, 2\)"):
        ucpstore.convert(tmp_path, tmp_path / "store", node=(2, 2))


def test_command_line(tmp_path: Path) -> None:
    run = deepspeed_run("s1-bf16-dp3")
    store = str(tmp_path / "store")
    result = CliRunner().invoke(main, ["convert", str(run.path), store, "--node", "0/1", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output.splitlines()[-1])["committed"]
    assert ucpstore.diff(store, run.path).equal
