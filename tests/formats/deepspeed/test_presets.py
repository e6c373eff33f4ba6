"""Presets against the models that they are for: what real AutoTP cuts, real classes' names, Megatron's lists."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.deepspeed_runs import copy_run, deepspeed_run
from tests.formats.deepspeed.test_real_runs import bits, read, truth_of
from tests.formats.deepspeed.test_tensor_parallel import (
    TP_RUNS,
    assemble,
    change_info,
    children,
)
from tests.schemas import validate
from ucpstore.errors import PatternError
from ucpstore.formats.deepspeed import FORMAT
from ucpstore.formats.deepspeed.autotp import TensorParallel
from ucpstore.io import open_files
from ucpstore.layout.patterns import Replicate, ShardNC, local_shape
from ucpstore.layout.rules import Held, Patterns

PRESETS = {
    "llama": "hf-llama",
    "uneven": "hf-llama,kv_unit=4,q_unit=8",
    "qwen3": "hf-llama",
    "gpt_neox": "hf-gpt-neox,unit=24,head=8",
    "bloom": "hf-gpt-neox",
    "phi3": "hf-phi3,group=2",
}


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What AutoTP cuts of every model, made by one run of two ranks."""
    folder = tmp_path_factory.mktemp("cuts")
    script = Path(__file__).with_name("autotp_cuts.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    quiet = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *launch, str(script), str(folder)],
        env={**os.environ, **quiet, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def cut_of(cuts: Path, name: str) -> tuple[dict[str, Any], dict[str, list[np.ndarray]], Any]:
    """Whole parameters, what the ranks hold of them, and the info."""
    import torch

    found = torch.load(cuts / f"{name}.pt", weights_only=False)
    whole = {
        fqn: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for fqn, shape in found["shapes"].items()
    }
    return (
        whole,
        {fqn: [rank[fqn].numpy() for rank in found["ranks"]] for fqn in whole},
        found["info"],
    )


def shapes_of(held: Held) -> list[tuple[int, ...] | None]:
    return [local_shape(held.shape, held.axes, {"tp": rank}) for rank in range(held.axes[-1].size)]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_unite_what_autotp_cuts(cuts: Path, name: str) -> None:
    patterns = Patterns.preset(PRESETS[name])
    whole, parts, _ = cut_of(cuts, name)
    assert any(len({part.tobytes() for part in held}) > 1 for held in parts.values())
    for fqn, value in whole.items():
        united = patterns.unite(fqn, children(parts[fqn]))
        assert (assemble(united.geometry, parts[fqn]) == value).all(), fqn
        assert shapes_of(patterns.held(fqn, value.shape, 2)) == [p.shape for p in parts[fqn]], fqn
        replicated = all((part.shape == value.shape) for part in parts[fqn])
        assert isinstance(united.rule.tp, Replicate) == replicated, fqn
    assert not Patterns.preset(PRESETS[name]).warnings({fqn: v.ndim for fqn, v in whole.items()})


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("lists_only", [True, False])
def test_infos_become_rules_for_any_number_of_ranks(
    cuts: Path, name: str, lists_only: bool
) -> None:
    whole, parts, info = cut_of(cuts, name)
    if lists_only:
        del info["affine_map"]
    rules = TensorParallel(info, 2)
    for fqn, value in whole.items():
        merged = rules.merge(fqn, children(parts[fqn]))
        assert (assemble(merged.geometry, parts[fqn]) == value).all(), fqn
    document = validate(rules.patterns().to_json(), "patterns")
    assert len(document["rules"]) <= 10
    assert all(rule["tp"]["pattern"] != "explicit" for rule in document["rules"])
    patterns = Patterns.from_json(document)
    preset = Patterns.preset(PRESETS[name])
    for fqn, value in whole.items():
        assert shapes_of(patterns.held(fqn, value.shape, 2)) == [p.shape for p in parts[fqn]]
        for degree in (1, 3):
            try:
                expected = preset.held(fqn, value.shape, degree)
            except (
                PatternError
            ):  # three ranks of two key-value heads: Phi-3's sections have no unit
                continue
            assert shapes_of(patterns.held(fqn, value.shape, degree))[0] is not None
            assert patterns.held(fqn, value.shape, degree).shape == expected.shape


@pytest.mark.parametrize("name", TP_RUNS)
def test_a_preset_instead_of_the_checkpoints_own_rules(tmp_path: Path, name: str) -> None:
    run = copy_run(deepspeed_run(name), tmp_path)
    change_info(run.tag_path, lambda holder: holder.pop("universal_checkpoint_info"))
    source = FORMAT.open(open_files(run.path), patterns=Patterns.preset("hf-llama"))
    for fqn, state, value in truth_of(run):
        assert bits(read(source, fqn, state)) == bits(value), (fqn, state)
    patterns = Patterns.from_json(validate(source.common.document["patterns"], "patterns"))
    for fqn, parameter in source.parameters.items():
        if parameter.trainable:
            held = patterns.held(fqn, parameter.states["fp32"].shape, run.case.tp)
            real = [run.tensor("fp32", fqn, tp_rank=rank).shape for rank in range(run.case.tp)]
            assert shapes_of(held) == real, fqn


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 8}


@pytest.mark.parametrize(
    ("kind", "sizes", "preset"),
    [
        ("llama", {**SIZES, "attention_bias": True, "mlp_bias": True}, "hf-llama"),
        ("mistral", SIZES, "hf-llama"),
        ("qwen2", SIZES, "hf-llama"),
        ("qwen3", SIZES, "hf-llama"),
        ("mixtral", {**SIZES, "num_local_experts": 4}, "hf-llama"),
        ("qwen2_moe", {**SIZES, **SHARED}, "hf-llama"),
        ("qwen3_moe", {**SIZES, **EXPERTS}, "hf-llama"),
        ("gpt_neox", {k: v for k, v in SIZES.items() if "key" not in k}, "hf-gpt-neox"),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "hf-gpt-neox"),
        ("phi3", {**SIZES, "pad_token_id": 0}, "hf-phi3,group=2"),
    ],
)
def test_presets_name_every_parameter_of_the_real_classes(
    kind: str, sizes: dict[str, Any], preset: str
) -> None:
    """Where the class has a plan for its own tensor parallelism, the preset cuts the same dims."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=64, **sizes))
    shapes = {fqn: tuple(p.shape) for fqn, p in model.named_parameters()}
    patterns = Patterns.preset(preset)
    assert not [fqn for fqn, shape in shapes.items() if patterns.find(fqn, len(shape)) is None]
    for fqn, shape in shapes.items():
        local = shapes_of(patterns.held(fqn, shape, 2))
        cut = [d for d in range(len(shape)) if local[0] is not None and local[0][d] != shape[d]]
        style = _style(model.config.base_model_tp_plan or {}, fqn)
        if style in ("colwise", "packed_colwise", "colwise_gather_output"):
            assert cut == [len(shape) - 2 if len(shape) > 1 else 0], fqn
        elif style in ("rowwise", "rowwise_split_input") and not fqn.endswith("bias"):
            assert cut == [len(shape) - 1], fqn
        elif fqn != "lm_head.weight" and style is None and model.config.base_model_tp_plan:
            shared = "shared_expert." in fqn
            assert bool(cut) == (shared or fqn.endswith("experts.gate_up_proj")), fqn
        if style == "packed_colwise":
            held = patterns.held(fqn, shape, 2).resolved().tp
            assert isinstance(held, ShardNC)
            assert held.widths == ((shape[1] // 4,) * 2,) * 2


def _style(plan: dict[str, str], fqn: str) -> str | None:
    """The style that a plan of transformers gives a parameter; ``*`` stands for a layer's number."""
    name = fqn.removesuffix(".weight").removesuffix(".bias").split(".")
    for key, style in plan.items():
        parts = key.split(".")
        mine = name[-len(parts) :]
        if len(mine) == len(parts) and all(
            a == b or (b == "*" and a.isdigit()) for a, b in zip(mine, parts, strict=True)
        ):
            return style
    return None


def megatron(*, pipeline: bool, swiglu: bool, tied: bool = True) -> tuple[Any, Any]:
    """What Megatron-DeepSpeed writes at tp 2 (megatron/model/gpt_model.py), and shapes of its model."""
    layer = "" if pipeline else "language_model.encoder.layers."
    embed = "tied_modules.embed." if pipeline else "language_model.embedding."
    final = "6." if pipeline else "language_model.encoder.final_layernorm."
    number = r"\d+." if pipeline else r"language_model.encoder.layers.\d+."
    head = "7.lm_head.weight" if pipeline else "language_model.output_layer.weight"
    shapes = {
        f"{embed}word_embeddings.weight": (50257, 8),
        f"{embed}position_embeddings.weight": (16, 8),
        f"{layer}3.input_layernorm.weight": (8,),
        f"{layer}3.input_layernorm.bias": (8,),
        f"{layer}3.self_attention.query_key_value.weight": (48, 8),
        f"{layer}3.self_attention.query_key_value.bias": (48,),
        f"{layer}3.self_attention.dense.weight": (8, 24),
        f"{layer}3.self_attention.dense.bias": (8,),
        f"{layer}3.post_attention_layernorm.weight": (8,),
        f"{layer}3.post_attention_layernorm.bias": (8,),
        f"{layer}3.mlp.dense_h_to_4h.weight": (32, 8),
        f"{layer}3.mlp.dense_h_to_4h.bias": (32,),
        f"{layer}3.mlp.dense_4h_to_h.weight": (8, 32),
        f"{layer}3.mlp.dense_4h_to_h.bias": (8,),
        f"{final}weight": (8,),
        f"{final}bias": (8,),
    }
    vocabulary = [f"{embed}word_embeddings.weight"]
    if not tied:
        shapes[head] = (50257, 8)
        vocabulary.append(r"\d+.lm_head.weight" if pipeline else head)
    if swiglu:
        del shapes[f"{embed}position_embeddings.weight"]
    replicated = [
        *(
            f"{number}{norm}_layernorm.{kind}"
            for norm in ("input", "post_attention")
            for kind in ("weight", "bias")
        ),
        *(f"{number}{name}.bias" for name in ("self_attention.dense", "mlp.dense_4h_to_h")),
        *(rf"\d+.{kind}" if pipeline else f"{final}{kind}" for kind in ("weight", "bias")),
        f"{embed}position_embeddings.weight",
    ]
    info = {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": 50257,
        "padded_vocab_size": 50432,
        "vocabulary_parameter_patterns": vocabulary,
        "tp_replicated_parameter_patterns": replicated,
        "parameter_with_row_parallelism_patterns": [
            f"{number}mlp.dense_4h_to_h.weight",
            f"{number}self_attention.dense.weight",
        ],
    }
    if swiglu:
        names = [f"{number}mlp.dense_h_to_4h.{kind}" for kind in ("weight", "bias")]
        info["parameter_with_2_sub_params_cat_dim_0"] = names
    return info, shapes


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("swiglu", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_megatrons_lists_and_its_presets_say_the_same(
    pipeline: bool, swiglu: bool, tied: bool
) -> None:
    info, shapes = megatron(pipeline=pipeline, swiglu=swiglu, tied=tied)
    arguments = {"args": {"make_vocab_size_divisible_by": 128}}
    preset = Patterns.preset(f"megatron-{'llama' if swiglu else 'gpt'},vocab=50257")
    rules = TensorParallel(info, 2, client=arguments)
    parts = {}
    for fqn, shape in shapes.items():
        local = shapes_of(preset.held(fqn, shape, 2))
        parts[fqn] = [np.zeros(list(part or ()), np.int8) for part in local]
        merged = rules.merge(fqn, children(parts[fqn]))
        assert merged.geometry.shape == shape, fqn
        assert ("pad(0)" in merged.pattern) == (shape[0] == 50257)
    document = validate(rules.patterns().to_json(), "patterns")
    patterns = Patterns.from_json(document)
    for fqn, shape in shapes.items():
        for degree in (1, 2, 4):
            mine, theirs = (p.held(fqn, shape, degree).resolved() for p in (patterns, preset))
            if degree > 1 or shape[0] == 50257:
                assert mine == theirs, (fqn, degree)
    assert patterns.held(vocabulary := next(iter(shapes)), shapes[vocabulary], 4).shape[0] == 50688
    if swiglu:
        assert not preset.warnings({fqn: len(shape) for fqn, shape in shapes.items()})


@pytest.mark.parametrize("what", ["weight", "bias"])
@pytest.mark.parametrize("by", ["preset", "info"])
def test_swiglu_gate_and_up_never_mix(what: str, by: str) -> None:
    """Case 47: four ranks, all of the gate is positive, all of up negative."""
    gate = np.arange(1, 33, dtype=np.float32).reshape((16, 2) if what == "weight" else (32,))
    slices = [
        np.concatenate([g, u]) for g, u in zip(np.split(gate, 4), np.split(-gate, 4), strict=True)
    ]
    info, _ = megatron(pipeline=False, swiglu=True)
    users = Patterns.preset("megatron-llama") if by == "preset" else Patterns()
    rules = TensorParallel(info if by == "info" else None, 4, patterns=users)
    fqn = f"language_model.encoder.layers.0.mlp.dense_h_to_4h.{what}"
    whole = assemble(rules.merge(fqn, children(slices)).geometry, slices)
    assert (whole == np.concatenate([gate, -gate])).all()


def test_bloom_averages_what_has_drifted_apart() -> None:
    """BigScience's own converter does: pads are not stripped unless the vocabulary is told."""
    patterns = Patterns.preset("megatron-bloom")
    for fqn in ("tied_modules.embed.word_embeddings.norm.weight", "7.input_layernorm.bias"):
        united = patterns.unite(fqn, children([np.zeros(3), np.ones(3)]))
        assert united.geometry.rule == "average"
    assert patterns.rule("70.weight", (3,)).tp.name == "partial"
    fqn = "tied_modules.embed.word_embeddings.weight"
    assert patterns.held(fqn, (250880, 2), 4).shape == (250880, 2)
    told = Patterns.preset("megatron-bloom,vocab=250680,multiple=128")
    assert told.held(fqn, (250680, 2), 4).shape == (250880, 2)
