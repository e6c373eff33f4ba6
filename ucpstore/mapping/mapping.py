"""`Mapping`: names and affine transforms between model families, as one document."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ucpstore.errors import FormatVersionError, Kind, PatternError, listing
from ucpstore.mapping import presets
from ucpstore.mapping.entries import (
    AliasEntry,
    DropEntry,
    Entry,
    FuseEntry,
    KeepEntry,
    RenameEntry,
    RotaryEntry,
    SplitEntry,
    StackEntry,
    TransposeEntry,
    UnstackEntry,
)

__all__ = ["Mapping", "Pass"]

VERSION = "1.0"
_TABLES = {
    "rename": RenameEntry,
    "keep": KeepEntry,
    "drop": DropEntry,
    "fuse": FuseEntry,
    "split": SplitEntry,
    "stack": StackEntry,
    "unstack": UnstackEntry,
    "transpose": TransposeEntry,
    "rotary": RotaryEntry,
}


class Pass(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Entries that are applied at once: each looks at the names of the source.

    Attributes
    ----------
    rename, keep, drop, fuse, split, stack, unstack, transpose, rotary : tuple of entries
    alias : tuple of AliasEntry
    order : tuple of str
        The target's names in the order in which its optimizer was given them, where that differs from the
        source's (a flat buffer knows no names).
    """

    rename: tuple[RenameEntry, ...] = ()
    keep: tuple[KeepEntry, ...] = ()
    drop: tuple[DropEntry, ...] = ()
    fuse: tuple[FuseEntry, ...] = ()
    split: tuple[SplitEntry, ...] = ()
    stack: tuple[StackEntry, ...] = ()
    unstack: tuple[UnstackEntry, ...] = ()
    transpose: tuple[TransposeEntry, ...] = ()
    rotary: tuple[RotaryEntry, ...] = ()
    alias: tuple[AliasEntry, ...] = ()
    order: tuple[str, ...] = ()

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Every entry but the aliases, with its place in the document."""
        for table in _TABLES:
            for index, entry in enumerate(getattr(self, table)):
                yield f"{table}[{index}]", entry

    def normal(self) -> Pass:
        """The pass with every entry in its normal form."""
        return msgspec.structs.replace(
            self, **{table: tuple(e.normal() for e in getattr(self, table)) for table in _TABLES}
        )

    def inverse(self) -> Pass:
        """The pass that undoes this one; the source's own order is what it restores.

        Raises
        ------
        PatternError
            An entry cannot be turned around; all such entries are named.
        """
        turned: dict[str, list[Entry]] = {table: [] for table in _TABLES}
        tables: dict[type, str] = {cls: table for table, cls in _TABLES.items()}
        problems = []
        undone: list[tuple[str, Entry | AliasEntry]] = [*self.entries()]
        undone += [(f"alias[{i}]", entry) for i, entry in enumerate(self.alias)]
        for where, entry in undone:
            try:
                found = entry.inverse()
            except PatternError as error:
                problems.append(f"{where}: {error}")
            else:
                turned[tables[type(found)]].append(found)
        if self.order:
            problems.append("order: the order before it is not known.")
        if problems:
            raise PatternError(
                f"the mapping cannot be turned around: {listing(problems)}", kind=Kind.UNSUPPORTED
            )
        return Pass(**{table: tuple(entries) for table, entries in turned.items()})  # type: ignore[arg-type]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    version: str = VERSION
    passes: tuple[Pass, ...]


@dataclass(frozen=True)
class Mapping:
    """How the parameters of one model become those of another: renamed, fused, split, permuted.

    A mapping document is TOML or JSON; see the README and ``schemas/mapping.schema.json``. Every name of the
    source has to be taken by exactly one entry.

    Attributes
    ----------
    passes : tuple of Pass
        Applied one after the other.

    Examples
    --------
    >>> mapping = Mapping.from_toml('''
    ... [[rename]]
    ... from = "{n}.mlp.{rest**}"
    ... to = "layers.{n-3}.mlp.{rest}"
    ... ''')
    >>> mapping.inverse().to_json()["passes"]
    [{'rename': [{'from': 'layers.{n-3}.mlp.{rest**}', 'to': '{n}.mlp.{rest**}'}]}]
    """

    passes: tuple[Pass, ...]

    @classmethod
    def from_json(cls, document: Any, *, name: str = "mapping") -> Mapping:
        """Parse a document that was parsed from TOML or JSON.

        Parameters
        ----------
        document : dict
            With ``passes``, or the tables of a single pass.
        name : str
            Of the file, for messages.

        Raises
        ------
        PatternError
            It is no mapping document (``MALFORMED``); the message says where.
        FormatVersionError
        """
        if isinstance(document, dict) and "passes" not in document:
            rest = {key: value for key, value in document.items() if key != "version"}
            document = {"version": document.get("version", VERSION), "passes": [rest]}
        version = document.get("version", VERSION) if isinstance(document, dict) else VERSION
        if isinstance(version, str) and version.split(".")[0] != VERSION.split(".")[0]:
            raise FormatVersionError(
                f"{name} has format version {version!r}: expected {VERSION.split('.')[0]}.x."
            )
        try:
            found = msgspec.convert(document, _Document)
        except (msgspec.ValidationError, RecursionError) as error:
            raise PatternError(f"{name}: {error}.", kind=Kind.MALFORMED) from error
        return cls(tuple(one.normal() for one in found.passes))

    @classmethod
    def from_toml(cls, text: str, *, name: str = "mapping") -> Mapping:
        """Parse the text of a TOML document.

        Raises
        ------
        PatternError, FormatVersionError
            See `from_json`.
        """
        return cls.from_json(presets.parse_toml(text, name), name=name)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Mapping:
        """Read a local file: JSON if it is called so, else TOML.

        Raises
        ------
        PatternError, FormatVersionError
            See `from_json`; also where the file cannot be read.
        """
        name = os.fspath(path)
        try:
            with open(name, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise PatternError(
                f"mapping {name!r} cannot be read: {error}.", kind=Kind.NOT_FOUND
            ) from error
        if not name.endswith(".json"):
            return cls.from_toml(text, name=name)
        try:
            document = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise PatternError(f"{name} is no JSON: {error}.", kind=Kind.MALFORMED) from error
        return cls.from_json(document, name=name)

    @classmethod
    def preset(cls, name: str, **parameters: int) -> Mapping:
        """A mapping that comes with the package.

        Parameters
        ----------
        name : str
            One of `presets`.
        **parameters : int
            What it asks for: numbers of layers, heads, ...

        Raises
        ------
        PatternError
            There is no such preset, or parameters are missing or unknown.
        """
        return cls.from_json(presets.load(name, parameters), name=f"preset {name}")

    @staticmethod
    def presets() -> dict[str, str]:
        """Names of the presets, and what each is for."""
        return presets.descriptions()

    @property
    def digest(self) -> str:
        """``sha256:`` of the normal form."""
        encoded = msgspec.json.encode(self.to_json(), order="deterministic")
        return f"sha256:{hashlib.sha256(encoded).hexdigest()}"

    def to_json(self) -> dict[str, Any]:
        """The normal form as JSON values (``schemas/mapping.schema.json``)."""
        passes = msgspec.json.decode(msgspec.json.encode(self.passes))
        return {"version": VERSION, "passes": passes}

    def inverse(self) -> Mapping:
        """The mapping that undoes this one.

        Raises
        ------
        PatternError
            The document does not say enough for that (``UNSUPPORTED``).
        """
        return Mapping(tuple(one.inverse().normal() for one in reversed(self.passes)))

    def then(self, *others: Mapping) -> Mapping:
        """The mapping, followed by others."""
        return Mapping((*self.passes, *(one for other in others for one in other.passes)))

    def ordered(self, names: Sequence[str]) -> Mapping:
        """The same, with the target's names in the order in which its optimizer was given them.

        Parameters
        ----------
        names : sequence of str
            Such as the names of ``model.named_parameters()``.
        """
        if not self.passes:
            raise PatternError("a mapping without passes has no order.", kind=Kind.MALFORMED)
        last = msgspec.structs.replace(self.passes[-1], order=tuple(names))
        return Mapping((*self.passes[:-1], last))
