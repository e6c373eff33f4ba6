"""Byte objects in S3 and GCS buckets.

Listing and stats go through s3fs and gcsfs. Ranges are read and objects created through TensorStore's
key-value store, which has conditional writes for both and needs no event loop (against s3fs, on a
loopback server: as fast at half the CPU time). Puts to S3 go through botocore: TensorStore holds two
copies of the object beside ours while it takes a put over, s3fs takes three times the CPU time.
"""

from __future__ import annotations

import hashlib
import io
import types
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorstore as ts

from ucpstore.errors import Kind, MissingExtraError, StorageError
from ucpstore.io.base import FileStat, check_name
from ucpstore.io.fsspecerrors import fsspec_errors
from ucpstore.io.kvstore import check_fork, kvstore_spec, tensorstore_errors
from ucpstore.io.objects import ObjectFiles
from ucpstore.io.retries import patience, retried
from ucpstore.io.s3 import s3_client, s3_filesystem
from ucpstore.io.urls import OWN_OPTIONS

__all__ = ["RemoteFiles"]

_PROBES = ".ucpstore/probe"
_REPLACEMENTS = 8
"""How often an object is replaced that somebody else replaces at the same time."""
_NOT_MET = {"PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey", "412"}
"""S3's words for: the object is not what the condition says."""


class RemoteFiles(ObjectFiles):
    """Objects of an S3 or GCS bucket below one key prefix."""

    def create(self, name: str, data: bytes) -> bool:
        """See `ucpstore.io.base.Files.create`: a conditional put.

        ``False`` can also mean that this very put succeeded, its answer got lost and the driver
        tried again: compare the content where that matters.
        """
        check_name(name)
        return retried(lambda: self._create(name, data))

    def _create(self, name: str, data: bytes) -> bool:
        with tensorstore_errors("create", self._show(name)):
            store = self._store()
            missing = store.read(name).result()
            if missing.state != "missing":
                return False
            if self._is_unsafe:
                store.write(name, data).result()
                return True
            # A lost race does not raise: the generation of the result is empty. The generation of a
            # missing object must be asked for, since b"" would mean "no condition".
            written = store.write(name, data, if_equal=missing.stamp.generation).result()
            return bool(written.generation)

    def creates_exclusively(self) -> bool:
        """See `ucpstore.io.base.Files.creates_exclusively`. Five requests, for an object of its own."""
        try:
            return retried(self._probe)
        except StorageError as error:
            # A server that does not know the header says 501, or that the request is wrong.
            unknown = "notimplemented" in str(error).lower().replace(" ", "")
            if error.kind is Kind.UNSUPPORTED or unknown:
                return False
            raise

    def _probe(self) -> bool:
        name = f"{_PROBES}/{uuid.uuid4().hex}"
        with tensorstore_errors("create", self._show(name)):
            store = self._store()
            missing = store.read(name).result().stamp.generation
            store.write(name, b"1", if_equal=missing).result()
            second = store.write(name, b"2", if_equal=missing).result()
            kept = store.read(name).result().value
            store.write(name, None).result()
        return not second.generation and bytes(kept) == b"1"

    def delete(self, names: Iterable[str]) -> None:
        """See `ucpstore.io.base.Files.delete`. One request per object, many in flight."""
        names = [check_name(name) for name in names]

        def delete() -> None:
            with tensorstore_errors("delete objects of", self.url):
                store = self._store()
                for future in [store.write(name, None) for name in names]:
                    future.result()

        retried(delete)

    @property
    def _is_unsafe(self) -> bool:
        """Whether the user says that the store ignores conditions."""
        return bool(self.options.get("unsafe_commit"))

    def s3(self) -> Any:
        """The botocore client of this process."""
        return self._client("botocore", lambda: s3_client(self.options))

    def _store(self) -> ts.KvStore:
        def make() -> ts.KvStore:
            check_fork(self.url)
            spec = kvstore_spec(self.location, self.options)
            once = {name: {"max_retries": 0} for name in spec if name.endswith("_request_retries")}
            return ts.KvStore.open({**spec, **once}).result()

        store: ts.KvStore = self._client("tensorstore", make)
        return store

    def _filesystem(self) -> Any:
        make = s3_filesystem if self.location.scheme == "s3" else _gcs_filesystem
        return self._client("fsspec", lambda: make(self.options))

    def _info(self, path: str) -> Mapping[str, Any]:
        filesystem = self._filesystem()
        # Their own info lists the prefix, too.
        bucket, _, key = path.partition("/")
        if self.location.scheme != "s3":
            found = filesystem.call("GET", "b/{}/o/{}", bucket, key, json_out=True)
            return {"type": "file", **found, "size": int(found["size"])}
        head = filesystem.call_s3("head_object", Bucket=bucket, Key=key)
        return {
            "type": "file",
            "size": head["ContentLength"],
            "ETag": head["ETag"],
            "LastModified": head.get("LastModified"),
        }

    def _token(self, entry: Mapping[str, Any]) -> str:
        value = entry["ETag"] if self.location.scheme == "s3" else entry["generation"]
        return str(value).strip('"')

    def _get(self, name: str, offset: int, nbytes: int | None) -> bytes | None:
        end = None if nbytes is None else offset + nbytes

        def get() -> bytes | None:
            with tensorstore_errors("read", self._show(name)):
                store = self._store()
                try:
                    found = store.read(name, byte_range=slice(offset, end)).result()
                except ValueError as error:
                    if str(error).startswith("OUT_OF_RANGE"):
                        return None
                    raise
            return found.value if found.state == "value" else None

        return retried(get)

    def _put(self, name: str, content: io.BytesIO) -> FileStat:
        data = content.getvalue()  # shares the memory
        found = (
            self._put_s3(name, data) if self.location.scheme == "s3" else self._put_gcs(name, data)
        )
        if found is None or found.nbytes != len(data):
            raise self._replaced(name)
        content.close()
        return found

    def _place(
        self, name: str, content: io.BytesIO, guard: Callable[[], object] | None
    ) -> FileStat:
        """A put that replaces nothing unseen: each names the object that it expects, or none.

        So the put of a writer that lost its claim cannot replace what its heir wrote, however late
        it arrives. The object that is expected must be looked at before ``guard`` is asked.
        """
        if self._is_unsafe:
            return super()._place(name, content, guard)
        data = content.getvalue()
        is_s3 = self.location.scheme == "s3"
        put, look = (self._put_s3, self._look_s3) if is_s3 else (self._put_gcs, self._look_gcs)
        expected: Any = None
        for _ in range(_REPLACEMENTS):
            found = put(name, data, only_if=True, expected=expected)
            if found is None:
                same, expected = look(name, data)
                # By another writer of the same plan, or by this put, whose answer got lost.
                found = self.stat(name) if same else None
            if found is not None:
                content.close()
                return found
            if expected is not None and guard is not None:
                guard()
        raise self._replaced(name)

    def _replaced(self, name: str) -> StorageError:
        return StorageError(
            f"cannot write {self._show(name)!r}: it was replaced or deleted by somebody else.",
            retryable=True,
            url=self.url,
            name=name,
        )

    def _put_s3(
        self, name: str, data: bytes, *, only_if: bool = False, expected: str | None = None
    ) -> FileStat | None:
        """Put; with ``only_if`` only in place of the ETag ``expected`` (None: of no object)."""
        import botocore.exceptions

        request = {"Bucket": self.location.bucket, "Key": self.location.prefix + name, "Body": data}
        if self.options.get("requester_pays"):
            request["RequestPayer"] = "requester"
        if only_if and expected is None:
            request["IfNoneMatch"] = "*"
        elif only_if:
            request["IfMatch"] = f'"{expected}"'

        def put() -> FileStat | None:
            with fsspec_errors("write", self._show(name)):
                client = self.s3()
                try:
                    answer = client.put_object(**request)
                except botocore.exceptions.ClientError as error:
                    if only_if and error.response.get("Error", {}).get("Code") in _NOT_MET:
                        return None
                    raise
            return FileStat(name, len(data), answer["ETag"].strip('"'))

        return retried(put)

    def _look_s3(self, name: str, data: bytes) -> tuple[bool, str | None]:
        """Whether the object holds ``data``, and its ETag (None: there is no object)."""
        there = self.stat(name)
        if there is None:
            return False, None
        same = there.nbytes == len(data) and (
            there.token == hashlib.md5(data, usedforsecurity=False).hexdigest()
            or self.read(name) == data
        )
        return same, there.token

    def _put_gcs(
        self, name: str, data: bytes, *, only_if: bool = False, expected: bytes | None = None
    ) -> FileStat | None:
        """As `_put_s3`, with TensorStore's generations."""
        if only_if and expected is None:
            expected = self._missing()

        def put() -> bool:
            with tensorstore_errors("write", self._show(name)):
                written = self._store().write(name, data, if_equal=expected).result()
            return bool(written.generation)

        return self.stat(name) if retried(put) else None

    def _look_gcs(self, name: str, data: bytes) -> tuple[bool, bytes | None]:
        """As `_look_s3`."""

        def look() -> ts.KvStore.ReadResult:
            with tensorstore_errors("read", self._show(name)):
                return self._store().read(name).result()

        there = retried(look)
        if there.state != "value":
            return False, None
        return there.value == data, there.stamp.generation

    def _missing(self) -> bytes:
        """The generation that all missing objects have; one must be asked for."""

        def ask() -> bytes:
            name = f"{_PROBES}/{uuid.uuid4().hex}"
            with tensorstore_errors("read", self._show(name)):
                return bytes(self._store().read(name).result().stamp.generation)

        generation: bytes = self._client("missing", lambda: retried(ask))
        return generation


def _gcs_filesystem(options: Mapping[str, Any]) -> Any:
    try:
        import gcsfs
    except ImportError as error:
        raise MissingExtraError(
            "cannot open gs:// URLs: gcsfs is not installed.",
            hint="Install it with: pip install 'ucpstore[gcs]'",
        ) from error
    given = {k: v for k, v in options.items() if k not in OWN_OPTIONS}
    filesystem = gcsfs.GCSFileSystem(
        **given,
        requests_timeout=patience().idle_seconds,
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    once = getattr(gcsfs.GCSFileSystem._request, "__wrapped__", None)
    if once is not None:  # under a decorator that asks six times
        filesystem._request = types.MethodType(once, filesystem)
    return filesystem
