"""Python's own types in pickles, as data: containers, bytes, paths, dates, namespaces."""

from __future__ import annotations

import datetime
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Any

from ucpstore.formats._torch.machine import Handler, PickleMachine
from ucpstore.tagged import StubObject

__all__ = ["CALLS", "VALUES", "plain", "text_of", "tuple_of"]


def tuple_of(machine: PickleMachine, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``torch.Size`` and ``tuple``: a plain tuple."""
    (values,) = args or ((),)
    if type(values) not in (tuple, list):
        raise machine.corrupt(f"a tuple is made of a {type(values).__name__}")
    machine.spend(len(values))
    return tuple(values)


def _list(machine: PickleMachine, args: tuple[Any, ...]) -> list[Any]:
    """``list``, and ``deque`` with its capacity dropped."""
    return list(tuple_of(machine, args[:1]))


def _dict(machine: PickleMachine, args: tuple[Any, ...]) -> dict[Any, Any]:
    return dict(_pairs(machine, args))


def _ordered_dict(machine: PickleMachine, args: tuple[Any, ...]) -> OrderedDict[Any, Any]:
    return OrderedDict(_pairs(machine, args)) if args else OrderedDict()


def _pairs(machine: PickleMachine, args: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    (items,) = args or ((),)
    pairs = list(items.items()) if type(items) in (dict, OrderedDict) else _list(machine, (items,))
    machine.spend(len(pairs))
    if not all(type(pair) in (tuple, list) and len(pair) == 2 for pair in pairs):
        raise machine.corrupt("a dict is not made of pairs")
    return [(machine.as_key(key), value) for key, value in pairs]


def _defaultdict(machine: PickleMachine, args: tuple[Any, ...]) -> dict[Any, Any]:
    return _dict(machine, args[1:])


def _set(machine: PickleMachine, args: tuple[Any, ...]) -> set[Any]:
    return set(machine.as_keys(_list(machine, args)))


def _frozenset(machine: PickleMachine, args: tuple[Any, ...]) -> frozenset[Any]:
    return frozenset(machine.as_keys(_list(machine, args)))


def _bytes(machine: PickleMachine, args: tuple[Any, ...]) -> bytes:
    """``bytes()``, ``bytes(b"..")``, ``bytearray(text, "latin-1")``, ``_codecs.encode(text, "latin1")``."""
    data, *encoding = args or (b"",)
    if type(data) is str and encoding and encoding[0] in ("latin1", "latin-1"):
        machine.spend(len(data) // 64)
        return data.encode("latin-1")
    if type(data) not in (bytes, bytearray) or encoding:
        raise machine.corrupt(f"bytes are made of a {type(data).__name__}, expected latin-1 text")
    machine.spend(len(data) // 64)
    return bytes(data)


def _bytearray(machine: PickleMachine, args: tuple[Any, ...]) -> bytearray:
    return bytearray(_bytes(machine, args))


def _complex(machine: PickleMachine, args: tuple[Any, ...]) -> complex:
    real, imag = args
    return complex(float(real), float(imag))


def text_of(machine: PickleMachine, args: tuple[Any, ...]) -> str:
    (text,) = args
    if type(text) is not str:
        raise machine.corrupt(f"a text is made of a {type(text).__name__}")
    return text


def _path(machine: PickleMachine, args: tuple[Any, ...]) -> str:
    if not all(type(part) is str for part in args):
        raise machine.corrupt("a path is not made of strings")
    machine.spend(sum(map(len, args)) // 64)
    return str(PurePosixPath(*args))


def plain(module: str, qualname: str) -> Handler:
    """A small value that is kept as its class name and arguments."""
    return lambda machine, args: StubObject(module, qualname, args)


def _datetime(kind: type[datetime.datetime | datetime.date | datetime.time]) -> Handler:
    """Date and time: the text of ISO 8601 where the packed state is complete, else its arguments."""

    def handler(machine: PickleMachine, args: tuple[Any, ...]) -> StubObject:
        if len(args) == 1 and type(args[0]) is bytes:
            args = (kind(args[0]).isoformat(),)  # type: ignore[arg-type,call-arg]
        return StubObject("datetime", kind.__name__, args)

    return handler


CALLS: dict[str, Handler] = {
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _defaultdict,
    "collections.Counter": _dict,
    "collections.deque": _list,
    "builtins.list": _list,
    "builtins.dict": _dict,
    "builtins.tuple": tuple_of,
    "builtins.set": _set,
    "builtins.frozenset": _frozenset,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "builtins.slice": plain("builtins", "slice"),
    "builtins.range": plain("builtins", "range"),
    "_codecs.encode": _bytes,
    "argparse.Namespace": plain("argparse", "Namespace"),
    "types.SimpleNamespace": plain("types", "SimpleNamespace"),
    "datetime.datetime": _datetime(datetime.datetime),
    "datetime.date": _datetime(datetime.date),
    "datetime.time": _datetime(datetime.time),
    "datetime.timedelta": plain("datetime", "timedelta"),
    "datetime.timezone": plain("datetime", "timezone"),
    **{
        f"{module}.{name}Path": _path
        for module in ("pathlib", "pathlib._local")
        for name in ("", "Pure", "Posix", "PurePosix", "Windows", "PureWindows")
    },
}

VALUES = frozenset(f"builtins.{name}" for name in ("int", "float", "str", "bool", "object"))
