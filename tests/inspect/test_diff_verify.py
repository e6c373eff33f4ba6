"""Comparing and verifying: every planted fault is found by name, equal things are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import ml_dtypes
import numpy as np
import pytest

from tests.engine.test_run import convert
from tests.fakes import ArraySource
from tests.schemas import schema
from ucpstore.errors import IntegrityError, Kind
from ucpstore.inspect.diff import diff_sources
from ucpstore.inspect.verify import verify_source
from ucpstore.io.local import LocalFiles
from ucpstore.store.source import StoreSource


def arrays() -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(5)
    big = rng.standard_normal((700, 600)).astype(np.float32)
    return {
        "big": {"fp32": big, "adam_v": big * big},
        "small": {"fp32": np.float32([1, np.nan, -0.0, 0.0])},
        "ids": {"buffer": np.int64([2**24 + 1, -5])},
        "mask": {"buffer": np.array([True, False])},
    }


def checked(document: Any, name: str) -> Any:
    jsonschema.validate(document, schema(name))
    return document


def test_equal() -> None:
    result = diff_sources(ArraySource(arrays()), ArraySource(arrays()))
    assert result.equal
    assert result.counts() == {"equal": 5}
    assert checked(result.to_json(), "diff")["states"] == []


@pytest.mark.parametrize(
    ("fqn", "state", "index", "value", "max_abs"),
    [
        ("big", "adam_v", (699, 599), np.float32(-1), None),
        ("small", "fp32", (3,), np.float32(-0.0), 0.0),
        ("small", "fp32", (1,), np.float32(7), None),
        ("ids", "buffer", (0,), np.int64(2**24), 1.0),
        ("mask", "buffer", (1,), True, None),
    ],
)
def test_one_element_is_found(
    fqn: str, state: str, index: Any, value: Any, max_abs: float | None
) -> None:
    changed = arrays()
    changed[fqn][state][index] = value
    result = diff_sources(ArraySource(arrays()), ArraySource(changed))
    assert not result.equal
    (found,) = [s for s in result.states if s.status != "equal"]
    assert (found.fqn, found.state, found.first, found.changed) == (fqn, state, index, 1)
    if max_abs is not None:
        assert found.max_abs == max_abs
    assert f"{fqn} {state}" in result.summary()
    checked(result.to_json(), "diff")


def test_added_removed_reshaped_retyped() -> None:
    other = arrays()
    del other["mask"]
    other["new"] = {"fp32": np.zeros(2, np.float32)}
    other["small"]["fp32"] = other["small"]["fp32"].reshape(2, 2)
    other["ids"]["buffer"] = other["ids"]["buffer"].astype(np.int32)
    found = {
        s.fqn: s.status for s in diff_sources(ArraySource(arrays()), ArraySource(other)).states
    }
    assert found == {
        "big": "equal",
        "small": "shape",
        "ids": "dtype",
        "mask": "removed",
        "new": "added",
    }


def test_common_state_differences_name_the_path() -> None:
    left = ArraySource(
        arrays(), {"param_groups": [{"lr": 0.1, "betas": [0.9, 0.95]}], "steps": {"a": 1}}
    )
    right = ArraySource(
        arrays(), {"param_groups": [{"lr": 0.1, "betas": [0.9, 0.99]}], "steps": {"a": 1.0}}
    )
    result = diff_sources(left, right)
    assert not result.equal
    assert [text.split(":")[0] for text in result.common] == ["param_groups[0].betas[1]", "steps.a"]


def test_widened_halves_are_equal_to_their_float32() -> None:
    half = np.float32([1.5, -2.25, 3e-3]).astype(ml_dtypes.bfloat16)
    left = ArraySource({"w": {"adam_m": half}})
    assert diff_sources(left, ArraySource({"w": {"adam_m": half.astype(np.float32)}})).equal
    other = half.astype(np.float32) + np.float32([0, 0, 1e-9])
    assert not diff_sources(left, ArraySource({"w": {"adam_m": other}})).equal


def test_store_verifies_and_matches_its_source(tmp_path: Path) -> None:
    source = ArraySource(arrays(), {"a": 1}, tensors={"rng": np.arange(9, dtype=np.uint8)})
    convert(tmp_path / "s", source)
    store = StoreSource(LocalFiles(str(tmp_path / "s")))
    result = verify_source(store, against=source)
    assert result.ok, result.summary()
    assert result.digests == result.states == 6
    assert diff_sources(source, store).equal
    checked(result.to_json(), "verification")


def test_equal_digests_settle_without_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        convert(tmp_path / name, ArraySource(arrays()))
    left, right = (StoreSource(LocalFiles(str(tmp_path / name))) for name in "ab")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise IntegrityError("something was read")

    monkeypatch.setattr(StoreSource, "read", refuse)
    assert diff_sources(left, right).equal


@pytest.mark.parametrize("fault", ["flip", "truncate", "delete", "swap"])
def test_damage_is_found_and_named(tmp_path: Path, fault: str) -> None:
    convert(tmp_path / "s", ArraySource(arrays()))
    folder = tmp_path / "s" / "params" / "big"
    (victim,) = (folder / "adam_v").glob("c.*")
    if fault == "flip":
        data = bytearray(victim.read_bytes())
        data[123_456] ^= 1
        victim.write_bytes(data)
    elif fault == "truncate":
        victim.write_bytes(victim.read_bytes()[:-100])
    elif fault == "delete":
        victim.unlink()
    else:  # a whole valid object of another state: every checksum is right
        (other,) = (folder / "fp32").glob("c.*")
        victim.write_bytes(other.read_bytes())
    result = verify_source(StoreSource(LocalFiles(str(tmp_path / "s"))))
    (finding,) = result.findings
    assert (finding.fqn, finding.state) == ("big", "adam_v")
    expected = str(Kind.LOST_OBJECT if fault == "delete" else Kind.CHECKSUM)
    assert finding.kind == expected, finding
    assert "big" in result.summary()


def test_differences_from_another_checkpoint_are_findings(tmp_path: Path) -> None:
    convert(tmp_path / "s", ArraySource(arrays()))
    other = arrays()
    other["big"]["fp32"][3, 4] += 1
    del other["mask"]
    result = verify_source(StoreSource(LocalFiles(str(tmp_path / "s"))), against=ArraySource(other))
    assert {(f.fqn, f.kind) for f in result.findings} == {("big", "differs"), ("mask", "differs")}
    assert any("(3, 4)" in f.message for f in result.findings)


def test_what_only_the_other_checkpoint_has_is_a_finding(tmp_path: Path) -> None:
    convert(tmp_path / "s", ArraySource(arrays(), {"lr": 0.1}))
    store = StoreSource(LocalFiles(str(tmp_path / "s")))
    assert verify_source(store, against=ArraySource(arrays(), {"lr": 0.1})).ok
    more = arrays()
    more["head"] = {"fp32": np.zeros(3, np.float32)}
    result = verify_source(store, against=ArraySource(more, {"lr": 0.2}))
    checked(result.to_json(), "verification")
    assert [(f.fqn, f.kind) for f in result.findings] == [
        ("head", "missing"),
        ("__common__", "differs"),
    ]
    assert "lr: 0.1 against 0.2" in result.summary()


def test_summaries_hold_no_terminal_commands(tmp_path: Path) -> None:
    name = "evil\n\x1b[2J"
    left = ArraySource({name: {"fp32": np.zeros(3, np.float32)}})
    right = ArraySource({name: {"fp32": np.ones(3, np.float32)}}, {name: 1})
    for text in (
        diff_sources(left, right).summary(),
        verify_source(left, against=right).summary(),
    ):
        assert "\x1b" not in text
        assert "evil\\n\\x1b[2J" in text


def stacked_store(folder: Path) -> tuple[ArraySource, StoreSource]:
    """Eight experts of equal shape, stored as one array."""
    from ucpstore.engine.plan import make_plan
    from ucpstore.engine.run import Workers, run
    from ucpstore.store.grid import plan_arrays
    from ucpstore.store.target import ZarrTarget

    rng = np.random.default_rng(2)
    source = ArraySource(
        {
            f"experts.{i}.w": {"fp32": rng.standard_normal((300, 400)).astype(np.float32)}
            for i in range(8)
        }
    )
    planned = plan_arrays(source, stack_above=3)
    assert len(planned) == 1
    target = ZarrTarget(LocalFiles(str(folder)), planned, source=source)
    plan = make_plan(source, target, states=list(planned[0].members))
    run((source, target), plan, workers=Workers(), opener=lambda: (plan.digest, source, target))
    return source, StoreSource(LocalFiles(str(folder)))


def test_stacked_states_verify_by_their_joint_digest(tmp_path: Path) -> None:
    source, store = stacked_store(tmp_path / "s")
    result = verify_source(store, against=source)
    assert result.ok, result.summary()
    assert result.digests == result.states == 8


def test_damage_in_a_stack_names_the_members(tmp_path: Path) -> None:
    _, store = stacked_store(tmp_path / "s")
    objects = sorted((tmp_path / "s" / "params").rglob("c.*"))
    data = bytearray(objects[0].read_bytes())
    data[1000] ^= 8
    objects[0].write_bytes(data)
    (finding,) = verify_source(store).findings
    assert finding.kind == str(Kind.CHECKSUM)
    assert finding.fqn.startswith("experts.")
