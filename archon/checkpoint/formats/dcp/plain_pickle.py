"""Parse pickles as plain data: nothing is imported or called.

A stack machine executes the few opcodes of pickled dictionaries, lists, tuples, numbers, strings and dataclasses
(protocols 2 to 5, see CPython's `pickletools`). The name of a class or function becomes a `GlobalName`, a call becomes
a `Record` of name, arguments and state. Only names in an allow-list are accepted. Memory is proportional to the size of
the pickle.
"""

from __future__ import annotations

import os
import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from archon.checkpoint.safetensors_file import fail


@dataclass(frozen=True)
class GlobalName:
    """Dotted name of a class or function; never imported."""

    name: str


class PickledDict:
    """Items of a pickled dictionary; keys may be of any kind and are not hashed."""

    def __init__(self) -> None:
        self.items: list[tuple[Any, Any]] = []


class Record:
    """A call or an instance in a pickle.

    Attributes:
        name: dotted name of the class or function; `persistent` for a reference outside the pickle.
        args: the arguments.
        state: the state of the instance, if any.
    """

    def __init__(self, name: str, args: Any) -> None:
        self.name, self.args = name, args
        self.state: Any = None


PERSISTENT = "persistent"


class _Mark:
    """Start of a container's items on the stack."""


class _Unpickler:
    """Stack and memo of one pickle; `step` executes an opcode."""

    def __init__(self, allowed: Collection[str]) -> None:
        self.allowed = allowed
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, opcode: str, argument: Any) -> None:
        if opcode in _VALUES:
            self.stack.append(_VALUES[opcode] if argument is None else argument)
            return
        if opcode not in _STEPS:
            raise ValueError(f"it has the opcode {opcode}, which no pickle of plain data needs")
        _STEPS[opcode](self, argument)

    def pop(self, kind: type | None = None) -> Any:
        value = self.stack.pop()
        if isinstance(value, _Mark) or (kind is not None and not isinstance(value, kind)):
            raise ValueError(f"a {type(value).__name__} has the wrong type here")
        return value

    def top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"a {type(self.stack[-1]).__name__} cannot be filled like a {kind.__name__}")
        return self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        values: list[Any] = []
        while not isinstance(self.stack[-1], _Mark):
            values.append(self.stack.pop())
        self.stack.pop()
        return values[::-1]

    def global_name(self, name: str) -> None:
        if name not in self.allowed:
            raise ValueError(f"it names {name!r}, which is not among the names that are allowed there")
        self.stack.append(GlobalName(name))

    def stack_global(self, _: Any) -> None:
        name = self.pop(str)
        self.global_name(f"{self.pop(str)}.{name}")

    def reduce(self, _: Any) -> None:
        arguments = self.pop(tuple)
        self.stack.append(Record(self.pop(GlobalName).name, arguments))

    def build(self, _: Any) -> None:
        state = self.pop()
        record = self.top(Record)
        if record.state is not None:
            raise ValueError("it sets the state of an object twice")
        record.state = state

    def extend(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise ValueError("a dictionary has a key without a value")
        self.top(PickledDict).items.extend(zip(values[::2], values[1::2], strict=True))

    def build_tuple(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self.stack.append(tuple(values[::-1]))

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]


# Opcodes that push a value: a constant, or their argument.
_VALUES: dict[str, Any] = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")),
}
_STEPS: dict[str, Callable[[_Unpickler, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "STOP": lambda machine, _: None,
    "MARK": lambda machine, _: machine.stack.append(_Mark()),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append(PickledDict()),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.build_tuple(1),
    "TUPLE2": lambda machine, _: machine.build_tuple(2),
    "TUPLE3": lambda machine, _: machine.build_tuple(3),
    "APPEND": lambda machine, _: machine.extend([machine.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_to_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    "BINPUT": lambda machine, key: machine.put(key),
    "LONG_BINPUT": lambda machine, key: machine.put(key),
    "BINGET": lambda machine, key: machine.stack.append(machine.memo[key]),
    "LONG_BINGET": lambda machine, key: machine.stack.append(machine.memo[key]),
    "GLOBAL": lambda machine, name: machine.global_name(name.replace(" ", ".")),
    "STACK_GLOBAL": _Unpickler.stack_global,
    "REDUCE": _Unpickler.reduce,
    "NEWOBJ": _Unpickler.reduce,
    "BUILD": _Unpickler.build,
    "BINPERSID": lambda machine, _: machine.stack.append(Record(PERSISTENT, machine.pop(tuple))),
}


def read_pickle(content: bytes, allowed: Collection[str], file: str | os.PathLike[str]) -> Any:
    """Return the value of a pickle: None, bool, int, float, str, tuple, list, PickledDict, GlobalName or Record.

    Containers may be nested to any depth and contain themselves.

    Raises:
        CheckpointError: the pickle has another opcode or a name that is not in `allowed`, or is damaged.
    """
    machine = _Unpickler(allowed)
    try:
        for opcode, argument, _ in pickletools.genops(content):
            machine.step(opcode.name, argument)
        if len(machine.stack) != 1:
            raise ValueError(f"it ends with {len(machine.stack)} values instead of one")
        return machine.pop()
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        reason = (
            "its pickle ends early or refers to nothing" if isinstance(error, IndexError | KeyError) else str(error)
        )
        fail(file, f"refusing to unpickle it, only plain data is allowed: {reason}; the file is corrupt or unsafe")
