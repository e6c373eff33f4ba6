"""The zip container of ``torch.save`` (torch >= 1.6): where its records lie.

Written by ``caffe2/serialize/inline_container.cc`` (``PyTorchStreamWriter``) with miniz. All records are stored,
never compressed, below one folder: ``<archive>/data.pkl`` (the pickle), ``byteorder``, ``version``,
``.storage_alignment`` and ``data/<key>``, the bytes of each storage. A record's local header carries an
extra field ``FB`` that pads the content to a multiple of the alignment, 64 unless configured.

The central directory gives each record's size and the position of its local header, but not where the
content starts, since only the local header knows the length of its own extra field:

- Local files: each needed local header is read, 30 bytes and the name, and must agree with the directory.
- Remote files: one request per record would be slow, so the position is computed in two ways, forwards by the
  writer's padding rule (``getPadding``) and backwards from the next record's header minus size and data
  descriptor. Where both agree the position is certain. Where they do not (another writer, other
  alignment) the local header is read, as for local files.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from ucpstore.errors import CorruptSourceError, Kind, UcpStoreError, UnsupportedSourceError
from ucpstore.formats._torch.machine import MAX_PICKLE
from ucpstore.formats._torch.ranges import FileRanges

__all__ = ["ZipIndex", "ZipRecord"]

MAX_DIRECTORY = 32 << 20
"""Bytes that the central directory may have: about 300,000 storages."""

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_END_SIGNATURE = b"PK\x05\x06"
_END_NBYTES = 22
_LONGEST_END = _END_NBYTES + 0xFFFF  # with the longest comment
_ALIGNMENT = 64
_U32_MAX = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One entry of the central directory.

    Attributes
    ----------
    name : str
        Inside the archive's folder.
    raw_name : bytes
        As stored, with the folder.
    header : int, bytes
        Position of the local header.
    nbytes : int
        Size of the content.
    crc : int
    descriptor : bool
        A data descriptor follows the content.
    end : int, bytes
        Where the next record (or the directory) starts.
    """

    name: str
    raw_name: bytes
    header: int
    nbytes: int
    crc: int
    descriptor: bool
    end: int


class ZipIndex:
    """The records of one archive; ``folder`` is the one that all of them lie in.

    Raises
    ------
    CorruptSourceError
        The directory is missing, damaged, or describes records that overlap or lie outside the file.
    UnsupportedSourceError
        A record is compressed or encrypted, or the archive is a TorchScript module.
    """

    def __init__(self, ranges: FileRanges) -> None:
        self._ranges = ranges
        self._name = ranges.stat.name
        self.folder = ""
        self.records = self._index()

    def _index(self) -> dict[str, ZipRecord]:
        self._ranges.keep_tail()
        infos, directory = self._read_directory()
        infos.sort(key=lambda info: info.header_offset)
        folder = next(
            (i.filename[: -len("data.pkl")] for i in infos if i.filename.endswith("/data.pkl")),
            None,
        )
        if folder is None:
            raise self._corrupt(
                "it has no record 'data.pkl', expected an archive written by torch.save"
            )
        self.folder = folder.rstrip("/")
        records: dict[str, ZipRecord] = {}
        ends = [info.header_offset for info in infos[1:]] + [directory]
        for info, end in zip(infos, ends, strict=True):
            record = self._record(info, folder, end)
            if record.name in records:
                raise self._corrupt(f"the record {record.name[:100]!r} exists twice")
            records[record.name] = record
        if "constants.pkl" in records:
            raise UnsupportedSourceError(
                f"{self._name} is a TorchScript module, expected a file written by torch.save",
                file=self._name,
            )
        return records

    def _read_directory(self) -> tuple[list[zipfile.ZipInfo], int]:
        """Entries of the central directory, and its position."""
        view = _DirectoryView(self._ranges)
        try:
            with zipfile.ZipFile(view) as archive:
                return archive.infolist(), archive.start_dir
        except (
            zipfile.BadZipFile,
            ArithmeticError,
            LookupError,
            NotImplementedError,
            OSError,
            RuntimeError,
            ValueError,
            struct.error,
        ) as error:
            if isinstance(view.failure, UcpStoreError):
                raise view.failure from None
            self._require_end()
            raise self._corrupt(f"its central directory does not read ({error})") from None

    def _require_end(self) -> None:
        """A file without an end record was cut off: the writer puts it last."""
        size = self._ranges.stat.nbytes
        count = min(size, _LONGEST_END)
        at = self._ranges.read(size - count, count).rfind(_END_SIGNATURE)
        if at < 0 or at + _END_NBYTES > count:
            raise CorruptSourceError(
                f"{self._name} is truncated at {size} bytes: it starts as a torch.save archive, but the "
                "directory that ends one is missing.",
                kind=Kind.TRUNCATED,
                hint="It was probably not written to its end: use an older checkpoint, or copy it "
                "again.",
                file=self._name,
            )

    def _record(self, info: zipfile.ZipInfo, folder: str, end: int) -> ZipRecord:
        raw = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
        name = info.filename
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1:
            raise UnsupportedSourceError(
                f"{self._name}: the record {name[:100]!r} is compressed or encrypted, expected stored "
                "bytes, as torch.save writes them",
                file=self._name,
            )
        smallest = info.header_offset + _LOCAL_HEADER.size + len(raw) + info.file_size
        if info.compress_size != info.file_size or info.header_offset < 0 or smallest > end:
            raise self._corrupt(
                f"the record {name[:100]!r} of {info.file_size} bytes at {info.header_offset} reaches "
                f"into what follows it at {end}"
            )
        return ZipRecord(
            name.removeprefix(folder),
            raw,
            info.header_offset,
            info.file_size,
            info.CRC,
            bool(info.flag_bits & 0x8),
            end,
        )

    # ------------------------------------------------------------------ positions

    def position(self, record: ZipRecord) -> int:
        """Where the content of ``record`` starts in the file."""
        if not self._ranges.is_local:
            position = _computed_position(record)
            if position is not None:
                return position
        nbytes = _LOCAL_HEADER.size + len(record.raw_name)
        return self._check_header(record, self._ranges.read(record.header, nbytes))

    def _check_header(self, record: ZipRecord, header: bytes) -> int:
        fields = _LOCAL_HEADER.unpack(header[: _LOCAL_HEADER.size])
        signature, name_nbytes, extra_nbytes = fields[0], fields[-2], fields[-1]
        position: int = record.header + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
        name = header[_LOCAL_HEADER.size : _LOCAL_HEADER.size + name_nbytes]
        if signature != b"PK\x03\x04" or fields[3] != 0 or name != record.raw_name:
            raise self._corrupt(
                f"the local header of {record.name[:100]!r} at byte {record.header} does not agree with "
                "the central directory"
            )
        if position + record.nbytes > record.end:
            raise self._corrupt(
                f"the content of {record.name[:100]!r} ends at {position + record.nbytes}, but the next "
                f"record starts at {record.end}"
            )
        return position

    # ------------------------------------------------------------------ small records

    def content(self, name: str, *, limit: int = MAX_PICKLE) -> bytes:
        """The whole content of a record that is not a tensor, in one read together with its header.

        The checksum is verified where there is one: ``torch.serialization.set_crc32_options(False)``
        writes 0.
        """
        record = self.records[name]
        if record.end - record.header > limit:
            raise self._corrupt(f"the record {name!r} is larger than {limit} bytes")
        data = self._ranges.read(record.header, record.end - record.header)
        start = self._check_header(record, data) - record.header
        content = data[start : start + record.nbytes]
        if record.crc not in (0, zlib.crc32(content)):
            raise self._corrupt(f"the checksum of the record {name!r} does not match its content")
        return content

    def is_big_endian(self) -> bool:
        """Byte order of the storages; the record ``byteorder`` exists since torch 2.1."""
        record = self.records.get("byteorder")
        if record is None:
            return False
        known = {(len(text), zlib.crc32(text)): text for text in (b"little", b"big")}
        # the directory's checksum says which of the two words it is: no read is needed
        text = known.get((record.nbytes, record.crc)) or self.content("byteorder", limit=1 << 16)
        if text not in known.values():
            raise self._corrupt(f"its byte order is {text[:20]!r}, expected 'little' or 'big'")
        return text == b"big"

    def storage_positions(self, sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
        """Positions of storages, by key; each must have exactly the size in bytes given with its key."""
        positions = {}
        for key, nbytes in sizes:
            record = self.records.get(f"data/{key}")
            if record is None:
                if nbytes:
                    raise self._corrupt(f"the record of storage {key[:40]!r} is missing")
                positions[key] = 0
                continue
            if record.nbytes != nbytes:
                raise self._corrupt(
                    f"storage {key[:40]!r} has {record.nbytes} bytes, but the pickle expects {nbytes}"
                )
            positions[key] = self.position(record)
        return positions

    def _corrupt(self, what: str) -> CorruptSourceError:
        return CorruptSourceError(
            f"{self._name} does not read as a torch.save archive: {what}.",
            hint="It may be truncated or damaged: compare its size with the original.",
            file=self._name,
        )


def _computed_position(record: ZipRecord) -> int | None:
    """Where the content starts, if the writer's rule and the next record's position agree on it."""
    start = record.header + _LOCAL_HEADER.size + len(record.raw_name) + 4
    big_size, big_offset = record.nbytes >= _U32_MAX, record.header >= _U32_MAX
    if big_size or big_offset:  # a zip64 extra field of 16 and 8 bytes
        start += 4 + 16 * big_size + 8 * big_offset
    forwards = -(-start // _ALIGNMENT) * _ALIGNMENT
    descriptor = 0
    if record.descriptor and record.nbytes:
        descriptor = 24 if big_size or big_offset else 16
    backwards = record.end - descriptor - record.nbytes
    return forwards if forwards == backwards else None


class _DirectoryView(io.RawIOBase):
    """A seekable file for `zipfile`, which reads the directory through it and nothing else.

    ``failure`` keeps the storage error of a read: `zipfile` takes every OSError for a damaged archive.
    """

    def __init__(self, ranges: FileRanges) -> None:
        super().__init__()
        self._ranges = ranges
        self._position = 0
        self.failure: Exception | None = None

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._ranges.stat.nbytes}
        position = base[whence] + offset
        if position < 0:
            raise OSError(f"position {position} is before the start of the file")
        self._position = position
        return position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._ranges.stat.nbytes - self._position)
        count = left if size is None or size < 0 else min(size, left)
        if count > MAX_DIRECTORY:
            self.failure = CorruptSourceError(
                f"{self._ranges.stat.name}: its central directory of {count} bytes is larger than the "
                f"limit of {MAX_DIRECTORY}",
                file=self._ranges.stat.name,
            )
            raise self.failure
        try:
            data = self._ranges.read(self._position, count)
        except UcpStoreError as error:
            self.failure = error
            raise
        self._position += len(data)
        return data
