"""Several roots as one."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest

from ucpstore.errors import CheckpointNotFoundError, IntegrityError, Kind, StorageError
from ucpstore.io import open_roots, root_urls
from ucpstore.io.union import UnionFiles


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    one, two = tmp_path / "one", tmp_path / "two"
    (one / "step").mkdir(parents=True)
    (two / "step").mkdir(parents=True)
    (one / "step" / "a").write_bytes(b"first")
    (two / "step" / "b").write_bytes(b"second")
    (one / "both").write_bytes(b"same")
    shutil.copy2(one / "both", two / "both")
    return one, two


def test_names_of_all_roots(roots: tuple[Path, Path]) -> None:
    files = pickle.loads(pickle.dumps(open_roots(roots)))
    assert isinstance(files, UnionFiles)
    assert [stat.name for stat in files.list()] == ["both", "step/a", "step/b"]
    assert files.folders() == ["step"]
    assert files.read("step/b", 1, 3) == b"eco"
    found = bytearray(4)
    files.read_into("step/a", 1, [memoryview(found)])
    assert found == b"irst"
    assert files.stat("step/c") is None
    assert files.stat("both") == open_roots(roots[0]).stat("both")
    with pytest.raises(CheckpointNotFoundError) as raised:
        files.read("step/c")
    assert all(str(root) in str(raised.value) for root in roots)


def test_a_root_that_is_given_twice_is_one(roots: tuple[Path, Path]) -> None:
    assert root_urls([roots[0], str(roots[0]), f"file://{roots[0]}"]) == (str(roots[0]),)
    assert not isinstance(open_roots([roots[0], roots[0]]), UnionFiles)
    with pytest.raises(StorageError, match="without a root"):
        root_urls([])


def test_copies_with_other_times_are_compared(roots: tuple[Path, Path]) -> None:
    os.utime(roots[1] / "both", ns=(1, 1))
    assert open_roots(roots).read("both") == b"same"
    (roots[1] / "both").write_bytes(b"sane")
    files = open_roots(roots)
    assert files.read("step/a") == b"first"  # what nobody uses may differ
    for use in (files.read, files.stat):
        with pytest.raises(IntegrityError, match="they differ at byte 2") as raised:
            use("both")
        assert raised.value.kind is Kind.REPLICAS_DIFFER
        assert all(str(root) in str(raised.value) for root in roots)
    (roots[1] / "both").write_bytes(b"longer")
    with pytest.raises(IntegrityError, match="4 and 6 bytes"):
        open_roots(roots).read("both")


def test_nothing_is_written(roots: tuple[Path, Path]) -> None:
    files = open_roots(roots)
    for act in (
        lambda: files.write("x", b""),
        lambda: files.create("x", b""),
        lambda: files.sink("x", 1),
        lambda: files.delete(["both"]),
    ):
        with pytest.raises(StorageError, match="only read from"):
            act()
    assert files.free_space() is None
    assert (roots[0] / "both").exists()
