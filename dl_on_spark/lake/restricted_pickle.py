"""A pickle as plain data: no name in it is imported, nothing is called.

Python's own unpickler runs whatever a pickle names. Here the opcodes are read one by one (`pickletools`) on a
stack of our own: a name becomes a `Global`, an object an `Instance` of one, and a name that the caller does not
allow is refused before anything is made of it. `dump` writes the same values so that an unpickler makes the objects.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_MARK = object()
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict}
_SMALL_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET = {"GET", "BINGET", "LONG_BINGET"}
# Opcodes whose argument is the value itself.
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES"),
}


class PickleError(ValueError):
    """The pickle is damaged, or names or does what is not allowed."""


@dataclass(frozen=True)
class Global:
    """A class or function by name; never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass
class Instance:
    """What calling or instantiating ``of`` with ``args`` would make; ``state`` is what it would get after, ``items``
    what would be set in it as in a dict."""

    of: Global
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


def load(data: bytes, allowed: Callable[[Global], bool]) -> Any:
    """The one value of a pickle of any protocol.

    Raises `PickleError` naming the first name that is not `allowed`, or the opcode that plain data does not need.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                (value,) = stack
                return value
            _step(opcode.name, argument, stack, memo, allowed)
    except PickleError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, UnicodeDecodeError, AttributeError) as error:
        raise PickleError(f"it is damaged ({error})") from error
    raise PickleError("it is damaged (no end)")


def _step(name: str, argument: Any, stack: list[Any], memo: dict[int, Any], allowed: Callable[[Global], bool]) -> None:
    if name in {"PROTO", "FRAME"}:
        return
    if name in _LITERALS:
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name == "MARK":
        stack.append(_MARK)
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in _PUT:
        memo[int(argument)] = stack[-1]
    elif name in _GET:
        stack.append(memo[int(argument)])
    elif name in _SMALL_TUPLES:
        stack.append(tuple(_pop(stack, _SMALL_TUPLES[name])))
    elif name == "TUPLE":
        stack.append(tuple(_pop_to_mark(stack)))
    elif name == "LIST":
        stack.append(_pop_to_mark(stack))
    elif name == "DICT":
        stack.append(_pairs(_pop_to_mark(stack)))
    elif name in {"APPEND", "APPENDS"}:
        values = _pop(stack, 1) if name == "APPEND" else _pop_to_mark(stack)
        stack[-1].extend(values)
    elif name in {"SETITEM", "SETITEMS"}:
        pairs = _pairs(_pop(stack, 2) if name == "SETITEM" else _pop_to_mark(stack))
        target = stack[-1]
        (target.items if isinstance(target, Instance) else target).update(pairs)
    elif name in {"GLOBAL", "STACK_GLOBAL"}:
        module, _, attribute = argument.partition(" ") if name == "GLOBAL" else (stack[-2], "", stack[-1])
        if name == "STACK_GLOBAL":
            _pop(stack, 2)
        stack.append(_checked(Global(str(module), str(attribute)), allowed))
    elif name in {"NEWOBJ", "REDUCE"}:
        of, args = _pop(stack, 2)
        if not isinstance(of, Global) or not isinstance(args, tuple):
            raise PickleError(f"it is damaged ({name} of what is no class)")
        stack.append(Instance(of, args))
    elif name == "BUILD":
        (state,) = _pop(stack, 1)
        if isinstance(stack[-1], Instance):
            stack[-1].state = state
        else:
            raise PickleError("it is damaged (BUILD of what is no object)")
    else:
        raise PickleError(f"it uses the opcode {name}, which plain data does not need")


def _checked(found: Global, allowed: Callable[[Global], bool]) -> Global:
    if not allowed(found):
        raise PickleError(f"it names {found}")
    return found


def _pop(stack: list[Any], count: int) -> list[Any]:
    if count > len(stack) or any(value is _MARK for value in stack[-count:]):
        raise PickleError("it is damaged (values are missing)")
    found = stack[-count:]
    del stack[-count:]
    return found


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1
    while stack[at] is not _MARK:  # IndexError below the bottom: damaged
        at -= 1
    found = stack[at + 1 :]
    del stack[at:]
    return found


def _pairs(values: list[Any]) -> dict[Any, Any]:
    return dict(zip(values[::2], values[1::2], strict=True))


def dump(value: Any) -> bytes:
    """A pickle (protocol 2) of nested values: `Instance`, `Global`, text, int, bool, None, tuple, dict."""
    return b"\x80\x02" + b"".join(_opcodes(value)) + b"."


def _opcodes(value: Any) -> list[bytes]:
    if value is None:
        return [b"N"]
    if isinstance(value, bool):
        return [b"\x88" if value else b"\x89"]
    if isinstance(value, int):
        return [b"J", struct.pack("<i", value)]
    if isinstance(value, str):
        text = value.encode("utf-8")
        return [b"X", struct.pack("<I", len(text)), text]
    if isinstance(value, tuple):
        return [b"(", *(code for each in value for code in _opcodes(each)), b"t"]
    if isinstance(value, dict):
        return [b"}", *_items(value)]
    if isinstance(value, Global):
        return [b"c", f"{value.module}\n{value.name}\n".encode("ascii")]
    if isinstance(value, Instance):
        # A class is instantiated (NEWOBJ); one that takes items is called without arguments (REDUCE), as OrderedDict.
        made = [*_opcodes(value.of), *_opcodes(value.args), b"R" if value.items else b"\x81"]
        state = [] if value.state is None else [*_opcodes(value.state), b"b"]
        return [*made, *_items(value.items), *state]
    raise TypeError(f"no plain value: {type(value).__name__}")


def _items(values: dict[Any, Any]) -> list[bytes]:
    pairs = [code for key, value in values.items() for each in (key, value) for code in _opcodes(each)]
    return [b"(", *pairs, b"u"] if pairs else []
