"""What only buckets promise: requests per operation, credentials, error kinds."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.servers import S3Server
from ucpstore.errors import CheckpointNotFoundError, Kind, MissingExtraError, StorageError
from ucpstore.io import Files, open_files
from ucpstore.io.fsspecerrors import fsspec_errors
from ucpstore.io.kvstore import tensorstore_errors
from ucpstore.io.objects import MAX_OBJECT_BYTES

MIB = 1 << 20


@pytest.fixture
def url(bucket: str) -> str:
    return f"{bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def files(s3_server: S3Server, url: str) -> Files:
    files = open_files(url, s3_server.options)
    files.write("warm", b"")
    files.stat("warm")
    s3_server.forget_requests()
    return files


def methods(server: S3Server) -> list[str]:
    found = [request.method for request in server.requests()]
    server.forget_requests()
    return found


def test_requests_per_operation(s3_server: S3Server, files: Files) -> None:
    files.write("small", b"123")
    assert methods(s3_server) == ["PUT"]
    files.read("small", 1, 2)
    assert methods(s3_server) == ["GET"]
    files.read("small")
    assert methods(s3_server) == ["GET"]
    files.read_into("small", 0, [memoryview(bytearray(1)), memoryview(bytearray(2))])
    assert methods(s3_server) == ["GET"]
    files.stat("small")
    assert methods(s3_server) == ["HEAD"]
    files.stat("missing")
    assert methods(s3_server) == ["HEAD"]
    files.list()
    assert methods(s3_server) == ["GET"]
    assert files.create("claim", b"1")
    assert methods(s3_server) == ["GET", "PUT"]
    assert not files.create("claim", b"2")
    assert methods(s3_server) == ["GET"]


def test_create_does_not_replace_what_appeared_meanwhile(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object appears between the look and the put: the put must not replace it."""
    store = files._store()  # type: ignore[attr-defined]
    missing = store.read("late").result()
    files.write("late", b"theirs")

    class Stale:
        def read(self, name: str) -> object:
            return type("Future", (), {"result": lambda self: missing})()

        def write(self, *arguments: object, **keywords: object) -> object:
            return store.write(*arguments, **keywords)

    monkeypatch.setattr(files, "_store", Stale)
    assert not files.create("late", b"mine")
    monkeypatch.undo()
    assert files.read("late") == b"theirs"


def test_large_object_is_one_put(s3_server: S3Server, files: Files) -> None:
    block = os.urandom(MIB)
    sink = files.sink("shard", 64 * MIB)
    for _ in range(64):
        sink.write([block])
    assert methods(s3_server) == []
    stat = sink.close()
    assert methods(s3_server) == ["PUT"]
    assert stat == files.stat("shard")
    out = bytearray(2 * MIB)
    files.read_into("shard", 10 * MIB - 5, [memoryview(out)])
    assert out == (block * 4)[MIB - 5 : 3 * MIB - 5]


def test_object_beyond_one_put_is_refused(files: Files) -> None:
    with pytest.raises(StorageError, match="in one request"):
        files.sink("x", MAX_OBJECT_BYTES + 1)


MEMORY = """
import sys
from pathlib import Path
from ucpstore.io import open_files

def peak():  # of this program: ru_maxrss would remember the parent's
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

files = open_files(sys.argv[1], {"endpoint_url": sys.argv[2]})
files.write("warm", b"x" * (1 << 20))
size = 128 << 20
block = bytes(1 << 20)
before = peak()
sink = files.sink("x", size)
for _ in range(128):
    sink.write([block])
filled = peak()
sink.close()
print((filled - before) / size, (peak() - before) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_sink(s3_server: S3Server, url: str) -> None:
    output = subprocess.run(
        [sys.executable, "-c", MEMORY, url, s3_server.endpoint],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ).stdout
    filled, closed = map(float, output.split())
    assert 0.9 < filled < 1.1
    assert closed < 1.2


def test_explicit_keys_reach_the_server(
    s3_server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    files = open_files(url, {**s3_server.options, "key": "explicit", "secret": "hunter2"})
    files.write("x", b"1")
    assert files.create("y", b"2")
    assert [stat.name for stat in files.list()] == ["x", "y"]
    again = pickle.loads(pickle.dumps(files))
    assert again.read("y") == b"2"


def test_worker_process_opens_from_a_pickle(s3_server: S3Server, files: Files) -> None:
    files.write("x", b"123")
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).read('x', 1))"
    output = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(files),
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ).stdout
    assert output.strip() == b"b'23'"


def test_forked_child_is_refused_instead_of_hanging(files: Files) -> None:
    files.read("warm")
    child = os.fork()
    if child == 0:
        try:
            files.read("warm")
        except StorageError as error:
            os._exit(0 if "forkserver" in error.hint else 2)
        except BaseException:
            os._exit(3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_unreachable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from ucpstore.io import retries

    monkeypatch.setattr(retries, "_patience", retries.Patience(attempts=2, first_delay=0.01))
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0)
    files = open_files(
        "s3://bucket/x",
        {"endpoint_url": "http://127.0.0.1:9", "key": "AKIA", "secret": "hunter2"},
    )
    for use in (lambda: files.read("x"), lambda: files.write("x", b"1")):
        with pytest.raises(StorageError, match="s3://bucket/x") as caught:
            use()
        assert caught.value.retryable
        assert "hunter2" not in f"{caught.value!r} {caught.value.context}"


def test_missing_bucket(s3_server: S3Server) -> None:
    files = open_files(f"s3://no-{uuid.uuid4().hex}/x", s3_server.options)
    with pytest.raises(CheckpointNotFoundError):
        files.read("x")
    with pytest.raises((CheckpointNotFoundError, StorageError)) as caught:
        files.write("x", b"1")
    assert not getattr(caught.value, "retryable", False)


@pytest.mark.parametrize(
    ("text", "kind", "retryable"),
    [
        ("PERMISSION_DENIED: AccessDenied: no [http_response_code='403']", Kind.PERMISSION, False),
        ("UNAUTHENTICATED: who are you", Kind.PERMISSION, False),
        ("UNAVAILABLE: SlowDown: reduce your request rate", Kind.IO, True),
        ("DEADLINE_EXCEEDED: timeout", Kind.IO, True),
        ("INTERNAL: InternalError", Kind.IO, True),
        ("INVALID_ARGUMENT: bad name", Kind.UNSUPPORTED, False),
        ("what is this", Kind.IO, True),
    ],
)
def test_tensorstore_error_kinds(text: str, kind: Kind, retryable: bool) -> None:
    with (
        pytest.raises(StorageError, match="cannot read 's3://b/x'") as caught,
        tensorstore_errors("read", "s3://b/x"),
    ):
        raise ValueError(text)
    assert (caught.value.kind, caught.value.retryable) == (kind, retryable)
    assert "http_response_code" not in str(caught.value)


def test_fsspec_error_kinds() -> None:
    import botocore.exceptions as boto

    def client_error(status: int, code: str) -> Exception:
        response = {
            "Error": {"Code": code, "Message": code},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }
        error: Exception = boto.ClientError(response, "ListObjectsV2")
        return error

    cases = [
        (client_error(403, "AccessDenied"), Kind.PERMISSION, False),
        (client_error(503, "SlowDown"), Kind.IO, True),
        (client_error(400, "InvalidRequest"), Kind.IO, False),
        (client_error(429, "TooManyRequests"), Kind.IO, True),
        (PermissionError("Access Denied"), Kind.PERMISSION, False),
        (boto.NoCredentialsError(), Kind.PERMISSION, False),
        (boto.EndpointConnectionError(endpoint_url="http://h"), Kind.IO, True),
        (TimeoutError(), Kind.IO, True),
        (ConnectionResetError("reset"), Kind.IO, True),
    ]
    for error, kind, retryable in cases:
        with pytest.raises(StorageError, match="cannot list") as caught, fsspec_errors("list", "u"):
            raise error
        assert (caught.value.kind, caught.value.retryable) == (kind, retryable), error
    with pytest.raises(CheckpointNotFoundError), fsspec_errors("list", "u"):
        raise client_error(404, "NoSuchBucket")
    with pytest.raises(ZeroDivisionError), fsspec_errors("list", "u"):
        raise ZeroDivisionError


def test_gcs_without_gcsfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtraError, match=r"ucpstore\[gcs\]"):
        open_files("gs://bucket/x").list()


def test_memory_files_are_fsspecs() -> None:
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://{uuid.uuid4().hex}"
    files = open_files(url)
    files.write("a/b", b"123")
    with fsspec.open(f"{url}/a/b") as stream:
        assert stream.read() == b"123"
    fsspec.filesystem("memory").pipe_file(f"{url}/c", b"4")
    assert [stat.name for stat in files.list()] == ["a/b", "c"]
