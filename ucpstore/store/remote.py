"""Reads of stored arrays through TensorStore, which keeps many requests to an object store in flight."""

from __future__ import annotations

import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import tensorstore as ts

from ucpstore.contracts import Arrays
from ucpstore.errors import UnsupportedSourceError
from ucpstore.io.base import Files
from ucpstore.io.kvstore import check_fork
from ucpstore.layout.region import Region
from ucpstore.store.arrays import ArraySpec
from ucpstore.store.tensorstore_ import array_spec, folder_spec, make_context, translated

__all__ = ["TensorStoreReader", "split_region"]

_REQUEST_BYTES = 128 << 20
"""Bytes of a read, in whole objects: reading all of one takes a single request."""

_OPEN_ARRAYS = 1024


def split_region(
    region: Region, tile: tuple[int, ...], itemsize: int, limit: int
) -> Iterator[Region]:
    """Cut a region at tile borders into boxes of at most ``limit`` bytes (or of one tile)."""
    extent = list(tile)
    nbytes = math.prod(tile) * itemsize
    for dim in reversed(range(region.ndim)):
        tiles = -(-region.stops[dim] // tile[dim]) - region.offsets[dim] // tile[dim]
        fit = min(tiles, max(1, limit // nbytes))
        extent[dim] *= fit
        nbytes *= fit
        if fit < tiles:
            break
    axes = []
    for offset, stop, size, step in zip(region.offsets, region.stops, tile, extent, strict=True):
        cuts = range(offset // size * size + step, stop, step)
        axes.append(list(itertools.pairwise([offset, *cuts, stop])))
    for box in itertools.product(*axes):
        yield Region(tuple(a for a, _ in box), tuple(b - a for a, b in box))


class TensorStoreReader:
    """Opens arrays by their metadata alone and reads boxes of them. Safe between threads.

    Parameters
    ----------
    files : Files
        The checkpoint's folder.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._kvstore = folder_spec(files)
        self._context = make_context()
        self._lock = threading.Lock()
        self._open: OrderedDict[str, ts.TensorStore] = OrderedDict()

    def open(self, array: ArraySpec, metadata: Mapping[str, Any]) -> ts.TensorStore:
        """The array as TensorStore sees it: stored dtype, whole shape. No request is made.

        Parameters
        ----------
        array : ArraySpec
        metadata : mapping
            Its ``zarr.json``.

        Raises
        ------
        UnsupportedSourceError
            TensorStore does not know this kind of storage.
        """
        url = self._files.url
        if self._kvstore is None:
            raise UnsupportedSourceError(
                f"TensorStore cannot open {url}: expected a local, s3:// or gs:// URL."
            )
        with self._lock:
            store = self._open.get(array.path)
            if store is not None:
                self._open.move_to_end(array.path)
                return store
        check_fork(url)
        with translated(f"cannot open {array.path!r}", url=url):
            spec = array_spec(self._kvstore, array.path, metadata)
            store = ts.open(spec, context=self._context, read=True, write=False).result()
        with self._lock:
            self._open[array.path] = store
            while len(self._open) > _OPEN_ARRAYS:
                self._open.popitem(last=False)
        return store

    def read(
        self,
        array: ArraySpec,
        metadata: Mapping[str, Any],
        region: Region,
        out: Arrays,
        *,
        what: str,
        **context: Any,
    ) -> None:
        """Fill ``out`` (shape ``region.sizes``, stored dtype, any strides).

        Raises
        ------
        IntegrityError
            An object is lost (``LOST_OBJECT``) or damaged (``CHECKSUM``).
        """
        for box in split_region(region, array.shard, out.itemsize, _REQUEST_BYTES):
            keys = [array.object_key(index) for index in array.objects_in(box)]
            with translated(f"{what} {box}", keys, url=self._files.url, **context):
                part = ts.array(out[box.within(region).slices])
                part.write(self.open(array, metadata)[box.slices]).result()
