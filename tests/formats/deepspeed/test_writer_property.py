"""Random models from one random layout into another, with garbage in all padding of the files between.

A model in memory is written natively in layout A; what pads flat buffers, fragments and vocabularies there is then
overwritten on disk. Read back, and written in layout B from A's files, every state has the bits of the start, and
the garbage is nowhere. Where padding lies is computed here by DeepSpeed's formulas from the loaded files
(``stage_1_and_2.py``, ``partition_parameters.py``), without our code.
"""

from __future__ import annotations

import math
import mmap
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.formats.deepspeed.native import write
from tests.formats.deepspeed.test_real_runs import bits, read
from tests.formats.deepspeed.test_writer_parallel import open_source, same_states
from ucpstore import Layout
from ucpstore.contracts import CommonState, Fragment, ParameterSpec, Role, SourceFile, StateSpec
from ucpstore.layout.region import Region
from ucpstore.layout.rules import Patterns

GARBAGE = -12288.0
"""Exact in 16 bits, and no value of a model here; NaN is the other one."""
STATES = {"adam_m": Role.FIRST_MOMENT, "adam_v": Role.SECOND_MOMENT}
TAG = "global_step3"


class MemorySource:
    """A model in memory."""

    format = "memory"
    url = "memory://model"
    is_local = True
    warnings: Sequence[str] = ()

    def __init__(
        self,
        parameters: Mapping[str, ParameterSpec],
        arrays: Mapping[tuple[str, str], np.ndarray],
        document: Mapping[str, Any],
    ) -> None:
        self.parameters = parameters
        self._arrays = arrays
        self.common = CommonState(document)
        self.parallelism = {"dp": 1, "tp": 1, "pp": 1, "zero_stage": 1, "tag": TAG}

    def spec(self, fqn: str, state: str) -> StateSpec:
        return self.parameters[fqn].states[state]

    def files(self) -> Sequence[SourceFile]:
        return []

    current_files = files

    def read(
        self, fqn: str, state: str, region: Region, out: np.ndarray, *, compare: bool = False
    ) -> None:
        out[...] = self._arrays[fqn, state][region.slices]

    def cuts(self, fqn: str, state: str) -> tuple[tuple[int, ...], ...]:
        return ((),) * self._arrays[fqn, state].ndim

    def fragments(self, fqn: str, state: str, region: Region) -> Sequence[Fragment]:
        return []

    def count_reads(self, fqn: str, state: str) -> int:
        return 0

    def digest(self, fqn: str, state: str) -> str | None:
        return None

    def joint_digests(self) -> Mapping[tuple[tuple[str, str], ...], str]:
        return {}


@dataclass(frozen=True)
class Vocabulary:
    """The padded parameter: true rows, elements of a row, and the multiple of its rows on a rank."""

    fqn: str
    rows: int
    row_numel: int
    multiple: int

    def valid(self, tp: int, degree: int) -> int:
        """True elements at the start of a rank's local tensor."""
        local = -(-self.rows // (self.multiple * degree)) * self.multiple
        return min(max(self.rows - tp * local, 0), local) * self.row_numel


@dataclass(frozen=True)
class Example:
    source: MemorySource
    patterns: Patterns
    vocabulary: Vocabulary
    layouts: tuple[Layout, Layout]


# ------------------------------------------------------------------- what is drawn


@st.composite
def layouts(draw: st.DrawFn, layers: int, *, dtype: str, tied: bool) -> Layout:
    """Any layout of at most eight ranks."""
    stage = draw(st.integers(0, 3))
    tp = draw(st.integers(1, 3))
    # stages of a pipeline: DeepSpeed refuses ZeRO 2 and 3; without ZeRO its names are known elsewhere
    pp = draw(st.integers(1, 2)) if stage == 1 else 1
    ranks = draw(st.integers(1, max(1, 8 // (tp * pp))))
    sp = draw(st.sampled_from([n for n in (1, 2, 3) if ranks % n == 0]))
    more: dict[str, Any] = {"fused_adam": False} if stage == 0 else {}
    if pp > 1:
        more["stages"] = (0, draw(st.integers(1, layers)))
        more["tied"] = {"embed": (0, layers + 1)} if tied else None
    elif stage <= 1:
        more["pipeline"] = False
    if stage == 3:
        # ranks with slices of different sizes would have different sub-groups
        sizes = [1, 7, 10**9] if tp == 1 else [10**9]
        more["sub_group_size"] = draw(st.sampled_from(sizes))
    return Layout(dp=ranks // sp, sp=sp, tp=tp, pp=pp, zero_stage=stage, dtype=dtype, **more)


def rule(draw: st.DrawFn, fqn: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """How a parameter lies on tensor-parallel ranks: also more of these than rows."""
    kinds: list[dict[str, Any]] = [{"pattern": "replicate"}]
    if shape:
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, shape[dim]))
        kinds += [
            {"pattern": "shard", "dim": dim},
            {"pattern": "shard_nc", "dim": dim, "sections": [cut, shape[dim] - cut]},
        ]
    return {"match": [fqn], "tp": draw(st.sampled_from(kinds))}


def parameter(fqn: str, arrays: Mapping[str, np.ndarray], **more: Any) -> ParameterSpec:
    roles = {"fp32": Role.MASTER_WEIGHT, "weight": Role.MODEL_WEIGHT, "buffer": Role.BUFFER}
    states = {
        name: StateSpec(name, {**STATES, **roles}[name], array.shape, str(array.dtype))
        for name, array in arrays.items()
    }
    return ParameterSpec(fqn, states, trainable="fp32" in states, **more)


shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """A model, rules for it, and two layouts."""
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    half = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, tied = draw(st.integers(1, 3)), draw(st.booleans())
    pair = tuple(draw(layouts(layers, dtype=dtype, tied=tied)) for _ in "AB")
    piped = any(layout.pp > 1 for layout in pair)
    names = {0: "tied_modules.embed.weight" if tied else "0.weight"}
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    vocabulary = Vocabulary(names[0], rows, columns, draw(st.integers(1, 5)))
    pad = {"dim": 0, "true_size": rows, "multiple": vocabulary.multiple}
    rules = [{"match": [names[0]], "tp": {"pattern": "shard", "dim": 0}, "pad": pad}]
    arrays: dict[str, dict[str, np.ndarray]] = {}

    def train(fqn: str, shape: tuple[int, ...]) -> None:
        arrays[fqn] = {
            state: np.asarray(random.standard_normal(shape), np.float32)
            for state in ("fp32", *STATES)
        }

    train(names[0], (rows, columns))
    for layer in range(1, layers + 1):
        for index in range(draw(st.integers(1, 3))):
            fqn, shape = f"{layer}.w{index}", draw(shapes)
            train(fqn, shape)
            rules.append(rule(draw, fqn, shape))
        if draw(st.booleans()):
            fqn, shape = f"{layer}.frozen", draw(shapes)
            arrays[fqn] = {"weight": np.asarray(random.standard_normal(shape)).astype(half)}
            rules.append(rule(draw, fqn, shape))
        if draw(st.booleans()):
            kind = draw(st.sampled_from(["int64", "bool", "float32"]))
            value = random.integers(0, 2**40, draw(shapes)).astype(kind)
            arrays[f"{layer}.buffer"] = {"buffer": value}
    aliases = {} if piped or not tied else {names[0]: ("head.weight",)}
    parameters = {
        fqn: parameter(fqn, states, aliases=aliases.get(fqn, ())) for fqn, states in arrays.items()
    }
    trained = [fqn for fqn, states in arrays.items() if "fp32" in states]
    if not piped:
        trained = draw(st.permutations(trained))
    first = {fqn for fqn in trained if draw(st.booleans())}
    for layout in pair:  # a stage without a group is told by another one that has all
        cut = 0 if layout.stages is None else layout.stages[1]
        sides = [
            {f in first for f in trained if (layer_of(f) < cut) == side} for side in (True, False)
        ]
        if cut and all(len(side) == 1 for side in sides):
            first = set(trained)
    groups = [[f for f in trained if f in first], [f for f in trained if f not in first]]
    document = common(
        [group for group in groups if group],
        dtype,
        round_robin=not piped and draw(st.booleans()),
    )
    source = MemorySource(
        parameters, {(f, s): a for f, states in arrays.items() for s, a in states.items()}, document
    )
    return Example(source, Patterns.from_json({"rules": rules}), vocabulary, pair)  # type: ignore[arg-type]


def layer_of(fqn: str) -> int:
    return int(fqn.partition(".")[0]) if fqn[0].isdigit() else 0


def common(groups: Sequence[Sequence[str]], dtype: str, *, round_robin: bool) -> dict[str, Any]:
    return {
        "param_groups": [
            {"lr": 0.1 * (index + 1), "weight_decay": 0.01, "params": list(group)}
            for index, group in enumerate(groups)
        ],
        "steps": {fqn: 3.0 for group in groups for fqn in group},
        "scheduler": {"last_batch_iteration": 2},
        "counters": {"global_steps": 3, "global_samples": 6, "skipped_steps": 0},
        "client": {"iteration": 3},
        "framework": {
            "name": "deepspeed",
            "version": "0.19.8",
            "ds_config": {
                "bf16": {"enabled": dtype == "bfloat16"},
                "zero_optimization": {"round_robin_gradients": round_robin},
            },
            "optimizer": {
                "step": {"kept_in": ["state"], "types": ["float32"]},
                "scalars": [{} for _ in groups],
            },
        },
    }


# ------------------------------------------------------------------- where padding lies

Files = Mapping[str, Any]


def loaded(tag: Path) -> Files:
    """Every file of a checkpoint as torch loads it; what is changed in place changes on disk."""
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return {
            path.name: torch.load(path, weights_only=False, mmap=True)
            for path in sorted(tag.glob("*.pt"))
        }


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def rank_of(name: str) -> tuple[int, int]:
    """Model-parallel and data-parallel rank of a file."""
    mp, dp = re.search(r"mp_rank_(\d+)", name), re.search(r"pp_rank_(\d+)", name)
    return (int(mp[1]) if mp else -1), (int(dp[1]) if dp else 0)


def padding(files: Files, layout: Layout, vocabulary: Vocabulary) -> Iterator[torch.Tensor]:
    """Views of all padding."""
    for name, content in files.items():
        mp, dp = rank_of(name)
        tp = int(name[len("layer_00-model_") :][:2]) if mp < 0 else mp % layout.tp
        valid = vocabulary.valid(tp, layout.tp)
        if mp < 0:  # a layer
            key = vocabulary.fqn.split(".", 2 if vocabulary.fqn[0] == "t" else 1)[-1]
            layer = int(name[len("layer_") :][:2])
            last = max(int(n[len("layer_") :][:2]) for n in files if n.startswith("layer_"))
            held = (0, last) if vocabulary.fqn[0] == "t" else (0,)
            if layer in held and key in content:
                yield content[key].view(-1)[valid:]
        elif "optim_states" in name:
            model = files[
                re.sub(r"^(bf16_)?zero_.*(mp_rank_\d+).*", r"\2_model_states.pt", name)
                if layout.zero_stage < 3
                else f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt"
            ]
            yield from flat_padding(content["optimizer_state_dict"], model, dp, vocabulary, valid)
        else:
            weight = (content["module"] or {}).get(vocabulary.fqn)
            if weight is not None and weight.numel():
                yield weight.view(-1)[valid:]
            if layout.zero_stage == 3:
                ranks = layout.zero_ranks
                for fqn, part in content["frozen_param_fragments"].items():
                    n = content["frozen_param_shapes"][fqn].numel()
                    yield part[min(max(n - dp * -(-n // ranks), 0), part.numel()) :]


def flat_padding(
    optimizer: Any, model: Any, dp: int, vocabulary: Vocabulary, valid: int
) -> Iterator[torch.Tensor]:
    """Padding of the flat buffers of a rank."""
    if "fp32_flat_groups" in optimizer:
        masters, base = optimizer["fp32_flat_groups"], optimizer["optimizer_state_dict"]
        ranks = optimizer["partition_count"]
    else:
        masters, base = (
            optimizer["single_partition_of_fp32_groups"],
            optimizer["base_optimizer_state"],
        )
        ranks = optimizer["partition_count"][0]
    for index, shapes_ in enumerate(model["param_shapes"]):
        sizes = {fqn: math.prod(shape) for fqn, shape in shapes_.items()}
        flats = [masters[index], *(base["state"][index][key] for key in ("exp_avg", "exp_avg_sq"))]
        holes: list[tuple[int, int]] = []
        at = 0
        if "fp32_flat_groups" in optimizer:
            for fqn, n in sizes.items():
                width = -(-n // ranks)
                end = min(n, valid if fqn == vocabulary.fqn else n)
                holes.append((at + min(max(end - dp * width, 0), width), at + width))
                at += width
        else:
            total = sum(sizes.values())
            size = -(-total // (2 * ranks)) * 2
            for fqn, n in sizes.items():
                if fqn == vocabulary.fqn:
                    holes.append((at + valid - dp * size, at + n - dp * size))
                at += n
            holes.append((total - dp * size, size))
        for flat in flats:
            for low, high in holes:
                yield flat[max(low, 0) : max(high, 0)]


def spoil(files: Files, layout: Layout, vocabulary: Vocabulary) -> int:
    """Fill all padding with garbage; returns the number of elements."""
    count = 0
    for view in padding(files, layout, vocabulary):
        view[::2] = math.nan
        view[1::2] = GARBAGE
        count += view.numel()
    return count


@settings(max_examples=50)
@given(examples())
def test_states_survive_any_two_layouts_and_padding_never_leaks(example: Example) -> None:
    source, vocabulary = example.source, example.vocabulary
    one, two = example.layouts
    with tempfile.TemporaryDirectory() as folder:
        path, other = Path(folder) / "one", Path(folder) / "two"
        write(source, path, one, example.patterns)
        files = loaded(path / TAG)
        spoiled = spoil(files, one, vocabulary)
        event(f"spoiled: {spoiled > 0}")
        del files
        found = [t.float() for t in tensors_in(loaded(path / TAG)) if t.is_floating_point()]
        assert any(t.isnan().any() for t in found) == (spoiled > 0)
        between = open_source(path)
        same_states(source, between)
        weights_are_masters(source, between)
        write(between, other, two, example.patterns)
        files = loaded(other / TAG)
        for tensor in tensors_in(files):
            if tensor.is_floating_point():
                assert tensor.isfinite().all()
                assert not (tensor == GARBAGE).any()
        for view in padding(files, two, vocabulary):
            assert not view.any()
        back = open_source(other)
        same_states(source, back)
        weights_are_masters(source, back)
        for fqn, spec in source.parameters.items():
            assert back.parameters[fqn].trainable == spec.trainable
            assert back.parameters[fqn].aliases == spec.aliases


def weights_are_masters(source: MemorySource, found: Any) -> None:
    """16-bit copies are the rounded masters, also of the vocabulary."""
    for fqn, parameter_ in found.parameters.items():
        spec = parameter_.states.get("weight")
        if spec is not None and spec.derived:
            master = read(source, fqn, "fp32")  # type: ignore[arg-type]
            weight = read(found, fqn, "weight")
            assert bits(weight) == bits(master.astype(weight.dtype)), fqn
