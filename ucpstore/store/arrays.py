"""One Zarr array of the hierarchy: shape, grid, dtypes and its ``zarr.json``, without its data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ucpstore.contracts import Role
from ucpstore.dtypes import itemsize
from ucpstore.errors import FormatVersionError
from ucpstore.layout.region import Region

__all__ = ["CRC_BYTES", "INDEX_ENTRY_BYTES", "NO_ATTRIBUTES", "ArraySpec", "storage_dtype"]

CRC_BYTES = 4
"""Bytes of the crc32c behind every inner chunk and behind a shard's index."""

NO_ATTRIBUTES: Mapping[str, Any] = {}
"""Shared by all arrays without further attributes; never changed."""

INDEX_ENTRY_BYTES = 16
"""Bytes of an inner chunk's entry in a shard's index: offset and size as uint64."""

_HALVES = frozenset({"float16", "bfloat16"})
_KEPT = frozenset({Role.MODEL_WEIGHT, Role.BUFFER})


def _bits(dtype: str) -> str:
    """The dtype that Zarr readers know, of the same size, for a dtype that they may not know."""
    if dtype == "bfloat16":
        return "uint16"
    return "uint8" if dtype.startswith("float8") else dtype


def storage_dtype(dtype: str, role: Role) -> str:
    """Name of the dtype in which a state is stored.

    Optimizer states of 16 bits are widened to float32 (Universal Checkpointing stores float32),
    which is exact. Model weights and buffers keep their dtype, and nothing is ever narrowed. bfloat16 and
    float8 are stored as the bits of an unsigned integer: one bfloat16 array makes ``zarr.open_group``
    of the whole hierarchy fail in zarr-python 3.1.

    Parameters
    ----------
    dtype : str
        Element type in the source.
    role : Role
    """
    if dtype in _HALVES and role not in _KEPT:
        return "float32"
    itemsize(dtype)
    return _bits(dtype)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array to write, or one that was written.

    Attributes
    ----------
    path : str
        Folder of the array under the checkpoint's URL.
    shape : tuple of int
    dtype : str
        Stored numpy dtype.
    source_dtype : str
        Element type in the source; differs from `logical_dtype` only where it was widened.
    tile : tuple of int
        Shape of an inner chunk.
    shard : tuple of int
        Shape of an object: a multiple of ``tile``, equal to it where the array is not sharded.
    members : tuple of (fqn, state)
        What the array holds: one state, or several that are stacked along a leading axis.
    role : Role
    dimension_names : tuple of str, optional
        ``dim_0``, ``dim_1``, ... by default.
    attributes : mapping
        Further members of the attribute ``ucpstore``, JSON values.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    source_dtype: str
    tile: tuple[int, ...]
    shard: tuple[int, ...]
    members: tuple[tuple[str, str], ...]
    role: Role = Role.OTHER
    dimension_names: tuple[str, ...] | None = None
    attributes: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRIBUTES)

    @property
    def sharded(self) -> bool:
        """Whether an object holds several inner chunks."""
        return self.shard != self.tile

    @property
    def stacked(self) -> bool:
        """Whether the leading axis numbers the members."""
        return "stack" in self.attributes

    @property
    def logical_dtype(self) -> str:
        """Element type that a reader of ``ucpstore`` sees (bfloat16 where its bits are stored)."""
        return self.source_dtype if _bits(self.source_dtype) == self.dtype else self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without padding, checksums and indexes."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def tile_nbytes(self) -> int:
        """Bytes of a whole inner chunk, without its checksum."""
        return math.prod(self.tile) * itemsize(self.dtype)

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Number of objects along every dim."""
        return tuple(-(-n // s) for n, s in zip(self.shape, self.shard, strict=True))

    @property
    def shard_grid(self) -> tuple[int, ...]:
        """Number of inner chunks along every dim of an object, those outside the array included."""
        return tuple(s // t for s, t in zip(self.shard, self.tile, strict=True))

    @property
    def num_objects(self) -> int:
        """Number of stored objects: 1 for a 0-d array, 0 for an empty one."""
        return math.prod(self.grid_shape)

    def object_position(self, index: int) -> tuple[int, ...]:
        """Position in the grid of the ``index``-th object, in C order."""
        if not 0 <= index < self.num_objects:
            raise IndexError(f"{self.path!r} has {self.num_objects} objects, no object {index}")
        position = []
        for extent in reversed(self.grid_shape):
            index, place = divmod(index, extent)
            position.append(place)
        return tuple(reversed(position))

    def object_key(self, index: int) -> str:
        """Name of the ``index``-th object under the checkpoint's URL.

        Chunk key encoding ``default`` with separator ``.`` (Zarr v3 core, "Chunk key encoding").
        """
        return ".".join([f"{self.path}/c", *map(str, self.object_position(index))])

    def object_region(self, index: int) -> Region:
        """The part of the array that the ``index``-th object holds, clipped to the array."""
        offsets = tuple(p * s for p, s in zip(self.object_position(index), self.shard, strict=True))
        stops = (min(o + s, n) for o, s, n in zip(offsets, self.shard, self.shape, strict=True))
        return Region(offsets, tuple(b - o for b, o in zip(stops, offsets, strict=True)))

    def objects_in(self, region: Region) -> Iterator[int]:
        """Indices of the objects that hold a part of ``region``, in C order."""
        if region.volume == 0:
            return
        first = (o // s for o, s in zip(region.offsets, self.shard, strict=True))
        last = (-(-e // s) for e, s in zip(region.stops, self.shard, strict=True))
        grid = self.grid_shape
        for position in itertools.product(*map(range, first, last)):
            index = 0
            for place, extent in zip(position, grid, strict=True):
                index = index * extent + place
            yield index

    def object_tiles(self, index: int) -> tuple[int, ...]:
        """Number of inner chunks along every dim that the ``index``-th object stores."""
        sizes = self.object_region(index).sizes
        return tuple(-(-s // t) for s, t in zip(sizes, self.tile, strict=True))

    def object_nbytes(self, index: int) -> int:
        """Exact size in bytes of the ``index``-th object."""
        chunks = math.prod(self.object_tiles(index)) * (self.tile_nbytes + CRC_BYTES)
        if not self.sharded:
            return chunks
        return chunks + math.prod(self.shard_grid) * INDEX_ENTRY_BYTES + CRC_BYTES

    def metadata(self, extra: Mapping[str, Any] = NO_ATTRIBUTES) -> dict[str, Any]:
        """The array's ``zarr.json`` (Zarr v3 core), always with the same order of keys.

        Parameters
        ----------
        extra : mapping
            Further members of the attribute ``ucpstore`` that are known only later: the digest.
        """
        fqn, state = self.members[0]
        described = {
            **({} if self.stacked else {"fqn": fqn}),
            "state": state,
            "role": str(self.role),
            "dtype": self.logical_dtype,
            "source_dtype": self.source_dtype,
            **self.attributes,
            **extra,
        }
        names = self.dimension_names or tuple(f"dim_{d}" for d in range(len(self.shape)))
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.shard)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": _fill_value(self.dtype),
            "codecs": self._codecs(),
            "attributes": {"ucpstore": described},
            "dimension_names": list(names),
        }

    def _codecs(self) -> list[dict[str, Any]]:
        elements: dict[str, Any] = {"name": "bytes"}
        if itemsize(self.dtype) > 1:
            elements["configuration"] = {"endian": "little"}
        chunk = [elements, {"name": "crc32c"}]
        if not self.sharded:
            return chunk
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        return [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": list(self.tile),
                    "codecs": chunk,
                    "index_codecs": index,
                    "index_location": "end",
                },
            }
        ]

    @classmethod
    def from_metadata(cls, path: str, document: Mapping[str, Any]) -> ArraySpec:
        """The array that `metadata` describes.

        Raises
        ------
        FormatVersionError
            The document is not one that `metadata` made.
        """
        try:
            described = dict(document["attributes"]["ucpstore"])
            shard = tuple(document["chunk_grid"]["configuration"]["chunk_shape"])
            codec = document["codecs"][0]
            tile = shard
            if codec["name"] == "sharding_indexed":
                tile = tuple(codec["configuration"]["chunk_shape"])
            shape = tuple(document["shape"])
            members = _members(described)
            _check_grid(shape, tile, shard, len(members) if "stack" in described else None)
            names = tuple(document["dimension_names"])
            default_names = tuple(f"dim_{d}" for d in range(len(shape)))
            listed = {"fqn", "state", "role", "dtype", "source_dtype"}
            return cls(
                path=path,
                shape=shape,
                dtype=document["data_type"],
                source_dtype=described["source_dtype"],
                tile=tile,
                shard=shard,
                members=members,
                role=Role(described["role"]),
                dimension_names=None if names == default_names else names,
                attributes={k: v for k, v in described.items() if k not in listed},
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise FormatVersionError(
                f"array {path!r}: its zarr.json has another form ({error!r}), expected one that "
                "ucpstore wrote.",
                path=path,
            ) from error


def _check_grid(
    shape: tuple[int, ...], tile: tuple[int, ...], shard: tuple[int, ...], members: int | None
) -> None:
    if not len(shape) == len(tile) == len(shard):
        raise ValueError(f"shape {shape}, chunk {shard} and inner chunk {tile} differ in rank")
    if any(n < 0 or t < 1 or s < t or s % t for n, t, s in zip(shape, tile, shard, strict=True)):
        raise ValueError(f"no grid of chunks {shard} and inner chunks {tile} over shape {shape}")
    if members is not None and (not shape or members != shape[0]):
        raise ValueError(f"{members} members are stacked in shape {shape}")


def _members(described: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Members by the attribute ``stack``: numbered siblings ``prefix + number + suffix``."""
    state = described["state"]
    stack = described.get("stack")
    if stack is None:
        return ((described["fqn"], state),)
    numbers = range(stack["first"], stack["first"] + stack["count"])
    return tuple((f"{stack['prefix']}{number}{stack['suffix']}", state) for number in numbers)


def _fill_value(dtype: str) -> Any:
    """What a reader would see in place of a lost object: NaN where the dtype has one."""
    if dtype.startswith("float"):
        return "NaN"
    if dtype.startswith("complex"):
        return ["NaN", "NaN"]
    return False if dtype == "bool" else 0
