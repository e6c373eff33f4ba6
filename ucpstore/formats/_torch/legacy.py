"""The legacy container of ``torch.save`` (before torch 1.6, or ``_use_new_zipfile_serialization=False``).

``torch.serialization._legacy_save``: five pickles one after another (magic number, protocol version, facts
about the machine, the object, the sorted storage keys), then for every key an 8-byte count of elements and the
raw bytes. Counts and elements are little-endian on every machine (``THPStorage_writeFileRaw``). Nothing
is aligned: storages start at any byte.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from ucpstore.dtypes import itemsize
from ucpstore.errors import CorruptSourceError, Kind
from ucpstore.formats._torch.globals import Globals
from ucpstore.formats._torch.machine import PickleMachine
from ucpstore.formats._torch.ranges import FileRanges
from ucpstore.formats._torch.rebuild_torch import Storages

__all__ = ["load_legacy"]

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
_COUNT = struct.Struct("<q")


def load_legacy(
    ranges: FileRanges, head: bytes, allowed: Globals, storages: Storages
) -> tuple[Any, list[str]]:
    """Run the pickles and locate the storages; returns the object and warnings.

    Parameters
    ----------
    ranges : FileRanges
    head : bytes
        The start of the file.
    allowed : Globals
        Allow-list for the object; the other pickles may name no global at all.
    storages : Storages
        Those of ``allowed``; their positions are filled in.
    """
    name = ranges.stat.name
    machine = PickleMachine(head, name, more=_Ahead(ranges, len(head)))
    plain = Globals(name)
    if machine.load(plain) != MAGIC_NUMBER:
        raise CorruptSourceError(
            f"{name} was not written by torch.save: it is another pickle, expected torch's magic number",
            file=name,
        )
    version = machine.load(plain)
    if version != PROTOCOL_VERSION or type(version) is not int:
        raise machine.corrupt(f"the protocol version is not {PROTOCOL_VERSION}")
    machine.load(plain)
    root = machine.load(allowed)
    warnings = list(machine.warnings)
    keys = machine.load(plain)
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise machine.corrupt("the storage keys are not a list of strings")
    _locate(ranges, machine.position, keys, storages)
    return root, warnings


class _Ahead:
    """Reads on in blocks that double, so that a long pickle takes few reads."""

    def __init__(self, ranges: FileRanges, position: int) -> None:
        self._ranges = ranges
        self._position = position
        self._block = max(position, 1 << 12)

    def __call__(self, need: int) -> bytes:
        left = self._ranges.stat.nbytes - self._position
        if need > left:
            raise _truncated(self._ranges, self._position + need)
        data = self._ranges.read(self._position, min(left, max(need, self._block)))
        self._position += len(data)
        self._block *= 2
        return data


def _locate(ranges: FileRanges, start: int, keys: Sequence[str], storages: Storages) -> None:
    """Give every storage its position.

    The pickle tells all sizes, so the positions follow by counting. The counts in the file must agree:
    all of them are read locally; from a remote file only the first, provided that the last storage ends
    exactly where the file does.
    """
    name = ranges.stat.name
    if set(keys) != set(storages.by_key) or len(keys) != len(storages.by_key):
        raise CorruptSourceError(
            f"{name}: its list of {len(keys)} storages is not that of the {len(storages.by_key)} storages "
            "of its pickle",
            file=name,
        )
    position = start
    for key in keys:
        storage = storages.by_key[key]
        storage.offset = position + _COUNT.size
        position = storage.offset + storage.nbytes
    if position > ranges.stat.nbytes:
        raise _truncated(ranges, position)
    ends_exactly = position == ranges.stat.nbytes
    checked = keys if ranges.is_local or not ends_exactly else keys[:1]
    for key in checked:
        storage = storages.by_key[key]
        (count,) = _COUNT.unpack(ranges.read(storage.offset - _COUNT.size, _COUNT.size))
        expected = storage.nbytes // itemsize(storages.first_dtype[key])
        if count != expected:
            raise CorruptSourceError(
                f"{name}: storage {key[:40]!r} at byte {storage.offset - _COUNT.size} has {count} "
                f"elements, but the pickle expects {expected}",
                file=name,
            )


def _truncated(ranges: FileRanges, expected: int) -> CorruptSourceError:
    name = ranges.stat.name
    return CorruptSourceError(
        f"{name} is truncated: it has {ranges.stat.nbytes} bytes, expected at least {expected}.",
        kind=Kind.TRUNCATED,
        hint="It was probably not written to its end: use an older checkpoint, or copy it again.",
        file=name,
    )
