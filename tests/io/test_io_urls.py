"""URLs, storage options and their translation to TensorStore."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ucpstore.errors import Kind, StorageError
from ucpstore.io import open_files
from ucpstore.io.kvstore import kvstore_spec
from ucpstore.io.urls import Location, parse_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/data/run", Location("file", "/data/run")),
        ("/data/run/", Location("file", "/data/run")),
        ("/data/a b#c?d", Location("file", "/data/a b#c?d")),
        ("file:///data/run", Location("file", "/data/run")),
        ("file://localhost/data/run", Location("file", "/data/run")),
        ("file:///data/a%20b", Location("file", "/data/a b")),
        ("memory://x/y", Location("memory", "x/y")),
        ("s3://bucket/a/b/", Location("s3", "bucket/a/b")),
        ("S3://bucket", Location("s3", "bucket")),
        ("s3a://bucket/a", Location("s3", "bucket/a")),
        ("gs://bucket/a", Location("gs", "bucket/a")),
        ("gcs://bucket//a", Location("gs", "bucket/a")),
    ],
)
def test_parse_url(url: str, expected: Location) -> None:
    assert parse_url(url) == expected
    assert parse_url(expected.url) == expected


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_url("run").path == str(tmp_path / "run")
    assert parse_url(Path("run")).path == str(tmp_path / "run")


def test_bucket_and_prefix() -> None:
    location = parse_url("s3://bucket/a/b")
    assert (location.bucket, location.prefix) == ("bucket", "a/b/")
    assert parse_url("s3://bucket").prefix == ""


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host/x", "found the scheme 'http', expected a plain path or one of file://"),
        ("s3n://bucket/x", "Did you mean 's3'"),
        ("s3://", "names no bucket"),
        ("s3://bucket/../other", "without credentials"),
        ("s3://key:hunter2@bucket/x", "without credentials"),
        ("file://host/data", "found the host 'host'"),
        ("", "expected a path or a URL"),
        ("run\0", "expected a path or a URL"),
    ],
)
def test_refused_urls(url: str, message: str) -> None:
    with pytest.raises(StorageError, match=message) as caught:
        open_files(url)
    assert caught.value.kind is Kind.NAME
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("s3://b/x", {"endpoint": "http://h"}, "'endpoint': expected one of anon.*'endpoint_url'"),
        ("s3://b/x", {"client_kwargs": {"region": "x"}}, "'region'.*'region_name'"),
        ("s3://b/x", {"client_kwargs": "x"}, "found str, expected a mapping"),
        ("gs://b/x", {"key": "x"}, "gs storage option 'key': expected one of"),
        ("/data", {"key": "x"}, "file storage option 'key': expected none"),
        ("memory://x", {"anon": True}, "memory storage option 'anon'"),
    ],
)
def test_unknown_options(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StorageError, match=message):
        open_files(url, options)


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    return monkeypatch


def spec(url: str, **options: Any) -> dict[str, Any]:
    return kvstore_spec(parse_url(url), options)


def test_spec_of_a_path() -> None:
    assert spec("/data/run") == {"driver": "file", "path": "/data/run/"}


def test_spec_of_memory() -> None:
    with pytest.raises(StorageError, match="fsspec's memory"):
        spec("memory://x")


def test_s3_spec(no_aws: pytest.MonkeyPatch) -> None:
    found = spec("s3://b/a", requester_pays=True, client_kwargs={"region_name": "eu-west-1"})
    assert found["driver"] == "s3"
    assert (found["bucket"], found["path"]) == ("b", "a/")
    assert found["aws_region"] == "eu-west-1"
    assert found["aws_credentials"] == {"type": "default"}
    assert found["requester_pays"] is True
    assert "endpoint" not in found


def test_s3_region_and_endpoint_defaults(no_aws: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "aws_region" not in spec("s3://b/a")
    assert spec("s3://b/a", endpoint_url="http://h:9/")["endpoint"] == "http://h:9"
    assert spec("s3://b/a", endpoint_url="http://h:9")["aws_region"] == "us-east-1"
    no_aws.setenv("AWS_ENDPOINT_URL", "http://env:1")
    assert spec("s3://b/a")["endpoint"] == "http://env:1"
    config = tmp_path / "config"
    config.write_text("[profile lab]\nregion = ap-south-1\n")
    no_aws.setenv("AWS_CONFIG_FILE", str(config))
    found = spec("s3://b/a", profile="lab")
    assert found["aws_region"] == "ap-south-1"
    assert found["aws_credentials"] == {
        "type": "profile",
        "profile": "lab",
        "credentials_file": os.devnull,
        "config_file": str(config),
    }
    with pytest.raises(StorageError, match="'profile': found 'other'"):
        spec("s3://b/a", profile="other")


def test_s3_credentials_of_the_environment(no_aws: pytest.MonkeyPatch) -> None:
    assert spec("s3://b/a")["aws_credentials"] == {"type": "default"}
    no_aws.setenv("AWS_ACCESS_KEY_ID", "x")
    assert spec("s3://b/a")["aws_credentials"] == {"type": "environment"}
    assert spec("s3://b/a", anon=True)["aws_credentials"] == {"type": "anonymous"}


def test_s3_anonymous(no_aws: pytest.MonkeyPatch) -> None:
    assert spec("s3://b/a", anon=True)["aws_credentials"] == {"type": "anonymous"}


def test_explicit_keys_are_not_in_the_spec(no_aws: pytest.MonkeyPatch) -> None:
    found = spec("s3://b/a", key="AKIA", secret="hunter2", token="session")
    assert "hunter2" not in json.dumps(found)
    assert "AKIA" not in json.dumps(found)
    credentials = found["aws_credentials"]
    text = Path(credentials["credentials_file"]).read_text()
    assert f"[{credentials['profile']}]" in text
    assert "aws_secret_access_key = hunter2" in text
    assert spec("s3://b/a", key="AKIA", secret="hunter2", token="session") == found


@pytest.mark.parametrize("options", [{"key": "x"}, {"secret": "hunter2"}])
def test_half_a_key_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(StorageError, match="expected both") as caught:
        spec("s3://b/a", endpoint_url="http://h", **options)
    assert "hunter2" not in str(caught.value)


def test_keys_of_two_lines_are_refused() -> None:
    with pytest.raises(StorageError, match="line break") as caught:
        spec("s3://b/a", endpoint_url="http://h", key="x", secret="hunter2\n[other]")
    assert "hunter2" not in str(caught.value)


def test_gcs_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://one")
    found = spec("gs://b/a", endpoint_url="http://one/", project="p", requester_pays=True)
    assert (found["driver"], found["bucket"], found["path"]) == ("gcs", "b", "a/")
    assert found["gcs_user_project"] == {"project_id": "p"}
    with pytest.raises(StorageError, match="one per process"):
        spec("gs://b/a", endpoint_url="http://two")
    with pytest.raises(StorageError, match="names no file") as caught:
        spec("gs://b/a", token="hunter2")
    assert "hunter2" not in str(caught.value)


def test_secrets_are_not_shown(no_aws: pytest.MonkeyPatch) -> None:
    options = {"key": "AKIA", "secret": "hunter2", "endpoint_url": "http://h"}
    files = open_files("s3://b/a", options)
    assert "hunter2" not in repr(files)
    assert "AKIA" not in repr(files)


def test_local_storage_imports_no_driver() -> None:
    code = (
        "import sys\n"
        "from ucpstore.io import open_files\n"
        "open_files('/tmp')\n"
        "heavy = {'tensorstore', 'fsspec', 's3fs', 'numpy', 'torch', 'zarr', 'botocore'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    ).stdout
    assert output == "[]\n"
