"""A source of arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ucpstore.contracts import CommonState, Fragment, ParameterSpec, Role, SourceFile, StateSpec
from ucpstore.errors import LayoutError
from ucpstore.layout.region import Region

ROLES = {"fp32": Role.MASTER_WEIGHT, "adam_m": Role.FIRST_MOMENT, "adam_v": Role.SECOND_MOMENT}


class ArraySource:
    """Parameters with the states ``fp32``, ``adam_m`` and ``adam_v``; counts what is read."""

    format = "arrays"
    url = "memory://arrays"

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        *,
        aliases: Mapping[str, tuple[str, ...]] | None = None,
        groups: Sequence[Sequence[str]] | None = None,
        steps: Mapping[str, int] | None = None,
        states: Sequence[str] = tuple(ROLES),
        is_local: bool = True,
        frozen: Sequence[str] = (),
    ) -> None:
        self.arrays = {
            (fqn, state): np.roll(values, i) if i else values
            for fqn, values in arrays.items()
            for i, state in enumerate(states)
        }
        self.is_local = is_local
        self.parameters = {
            fqn: ParameterSpec(
                fqn,
                {
                    state: StateSpec(state, ROLES[state], values.shape, str(values.dtype))
                    for state in states
                },
                trainable=fqn not in frozen,
                aliases=(aliases or {}).get(fqn, ()),
                pattern="unique",
            )
            for fqn, values in arrays.items()
        }
        document: dict[str, Any] = {
            "param_groups": [
                {"lr": 0.1 * (i + 1), "params": list(names)}
                for i, names in enumerate(groups if groups is not None else [list(arrays)])
            ],
            "steps": {fqn: (steps or {}).get(fqn, 3) for fqn in arrays},
            "framework": {"name": "arrays", "buffer_names": []},
        }
        self.common = CommonState(document)
        self.parallelism: Mapping[str, Any] = {}
        self.warnings: Sequence[str] = []
        self.elements_read = 0
        self.compared = 0

    def files(self) -> Sequence[SourceFile]:
        return [SourceFile("all", 1, "1")]

    def current_files(self) -> Sequence[SourceFile]:
        return self.files()

    def read(
        self, fqn: str, state: str, region: Region, out: np.ndarray, *, compare: bool = False
    ) -> None:
        values = self.arrays[fqn, state]
        if not Region.full(values.shape).contains(region) or out.shape != region.sizes:
            raise LayoutError(f"{fqn} {region} is not inside {values.shape}")
        assert out.dtype == values.dtype
        out[...] = values[region.slices]
        self.elements_read += region.volume
        self.compared += compare

    def cuts(self, fqn: str, state: str) -> tuple[tuple[int, ...], ...]:
        return tuple((size // 2,) if size > 1 else () for size in self.arrays[fqn, state].shape)

    def fragments(self, fqn: str, state: str, region: Region) -> Sequence[Fragment]:
        size = self.arrays[fqn, state].itemsize
        return [
            Fragment(region, fqn, region.offsets[0] if region.ndim else 0, region.volume * size)
        ]

    def count_reads(self, fqn: str, state: str) -> int:
        return 1

    def digest(self, fqn: str, state: str) -> str | None:
        return f"{fqn}:{state}"

    def joint_digests(self) -> Mapping[tuple[tuple[str, str], ...], str]:
        return {}
