"""What a rank loads is what DeepSpeed's own files have for that rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ucpstore
from tests.deepspeed_runs import CASES, PIPELINE_CASES, Case, Run, deepspeed_run
from tests.schemas import validate
from ucpstore import Layout
from ucpstore.cli.main import main
from ucpstore.errors import LayoutError, ParameterNotFoundError, PlanError
from ucpstore.io.traffic import traffic

OWN = [
    "s1-bf16-dp3",
    "s2-fp32-dp3",
    "s3-bf16-dp3",
    "subgroups-s3-fp32-dp2",
    "frozen-s3-bf16-dp3",
    "tied-s1-bf16-dp3",
    "sgd-s1-fp32-dp2",
    "tp2-s1-fp32-dp2",
    "tp2-s3-fp32-dp2",
    "tp2-uneven-s1-fp32-dp2",
    "pp2-s1-fp32-dp2",
    "pp2-tp2-bf16opt-dp2",
]
NAMES = {"adam_m": "exp_avg", "adam_v": "exp_avg_sq"}


def case_of(name: str) -> Case:
    return CASES.get(name) or PIPELINE_CASES[name]


def layout_of(case: Case, **changes: Any) -> Layout:
    return Layout(
        **{"dp": case.dp, "tp": case.tp, "pp": case.pp, "zero_stage": case.stage, **changes}
    )


def torch_load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


class Files:
    """DeepSpeed's own files of one rank, loaded by torch."""

    def __init__(self, run: Run, case: Case, coordinates: tuple[int, int, int]) -> None:
        pp, dp, tp = coordinates
        mp = f"mp_rank_{pp * case.tp + tp:02d}"
        zero = f"zero_pp_rank_{dp}_{mp}"
        model = f"{zero if case.stage == 3 else mp}_model_states.pt"
        (optimizer,) = run.tag_path.glob(f"*{zero}_optim_states.pt")
        self.model = torch_load(run.tag_path / model)
        inner = torch_load(optimizer)["optimizer_state_dict"]
        self.masters = inner.get("fp32_flat_groups") or inner["single_partition_of_fp32_groups"]
        base = inner.get("optimizer_state_dict") or inner["base_optimizer_state"]
        self.states = base["state"]
        self.layers: dict[str, torch.Tensor] = {}
        for path in run.tag_path.glob("layer_*"):
            number = int(path.name[6:8])
            if "-model_0" not in path.name or f"-model_{tp:02d}" in path.name:
                for key, value in torch_load(path).items():
                    self.layers[f"{number}.{key}"] = value

    def optimizer_range(self, tensor: ucpstore.LocalTensor) -> torch.Tensor:
        assert tensor.buffer is not None
        buffer, offset = tensor.buffer
        name = NAMES.get(tensor.name, tensor.name)
        flat = self.masters[buffer] if name == "fp32" else self.states[buffer][name]
        return flat[offset : offset + tensor.shape[0]]

    def weight(self, tensor: ucpstore.LocalTensor) -> torch.Tensor:
        if self.model["module"] is None:
            tied = tensor.fqn.removeprefix("tied_modules.embed.")
            return self.layers[tensor.fqn if tied == tensor.fqn else f"0.{tied}"]
        return self.model["module"][tensor.fqn]


def bits(value: torch.Tensor) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", OWN)
def test_every_rank_of_the_own_layout(name: str) -> None:
    run, case = deepspeed_run(name), case_of(name)
    layout = layout_of(case)
    for rank in range(case.world):
        state = ucpstore.load(run.path, layout, rank)
        files = Files(run, case, state.coordinates)
        optimizer = [t for t in state.tensors if t.kind == "optimizer"]
        assert optimizer
        for tensor in optimizer:
            assert tensor.read().tobytes() == bits(files.optimizer_range(tensor)), tensor
        held = {t.buffer[0] for t in optimizer if t.buffer is not None}
        elements = sum(t.shape[0] for t in optimizer if t.name == "fp32")
        assert elements <= sum(files.masters[buffer].numel() for buffer in held)
        for tensor in state.tensors:
            if tensor.kind == "module" and not (case.stage == 3 and tensor.name == "weight"):
                expected = files.weight(tensor)
                assert tensor.shape == tuple(expected.shape)
                assert tensor.read().tobytes() == bits(expected), tensor


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("s1-bf16-dp3", Layout(dp=2, zero_stage=3)),
        ("s3-bf16-dp3", Layout(dp=4, zero_stage=2)),
        ("tp2-s1-fp32-dp2", Layout(dp=3)),
        ("s2-fp32-dp3", Layout(dp=2, sp=2)),
        ("pp2-tp2-bf16opt-dp2", Layout(dp=3, tp=1, pp=2)),
    ],
)
def test_all_ranks_together_hold_every_element_once(name: str, layout: Layout) -> None:
    run = deepspeed_run(name)
    checkpoint = ucpstore.open(run.path)
    found: dict[tuple[str, str], list[np.ndarray[Any, Any]]] = {}
    seen: dict[str, set[tuple[int, int]]] = {}
    for rank in range(layout.world):
        state = ucpstore.load(run.path, layout, rank)
        pp, dp, tp = state.coordinates
        assert (pp * layout.zero_ranks + dp) * layout.tp + tp == rank
        for tensor in state.tensors:
            if tensor.kind == "optimizer":
                assert tensor.start is not None
                span = (tensor.start, tensor.start + tensor.shape[0])
                seen.setdefault(tensor.fqn, set()).add(span)
                found.setdefault((tensor.fqn, tensor.name), []).append((span, tensor.read()))
    for (fqn, name_), parts in found.items():
        whole = checkpoint[fqn][name_][...].reshape(-1)
        filled = np.full(whole.shape, np.nan, whole.dtype)
        for (start, stop), values in parts:
            filled[start:stop] = values
        assert filled.tobytes() == whole.tobytes()
    trainable = {fqn for fqn, p in checkpoint.items() if p.trainable}
    assert seen.keys() == trainable


def destination(state: ucpstore.RankState, make: Any) -> dict[str, dict[str, Any]]:
    into: dict[str, dict[str, Any]] = {}
    for tensor in state.tensors:
        into.setdefault(tensor.fqn, {})[tensor.name] = make(tensor)
    return into


def as_numpy(tensor: ucpstore.LocalTensor) -> Any:
    return np.full(tensor.shape, 7, tensor.dtype)


def as_torch(tensor: ucpstore.LocalTensor) -> Any:
    return torch.full(tensor.shape, 7, dtype=getattr(torch, str(tensor.dtype)))


def raw(value: Any) -> bytes:
    return bits(value) if isinstance(value, torch.Tensor) else value.tobytes()


@pytest.mark.parametrize("make", [as_numpy, as_torch])
@pytest.mark.parametrize("store", [False, True])
def test_into(make: Any, store: bool, tmp_path: Path) -> None:
    source = deepspeed_run("frozen-s3-bf16-dp3").path
    if store:
        ucpstore.convert(source, tmp_path / "store")
        source = tmp_path / "store"
    layout = Layout(dp=2, zero_stage=2)
    state = ucpstore.load(source, layout, 1)
    into = destination(state, make)
    assert ucpstore.load(source, layout, 1, into=into, memory_limit="24MiB").nbytes == state.nbytes
    for tensor in state.tensors:
        assert raw(into[tensor.fqn][tensor.name]) == tensor.read().tobytes()


def test_what_does_not_fit_is_reported_whole() -> None:
    run = deepspeed_run("s1-bf16-dp3")
    state = ucpstore.load(run.path, Layout(dp=2), 0)
    into = destination(state, as_numpy)
    first, second, third, *_ = into
    del into[first]["weight"]
    into[second]["weight"] = into[second]["weight"].astype(np.float64)
    into[third]["weight"] = np.zeros((3, 1, 4))
    into["no.such"] = {"weight": np.zeros(3)}
    kept = into[second]["fp32"].copy()
    with pytest.raises(LayoutError) as caught:
        ucpstore.load(run.path, Layout(dp=2), 0, into=into)
    text = str(caught.value)
    assert f"weight of {first}: missing" in text
    assert f"weight of {second}: found elements of float64, expected bfloat16" in text
    assert f"weight of {third}: found shape [3, 1, 4]" in text
    assert "weight of no.such: not held" in text
    assert (into[second]["fp32"] == kept).all()  # nothing was read


def test_bad_requests() -> None:
    run = deepspeed_run("s1-bf16-dp3")
    with pytest.raises(PlanError, match="rank is 2, expected one of the 2 ranks"):
        ucpstore.load(run.path, Layout(dp=2), 2)
    state = ucpstore.load(run.path, Layout(dp=2), 0)
    with pytest.raises(PlanError, match="one block in flight needs"):
        state.load(memory_limit=1000)
    with pytest.raises(ParameterNotFoundError, match="rank 0 holds nothing of 'x'"):
        state["x"]
    with pytest.raises(LayoutError, match="found list, expected a numpy array"):
        state.tensors[0].read(out=[])


def spans(state: ucpstore.RankState) -> Iterator[int]:
    for tensor in state.tensors:
        yield sum(region.volume for region in tensor.regions)


def test_a_rank_reads_its_part_alone() -> None:
    """Of a source whose ranges are contiguous, no byte more than is needed."""
    run = deepspeed_run("s1-bf16-dp3")
    state = ucpstore.load(run.path, Layout(dp=4, zero_stage=3), 3)
    before = traffic()
    moved = state.load()
    assert traffic().since(before).nbytes == moved.read_nbytes == moved.needed_nbytes
    assert sum(spans(state)) == sum(t.nbytes // t.dtype.itemsize for t in state.tensors)
    whole = ucpstore.load(run.path, Layout(dp=1, zero_stage=3), 0).load()
    assert moved.needed_nbytes < whole.needed_nbytes / 3


def test_command() -> None:
    run = deepspeed_run("tp2-s1-fp32-dp2")
    arguments = ["load", str(run.path), "--layout", "dp=3", "--rank", "1"]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    state = ucpstore.load(run.path, Layout(dp=3), 1)
    assert document["held_nbytes"] == state.nbytes
    assert document["coordinates"] == {"pp": 0, "dp": 1, "tp": 0}
    assert document["read_nbytes"] >= document["needed_nbytes"] > 0
    assert [t["fqn"] for t in document["tensors"]] == [t.fqn for t in state.tensors]
    validate(document, "load")
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0
    assert "ZeRO rank 1" in shown.stdout
    assert CliRunner().invoke(main, [*arguments[:-1], "3"]).exit_code == 3
