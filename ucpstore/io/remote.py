"""Byte objects in S3 and GCS buckets.

Listing and stats go through s3fs and gcsfs, bytes through TensorStore's key-value store: a put is one
request whatever the size, conditional writes work on both, and no event loop is involved. Against
s3fs, on a loopback server: ranged reads as fast at half the CPU time, puts twice as fast.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from typing import Any

import tensorstore as ts

from ucpstore.errors import StorageError
from ucpstore.io.base import FileStat, check_name
from ucpstore.io.kvstore import kvstore_spec, s3_endpoint, s3_region, tensorstore_errors
from ucpstore.io.objects import ObjectFiles

__all__ = ["RemoteFiles"]


class RemoteFiles(ObjectFiles):
    """Objects of an S3 or GCS bucket below one key prefix."""

    def create(self, name: str, data: bytes) -> bool:
        """See `ucpstore.io.base.Files.create`: a conditional put.

        ``False`` can also mean that this very put succeeded, its answer got lost and the driver
        tried again: compare the content where that matters.
        """
        check_name(name)
        with tensorstore_errors("create", self._show(name)):
            store = self._store()
            missing = store.read(name).result()
            if missing.state != "missing":
                return False
            # A lost race does not raise: the generation of the result is empty. The generation of a
            # missing object must be asked for, since b"" would mean "no condition".
            written = store.write(name, data, if_equal=missing.stamp.generation).result()
            return bool(written.generation)

    def delete(self, names: Iterable[str]) -> None:
        """See `ucpstore.io.base.Files.delete`. One request per object, many in flight."""
        names = [check_name(name) for name in names]
        with tensorstore_errors("delete objects of", self.url):
            store = self._store()
            for future in [store.write(name, None) for name in names]:
                future.result()

    def _store(self) -> ts.KvStore:
        def make() -> ts.KvStore:
            _check_fork(self.url)
            return ts.KvStore.open(kvstore_spec(self.location, self.options)).result()

        store: ts.KvStore = self._client("tensorstore", make)
        return store

    def _filesystem(self) -> Any:
        make = _s3_filesystem if self.location.scheme == "s3" else _gcs_filesystem
        return self._client("fsspec", lambda: make(self.options))

    def _info(self, path: str) -> Mapping[str, Any]:
        filesystem = self._filesystem()
        if self.location.scheme != "s3":
            found: Mapping[str, Any] = filesystem.info(path)
            return found
        # s3fs' own info lists the prefix where there is no object.
        bucket, _, key = path.partition("/")
        head = filesystem.call_s3("head_object", Bucket=bucket, Key=key)
        return {"type": "file", "size": head["ContentLength"], "ETag": head["ETag"]}

    def _token(self, entry: Mapping[str, Any]) -> str:
        value = entry["ETag"] if self.location.scheme == "s3" else entry["generation"]
        return str(value).strip('"')

    def _get(self, name: str, offset: int, nbytes: int | None) -> bytes | None:
        end = None if nbytes is None else offset + nbytes
        with tensorstore_errors("read", self._show(name)):
            store = self._store()
            try:
                found = store.read(name, byte_range=slice(offset, end)).result()
            except ValueError as error:
                if str(error).startswith("OUT_OF_RANGE"):
                    return None
                raise
        return found.value if found.state == "value" else None

    def _put(self, name: str, content: io.BytesIO) -> FileStat:
        nbytes = content.getbuffer().nbytes
        with tensorstore_errors("write", self._show(name)):
            future = self._store().write(name, content.getvalue())  # the driver copies here
            content.close()
            generation = future.result().generation
        tag = _etag(generation) if self.location.scheme == "s3" else None
        if tag is not None:
            return FileStat(name, nbytes, tag)
        found = self.stat(name)
        if found is None or found.nbytes != nbytes:
            raise StorageError(
                f"cannot write {self._show(name)!r}: it was replaced or deleted by somebody else.",
                url=self.url,
                name=name,
            )
        return found


_first_pid: int | None = None


def _check_fork(url: str) -> None:
    """TensorStore hangs in a forked child whose parent has used it."""
    global _first_pid
    _first_pid = _first_pid or os.getpid()
    if _first_pid != os.getpid():
        raise StorageError(
            f"cannot open {url!r}: this process was forked from one that uses TensorStore, expected"
            " a fresh one.",
            hint="Start worker processes with the method 'forkserver' or 'spawn'.",
            url=url,
        )


def _etag(generation: bytes) -> str | None:
    """ETag in TensorStore's generation of an S3 object: a marker byte, then the quoted tag."""
    start = generation.find(b'"')
    if start < 0 or not generation.endswith(b'"'):
        return None
    return generation[start:].decode("ascii", "replace").strip('"')


def _s3_filesystem(options: Mapping[str, Any]) -> Any:
    import s3fs

    endpoint, region = s3_endpoint(options), s3_region(options)
    given = {k: v for k, v in options.items() if k not in ("client_kwargs", "endpoint_url")}
    return s3fs.S3FileSystem(
        **given,
        endpoint_url=endpoint,
        client_kwargs={"region_name": region} if region else {},
        # as TensorStore addresses servers other than AWS
        config_kwargs={"s3": {"addressing_style": "path"}} if endpoint else {},
        skip_instance_cache=True,
        use_listings_cache=False,
    )


def _gcs_filesystem(options: Mapping[str, Any]) -> Any:
    import gcsfs

    return gcsfs.GCSFileSystem(**options, skip_instance_cache=True, use_listings_cache=False)
