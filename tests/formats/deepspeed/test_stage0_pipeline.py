"""Pipelines without ZeRO: layers get their stages and parameters their names, or the checkpoint is refused.

That every state of the real runs is bit-equal to the live engine's is shown in ``test_pipeline.py``, that
a run written in its own layout has DeepSpeed's files in ``test_writer_parallel.py``, and that runs go on in
other layouts in ``tests/test_matrix.py``.
"""

from __future__ import annotations

import doctest
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ucpstore
from tests.deepspeed_runs import Run, copy_run, deepspeed_run
from tests.deepspeed_runs.compare import differences
from tests.deepspeed_runs.resume import Resumed, resume_run, train_run
from tests.formats.deepspeed.native import differences as unlike
from tests.formats.deepspeed.synthetic import edit
from tests.formats.deepspeed.test_pipeline import EMBED, told
from tests.formats.deepspeed.test_real_runs import bits, open_run, read
from ucpstore import Layout
from ucpstore.errors import (
    CorruptSourceError,
    IncompleteSourceError,
    IntegrityError,
    Kind,
    PatternError,
    UnsupportedSourceError,
)
from ucpstore.formats.deepspeed import FORMAT, staging
from ucpstore.formats.deepspeed.stage0 import NAMES_FILE
from ucpstore.formats.deepspeed.staging import Held, Stage, assign
from ucpstore.io import open_files
from ucpstore.pieces import PieceSource

HEADLESS = "pp2-s0-fp32-dp2"
"""The head is a function over the tied embedding: no layer file of the last stage has it."""
FROZEN = "pp2-frozen-s0-fp32-dp1"
"""Both layers of the tied embedding have a file."""
NAMED = "pp2-named-s0-fp32-dp1"
BOTH = "pp2-tp2-s0-fp32-dp1"


# ------------------------------------------------------------------- names that must be told


def test_a_tied_module_that_nothing_names_is_refused() -> None:
    for name, words in {
        HEADLESS: "no cut of the 5 layers into 2 stages.*hold 18 parameters, the layer files 17",
        FROZEN: "layers 0, 7 have the same weights",
    }.items():
        with pytest.raises(PatternError, match=words) as caught:
            open_run(deepspeed_run(name))
        assert caught.value.kind is Kind.AMBIGUOUS
        assert "tied_modules" in str(caught.value)
        assert NAMES_FILE in str(caught.value)


def test_names_that_rest_on_the_order_are_told(tmp_path: Path) -> None:
    warnings = [text for text in open_run(told(HEADLESS, tmp_path)).warnings if "order" in text]
    assert ["mp_rank_00" in text for text in warnings] == [True, False]
    assert "2.up.weight" in warnings[0]
    assert "5.norm.weight" in warnings[1]
    assert not any("order" in text for text in open_run(deepspeed_run(NAMED)).warnings)


def groups_of(run: Run) -> list[list[str]]:
    """Names by group, stage by stage, tied ones once."""
    decays: dict[float, dict[str, None]] = {0.1: {}, 0.0: {}}
    for stage in run.stages:
        for group in stage["groups"]:
            decays[group["hyper"]["weight_decay"]].update(dict.fromkeys(group["names"]))
    return [list(names) for names in decays.values()]


@pytest.mark.parametrize("name", [HEADLESS, FROZEN, "pp4-s0-fp32-dp1"])
def test_all_names_in_groups_do_as_well(name: str, tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(name), tmp_path / "a")
    names = groups_of(run)
    (run.tag_path / NAMES_FILE).write_text(json.dumps(names))
    source = open_run(run)
    assert not any("told apart" in text for text in source.warnings)
    other = open_run(told(name, tmp_path / "b"))
    assert source.parameters.keys() == other.parameters.keys()
    for fqn, parameter in source.parameters.items():
        for state in parameter.states:
            assert bits(read(source, fqn, state)) == bits(read(other, fqn, state)), (fqn, state)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"tied_modules": {"embed": [0, "7"]}}, "other tied_modules"),
        ({"tied_modules": {"embed": [0], "other": [0]}}, "a layer in two tied modules"),
        ({"tied_modules": [0, 7]}, "other tied_modules"),
        ({"tied": {}}, "another structure"),
        ({"groups": {"a": ["b"]}}, "another structure"),
        ({"tied_modules": {"embed": [5, 7]}}, "layer 5 as one.*'5.seen' is a buffer"),
        ({"groups": [["2.up.weight"]], "tied_modules": {"embed": [0, 7]}}, "no cut of the"),
    ],
)
def test_wrong_names_are_refused(content: Any, words: str, tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(HEADLESS), tmp_path)
    (run.tag_path / NAMES_FILE).write_text(json.dumps(content))
    with pytest.raises((PatternError, CorruptSourceError), match=words):
        open_run(run)


def test_tied_modules_need_a_pipeline(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run("s0-fp32-dp2"), tmp_path)
    (run.tag_path / NAMES_FILE).write_text('{"tied_modules": {"embed": [0]}}')
    with pytest.raises(PatternError, match="no layer files"):
        open_run(run)


def test_exchanged_names_exchange_the_states(tmp_path: Path) -> None:
    """Names that the owner writes are believed where shapes agree: the control of the tests above."""
    run = copy_run(deepspeed_run(HEADLESS), tmp_path)
    names = groups_of(run)
    one, two = (names[0].index(f"{layer}.up.weight") for layer in (2, 3))
    names[0][one], names[0][two] = names[0][two], names[0][one]
    (run.tag_path / NAMES_FILE).write_text(json.dumps(names))
    found = read(open_run(run), "2.up.weight", "adam_m")
    assert bits(found) == bits(run.tensor("exp_avg", "3.up.weight"))


# ------------------------------------------------------------------- damage


def nudge(content: dict[str, Any]) -> None:
    content["optimizer"]["state"][0]["exp_avg"].data.view(-1)[0] += 1e-3


def test_copies_of_a_tied_module_that_differ_are_an_error(tmp_path: Path) -> None:
    run = told(FROZEN, tmp_path)
    edit(run.tag_path / "mp_rank_01_model_states.pt", nudge)
    with pytest.raises(IntegrityError, match=rf"{EMBED}.*mp_rank_01") as caught:
        read(open_run(run), EMBED, "adam_m")
    assert caught.value.kind == Kind.REPLICAS_DIFFER


def test_weights_of_a_tied_module_that_differ_are_an_error(tmp_path: Path) -> None:
    """In fp32 they are the masters: each stage's are in its own layer's file."""
    run = told(FROZEN, tmp_path)
    edit(run.tag_path / "layer_07-model_states.pt", lambda layer: layer["weight"].data.add_(1))
    with pytest.raises(IntegrityError, match=rf"{EMBED}.*layer_07"):
        read(open_run(run), EMBED, "fp32")


@pytest.mark.parametrize(("name", "layer"), [(NAMED, 6), (NAMED, 2), (BOTH, 5), (HEADLESS, 3)])
def test_a_missing_layer_is_named(name: str, layer: int, tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(name), tmp_path)
    paths = sorted(run.tag_path.glob(f"layer_0{layer}-*"))
    for path in paths:
        path.unlink()
    with pytest.raises(IncompleteSourceError) as caught:
        open_run(run)
    missing = [Path(found).name for found in caught.value.context["missing"]]
    assert missing == [path.name for path in paths]


def test_a_missing_layer_that_nothing_names_is_refused(tmp_path: Path) -> None:
    run = told(HEADLESS, tmp_path)
    (run.tag_path / "layer_06-model_states.pt").unlink()
    with pytest.raises(PatternError, match="A layer file is missing, or"):
        open_run(run)


def test_a_missing_stage_is_named(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(NAMED), tmp_path)
    (run.tag_path / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(IncompleteSourceError, match=r"mp_rank_01_model_states.pt"):
        open_run(run)


def test_files_of_zero_beside(tmp_path: Path) -> None:
    run = copy_run(deepspeed_run(NAMED), tmp_path)
    for rank in range(2):
        name = f"zero_pp_rank_0_mp_rank_0{rank}_optim_states.pt"
        (run.tag_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedSourceError, match="no param_shapes, as of ZeRO stage 0"):
        open_run(run)


def test_stages_of_other_hyper_parameters_are_refused(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["optimizer"]["param_groups"][0]["weight_decay"] = 0.5

    run = copy_run(deepspeed_run(NAMED), tmp_path)
    edit(run.tag_path / "mp_rank_01_model_states.pt", change)
    with pytest.raises(CorruptSourceError, match="'weight_decay' of group 0"):
        open_run(run)


def test_a_step_of_another_copy_is_an_error(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        names = content["optimizer"]["param_groups"][1]["param_names"]
        index = len(content["optimizer"]["param_groups"][0]["params"]) + names.index(EMBED)
        content["optimizer"]["state"][index]["step"] += 1

    run = copy_run(deepspeed_run(NAMED), tmp_path)
    edit(run.tag_path / "mp_rank_01_model_states.pt", change)
    with pytest.raises(CorruptSourceError, match="step of"):
        open_run(run)


# ------------------------------------------------------------------- pipelines made here

Layer = Mapping[str, torch.Tensor]


def write_pipeline(
    folder: Path,
    layers: Mapping[int, Layer],
    stages: Sequence[Sequence[tuple[str, torch.Tensor]]],
    *,
    buffers: Sequence[Sequence[str]] = (),
    named: bool = False,
) -> list[dict[str, dict[str, torch.Tensor]]]:
    """A pipeline whose stages' optimizers hold the given parameters; returns their states by name."""
    target = folder / "global_step2"
    target.mkdir()
    (folder / "latest").write_text("global_step2")
    found = []
    for stage, members in enumerate(stages):
        split = [[(n, p) for n, p in members if (p.ndim > 1) == flat] for flat in (True, False)]
        groups: list[dict[str, Any]] = [
            {"params": [(n, torch.nn.Parameter(p)) for n, p in group], "weight_decay": 0.1 * i}
            for i, group in enumerate(split)
            if group
        ]
        parameters = [member for group in groups for member in group["params"]]
        if not named:
            groups = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
        optimizer = torch.optim.AdamW(groups)
        for number, (_, parameter) in enumerate(parameters):
            generator = torch.Generator().manual_seed(100 * stage + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        found.append({name: optimizer.state[parameter] for name, parameter in parameters})
        content = {
            "module": None,
            "buffer_names": list(buffers[stage]) if buffers else [],
            "optimizer": optimizer.state_dict(),
            "param_shapes": None,
            "lr_scheduler": None,
            "global_steps": 1,
            "skipped_steps": 0,
            "dp_world_size": 1,
            "mp_world_size": len(stages),
            "checkpoint_parallel_dimensions": {"pp_degree": len(stages), "tp_degree": 1},
            "ds_version": "0.19.8",
            "ds_config": {"zero_optimization": {"stage": 0}},
        }
        torch.save(content, target / f"mp_rank_{stage:02d}_model_states.pt")
    for number, layer in layers.items():  # which have stepped
        torch.save(dict(layer), target / f"layer_{number:02d}-model_states.pt")
    return found


def open_folder(folder: Path) -> PieceSource:
    return FORMAT.open(open_files(folder))


def random_layer(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_a_pipeline_without_tied_modules_needs_nothing_told(tmp_path: Path) -> None:
    block = {"w": (3, 4), "b": (3,)}
    layers = {n: random_layer(block, n) for n in (1, 2, 4)}
    stages = [
        [(f"{n}.{k}", v) for n in own for k, v in layers[n].items()] for own in ((1,), (2, 4))
    ]
    states = write_pipeline(tmp_path, layers, stages)
    source = open_folder(tmp_path)
    assert source.common.document["framework"]["pipeline"] == {"stages": [[1], [2, 4]], "tied": {}}
    for name, state in {**states[0], **states[1]}.items():
        assert bits(read(source, name, "adam_m")) == bits(state["exp_avg"].numpy()), name
        layer, _, key = name.partition(".")
        assert bits(read(source, name, "fp32")) == bits(layers[int(layer)][key].numpy())


def test_several_cuts_are_refused_and_buffers_settle_them(tmp_path: Path) -> None:
    """A frozen layer like the others may be any of them."""
    block = {"w": (3, 4), "seen": (2,)}
    layers = {n: random_layer(block, n) for n in range(3)}
    members = [[("0.w", layers[0]["w"])], [("2.w", layers[2]["w"])]]
    for number, buffers in enumerate(
        [[["0.seen"], ["2.seen"]], [["0.seen", "1.seen"], ["2.seen"]]]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_pipeline(folder, layers, members, buffers=buffers)
        with pytest.raises(PatternError, match="no cut of the 3 layers"):
            open_folder(folder)
    (folder / "global_step2" / NAMES_FILE).write_text('[["0.w", "2.w"]]')
    source = open_folder(folder)
    assert not source.parameters["1.w"].trainable
    assert source.parameters["2.w"].trainable


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[int], int, list[dict[str, tuple[int, ...]]], bool]:
    kinds: list[dict[str, tuple[int, ...]]] = [
        {"w": (2, 3), "b": (2,)},
        {"w": (3, 2)},
        {"b": (2,)},
        {"w": (2, 3)},
    ]
    layers = draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=7))
    count = draw(st.integers(1, min(3, len(layers))))
    inner = st.integers(1, len(layers) - 1)
    cuts = sorted(draw(st.sets(inner, min_size=count - 1, max_size=count - 1)))
    tied = draw(st.booleans())
    return cuts, count, layers, tied


@given(pipelines(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_names_are_right_or_refused(
    made: tuple[list[int], int, list[dict[str, tuple[int, ...]]], bool], told_tied: bool
) -> None:
    cuts, count, shapes, tied = made
    layers = {n: random_layer(shape, n) for n, shape in enumerate(shapes)}
    last = len(layers) - 1
    if tied:
        layers[last] = dict(layers[0])
    bounds = [0, *cuts, len(layers)]
    stages = []
    for stage in range(count):
        own = range(bounds[stage], bounds[stage + 1])
        users = [n for n in own if tied and n in (0, last)][:1]
        first = [(f"tied_modules.e.{k}", v) for n in users for k, v in layers[n].items()]
        rest = [n for n in own if not (tied and n in (0, last))]
        stages.append(first + [(f"{n}.{k}", v) for n in rest for k, v in layers[n].items()])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        states = write_pipeline(folder, layers, stages)
        if told_tied and tied:
            words = {"tied_modules": {"e": [0, last]}}
            (folder / "global_step2" / NAMES_FILE).write_text(json.dumps(words))
        kinds = [{value.ndim for _, value in stage} for stage in stages]
        if all(len(kind) == 1 for kind in kinds) and kinds[0] != set().union(*kinds):
            # one stage has matrices only, the other vectors: nothing tells that these are two groups
            with pytest.raises((PatternError, CorruptSourceError), match=r"tied|'weight_decay'"):
                open_folder(folder)
            return
        try:
            source = open_folder(folder)
        except PatternError:
            assert tied  # without, everything is known
            return
        assert told_tied or not tied
        assert {fqn for fqn, p in source.parameters.items() if p.trainable} == {
            fqn for stage in states for fqn in stage
        }
        for stage in states:
            for fqn, state in stage.items():
                if not fqn.startswith("tied"):  # these have no equal copies here
                    found = read(source, fqn, "adam_m")
                    assert bits(found) == bits(state["exp_avg"].numpy()), fqn


# ------------------------------------------------------------------- which stage holds a layer


def test_the_examples_of_the_module() -> None:
    result = doctest.testmod(staging)
    assert result.attempted > 0
    assert result.failed == 0


def test_stages_by_what_they_hold() -> None:
    a, b = Counter({"a": 1}), Counter({"b": 1})
    layers = {0: a, 1: b, 2: a, 3: b}
    assert assign([Held(a + b), Held(a + b)], layers, {}, {}) == [
        (Stage((0, 1), ()), Stage((2, 3), ()))
    ]
    assert assign([Held(a), Held(a + b)], layers, {}, {}) == []
    # a parameter without states may be any
    assert assign([Held(Counter(), 1), Held(a + b + b)], layers, {}, {}) == [
        (Stage((0,), ()), Stage((1, 2, 3), ()))
    ]
    # a tied module on both stages, and one on the last
    found = assign([Held(a + b + a), Held(a + b + a)], layers, {"t": a}, {})
    assert found == [(Stage((0, 1), ("t",)), Stage((2, 3), ("t",)))]
    # a layer like the tied module: two ways, unless something fixes it
    layers = {0: b, 1: a, 2: b}
    ways = assign([Held(a + b), Held(a + b)], layers, {"t": a}, {})
    assert ways == [
        (Stage((0,), ("t",)), Stage((1, 2), ())),
        (Stage((0, 1), ()), Stage((2,), ("t",))),
    ]
    assert assign([Held(a + b), Held(a + b)], layers, {"t": a}, {1: 0}) == ways[1:]


# ------------------------------------------------------------------- targets


def test_names_in_the_groups_are_the_ranks_own(tmp_path: Path) -> None:
    run = deepspeed_run(BOTH)
    layout = Layout(pp=3, tp=1, dp=1, zero_stage=0)
    ucpstore.convert(run.path, tmp_path / "c", to="deepspeed", layout=layout)
    files = sorted((tmp_path / "c").glob("*/mp_rank_*"))
    assert len(files) == 3
    for file in files:
        content = torch.load(file, weights_only=False)
        shapes = iter(content["optimizer"]["state"].values())
        for group in content["optimizer"]["param_groups"]:
            assert len(group["param_names"]) == len(group["params"]) > 0
            for name in group["param_names"]:
                assert (
                    tuple(next(shapes)["exp_avg"].shape)
                    == run.full("fp32", name, stage=0 if name[0] in "t23" else 1).shape
                )


def test_the_names_file_is_needed_and_enough(tmp_path: Path) -> None:
    layout = Layout(pp=2, dp=1, zero_stage=0)
    path = tmp_path / "c"
    ucpstore.convert(deepspeed_run("pp2-s1-fp32-dp2").path, path, to="deepspeed", layout=layout)
    assert ucpstore.open(path).source.parallelism["zero_stage"] == 0
    next(path.glob("*/parameter_names.json")).unlink()
    with pytest.raises(PatternError, match="the same weights"):
        ucpstore.open(path)


def test_deepspeed_takes_another_norm_without_zero(tmp_path: Path) -> None:
    """Without clipping the two train alike to the last bit; with it they do not, and a warning says so."""
    name = "3d-pp2-s1-fp32-dp1"
    runs: dict[tuple[int, float], Resumed] = {}
    for clip in (0.0, 1.0):
        for stage in (0, 1):
            config = {"gradient_clipping": clip}
            folder = tmp_path / f"{stage}-{clip}"
            runs[stage, clip] = train_run(
                name, folder, world=2, pp=2, stage=stage, config=config, further=2
            )
        zero = runs[1, clip]
        found = differences(zero.run, runs[0, clip], zero.losses, rtol=0)
        assert ("exp_avg" in found) == ("losses" in found) == (clip > 0)
        report = ucpstore.convert(
            zero.run.path,
            tmp_path / f"c{clip}",
            to="deepspeed",
            layout=Layout(pp=2, zero_stage=0),
        )
        assert any("computes the norm" in text for text in report.warnings) == (clip > 0)


UNSCALED: dict[str, Any] = {"fp16": {"loss_scale": 1}, "gradient_clipping": 0.0}
DYNAMIC: dict[str, Any] = {
    "fp16": {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Resumed]:
    """Pipelines in fp16, each trained once, with the layers of their tied module told at stage 0."""
    made: dict[str, Resumed] = {}

    def make(name: str, stage: int, config: dict[str, Any]) -> Resumed:
        key = json.dumps([name, stage, config])
        if key not in made:
            folder = tmp_path_factory.mktemp("fp16") / "run"
            made[key] = train_run(
                name, folder, world=2, pp=2, stage=stage, dtype="fp16", config=config
            )
            if stage == 0:
                run = made[key].run
                words: Any = {"tied_modules": {"embed": [0, 7]}}
                if name.startswith("pp2-fused"):
                    words["groups"] = groups_of(run)
                (run.tag_path / NAMES_FILE).write_text(json.dumps(words))
        return made[key]

    return make


@pytest.mark.parametrize("name", ["3d-pp2-s1-fp32-dp1", "pp2-fused-s1-fp32-dp1"])
@pytest.mark.parametrize(
    ("source", "target", "config"),
    [(0, 0, DYNAMIC), (0, 1, UNSCALED), (1, 0, UNSCALED), (0, 1, DYNAMIC), (1, 0, DYNAMIC)],
)
def test_fp16_goes_on(
    name: str,
    source: int,
    target: int,
    config: dict[str, Any],
    half: Callable[..., Resumed],
    tmp_path: Path,
) -> None:
    before = half(name, source, config)
    wrapper = "FP16_Optimizer" if "fused" in name else "FP16_UnfusedOptimizer"
    wrappers = {0: wrapper, 1: "DeepSpeedZeroOptimizer"}
    assert before.run.facts["zero_optimizer"] == wrappers[source]
    ucpstore.convert(before.run.path, tmp_path / "store")
    layout = Layout(pp=2, dp=1, zero_stage=target)
    path = tmp_path / "c"
    ucpstore.convert(tmp_path / "store", path, to="deepspeed", layout=layout)
    resumed = resume_run(
        name, path, tmp_path / "r", world=2, pp=2, stage=target, dtype="fp16", config=config
    )
    assert resumed.run.facts["zero_optimizer"] == wrappers[target]
    found = differences(before.run, resumed, before.losses, rtol=0 if source == target else 2e-3)
    if source != target and config is DYNAMIC:  # DeepSpeed does not scale the loss without ZeRO
        found.pop("losses", None)
    assert found == {}
    was, now = before.run.facts["scaler"], resumed.run.facts["scaler"]
    assert was["cur_scale"] == now["cur_scale"] == (1 if config is UNSCALED else 512)
    if source == target:
        assert unlike(before.run.tag_path, next(path.glob("global_step*"))) == {}


def test_flat_groups_need_all_names(half: Callable[..., Resumed], tmp_path: Path) -> None:
    run = copy_run(half("pp2-fused-s1-fp32-dp1", 0, UNSCALED).run, tmp_path)
    file = run.tag_path / NAMES_FILE
    words = json.loads(file.read_text())
    file.write_text(json.dumps({"tied_modules": words["tied_modules"]}))
    with pytest.raises(PatternError, match=r"order of the parameters .* is not recorded"):
        open_run(run)
    file.write_text(json.dumps([[*words["groups"][0][:-1]], words["groups"][1]]))
    with pytest.raises(PatternError, match=r"no cut of the|is said to hold"):
        open_run(run)
    file.unlink()
    with pytest.raises(PatternError, match="the same weights"):
        open_run(run)


def test_masters_tell_parameters_of_one_shape_apart(
    half: Callable[..., Resumed], tmp_path: Path
) -> None:
    """In 16 bit the first elements of masters and of the layers' weights are compared, across files."""
    run = copy_run(half("3d-pp2-s1-fp32-dp1", 0, UNSCALED).run, tmp_path)

    def swap(content: dict[str, Any]) -> None:
        inner = content["optimizer"]
        masters = inner["fp32_groups"][0]
        shapes = [tuple(master.shape) for master in masters]
        one, two = [index for index, shape in enumerate(shapes) if shapes.count(shape) > 1][:2]
        two = next(i for i in range(one + 1, len(shapes)) if shapes[i] == shapes[one])
        masters[one], masters[two] = masters[two], masters[one]
        state = inner["optimizer_state_dict"]["state"]
        state[one], state[two] = state[two], state[one]

    edit(run.tag_path / "mp_rank_00_model_states.pt", swap)
    source = open_run(run)
    for fqn in run.stages[0]["parameters"]:
        assert bits(read(source, fqn, "adam_v")) == bits(run.tensor("exp_avg_sq", fqn)), fqn
    assert np.any(
        run.tensor("exp_avg_sq", "2.up.weight") != run.tensor("exp_avg_sq", "3.up.weight")
    )
