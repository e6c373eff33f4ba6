"""Small stores for tests: arrays with tiny tiles and shards, and a serial engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from tests.fakes import ArraySource, random_array
from ucpstore.contracts import CommonState, Source
from ucpstore.io.base import Files
from ucpstore.store.arrays import ArraySpec, storage_dtype
from ucpstore.store.names import encode_name
from ucpstore.store.target import ZarrTarget

COMMON = {
    "param_groups": [{"params": ["a", "b/c d"], "lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-08}],
    "steps": {"a": 7, "b/c d": 7},
    "scheduler": None,
    "rng": {"0": {"state": 2**127 + 1, "bytes": {"$tensor": "rng"}}},
    "text": 'é "\\ \u2028 \x00',
}


def small_source() -> ArraySource:
    """Every kind of array: sharded, ragged, 0-d, empty, bits, widened, stacked, integers, bool."""
    arrays: dict[str, dict[str, Any]] = {
        "z.weight": {
            "fp32": random_array((13, 22), seed=1),
            "adam_m": random_array((13, 22), seed=2),
            "adam_v": np.zeros((13, 22), np.float32),
        },
        "a": {"fp32": random_array((4,), seed=3), "step_size": random_array((), seed=4)},
        "b/c d": {"weight": random_array((9, 5), "float32", seed=5).astype(ml_dtypes.bfloat16)},
        "half": {"adam_m": random_array((5, 3), "float32", seed=6).astype(ml_dtypes.bfloat16)},
        "f8": {"buffer": random_array((3, 3), "float32", seed=7).astype(ml_dtypes.float8_e4m3fn)},
        "ids": {"buffer": np.arange(11, dtype=np.int64) - 5, "mask": np.arange(11) % 2 == 0},
        "empty": {"fp32": np.zeros((0, 4), np.float32)},
        "nan": {"fp32": np.full((6, 6), np.nan, np.float32)},
        "f64": {"momentum": random_array((3, 5), "float64", seed=8)},
    }
    for number in range(4):
        arrays[f"experts.{number}.w"] = {"fp32": random_array((6, 7), seed=20 + number)}
    specs = {
        "z.weight": {
            "aliases": ("tied",),
            "pattern": "tp: shard(0)",
            "attributes": {"sections": [1, 2]},
        },
        "ids": {"trainable": False},
    }
    tensors = {"rng": np.arange(5000, dtype=np.uint8)}
    return ArraySource(arrays, COMMON, tensors=tensors, specs=specs, parallelism={"tp": 2, "dp": 3})


def small_arrays(source: ArraySource) -> list[ArraySpec]:
    """An array per state, objects of 2 x 2 tiles; the experts are stacked."""
    found = []
    for fqn, parameter in source.parameters.items():
        if not fqn.startswith("experts."):
            for state in parameter.states.values():
                path = f"params/{encode_name(fqn)}/{state.name}"
                found.append(_array(path, (fqn, state.name), source))
    if "experts.0.w" in source.parameters:
        found.append(_stack(source))
    found += [
        _array(f"common/{name}", (CommonState.FQN, name), source) for name in source.common.tensors
    ]
    return found


def _stack(source: ArraySource) -> ArraySpec:
    return ArraySpec(
        path="params/experts.(0-3).w/fp32",
        shape=(4, 6, 7),
        dtype="float32",
        source_dtype="float32",
        tile=(1, 2, 4),
        shard=(2, 6, 4),
        members=tuple((f"experts.{number}.w", "fp32") for number in range(4)),
        role=source.parameters["experts.0.w"].states["fp32"].role,
        attributes={"stack": {"prefix": "experts.", "first": 0, "count": 4, "suffix": ".w"}},
    )


def _array(path: str, member: tuple[str, str], source: ArraySource) -> ArraySpec:
    fqn, state = member
    states = source.common.tensors if fqn == CommonState.FQN else source.parameters[fqn].states
    spec = states[state]
    tile = tuple(max(1, min(n, 3)) for n in spec.shape)
    small = len(spec.shape) < 2
    return ArraySpec(
        path=path,
        shape=spec.shape,
        dtype=storage_dtype(spec.dtype, spec.role),
        source_dtype=spec.dtype,
        tile=tuple(max(1, n) for n in spec.shape) if small else tile,
        shard=tuple(max(1, n) for n in spec.shape) if small else tuple(2 * t for t in tile),
        members=(member,),
        role=spec.role,
    )


def make_target(files: Files, source: ArraySource | None = None) -> ZarrTarget:
    source = source or small_source()
    return ZarrTarget(files, small_arrays(source), source=source, step=7)


def digest_of(target: ZarrTarget) -> str:
    return hashlib.sha256(json.dumps(target.document(), sort_keys=True).encode()).hexdigest()


def convert(target: ZarrTarget, source: Source, *, batch: int = 5, digest: str = "") -> set[int]:
    """What the engine does, in one thread. Returns the tasks that were written."""
    if not target.begin(digest or digest_of(target)):
        return set()
    records = dict(target.records())
    missing = [task for task in target.tasks() if task.index not in records]
    for start in range(0, len(missing), batch):
        done = [target.write(task, source) for task in missing[start : start + batch]]
        target.publish(done)
        records |= {record.task: record for record in done}
    target.commit(records)
    return {task.index for task in missing}


def contents(files: Files) -> Mapping[str, bytes]:
    """Every committed byte: all objects but claims and done records."""
    return {
        stat.name: files.read(stat.name)
        for stat in files.list()
        if not stat.name.startswith(".ucpstore/")
    }
