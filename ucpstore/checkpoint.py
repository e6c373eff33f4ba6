"""Lazy views over any source: `Checkpoint` -> `Parameter` -> `LazyTensor`.

Nothing here reads tensor bytes until a tensor is indexed; no ``repr`` does I/O.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from ucpstore.contracts import Arrays, CommonState, Fragment, ParameterSpec, Role, Source, StateSpec
from ucpstore.dtypes import numpy_dtype
from ucpstore.errors import (
    IndexingError,
    LayoutError,
    ParameterNotFoundError,
    UnsupportedSourceError,
    close_names,
)
from ucpstore.layout.region import Region
from ucpstore.tagged import decode
from ucpstore.text import printable

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "LazyTensor", "Parameter"]

Index = int | slice | EllipsisType
_REPR_CAP = 12


class LazyTensor:
    """One state of one parameter; indexing reads the tiles or rows that hold the index, no more.

    Supports integers, slices (any positive step) and ``...``; the result is a new numpy array. A step
    saves no reading: the elements in between are read and dropped.

    Attributes
    ----------
    fqn, name : str
        The parameter and the state.
    shape : tuple of int
    dtype : numpy.dtype
        ``bfloat16`` and ``float8_*`` are ``ml_dtypes``' types.
    role : Role
    """

    __slots__ = ("_source", "_spec", "fqn")

    def __init__(self, source: Source, fqn: str, spec: StateSpec) -> None:
        self._source = source
        self._spec = spec
        self.fqn = fqn

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._spec.shape

    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    @property
    def dtype(self) -> Any:
        return numpy_dtype(self._spec.dtype)

    @property
    def role(self) -> Role:
        return self._spec.role

    @property
    def nbytes(self) -> int:
        return self._spec.nbytes

    @property
    def digest(self) -> str | None:
        """The recorded digest, or None where the format keeps none."""
        return self._source.digest(self.fqn, self.name)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.fqn!r} ({self.name}) is 0-d and has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<LazyTensor {self.fqn!r} {printable(self.name)} {list(self.shape)} {self._spec.dtype}>"

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Arrays:
        region, inner = _basic_index(index, self.shape, f"{self.fqn!r} ({self.name})")
        found = self.read(region)[inner]
        # A step would keep everything in between in memory.
        return found.copy() if found.ndim and found.size < region.volume else found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Arrays:
        if copy is False:
            raise ValueError(
                f"{self.fqn!r} ({self.name}) is in storage: an array of it is always a copy"
            )
        values = self.read()
        return values if dtype is None else values.astype(dtype)

    def read(
        self, region: Region | None = None, *, out: Arrays = None, compare: bool = False
    ) -> Arrays:
        """Read a region.

        Parameters
        ----------
        region : Region, optional
            Half-open box, in elements; the whole tensor by default.
        out : numpy.ndarray, optional
            Array of shape ``region.sizes`` and this tensor's dtype to read into (any strides).
        compare : bool
            Read every replica and require that they are bit-equal.

        Returns
        -------
        numpy.ndarray
            ``out``, or a new array.

        Raises
        ------
        IntegrityError
            Stored bytes are lost or damaged, or replicas differ.
        """
        import numpy as np

        region = Region.full(self.shape) if region is None else region
        if out is None:
            out = np.empty(region.sizes, self.dtype)
        elif not isinstance(out, np.ndarray):
            raise LayoutError(
                f"cannot read {self.fqn!r} ({self.name}) into {type(out).__name__}: expected a numpy array."
            )
        elif out.dtype != self.dtype:
            raise LayoutError(
                f"cannot read {self.fqn!r} ({self.name}) into an array of {out.dtype}: it holds {self._spec.dtype}.",
                hint="Read first, then cast.",
            )
        self._source.read(self.fqn, self.name, region, out, compare=compare)
        return out

    def torch(self, index: Index | tuple[Index, ...] = ...) -> torch.Tensor:
        """The indexed elements as a CPU tensor of the same dtype."""
        import numpy as np
        import torch

        values = np.require(self[index], requirements="C")
        dtype = getattr(torch, self._spec.dtype)
        raw = torch.from_numpy(values.reshape(-1).view(np.uint8))
        return raw.view(dtype).reshape(values.shape)

    def tensorstore(self) -> Any:
        """The stored array as a read-only ``tensorstore.TensorStore`` (only of our own stores).

        Raises
        ------
        UnsupportedSourceError
            The checkpoint is a framework's: there is no array.
        """
        return _native(self._source, "tensorstore", "array")(self.fqn, self.name)

    def fragments(self, region: Region | None = None) -> Sequence[Fragment]:
        """Where the source's files hold a region (metadata only)."""
        return self._source.fragments(self.fqn, self.name, region or Region.full(self.shape))


class Parameter(Mapping[str, LazyTensor]):
    """A parameter: a mapping from state name to `LazyTensor`; states are attributes too."""

    __slots__ = ("_source", "spec")

    def __init__(self, source: Source, spec: ParameterSpec) -> None:
        self._source = source
        self.spec = spec

    @property
    def fqn(self) -> str:
        return self.spec.fqn

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its first state."""
        return next((state.shape for state in self.spec.states.values()), ())

    @property
    def pattern(self) -> str:
        """How the source laid the parameter over its mesh axes."""
        return self.spec.pattern

    @property
    def trainable(self) -> bool:
        return self.spec.trainable

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names of the same tensor (tied weights)."""
        return self.spec.aliases

    def __getitem__(self, state: str) -> LazyTensor:
        try:
            return LazyTensor(self._source, self.fqn, self.spec.states[state])
        except KeyError:
            raise ParameterNotFoundError(
                f"parameter {self.fqn!r} has no state {state!r}; it has {', '.join(self.spec.states)}.",
                fqn=self.fqn,
                state=state,
            ) from None

    def __getattr__(self, state: str) -> LazyTensor:
        if state.startswith("__"):
            raise AttributeError(state)
        try:
            return self[state]
        except ParameterNotFoundError as error:
            raise AttributeError(str(error)) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.spec.states)

    def __len__(self) -> int:
        return len(self.spec.states)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.spec.states]

    def __repr__(self) -> str:
        states = _states_by_dtype(self.spec)
        also = ", ".join(map(printable, self.aliases))
        tied = f", also {also}" if also else ""
        return f"<Parameter {self.fqn!r} {list(self.shape)} ({states}){tied}>"


class Checkpoint(Mapping[str, Parameter]):
    """An open checkpoint: a mapping from fully qualified name to `Parameter`.

    Aliases of tied parameters can be looked up too; iteration names every tensor once.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._common: dict[str, Any] | None = None
        self._aliases = {
            alias: fqn for fqn, spec in source.parameters.items() for alias in spec.aliases
        }

    @property
    def url(self) -> str:
        return self.source.url

    @property
    def format(self) -> str:
        return self.source.format

    @property
    def common(self) -> Mapping[str, Any]:
        """Param groups, steps, scheduler, counters and everything else that is not per element.

        Plain Python values: tuples are tuples, arrays are `ucpstore.tagged.NumpyArray`, instances of classes
        that are not loaded are inert `ucpstore.tagged.StubObject`, real tensors are named
        (`ucpstore.tagged.TensorName`) and in `common_tensors`. ``source.common.document`` is the JSON.
        """
        if self._common is None:
            self._common = {
                name: decode(value) for name, value in self.source.common.document.items()
            }
        return self._common

    @property
    def common_tensors(self) -> Mapping[str, LazyTensor]:
        """Tensors that the common state refers to as ``{"$tensor": name}``."""
        tensors = self.source.common.tensors
        return {name: LazyTensor(self.source, CommonState.FQN, s) for name, s in tensors.items()}

    @property
    def layout(self) -> Mapping[str, Any]:
        """Degrees and facts of the layout that wrote the checkpoint."""
        return self.source.parallelism

    @property
    def warnings(self) -> Sequence[str]:
        """What the reader noticed and the user should know."""
        return self.source.warnings

    def __getitem__(self, fqn: str) -> Parameter:
        parameters = self.source.parameters
        # A tensor's own name comes before another one's alias.
        name = fqn if fqn in parameters else self._aliases.get(fqn, fqn)
        try:
            return Parameter(self.source, parameters[name])
        except KeyError:
            raise ParameterNotFoundError(
                f"{self.url}: no parameter {fqn!r} among {len(self)}.",
                hint=close_names(fqn, list(parameters)) if isinstance(fqn, str) else "",
                fqn=fqn,
            ) from None

    def __contains__(self, fqn: object) -> bool:
        return fqn in self.source.parameters or fqn in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.parameters)

    def __len__(self) -> int:
        return len(self.source.parameters)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to release: files are opened per read and cached by the storage backend."""

    def zarr_group(self) -> Any:
        """The whole checkpoint as a read-only ``zarr.Group`` (only of our own stores).

        Raises
        ------
        UnsupportedSourceError
            The checkpoint is a framework's: there is no Zarr hierarchy.
        """
        return _native(self.source, "zarr_group", "Zarr hierarchy")()

    def info(self) -> dict[str, Any]:
        """Facts about the checkpoint as JSON values (``schemas/info.schema.json``)."""
        states: dict[str, dict[str, Any]] = {}
        for spec in self.source.parameters.values():
            for state in spec.states.values():
                entry = states.setdefault(
                    state.name,
                    {
                        "role": str(state.role),
                        "tensors": 0,
                        "elements": 0,
                        "nbytes": 0,
                        "dtypes": [],
                    },
                )
                entry["tensors"] += 1
                entry["elements"] += state.nbytes // numpy_dtype(state.dtype).itemsize
                entry["nbytes"] += state.nbytes
                if state.dtype not in entry["dtypes"]:
                    entry["dtypes"] = sorted([*entry["dtypes"], state.dtype])
        specs = self.source.parameters.values()
        return {
            "url": self.url,
            "format": self.format,
            "layout": dict(self.layout),
            "parameters": len(self),
            "trainable": sum(spec.trainable for spec in specs),
            "aliases": len(self._aliases),
            "states": states,
            "common": sorted(self.common),
            "files": len(self.source.files()),
            "warnings": list(self.warnings),
        }

    def tree(self, *, max_nodes: int = 300) -> str:
        """The parameter names as a tree of their dotted segments, as text.

        Parameters
        ----------
        max_nodes : int
            Lines after which the rest is only counted.
        """
        lines = [f"{printable(self.url)} ({self.format}, {len(self)} parameters)"]
        root: dict[str, Any] = {}
        for fqn in self:
            node = root
            *parents, leaf = printable(fqn).split(".")
            for segment in parents:
                node = node.setdefault(segment + ".", {})
            node[leaf] = self[fqn]
        _draw(root, "", lines)
        if len(lines) > max_nodes:
            lines = [*lines[:max_nodes], f"... {len(lines) - max_nodes} more lines"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        head = f"<Checkpoint {self.url!r} ({self.format}): {len(self)} parameters>"
        names = list(self.source.parameters)[:_REPR_CAP]
        lines = [
            f"  {printable(fqn)} {list(self[fqn].shape)} {printable('/'.join(self[fqn]))}"
            for fqn in names
        ]
        if len(self) > len(names):
            lines.append(f"  ... {len(self) - len(names)} more")
        return "\n".join([head, *lines])


def _native(source: Source, method: str, what: str) -> Callable[..., Any]:
    """A method that only stores have."""
    found: Callable[..., Any] | None = getattr(source, method, None)
    if found is None:
        raise UnsupportedSourceError(
            f"{source.url} is a {source.format} checkpoint: it has no {what}.",
            hint="Convert it first; slices and reads work on it as it is.",
            url=source.url,
        )
    return found


def _states_by_dtype(spec: ParameterSpec) -> str:
    """``fp32 adam_m adam_v: float32, weight: bfloat16``."""
    names: dict[str, list[str]] = {}
    for state in spec.states.values():
        names.setdefault(state.dtype, []).append(printable(state.name))
    return ", ".join(f"{' '.join(found)}: {dtype}" for dtype, found in names.items())


def _draw(node: Mapping[str, Any], indent: str, lines: list[str]) -> None:
    """Append one line per child of ``node``, recursing into prefixes; only children share a line."""
    entries = list(node.items())
    for position, (name, child) in enumerate(entries):
        last = position == len(entries) - 1
        branch, deeper = ("└── ", "    ") if last else ("├── ", "│   ")
        while isinstance(child, dict) and len(child) == 1:
            ((segment, child),) = child.items()
            name += segment
        if isinstance(child, dict):
            lines.append(indent + branch + name)
            _draw(child, indent + deeper, lines)
            continue
        states = _states_by_dtype(child.spec)
        notes = "" if child.trainable else ", not trained"
        also = ", ".join(map(printable, child.aliases))
        notes += f", also {also}" if also else ""
        lines.append(f"{indent}{branch}{name} {list(child.shape)} ({states}){notes}")


def _basic_index(
    index: Index | tuple[Index, ...], shape: tuple[int, ...], what: str
) -> tuple[Region, tuple[Index, ...]]:
    """Split a numpy basic index into the box to read and the index into that box."""
    items = list(index) if isinstance(index, tuple) else [index]
    ellipses = [place for place, item in enumerate(items) if item is Ellipsis]
    fill = len(shape) - len(items) + len(ellipses)
    if fill < 0:
        raise IndexingError(f"{what} has {len(shape)} dims, the index has {len(shape) - fill}.")
    if len(ellipses) > 1:
        raise IndexingError(f"{what}: found {len(ellipses)} ellipses in the index, expected one.")
    at = ellipses[0] if ellipses else len(items)
    items[at : at + len(ellipses)] = [slice(None)] * fill
    offsets: list[int] = []
    sizes: list[int] = []
    inner: list[int | slice] = []
    for dim, (item, size) in enumerate(zip(items, shape, strict=True)):
        where = f"{what}: dim {dim}"
        if isinstance(item, slice):
            start, stop, step = _bounds(item, size, where)
            count = len(range(start, stop, step))
            offsets.append(start if count else 0)
            sizes.append((count - 1) * step + 1 if count else 0)
            inner.append(slice(None, None, step))
            continue
        position = _integer(item, where)
        if not -size <= position < size:
            raise IndexingError(
                f"{what}: index {position} is out of range for dim {dim} of size {size}"
            )
        offsets.append(position % size)
        sizes.append(1)
        inner.append(0)
    # As in numpy, an ellipsis makes a 0-d array of what would be a scalar.
    return Region(tuple(offsets), tuple(sizes)), (*inner, *([...] if ellipses else []))


def _integer(item: object, where: str) -> int:
    # numpy takes booleans for masks, which are not read lazily; here they would pass as 0 and 1.
    if not isinstance(item, bool):
        try:
            return operator.index(item)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise IndexingError(
        f"{where} is indexed by {type(item).__name__}; expected an integer, a slice or '...'."
    )


def _bounds(item: slice, size: int, where: str) -> tuple[int, int, int]:
    try:
        start, stop, step = item.indices(size)
    except (TypeError, ValueError) as error:
        raise IndexingError(f"{where} is indexed by {item}: {error}.") from error
    if step < 0:
        raise IndexingError(f"{where} has step {step}; only positive steps are read.")
    return start, stop, step
