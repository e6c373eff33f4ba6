"""Models cut over tensor-parallel ranks by rules that the test knows: the truth that inference is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.fakes import ArraySource
from ucpstore.contracts import Arrays
from ucpstore.layout.geometry import Strided
from ucpstore.layout.patterns import Partial, Pattern, Replicate, Shard, ShardNC
from ucpstore.layout.region import Region
from ucpstore.layout.rules import Rule

__all__ = ["STATES", "Truth", "cut", "ranks_of", "united"]

STATES = ("fp32", "adam_m", "adam_v")
Truth = Mapping[str, tuple[Mapping[str, Arrays], Pattern]]
"""Per parameter its whole states and how it lies on the ranks."""


def states(shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, Arrays]:
    """Random values for a trained parameter."""
    weight, m = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    return {"fp32": weight, "adam_m": m * np.float32(0.01), "adam_v": m * m}


def constant(shape: tuple[int, ...], value: float = 1.0) -> dict[str, Arrays]:
    """A parameter that was initialised and never trained."""
    zeros = np.zeros(shape, np.float32)
    return {"fp32": np.full(shape, value, np.float32), "adam_m": zeros, "adam_v": zeros}


def cut(whole: Arrays, pattern: Pattern, degree: int) -> list[Arrays]:
    """What every rank holds; written with numpy alone."""
    if isinstance(pattern, Replicate | Partial):
        return [whole] * degree
    if isinstance(pattern, Shard):
        widths = pattern.widths or [
            len(p) for p in np.array_split(range(whole.shape[pattern.dim]), degree)
        ]
        return np.split(whole, np.cumsum(widths)[:-1], axis=pattern.dim)
    assert isinstance(pattern, ShardNC)
    length = whole.shape[pattern.dim]
    sizes = pattern.sections or [
        length * r // sum(pattern.ratio or ()) for r in pattern.ratio or ()
    ]
    sections = np.split(whole, np.cumsum(sizes)[:-1], axis=pattern.dim)
    slices = [np.array_split(section, degree, axis=pattern.dim) for section in sections]
    return [
        np.concatenate([section[rank] for section in slices], axis=pattern.dim)
        for rank in range(degree)
    ]


def ranks_of(truth: Truth, degree: int) -> list[ArraySource]:
    """One source per rank."""
    held: list[dict[str, dict[str, Arrays]]] = [{} for _ in range(degree)]
    for fqn, (values, pattern) in truth.items():
        for state, whole in values.items():
            for rank, local in enumerate(cut(whole, pattern, degree)):
                held[rank].setdefault(fqn, {})[state] = local
    return [ArraySource(arrays, parallelism={"tp": degree}) for arrays in held]


def united(rule: Rule, fqn: str, locals_: Sequence[Arrays]) -> Arrays:
    """The whole tensor that a rule makes of the ranks' local tensors, element by element."""
    leaves = [Strided(local.shape, rank) for rank, local in enumerate(locals_)]
    geometry = rule.unite(fqn, leaves).geometry
    out = np.full(geometry.shape, np.nan, locals_[0].dtype)
    for piece in geometry.query(Region.full(geometry.shape)):
        flat = np.ascontiguousarray(locals_[piece.slot]).reshape(-1)
        view = np.lib.stride_tricks.as_strided(
            flat[piece.offset :],
            piece.region.sizes,
            [stride * flat.itemsize for stride in piece.strides],
        )
        out[piece.region.slices] = view
    return out


def llama(degree: int, rng: np.random.Generator, *, trained: bool = True) -> dict[str, Any]:
    """A small LLaMA under Megatron's cuts, and biases so that all kinds occur."""
    hidden, inner, rows = 8 * degree + 3, 6 * degree, 10 * degree
    make = states if trained else lambda shape, _: constant(shape)
    truth: dict[str, Any] = {
        "model.embed_tokens.weight": (states((rows, hidden), rng), Shard(0)),
        "model.norm.weight": (make((hidden,), rng), Replicate()),
    }
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, out in (("q", 4 * degree), ("k", 2 * degree), ("v", 2 * degree)):
            truth[f"{at}self_attn.{name}_proj.weight"] = (states((out, hidden), rng), Shard(0))
            truth[f"{at}self_attn.{name}_proj.bias"] = (make((out,), rng), Shard(0))
        truth[f"{at}self_attn.o_proj.weight"] = (states((hidden, 4 * degree), rng), Shard(1))
        truth[f"{at}self_attn.o_proj.bias"] = (make((hidden,), rng), Replicate())
        for name in ("gate", "up"):
            truth[f"{at}mlp.{name}_proj.weight"] = (states((inner, hidden), rng), Shard(0))
        truth[f"{at}mlp.down_proj.weight"] = (states((hidden, inner), rng), Shard(1))
        truth[f"{at}input_layernorm.weight"] = (make((hidden,), rng), Replicate())
    return truth
