"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest

from ucpstore.layout import geometry, matching, names, patterns, rules


def test_examples():
    for module in (geometry, matching, names, patterns, rules):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0
