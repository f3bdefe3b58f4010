"""Whatever bytes come as a header: a CheckpointError, or exactly what safetensors' own reader understands."""

from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from archon.checkpoint.safetensors_file import DTYPE_NAMES, parse_header
from archon.schema.errors import CheckpointError

VALID = save(
    {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b.weight": torch.arange(5, dtype=torch.bfloat16),
        "c": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 2),
    },
    {"format": "pt"},
)
HEADER = VALID[8 : 8 + int.from_bytes(VALID[:8], "little")]
DATA = VALID[8 + len(HEADER) :]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
sizes = st.integers(-1, 40)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "BOOL", "F8_E8M0", "x"]),
        "shape": st.lists(sizes, max_size=3),
        "data_offsets": st.lists(sizes, min_size=2, max_size=2),
    }
)


def check(header: bytes, data: bytes) -> None:
    """Accepted means accepted by the reference as well, with the same tensors."""
    try:
        found = parse_header(header, len(data), "file")
    except CheckpointError:
        return
    try:
        reference = dict(deserialize(len(header).to_bytes(8, "little") + header + data))
    except SafetensorError as error:
        raise AssertionError(f"the reference refuses {header!r}: {error}") from error
    assert found.keys() == reference.keys()
    content = header + data
    for name, entry in found.items():
        assert list(entry.shape) == reference[name]["shape"]
        assert DTYPE_NAMES[entry.dtype] == reference[name]["dtype"]
        assert content[entry.start - 8 : entry.end - 8] == bytes(reference[name]["data"])


def test_valid_header_is_read() -> None:
    found = parse_header(HEADER, len(DATA), "file")
    assert {name: entry.shape for name, entry in found.items()} == {
        "a": (2, 3),
        "b.weight": (5,),
        "c": (),
        "empty": (0, 2),
    }
    check(HEADER, DATA)


@given(st.binary(max_size=200))
@example(b"")
@example(b"{}")
@example(b"null")
@example(b'\xef\xbb\xbf{"a": 1}')
@settings(max_examples=200, deadline=None)
def test_random_bytes(header: bytes) -> None:
    check(header, DATA)


@given(st.integers(0, len(HEADER) - 1), st.integers(0, 255))
@settings(max_examples=600, deadline=None)
def test_one_byte_replaced(position: int, value: int) -> None:
    check(HEADER[:position] + bytes([value]) + HEADER[position + 1 :], DATA)


@given(st.integers(0, len(HEADER) - 1), st.integers(0, 20), st.binary(max_size=20))
@settings(max_examples=300, deadline=None)
def test_a_stretch_replaced(position: int, count: int, patch: bytes) -> None:
    check(HEADER[:position] + patch + HEADER[position + count :], DATA)


@given(json_values)
@settings(max_examples=200, deadline=None)
def test_any_json(value: Any) -> None:
    check(json.dumps(value).encode(), DATA)


@given(st.dictionaries(st.text(max_size=3), entries | json_values, max_size=4), st.integers(0, 40))
@settings(max_examples=400, deadline=None)
def test_plausible_entries(header: dict[str, Any], size: int) -> None:
    check(json.dumps(header).encode(), bytes(size))
