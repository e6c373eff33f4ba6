"""Inference: what is called certain is true, what is proposed as replicated is the same, the rest is asked."""

from __future__ import annotations

import doctest
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import ArraySource
from tests.inspect.models import STATES, Truth, constant, cut, llama, ranks_of, states, united
from tests.schemas import validate
from ucpstore.errors import ParameterNotFoundError, PlanError
from ucpstore.inspect.infer import (
    Inference,
    check_sources,
    conventions,
    explain_sources,
    grouping,
    infer_sources,
)
from ucpstore.inspect.infer.conventions import hint
from ucpstore.inspect.infer.grouping import template_of
from ucpstore.layout.patterns import Partial, Pattern, Replicate, Shard, ShardNC
from ucpstore.layout.rules import Patterns, Rule


def rng(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


def verdicts(found: Inference) -> dict[str, tuple[Pattern | None, str]]:
    return {
        name: (one.pattern, one.confidence) for one in found.proposals for name in one.parameters
    }


def infer(truth: Truth, degree: int = 2, **options: Any) -> Inference:
    found = infer_sources(ranks_of(truth, degree), **options)
    validate(found.to_json(), "inference")
    assert Patterns.parse(found.toml()) == found.patterns
    return found


def uncommented(text: str) -> str:
    """The TOML of an inference with every question answered by its first alternative."""
    lines, asked = [], False
    for line in text.splitlines():
        if line.startswith("# QUESTION"):
            asked = True
        elif not line.startswith("#"):
            asked = False
        if not asked:
            lines.append(line)
        elif line.startswith("# [[rule]]"):
            lines.append(line[2:])
            answered = False
        elif line.startswith(("# match", "# regex", "#     ", "# ]")):
            lines.append(line[2:])
        elif line.startswith("# tp") and not answered:
            answered = True
            lines.append(line[2:])
    return "\n".join(lines)


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("trained", [True, False])
def test_llama(degree: int, trained: bool) -> None:
    """Every parameter of a conventional model is told, also with fresh norms and zero biases."""
    truth = llama(degree, rng(), trained=trained)
    found = infer(truth, degree)
    assert not found.questions
    assert {name: pattern for name, (pattern, _) in verdicts(found).items()} == {
        name: pattern for name, (_, pattern) in truth.items()
    }
    sure = {name for name, (_, confidence) in verdicts(found).items() if confidence == "certain"}
    vectors = {name for name, (values, _) in truth.items() if values["fp32"].ndim == 1}
    assert sure == (truth.keys() if trained else truth.keys() - vectors)
    assert found.counts()["ambiguous"] == 0
    # One template for all layers, one rule for all templates alike.
    assert {str(one) for rule in found.patterns.rules for one in rule.match} == {
        template_of(name) for name in truth
    }
    assert len(found.patterns.rules) <= 6


def test_rules_are_for_any_degree() -> None:
    truth = llama(2, rng())
    patterns = infer(truth).patterns
    name = "model.layers.1.mlp.up_proj.weight"
    assert patterns.held(name, truth[name][0]["fp32"].shape, 4).axes[0].pattern == Shard(0)


def test_norms_are_never_joined() -> None:
    """Issue 6503 of DeepSpeed: without patterns, its converter joins equal norms along dim 0."""
    truth = {
        "a.norm.weight": (states((6,), rng()), Replicate()),
        "a.up_proj.weight": (states((8, 6), rng()), Shard(0)),
    }
    assert verdicts(infer(truth))["a.norm.weight"] == (Replicate(), "certain")


def test_equal_values_alone_prove_nothing() -> None:
    """All ranks seeded alike, without names: not even a likely rule for matrices."""
    weight = states((4, 6), rng())
    twice = {name: np.concatenate([value, value]) for name, value in weight.items()}
    found = infer({"m.a": (twice, Shard(0)), "m.b": (constant((4,), 0.0), Shard(0))})
    assert {confidence for _, confidence in verdicts(found).values()} == {"ambiguous"}
    assert [str(p) for p in found.proposals[0].alternatives] == [
        "replicate",
        "shard(0)",
        "shard(1)",
    ]


def test_named_as_cut_but_equal_is_asked() -> None:
    truth = {
        "x.q_proj.weight": (states((4, 6), rng()), Replicate()),
        "x.other": (states((4, 6), rng()), Shard(0)),
    }
    pattern, confidence = verdicts(infer(truth))["x.q_proj.weight"]
    assert (pattern, confidence) == (None, "ambiguous")


def test_contents_of_siblings_count() -> None:
    """A fresh bias is cut like that of the same name in another layer."""
    truth = {
        "layers.0.fc.up_proj.bias": (constant((8,), 0.0), Shard(0)),
        "layers.1.fc.up_proj.bias": (states((8,), rng()), Shard(0)),
    }
    found = verdicts(infer(truth))
    assert found["layers.0.fc.up_proj.bias"] == found["layers.1.fc.up_proj.bias"]
    assert found["layers.0.fc.up_proj.bias"][0] == Shard(0)


def test_layers_that_contradict_each_other_are_named() -> None:
    truth = {
        "0.weight": (states((4, 4), rng(1)), Shard(0)),
        "1.weight": (states((2, 4), rng(2)), Replicate()),
        "2.weight": (states((5, 3), rng(4)), Replicate()),
    }
    found = infer(truth)
    assert verdicts(found)["0.weight"][0] is None
    replicated = [one for one in found.proposals if one.pattern == Replicate()]
    assert {str(match) for one in replicated for match in one.match} == {"1.weight", "2.weight"}


def test_a_name_that_the_sizes_contradict_is_asked() -> None:
    """A vocabulary cut along the model's dim, as AutoTP's inference does it."""
    truth = {
        "embed_tokens.weight": (states((7, 6), rng()), Shard(1)),
        "norm.weight": (states((6,), rng()), Replicate()),
    }
    (asked,) = infer(truth).questions
    assert asked.parameters == ("embed_tokens.weight",)
    assert Shard(1) in asked.alternatives


def test_uneven_shapes_prove_the_dim() -> None:
    truth = {
        "x.down_proj.weight": (states((5, 7), rng()), Shard(1)),
        "x.thing": (states((5, 3), rng()), Shard(1)),
    }
    found = verdicts(infer(truth))
    assert found["x.down_proj.weight"] == (Shard(1), "certain")
    assert found["x.thing"] == (Shard(1), "likely")


def test_fused_sections_are_asked() -> None:
    gate_up, qkv = ShardNC(0, ratio=(1, 1)), ShardNC(0, (8, 4, 4))
    truth = {
        "x.mlp.gate_up_proj.weight": (states((12, 5), rng()), gate_up),
        "x.mlp.down_proj.weight": (states((5, 6), rng()), Shard(1)),
        "x.attn.qkv_proj.weight": (states((16, 5), rng()), qkv),
        "x.attn.qkv_proj.bias": (states((16,), rng()), qkv),
        "x.attn.o_proj.weight": (states((5, 8), rng()), Shard(1)),
        "x.norm.weight": (states((5,), rng()), Replicate()),
    }
    found = infer(truth)
    asked = {name: one for one in found.questions for name in one.parameters}
    assert asked.keys() == {name for name in truth if "gate" in name or "qkv" in name}
    assert asked["x.mlp.gate_up_proj.weight"].alternatives == (gate_up, Shard(0))
    assert asked["x.attn.qkv_proj.weight"].alternatives == (Shard(0), qkv)
    assert asked["x.attn.qkv_proj.bias"].alternatives == (Shard(0), qkv)


@pytest.mark.parametrize("bias", [True, False])
def test_swiglu_is_not_joined_plainly(bias: bool) -> None:
    """The name does not tell Megatron's SwiGLU; that it gives out twice what dense_4h_to_h takes in does."""
    halves = ShardNC(0, ratio=(1, 1))
    truth = {
        "3.mlp.dense_h_to_4h.weight": (states((16, 5), rng()), halves),
        "3.mlp.dense_4h_to_h.weight": (states((5, 8), rng()), Shard(1)),
        "3.input_layernorm.weight": (states((5,), rng()), Replicate()),
    }
    if bias:
        truth["3.mlp.dense_h_to_4h.bias"] = (states((16,), rng()), halves)
    found = infer(truth, 4)
    (asked,) = found.questions
    assert set(asked.parameters) == {name for name in truth if "h_to_4h" in name}
    assert asked.alternatives[0] == halves
    plain = dict(truth)
    del plain["3.mlp.dense_h_to_4h.weight"], plain["3.mlp.dense_4h_to_h.weight"]
    plain.pop("3.mlp.dense_h_to_4h.bias", None)
    plain["3.mlp.dense_h_to_4h.weight"] = (states((16, 5), rng()), Shard(0))
    plain["3.mlp.dense_4h_to_h.weight"] = (states((5, 16), rng()), Shard(1))
    assert not infer(plain, 4).questions


def megatron(**more: Any) -> dict[str, Any]:
    """A pipeline stage of Megatron-DeepSpeed."""
    at = "3."
    truth = {
        f"{at}input_layernorm.weight": (states((5,), rng()), Replicate()),
        f"{at}self_attention.query_key_value.weight": (states((18, 5), rng()), Shard(0)),
        f"{at}self_attention.query_key_value.bias": (states((18,), rng()), Shard(0)),
        f"{at}self_attention.dense.weight": (states((5, 6), rng()), Shard(1)),
        f"{at}mlp.dense_4h_to_h.weight": (states((5, 8), rng()), Shard(1)),
    }
    return {**truth, **{f"{at}{name}": value for name, value in more.items()}}


def test_a_preset_that_fits_answers_what_names_leave_open() -> None:
    """Megatron's query_key_value lies head by head; the preset knows, and its rules fit all the rest."""
    gelu = {"mlp.dense_h_to_4h.weight": (states((8, 5), rng()), Shard(0))}
    swiglu = {"mlp.dense_h_to_4h.weight": (states((16, 5), rng()), ShardNC(0, ratio=(1, 1)))}
    for more, preset in ((gelu, "megatron-gpt"), (swiglu, "megatron-llama")):
        truth = megatron(**more)
        found = infer(truth)
        assert preset in found.presets
        name = "3.self_attention.query_key_value.weight"
        assert verdicts(found)[name] == (Shard(0), "likely")
    # presets that do not agree answer nothing: both would do for SwiGLU's sizes
    assert {"megatron-gpt", "megatron-llama"} <= set(found.presets)
    (asked,) = found.questions
    assert asked.parameters == ("3.mlp.dense_h_to_4h.weight",)
    # a parameter that no preset knows: none fits
    unknown = infer(megatron(**gelu, **{"mlp.extra": (states((7, 5), rng()), Replicate())}))
    assert unknown.presets == ()
    assert {len(one.parameters) for one in unknown.questions} == {2}


def test_copies_that_drifted_are_asked() -> None:
    sources = ranks_of({"x.norm.weight": (states((6,), rng()), Replicate())}, 2)
    values = sources[1]._arrays["x.norm.weight", "fp32"].copy()
    values[4] += np.float32(1e-3)
    sources[1]._arrays["x.norm.weight", "fp32"] = values
    found = infer_sources(sources)
    (asked,) = found.questions
    assert asked.alternatives == (Replicate("first"), Partial(), Shard(0))
    assert "by up to 0.001 in x.norm.weight" in found.toml()


def test_ranks_that_share_slices_are_asked() -> None:
    """Two key-value heads on four ranks: no rule says so."""
    heads = [states((2, 5), rng(i)) for i in range(2)]
    sources = [
        ArraySource({"x.k_proj.weight": heads[rank // 2]}, parallelism={"tp": 4})
        for rank in range(4)
    ]
    (asked,) = infer_sources(sources).questions
    assert asked.alternatives == ()
    assert "0+1 = 2+3" in asked.entries[0].evidence[0]


def test_what_some_ranks_lack_is_asked() -> None:
    sources = ranks_of({"x.a": (states((4,), rng()), Replicate())}, 2)
    lacking = ArraySource({}, parallelism={"tp": 2})
    (asked,) = infer_sources([sources[0], lacking]).questions
    assert asked.parameters == ("x.a",)
    kinds = [found.kind for found in check_sources([sources[0], lacking], Patterns()).findings]
    assert kinds == ["missing"]


def test_known_rules_are_kept_and_a_default_is_no_knowledge() -> None:
    truth = llama(2, rng())
    norms = Patterns.parse('[[rule]]\nmatch = "**norm.weight"\ntp = "replicate"')
    default = Patterns.parse('[[rule]]\nmatch = "**"\ntp = "shard(0)"')
    found = infer(truth, known=norms + default)
    assert found.covered == sum("norm" in name for name in truth)
    assert not [name for name in verdicts(found) if "norm" in name]


def test_one_rank_needs_no_rules() -> None:
    found = infer(llama(1, rng()), 1)
    assert (found.proposals, found.patterns.rules) == ((), ())
    with pytest.raises(PlanError, match="2 tensor-parallel ranks"):
        infer_sources(ranks_of(llama(2, rng()), 2)[:1])


@pytest.mark.parametrize(
    "name",
    ["a*b", "{n}.weight", 'quote".weight', "back\\slash.0", "tab\t.\x7f.w", "ü.😀.weight", "007.w"],
)
def test_strange_names(name: str) -> None:
    truth = {name: (states((4,), rng()), Replicate())}
    found = infer(truth)
    (rule,) = found.patterns.rules
    assert rule.matches(name, 1)
    assert not rule.matches(f"{name}x", 1)


def test_contents_are_read_only_until_they_differ() -> None:
    big = {"x.up_proj.weight": (states((3000, 400), rng()), Shard(0))}
    sources = ranks_of(big, 2)
    infer_sources(sources)
    for source in sources:
        assert source.elements_read <= (1 << 20) // 4 // 2
    same = ranks_of({"x.norm.weight": (*big["x.up_proj.weight"][:1], Replicate())}, 2)
    infer_sources(same)
    assert [source.elements_read for source in same] == [3 * 3000 * 400] * 2


KINDS: list[tuple[str, Pattern]] = [
    ("q_proj.weight", Shard(0)),
    ("up_proj.weight", Shard(0)),
    ("lm_head.weight", Shard(0)),
    ("down_proj.weight", Shard(1)),
    ("input_layernorm.weight", Replicate()),
    ("router.weight", Replicate()),
    ("down_proj.bias", Replicate()),
    ("up_proj.bias", Shard(0)),
    ("gate_up_proj.weight", ShardNC(0, ratio=(1, 1))),
    ("gate_up_proj.weight", Shard(0)),
    ("fc1.weight", ShardNC(0, ratio=(1, 1))),
    ("fc1.weight", Shard(0)),
    ("qkv_proj.weight", ShardNC(0, ratio=(2, 1, 1))),
    # names that say nothing may lie in any way
    *(
        (name, pattern)
        for name in ("a.w", "b.w", "c.v")
        for pattern in (
            Replicate(),
            Shard(0),
            Shard(1),
            ShardNC(0, ratio=(1, 1)),
            ShardNC(1, ratio=(2, 1)),
        )
    ),
]


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Parameters that lie as their names say, or in any way where these say nothing."""
    degree = draw(st.integers(2, 4))
    generator = rng(draw(st.integers(0, 1000)))
    truth: dict[str, Any] = {}
    for index, (name, pattern) in enumerate(
        draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    ):
        ndim = 1 if name.endswith((".bias", "norm.weight", ".v")) else 2
        if ndim == 1 and getattr(pattern, "dim", 0) == 1:
            continue
        unit = (
            12 * degree
            if isinstance(pattern, ShardNC)
            else draw(st.sampled_from((degree, 2 * degree, 7)))
        )
        shape = [draw(st.sampled_from((3, 4, 12))) for _ in range(ndim)]
        if not isinstance(pattern, Replicate):
            shape[pattern.dim] = unit
        layer = draw(st.integers(0, 2))
        kind = draw(st.sampled_from(("trained", "constant", "repeated")))
        values = states(tuple(shape), generator) if kind == "trained" else constant(tuple(shape))
        even = isinstance(pattern, Shard) and shape[pattern.dim] % degree == 0
        if kind == "repeated" and even:  # ranks that were seeded alike
            part = [n // degree if d == pattern.dim else n for d, n in enumerate(shape)]
            once = states(tuple(part), generator)
            values = {s: np.concatenate([v] * degree, axis=pattern.dim) for s, v in once.items()}
        truth[f"layers.{layer}.m{index}.{name}"] = (values, pattern)
    return truth, degree


@given(models())
@settings(max_examples=150, deadline=None)
def test_certain_is_true(model: tuple[dict[str, Any], int]) -> None:
    truth, degree = model
    found = infer(truth, degree)
    assert verdicts(found).keys() == truth.keys()
    for one in found.proposals:
        for name in one.parameters:
            values, pattern = truth[name]
            held = {state: cut(values[state], pattern, degree) for state in STATES}
            if one.pattern == Replicate():
                for state in STATES:
                    assert all(part.tobytes() == held[state][0].tobytes() for part in held[state])
            if one.confidence == "certain":
                for state in STATES:
                    assert one.rule is not None
                    joined = united(one.rule, name, held[state])
                    assert joined.shape == values[state].shape
                    assert joined.tobytes() == values[state].tobytes()


@given(models())
@settings(max_examples=50, deadline=None)
def test_every_answer_fits_and_reads_back(model: tuple[dict[str, Any], int]) -> None:
    truth, degree = model
    found = infer(truth, degree)
    answered = Patterns.parse(uncommented(found.toml()))
    expected = found.patterns.rules + tuple(
        one.answered(one.alternatives[0]) for one in found.questions if one.alternatives
    )
    assert [(rule.match, rule.tp) for rule in answered.rules] == [
        (rule.match, rule.tp) for rule in expected
    ]
    sources = ranks_of(truth, degree)
    kinds = {finding.kind for finding in check_sources(sources, answered).findings}
    assert kinds <= {"unmatched", "replicas_differ"}
    for one in found.questions:
        for pattern in one.alternatives:
            for name in one.parameters:
                values, true = truth[name]
                shapes = [part.shape for part in cut(values["fp32"], true, degree)]
                one.answered(pattern).observed(name, shapes)


# check


def rules(*pairs: tuple[str, str]) -> Patterns:
    return Patterns.parse("".join(f'[[rule]]\nmatch = "{m}"\ntp = "{tp}"\n' for m, tp in pairs))


GOOD = (
    ("**norm.weight", "replicate"),
    ("**.o_proj.bias", "replicate"),
    ("**.o_proj.weight", "shard(1)"),
    ("**.down_proj.weight", "shard(1)"),
    ("**", "shard(0)"),
)


def test_check_ok() -> None:
    found = check_sources(ranks_of(llama(2, rng()), 2), rules(*GOOD))
    assert found.ok
    assert found.summary().endswith("nothing wrong")
    assert (found.rules, found.replicas) == (5, 5)
    validate(found.to_json(), "patterncheck")


def test_check_finds_everything() -> None:
    sources = ranks_of(llama(2, rng()), 2)
    values = sources[1]._arrays["model.norm.weight", "adam_v"].copy()
    values[3] += np.float32(0.5)
    sources[1]._arrays["model.norm.weight", "adam_v"] = values
    patterns = rules(
        ("*.norm.weight", "replicate"),
        ("*.norm.*", "shard(0)"),
        ("**.input_layernorm.weight", "shard(1)"),
        ("nothing.{n}", "replicate"),
        ("**.self_attn.*.weight", "shard(0)"),
        ("**.bias", "shard(0)"),
    )
    found = check_sources(sources, patterns)
    kinds = [finding.kind for finding in found.findings]
    assert kinds[:2] == ["shadowed", "unused"]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "shadowed": 1,
        "unused": 1,
        "shape": 2,
        "unmatched": 7,
        "replicas_differ": 1,
    }
    (differ,) = [one for one in found.findings if one.kind == "replicas_differ"]
    assert differ.subject == "model.norm.weight"
    assert "adam_v of ranks 0 and 1" in differ.message
    assert "1 of 19 elements differ, first at (3,), max |difference| 0.5" in differ.message
    validate(found.to_json(), "patterncheck")
    assert len(found.summary().splitlines()) == len(kinds) + 1


def test_check_lets_declared_differences_pass() -> None:
    sources = ranks_of({"a.norm.weight": (states((4,), rng()), Replicate())}, 2)
    sources[1]._arrays["a.norm.weight", "fp32"] = np.zeros(4, np.float32)
    for tp, ok in ((Replicate("first"), True), (Partial(), True), (Replicate(), False)):
        rule = Rule(rules(("**", "replicate")).rules[0].match, tp)
        assert check_sources(sources, Patterns((rule,))).ok is ok


# explain


def test_explain() -> None:
    sources = ranks_of(llama(2, rng()), 2)
    name = "model.layers.0.self_attn.o_proj.weight"
    found = explain_sources(sources, [name, "model.norm.weight"], known=rules(GOOD[0]))
    validate(found.to_json(), "explanation")
    matrix, norm = found.parameters
    assert (matrix.pattern, matrix.origin, matrix.confidence) == (Shard(1), "inferred", "certain")
    assert (matrix.shapes, matrix.whole) == (((19, 4), (19, 4)), (19, 8))
    assert (norm.pattern, norm.origin, norm.problem) == (Replicate(), "rules", "")
    assert "  origin      rules: **norm.weight" in norm.words()
    assert "  ranks hold  2 x 19x4" in matrix.words()
    assert found.ok
    # only what matters for these was read
    assert sources[0].elements_read < 6 * 19 * 20
    wrong = explain_sources(sources, [name], known=rules(("**", "shard(0)")))
    assert not wrong.ok
    assert wrong.parameters[0].problem == "the rule says shard(0), the evidence shard(1)"
    with pytest.raises(ParameterNotFoundError, match=r"Did you mean 'model\.norm\.weight'"):
        explain_sources(sources, ["model.norm.weigth"])


def test_explain_padding_and_questions() -> None:
    truth = {
        "a.lm_head.weight": (states((12, 5), rng()), Shard(0)),
        "a.thing": (states((4, 4), rng()), Shard(0)),
    }
    pad = Patterns.parse(
        '[[rule]]\nmatch = "a.lm_head.weight"\ntp = "shard(0)"\npad = {dim = 0, true_size = 11}'
    )
    found = explain_sources(ranks_of(truth, 2), known=pad)
    assert [one.whole for one in found.parameters] == [(11, 5), None]
    assert found.parameters[1].pattern is None
    assert not found.ok
    text = "\n".join(found.parameters[1].words())
    assert "answers     shard(0) | shard(1) | partial" in text
    assert json.loads(json.dumps(found.to_json()))["parameters"][1]["tp"] is None


def test_names() -> None:
    dims = {
        "h.0.attn.c_attn.weight": 0,
        "model.layers.1.self_attn.o_proj.weight": 1,
        "3.self_attention.dense.weight": 1,
        "3.self_attention.dense.bias": None,
        "3.mlp.dense_4h_to_h.bias": None,
        "3.mlp.dense_h_to_4h.bias": 0,
        "model.layers.1.self_attn.q_norm.weight": None,
        "transformer.ln_f.bias": None,
        "encoder.final_layernorm.weight": None,
    }
    for name, dim in dims.items():
        found = hint(name)
        assert found is not None
        assert found.dim == dim
    assert hint("encoder.dense.weight") is None
    assert hint("model.enormous.weight") is None


def test_examples_in_the_docstrings_are_true() -> None:
    for module in (conventions, grouping):
        result = doctest.testmod(module)
        assert result.attempted
        assert not result.failed
