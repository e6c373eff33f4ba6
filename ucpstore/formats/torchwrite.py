"""Files that ``torch.load`` reads, written front to back from states that are read block by block.

The container is that of torch's ``PyTorchStreamWriter`` (``caffe2/serialize/inline_container.cc``): a zip of
stored records, the content of each aligned to 64 bytes by an extra field ``FB``, sizes in a zip64 field from
4 GiB on, checksums in data descriptors. All positions follow from the sizes, so the file's size is known
before a byte is read, and memory is one block, whatever the tensors' sizes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from ucpstore.contracts import Source
from ucpstore.dtypes import itemsize, numpy_dtype
from ucpstore.formats._torch.pickling import Size, View, dump
from ucpstore.gather import BLOCK, Tensor, blocks, fill
from ucpstore.io.base import Sink

__all__ = ["BytesWriter", "Size", "TorchWriter", "View"]

_ALIGNMENT = 64
_U32 = 0xFFFFFFFF
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_DATE = 33  # 1980-01-01: the same inputs give the same bytes


@dataclass(frozen=True, slots=True)
class _Record:
    """One record: its name, where its header starts, and what its content is."""

    name: bytes
    offset: int
    nbytes: int
    tensor: Tensor | None
    content: bytes = b""

    @property
    def streamed(self) -> bool:
        """The checksum follows the content, because it is not known before."""
        return self.tensor is not None and self.nbytes > 0

    @property
    def wide(self) -> bool:
        return self.nbytes >= _U32

    @property
    def descriptor_nbytes(self) -> int:
        return (24 if self.wide else 16) * self.streamed

    def header(self) -> bytes:
        """Local header; its extra field moves the content to a multiple of 64 bytes."""
        fields = b""
        if self.wide or self.offset >= _U32:
            sizes = [0 if self.streamed else self.nbytes] * 2 if self.wide else []
            body = struct.pack(f"<{len(sizes)}Q", *sizes)
            body += struct.pack("<Q", self.offset) if self.offset >= _U32 else b""
            fields = struct.pack("<2H", 1, len(body)) + body
        start = self.offset + _LOCAL.size + len(self.name) + len(fields) + 4
        padding = -start % _ALIGNMENT
        fields += b"FB" + struct.pack("<H", padding) + b"Z" * padding
        size = _U32 if self.wide else 0 if self.streamed else self.nbytes
        crc = 0 if self.streamed else zlib.crc32(self.content)
        flags = 0x8 if self.streamed else 0
        head = (b"PK\x03\x04", 0, flags, 0, 0, _DATE, crc, size, size, len(self.name), len(fields))
        return _LOCAL.pack(*head) + self.name + fields

    def descriptor(self, crc: int) -> bytes:
        """What follows a streamed content."""
        if not self.streamed:
            return b""
        return struct.pack(
            "<4sI2Q" if self.wide else "<4s3I", b"PK\x07\x08", crc, *[self.nbytes] * 2
        )

    def entry(self, crc: int) -> bytes:
        """The record in the central directory."""
        far = self.offset >= _U32
        values = [self.nbytes] * 2 * self.wide + [self.offset] * far
        extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
        size, offset = min(self.nbytes, _U32), min(self.offset, _U32)
        flags = 0x8 if self.streamed else 0
        head = (b"PK\x01\x02", 0, 0, flags, 0, 0, _DATE, crc, size, size)
        tail = (len(self.name), len(extra), 0, 0, 0, 0, offset)
        return _CENTRAL.pack(*head, *tail) + self.name + extra


class TorchWriter:
    """One file, laid out and ready to be written.

    Parameters
    ----------
    root : Any
        What ``torch.load`` will return; see `ucpstore.formats._torch.pickling.dump`.
    name : str
        The file's own name without its ending: torch names the folder of the records so.
    """

    def __init__(self, root: Any, name: str) -> None:
        content, tensors = dump(root, name)
        self.pickle_nbytes = len(content)
        self.pickle_digest = xxhash.xxh3_128_hexdigest(content)
        self.tensors: Sequence[Tensor] = tensors
        self._records: list[_Record] = []
        self._end = 0
        self._add(f"{name}/data.pkl", content)
        self._add(f"{name}/byteorder", b"little")
        for key, tensor in enumerate(tensors):
            self._add(f"{name}/data/{key}", tensor)
        self._add(f"{name}/version", b"3\n")
        self.nbytes = self._end + len(self._directory([0] * len(self._records)))

    def _add(self, name: str, content: bytes | Tensor) -> None:
        if isinstance(content, Tensor):
            record = _Record(name.encode(), self._end, content.nbytes, content)
        else:
            record = _Record(name.encode(), self._end, len(content), None, content)
        self._records.append(record)
        self._end += len(record.header()) + record.nbytes + record.descriptor_nbytes

    def _directory(self, crcs: Sequence[int]) -> bytes:
        entries = b"".join(r.entry(crc) for r, crc in zip(self._records, crcs, strict=True))
        count, start, nbytes = len(self._records), self._end, len(entries)
        end64 = b""
        if count >= 0xFFFF or start >= _U32:
            end64 = _END64.pack(
                b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, nbytes, start
            ) + _LOCATOR.pack(b"PK\x06\x07", 0, start + nbytes, 1)
        few = min(count, 0xFFFF)
        end = _END.pack(b"PK\x05\x06", 0, 0, few, few, min(nbytes, _U32), min(start, _U32), 0)
        return entries + end64 + end

    def write(self, source: Source, sink: Sink) -> int:
        """Write everything to ``sink``.

        Returns
        -------
        int
            xxh3-128 of the file.
        """
        out = _Hashed(sink)
        crcs = []
        buffer = np.empty(BLOCK, np.uint8)
        for record in self._records:
            out.write(record.header())
            if record.tensor is None:
                out.write(record.content)
                crcs.append(zlib.crc32(record.content))
                continue
            crc = 0
            size = itemsize(record.tensor.dtype)
            for start, stop in blocks(source, record.tensor, BLOCK):
                block = buffer[: (stop - start) * size]
                view = block.view(numpy_dtype(record.tensor.dtype))
                fill(source, record.tensor, start, view, compare=True)
                crc = zlib.crc32(block.data, crc)
                out.write(block.data)
            out.write(record.descriptor(crc))
            crcs.append(crc)
        out.write(self._directory(crcs))
        return out.digest()


class BytesWriter:
    """A small file of known content, written like the others.

    Parameters
    ----------
    content : bytes
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.nbytes = self.pickle_nbytes = len(content)
        self.pickle_digest = xxhash.xxh3_128_hexdigest(content)
        self.tensors: Sequence[Tensor] = ()

    def write(self, source: Source, sink: Sink) -> int:
        """Write everything to ``sink``; nothing comes from ``source``.

        Returns
        -------
        int
            xxh3-128 of the file.
        """
        out = _Hashed(sink)
        out.write(self._content)
        return out.digest()


class _Hashed:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._hash = xxhash.xxh3_128()

    def write(self, data: bytes | memoryview) -> None:
        if len(data):
            self._hash.update(data)
            self._sink.write([data])

    def digest(self) -> int:
        return self._hash.intdigest()
