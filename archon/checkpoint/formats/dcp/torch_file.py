"""Read tensor regions directly from `torch.save` archives, without unpickling.

A tensor is an uncompressed ZIP archive: `*/data.pkl` has offset, shape, strides and storage name, `*/data/<name>` is
the storage in the byte order of `*/byteorder`. Checksums are not compared, because PyTorch can omit them.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from archon.checkpoint.formats.dcp.metadata import Chunk
from archon.checkpoint.formats.dcp.plain_pickle import PERSISTENT, GlobalName, Record, read_pickle
from archon.checkpoint.safetensors_file import Region, RegularFile, TensorEntry, fail, region_shape
from archon.checkpoint.tensor_reader import read_region

MAX_PICKLE_BYTES = 2**16
_REBUILD = "torch._utils._rebuild_tensor_v2"
_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
_ALLOWED = frozenset({_REBUILD, "collections.OrderedDict", *_STORAGES})
_LOCAL_HEADER_BYTES = 30


class StorageLocation(NamedTuple):
    """Location of a tensor's data: `start` is the file offset of the first element, strides count elements."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Section(io.RawIOBase):
    """Bytes [start, start + length) of a file as a file object."""

    def __init__(self, file: RegularFile, start: int, length: int) -> None:
        self.file, self.start, self.length = file, start, length
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, origin: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[origin]
        if base + offset < 0:
            raise OSError(22, "negative position")
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.length - self.position))
        self.file.read_into(memoryview(buffer)[:count], self.start + self.position, "a tensor's archive")
        self.position += count
        return count


def read_chunk(file: RegularFile, chunk: Chunk, dtype: torch.dtype, region: Region, out: Tensor) -> None:
    """Fill `out` with a region of a chunk.

    Raises:
        CheckpointError: the chunk's archive is damaged or holds a tensor of another dtype or shape.
    """
    stored = _locate(file, chunk)
    if (stored.dtype, stored.shape) != (dtype, chunk.sizes):
        fail(
            file.path,
            f"at byte {chunk.start} it holds {stored.dtype} {list(stored.shape)}, "
            f".metadata says {dtype} {list(chunk.sizes)}",
        )
    order = sorted(range(len(stored.shape)), key=lambda dim: -stored.strides[dim])
    if not _is_dense(stored, order):
        fail(file.path, f"at byte {chunk.start} it holds a tensor with gaps or repetitions; save a contiguous one")
    # The dimensions of a transposed tensor are stored in another order.
    shape = tuple(stored.shape[dim] for dim in order)
    entry = TensorEntry("", dtype, shape, stored.start, stored.start + math.prod(shape) * dtype.itemsize)
    stored_region = tuple(region[dim] for dim in order)
    if order == sorted(order):
        read_region(file, entry, stored_region, out)
        return
    data = read_region(file, entry, stored_region, torch.empty(region_shape(stored_region), dtype=dtype))
    out.copy_(data.permute([order.index(dim) for dim in range(len(order))]))


def _is_dense(stored: StorageLocation, order: list[int]) -> bool:
    """Return whether the elements are contiguous with the dimensions in `order`."""
    expected = 1
    for dim in reversed(order):
        if stored.shape[dim] != 1 and stored.strides[dim] != expected:
            return False
        expected *= stored.shape[dim]
    return True


def _locate(file: RegularFile, chunk: Chunk) -> StorageLocation:
    where = f"{file.path}, byte {chunk.start}"
    if chunk.start + chunk.length > file.size:
        fail(file.path, f"it has {file.size} bytes, .metadata places data up to {chunk.start + chunk.length} in it")
    try:
        with zipfile.ZipFile(_Section(file, chunk.start, chunk.length)) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            for name in ("data.pkl", "byteorder"):
                if name not in members or members[name].file_size > MAX_PICKLE_BYTES:
                    fail(where, f"it holds no {name} as torch.save writes it")
            if archive.read(members["byteorder"]) != b"little":
                fail(where, "its byte order is not little-endian; save it again on such a machine")
            pickled = archive.read(members["data.pkl"])
    except (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, RuntimeError, EOFError) as error:
        fail(where, f"it holds no valid torch.save archive ({error}); damaged?")
    return _storage(file, chunk, read_pickle(pickled, _ALLOWED, where), members, where)


def _storage(
    file: RegularFile, chunk: Chunk, described: Any, members: dict[str, zipfile.ZipInfo], where: str
) -> StorageLocation:
    """Return the location of the tensor in a pickled `_rebuild_tensor_v2(storage, offset, shape, strides, …)`."""
    match described:
        case Record(
            name=name,
            args=(
                Record(name=kind, args=("storage", GlobalName(name=storage), str(key), str(), int(count))),
                int(offset),
                tuple(shape),
                tuple(strides),
                *_,
            ),
        ) if name == _REBUILD and kind == PERSISTENT and storage in _STORAGES:
            pass
        case _:
            fail(where, "its pickle describes no plain tensor of a supported dtype")
    numbers = [offset, count, *shape, *strides]
    if len(shape) != len(strides) or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        fail(where, "its pickle describes a tensor of impossible sizes")
    dtype = _STORAGES[storage]
    member = members.get(f"data/{key}")
    if member is None or member.compress_type != zipfile.ZIP_STORED or member.file_size != count * dtype.itemsize:
        fail(where, f"its archive does not hold the {count} elements of {dtype} that its pickle describes")
    header = bytearray(_LOCAL_HEADER_BYTES)
    first = chunk.start + member.header_offset
    file.read_into(memoryview(header), first, "the header of a tensor's data")
    first += _LOCAL_HEADER_BYTES + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    if last >= max(count, 1) or first + count * dtype.itemsize > chunk.start + chunk.length:
        fail(where, "its pickle describes a tensor larger than its data")
    return StorageLocation(dtype, first + offset * dtype.itemsize, tuple(shape), tuple(strides))
