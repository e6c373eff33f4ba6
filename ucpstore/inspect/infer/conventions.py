"""What a parameter's name says about tensor parallelism, by the conventions of known model families.

Sources: Megatron-LM (Shoeybi et al. 2019: column-parallel, then row-parallel projections), the module names of
Megatron-DeepSpeed (``megatron/model``), Megatron core, BLOOM, GPT-NeoX and Hugging Face LLaMA, Mistral, Qwen, OPT,
Falcon, Phi, and ``universal_checkpoint_info`` of Megatron-DeepSpeed (``megatron/model/gpt_model.py``).
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

__all__ = ["Hint", "Name", "Part", "hint"]


class Name(StrEnum):
    """What a parameter is called after."""

    NORM = "norm"
    HEAD_NORM = "norm of an attention head"
    POSITION = "position embedding"
    ROUTER = "router"
    VOCABULARY = "vocabulary matrix"
    COLUMN = "column-parallel projection"
    MAYBE_FUSED = "column-parallel projection that may hold gate and up"
    ROW = "row-parallel projection"
    QKV = "fused query, key and value projection"
    GATE_UP = "fused gate and up projection"


class Part(StrEnum):
    """Which tensor of a module it is."""

    WEIGHT = "weight"
    BIAS = "bias"


class Hint(NamedTuple):
    """The convention that a name follows."""

    name: Name
    part: Part

    @property
    def words(self) -> str:
        """As evidence."""
        bias = "bias of a " if self.part is Part.BIAS else ""
        cut = "whole" if self.replicated else f"cut along dim {self.dim}"
        return f"named as a {bias}{self.name}: {cut}"

    @property
    def fused(self) -> bool:
        """Whether several sections lie along one dim."""
        return self.name in (Name.QKV, Name.GATE_UP)

    @property
    def replicated(self) -> bool:
        """Whether all ranks hold it by convention."""
        if self.name in (Name.NORM, Name.HEAD_NORM, Name.POSITION, Name.ROUTER):
            return True
        return self.name is Name.ROW and self.part is Part.BIAS

    @property
    def dim(self) -> int | None:
        """The dim that is cut by convention."""
        if self.replicated:
            return None
        return 1 if self.name is Name.ROW and self.part is Part.WEIGHT else 0


_CONVENTIONS: tuple[tuple[Name, str], ...] = (
    (Name.HEAD_NORM, r"(q|k|query|key)_?(layer)?_?norm"),
    (Name.NORM, r"(.*_)?(layer|rms|group)?_?norm\d*|.*layernorm\d*|ln(_\w+|\d+)?"),
    (Name.POSITION, r"wpe|embed_positions|position_embeddings?|pos_embed(ding)?s?"),
    (Name.ROUTER, r"router|wg"),
    (
        Name.VOCABULARY,
        r"embed_tokens|wte|word_embeddings?|tok_embeddings|embed_in|embed_out|lm_head|output_layer",
    ),
    (Name.QKV, r"qkv(_proj)?|query_key_value|wqkv|c_attn|linear_qkv|in_proj(_weight|_bias)?"),
    (Name.GATE_UP, r"gate_up(_proj)?|w13|gate_and_up_proj"),
    (Name.MAYBE_FUSED, r"dense_h_to_4h|linear_fc1|fc1|fc_in"),
    (
        Name.COLUMN,
        r"[qkv]_proj|w[qkv]|query|key|value|(gate|up)_proj|w1|w3",
    ),
    (Name.ROW, r"(o|out|down)_proj|wo|dense_4h_to_h|linear_fc2|linear_proj|fc2|fc_out|w2"),
)
_COMPILED = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _CONVENTIONS)
_ATTENTION = re.compile(r"(self_?)?attn|(self_?)?attention", re.IGNORECASE)


def hint(fqn: str) -> Hint | None:
    """The convention that the name follows, if it is a known one.

    Examples
    --------
    >>> hint("model.layers.3.mlp.down_proj.weight").dim
    1
    >>> hint("model.layers.3.mlp.down_proj.bias").replicated
    True
    """
    segments = fqn.split(".")
    last = segments[-1].lower()
    part = Part.BIAS if last == "bias" or last.endswith("_bias") else Part.WEIGHT
    if last in ("weight", "bias"):
        segments = segments[:-1]
    if not segments:
        return None
    module = segments[-1]
    if module == "dense" and len(segments) > 1 and _ATTENTION.fullmatch(segments[-2]):
        return Hint(Name.ROW, part)
    for name, pattern in _COMPILED:
        if pattern.fullmatch(module):
            return Hint(name, part)
    return None
