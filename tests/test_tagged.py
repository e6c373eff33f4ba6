"""decode(encode(x)) == x for everything the table knows; the rest is reported, never silent."""

from __future__ import annotations

import collections
import enum
import json
import math
import random
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucpstore.errors import CorruptSourceError
from ucpstore.tagged import NumpyArray, StubObject, Symbol, TensorName, decode, encode

TEXT = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["$tuple", "$", "$escaped", "$dict", "\ud800", "a\udfff", "$\ud800"]),
    st.text(st.characters(categories=["Cs"]), max_size=2),
)
FLOATS = st.one_of(
    st.floats(allow_nan=False),
    st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", struct.pack(">Q", bits))[0]),
)
INTS = st.one_of(st.integers(-1000, 1000), st.integers(-(2**200), 2**200))
KEYS = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        INTS,
        FLOATS,
        TEXT,
        st.binary(max_size=4),
        st.complex_numbers(allow_nan=False),
        st.builds(Symbol, TEXT, TEXT),
        st.builds(TensorName, st.text(max_size=5)),
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
NUMPY = st.one_of(
    st.builds(
        lambda data, fortran: NumpyArray("|u1", (len(data),), data, fortran),
        st.binary(max_size=6),
        st.booleans(),
    ),
    st.binary(min_size=8, max_size=8).map(lambda data: NumpyArray("<f8", (), data)),
    st.binary(min_size=4, max_size=4).map(lambda data: NumpyArray(">f4", (), data)),
    st.binary(min_size=2, max_size=2).map(lambda data: NumpyArray("<f2", (), data)),
    st.binary(min_size=1, max_size=1).map(lambda data: NumpyArray("|b1", (), data)),
    st.binary(min_size=8, max_size=8).map(lambda data: NumpyArray("<u8", (), data)),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(TEXT, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.sets(KEYS, max_size=4),
        st.binary(max_size=5).map(bytearray),
        st.builds(
            StubObject,
            TEXT,
            TEXT,
            st.lists(inner, max_size=2).map(tuple),
            inner,
            st.none() | st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
        ),
        st.lists(inner, max_size=3).map(lambda items: NumpyArray("object", (len(items),), items)),
    )


VALUES = st.recursive(KEYS | NUMPY, containers, max_leaves=15)


def canonical(value: Any) -> Any:
    """Comparable also for NaN, -0.0, True against 1 and unordered sets."""
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    if isinstance(value, complex):
        return ("complex", canonical(value.real), canonical(value.imag))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [canonical(item) for item in value])
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, sorted(repr(canonical(item)) for item in value))
    if isinstance(value, dict):
        return ("dict", [(canonical(key), canonical(item)) for key, item in value.items()])
    if isinstance(value, StubObject):
        parts = (value.module, value.qualname, value.args, value.state, value.contents)
        return ("stub", canonical(parts))
    if isinstance(value, NumpyArray):
        return ("numpy", value.dtype, value.shape, canonical(value.data), value.fortran)
    return (type(value).__name__, value)


@given(VALUES)
def test_round_trip_through_json(value: Any) -> None:
    warnings: list[str] = []
    encoded = encode(value, warnings=warnings)
    assert warnings == []
    text = json.dumps(encoded, allow_nan=False)
    assert json.loads(text) == encoded
    assert canonical(decode(json.loads(text))) == canonical(value)


@given(VALUES)
def test_documents_are_a_function_of_the_value(value: Any) -> None:
    again = decode(encode(value))
    assert json.dumps(encode(again)) == json.dumps(encode(value))


def test_plain_values_stay_as_they_are() -> None:
    value = {"lr": 1e-3, "betas": [0.9, 0.95], "name": "ü", "none": None, "on": True, "n": 2**63}
    assert encode(value) == value


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ((1, "a"), {"$tuple": [1, "a"]}),
        ({1: "a"}, {"$dict": [[1, "a"]]}),
        ({"$tuple": [1]}, {"$escaped": {"$tuple": [1]}}),
        ({3, 1, 2}, {"$set": [1, 2, 3]}),
        (b"ab", {"$bytes": "YWI="}),
        (math.inf, {"$float": "inf"}),
        (-math.inf, {"$float": "-inf"}),
        (math.nan, {"$float": "nan"}),
        (2**64, {"$int": "0x10000000000000000"}),
        (1 + 2j, {"$complex": [1.0, 2.0]}),
        (Symbol("torch", "float32"), {"$symbol": ["torch", "float32"]}),
        (TensorName("rng/0"), {"$tensor": "rng/0"}),
        (
            StubObject("argparse", "Namespace", state={"lr": 0.1}),
            {"$object": ["argparse", "Namespace"], "state": {"lr": 0.1}},
        ),
        (StubObject("m", "E", (1,)), {"$object": ["m", "E"], "args": [1]}),
        (NumpyArray("<f8", (), struct.pack("<d", 0.1)), {"$numpy": "<f8", "value": 0.1}),
        (NumpyArray("|u1", (2,), b"ab"), {"$numpy": "|u1", "shape": [2], "data": "YWI="}),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    ],
)
def test_the_table(value: Any, encoded: Any) -> None:
    assert encode(value) == encoded
    assert canonical(decode(encoded)) == canonical(
        dict(value) if isinstance(value, collections.OrderedDict) else value
    )


def test_live_numpy_values() -> None:
    assert encode(np.float64(0.5)) == {"$numpy": "<f8", "value": 0.5}
    assert encode(np.bool_(True)) == {"$numpy": "|b1", "value": True}
    array = np.arange(6, dtype=">i2").reshape(2, 3)
    found = decode(encode(array))
    assert (found.to_numpy() == array).all()
    assert found.to_numpy().dtype == array.dtype
    warnings: list[str] = []
    encode(np.zeros(2, dtype=[("a", "i4")]), warnings=warnings)
    assert len(warnings) == 1


def test_numpy_arrays() -> None:
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    plain = NumpyArray("<f8", (2, 3), array.tobytes("F"), fortran=True)
    assert (decode(encode(plain)).to_numpy() == array).all()
    assert NumpyArray("<i8", (1,), struct.pack("<q", 7)).item() == 7
    assert NumpyArray("<U2", (), "ab".encode("utf-32-le")).item() == "ab"
    assert NumpyArray("object", (2, 1), ["a", None]).to_numpy().tolist() == [["a"], [None]]


class Ref:
    """Something that only the caller knows."""

    def __repr__(self) -> str:
        raise AssertionError("executed")


def test_tensors_go_to_the_callers_sink() -> None:
    kept: list[Ref] = []

    def keep(value: Any) -> str | None:
        if not isinstance(value, Ref):
            return None
        kept.append(value)
        return f"t{len(kept)}"

    value = {"a": Ref(), "b": [Ref(), {"c": (Ref(),)}]}
    encoded = encode(value, tensors=keep)
    assert encoded == {
        "a": {"$tensor": "t1"},
        "b": [{"$tensor": "t2"}, {"c": {"$tuple": [{"$tensor": "t3"}]}}],
    }
    assert decode(encoded)["b"][0] == TensorName("t2")


class Color(enum.IntEnum):
    RED = 1


def test_what_cannot_be_kept_is_named() -> None:
    warnings: list[str] = []
    value = {"model": {"fn": len, "ref": Ref()}, "list": [Color.RED, random.Random]}
    encoded = encode(value, warnings=warnings, path="client")
    assert encoded["model"]["ref"] == {"$opaque": f"{__name__}.Ref", "repr": f"<{__name__}.Ref>"}
    assert [text.split(" was not kept")[0] for text in warnings] == [
        "client.model.fn of type builtins.builtin_function_or_method",
        f"client.model.ref of type {__name__}.Ref",
        f"client.list[0] of type {__name__}.Color",
        "client.list[1] of type builtins.type",
    ]
    assert decode(encoded)["model"]["ref"] == StubObject(__name__, "Ref")


def test_cycles_and_depth_are_reported() -> None:
    cycle: list[Any] = [1]
    cycle.append({"self": cycle})
    warnings: list[str] = []
    encoded = encode(cycle, warnings=warnings)
    assert encoded[1]["self"]["$opaque"] == "builtins.list"
    assert "contains itself" in warnings[0]
    deep: Any = 1
    for _ in range(1000):
        deep = [deep]
    warnings.clear()
    json.dumps(encode(deep, warnings=warnings))
    assert "levels deep" in warnings[0]
    shared = [1, 2]
    assert encode([shared, shared], warnings=warnings) == [[1, 2], [1, 2]]
    assert len(warnings) == 1


@pytest.mark.parametrize(
    "document",
    [
        {"$unknown": 1},
        {"$tuple": 3},
        {"$bytes": "not base64!"},
        {"$int": "zz"},
        {"$float": "one"},
        {"$float": "nan:00"},
        {"$complex": [1]},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$set": [[]]},
        {"$object": "x"},
        {"$numpy": "<f8"},
        {"$numpy": "<V8", "value": 1},
        {"$numpy": "|u1", "value": 300},
        {"$str": "gICA"},
        {"$symbol": ["a"]},
        {"$escaped": []},
    ],
)
def test_false_documents(document: Any) -> None:
    with pytest.raises(CorruptSourceError, match="tag"):
        decode({"a": [document]})


def test_deep_documents_are_an_error_not_a_crash() -> None:
    document: Any = 1
    for _ in range(100_000):
        document = [document]
    with pytest.raises(CorruptSourceError):
        decode(document)
