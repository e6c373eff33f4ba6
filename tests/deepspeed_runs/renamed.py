"""The tiny language model as other code bases would have written it: the same function, other parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.deepspeed_runs.model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LanguageModel, rotate
from tests.deepspeed_runs.pipeline import loss_fn, scale


class Prefixed(nn.Module):
    """Every name gets a prefix; the order is the same."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, tokens: torch.Tensor) -> Any:
        """Return the model's loss."""
        return self.net(tokens)


class FusedAttention(nn.Module):
    """Megatron's: query, key and value in one matrix, per key-value head its query heads, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.dense = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, inv_freq: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend over `x` of shape (batch, length, HIDDEN)."""
        batch, length, _ = x.shape
        share = HEADS // KV_HEADS
        mixed = self.query_key_value(x).view(batch, length, KV_HEADS, share + 2, HEAD_DIM)
        q = mixed[:, :, :, :share].reshape(batch, length, HEADS, HEAD_DIM)
        k, v = mixed[:, :, :, share], mixed[:, :, :, share + 1]
        q, k = rotate(q, inv_freq), rotate(k, inv_freq)
        k, v = (t.repeat_interleave(share, dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / HEAD_DIM**0.5
        scores = scores.masked_fill(~mask[:length, :length], float("-inf"))
        out = torch.einsum("bhqk,bkhd->bqhd", scores.float().softmax(-1).to(v.dtype), v)
        return self.dense(out.reshape(batch, length, HEADS * HEAD_DIM))  # type: ignore[no-any-return]


class FusedMLP(nn.Module):
    """SwiGLU with the gate's and the other rows in one matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(HIDDEN, 2 * width, bias=False)
        self.dense_4h_to_h = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, HIDDEN) to the same shape."""
        gate, up = self.dense_h_to_4h(x).chunk(2, dim=-1)
        return self.dense_4h_to_h(functional.silu(gate) * up)  # type: ignore[no-any-return]


class MegatronLayer(nn.Module):
    """A block in Megatron's order."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attention = FusedAttention()
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = FusedMLP(layer.mlp.gate_proj.out_features)

    def forward(self, x: torch.Tensor, inv_freq: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, HIDDEN) to the same shape."""
        x = x + self.self_attention(self.input_layernorm(x), inv_freq, mask)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Megatron(nn.Module):
    """Megatron's names, fused weights, and another order of parameters: the head comes first here."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        decoder = model.model
        self.output_layer = model.lm_head
        self.embedding = nn.ModuleDict({"word_embeddings": decoder.embed_tokens})
        layers: Any = decoder.layers
        self.layers = nn.ModuleList(MegatronLayer(layer) for layer in layers)
        self.final_layernorm = decoder.norm
        for name, buffer in decoder.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name != "inv_freq")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the next-token loss of token ids (batch, length)."""
        x = self.embedding["word_embeddings"](tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, self.inv_freq, self.causal_mask)
        logits = self.output_layer(self.final_layernorm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Unpiped(nn.Module):
    """The twin of the pipeline as a language model of Megatron's: ``GPTModelPipe`` became ``GPTModel``."""

    def __init__(self, twin: Any) -> None:
        super().__init__()
        layers = twin._modules
        self.language_model = nn.ModuleDict(
            {
                "embedding": twin.tied_modules["embed"],
                "encoder": nn.ModuleDict(
                    {
                        "layers": nn.ModuleList([layers["2"], layers["3"], layers["5"]]),
                        "final_layernorm": layers["6"],
                    }
                ),
            }
        )

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of token ids and labels (batch, length)."""
        embedding, encoder = (self.language_model[name] for name in ("embedding", "encoder"))
        first, second, third = encoder["layers"]
        x = third(scale(second(first(scale(embedding(tokens))))))
        return loss_fn(embedding(encoder["final_layernorm"](x)), labels)


UNPIPED = {
    "tied_modules.embed": "language_model.embedding",
    "2": "language_model.encoder.layers.0",
    "3": "language_model.encoder.layers.1",
    "5": "language_model.encoder.layers.2",
    "6": "language_model.encoder.final_layernorm",
}
"""Modules of the pipeline -> those of `Unpiped`."""

WRAPS: dict[str, Any] = {"prefixed": Prefixed, "megatron": Megatron, "unpiped": Unpiped}

MEGATRON_MAPPING = {
    "rename": [
        {"from": "model.embed_tokens.weight", "to": "embedding.word_embeddings.weight"},
        {"from": "lm_head.weight", "to": "output_layer.weight"},
        {"from": "model.norm.weight", "to": "final_layernorm.weight"},
        {"from": "model.layers.{n}.{norm*}_layernorm.weight", "to": "layers.{n}.{norm}_layernorm.weight"},
        {"from": "model.layers.{n}.self_attn.o_proj.weight", "to": "layers.{n}.self_attention.dense.weight"},
        {"from": "model.layers.{n}.mlp.down_proj.weight", "to": "layers.{n}.mlp.dense_4h_to_h.weight"},
        *({"from": f"model.{name}", "to": name} for name in ("causal_mask", "tokens_seen", "running_scale")),
    ],
    "fuse": [
        {
            "from": [f"model.layers.{{n}}.self_attn.{name}_proj.{{kind*}}" for name in "qkv"],
            "to": "layers.{n}.self_attention.query_key_value.{kind}",
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
        },
        {
            "from": [f"model.layers.{{n}}.mlp.{name}_proj.weight" for name in ("gate", "up")],
            "to": "layers.{n}.mlp.dense_h_to_4h.weight",
            "ratio": [1, 1],
        },
    ],
}  # fmt: skip


def megatron_names(layers: int = 2) -> list[str]:
    """Names of the parameters of `Megatron`, as it registers them."""
    block = [
        "input_layernorm.weight",
        "self_attention.query_key_value.weight",
        "self_attention.query_key_value.bias",
        "self_attention.dense.weight",
        "post_attention_layernorm.weight",
        "mlp.dense_h_to_4h.weight",
        "mlp.dense_4h_to_h.weight",
    ]
    return [
        "output_layer.weight",
        "embedding.word_embeddings.weight",
        *(f"layers.{n}.{name}" for n in range(layers) for name in block),
        "final_layernorm.weight",
    ]
