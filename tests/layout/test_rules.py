"""Rules: what ranks of any number hold, and the whole tensor from what they hold, are inverse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.schemas import validate
from ucpstore.errors import Kind, PatternError
from ucpstore.layout.coverage import require_covered
from ucpstore.layout.explicit import Explicit
from ucpstore.layout.geometry import Geometry, Strided
from ucpstore.layout.kinds import Pattern
from ucpstore.layout.matching import exactly
from ucpstore.layout.names import Template
from ucpstore.layout.patterns import (
    Flat,
    Partial,
    Replicate,
    Shard,
    ShardNC,
    compose,
    pattern_from_json,
)
from ucpstore.layout.region import Region
from ucpstore.layout.rule import for_any_degree
from ucpstore.layout.rules import Held, Padding, Patterns, PrefixRegex, Rule

EXAMPLE = """
[[rule]]
match = ["*.norm.weight", "*.down.bias"]
tp = "replicate"

[[rule]]
match = "*.down.weight"
tp = "shard(1)"

[[rule]]
match = "*.gate_up.*"
tp = {pattern = "shard_nc", dim = 0, ratio = [1, 1]}

[[rule]]
match = "embed.weight"
tp = "shard(0)"
pad = {dim = 0, true_size = 50257, multiple = 128}

[[rule]]
regex = '\\d+\\.router'
tp = "replicate(first)"
origin = "mine"

[[rule]]
match = "**"
tp = "partial"
min_ndim = 2
"""


def cut(held: Held, whole: np.ndarray) -> list[np.ndarray]:
    """What every rank holds of a padded tensor, by the pattern's own description of its geometry."""
    padded = np.full(held.shape, -7, whole.dtype)
    padded[tuple(map(slice, whole.shape))] = whole
    size = held.axes[-1].size
    shapes: list[tuple[int, ...]] = [(0,)] * size

    def leaf(at: dict[str, int], shape: tuple[int, ...]) -> Geometry:
        shapes[at["tp"]] = shape
        return Strided(shape, at["tp"])

    geometry = compose(held.shape, held.axes[-1:], leaf)
    locals_ = [np.full(shape, -9, whole.dtype) for shape in shapes]
    for copy in range(geometry.copies):
        for piece in geometry.query(Region.full(held.shape), copy):
            view(locals_[piece.slot], piece)[...] = padded[piece.region.slices]
    assert all((part != -9).all() for part in locals_)
    return locals_


def view(local: np.ndarray, piece: object) -> np.ndarray:
    flat = local.reshape(-1)
    return np.lib.stride_tricks.as_strided(
        flat[piece.offset :],  # type: ignore[attr-defined]
        piece.region.sizes,  # type: ignore[attr-defined]
        tuple(s * flat.itemsize for s in piece.strides),  # type: ignore[attr-defined]
    )


def put_together(geometry: Geometry, parts: list[np.ndarray], copy: int = 0) -> np.ndarray:
    require_covered(geometry, fqn="w", state="fp32")
    out = np.full(geometry.shape, -1, parts[0].dtype)
    for piece in geometry.query(Region.full(geometry.shape), copy):
        out[piece.region.slices] = view(parts[piece.slot], piece)
    return out


KINDS = [
    "replicate",
    "first",
    "partial",
    "even",
    "unit",
    "widths",
    "sections",
    "units",
    "section-widths",
    "ratio",
    "ratio-units",
]


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Rule, tuple[int, ...], int]:
    """A rule, a shape that it fits, and a number of ranks."""
    degree = draw(st.integers(1, 5))
    ndim = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(ndim)]
    dim = draw(st.integers(0, ndim - 1))
    kind = draw(st.sampled_from(KINDS))
    width = st.lists(st.integers(0, 4), min_size=degree, max_size=degree)
    counts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    units = tuple(draw(st.integers(1, 3)) for _ in counts)
    tp: Pattern
    if kind in ("replicate", "first", "partial"):
        tp = {"replicate": Replicate(), "first": Replicate("first"), "partial": Partial()}[kind]
    elif kind in ("even", "unit"):
        unit = units[0] if kind == "unit" else 1
        tp, shape[dim] = Shard(dim, unit=unit), unit * counts[0]
    elif kind == "widths":
        widths = tuple(draw(width))
        tp, shape[dim] = Shard(dim, widths), sum(widths)
    elif kind == "section-widths":
        both = (tuple(draw(width)), tuple(draw(width)))
        tp = ShardNC(dim, tuple(map(sum, both)), both)
        shape[dim] = sum(map(sum, both))
    elif kind == "ratio":
        tp, shape[dim] = ShardNC(dim, ratio=units), sum(units) * counts[0]
    elif kind == "ratio-units":
        heads = tuple(unit * 2 for unit in units)
        tp, shape[dim] = ShardNC(dim, ratio=units, units=heads), sum(heads) * counts[0]
    else:
        given_units = units if kind == "units" else (1,) * len(units)
        sections = tuple(n * u for n, u in zip(counts, given_units, strict=True))
        tp = ShardNC(dim, sections, units=units if kind == "units" else None)
        shape[dim] = sum(sections)
    pad = None
    if kind not in ("widths", "section-widths", "sections", "units") and draw(st.booleans()):
        across = draw(st.integers(0, ndim - 1))
        step = 1 if across != dim else getattr(tp, "unit", sum(getattr(tp, "ratio", None) or (1,)))
        if getattr(tp, "units", None) is not None:
            step = sum(tp.units)  # type: ignore[attr-defined]
        pad = Padding(across, shape[across], multiple=step * draw(st.integers(1, 3)))
    return Rule((Template("w"),), tp, pad), tuple(shape), degree


@given(sharded())
def test_unite_is_the_inverse_of_held(case: tuple[Rule, tuple[int, ...], int]) -> None:
    rule, shape, degree = case
    whole = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    held = rule.held("w", shape, degree)
    parts = cut(held, whole)
    united = rule.unite("w", [Strided(part.shape, slot) for slot, part in enumerate(parts)])
    assert united.geometry.shape == shape
    for copy in range(united.geometry.copies):
        assert (put_together(united.geometry, parts, copy) == whole).all()
    assert united.held.resolved() == held.resolved()
    assert united.rule is rule


@given(sharded())
def test_what_was_observed_tells_the_rule_for_any_number_of_ranks(
    case: tuple[Rule, tuple[int, ...], int],
) -> None:
    rule, shape, degree = case
    assume(rule.pad is None)
    held = rule.held("w", shape, degree).resolved()
    again = Rule(rule.match, for_any_degree(held.tp))
    assert again.held("w", shape, degree).resolved() == held


@given(st.lists(sharded(), min_size=1, max_size=4))
def test_json_round_trip(cases: list[tuple[Rule, tuple[int, ...], int]]) -> None:
    patterns = Patterns(tuple(rule for rule, _, _ in cases))
    document = json.loads(json.dumps(patterns.to_json()))
    assert Patterns.from_json(validate(document, "patterns")) == patterns


def test_toml_and_its_normal_form(tmp_path: Path) -> None:
    patterns = Patterns.parse(EXAMPLE)
    document = validate(patterns.to_json(), "patterns")
    assert Patterns.from_json(document) == patterns
    assert [rule["tp"]["pattern"] for rule in document["rules"]] == [
        *("replicate", "shard", "shard_nc", "shard", "replicate", "partial")
    ]
    assert document["rules"][4] == {
        "regex": [r"\d+\.router"],
        "tp": {"pattern": "replicate", "rule": "first"},
        "origin": "mine",
    }
    (tmp_path / "rules.toml").write_text(EXAMPLE)
    (tmp_path / "rules.json").write_text(json.dumps(document))
    for name in ("rules.toml", "rules.json"):
        assert Patterns.of(tmp_path / name) == Patterns.of(str(tmp_path / name)) == patterns
    assert Patterns.of(patterns) is patterns
    assert not Patterns.of(None)


def test_the_first_rule_that_matches_counts() -> None:
    patterns = Patterns.parse(EXAMPLE)
    assert str(patterns.rule("0.norm.weight", (3,)).tp) == "replicate"
    assert str(patterns.rule("embed.weight", (50257, 2)).tp) == "shard(0)"
    assert str(patterns.rule("7.router.bias", (3,)).tp) == "replicate(first)"
    assert str(patterns.rule("else.where", (3, 3)).tp) == "partial"
    with pytest.raises(PatternError, match=r"no rule says how 'else' of shape \[3\]") as caught:
        patterns.rule("else", (3,))
    assert caught.value.kind == Kind.UNMATCHED
    assert [str(rule.tp) for rule in patterns.unused({"0.norm.weight": 1, "x": 2})] == [
        *("shard(1)", "shard_nc(0: 1|1)", "shard(0)", "replicate(first)")
    ]
    assert "for *.down.weight (shard(1)) is for no parameter" in patterns.warnings({"x": 2})[1]
    own = Patterns((Rule((Template("else"), PrefixRegex("^a\\.b$")), Shard(0)),)) + patterns
    assert own.rule("else", (4,)).tp == own.rule("a.b", (4,)).tp == Shard(0)
    assert own.find("a.bc", 1) is None


def test_key_value_heads_over_any_number_of_ranks() -> None:
    """Case 6: 3 heads of 4 rows over 2 ranks are 2 and 1 of them; 10 rows over 4 ranks are 3, 3, 2, 2."""
    rule = Rule((Template("k"),), Shard(0, unit=4))
    for degree, widths in {1: (12,), 2: (8, 4), 3: (4, 4, 4), 4: (4, 4, 4, 0)}.items():
        assert rule.held("k", (12, 2), degree).resolved().tp == Shard(0, widths)
    assert for_any_degree(Shard(0, (8, 4))) == Shard(0, unit=4)
    assert for_any_degree(Shard(0, (3, 3, 2, 2))) == Shard(0)
    assert for_any_degree(Shard(0, (1, 9))) == Shard(0, (1, 9))
    fused = ShardNC(0, (24, 12, 12), ((16, 8), (8, 4), (8, 4)))
    assert for_any_degree(fused) == ShardNC(0, (24, 12, 12), units=(8, 4, 4))
    with pytest.raises(PatternError, match="no whole units of 4"):
        rule.held("k", (10, 2), 2)


def test_widths_count_on_as_many_ranks_only() -> None:
    rule = Rule((Template("w"),), Shard(0, (1, 5)))
    assert rule.held("w", (6,), 2).resolved().tp == Shard(0, (1, 5))
    assert rule.held("w", (6,), 3).resolved().tp == Shard(0, (2, 2, 2))
    fused = Rule((Template("w"),), ShardNC(0, (4, 2), ((3, 1), (1, 1))))
    assert fused.held("w", (6,), 1).resolved().tp == ShardNC(0, (4, 2), ((4,), (2,)))


@pytest.mark.parametrize(
    ("rule", "shapes", "message"),
    [
        (Rule((), Replicate()), [(3,), (4,)], r"found local shapes \[3\], \[4\], expected replica"),
        (Rule((), Shard(1)), [(3,), (3,)], "that have dim 1"),
        (Rule((), Shard(0)), [(3, 2), (3, 1)], "differ in dim 0 only"),
        (Rule((), ShardNC(0, ratio=(2, 1))), [(3,), (4,)], "4 indices cannot be cut in this ratio"),
        (Rule((), ShardNC(0, (4, 2))), [(4,), (2,)], r"expected \[3\], \[3\]"),
        (Rule((), Shard(0), Padding(0, 9)), [(4,), (4,)], "9 indices without padding"),
        (Rule((), Shard(0), Padding(0, 7, size=10)), [(4,), (4,)], r"and 10 with it"),
        (Rule((), Flat()), [(4,), (4,)], "no way to lie on tensor-parallel ranks"),
    ],
)
def test_rules_that_do_not_fit(rule: Rule, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(PatternError, match=message) as caught:
        rule.unite("w", [Strided(shape, slot) for slot, shape in enumerate(shapes)])
    assert "'w'" in str(caught.value)


def test_padded_sizes() -> None:
    rule = Rule((Template("e"),), Shard(0), Padding(0, 50257, multiple=128))
    assert [rule.held("e", (50257, 2), n).shape[0] for n in (1, 2, 3, 8)] == [
        *(50304, 50432, 50304, 51200)
    ]
    known = Rule((Template("e"),), Shard(0), Padding(0, 13, size=16))
    assert known.held("e", (13,), 4).shape == (16,)
    with pytest.raises(PatternError, match="3 tensor-parallel ranks is not known") as caught:
        known.held("e", (13,), 3)
    assert "pad.multiple" in caught.value.hint
    with pytest.raises(PatternError, match=r"pads dim 0 of 13 indices, but the shape is \[14\]"):
        known.held("e", (14,), 2)


def test_explicit_boxes() -> None:
    """Two ranks with a slice each and a common part, as GPTBigCode's keys and values."""
    tp = Explicit(
        (10, 3),
        ((8, 3), (6, 3)),
        (
            (((0, 0), (0, 0), (4, 3)), ((6, 0), (4, 0), (4, 3))),
            (((4, 0), (0, 0), (2, 3)), ((6, 0), (2, 0), (4, 3))),
        ),
    )
    rule = Rule((Template("w"),), tp)
    assert pattern_from_json(json.loads(json.dumps(tp.to_json()))) == tp
    validate(Patterns((rule,)).to_json(), "patterns")
    whole = np.arange(30).reshape(10, 3)
    parts = cut(rule.held("w", (10, 3), 2), whole)
    assert [len(part) for part in parts] == [8, 6]
    united = rule.unite("w", [Strided(part.shape, slot) for slot, part in enumerate(parts)])
    assert (put_together(united.geometry, parts) == whole).all()
    assert (put_together(united.geometry, parts, 1)[6:] == whole[6:]).all()  # the other replica
    for shape, degree in [((10, 3), 3), ((9, 3), 2)]:
        with pytest.raises(PatternError, match=r"the boxes are those of shape \[10, 3\] on 2"):
            rule.held("w", shape, degree)
    with pytest.raises(PatternError, match="lies outside"):
        Explicit((4,), ((2,),), ((((3,), (0,), (2,)),),))


@pytest.mark.parametrize(
    "text",
    [
        "rule = 3",
        "[[rule]]\ntp = 'replicate'",
        "[[rule]]\nmatch = 'x'",
        "[[rule]]\nmatch = 'x'\ntp = 'shard'",
        "[[rule]]\nmatch = 'x'\ntp = 'nothing'",
        "[[rule]]\nmatch = 'x'\ntp = 'shard(-1)'",
        "[[rule]]\nmatch = 'x'\ntp = 'replicate(last)'",
        "[[rule]]\nmatch = 'x{'\ntp = 'replicate'",
        "[[rule]]\nregex = '('\ntp = 'replicate'",
        "[[rule]]\nregex = '(a+)+'\ntp = 'replicate'",
        "[[rule]]\nmatch = 'x'\ntp = 'replicate'\nmin_ndim = 'two'",
        "[[rule]]\nmatch = 'x'\ntp = 'replicate'\npads = {}",
        "[[rule]]\nmatch = 'x'\ntp = 'replicate'\npad = {dim = 0}",
        "[[rule]]\nmatch = 'x'\ntp = 'replicate'\npad = {dim = 0, true_size = 2, multiple = 0}",
        "[[rule]]\nmatch = 'x'\ntp = {pattern = 'shard', dim = 0, units = 3}",
        "[[rule]]\nmatch = 'x'\ntp = {pattern = 'shard', dim = 0, widths = 3}",
        "[[rule]]\nmatch = 'x'\ntp = {pattern = 'shard_nc', dim = 0, ratio = [0, 1]}",
        "[[rule]]\nmatch = 'x'\ntp = {pattern = 'shard_nc', dim = 0, ratio = [1], sections = [2]}",
        "[[rule]]\nmatch = 'x'\ntp = {pattern = 'explicit', shape = [2], local = [2], boxes = []}",
        "[[rule]]\nmatch = 'x'\ntp = {pattern = 'explicit', shape = [2]}",
        "version = '2.0'",
        "[[rules]]\nmatch = 'x'\ntp = 'replicate'",
        "a = " + "[" * 50_000,
        "no toml",
    ],
)
def test_documents_that_are_none(text: str) -> None:
    with pytest.raises(PatternError):
        Patterns.parse(text)


def test_files_and_presets_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(PatternError, match="No such file"):
        Patterns.of(tmp_path / "none.toml")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(PatternError, match="no JSON"):
        Patterns.of(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(PatternError, match="no JSON"):
        Patterns.of(tmp_path / "x.json")
    with pytest.raises(PatternError, match="there are hf-gpt-neox, hf-llama") as caught:
        Patterns.of("hf-lama")
    assert "'hf-llama'" in caught.value.hint
    with pytest.raises(PatternError, match=r"needs group= \(query heads per key-value head\)"):
        Patterns.of("hf-phi3")
    with pytest.raises(PatternError, match=r"with 'heads=2': expected group=NUMBER"):
        Patterns.of("hf-phi3,heads=2")
    with pytest.raises(PatternError, match="int, expected Patterns, a file"):
        Patterns.of(3)  # type: ignore[arg-type]


def test_exact_names_become_one_per_layer() -> None:
    names = [f"layers.{n}.{what}.weight" for n in range(12) for what in ("norm", "up", "odd")]
    regexes = tuple(
        PrefixRegex(f"^{re.escape(name)}$")
        for name in names
        if "up" not in name and "11.odd" not in name
    )
    patterns = Patterns(
        (
            Rule(regexes, Replicate(), origin="listed"),
            Rule((PrefixRegex(r"layers\.\d+\.odd"),), Shard(0)),
            Rule((Template("**"),), Shard(1)),
        )
    )
    ndims = dict.fromkeys(names, 2)
    compact = patterns.compact(ndims)
    first = compact.rules[0]
    assert Template("layers.{n}.norm.weight") in first.match
    # The last layer's follows another rule: these stay one by one.
    assert sum("odd" in str(one) for one in first.match) == 11
    assert len(first.match) == 12
    for name in names:
        assert compact.rule(name, (2, 2)).tp == patterns.rule(name, (2, 2)).tp, name
    assert compact.rule("layers.70.norm.weight", (2,)).tp == Replicate()
    assert Patterns.from_json(validate(compact.to_json(), "patterns")) == compact
    strange = "layers.0.{a*}.weight"
    kept = Patterns((Rule((exactly(strange),), Replicate()),)).compact({strange: 1})
    assert kept.find(strange, 1) is kept.rules[0]
    assert kept.find("layers.0.{ab}.weight", 1) is None
