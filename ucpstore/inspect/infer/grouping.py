"""Which parameters answer for each other: numbered siblings of the same shapes."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ucpstore.inspect.infer.conventions import Hint, hint
from ucpstore.inspect.infer.views import RankViews

__all__ = ["Group", "Relatives", "group_names", "template_of"]

_Shape = tuple[int, ...]
_NUMBER = re.compile(r"0|[1-9]\d{0,8}")
_MAX_RELATIVES = 64
_VARIABLES = ("n", "m", "k")


def template_of(fqn: str) -> str | None:
    """The name with its numbers as variables; None where the language of templates cannot say it.

    Only numbers vary, so that two templates that are not equal never match the same name.

    Examples
    --------
    >>> template_of("model.layers.3.experts.0.w1.weight")
    'model.layers.{n}.experts.{m}.w1.weight'
    """
    if any(char in fqn for char in "*{}") or not fqn or len(fqn) > 500:
        return None
    count = 0
    segments = []
    for segment in fqn.split("."):
        if _NUMBER.fullmatch(segment):
            name = _VARIABLES[count] if count < len(_VARIABLES) else f"n{count + 1}"
            segments.append(f"{{{name}}}")
            count += 1
        else:
            segments.append(segment)
    return ".".join(segments)


@dataclass(frozen=True)
class Group:
    """Parameters that differ in numbers of their names only, in modules of the same shapes.

    Attributes
    ----------
    template : str or None
    members : tuple of str
    shapes : tuple of (tuple of int or None)
        Local shape on every rank, the same for all members.
    """

    template: str | None
    members: tuple[str, ...]
    shapes: tuple[_Shape | None, ...]

    @cached_property
    def hint(self) -> Hint | None:
        """What the names say."""
        return hint(self.members[0])

    @property
    def ndim(self) -> int:
        """Number of dims, on the first rank that holds it."""
        return next(len(shape) for shape in self.shapes if shape is not None)

    def only(self, names: Container[str]) -> Group:
        """The members among ``names``."""
        return replace(self, members=tuple(name for name in self.members if name in names))

    def local(self) -> list[_Shape]:
        """Shapes of the ranks that hold it."""
        return [shape for shape in self.shapes if shape is not None]


class Relatives:
    """Finds tensors of the same module and of neighbouring modules."""

    def __init__(self, views: RankViews) -> None:
        self._views = views
        self._modules: dict[str, list[str]] = {}
        self._kinds: dict[str, int] = {}
        self._blocks: dict[str, list[str]] = {}
        for fqn in views.names:
            module = fqn.rpartition(".")[0]
            self._modules.setdefault(module, []).append(fqn)
            self._blocks.setdefault(module.rpartition(".")[0], []).append(fqn)
        seen: dict[object, int] = {}
        for module, names in self._modules.items():
            kin = tuple((name.rpartition(".")[2], views.shapes(name)) for name in names)
            self._kinds[module] = seen.setdefault(kin, len(seen))

    def module(self, fqn: str) -> Sequence[str]:
        """All tensors of the parameter's module."""
        return self._modules[fqn.rpartition(".")[0]]

    def kind(self, fqn: str) -> int:
        """The same number for tensors in modules that hold tensors of the same names and shapes."""
        return self._kinds[fqn.rpartition(".")[0]]

    def weight(self, fqn: str) -> str | None:
        """The matrix that a vector belongs to: the only one of its module."""
        found = [name for name in _few(self.module(fqn)) if self._views.ndim(name) > 1]
        return found[0] if len(found) == 1 and found[0] != fqn else None

    def block(self, fqn: str) -> Sequence[str]:
        """Tensors of the parameter's module and of its direct neighbours, such as one MLP."""
        return _few(self._blocks[fqn.rpartition(".")[0].rpartition(".")[0]])


def _few(names: Sequence[str]) -> Sequence[str]:
    """The names, unless they are too many for one module: names without structure."""
    return names if len(names) <= _MAX_RELATIVES else ()


def group_names(views: RankViews, relatives: Relatives) -> list[Group]:
    """Group the parameters; the modules' shapes count, as ``{n}.weight`` may name all sorts of layers."""
    found: dict[object, list[str]] = {}
    for fqn in views.names:
        key = (template_of(fqn) or fqn, views.shapes(fqn), relatives.kind(fqn))
        found.setdefault(key, []).append(fqn)
    return [
        Group(template_of(members[0]), tuple(members), views.shapes(members[0]))
        for members in found.values()
    ]
