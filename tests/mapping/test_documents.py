"""Documents: TOML and JSON, the schema, the normal form, inverses, presets."""

from __future__ import annotations

import copy
import pickle
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings

from tests.mapping.test_reads import CASES, Case
from tests.schemas import validate
from ucpstore import Mapping
from ucpstore.errors import FormatVersionError, Kind, PatternError

PRESETS: dict[str, dict[str, int]] = {
    "bloom-pipe-to-hf": {"layers": 2},
    "hf-llama-to-phi3": {"heads": 4, "kv_heads": 2, "head_dim": 6},
    "megatron-deepspeed-gpt-pipe-to-plain": {"layers": 2},
    "megatron-deepspeed-llama-to-hf": {"heads": 4, "kv_heads": 2, "head_dim": 6},
    "megatron-deepspeed-untied-pipe-to-plain": {"layers": 2, "first_layer": 3, "gap": 1},
    "meta-llama-to-hf": {"heads": 4, "kv_heads": 2},
}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"rename": [{"from": "a"}]}, "missing required field `to`"),
    ({"rename": [{"from": "a", "to": "b", "x": 1}]}, "unknown field `x`"),
    ({"renames": []}, "unknown field `renames`"),
    ({"rename": [{"from": "a.{n}", "to": "b.{m}"}]}, "has m, which a.{n} lacks"),
    ({"rename": [{"from": "a.{n}", "to": "b.*"}]}, "unnamed wildcard"),
    ({"rename": [{"from": "a.{n", "to": "b"}]}, "found a brace"),
    ({"fuse": [{"from": ["a"], "to": "b"}]}, "length >= 2"),
    ({"fuse": [{"from": ["a.{n}", "b"], "to": "c.{n}"}]}, "has n, which b lacks"),
    ({"fuse": [{"from": ["a.{n}", "b.{m}"], "to": "c"}]}, "different variables"),
    ({"fuse": [{"from": ["a", "b"], "to": "c", "ratio": [1, 2, 3]}]}, "ratio has 3 numbers"),
    ({"fuse": [{"from": ["a", "b"], "to": "c", "unit": 2}]}, "there is no ratio"),
    ({"fuse": [{"from": ["a", "b"], "to": "c", "heads": 2}]}, "found 2 members"),
    ({"fuse": [{"from": list("abc"), "to": "d", "heads": 3, "kv_heads": 2}]}, "no multiple"),
    ({"fuse": [{"from": list("abc"), "to": "d", "heads": 3, "groups": 2}]}, "one or the other"),
    ({"fuse": [{"from": list("abc"), "to": "d", "kv_heads": 2}]}, "only said with heads"),
    ({"fuse": [{"from": ["a", "b"], "to": "c", "groups": 0}]}, ">= 1"),
    ({"split": [{"from": "a", "to": ["b", "c"]}]}, "give ratio or heads"),
    ({"stack": [{"from": "a.{e}", "to": "b.{e}", "over": "e"}]}, "expected a number of a.{e}"),
    ({"stack": [{"from": "a.{e*}", "to": "b", "over": "e"}]}, "expected a number of a.{e*}"),
    ({"unstack": [{"from": "a", "to": "b.{f}", "over": "e"}]}, "has f, which a lacks"),
    ({"transpose": [{"from": "a", "dims": [0, 2]}]}, "expected every dim from 0 once"),
    ({"rotary": [{"from": "a", "heads": 2, "layout": "thirds"}]}, "enum value 'thirds'"),
    ({"passes": [], "rename": []}, "unknown field `rename`"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "text"), BAD)
def test_what_is_wrong_with_a_document_is_said_with_its_place(
    document: dict[str, Any], text: str
) -> None:
    with pytest.raises(PatternError) as caught:
        Mapping.from_json(document, name="m.toml")
    assert text in str(caught.value)
    assert str(caught.value).startswith("m.toml: ")
    assert caught.value.kind is Kind.MALFORMED


def test_other_documents_are_refused(tmp_path: Path) -> None:
    for document in ([], "x", None, {"passes": 3}, {"passes": [{"rename": {}}]}):
        with pytest.raises(PatternError):
            Mapping.from_json(document)
    with pytest.raises(FormatVersionError):
        Mapping.from_json({"version": "2.0", "passes": []})
    with pytest.raises(PatternError, match="is no TOML"):
        Mapping.from_toml("[[rename]")
    path = tmp_path / "m.json"
    path.write_text("{")
    with pytest.raises(PatternError, match="is no JSON"):
        Mapping.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PatternError, match="cannot be read"):
        Mapping.load(path)


@settings(max_examples=40, deadline=None)
@given(case=CASES)
def test_normal_forms_and_inverses_match_the_schema(case: Case) -> None:
    _, document, _ = case
    validate(document, "mapping")
    mapping = Mapping.from_json(document)
    for one in (mapping, mapping.inverse(), mapping.then(mapping.inverse())):
        assert Mapping.from_json(validate(one.to_json(), "mapping")) == one
        assert pickle.loads(pickle.dumps(one)) == one
        assert Mapping.from_json(one.to_json()).digest == one.digest


def test_the_schema_refuses_what_the_parser_refuses() -> None:
    structural = [
        {"rename": [{"from": "a"}]},
        {"rename": [{"from": "a", "to": "b", "x": 1}]},
        {"renames": []},
        {"fuse": [{"from": ["a"], "to": "b"}]},
        {"split": [{"from": "a", "to": ["b", "c"]}]},
        {"passes": [], "rename": []},
        {"passes": [{"renames": []}]},
        {"rotary": [{"from": "a", "heads": 2, "layout": "thirds"}]},
    ]
    for document in structural:
        with pytest.raises(jsonschema.ValidationError):
            validate(document, "mapping")
        with pytest.raises(PatternError):
            Mapping.from_json(document)


def test_short_forms_are_the_same_mapping() -> None:
    names = {"from": list("qkv"), "to": "qkv"}
    short = Mapping.from_json({"fuse": [{**names, "heads": 8, "kv_heads": 2, "head_dim": 4}]})
    long = Mapping.from_json({"fuse": [{**names, "groups": 2, "ratio": [4, 1, 1], "unit": 4}]})
    assert short == long
    assert short.digest == long.digest
    again = {"transpose": [{"from": "a", "to": "a", "dims": [1, 0], "optional": False}]}
    assert Mapping.from_json(again) == Mapping.from_json({"transpose": [{"from": "a"}]})


def test_what_cannot_be_turned_around_is_said() -> None:
    document = {
        "rename": [{"from": "a.*", "to": "a"}, {"from": "b.{n}", "to": "b"}],
        "drop": [{"name": "c"}],
        "fuse": [{"from": ["d", "e"], "to": "f"}],
        "alias": [{"name": "g", "of": "a"}],
        "order": ["a"],
    }
    with pytest.raises(PatternError) as caught:
        Mapping.from_json(document).inverse()
    text = str(caught.value)
    for place in ("rename[0]", "rename[1]", "drop[0]", "fuse[0]", "order"):
        assert place in text
    assert caught.value.kind is Kind.UNSUPPORTED


def test_an_inverse_keeps_the_kinds_of_wildcards() -> None:
    mapping = Mapping.from_json({"rename": [{"from": "{n}.{a*}.{b**}", "to": "x.{b}.{n-3}.{a}"}]})
    assert mapping.inverse().to_json()["passes"] == [
        {"rename": [{"from": "x.{b**}.{n-3}.{a*}", "to": "{n}.{a*}.{b**}"}]}
    ]


def test_every_preset_is_tested_and_matches_the_schema() -> None:
    assert set(Mapping.presets()) == set(PRESETS)
    for name, parameters in PRESETS.items():
        mapping = Mapping.preset(name, **parameters)
        validate(mapping.to_json(), "mapping")
        validate(mapping.inverse().to_json(), "mapping")
        text = (files("ucpstore.mapping") / "documents" / f"{name}.toml").read_text()
        assert set(tomllib.loads(text)["preset"]["parameters"]) >= set(parameters)


def test_parameters_of_presets_are_checked() -> None:
    with pytest.raises(PatternError, match=r"Did you mean 'meta-llama-to-hf'") as caught:
        Mapping.preset("meta-llama-to-hff")
    assert caught.value.kind is Kind.NOT_FOUND
    with pytest.raises(PatternError, match="missing kv_heads; unknown layers") as caught:
        Mapping.preset("meta-llama-to-hf", heads=2, layers=3)
    with pytest.raises(PatternError, match="no whole number"):
        Mapping.preset("meta-llama-to-hf", heads=2, kv_heads=True)
    with pytest.raises(PatternError, match="no whole number"):
        Mapping.preset("meta-llama-to-hf", heads=-2, kv_heads=2)


def test_the_readmes_document_is_a_mapping() -> None:
    readme = Path(__file__).parents[2] / "README.md"
    texts = re.findall(r"```toml\n(.*?)```", readme.read_text(), re.DOTALL)
    (text,) = [text for text in texts if "[[rename]]" in text]
    validate(tomllib.loads(text), "mapping")
    assert Mapping.from_toml(text).to_json()["passes"][0]["alias"]


def test_the_example_in_the_docstring_is_true() -> None:
    import doctest

    import ucpstore.mapping.mapping as module

    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_ordered_and_then() -> None:
    one = Mapping.from_json({"keep": [{"name": "a"}]})
    assert one.ordered(["a"]).to_json()["passes"] == [{"keep": [{"name": "a"}], "order": ["a"]}]
    assert len(one.then(one, one).passes) == 3
    with pytest.raises(PatternError, match="without passes"):
        Mapping(()).ordered(["a"])
    document = copy.deepcopy(one.to_json())
    assert document == one.to_json()
