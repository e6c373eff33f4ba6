"""The entries of a mapping document: what each matches, what it makes, and its inverse.

Field names are those of the document (``schemas/mapping.schema.json``), but ``from``, a word of Python's, is
``source`` here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Literal, Self

import msgspec

from ucpstore.errors import Kind, PatternError
from ucpstore.layout.names import Template
from ucpstore.mapping.transforms import (
    Fuse,
    Identity,
    Rotary,
    Split,
    Stack,
    Transform,
    Transpose,
    Unstack,
)

__all__ = [
    "AliasEntry",
    "DropEntry",
    "Entry",
    "FuseEntry",
    "KeepEntry",
    "RenameEntry",
    "RotaryEntry",
    "SplitEntry",
    "StackEntry",
    "TransposeEntry",
    "UnstackEntry",
    "template",
]

_VARIABLE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\**([+-]\d+)?\}")
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Dim = Annotated[int, msgspec.Meta(ge=0, le=31)]
_Members = Annotated[tuple[str, ...], msgspec.Meta(min_length=2)]
_Ratio = Annotated[tuple[_Count, ...], msgspec.Meta(min_length=2)]


@lru_cache(maxsize=4096)
def template(text: str) -> Template:
    """`Template`, parsed once."""
    return Template(text)


class Entry(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """An entry: templates of the names that it takes, and of those that it makes.

    Attributes
    ----------
    optional : bool
        The entry may match nothing.
    """

    optional: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """Templates of source names; a name that matches one is this entry's."""
        raise NotImplementedError

    @property
    def targets(self) -> tuple[str, ...]:
        """Templates of target names."""
        raise NotImplementedError

    @property
    def over(self) -> str | None:
        """Variable that numbers siblings, on one side only."""
        return None

    @property
    def keeps_name(self) -> bool:
        """Whether the target has the name that matched; then wildcards need no names."""
        return False

    def transform(self, index: int = 0) -> Transform:
        """How target ``index`` is made of its members."""
        raise NotImplementedError

    def normal(self) -> Entry:
        """The entry in its shortest form; equal entries have equal ones."""
        return self

    def inverse(self) -> Entry:
        """The entry that undoes this one.

        Raises
        ------
        PatternError
            The document does not say enough for that (``UNSUPPORTED``).
        """
        raise NotImplementedError

    def _check_names(self, extra: str | None = None) -> None:
        """Every variable of a target is one of every source; ``extra`` is on one side only."""
        made = [template(text) for text in self.targets]
        taken = [template(text) for text in self.sources]
        for target in made:
            if not (target.is_invertible or self.keeps_name):
                raise ValueError(f"{target}: found an unnamed wildcard in a name to be made")
            for source in taken:
                lacks = target.variables - source.variables - {extra}
                if lacks:
                    raise ValueError(
                        f"{target} has {', '.join(sorted(lacks))}, which {source} lacks"
                    )
        for texts in (taken, made):
            if any(one.variables != texts[0].variables for one in texts):
                raise ValueError(f"{', '.join(map(str, texts))} have different variables")

    def _turned(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Templates of the inverse: (sources, targets)."""
        sources, targets = self.sources, self.targets
        extra = {self.over} - {None}
        ours = template(sources[0])
        if (
            not all(template(text).is_invertible for text in sources)
            or (ours.variables ^ template(targets[0]).variables) - extra
        ):
            raise PatternError(
                f"{', '.join(sources)} -> {', '.join(targets)} cannot be turned around: names that match cannot be"
                " made again.",
                hint="Give every wildcard a name, and use it on both sides.",
                kind=Kind.UNSUPPORTED,
            )
        kinds = {hole.name: hole.kind for hole in ours.holes}

        def typed(text: str) -> str:
            return _VARIABLE.sub(
                lambda m: "{" + m[1] + kinds.get(m[1], "") + (m[2] or "") + "}", text
            )

        return tuple(map(typed, targets)), sources


class _OneToOne(Entry, frozen=True, kw_only=True):
    """One parameter to one."""

    source: str = msgspec.field(name="from")
    to: str | None = None

    def __post_init__(self) -> None:
        self._check_names()

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.source if self.to is None else self.to,)

    @property
    def keeps_name(self) -> bool:
        return self.to is None

    def normal(self) -> Self:
        return msgspec.structs.replace(self, to=None) if self.to == self.source else self

    def _back(self) -> tuple[str, str | None]:
        """``from`` and ``to`` of the inverse."""
        if self.to is None:
            return self.source, None
        (source,), (target,) = self._turned()
        return source, target


class RenameEntry(_OneToOne, frozen=True, kw_only=True):
    """``[[rename]]``: another name."""

    to: str

    def normal(self) -> Self:
        return self

    def transform(self, index: int = 0) -> Transform:
        return Identity()

    def inverse(self) -> RenameEntry:
        (source,), (target,) = self._turned()
        return RenameEntry(source=source, to=target, optional=self.optional)


class _Named(Entry, frozen=True, kw_only=True):
    """Names that stay, or go."""

    name: str

    def __post_init__(self) -> None:
        template(self.name)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.name,)


class KeepEntry(_Named, frozen=True, kw_only=True):
    """``[[keep]]``: as it is."""

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def keeps_name(self) -> bool:
        return True

    def transform(self, index: int = 0) -> Transform:
        return Identity()

    def inverse(self) -> KeepEntry:
        return self


class DropEntry(_Named, frozen=True, kw_only=True):
    """``[[drop]]``: explicitly left out."""

    @property
    def targets(self) -> tuple[str, ...]:
        return ()

    def inverse(self) -> Entry:
        raise PatternError(
            f"drop {self.name} cannot be turned around: what it leaves out is lost.",
            kind=Kind.UNSUPPORTED,
        )


class TransposeEntry(_OneToOne, frozen=True, kw_only=True):
    """``[[transpose]]``: dims in another order."""

    dims: tuple[_Dim, ...] = (1, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if sorted(self.dims) != list(range(len(self.dims))):
            raise ValueError(f"dims {list(self.dims)}: expected every dim from 0 once")

    def transform(self, index: int = 0) -> Transform:
        return Transpose(self.dims)

    def inverse(self) -> TransposeEntry:
        source, target = self._back()
        dims = tuple(self.dims.index(d) for d in range(len(self.dims)))
        return TransposeEntry(source=source, to=target, dims=dims, optional=self.optional)


class RotaryEntry(_OneToOne, frozen=True, kw_only=True):
    """``[[rotary]]``: rows of heads from pairs to halves, or back; see `Rotary`."""

    heads: _Count
    layout: Literal["halves", "pairs"]
    rotary_dim: _Count | None = None

    def transform(self, index: int = 0) -> Transform:
        return Rotary(self.heads, self.layout, self.rotary_dim)

    def inverse(self) -> RotaryEntry:
        source, target = self._back()
        layout: Literal["halves", "pairs"] = "pairs" if self.layout == "halves" else "halves"
        return RotaryEntry(
            source=source,
            to=target,
            heads=self.heads,
            layout=layout,
            rotary_dim=self.rotary_dim,
            optional=self.optional,
        )


class _Fusion(Entry, frozen=True, kw_only=True):
    """What `fuse` and `split` share: how the members lie in the fused tensor.

    ``heads``, ``kv_heads`` and ``head_dim`` are short for query, key and value in groups: per key-value head its
    query heads, then the key, then the value.
    """

    dim: _Dim = 0
    groups: _Count = 1
    ratio: _Ratio | None = None
    unit: _Count | None = None
    heads: _Count | None = None
    kv_heads: _Count | None = None
    head_dim: _Count | None = None

    def _members(self) -> Sequence[str]:
        raise NotImplementedError

    def __post_init__(self) -> None:
        self._check_names()
        count = len(self._members())
        if self.heads is None:
            if (self.kv_heads, self.head_dim) != (None, None):
                raise ValueError("kv_heads and head_dim are only said with heads")
        elif (self.groups, self.ratio, self.unit) != (1, None, None):
            raise ValueError("heads say what groups, ratio and unit would: give one or the other")
        elif count != 3:
            raise ValueError(f"heads are of query, key and value: found {count} members")
        elif self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"{self.heads} heads are no multiple of {self.kv_heads} kv_heads")
        if self.ratio is not None and len(self.ratio) != count:
            raise ValueError(f"ratio has {len(self.ratio)} numbers, there are {count} members")
        if self.unit is not None and self.ratio is None:
            raise ValueError("unit is what 1 in the ratio stands for: there is no ratio")

    def normal(self) -> Self:
        if self.heads is None:
            return self
        kv_heads = self.kv_heads or self.heads
        return msgspec.structs.replace(
            self,
            groups=kv_heads,
            ratio=(self.heads // kv_heads, 1, 1),
            unit=self.head_dim,
            heads=None,
            kv_heads=None,
            head_dim=None,
        )


class FuseEntry(_Fusion, frozen=True, kw_only=True):
    """``[[fuse]]``: several parameters become one, along a dim."""

    source: _Members = msgspec.field(name="from")
    to: str

    def _members(self) -> Sequence[str]:
        return self.source

    @property
    def sources(self) -> tuple[str, ...]:
        return self.source

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.to,)

    def transform(self, index: int = 0) -> Transform:
        entry = self.normal()
        return Fuse(entry.dim, entry.groups, entry.ratio, entry.unit)

    def inverse(self) -> SplitEntry:
        entry = self.normal()
        (source,), targets = self._turned()
        if entry.ratio is None:
            raise PatternError(
                f"fuse to {self.to} cannot be turned around: it does not say how large its members are.",
                hint="Give ratio, such as [1, 1].",
                kind=Kind.UNSUPPORTED,
            )
        return SplitEntry(
            source=source,
            to=targets,
            dim=entry.dim,
            groups=entry.groups,
            ratio=entry.ratio,
            unit=entry.unit,
            optional=entry.optional,
        )


class SplitEntry(_Fusion, frozen=True, kw_only=True):
    """``[[split]]``: one parameter becomes several; the ratio has to be said."""

    source: str = msgspec.field(name="from")
    to: _Members

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio is None and self.heads is None:
            raise ValueError(
                f"{self.source}: how large the members are is not said: give ratio or heads"
            )

    def _members(self) -> Sequence[str]:
        return self.to

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def targets(self) -> tuple[str, ...]:
        return self.to

    def transform(self, index: int = 0) -> Transform:
        entry = self.normal()
        return Split(index, entry.ratio or (), entry.dim, entry.groups, entry.unit)

    def inverse(self) -> FuseEntry:
        entry = self.normal()
        sources, (target,) = self._turned()
        return FuseEntry(
            source=sources,
            to=target,
            dim=entry.dim,
            groups=entry.groups,
            ratio=entry.ratio,
            unit=entry.unit,
            optional=entry.optional,
        )


class _Siblings(Entry, frozen=True, kw_only=True):
    """Numbered siblings, and the variable that numbers them."""

    source: str = msgspec.field(name="from")
    to: str
    variable: str = msgspec.field(name="over")

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.to,)

    @property
    def over(self) -> str | None:
        return self.variable

    def _check_over(self, many: str, one: str) -> None:
        self._check_names(self.variable)
        numbers = {hole.name for hole in template(many).holes if hole.kind == ""}
        if self.variable not in numbers or self.variable in template(one).variables:
            raise ValueError(
                f"over {self.variable!r}: expected a number of {many}, and not of {one}"
            )


class StackEntry(_Siblings, frozen=True, kw_only=True):
    """``[[stack]]``: siblings numbered from 0 become one parameter with a leading dim."""

    def __post_init__(self) -> None:
        self._check_over(self.source, self.to)
        if not template(self.source).is_invertible:
            raise ValueError(f"{self.source}: found an unnamed wildcard in the names of siblings")

    def transform(self, index: int = 0) -> Transform:
        return Stack()

    def inverse(self) -> UnstackEntry:
        (source,), (target,) = self._turned()
        return UnstackEntry(
            source=source, to=target, variable=self.variable, optional=self.optional
        )


class UnstackEntry(_Siblings, frozen=True, kw_only=True):
    """``[[unstack]]``: every index of the leading dim becomes a parameter."""

    def __post_init__(self) -> None:
        self._check_over(self.to, self.source)

    def transform(self, index: int = 0) -> Transform:
        return Unstack(index)

    def inverse(self) -> StackEntry:
        (source,), (target,) = self._turned()
        return StackEntry(source=source, to=target, variable=self.variable, optional=self.optional)


class AliasEntry(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """``[[alias]]``: one more name of a target parameter."""

    name: str
    of: str

    def inverse(self) -> DropEntry:
        """The entry that takes the name away again."""
        if not template(self.name).is_literal:
            raise PatternError(f"alias {self.name}: expected a plain name.", kind=Kind.MALFORMED)
        return DropEntry(name=self.name)
