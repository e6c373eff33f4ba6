"""Linux system calls that Python's ``os`` does not wrap: ``syncfs`` and ``sync_file_range``."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["has_syncfs", "start_writeback", "sync_filesystem"]

_SYNC_FILE_RANGE_WRITE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE)


def _libc_function(name: str, *argtypes: Any) -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = argtypes
        function.restype = ctypes.c_int
    return function


_syncfs = _libc_function("syncfs", ctypes.c_int)
_sync_file_range = _libc_function(
    "sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
)


def has_syncfs() -> bool:
    """Whether one call can make a whole file system durable."""
    return _syncfs is not None


def sync_filesystem(fd: int) -> None:
    """Make everything on the file system of ``fd`` durable.

    Linux (5.8 and later) reports write-back errors that happened since ``fd`` was opened: open it
    before the first write.

    Raises
    ------
    OSError
        A write-back has been lost.
    """
    if _syncfs is None or _syncfs(fd) == 0:
        if _syncfs is None:
            os.sync()
        return
    code = ctypes.get_errno()
    if code != errno.ENOSYS:
        raise OSError(code, os.strerror(code))
    os.sync()


def start_writeback(fd: int, offset: int, nbytes: int) -> bool:
    """Ask the kernel to start writing a range of dirty pages, without waiting for it.

    Returns
    -------
    bool
        Whether the file system can do that.

    Notes
    -----
    It is a hint: durability comes from `sync_filesystem`, which also reports errors.
    """
    if _sync_file_range is None:
        return False
    if _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE) == 0:
        return True
    return ctypes.get_errno() not in _UNSUPPORTED
