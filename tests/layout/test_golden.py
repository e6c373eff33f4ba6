"""Golden vectors: geometries of real layouts and their pieces, worked out by hand.

The ZeRO files follow DeepSpeed's formulas (``runtime/zero/stage_1_and_2.py``, ``stage3.py``); fragment
addresses and sub-groups are those of a real run with groups of 173 and 18 elements on two ranks.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ucpstore.layout.geometry import Piece, Strided, geometry_from_json
from ucpstore.layout.patterns import Axis, compose, pattern_from_json
from ucpstore.layout.region import Region

FILES = sorted((Path(__file__).parent / "golden").glob("*.json"))
CASES = [
    pytest.param(tensor, id=f"{file.stem}: {name}")
    for file in FILES
    for name, tensor in json.loads(file.read_text())["tensors"].items()
]


def test_there_are_golden_files():
    assert len(FILES) == 4
    assert len(CASES) == 16


@pytest.mark.parametrize("tensor", CASES)
def test_pieces(tensor: dict[str, Any]):
    geometry = geometry_from_json(tensor["geometry"])
    assert geometry.faults() == []
    assert geometry.count() == tensor["count"]
    assert list(map(list, geometry.cuts())) == tensor.get("cuts", [[] for _ in geometry.shape])
    for query in tensor["queries"]:
        region = Region(*map(tuple, query["region"]))
        expected = [
            Piece(Region(tuple(offsets), tuple(sizes)), slot, offset, tuple(strides))
            for offsets, sizes, slot, offset, strides in query["pieces"]
        ]
        assert list(geometry.query(region, query.get("copy", 0))) == expected


@pytest.mark.parametrize("tensor", [case for case in CASES if "axes" in case.values[0]])
def test_patterns_compose_to_the_same_geometry(tensor: dict[str, Any]):
    slots = itertools.count()
    axes = [Axis(name, size, pattern_from_json(p)) for name, size, p in tensor["axes"]]
    shape = tuple(tensor["shape"])
    geometry = compose(shape, axes, lambda at, held: Strided(held, next(slots)))
    assert geometry.to_json() == tensor["geometry"]
