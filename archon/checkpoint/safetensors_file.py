"""Read and write one safetensors file; the full header is validated before any data is read.

Format (https://github.com/huggingface/safetensors#format): 8 bytes of little-endian header length, a JSON object
`{name: {"dtype", "shape", "data_offsets": [begin, end]}}` with an optional `__metadata__` of strings, then the data,
row-major and little-endian, without holes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from archon.checkpoint.atomic import kill_point
from archon.schema.errors import CheckpointError
from archon.schema.files import regular_handle

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The limit of the reference reader; 100 MB of JSON describe a million tensors.
MAX_HEADER_BYTES = 100_000_000
# Data is read or converted in chunks of this size: large enough to make the cost of calls negligible, small enough to
# stay in a core's cache.
CHUNK_BYTES = 2**20
COMPARED_BYTES = 8 * CHUNK_BYTES


@dataclass(frozen=True)
class TensorEntry:
    """Header entry of a tensor; `start` and `end` are byte offsets in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


Region = tuple[slice, ...]
"""A rectangular region of a tensor: one slice per dimension."""


def full_region(shape: tuple[int, ...] | torch.Size) -> Region:
    """Return the region that covers a tensor of `shape`."""
    return tuple(slice(0, size) for size in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    """Return the size of a region in every dimension."""
    return tuple(part.stop - part.start for part in region)


def overlap(region: Region, start: Sequence[int], shape: Sequence[int]) -> tuple[Region, Region] | None:
    """Return the overlap of `region` and a stored region as (region of the stored tensor, region of the result)."""
    bounds = [
        (max(part.start, first), min(part.stop, first + size))
        for part, first, size in zip(region, start, shape, strict=True)
    ]
    if any(a >= b for a, b in bounds):
        return None
    source = tuple(slice(a - first, b - first) for (a, b), first in zip(bounds, start, strict=True))
    target = tuple(slice(a - part.start, b - part.start) for (a, b), part in zip(bounds, region, strict=True))
    return source, target


@dataclass(frozen=True)
class LazyTensor:
    """A tensor with data that is read or computed on demand, to keep one tensor in memory at a time.

    Attributes:
        load: returns the data of a region on the CPU.
        by_rows: the cost of reading rows is proportional to their number.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[Region], Tensor]
    by_rows: bool = False

    def read(self, region: Region | None = None) -> Tensor:
        """Return the data of `region`; by default of the full tensor."""
        return self.load(full_region(self.shape) if region is None else region)

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def pieces(self) -> Iterator[Tensor]:
        """Yield the data in order: in pieces of rows of about `CHUNK_BYTES` if `by_rows`, else whole."""
        if not self.by_rows or not self.shape:
            yield self.read()
            return
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        rows = max(1, CHUNK_BYTES // max(1, row_bytes))
        for first in range(0, self.shape[0], rows):
            piece = slice(first, min(first + rows, self.shape[0]))
            yield self.read((piece, *full_region(self.shape[1:])))


def bitwise_equal(first: LazyTensor, second: LazyTensor) -> bool:
    """Return whether two tensors of at least one dimension are bitwise equal, reading some rows at a time."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    rows = max(1, COMPARED_BYTES // max(1, math.prod(first.shape[1:]) * first.dtype.itemsize))
    for row in range(0, first.shape[0], rows):
        region = (slice(row, min(row + rows, first.shape[0])), *full_region(first.shape[1:]))
        if not torch.equal(first.read(region).view(torch.uint8), second.read(region).view(torch.uint8)):
            return False
    return True


def parse_header(header: bytes, data_bytes: int, file: str | os.PathLike[str]) -> dict[str, TensorEntry]:
    """Return the entries of a header by name, in the order of their data.

    Args:
        header: the JSON, without the 8 bytes of its length.
        data_bytes: number of bytes after the header.
        file: path for error messages.

    Raises:
        CheckpointError: the header violates the format: invalid JSON, duplicate names, unknown dtypes, sizes that
            differ from shape × item size, overlaps, gaps, data beyond the end of the file, or unused bytes.
    """
    try:
        content = json.loads(
            header.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=_reject_json_constant
        )
    except (ValueError, RecursionError) as error:
        fail(file, f"its header is not valid JSON ({error}); the file is damaged")
    if not header.startswith(b"{") or not isinstance(content, dict):
        fail(file, "its header is not a JSON object; the file is damaged")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        fail(file, "its __metadata__ is not an object of strings; the file is damaged")
    base = 8 + len(header)
    entries = sorted((_entry(file, base, *item) for item in content.items()), key=lambda e: (e.start, e.end))
    end = base
    for entry in entries:
        if entry.start != end:
            problem = "overlaps the data before it" if entry.start < end else "leaves a gap before it"
            fail(file, f"the data of key {entry.name!r} {problem} (byte {entry.start}, expected {end})")
        end = entry.end
    if end != base + data_bytes:
        last = f" after key {entries[-1].name!r}" if entries else ""
        fail(file, f"it holds {base + data_bytes} bytes, its header describes {end}{last}; truncated or overwritten?")
    return {entry.name: entry for entry in entries}


def _entry(file: str | os.PathLike[str], base: int, name: str, item: Any) -> TensorEntry:
    if not isinstance(item, dict) or item.keys() != {"dtype", "shape", "data_offsets"}:
        fail(file, f"key {name!r} must have exactly dtype, shape and data_offsets")
    if not isinstance(item["dtype"], str) or item["dtype"] not in DTYPES:
        fail(file, f"key {name!r} has dtype {item['dtype']!r}; archon reads {', '.join(DTYPES)}")
    dtype, shape, offsets = DTYPES[item["dtype"]], item["shape"], item["data_offsets"]
    if not _is_shape(shape):
        fail(file, f"key {name!r} has shape {shape!r}; expected a list of sizes")
    if not _is_shape(offsets) or len(offsets) != 2:
        fail(file, f"key {name!r} has invalid data_offsets {offsets!r}; expected [begin, end]")
    size = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != size:
        fail(
            file,
            f"key {name!r} has {offsets[1] - offsets[0]} bytes, but shape {shape} of {item['dtype']} takes {size}",
        )
    return TensorEntry(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _is_shape(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise ValueError if a key is repeated. Python's reader would keep the last value."""
    content = dict(pairs)
    if len(content) < len(pairs):
        duplicate, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {duplicate!r} appears twice")
    return content


def _reject_json_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def fail(file: str | os.PathLike[str], why: str) -> NoReturn:
    """Raise CheckpointError for a file or folder."""
    raise CheckpointError(f"{os.fspath(file)}: {why}")


class RegularFile:
    """A file open for thread-safe reads at any offset; CheckpointError unless it is a regular file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._handle = regular_handle(self.path, CheckpointError)
        self.size = os.fstat(self._handle).st_size

    def read_into(self, view: memoryview, offset: int, label: str) -> None:
        """Fill `view` (bytes) from `offset` of the file; releases the GIL while it reads."""
        while view:
            try:
                count = os.preadv(self._handle, [view], offset)
            except OSError as error:
                fail(self.path, f"{label} cannot be read: {os.strerror(error.errno or 0)}")
            if count == 0:
                fail(self.path, f"it ends within {label}; was it changed while being read?")
            view, offset = view[count:], offset + count

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SafetensorsFile(RegularFile):
    """An open safetensors file with a valid header; `entries` are by name, in the order of their data."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        try:
            self.header = self._read_header()
            self.entries = parse_header(self.header, self.size - 8 - len(self.header), path)
        except BaseException:
            self.close()
            raise

    @property
    def metadata(self) -> dict[str, str]:
        """The `__metadata__` strings of the header."""
        return json.loads(self.header).get("__metadata__", {})

    def _read_header(self) -> bytes:
        if self.size < 8:
            fail(self.path, f"it holds {self.size} bytes, too few for a safetensors file; truncated?")
        length = int.from_bytes(os.pread(self._handle, 8, 0), "little")
        if length > MAX_HEADER_BYTES:
            fail(self.path, f"its header claims {length} bytes, more than {MAX_HEADER_BYTES}; not a safetensors file?")
        if length > self.size - 8:
            fail(self.path, f"its header claims {length} bytes, but the file holds {self.size}; truncated?")
        header = bytearray(length)
        self.read_into(memoryview(header), 8, "its header")
        return bytes(header)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a writable view of its memory."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def chunks(tensor: Tensor, itemsize: int, limit: int = CHUNK_BYTES) -> Iterator[tuple[int, Tensor]]:
    """Yield (byte offset, view) pairs that cover `tensor` in row-major order.

    Offsets and the limit of `limit` bytes per view count `itemsize` bytes per element, whatever the tensor's dtype. The
    views of a contiguous tensor are flat.
    """
    if tensor.numel() == 0:
        return
    if tensor.numel() * itemsize <= limit:
        yield 0, tensor
        return
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    row = math.prod(tensor.shape[1:]) * itemsize
    rows = max(1, limit // row)
    for first in range(0, tensor.shape[0], rows):
        part = tensor[first : first + rows]
        if rows == 1 and row > limit:
            yield from ((first * row + offset, chunk) for offset, chunk in chunks(part[0], itemsize, limit))
        else:
            yield first * row, part


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor | LazyTensor],
    kill_at_tensor: str,
    metadata: Mapping[str, str] | None = None,
    with_digest: bool = True,
) -> str:
    """Write tensors of any device and layout to a synced file; return its SHA-256.

    Tensors of wider dtypes come first, so that every tensor is aligned to its item size. Extra memory is one chunk of a
    tensor that is not contiguous on the CPU, and one lazy tensor or a piece of it.

    Args:
        path: the new file.
        tensors: tensors by name.
        kill_at_tensor: kill point between the two halves of a chunk.
        metadata: further strings for the header's `__metadata__`.
        with_digest: compute the SHA-256, which takes as long as writing to memory; otherwise hash nothing.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header, offset = {"__metadata__": {"format": "pt", **(metadata or {})}}, 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.dtype.itemsize
        dtype = DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}  # type: ignore[dict-item]
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:

        def write(data: memoryview | bytes) -> None:
            if with_digest:
                digest.update(data)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]

        write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            written = 0
            for data in tensor.pieces() if isinstance(tensor, LazyTensor) else (tensor.detach(),):
                assert (data.dtype, tuple(data.shape[1:])) == (tensor.dtype, tuple(tensor.shape[1:]))
                written += data.numel()
                for _, chunk in chunks(data, tensor.dtype.itemsize):
                    view = tensor_bytes(chunk.cpu().contiguous())
                    write(view[: len(view) // 2])
                    kill_point(kill_at_tensor)
                    write(view[len(view) // 2 :])
            assert written == tensor.numel()
        os.fsync(file.fileno())
    return digest.hexdigest()
