"""Rules tell of the names before a mapping: they must not decide how the parameters behind it are cut."""

from __future__ import annotations

from pathlib import Path

import pytest

import ucpstore
from tests.deepspeed_runs import deepspeed_run
from ucpstore import Layout, Mapping
from ucpstore.errors import PatternError


def everything_renamed(names: list[str]) -> Mapping:
    others = [name for name in names if not name.startswith("model.")]
    keeps = "".join(f'[[keep]]\nname = "{name}"\n' for name in others)
    return Mapping.from_toml(f'[[rename]]\nfrom = "model.{{rest**}}"\nto = "net.{{rest}}"\n{keeps}')


def test_rules_of_the_old_names_are_left_out(tmp_path: Path) -> None:
    run = deepspeed_run("tp2-s1-fp32-dp2")
    plain = ucpstore.open(run.path)
    assert "patterns" in plain.common
    mapping = everything_renamed(list(plain))
    mapped = ucpstore.open(run.path, mapping=mapping)
    assert "patterns" not in mapped.common
    assert any("tell of the names before" in text for text in mapped.warnings)
    with pytest.raises(PatternError, match="the source has no patterns"):
        ucpstore.convert(
            run.path, tmp_path / "native", to="deepspeed", layout=Layout(tp=2), mapping=mapping
        )
    assert not (tmp_path / "native" / "latest").exists()


def test_rules_for_the_new_names_count(tmp_path: Path) -> None:
    run = deepspeed_run("tp2-s1-fp32-dp2")
    plain = ucpstore.open(run.path)
    mapping = everything_renamed(list(plain))
    mapping = mapping.ordered([n.replace("model.", "net.", 1) for n in plain])
    report = ucpstore.convert(
        run.path,
        tmp_path / "native",
        to="deepspeed",
        layout=Layout(tp=2, dp=1),
        mapping=mapping,
        patterns="hf-llama",
    )
    assert report.committed
    back = ucpstore.open(tmp_path / "native")
    for fqn, parameter in plain.items():
        there = back[fqn.replace("model.", "net.", 1)]
        for state in ("fp32", "adam_m", "adam_v"):
            if state in parameter:
                assert there[state][...].tobytes() == parameter[state][...].tobytes()
