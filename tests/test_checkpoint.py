"""Lazy views: indexing is numpy's, names are helpful, reprs do no I/O."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import ArraySource
from ucpstore.checkpoint import Checkpoint
from ucpstore.errors import IndexingError, LayoutError, ParameterNotFoundError
from ucpstore.layout.region import Region

VALUES = np.arange(5 * 6 * 7, dtype=np.float32).reshape(5, 6, 7)


class Counting(ArraySource):
    reads = 0

    def read(self, *args: Any, **kwargs: Any) -> None:
        self.reads += 1
        super().read(*args, **kwargs)


def make(specs: Any = None) -> Checkpoint:
    arrays = {
        "block.0.w": {"fp32": VALUES, "adam_m": -VALUES},
        "block.0.scale": {"fp32": np.float32(3.5).reshape(())},
        "embed": {"fp32": np.zeros((0, 4), np.float32)},
    }
    return Checkpoint(Counting(arrays, {"counters": {"global_steps": 9}}, specs=specs))


slices = st.builds(
    slice,
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(1, 4),
)


@given(st.data())
def test_indexing_is_numpys(data: st.DataObject) -> None:
    items: list[Any] = [
        data.draw(st.integers(-n, n - 1) | slices)
        for n in VALUES.shape[: data.draw(st.integers(0, 3))]
    ]
    if data.draw(st.booleans()):
        items.insert(data.draw(st.integers(0, len(items))), ...)
    index = tuple(items)
    found = make()["block.0.w"].fp32[index]
    assert np.array_equal(found, VALUES[index])
    assert found.dtype == VALUES.dtype
    assert np.shape(found) == np.shape(VALUES[index])


@pytest.mark.parametrize(
    "index",
    [
        5,
        -6,
        10**30,
        (0, 0, 7),
        (0, 0, 0, 0),
        (..., ...),
        slice(None, None, -1),
        slice(None, None, 0),
        slice(0.5, 2),
        [1, 2],
        1.5,
        "0",
        None,
        True,
        np.True_,
        np.array([0, 1]),
        np.zeros((5, 6, 7), bool),
        (0, np.array([0, 1])),
        (..., True),
    ],
)
def test_what_cannot_be_read_lazily_is_refused(index: Any) -> None:
    with pytest.raises(IndexingError, match=r"block\.0\.w"):
        make()["block.0.w"].fp32[index]
    with pytest.raises(IndexError):
        make()["block.0.w"].fp32[index]


def test_only_the_box_is_read() -> None:
    checkpoint = make()
    checkpoint["block.0.w"].adam_m[1:3, 2, ::3]
    assert checkpoint.source.elements_read == 2 * 1 * 7  # type: ignore[attr-defined]


def test_scalars_and_empty_tensors() -> None:
    checkpoint = make()
    assert checkpoint["block.0.scale"].fp32[...] == np.float32(3.5)
    assert checkpoint["block.0.scale"].fp32[()] == np.float32(3.5)
    assert checkpoint["embed"].fp32[...].shape == (0, 4)
    with pytest.raises(TypeError):
        len(checkpoint["block.0.scale"].fp32)


def test_ellipsis_makes_arrays_as_in_numpy() -> None:
    checkpoint = make()
    assert isinstance(checkpoint["block.0.scale"].fp32[...], np.ndarray)
    assert not isinstance(checkpoint["block.0.scale"].fp32[()], np.ndarray)
    assert isinstance(checkpoint["block.0.w"].fp32[0, 0, 0, ...], np.ndarray)
    assert np.asarray(checkpoint["block.0.scale"].fp32).shape == ()


def test_a_step_keeps_only_its_elements() -> None:
    found = make()["block.0.w"].fp32[::4]
    assert found.shape == (2, 6, 7)
    assert found.base is None


def test_names_of_attributes_are_reachable_as_items() -> None:
    states = ("fqn", "shape", "keys", "items", "spec", "get", "fp32")
    checkpoint = Checkpoint(
        ArraySource({"shape": {name: np.full(2, i, np.float32) for i, name in enumerate(states)}})
    )
    parameter = checkpoint["shape"]
    assert [int(parameter[name][0]) for name in states] == list(range(len(states)))
    assert (parameter.fqn, parameter.shape, list(parameter)) == ("shape", (2,), list(states))
    for view in (checkpoint, parameter, parameter["keys"]):
        for copied in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view)):
            assert repr(copied) == repr(view)
            assert not hasattr(copied, "no_such_thing")
            assert not hasattr(copied, "__array_interface__")


def test_a_name_comes_before_an_alias() -> None:
    arrays = {"a": {"fp32": np.float32([1])}, "b": {"fp32": np.float32([2])}}
    checkpoint = Checkpoint(ArraySource(arrays, specs={"a": {"aliases": ("b",)}}))
    assert checkpoint["b"].fp32[0] == 2


def test_texts_hold_no_terminal_commands() -> None:
    name = "evil\n\x1b[2J\u202e\ud800"
    checkpoint = Checkpoint(ArraySource({name: {name: VALUES}}, specs={name: {"aliases": (name,)}}))
    for text in (repr(checkpoint), checkpoint.tree(), repr(checkpoint[name])):
        assert not {"\x1b", "\u202e", "\ud800"} & set(text)
    assert len(checkpoint.tree().splitlines()) == 2
    assert repr(checkpoint[name][name]).isprintable()


def test_read_into_an_array() -> None:
    out = np.empty((2, 6, 7), np.float32)
    tensor = make()["block.0.w"].fp32
    assert tensor.read(Region((1, 0, 0), (2, 6, 7)), out=out) is out
    assert np.array_equal(out, VALUES[1:3])
    with pytest.raises(LayoutError, match="float64"):
        tensor.read(Region((1, 0, 0), (2, 6, 7)), out=out.astype(np.float64))
    with pytest.raises(LayoutError, match="list"):
        tensor.read(out=[1])


def test_mappings_and_attributes() -> None:
    checkpoint = make({"block.0.w": {"aliases": ("head.w",)}})
    assert list(checkpoint) == ["block.0.w", "block.0.scale", "embed"]
    assert list(checkpoint["block.0.w"]) == ["fp32", "adam_m"]
    assert checkpoint["head.w"].fqn == "block.0.w"
    assert "head.w" in checkpoint
    assert "nothing" not in checkpoint
    assert hasattr(checkpoint["block.0.w"], "adam_m")
    assert not hasattr(checkpoint["block.0.w"], "adam_v")
    assert checkpoint.common["counters"]["global_steps"] == 9
    assert np.asarray(checkpoint["block.0.w"].fp32).shape == (5, 6, 7)


def test_unknown_names_offer_close_ones() -> None:
    with pytest.raises(ParameterNotFoundError, match=r"Did you mean 'block\.0\.w'"):
        make()["block.0.x"]
    for odd in (3, None, ("block.0.w",)):
        with pytest.raises(ParameterNotFoundError):
            make()[odd]  # type: ignore[index]
    with pytest.raises(KeyError, match="has no state 'adam_v'; it has fp32, adam_m"):
        make()["block.0.w"]["adam_v"]


def test_looking_does_no_io() -> None:
    checkpoint = make()
    texts = [
        repr(checkpoint),
        repr(checkpoint["block.0.w"]),
        repr(checkpoint["block.0.w"].fp32),
        checkpoint.tree(),
        str(checkpoint.info()),
    ]
    assert checkpoint.source.reads == 0  # type: ignore[attr-defined]
    assert all("float32" in text for text in texts[1:])
    assert "block.0.w [5, 6, 7] fp32/adam_m" in texts[0]


def test_reprs_and_trees_are_capped() -> None:
    arrays = {f"layers.{i}.w": {"fp32": np.zeros(2, np.float32)} for i in range(1000)}
    checkpoint = Checkpoint(ArraySource(arrays))
    assert repr(checkpoint).count("\n") < 20
    assert "988 more" in repr(checkpoint)
    tree = checkpoint.tree(max_nodes=50).splitlines()
    assert len(tree) == 51
    assert tree[-1].endswith("more lines")


def test_torch_keeps_bits() -> None:
    torch = pytest.importorskip("torch")
    import ml_dtypes

    bits = np.arange(24, dtype=np.uint16).reshape(2, 12).view(ml_dtypes.bfloat16)
    checkpoint = Checkpoint(ArraySource({"w": {"weight": bits, "fp32": VALUES[0]}}))
    found = checkpoint["w"].weight.torch((slice(None), slice(3, 9)))
    assert found.dtype == torch.bfloat16
    assert found.view(torch.uint16).numpy().tolist() == bits.view(np.uint16)[:, 3:9].tolist()
    assert checkpoint["w"].fp32.torch(0).tolist() == VALUES[0, 0].tolist()


def test_common_tensors_and_python_values() -> None:
    document = {"betas": {"$tuple": [0.9, 0.95]}, "rng": {"$tensor": "rng"}, "steps": {"a": 1}}
    values = np.arange(5, dtype=np.uint8)
    checkpoint = Checkpoint(ArraySource({}, document, tensors={"rng": values}))
    assert checkpoint.common["betas"] == (0.9, 0.95)
    assert checkpoint.common["steps"] == {"a": 1}
    name = checkpoint.common["rng"].name
    assert checkpoint.common_tensors[name][...].tolist() == values.tolist()
