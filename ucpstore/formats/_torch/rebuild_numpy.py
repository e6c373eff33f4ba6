"""NumPy arrays, scalars and dtypes in pickles, as data: numpy itself is not asked to rebuild anything.

Source: ``__reduce__`` and ``__setstate__`` of ``numpy.ndarray``, ``numpy.generic`` and ``numpy.dtype``, numpy 1.x
and 2.x.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ucpstore.formats._torch.machine import Handler, PickleMachine, is_size, name_of
from ucpstore.tagged import NumpyArray, StubObject

__all__ = ["CALLS", "VALUES", "build"]


_MAX_DIMS = 64
_ORDERS = {"<": "<", ">": ">", "|": "|", "=": "<"}
_CODE = re.compile(r"b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|O8|[SU]\d{1,7}")


def _dtype(machine: PickleMachine, args: tuple[Any, ...]) -> StubObject:
    """``numpy.dtype(code, align, copy)``; ``BUILD`` adds the state that tells the byte order."""
    code = args[0] if args else None
    if type(code) is not str or not _CODE.fullmatch(code):
        what = repr(code[:40]) if type(code) is str else name_of(code)
        raise machine.unsupported(f"a NumPy array has elements of type {what}")
    return StubObject("numpy", "dtype", args)


def _code_of(machine: PickleMachine, dtype: Any) -> tuple[str, str]:
    """Byte order and code of a dtype.

    Its state is ``(version, byte order, subdtype, names, fields, size, alignment, flags)``.
    """
    if type(dtype) is not StubObject or dtype.name != "numpy.dtype":
        raise machine.corrupt(f"the element type of a NumPy array is a {type(dtype).__name__}")
    if dtype.state is None:
        return "|", dtype.args[0]
    if type(dtype.state) is not tuple or len(dtype.state) < 5 or dtype.state[1] not in _ORDERS:
        raise machine.corrupt("the state of a NumPy dtype is not a tuple with a byte order")
    if any(part is not None for part in dtype.state[2:5]):
        raise machine.unsupported("a NumPy array has a structured element type")
    return _ORDERS[dtype.state[1]], dtype.args[0]


def build(machine: PickleMachine, target: NumpyArray, state: Any) -> None:
    """``BUILD`` of an array: state ``([version,] shape, dtype, is_fortran, data)``."""
    if type(state) is not tuple or len(state) not in (4, 5):
        raise machine.corrupt("the state of a NumPy array is not a tuple of 5")
    shape, dtype, fortran, data = state[-4:]
    _fill(machine, target, data, dtype, shape)
    target.fortran = fortran is True or fortran == 1


def _array(machine: PickleMachine, args: tuple[Any, ...]) -> NumpyArray:
    """``_reconstruct(ndarray, (0,), b"b")``: an empty array that ``BUILD`` fills."""
    if not args or name_of(args[0]) not in ("numpy.ndarray", "numpy.matrix"):
        raise machine.unsupported("an array of an unknown class is reconstructed")
    return NumpyArray("|b1", (0,), b"")


def _fill(machine: PickleMachine, target: NumpyArray, data: Any, dtype: Any, shape: Any) -> None:
    """Give an array its content, after checking that bytes, type and shape agree."""
    order, code = _code_of(machine, dtype)
    if type(shape) is not tuple or len(shape) > _MAX_DIMS or not all(map(is_size, shape)):
        raise machine.corrupt("the shape of a NumPy array is not made of sizes")
    count = math.prod(shape)
    if type(data) is str:  # Python 2 wrote raw bytes as a string
        data = data.encode("latin-1")
    if code[0] == "O":
        matches = type(data) is list and len(data) == count
    else:
        size = int(code[1:]) * (4 if code[0] == "U" else 1)
        matches = type(data) in (bytes, bytearray) and len(data) == count * size
    if not matches:
        raise machine.corrupt(
            f"the content of a NumPy array does not fill its shape of {count} elements"
        )
    target.dtype, target.shape = "object" if code[0] == "O" else order + code, shape
    target.data = data if type(data) is list else bytes(data)


def _scalar(machine: PickleMachine, args: tuple[Any, ...]) -> NumpyArray:
    """``scalar(dtype, bytes)``."""
    dtype, data = args
    target = NumpyArray("|b1", (), b"")
    _fill(machine, target, data if type(data) in (bytes, str) else [data], dtype, ())
    return target


def _frombuffer(machine: PickleMachine, args: tuple[Any, ...]) -> NumpyArray:
    """``_frombuffer(data, dtype, shape, order)`` of pickle protocol 5."""
    data, dtype, shape, order = args
    target = NumpyArray("|b1", (0,), b"")
    machine.spend(len(data) // 64)
    _fill(machine, target, data, dtype, shape)
    target.fortran = order == "F"
    return target


CALLS: dict[str, Handler] = {
    "numpy.dtype": _dtype,
    **{
        f"{module}.{name}": handler
        for module in ("numpy.core", "numpy._core")
        for name, handler in (
            ("multiarray._reconstruct", _array),
            ("multiarray.scalar", _scalar),
            ("numeric._frombuffer", _frombuffer),
        )
    },
}

_SCALARS = "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
VALUES = frozenset(["numpy.ndarray", *(f"numpy.{name}" for name in _SCALARS.split())])
