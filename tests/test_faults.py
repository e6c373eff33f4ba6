"""One fault at a time, for every function: tried again within the policy, or one error that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucpstore
from tests.deepspeed_runs import Run, deepspeed_run
from tests.faults import FOREVER, REFUSALS, TRANSIENT, Fault, injected
from tests.servers import S3Server, s3_server, seaweedfs_server  # noqa: F401
from tests.store.stores import convert, make_target, small_source
from ucpstore.errors import IntegrityError, Kind, StorageError, UcpStoreError
from ucpstore.io import open_files, retries
from ucpstore.layout.parallel import Layout
from ucpstore.store.grid import plan_arrays
from ucpstore.store.source import StoreSource
from ucpstore.store.target import ZarrTarget

OBJECTS = 4
"""That the slice of `operations` touches."""


@pytest.fixture(autouse=True)
def policy(monkeypatch: pytest.MonkeyPatch) -> retries.Patience:
    """The policy in small. TensorStore reads its timeouts once per process, before any test."""
    found = retries.Patience(
        attempts=4, first_delay=0.01, max_delay=0.05, connect_seconds=2.0, idle_seconds=0.5
    )
    monkeypatch.setattr(retries, "_patience", found)
    return found


@pytest.fixture(scope="module")
def run() -> Run:
    return deepspeed_run("s1-bf16-dp3")


@pytest.fixture(scope="module")
def store(s3_server: S3Server) -> str:  # noqa: F811
    """A committed store in a bucket."""
    url = f"{s3_server.new_bucket()}/store"
    source = small_source()
    convert(make_target(open_files(url, s3_server.options), source), source)
    return url


@pytest.fixture(scope="module")
def native(run: Run, seaweedfs_server: S3Server) -> str:  # noqa: F811
    """DeepSpeed files in a bucket."""
    url = f"{seaweedfs_server.new_bucket()}/ds"
    files = open_files(url, seaweedfs_server.options)
    for path in sorted(run.path.rglob("*")):
        if path.is_file():
            files.write(str(path.relative_to(run.path)), path.read_bytes())
    return url


def operations(url: str, options: Any) -> dict[str, Any]:
    """Requests by every client that there is: botocore, s3fs, TensorStore's objects and arrays."""
    files = open_files(f"{url}-not", options)
    array = ucpstore.open(url, storage_options=options)["z.weight"]["fp32"]
    files.write("x/object", bytes(1000))
    numbers = iter(range(1000))

    def sink() -> Any:
        found = files.sink(f"x/{next(numbers)}", 4)
        found.write([b"abcd"])
        return found.close()

    return {
        "read": lambda: files.read("x/object"),
        "stat": lambda: files.stat("x/object"),
        "list": lambda: files.list("x"),
        "write": lambda: files.write("x/object", bytes(1000)),
        "sink": sink,
        "create": lambda: files.create(f"x/{next(numbers)}", b"1"),
        "delete": lambda: files.delete([f"x/{next(numbers)}"]),
        "array": lambda: array[2:5],
        "open": lambda: ucpstore.open(url, storage_options=options).keys(),
    }


@pytest.mark.parametrize("fault", sorted(set(TRANSIENT) - {"stall", "stall_in_answer"}))
def test_what_ends_by_itself_is_tried_again(
    fault: str,
    store: str,
    s3_server: S3Server,  # noqa: F811
    policy: retries.Patience,
) -> None:
    for name, call in operations(store, s3_server.options).items():
        with injected(s3_server, [Fault(fault, times=2)]) as faults:
            if fault == "request_timeout" and name in ("stat", "open"):
                continue  # the answer to HEAD has no body: nobody can tell it from another 400
            call()
        assert faults.struck == 2 or (fault == "cut_answer" and faults.struck), (name, fault)


@pytest.mark.parametrize("fault", ["slow_down", "reset", "error_500", "lost_answer"])
def test_what_does_not_end_is_given_up(
    fault: str,
    store: str,
    s3_server: S3Server,  # noqa: F811
    policy: retries.Patience,
) -> None:
    for name, call in operations(store, s3_server.options).items():
        with injected(s3_server, [Fault(fault)]) as faults, pytest.raises(StorageError) as caught:
            call()
        assert caught.value.retryable, (name, str(caught.value))
        assert "Try again" in caught.value.hint, name
        # HTTP clients reconnect once by themselves where a connection breaks without a word.
        objects = OBJECTS if name == "array" else 1
        assert faults.struck <= objects * (2 * policy.attempts + 1), (name, faults.struck)
        call() if name not in ("sink", "create") else None


@pytest.mark.parametrize("fault", sorted(REFUSALS))
def test_what_somebody_has_to_do_something_about_is_said_at_once(
    fault: str,
    store: str,
    s3_server: S3Server,  # noqa: F811
    policy: retries.Patience,
) -> None:
    kind = Kind.NO_SPACE if fault in ("full_507", "quota") else Kind.PERMISSION
    word = {"expired_token": "expired", "expired_403": "expired", "clock_skew": "clocks"}.get(fault)
    for name, call in operations(store, s3_server.options).items():
        with injected(s3_server, [Fault(fault)]) as faults, pytest.raises(StorageError) as caught:
            call()
        assert not caught.value.retryable, (name, str(caught.value))
        if name in ("stat", "open"):  # they begin with HEAD: the status is all there is
            assert caught.value.hint
            continue
        assert caught.value.kind is kind, (name, str(caught.value))
        assert word is None or word in caught.value.hint, (name, caught.value.hint)
        objects = OBJECTS if name == "array" else 1
        # TensorStore asks again where a clock is wrong; s3fs where an answer has no reason.
        limit = policy.attempts if (name, fault) == ("array", "clock_skew") else 1
        assert faults.struck <= objects * limit, (name, faults.struck)


def test_a_wrong_byte_on_the_way_is_found(
    s3_server: S3Server,  # noqa: F811
    tmp_path: Path,
) -> None:
    options = s3_server.options
    plain, source = f"{s3_server.new_bucket()}/store", small_source()
    files = open_files(plain, options)
    convert(ZarrTarget(files, plan_arrays(source), source=source), source)
    array = ucpstore.open(plain, storage_options=options)["z.weight"]["fp32"]
    with injected(s3_server, [Fault("wrong_byte", part="/c", method="GET")]) as faults:
        with pytest.raises(IntegrityError) as caught:
            array[:]
        assert caught.value.kind is Kind.CHECKSUM
        assert ucpstore.verify(plain, storage_options=options).findings
        with pytest.raises(IntegrityError):
            ucpstore.convert(plain, tmp_path / "copy", source_options=options)
    assert faults.struck
    with pytest.raises(UcpStoreError):
        ucpstore.open(tmp_path / "copy")
    ucpstore.convert(plain, tmp_path / "copy", source_options=options)
    assert ucpstore.diff(plain, tmp_path / "copy", left_options=options).equal
    assert not ucpstore.verify(plain, storage_options=options).findings


def test_what_was_read_damaged_and_recorded_is_read_anew(tmp_path: Path) -> None:
    """A source that lies once, behind the checksums: the digests find it, and the next run heals it."""
    source = small_source()
    source_files = open_files(str(tmp_path / "source"))
    convert(ZarrTarget(source_files, plan_arrays(source), source=source), source)
    opened = StoreSource(source_files)
    lying, read = StoreSource(source_files), opened.read

    def lie(fqn: str, state: str, region: Any, out: Any, **keywords: Any) -> None:
        read(fqn, state, region, out, **keywords)
        if (fqn, state) == ("z.weight", "adam_m"):
            out[...] += 1

    files = open_files(str(tmp_path / "copy"))
    lying.read = lie  # type: ignore[method-assign]
    with pytest.raises(IntegrityError, match="adam_m") as caught:
        convert(ZarrTarget(files, plan_arrays(opened), source=opened), lying)
    assert "again" in caught.value.hint
    written = convert(ZarrTarget(files, plan_arrays(opened), source=opened), opened)
    assert len(written) == 1
    assert ucpstore.diff(tmp_path / "source", tmp_path / "copy").equal


@pytest.mark.parametrize("fault", ["slow_down", "reset", "cut_answer", "error_500"])
def test_native_files_in_a_bucket(
    fault: str,
    native: str,
    run: Run,
    seaweedfs_server: S3Server,  # noqa: F811
) -> None:
    """Open, slices and load: through faults now and then, or one error."""
    options, layout = seaweedfs_server.options, Layout(dp=2, zero_stage=2)
    local = ucpstore.load(run.path, layout, 1)
    now_and_then = [Fault(fault, after=number, times=1) for number in range(3, 300, 7)]
    with injected(seaweedfs_server, now_and_then) as faults:
        checkpoint = ucpstore.open(native, storage_options=options)
        held = ucpstore.load(native, layout, 1, storage_options=options)
        for ours, theirs in zip(held.tensors, local.tensors, strict=True):
            assert ours.read().tobytes() == theirs.read().tobytes()
    assert faults.struck > 3
    fqn = next(fqn for fqn in checkpoint if "fp32" in checkpoint[fqn])
    with (
        injected(seaweedfs_server, [Fault(fault, times=FOREVER)]),
        pytest.raises(UcpStoreError) as caught,
    ):
        checkpoint[fqn]["fp32"][:1]
    assert isinstance(caught.value, StorageError), caught.value
    assert caught.value.retryable
    original = ucpstore.open(run.path)[fqn]["fp32"][:1]
    assert np.array_equal(checkpoint[fqn]["fp32"][:1], original)


@pytest.mark.parametrize("fault", ["expired_403", "full_507", "slow_down"])
def test_a_conversion_goes_on_where_it_stopped(
    fault: str,
    native: str,
    run: Run,
    seaweedfs_server: S3Server,  # noqa: F811
) -> None:
    options = seaweedfs_server.options
    dest = f"{seaweedfs_server.new_bucket()}/store"
    sides = {"source_options": options, "dest_options": options}
    with (
        injected(seaweedfs_server, [Fault(fault, after=20, method="PUT")]),
        pytest.raises(StorageError) as caught,
    ):
        ucpstore.convert(native, dest, threads=2, retries=1, **sides)
    assert dest in str(caught.value)
    assert caught.value.retryable == (fault in TRANSIENT)
    with pytest.raises(UcpStoreError):
        ucpstore.open(dest, storage_options=options)
    report = ucpstore.convert(native, dest, **sides)
    assert report.committed
    verified = ucpstore.verify(
        dest, against=native, storage_options=options, against_options=options
    )
    assert list(verified.findings) == []


def test_a_store_that_says_nothing_is_given_up_in_time(
    store: str,
    s3_server: S3Server,  # noqa: F811
    policy: retries.Patience,
) -> None:
    """botocore and s3fs; TensorStore's timeouts are in whole seconds: the matrix has them small."""
    calls = operations(store, s3_server.options)
    for name in ("stat", "list", "write", "sink"):
        with injected(s3_server, [Fault("stall")]) as faults, pytest.raises(StorageError) as caught:
            calls[name]()
        assert caught.value.retryable, name
        assert faults.struck <= policy.attempts + 1, name


def test_retry_after_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    errors = [StorageError("x", retryable=True, retry_after=7.0), StorageError("x", retryable=True)]

    def call() -> int:
        if errors:
            raise errors.pop()
        return 5

    assert retries.retried(call) == 5
    assert slept[0] < 1.0
    assert slept[1] == 7.0
    slept.clear()
    errors += [StorageError("x", retryable=True, retry_after=100.0)]
    with pytest.raises(StorageError):  # later than the policy allows: said now
        retries.retried(call)
    assert slept == []
