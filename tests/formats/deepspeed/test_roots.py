"""Rank files spread over the nodes that wrote them (cases 39 and 40 of the known failures)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import ucpstore
from tests.deepspeed_runs import Run, deepspeed_run
from ucpstore import Layout
from ucpstore.cli.main import main
from ucpstore.errors import IncompleteSourceError, IntegrityError, UnrecognizedSourceError


def spread(run: Run, folder: Path, *, nodes: int = 2, latest: int = 1) -> list[Path]:
    """Copy a checkpoint as ``nodes`` nodes would have written it: every one its own data-parallel ranks."""
    roots = [folder / f"node{node}" for node in range(nodes)]
    tag = run.tag_path.name
    for node, root in enumerate(roots):
        (root / tag).mkdir(parents=True)
        if node < latest:
            shutil.copy2(run.path / "latest", root)
    for path in run.tag_path.iterdir():
        rank = path.name.partition("zero_pp_rank_")[2].partition("_")[0]
        shutil.copy2(path, roots[int(rank or 0) % nodes] / tag)
    return roots


@pytest.mark.parametrize("name", ["s1-bf16-dp3", "s3-bf16-dp3", "tp2-s1-fp32-dp2"])
def test_several_roots_are_one_checkpoint(name: str, tmp_path: Path) -> None:
    run = deepspeed_run(name)
    roots = spread(run, tmp_path)
    found = ucpstore.diff(roots, run.path)
    assert found.equal, found.summary()
    report = ucpstore.convert(roots, tmp_path / "store")
    assert report.committed
    assert report.plan_digest == ucpstore.plan(run.path, tmp_path / "other").digest
    assert ucpstore.diff(tmp_path / "store", run.path).equal


def test_tag_folders_as_roots_and_processes(tmp_path: Path) -> None:
    run = deepspeed_run("s1-bf16-dp3")
    tags = [root / run.tag_path.name for root in spread(run, tmp_path, nodes=3)]
    ucpstore.convert(tags, tmp_path / "store", workers=2)
    assert ucpstore.diff(tmp_path / "store", run.path).equal
    mine, whole = (ucpstore.load(url, Layout(dp=2, zero_stage=3), 1) for url in (tags, run.path))
    assert [t.read().tobytes() for t in mine.tensors] == [t.read().tobytes() for t in whole.tensors]


def test_missing_rank_files_are_named_with_the_roots(tmp_path: Path) -> None:
    run = deepspeed_run("s3-bf16-dp3")
    roots = spread(run, tmp_path, nodes=3)
    with pytest.raises(IncompleteSourceError) as raised:
        ucpstore.open(roots[:2])
    for name in ("zero_pp_rank_2_mp_rank_00_optim_states.pt", str(roots[0]), str(roots[1])):
        assert name in str(raised.value)
    assert str(roots[2]) not in str(raised.value)
    with pytest.raises(IncompleteSourceError, match="further roots"):
        ucpstore.open(roots[0])


def test_copies_must_agree(tmp_path: Path) -> None:
    run = deepspeed_run("s1-bf16-dp3")
    roots = spread(run, tmp_path, latest=2)
    (model,) = roots[0].glob("*/mp_rank_00_model_states.pt")
    copy = roots[1] / model.parent.name / model.name
    shutil.copy(model, copy)  # of another time: every node writes it with use_node_local_storage
    assert ucpstore.diff(roots, run.path).equal
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    copy.write_bytes(data)
    with pytest.raises(IntegrityError, match=f"at byte {len(data) // 2}") as raised:
        ucpstore.open(roots)
    assert str(roots[0]) in str(raised.value)
    assert str(roots[1]) in str(raised.value)
    copy.unlink()
    (roots[1] / "latest").write_text("global_step9")
    with pytest.raises(IntegrityError, match="latest is not the same"):
        ucpstore.open(roots)
    tag = run.tag_path.name  # where nothing is left to find out, 'latest' is not read
    assert ucpstore.open(roots, tag=tag, format="deepspeed")


def test_our_own_store_has_one_root(tmp_path: Path) -> None:
    run = deepspeed_run("s1-bf16-dp3")
    for name in ("one", "two"):
        ucpstore.convert(run.path, tmp_path / name)
    with pytest.raises(UnrecognizedSourceError):
        ucpstore.open([tmp_path / "one", tmp_path / "two"])


def test_the_same_layout_is_written_when_it_is_spread(tmp_path: Path) -> None:
    """DeepSpeed cannot load several roots, so that there is something to do."""
    run = deepspeed_run("s2-fp32-dp3")
    roots = spread(run, tmp_path)
    report = ucpstore.convert(
        roots, tmp_path / "native", to="deepspeed", layout=Layout(dp=3, zero_stage=2)
    )
    assert report.tasks_done
    assert ucpstore.diff(tmp_path / "native", run.path).equal


def test_command_line(tmp_path: Path) -> None:
    run = deepspeed_run("s1-bf16-dp3")
    one, two = spread(run, tmp_path)
    store = str(tmp_path / "store")
    for arguments in (
        ["inspect", str(one), "--source", str(two)],
        ["plan", str(one), store, "--source", str(two)],
        ["convert", str(one), store, "--source", str(two)],
        ["verify", str(one), "--source", str(two), "--against", store],
        ["load", str(one), "--source", str(two), "--layout", "dp=2", "--rank", "1"],
        ["ls", str(one), "--source", str(two)],
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
    result = CliRunner().invoke(main, ["inspect", str(one)])
    assert result.exit_code == 3
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in result.output
