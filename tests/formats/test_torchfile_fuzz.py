"""Damaged files: cut anywhere, changed anywhere. Only errors of this package come out, or the truth."""

from __future__ import annotations

import collections
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.torchfiles import indexed, saved
from ucpstore.errors import CorruptSourceError, Kind, SourceError
from ucpstore.formats.torchfile import TensorRef

CONTAINERS = pytest.mark.parametrize("use_zip", [True, False], ids=["zip", "legacy"])
PLACES = pytest.mark.parametrize("is_local", [True, False], ids=["local", "remote"])


def value() -> Any:
    return {
        "module": collections.OrderedDict(
            (f"layers.{i}.weight", torch.randn(3, 4)) for i in range(5)
        ),
        "step": torch.tensor(3.0),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "view": torch.arange(1000)[3:100:5],
        "shapes": [torch.Size([3, 4])] * 3,
        "groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "name": "decay", "params": [0, 1]}],
        "numbers": [1, 300, 70_000, 2**40, -5, None, True],
    }


@pytest.fixture(scope="module")
def files() -> dict[bool, bytes]:
    torch.manual_seed(0)
    return {use_zip: saved(value(), use_zip=use_zip) for use_zip in (True, False)}


def outcome(data: bytes, *, is_local: bool) -> Any:
    """The index, or the error; anything but an error about the source propagates and fails the test."""
    try:
        return indexed(data, is_local=is_local)
    except SourceError as error:
        return error


def refs_of(item: Any) -> list[TensorRef]:
    if isinstance(item, dict):
        return [ref for part in item.values() for ref in refs_of(part)]
    if isinstance(item, (list, tuple)):
        return [ref for part in item for ref in refs_of(part)]
    return [item] if isinstance(item, TensorRef) else []


def check_bounds(root: Any, nbytes: int) -> None:
    """Whatever a damaged file claims, no tensor may reach outside of it."""
    for ref in refs_of(root):
        if ref.span:
            assert ref.offset >= 0
            assert ref.start + ref.span <= ref.storage.nbytes
            assert ref.storage.offset + ref.storage.nbytes <= nbytes


@CONTAINERS
@PLACES
def test_truncation_is_always_noticed(
    files: dict[bool, bytes], use_zip: bool, is_local: bool
) -> None:
    data = files[use_zip]
    tenths = [len(data) * i // 10 for i in range(10)]
    ends = sorted({*tenths, *range(0, len(data), 37), *range(len(data) - 120, len(data))})
    for end in ends:
        error = outcome(data[:end], is_local=is_local)
        assert isinstance(error, CorruptSourceError), end
        assert error.kind is Kind.TRUNCATED, (end, error)


@CONTAINERS
@PLACES
def test_missing_and_repeated_parts(
    files: dict[bool, bytes], use_zip: bool, is_local: bool
) -> None:
    data = files[use_zip]
    rng = random.Random(1)
    for _ in range(150):
        start = rng.randrange(len(data))
        stop = min(len(data), start + rng.choice([1, 7, 64, 500]))
        middle = rng.choice(
            [b"", data[start:stop] * 2, b"\0" * (stop - start), b"\xff" * (stop - start)]
        )
        changed = data[:start] + middle + data[stop:]
        found = outcome(changed, is_local=is_local)
        if not isinstance(found, SourceError):
            check_bounds(found.root, len(changed))


@CONTAINERS
@PLACES
def test_flipped_bits(files: dict[bool, bytes], use_zip: bool, is_local: bool) -> None:
    data = files[use_zip]
    rng = random.Random(2)
    errors = 0
    for _ in range(700):
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 1, 3, 20])):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        found = outcome(bytes(changed), is_local=is_local)
        if isinstance(found, SourceError):
            errors += 1
        else:
            check_bounds(found.root, len(changed))
    assert errors > 10


@PLACES
def test_every_byte_of_the_legacy_pickle(files: dict[bool, bytes], is_local: bool) -> None:
    """The zip container has a checksum over its pickle; here every damage reaches the machine."""
    data = files[False]
    end = len(data) - 8 * 1000 - 200
    rng = random.Random(3)
    for at in range(end):
        changed = bytearray(data)
        changed[at] = rng.randrange(256)
        found = outcome(bytes(changed), is_local=is_local)
        if not isinstance(found, SourceError):
            check_bounds(found.root, len(changed))


def test_damage_of_the_zip_pickle_is_always_noticed(files: dict[bool, bytes]) -> None:
    data = files[True]
    start = data.index(b"\x80\x02}")
    for at in range(start, data.index(b"PK\x07\x08", start), 5):
        changed = bytearray(data)
        changed[at] ^= 0x10
        assert isinstance(outcome(bytes(changed), is_local=True), CorruptSourceError)


@given(st.binary(max_size=400), st.booleans())
def test_random_pickles(tail: bytes, use_frame: bool) -> None:
    headers = b"".join(b"\x80\x02" + part for part in HEADERS)
    prefix = b"\x80\x04" if use_frame else b"\x80\x02"
    outcome(headers + prefix + tail + b".", is_local=True)


OPCODES = st.sampled_from(
    [
        b"(",
        b")",
        b"]",
        b"}",
        b"N",
        b"0",
        b"1",
        b"2",
        b"a",
        b"b",
        b"d",
        b"e",
        b"l",
        b"o",
        b"s",
        b"t",
        b"u",
    ]
    + [
        b"\x81",
        b"\x85",
        b"\x86",
        b"\x87",
        b"\x88",
        b"\x8f",
        b"\x90",
        b"\x91",
        b"\x92",
        b"\x94",
        b"R",
        b"Q",
    ]
    + [b"K\x03", b"h\x00", b"h\x01", b"q\x00", b"q\x01", b"U\x01a", b"X\x01\x00\x00\x00b", b"\x93"]
    + [
        f"c{name}\n".encode()
        for name in (
            "collections\nOrderedDict",
            "collections\ndefaultdict",
            "torch._utils\n_rebuild_tensor_v2",
            "torch._utils\n_rebuild_parameter_with_state",
            "torch._tensor\n_rebuild_from_type_v2",
            "torch\nFloatStorage",
            "torch\nSize",
            "argparse\nNamespace",
            "numpy\ndtype",
            "numpy\nndarray",
            "numpy.core.multiarray\n_reconstruct",
            "numpy.core.multiarray\nscalar",
            "_codecs\nencode",
            "datetime\ndatetime",
            "pathlib\nPosixPath",
            "__builtin__\nset",
            "__builtin__\ncomplex",
            "__builtin__\nbytearray",
        )
    ]
)
HEADERS = (
    b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
    b"M\xe9\x03.",
    b"}.",
)


@given(st.lists(OPCODES, max_size=40))
def test_random_programs(opcodes: list[bytes]) -> None:
    headers = b"".join(b"\x80\x02" + part for part in HEADERS)
    outcome(headers + b"\x80\x02" + b"".join(opcodes) + b"." + b"\x80\x02].", is_local=True)
