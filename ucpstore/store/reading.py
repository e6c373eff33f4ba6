"""Reads of stored arrays, each in the way that suits its storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ucpstore.contracts import Arrays
from ucpstore.digest import hash_tile, merge
from ucpstore.dtypes import itemsize
from ucpstore.io.base import Files
from ucpstore.io.urls import parse_url
from ucpstore.layout.region import Region
from ucpstore.layout.tiles import iter_blocks, iter_tiles
from ucpstore.store.arrays import ArraySpec
from ucpstore.store.blocks import BlockReader

if TYPE_CHECKING:
    import tensorstore as ts

    from ucpstore.store.remote import TensorStoreReader

__all__ = ["ArrayReader"]

_NOT_ENCODING = {"attributes", "dimension_names", "fill_value"}
"""Members of ``zarr.json`` that say nothing about the bytes of objects."""


class ArrayReader:
    """Reads boxes of arrays by their metadata alone. Picklable; safe between threads.

    Local files and ``memory://`` are read by `ucpstore.store.blocks`, object stores by TensorStore.

    Parameters
    ----------
    files : Files
        The checkpoint's folder.
    metadata : mapping of str to mapping, optional
        ``zarr.json`` of arrays as it was stored, by path.
    """

    def __init__(
        self, files: Files, metadata: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._files = files
        self._metadata = metadata or {}
        self._reset()

    def _reset(self) -> None:
        self._near = parse_url(self._files.url).scheme in {"file", "memory"}
        self._blocks = BlockReader(self._files)
        self._through_tensorstore: TensorStoreReader | None = None
        self._plain: dict[str, bool] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_files": self._files, "_metadata": self._metadata}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def open(self, array: ArraySpec) -> ts.TensorStore:
        """The array as TensorStore sees it: stored dtype, whole shape. No request is made.

        Raises
        ------
        UnsupportedSourceError
            TensorStore does not know this kind of storage.
        """
        return self._tensorstore().open(array, self._document(array))

    def read(
        self, array: ArraySpec, region: Region, out: Arrays, *, what: str, **context: Any
    ) -> None:
        """Fill ``out`` (shape ``region.sizes``, stored or logical dtype, any strides).

        Raises
        ------
        IntegrityError
            An object is lost (``LOST_OBJECT``) or damaged (``CHECKSUM``).
        """
        stored = np.dtype(array.dtype)
        if not (out.flags.writeable and out.flags.aligned and out.dtype.isnative):
            # TensorStore would fill a copy of such an array.
            values = np.empty(region.sizes, stored)
            self.read(array, region, values, what=what, **context)
            out[...] = values.view(out.dtype.newbyteorder("="))
            return
        view = out.view(stored)
        if self._near and self.is_own_encoding(array):
            self._blocks.read(array, region, view, what=what, **context)
        else:
            reader, document = self._tensorstore(), self._document(array)
            reader.read(array, document, region, view, what=what, **context)

    def digest_object(self, array: ArraySpec, index: int) -> int:
        """Partial digest of a stored object, as `ucpstore.store.encoder.encode_object` returned it.

        Raises
        ------
        IntegrityError
            The object is lost or damaged.
        """
        partials = []
        size = itemsize(array.dtype)
        for block in iter_blocks(array.object_region(index), array.tile, size):
            values = np.empty(block.sizes, array.dtype)
            self.read(array, block, values, what=f"cannot check {array.path!r}")
            for tile, box in iter_tiles(array.shape, array.tile, block):
                part = np.ascontiguousarray(values[box.within(block).slices])
                partials.append(hash_tile(tile, part.reshape(-1).view(np.uint8)))
        return merge(partials)

    def _document(self, array: ArraySpec) -> Mapping[str, Any]:
        return self._metadata.get(array.path) or array.metadata()

    def is_own_encoding(self, array: ArraySpec) -> bool:
        """Whether the array is encoded as we do it; TensorStore knows other codecs, too."""
        plain = self._plain.get(array.path)
        if plain is None:
            documents = self._document(array), array.metadata()
            found, own = (
                {key: value for key, value in document.items() if key not in _NOT_ENCODING}
                for document in documents
            )
            plain = self._plain[array.path] = found == own
        return plain

    def _tensorstore(self) -> TensorStoreReader:
        from ucpstore.store.remote import TensorStoreReader

        if self._through_tensorstore is None:
            self._through_tensorstore = TensorStoreReader(self._files)
        return self._through_tensorstore
