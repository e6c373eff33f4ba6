"""Python values as JSON and back: how the common state keeps what JSON cannot say.

``None``, booleans, strings, finite floats, 64-bit integers, lists and dicts with string keys stand for
themselves. Everything else is a one-tag object:

======================  ==============================================================================
``{"$tuple": [..]}``    tuple, also ``torch.Size``
``{"$dict": [[k, v]]}`` dict with a key that is not a string
``{"$escaped": {..}}``  dict with a key that starts with ``$``
``{"$set": [..]}``      set; ``$frozenset`` likewise
``{"$bytes": b64}``     bytes; ``$bytearray`` likewise
``{"$str": b64}``       string with lone surrogates (UTF-8, ``surrogatepass``)
``{"$int": hex}``       integer beyond 64 bits
``{"$float": text}``    ``nan``, ``-nan:bits``, ``inf``, ``-inf``
``{"$complex": [r, i]}``
``{"$symbol": name}``   a class, dtype or other named constant: ``torch.float32``
``{"$object": ..}``     instance of a class that was not loaded: name, ``args``, ``state``, ``contents``
``{"$numpy": dtype}``   array: ``shape``, ``data`` (or ``items`` of an object array), ``fortran`` order;
                        a number has ``value`` instead, where that is exact
``{"$tensor": name}``   a real tensor, kept beside the document
``{"$opaque": ..}``     could not be kept: type and ``repr``; always reported as a warning
======================  ==============================================================================

The table is part of the format: a reader needs no Python class to understand a document.
"""

from __future__ import annotations

import base64
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ucpstore.errors import CorruptSourceError

__all__ = ["NumpyArray", "StubObject", "Symbol", "TensorName", "decode", "encode"]

MAX_DEPTH = 100
"""Levels of nesting that a document may have."""

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named constant that was not resolved: a class, a dtype, a layout.

    Attributes
    ----------
    module, qualname : str
        Where the constant lives, such as ``torch`` and ``float32``.
    """

    module: str
    qualname: str

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"


@dataclass(slots=True)
class StubObject:
    """Inert stand-in for an instance of a class that was not loaded. It holds data and runs no code.

    Attributes
    ----------
    module, qualname : str
        Name of the class.
    args : tuple
        Arguments that would have been passed to it.
    state : Any
        Attributes as a dict, usually; ``None`` where there are none.
    contents : list or dict, optional
        Elements or items, for a class derived from ``list`` or ``dict``.
    """

    module: str
    qualname: str
    args: tuple[Any, ...] = ()
    state: Any = None
    contents: Any = None

    @property
    def name(self) -> str:
        """``module.qualname``."""
        return f"{self.module}.{self.qualname}"


@dataclass(slots=True)
class NumpyArray:
    """A NumPy array or scalar as plain data.

    Attributes
    ----------
    dtype : str
        NumPy's type string with its byte order: ``<f8``, ``|u1``, ``<U5``; ``object`` for objects.
    shape : tuple of int
        ``()`` for a scalar.
    data : bytes or list
        The elements; a list of values only where ``dtype`` is ``object``.
    fortran : bool
        The bytes are in column-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | list[Any] = field(repr=False)
    fortran: bool = False

    def to_numpy(self) -> Any:
        """A read-only `numpy.ndarray` over the bytes (an object array is copied).

        Raises
        ------
        CorruptSourceError
            Type, shape and bytes contradict each other.
        """
        import numpy as np

        try:
            if isinstance(self.data, list):
                out = np.empty(len(self.data), dtype=object)
                out[:] = self.data
                return out.reshape(self.shape)
            array = np.frombuffer(self.data, dtype=np.dtype(self.dtype))
            return array.reshape(self.shape, order="F" if self.fortran else "C")
        except (TypeError, ValueError) as error:
            raise CorruptSourceError(
                f"a NumPy array of {self.dtype!r:.40} and shape {list(self.shape)!r:.40}: {error}."
            ) from error

    def item(self) -> Any:
        """The Python number (or string) of an array of one element."""
        layout = _layout(self.dtype)
        if layout is not None and isinstance(self.data, bytes) and len(self.data) == layout.size:
            return layout.unpack(self.data)[0]
        return self.to_numpy().item()


@dataclass(frozen=True, slots=True)
class TensorName:
    """A decoded ``{"$tensor": name}``: the tensor lies beside the document under this name."""

    name: str


def encode(
    value: Any,
    *,
    tensors: Callable[[Any], str | None] | None = None,
    warnings: list[str] | None = None,
    path: str = "",
) -> Any:
    """Make a JSON value of ``value``.

    Parameters
    ----------
    value : Any
        Anything; it is not changed.
    tensors : callable, optional
        Is asked about every object that has no encoding of its own. It returns the name under which it
        keeps the object as a tensor, or ``None`` where the object is not a tensor.
    warnings : list of str, optional
        Receives one sentence for every object that could not be kept.
    path : str
        What ``value`` is called in these sentences.

    Returns
    -------
    JSON value
        ``decode`` gives ``value`` again, except for ``$opaque`` and for containers whose type is not
        part of the table (`collections.OrderedDict` becomes a dict).
    """
    return _Encoder(tensors, warnings if warnings is not None else [])(value, path, 0)


class _Encoder:
    """One run of `encode`; ``_open`` holds the containers above the current one, to notice cycles."""

    def __init__(self, tensors: Callable[[Any], str | None] | None, warnings: list[str]) -> None:
        self._tensors = tensors
        self._warnings = warnings
        self._open: set[int] = set()

    def __call__(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        simple = _SIMPLE.get(kind)
        if simple is not None:
            return simple(value)
        container = _CONTAINERS.get(kind)
        if container is None:
            return self._other(value, path)
        if depth >= MAX_DEPTH:
            return self._opaque(value, path, f"nested more than {MAX_DEPTH} levels deep")
        if id(value) in self._open:
            return self._opaque(value, path, "it contains itself")
        self._open.add(id(value))
        try:
            return container(self, value, path, depth + 1)
        finally:
            self._open.discard(id(value))

    def _other(self, value: Any, path: str) -> Any:
        array = _from_numpy(value)
        if array is not None:
            return self.numpy(array, path, MAX_DEPTH)
        name = self._tensors(value) if self._tensors is not None else None
        if name is not None:
            return {"$tensor": name}
        return self._opaque(value, path, "its type has no encoding")

    def _opaque(self, value: Any, path: str, why: str) -> Any:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        self._warnings.append(f"{path or 'value'} of type {name} was not kept: {why}")
        # object.__repr__ rather than repr(): a value from outside must not run code or grow the document
        return {"$opaque": name, "repr": f"<{name}>"}

    def items(self, values: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [self(value, f"{path}[{i}]", depth) for i, value in enumerate(values)]

    def dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if all(type(key) is str and _is_text(key) for key in value):
            body = {key: self(item, _join(path, key), depth) for key, item in value.items()}
            return {"$escaped": body} if any(key.startswith("$") for key in body) else body
        pairs = []
        for key, item in value.items():
            label = f"{path}[{key!r}]" if isinstance(key, (str, int, float)) else f"{path}[..]"
            pairs.append([self(key, label, depth), self(item, label, depth)])
        return {"$dict": pairs}

    def set(self, value: Any, path: str, depth: int) -> Any:
        # sets have no order; sorting makes the document a function of the value
        encoded = [self(item, f"{path}[..]", depth) for item in value]
        return {f"${type(value).__name__}": sorted(encoded, key=_sort_key)}

    def object(self, value: StubObject, path: str, depth: int) -> Any:
        out: dict[str, Any] = {"$object": [_text(value.module), _text(value.qualname)]}
        if value.args:
            out["args"] = self.items(value.args, f"{path}.args", depth)
        if value.state is not None:
            out["state"] = self(value.state, path, depth)
        if value.contents is not None:
            out["contents"] = self(value.contents, path, depth)
        return out

    def numpy(self, value: NumpyArray, path: str, depth: int) -> Any:
        layout = _layout(value.dtype)
        if layout is not None and value.shape == () and isinstance(value.data, bytes):
            number = value.item()
            if layout.pack(number) == value.data:  # not so for a NaN with a payload
                return {"$numpy": value.dtype, "value": self(number, path, depth)}
        out: dict[str, Any] = {"$numpy": value.dtype, "shape": list(value.shape)}
        if value.fortran:
            out["fortran"] = True
        if isinstance(value.data, list):
            out["items"] = self.items(value.data, path, depth)
        else:
            out["data"] = _b64(value.data)
        return out


def _layout(dtype: str) -> struct.Struct | None:
    """How `struct` packs a number of a NumPy type, such as ``<f8``."""
    code = _STRUCT_CODES.get(dtype[1:])
    return struct.Struct((">" if dtype[0] == ">" else "<") + code) if code else None


_STRUCT_CODES = dict(
    zip(
        ["b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"],
        "?bBhHiIqQefd",
        strict=True,
    )
)


def _from_numpy(value: Any) -> NumpyArray | None:
    """A live NumPy array or scalar as plain data; ``None`` for anything else, and for records."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    array = numpy.asarray(value)
    if array.dtype.kind not in "biufcSU":
        return None
    return NumpyArray(array.dtype.str, array.shape, array.tobytes())


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _text(value: str) -> Any:
    if _is_text(value):
        return value
    return {"$str": _b64(value.encode("utf-8", "surrogatepass"))}


def _int(value: int) -> Any:
    return value if _INT_MIN <= value <= _INT_MAX else {"$int": hex(value)}


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        bits = struct.pack(">d", value).hex()
        return {"$float": "nan" if bits == "7ff8000000000000" else f"nan:{bits}"}
    return {"$float": "inf" if value > 0 else "-inf"}


def _sort_key(value: Any) -> str:
    import json

    return json.dumps(value, sort_keys=True)


_SIMPLE: dict[type, Callable[[Any], Any]] = {
    str: _text,
    int: _int,
    float: _float,
    bytes: lambda v: {"$bytes": _b64(v)},
    bytearray: lambda v: {"$bytearray": _b64(bytes(v))},
    complex: lambda v: {"$complex": [_float(v.real), _float(v.imag)]},
    Symbol: lambda v: {"$symbol": [_text(v.module), _text(v.qualname)]},
    TensorName: lambda v: {"$tensor": v.name},
}

_CONTAINERS: dict[type, Callable[[_Encoder, Any, str, int], Any]] = {
    list: _Encoder.items,
    tuple: lambda run, v, path, depth: {"$tuple": run.items(v, path, depth)},
    dict: _Encoder.dict,
    OrderedDict: _Encoder.dict,
    set: _Encoder.set,
    frozenset: _Encoder.set,
    StubObject: _Encoder.object,
    NumpyArray: _Encoder.numpy,
}


def decode(value: Any) -> Any:
    """The value of which `encode` made ``value``.

    Raises
    ------
    CorruptSourceError
        ``value`` holds a tag that the table does not know, or a tag with the wrong content.
    """
    try:
        return _decode(value)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, struct.error) as error:
        raise CorruptSourceError(
            f"a tagged value does not decode: {type(error).__name__}: {error}; expected the tags of "
            "the common state document"
        ) from None


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(item) for key, item in value.items()}
    return _TAGS[tag](value)


def _decode_object(value: dict[str, Any]) -> StubObject:
    module, qualname = _decode(value["$object"])
    return StubObject(
        module,
        qualname,
        tuple(_decode(value.get("args", []))),
        _decode(value.get("state")),
        _decode(value.get("contents")),
    )


def _decode_numpy(value: dict[str, Any]) -> NumpyArray:
    if "value" in value:
        layout = _layout(value["$numpy"])
        if layout is None:
            raise ValueError(f"{value['$numpy']!r} is not the type of a number")
        return NumpyArray(value["$numpy"], (), layout.pack(_decode(value["value"])))
    data = _decode(value["items"]) if "items" in value else base64.b64decode(value["data"])
    return NumpyArray(value["$numpy"], tuple(value["shape"]), data, value.get("fortran", False))


def _decode_float(text: str) -> float:
    if text.startswith("nan:"):
        return float(struct.unpack(">d", bytes.fromhex(text[4:]))[0])
    return float(text)


def _decode_complex(real: float, imag: float) -> complex:
    return complex(real, imag)


_TAGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "$tuple": lambda v: tuple(_decode(v["$tuple"])),
    "$dict": lambda v: {_decode(key): _decode(item) for key, item in v["$dict"]},
    "$escaped": lambda v: {key: _decode(item) for key, item in v["$escaped"].items()},
    "$set": lambda v: set(_decode(v["$set"])),
    "$frozenset": lambda v: frozenset(_decode(v["$frozenset"])),
    "$bytes": lambda v: base64.b64decode(v["$bytes"]),
    "$bytearray": lambda v: bytearray(base64.b64decode(v["$bytearray"])),
    "$str": lambda v: base64.b64decode(v["$str"]).decode("utf-8", "surrogatepass"),
    "$int": lambda v: int(v["$int"], 16),
    "$float": lambda v: _decode_float(v["$float"]),
    "$complex": lambda v: _decode_complex(*_decode(v["$complex"])),
    "$symbol": lambda v: Symbol(*_decode(v["$symbol"])),
    "$object": _decode_object,
    "$numpy": _decode_numpy,
    "$tensor": lambda v: TensorName(v["$tensor"]),
    "$opaque": lambda v: StubObject(*v["$opaque"].rpartition(".")[::2]),
}
