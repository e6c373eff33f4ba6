"""Files whose keys are missing or hold something else end in our errors, whatever is wrong."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.deepspeed_runs import copy_run, deepspeed_run
from tests.formats.deepspeed.synthetic import Checkpoint
from tests.formats.deepspeed.test_real_runs import bits, open_run, read, truth_of
from tests.formats.deepspeed.test_silent_failures import FOUR
from ucpstore.errors import UcpStoreError
from ucpstore.formats.deepspeed import FORMAT
from ucpstore.io import open_files

JUNK = [
    ("none", None),
    ("negative", -1),
    ("huge", 10**30),
    ("text", "text"),
    ("list", [None]),
    ("empty", {}),
    ("dict", {"a": 1, 7: None}),
    ("tensor", torch.zeros(3, 2)),
    ("scalar", torch.tensor(1.5)),
]
MISSING = object()


def paths(value: Any, prefix: tuple[Any, ...] = (), depth: int = 0) -> Iterator[tuple[Any, ...]]:
    """Places of a nested object, down to four levels, the first two entries of each container."""
    if depth == 5:
        return
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())[: None if depth < 2 else 2]
    elif isinstance(value, list):
        items = list(enumerate(value))[:2]
    for key, item in items:
        yield (*prefix, key)
        yield from paths(item, (*prefix, key), depth + 1)


def replaced(content: Any, path: tuple[Any, ...], junk: Any) -> Any:
    """A copy of `content` with `junk` at `path`."""
    changed = copy.deepcopy(content)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    if junk is not MISSING:
        holder[path[-1]] = junk
    elif isinstance(holder, dict):
        del holder[path[-1]]
    else:
        holder.pop(path[-1])
    return changed


@pytest.mark.parametrize("file", ["model", "optim"])
@pytest.mark.parametrize("source", ["stage1", "stage3", "tp"])
def test_junk_at_any_place(tmp_path: Path, source: str, file: str) -> None:
    if source == "tp":
        folder = copy_run(deepspeed_run("tp2-s1-bf16-dp1"), tmp_path).tag_path
    else:
        stage = int(source[-1])
        model: dict[str, Any] = {"iteration": 3}
        if stage == 3:
            model["frozen_param_shapes"] = {"ice": torch.Size([3])}
            model["frozen_param_fragments"] = {"ice": torch.zeros(2)}
        written = Checkpoint([FOUR, {"b": (3,)}], ranks=2, stage=stage, model=model)
        folder = written.write(tmp_path)
    (name,) = sorted(folder.glob("*00_model_states.pt" if file == "model" else "*optim*"))[:1]
    content = torch.load(name, weights_only=False)
    intact = name.read_bytes()
    surprises = []
    for path in paths(content):
        for label, junk in [*JUNK, ("missing", MISSING)]:
            torch.save(replaced(content, path, junk), name)
            try:
                FORMAT.open(open_files(folder))
            except UcpStoreError:
                pass
            except Exception as error:
                surprises.append(f"{path} = {label}: {type(error).__name__}: {error}")
    name.write_bytes(intact)
    assert not surprises, "\n".join(surprises[:40]) + f"\n{len(surprises)} in all"
    FORMAT.open(open_files(folder))


def test_a_source_survives_pickling() -> None:
    """Worker processes get the source by pickle."""
    run = deepspeed_run("tp2-s1-fp32-dp2")
    source = pickle.loads(pickle.dumps(open_run(run)))
    for fqn, state, value in truth_of(run):
        assert bits(read(source, fqn, state)) == bits(value)


def test_files_that_the_source_depends_on() -> None:
    for name in ("s2-fp32-dp2", "frozen-s3-fp32-dp2", "tp2-s1-fp32-dp2"):
        run = deepspeed_run(name)
        source = open_run(run)
        names = [file.name for file in source.files()]
        tag = run.facts["tag"]
        assert names == sorted(f"{tag}/{path.name}" for path in run.tag_path.glob("*.pt"))
        assert list(source.current_files()) == list(source.files())


def test_thousand_ranks_share_their_buffers(tmp_path: Path) -> None:
    """Nothing is kept per rank *and* parameter."""
    parameters: dict[str, tuple[int, ...]] = {f"w{i}": (3, 2) for i in range(50)}
    Checkpoint([parameters], ranks=60, stage=3).write(tmp_path)
    source = FORMAT.open(open_files(tmp_path))
    bounds = [source.bound(fqn, "adam_m") for fqn in parameters]
    assert len({id(bound.buffers) for bound in bounds}) == 1
    assert len(bounds[0].buffers) == 60
    same = source.bound("w0", "fp32").geometry
    assert source.bound("w0", "adam_v").geometry is same
    assert np.prod(source.spec("w0", "fp32").shape) == 6
