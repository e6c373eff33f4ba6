"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest

from ucpstore.layout import geometry, patterns


def test_examples():
    for module in (geometry, patterns):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0
