"""Native targets of models that no run here has: odd shapes, groups, names and documents."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ucpstore
from tests.fakes import ArraySource, random_array
from tests.formats.deepspeed.native import write
from ucpstore import Layout
from ucpstore.errors import (
    CorruptSourceError,
    Kind,
    PlanError,
    UcpStoreError,
    UnsupportedSourceError,
)
from ucpstore.formats.deepspeed import recipe, writer
from ucpstore.formats.deepspeed.contents import File, content, files_of
from ucpstore.formats.deepspeed.recipe import make_recipe
from ucpstore.formats.deepspeed.sameness import same_layout
from ucpstore.formats.torchwrite import TorchWriter
from ucpstore.io import open_files
from ucpstore.layout.region import Region
from ucpstore.layout.rules import Patterns

Shapes = Mapping[str, tuple[int, ...]]
STATES = ("fp32", "adam_m", "adam_v")
PIPELINE: Mapping[str, Any] = {"stages": [[0, 1, 2, 3]], "tied": {}}
LAYERS: Shapes = {"0.w": (3, 2), "1.w": (3, 2), "3.b": (2,)}


def made_up(
    shapes: Shapes,
    groups: Sequence[Sequence[str]] | None = None,
    *,
    framework: Mapping[str, Any] | None = None,
    specs: Mapping[str, Mapping[str, Any]] | None = None,
    **common: Any,
) -> ArraySource:
    """A source of a DeepSpeed run with Adam that has these parameters."""
    arrays = {
        fqn: {
            state: random_array(shape, seed=3 * number + k).reshape(shape)
            for k, state in enumerate(STATES)
        }
        for number, (fqn, shape) in enumerate(shapes.items())
    }
    document = {
        "param_groups": [
            {"lr": 0.1 * (n + 1), "weight_decay": 0.01 * n, "params": list(group)}
            for n, group in enumerate(groups or [list(shapes)])
        ],
        "steps": dict.fromkeys(shapes, 3),
        "counters": {"global_steps": 3, "global_samples": 6, "skipped_steps": 0},
        "framework": {
            "name": "deepspeed",
            "version": "0.19.8",
            "ds_config": {},
            "optimizer": {"step": {"kept_in": ["state"], "types": ["float32"]}, "scalars": []},
            **(framework or {}),
        },
        **common,
    }
    facts = {"dp": 1, "tp": 1, "pp": 1, "zero_stage": 1}
    return ArraySource(arrays, document, specs=specs, parallelism=facts)


def same(source: ArraySource, path: Path) -> None:
    """What was written has every state, in the same groups and order."""
    back = ucpstore.open(path).source
    assert back.parameters.keys() == source.parameters.keys()
    for fqn, parameter in source.parameters.items():
        for state, spec in parameter.states.items():
            region = Region.full(spec.shape)
            wanted, found = (np.empty(spec.shape, np.float32) for _ in range(2))
            source.read(fqn, state, region, wanted)
            back.read(fqn, state, region, found, compare=True)
            assert wanted.tobytes() == found.tobytes(), (fqn, state)
    mine, theirs = (s.common.document["param_groups"] for s in (source, back))
    assert theirs == [group for group in mine if group["params"]]


@pytest.mark.parametrize("dp", [1, 40])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("shapes", "groups"),
    [
        ({"a": ()}, None),
        ({"a": (0, 4)}, None),
        ({"a": (), "b": (0,), "c": (3, 2)}, None),
        ({"a": (2, 4), "b": (3,)}, [[], ["b"], ["a"]]),
        ({"a/b é\n.w": (2, 4), "..": (3,), "'\"": (1,)}, None),
    ],
)
def test_odd_models(
    shapes: Shapes, groups: Sequence[Sequence[str]] | None, stage: int, dp: int, tmp_path: Path
) -> None:
    source = made_up(shapes, groups)
    write(source, tmp_path, Layout(dp=dp, zero_stage=stage))
    same(source, tmp_path)


# ------------------------------------------------------------------------ pipelines


def test_a_stage_without_a_group_has_no_scheduler_numbers_of_it(tmp_path: Path) -> None:
    per_group = {"base_lrs": [0.1, 0.2], "_last_lr": [0.3, 0.4]}
    scheduler = {**per_group, "last_epoch": 3, "milestones": [5, 6], "_schedulers": [per_group]}
    groups = [["1.w"], ["0.w", "3.b"]]
    source = made_up(LAYERS, groups, framework={"pipeline": PIPELINE}, scheduler=scheduler)
    target = write(source, tmp_path, Layout(pp=2, stages=(0, 1)))
    same(source, tmp_path)
    first, last = (
        torch.load(tmp_path / target.recipe.tag / f"mp_rank_0{mp}_model_states.pt")["lr_scheduler"]
        for mp in (0, 1)
    )
    assert last == scheduler
    mine = {"base_lrs": [0.2], "_last_lr": [0.4]}
    assert first == {**mine, "last_epoch": 3, "milestones": [5, 6], "_schedulers": [mine]}
    back = ucpstore.open(tmp_path).common
    assert back["scheduler"] == scheduler, "the first stage does not have all groups"


def test_layers_that_share_a_parameter_each_have_a_file(tmp_path: Path) -> None:
    specs = {"0.w": {"aliases": ("2.w",)}}
    source = made_up(LAYERS, framework={"pipeline": PIPELINE}, specs=specs)
    target = write(source, tmp_path, Layout(pp=2, stages=(0, 3)))
    names = {path.name[:8] for path in (tmp_path / target.recipe.tag).glob("layer_*")}
    assert names == {"layer_00", "layer_01", "layer_02", "layer_03"}
    files = tmp_path / target.recipe.tag
    zero, two = (
        torch.load(files / f"layer_{n}-model_00-model_states.pt")["w"] for n in ("00", "02")
    )
    assert torch.equal(zero, two)
    with pytest.raises(PlanError, match="another name"):
        write(source, tmp_path / "apart", Layout(pp=2, stages=(0, 2)))


@pytest.mark.parametrize("name", ["2.count", "tied_modules.key.count", "5.count"])
def test_entries_of_layers_without_parameters_have_a_file(name: str, tmp_path: Path) -> None:
    framework = {"pipeline": PIPELINE, "module_extras": {name: 5}}
    layout = Layout(pp=2, tied={"key": (2,)}) if "tied" in name else Layout(pp=2)
    target = write(made_up(LAYERS, framework=framework), tmp_path, layout)
    number = "05" if name[0] == "5" else "02"
    file = tmp_path / target.recipe.tag / f"layer_{number}-model_00-model_states.pt"
    assert torch.load(file) == {"count": 5}


# -------------------------------------------------------------------------- sources


@pytest.mark.parametrize(
    "selection",
    [
        {"states": ["fp32"]},
        {"states": ["adam_m"]},
        {"only": ["a"]},
        {"exclude": ["table"]},
        {"exclude": ["frozen"]},
    ],
)
def test_a_part_of_a_model_is_refused(selection: dict[str, Any], tmp_path: Path) -> None:
    source = made_up({"a": (4, 2), "b": (3,)})
    more = ArraySource(
        {
            **{f: {s: source._arrays[f, s] for s in STATES} for f in source.parameters},
            "table": {"buffer": random_array((3,))},
            "frozen": {"weight": random_array((3,))},
        },
        source.common.document,
        specs={"table": {"trainable": False}, "frozen": {"trainable": False}},
        parallelism=source.parallelism,
    )
    write(more, tmp_path / "native", Layout(zero_stage=2))
    ucpstore.convert(tmp_path / "native", tmp_path / "part", **selection)
    ucpstore.convert(tmp_path / "part", tmp_path / "copy")
    for part in ("part", "copy"):
        with pytest.raises(UnsupportedSourceError, match="is a selection") as caught:
            write(ucpstore.open(tmp_path / part).source, tmp_path / "again", Layout())
        assert caught.value.kind is Kind.SELECTION
    ucpstore.convert(
        tmp_path / "native", tmp_path / "all", states=["fp32", *STATES, "weight", "buffer"]
    )
    write(ucpstore.open(tmp_path / "all").source, tmp_path / "again", Layout())


# --------------------------------------------------------------------------- plans


def test_thousands_of_ranks_that_are_alike_are_laid_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def count(found: Any, file: File) -> Any:
        made.append(file.name)
        return content(found, file)

    monkeypatch.setattr(writer, "content", count)
    source = made_up({"a": (40, 20), "b": (3,)})
    target = writer.DeepSpeedTarget(
        open_files(str(tmp_path)), source, Layout(dp=1234, zero_stage=3)
    )
    assert len(target.tasks()) == 2 * 1234
    lengths = 4  # names of ranks 0 to 9, 10 to 99, ...
    assert len(made) == 2 * lengths + 1, "the very first model file names the aliases"
    for task in [*target.tasks()[::97], *target.tasks()[-3:]]:
        assert task.nbytes == target._writer(task.index).nbytes


# ------------------------------------------------------------------ untrusted stores

ODD = (
    None, 5, "x", [], {}, [1], {"a": 1}, -1, 1e308, True, [[1]], "\ud800",
    {"$tuple": [1]}, {"$float": "nan"}, {"$bytes": "AA=="}, {"$tensor": "absent"},
    {"$symbol": ["os", "system"]}, {"$object": ["os", "system"], "args": ["x"]},
    {"$dict": [[1, 2]]}, {"$numpy": "<f8", "shape": [1], "data": ""},
)  # fmt: skip
INFO = {
    "universal_checkpoint_version": 0.2,
    "vocabulary_parameter_patterns": ["z"],
    "padded_vocab_size": 4,
    "original_vocab_size": 3,
    "parameter_with_sub_params": [{"patterns": ["1.w"], "shape": [2, 2], "partition_dim": 0}],
}
PATTERNS = {"rules": [{"match": ["**"], "tp": "replicate"}]}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something could be put in place of what is there."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    key, *rest = path
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[key] = changed(copy[key], tuple(rest), value) if rest else value
    return copy


def test_odd_documents_are_refused_in_words_or_written() -> None:
    source = made_up(
        LAYERS,
        [["1.w"], ["0.w", "3.b"]],
        framework={
            "pipeline": PIPELINE,
            "module_extras": {"2.count": 1},
            "universal_checkpoint_info": INFO,
            "ds_config": {
                "zero_optimization": {"round_robin_gradients": True, "sub_group_size": 9}
            },
        },
        scheduler={"base_lrs": [0.1, 0.2]},
        rng={"mp_0": {"rng_state": 1}},
        client={"iteration": 3},
        client_by_rank={"mp_0": {"x": 1}},
        patterns=PATTERNS,
    )
    whole = source.common.document
    layouts = (Layout(pp=2, stages=(0, 1)), Layout(tp=2, zero_stage=3), Layout(zero_stage=0))
    refused = 0
    cases = [(path, odd) for path in places(whole) for odd in ODD]
    for number, (path, odd) in enumerate(cases[::3]):
        source.common = replace(source.common, document=changed(whole, path, odd))
        try:
            made = make_recipe(source, layouts[number % 3])
            for file in files_of(made):
                found = content(made, file)
                if not isinstance(found, bytes):
                    TorchWriter(found, file.name)
        except UcpStoreError:
            refused += 1
    assert 0 < refused < len(cases[::3])


@pytest.mark.parametrize("name", ["dp", "tp", "pp", "zero_stage"])
@pytest.mark.parametrize("odd", [None, "2", -1, [1], 1.5, True])
def test_odd_degrees_are_refused(name: str, odd: Any) -> None:
    source = made_up({"a": (2,)})
    source.parallelism = {**source.parallelism, name: odd}
    with pytest.raises(CorruptSourceError, match=name):
        make_recipe(source, Layout())


def test_a_name_in_two_groups_is_refused() -> None:
    with pytest.raises(CorruptSourceError, match="every one once"):
        make_recipe(made_up({"a": (2,), "b": (2,)}, [["a"], ["b", "a"]]), Layout())


# ---------------------------------------------------------------------- the same layout


def test_a_table_that_would_be_padded_is_not_there_yet(tmp_path: Path) -> None:
    rules = Patterns.parse(
        """
        [[rule]]
        match = "table"
        tp = "shard(0)"
        pad = {dim = 0, true_size = 5, multiple = 8}
        """
    )
    source = made_up({"table": (5, 2)})
    write(source, tmp_path / "bare", Layout())
    write(source, tmp_path / "padded", Layout(), rules)
    bare, padded = (
        ucpstore.open(tmp_path / name, patterns=rules).source for name in ("bare", "padded")
    )
    assert not same_layout(bare, Layout(), rules)
    assert same_layout(padded, Layout(), rules)
    report = ucpstore.convert(
        tmp_path / "bare", tmp_path / "c", to="deepspeed", layout=Layout(), patterns=rules
    )
    assert report.url == str(tmp_path / "c")
    wider = Patterns((replace(rules.rules[0], pad=replace(rules.rules[0].pad, multiple=16)),))
    assert not same_layout(padded, Layout(), wider), "the padding is another one"


def test_a_plan_lists_so_many_parts_and_counts_the_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make_recipe(made_up({f"p{n}": (64,) for n in range(50)}), Layout(dp=30, zero_stage=3))
    info = made.ucp_info()
    assert len(info["ranks"]) == 30
    assert "ranks_left_out" not in info
    monkeypatch.setattr(recipe, "_MOST_LISTED", 101)
    few = made.ucp_info()
    assert few["ranks"] == info["ranks"][:3]
    assert few["ranks_left_out"] == 27


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_memory_of_a_task_includes_that_of_making_its_pickle(
    stage: int, tmp_path: Path
) -> None:
    made = made_up({f"model.layers.{n}.weight": (2,) for n in range(1500)})
    target = writer.DeepSpeedTarget(open_files(str(tmp_path)), made, Layout(dp=2, zero_stage=stage))
    for task in target.tasks():
        tracemalloc.start()
        target._writer(task.index)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak + writer._BLOCKS * writer.BLOCK <= target.task_memory(), task.key


def test_weights_of_float64_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = ArraySource(
        {
            "a": {state: random_array((2,)) for state in STATES},
            "frozen": {"weight": random_array((2,), "float64")},
        },
        made_up({"a": (2,)}).common.document,
        specs={"frozen": {"trainable": False}},
        parallelism={"dp": 1, "zero_stage": 2},
    )
    for stage in range(4):
        with pytest.raises(PlanError, match="frozen: found elements of float64"):
            writer.DeepSpeedTarget(open_files(str(tmp_path)), source, Layout(zero_stage=stage))


def test_numbers_of_a_configuration_that_are_too_large() -> None:
    config = {"fp16": {"initial_scale_power": 5000}}
    with pytest.raises(PlanError, match="initial_scale_power is 5000"):
        make_recipe(made_up({"a": (2,)}, framework={"ds_config": config}), Layout(dtype="fp16"))
    endless = {"zero_optimization": {"sub_group_size": {"$float": "inf"}}}
    made = make_recipe(made_up({"a": (2,)}, framework={"ds_config": endless}), Layout(zero_stage=3))
    assert made.layout.sub_group_size == 10**9


def test_ranks_with_equal_slices_are_laid_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def count(found: Any, file: File) -> Any:
        made.append(file.name)
        return content(found, file)

    monkeypatch.setattr(writer, "content", count)
    rules = '[[rule]]\nmatch = "**"\ntp = "shard({})"\n'
    source = made_up({"a": (8, 10)})
    even, other = (
        writer.DeepSpeedTarget(
            open_files(str(tmp_path)), source, Layout(tp=tp), Patterns.parse(rules.format(dim))
        )
        for tp, dim in ((8, 0), (8, 1))
    )
    files = [name for name in made if "model_states" in name]
    assert len(files) == 2 + 3, "the first names the aliases; two ranks of dim 1 are wider"
    for target in (even, other):
        for task in target.tasks():
            assert task.nbytes == target._writer(task.index).nbytes
    assert even.document() != other.document()
