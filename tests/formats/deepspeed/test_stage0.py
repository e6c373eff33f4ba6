"""Stage 0: a plain optimizer's numbered states get the right names, or the checkpoint is refused.

That every state of the real runs is bit-equal to the live optimizer's is shown with those of the other
stages (``test_real_runs.py``, ``tests/test_exactness.py``); here are the traps.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ucpstore
from tests.deepspeed_runs import Run, copy_run, deepspeed_run
from tests.formats.deepspeed.synthetic import edit
from tests.formats.deepspeed.test_real_runs import bits, open_run, read, truth_of
from ucpstore.contracts import Role
from ucpstore.errors import CorruptSourceError, Kind, PatternError, UnsupportedSourceError
from ucpstore.formats.deepspeed import FORMAT
from ucpstore.formats.deepspeed.naming import PROBE
from ucpstore.formats.deepspeed.stage0 import NAMES_FILE
from ucpstore.io import open_files
from ucpstore.pieces import PieceSource

MODEL = "mp_rank_00_model_states.pt"
AMBIGUOUS = ["frozen-s0-fp32-dp1", "crossed-s0-fp32-dp1", "reversed-s0-fp32-dp1"]
OURS = {"exp_avg": "adam_m", "exp_avg_sq": "adam_v"}

Tensors = dict[str, torch.Tensor]


def require_truth(source: PieceSource, run: Run) -> None:
    for fqn, state, value in truth_of(run):
        assert bits(read(source, fqn, state)) == bits(value), (fqn, state)


def optimizer_order(run: Run) -> list[list[str]]:
    """Names in the live optimizer's order; the truth lists a group in the module's."""
    names = [list(group["names"]) for group in run.facts["groups"]]
    if run.case.grouping == "reversed":
        names = [group[::-1] for group in names]
    if run.case.grouping == "crossed":  # matrices, then vectors
        names = [sorted(g, key=lambda name: run.tensor("fp32", name).ndim < 2) for g in names]
    return names


def write_model(
    folder: Path,
    module: Tensors,
    optimizer: Any,
    *,
    buffers: tuple[str, ...] = (),
    **more: Any,
) -> PieceSource:
    """A model file as the engine writes it without ZeRO, opened."""
    content = {
        "module": module,
        "buffer_names": list(buffers),
        "optimizer": optimizer,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": None,
        "lr_scheduler": {"last_batch_iteration": 2},
        "global_steps": 3,
        "skipped_steps": 0,
        "global_samples": 6,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        "ds_config": {"zero_optimization": {"stage": 0}},
        **more,
    }
    target = folder / "global_step3"
    target.mkdir()
    (folder / "latest").write_text("global_step3")
    torch.save(content, target / MODEL)
    return FORMAT.open(open_files(folder))


def trained(
    module: dict[str, torch.nn.Parameter], groups: list[list[str]], *, named: bool = False
) -> torch.optim.Optimizer:
    """An AdamW that stepped twice, with other gradients for every parameter."""
    members = [[(n, module[n]) if named else module[n] for n in group] for group in groups]
    optimizer = torch.optim.AdamW(
        [{"params": m, "weight_decay": 0.1 * i} for i, m in enumerate(members)],
        lr=1e-2,
    )
    for step in range(2):
        for number, parameter in enumerate(module.values()):
            generator = torch.Generator().manual_seed(100 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer


def parameters(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }


def require_moments(
    source: PieceSource, module: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    for name, parameter in module.items():
        for key, ours in OURS.items():
            if parameter in optimizer.state:
                value = optimizer.state[parameter][key].numpy()
                assert bits(read(source, name, ours)) == bits(value), (name, key)


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_real_runs_whose_names_cannot_be_known_are_refused(name: str) -> None:
    with pytest.raises(PatternError) as caught:
        open_run(deepspeed_run(name))
    text = str(caught.value)
    assert caught.value.kind is Kind.AMBIGUOUS
    assert NAMES_FILE in text
    assert "can be any of" in text
    expected = {
        "frozen-s0-fp32-dp1": "the optimizer has only 1 of these 2",
        "crossed-s0-fp32-dp1": "several groups",
        "reversed-s0-fp32-dp1": "not in the module's order",
    }
    assert expected[name] in text
    if name == "frozen-s0-fp32-dp1":
        for layer in (0, 1):
            assert f"'model.layers.{layer}.self_attn.o_proj.weight'" in text


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_the_owner_can_name_them(name: str, tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(name), tmp_path)
    (run.tag_path / NAMES_FILE).write_text(json.dumps(optimizer_order(run)))
    source = open_run(run)
    require_truth(source, run)
    assert not any("told apart" in text for text in source.warnings)
    ucpstore.convert(run.path, tmp_path / "store")
    store = ucpstore.open(tmp_path / "store")
    for fqn in run.facts["parameters"]:
        assert store[fqn].adam_m[...].tobytes() == run.tensor("exp_avg", fqn).tobytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda names: names[:1], "has 1 lists"),
        (lambda names: [names[0][1:], names[1]], "expected one for each"),
        (lambda names: [[n.replace("up_", "gate_") for n in names[0]], names[1]], "named twice"),
        (lambda names: [["nobody", *names[0][1:]], names[1]], "'nobody' of group 0"),
        (lambda names: [names[0][::-1], names[1]], "has shape"),
        (lambda names: {"a": 1}, "another structure"),
        (lambda names: [[1]], "another structure"),
    ],
)
def test_wrong_names_are_refused(
    change: Callable[[list[list[str]]], Any], words: str, tmp_path: Path
) -> None:
    run = copy_run(deepspeed_run("s0-fp32-dp2"), tmp_path)
    names = optimizer_order(run)
    (run.tag_path / NAMES_FILE).write_text(json.dumps(change(names)))
    with pytest.raises(PatternError, match=words):
        open_run(run)


def test_names_that_are_no_json(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s0-fp32-dp2"), tmp_path)
    for text in ("", "[[", "[" * 100_000):
        (run.tag_path / NAMES_FILE).write_text(text)
        with pytest.raises(PatternError, match="expected a JSON list"):
            open_run(run)


@pytest.mark.parametrize(
    ("name", "assumed"),
    [
        ("s0-fp32-dp2", True),
        ("named-s0-fp32-dp2", False),
        ("s0-bf16-dp2", False),
        ("crossed-s0-bf16-dp2", False),
        ("reversed-s0-bf16-dp1", False),
        ("frozen-tied-s0-bf16-dp2", False),
        ("crossed-fused-s0-bf16-dp1", False),
        ("unstepped-s0-bf16-dp1", True),  # all norms are still ones
    ],
)
def test_a_warning_says_what_rests_on_the_order(name: str, assumed: bool) -> None:
    source = open_run(deepspeed_run(name))
    found = [text for text in source.warnings if "told apart by the module's order" in text]
    assert len(found) == assumed


def test_masters_in_fp32_are_the_weights() -> None:
    source = open_run(deepspeed_run("s0-fp32-dp2"))
    states = source.parameters["lm_head.weight"].states
    assert set(states) == {"fp32", "adam_m", "adam_v"}
    assert states["fp32"].role is Role.MASTER_WEIGHT
    half = open_run(deepspeed_run("s0-bf16-dp2")).parameters["lm_head.weight"].states
    assert set(half) == {"fp32", "adam_m", "adam_v", "weight"}
    assert half["weight"].derived


def test_trap_equal_shapes_in_both_groups(tmp_path: Path) -> None:
    """Order within the groups would fit here, and swap the moments of `a` and `b`."""
    module = parameters({"a": (8, 8), "c": (4, 4), "b": (8, 8), "d": (2, 2)})
    optimizer = trained(module, [["b", "c"], ["a", "d"]])
    weights = {name: p.detach() for name, p in module.items()}
    with pytest.raises(PatternError, match="'a', 'b': parameters of this shape are in several"):
        write_model(tmp_path, weights, optimizer.state_dict())


def test_trap_order_other_than_the_modules(tmp_path: Path) -> None:
    module = parameters({"a": (8, 8), "b": (8, 8), "c": (4,)})
    optimizer = trained(module, [["c", "b", "a"]])
    weights = {name: p.detach() for name, p in module.items()}
    with pytest.raises(PatternError, match=r"'a', 'b'.* not in the module's order"):
        write_model(tmp_path, {**weights, "frozen": torch.ones(3)}, optimizer.state_dict())


def test_names_that_torch_saved_settle_both_traps(tmp_path: Path) -> None:
    module = parameters({"a": (8, 8), "c": (4, 4), "b": (8, 8), "d": (2, 2)})
    optimizer = trained(module, [["b", "c"], ["d", "a"]], named=True)
    weights = {name: p.detach() for name, p in module.items()}
    source = write_model(tmp_path, weights, optimizer.state_dict())
    require_moments(source, module, optimizer)
    groups = source.common.document["param_groups"]
    assert [group["params"] for group in groups] == [["b", "c"], ["d", "a"]]


def test_names_of_another_module_are_ignored(tmp_path: Path) -> None:
    module = parameters({"a": (8, 8), "b": (3,)})
    optimizer = trained(module, [["b", "a"]], named=True)
    state = optimizer.state_dict()
    state["param_groups"][0]["param_names"] = ["module.b", "module.a"]
    source = write_model(tmp_path, {n: p.detach() for n, p in module.items()}, state)
    require_moments(source, module, optimizer)
    assert any("param_names of group 0" in text for text in source.warnings)


def test_frozen_parameters_inside_the_only_group(tmp_path: Path) -> None:
    """`AdamW(model.parameters())` numbers frozen parameters too; they have no state."""
    module = parameters({"a": (8, 8), "ice": (8, 8), "b": (8, 8), "bias": (8,)})
    optimizer = torch.optim.AdamW(module.values())
    for number, (name, parameter) in enumerate(module.items()):
        if name != "ice":
            parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    weights = {name: p.detach() for name, p in module.items()}
    source = write_model(tmp_path, weights, optimizer.state_dict())
    require_moments(source, module, optimizer)
    assert set(source.parameters["ice"].states) == {"fp32"}


def test_states_without_any_tensor_in_two_groups_are_refused(tmp_path: Path) -> None:
    """Plain SGD has no state: which parameter has which weight decay cannot be known."""
    module = parameters({"a": (8, 8), "b": (3,)})
    optimizer = torch.optim.SGD([{"params": [p]} for p in module.values()], lr=0.1)
    weights = {name: p.detach() for name, p in module.items()}
    with pytest.raises(PatternError, match="no states of them that tell their shape"):
        write_model(tmp_path, weights, optimizer.state_dict())


def test_a_number_as_parameter(tmp_path: Path) -> None:
    module = parameters({"scale": (), "w": (3, 2)})
    optimizer = trained(module, [["scale", "w"]])
    source = write_model(
        tmp_path, {n: p.detach() for n, p in module.items()}, optimizer.state_dict()
    )
    require_moments(source, module, optimizer)
    assert source.parameters["scale"].states["adam_m"].shape == ()


def test_channels_last_parameters(tmp_path: Path) -> None:
    value = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    module = {"conv": torch.nn.Parameter(value)}
    optimizer = trained(module, [["conv"]])
    weights = {"conv": module["conv"].detach()}
    assert not weights["conv"].is_contiguous()
    source = write_model(tmp_path, weights, optimizer.state_dict())
    require_moments(source, module, optimizer)
    assert bits(read(source, "conv", "fp32")) == bits(weights["conv"].numpy())
    mixed = optimizer.state_dict()
    mixed["state"][0]["exp_avg"] = mixed["state"][0]["exp_avg"].contiguous()
    (tmp_path / "mixed").mkdir()
    with pytest.raises(UnsupportedSourceError, match="several memory formats"):
        write_model(tmp_path / "mixed", weights, mixed)


def test_factored_states_are_refused(tmp_path: Path) -> None:
    module = parameters({"a": (8, 6)})
    optimizer = torch.optim.Adafactor(module.values())
    module["a"].grad = torch.ones(8, 6)
    optimizer.step()
    with pytest.raises(UnsupportedSourceError, match=r"several shapes"):
        write_model(tmp_path, {"a": module["a"].detach()}, optimizer.state_dict())


def half_file(
    masters: list[list[torch.Tensor]], module: Tensors, folder: Path, **more: Any
) -> PieceSource:
    """A file of `FP16_UnfusedOptimizer` whose moments are functions of the masters."""
    flat = [master for group in masters for master in group]
    ends = np.cumsum([len(group) for group in masters])
    state = {
        "state": {
            i: {"step": torch.tensor(4.0), "exp_avg": m * 2, "exp_avg_sq": m * m}
            for i, m in enumerate(flat)
        },
        "param_groups": [
            {"lr": 0.1, "params": list(range(int(end) - len(group), int(end)))}
            for end, group in zip(ends, masters, strict=True)
        ],
    }
    scaler = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 3}
    optimizer = {**scaler, "optimizer_state_dict": state, "fp32_groups": masters}
    return write_model(folder, module, optimizer, **more)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_trap_is_settled_by_the_values_of_masters(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    names = ["a", "b", "c", "d", "e"]
    masters = {name: torch.randn(40, 30, generator=generator) for name in names}
    masters["b"][0, :3] = torch.tensor([float("nan"), float("inf"), 1e30])
    masters["c"][0, :2] = torch.tensor([-0.0, 1e-30])
    module = {name: value.to(dtype) for name, value in masters.items()}
    listed = [["d", "a"], ["c", "b"]]  # `e` is frozen
    source = half_file([[masters[n] for n in group] for group in listed], module, tmp_path)
    for name in names[:4]:
        assert bits(read(source, name, "fp32")) == bits(masters[name].numpy())
        assert bits(read(source, name, "adam_m")) == bits((masters[name] * 2).numpy())
    assert not source.parameters["e"].trainable
    groups = source.common.document["param_groups"]
    assert [group["params"] for group in groups] == listed
    assert source.common.document["loss_scaler"] == {
        "dynamic_loss_scale": False,
        "cur_scale": 1.0,
        "cur_iter": 3,
    }


def test_equal_values_in_both_groups_are_refused(tmp_path: Path) -> None:
    one, two = torch.ones(40, 30), torch.ones(40, 30)
    one[20, 0] = 7  # beyond the elements that are compared
    assert PROBE < 20 * 30
    module = {"a": one.bfloat16(), "b": two.bfloat16()}
    with pytest.raises(PatternError, match=r"'a', 'b'.*several groups"):
        half_file([[two], [one]], module, tmp_path)


def test_masters_of_another_model_are_refused(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    masters = [torch.randn(40, 30, generator=generator) for _ in range(2)]
    module = {"a": masters[0].bfloat16(), "b": (masters[1] + 1).bfloat16()}
    with pytest.raises(CorruptSourceError, match="are the weights of no parameter of their shape"):
        half_file([masters], module, tmp_path)


def test_opening_reads_only_the_first_elements(tmp_path: Path) -> None:
    """The one exception to the rule that opening reads no tensor bytes is bounded."""
    generator = torch.Generator().manual_seed(3)
    masters = [torch.randn(400, 300, generator=generator) for _ in range(2)]
    module = {"a": masters[0].bfloat16(), "b": masters[1].bfloat16()}
    half_file([masters], module, tmp_path)
    files = open_files(tmp_path)
    counted: list[int] = []
    plain = files.read

    def read_counted(name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = plain(name, offset, nbytes)
        counted.append(len(data))
        return data

    files.read = read_counted  # type: ignore[method-assign]
    FORMAT.open(files)
    assert counted.count(PROBE * 4) == counted.count(PROBE * 2) == 2
    assert sum(counted) < 100_000 < masters[0].nbytes


def flat_file(
    listed: list[list[str]], masters: Tensors, folder: Path, *, cloned: bool = False
) -> PieceSource:
    """A file of `FP16_Optimizer`: per group one flat master, and weights that view one flat tensor."""
    module = {name: value.bfloat16() for name, value in masters.items()}
    flats = [torch.cat([masters[name].flatten() for name in group]) for group in listed]
    for group, flat in zip(listed, flats, strict=True):
        half, start = flat.bfloat16(), 0
        for name in group:
            end = start + masters[name].numel()
            view = half[start:end].view(masters[name].shape)
            module[name], start = view.clone() if cloned else view, end
    state = {
        "state": {
            i: {"step": 4, "exp_avg": m * 2, "exp_avg_sq": m * m} for i, m in enumerate(flats)
        },
        "param_groups": [{"lr": 0.1, "step": 1, "params": [i]} for i in range(len(flats))],
    }
    optimizer = {"optimizer_state_dict": state, "fp32_groups_flat": flats, "clip_grad": 1.0}
    return write_model(folder, module, optimizer)


FLAT = {"a": (8, 8), "ice": (8, 8), "c": (32,), "b": (8, 8), "d": (4, 8)}


def test_trap_in_flat_groups_is_settled_by_the_places_of_weights(tmp_path: Path) -> None:
    """Two groups of equal length, not in the module's order, hold parameters of equal shapes."""
    generator = torch.Generator().manual_seed(9)
    masters = {name: torch.randn(shape, generator=generator) for name, shape in FLAT.items()}
    listed = [["b", "c"], ["d", "a"]]
    source = flat_file(listed, masters, tmp_path)
    for name in ("a", "b", "c", "d"):
        assert bits(read(source, name, "fp32")) == bits(masters[name].numpy())
        assert bits(read(source, name, "adam_m")) == bits((masters[name] * 2).numpy())
    assert not source.parameters["ice"].trainable
    assert source.parameters["a"].pattern == "dp: replicate"
    groups = source.common.document["param_groups"]
    assert [group["params"] for group in groups] == listed


def test_flat_groups_of_equal_values_are_refused(tmp_path: Path) -> None:
    masters = {name: torch.ones(shape) for name, shape in FLAT.items()}
    with pytest.raises(PatternError, match="several groups"):
        flat_file([["b", "c"], ["d", "a"]], masters, tmp_path)


def test_flat_groups_whose_weights_lie_apart_are_refused(tmp_path: Path) -> None:
    masters = {name: torch.ones(shape) for name, shape in FLAT.items()}
    with pytest.raises(UnsupportedSourceError, match="their order in it is unknown"):
        flat_file([["b", "c"], ["d", "a"]], masters, tmp_path, cloned=True)


SHAPES = [(3, 3), (4, 2), (3,), (2,)]


@given(data=st.data(), half=st.booleans())
@settings(max_examples=80, deadline=None)
def test_names_are_right_or_refused(data: st.DataObject, half: bool) -> None:
    """Any grouping: fp32 with groups in the module's order, 16 bit in any order."""
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=7))
    module = {
        f"p{i}": torch.full(shape, 1.0 + i) + torch.arange(math.prod(shape)).reshape(shape) / 7
        for i, shape in enumerate(shapes)
    }
    places = [data.draw(st.integers(0, 2), label=name) for name in module]  # 2: frozen
    listed = [[n for n, p in zip(module, places, strict=True) if p == group] for group in (0, 1)]
    listed = [group for group in listed if group]
    assume(listed)
    if half:
        listed = [data.draw(st.permutations(group)) for group in listed]
    with tempfile.TemporaryDirectory() as folder:
        try:
            if half:
                masters = [[module[name] for name in group] for group in listed]
                weights = {name: value.bfloat16() for name, value in module.items()}
                source = half_file(masters, weights, Path(folder))
            else:
                live = {name: torch.nn.Parameter(value) for name, value in module.items()}
                source = write_model(Path(folder), module, adam(live, listed))
        except PatternError:
            kinds = [
                {(places[i], s) for i, s in enumerate(shapes) if s == shape} for shape in shapes
            ]
            assert not half
            assert any(len(kind) > 1 for kind in kinds), "refused without an ambiguity"
            return
        groups = source.common.document["param_groups"]
        assert [group["params"] for group in groups] == listed
        for name in (name for group in listed for name in group):
            value = (module[name] * 2).numpy()
            assert bits(read(source, name, "adam_m")) == bits(value)


def adam(module: dict[str, torch.nn.Parameter], listed: list[list[str]]) -> dict[str, Any]:
    """torch's state dict, with moments that are twice and the square of the parameters."""
    groups = [{"params": [module[name] for name in group]} for group in listed]
    optimizer = torch.optim.Adam(groups or [{"params": []}])
    for group in listed:
        for name in group:
            p = module[name]
            optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": p.detach() * 2}
            optimizer.state[p]["exp_avg_sq"] = p.detach() ** 2
    return optimizer.state_dict()


def test_case_33_no_optimizer_is_weights_only(tmp_path: Path) -> None:
    """case-33 (DeepSpeed #7571): with bf16 at stage 0 some versions saved no optimizer."""
    run = copy_run(deepspeed_run("s0-bf16-dp2"), tmp_path)
    edit(run.tag_path / MODEL, lambda content: content.update(optimizer=None))
    source = open_run(run)
    (warning,) = [text for text in source.warnings if "weights only" in text]
    assert "was not saved" in warning
    weights = [fqn for fqn, p in source.parameters.items() if set(p.states) == {"weight"}]
    assert set(weights) == set(run.facts["parameters"])
    for fqn in weights:
        assert bits(read(source, fqn, "weight")) == bits(run.tensor("weight", fqn))
    ucpstore.convert(run.path, tmp_path / "store")
    assert ucpstore.verify(tmp_path / "store", against=run.path).ok


@pytest.mark.parametrize("place", ["state", "group", "both"])
def test_case_36_step_in_either_place(tmp_path: Path, place: str) -> None:
    """case-36 (DeepSpeed PR #5289): torch counts in the state, apex in the group, FusedAdam in both."""
    module = parameters({"a": (8, 8), "b": (3,)})
    state = trained(module, [["a"], ["b"]]).state_dict()
    for entry in state["state"].values():
        entry["step"] = 7
        if place == "group":
            del entry["step"]
    for group in state["param_groups"]:
        if place != "state":
            group["step"] = 7 if place == "group" else 1
    source = write_model(tmp_path, {n: p.detach() for n, p in module.items()}, state)
    document = source.common.document
    assert document["steps"] == {"a": 7, "b": 7}
    kept = {"state": ["state"], "group": ["param_groups"], "both": ["state", "param_groups"]}
    assert document["framework"]["optimizer"]["step"]["kept_in"] == kept[place]


def test_case_37_no_scheduler_is_a_warning() -> None:
    """case-37 (DeepSpeed #3875): the client owns the scheduler."""
    source = open_run(deepspeed_run("legacy-s0-fp32-dp1"))
    assert source.common.document["scheduler"] is None
    assert any("no lr_scheduler state" in text for text in source.warnings)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda o: o.pop("param_groups"), UnsupportedSourceError, "expected those of a torch"),
        (lambda o: o["param_groups"][0].update(params=[0, 0]), CorruptSourceError, "two places"),
        (lambda o: o["param_groups"].pop(), CorruptSourceError, "which are in no group"),
        (lambda o: o["param_groups"][0].update(params=7), CorruptSourceError, "expected a list"),
        (lambda o: o.update(state=[1]), CorruptSourceError, "expected a dict"),
        (
            lambda o: o["state"][0].update(exp_avg=torch.ones(5, 5), exp_avg_sq=torch.ones(5, 5)),
            CorruptSourceError,
            r"1 parameters of shape \[5, 5\], but 'module' has 0",
        ),
    ],
)
def test_damaged_optimizers(
    change: Callable[[Any], Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    run = copy_run(deepspeed_run("s0-fp32-dp2"), tmp_path)
    edit(run.tag_path / MODEL, lambda content: change(content["optimizer"]))
    with pytest.raises(error, match=words):
        open_run(run)


@pytest.mark.parametrize("short", [True, False])
def test_damaged_masters(short: bool, tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s0-bf16-dp2"), tmp_path)

    def change(content: dict[str, Any]) -> None:
        group = content["optimizer"]["fp32_groups"][0]
        if short:
            group.pop()
        else:
            group[0] = "text"

    edit(run.tag_path / MODEL, change)
    with pytest.raises(CorruptSourceError, match="fp32_groups: found"):
        open_run(run)


def test_files_of_another_stage_beside(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s0-fp32-dp2"), tmp_path)
    other = deepspeed_run("s1-fp32-dp2")
    for path in other.tag_path.glob("*optim_states.pt"):
        (run.tag_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UnsupportedSourceError, match="as of ZeRO stage 0, but 2 rank files"):
        open_run(run)
