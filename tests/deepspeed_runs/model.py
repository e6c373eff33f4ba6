"""A tiny LLaMA-like language model: GQA, RoPE, RMSNorm, SwiGLU, and awkward sizes.

The sizes are odd on purpose: the two optimizer groups hold 11,063 and 211 elements, so the
flat buffers of ZeRO-1/2 need padding at 2, 3 and 4 ranks, most parameters start and end inside
a rank's partition, and several straddle two ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.deepspeed_runs.cases import Case, Tied

VOCAB = 53
HIDDEN = 23
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 6
INTERMEDIATE = (37, 40)
SEQUENCE = 11
BIG_COUNTER = 2**24 + 1  # not representable in float32


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x.float() * scale).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; q, k, v have a bias, o has none."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.attend: Any = attend  # sequence parallelism exchanges heads around it

    def forward(self, x: torch.Tensor, inv_freq: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend over `x` of shape (batch, length, HIDDEN)."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, HEADS, HEAD_DIM)
        k = self.k_proj(x).view(batch, length, KV_HEADS, HEAD_DIM)
        v = self.v_proj(x).view(batch, length, KV_HEADS, HEAD_DIM)
        mixed = self.attend(q, k, v, inv_freq, mask)
        out: torch.Tensor = self.o_proj(mixed.reshape(batch, length, HEADS * HEAD_DIM))
        return out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inv_freq: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Attend over whole sequences (batch, length, heads, HEAD_DIM), for some or all heads."""
    length = q.shape[1]
    q, k = rotate(q, inv_freq), rotate(k, inv_freq)
    k = k.repeat_interleave(HEADS // KV_HEADS, dim=2)
    v = v.repeat_interleave(HEADS // KV_HEADS, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / HEAD_DIM**0.5
    scores = scores.masked_fill(~mask[:length, :length], float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.float().softmax(-1).to(v.dtype), v)


def rotate(x: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embedding to `x` of shape (batch, length, heads, HEAD_DIM)."""
    position = torch.arange(x.shape[1], dtype=torch.float32)
    angle = torch.outer(position, inv_freq.float())[None, :, None, :]
    first, second = x.float().chunk(2, dim=-1)
    turned = (
        first * angle.cos() - second * angle.sin(),
        second * angle.cos() + first * angle.sin(),
    )
    return torch.cat(turned, dim=-1).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, intermediate, bias=False)
        self.up_proj = nn.Linear(HIDDEN, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, HIDDEN) to the same shape."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One transformer block."""

    def __init__(self, intermediate: int) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = MLP(intermediate)
        self.input_layernorm = RMSNorm(HIDDEN)
        self.post_attention_layernorm = RMSNorm(HIDDEN)

    def forward(self, x: torch.Tensor, inv_freq: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, HIDDEN) to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), inv_freq, mask)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks and final norm, with buffers of several dtypes."""

    causal_mask: torch.Tensor
    inv_freq: torch.Tensor

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(width) for width in INTERMEDIATE)
        self.norm = RMSNorm(HIDDEN)
        # 7 elements: no number of ranks used here but 1 divides them.
        self.adapter = nn.Linear(7, 1, bias=False) if frozen else None
        if self.adapter is not None:
            self.adapter.weight.requires_grad_(False)
            self.layers[0].self_attn.o_proj.weight.requires_grad_(False)
        self.register_buffer("causal_mask", torch.ones(SEQUENCE, SEQUENCE).tril().bool())
        self.register_buffer("tokens_seen", torch.tensor([BIG_COUNTER, -3], dtype=torch.int64))
        self.register_buffer("running_scale", torch.linspace(0.1, 0.9, 5))
        inv_freq = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token ids (batch, length) to hidden states (batch, length, HIDDEN)."""
        x = self.embed_tokens(tokens)
        if self.adapter is not None:
            x = x + 0.01 * self.adapter(x[..., :7])
        for layer in self.layers:
            x = layer(x, self.inv_freq, self.causal_mask)
        out: torch.Tensor = self.norm(x)
        return out


class LanguageModel(nn.Module):
    """The decoder with its output head; returns the loss."""

    def __init__(self, *, tied: Tied = "no", frozen: bool = False) -> None:
        super().__init__()
        # With the head registered first the tied parameter's first name is `lm_head.weight`
        # and the embedding becomes the alias.
        if tied == "reverse":
            self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.model = Decoder(frozen=frozen)
        if tied != "reverse":
            self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.1)
        if tied != "no":
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss of token ids (batch, length), by default that of each next token."""
        if labels is None:
            tokens, labels = tokens[:, :-1], tokens[:, 1:]
        logits = self.lm_head(self.model(tokens)).float()
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TinyGroups(nn.Module):
    """Two groups so small that whole ranks hold nothing but padding."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([[0.5, -1.5, 2.5]]))
        self.bias = nn.Parameter(torch.tensor([0.25]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss that depends on every element."""
        x = functional.one_hot(tokens[0] % 3, 3).to(self.scale.dtype)
        return (x @ self.scale.T + self.bias).float().pow(2).mean()


class WideOverRanks(nn.Module):
    """Small parameters before and after one that spans the last quarter of twelve ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(15, 60)  # 900 + 60 elements: ranks 0 to 9
        self.late = nn.Linear(60, 5, bias=False)  # 300 elements: ranks 9 to 11

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss that depends on every element."""
        x = functional.one_hot(tokens[0] % 15, 15).to(self.late.weight.dtype)
        out: torch.Tensor = self.late(torch.tanh(self.early(x))).float().pow(2).mean()
        return out


def llama(config: dict[str, Any]) -> nn.Module:
    """Return a randomly initialised Hugging Face LLaMA of the given sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager"))
    return model


def build_model(case: Case) -> nn.Module:
    """Return the model of `case`, initialised from a fixed seed."""
    torch.manual_seed(1234)
    if case.model in ("llama", "ulysses"):
        return LanguageModel(tied=case.tied, frozen=case.frozen)
    if case.model == "tiny":
        return TinyGroups()
    if case.model == "wide":
        return WideOverRanks()
    return llama(dict(case.sizes))
