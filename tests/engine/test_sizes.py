from __future__ import annotations

import math
from typing import Any

import pytest

from ucpstore.engine.sizes import format_bytes, parse_bytes
from ucpstore.errors import PlanError


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("512MB", 512_000_000),
        ("8GiB", 8 << 30),
        ("64 M", 64 << 20),
        ("1.5 KiB", 1536),
        ("100", 100),
        ("7B", 7),
        (4096, 4096),
        (1e9, 10**9),
    ],
)
def test_parse(text: str | float, amount: int) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize(
    "text",
    [
        "",
        "much",
        "-5MB",
        "5 parsecs",
        "1e9",
        "5Bi",
        "9" * 400,
        "\u0665MB",
        -1,
        True,
        math.nan,
        b"1GB",
    ],
)
def test_refused(text: Any) -> None:
    with pytest.raises(PlanError, match="amount of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0 B"), (999, "999 B"), (4_258_000_000, "4.26 GB"), (2e15, "2e+03 TB")]
)
def test_format(amount: float, text: str) -> None:
    assert format_bytes(amount) == text
