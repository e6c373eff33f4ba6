from __future__ import annotations

import json
import math
import pickle
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucpstore.contracts import CommonState, ParameterSpec, Role, StateSpec
from ucpstore.errors import Kind, PlanError
from ucpstore.layout.tiles import num_tiles, tile_shape
from ucpstore.store.arrays import ArraySpec
from ucpstore.store.grid import plan_arrays, shard_shape

MIB = 1 << 20
Cuts = tuple[tuple[int, ...], ...]


class Specs:
    """As much of a source as planning needs."""

    format = "specs"
    url = "specs://"
    is_local = True
    parallelism: Mapping[str, Any] = {}
    warnings = ()

    def __init__(
        self,
        parameters: Mapping[str, list[StateSpec]],
        *,
        tensors: Mapping[str, StateSpec] | None = None,
        cuts: Mapping[str, Cuts] | None = None,
    ) -> None:
        self.parameters = {
            fqn: ParameterSpec(fqn, {spec.name: spec for spec in states})
            for fqn, states in parameters.items()
        }
        self.common = CommonState({}, tensors or {})
        self._cuts = cuts or {}

    def cuts(self, fqn: str, state: str) -> Cuts:
        if fqn in self._cuts:
            return self._cuts[fqn]
        states = self.common.tensors if fqn == CommonState.FQN else self.parameters[fqn].states
        return ((),) * len(states[state].shape)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"planning used {name}")


def adam(shape: tuple[int, ...], dtype: str = "float32") -> list[StateSpec]:
    return [
        StateSpec("fp32", Role.MASTER_WEIGHT, shape, dtype),
        StateSpec("adam_m", Role.FIRST_MOMENT, shape, dtype),
        StateSpec("adam_v", Role.SECOND_MOMENT, shape, dtype),
        StateSpec("weight", Role.MODEL_WEIGHT, shape, "bfloat16", derived=True),
    ]


def plan(source: Specs, **options: Any) -> list[ArraySpec]:
    return plan_arrays(source, **options)  # type: ignore[arg-type]


def even_cuts(size: int, parts: int) -> tuple[int, ...]:
    return tuple(size * part // parts for part in range(1, parts))


def shard_of(shape: tuple[int, ...], cuts: Cuts) -> tuple[int, ...]:
    return shard_shape(shape, tile_shape(shape, 4), 4, cuts)


dims = st.sampled_from([1024, 2048, 2560, 4096, 5120, 8192, 11008, 14336, 16384, 32000, 128256])


@given(st.tuples(dims, dims), st.integers(0, 1), st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
def test_shards_and_even_cuts(shape: tuple[int, int], dim: int, degree: int) -> None:
    cuts: list[tuple[int, ...]] = [(), ()]
    cuts[dim] = even_cuts(shape[dim], degree)
    tile = tile_shape(shape, 4)
    shard = shard_of(shape, tuple(cuts))
    nbytes = math.prod(shard) * 4
    assert all(s % t == 0 for s, t in zip(shard, tile, strict=True))
    assert nbytes <= 129 * MIB
    least = 32 * MIB if degree == 1 else 4 * MIB
    assert nbytes >= min(least, math.prod(shape) * 4)
    width = shape[dim] // degree
    if degree == 1 or shape[dim] % degree or width % tile[dim]:
        return
    one, other = shard[dim], shard[1 - dim]
    slice_bytes = 4 * width * other
    if one % width == 0 or width % one == 0:  # whole slices in a shard, or shards in a slice
        return
    # otherwise the shard spans the dim, or no division of a large slice has a fitting size
    assert one >= shape[dim] or slice_bytes > 128 * MIB
    if slice_bytes > 128 * MIB:
        tiles = width // tile[dim]
        parts = [slice_bytes / n for n in range(1, tiles + 1) if tiles % n == 0]
        assert not any(4 * MIB <= part <= 128 * MIB for part in parts)


@pytest.mark.parametrize(
    ("shape", "cuts", "expected"),
    [
        ((8192, 8192), (even_cuts(8192, 8), ()), (1024, 8192)),  # one 32 MiB slice of rows
        ((8192, 8192), ((), even_cuts(8192, 8)), (8192, 1024)),  # one 32 MiB slice of columns
        ((4096, 4096), (even_cuts(4096, 8), ()), (2048, 4096)),  # four slices of 8 MiB
        ((4096, 4096), ((), even_cuts(4096, 8)), (4096, 2048)),
        ((2048, 2048), (even_cuts(2048, 8), ()), (2048, 2048)),  # 16 MiB in all
        ((32768, 8192), (even_cuts(32768, 2), ()), (2048, 8192)),  # slices of 512 MiB are divided
        (
            (128256, 8192),
            (even_cuts(128256, 2), ()),
            (384, 8192),
        ),  # nothing in 32-128 MiB divides it
        ((6144, 8192), ((4096, 5120), ()), (1024, 8192)),  # q | k | v: gcd of unequal cuts
        ((8192, 8192), ((100, 4096), ()), (2048, 8192)),  # gcd below the tile
        ((64, 2048, 1408), (even_cuts(64, 8), (), ()), (8, 2048, 1408)),  # experts per rank
        ((50257, 1024), ((), ()), (16758, 1024)),
        ((1 << 26,), ((),), (1 << 24,)),
        ((1024,), ((512,),), (1024,)),
    ],
)
def test_examples(shape: tuple[int, ...], cuts: Cuts, expected: tuple[int, ...]) -> None:
    assert shard_of(shape, cuts) == expected


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=4).map(tuple),
    st.sampled_from([1, 2, 4, 8]),
    st.data(),
)
def test_any_cuts_give_a_grid(shape: tuple[int, ...], size: int, data: st.DataObject) -> None:
    cuts = tuple(
        tuple(sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=4)))) if n > 1 else ()
        for n in shape
    )
    tile = tile_shape(shape, size)
    shard = shard_shape(shape, tile, size, cuts)
    assert all(s % t == 0 for s, t in zip(shard, tile, strict=True))
    assert all(s < n + t for s, n, t in zip(shard, shape, tile, strict=True))
    if num_tiles(shape, tile) == 1:
        assert shard == tile
    else:
        assert math.prod(shard) * size <= 129 * MIB
        padded = math.prod(-(-n // t) * t for n, t in zip(shape, tile, strict=True))
        least = 4 * MIB if any(cuts) else 30 * MIB
        assert math.prod(shard) * size >= min(least, padded * size)


def test_arrays_of_parameters_and_common_state() -> None:
    source = Specs(
        {
            "a.weight": adam((4, 6), "bfloat16"),
            "frozen": [StateSpec("weight", Role.MODEL_WEIGHT, (3,), "bfloat16")],
            "position": [StateSpec("buffer", Role.BUFFER, (), "int64")],
            "wide": [StateSpec("momentum_buffer", Role.MOMENTUM, (2,), "float64")],
        },
        tensors={"ema/a": StateSpec("ema/a", Role.OTHER, (5,), "float16")},
    )
    arrays = plan(source)
    assert [(a.path, a.dtype, a.logical_dtype, a.members) for a in arrays] == [
        ("params/a.weight/fp32", "float32", "float32", (("a.weight", "fp32"),)),
        ("params/a.weight/adam_m", "float32", "float32", (("a.weight", "adam_m"),)),
        ("params/a.weight/adam_v", "float32", "float32", (("a.weight", "adam_v"),)),
        ("params/frozen/weight", "uint16", "bfloat16", (("frozen", "weight"),)),
        ("params/position/buffer", "int64", "int64", (("position", "buffer"),)),
        ("params/wide/momentum_buffer", "float64", "float64", (("wide", "momentum_buffer"),)),
        ("common/ema%2Fa", "float16", "float16", ((CommonState.FQN, "ema/a"),)),
    ]
    assert arrays[1].source_dtype == "bfloat16"
    assert pickle.loads(pickle.dumps(arrays)) == arrays
    assert plan(source) == arrays


def test_selection() -> None:
    source = Specs({f"layers.{i}.{w}": adam((2,)) for i in range(3) for w in ("up", "down")})

    def members(**options: Any) -> list[tuple[str, str]]:
        return [m for array in plan(source, **options) for m in array.members]

    assert members(states=["weight"], only=["layers.0.*"]) == [
        ("layers.0.up", "weight"),
        ("layers.0.down", "weight"),
    ]
    assert members(states=["adam_m", "fp32"], only=["layers.1.up"]) == [
        ("layers.1.up", "fp32"),
        ("layers.1.up", "adam_m"),
    ]
    assert members(exclude=["*.up", "layers.[12].down"], states=["fp32"]) == [
        ("layers.0.down", "fp32")
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"states": ["adam_n"]}, r"state 'adam_n'.*Did you mean .*'adam_m'"),
        ({"only": ["*.upp"]}, r"parameter '\*.upp'"),
        ({"exclude": ["nothing"]}, r"parameter 'nothing'"),
        ({"exclude": ["*"]}, r"leaves none of its 1 parameters"),
    ],
)
def test_selection_that_matches_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        plan(Specs({"layers.0.up": adam((2,))}), **options)
    assert caught.value.kind is Kind.SELECTION


def test_names_that_cannot_be_paths() -> None:
    for name in ("..", "__x", "zarr.json"):
        with pytest.raises(PlanError) as caught:
            plan(Specs({name: adam((2,))}))
        assert caught.value.kind is Kind.NAME


def test_siblings_are_stacked_above_the_limit() -> None:
    parameters: dict[str, list[StateSpec]] = {"embed": adam((6, 4))}
    for layer in range(2):
        for expert in range(5):
            parameters[f"layers.{layer}.experts.{expert}.w"] = adam((4, 6))
        parameters[f"layers.{layer}.norm"] = adam((4,))
    parameters["layers.0.experts.7.w"] = adam((4, 6))
    parameters["layers.0.experts.05.w"] = adam((4, 6))
    source = Specs(parameters)
    assert len(plan(source, stack_above=48)) == len(plan(source)) == 3 * len(parameters)

    arrays = plan(source, stack_above=44)
    assert sorted(m for a in arrays for m in a.members) == sorted(
        (fqn, s) for fqn in parameters for s in ("fp32", "adam_m", "adam_v")
    )
    shapes = {a.path: a.shape for a in arrays if a.path.endswith("fp32")}
    assert shapes == {
        "params/embed/fp32": (6, 4),
        "params/layers.0.experts.(0-4).w/fp32": (5, 4, 6),
        "params/layers.(0-1).norm/fp32": (2, 4),
        "params/layers.1.experts.(0-4).w/fp32": (5, 4, 6),
        "params/layers.0.experts.7.w/fp32": (4, 6),
        "params/layers.0.experts.05.w/fp32": (4, 6),
    }
    stacked = arrays[3]
    assert stacked.members == tuple((f"layers.0.experts.{i}.w", "fp32") for i in range(5))
    document = json.loads(json.dumps(stacked.metadata()))
    assert ArraySpec.from_metadata(stacked.path, document) == stacked


def test_only_equal_siblings_are_stacked() -> None:
    source = Specs(
        {
            "a.0.w": adam((4,)),
            "a.1.w": adam((4,)),
            "a.2.w": adam((5,)),
            "a.3.w": adam((5,), "bfloat16"),
            "a.4.w": adam((5,)),
            "b.0": adam((8, 2)),
            "b.1": adam((8, 2)),
        },
        cuts={"b.1": ((4,), ())},
    )
    paths = [a.path for a in plan(source, stack_above=0, states=["fp32"])]
    assert paths == [
        "params/a.(0-1).w/fp32",
        "params/a.2.w/fp32",
        "params/a.3.w/fp32",
        "params/a.4.w/fp32",
        "params/b.0/fp32",
        "params/b.1/fp32",
    ]


def test_stacking_merges_along_the_number_that_merges_most() -> None:
    wide = {f"l.{i}.e.{j}.w": adam((4,)) for i in range(6) for j in range(2)}
    paths = [a.path for a in plan(Specs(wide), stack_above=0, states=["fp32"])]
    assert paths == ["params/l.(0-5).e.0.w/fp32", "params/l.(0-5).e.1.w/fp32"]


def test_many_experts() -> None:
    shape = (2048, 1408)
    fqns = [f"layers.{i}.mlp.experts.{j}.{w}" for i in range(10) for j in range(256) for w in "uvw"]
    source = Specs(dict.fromkeys(fqns, adam(shape)))
    tracemalloc.start()
    flat = plan(source, stack_above=10**9)
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(flat) == 3 * len(fqns) > 20_000
    assert nbytes < 1024 * len(flat)  # 141,000 arrays take less than 150 MB

    stacked = plan(source)
    assert len(stacked) == 10 * 3 * 3
    assert stacked[0].shape == (256, *shape)
    assert stacked[0].tile[0] == 1
    assert stacked[0].path == "params/layers.0.mlp.experts.(0-255).u/fp32"
