"""A pickle as ``torch.save`` makes it, from plain data: no torch, no framework class is imported.

Classes are written by name. Which names may occur is decided here, since a store is untrusted input and
what loads the result calls what it names.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from ucpstore.errors import PlanError
from ucpstore.gather import Tensor
from ucpstore.tagged import NumpyArray, StubObject, Symbol, TensorName

__all__ = ["Size", "View", "dump"]

_STORAGES = {
    "bool": "BoolStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""Storage classes of ``torch``, by the name of the element type."""

_INSTANCES = (
    "argparse.Namespace",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes whose instances may be written: made empty, then given plain attributes."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor that lies in the storage of another.

    Attributes
    ----------
    base : Tensor
    start : int, elements
        Where it begins in the storage.
    shape : tuple of int
    """

    base: Tensor
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """A ``torch.Size``."""

    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Global:
    """A name, written as a reference."""

    module: str
    name: str

    def __call__(self, *_: object) -> NoReturn:
        """Only `pickle` asks whether it could be called."""
        raise TypeError(f"{self.module}.{self.name} is only a name")


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str
    numel: int


def dump(root: Any, what: str) -> tuple[bytes, list[Tensor]]:
    """Pickle ``root`` (protocol 2, as ``torch.save``), and list its tensors in order of their storage keys.

    Parameters
    ----------
    root : Any
        Plain Python data, `Tensor`, `View`, `Size`, and what `ucpstore.tagged.decode` gives.
    what : str
        The file's name, for messages.

    Raises
    ------
    PlanError
        A value has no counterpart, or a class may not be written.
    """
    out = io.BytesIO()
    pickler = _Pickler(out, what)
    pickler.dump(root)
    return out.getvalue(), pickler.tensors


class _Pickler(pickle._Pickler):
    """Python's own pickler, which can be told how to write further types."""

    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(pickle._Pickler.dispatch)

    if TYPE_CHECKING:  # typeshed knows only what the C pickler has, too
        write: Callable[[bytes], Any]
        save: Callable[[Any], None]
        memoize: Callable[[Any], None]
        save_reduce: Callable[[Any, tuple[Any, ...]], None]

    def __init__(self, out: io.BytesIO, what: str) -> None:
        super().__init__(out, protocol=2)
        self.tensors: list[Tensor] = []
        self._keys: dict[int, int] = {}
        self._what = what

    def persistent_id(self, obj: Any) -> Any:
        """A storage, in the words of ``torch.serialization`` (``persistent_id``)."""
        if not isinstance(obj, _Storage):
            return None
        name = _STORAGES.get(obj.dtype)
        if name is None:
            raise PlanError(f"{self._what}: a tensor of {obj.dtype} cannot be written.")
        return "storage", _Global("torch", name), obj.key, "cpu", obj.numel

    def save_reference(self, value: _Global) -> None:
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    def save_tensor(self, value: Tensor) -> None:
        self.save_view(View(value, 0, value.shape))

    def save_view(self, value: View) -> None:
        base = value.base
        key = self._keys.setdefault(id(base), len(self.tensors))
        if key == len(self.tensors):
            self.tensors.append(base)
        strides, step = [], 1
        for size in reversed(value.shape):
            strides.append(step)
            step *= max(size, 1)
        hooks: OrderedDict[str, Any] = OrderedDict()
        storage = _Storage(str(key), base.dtype, base.numel)
        arguments = (storage, value.start, value.shape, tuple(reversed(strides)), False, hooks)
        self.save_reduce(_Global("torch._utils", "_rebuild_tensor_v2"), arguments)

    def save_size(self, value: Size) -> None:
        self.save_reduce(_Global("torch", "Size"), (value.sizes,))

    def save_symbol(self, value: Symbol) -> None:
        # A name that is only referred to runs nothing; dtypes, layouts and memory formats are such.
        if value.module != "torch" or not value.qualname.isidentifier():
            raise self._refuse(str(value))
        self.save(_Global(value.module, value.qualname))

    def save_stub(self, value: StubObject) -> None:
        plain = value.state is None or type(value.state) is dict
        if value.name not in _INSTANCES or value.args or value.contents is not None or not plain:
            raise self._refuse(value.name)
        self.save(_Global(value.module, value.qualname))
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        if value.state:
            self.save(value.state)
            self.write(pickle.BUILD)

    def save_array(self, value: NumpyArray) -> None:
        array = value.to_numpy()
        if array.dtype == np.dtype(object):
            raise self._refuse("numpy.ndarray of objects")
        self.save(array.copy() if value.shape else array[()])

    def save_name(self, value: TensorName) -> None:
        raise self._refuse(f"tensor {value.name!r}")

    def _refuse(self, name: str) -> PlanError:
        return PlanError(
            f"{self._what}: an object {name} of the common state cannot be written: expected plain data,"
            f" or one of {', '.join(_INSTANCES)}."
        )

    dispatch[_Global] = save_reference
    dispatch[Tensor] = save_tensor
    dispatch[View] = save_view
    dispatch[Size] = save_size
    dispatch[Symbol] = save_symbol
    dispatch[StubObject] = save_stub
    dispatch[NumpyArray] = save_array
    dispatch[TensorName] = save_name
