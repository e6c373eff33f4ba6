"""Reads through every transform equal numpy on whole arrays; the inverse gives the source again."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mapping.sources import ArraySource
from ucpstore.contracts import Source
from ucpstore.layout.region import Region
from ucpstore.mapped import map_source
from ucpstore.mapping import Mapping

Arrays = dict[str, np.ndarray]
Case = tuple[Arrays, dict[str, Any], Arrays]
"""Source arrays, mapping document, target arrays as numpy makes them."""


def values(shape: tuple[int, ...], first: int = 0, dtype: Any = "float32") -> np.ndarray:
    return (np.arange(first, first + int(np.prod(shape)))).reshape(shape).astype(dtype)


dims = st.integers(1, 5)
DTYPES = st.sampled_from(["float32", "int64", "uint8", ml_dtypes.bfloat16, "complex128"])


@st.composite
def fused(draw: st.DrawFn) -> Case:
    dim, ndim = draw(st.integers(0, 2)), 3
    groups, unit = draw(dims), draw(dims)
    ratio = draw(st.lists(dims, min_size=2, max_size=4))
    shape = [draw(dims) for _ in range(ndim)]
    dtype = draw(DTYPES)
    members = {}
    for i, share in enumerate(ratio):
        shape[dim] = groups * share * unit
        members[f"w{i}"] = values(tuple(shape), 1000 * i, dtype)
    parts = [np.split(m, groups, axis=dim) for m in members.values()]
    whole = np.concatenate([p[g] for g in range(groups) for p in parts], axis=dim)
    entry = {"from": list(members), "to": "fused", "dim": dim, "groups": groups, "ratio": ratio}
    if draw(st.booleans()):
        entry["unit"] = unit
    return members, {"fuse": [entry]}, {"fused": whole}


@st.composite
def stacked(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(dims, max_size=3)))
    count = draw(st.integers(1, 12))
    dtype = draw(DTYPES)
    members = {f"e.{i}.w": values(shape, 100 * i, dtype) for i in range(count)}
    document = {"stack": [{"from": "e.{e}.w", "to": "w", "over": "e"}]}
    return members, document, {"w": np.stack(list(members.values()))}


@st.composite
def transposed(draw: st.DrawFn) -> Case:
    order = draw(st.permutations(range(draw(st.integers(1, 4)))))
    whole = values(tuple(draw(dims) for _ in order), dtype=draw(DTYPES))
    document = {"transpose": [{"from": "w", "to": "t", "dims": list(order)}]}
    return {"w": whole}, document, {"t": whole.transpose(order)}


@st.composite
def rotary(draw: st.DrawFn) -> Case:
    heads, half, more = draw(dims), draw(dims), draw(st.integers(0, 3))
    rest = tuple(draw(st.lists(dims, max_size=1)))
    layout = draw(st.sampled_from(["halves", "pairs"]))
    dtype = draw(DTYPES)
    whole = values((heads, 2 * half + more, *rest), dtype=dtype)
    turned, kept = whole[:, : 2 * half], whole[:, 2 * half :]
    shape = (heads, half, 2, *rest) if layout == "halves" else (heads, 2, half, *rest)
    turned = turned.reshape(shape).swapaxes(1, 2).reshape(heads, 2 * half, *rest)
    made = np.concatenate([turned, kept], axis=1)
    entry = {"from": "w", "heads": heads, "layout": layout}
    if more or draw(st.booleans()):
        entry["rotary_dim"] = 2 * half
    flat = (heads * (2 * half + more), *rest)
    return {"w": whole.reshape(flat)}, {"rotary": [entry]}, {"w": made.reshape(flat)}


CASES = st.one_of(fused(), stacked(), transposed(), rotary())


def read(source: Source, fqn: str, region: Region | None = None, state: str = "fp32") -> np.ndarray:
    from ucpstore.dtypes import numpy_dtype

    spec = source.parameters[fqn].states[state]
    region = region or Region.full(spec.shape)
    out = np.full(region.sizes, 77).astype(numpy_dtype(spec.dtype))
    source.read(fqn, state, region, out)
    return out


def a_region(draw: Callable[[Any], Any], shape: tuple[int, ...]) -> Region:
    offsets, sizes = [], []
    for size in shape:
        start = draw(st.integers(0, size))
        offsets.append(start)
        sizes.append(draw(st.integers(0, size - start)))
    return Region(tuple(offsets), tuple(sizes))


@settings(max_examples=300, deadline=None)
@given(case=CASES, data=st.data())
def test_reads_of_regions_equal_numpy_on_whole_arrays(case: Case, data: st.DataObject) -> None:
    arrays, document, expected = case
    source = map_source(ArraySource(arrays), Mapping.from_json(document))
    assert list(source.parameters) == list(expected)
    for fqn, whole in expected.items():
        assert source.parameters[fqn].states["fp32"].shape == whole.shape
        np.testing.assert_array_equal(read(source, fqn), whole)
        region = a_region(data.draw, whole.shape)
        np.testing.assert_array_equal(read(source, fqn, region), whole[region.slices])
        strided = np.zeros([2 * n for n in region.sizes], whole.dtype)
        view = strided[(*(slice(None, None, 2) for _ in region.sizes), ...)]
        source.read(fqn, "fp32", region, view, compare=True)
        np.testing.assert_array_equal(view, whole[region.slices])


@settings(max_examples=300, deadline=None)
@given(case=CASES)
def test_the_inverse_gives_the_source_again_in_every_state(case: Case) -> None:
    arrays, document, _ = case
    mapping = Mapping.from_json(document)
    original = ArraySource(arrays)
    back = map_source(original, mapping.then(mapping.inverse()))
    assert list(back.parameters) == list(arrays)
    for fqn in arrays:
        for state in ("fp32", "adam_m", "adam_v"):
            np.testing.assert_array_equal(read(back, fqn, state=state), original.arrays[fqn, state])
    assert back.common.document == original.common.document
    assert mapping.inverse().inverse() == mapping


@settings(max_examples=200, deadline=None)
@given(case=CASES, data=st.data())
def test_fragments_tile_the_region_and_say_where_it_lies(case: Case, data: st.DataObject) -> None:
    arrays, document, expected = case
    source = map_source(ArraySource(arrays), Mapping.from_json(document))
    for fqn, whole in expected.items():
        region = a_region(data.draw, whole.shape)
        found = np.zeros(whole.shape, int)
        for fragment in source.fragments(fqn, "fp32", region):
            assert region.contains(fragment.region)
            found[fragment.region.slices] += 1
            assert np.isin(whole[fragment.region.slices], arrays[fragment.file]).all()
            assert fragment.nbytes == fragment.region.volume * whole.itemsize
        inside = np.zeros(whole.shape, int)
        inside[region.slices] = 1
        np.testing.assert_array_equal(found, inside)
        for size, cuts in zip(whole.shape, source.cuts(fqn, "fp32"), strict=True):
            assert list(cuts) == sorted(set(cuts))
            assert all(0 < cut < size for cut in cuts)
        assert source.count_reads(fqn, "fp32") >= len(arrays)


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_large_tensors_are_read_once_and_in_small_blocks(is_local: bool, layout: str) -> None:
    import tracemalloc

    heads, head, columns = 4, 64, 1024
    whole = values((heads * head, columns))
    document = {
        "passes": [
            {"rotary": [{"from": "w", "heads": heads, "layout": layout}]},
            {"transpose": [{"from": "w"}]},
        ]
    }
    original = ArraySource({"w": whole}, states=["fp32"], is_local=is_local)
    source = map_source(original, Mapping.from_json(document))
    out = np.empty((columns, heads * head), "float32")
    tracemalloc.start()
    source.read("w", "fp32", Region.full(out.shape), out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    shape = (heads, 32, 2, columns) if layout == "halves" else (heads, 2, 32, columns)
    np.testing.assert_array_equal(out, whole.reshape(shape).swapaxes(1, 2).reshape(whole.shape).T)
    assert peak < 1 << 20  # the tensor has that many bytes; two passes have a block each
    assert original.elements_read == whole.size


def test_a_mapped_source_is_picklable_and_passes_on_compare() -> None:
    original = ArraySource({"a": values((2, 3)), "b": values((4, 3))})
    document = {"fuse": [{"from": ["a", "b"], "to": "c"}]}
    source = pickle.loads(pickle.dumps(map_source(original, Mapping.from_json(document))))
    out = np.empty((6, 3), "float32")
    source.read("c", "fp32", Region.full((6, 3)), out, compare=True)
    assert source._source.compared == 2
    np.testing.assert_array_equal(out, np.concatenate([values((2, 3)), values((4, 3))]))


def test_a_box_of_a_large_stack_asks_few_members(monkeypatch: pytest.MonkeyPatch) -> None:
    from ucpstore.mapping.affine import Part

    members = {f"e.{i}": values((3, 2), 10 * i) for i in range(500)}
    source = map_source(
        ArraySource(members, states=["fp32"]),
        Mapping.from_json({"stack": [{"from": "e.{i}", "to": "e", "over": "i"}]}),
    )
    asked = []
    within = Part.within
    monkeypatch.setattr(Part, "within", lambda part, box: asked.append(part) or within(part, box))
    found = read(source, "e", Region((137, 1, 0), (2, 2, 1)))
    assert [part.source for part in asked] == ["e.137", "e.138"]
    expected = np.stack([members["e.137"], members["e.138"]])[:, 1:3, :1]
    np.testing.assert_array_equal(found, expected)
