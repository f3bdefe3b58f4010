"""Reads regions of the tensors in safetensors files into tensors of any device, layout and float dtype."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from archon.checkpoint.safetensors_file import (
    CHUNK_BYTES,
    LazyTensor,
    Region,
    RegularFile,
    TensorEntry,
    chunks,
    full_region,
    region_shape,
    tensor_bytes,
)

_MADV_POPULATE_WRITE = 23
_madvise = getattr(ctypes.CDLL(None), "madvise", None)


class RowDecoder(Protocol):
    """Decoder of quantized rows; a row is the last dimension of a tensor."""

    @property
    def row(self) -> int:
        """Elements per row."""

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""

    def decode(self, data: Tensor, first: int) -> Tensor:
        """Return rows `first` to first + n of all rows as float32 [n, row] from their data, uint8 [n, row_bytes]."""


@dataclass(frozen=True)
class _Source:
    """A tensor in a file, and the decoder of quantized data."""

    file: RegularFile
    entry: TensorEntry
    decoder: RowDecoder | None

    def byte_count(self, elements: int) -> int:
        """Return the bytes of this number of elements."""
        if self.decoder is None:
            return elements * self.entry.dtype.itemsize
        return elements * self.decoder.row_bytes // self.decoder.row


@dataclass(frozen=True)
class ReadJob:
    """One read: the data of a tensor from byte `offset` of a file, and the view `target` to fill.

    `inner`, if set, is the region of each row of shape `row` that `target` takes.
    """

    source: _Source
    offset: int
    target: Tensor
    row: tuple[int, ...] = ()
    inner: Region | None = None


def read_jobs(
    file: RegularFile,
    entry: TensorEntry,
    region: Region,
    target: Tensor,
    shape: tuple[int, ...] | None = None,
    decoder: RowDecoder | None = None,
) -> Iterator[ReadJob]:
    """Yield jobs of about `CHUNK_BYTES` that fill `target` with a region of a tensor.

    Args:
        file: open file.
        entry: header entry of the tensor.
        region: one slice per dimension.
        target: tensor to fill.
        shape: view of the tensor, by default its shape; required if it is quantized.
        decoder: decoder of a quantized tensor.
    """
    if target.numel():
        yield from _jobs(
            _Source(file, entry, decoder), entry.start, entry.shape if shape is None else shape, region, target
        )


def _jobs(source: _Source, start: int, shape: tuple[int, ...], region: Region, target: Tensor) -> Iterator[ReadJob]:
    """Yield the jobs for a region of a tensor of `shape` with data from byte `start` of the file."""
    rows, *inner = region or (slice(0, 1),)
    row_bytes = source.byte_count(math.prod(shape[1:]))
    first = start + rows.start * row_bytes
    is_quantized = source.decoder is not None
    if tuple(inner) == full_region(shape[1:]) and not is_quantized:
        for offset, view in chunks(target, source.entry.dtype.itemsize):
            yield ReadJob(source, first + offset, view)
    # The rows of a quantized tensor are decoded whole.
    elif row_bytes > CHUNK_BYTES and (source.decoder is None or math.prod(shape[1:]) > source.decoder.row):
        for row in range(rows.stop - rows.start):
            yield from _jobs(source, first + row * row_bytes, shape[1:], tuple(inner), target[row])
    else:
        # For some columns of a matrix whole rows are read, because the other columns are in the same pages anyway.
        step = max(1, CHUNK_BYTES // row_bytes)
        for row in range(0, rows.stop - rows.start, step):
            view = target[row : row + step]
            yield ReadJob(source, first + row * row_bytes, view, shape[1:], tuple(inner))


class JobReader:
    """Runner of read jobs in any number of threads, with one buffer per thread for out-of-place reads."""

    def __init__(self) -> None:
        self._buffers = threading.local()

    def read(self, job: ReadJob) -> None:
        """Run one job in the calling thread."""
        target, source, entry = job.target, job.source, job.source.entry
        is_plain = target.device.type == "cpu" and target.is_contiguous()
        if is_plain:
            prefault(target)
        if is_plain and target.dtype == entry.dtype and job.inner is None:
            source.file.read_into(tensor_bytes(target), job.offset, f"key {entry.name!r}")
            return
        shape = target.shape if job.inner is None else (target.shape[0], *job.row)
        size = source.byte_count(math.prod(shape))
        staged = self._buffer(size, target.is_cuda)[:size]
        source.file.read_into(tensor_bytes(staged), job.offset, f"key {entry.name!r}")
        if source.decoder is None:
            values = staged.view(entry.dtype).view(shape)
        else:
            row_bytes = source.decoder.row_bytes
            values = source.decoder.decode(staged.view(-1, row_bytes), (job.offset - entry.start) // row_bytes)
            values = values.view(shape).to(target.dtype)
        if job.inner is not None:
            values = values[(slice(None), *job.inner)]
        # Sent to a GPU in the file's dtype and converted there: fewer bytes on the bus, and no second buffer here.
        target.copy_(values.to(target.device))

    def _buffer(self, size: int, pinned: bool) -> Tensor:
        """Return the thread's buffer of at least `size` bytes, more than a chunk only for a longer row of blocks."""
        if not hasattr(self._buffers, "bytes") or size > self._buffers.bytes.numel():
            self._buffers.bytes = torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8, pin_memory=pinned)
        return self._buffers.bytes


def read_region(
    file: RegularFile,
    entry: TensorEntry,
    region: Region,
    out: Tensor | None = None,
    shape: tuple[int, ...] | None = None,
    decoder: RowDecoder | None = None,
) -> Tensor:
    """Return a region of a tensor in a file, read into `out` if set; see `read_jobs` for the other arguments."""
    out = torch.empty(region_shape(region), dtype=entry.dtype) if out is None else out
    reader = JobReader()
    for job in read_jobs(file, entry, region, out, shape, decoder):
        reader.read(job)
    return out


def lazy_tensor(file: RegularFile, entry: TensorEntry) -> LazyTensor:
    """Return a tensor of an open file."""
    return LazyTensor(entry.dtype, entry.shape, functools.partial(read_region, file, entry), by_rows=True)


def prefault(target: Tensor) -> None:
    """Make the kernel map the pages of newly allocated memory at once, which costs less than one fault per page.

    Huge pages are not requested: on a virtual machine the host must provide them, which takes 3 times as long.
    """
    if _madvise is None:
        return
    start = target.data_ptr() - target.data_ptr() % mmap.PAGESIZE
    size = -(-(target.data_ptr() + target.nbytes - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    # Kernels before 5.14 return an error: the pages then fault one by one.
    _madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)
