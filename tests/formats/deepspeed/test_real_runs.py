"""Every state of every real run is bit-equal to what the live engine held when it saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.deepspeed_runs import CASES, Run, deepspeed_run
from ucpstore.contracts import CommonState, Role
from ucpstore.dtypes import numpy_dtype
from ucpstore.errors import UnsupportedSourceError
from ucpstore.formats.deepspeed import FORMAT
from ucpstore.io import open_files
from ucpstore.layout.coverage import require_covered
from ucpstore.layout.region import Region
from ucpstore.pieces import PieceSource
from ucpstore.tagged import decode

OURS = {"exp_avg": "adam_m", "exp_avg_sq": "adam_v"}
# The last three: stage 0 whose optimizer's numbers can stand for several parameters (test_stage0.py).
UNREADABLE = {
    "muon-s2-bf16-dp2",
    "frozen-s0-fp32-dp1",
    "crossed-s0-fp32-dp1",
    "reversed-s0-fp32-dp1",
}
READABLE = [name for name in CASES if name not in UNREADABLE]


def open_run(run: Run) -> PieceSource:
    return FORMAT.open(open_files(run.path))


def read(source: PieceSource, fqn: str, state: str, region: Region | None = None) -> np.ndarray:
    spec = source.spec(fqn, state)
    region = Region.full(spec.shape) if region is None else region
    out = np.empty(region.sizes, numpy_dtype(spec.dtype))
    source.read(fqn, state, region, out, compare=True)
    return out


def bits(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes: NaNs and signed zeros count too."""
    return str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes()


def truth_of(run: Run) -> Iterator[tuple[str, str, np.ndarray]]:
    """Parameter, our state's name, and value, for everything that the checkpoint must have."""
    facts = run.facts
    for fqn, entry in facts["parameters"].items():
        yield fqn, "fp32", run.full("fp32", fqn)
        for state in entry["states"]:
            yield fqn, OURS.get(state, state), run.full(state, fqn)
        # at stage 3 `module` has placeholders; in fp32 without ZeRO it has the masters themselves
        if run.case.stage < 3 and (run.case.stage or run.case.dtype != "fp32"):
            yield fqn, "weight", run.full("weight", fqn)
    if not run.case.exclude_frozen:
        for fqn in facts["frozen"]:
            yield fqn, "weight", run.full("weight", fqn)
    for fqn in facts["buffers"]:
        yield fqn, "buffer", run.full("buffer", fqn)


@pytest.mark.parametrize("name", READABLE)
def test_states_equal_the_live_engine(name: str) -> None:
    run = deepspeed_run(name)
    source = open_run(run)
    random = np.random.default_rng(len(name))
    expected = set()
    for fqn, state, truth in truth_of(run):
        expected.add((fqn, state))
        assert bits(read(source, fqn, state)) == bits(truth), (fqn, state)
        for _ in range(3):
            offsets = [int(random.integers(0, size)) for size in truth.shape]
            sizes = [
                int(random.integers(1, size - o + 1))
                for size, o in zip(truth.shape, offsets, strict=True)
            ]
            region = Region(tuple(offsets), tuple(sizes))
            assert bits(read(source, fqn, state, region)) == bits(truth[region.slices])
    found = {(fqn, state) for fqn, p in source.parameters.items() for state in p.states}
    assert found == expected


@pytest.mark.parametrize("name", READABLE)
def test_specs_and_coverage(name: str) -> None:
    run = deepspeed_run(name)
    source = open_run(run)
    facts = run.facts
    for fqn, parameter in source.parameters.items():
        assert parameter.fqn == fqn
        assert parameter.trainable == (fqn in facts["parameters"])
        for state, spec in parameter.states.items():
            bound = source.bound(fqn, state)
            require_covered(bound.geometry, fqn=fqn, state=state)
            assert bound.geometry.shape == spec.shape
            assert source.fragments(fqn, state, Region.full(spec.shape))
            assert spec.derived == (state == "weight" and parameter.trainable)
    roles = {s.role for p in source.parameters.values() for s in p.states.values()}
    assert Role.MASTER_WEIGHT in roles
    aliases = {alias: fqn for fqn, p in source.parameters.items() for alias in p.aliases}
    assert aliases == facts["aliases"]


@pytest.mark.parametrize("name", READABLE)
def test_common_state_equals_the_live_engine(name: str) -> None:
    run = deepspeed_run(name)
    source = open_run(run)
    facts = run.facts
    document = decode(source.common.document)
    groups = document["param_groups"]
    assert len(groups) == len(facts["groups"])
    for group, expected in zip(groups, facts["groups"], strict=True):
        assert set(group["params"]) == set(expected["names"])
        if "elastic" not in name:  # elastic checkpoints do not save hyper-parameters
            hyper = {k: _plain(v) for k, v in group.items() if k != "params"}
            assert hyper == expected["hyper"]
    steps = {fqn: p["step"] for fqn, p in facts["parameters"].items() if p["step"] is not None}
    assert document["steps"] == steps
    assert document["counters"] == {
        key: facts["counters"][key] for key in ("global_steps", "global_samples", "skipped_steps")
    }
    for key, value in facts["client_state"].items():
        assert document["client"][key] == value
    if facts["scheduler"] is not None:
        scheduler = document["scheduler"]
        for key, value in facts["scheduler"].items():
            assert _plain(scheduler[key]) == value
    else:
        assert document["scheduler"] is None
    assert source.parallelism["zero_stage"] == run.case.stage
    assert source.parallelism["dp"] == run.case.dp
    assert source.parallelism["tp"] == run.case.tp
    unnamed = run.case.stage == 0 and run.case.dtype == "fp32"  # torch does not save its class
    expected_class = "torch.optim.Optimizer" if unnamed else facts["zero_optimizer"]
    assert source.parallelism["optimizer_class"] == expected_class
    assert document["framework"]["dp_world_size"] == facts["counters"]["dp_world_size"]


def _plain(value: Any) -> Any:
    """Tuples as JSON has them."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


@pytest.mark.parametrize("name", ["client-s2-bf16-dp2", "client-s3-fp32-dp2"])
def test_client_state_is_kept_verbatim(name: str) -> None:
    import random

    run = deepspeed_run(name)
    source = open_run(run)
    document = decode(source.common.document)
    client = document["client"]
    args = client["args"]
    assert args.name == "argparse.Namespace"
    assert args.state == {"hidden_size": 21, "lr": 1e-2, "data_path": ["a", "b"], "tp": None}
    assert client["checkpoint_version"] == 3.0
    ema = client["ema_loss"]
    assert bits(read(source, CommonState.FQN, ema.name)) == bits(run.tensor("client", "ema_loss"))
    ranks = [f"dp_{rank}_mp_0" for rank in range(2)] if run.case.stage == 3 else ["mp_0"]
    assert list(document["rng"]) == ranks
    for entry in document["rng"].values():
        (state,) = entry["rng_state"]
        assert state["random_rng_state"] == random.Random(77).getstate()
        keys = state["np_rng_state"][1].to_numpy()
        assert keys.tolist() == np.random.RandomState(77).get_state()[1].tolist()  # type: ignore[index]
        torch_state = read(source, CommonState.FQN, state["torch_rng_state"].name)
        assert torch_state.dtype == np.uint8
        assert torch_state.size > 5000


def test_muon_momentum_of_another_length_is_refused() -> None:
    """Muon's momentum at stage 2 is not laid out like the masters; it must never be read as if."""
    run = deepspeed_run("muon-s2-bf16-dp2")
    with pytest.raises(UnsupportedSourceError, match=r"momentum_buffer of group 0 .* elements"):
        open_run(run)


def test_reading_needs_no_framework() -> None:
    import subprocess
    import sys

    run = deepspeed_run("s2-bf16-dp2")
    code = (
        "import sys; from ucpstore.io import open_files; from ucpstore.formats.deepspeed import FORMAT;"
        f"FORMAT.open(open_files({str(run.path)!r}));"
        "print([m for m in ('torch', 'deepspeed', 'tensorstore', 'zarr') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
