"""Hostile pickles: whatever they ask for, nothing is imported, called or filled, and it ends in one line."""

from __future__ import annotations

import builtins
import collections
import contextlib
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from archon.checkpoint.formats.dcp.plain_pickle import GlobalName, PickledDict, Record, read_pickle
from archon.schema.errors import CheckpointError

pytestmark = pytest.mark.unsampled

ALLOWED = frozenset({"collections.OrderedDict", "torch.Size"})


def read(content: bytes) -> Any:
    return read_pickle(content, ALLOWED, "a.pkl")


def short(text: str) -> bytes:
    return b"\x8c" + struct.pack("<B", len(text)) + text.encode()


class Calls:
    """Pickled, it is a call of `function` with `arguments`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_read(protocol: int) -> None:
    value = [
        None,
        True,
        False,
        0,
        -1,
        255,
        2**40,
        1.5,
        "text",
        "ü" * 300,
        (),
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 3, 4),
        [],
    ]
    assert read(pickle.dumps(value, protocol)) == value
    found = read(pickle.dumps({"a": 1, 2: {"b": []}}, protocol))
    assert isinstance(found, PickledDict) and found.items[0] == ("a", 1)
    assert found.items[1][1].items == [("b", [])]


def test_a_call_is_recorded_and_not_made() -> None:
    found = read(pickle.dumps(collections.OrderedDict))
    assert found == GlobalName("collections.OrderedDict")
    found = read(b"\x80\x04" + short("torch") + short("Size") + b"\x93" + b"K\x01K\x02\x86\x85R.")
    assert isinstance(found, Record) and (found.name, found.args, found.state) == ("torch.Size", ((1, 2),), None)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, f"{os.system.__module__}.system"),
        (builtins.eval, "eval"),
        (builtins.exec, "exec"),
        (builtins.__import__, "__import__"),
        (builtins.getattr, "getattr"),
        (subprocess.Popen, "Popen"),
    ],
)
def test_a_call_of_anything_else_is_refused(
    tmp_path: Path, protocol: int, nested: bool, function: Any, name: str
) -> None:
    trace = tmp_path / "executed"
    hostile: Any = Calls(function, f"open({str(trace)!r}, 'w')")
    if nested:
        hostile = {"a": [(1, Calls(collections.OrderedDict, [("b", hostile)]))]}
    with pytest.raises(CheckpointError, match=rf"a.pkl: .*names '[^']*{name}', which is not among the names"):
        read(pickle.dumps(hostile, protocol))
    assert not trace.exists()


def test_no_name_is_looked_up_even_an_allowed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "harmful.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = read_pickle(b"charmful\nthing\n.", {"harmful.thing"}, "a.pkl")
    assert found == GlobalName("harmful.thing")
    assert "harmful" not in sys.modules and not (tmp_path / "imported").exists()


# Each is a program for CPython's machine that plain data never needs.
TORCH_SIZE = b"ctorch\nSize\n"
PROGRAMS = {
    "an attribute set on a class": (TORCH_SIZE + b"}\x8c\x01a" + b"K\x01sb.", "cannot be filled"),
    "a call of a text": (short("torch.Size") + b")R.", "a str has the wrong type"),
    "a call of a call's result": (TORCH_SIZE + b")R)R.", "a Record has the wrong type"),
    "a call with a list": (TORCH_SIZE + b"]R.", "a list has the wrong type"),
    "state set twice": (TORCH_SIZE + b")RK\x01bK\x01b.", "the state of an object twice"),
    "an item of a tuple": (b")K\x01a.", "a tuple cannot be filled"),
    "an item of a call's result": (TORCH_SIZE + b")RK\x01K\x02s.", "a Record cannot be filled"),
    "a key without a value": (b"}(K\x01u.", "a key without a value"),
    "an extension code": (b"\x82\x01.", "opcode EXT1"),
    "an instance, protocol 0": (b"(ios\nsystem\n.", "opcode INST"),
    "an object, protocol 1": (b"(cos\nsystem\no.", "'os.system'"),
    "a persistent text": (b"Pabc\n.", "opcode PERSID"),
    "a buffer outside": (b"\x97.", "opcode NEXT_BUFFER"),
    "bytes": (b"C\x01a.", "opcode SHORT_BINBYTES"),
    "a huge array of bytes": (b"\x96" + struct.pack("<Q", 2**62) + b".", "2\\*\\*63|expected|bytearray8|BYTEARRAY8"),
    "a huge text": (b"\x8d" + struct.pack("<Q", 2**62) + b"a.", "expected"),
    "a huge frame": (b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"N.", None),
    "a huge memo": (b"Nr\xff\xff\xff\xff.", None),
    "a memo that is not there": (b"h\x07.", "refers to nothing"),
    "an empty stack": (b"a.", "refers to nothing"),
    "a mark for a value": (b"(\x85.", "a _Mark has the wrong type"),
    "two values": (b"NN.", "ends with 2 values"),
    "no value": (b"\x80\x04.", "ends with 0 values"),
    "no end": (b"\x80\x04N", "pickle exhausted"),
    "nothing": (b"", "pickle exhausted"),
    "no pickle": (b"PK\x03\x04", "."),
    "a name in halves": (short("os.") + short("system") + b"\x93.", "'os..system'"),
    "a name with a space": (b"cos system\nx\n.", "'os.system.x'"),
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_program_is_refused_in_one_line(what: str) -> None:
    content, message = PROGRAMS[what]
    if message is None:
        assert read(content) is None
        return
    with pytest.raises(CheckpointError, match=message) as caught:
        read(content)
    assert "\n" not in str(caught.value)


def test_every_cut_and_many_changes_end_in_an_error_or_a_value() -> None:
    content = pickle.dumps({"a": [1, (2.5, "b")], "c": collections.OrderedDict(d=None)}, 4)
    for end in range(len(content)):
        with pytest.raises(CheckpointError):
            read(content[:end])
    for place in range(len(content)):
        for byte in range(0, 256, 5):
            with contextlib.suppress(CheckpointError):  # any other error fails the test
                read(content[:place] + bytes([byte]) + content[place + 1 :])


def test_sharing_and_depth_cost_no_more_memory_than_the_pickle_is_long() -> None:
    doubling = b"\x80\x04N" + b"\x94h\x00\x86" * 1  # (None, None)
    for level in range(1, 200):
        doubling += b"\x94h" + struct.pack("<B", level) + b"\x86"  # (x, x) of the last: 2**200 leaves
    deep = b"]" * 200_000 + b"a" * 199_999 + b"."
    cycle = b"]\x94h\x00a."
    tracemalloc.start()
    try:
        read(doubling + b".")
        read(deep)
        found = read(cycle)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found[0] is found
    assert peak < 200 * (len(doubling) + len(deep))
