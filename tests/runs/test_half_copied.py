"""Promise: a tree that other tools copied in any order gives data as it was, or an error: never less.

The root document may arrive first, and opening costs one read of it alone. So a half-copied tree may
open; every read of what has not arrived is an error, `verify` finds it all (``quick``: by listings), and nothing
is converted or copied from it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ucpstore
from tests.runs.places import Place, commit_planned
from tests.store.stores import contents
from ucpstore.errors import IntegrityError, Kind, UcpStoreError


def read_all(url: str) -> dict[tuple[str, str], bytes | None]:
    """Bytes of every state; None where reading is refused."""
    found: dict[tuple[str, str], bytes | None] = {}
    for fqn, parameter in ucpstore.open(url).items():
        for name, tensor in parameter.items():
            try:
                found[fqn, name] = np.ascontiguousarray(tensor[...]).tobytes()
            except IntegrityError:
                found[fqn, name] = None
    return found


@pytest.fixture
def source(place: Callable[[str], Place]) -> Path:
    made = place("file").at("source")
    commit_planned(made.files())
    return Path(made.url)


ORDERS: dict[str, Callable[[list[str]], None]] = {
    "root first": lambda names: names.sort(key=lambda name: (name.count("/"), name)),
    "by name": lambda names: names.sort(),
    "backwards": lambda names: names.sort(reverse=True),
    "random": lambda names: random.Random(4).shuffle(names),
}


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_objects(source: Path, tmp_path: Path, order: str) -> None:
    truth = read_all(str(source))
    assert None not in truth.values()
    names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    ORDERS[order](names)
    dest, opened = tmp_path / "dest", 0
    for count, name in enumerate(names, 1):
        (dest / name).parent.mkdir(parents=True, exist_ok=True)
        data = (source / name).read_bytes()
        for part in (data[: len(data) // 2], data):  # tools such as rsync --inplace show halves
            (dest / name).write_bytes(part)
            whole = count == len(names) and part is data
            try:
                found = read_all(str(dest))
            except UcpStoreError:
                assert not whole
                continue
            opened += 1
            assert all(value in (None, truth[key]) for key, value in found.items())
            quick = ucpstore.verify(dest, quick=True)
            needed = {n for n in names[count:] if not n.startswith(".ucpstore")} - {"zarr.json"}
            assert {finding.message.split()[0] for finding in quick.findings} >= needed
            if None in found.values():
                assert not quick.ok
                with pytest.raises(IntegrityError) as caught:
                    ucpstore.copy(dest, tmp_path / "copy")
                assert caught.value.kind == Kind.LOST_OBJECT
                with pytest.raises(IntegrityError, match="incomplete"):
                    ucpstore.convert(dest, tmp_path / "converted")
                assert not (tmp_path / "copy").exists()
                assert not (tmp_path / "converted").exists()
    assert ucpstore.verify(dest).ok
    assert opened > len(names) if order == "root first" else opened >= 1


def test_a_tree_copied_over_another_one_is_found(
    place: Callable[[str], Place], source: Path, tmp_path: Path
) -> None:
    """Objects of an older step under the root of a newer one: only digests tell, and they do."""
    other = place("file").at("other")
    commit_planned(other.files(), 1)
    mixed = tmp_path / "mixed"
    shutil.copytree(other.url, mixed)
    shutil.copy(source / "zarr.json", mixed / "zarr.json")
    assert ucpstore.verify(mixed, quick=True).ok  # names and sizes are the same
    found = ucpstore.verify(mixed)
    assert {str(finding.kind) for finding in found.findings} == {"checksum"}
    with pytest.raises(IntegrityError):
        ucpstore.copy(mixed, tmp_path / "copy")
    assert not (tmp_path / "copy" / "zarr.json").exists()


def test_missing_metadata_of_nodes_is_found(source: Path) -> None:
    (source / "params" / "a" / "zarr.json").unlink()
    found = ucpstore.verify(source)
    assert [finding.message for finding in found.findings] == ["params/a/zarr.json is not there"]


def test_claims_and_records_need_not_be_copied(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "dest", ignore=shutil.ignore_patterns(".ucpstore"))
    assert ucpstore.verify(tmp_path / "dest").ok
    place = Place(str(tmp_path / "dest"))
    ucpstore.copy(tmp_path / "dest", tmp_path / "again")
    assert contents(Place(str(tmp_path / "again")).files()) == contents(place.files())
