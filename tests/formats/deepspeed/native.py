"""Native targets for tests: written without the engine, and compared with DeepSpeed's own files."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.deepspeed_runs import Case
from ucpstore import Layout
from ucpstore.contracts import Source
from ucpstore.formats.deepspeed.writer import DeepSpeedTarget
from ucpstore.io import open_files
from ucpstore.layout.rules import Patterns

__all__ = ["differences", "patterns_of", "write"]

_AUTOTP = """
[[rule]]
match = ["**norm.weight", "**embed_tokens.weight"]
tp = "replicate"
[[rule]]
match = "**q_proj.weight"
tp = {{pattern = "shard", dim = 0, unit = {query}}}
[[rule]]
match = ["**k_proj.weight", "**v_proj.weight"]
tp = {{pattern = "shard", dim = 0, unit = {key}}}
[[rule]]
match = "**o_proj.weight"
tp = {{pattern = "shard", dim = 1, unit = {query}}}
[[rule]]
match = "**down_proj.weight"
tp = "shard(1)"
[[rule]]
match = ["**gate_proj.weight", "**up_proj.weight", "lm_head.weight"]
tp = "shard(0)"
"""

_PIPELINE = """
[[rule]]
match = ["tied_modules.**", "*.norm.weight", "*.down.bias", "*.adapter", "6.weight"]
tp = "replicate"
[[rule]]
match = "*.down.weight"
tp = "shard(1)"
[[rule]]
match = "*.up.*"
tp = "shard(0)"
"""


def patterns_of(case: Case) -> Patterns:
    """How the parameters of a run's model lie on tensor-parallel ranks; key-value heads stay whole."""
    if case.model == "pipeline":
        return Patterns.parse(_PIPELINE)
    sizes = dict(case.sizes)
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    query = head * sizes["num_attention_heads"] // sizes["num_key_value_heads"]
    return Patterns.parse(_AUTOTP.format(query=query, key=head))


def write(
    source: Source, dest: Path, layout: Layout, patterns: Patterns | None = None
) -> DeepSpeedTarget:
    """Write every file here and now, and commit."""
    target = DeepSpeedTarget(open_files(str(dest)), source, layout, patterns)
    target.begin("sha256:" + "0" * 64)
    records = {task.index: target.write(task, source) for task in target.tasks()}
    target.publish(list(records.values()))
    target.commit(records)
    return target


def differences(real: Path, ours: Path) -> dict[str, str]:
    """What our files of a tag have otherwise than DeepSpeed's: path inside a file -> in words."""
    theirs = {path.name: path for path in real.glob("*.pt")}
    mine = {path.name: path for path in ours.glob("*.pt")}
    if not any("-model_00-" in name for name in theirs):  # a topology without a model axis
        mine = {re.sub("-model_00-model_", "-model_", name): path for name, path in mine.items()}
    found = dict.fromkeys(theirs.keys() ^ mine.keys(), "only on one side")
    for name in theirs.keys() & mine.keys():
        left, right = (torch.load(p, weights_only=False) for p in (theirs[name], mine[name]))
        found.update(_compare(left, right, ""))
    return found


def _compare(left: Any, right: Any, path: str) -> Iterator[tuple[str, str]]:
    if torch.is_tensor(left) and torch.is_tensor(right):
        if left.dtype != right.dtype or left.shape != right.shape:
            yield path, f"{left.dtype} {list(left.shape)}, {right.dtype} {list(right.shape)}"
        elif (
            left.contiguous()
            .view(-1)
            .view(torch.uint8)
            .ne(right.contiguous().view(-1).view(torch.uint8))
            .any()
        ):
            yield path, "values"
    elif isinstance(left, dict) and isinstance(right, dict):
        if isinstance(left, OrderedDict) and list(left) != list(right):
            yield path, f"order: {list(left)}, {list(right)}"
        for key in {**left, **right}:
            if key not in left or key not in right:
                yield f"{path}/{key}", "missing" if key in left else "extra"
            else:
                yield from _compare(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if (type(left), len(left)) != (type(right), len(right)):
            yield path, f"{type(left)} of {len(left)}, {type(right)} of {len(right)}"
        for index, (a, b) in enumerate(zip(left, right, strict=False)):
            yield from _compare(a, b, f"{path}/{index}")
    elif hasattr(left, "__dict__") and type(left) is type(right) and not isinstance(left, int):
        yield from _compare(vars(left), vars(right), path)
    elif left != right:
        yield path, f"{left!r:.60}, {right!r:.60}"
