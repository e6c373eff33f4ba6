"""`RankState`: what one rank of a training run holds of a checkpoint, read by that rank alone.

The other side of the native targets: the same parts, into memory instead of into files. Nothing is read
before a tensor is asked for, and then only what the rank holds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ucpstore.contracts import Arrays, Role, Source
from ucpstore.dtypes import itemsize, numpy_dtype
from ucpstore.errors import (
    Kind,
    LayoutError,
    ParameterNotFoundError,
    PlanError,
    close_names,
    listing,
)
from ucpstore.layout.parallel import Layout
from ucpstore.layout.region import Region
from ucpstore.text import printable

if TYPE_CHECKING:
    from ucpstore.gather import Tensor

__all__ = ["Holding", "Into", "LocalTensor", "RankState", "Transfer"]

Into = Mapping[str, Mapping[str, Any]]
"""Parameter -> state -> array or tensor to read into."""

_THREADS = 8


@dataclass(frozen=True, slots=True)
class Holding:
    """One tensor that a rank holds, as a format lays it out.

    Attributes
    ----------
    fqn, state : str
    role : Role
    kind : {"module", "optimizer"}
        Whether it belongs to the model, or to the optimizer.
    tensor : Tensor
        Element type, shape, and where its elements come from.
    local_shape : tuple of int
        What the rank's model-parallel neighbours leave it of the parameter.
    start : int or None, elements
        Of a flat range of the flattened local tensor: its first element. None where all is held.
    buffer : (int, int) or None
        The flat buffer (by position) in which the range lies, and where it begins there.
    """

    fqn: str
    state: str
    role: Role
    kind: Literal["module", "optimizer"]
    tensor: Tensor
    local_shape: tuple[int, ...]
    start: int | None = None
    buffer: tuple[int, int] | None = None


class LocalTensor:
    """What a rank holds of one state of one parameter: its slice, or a flat range of that.

    Attributes
    ----------
    fqn, name : str
        The parameter and the state.
    role : Role
    kind : {"module", "optimizer"}
    shape : tuple of int
        Of what is read: that of the local tensor, or the length of a flat range.
    dtype : numpy.dtype
    local_shape : tuple of int
        Of the local tensor.
    start : int or None, elements
        First element of a flat range of the flattened local tensor.
    buffer : (int, int) or None
        Flat buffer of the optimizer, and where in it the range begins.
    """

    __slots__ = ("_holding", "_source")

    def __init__(self, source: Source, holding: Holding) -> None:
        self._source = source
        self._holding = holding

    @property
    def fqn(self) -> str:
        return self._holding.fqn

    @property
    def name(self) -> str:
        return self._holding.state

    @property
    def role(self) -> Role:
        return self._holding.role

    @property
    def kind(self) -> Literal["module", "optimizer"]:
        return self._holding.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return self._holding.tensor.shape

    @property
    def dtype(self) -> Any:
        return numpy_dtype(self._holding.tensor.dtype)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self._holding.local_shape

    @property
    def start(self) -> int | None:
        return self._holding.start

    @property
    def buffer(self) -> tuple[int, int] | None:
        return self._holding.buffer

    @property
    def nbytes(self) -> int:
        """Bytes that the rank holds."""
        return self._holding.tensor.nbytes

    @property
    def source_nbytes(self) -> int:
        """Bytes of the source that these are made from; padding is made from none."""
        found = 0
        for part in self._holding.tensor.parts:
            spec = self._source.parameters[part.fqn].states[part.state]
            found += part.source_numel * itemsize(spec.dtype)
        return found

    @property
    def regions(self) -> list[Region]:
        """Boxes of the whole parameter, in the order of the elements."""
        found = []
        for part in self._holding.tensor.parts:
            for _, _, windows in part.runs(part.start, part.count):
                found += [window.logical for window in windows]
        return found

    def __repr__(self) -> str:
        place = "" if self.start is None else f" from element {self.start}"
        return (
            f"<LocalTensor {self.fqn!r} {printable(self.name)} {list(self.shape)}{place}"
            f" of {list(self.local_shape)} {self._holding.tensor.dtype}>"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything but the elements."""
        return {
            "fqn": self.fqn,
            "state": self.name,
            "kind": self.kind,
            "dtype": self._holding.tensor.dtype,
            "shape": list(self.shape),
            "local_shape": list(self.local_shape),
            "start": self.start,
            "buffer": None if self.buffer is None else list(self.buffer),
            "nbytes": self.nbytes,
        }

    def read(self, *, out: Arrays = None, compare: bool = False) -> Arrays:
        """Read it.

        Parameters
        ----------
        out : numpy.ndarray, optional
            C-contiguous, of this shape and dtype.
        compare : bool
            Read every replica in the source and require that they are bit-equal.

        Returns
        -------
        numpy.ndarray
            ``out``, or a new array.
        """
        import numpy as np

        if out is None:
            out = np.empty(self.shape, self.dtype)
        problem = _problem(self, out)
        if problem:
            raise LayoutError(f"cannot read {self.name} of {self.fqn!r}: {problem}.")
        self.fill(_flat(out), 0, compare=compare)
        return out

    def blocks(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Runs of at most ``nbytes``, as first element and the one past the last, that `fill` reads best."""
        from ucpstore.gather import blocks

        return blocks(self._source, self._holding.tensor, nbytes)

    def fill(self, out: Arrays, start: int, *, compare: bool = False) -> None:
        """Fill the 1-D array ``out`` with the elements from ``start`` on (of what is held, flattened)."""
        from ucpstore.gather import fill

        fill(self._source, self._holding.tensor, start, out, compare=compare)


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a load moved.

    Attributes
    ----------
    tensor_count : int
    held_nbytes : int
        Bytes that the rank holds.
    needed_nbytes : int
        Bytes of the source that these are made from, every one counted as often as it is held.
    read_nbytes : int
        Bytes that were read from storage meanwhile, by this process.
    requests : int
        In how many reads.
    """

    tensor_count: int
    held_nbytes: int
    needed_nbytes: int
    read_nbytes: int
    requests: int

    @property
    def amplification(self) -> float:
        """Bytes read per byte needed."""
        return self.read_nbytes / self.needed_nbytes if self.needed_nbytes else 0.0

    def to_json(self) -> dict[str, int]:
        """The numbers by their names."""
        return asdict(self)


class RankState(Mapping[str, Mapping[str, LocalTensor]]):
    """All that one rank holds: parameter -> state -> `LocalTensor`. Nothing is read yet.

    Attributes
    ----------
    layout : Layout
    rank : int
    coordinates : tuple of int
        Pipeline stage, rank among those that ZeRO cuts over, tensor-parallel rank.
    warnings : tuple of str
    """

    def __init__(
        self,
        source: Source,
        holdings: Sequence[Holding],
        *,
        layout: Layout,
        rank: int,
        warnings: Sequence[str] = (),
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.coordinates = layout.coordinates(rank)
        self.warnings = tuple(warnings)
        self._source = source
        self._states: dict[str, dict[str, LocalTensor]] = {}
        for holding in holdings:
            states = self._states.setdefault(holding.fqn, {})
            states[holding.state] = LocalTensor(source, holding)

    def __getitem__(self, fqn: str) -> Mapping[str, LocalTensor]:
        try:
            return self._states[fqn]
        except KeyError:
            raise ParameterNotFoundError(
                f"rank {self.rank} holds nothing of {fqn!r}: it holds parts of {len(self)} parameters."
                f" {close_names(fqn, list(self._states))}".rstrip(),
                fqn=fqn,
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        pp, dp, tp = self.coordinates
        return (
            f"<RankState of rank {self.rank} (pp {pp}, dp {dp}, tp {tp}): {len(self)} parameters,"
            f" {self.nbytes:,} bytes>"
        )

    @property
    def tensors(self) -> list[LocalTensor]:
        """All of them, parameter by parameter."""
        return [tensor for states in self._states.values() for tensor in states.values()]

    @property
    def nbytes(self) -> int:
        """Bytes that the rank holds."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def load(
        self,
        into: Into | None = None,
        *,
        memory_limit: int | None = None,
        compare: bool = False,
    ) -> Transfer:
        """Read everything that the rank holds, block by block, parameter after parameter.

        Parameters
        ----------
        into : mapping of str to mapping of str to array, optional
            Parameter -> state -> C-contiguous numpy array, or torch tensor on any device, of the shapes
            and dtypes of this mapping. Without it everything is read and dropped.
        memory_limit : int, bytes, optional
            What blocks in flight may need together, besides the destination.
        compare : bool
            Read every replica in the source and require that they are bit-equal.

        Raises
        ------
        LayoutError
            ``into`` lacks tensors, has more, or others: all differences are reported at once, and nothing
            was read.
        PlanError
            The memory limit is below one block.
        IntegrityError
            Stored bytes are lost or damaged, or replicas differ.
        """
        from ucpstore.gather import BLOCK
        from ucpstore.io.traffic import traffic

        if into is not None:
            self._check(into)
        each = 3 * BLOCK  # a block, and what reading and casting take
        threads = min(_THREADS, os.cpu_count() or 1)
        if memory_limit is not None:
            threads = min(threads, memory_limit // each)
            if threads < 1:
                raise PlanError(
                    f"cannot load within {memory_limit} bytes: found one block in flight needs {each}.",
                    kind=Kind.MEMORY_LIMIT,
                    hint=f"Give at least {each} bytes.",
                )
        before = traffic()
        jobs = [
            (tensor, None if into is None else into[tensor.fqn][tensor.name], start, stop)
            for tensor in self.tensors
            for start, stop in tensor.blocks(BLOCK)
        ]
        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(_move, *job, compare) for job in jobs]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        read = traffic().since(before)
        return Transfer(
            len(self.tensors),
            self.nbytes,
            sum(tensor.source_nbytes for tensor in self.tensors),
            read.nbytes,
            read.requests,
        )

    def _check(self, into: Into) -> None:
        mine = {(tensor.fqn, tensor.name): tensor for tensor in self.tensors}
        theirs = {
            (fqn, state): out for fqn, states in into.items() for state, out in states.items()
        }
        problems = [f"{state} of {fqn}: missing" for fqn, state in mine.keys() - theirs.keys()]
        problems += [f"{state} of {fqn}: not held" for fqn, state in theirs.keys() - mine.keys()]
        for key in mine.keys() & theirs.keys():
            problem = _problem(mine[key], theirs[key])
            if problem:
                problems.append(f"{key[1]} of {key[0]}: {problem}")
        if problems:
            raise LayoutError(
                f"rank {self.rank} cannot load into the {len(theirs)} tensors given:"
                f" {listing(sorted(problems), cap=20)}.",
                kind=Kind.SHAPE,
                problems=sorted(problems),
            )


def _move(tensor: LocalTensor, out: Any, start: int, stop: int, compare: bool) -> None:
    """Read one block to where it belongs."""
    import numpy as np

    if isinstance(out, np.ndarray):
        tensor.fill(_flat(out)[start:stop], start, compare=compare)
        return
    if out is not None and out.device.type == "cpu":
        view = out.detach().reshape(-1).view(sys.modules["torch"].uint8).numpy()
        tensor.fill(view.view(tensor.dtype)[start:stop], start, compare=compare)
        return
    block = np.empty(stop - start, tensor.dtype)
    tensor.fill(block, start, compare=compare)
    if out is not None:
        library = sys.modules["torch"]
        values = library.from_numpy(block.view(np.uint8)).view(out.dtype)
        out.detach().reshape(-1)[start:stop].copy_(values)


def _flat(array: Arrays) -> Arrays:
    """A 1-D view."""
    return array.reshape(-1)


def _problem(tensor: LocalTensor, out: Any) -> str:
    """Why ``out`` cannot take the tensor; empty where it can."""
    import numpy as np

    library = sys.modules.get("torch")
    if isinstance(out, np.ndarray):
        dtype, contiguous = str(out.dtype), out.flags.c_contiguous and out.flags.writeable
    elif library is not None and isinstance(out, library.Tensor):
        dtype, contiguous = str(out.dtype).removeprefix("torch."), out.is_contiguous()
    else:
        return f"found {type(out).__name__}, expected a numpy array or torch tensor"
    if tuple(out.shape) != tensor.shape:
        return f"found shape {list(out.shape)}, expected {list(tensor.shape)}"
    if dtype != str(tensor.dtype):
        return f"found elements of {dtype}, expected {tensor.dtype}"
    return "" if contiguous else "expected it writable and C-contiguous"
