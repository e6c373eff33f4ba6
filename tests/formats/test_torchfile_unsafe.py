"""Hostile files: nothing is executed, what was refused is named, and nothing hangs or grows."""

from __future__ import annotations

import copyreg
import io
import operator
import os
import pickle
import resource
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.formats.torchfiles import indexed, saved
from ucpstore.errors import (
    CorruptSourceError,
    SourceError,
    UnsafePickleError,
    UnsupportedSourceError,
)
from ucpstore.formats.torchfile import StubObject, TensorRef

CANARY: list[str] = []
"""Gets an entry when a hostile pickle runs code."""


def trip(*args: Any) -> Any:
    """What the hostile pickles would like to call."""
    CANARY.append(repr(args))
    return {}


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    CANARY.clear()
    yield
    assert CANARY == []


def archive(pickled: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """A zip container around a pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as zipped:
        for name, data in {"data.pkl": pickled, "byteorder": b"little", **(records or {})}.items():
            zipped.writestr(f"archive/{name}", data)
    return out.getvalue()


def legacy(pickled: bytes) -> bytes:
    """A legacy container around a pickle without storages."""
    headers = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    return b"".join(pickle.dumps(h, 2) for h in headers) + pickled + pickle.dumps([], 2)


CONTAINERS = pytest.mark.parametrize("wrap", [archive, legacy], ids=["zip", "legacy"])


class Reduces:
    """Pickles as a call."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


HERE = __name__
GLOBAL_TRIP = f"c{HERE}\ntrip\n".encode()

CALLS = {
    "os.system": (Reduces(os.system, ("touch canary",)), r"(posix|os)\.system"),
    "eval": (Reduces(eval, (f"__import__('{HERE}').trip()",)), r"builtins\.eval"),
    "exec": (Reduces(exec, ("1",)), r"builtins\.exec"),
    "getattr": (Reduces(getattr, ("text", "__class__")), r"builtins\.getattr"),
    "import": (Reduces(__import__, ("os",)), r"builtins\.__import__"),
    "attrgetter": (Reduces(operator.attrgetter, ("system",)), r"operator\.attrgetter"),
    "methodcaller": (Reduces(operator.methodcaller, ("x",)), r"operator\.methodcaller"),
    "torch.load": (Reduces(torch.load, ("other.pt",)), r"torch\.serialization\.load"),
    "load_from_bytes": (
        Reduces(torch.storage._load_from_bytes, (pickle.dumps(1),)),
        r"torch\.storage\._load_from_bytes",
    ),
    "nested pickle": (Reduces(pickle.loads, (pickle.dumps(1),)), r"_?pickle\.loads"),
    "own function": (Reduces(trip, ()), rf"{HERE}\.trip"),
}


@CONTAINERS
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_refused_by_name(
    name: str, protocol: int, wrap: Callable[[bytes], bytes]
) -> None:
    call, pattern = CALLS[name]
    pickled = pickle.dumps({"model": [1, call]}, protocol)
    with pytest.raises(UnsafePickleError, match=rf"x\.pt.*{pattern}.*Nothing was executed"):
        indexed(wrap(pickled), stub_prefixes=["deepspeed"])


def test_a_plain_pickle_is_refused_by_name() -> None:
    with pytest.raises(UnsafePickleError, match=r"\.system"):
        indexed(pickle.dumps(Reduces(os.system, ("x",)), 2))


@pytest.mark.parametrize(
    "pickled",
    [
        GLOBAL_TRIP + b".",
        GLOBAL_TRIP + b")R.",
        GLOBAL_TRIP + b")\x81.",
        b"\x80\x04\x8c" + bytes([len(HERE)]) + HERE.encode() + b"\x8c\x04trip\x93)R.",
        # the name is put together on the stack and taken from the memo
        b"\x80\x04\x8c\x04trip\x940\x8c" + bytes([len(HERE)]) + HERE.encode() + b"h\x00\x93.",
        b"(i" + HERE.encode() + b"\ntrip\n.",
        b"(" + GLOBAL_TRIP + b"o.",
        GLOBAL_TRIP + b")}\x92.",
    ],
    ids=["GLOBAL", "REDUCE", "NEWOBJ", "STACK_GLOBAL", "dynamic", "INST", "OBJ", "NEWOBJ_EX"],
)
@CONTAINERS
def test_every_opcode_that_resolves_globals(pickled: bytes, wrap: Callable[[bytes], bytes]) -> None:
    with pytest.raises(UnsafePickleError, match=rf"{HERE}\.trip"):
        indexed(wrap(pickled))


@pytest.mark.parametrize("opcode", [b"\x82\xf0", b"\x83\xf0\x00", b"\x84\xf0\x00\x00\x00"])
def test_extension_codes_are_refused(opcode: bytes) -> None:
    copyreg.add_extension(HERE, "trip", 0xF0)
    try:
        pickle.loads(b"\x80\x02" + opcode + b".")  # fills the cache that the C unpickler trusts
        with pytest.raises(UnsafePickleError, match="extension code"):
            indexed(archive(b"\x80\x02" + opcode + b")R."))
    finally:
        copyreg.remove_extension(HERE, "trip", 0xF0)
        copyreg.clear_extension_cache()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


DICT = b"}("  # a dict follows, then SETITEMS


@pytest.mark.parametrize(
    ("pickled", "error"),
    [
        # state on a list, a string, a global, a rebuild function, a class of the allow-list
        (b"]}" + text("append") + b"Nsb.", UnsafePickleError),
        (text("x") + b"}b.", UnsafePickleError),
        (b"ctorch._utils\n_rebuild_tensor_v2\n}" + text("__code__") + b"Nsb.", UnsafePickleError),
        (b"ccollections\nOrderedDict\n}" + text("__init__") + b"Nsb.", UnsafePickleError),
        (b"cargparse\nNamespace\nN}" + text("__call__") + b"Ns\x86b.", UnsafePickleError),
        (b"ctorch\nfloat32\n}b.", UnsafePickleError),
        # calls of what is not a function of the allow-list
        (b"])R.", UnsafePickleError),
        (text("os.system") + b")R.", UnsafePickleError),
        (b"cargparse\nNamespace\n)\x81)R.", UnsafePickleError),
        (b"ctorch\nfloat32\n)R.", UnsafePickleError),
        (b"ctorch\nFloatStorage\nK\x05\x85R.", UnsafePickleError),
        (b"cbuiltins\nint\n" + text("1" * 50) + b"\x85R.", UnsafePickleError),
        # dotted names must not walk attributes
        (b"\x80\x04\x8c\x05torch\x8c\x0eSize.__class__\x93.", UnsafePickleError),
        (b"ctorch\nserialization.os.system\n.", UnsafePickleError),
        (b"ccollections\nOrderedDict.fromkeys\n.", UnsafePickleError),
    ],
)
def test_nothing_real_takes_state_or_is_called(pickled: bytes, error: type[SourceError]) -> None:
    with pytest.raises(error):
        indexed(archive(pickled))


def test_state_of_an_ordered_dict_cannot_shadow_its_methods() -> None:
    state = DICT + text("items") + b"K\x05" + text("_metadata") + b"K\x06u"
    index = indexed(archive(b"ccollections\nOrderedDict\n)R" + state + b"b."))
    assert vars(index.root) == {"_metadata": 6}
    assert list(index.root.items()) == []
    assert any("'items'" in warning for warning in index.warnings)


def test_hooks_of_stubs_are_only_data() -> None:
    names = ["__setstate__", "__class__", "__reduce__", "__dict__", "__getattr__", "__del__"]
    state = DICT + b"".join(text(name) + text("evil") for name in names) + b"u"
    root = indexed(
        archive(b"cdeepspeed.x\nThing\n)\x81" + state + b"b."), stub_prefixes=["deepspeed"]
    ).root
    assert type(root) is StubObject
    assert root.state == dict.fromkeys(names, "evil")


def test_prefixes_do_not_match_neighbours() -> None:
    with pytest.raises(UnsafePickleError, match=r"deepspeedevil\.Thing"):
        indexed(archive(b"cdeepspeedevil\nThing\n)\x81."), stub_prefixes=["deepspeed"])


# ------------------------------------------------------------------------------------ growth and hanging


BOMBS = {
    # nested one level per byte or two
    "deep lists": b"]" * 100_000 + b"a" * 99_999 + b".",
    "deep tuples": b")" + b"\x85" * 200_000 + b".",
    "deep key": b"}" + b")" + b"\x85" * 200_000 + b"Ns.",
    "deep set element": b"\x8f(" + b")" + b"\x85" * 200_000 + b"\x90.",
    "deep frozenset": b"(\x91" + b"\x85" * 100_000 + b".",
    "deep stubs": b"cargparse\nNamespace\n)\x81" * 20_000 + b"b" * 19_999 + b".",
    # every step doubles
    "laughing tuples": b")" + b"2\x86" * 100 + b".",
    "laughing lists": b"]q\x00" + b"0](h\x00h\x00eq\x00" * 64 + b".",
    "laughing key": b"}" + b")" + b"2\x86" * 64 + b"Ns.",
    "laughing set": b"\x8f(" + b")" + b"2\x86" * 64 + b"\x90.",
    # sizes that are not there
    "huge bytes": b"\x8e" + struct.pack("<Q", 2**62) + b"x.",
    "huge bytearray": b"\x96" + struct.pack("<Q", 2**63) + b"x.",
    "huge text": b"\x8d" + struct.pack("<Q", 2**64 - 1) + b"x.",
    "huge string": b"X" + struct.pack("<I", 2**32 - 1) + b"x.",
    "huge integer": b"\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
    "negative integer": b"\x8b" + struct.pack("<i", -5) + b"x.",
    "huge frame": b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b".",
    "decimal integer": b"L" + b"9" * 4000 + b"L\n.",
    "endless line": b"L" + b"9" * 100_000 + b"\n.",
    "huge memo": b"Nr" + struct.pack("<I", 2**32 - 1) + b"j" + struct.pack("<I", 7) + b".",
    # calls that would allocate
    "bytes of a size": b"cbuiltins\nbytes\nJ\xff\xff\xff\x7f\x85R.",
    "bytearray of a size": b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "list of a range": b"cbuiltins\nlist\ncbuiltins\nrange\nJ\xff\xff\xff\x7f\x85R\x85R.",
    # cycles
    "list of itself": b"]q\x00h\x00a.",
    "dict of itself": b"}q\x00" + text("a") + b"h\x00s.",
    "stub of itself": b"cargparse\nNamespace\n)\x81q\x00h\x00b.",
    # copies that multiply
    "copies": b"(" + b"N" * 100_000 + b"tq\x000(" + b"cbuiltins\nlist\nh\x00\x85R" * 2_000 + b"l.",
    # malformed
    "empty stack": b".",
    "unknown opcode": b"\xff.",
    "values left": b"NN.",
    "mark left": b"(N.",
    "no memo": b"h\x07.",
    "pop of nothing": b"0.",
    "odd items": b"}(NNNu.",
    "append to text": text("a") + b"Na.",
    "short tuple": b"N\x87.",
    "protocol 9": b"\x80\x09N.",
    "text persistent id": b"P0\n.",
    "persistent id": b"NQ.",
    "buffers": b"\x97.",
    "bad utf-8": b"X\x02\x00\x00\x00\xff\xff.",
    "no newline": b"ctorch",
    "unhashable": b"}]Ns.",
    "negative memo": b"Np-1\n.",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", BOMBS)
@CONTAINERS
def test_bombs(name: str, wrap: Callable[[bytes], bytes]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((CorruptSourceError, UnsupportedSourceError, UnsafePickleError)) as caught:
        indexed(wrap(BOMBS[name]))
    assert "x.pt" in str(caught.value)
    assert len(str(caught.value)) < 2000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 400_000  # KiB


def test_colliding_keys_are_limited() -> None:
    keys = b"".join(
        b"\x8a\x0a" + ((2**61 - 1) * (2**9 + i)).to_bytes(10, "little") + b"N"
        for i in range(20_000)
    )
    with pytest.raises(UnsupportedSourceError, match="keys"):
        indexed(archive(b"}(" + keys + b"u."))


def test_shared_but_small_structures_are_fine() -> None:
    assert indexed(archive(b")" + b"2\x86" * 15 + b".")).root[0][0][0][0] is not None


# ------------------------------------------------------------------------------------ claims of tensors


def claim(
    numel: Any = 4,
    *,
    start: Any = 0,
    shape: Any = (2, 2),
    strides: Any = (2, 1),
    key: Any = "0",
    kind: bytes = b"ctorch\nFloatStorage\n",
) -> bytes:
    """A pickle with one tensor that makes any claims about itself."""

    def dumped(value: Any) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    pid = b"(" + text("storage") + kind + dumped(key) + text("cpu") + dumped(numel) + b"tQ"
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
        + pid
        + b"".join(map(dumped, (start, shape, strides, False, None)))
        + b"tR."
    )


def test_the_claim_of_an_honest_tensor() -> None:
    root = indexed(archive(claim(), {"data/0": b"\0" * 16})).root
    assert type(root) is TensorRef
    assert root.shape == (2, 2)


@pytest.mark.parametrize(
    "claims",
    [
        {"numel": 2**60},
        {"numel": 2**63},
        {"numel": -1},
        {"numel": 3},
        {"numel": 5},
        {"numel": 4.0},
        {"numel": True},
        {"numel": None},
        {"key": "1"},
        {"key": "../data/0"},
        {"key": 0},
        {"start": 1},
        {"start": -1},
        {"start": 2**62},
        {"start": None},
        {"shape": (3, 2)},
        {"shape": (2**40, 2**40), "strides": (0, 0), "start": 4},
        {"shape": (2**62, 2**62), "strides": (0, 0)},
        {"shape": (2, -2)},
        {"shape": (2, 2.0)},
        {"shape": [2, 2]},
        {"shape": (2, 2, 1)},
        {"shape": (1,) * 100, "strides": (1,) * 100},
        {"strides": (2, -1)},
        {"strides": (2, 2)},
        {"strides": (2**62, 2**62)},
        {"strides": None},
        {"kind": b"ctorch\nQInt8Storage\n"},
        {"kind": b"ctorch\nfloat32\n"},
        {"kind": text("FloatStorage")},
    ],
    ids=str,
)
def test_claims_beyond_the_storage(claims: dict[str, Any]) -> None:
    data = archive(claim(**claims), {"data/0": b"\0" * 16})
    with pytest.raises((CorruptSourceError, UnsupportedSourceError), match=r"x\.pt"):
        indexed(data)


def test_one_storage_of_two_sizes() -> None:
    pair = b"\x80\x02" + claim()[2:-1] + claim(2, shape=(2,), strides=(1,))[2:-1] + b"\x86."
    with pytest.raises(CorruptSourceError, match="16 bytes at one and 8 at another"):
        indexed(archive(pair, {"data/0": b"\0" * 16}))


# ------------------------------------------------------------------------------------ claims of archives


def directory_of(data: bytes) -> int:
    """Position of the central directory."""
    return int(struct.unpack("<I", data[-6:-2])[0])


def patched(data: bytes, at: int, layout: str, value: int) -> bytes:
    out = bytearray(data)
    struct.pack_into(layout, out, at, value)
    return bytes(out)


@pytest.fixture(scope="module")
def honest() -> bytes:
    return saved({"a": torch.arange(100), "b": torch.ones(7)})


def entries(data: bytes) -> list[tuple[int, str]]:
    """Position and name of every entry of the central directory."""
    at, out = directory_of(data), []
    while data[at : at + 4] == b"PK\x01\x02":
        name, extra, comment = struct.unpack("<3H", data[at + 28 : at + 34])
        out.append((at, data[at + 46 : at + 46 + name].decode().split("/", 1)[1]))
        at += 46 + name + extra + comment
    return out


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "remote"])
@pytest.mark.parametrize(
    ("field", "layout", "value"),
    [
        (20, "<I", 2**31),  # compressed size
        (24, "<I", 8),  # size
        (24, "<I", 2**32 - 1),  # size, "see the zip64 field"
        (24, "<I", 2**32 - 2),
        (42, "<I", 64),  # position
        (42, "<I", 2**32 - 1),
        (42, "<I", 2**32 - 2),
        (28, "<H", 2**16 - 1),  # length of the name
        (28, "<H", 3),
        (30, "<H", 2**16 - 1),  # length of the extra field
        (8, "<H", 1),  # encrypted
        (10, "<H", 8),  # deflated
        (10, "<H", 99),
    ],
)
def test_false_entries(honest: bytes, field: int, layout: str, value: int, is_local: bool) -> None:
    (at,) = [at for at, name in entries(honest) if name == "data/0"]
    with pytest.raises((CorruptSourceError, UnsupportedSourceError), match=r"x\.pt"):
        indexed(patched(honest, at + field, layout, value), is_local=is_local)


@pytest.mark.parametrize(
    ("field", "layout", "value"),
    [
        (8, "<H", 3),  # number of entries
        (10, "<H", 2**16 - 1),
        (12, "<I", 2**31),  # size of the directory
        (12, "<I", 1),
        (16, "<I", 2**31),  # position of the directory
        (16, "<I", 2**32 - 1),
        (20, "<H", 500),  # length of the comment
        (0, "<I", 0),
    ],
)
def test_false_end_records(honest: bytes, field: int, layout: str, value: int) -> None:
    data = patched(honest, len(honest) - 22 + field, layout, value)
    found = outcome(data)
    # some fields repeat what the file says elsewhere: then the answer must be the right one
    assert found in (CorruptSourceError, indexed(honest).root["a"].offset)


def outcome(data: bytes) -> Any:
    """Offset of a tensor, or the class of the error."""
    try:
        return indexed(data).root["a"].offset
    except SourceError as error:
        return type(error)


def test_false_zip64_sizes() -> None:
    honest = archive(claim(), {"data/0": b"\0" * 16})
    (at, _), *_ = [entry for entry in entries(honest) if entry[1] == "data/0"]
    name = struct.unpack("<H", honest[at + 28 : at + 30])[0]
    extra = struct.pack("<HHQQQ", 1, 24, 2**63, 2**63, 2**63)
    entry = bytearray(honest[at : at + 46 + name]) + extra
    struct.pack_into("<II", entry, 20, 2**32 - 1, 2**32 - 1)
    struct.pack_into("<H", entry, 30, len(extra))
    struct.pack_into("<I", entry, 42, 2**32 - 1)
    data = honest[:at] + bytes(entry) + honest[at + 46 + name :]
    size = struct.unpack("<I", data[-10:-6])[0] + len(extra)
    with pytest.raises(CorruptSourceError, match="data/0"):
        indexed(patched(data, len(data) - 10, "<I", size))


def test_names_that_exist_twice() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as zipped:
        zipped.writestr("archive/data.pkl", claim())
        zipped.writestr("archive/data/0", b"\0" * 16)
        with pytest.warns(UserWarning, match="Duplicate"):
            zipped.writestr("archive/data/0", b"\1" * 16)
    with pytest.raises(CorruptSourceError, match="twice"):
        indexed(out.getvalue())


def test_overlapping_records() -> None:
    data = archive(claim(), {"data/0": b"\0" * 16, "data/1": b"\1" * 16})
    by_name = {name: at for at, name in entries(data)}
    position = struct.unpack("<I", data[by_name["data/0"] + 42 :][:4])[0]
    with pytest.raises(CorruptSourceError, match="reaches into"):
        indexed(patched(data, by_name["data/1"] + 42, "<I", position + 8))


def test_local_headers_that_disagree(honest: bytes) -> None:
    header = indexed(honest).root["a"].offset
    header = honest.rindex(b"PK\x03\x04", 0, header)
    for at, layout, value in [(0, "<I", 0), (26, "<H", 3), (28, "<H", 40_000), (8, "<H", 8)]:
        with pytest.raises(CorruptSourceError, match="data/0"):
            indexed(patched(honest, header + at, layout, value))


def test_exchanged_entries_of_the_directory() -> None:
    """Two storages of one size: only the names in the local headers tell which is which."""
    data = saved({"a": torch.zeros(5000), "b": torch.ones(5000)})
    by_name = {name: at + 42 for at, name in entries(data)}
    first, second = by_name["data/0"], by_name["data/1"]
    positions = [struct.unpack("<I", data[at : at + 4])[0] for at in (first, second)]
    exchanged = patched(patched(data, first, "<I", positions[1]), second, "<I", positions[0])
    with pytest.raises(CorruptSourceError, match="does not agree with"):
        indexed(exchanged)


def test_torchscript_is_refused() -> None:
    data = archive(claim(), {"constants.pkl": b"", "data/0": b"\0" * 16})
    with pytest.raises(UnsupportedSourceError, match="TorchScript"):
        indexed(data)


def test_checksum_of_a_huge_record_is_not_needed() -> None:
    pickled = claim()
    data = archive(pickled, {"data/0": b"\0" * 16})
    at = data.index(struct.pack("<I", zlib.crc32(b"\0" * 16)), directory_of(data))
    assert indexed(patched(data, at, "<I", 0)).root.shape == (2, 2)


# ------------------------------------------------------------------------------------ legacy containers


def test_legacy_storage_lists_must_agree() -> None:
    data = saved({"a": torch.arange(4)}, use_zip=False)
    count = data.rindex((4).to_bytes(8, "little"))
    with pytest.raises(CorruptSourceError, match="has 5 elements"):
        indexed(patched(data, count, "<q", 5))
    with pytest.raises(CorruptSourceError, match="truncated"):
        indexed(data[:-1])
    keys = data.rindex(b"]q")
    assert indexed(data + b"more").root["a"].shape == (4,)
    with pytest.raises(CorruptSourceError, match="storages"):
        indexed(data[:keys] + b"]." + data[count:])


def test_legacy_headers() -> None:
    good = legacy(b"\x80\x02N.")
    assert indexed(good).root is None
    with pytest.raises(CorruptSourceError, match="protocol version"):
        indexed(good.replace(pickle.dumps(1001, 2), pickle.dumps(1002, 2)))
    with pytest.raises(UnsafePickleError, match=r"os\.system"):
        indexed(good.replace(pickle.dumps({"little_endian": True}, 2), b"\x80\x02cos\nsystem\n."))
    with pytest.raises(UnsafePickleError, match="argparse"):
        indexed(good[: -len(pickle.dumps([], 2))] + b"\x80\x02cargparse\nNamespace\n.")
