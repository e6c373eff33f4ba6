"""Safe index of ``torch.save`` files (zip and legacy), local or remote, without torch and without tensor bytes.

- ``_unpickler``: the pickle machine, which can call nothing but the allow-list of ``_globals``
- ``torch_zip``, ``torch_legacy``: the two containers, where pickle and storages lie
- ``torch_refs``: tensors as data
- ``_structure``: refuses structures that recursive code could not walk
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ucpstore.dtypes import numpy_dtype
from ucpstore.errors import (
    CheckpointNotFoundError,
    CorruptSourceError,
    Kind,
    SourceError,
    UnsupportedSourceError,
)
from ucpstore.formats._torch.globals import Globals
from ucpstore.formats._torch.legacy import load_legacy
from ucpstore.formats._torch.machine import PickleMachine
from ucpstore.formats._torch.ranges import FileRanges
from ucpstore.formats._torch.rebuild_torch import Storages
from ucpstore.formats._torch.refs import Storage, TensorRef, TypedStorage
from ucpstore.formats._torch.structure import check_structure
from ucpstore.formats._torch.zip import ZipIndex
from ucpstore.io.base import Files, FileStat
from ucpstore.tagged import NumpyArray, StubObject, Symbol

__all__ = [
    "NumpyArray",
    "Storage",
    "StubObject",
    "Symbol",
    "TensorRef",
    "TorchFile",
    "TypedStorage",
    "index_torch_file",
    "read_tensor",
]

LOCAL_BLOCK = 4 << 10
REMOTE_BLOCK = 256 << 10
"""Bytes that are read ahead at the start and the end of a file: a request costs as much as they do."""


@dataclass(frozen=True, slots=True)
class TorchFile:
    """What a ``torch.save`` file holds.

    Attributes
    ----------
    root : Any
        The saved object: dicts (`collections.OrderedDict` where it was one), lists, tuples (also for
        ``torch.Size``), sets, numbers, strings, bytes, and `TensorRef`, `StubObject`, `NumpyArray`,
        `Symbol` (dtypes, classes) for what has no plain counterpart. Free of cycles.
    stat : FileStat
        The file as it was indexed.
    big_endian : bool
        Byte order of the elements.
    container : str
        ``zip`` or ``legacy``.
    warnings : tuple of str
        What was left out of ``root``.
    saved_as : str
        Name, without its ending, under which torch first wrote a zip: the folder of its records.
        Empty, or ``archive``, where torch did not know the name.
    """

    root: Any
    stat: FileStat
    big_endian: bool
    container: str
    warnings: tuple[str, ...] = ()
    saved_as: str = ""


def index_torch_file(
    files: Files,
    name: str,
    *,
    stubs: Mapping[str, Callable[..., Any] | None] | None = None,
    stub_prefixes: Iterable[str] = (),
) -> TorchFile:
    """Index one file: run its pickle through the allow-list and locate its storages.

    A local file takes two small reads, one for the pickle, and one of a local header (zip) or 8 bytes (legacy) for
    every storage; a remote one takes two or three ranged reads.

    Parameters
    ----------
    files : Files
    name : str
        The file's name in ``files``.
    stubs : mapping of str to callable or None
        Further globals that the pickle may name, as ``module.qualname``. ``None`` makes instances a
        `StubObject`; a callable is called with the arguments instead. It must be inert: its arguments come
        from an untrusted file.
    stub_prefixes : iterable of str
        Packages (``deepspeed``) all of whose classes become a `StubObject`.

    Returns
    -------
    TorchFile

    Raises
    ------
    CheckpointNotFoundError
        The file does not exist.
    CorruptSourceError
        It is truncated, malformed, contradicts itself, or exceeds a limit that no checkpoint needs.
    UnsafePickleError
        The pickle names a global outside the allow-list. Nothing was executed.
    UnsupportedSourceError
        It is of a kind that cannot be read faithfully: tar container, TorchScript, compressed records,
        sparse or quantized tensors.
    StorageError
        Storage failed.
    """
    stat = files.stat(name)
    if stat is None:
        raise CheckpointNotFoundError(f"{name} does not exist below {files.url}", file=name)
    ranges = FileRanges(files, stat, LOCAL_BLOCK if files.is_local else REMOTE_BLOCK)
    head = ranges.keep_head()
    storages = Storages()
    allowed = Globals(name, storages, stubs=stubs, stub_prefixes=stub_prefixes)
    big_endian = False
    saved_as = ""
    if head.startswith(b"PK"):
        archive = ZipIndex(ranges)
        machine = PickleMachine(archive.content("data.pkl"), name)
        root = machine.load(allowed)
        warnings = machine.warnings
        saved_as = archive.folder
        big_endian = archive.is_big_endian()
        sizes = [(key, storage.nbytes) for key, storage in storages.by_key.items()]
        for key, position in archive.storage_positions(sizes).items():
            storages.by_key[key].offset = position
    elif head.startswith(b"\x80"):
        root, warnings = load_legacy(ranges, head, allowed, storages)
    else:
        raise _not_torch(head, name)
    check_structure(root, name)
    container = "zip" if head[:2] == b"PK" else "legacy"
    return TorchFile(root, stat, big_endian, container, tuple(warnings), saved_as)


def _not_torch(head: bytes, name: str) -> SourceError:
    """What to say about a file that is neither container."""
    if head[257:262] == b"ustar":
        return UnsupportedSourceError(
            f"{name} is in the tar container that torch wrote before 0.1.10",
            hint="Load it with torch.load and save it again.",
            file=name,
        )
    if len(head) < 4:
        return CorruptSourceError(
            f"{name} has only {len(head)} bytes, expected a file written by torch.save",
            kind=Kind.TRUNCATED,
            file=name,
        )
    return CorruptSourceError(
        f"{name} was not written by torch.save: it starts with {head[:8].hex()}, expected a zip archive "
        "or torch's magic number",
        file=name,
    )


def read_tensor(
    files: Files, name: str, ref: TensorRef, *, big_endian: bool = False, max_nbytes: int = 1 << 24
) -> Any:
    """Read a small tensor, such as the ``step`` of Adam.

    Parameters
    ----------
    files, name
        Where ``ref`` was found.
    ref : TensorRef
    big_endian : bool
        `TorchFile.big_endian`.
    max_nbytes : int, bytes
        Refuse a tensor that is larger, or lies in a wider range.

    Returns
    -------
    numpy.ndarray, of the tensor's shape, native byte order

    Raises
    ------
    UnsupportedSourceError
        The tensor is too large to be read at once.
    CorruptSourceError
        The file ends before the tensor does.
    """
    if max(ref.nbytes, ref.span) > max_nbytes:
        raise UnsupportedSourceError(
            f"{name}: a tensor of shape {ref.shape} has {ref.nbytes} bytes in a range of {ref.span}, "
            f"expected at most {max_nbytes}",
            file=name,
        )
    dtype = numpy_dtype(ref.dtype)
    if not ref.span:
        return np.empty(ref.shape, dtype)
    data = files.read(name, ref.offset, ref.span)
    if len(data) != ref.span:
        raise CorruptSourceError(
            f"{name} ends at byte {ref.offset + len(data)}, inside a tensor that ends at "
            f"{ref.offset + ref.span}",
            kind=Kind.TRUNCATED,
            file=name,
        )
    steps = [step * dtype.itemsize for step in ref.strides]
    out = np.ndarray(ref.shape, dtype, buffer=data, strides=steps).copy()
    return out.byteswap() if big_endian != (sys.byteorder == "big") else out
