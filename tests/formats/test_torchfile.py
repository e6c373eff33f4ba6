"""What real torch writes is found at the right bytes, in both containers."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import io
import pathlib
import pickle
import subprocess
import sys
import zipfile
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.formats.torchfiles import MemoryFiles, bits_at, bits_of, indexed, saved
from ucpstore.errors import (
    CheckpointNotFoundError,
    CorruptSourceError,
    UnsafePickleError,
    UnsupportedSourceError,
)
from ucpstore.formats.torchfile import (
    NumpyArray,
    StubObject,
    Symbol,
    TensorRef,
    index_torch_file,
    read_tensor,
)
from ucpstore.io.base import FileStat

CONTAINERS = pytest.mark.parametrize("use_zip", [True, False], ids=["zip", "legacy"])

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def random_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(
        dtype
    )


def tensors_of(value: Any, path: str = "") -> dict[str, Any]:
    """Tensors (or refs) of nested dicts, lists and tuples, by path."""
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, (list, tuple)):
        pairs = list(enumerate(value))
    else:
        return {path: value} if isinstance(value, (torch.Tensor, TensorRef)) else {}
    out = {}
    for key, item in pairs:
        out.update(tensors_of(item, f"{path}/{key}"))
    return out


def check_all(value: Any, data: bytes, *, is_local: bool = True) -> Any:
    """Every tensor of ``value`` is where the index says; returns the index's root."""
    index = indexed(data, is_local=is_local)
    expected, refs = tensors_of(value), tensors_of(index.root)
    assert list(expected) == list(refs)
    for path, tensor in expected.items():
        ref = refs[path]
        assert ref.shape == tuple(tensor.shape), path
        assert str(tensor.dtype) == f"torch.{ref.dtype}", path
        assert ref.requires_grad == tensor.requires_grad, path
        assert ref.is_parameter == isinstance(tensor, torch.nn.Parameter), path
        assert ref.is_contiguous == tensor.is_contiguous(), path
        assert bits_at(data, ref) == bits_of(tensor), path
        read = read_tensor(MemoryFiles({"x.pt": data}), "x.pt", ref, big_endian=index.big_endian)
        assert read.shape == tuple(tensor.shape), path
        assert read.tobytes() == bits_of(tensor), path
    return index.root


@CONTAINERS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, use_zip: bool) -> None:
    whole = random_bits(dtype, 24)
    value = {
        "flat": whole,
        "matrix": whole.clone().reshape(4, 6),
        "scalar": whole[3].clone(),
        "empty": whole[:0].clone(),
        "empty2": torch.empty((3, 0, 2), dtype=dtype),
    }
    check_all(value, saved(value, use_zip=use_zip))


@CONTAINERS
@pytest.mark.parametrize("is_local", [True, False], ids=["local", "remote"])
def test_views_parameters_and_shared_storages(use_zip: bool, is_local: bool) -> None:
    big = torch.arange(10_000, dtype=torch.float32)
    tied = torch.nn.Parameter(torch.randn(5, 4))
    value = {
        "row": big.reshape(100, 100)[7],
        "column": big.reshape(100, 100)[:, 3],
        "transposed": big.reshape(100, 100)[2:5, 10:14].t(),
        "step": big[5000:5100:7],
        "expanded": big[17:18].expand(6, 1),
        "tied": [tied, tied, tied.data[1:]],
        "frozen": torch.nn.Parameter(torch.randn(3), requires_grad=False),
        "grad": torch.randn(2, requires_grad=True),
        "nested": (collections.OrderedDict(w=torch.ones(2)), [torch.zeros(1)]),
    }
    data = saved(value, use_zip=use_zip)
    root = check_all(value, data, is_local=is_local)
    assert root["row"].storage_nbytes == 40_000
    assert root["row"].span == 400
    assert root["row"].storage is root["column"].storage
    assert root["row"].storage is not root["tied"][0].storage
    assert root["row"].storage_offset == 700
    first, second, part = root["tied"]
    assert first == second
    assert part.storage is first.storage
    assert part.offset == first.offset + 16


@CONTAINERS
def test_state_dict_and_optimizer(use_zip: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    value = {"module": model.state_dict(), "optimizer": optimizer.state_dict()}
    root = check_all(value, saved(value, use_zip=use_zip))
    assert type(root["module"]) is collections.OrderedDict
    assert root["module"]._metadata == dict(model.state_dict()._metadata)
    assert root["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)
    step = root["optimizer"]["state"][0]["step"]
    files = MemoryFiles({"x.pt": saved(value, use_zip=use_zip)})
    assert read_tensor(files, "x.pt", step).item() == 1.0


def test_offsets_are_those_of_torch() -> None:
    value = {f"layers.{i}": torch.randn(i, 3, dtype=torch.float64) for i in range(40)}
    data = saved(value)
    with FakeTensorMode():
        fake = torch.load(io.BytesIO(data))
    for is_local in (True, False):
        refs = indexed(data, is_local=is_local).root
        assert {k: r.storage.offset for k, r in refs.items() if r.span} == {
            k: t.untyped_storage()._checkpoint_offset for k, t in fake.items() if t.numel()
        }


@CONTAINERS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols(protocol: int, use_zip: bool) -> None:
    value = {
        "w": torch.randn(3, 4),
        "shape": torch.randn(2, 3).shape,
        "b": b"\x00\xff",
        "s": {1, 2},
    }
    root = check_all(value, saved(value, use_zip=use_zip, protocol=protocol))
    assert root["shape"] == (2, 3)
    assert root["b"] == b"\x00\xff"
    assert root["s"] == {1, 2}


@CONTAINERS
def test_plain_python_values_survive(use_zip: bool) -> None:
    value = {
        "numbers": [0, 1, 255, 256, 65536, -1, 2**40, -(2**70), 2**200, 0.1, -0.0, float("inf")],
        "text": ["", "a", "ü\n", "x" * 300, "\ud800"],
        "bytes": [b"", b"\x80" * 300, bytearray(b"abc")],
        "none": [None, True, False],
        "nested": {"a": [{"b": ({"c": 1},)}], 1: "int key", (1, "x"): "tuple key", None: 0, 1.5: 1},
        "sets": [set(), {1, "a"}, frozenset({2, 3})],
        "complex": 1 + 2j,
        "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
        "shared": [[1]] * 2,
    }
    root = indexed(saved(value, use_zip=use_zip)).root
    assert root == value
    assert repr(root) == repr(value)
    assert root["shared"][0] is root["shared"][1]


def test_containers_of_the_standard_library() -> None:
    value = {
        "default": collections.defaultdict(list, {"a": [1]}),
        "deque": collections.deque([1, 2], maxlen=5),
        "counter": collections.Counter("abca"),
        "path": pathlib.PurePosixPath("/data/run"),
        "range": range(1, 10, 2),
        "slice": slice(1, None, 2),
        "when": datetime.datetime(2024, 5, 6, 7, 8, 9),
        "delta": datetime.timedelta(days=1, seconds=2),
        "namespace": argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "kind": int,
    }
    assert indexed(saved(value)).root == {
        "default": {"a": [1]},
        "deque": [1, 2],
        "counter": {"a": 2, "b": 1, "c": 1},
        "path": "/data/run",
        "range": StubObject("builtins", "range", (1, 10, 2)),
        "slice": StubObject("builtins", "slice", (1, None, 2)),
        "when": StubObject("datetime", "datetime", ("2024-05-06T07:08:09",)),
        "delta": StubObject("datetime", "timedelta", (1, 2, 0)),
        "namespace": StubObject("argparse", "Namespace", state={"lr": 0.1, "betas": (0.9, 0.99)}),
        "dtype": Symbol("torch", "bfloat16"),
        "device": StubObject("torch", "device", ("cuda", 1)),
        "kind": Symbol("builtins", "int"),
    }


@pytest.mark.parametrize("protocol", [2, 5])
def test_numpy_values(protocol: int) -> None:
    generator = np.random.default_rng(0)
    value = {
        "state": np.random.RandomState(3).get_state(),
        "fortran": np.asfortranarray(generator.normal(size=(3, 4))),
        "big": np.arange(5, dtype=">i4"),
        "bools": np.array([True, False]),
        "text": np.array(["ab", "c"]),
        "empty": np.zeros((0, 3), dtype=np.float32),
        "scalar": np.float64(0.1),
        "flag": np.bool_(True),
        "objects": np.array([1, "a", None], dtype=object),
        "half": np.float16(0.5),
    }
    root = indexed(saved(value, protocol=protocol)).root
    for key in ("fortran", "big", "bools", "text", "empty", "scalar", "flag", "half"):
        found = root[key]
        assert type(found) is NumpyArray
        array = found.to_numpy()
        assert array.dtype == np.asarray(value[key]).dtype, key
        assert array.shape == np.asarray(value[key]).shape, key
        assert array.tobytes() == np.asarray(value[key]).tobytes(), key
    assert root["scalar"].item() == 0.1
    assert root["objects"].to_numpy().tolist() == [1, "a", None]
    assert root["state"][0] == "MT19937"
    assert (root["state"][1].to_numpy() == value["state"][1]).all()
    assert root["state"][2:] == value["state"][2:]


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, 2


class Point(NamedTuple):
    x: int
    y: int


class Settings(dict[str, int]):
    pass


class Loud:
    """Every hook that unpickling could run raises."""

    def __init__(self) -> None:
        self.value = 5

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("executed")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (Loud, (7,), {"value": 5})


HERE = __name__


def test_stub_classes_hold_data_and_run_nothing() -> None:
    settings = Settings(a=1)
    settings.origin = "file"  # type: ignore[attr-defined]
    value = [Loud(), Color.RED, Level.HIGH, Slotted(), Point(1, 2), settings, {Color.RED: 1}]
    root = indexed(saved(value, protocol=4), stub_prefixes=[HERE.rpartition(".")[0] + "."]).root
    loud, color, level, slotted, point, found, keyed = root
    assert loud == StubObject(HERE, "Loud", (7,), {"value": 5})
    assert color == StubObject(HERE, "Color", ("red",))
    assert level == StubObject(HERE, "Level", (3,))
    assert slotted.state == (None, {"a": 1, "b": 2})
    assert point.args == (1, 2)
    assert found == StubObject(HERE, "Settings", state={"origin": "file"}, contents={"a": 1})
    assert keyed == {Symbol(HERE, "Color('red')"): 1}


def test_named_stubs_and_factories() -> None:
    data = saved([Level.HIGH, Point(1, 2), Loud])
    root = indexed(
        data, stubs={f"{HERE}.Level": lambda v: v, f"{HERE}.Point": None, f"{HERE}.Loud": None}
    ).root
    assert root == [3, StubObject(HERE, "Point", (1, 2)), Symbol(HERE, "Loud")]
    with pytest.raises(UnsafePickleError, match=f"{HERE}.Level"):
        indexed(data, stubs={f"{HERE}.Point": None})


def test_a_failing_factory_is_an_error_about_the_file() -> None:
    def fails(value: Any) -> Any:
        raise ValueError("unknown level")

    with pytest.raises(CorruptSourceError, match="unknown level"):
        indexed(saved(Level.HIGH), stubs={f"{HERE}.Level": fails})


def test_tensor_attributes() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.partition_dim = 1  # type: ignore[attr-defined]
    tensor = torch.zeros(3)
    tensor.note = ["x"]  # type: ignore[attr-defined]
    root = check_all([parameter, tensor], saved([parameter, tensor]))
    assert root[0].attributes == {"partition_dim": 1}
    assert root[1].attributes == {"note": ["x"]}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        lambda: torch.zeros(3, dtype=torch.complex32),
    ],
    ids=["coo", "csr", "quantized", "meta", "conj", "complex32"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_elements_are_refused(make: Any) -> None:
    data = saved({"w": make()})
    with pytest.raises(UnsupportedSourceError, match=r"x\.pt"):
        indexed(data)


def test_old_persistent_views_and_modules() -> None:
    """``view_metadata`` and module sources, which torch itself no longer writes."""
    tensor = torch.arange(10, dtype=torch.float32)

    modules = [Loud]

    class Old(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if isinstance(obj, torch.storage.TypedStorage):
                return ("storage", torch.FloatStorage, "7", "cpu", 10, ("8", 4, 3))
            return ("module", modules.pop(), "file.py", "text") if obj in modules else None

    out = io.BytesIO()
    for header in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
        pickle.dump(header, out, protocol=2)
    Old(out, protocol=2).dump([tensor[1:3], Loud])
    pickle.dump(["7"], out, protocol=2)
    out.write((10).to_bytes(8, "little") + bits_of(tensor))
    data = out.getvalue()
    root = indexed(data, stubs={f"{HERE}.Loud": None}).root
    assert bits_at(data, root[0]) == bits_of(torch.tensor([5.0, 6.0]))
    assert root[1] == Symbol(HERE, "Loud")


def rewritten(data: bytes, *, change: dict[str, bytes] | None = None, **options: Any) -> bytes:
    """The archive as another program would write it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", **options) as new:
        for info in old.infolist():
            short = info.filename.split("/", 1)[1]
            content = (change or {}).get(short, old.read(info))
            new.writestr(info.filename, content)
    return out.getvalue()


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "remote"])
def test_archives_of_other_writers(is_local: bool) -> None:
    value = {"a": torch.arange(5), "b": torch.randn(3, 3)}
    check_all(value, rewritten(saved(value)), is_local=is_local)


def test_compressed_archives_are_refused() -> None:
    data = rewritten(saved({"a": torch.arange(5)}), compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedSourceError, match="compressed"):
        indexed(data)


@pytest.mark.parametrize("dtype", [torch.int16, torch.bfloat16, torch.float64, torch.complex64])
def test_big_endian_archives(dtype: torch.dtype) -> None:
    assert sys.byteorder == "little"
    tensor = random_bits(dtype, 6)
    data = saved({"w": tensor})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        stored = archive.read("archive/data/0")
    size = 4 if dtype is torch.complex64 else tensor.element_size()
    swapped = b"".join(stored[i : i + size][::-1] for i in range(0, len(stored), size))
    data = rewritten(data, change={"byteorder": b"big", "data/0": swapped})
    oracle = torch.load(io.BytesIO(data))["w"]
    assert bits_of(oracle) == bits_of(tensor)
    index = indexed(data)
    assert index.big_endian
    files = MemoryFiles({"x.pt": data})
    read = read_tensor(files, "x.pt", index.root["w"], big_endian=index.big_endian)
    assert read.tobytes() == bits_of(tensor)


def test_unknown_byte_order_is_refused() -> None:
    with pytest.raises(CorruptSourceError, match="byte order"):
        indexed(rewritten(saved(torch.ones(2)), change={"byteorder": b"middle"}))


def test_checksums_of_the_pickle() -> None:
    data = bytearray(saved({"lr": 0.125, "w": torch.ones(2)}))
    at = data.index(np.float64(0.125).byteswap().tobytes())
    data[at] ^= 1
    with pytest.raises(CorruptSourceError, match="checksum"):
        indexed(bytes(data))
    torch.serialization.set_crc32_options(False)
    try:
        unchecked = saved({"lr": 0.125, "w": torch.ones(2)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert indexed(unchecked).root["lr"] == 0.125


def test_skeletons_without_data(tmp_path: pathlib.Path) -> None:
    """``skip_data`` leaves holes; beyond 4 GiB the archive has zip64 fields in every place."""
    path = tmp_path / "big.pt"
    value = {
        f"w{i}": torch.empty(n, dtype=torch.uint8) for i, n in enumerate([5, 5 << 30, 7, 0, 9])
    }
    with torch.serialization.skip_data():
        torch.save(value, path)

    class Sparse(MemoryFiles):
        """Reads the file, since its bytes do not fit into memory."""

        def stat(self, name: str) -> FileStat | None:
            return FileStat(name, path.stat().st_size, "1")

        def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(nbytes)

    with FakeTensorMode():
        fake = torch.load(path)
    expected = {k: t.untyped_storage()._checkpoint_offset for k, t in fake.items() if t.numel()}
    for is_local in (True, False):
        root = index_torch_file(Sparse({}, is_local=is_local), "big.pt").root
        assert {k: r.offset for k, r in root.items() if r.numel} == expected


def test_what_is_not_a_torch_file() -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"y\.pt"):
        index_torch_file(MemoryFiles({}), "y.pt")
    for data, message in [
        (b"", "only 0 bytes"),
        (b"hello world, this is text", "not written by torch.save"),
        (pickle.dumps([1, 2]), "another pickle"),
        (b"\x80\x02", "past its end|truncated"),
    ]:
        with pytest.raises(CorruptSourceError, match=message):
            indexed(data)
    with pytest.raises(UnsupportedSourceError, match="tar"):
        indexed(b"x" * 257 + b"ustar" + b"\0" * 512)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", "hello")
    with pytest.raises(CorruptSourceError, match=r"data\.pkl"):
        indexed(buffer.getvalue())


def test_read_tensor_refuses_large_and_missing_bytes() -> None:
    data = saved({"w": torch.zeros(100), "wide": torch.zeros(1000)[::999]})
    root = indexed(data).root
    with pytest.raises(UnsupportedSourceError, match="at most 64"):
        read_tensor(MemoryFiles({"x.pt": data}), "x.pt", root["w"], max_nbytes=64)
    with pytest.raises(UnsupportedSourceError, match="range of 4000"):
        read_tensor(MemoryFiles({"x.pt": data}), "x.pt", root["wide"], max_nbytes=64)
    short = data[: root["w"].offset + 40]
    with pytest.raises(CorruptSourceError, match="inside a tensor"):
        read_tensor(MemoryFiles({"x.pt": short}), "x.pt", root["w"])


def test_an_index_can_be_pickled() -> None:
    shared = torch.arange(6.0)
    index = indexed(saved({"a": shared, "b": shared[2:], "s": torch.nn.Linear(1, 1).state_dict()}))
    again = pickle.loads(pickle.dumps(index))
    assert again.stat == index.stat
    assert again.root["a"].storage is again.root["b"].storage
    assert again.root["b"].offset == index.root["b"].offset
    assert again.root["s"]._metadata == index.root["s"]._metadata


def test_neither_torch_nor_its_own_pickle_runs(tmp_path: pathlib.Path) -> None:
    """Reading works where torch is not installed, and Python's unpicklers are never used."""
    for use_zip in (True, False):
        (tmp_path / "x.pt").write_bytes(
            saved({"w": torch.ones(3), "n": np.ones(2)}, use_zip=use_zip)
        )
        code = (
            "import sys, pickle, _pickle\n"
            "sys.modules['torch'] = None\n"
            "def refuse(*args, **kwargs): raise SystemExit('an unpickler was made')\n"
            "for module in (pickle, _pickle):\n"
            "    module.Unpickler = module.loads = module.load = refuse\n"
            "pickle._Unpickler = refuse\n"
            "from ucpstore.formats.torchfile import index_torch_file\n"
            "from ucpstore.io.local import LocalFiles\n"
            "print(index_torch_file(LocalFiles(sys.argv[1]), 'x.pt').root['w'].shape)\n"
        )
        run = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert run.stdout == "(3,)\n", run.stderr


@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.lists(st.integers(0, 4), max_size=4),
            st.integers(0, 5),
            st.booleans(),
        ),
        max_size=6,
    ),
    st.booleans(),
)
def test_any_tensors(specs: list[tuple[torch.dtype, list[int], int, bool]], use_zip: bool) -> None:
    value = {}
    for i, (dtype, shape, start, transpose) in enumerate(specs):
        tensor = random_bits(dtype, int(np.prod(shape, dtype=int)) + start)[start:].reshape(shape)
        value[str(i)] = tensor.permute(list(reversed(range(len(shape))))) if transpose else tensor
    for is_local in (True, False):
        check_all(value, saved(value, use_zip=use_zip), is_local=is_local)
