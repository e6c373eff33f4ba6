from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ucpstore.errors import Kind, PlanError
from ucpstore.store.names import MAX_SEGMENT_BYTES, decode_name, encode_name, encode_siblings

any_text = st.text(st.characters(exclude_categories=()), min_size=1, max_size=60)
hostile = st.text(st.sampled_from("ab.1_/\\%\0*? :()'\"\n\ud800é漢😀~"), min_size=1, max_size=25)


def quoted(name: str) -> str:
    """Every byte but letters, digits and four signs in hexadecimal."""
    raw = name.encode("utf-8", "surrogatepass")
    return "".join(
        chr(b) if (chr(b).isalnum() and b < 128) or chr(b) in "._-~" else f"%{b:02X}" for b in raw
    )


@given(any_text | hostile)
def test_round_trip_as_one_safe_segment(name: str) -> None:
    if name in {".", "..", "c", "zarr.json"} or name.startswith("__") or len(quoted(name)) > 250:
        with pytest.raises(PlanError) as caught:
            encode_name(name)
        assert caught.value.kind is Kind.NAME
        return
    segment = encode_name(name)
    assert segment == quoted(name)
    assert segment not in {".", "..", "c", "zarr.json"}
    assert len(segment) <= MAX_SEGMENT_BYTES
    assert decode_name(segment) == name


@given(hostile, hostile)
def test_different_names_differ(one: str, other: str) -> None:
    assume(one != other)
    try:
        assert encode_name(one) != encode_name(other)
    except PlanError:
        assume(False)


def test_usual_names_stay() -> None:
    for name in ("model.layers.0.self_attn.q_proj.weight", "_orig_mod.w", "a-b~c", "C", "..."):
        assert encode_name(name) == name
    assert encode_name("a/b%\\\0é") == "a%2Fb%25%5C%00%C3%A9"


@pytest.mark.parametrize("name", ["", ".", "..", "zarr.json", "c", "__common__", "__"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match="is reserved in a Zarr hierarchy") as caught:
        encode_name(name)
    assert caught.value.kind is Kind.NAME


def test_long_names_are_refused_by_their_encoded_length() -> None:
    assert encode_name("a" * 250) == "a" * 250
    for name in ("a" * 251, "é" * 42):
        with pytest.raises(PlanError, match="expected at most 250") as caught:
            encode_name(name)
        assert caught.value.kind is Kind.NAME


@pytest.mark.parametrize("segment", ["a/b", "a%2fb", "%", "%C3", "é", "a%61", "", "c", "x.(0-3)"])
def test_segments_that_no_name_has(segment: str) -> None:
    with pytest.raises(PlanError, match=r"is no encoded name|is reserved") as caught:
        decode_name(segment)
    assert caught.value.kind is Kind.NAME


def test_siblings_are_no_name() -> None:
    segment = encode_siblings("a/", range(3, 7), "")
    assert segment == "a%2F(3-6)"
    assert encode_name("a/(3-6)") != segment
    with pytest.raises(PlanError, match="expected at most 250"):
        encode_siblings("a" * 250, range(2), ".w")
