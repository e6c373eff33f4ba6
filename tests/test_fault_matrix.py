"""Faults and kills on object stores: whatever happens to a conversion, nothing half-done is ever visible, and
the same command completes it."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes import ArraySource, random_array
from tests.fault_worker import Child, workers
from tests.faults import FOREVER, REFUSALS, TRANSIENT, Fault, Faults
from tests.proxy import Exchange
from tests.servers import GcsServer, S3Server, gcs_server, s3_server, seaweedfs_server  # noqa: F401
from tests.store.stores import convert
from ucpstore.io import open_files
from ucpstore.store.grid import plan_arrays
from ucpstore.store.target import ZarrTarget

Server = S3Server | GcsServer

TRIALS = {"seaweedfs_server": 100, "s3_server": 64, "gcs_server": 40}
LANES = {"seaweedfs_server": 2, "s3_server": 2, "gcs_server": 1}
SEED = 20
SECONDS = 30.0
"""Of one conversion, whatever happens: with the policy in small, on a machine that does other things."""
KINDS = {"io", "permission", "no_space", "checksum", "lost_object", "source_changed", "malformed"}


def test_the_matrix_is_as_large_as_the_readme_says() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    total = sum(TRIALS.values())
    assert total >= 200
    assert f"Faults and kills on object stores: {total} trials, 0 committed corruption" in text


@dataclass
class Trial:
    """What happens to one conversion.

    Attributes
    ----------
    faults : list of Fault
    kill : int or None
        The process dies at its request with this number,
    when : str
        before it arrives, in the middle of its body, when it took effect, or after its answer.
    abandon : bool
        The claim is freed before the command is run again.
    """

    number: int
    faults: list[Fault]
    kill: int | None
    when: str
    abandon: bool


def choose(rng: random.Random, number: int, requests: int) -> Trial:
    """Every second trial is a kill, two thirds of the others are transient faults."""
    moment = rng.randrange(requests)
    if number % 2:
        trial = Trial(
            number, [], moment, rng.choice(["before", "during", "effect", "after"]), number % 8 == 1
        )
        if rng.random() < 0.25:
            trial.faults.append(transient(rng, requests))
        return trial
    if number % 6:
        faults = [transient(rng, requests) for _ in range(rng.randint(1, 3))]
    else:
        faults = [Fault(rng.choice([*sorted(REFUSALS), "wrong_byte"]), after=moment)]
        if faults[0].name == "wrong_byte":
            faults[0].method, faults[0].part = "GET", "src/params/"  # documents have no checksums
            faults[0].after = rng.randrange(3)
            faults[0].times = rng.choice([1, 3])
    return Trial(number, faults, None, "", number % 8 == 0)


def transient(rng: random.Random, requests: int) -> Fault:
    name = rng.choice(sorted(TRANSIENT))
    slow = name.startswith("stall") or name in ("throttled", "unavailable")
    times = 1 if slow else rng.choice([1, 1, 2, 3, 6, FOREVER])
    return Fault(name, after=rng.randrange(requests), times=times)


class Killer:
    """Lets faults strike, and kills the process at its n-th request."""

    def __init__(self, faults: Faults, trial: Trial, child: Child) -> None:
        self._faults, self._trial, self._child = faults, trial, child
        self._lock = threading.Lock()
        self.seen = 0

    def __call__(self, exchange: Exchange) -> None:
        with self._lock:
            here, self.seen = self.seen == self._trial.kill, self.seen + 1
        if not here:
            self._faults(exchange)
            return
        when = self._trial.when
        if when == "before":
            self._child.kill()
        elif when == "during":
            next(exchange.body(), b"")
            self._child.kill()
        elif when == "effect":
            exchange.forward = exchange.send  # type: ignore[method-assign,assignment]
            self._faults.forward(exchange)
            self._child.kill()
        else:
            self._faults.forward(exchange)
            self._child.kill()
        exchange.drop()


@dataclass
class Lane:
    """A bucket of a server, in which one trial runs after another."""

    name: str
    server: Server
    new_child: Callable[[], Child]
    source: ArraySource
    bucket: str = ""
    hook: Any = None
    seen: Counter[str] = field(default_factory=Counter)

    def prepare(self) -> tuple[int, str]:
        """Requests of an undisturbed conversion, and the hash of what it leaves."""
        self.bucket = self.server.new_bucket()
        files = open_files(f"{self.bucket}/src", self.server.options)
        convert(ZarrTarget(files, plan_arrays(self.source), source=self.source), self.source)
        counted = Trial(0, [], None, "", abandon=False)
        killer, result = self.disturbed(counted, "reference")
        assert result is not None
        assert result["committed"], result
        found = self.finish(counted, "reference", "")
        assert found["findings"] == []
        return killer.seen, found["hash"]

    def disturbed(self, trial: Trial, name: str) -> tuple[Killer, dict[str, Any] | None]:
        """One run under faults."""
        child = self.new_child()
        faults = Faults(self.hook, trial.faults)
        killer = Killer(faults, trial, child)
        routes(self.server)[self.bucket.partition("://")[2]] = killer
        options = {"source_options": dict(self.options), "dest_options": dict(self.options)}
        try:
            child.start("convert", source=f"{self.bucket}/src", dest=self.dest(name), **options)
            return killer, child.result()
        finally:
            del routes(self.server)[self.bucket.partition("://")[2]]
            faults.released.set()

    def finish(self, trial: Trial, name: str, reference: str) -> dict[str, Any]:
        child = self.new_child()
        where = {"source": f"{self.bucket}/src", "dest": self.dest(name)}
        options = dict(self.options)
        child.start("finish", **where, abandon=trial.abandon, reference=reference, options=options)
        found = child.result()
        assert found is not None
        return found

    @property
    def options(self) -> Mapping[str, Any]:
        return self.server.options

    def dest(self, name: str) -> str:
        return f"{self.bucket}/{name}"

    def run(self, numbers: range) -> None:
        requests, reference = self.prepare()
        rng = random.Random(f"{SEED} {self.name} {numbers.start}")
        for number in numbers:
            trial = choose(rng, number, requests)
            name = f"t{number:04d}"
            _, result = self.disturbed(trial, name)
            self.judge(trial, result)
            found = self.finish(trial, name, reference)
            assert "crashed" not in found, (trial, found["crashed"])
            assert found["whole"], (trial, found)
            assert found["committed"], (trial, found)
            assert found["findings"] == [], (trial, found)
            assert found["hash"] == reference, (trial, found)
            self.seen["trials"] += 1
            self.seen["resumed"] += bool(found["resumed"])
            self.seen["abandoned"] += found["abandoned"] not in ("", "None")
            self.seen["committed before"] += found["visible"]
            self.seen["struck"] += any(fault.struck for fault in trial.faults)

    def judge(self, trial: Trial, result: dict[str, Any] | None) -> None:
        """The run ended in one of three ways, in time."""
        if result is None:
            assert trial.kill is not None, trial
            self.seen["killed"] += 1
            return
        assert "crashed" not in result, (trial, result["crashed"])
        assert result["seconds"] < SECONDS, (trial, result)
        if "error" not in result:
            assert result["committed"], (trial, result)
            self.seen["committed"] += 1
            return
        self.seen["errors"] += 1
        assert result["kind"] in KINDS, (trial, result)
        struck = [fault.name for fault in trial.faults if fault.struck]
        assert struck, (trial, result)
        if result["retryable"]:
            assert set(struck) & set(TRANSIENT), (trial, result)


_Routes = dict[str, Callable[[Exchange], None]]


def routes(server: Server) -> _Routes:
    found: _Routes = server.proxy.hook.routes  # type: ignore[attr-defined]
    return found


class Router:
    """Sends the requests of every bucket to the hook of its lane."""

    def __init__(self, forward: Callable[[Exchange], None]) -> None:
        self.forward = forward
        self.routes: _Routes = {}

    def __call__(self, exchange: Exchange) -> None:
        for bucket, hook in list(self.routes.items()):
            if bucket in exchange.path:
                hook(exchange)
                return
        self.forward(exchange)


@pytest.fixture
def servers(
    seaweedfs_server: S3Server,  # noqa: F811
    s3_server: S3Server,  # noqa: F811
    gcs_server: GcsServer,  # noqa: F811
) -> Iterator[dict[str, Server]]:
    found: dict[str, Server] = {
        "seaweedfs_server": seaweedfs_server,
        "s3_server": s3_server,
        "gcs_server": gcs_server,
    }
    hooks = {name: server.proxy.hook for name, server in found.items()}
    for name, server in found.items():
        plain = hooks[name] is Exchange.forward
        server.proxy.hook = Router((lambda exchange: exchange.forward()) if plain else hooks[name])
    yield found
    for name, server in found.items():
        server.proxy.hook = hooks[name]


def tiny_source() -> ArraySource:
    arrays = {
        "layer.weight": {
            "fp32": random_array((12, 10), seed=1),
            "adam_m": random_array((12, 10), seed=2),
        },
        "norm.weight": {"fp32": random_array((6,), seed=3)},
    }
    tensors = {"rng": np.arange(300, dtype=np.uint8)}
    common = {"steps": {"layer.weight": 3}, "rng": {"0": {"bytes": {"$tensor": "rng"}}}}
    return ArraySource(arrays, common, tensors=tensors)


def test_faults_and_kills(servers: dict[str, Server], tmp_path: Path) -> None:
    jobs = []
    with workers(tmp_path) as new_child, ThreadPoolExecutor() as pool:
        for name, trials in TRIALS.items():
            share = trials // LANES[name]
            for part in range(LANES[name]):
                server = servers[name]
                lane = Lane(name, server, new_child, tiny_source(), hook=server.proxy.hook.forward)  # type: ignore[attr-defined]
                jobs.append((lane, pool.submit(lane.run, range(part * share, (part + 1) * share))))
        for _, job in jobs:
            job.result()
    seen = sum((lane.seen for lane, _ in jobs), Counter[str]())
    assert seen["trials"] == sum(TRIALS.values())
    # The matrix did what it says: kills killed, faults struck, runs were resumed and abandoned.
    assert seen["killed"] > 60, seen
    assert seen["struck"] > 80, seen
    assert seen["errors"] > 15, seen
    assert seen["committed"] > 15, seen
    assert seen["resumed"] > 20, seen
    assert seen["abandoned"] > 5, seen
