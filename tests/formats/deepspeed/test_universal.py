"""Infos of every version as rules; what an untrusted one may not do."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.deepspeed.test_tensor_parallel import affine, assemble, children, table
from tests.schemas import validate
from ucpstore.errors import Kind, PatternError, UcpStoreError
from ucpstore.formats.deepspeed.autotp import TensorParallel
from ucpstore.formats.deepspeed.universal import rules_of
from ucpstore.formats.torchfile import StubObject
from ucpstore.layout.patterns import Partial, Replicate, Shard, ShardNC
from ucpstore.layout.rules import Padding, Patterns

VOCABULARY = {
    "original_vocab_size": 13,
    "padded_vocab_size": 16,
    "vocabulary_parameter_patterns": ["embed.weight"],
}
OLD = {
    "universal_checkpoint_version": 0.1,
    **VOCABULARY,
    "parameter_to_average_patterns": [r"\d+.norm.weight"],
    "parameter_with_row_parallelism_patterns": [r"\d+.down.weight"],
}
NEW = {
    **OLD,
    "universal_checkpoint_version": 0.4,
    "tp_replicated_parameter_patterns": [r"^1\.norm\.weight$"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+.up.weight", r"\d+.up.bias"],
    "parameter_with_sub_params": [
        {"patterns": ["^1\\.qkv$"], "shape": [(24, 12, 12), -1], "partition_dim": 0},
        {"patterns": ["^2\\.qkv$"], "shape": [(24, 12, 12), -1], "partition_dim": 0},
    ],
    "sub_param_shard_widths": {
        "^1\\.qkv$": [[16, 8], [8, 4], [8, 4]],
        "^2\\.qkv$": [[16, 8], [8, 4], [8, 4]],
    },
}


@pytest.mark.parametrize("version", [0.1, 0.2, 0.3, 0.4])
def test_lists_of_every_version(version: float) -> None:
    rules = rules_of({**OLD, "universal_checkpoint_version": version}, 2)
    validate(rules.to_json(), "patterns")
    assert rules.rule("3.norm.weight", (4,)).tp == Partial()
    assert rules.rule("3.down.weight", (4, 4)).tp == Shard(1)
    assert rules.rule("3.up.weight", (4, 4)).tp == Shard(0)
    assert rules.rule("embed.weight", (13, 4)).pad == Padding(0, 13, size=16)
    with pytest.raises(PatternError, match=r"no rule says how '3.up.bias'"):
        rules.rule("3.up.bias", (4,))


def test_the_newest_lists() -> None:
    rules = rules_of(NEW, 2)
    validate(rules.to_json(), "patterns")
    assert rules.rule("1.norm.weight", (4,)).tp == Replicate()
    assert rules.rule("1.up.bias", (4,)).tp == ShardNC(0, ratio=(1, 1))
    assert rules.rule("1.bias", (4,)).tp == Shard(0)  # norms are named: other vectors are cut
    fused = rules.rule("1.qkv", (48, 2))
    assert fused is rules.rule("2.qkv", (48, 2))
    assert fused.tp == ShardNC(0, (24, 12, 12), ((16, 8), (8, 4), (8, 4)), units=(8, 4, 4))
    # three key-value heads: whole ones, on any number of ranks
    assert fused.held("1.qkv", (48, 2), 3).resolved().tp.split((48, 2), 3) == ((16, 2),) * 3


def test_one_rank_writes_no_lists_and_gets_no_default() -> None:
    """Megatron at tp 1 names the vocabulary only: nothing tells what a second rank would hold."""
    rules = rules_of({"universal_checkpoint_version": 0.2, **VOCABULARY}, 1)
    assert [rule.origin for rule in rules.rules] == ["vocabulary_parameter_patterns"]
    held = TensorParallel({"universal_checkpoint_version": 0.2, **VOCABULARY}, 1)
    assert held.merge("3.up.weight", children([table(4, 4)])).pattern == ""
    assert held.merge("embed.weight", children([table(16, 2)])).geometry.shape == (13, 2)
    assert rules_of(NEW, 1).find("3.down.weight", 2) is not None


@pytest.mark.parametrize(
    ("multiple", "expected"),
    [(8, Padding(0, 13, multiple=8, size=16)), (3, Padding(0, 13, size=16)), (None, None)],
)
def test_megatrons_args_tell_the_multiple(multiple: Any, expected: Padding | None) -> None:
    """Only where it makes the padded size of this run; ``args`` is an inert stand-in of a Namespace."""
    namespace = StubObject(
        "argparse", "Namespace", state={"make_vocab_size_divisible_by": multiple}
    )
    rules = rules_of(NEW, 2, {"args": namespace})
    assert rules.rule("embed.weight", (13, 2)).pad == (expected or Padding(0, 13, size=16))
    if multiple == 8:
        assert rules.held("embed.weight", (13, 2), 4).shape == (32, 2)


def test_a_vocabulary_lies_as_the_other_lists_say() -> None:
    """The strip comes on top of any list; tables of other sizes are not padded."""
    info = {
        **VOCABULARY,
        "vocabulary_parameter_patterns": ["embed"],
        "tp_replicated_parameter_patterns": ["embed.all"],
        "parameter_with_row_parallelism_patterns": ["embed.row"],
    }
    rules = TensorParallel(info, 2)
    whole = table(16, 6)
    merged = rules.merge("embed.row", children(parts := np.split(whole, 2, 1)))
    assert (assemble(merged.geometry, parts) == whole[:13]).all()
    merged = rules.merge("embed.all", children([whole, whole]))
    assert (merged.pattern, merged.geometry.shape) == ("replicate pad(0)", (13, 6))
    merged = rules.merge("embed.position", children(np.split(table(12, 6), 2)))
    assert (merged.pattern, merged.geometry.shape) == ("shard(0)", (12, 6))
    patterns = Patterns.from_json(validate(rules.patterns().to_json(), "patterns"))
    for fqn, shape, words in [
        ("embed.row", (13, 6), "pad(0: 13), tp: shard(1)"),
        ("embed.all", (13, 6), "pad(0: 13), tp: replicate"),
        ("embed.position", (12, 6), "tp: shard(0)"),
    ]:
        assert patterns.held(fqn, shape, 2).words == words


def test_maps_alone_become_rules() -> None:
    """Without lists the pieces tell; what is no known pattern stays as boxes, for these ranks only."""
    split = affine(
        "1.up",
        (6, 3),
        ((4, 3), ([4, 3], [0, [3, 1]], [0, [3, 1]])),
        ((2, 3), ([2, 3], [12, [3, 1]], [0, [3, 1]])),
    )
    shared = affine(
        "attn",
        (10, 3),
        ((8, 3), ([4, 3], [0, [3, 1]], [0, [3, 1]]), ([4, 3], [18, [3, 1]], [12, [3, 1]])),
        ((6, 3), ([2, 3], [12, [3, 1]], [0, [3, 1]]), ([4, 3], [18, [3, 1]], [6, [3, 1]])),
    )
    split["affine_map"]["params"].update(shared["affine_map"]["params"])
    rules = TensorParallel(split, 2)
    rules.merge("1.up", children([table(4, 3), table(2, 3)]))
    rules.merge("attn", children([table(8, 3), table(6, 3)]))
    document = validate(rules.patterns().to_json(), "patterns")
    assert [rule["tp"]["pattern"] for rule in document["rules"]] == ["shard", "explicit", "shard"]
    assert document["rules"][0] == {
        "match": ["{n}.up"],
        "tp": {"pattern": "shard", "dim": 0, "unit": 2},
    }
    patterns = Patterns.from_json(document)
    assert patterns.held("attn", (10, 3), 2).tp.split((10, 3), 2) == ((8, 3), (6, 3))
    with pytest.raises(PatternError, match="'attn' on 3 tensor-parallel ranks: explicit") as caught:
        patterns.held("attn", (10, 3), 3)
    assert caught.value.kind == Kind.SHAPE


@pytest.mark.parametrize("name", ["weird.{n}.*", "a" * 1500, "layers.007.norm"])
def test_names_that_are_no_templates(name: str) -> None:
    rules = TensorParallel({"tp_replicated_parameter_patterns": [rf"^{re.escape(name)}$"]}, 2)
    rules.merge(name, children([table(3), table(3)]))
    patterns = Patterns.from_json(validate(rules.patterns().to_json(), "patterns"))
    assert patterns.rule(name, (3,)).tp == Replicate()
    assert patterns.find(f"{name}x", 1).tp == Shard(0)  # type: ignore[union-attr]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.data())
def test_a_malformed_info_is_a_clear_error(data: st.DataObject) -> None:
    info = {**NEW, **affine("w", (2,), ((1,), ([1], [0, [1]], [0, [1]])))}
    key = data.draw(st.sampled_from(sorted(info)))
    inner = info[key]
    if (
        isinstance(inner, list)
        and inner
        and isinstance(inner[0], dict)
        and data.draw(st.booleans())
    ):
        field = data.draw(st.sampled_from(sorted(inner[0])))
        info[key] = [{**inner[0], field: data.draw(ANYTHING)}]
    else:
        info[key] = data.draw(ANYTHING)
    client = data.draw(st.just({}) | st.dictionaries(st.just("args"), ANYTHING))
    with contextlib.suppress(UcpStoreError):  # and no other error
        rules = TensorParallel(info, 2, client=client)
        for fqn in ("1.norm.weight", "1.qkv", "embed.weight", "w"):
            rules.merge(fqn, children([table(24, 2), table(24, 2)]))
        validate(rules.patterns().to_json(), "patterns")
