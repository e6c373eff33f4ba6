"""A renamed and fused model goes on in unmodified DeepSpeed (MDS#405: a hand-made renaming changed the loss)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ucpstore
from tests.deepspeed_runs import deepspeed_run
from tests.deepspeed_runs.model import KV_HEADS
from tests.deepspeed_runs.renamed import MEGATRON_MAPPING, megatron_names
from tests.deepspeed_runs.resume import continue_run, resume_run
from tests.schemas import validate
from ucpstore import Layout, Mapping
from ucpstore.cli.main import main
from ucpstore.errors import PatternError, PlanError, UnsupportedSourceError

STATES = {"fp32": "fp32", "adam_m": "exp_avg", "adam_v": "exp_avg_sq", "buffer": "buffer"}
PREFIX = Mapping.from_json({"rename": [{"from": "{name**}", "to": "net.{name}"}]})
MEGATRON = Mapping.from_json(MEGATRON_MAPPING)


def native(source: Path, dest: Path, mapping: Mapping | None, **options: Any) -> Path:
    layout = Layout(**{"dp": 2, "zero_stage": 1, **options})
    report = ucpstore.convert(source, dest, to="deepspeed", layout=layout, mapping=mapping)
    told = any("the mapping gives no order" in text for text in report.warnings)
    assert told == (mapping is not None and not mapping.passes[-1].order)
    return dest


def fuse(parts: list[np.ndarray], groups: int) -> np.ndarray:
    cut = [np.split(part, groups) for part in parts]
    return np.concatenate([c[g] for g in range(groups) for c in cut])


def megatron_truth(run: Any, state: str, name: str) -> np.ndarray:
    """What DeepSpeed's own getters say of the source, in the other model's shapes."""
    head, _, kind = name.rpartition(".")
    head = head if head.startswith(("output", "embedding", "final")) else f"model.{head}"

    def of(*names: str) -> list[np.ndarray]:
        return [run.full(STATES[state], f"{parent}.{n}.{kind}") for n in names]

    parent = head.rpartition(".")[0].replace("self_attention", "self_attn")
    if name.endswith(("query_key_value.weight", "query_key_value.bias")):
        return fuse(of("q_proj", "k_proj", "v_proj"), KV_HEADS)
    if "dense_h_to_4h" in name:
        return fuse(of("gate_proj", "up_proj"), 1)
    plain = {
        "output_layer": "lm_head",
        "embedding.word_embeddings": "model.embed_tokens",
        "final_layernorm": "model.norm",
    }
    renamed = plain.get(head) or head.replace("self_attention.dense", "self_attn.o_proj").replace(
        "dense_4h_to_h", "down_proj"
    )
    return run.full(STATES[state], f"{renamed}.{kind}")


def test_a_renamed_module_resumes_with_exactly_the_losses(tmp_path: Path) -> None:
    run = deepspeed_run("s1-fp32-dp2")
    path = native(run.path, tmp_path / "c", PREFIX)
    resumed = resume_run(
        "s1-fp32-dp2", path, tmp_path / "r", world=2, stage=1, dtype="fp32", wrap="prefixed"
    )
    assert resumed.losses == continue_run("s1-fp32-dp2")
    for key, value in resumed.run.tensors().items():
        state, _, fqn = key.partition(":")
        assert fqn.startswith("net.")
        assert value.tobytes() == run.full(state, fqn.removeprefix("net.")).tobytes(), key


@pytest.mark.parametrize(("stage", "dp", "through_store"), [(1, 2, False), (3, 2, True)])
def test_a_fused_module_in_another_order_resumes(
    tmp_path: Path, stage: int, dp: int, through_store: bool
) -> None:
    run = deepspeed_run("s2-fp32-dp3")
    mapping = MEGATRON.ordered(megatron_names())
    if through_store:
        ucpstore.convert(run.path, tmp_path / "store", mapping=mapping)
        path = native(tmp_path / "store", tmp_path / "c", None, dp=dp, zero_stage=stage)
    else:
        path = native(run.path, tmp_path / "c", mapping, dp=dp, zero_stage=stage)
    resumed = resume_run(
        "s2-fp32-dp3", path, tmp_path / "r", world=dp, stage=stage, dtype="fp32", wrap="megatron"
    )
    assert set(resumed.run.facts["parameters"]) == set(megatron_names())
    for name in megatron_names():
        for state in ("fp32", "adam_m", "adam_v"):
            found = resumed.run.tensor(STATES[state], name)
            assert found.tobytes() == megatron_truth(run, state, name).tobytes(), (state, name)
    np.testing.assert_allclose(resumed.losses, continue_run("s2-fp32-dp3"), rtol=1e-5)


def test_without_the_order_the_getters_and_the_losses_tell(tmp_path: Path) -> None:
    run = deepspeed_run("s2-fp32-dp3")
    path = native(run.path, tmp_path / "c", MEGATRON)
    resumed = resume_run(
        "s2-fp32-dp3", path, tmp_path / "r", world=2, stage=1, dtype="fp32", wrap="megatron"
    )
    differ = [
        name
        for name in megatron_names()
        if resumed.run.tensor("fp32", name).tobytes() != megatron_truth(run, "fp32", name).tobytes()
    ]
    assert differ
    assert not np.allclose(resumed.losses, continue_run("s2-fp32-dp3"), rtol=1e-3)


def test_a_store_through_a_mapping_holds_all_states_and_the_common_state(tmp_path: Path) -> None:
    run = deepspeed_run("s1-fp32-dp2")
    store = tmp_path / "store"
    ucpstore.convert(run.path, store, mapping=MEGATRON, workers=2, threads=1)
    checkpoint = ucpstore.open(store)
    assert {n for n, p in checkpoint.items() if p.trainable} == set(megatron_names())
    for name in megatron_names():
        for state in ("fp32", "adam_m", "adam_v"):
            assert (
                checkpoint[name][state][...].tobytes() == megatron_truth(run, state, name).tobytes()
            )
    assert ucpstore.verify(store, against=run.path, mapping=MEGATRON).ok
    assert not ucpstore.verify(store, against=run.path).ok
    assert ucpstore.diff(run.path, store, mapping=MEGATRON).equal
    groups = checkpoint.common["param_groups"]
    assert groups[1]["params"] == [
        "layers.0.self_attention.query_key_value.bias",
        "layers.0.input_layernorm.weight",
        "layers.0.post_attention_layernorm.weight",
        "layers.1.self_attention.query_key_value.bias",
        "layers.1.input_layernorm.weight",
        "layers.1.post_attention_layernorm.weight",
        "final_layernorm.weight",
    ]
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert checkpoint.common["steps"] == dict.fromkeys(megatron_names(), 3)
    assert checkpoint.common["framework"]["buffer_names"] == [
        "causal_mask",
        "running_scale",
        "tokens_seen",
    ]
    assert checkpoint.layout["mapping"] == MEGATRON.digest
    back = ucpstore.open(store, mapping=MEGATRON.inverse())
    source = ucpstore.open(run.path)
    assert set(back) == set(source)
    for name, parameter in source.items():
        for state in back[name]:
            assert back[name][state][...].tobytes() == parameter[state][...].tobytes()
    assert back.common["steps"] == source.common["steps"]
    assert [set(g["params"]) for g in back.common["param_groups"]] == [
        set(g["params"]) for g in source.common["param_groups"]
    ]


def test_pipeline_layers_are_renumbered(tmp_path: Path) -> None:
    run = deepspeed_run("pp2-s1-fp32-dp2")
    rename = [
        {"from": "tied_modules.embed.{rest**}", "to": "language_model.embedding.{rest}"},
        *(
            {
                "from": f"{{n}}.{part}.{{rest**}}",
                "to": f"language_model.layers.{{n-2}}.{part}.{{rest}}",
            }
            for part in ("norm", "up", "down")
        ),
        {"from": "{n}.{part*}", "to": "language_model.layers.{n-2}.{part}"},
    ]
    mapping = Mapping.from_json({"rename": rename})
    with ucpstore.open(run.path, mapping=mapping) as checkpoint:
        names = set(checkpoint)
        assert {"language_model.layers.0.up.weight", "language_model.layers.3.seen"} <= names
        found = checkpoint["language_model.layers.1.down.weight"].adam_v[...]
    expected = ucpstore.open(run.path)["3.down.weight"].adam_v[...]
    assert found.tobytes() == expected.tobytes()
    document = mapping.to_json()
    del document["passes"][0]["rename"][1]
    with pytest.raises(PatternError, match=r"'2\.norm\.weight' is matched by no entry") as caught:
        ucpstore.open(run.path, mapping=Mapping.from_json(document))
    assert sum("is matched by no entry" in text for text in caught.value.context["problems"]) == 3
    with pytest.raises(PatternError):
        ucpstore.convert(run.path, tmp_path / "s", mapping=Mapping.from_json(document))
    assert not (tmp_path / "s").exists()


def test_tied_names_follow_their_parameter() -> None:
    run = deepspeed_run("tied-s1-bf16-dp3")
    checkpoint = ucpstore.open(run.path, mapping=PREFIX)
    assert checkpoint["net.model.embed_tokens.weight"].aliases == ("net.lm_head.weight",)
    assert checkpoint["net.lm_head.weight"].fqn == "net.model.embed_tokens.weight"


def test_dealt_parameters_cannot_be_reordered(tmp_path: Path) -> None:
    run = deepspeed_run("roundrobin-s2-fp32-dp2")
    with pytest.raises(UnsupportedSourceError, match="round_robin_gradients"):
        native(run.path, tmp_path / "c", MEGATRON, zero_stage=3)
    native(run.path, tmp_path / "d", PREFIX, zero_stage=3)


def test_the_mapping_decides_the_plan(tmp_path: Path) -> None:
    run = deepspeed_run("tp2-large-s1-fp32-dp1")
    names = [n for n in ucpstore.open(run.path) if "q_proj" not in n]
    keep = [{"name": n} for n in names]
    square = "model.layers.{n}.self_attn.q_proj.weight"
    plain = Mapping.from_json({"keep": [*keep, {"name": square}]})
    turned = Mapping.from_json({"keep": keep, "transpose": [{"from": square}]})
    heads = Mapping.from_json(
        {"keep": keep, "rotary": [{"from": square, "heads": 8, "layout": "pairs"}]}
    )
    layout = Layout(dp=1, zero_stage=1)
    for options in ({}, {"to": "deepspeed", "layout": layout}):
        digests = {
            ucpstore.plan(run.path, tmp_path / "x", mapping=mapping, **options).digest
            for mapping in (None, plain, turned, heads)
        }
        assert len(digests) == 4


def test_the_same_layout_under_other_names_is_written(tmp_path: Path) -> None:
    run = deepspeed_run("s1-fp32-dp2")
    layout = Layout(dp=2, zero_stage=1)
    report = ucpstore.convert(
        run.path, tmp_path / "c", to="deepspeed", layout=layout, mapping=PREFIX
    )
    assert report.tasks_done == 3
    assert "net.lm_head.weight" in ucpstore.open(tmp_path / "c")


def test_autotp_slices_become_another_familys_fused_weights(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

    run = deepspeed_run("tp2-s1-fp32-dp2")
    sizes = {**dict(run.case.sizes), "pad_token_id": 0, "attn_implementation": "eager"}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    mapping = Mapping.preset(
        "hf-llama-to-phi3",
        heads=heads,
        kv_heads=sizes["num_key_value_heads"],
        head_dim=hidden // heads,
    )
    ucpstore.convert(run.path, tmp_path / "store", mapping=mapping)
    store = ucpstore.open(tmp_path / "store")
    fused = "model.layers.1.self_attn.qkv_proj.weight"
    for state, native_name in (("adam_m", "exp_avg"), ("adam_v", "exp_avg_sq")):
        parts = [run.full(native_name, fused.replace("qkv_", f"{part}_")) for part in "qkv"]
        assert store[fused][state][...].tobytes() == np.concatenate(parts).tobytes()
    llama = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    names = [name for name, _ in llama.named_parameters()]
    llama.load_state_dict({n: torch.from_numpy(run.full("fp32", n).copy()) for n in names})
    config = Phi3Config(**sizes, rms_norm_eps=llama.config.rms_norm_eps)
    phi3 = Phi3ForCausalLM(config).eval()
    phi3.load_state_dict({n: p.fp32.torch() for n, p in store.items() if p.trainable})
    tokens = torch.arange(11)[None]
    with torch.no_grad():
        torch.testing.assert_close(phi3(tokens).logits, llama(tokens).logits, rtol=1e-5, atol=1e-5)


def test_stored_arrays_are_only_those_whose_names_differ(tmp_path: Path) -> None:
    run = deepspeed_run("s1-fp32-dp2")
    ucpstore.convert(run.path, tmp_path / "store")
    store = ucpstore.open(tmp_path / "store", mapping=MEGATRON)
    plain, fused = (
        store["output_layer.weight"].fp32,
        store["layers.0.mlp.dense_h_to_4h.weight"].fp32,
    )
    assert plain.digest is not None
    assert fused.digest is None
    assert (plain.tensorstore().read().result() == plain[...]).all()
    for call in (fused.tensorstore, store.zarr_group):
        with pytest.raises(UnsupportedSourceError, match="seen through a mapping"):
            call()


def test_remote_stores_are_read_through_a_mapping() -> None:
    run = deepspeed_run("s1-fp32-dp2")
    url = "memory://mapping-remote/store"
    ucpstore.convert(run.path, url, mapping=MEGATRON)
    back = ucpstore.open(url, mapping=MEGATRON.inverse())
    for name, parameter in ucpstore.open(run.path).items():
        for state in back[name]:
            assert back[name][state][...].tobytes() == parameter[state][...].tobytes()


def test_no_mapping_is_refused() -> None:
    run = deepspeed_run("s1-fp32-dp2")
    with pytest.raises(PlanError, match="expected a ucpstore"):
        ucpstore.open(run.path, mapping="mapping.toml")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="give against"):
        ucpstore.verify(run.path, mapping=PREFIX)


def test_on_the_command_line(tmp_path: Path) -> None:
    run = deepspeed_run("s1-fp32-dp2")
    (tmp_path / "m.json").write_text(json.dumps(MEGATRON.to_json()))
    (tmp_path / "p.toml").write_text('[[rename]]\nfrom = "{name**}"\nto = "net.{name}"\n')
    source, store = str(run.path), str(tmp_path / "store")
    mapping = ["--mapping", str(tmp_path / "m.json"), "--mapping", str(tmp_path / "p.toml")]

    def call(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, list(arguments))
        assert result.exit_code == code, result.output
        return result.output

    call("convert", source, store, *mapping)
    call("verify", store, "--against", source, *mapping)
    call("diff", source, store, *mapping)
    assert "net.layers.0.self_attention.query_key_value.weight" in call("ls", source, *mapping)
    assert "query_key_value" in call("tree", store)
    assert "mapping=sha256:" in call("inspect", source, *mapping)
    inverse = json.loads(call("mapping", str(tmp_path / "m.json"), "--inverse"))
    assert Mapping.from_json(inverse) == MEGATRON.inverse()
    assert "megatron-deepspeed-llama-to-hf" in call("mapping")
    validate(json.loads(call("mapping", "--json")), "presets")
    (tmp_path / "bad.toml").write_text('[[rename]]\nfrom = "model.{name**}"\nto = "{name}"\n')
    assert "'lm_head.weight' is matched by no entry" in call(
        "plan", source, store, "--mapping", str(tmp_path / "bad.toml"), code=3
    )
    assert "expected NAME=N" in call("inspect", source, "--mapping", "preset:x,y", code=3)
    assert "there are bloom-pipe-to-hf" in call("inspect", source, "--mapping", "preset:x", code=3)
    assert "cannot be read" in call("inspect", source, "--mapping", "nowhere.toml", code=3)
