"""Universal checkpoints for large-model training, on Zarr v3 and TensorStore.

>>> import ucpstore
>>> checkpoint = ucpstore.open("run/checkpoints")                          # doctest: +SKIP
>>> checkpoint["model.layers.0.mlp.up_proj.weight"].adam_v[10:20, :64]     # doctest: +SKIP

Names are loaded on first use: importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ucpstore.errors import UcpStoreError

if TYPE_CHECKING:
    from ucpstore.api import (
        abandon,
        convert,
        diff,
        load,
        open,  # noqa: A004
        plan,
        save_rank,
        verify,
    )
    from ucpstore.checkpoint import Checkpoint, LazyTensor, Parameter
    from ucpstore.engine.plan import Plan
    from ucpstore.engine.run import Report
    from ucpstore.inferring import check_patterns, explain_patterns, infer_patterns
    from ucpstore.layout.parallel import Layout
    from ucpstore.layout.rules import Patterns
    from ucpstore.mapping import Mapping
    from ucpstore.moving import copy, gc, steps, use_attempt
    from ucpstore.parts.deepspeed import deepspeed_parts
    from ucpstore.parts.held import Held
    from ucpstore.rankstate import LocalTensor, RankState, Transfer

__version__ = "0.1.0"

_HOME = {
    "Checkpoint": "ucpstore.checkpoint",
    "Held": "ucpstore.parts.held",
    "Layout": "ucpstore.layout.parallel",
    "LazyTensor": "ucpstore.checkpoint",
    "Mapping": "ucpstore.mapping",
    "LocalTensor": "ucpstore.rankstate",
    "Parameter": "ucpstore.checkpoint",
    "Patterns": "ucpstore.layout.rules",
    "Plan": "ucpstore.engine.plan",
    "RankState": "ucpstore.rankstate",
    "Report": "ucpstore.engine.run",
    "Transfer": "ucpstore.rankstate",
    "abandon": "ucpstore.api",
    "check_patterns": "ucpstore.inferring",
    "convert": "ucpstore.api",
    "copy": "ucpstore.moving",
    "deepspeed_parts": "ucpstore.parts.deepspeed",
    "diff": "ucpstore.api",
    "explain_patterns": "ucpstore.inferring",
    "gc": "ucpstore.moving",
    "infer_patterns": "ucpstore.inferring",
    "load": "ucpstore.api",
    "open": "ucpstore.api",
    "plan": "ucpstore.api",
    "save_rank": "ucpstore.api",
    "steps": "ucpstore.moving",
    "use_attempt": "ucpstore.moving",
    "verify": "ucpstore.api",
}

__all__ = [
    "Checkpoint",
    "Held",
    "Layout",
    "LazyTensor",
    "LocalTensor",
    "Mapping",
    "Parameter",
    "Patterns",
    "Plan",
    "RankState",
    "Report",
    "Transfer",
    "UcpStoreError",
    "__version__",
    "abandon",
    "check_patterns",
    "convert",
    "copy",
    "deepspeed_parts",
    "diff",
    "explain_patterns",
    "gc",
    "infer_patterns",
    "load",
    "open",
    "plan",
    "save_rank",
    "steps",
    "use_attempt",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ucpstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
