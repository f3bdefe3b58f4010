"""Parse pickles as plain data: nothing is imported or called.

Python's unpickler runs with the few opcodes of pickled dictionaries, lists, tuples, numbers, strings and dataclasses
(protocols 2 to 5). The name of a class or function becomes a `GlobalName`, a call becomes a `Record` of name, arguments
and state. Only names in an allow-list are accepted. Memory is proportional to the size of the pickle, which is why the
faster `pickle.Unpickler` is not used: it allocates its memo up to any index in the pickle.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from archon.checkpoint.safetensors_file import fail

PERSISTENT = "persistent"
_ERRORS = (
    AttributeError,
    EOFError,
    LookupError,
    OverflowError,
    TypeError,
    ValueError,
    struct.error,
    pickle.PickleError,
)
_OPCODES = b"".join(
    (
        pickle.PROTO + pickle.FRAME + pickle.STOP + pickle.MARK + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE,
        pickle.BININT + pickle.BININT1 + pickle.BININT2 + pickle.LONG1 + pickle.BINFLOAT,
        pickle.SHORT_BINUNICODE + pickle.BINUNICODE + pickle.BINUNICODE8,
        pickle.EMPTY_TUPLE + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3,
        pickle.EMPTY_LIST + pickle.APPEND + pickle.APPENDS + pickle.EMPTY_DICT + pickle.SETITEM + pickle.SETITEMS,
        pickle.MEMOIZE + pickle.BINPUT + pickle.LONG_BINPUT + pickle.BINGET + pickle.LONG_BINGET,
        pickle.GLOBAL + pickle.STACK_GLOBAL + pickle.REDUCE + pickle.NEWOBJ + pickle.BUILD + pickle.BINPERSID,
    )
)


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


@dataclass(frozen=True)
class GlobalName:
    """Dotted name of a class or function; never imported."""

    name: str

    def __call__(self, *args: Any) -> Record:
        """Record a call instead of making it."""
        return Record(self.name, args)


class PickledDict:
    """Items of a pickled dictionary; keys may be of any kind and are not hashed."""

    def __init__(self) -> None:
        self.items: list[tuple[Any, Any]] = []

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


def _build(unpickler: Any) -> None:
    state, record = unpickler.stack.pop(), unpickler.stack[-1]
    if not isinstance(record, Record) or record.state is not None:
        raise ValueError("it sets the state of an object twice, or of something that is no object")
    record.state = state


class _Unpickler(pickle._Unpickler):
    """Unpickler with an allow-list of opcodes and of names."""

    dispatch = {opcode: pickle._Unpickler.dispatch[opcode] for opcode in _OPCODES} | {
        pickle.EMPTY_DICT[0]: lambda self: self.append(PickledDict()),
        pickle.BUILD[0]: _build,
        pickle.NEWOBJ[0]: pickle._Unpickler.dispatch[pickle.REDUCE[0]],
    }

    def __init__(self, content: bytes, allowed: Collection[str]) -> None:
        super().__init__(io.BytesIO(content), fix_imports=False)
        self.allowed = allowed

    def find_class(self, module: str, name: str) -> GlobalName:
        """Return an allowed name, unimported."""
        if f"{module}.{name}" not in self.allowed:
            raise ValueError(f"it contains '{module}.{name}'; only the names of tensor metadata are allowed")
        return GlobalName(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Record:
        """Record a reference outside the pickle."""
        return Record(PERSISTENT, pid)


def read_pickle(content: bytes, allowed: Collection[str], file: str | os.PathLike[str]) -> Any:
    """Return the value of a pickle: None, bool, int, float, str, tuple, list, PickledDict, GlobalName or Record.

    Containers may be nested to any depth and contain themselves.

    Raises:
        CheckpointError: the pickle has another opcode or a name that is not in `allowed`, or is damaged.
    """
    try:
        return _Unpickler(content, allowed).load()
    except _ERRORS as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        fail(file, f"refusing to unpickle it, only plain data is allowed: {reason}; the file is corrupt or unsafe")
