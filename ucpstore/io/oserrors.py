"""Translation of the operating system's errors into this package's."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ucpstore.errors import CheckpointNotFoundError, Kind, StorageError, UcpStoreError

__all__ = ["os_errors", "translate_os_error"]

_MISSING = {errno.ENOENT, errno.ENOTDIR}
_READS = {"read", "list", "look at"}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}
_NAME = {errno.ENAMETOOLONG, errno.EILSEQ, errno.ELOOP, errno.EISDIR}
_RETRYABLE = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EIO,
    errno.EMFILE,
    errno.ENETUNREACH,
    errno.ENFILE,
    errno.ENOLCK,
    errno.ENOMEM,
    errno.EPIPE,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_HINTS = {
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENOTDIR: "A folder on the way to it is a file: choose another destination.",
    errno.ENOSPC: "Free space there or choose another destination.",
    errno.EDQUOT: "The quota is used up: free space there or choose another destination.",
    errno.EACCES: "Check the permissions of that path.",
    errno.EPERM: "Check the permissions of that path.",
    errno.EROFS: "The file system is mounted read-only.",
}


def translate_os_error(error: OSError, action: str, path: str) -> UcpStoreError:
    """Error of this package that says what happened to which path.

    Parameters
    ----------
    error : OSError
    action : str
        Verb in the infinitive: ``"read"``.
    path : str
        Object or folder, as the user knows it.

    Returns
    -------
    UcpStoreError
        `CheckpointNotFoundError` where a path that is read does not exist, else `StorageError`.
    """
    code = error.errno or 0
    if code in _MISSING and action in _READS:
        return CheckpointNotFoundError(
            f"cannot {action} {path!r}: there is no such file.", url=path, errno_code=code
        )
    kind = Kind.IO
    if code in _NO_SPACE:
        kind = Kind.NO_SPACE
    elif code in _PERMISSION:
        kind = Kind.PERMISSION
    elif code in _NAME:
        kind = Kind.NAME
    return StorageError(
        f"cannot {action} {path!r}: {error.strerror or type(error).__name__}"
        f" ({errno.errorcode.get(code, code)}).",
        kind=kind,
        hint=_HINTS.get(code, ""),
        retryable=code in _RETRYABLE or isinstance(error, TimeoutError),
        url=path,
        errno_code=code,
    )


@contextmanager
def os_errors(action: str, path: str) -> Iterator[None]:
    """Translate every `OSError` of the block; errors of this package pass through.

    Raises
    ------
    StorageError, CheckpointNotFoundError
    """
    try:
        yield
    except UcpStoreError:
        raise
    except OSError as error:
        raise translate_os_error(error, action, path) from error
