"""Checkpoints in buckets, for every function and command: where they lie changes nothing but the requests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from click.testing import CliRunner

import ucpstore
from tests.deepspeed_runs import Run, deepspeed_run
from tests.fakes import ArraySource, random_array
from tests.proxy import Request
from tests.seaweedfs import s3_client
from tests.servers import (  # noqa: F401
    GcsServer,
    S3Server,
    gcs_server,
    run_seaweedfs_server,
    s3_server,
    seaweedfs_server,
)
from tests.store.stores import convert
from ucpstore.cli.main import main
from ucpstore.cli.output import EXIT_SOURCE
from ucpstore.errors import Kind, PlanError, StorageError, UcpStoreError
from ucpstore.io import open_files
from ucpstore.io.retries import Patience
from ucpstore.layout.parallel import Layout
from ucpstore.layout.region import Region
from ucpstore.store.grid import plan_arrays
from ucpstore.store.source import StoreSource
from ucpstore.store.target import ZarrTarget

CASE = "s1-bf16-dp3"
KEY, SECRET = "AKIAFAKEFAKEFAKEFAKE", "wJalrFAKEsecretFAKEsecretFAKEsecretFAKE0"


@pytest.fixture(scope="module")
def run() -> Run:
    return deepspeed_run(CASE)


@pytest.fixture(scope="module")
def other_cluster() -> Iterator[S3Server]:
    """A second SeaweedFS, with credentials of its own."""
    yield from run_seaweedfs_server(KEY, SECRET)


def upload(folder: Path, url: str, options: Any) -> str:
    files = open_files(url, options)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files.write(str(path.relative_to(folder)), path.read_bytes())
    return url


def values(checkpoint: ucpstore.Checkpoint) -> dict[tuple[str, str], bytes]:
    return {
        (fqn, state): parameter[state][...].tobytes()
        for fqn, parameter in checkpoint.items()
        for state in parameter
    }


def per_file(requests: list[Request]) -> Counter[str]:
    """Requests for the contents of each file."""
    paths = [unquote(r.path.partition("?")[0]) for r in requests if r.method == "GET"]
    return Counter(path.rpartition("/")[2] for path in paths if path.endswith(".pt"))


# ------------------------------------------------------------------ framework checkpoints


def test_a_native_checkpoint_opens_by_a_few_ranges_of_each_file(
    run: Run,
    seaweedfs_server: S3Server,  # noqa: F811
) -> None:
    url = upload(run.path, f"{seaweedfs_server.new_bucket()}/ds", seaweedfs_server.options)
    names = [path.name for path in run.tag_path.glob("*.pt")]
    seaweedfs_server.forget_requests()
    checkpoint = ucpstore.open(url, storage_options=seaweedfs_server.options)
    opened = seaweedfs_server.requests()
    counts = per_file(opened)
    assert set(counts) == set(names)
    assert max(counts.values()) <= 4, counts  # both ends; of one rank's also small tensors
    assert sorted(counts.values())[-2] <= 2, counts
    assert all(r.range for r in opened if r.method == "GET" and r.path.endswith(".pt"))
    assert len(opened) <= 4 * len(names) + 16, [(r.method, r.path) for r in opened]
    assert values(checkpoint) == values(ucpstore.open(run.path))


def strided(checkpoint: ucpstore.Checkpoint) -> Any:
    """The largest matrix of the checkpoint."""
    tensors = [p["fp32"] for p in checkpoint.values() if "fp32" in p and len(p["fp32"].shape) == 2]
    return max(tensors, key=lambda tensor: tensor.shape[0] * tensor.shape[1])


def test_a_column_is_read_by_one_request_per_file(
    run: Run,
    seaweedfs_server: S3Server,  # noqa: F811
) -> None:
    url = upload(run.path, f"{seaweedfs_server.new_bucket()}/ds", seaweedfs_server.options)
    tensor = strided(ucpstore.open(url, storage_options=seaweedfs_server.options))
    seaweedfs_server.forget_requests()
    column = tensor[:, 3:5]
    requests = seaweedfs_server.requests()
    assert all(r.method == "GET" for r in requests)
    assert len(requests) <= 2 * max(per_file(requests).total(), 1)
    assert max(per_file(requests).values()) <= 2  # a partition may hold it in two stretches
    whole = tensor.shape[0] * tensor.shape[1] * 4
    assert sum(r.nbytes for r in requests) <= whole
    assert np.array_equal(column, strided(ucpstore.open(run.path))[:, 3:5])


# ------------------------------------------------------------------------- two clusters


def test_from_one_cluster_to_the_other_and_back_to_native(
    run: Run,
    seaweedfs_server: S3Server,  # noqa: F811
    other_cluster: S3Server,
    tmp_path: Path,
) -> None:
    here, there = seaweedfs_server.options, other_cluster.options
    native = upload(run.path, f"{seaweedfs_server.new_bucket()}/ds", here)
    store = f"{other_cluster.new_bucket()}/run/step"
    ucpstore.convert(native, store, source_options=here, dest_options=there)
    checkpoint = ucpstore.open(store, storage_options=there)
    found, original = values(checkpoint), values(ucpstore.open(run.path))
    assert {state for _, state in found} >= {"fp32", "adam_m", "adam_v"}
    assert found == {key: original[key] for key in found}
    verified = ucpstore.verify(store, against=native, storage_options=there, against_options=here)
    assert list(verified.findings) == []
    layout = Layout(dp=2, zero_stage=2)
    ucpstore.convert(
        store, tmp_path / "native", to="deepspeed", layout=layout, source_options=there
    )
    assert (tmp_path / "native" / "latest").read_text()
    held = ucpstore.load(store, layout, 1, storage_options=there)
    local = ucpstore.load(tmp_path / "native", layout, 1)
    for ours, theirs in zip(held.tensors, local.tensors, strict=True):
        assert ours.read().tobytes() == theirs.read().tobytes(), ours
    with pytest.raises(StorageError):  # the other cluster's credentials
        ucpstore.open(store, storage_options={**there, "secret": "another"})


def test_gcs_as_source_and_destination(
    run: Run,
    gcs_server: GcsServer,  # noqa: F811
    s3_server: S3Server,  # noqa: F811
) -> None:
    gs, s3 = gcs_server.options, s3_server.options
    native = upload(run.path, f"{gcs_server.new_bucket()}/ds", gs)
    store = f"{s3_server.new_bucket()}/store"
    ucpstore.convert(native, store, source_options=gs, dest_options=s3)
    back = f"{gcs_server.new_bucket()}/store"
    ucpstore.convert(store, back, source_options=s3, dest_options=gs)
    assert ucpstore.diff(store, back, left_options=s3, right_options=gs).equal
    assert list(ucpstore.verify(back, storage_options=gs).findings) == []


def test_a_native_target_in_a_bucket_is_refused_with_the_way_out(
    run: Run,
    s3_server: S3Server,  # noqa: F811
) -> None:
    dest = f"{s3_server.new_bucket()}/native"
    with pytest.raises(PlanError, match="local folder") as caught:
        ucpstore.convert(
            run.path,
            dest,
            to="deepspeed",
            layout=Layout(dp=2),
            dest_options=s3_server.options,
        )
    assert "local folder" in caught.value.hint
    assert open_files(dest, s3_server.options).list() == []


def test_commands_take_options_for_each_side(
    run: Run,
    seaweedfs_server: S3Server,  # noqa: F811
    other_cluster: S3Server,
    tmp_path: Path,
) -> None:
    def options(side: str, server: S3Server) -> list[str]:
        return [
            argument
            for name, value in server.options.items()
            for argument in (f"--{side}-option", f"{name}={value}")
        ]

    def invoke(*arguments: str) -> str:
        result = CliRunner().invoke(main, [*arguments, "--json"])
        assert result.exit_code == 0, result.output
        assert SECRET not in result.output
        return result.output

    here, there = seaweedfs_server, other_cluster
    first, second = f"{here.new_bucket()}/store", f"{there.new_bucket()}/store"
    invoke("convert", str(run.path), first, *options("storage", here))
    both = (*options("source", here), *options("dest", there))
    invoke("plan", first, second, *both)
    invoke("convert", first, second, *both)
    sides = (*options("left", here), *options("right", there))
    assert json.loads(invoke("diff", first, second, *sides))
    against = (*options("storage", here), *options("against", there))
    invoke("verify", first, "--against", second, *against)
    local = str(tmp_path / "store")
    invoke("convert", second, local, *options("storage", there))
    invoke("diff", local, second, *options("storage", there))


# -------------------------------------------------------------------------- credentials


def uses(url: str, options: dict[str, Any]) -> None:
    """Everything that a conversion asks of a bucket, through all clients."""
    files = open_files(url, options)
    assert files.create("x/claim", b"1")
    assert not files.create("x/claim", b"2")
    files.write("x/a", b"123")
    sink = files.sink("x/b", 2)
    sink.write([b"45"])
    sink.close()
    assert files.read("x/a", 1) == b"23"
    assert [s.name for s in files.list("x")] == ["x/a", "x/b", "x/claim"]
    assert files.stat("x/b") is not None
    files.delete(["x/a", "x/b", "x/claim"])
    assert files.list("x") == []


@pytest.mark.parametrize("way", ["explicit", "environment", "profile"])
def test_ways_to_give_credentials(
    way: str, other_cluster: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes only its own keys."""
    url, options = other_cluster.new_bucket(), {"endpoint_url": other_cluster.endpoint}
    if way == "explicit":
        options |= {"key": KEY, "secret": SECRET}
    elif way == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    else:
        keys = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
        (tmp_path / "credentials").write_text(f"[two]\n{keys}")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        options |= {"profile": "two"}
    uses(url, options)


def test_anonymous_access(s3_server: S3Server, other_cluster: S3Server) -> None:  # noqa: F811
    url = s3_server.new_bucket()
    client = s3_client(s3_server.endpoint, s3_server.key, s3_server.secret)
    client.put_object(Bucket=url.removeprefix("s3://"), Key="x/a", Body=b"123", ACL="public-read")
    client.close()
    public = open_files(url, {**s3_server.options, "anon": True})
    assert public.read("x/a", 1) == b"23"
    assert [s.name for s in public.list()] == ["x/a"]
    closed = open_files(
        other_cluster.new_bucket(), {"endpoint_url": other_cluster.endpoint, "anon": True}
    )
    for act in (lambda: closed.read("x"), lambda: closed.write("x", b""), closed.list):
        with pytest.raises(StorageError) as caught:
            act()
        assert caught.value.kind is Kind.PERMISSION
        assert not caught.value.retryable


# ----------------------------------------------------------------------------- requests


def test_requests_of_reads(run: Run, seaweedfs_server: S3Server) -> None:  # noqa: F811
    options = seaweedfs_server.options
    store = f"{seaweedfs_server.new_bucket()}/store"
    seaweedfs_server.forget_requests()
    ucpstore.convert(run.path, store, dest_options=options)
    shards = Counter(
        r.path.partition("?")[0]
        for r in seaweedfs_server.requests("PUT")
        if re.search(r"/c(\.\d+)*$", r.path)
    )
    assert shards
    assert set(shards.values()) == {1}, "one PUT per shard"
    gets = {r.path for r in seaweedfs_server.requests("GET")}
    assert not gets & set(shards), "no shard is read while it is written"
    seaweedfs_server.forget_requests()
    checkpoint = ucpstore.open(store, format="ucpstore", storage_options=options)
    assert [r.method for r in seaweedfs_server.requests()] == ["GET"]
    tensor = strided(checkpoint)
    tensor[:1]
    seaweedfs_server.forget_requests()
    row = tensor[1]
    found = seaweedfs_server.requests()
    touched = {r.path for r in found}
    assert 1 <= len(found) <= 2 * len(touched)
    assert {r.method for r in found} == {"GET"}
    assert np.array_equal(row, strided(ucpstore.open(run.path))[1])


def test_an_object_that_is_replaced_later_is_found_by_verify(
    run: Run,
    seaweedfs_server: S3Server,  # noqa: F811
) -> None:
    """By somebody who sends no conditions: good checksums, other values."""
    options = seaweedfs_server.options
    store = f"{seaweedfs_server.new_bucket()}/store"
    ucpstore.convert(run.path, store, dest_options=options)
    files = open_files(store, options)
    moments = sorted(s.name for s in files.list("params") if "/adam_m/c" in s.name)
    sizes = {s.name: s.nbytes for s in files.list("params")}
    first, second = next((a, b) for a in moments for b in moments if a < b and sizes[a] == sizes[b])
    files.write(first, files.read(second))
    findings = ucpstore.verify(store, storage_options=options).findings
    assert [str(f.kind) for f in findings] == ["checksum"]
    assert f"params/{findings[0].fqn}/" in first or findings[0].fqn in first


# ------------------------------------------------------------------------ secrets, names


def test_secrets_are_nowhere(
    run: Run,
    seaweedfs_server: S3Server,  # noqa: F811
    other_cluster: S3Server,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    good = other_cluster.options
    token = "FAKEtokenFAKEtokenFAKEtokenFAKEtoken"
    dead = {"endpoint_url": "http://127.0.0.1:9", "key": KEY, "secret": SECRET}
    wrong = {**seaweedfs_server.options, "key": KEY, "secret": SECRET, "token": token}
    store = f"{other_cluster.new_bucket()}/store"
    events: list[Any] = []
    report = ucpstore.convert(run.path, store, dest_options=good, on_event=events.append)
    files = open_files(store, good)
    texts = [repr(report), json.dumps(report.to_json()), repr(events), repr(files)]
    texts += [files.read(stat.name).decode("latin-1") for stat in files.list()]
    plan = ucpstore.plan(store, tmp_path / "x", source_options=good)
    texts += [plan.summary(), json.dumps(plan.to_json()), repr(plan)]
    texts.append(repr(ucpstore.open(store, storage_options=good)))
    failures = [
        lambda: ucpstore.open(store, storage_options={**good, "secret": SECRET[::-1]}),
        lambda: ucpstore.open(store, storage_options=wrong),
        lambda: ucpstore.convert(run.path, store, dest_options=wrong, retries=0),
        lambda: ucpstore.convert(store, tmp_path / "y", source_options=wrong, retries=0),
        lambda: ucpstore.open(f"{store}/missing", storage_options=good),
        lambda: ucpstore.open("s3://no-such-bucket-here/x", storage_options=good),
        lambda: ucpstore.open(store, storage_options={**good, "secrets": SECRET}),
        lambda: ucpstore.open(store, storage_options={"secret": SECRET}),
        lambda: ucpstore.open(store, storage_options={**good, "secret": f"{SECRET}\nx"}),
        lambda: ucpstore.open(f"s3://{KEY}:{SECRET}@bucket/x"),
        lambda: open_files(store, wrong).write("x", b"1"),
        lambda: open_files(store, wrong).list(),
        lambda: open_files(store, wrong).delete(["x"]),
        lambda: ucpstore.open(run.path, storage_options={"secret": SECRET}),
    ]
    for fail in failures:
        with pytest.raises(UcpStoreError) as caught:
            fail()
        texts += chain(caught.value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ucpstore.io.retries._patience", Patience(attempts=2, first_delay=0.01))
        with pytest.raises(UcpStoreError) as caught:
            open_files("s3://bucket/x", dead).read("x")
        texts += chain(caught.value)
    result = CliRunner().invoke(
        main, ["info", store, "-vv", *(f"--storage-option={k}={v}" for k, v in wrong.items())]
    )
    assert result.exit_code != 0
    typo = CliRunner().invoke(main, ["info", store, "--storage-option", SECRET])
    captured = capfd.readouterr()
    texts += [result.output, typo.output, caplog.text, captured.out, captured.err]
    reverse = SECRET[::-1]
    for text in texts:
        for secret in (SECRET, token, reverse):
            assert secret not in text, text[:2000]


def chain(error: BaseException | None) -> list[str]:
    """All that a traceback, a log or a bug report would show of an error and its causes."""
    found = []
    while error is not None:
        found += [str(error), repr(error), repr(vars(error))]
        error = error.__cause__ or error.__context__
    return found


@pytest.mark.parametrize(
    "name",
    ["../../escaped", "/escaped", "a/../../escaped", "...", "a/b", "x\\..\\y", "é\u202e"],
)
def test_names_from_a_checkpoint_stay_below_the_destination(
    name: str,
    s3_server: S3Server,  # noqa: F811
) -> None:
    bucket = s3_server.new_bucket()
    files = open_files(f"{bucket}/deep/dest", s3_server.options)
    source = ArraySource({name: {"fp32": random_array((3, 4))}}, {})
    s3_server.forget_requests()
    convert(ZarrTarget(files, plan_arrays(source), source=source), source)
    prefix = f"/{bucket.removeprefix('s3://')}/deep/dest/"
    puts = [unquote(r.path) for r in s3_server.requests("PUT")]
    assert puts
    for path in puts:
        assert path.startswith(prefix)
        assert os.path.normpath(path) == path
    out = np.empty((3, 4), np.float32)
    StoreSource(files).read(name, "fp32", Region.full((3, 4)), out)
    assert np.array_equal(out, source._arrays[name, "fp32"])


@pytest.mark.parametrize("name", [".", ".."])
def test_names_that_mean_folders_are_refused_before_anything_is_written(
    name: str,
    s3_server: S3Server,  # noqa: F811
) -> None:
    source = ArraySource({name: {"fp32": random_array((3, 4))}}, {})
    s3_server.forget_requests()
    with pytest.raises(PlanError, match="reserved"):
        plan_arrays(source)
    assert s3_server.requests("PUT") == []


# -------------------------------------------------------------------- racing commands


def test_racing_commands_commit_one_plan(
    run: Run,
    seaweedfs_server: S3Server,  # noqa: F811
) -> None:
    """Two of one plan and one of another, as users would start them."""
    options = seaweedfs_server.options
    store = f"{seaweedfs_server.new_bucket()}/store"
    command = [sys.executable, "-m", "ucpstore", "convert", str(run.path), store, "--json", "-q"]
    command += ["--storage-option", f"endpoint_url={seaweedfs_server.endpoint}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    processes = [
        subprocess.Popen(
            [*command, *more],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for more in ([], [], ["--state", "fp32"])
    ]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes in ([0, 0, EXIT_SOURCE], [EXIT_SOURCE, EXIT_SOURCE, 0]), errors
    for code, error in zip(codes, errors, strict=True):
        assert code == 0 or "another plan" in error
    assert list(ucpstore.verify(store, storage_options=options).findings) == []
    states = {s for p in ucpstore.open(store, storage_options=options).values() for s in p}
    assert ("adam_m" in states) == (codes[0] == 0)
