"""Which parameter every numbered entry of a plain torch optimizer belongs to.

Without ZeRO a checkpoint has torch's ``state_dict`` of the optimizer, which numbers parameters through
its groups and names none (``torch/optim/optimizer.py``, ``state_dict``); only an optimizer that was given
names saves ``param_names`` (torch 2.6). A wrong guess swaps the moments of two parameters and shows
nowhere, so an entry gets a name for one of these reasons only:

1. The checkpoint, or its owner, says so.
2. No other parameter has its shape.
3. No other parameter of its shape has the values to which its 16-bit copy of the master weights
   rounds (``fp16/unfused_optimizer.py`` copies the masters to the model after every step). The first
   `PROBE` elements are compared: the one place where opening a checkpoint reads tensor bytes.
4. All parameters of its shape (and values) are in its group, which therefore is known, and all that is
   known of that group is in the module's order: then they are taken in the module's order, as
   ``model.parameters()`` lists them. This is an assumption, and a warning names who rests on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn, TypeAlias

import numpy as np

from ucpstore.dtypes import itemsize, numpy_dtype
from ucpstore.errors import CorruptSourceError, Kind, PatternError, listing
from ucpstore.formats.torchfile import TensorRef
from ucpstore.io.base import Files

__all__ = ["PROBE", "Entry", "Naming", "Prober"]

PROBE = 256
"""Elements of a tensor that are compared."""

_Place: TypeAlias = tuple[int, int]
"""Group, and position in it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of one numbered parameter.

    Attributes
    ----------
    shape : tuple of int, or None
        ``None`` where the optimizer has no state of it.
    master : TensorRef or None
        Its master weights, where they are apart from the module's.
    """

    shape: tuple[int, ...] | None
    master: TensorRef | None


@dataclass(frozen=True, slots=True)
class Prober:
    """Reads the first elements of tensors.

    Attributes
    ----------
    files : Files
    name : str
        Of their file.
    big_endian : bool
    map : callable
        Runs a function over independent items, in threads.
    homes : mapping of int to str
        By `id` of their storages, the files of those that are elsewhere: in layer files of a pipeline.
    """

    files: Files
    name: str
    big_endian: bool
    map: Callable[[Callable[[Any], bytes], Sequence[Any]], list[bytes]]
    homes: Mapping[int, str] = field(default_factory=dict)

    def __call__(self, refs: Sequence[TensorRef], dtype: str) -> list[bytes]:
        """The first elements of every tensor, rounded to ``dtype``; all NaNs are alike."""
        return self.map(lambda ref: self._read(ref, dtype), refs)

    def _read(self, ref: TensorRef, dtype: str) -> bytes:
        count = min(ref.numel, PROBE)
        name = self.homes.get(id(ref.storage), self.name)
        data = self.files.read(name, ref.offset, count * itemsize(ref.dtype))
        if len(data) != count * itemsize(ref.dtype):
            raise CorruptSourceError(
                f"{name} ends inside a tensor of {ref.nbytes} bytes at {ref.offset}.",
                kind=Kind.TRUNCATED,
            )
        values = np.frombuffer(data, numpy_dtype(ref.dtype))
        if self.big_endian:
            values = values.byteswap()
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = values.astype(numpy_dtype(dtype)).astype(np.float64)
        rounded[np.isnan(rounded)] = np.nan
        return rounded.tobytes()


@dataclass(slots=True)
class Naming:
    """Gives the entries of one model file's optimizer their names.

    Attributes
    ----------
    file : str
        The model file, for messages.
    module : mapping of str to TensorRef
        Everything that can be a parameter, in the module's order, every tensor once.
    groups : sequence of sequence of Entry
    remedy : str
        What the user can do about an ambiguity.
    warnings : list of str
    """

    file: str
    module: Mapping[str, TensorRef]
    groups: Sequence[Sequence[Entry]]
    remedy: str
    warnings: list[str] = field(default_factory=list)
    _found: dict[_Place, str] = field(default_factory=dict)
    _assumed: dict[_Place, None] = field(default_factory=dict)

    def declare(self, group: int, names: Sequence[str], origin: str) -> None:
        """Take names that somebody recorded.

        Raises
        ------
        PatternError
            They are not those of parameters of these shapes.
        """
        entries = self.groups[group]
        taken = set(self._found.values())
        if len(names) != len(entries):
            raise PatternError(
                f"{origin}: group {group} has {len(names)} names, expected one for each of its {len(entries)}"
                " parameters.",
                kind=Kind.SHAPE,
            )
        for position, (name, entry) in enumerate(zip(names, entries, strict=True)):
            ref = self.module.get(name)
            if ref is None:
                raise PatternError(
                    f"{origin}: {name!r} of group {group} is no parameter of {self.file}."
                )
            if name in taken:
                raise PatternError(f"{origin}: {name!r} is named twice.", kind=Kind.AMBIGUOUS)
            if entry.shape not in (None, ref.shape):
                raise PatternError(
                    f"{origin}: {name!r} of group {group} has shape {list(ref.shape)}, but the optimizer's states"
                    f" of this parameter have {list(entry.shape or ())}.",
                    kind=Kind.SHAPE,
                    fqn=name,
                )
            self._found[group, position] = name
            taken.add(name)

    def result(self, probe: Prober) -> list[list[str]]:
        """The names of all entries, by group.

        Raises
        ------
        PatternError
            Some entry can be several parameters; they are named.
        CorruptSourceError
            Some entry can be none.
        """
        if not self._whole_module():
            self._by_key(probe)
            self._without_states()
        for group in {group for group, _ in self._assumed}:
            self._require_order(group)
        if self._assumed:
            self.warnings.append(
                f"{self.file}: the optimizer's state has no names; {len(self._assumed)} parameters that others equal"
                f" in shape ({listing([self._found[p] for p in self._assumed], cap=3)}) were told apart by the"
                " module's order, in which model.parameters() lists them. If the optimizer was given another order,"
                f" do not use their states. {self.remedy}"
            )
        return [
            [self._found[group, position] for position in range(len(entries))]
            for group, entries in enumerate(self.groups)
        ]

    def _open(self) -> dict[_Place, Entry]:
        return {
            (group, position): entry
            for group, entries in enumerate(self.groups)
            for position, entry in enumerate(entries)
            if (group, position) not in self._found
        }

    def _free(self) -> list[str]:
        taken = set(self._found.values())
        return [name for name in self.module if name not in taken]

    def _whole_module(self) -> bool:
        """One group without masters that has all parameters: there is only the order to go by."""
        entries, names = self._open(), self._free()
        if len({group for group, _ in entries}) != 1 or len(entries) != len(names):
            return False
        fits = [
            entry.master is None and entry.shape in (None, self.module[name].shape)
            for entry, name in zip(entries.values(), names, strict=True)
        ]
        if not all(fits):
            return False
        shapes = Counter(self.module[name].shape for name in names)
        for place, name in zip(entries, names, strict=True):
            alone = shapes[self.module[name].shape] == 1
            self._take(place, name, assumed=not alone and entries[place].shape is not None)
        return True

    def _by_key(self, probe: Prober) -> None:
        """Name all entries whose shape is known."""
        shapes: dict[tuple[int, ...], list[_Place]] = {}
        entries = self._open()
        for place, entry in entries.items():
            if entry.shape is not None:
                shapes.setdefault(entry.shape, []).append(place)
        names = self._free()
        for shape, places in shapes.items():
            alike = [name for name in names if self.module[name].shape == shape]
            if len(places) > len(alike):
                raise CorruptSourceError(
                    f"{self.file}: the optimizer has states of {len(places)} parameters of shape {list(shape)}, but"
                    f" 'module' has {len(alike)} of that shape ({listing(alike, cap=3) or 'none'}): they do not"
                    " belong together.",
                    kind=Kind.SHAPE,
                )
            masters = [entries[place].master for place in places]
            refs = [ref for ref in masters if ref is not None]
            if len(refs) < len(places):
                self._settle(places, alike)
            else:
                self._by_content(places, alike, refs, probe)

    def _by_content(
        self, places: Sequence[_Place], names: Sequence[str], masters: Sequence[TensorRef],
        probe: Prober,
    ) -> None:  # fmt: skip
        """Tell entries of one shape apart by what their masters round to."""
        weights = [self.module[name] for name in names]
        dtype = weights[0].dtype
        plain = all(ref.is_contiguous and ref.numel for ref in [*weights, *masters])
        if not plain or any(ref.dtype != dtype for ref in weights):
            self._settle(places, names)
            return
        having: dict[bytes, tuple[list[_Place], list[str]]] = {}
        values = probe([*masters, *weights], dtype)
        for place, value in zip(places, values, strict=False):
            having.setdefault(value, ([], []))[0].append(place)
        for name, value in zip(names, values[len(places) :], strict=True):
            having.setdefault(value, ([], []))[1].append(name)
        for mine, theirs in having.values():
            if len(mine) > len(theirs):
                group, position = mine[0]
                raise CorruptSourceError(
                    f"{self.file}: the master weights of parameter {position} of group {group}, rounded to {dtype},"
                    f" are the weights of no parameter of their shape {list(weights[0].shape)}"
                    f" ({listing(names, cap=5)}): 'module' and 'optimizer' do not belong together.",
                    hint=self.remedy,
                )
            if mine:
                self._settle(mine, theirs)

    def _settle(self, places: Sequence[_Place], names: Sequence[str]) -> None:
        """Name entries that nothing tells apart but their order."""
        if len(places) == len(names) == 1:
            self._take(places[0], names[0], assumed=False)
            return
        if len({group for group, _ in places}) > 1:
            self._refuse(places, names, "parameters of this shape are in several groups")
        if len(places) < len(names):
            self._refuse(
                places, names, f"the optimizer has only {len(places)} of these {len(names)}"
            )
        for place, name in zip(places, names, strict=True):
            self._take(place, name, assumed=True)

    def _take(self, place: _Place, name: str, *, assumed: bool) -> None:
        self._found[place] = name
        if assumed:
            self._assumed[place] = None

    def _without_states(self) -> None:
        """Entries that have no state: only their group matters."""
        places, names = list(self._open()), self._free()
        if not places:
            return
        if len({group for group, _ in places}) > 1 or len(places) != len(names):
            self._refuse(places, names, "the optimizer has no states of them that tell their shape")
        for place, name in zip(places, names, strict=True):
            self._take(place, name, assumed=False)

    def _require_order(self, group: int) -> None:
        """Refuse to go by the order in a group of which something is not in order."""
        order = {name: number for number, name in enumerate(self.module)}
        entries = self.groups[group]
        numbers = [
            (order[self._found[group, position]], position)
            for position, entry in enumerate(entries)
            if entry.shape is not None
        ]
        for (before, _), (after, position) in pairwise(numbers):
            if before < after:
                continue
            places = [place for place in self._assumed if place[0] == group]
            names = sorted((self._found[place] for place in places), key=order.__getitem__)
            why = (
                f"the group is not in the module's order, as its parameter {position}, of shape"
                f" {list(entries[position].shape or ())}, shows"
            )
            self._refuse(places, names, why)

    def _refuse(self, places: Iterable[_Place], names: Sequence[str], why: str) -> NoReturn:
        numbers = [f"{position} of group {group}" for group, position in places]
        raise PatternError(
            f"{self.file}: the optimizer's state has no names, and its parameters {listing(numbers, cap=5)} can be"
            f" any of {listing(map(repr, names), cap=8) or 'none'}: {why}.",
            hint=self.remedy,
            kind=Kind.AMBIGUOUS,
            names=list(names),
        )
