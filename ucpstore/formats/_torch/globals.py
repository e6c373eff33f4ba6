"""The allow-list: globals that a ``torch.save`` file may name, and the inert value that each stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ucpstore.errors import UnsafePickleError
from ucpstore.formats._torch import rebuild_numpy, rebuild_python, rebuild_torch
from ucpstore.formats._torch.machine import PickleMachine
from ucpstore.formats._torch.rebuild_torch import Storages
from ucpstore.formats._torch.refs import TensorRef
from ucpstore.tagged import NumpyArray, StubObject, Symbol

__all__ = ["Globals"]

_CALLS = {**rebuild_torch.CALLS, **rebuild_python.CALLS, **rebuild_numpy.CALLS}
_VALUES = rebuild_torch.VALUES | rebuild_python.VALUES | rebuild_numpy.VALUES
_UNSUPPORTED = rebuild_torch.UNSUPPORTED


class Globals:
    """The allow-list of one file (`ucpstore.formats._torch.machine.Allowed`).

    Parameters
    ----------
    where : str
        What the file is called in messages.
    storages : Storages, optional
        Without it the pickle may not name a global or a storage at all.
    stubs, stub_prefixes
        See `ucpstore.formats.torchfile.index_torch_file`.
    """

    def __init__(
        self,
        where: str,
        storages: Storages | None = None,
        *,
        stubs: Mapping[str, Callable[..., Any] | None] | None = None,
        stub_prefixes: Iterable[str] = (),
    ) -> None:
        self._where = where
        self._storages = storages
        self._stubs = dict(stubs or {})
        self._prefixes = tuple(prefix.rstrip(".") for prefix in stub_prefixes)
        self._known: dict[tuple[str, str], Symbol] = {}

    def resolve(self, module: str, qualname: str) -> Symbol:
        """The symbol of a global, or `UnsafePickleError`."""
        symbol = self._known.get((module, qualname))
        if symbol is None:
            name = f"{module}.{qualname}"
            allowed = (
                name in self._stubs or name in _CALLS or name in _VALUES or name in _UNSUPPORTED
            )
            if self._storages is None or not (allowed or self._is_stub(module)):
                raise UnsafePickleError(
                    f"{self._where}: the pickle asks for the global {name[:200]!r}, which is not on the "
                    "allow-list. Nothing was executed.",
                    hint="If it is a class that only holds data, name it as a stub.",
                    file=self._where,
                    name=name[:200],
                )
            symbol = self._known[module, qualname] = Symbol(module, qualname)
        return symbol

    def _is_stub(self, module: str) -> bool:
        return any(module == prefix or module.startswith(prefix + ".") for prefix in self._prefixes)

    def call(self, machine: PickleMachine, symbol: Symbol, args: tuple[Any, ...]) -> Any:
        """What calling ``symbol`` stands for, or `UnsafePickleError`."""
        name = str(symbol)
        if name in self._stubs:
            factory = self._stubs[name]
            if factory is not None:
                return factory(*args)
            return StubObject(symbol.module, symbol.qualname, args)
        handler = _CALLS.get(name)
        if handler is not None:
            return handler(machine, args)
        if name in _UNSUPPORTED:
            raise machine.unsupported(
                f"it holds {_UNSUPPORTED[name]} ({name}), which has no plain elements to read"
            )
        if self._is_stub(symbol.module):
            return StubObject(symbol.module, symbol.qualname, args)
        raise UnsafePickleError(
            f"{self._where}: the pickle calls {name[:200]!r}, which is allowed as a value only. "
            "Nothing was executed.",
            file=self._where,
            name=name[:200],
        )

    def persistent(self, machine: PickleMachine, pid: Any) -> Any:
        """What a persistent id stands for."""
        if self._storages is None:
            raise machine.corrupt("a persistent id is out of place")
        return self._storages.persistent(machine, pid)

    def build(self, machine: PickleMachine, target: Any, state: Any) -> None:
        """Give state to a `NumpyArray`; nothing else takes any."""
        if type(target) is NumpyArray:
            rebuild_numpy.build(machine, target, state)
        elif type(target) is TensorRef:
            machine.warn("state of a tensor was left out")
        else:
            raise UnsafePickleError(
                f"{self._where}: the pickle sets attributes of a {type(target).__name__}; only inert "
                "stand-ins take attributes. Nothing was executed.",
                file=self._where,
            )
