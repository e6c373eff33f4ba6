"""Where the tensors of a ``torch.save`` file lie: plain data, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ucpstore.dtypes import itemsize

__all__ = ["Storage", "TensorRef", "TypedStorage"]


@dataclass(slots=True, eq=False)
class Storage:
    """A run of bytes that one or more tensors view. Compared by identity: shared means ``is``.

    Attributes
    ----------
    key : str
        The storage's key in its file.
    nbytes : int
    offset : int, bytes
        Absolute position in the file; -1 until the container was indexed.
    """

    key: str
    nbytes: int
    offset: int = -1


@dataclass(frozen=True, slots=True)
class TypedStorage:
    """A storage (or a part of one) with an element type.

    Attributes
    ----------
    storage : Storage
    dtype : str
        Name known to `ucpstore.dtypes`.
    start : int, bytes
        Where the part starts inside the storage: 0 but for views of very old files.
    nbytes : int
    """

    storage: Storage
    dtype: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that was not read: where its elements lie in the file.

    Attributes
    ----------
    storage : Storage
        Shared by all tensors that view the same memory; it may be far larger than this tensor.
    dtype : str
        Name known to `ucpstore.dtypes`.
    shape : tuple of int
    strides : tuple of int, elements
        All >= 0.
    start : int, bytes
        Where the first element lies inside the storage.
    requires_grad : bool
    is_parameter : bool
        It was saved as ``torch.nn.Parameter``.
    attributes : dict, optional
        Python attributes that were saved with the tensor.
    """

    storage: Storage
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0
    requires_grad: bool = False
    is_parameter: bool = False
    attributes: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def offset(self) -> int:
        """Absolute position of the first element in the file, in bytes; need not be aligned."""
        return self.storage.offset + self.start

    @property
    def storage_offset(self) -> int:
        """Position of the first element inside the storage, in elements."""
        return self.start // itemsize(self.dtype)

    @property
    def storage_nbytes(self) -> int:
        """Size of the whole storage in bytes."""
        return self.storage.nbytes

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Logical size in bytes: elements times element size."""
        return self.numel * itemsize(self.dtype)

    @property
    def span(self) -> int:
        """Bytes from the first to the end of the last element in the file; 0 where there is none."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return (last + 1) * itemsize(self.dtype)

    @property
    def is_contiguous(self) -> bool:
        """The elements lie in C order without gaps (strides of dims of size 1 do not matter)."""
        if 0 in self.shape:
            return True
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True
