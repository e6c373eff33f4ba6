"""Templates of names: what they match, fill and refuse."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucpstore.errors import PatternError
from ucpstore.layout.names import Template


@pytest.mark.parametrize(
    ("template", "name", "values"),
    [
        ("a.b", "a.b", {}),
        ("a.b", "axb", None),
        ("a.b", "a.b.c", None),
        ("*.weight", "norm.weight", {}),
        ("*.weight", "a.norm.weight", None),
        ("**.weight", "a.norm.weight", {}),
        ("{n}.x", "12.x", {"n": "12"}),
        ("{n}.x", "012.x", None),
        ("{n}.x", "a.x", None),
        ("{n-3}.x", "0.x", {"n": "3"}),
        ("{n+3}.x", "2.x", None),
        ("{a*}.{b**}", "p.q.r", {"a": "p", "b": "q.r"}),
    ],
)
def test_match(template: str, name: str, values: dict[str, str] | None) -> None:
    assert Template(template).match(name) == values


@pytest.mark.parametrize(
    "text", ["", "{", "a}b", "{1}", "{a b}", "{n}{n}", "**a**b**c**", "x" * 1001]
)
def test_what_is_no_template(text: str) -> None:
    with pytest.raises(PatternError, match="template of names"):
        Template(text)


def test_fill_needs_every_value() -> None:
    with pytest.raises(PatternError, match="'m', which has no value: found n"):
        Template("{m}.x").fill({"n": "1"})
    with pytest.raises(PatternError, match="an unnamed wildcard"):
        Template("*.x").fill({})
    with pytest.raises(PatternError, match="expected a number from 0"):
        Template("{n-3}.x").fill({"n": "2"})


@given(
    numbers=st.lists(st.integers(0, 10**6), min_size=2, max_size=2),
    words=st.text("abc.", min_size=1, max_size=20),
    offset=st.integers(-5, 5),
)
def test_a_name_survives_there_and_back(numbers: list[int], words: str, offset: int) -> None:
    here = Template("p.{i}.q{j}.{rest**}")
    there = Template(f"r.{{rest}}.{{j}}.{{i{offset:+d}}}" if offset else "r.{rest}.{j}.{i}")
    back = Template(there.text.replace("{rest}", "{rest**}"))
    i, j = numbers
    name = f"p.{i}.q{j}.{words}"
    values = here.match(name)
    assert values is not None
    if i + offset < 0:
        with pytest.raises(PatternError):
            there.fill(values)
        return
    filled = there.fill(values)
    found = back.match(filled)
    assert found == values
    assert here.fill(found) == name


def test_pickled_whole() -> None:
    template = Template("{n}.x")
    assert pickle.loads(pickle.dumps(template)) == template
