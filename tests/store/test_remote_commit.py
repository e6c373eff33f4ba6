"""The commit protocol on object stores: racing processes, stores without conditions, late puts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.proxy import Exchange
from tests.servers import GcsServer, S3Server, gcs_server, s3_server, seaweedfs_server  # noqa: F401
from tests.store.racers import race, source_of
from tests.store.stores import contents, convert, make_target
from ucpstore.errors import AlreadyExistsError, IntegrityError, Kind, StorageError
from ucpstore.io import Files, open_files
from ucpstore.io.local import LocalFiles
from ucpstore.store.source import StoreSource

KEY = "params/z.weight/fp32/c.0.1"
Server = S3Server | GcsServer


@pytest.fixture(params=["s3_server", "seaweedfs_server", "gcs_server"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    found: Server = request.getfixturevalue(request.param)
    hook = found.proxy.hook
    yield found
    found.proxy.hook = hook
    if isinstance(found, GcsServer):
        found.preconditions = True


@pytest.fixture
def bucket(server: Server) -> Files:
    return open_files(f"{server.new_bucket()}/run/step-1", server.options)


def expected_of(plan: str, folder: Path) -> Any:
    """What the plan leaves in a local folder."""
    files, source = LocalFiles(str(folder / plan)), source_of(plan)
    convert(make_target(files, source), source, digest=plan)
    return contents(files)


@pytest.mark.parametrize("plans", ["AAAA", "AABB", "ABCDEFGH", "AB"])
def test_racing_processes_commit_one_plan(
    bucket: Files, server: Server, memory_path: Path, plans: str
) -> None:
    keys = {"key": server.key, "secret": server.secret} if isinstance(server, S3Server) else {}
    environment = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "testing",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
    results = race(plans, bucket.url, {**server.options, **keys}, environment)
    winners = {plan for plan, error in results if not error}
    assert len(winners) == 1, results
    (winner,) = winners
    for plan, error in results:
        assert error == "" if plan == winner else error.startswith(("claimed", "already_exists")), (
            results
        )
    assert contents(bucket) == expected_of(winner, memory_path)
    assert StoreSource(bucket).attributes.plan_digest == winner


# ------------------------------------------------------------- stores without conditions


def ignoring(forward: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
    """The hook of a store that does not look at conditions."""

    def hook(exchange: Exchange) -> None:
        for name in ("If-None-Match", "If-Match"):
            del exchange.headers[name]
        forward(exchange)

    return hook


def test_a_store_that_ignores_conditions_is_refused(
    bucket: Files, server: Server, memory_path: Path
) -> None:
    if isinstance(server, S3Server) and server.checks_signatures:
        pytest.skip("the conditions are signed: they cannot be taken out on the way")
    server.proxy.hook = ignoring(server.proxy.hook)
    if isinstance(server, GcsServer):
        server.preconditions = False
    source = source_of("A")
    with pytest.raises(StorageError, match="cannot be claimed") as caught:
        convert(make_target(bucket, source), source, digest="A")
    assert caught.value.kind is Kind.UNSUPPORTED
    assert "unsafe_commit" in caught.value.hint
    assert bucket.list() == []
    knowing = open_files(bucket.url, {**bucket.options, "unsafe_commit": True})
    convert(make_target(knowing, source), source, digest="A")
    assert contents(bucket) == expected_of("A", memory_path)
    with pytest.raises(AlreadyExistsError):
        convert(make_target(knowing, source), source, digest="B")


def test_a_store_that_knows_no_conditions_is_refused(bucket: Files, server: Server) -> None:
    """Some servers answer 501 to a header that they do not implement."""
    if isinstance(server, GcsServer):
        pytest.skip("generations are as old as GCS")
    forward = server.proxy.hook

    def hook(exchange: Exchange) -> None:
        if "If-None-Match" in exchange.headers or "ifGenerationMatch" in exchange.path:
            exchange.answer(501, b"<Error><Code>NotImplemented</Code></Error>")
        else:
            forward(exchange)

    server.proxy.hook = hook
    source = source_of("A")
    with pytest.raises(StorageError, match="cannot be claimed"):
        convert(make_target(bucket, source), source, digest="A")
    assert bucket.list() == []


def test_unsafe_commit_sends_no_conditions(bucket: Files, server: Server) -> None:
    seen = []
    forward = server.proxy.hook

    def hook(exchange: Exchange) -> None:
        conditions = ("If-None-Match", "If-Match")
        seen.append(
            "ifGenerationMatch" in exchange.path
            or any(name in exchange.headers for name in conditions)
        )
        forward(exchange)

    server.proxy.hook = hook
    knowing, source = (
        open_files(bucket.url, {**bucket.options, "unsafe_commit": True}),
        source_of("A"),
    )
    convert(make_target(knowing, source), source, digest="A")
    assert seen
    assert not any(seen)


# ----------------------------------------------------------------------------- late puts


def is_put(exchange: Exchange, key: str) -> bool:
    return exchange.method in ("PUT", "POST") and key in unquote(exchange.path)


class Held:
    """Keeps the first put of an object from the server until it is let go."""

    def __init__(self, server: Server, key: str) -> None:
        self._forward, self._key = server.proxy.hook, key
        self.arrived, self.let_go = threading.Event(), threading.Event()
        self.exchange: Exchange | None = None
        server.proxy.hook = self

    def __call__(self, exchange: Exchange) -> None:
        if self.exchange is None and is_put(exchange, self._key):
            self.exchange = exchange
            self.arrived.set()
            self.let_go.wait(60)
        self._forward(exchange)


def begun(files: Files, plan: str) -> Any:
    target = make_target(files, source_of(plan))
    target.begin(plan)
    return target, next(task for task in target.tasks() if task.key == KEY)


def test_a_put_that_lands_after_another_plans_commit_changes_nothing(
    bucket: Files, server: Server, memory_path: Path
) -> None:
    """Its writer slept through the abandoning of its claim; S3 would take the bytes for hours."""
    zombie, task = begun(bucket, "A")
    held = Held(server, KEY)
    errors: list[BaseException] = []

    def write() -> None:
        try:
            zombie.write(task, source_of("A"))
        except AlreadyExistsError as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert held.arrived.wait(60)
    heir = open_files(bucket.url, bucket.options)
    assert make_target(heir).abandon() == "A"
    source = source_of("B")
    convert(make_target(heir, source), source, digest="B")
    held.let_go.set()
    thread.join(60)
    assert held.exchange is not None
    assert held.exchange.request.status == 412
    assert [error.kind for error in errors] == [Kind.ABANDONED]
    assert contents(bucket) == expected_of("B", memory_path)


def test_what_an_abandoned_plan_left_is_replaced(
    bucket: Files, server: Server, memory_path: Path
) -> None:
    zombie, task = begun(bucket, "A")
    zombie.write(task, source_of("A"))
    make_target(bucket).abandon()
    source = source_of("B")
    convert(make_target(bucket, source), source, digest="B")
    assert contents(bucket) == expected_of("B", memory_path)


def test_a_put_that_lands_just_before_the_heirs_is_replaced(
    bucket: Files, server: Server, memory_path: Path
) -> None:
    zombie, task = begun(bucket, "A")
    make_target(bucket).abandon()
    heir, same = begun(bucket, "B")
    zombie._log.check = lambda **_: None  # it looked before it was abandoned
    zombie.write(task, source_of("A"))
    heir.write(same, source_of("B"))
    zombie_again = bucket.read(KEY)
    convert(make_target(bucket, source_of("B")), source_of("B"), digest="B")
    assert bucket.read(KEY) == zombie_again
    assert contents(bucket) == expected_of("B", memory_path)


def test_writers_of_one_plan_share_an_object(bucket: Files, server: Server) -> None:
    first, task = begun(bucket, "A")
    second, _ = begun(bucket, "A")
    record = first.write(task, source_of("A"))
    server.forget_requests()
    assert second.write(task, source_of("A")) == record
    puts = [r.status for r in server.requests() if r.method in ("PUT", "POST") and KEY in r.path]
    assert puts in ([412], [])


def test_an_object_that_is_replaced_before_the_commit_stops_it(
    bucket: Files, memory_path: Path
) -> None:
    source = source_of("A")
    target = make_target(bucket, source)
    target.begin("A")
    records = {task.index: target.write(task, source) for task in target.tasks()}
    target.publish(list(records.values()))
    bucket.write(KEY, expected_of("B", memory_path)[KEY])
    with pytest.raises(IntegrityError) as caught:
        target.commit(records)
    assert caught.value.context["objects"] == [KEY]
    convert(make_target(bucket, source), source, digest="A")
    assert contents(bucket) == expected_of("A", memory_path)


def test_a_conflict_with_another_request_is_tried_again(bucket: Files, server: Server) -> None:
    """S3 answers 409 where two conditional puts of one object overlap."""
    if isinstance(server, GcsServer):
        pytest.skip("S3 only")
    forward, conflicts = server.proxy.hook, 3

    def hook(exchange: Exchange) -> None:
        nonlocal conflicts
        if is_put(exchange, "object") and conflicts:
            conflicts -= 1
            exchange.answer(409, b"<Error><Code>ConditionalRequestConflict</Code></Error>")
        else:
            forward(exchange)

    server.proxy.hook = hook
    sink = bucket.sink("object", 3)
    sink.write([b"abc"])
    assert sink.close() == bucket.stat("object")
    assert conflicts == 0


def test_the_guard_is_asked_before_other_bytes_are_replaced(bucket: Files) -> None:
    asked = []

    def put(data: bytes) -> None:
        sink = bucket.sink("object", len(data), guard=lambda: asked.append(data))
        sink.write([data])
        sink.close()

    put(b"one")
    put(b"one")
    assert asked == []
    put(b"two")
    assert (asked, bucket.read("object")) == ([b"two"], b"two")

    def refuse() -> None:
        raise AlreadyExistsError("no longer", kind=Kind.ABANDONED)

    sink = bucket.sink("object", 5, guard=refuse)
    sink.write([b"three"])
    with pytest.raises(AlreadyExistsError):
        sink.close()
    assert bucket.read("object") == b"two"
