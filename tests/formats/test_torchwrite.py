"""Files that torch loads: compared with torch itself, and safe whatever the source says."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash

from ucpstore.contracts import Role, StateSpec
from ucpstore.errors import PlanError
from ucpstore.formats import torchwrite
from ucpstore.formats._torch.pickling import dump
from ucpstore.formats.torchfile import index_torch_file, read_tensor
from ucpstore.formats.torchwrite import BytesWriter, Size, TorchWriter, View
from ucpstore.gather import Part, Tensor
from ucpstore.io import open_files
from ucpstore.layout.region import Region
from ucpstore.tagged import NumpyArray, StubObject, Symbol, TensorName


class FakeSource:
    """States in memory."""

    def __init__(self, **states: np.ndarray) -> None:
        self.states = states
        self.common = SimpleNamespace(tensors={})
        self.parameters = {
            fqn: SimpleNamespace(
                states={"s": StateSpec("s", Role.OTHER, value.shape, str(value.dtype))}
            )
            for fqn, value in states.items()
        }

    def read(self, fqn: str, state: str, region: Region, out: Any, *, compare: bool) -> None:
        assert compare
        out[...] = self.states[fqn][region.slices]


def write(root: Any, folder: Path, source: Any = None) -> Path:
    writer = TorchWriter(root, "file")
    files = open_files(folder)
    sink = files.sink("file.pt", writer.nbytes)
    writer.write(source or FakeSource(), sink)
    assert sink.close().nbytes == writer.nbytes
    return folder / "file.pt"


def test_torch_loads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torchwrite, "BLOCK", 64)  # many blocks, cut inside rows
    random = np.random.default_rng(0)
    w = random.standard_normal((5, 7, 3)).astype(np.float32)
    w[0, 0] = [np.nan, np.inf, 3.4e38]
    half = w.astype(ml_dtypes.bfloat16)
    count = random.integers(0, 2**62, (4,))
    source = FakeSource(w=w, half=half, count=count, scalar=np.array(2.5, np.float32))
    flat = Tensor(
        "float32", (60,), (Part("w", "s", w.shape, 11, 50, 2), Part("scalar", "s", (), 0, 1, 59))
    )
    rounded = Tensor("bfloat16", w.shape, (Part("w", "s", w.shape, 0, w.size, 0),))
    widened = Tensor("float32", (9,), (Part("half", "s", w.shape, 30, 9, 0),))
    root = {
        "flat": flat,
        "again": [flat, rounded],
        "widened": widened,
        "count": Tensor("int64", (4,), (Part("count", "s", (4,), 0, 4, 0),)),
        "empty": Tensor("float16", (0,)),
        "step": Tensor("float32", (), data=np.float32(3).tobytes()),
        "shapes": OrderedDict(a=Size((2, 3))),
        "plain": [None, True, 2**70, -1, 1.5, "é", b"x", (1, {2}), {1: "a"}],
        "dtype": Symbol("torch", "float32"),
        "number": NumpyArray("<f8", (), np.float64(0.1).tobytes()),
        "array": NumpyArray("<i4", (2,), np.arange(2, dtype="<i4").tobytes()),
        "args": StubObject("argparse", "Namespace", (), {"lr": 0.5}),
    }
    path = write(root, tmp_path, source)
    assert zipfile.ZipFile(path).testzip() is None  # all checksums
    found = torch.load(path, weights_only=False)
    expected = np.zeros(60, np.float32)
    expected[2:52] = w.reshape(-1)[11:61]
    expected[59] = 2.5
    assert found["flat"].numpy().tobytes() == expected.tobytes()
    assert found["again"][0].data_ptr() == found["flat"].data_ptr()
    assert torch.equal(found["again"][1].nan_to_num(), torch.from_numpy(w).bfloat16().nan_to_num())
    assert found["again"][1].isnan().sum() == 1
    assert found["widened"].numpy().tobytes() == half.reshape(-1)[30:39].astype("f4").tobytes()
    assert found["count"].tolist() == count.tolist()
    assert (found["empty"].shape, found["empty"].dtype) == ((0,), torch.float16)
    assert (found["step"].shape, found["step"].item()) == ((), 3.0)
    assert found["shapes"] == OrderedDict(a=torch.Size((2, 3)))
    assert type(found["shapes"]["a"]) is torch.Size
    assert found["plain"] == root["plain"]
    assert found["dtype"] is torch.float32
    assert type(found["number"]) is np.float64
    assert found["array"].tolist() == [0, 1]
    assert found["args"].lr == 0.5
    mapped = torch.load(path, weights_only=False, mmap=True)
    assert torch.equal(mapped["widened"], found["widened"])
    indexed = index_torch_file(open_files(tmp_path), "file.pt", stubs={"argparse.Namespace": None})
    ref = indexed.root["flat"]
    assert ref.offset % 64 == 0
    assert read_tensor(open_files(tmp_path), "file.pt", ref).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "value",
    [
        StubObject("os", "system", ("true",)),
        StubObject("os", "system"),
        StubObject("argparse", "Namespace", ("argument",)),
        StubObject("argparse", "Namespace", (), [1]),
        StubObject("argparse", "Namespace\n.cos\nsystem", (), {}),
        StubObject("deepspeed.launcher.runner", "main"),
        Symbol("os", "system"),
        Symbol("torch", "float32\ncos\nsystem\n("),
        Symbol("torch", "hub.load"),
        NumpyArray("object", (1,), [StubObject("os", "system", ("true",))]),
        TensorName("t"),
        Tensor("float8_e5m2", (1,)),
    ],
)
def test_names_from_a_source_never_become_code(value: Any) -> None:
    for root in (value, {"a": [value]}):
        with pytest.raises(PlanError):
            dump(root, "file")


def test_a_cast_that_would_lose_more_than_rounding_is_refused(tmp_path: Path) -> None:
    source = FakeSource(count=np.arange(3))
    root = Tensor("float32", (3,), (Part("count", "s", (3,), 0, 3, 0),))
    with pytest.raises(PlanError, match="int64"):
        write(root, tmp_path, source)
    assert not (tmp_path / "file.pt").exists()


def test_the_same_content_is_the_same_bytes() -> None:
    def make() -> bytes:
        return dump({"a": Tensor("float32", (2,)), "b": {"c": (1, "x")}}, "f")[0]

    assert make() == make()
    assert isinstance(io.BytesIO(make()).getvalue(), bytes)


def test_views_share_their_storage(tmp_path: Path) -> None:
    import torch

    w = np.arange(12, dtype=np.float32)
    base = Tensor("float32", (12,), (Part("w", "s", (12,), 0, 12, 0),))
    root = {"a": View(base, 2, (2, 3)), "b": View(base, 8, ()), "whole": base}
    found = torch.load(write(root, tmp_path, FakeSource(w=w)), weights_only=True)
    assert np.array_equal(found["a"].numpy(), w[2:8].reshape(2, 3))
    assert found["b"].item() == 8
    assert np.array_equal(found["whole"].numpy(), w)
    assert len({value.untyped_storage().data_ptr() for value in found.values()}) == 1


def test_known_bytes(tmp_path: Path) -> None:
    writer = BytesWriter(b"[1]")
    sink = open_files(tmp_path).sink("f.json", writer.nbytes)
    digest = writer.write(FakeSource(), sink)
    assert sink.close().nbytes == 3
    assert (tmp_path / "f.json").read_bytes() == b"[1]"
    assert digest == xxhash.xxh3_128(b"[1]").intdigest()
