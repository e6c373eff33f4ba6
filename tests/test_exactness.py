"""The promise: every state of every real checkpoint is bit-equal to the framework's own getters, in the store.

The virtual view is held against the same truth in ``tests/formats/deepspeed``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr

import ucpstore
from tests.deepspeed_runs import CASES, Run, copy_run, deepspeed_run
from ucpstore.errors import IntegrityError, Kind, UncommittedError, UnsupportedSourceError

CANONICAL = {"exp_avg": "adam_m", "exp_avg_sq": "adam_v"}
HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
OPAQUE = {
    *(name for name in CASES if name.startswith("muon")),
    *("frozen-s0-fp32-dp1", "crossed-s0-fp32-dp1", "reversed-s0-fp32-dp1"),
}  # states that are refused: see the reader's tests


def truth_states(run: Run) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
    """Masters and optimizer states by (fqn, our name), full over TP; 16 bits widened as the store does."""
    found = {}
    for key in run.tensors():
        state, _, fqn = key.partition(":")
        if state in ("weight", "buffer", "client"):
            continue
        value = run.full(state, fqn)
        found[fqn, CANONICAL.get(state, state)] = (
            value.astype(np.float32) if value.dtype in HALVES else value
        )
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name not in OPAQUE])
def test_store_equals_the_live_framework(name: str, tmp_path: Path) -> None:
    run = deepspeed_run(name)
    report = ucpstore.convert(run.path, tmp_path / "store")
    assert report.committed
    store = ucpstore.open(tmp_path / "store")
    truth = truth_states(run)
    assert truth, "an empty truth proves nothing"
    found = {
        (fqn, state)
        for fqn, parameter in store.items()
        for state, tensor in parameter.items()
        if str(tensor.role) not in ("model_weight", "buffer")
    }
    assert found == set(truth)
    for (fqn, state), expected in truth.items():
        value = store[fqn][state][...]
        assert value.dtype == expected.dtype, (fqn, state)
        assert value.shape == expected.shape, (fqn, state)
        assert value.tobytes() == expected.tobytes(), (fqn, state)
    verification = ucpstore.verify(tmp_path / "store", against=run.path)
    assert verification.ok, verification.summary()
    compared = ucpstore.diff(run.path, tmp_path / "store")
    assert compared.equal, compared.summary()


@pytest.mark.parametrize(
    "name", ["frozen-s1-fp32-dp2", "frozen-s2-bf16-dp2", "frozen-s3-bf16-dp3", "frozen-bf16opt-dp2"]
)
def test_frozen_weights_and_buffers_are_kept(name: str, tmp_path: Path) -> None:
    run = deepspeed_run(name)
    ucpstore.convert(run.path, tmp_path / "store")
    store = ucpstore.open(tmp_path / "store")
    frozen = 0
    for key, expected in run.tensors().items():
        state, _, fqn = key.partition(":")
        if state == "buffer" or (state == "weight" and fqn not in run.facts["parameters"]):
            value = store[fqn][state][...]
            assert value.dtype == expected.dtype, key
            assert value.tobytes() == expected.tobytes(), key
            frozen += 1
    assert frozen >= 2


def same(found: Any, expected: Any) -> bool:
    """Equal in value; the truth's JSON has lists for tuples."""
    if isinstance(expected, list | tuple):
        return (
            isinstance(found, list | tuple)
            and len(found) == len(expected)
            and all(same(a, b) for a, b in zip(found, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(same(found[key], value) for key, value in expected.items())
        )
    return bool(found == expected)


@pytest.mark.parametrize("name", [n for n in CASES if n not in OPAQUE and "elastic" not in n])
def test_hyper_parameters_steps_scheduler_and_counters_survive(name: str, tmp_path: Path) -> None:
    run = deepspeed_run(name)
    ucpstore.convert(run.path, tmp_path / "store")
    common = ucpstore.open(tmp_path / "store").common
    groups = run.facts["groups"]
    assert len(common["param_groups"]) == len(groups)
    for found, expected in zip(common["param_groups"], groups, strict=True):
        assert sorted(found["params"]) == sorted(expected["names"])
        assert expected["hyper"], "nothing would be shown"
        for key, value in expected["hyper"].items():
            assert same(found[key], value), key
    steps = {
        fqn: facts["step"]
        for fqn, facts in run.facts["parameters"].items()
        if facts["step"] is not None
    }
    assert common["steps"] == steps
    for key in ("global_steps", "global_samples", "skipped_steps"):
        assert common["counters"][key] == run.facts["counters"][key], key
    scheduler = run.facts["scheduler"]
    assert scheduler is None or same(common["scheduler"], scheduler)


def test_groups_differ_in_the_runs() -> None:
    groups = deepspeed_run("s2-bf16-dp2").facts["groups"]
    assert len(groups) == 2
    assert groups[0]["hyper"]["weight_decay"] != groups[1]["hyper"]["weight_decay"]
    assert deepspeed_run("s2-bf16-dp2").facts["scheduler"]


def test_replicas_that_differ_stop_a_conversion(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("tp2-s1-fp32-dp2"), tmp_path)
    victim = min(run.tag_path.glob("*_mp_rank_01_optim_states.pt"))
    saved = torch.load(victim, weights_only=False)
    state = saved["optimizer_state_dict"]
    shapes = torch.load(run.tag_path / "mp_rank_01_model_states.pt", weights_only=False)[
        "param_shapes"
    ]
    group = next(i for i, g in enumerate(shapes) if any("norm" in fqn for fqn in g))
    state["single_partition_of_fp32_groups"][group].data += 1e-3
    torch.save(saved, victim)
    with pytest.raises(IntegrityError, match=r"replicas of .*norm.* differ") as caught:
        ucpstore.convert(run.path, tmp_path / "store")
    assert caught.value.kind is Kind.REPLICAS_DIFFER
    with pytest.raises(UncommittedError):
        ucpstore.open(tmp_path / "store")


def test_damage_of_a_store_is_not_laundered_by_a_copy(tmp_path: Path) -> None:
    """Objects of equal shape exchanged: every checksum is right, only the digests tell."""
    ucpstore.convert(deepspeed_run("s2-fp32-dp2").path, tmp_path / "store")
    store = ucpstore.open(tmp_path / "store")
    first, second = [
        next((tmp_path / "store" / "params" / fqn / "adam_v").glob("c*"))
        for fqn, parameter in store.items()
        if ("adam_v" in parameter and parameter.shape == store[next(iter(store))].shape)
        or fqn.endswith(("k_proj.weight", "v_proj.weight"))
    ][-2:]
    kept = first.read_bytes()
    assert len(kept) == second.stat().st_size
    assert kept != second.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    with pytest.raises(IntegrityError, match="digest that the source recorded") as caught:
        ucpstore.convert(tmp_path / "store", tmp_path / "copy")
    assert caught.value.kind is Kind.CHECKSUM
    with pytest.raises(UncommittedError):
        ucpstore.open(tmp_path / "copy")


def test_plain_zarr_and_tensorstore_read_it(tmp_path: Path) -> None:
    run = deepspeed_run("s3-bf16-dp3")
    ucpstore.convert(run.path, tmp_path / "store")
    group = zarr.open_group(str(tmp_path / "store"), mode="r", zarr_format=3)
    store = ucpstore.open(tmp_path / "store")
    assert store.zarr_group()["common"].attrs["counters"] == store.common["counters"]
    with pytest.raises(UnsupportedSourceError, match="deepspeed checkpoint"):
        ucpstore.open(run.path).zarr_group()
    checked = 0
    for (fqn, state), expected in truth_states(run).items():
        path = f"params/{fqn}/{state}"
        assert group[path][...].tobytes() == expected.tobytes()
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{tmp_path}/store/{path}/"},
        }
        assert ts.open(spec, read=True).result().read().result().tobytes() == expected.tobytes()
        assert store[fqn][state].tensorstore().read().result().tobytes() == expected.tobytes()
        checked += 1
    assert checked > 10
    assert json.loads(json.dumps(dict(group["common"].attrs)))


def test_selection(tmp_path: Path) -> None:
    run = deepspeed_run("s2-fp32-dp2")
    ucpstore.convert(
        run.path, tmp_path / "store", states=["adam_v"], only=["*.weight"], exclude=["*norm*"]
    )
    store = ucpstore.open(tmp_path / "store")
    assert store
    assert all(list(parameter) == ["adam_v"] for parameter in store.values())
    assert all(fqn.endswith(".weight") and "norm" not in fqn for fqn in store)


def test_conversion_of_a_store_is_a_copy(tmp_path: Path) -> None:
    run = deepspeed_run("s2-fp32-dp2")
    ucpstore.convert(run.path, tmp_path / "first")
    ucpstore.convert(tmp_path / "first", tmp_path / "second")
    assert ucpstore.diff(tmp_path / "first", tmp_path / "second").equal
