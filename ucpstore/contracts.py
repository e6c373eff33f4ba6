"""The two protocols that everything meets at: `Source` and `Target`.

A reader of any format implements `Source`; whatever can be written implements `Target`. The engine
plans and runs one against the other and knows neither frameworks nor Zarr.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from ucpstore.dtypes import itemsize
from ucpstore.io.base import Files, FileStat
from ucpstore.layout.region import Region

if TYPE_CHECKING:
    from ucpstore.layout.rules import Patterns

__all__ = [
    "Arrays",
    "CommonState",
    "Detection",
    "Format",
    "Fragment",
    "ParameterSpec",
    "Record",
    "Role",
    "Source",
    "SourceFile",
    "StateSpec",
    "Target",
    "Task",
]

Arrays = Any  # numpy arrays of a dtype that is only known at run time


class Role(StrEnum):
    """What a state is for, whatever the optimizer calls it."""

    MASTER_WEIGHT = "master_weight"
    FIRST_MOMENT = "first_moment"
    SECOND_MOMENT = "second_moment"
    MOMENTUM = "momentum"
    MODEL_WEIGHT = "model_weight"
    BUFFER = "buffer"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A named tensor of a parameter, without its data.

    Attributes
    ----------
    name : str
        ``fp32``, ``adam_m``, ``adam_v``, ``weight``, ``buffer`` or the optimizer's own name.
    role : Role
    shape : tuple of int
        True logical shape: no padding, no partitioning.
    dtype : str
        Name of the element type: ``float32``, ``bfloat16``, ``int64``, ``bool``, ``float8_e4m3fn``, ...
    derived : bool
        The state is a rounded copy of the parameter's master weight. It is shown, but not converted
        unless asked for, since it can be made again bit by bit.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    derived: bool = False

    @property
    def nbytes(self) -> int:
        """Logical size in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A trainable or frozen tensor of the model (or a buffer) and its states.

    Attributes
    ----------
    fqn : str
        Fully qualified name.
    states : mapping of str to StateSpec
    trainable : bool
    aliases : tuple of str
        Other names of the same tensor (tied weights).
    pattern : str
        How the parameter lies on the mesh axes, in words: ``"tp: shard(0), dp: flat"``.
    attributes : mapping
        Further facts to keep, JSON values.
    """

    fqn: str
    states: Mapping[str, StateSpec]
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    pattern: str = "unique"
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommonState:
    """Everything that is not per element.

    Attributes
    ----------
    document : dict
        JSON values only. Keys: ``param_groups`` (list of dicts; ``params`` lists fqns, the rest are
        hyper-parameters), ``steps`` (fqn -> number), ``scheduler``, ``loss_scaler``, ``counters``, ``rng``,
        ``framework``, ``client``, and ``patterns`` where parameters lie on tensor-parallel ranks: the normal
        form of `ucpstore.layout.rules.Patterns`. Values that JSON lacks are tagged: see `ucpstore.tagged`.
    tensors : mapping of str to StateSpec
        Real tensors among the common state. The document refers to them as ``{"$tensor": name}``; they
        are read like any state, with the fqn `CommonState.FQN`.
    """

    document: Mapping[str, Any]
    tensors: Mapping[str, StateSpec] = field(default_factory=dict)

    FQN = "__common__"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that a source depends on; a plan is only good while none has changed."""

    name: str
    nbytes: int
    token: str

    @classmethod
    def of(cls, stat: FileStat) -> SourceFile:
        return cls(stat.name, stat.nbytes, stat.modified or stat.token)


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one source rank (file) holds of a state, for display and for planning reads."""

    region: Region
    file: str
    offset: int
    nbytes: int


class Source(Protocol):
    """An open checkpoint of any format. Opening read metadata only; picklable; safe to share between threads.

    ``parameters`` and ``common`` describe everything; `read` is the one way to the bytes.
    """

    format: str
    url: str
    is_local: bool
    parameters: Mapping[str, ParameterSpec]
    common: CommonState
    parallelism: Mapping[str, Any]
    """Degrees and facts of the layout that wrote it: ``{"tp": 2, "dp": 4, "zero_stage": 1, ...}``."""
    warnings: Sequence[str]

    def files(self) -> Sequence[SourceFile]:
        """Every file that the source depends on, sorted by name."""

    def current_files(self) -> Sequence[SourceFile]:
        """The same files as they are in storage now (a missing one has size -1)."""

    def read(
        self, fqn: str, state: str, region: Region, out: Arrays, *, compare: bool = False
    ) -> None:
        """Fill ``out`` (any strides, shape ``region.sizes``, the state's dtype) with the region's elements.

        With ``compare`` every replica is read and must be bit-equal (`ucpstore.errors.IntegrityError`).
        """

    def cuts(self, fqn: str, state: str) -> tuple[tuple[int, ...], ...]:
        """Per dim, the interior cut points of the source's TP/EP/stack slices (not ZeRO's flat cuts)."""

    def fragments(self, fqn: str, state: str, region: Region) -> Sequence[Fragment]:
        """What the source's files hold of a region."""

    def count_reads(self, fqn: str, state: str) -> int:
        """Upper bound of the contiguous byte ranges that hold the state; computed, never enumerated."""

    def digest(self, fqn: str, state: str) -> str | None:
        """The recorded digest of the state, where the format keeps one for it alone."""

    def joint_digests(self) -> Mapping[tuple[tuple[str, str], ...], str]:
        """Recorded digests of states that are stored stacked: members (fqn, state) in order -> digest."""


@dataclass(frozen=True, slots=True)
class Task:
    """One target object: the unit of work, written by one owner, once.

    Attributes
    ----------
    index : int
        Position in the plan.
    key : str
        Name of the object under the target's URL.
    nbytes : int
        Bytes of the finished object.
    """

    index: int
    key: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """Proof that a task was done.

    Attributes
    ----------
    task : int
        `Task.index`.
    nbytes : int
        Bytes of the object.
    token : str
        The object's `FileStat.token` right after it was written.
    digest : int
        Partial digest of the task's tiles, mod 2**128 (see `ucpstore.digest`).
    """

    task: int
    nbytes: int
    token: str
    digest: int


class Target(Protocol):
    """Something that a source is converted into. Picklable; `write` is safe to call from many threads.

    The engine calls `begin`, then `write` for every task without a record, `publish` for batches of
    records, and `commit` once all records are there. Every call is idempotent.
    """

    format: str
    url: str
    is_local: bool

    def document(self) -> Mapping[str, Any]:
        """Everything that decides the target's bytes, as JSON; hashed into the plan's digest."""

    def tasks(self) -> Sequence[Task]:
        """All objects to write, in order of ``index``."""

    def task_memory(self) -> int:
        """Largest anonymous memory, in bytes, that one `write` in flight needs."""

    def stored_nbytes(self) -> int:
        """Bytes of the objects that are at the destination, of any attempt; needs no claim."""

    def begin(self, digest: str) -> bool:
        """Claim the destination for the plan ``digest``. Returns False if it is committed already."""

    def records(self) -> Mapping[int, Record]:
        """Tasks that are durably done under this plan."""

    def write(self, task: Task, source: Source) -> Record:
        """Gather the object's bytes from ``source`` and write it whole."""

    def publish(self, records: Sequence[Record]) -> None:
        """Make the objects of ``records`` durable, then record them."""

    def commit(self, records: Mapping[int, Record]) -> None:
        """Check every object against its record and make the checkpoint visible."""

    def abandon(self) -> str | None:
        """Free a claim whose owner is dead. Returns the digest that held it."""


@dataclass(frozen=True, slots=True)
class Detection:
    """What a format saw at a URL: whether it recognises it, and the evidence in a few words."""

    matches: bool
    evidence: str


class Format(Protocol):
    """A checkpoint format that can be opened. Registered in the entry-point group ``ucpstore.formats``."""

    name: str

    def detect(self, files: Files) -> Detection:
        """Look at listings only."""

    def open(
        self,
        files: Files,
        *,
        tag: str | None = None,
        patterns: Patterns | None = None,
        rank: int | None = None,
    ) -> Source:
        """Index the checkpoint. Reads metadata only, never tensor bytes, and imports no torch.

        Parameters
        ----------
        files : Files
        tag : str, optional
            Which checkpoint of several.
        patterns : Patterns, optional
            How parameters lie on tensor-parallel ranks: they count before what the checkpoint says.
        rank : int, optional
            Open the local tensors of this tensor-parallel rank instead of whole parameters.
        """
