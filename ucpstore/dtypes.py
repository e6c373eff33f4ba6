"""Names of element types, shared by every format: numpy's, plus ``bfloat16`` and ``float8_*``.

Names are plain strings so that metadata can be handled without importing numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpstore.errors import UnsupportedSourceError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["itemsize", "numpy_dtype"]

_ITEMSIZE = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}


def itemsize(dtype: str) -> int:
    """Bytes per element.

    Raises
    ------
    UnsupportedSourceError
        The name is not an element type that a checkpoint can hold here.
    """
    try:
        return _ITEMSIZE[dtype]
    except KeyError:
        raise UnsupportedSourceError(
            f"element type {dtype!r} is not supported: expected one of {', '.join(_ITEMSIZE)}"
        ) from None


def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """The numpy dtype (native byte order) of a name; ``ml_dtypes`` provides bfloat16 and float8."""
    import numpy as np

    itemsize(dtype)
    if dtype == "bfloat16" or dtype.startswith("float8"):
        import ml_dtypes

        found: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, dtype))
        return found
    return np.dtype(dtype)
