"""A pickle machine that builds plain data and cannot call anything but an allow-list of our own functions.

Python's own unpicklers are not used, since overriding ``find_class`` does not contain them: ``BUILD``
sets attributes of whatever is on the stack, ``REDUCE`` calls it, extension codes are resolved past the
override, ``LONG_BINPUT`` allocates gigabytes, and hashing a nested tuple as a key may take forever or
overflow the C stack. Here a global is only ever a `Symbol`, which is data; calls go through a table.

Opcodes: CPython ``Lib/pickletools.py``. Pickles written by Python 2 and 3, protocols 0 to 5.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from itertools import repeat
from typing import Any, Protocol

from ucpstore.errors import (
    CorruptSourceError,
    Kind,
    UnsafePickleError,
    UnsupportedSourceError,
)
from ucpstore.tagged import StubObject, Symbol

__all__ = [
    "MAX_OPCODES",
    "MAX_PICKLE",
    "Allowed",
    "Handler",
    "PickleMachine",
    "is_size",
    "name_of",
]

MAX_PICKLE = 256 << 20
"""Bytes that the pickled structure of one file may have. Tensors are not part of it."""

MAX_OPCODES = 10_000_000
"""Steps that one pickle may take; a checkpoint takes about 60 per tensor."""

_MAX_LINE = 4096
_MAX_INTEGER = 1024  # bytes
_MAX_ODD_KEYS = 10_000  # keys whose hashes an attacker could make collide
_MAX_KEY_NODES = 1_000


class Allowed(Protocol):
    """The allow-list."""

    def resolve(self, module: str, qualname: str) -> Symbol:
        """The symbol of a global, or `UnsafePickleError`."""

    def call(self, machine: PickleMachine, symbol: Symbol, args: tuple[Any, ...]) -> Any:
        """What calling the symbol stands for, or `UnsafePickleError`."""

    def persistent(self, machine: PickleMachine, pid: Any) -> Any:
        """What a persistent id stands for."""

    def build(self, machine: PickleMachine, target: Any, state: Any) -> None:
        """Give state to an object that is neither a dict nor a `StubObject`."""


class PickleMachine:
    """Runs pickles that follow each other in ``data``.

    Parameters
    ----------
    data : bytes
        The start of the pickles.
    where : str
        What the file is called in messages.
    more : callable, optional
        Called with a number of bytes, returns at least as many that follow ``data``, or raises.
    """

    def __init__(
        self,
        data: bytes,
        where: str,
        *,
        more: Callable[[int], bytes] | None = None,
    ) -> None:
        self.where = where
        self.position = 0
        self.warnings: list[str] = []
        self._data = data
        self._more = more
        self._allowed: Allowed
        self._budget = 0
        self._odd_keys = 0
        self._reset()

    def _reset(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def load(self, allowed: Allowed) -> Any:
        """Run one pickle and return what it builds.

        Raises
        ------
        CorruptSourceError
            The pickle is truncated, malformed, or exceeds a limit that no checkpoint needs.
        UnsafePickleError
            It asks for a global outside ``allowed``. Nothing was executed.
        UnsupportedSourceError
            It holds something that cannot be represented.
        """
        self._allowed = allowed
        self._budget = MAX_OPCODES
        self._odd_keys = 0
        self._reset()
        try:
            return self._run()
        except IndexError:
            raise self.corrupt("it takes a value from an empty stack") from None
        except KeyError:
            raise self.corrupt("it refers to a value that it did not store") from None
        except (
            ArithmeticError,
            AttributeError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
            struct.error,
        ) as error:
            raise self.corrupt(f"{type(error).__name__}: {str(error)[:200]}") from None
        finally:
            self._reset()

    def _run(self) -> Any:
        table = _TABLE
        for _ in repeat(None, MAX_OPCODES):
            start = self.position
            if start >= len(self._data):
                self._fill(1)
            code = self._data[start]
            self.position = start + 1
            if code == _STOP:
                value = self._stack.pop()
                if self._stack or self._marks:
                    raise self.corrupt("values are left over at its end")
                return value
            table[code](self)
        raise self.corrupt(f"it takes more than {MAX_OPCODES} steps")

    # ------------------------------------------------------------------ for handlers of the allow-list

    def corrupt(self, what: str, kind: Kind = Kind.MALFORMED) -> CorruptSourceError:
        """An error at the current position."""
        return CorruptSourceError(
            f"{self.where}: the pickle does not read at byte {self.position}: {what}.",
            kind=kind,
            hint="The file is damaged or was not written by torch.save.",
            file=self.where,
        )

    def unsupported(self, what: str) -> UnsupportedSourceError:
        """An error about something that is understood but cannot be kept."""
        return UnsupportedSourceError(f"{self.where}: {what}", file=self.where)

    def warn(self, what: str) -> None:
        """Note something that is left out (once each, at most 100)."""
        if len(self.warnings) < 100 and what not in self.warnings:
            self.warnings.append(what)

    def spend(self, amount: int) -> None:
        """Charge work that grows with the data: copies must not multiply."""
        self._budget -= amount
        if self._budget < 0:
            raise self.corrupt("it copies values more often than its limit allows")

    def as_key(self, key: Any) -> Any:
        """``key`` if it is safe to hash: not deep, huge, made to collide, or mutable.

        A member of an enum that was not loaded becomes a `Symbol`.
        """
        kind = type(key)
        if kind is str or kind is bytes or kind is float or kind is bool or kind is Symbol:
            return key
        if key is None or (kind is int and -(2**63) <= key < 2**64):
            return key
        if kind is StubObject and key.state is None and len(key.args) == 1:
            (value,) = key.args
            if type(value) is str or is_size(value):
                return Symbol(key.module, f"{key.qualname}({value!r})")
        self._odd_keys += 1
        if self._odd_keys > _MAX_ODD_KEYS:
            raise self.unsupported(f"more than {_MAX_ODD_KEYS} keys are tuples or large numbers")
        self._check_hash(key)
        return key

    def _check_hash(self, key: Any) -> None:
        pending, seen = [key], 0
        while pending:
            item = pending.pop()
            seen += 1
            if seen > _MAX_KEY_NODES:
                raise self.corrupt(f"a key has more than {_MAX_KEY_NODES} parts")
            if type(item) is tuple or type(item) is frozenset:
                pending.extend(item)
            elif type(item) not in _HASHABLE:
                raise self.unsupported(
                    f"a dict key or set element of type {type(item).__name__} cannot be kept: "
                    "expected strings, numbers, tuples of these"
                )

    # ------------------------------------------------------------------ input

    def _fill(self, need: int) -> None:
        """Make ``need`` bytes available at the position."""
        missing = self.position + need - len(self._data)
        if self._more is None:
            raise self.corrupt(f"it needs {missing} bytes past its end", Kind.TRUNCATED)
        if len(self._data) + missing > MAX_PICKLE:
            raise self.corrupt(f"it is longer than {MAX_PICKLE} bytes")
        self._data += self._more(missing)

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        start = self.position
        end = start + count
        if end > len(self._data):
            self._fill(count)
        self.position = end
        return self._data[start:end]

    def _line(self) -> bytes:
        start = self.position
        while True:
            end = self._data.find(b"\n", start, start + _MAX_LINE)
            if end >= 0:
                self.position = end + 1
                return self._data[start:end]
            if len(self._data) >= start + _MAX_LINE:
                raise self.corrupt(f"a line is longer than {_MAX_LINE} bytes")
            self._fill(len(self._data) - start + 1)

    def byte(self) -> int:
        """The next byte."""
        start = self.position
        if start >= len(self._data):
            self._fill(1)
        self.position = start + 1
        return self._data[start]

    def _number(self, layout: struct.Struct) -> Any:
        start = self.position
        if start + layout.size > len(self._data):
            self._fill(layout.size)
        self.position = start + layout.size
        return layout.unpack_from(self._data, start)[0]

    def _sized(self, layout: struct.Struct) -> bytes:
        return self.take(self._number(layout))

    # ------------------------------------------------------------------ stack

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Take the top of the stack."""
        return self._stack.pop()

    def op_mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def pop_mark(self) -> list[Any]:
        """Take everything above the last mark."""
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def op_pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.pop_mark()

    def op_dup(self) -> None:
        self._stack.append(self._stack[-1])

    def put(self, index: int) -> None:
        """Remember the top of the stack."""
        if index < 0:
            raise self.corrupt(f"memo index {index} is negative")
        self._memo[index] = self._stack[-1]

    def op_binput(self) -> None:
        self._memo[self.byte()] = self._stack[-1]

    def op_long_binput(self) -> None:
        self._memo[self._number(_U4)] = self._stack[-1]

    def op_memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, index: int) -> None:
        """Push what was remembered."""
        self._stack.append(self._memo[index])

    # ------------------------------------------------------------------ plain values

    def op_binunicode(self) -> None:
        self._stack.append(str(self._sized(_U4), "utf-8", "surrogatepass"))

    def op_integer(self) -> None:
        text = self._line()
        special = {b"00": False, b"01": True}.get(text)
        self._stack.append(_decimal(text) if special is None else special)

    def long(self, count: int) -> None:
        """Push a little-endian integer of ``count`` bytes."""
        if not 0 <= count <= _MAX_INTEGER:
            raise self.corrupt(f"an integer has {count} bytes, expected at most {_MAX_INTEGER}")
        self._stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def py2_string(self, data: bytes) -> None:
        """Push a Python 2 ``str``: text where it is UTF-8 (as torch.load reads it), else bytes."""
        try:
            self._stack.append(data.decode("utf-8"))
        except UnicodeDecodeError:
            self._stack.append(data)

    def op_proto(self) -> None:
        version = self.byte()
        if version > 5:
            raise self.corrupt(f"pickle protocol {version} is unknown, expected 0 to 5")

    def op_frame(self) -> None:
        self.take(8)  # a hint for buffered readers; the frame's content follows as usual

    # ------------------------------------------------------------------ containers

    def op_append(self) -> None:
        item = self._stack.pop()
        self._extend(self._stack[-1], [item])

    def op_appends(self) -> None:
        items = self.pop_mark()
        self._extend(self._stack[-1], items)

    def _extend(self, target: Any, items: list[Any]) -> None:
        if type(target) is StubObject:
            if target.contents is None:
                target.contents = []
            target = target.contents
        if type(target) is not list:
            raise self.corrupt(f"elements are appended to a {type(target).__name__}")
        target.extend(items)

    def op_setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items(self._stack[-1], [key, value])

    def op_setitems(self) -> None:
        items = self.pop_mark()
        self._set_items(self._stack[-1], items)

    def _set_items(self, target: Any, items: list[Any]) -> None:
        if len(items) % 2:
            raise self.corrupt("a key has no value")
        if type(target) is StubObject:
            if target.contents is None:
                target.contents = {}
            target = target.contents
        if type(target) is not dict and type(target) is not OrderedDict:
            raise self.corrupt(f"items are set on a {type(target).__name__}")
        for i in range(0, len(items), 2):
            key = items[i]
            target[key if type(key) is str else self.as_key(key)] = items[i + 1]

    def op_dict(self) -> None:
        items = self.pop_mark()
        target: dict[Any, Any] = {}
        self._set_items(target, items)
        self._stack.append(target)

    def op_additems(self) -> None:
        items = self.pop_mark()
        target = self._stack[-1]
        if type(target) is not set:
            raise self.corrupt(f"elements are added to a {type(target).__name__}")
        target.update(self.as_keys(items))

    def as_keys(self, items: list[Any]) -> list[Any]:
        """`as_key` of each."""
        return [self.as_key(item) for item in items]

    def op_frozenset(self) -> None:
        items = self.pop_mark()
        self._stack.append(frozenset(self.as_keys(items)))

    def top(self, count: int) -> None:
        """Replace the ``count`` topmost values by a tuple."""
        if len(self._stack) < count:
            raise self.corrupt(f"a tuple of {count} is made of {len(self._stack)} values")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    # ------------------------------------------------------------------ globals and calls

    def find(self, module: str, qualname: str) -> Symbol:
        """The symbol of a global of the allow-list."""
        if module == "__builtin__":  # Python 2's name, which protocol 2 still writes
            module, qualname = "builtins", _PYTHON2.get(qualname, qualname)
        return self._allowed.resolve(module, qualname)

    def op_global(self) -> None:
        module, qualname = self._line(), self._line()
        self._stack.append(self.find(module.decode("utf-8"), qualname.decode("utf-8")))

    def op_stack_global(self) -> None:
        qualname, module = self._stack.pop(), self._stack.pop()
        if type(module) is not str or type(qualname) is not str:
            raise self.corrupt("a global is not named by two strings")
        self._stack.append(self.find(module, qualname))

    def call(self, symbol: Any, args: Any) -> None:
        """Push what a call stands for."""
        if type(symbol) is not Symbol:
            raise UnsafePickleError(
                f"{self.where}: the pickle calls a value of type {type(symbol).__name__}; only globals "
                "of the allow-list can be called. Nothing was executed.",
                file=self.where,
            )
        if type(args) is not tuple:
            raise self.corrupt(f"arguments of {symbol} are a {type(args).__name__}")
        self._stack.append(self._allowed.call(self, symbol, args))

    def op_reduce(self) -> None:
        args = self._stack.pop()
        self.call(self._stack.pop(), args)

    def op_newobj_ex(self) -> None:
        kwargs, args, symbol = self._stack.pop(), self._stack.pop(), self._stack.pop()
        if type(kwargs) is not dict or kwargs:
            raise self.unsupported(f"{symbol} is created with keyword arguments")
        self.call(symbol, args)

    def op_obj(self) -> None:
        symbol, *args = self.pop_mark()
        self.call(symbol, tuple(args))

    def op_inst(self) -> None:
        args = self.pop_mark()
        module, qualname = self._line(), self._line()
        self.call(self.find(module.decode("utf-8"), qualname.decode("utf-8")), tuple(args))

    def op_binpersid(self) -> None:
        self._stack.append(self._allowed.persistent(self, self._stack.pop()))

    def op_build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is StubObject:
            target.state = state if target.state is None else (target.state, state)
        elif type(target) is OrderedDict and type(state) in (dict, OrderedDict):
            for key, value in state.items():
                if (
                    key == "_metadata"
                ):  # torch.nn.Module.state_dict keeps the modules' versions here
                    target._metadata = value  # type: ignore[attr-defined]
                else:
                    name = key[:80] if type(key) is str else type(key).__name__
                    self.warn(f"attribute {name!r} of an OrderedDict was left out")
        else:
            self._allowed.build(self, target, state)

    def op_extension(self) -> None:
        raise UnsafePickleError(
            f"{self.where}: the pickle asks for a global by an extension code (opcode "
            f"0x{self._data[self.position - 1]:02x}); only globals of the allow-list by name are "
            "read. Nothing was executed.",
            file=self.where,
        )

    def op_buffer(self) -> None:
        raise self.unsupported(
            "the pickle refers to out-of-band buffers, which are not in the file"
        )

    def op_unknown(self) -> None:
        raise self.corrupt(f"opcode 0x{self._data[self.position - 1]:02x} is unknown")


Handler = Callable[[PickleMachine, tuple[Any, ...]], Any]
"""What a global of the allow-list does with its arguments when the pickle calls it."""

_STOP = ord(".")
_PYTHON2 = {"long": "int", "unicode": "str", "xrange": "range"}
_U1, _U2, _U4, _U8 = (struct.Struct(f"<{code}") for code in "BHIQ")
_I4 = struct.Struct("<i")
_DOUBLE = struct.Struct(">d")
_HASHABLE = (str, bytes, int, float, bool, complex, type(None), Symbol)


def _decimal(text: bytes) -> int:
    if len(text) > _MAX_INTEGER:
        raise ValueError(f"an integer has {len(text)} digits")
    return int(text.rstrip(b"L"))


def _push_new(make: Callable[[], Any]) -> Callable[[PickleMachine], None]:
    return lambda m: m.push(make())


_HANDLERS: dict[bytes, Callable[[PickleMachine], None]] = {
    b"(": PickleMachine.op_mark,
    b"0": PickleMachine.op_pop,
    b"1": lambda m: m.pop_mark().clear(),
    b"2": PickleMachine.op_dup,
    # memo
    b"p": lambda m: m.put(_decimal(m._line())),
    b"q": PickleMachine.op_binput,
    b"r": PickleMachine.op_long_binput,
    b"\x94": PickleMachine.op_memoize,
    b"g": lambda m: m.get(_decimal(m._line())),
    b"h": lambda m: m.get(m.byte()),
    b"j": lambda m: m.get(m._number(_U4)),
    # plain values
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"I": PickleMachine.op_integer,
    b"J": lambda m: m.push(m._number(_I4)),
    b"K": lambda m: m.push(m.byte()),
    b"M": lambda m: m.push(m._number(_U2)),
    b"L": lambda m: m.push(_decimal(m._line())),
    b"\x8a": lambda m: m.long(m._number(_U1)),
    b"\x8b": lambda m: m.long(m._number(_I4)),
    b"F": lambda m: m.push(float(m._line())),
    b"G": lambda m: m.push(m._number(_DOUBLE)),
    b"T": lambda m: m.py2_string(m._sized(_U4)),
    b"U": lambda m: m.py2_string(m._sized(_U1)),
    b"B": lambda m: m.push(m._sized(_U4)),
    b"C": lambda m: m.push(m._sized(_U1)),
    b"\x8e": lambda m: m.push(m._sized(_U8)),
    b"\x96": lambda m: m.push(bytearray(m._sized(_U8))),
    b"V": lambda m: m.push(str(m._line(), "raw-unicode-escape")),
    b"X": PickleMachine.op_binunicode,
    b"\x8c": lambda m: m.push(str(m._sized(_U1), "utf-8", "surrogatepass")),
    b"\x8d": lambda m: m.push(str(m._sized(_U8), "utf-8", "surrogatepass")),
    # containers
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push(tuple(m.pop_mark())),
    b"\x85": lambda m: m.top(1),
    b"\x86": lambda m: m.top(2),
    b"\x87": lambda m: m.top(3),
    b"]": _push_new(list),
    b"l": lambda m: m.push(m.pop_mark()),
    b"a": PickleMachine.op_append,
    b"e": PickleMachine.op_appends,
    b"}": _push_new(dict),
    b"d": PickleMachine.op_dict,
    b"s": PickleMachine.op_setitem,
    b"u": PickleMachine.op_setitems,
    b"\x8f": _push_new(set),
    b"\x90": PickleMachine.op_additems,
    b"\x91": PickleMachine.op_frozenset,
    # globals and calls
    b"c": PickleMachine.op_global,
    b"\x93": PickleMachine.op_stack_global,
    b"R": PickleMachine.op_reduce,
    b"\x81": PickleMachine.op_reduce,  # NEWOBJ: the same stack, and no constructor is run here anyway
    b"\x92": PickleMachine.op_newobj_ex,
    b"o": PickleMachine.op_obj,
    b"i": PickleMachine.op_inst,
    b"b": PickleMachine.op_build,
    b"Q": PickleMachine.op_binpersid,
    b"\x82": PickleMachine.op_extension,
    b"\x83": PickleMachine.op_extension,
    b"\x84": PickleMachine.op_extension,
    # framing
    b"\x80": PickleMachine.op_proto,
    b"\x95": PickleMachine.op_frame,
    b"\x97": PickleMachine.op_buffer,
    b"\x98": PickleMachine.op_buffer,
}

_TABLE: tuple[Callable[[PickleMachine], None], ...] = tuple(
    _HANDLERS.get(bytes([code]), PickleMachine.op_unknown) for code in range(256)
)


def name_of(value: Any) -> str:
    """Name of a symbol; of anything else only the type, since printing it could take forever."""
    return str(value)[:200] if type(value) is Symbol else f"<{type(value).__name__}>"


def is_size(value: Any) -> bool:
    """An integer that can be a size or an offset."""
    return type(value) is int and 0 <= value < 2**63
