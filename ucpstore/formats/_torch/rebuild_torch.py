"""Tensors and storages in pickles, as data.

Sources: ``torch.Tensor.__reduce_ex__``, ``torch.nn.Parameter``, ``torch._utils``, ``torch.storage`` and the
``persistent_id`` of ``torch.serialization``, torch 1.0 to 2.13.
"""

from __future__ import annotations

from typing import Any

from ucpstore.dtypes import itemsize
from ucpstore.formats._torch.machine import Handler, PickleMachine, is_size, name_of
from ucpstore.formats._torch.rebuild_python import plain, text_of, tuple_of
from ucpstore.formats._torch.refs import Storage, TensorRef, TypedStorage
from ucpstore.tagged import Symbol

__all__ = ["CALLS", "UNSUPPORTED", "VALUES", "Storages"]

MAX_DIMS = 64

STORAGE_DTYPES = {
    "UntypedStorage": "uint8",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""``torch.storage._dtype_to_storage_type_map`` without the quantized types."""

_ELEMENT_TYPES = (
    "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
_TORCH_DTYPES = {
    **{name: name for name in _ELEMENT_TYPES.split()},
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "cfloat": "complex64",
    "cdouble": "complex128",
}

_LAYOUTS = "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc"
_CONSTANTS = (
    f"{_LAYOUTS} contiguous_format channels_last channels_last_3d preserve_format per_tensor_affine "
    "per_channel_affine quint8 qint8 qint32 quint4x2 quint2x4 complex32 chalf uint1 uint2 uint3 uint4 uint5 "
    "uint6 uint7 float4_e2m1fn_x2"
)
_OTHER_STORAGES = (
    "QInt8Storage QUInt8Storage QInt32Storage QUInt4x2Storage QUInt2x4Storage TypedStorage"
)


class Storages:
    """The storages that a pickle refers to, by key."""

    def __init__(self) -> None:
        self.by_key: dict[str, Storage] = {}
        self.first_dtype: dict[str, str] = {}

    def persistent(self, machine: PickleMachine, pid: Any) -> Any:
        """``("storage", type, key, location, numel[, view])``, or ``("module", class, file, text)``."""
        if type(pid) is not tuple or len(pid) < 2:
            raise machine.corrupt("a persistent id is not a tuple")
        if pid[0] in ("module", b"module") and type(pid[1]) is Symbol:
            return pid[1]  # legacy files keep the source text of modules beside the class
        if pid[0] not in ("storage", b"storage") or len(pid) not in (5, 6):
            raise machine.corrupt("a persistent id is not that of a storage")
        kind, key, numel = pid[1], pid[2], pid[4]
        if type(kind) is not Symbol or type(key) is not str or not is_size(numel):
            raise machine.corrupt("the persistent id of a storage has the wrong types")
        dtype = STORAGE_DTYPES.get(kind.qualname)
        if dtype is None:
            raise machine.unsupported(f"storages of type {kind} cannot be read")
        nbytes = numel * itemsize(dtype)
        storage = self.by_key.get(key)
        if storage is None:
            storage = self.by_key[key] = Storage(key, nbytes)
            self.first_dtype[key] = dtype
        elif storage.nbytes != nbytes:
            raise machine.corrupt(
                f"storage {key[:40]!r} has {storage.nbytes} bytes at one and {nbytes} at another place"
            )
        view = pid[5] if len(pid) == 6 else None
        return TypedStorage(storage, dtype, *self._part(machine, view, dtype, nbytes))

    @staticmethod
    def _part(machine: PickleMachine, view: Any, dtype: str, nbytes: int) -> tuple[int, int]:
        """Start and size in bytes of ``view_metadata``: ``(key, offset, size)`` in elements, or ``None``."""
        if view is None:
            return 0, nbytes
        if type(view) is not tuple or len(view) != 3 or not all(map(is_size, view[1:])):
            raise machine.corrupt("the view of a storage is not a key, an offset and a size")
        start, size = (number * itemsize(dtype) for number in view[1:])
        if start + size > nbytes:
            raise machine.corrupt(
                f"a view ends at byte {start + size} of a storage of {nbytes} bytes"
            )
        return start, size


def _tensor(
    machine: PickleMachine,
    typed: Any,
    start: Any,
    shape: Any,
    strides: Any,
    *,
    dtype: str | None = None,
) -> TensorRef:
    """A tensor over a storage, after all claims were checked against the storage's size."""
    if type(typed) is not TypedStorage:
        raise machine.corrupt(f"a tensor is built on a {type(typed).__name__}, expected a storage")
    dtype = dtype or typed.dtype
    if not (
        type(shape) is tuple and type(strides) is tuple and len(shape) == len(strides) <= MAX_DIMS
    ):
        raise machine.corrupt(f"shape and strides are not tuples of one length up to {MAX_DIMS}")
    if not (is_size(start) and all(map(is_size, shape)) and all(map(is_size, strides))):
        raise machine.corrupt("shape, strides or offset of a tensor are not sizes")
    size = itemsize(dtype)
    ref = TensorRef(typed.storage, dtype, shape, strides, typed.start + start * size)
    if ref.span and start * size + ref.span > typed.nbytes:
        raise machine.corrupt(
            f"a tensor ends at byte {start * size + ref.span} of a storage of {typed.nbytes} bytes"
        )
    if ref.numel >= 2**63:
        raise machine.corrupt(f"a tensor has {ref.numel} elements")
    return ref


def _replaced(ref: TensorRef, **changes: Any) -> TensorRef:
    fields = {name: getattr(ref, name) for name in TensorRef.__slots__}
    return TensorRef(**{**fields, **changes})


def _metadata(machine: PickleMachine, metadata: Any) -> None:
    """``{"conj": True}`` or ``{"neg": True}``: the bytes are not those of the elements."""
    if metadata and not (type(metadata) is dict and not any(metadata.values())):
        raise machine.unsupported("a tensor is a lazy conjugate or negation of its storage")


def _rebuild_tensor(machine: PickleMachine, args: tuple[Any, ...]) -> TensorRef:
    storage, start, shape, strides = args
    return _tensor(machine, storage, start, shape, strides)


def _rebuild_tensor_v2(machine: PickleMachine, args: tuple[Any, ...]) -> TensorRef:
    storage, start, shape, strides, requires_grad, _hooks, *rest = args
    _metadata(machine, rest[0] if rest else None)
    ref = _tensor(machine, storage, start, shape, strides)
    return _replaced(ref, requires_grad=True) if requires_grad is True else ref


def _rebuild_tensor_v3(machine: PickleMachine, args: tuple[Any, ...]) -> TensorRef:
    storage, start, shape, strides, requires_grad, _hooks, dtype, *rest = args
    _metadata(machine, rest[0] if rest else None)
    name = _dtype_name(machine, dtype)
    ref = _tensor(machine, storage, start, shape, strides, dtype=name)
    return _replaced(ref, requires_grad=True) if requires_grad is True else ref


def _dtype_name(machine: PickleMachine, dtype: Any) -> str:
    if type(dtype) is not Symbol or dtype.module != "torch":
        raise machine.corrupt(f"the dtype of a tensor is a {type(dtype).__name__}")
    if dtype.qualname not in _TORCH_DTYPES:
        raise machine.unsupported(f"a tensor has elements of type {dtype}, which cannot be read")
    return _TORCH_DTYPES[dtype.qualname]


def _rebuild_parameter(machine: PickleMachine, args: tuple[Any, ...]) -> TensorRef:
    data, requires_grad, _hooks, *state = args
    if type(data) is not TensorRef:
        raise machine.corrupt(f"a parameter is built on a {type(data).__name__}, expected a tensor")
    return _replaced(
        data,
        requires_grad=requires_grad is True,
        is_parameter=True,
        attributes=_attributes(machine, state[0] if state else None),
    )


def _attributes(machine: PickleMachine, state: Any) -> dict[str, Any] | None:
    """Attributes of ``torch._utils._get_obj_state``: a dict, or a dict and one of slots."""
    out: dict[str, Any] = {}
    for part in state if type(state) is tuple else (state,):
        if part:
            if type(part) is not dict or not all(type(key) is str for key in part):
                raise machine.corrupt("the attributes of a tensor are not a dict of names")
            out.update(part)
    return out or None


def _rebuild_from_type(machine: PickleMachine, args: tuple[Any, ...]) -> TensorRef:
    """``torch._tensor._rebuild_from_type_v2(func, type, args, state)`` of tensors with attributes."""
    func, kind, inner, state = args
    rebuild = _REBUILD.get(name_of(func))
    if rebuild is None or type(inner) is not tuple or name_of(kind) not in _TENSOR_TYPES:
        raise machine.unsupported(
            f"a tensor of type {name_of(kind)} is rebuilt by {name_of(func)}: expected a plain tensor or "
            "parameter"
        )
    ref: TensorRef = rebuild(machine, inner)
    attributes = _attributes(machine, state)
    return _replaced(ref, attributes=attributes) if attributes else ref


_REBUILD: dict[str, Handler] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
}

_TENSOR_TYPES = (
    "torch.Tensor",
    "torch._tensor.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
)


def _layout(machine: PickleMachine, args: tuple[Any, ...]) -> Symbol:
    (text,) = args
    if type(text) is not str or text.removeprefix("torch.") not in _LAYOUTS.split():
        raise machine.corrupt("a memory layout is not named by a known string")
    return Symbol("torch", text.removeprefix("torch."))


CALLS: dict[str, Handler] = {
    **_REBUILD,
    "torch._tensor._rebuild_from_type": _rebuild_from_type,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.tensor._rebuild_from_type": _rebuild_from_type,
    "torch.serialization._get_layout": _layout,
    "torch.Size": tuple_of,
    "torch.device": plain("torch", "device"),
    "torch.torch_version.TorchVersion": text_of,
}

VALUES = frozenset(
    [
        *_TENSOR_TYPES,
        *(f"torch.{name}" for name in [*_TORCH_DTYPES, *_CONSTANTS.split()]),
        *(
            f"{module}.{name}"
            for module in ("torch", "torch.storage", "torch.cuda")
            for name in [*STORAGE_DTYPES, *_OTHER_STORAGES.split()]
        ),
    ]
)

UNSUPPORTED = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without data (device 'meta')",
    "torch._utils._rebuild_wrapper_subclass": "a tensor subclass without storage",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor pickled as a NumPy array",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of a device without storage",
    "torch._utils._rebuild_xla_tensor": "a tensor pickled as a NumPy array",
}
