"""Copies inside one object store, which its server makes: no byte comes here."""

from __future__ import annotations

from ucpstore.errors import CheckpointNotFoundError, StorageError
from ucpstore.io.base import Files, FileStat, check_name
from ucpstore.io.fsspecerrors import fsspec_errors

__all__ = ["can_copy_inside", "copy_inside", "same_storage"]


def same_storage(one: Files, other: Files) -> bool:
    """Whether equal URLs of both mean the same object: scheme, server and credentials are equal."""
    schemes = [
        files.url.partition("://")[0] if "://" in files.url else "" for files in (one, other)
    ]
    return schemes[0] == schemes[1] and dict(one.options) == dict(other.options)


def can_copy_inside(source: Files, dest: Files) -> bool:
    """Whether `copy_inside` knows how (S3 does), with one set of credentials for both sides."""
    if not (source.url.startswith("s3://") and dest.url.startswith("s3://")):
        return False
    from ucpstore.io.remote import RemoteFiles

    return (
        isinstance(source, RemoteFiles)
        and isinstance(dest, RemoteFiles)
        and same_storage(source, dest)
    )


def copy_inside(source: Files, dest: Files, name: str) -> tuple[FileStat, bool]:
    """Copy the object ``name`` by S3's CopyObject (up to 5 GiB).

    Returns
    -------
    (FileStat, bool)
        The copy, and whether the server says that its content is the source's: equal ETags (other
        ones are no proof of a difference: encryption changes them).

    Raises
    ------
    CheckpointNotFoundError
    StorageError
        Also where the object is replaced meanwhile.
    """
    from ucpstore.io.remote import RemoteFiles

    check_name(name)
    if not (isinstance(source, RemoteFiles) and isinstance(dest, RemoteFiles)):
        raise StorageError(f"cannot copy {name!r} from {source.url} to {dest.url} on one server.")
    found = source.stat(name)
    if found is None:
        raise CheckpointNotFoundError(
            f"cannot copy '{source.url}/{name}': there is no such object.",
            url=source.url,
            name=name,
        )
    payer = {"RequestPayer": "requester"} if dest.options.get("requester_pays") else {}
    origin = {"Bucket": source.location.bucket, "Key": source.location.prefix + name}
    with fsspec_errors("copy", f"{source.url}/{name}"):
        answer = dest.s3().copy_object(
            Bucket=dest.location.bucket,
            Key=dest.location.prefix + name,
            CopySource=origin,
            CopySourceIfMatch=found.token,
            **payer,
        )
    token = answer["CopyObjectResult"]["ETag"].strip('"')
    return FileStat(name, found.nbytes, token), token == found.token
