"""Nothing is silent: what a mapping leaves over, takes twice or cannot join is told, all at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.mapping.sources import ArraySource
from tests.mapping.test_reads import read, values
from ucpstore.checkpoint import Checkpoint
from ucpstore.contracts import CommonState, Source
from ucpstore.errors import Kind, LayoutError, ParameterNotFoundError, PatternError
from ucpstore.layout.region import Region
from ucpstore.mapped import map_source
from ucpstore.mapping import Mapping


def mapped(source: Source, **tables: Any) -> Source:
    return map_source(source, Mapping.from_json(tables))


def problems(source: Source, **tables: Any) -> tuple[Kind, list[str]]:
    with pytest.raises(PatternError) as caught:
        mapped(source, **tables)
    told = caught.value.context["problems"]
    for text in told[:20]:
        assert text in str(caught.value)
    return caught.value.kind, told


def abc(**options: Any) -> ArraySource:
    return ArraySource({name: values((4, 3), i) for i, name in enumerate("abc")}, **options)


def test_all_problems_of_names_are_told_at_once() -> None:
    source = ArraySource({name: values((2,)) for name in ("3.w", "1.w", "x", "y", "z", "u")})
    kind, told = problems(
        source,
        rename=[
            {"from": "{n}.w", "to": "layers.{n-3}.w"},
            {"from": "nowhere.{n}", "to": "m"},
            {"from": "nowhere.too", "to": "m", "optional": True},
            {"from": "x", "to": "same"},
        ],
        transpose=[{"from": "y", "to": "same", "dims": [0]}],
        keep=[{"name": "z"}],
        drop=[{"name": "z*"}, {"name": "z"}],
        alias=[{"name": "t", "of": "absent"}],
    )
    assert kind is Kind.UNUSED
    found = "\n".join(told)
    assert len(told) == 7
    assert "'u' is matched by no entry" in found
    assert "rename[1] matches nothing: nowhere.{n}" in found
    assert "drop[0] matches nothing: z*" in found
    assert "'z' is matched by 2 entries: keep[0], drop[1]" in found
    assert "2 names become 'same': of 'x', 'y'" in found
    assert "n is '1', with the offset -3" in found
    assert "alias[0]: no parameter of the target is called 'absent'" in found


def test_members_that_are_missing_are_named() -> None:
    arrays = {
        name: values((2,)) for name in ("0.q", "0.k", "1.q", "e.0.w", "e.2.w", "f.1.w", "f.2.w")
    }
    _, told = problems(
        ArraySource(arrays),
        fuse=[{"from": ["{n}.q", "{n}.k"], "to": "{n}.qk"}],
        stack=[
            {"from": "e.{e}.w", "to": "e.w", "over": "e"},
            {"from": "f.{e+1}.w", "to": "f.w", "over": "e"},
        ],
    )
    assert told == [
        "fuse[0]: '1.q' has no partner '1.k'",
        "stack[0]: 'e.0.w' has no sibling 'e.1.w'",
    ]


def test_what_does_not_belong_together_is_not_joined() -> None:
    fuse = [{"from": ["a", "b"], "to": "ab"}]
    rest = [{"name": "c"}]
    _, told = problems(abc(groups=[["a", "c"], ["b"]]), fuse=fuse, keep=rest)
    assert told == [
        "'ab' is made of parameters of different groups: 'a' in group 0, 'b' in group 1"
    ]
    _, told = problems(abc(groups=[["a", "c"]]), fuse=fuse, keep=rest)
    assert told == [
        "'ab' is made of parameters of different groups: 'a' in group 0, 'b' in no group"
    ]
    _, told = problems(abc(steps={"b": 4}), fuse=fuse, keep=rest)
    assert told == ["'ab' is made of parameters with different steps: 'a' 3, 'b' 4"]
    _, told = problems(abc(frozen=["b"]), fuse=fuse, keep=rest)
    assert told == ["'ab' cannot join 'a' and 'b': one is trained, the other is not"]
    arrays = {"a": values((4, 3)), "b": values((4, 3)).astype("float16"), "c": values((2,))}
    _, told = problems(ArraySource(arrays), fuse=fuse, keep=rest)
    assert "their fp32 is of float32" in told[0]
    half = abc()
    del half.parameters["b"].states["adam_v"]  # type: ignore[attr-defined]
    _, told = problems(half, fuse=fuse, keep=rest)
    assert "they have the states fp32, adam_m, adam_v and fp32, adam_m" in told[0]


@pytest.mark.parametrize(
    ("shapes", "tables", "text"),
    [
        (
            {"a": (4, 3), "b": (2, 2)},
            {"fuse": [{"from": ["a", "b"], "to": "c"}]},
            "may differ in dim 0 only",
        ),
        (
            {"a": (4, 3), "b": (3, 3)},
            {"fuse": [{"from": ["a", "b"], "to": "c", "groups": 2}]},
            "a multiple of the 2 groups",
        ),
        (
            {"a": (4, 3), "b": (2, 3)},
            {"fuse": [{"from": ["a", "b"], "to": "c", "ratio": [1, 2]}]},
            "found 4+2 indices per group, expected 2+4",
        ),
        (
            {"a": (4, 3), "b": (2, 3)},
            {"fuse": [{"from": ["a", "b"], "to": "c", "ratio": [2, 1], "unit": 3}]},
            "expected 9",
        ),
        (
            {"a": (4, 3), "b": (2, 3)},
            {"fuse": [{"from": ["a", "b"], "to": "c", "dim": 2}]},
            "expected one with dim 2",
        ),
        (
            {"a": (5, 3)},
            {"split": [{"from": "a", "to": ["b", "c"], "ratio": [1, 1]}]},
            "expected a multiple of 2",
        ),
        (
            {"e.0": (2,), "e.1": (3,)},
            {"stack": [{"from": "e.{e}", "to": "e", "over": "e"}]},
            "another shape",
        ),
        ({"a": ()}, {"unstack": [{"from": "a", "to": "a.{e}", "over": "e"}]}, "no rows"),
        ({"a": (2, 3, 4)}, {"transpose": [{"from": "a"}]}, "expected one of 2 dims"),
        ({"a": (9, 3)}, {"rotary": [{"from": "a", "heads": 3, "layout": "pairs"}]}, "even number"),
        (
            {"a": (8, 3)},
            {"rotary": [{"from": "a", "heads": 2, "layout": "pairs", "rotary_dim": 6}]},
            "at least 6 each",
        ),
    ],
)
def test_shapes_that_do_not_fit(
    shapes: dict[str, tuple[int, ...]], tables: dict[str, Any], text: str
) -> None:
    source = ArraySource({name: values(shape) for name, shape in shapes.items()})
    kind, told = problems(source, **tables)
    assert kind is Kind.SHAPE
    assert text in told[0]


def test_states_of_other_shapes_can_only_be_renamed() -> None:
    source = abc()
    spec = source.parameters["a"].states["adam_v"]
    object.__setattr__(spec, "shape", (4,))
    source.arrays["a", "adam_v"] = values((4,))
    rest = [{"name": "b"}, {"name": "c"}]
    assert mapped(source, rename=[{"from": "a", "to": "x"}], keep=rest).parameters["x"]
    _, told = problems(source, transpose=[{"from": "a"}], keep=rest)
    assert "states of different shapes" in told[0]


def test_aliases_go_where_their_parameter_goes() -> None:
    aliases = {"a": ("head.w", "head.v")}
    rest = [{"name": "b"}, {"name": "c"}]
    source = mapped(
        abc(aliases=aliases),
        rename=[{"from": "a", "to": "x"}, {"from": "head.w", "to": "y"}],
        keep=rest,
        drop=[{"name": "head.v"}],
        alias=[{"name": "z", "of": "x"}],
    )
    assert source.parameters["x"].aliases == ("y", "z")
    assert Checkpoint(source)["z"].fqn == "x"
    assert source.warnings == []
    _, told = problems(abc(aliases=aliases), keep=[{"name": "a"}, *rest])
    assert told == ["'head.w' is matched by no entry", "'head.v' is matched by no entry"]
    heads = [{"from": "head.{n*}", "to": "h.{n}"}]
    _, told = problems(abc(aliases=aliases), drop=[{"name": "a"}], rename=heads, keep=rest)
    assert len(told) == 2
    assert (
        "'head.w' is another name of 'a', but rename[0] does not take it where drop[0]" in told[0]
    )
    _, told = problems(abc(aliases=aliases), transpose=[{"from": "a"}], rename=heads, keep=rest)
    assert "where transpose[0] takes the parameter" in told[0]
    turned = mapped(
        abc(aliases=aliases), transpose=[{"from": "a"}, {"from": "head.{n*}"}], keep=rest
    )
    assert turned.parameters["a"].aliases == ("head.w", "head.v")
    _, told = problems(
        abc(aliases=aliases), keep=[{"name": "**"}], alias=[{"name": "b", "of": "a"}]
    )
    assert told == ["2 names become 'b': of 'a', 'b'"]


def test_what_is_dropped_is_told_and_leaves_the_groups() -> None:
    source = mapped(abc(), drop=[{"name": "b"}], keep=[{"name": "a"}, {"name": "c"}])
    assert list(source.parameters) == ["a", "c"]
    assert source.warnings == ["the mapping leaves out 1 parameters: b."]
    document = source.common.document
    assert document["param_groups"][0]["params"] == ["a", "c"]
    assert document["steps"] == {"a": 3, "c": 3}
    assert source.parallelism["mapping_reorders"] is True
    with pytest.raises(ParameterNotFoundError, match="under this mapping"):
        read_state(source, "b")
    with pytest.raises(ParameterNotFoundError, match="it has fp32, adam_m, adam_v"):
        read_state(source, "a", "momentum")


def test_a_group_that_loses_all_its_parameters_stays_and_is_told() -> None:
    source = mapped(
        abc(groups=[["a", "c"], ["b"]]), drop=[{"name": "b"}], keep=[{"name": "a"}, {"name": "c"}]
    )
    assert [g["params"] for g in source.common.document["param_groups"]] == [["a", "c"], []]
    assert "the mapping leaves parameter group 1 empty." in source.warnings


def read_state(source: Source, fqn: str, state: str = "fp32") -> np.ndarray:
    out = np.empty((4, 3), "float32")
    source.read(fqn, state, Region.full((4, 3)), out)
    return out


def test_a_joined_parameter_takes_the_place_of_its_first_member() -> None:
    source = ArraySource(
        {name: values((2,)) for name in ("n", "q", "m", "k", "o")},
        groups=[["o", "k", "m", "q"], ["n"]],
    )
    keep = [{"name": name} for name in "nmo"]
    fused = mapped(source, fuse=[{"from": ["q", "k"], "to": "qk"}], keep=keep)
    assert list(fused.parameters) == ["n", "qk", "m", "o"]
    groups = fused.common.document["param_groups"]
    assert [g["params"] for g in groups] == [["o", "qk", "m"], ["n"]]
    assert [g["lr"] for g in groups] == [0.1, 0.2]
    assert fused.parameters["qk"].attributes["source_names"] == ["q", "k"]
    assert "source_names" not in fused.parameters["m"].attributes
    ordered = mapped(
        source, fuse=[{"from": ["q", "k"], "to": "qk"}], keep=keep, order=["m", "qk", "o", "n"]
    )
    assert list(ordered.parameters) == ["m", "qk", "o", "n"]
    groups = ordered.common.document["param_groups"]
    assert [g["params"] for g in groups] == [["m", "qk", "o"], ["n"]]
    assert ordered.parallelism["mapping_ordered"] is True
    renamed = mapped(ordered, rename=[{"from": "{name*}", "to": "x.{name}"}])
    assert renamed.parallelism["mapping_ordered"] is True
    split = mapped(ordered, keep=keep, split=[{"from": "qk", "to": ["q", "k"], "ratio": [1, 1]}])
    assert "mapping_ordered" not in split.parallelism
    _, told = problems(
        source,
        fuse=[{"from": ["q", "k"], "to": "qk"}],
        keep=keep,
        order=["m", "qk", "qk", "x", "n"],
    )
    assert "order: names occur twice: qk" in told
    assert "order: no parameter of the target is called 'x'" in told
    assert "order does not name 'o'" in told


def test_renamed_states_keep_digests_and_cuts() -> None:
    source = mapped(
        abc(),
        rename=[{"from": "a", "to": "x"}],
        fuse=[{"from": ["b", "c"], "to": "bc"}],
    )
    assert source.digest("x", "adam_m") == "a:adam_m"
    assert source.digest("bc", "adam_m") is None
    assert source.cuts("x", "fp32") == ((2,), (1,))
    assert source.cuts("bc", "fp32") == ((2, 4, 6), (1,))
    assert source.parallelism["mapping"].startswith("sha256:")
    out = np.empty((4, 3), "float32")
    with pytest.raises(LayoutError):
        source.read("bc", "fp32", Region((6, 0), (4, 3)), out)
    with pytest.raises(LayoutError):
        source.read("bc", "fp32", Region.full((8, 3)), out)
    twice = map_source(source, Mapping.from_json({"keep": [{"name": "**"}]}))
    assert twice.parallelism["mapping"].count("sha256:") == 2


def test_descriptions_by_the_old_names_are_told() -> None:
    source = abc()
    document = dict(source.common.document)
    document["framework"] = {
        "buffer_names": ["c", "b"],
        "universal_checkpoint_info": {"tp_replicated_parameter_patterns": ["a"]},
        "module_extras": {"a._extra_state": 1},
    }
    document["param_groups"] = [{"params": ["a", "b", "c"], "param_names": ["a", "b", "c"]}]
    source.common = CommonState(document)
    found = mapped(source, rename=[{"from": "{name*}", "to": "m.{name}"}])
    framework = found.common.document["framework"]
    assert framework["buffer_names"] == ["m.b", "m.c"]
    assert "universal_checkpoint_info" not in framework
    assert len(found.warnings) == 2
    (group,) = found.common.document["param_groups"]
    assert group["params"] == group["param_names"] == ["m.a", "m.b", "m.c"]
    np.testing.assert_array_equal(read(found, "m.b"), values((4, 3), 1))
