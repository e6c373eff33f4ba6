"""Presets against real models: the same function of the same inputs after its weights were mapped.

The Hugging Face side is transformers itself. Megatron's and Meta's side is computed here from the layout that
their code documents (see the presets), by other means than the mapping's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.mapping.sources import ArraySource
from tests.mapping.test_reads import read
from ucpstore.mapped import map_source
from ucpstore.mapping import Mapping

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 2, 4, 2, 6, 24, 36, 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-6,
}
HEAD_PARAMETERS = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
TOKENS = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
Weights = dict[str, torch.Tensor]


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return noisy(LlamaForCausalLM(LlamaConfig(**SIZES)))


def phi3() -> torch.nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    return noisy(Phi3ForCausalLM(Phi3Config(**SIZES)))


def noisy(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def weights(model: torch.nn.Module) -> Weights:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def mapped(found: Weights, mapping: Mapping) -> Weights:
    source = ArraySource({name: value.numpy() for name, value in found.items()}, states=["fp32"])
    target = map_source(source, mapping)
    return {
        name: torch.from_numpy(read(target, fqn))
        for fqn, spec in target.parameters.items()
        for name in (fqn, *spec.aliases)
    }


@torch.no_grad()
def logits(model: Any, found: Weights) -> torch.Tensor:
    model.load_state_dict(found, strict=True)
    out: torch.Tensor = model(TOKENS, use_cache=False).logits
    return out


# ------------------------------------------------------------------------ references


def halves(x: torch.Tensor) -> torch.Tensor:
    """Megatron: ``rearrange(x, '... (j d) -> ... j d', j=2)``; x is (batch, length, heads, HEAD_DIM)."""
    cos, sin = angles(x)
    first, second = x.unflatten(-1, (2, HEAD_DIM // 2)).unbind(-2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def pairs(x: torch.Tensor) -> torch.Tensor:
    """Meta: neighbours are the real and imaginary part of a number that is turned."""
    cos, sin = angles(x)
    number = torch.view_as_complex(x.unflatten(-1, (HEAD_DIM // 2, 2)).contiguous())
    return torch.view_as_real(number * torch.complex(cos, sin)).flatten(-2)


def angles(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    speed = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), speed)[None, :, None]
    return angle.cos(), angle.sin()


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


QKV = Callable[[torch.Tensor, str], list[torch.Tensor]]


def reference(
    found: Weights,
    names: dict[str, str],
    qkv: QKV,
    rope: Callable[[torch.Tensor], torch.Tensor],
    *,
    first: int = 0,
) -> torch.Tensor:
    """Logits of a LLaMA; ``names`` are those of its parts, with ``{n}`` for the layer, from ``first``."""

    def w(part: str, n: int = 0) -> torch.Tensor:
        return found[names[part].replace("{n}", str(n))]

    x = functional.embedding(TOKENS, w("embed"))
    length = TOKENS.shape[1]
    mask = torch.ones(length, length).tril().bool()
    for n in range(first, first + LAYERS):
        q, k, v = qkv(norm(x, w("norm1", n)), names["qkv"].replace("{n}", str(n)))
        q, k = rope(q), rope(k)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / HEAD_DIM**0.5
        share = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + torch.einsum("bhqk,bkhd->bqhd", share, v).flatten(2) @ w("out", n).T
        y = norm(x, w("norm2", n))
        if "gate_up" in names:
            gate, up = (y @ w("gate_up", n).T).chunk(2, -1)
        else:
            gate, up = y @ w("gate", n).T, y @ w("up", n).T
        x = x + (functional.silu(gate) * up) @ w("down", n).T
    return norm(x, w("norm")) @ w("head").T


# ------------------------------------------------------------------------ tests


def test_llama_with_fused_weights_is_phi3() -> None:
    mapping = Mapping.preset("hf-llama-to-phi3", **HEAD_PARAMETERS)
    model = llama()
    fused = mapped(weights(model), mapping)
    expected = logits(model, weights(model))
    torch.testing.assert_close(logits(phi3(), fused), expected, rtol=1e-5, atol=1e-5)
    back = mapped(fused, mapping.inverse())
    assert all(torch.equal(back[name], value) for name, value in weights(model).items())
    wrong = Mapping.preset("hf-llama-to-phi3", heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    entries = wrong.to_json()
    entries["passes"][0]["fuse"][0]["groups"] = 2  # Megatron's layout is another function
    entries["passes"][0]["fuse"][0].update(ratio=[2, 1, 1], unit=HEAD_DIM)
    other = mapped(weights(model), Mapping.from_json(entries))
    assert not torch.allclose(logits(phi3(), other), expected, rtol=1e-2, atol=1e-2)


MEGATRON = {
    "embed": "1.word_embeddings.weight",
    "norm1": "{n}.input_layernorm.weight",
    "qkv": "{n}.self_attention.query_key_value.weight",
    "out": "{n}.self_attention.dense.weight",
    "norm2": "{n}.post_attention_layernorm.weight",
    "gate_up": "{n}.mlp.dense_h_to_4h.weight",
    "down": "{n}.mlp.dense_4h_to_h.weight",
}
SHAPES = {
    "embed": (VOCAB, HIDDEN),
    "head": (VOCAB, HIDDEN),
    "norm1": (HIDDEN,),
    "norm2": (HIDDEN,),
    "norm": (HIDDEN,),
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "q": (HEADS * HEAD_DIM, HIDDEN),
    "k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "out": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * INNER, HIDDEN),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}


def random_weights(names: dict[str, str], *, first: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(3)
    return {
        text.replace("{n}", str(n)): 0.5 * torch.randn(SHAPES[part], generator=generator)
        for part, text in names.items()
        for n in (range(first, first + LAYERS) if "{n}" in text else [0])
    }


@pytest.mark.parametrize(("first", "gap"), [(2, 0), (3, 1)])
def test_megatron_deepspeed_llama_is_hugging_faces(first: int, gap: int) -> None:
    last = first + LAYERS + gap
    pipe = {**MEGATRON, "norm": f"{last}.weight", "head": f"{last + 1}.lm_head.weight"}
    found = random_weights(pipe, first=first)

    def qkv(x: torch.Tensor, name: str) -> list[torch.Tensor]:
        y = (x @ found[name].T).unflatten(-1, (KV_HEADS, HEADS // KV_HEADS + 2, HEAD_DIM))
        parts = torch.split(y, [HEADS // KV_HEADS, 1, 1], dim=-2)
        return [part.reshape(*part.shape[:2], -1, HEAD_DIM) for part in parts]

    expected = reference(found, pipe, qkv, halves, first=first)
    mapping = Mapping.preset(
        "megatron-deepspeed-untied-pipe-to-plain", layers=LAYERS, first_layer=first, gap=gap
    ).then(Mapping.preset("megatron-deepspeed-llama-to-hf", **HEAD_PARAMETERS))
    made = mapped(found, mapping)
    torch.testing.assert_close(logits(llama(), made), expected, rtol=1e-4, atol=1e-4)
    back = mapped(made, mapping.inverse())
    assert all(torch.equal(back[name], value) for name, value in found.items())


META = {
    "embed": "tok_embeddings.weight",
    "head": "output.weight",
    "norm": "norm.weight",
    "norm1": "layers.{n}.attention_norm.weight",
    "norm2": "layers.{n}.ffn_norm.weight",
    "qkv": "layers.{n}.attention.w",
    "out": "layers.{n}.attention.wo.weight",
    "gate": "layers.{n}.feed_forward.w1.weight",
    "down": "layers.{n}.feed_forward.w2.weight",
    "up": "layers.{n}.feed_forward.w3.weight",
}


def test_metas_llama_is_hugging_faces() -> None:
    own = {part: text for part, text in META.items() if part != "qkv"}
    found = random_weights({**own, **{p: f"{META['qkv']}{p}.weight" for p in "qkv"}})

    def qkv(x: torch.Tensor, name: str) -> list[torch.Tensor]:
        return [(x @ found[f"{name}{p}.weight"].T).unflatten(-1, (-1, HEAD_DIM)) for p in "qkv"]

    mapping = Mapping.preset("meta-llama-to-hf", heads=HEADS, kv_heads=KV_HEADS)
    made = mapped(found, mapping)
    expected = reference(found, META, qkv, pairs)
    torch.testing.assert_close(logits(llama(), made), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(reference(found, META, qkv, halves), expected, atol=1e-2)
    back = mapped(made, mapping.inverse())
    assert all(torch.equal(back[name], value) for name, value in found.items())


def test_blooms_names_and_layout_are_hugging_faces() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS)
    model = noisy(BloomForCausalLM(config))
    found = weights(model)
    mapping = Mapping.preset("bloom-pipe-to-hf", layers=LAYERS)
    source = ArraySource(
        {name: value.numpy() for name, value in found.items()},
        aliases={"transformer.word_embeddings.weight": ("lm_head.weight",)},
        states=["fp32"],
    )
    piped = map_source(source, mapping.inverse())
    parts = [
        f"{part}.{kind}"
        for part in (
            "input_layernorm",
            "self_attention.query_key_value",
            "self_attention.dense",
            "post_attention_layernorm",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        )
        for kind in ("weight", "bias")
    ]
    assert list(piped.parameters) == [
        "tied_modules.embed.word_embeddings.weight",
        "tied_modules.embed.word_embeddings.norm.weight",
        "tied_modules.embed.word_embeddings.norm.bias",
        *(f"{n}.{part}" for n in (3, 4) for part in parts),
        "6.weight",
        "6.bias",
    ]
    again = map_source(piped, mapping)
    assert again.parameters["transformer.word_embeddings.weight"].aliases == ("lm_head.weight",)
    made = mapped({n: torch.from_numpy(read(piped, n)) for n in piped.parameters}, mapping)
    assert torch.equal(
        logits(model, made), logits(model, {**found, "lm_head.weight": made["lm_head.weight"]})
    )
    # Megatron's groups of one head each are what Hugging Face's module takes apart.
    x = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(4))
    q, k, v = (
        torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(s)) for s in (5, 6, 7)
    )
    entry = {"from": list("qkv"), "to": "fused", "heads": HEADS, "head_dim": HEAD_DIM}
    fused = mapped({"q": q, "k": k, "v": v}, Mapping.from_json({"fuse": [entry]}))["fused"]
    attention = model.transformer.h[0].self_attention  # type: ignore[union-attr]
    taken = attention._reshape(x @ fused.T)
    for one, whole in zip(taken, (q, k, v), strict=True):
        expected = (x @ whole.T).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        torch.testing.assert_close(one, expected)


def test_tied_pipelines_have_the_plain_models_names() -> None:
    names = [
        "tied_modules.embed.word_embeddings.weight",
        "tied_modules.embed.position_embeddings.weight",
        "2.self_attention.dense.bias",
        "2.input_layernorm.weight",
        "2.mlp.dense_h_to_4h.weight",
        "3.post_attention_layernorm.bias",
        "4.weight",
        "4.bias",
    ]
    source = ArraySource({name: np.zeros((2,), "float32") for name in names})
    mapping = Mapping.preset("megatron-deepspeed-gpt-pipe-to-plain", layers=LAYERS)
    made = map_source(source, mapping)
    assert list(made.parameters) == [
        "language_model.embedding.word_embeddings.weight",
        "language_model.embedding.position_embeddings.weight",
        "language_model.encoder.layers.0.self_attention.dense.bias",
        "language_model.encoder.layers.0.input_layernorm.weight",
        "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight",
        "language_model.encoder.layers.1.post_attention_layernorm.bias",
        "language_model.encoder.final_layernorm.weight",
        "language_model.encoder.final_layernorm.bias",
    ]
    assert list(map_source(made, mapping.inverse()).parameters) == names


def test_partly_rotary_heads_are_turned_as_gptj_and_gpt_neox_turn_them() -> None:
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj

    head, rotary, length = 10, 4, 5
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(1, length, HIDDEN, generator=generator)
    w = {name: torch.randn(HEADS * head, HIDDEN, generator=generator) for name in "qk"}
    entry = {"from": "{n*}", "heads": HEADS, "layout": "halves", "rotary_dim": rotary}
    turned = mapped(w, Mapping.from_json({"rotary": [entry]}))
    speed = 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), speed)

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bqhd,bkhd->bhqk", q, k)

    q, k = ((x @ w[n].T).unflatten(-1, (HEADS, head)) for n in "qk")
    sin, cos = angle.sin()[None], angle.cos()[None]
    expected = scores(
        *(torch.cat([gptj(t[..., :rotary], sin, cos), t[..., rotary:]], -1) for t in (q, k))
    )
    q, k = ((x @ turned[n].T).unflatten(-1, (HEADS, head)) for n in "qk")
    both = torch.cat([angle, angle], -1)[None]
    parts = neox(q[..., :rotary], k[..., :rotary], both.cos(), both.sin(), unsqueeze_dim=2)
    found = scores(
        *(torch.cat([p, t[..., rotary:]], -1) for p, t in zip(parts, (q, k), strict=True))
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
