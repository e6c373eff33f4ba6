"""A counting in-memory `Files` and small helpers for the tests of ``torch.save`` files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ucpstore.dtypes import numpy_dtype
from ucpstore.formats.torchfile import TensorRef, TorchFile, index_torch_file
from ucpstore.io.base import FileStat


class MemoryFiles:
    """Reads of in-memory objects, noted as ``(name, offset, nbytes)``."""

    url = "memory://test"

    def __init__(self, objects: Mapping[str, bytes], *, is_local: bool = True) -> None:
        self.objects = dict(objects)
        self.is_local = is_local
        self.options: Mapping[str, Any] = {}
        self.reads: list[tuple[str, int, int]] = []

    def stat(self, name: str) -> FileStat | None:
        data = self.objects.get(name)
        return None if data is None else FileStat(name, len(data), "1")

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = self.objects[name]
        end = len(data) if nbytes is None else min(len(data), offset + nbytes)
        self.reads.append((name, offset, end - offset))
        return data[offset:end]


def saved(value: Any, *, use_zip: bool = True, protocol: int = 2) -> bytes:
    """The bytes of ``torch.save``."""
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=use_zip, pickle_protocol=protocol)
    return out.getvalue()


def indexed(data: bytes, *, is_local: bool = True, **options: Any) -> TorchFile:
    """The index of a file with these bytes."""
    return index_torch_file(MemoryFiles({"x.pt": data}, is_local=is_local), "x.pt", **options)


def bits_of(tensor: torch.Tensor) -> bytes:
    """The elements in C order, as they lie in memory."""
    flat = tensor.detach().contiguous().reshape(-1)
    return b"" if flat.numel() == 0 else flat.view(torch.uint8).numpy().tobytes()


def bits_at(data: bytes, ref: TensorRef) -> bytes:
    """The elements of ``ref`` in C order, gathered from the file's bytes without `read_tensor`."""
    size = numpy_dtype(ref.dtype).itemsize
    index = np.zeros(ref.shape, dtype=np.int64)
    for dim, (count, step) in enumerate(zip(ref.shape, ref.strides, strict=True)):
        steps = np.arange(count).reshape([-1 if d == dim else 1 for d in range(len(ref.shape))])
        index = index + steps * step
    return b"".join(
        data[ref.offset + int(i) * size : ref.offset + int(i) * size + size]
        for i in index.reshape(-1)
    )
