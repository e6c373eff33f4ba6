"""Claims, done records and the root document, without arrays."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from ucpstore.contracts import Record
from ucpstore.errors import AlreadyExistsError, FormatVersionError, IntegrityError, Kind, PlanError
from ucpstore.io.local import LocalFiles
from ucpstore.store.documents import Claim, claim_name, claim_number, encode
from ucpstore.store.protocol import CommitLog, current_claim

ROOT_A = (
    b'{"attributes":{"ucpstore":{"format":"ucpstore","nbytes":0,"num_arrays":0,"num_objects":0,'
)
ROOT_A += b'"num_parameters":0,"plan_digest":"A","source":{},"version":"1.0"}},"node_type":"group","zarr_format":3}'
EMPTY_GROUP = b'{"attributes":{},"zarr_format":3,"node_type":"group"}'


@pytest.fixture
def files(memory_path: Path) -> LocalFiles:
    return LocalFiles(str(memory_path / "dest"))


def begun(files: LocalFiles, digest: str) -> CommitLog:
    log = CommitLog(files)
    assert log.begin(digest)
    return log


def test_first_plan_claims_and_same_plan_joins(files: LocalFiles) -> None:
    begun(files, "A")
    begun(files, "A")
    assert current_claim(files) == (1, Claim("1.0", "A", 1))
    assert [stat.name for stat in files.list(".ucpstore")] == [claim_name(1)]


def test_other_plan_is_refused_while_claimed(files: LocalFiles) -> None:
    begun(files, "A")
    with pytest.raises(AlreadyExistsError, match="ucpstore abandon") as caught:
        CommitLog(files).begin("B")
    assert caught.value.kind is Kind.CLAIMED


def test_committed_plan_has_nothing_to_do_and_refuses_others(files: LocalFiles) -> None:
    log = begun(files, "A")
    log.seal()
    log.write_root(ROOT_A)
    assert log.committed()
    assert not CommitLog(files).begin("A")
    with pytest.raises(AlreadyExistsError) as caught:
        CommitLog(files).begin("B")
    assert caught.value.kind is Kind.ALREADY_EXISTS
    assert CommitLog(files).abandon() is None
    log.write_root(ROOT_A)  # a loser with the same digest has succeeded


def test_nothing_is_written_without_a_claim(files: LocalFiles) -> None:
    log = CommitLog(files)
    with pytest.raises(PlanError):
        log.publish([Record(0, 1, "t", 1)])
    with pytest.raises(PlanError):
        log.seal()
    assert files.list() == []


def test_abandon_fences_the_old_owner(files: LocalFiles) -> None:
    zombie = begun(files, "A")
    assert CommitLog(files).abandon() == "A"
    assert CommitLog(files).abandon() is None
    heir = begun(files, "B")
    assert current_claim(files) == (3, Claim("1.0", "B", 3))
    for act in (zombie.check, zombie.seal, lambda: zombie.publish([Record(0, 1, "t", 1)])):
        with pytest.raises(AlreadyExistsError) as caught:
            act()
        assert caught.value.kind is Kind.ABANDONED
    heir.check()
    assert files.list(".ucpstore/done") == []


@pytest.mark.parametrize("again", [None, "B"])
def test_deleting_the_destination_fences_the_old_owner(
    files: LocalFiles, again: str | None
) -> None:
    zombie = begun(files, "A")
    files.delete([stat.name for stat in files.list(".ucpstore")])
    if again is not None:
        begun(files, again)
    for act in (zombie.check, zombie.seal, lambda: zombie.publish([Record(0, 1, "t", 1)])):
        with pytest.raises(AlreadyExistsError, match="deleted meanwhile") as caught:
            act()
        assert caught.value.kind is Kind.ABANDONED


def test_zombie_stays_fenced_when_its_own_plan_begins_again(files: LocalFiles) -> None:
    zombie = begun(files, "A")
    CommitLog(files).abandon()
    heir = begun(files, "A")
    with pytest.raises(AlreadyExistsError):
        zombie.check()
    heir.check()


def test_seal_decides_between_commit_and_abandon(files: LocalFiles) -> None:
    log = begun(files, "A")
    other = begun(files, "A")
    log.seal()
    log.seal()
    with pytest.raises(AlreadyExistsError, match="same command"):
        CommitLog(files).abandon()
    other.check()  # a writer of the same plan may go on
    other.seal()
    assert current_claim(files) == (2, Claim("1.0", "A", 1, sealed=True))
    resumed = begun(files, "A")
    resumed.check()
    resumed.seal()
    assert current_claim(files)[0] == 2
    with pytest.raises(AlreadyExistsError):
        CommitLog(files).begin("B")


def test_records_are_merged_over_batches_epochs_and_writers(files: LocalFiles) -> None:
    first, second = begun(files, "A"), begun(files, "A")
    batch = [Record(1, 10, "t1", 2**128 - 1), Record(0, 5, "t0", 7)]
    first.publish(batch)
    first.publish(batch[::-1])  # the same content is the same object
    second.publish([Record(2, 1, "t2", 0)])
    second.publish([])
    assert len(files.list(".ucpstore/done")) == 2
    CommitLog(files).abandon()
    begun(files, "B").publish([Record(0, 9, "other", 9)])
    CommitLog(files).abandon()
    again = begun(files, "A")
    again.publish([Record(3, 1, "t3", 3)])
    assert sorted(again.records(), key=lambda r: r.task) == [
        Record(0, 5, "t0", 7),
        Record(1, 10, "t1", 2**128 - 1),
        Record(2, 1, "t2", 0),
        Record(3, 1, "t3", 3),
    ]


@pytest.mark.parametrize(
    "document",
    [
        b'{"attributes":{"title":"mine"},"zarr_format":3,"node_type":"group"}',
        b'{"zarr_format":3,"node_type":"array","shape":[]}',
        b'{"node_type":"group","consolidated_metadata":{"kind":"inline","metadata":{"x":{}}}}',
        b"\xff\xfe not json",
        b"[]",
    ],
)
def test_foreign_root_is_refused(files: LocalFiles, document: bytes) -> None:
    files.write("zarr.json", document)
    with pytest.raises(AlreadyExistsError, match="something else"):
        CommitLog(files).begin("A")
    assert files.read("zarr.json") == document
    assert files.list(".ucpstore") == []


def test_foreign_content_is_refused_but_an_empty_group_is_not(files: LocalFiles) -> None:
    files.write("zarr.json", EMPTY_GROUP)
    log = begun(files, "A")
    files.write("params/x/zarr.json", b"{}")  # our own, later
    log.seal()
    log.write_root(ROOT_A)
    assert files.read("zarr.json") == ROOT_A

    other = LocalFiles(files.url + "2")
    other.write("mp_rank_00_model_states.pt", b"precious")
    with pytest.raises(AlreadyExistsError, match="mp_rank_00_model_states"):
        CommitLog(other).begin("A")
    other.delete(["mp_rank_00_model_states.pt"])
    other.write("params/w/fp32/c/0", b"precious")
    with pytest.raises(AlreadyExistsError, match="params"):
        CommitLog(other).begin("A")


def test_documents_of_another_major_version_or_damaged_are_refused(files: LocalFiles) -> None:
    files.write(claim_name(1), encode(Claim("2.0", "A", 1)))
    with pytest.raises(FormatVersionError, match=r"2\.0"):
        CommitLog(files).begin("A")
    files.write(
        claim_name(1),
        json.dumps({"version": "1.9", "plan_digest": "A", "epoch": 1, "new": 1}).encode(),
    )
    assert CommitLog(files).begin("A")
    for damage in (b"", b"{", b'{"version":"1.0"}', b"[1]", b"\xff"):
        files.write(claim_name(1), damage)
        with pytest.raises(IntegrityError) as caught:
            CommitLog(files).begin("A")
        assert caught.value.kind is Kind.MALFORMED


def test_claim_names_round_trip() -> None:
    for number in (1, 42, 999_999, 1_000_000):
        assert claim_number(claim_name(number)) == number
    for name in (
        "zarr.json",
        ".ucpstore/claims/1.json",
        ".ucpstore/claims/x.json",
        ".ucpstore/claims/000001",
    ):
        assert claim_number(name) is None


@pytest.mark.parametrize("round_", range(5))
def test_racing_plans_have_one_winner(files: LocalFiles, round_: int) -> None:
    start, results = threading.Barrier(8), {}

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = CommitLog(files).begin("AB"[index % 2])
        except AlreadyExistsError as error:
            results[index] = error.kind

    threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    number, claim = current_claim(files)
    assert number == 1
    assert claim is not None
    winner = "AB".index(claim.plan_digest or "")
    assert all(results[i] is (True if i % 2 == winner else Kind.CLAIMED) for i in range(8))


@pytest.mark.parametrize("round_", range(10))
def test_seal_and_abandon_race_for_one_number(files: LocalFiles, round_: int) -> None:
    log, start, results = begun(files, "A"), threading.Barrier(2), {}

    def run(name: str, act: object) -> None:
        start.wait()
        try:
            act()  # type: ignore[operator]
            results[name] = True
        except AlreadyExistsError:
            results[name] = False

    threads = [
        threading.Thread(target=run, args=("seal", log.seal)),
        threading.Thread(target=run, args=("abandon", CommitLog(files).abandon)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["seal"] != results["abandon"]
    number, claim = current_claim(files)
    assert number == 2
    assert claim is not None
    assert claim.sealed is results["seal"]
