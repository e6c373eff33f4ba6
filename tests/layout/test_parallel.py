"""Layouts: what is none is refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ucpstore import Layout
from ucpstore.errors import PlanError


@pytest.mark.parametrize(
    "text",
    [
        "dp=" + "9" * 5000,
        "dp=²",
        "dp",
        "=",
        "tied=e:0;e:7",
        "tied=e",
        "tied=",
        "stages=",
        "loss_scale=1e400",
        "pipeline=1",
    ],
)
def test_words_that_are_no_layout(text: str) -> None:
    with pytest.raises(PlanError, match="layout"):
        Layout.parse(text)


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": ["fp32"]},
        {"grad_accum_dtype": {}},
        {"pipeline": 1},
        {"fused_adam": 0},
        {"dp": np.int64(2)},
        {"dp": True},
        {"tied": [("e", (0,)), ("e", (7,))]},
        {"tied": {"e": [True]}},
        {"stages": "0:1", "pp": 2},
        {"partition": [1]},
    ],
)
def test_values_that_are_no_layout(values: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="layout"):
        Layout(**values)


def test_a_layer_that_uses_a_tied_module_twice_is_one() -> None:
    assert Layout(tied={"e": (7, 0, 7)}).uses == {"e": (0, 7)}
