"""Read tensor regions of safetensors files into tensors of any device, layout and float dtype."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class RowDecoder:
    """Decoder for the rows (last dimension) of a quantized tensor.

    Attributes:
        row: number of elements in a row.
        row_bytes: number of stored bytes of a row.
        decode: from uint8 [n, row_bytes] and the index of the first row to float32 [n, row].
    """

    row: int
    row_bytes: int
    decode: Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Source:
    """A stored tensor, viewed as `shape` (by default its stored shape); a quantized one needs shape and decoder."""

    file: RegularFile
    entry: TensorEntry
    decoder: RowDecoder | None = None
    shape: tuple[int, ...] | None = None

    def byte_count(self, elements: int) -> int:
        """Return the stored bytes of `elements` elements."""
        if self.decoder is None:
            return elements * self.entry.dtype.itemsize
        return elements * self.decoder.row_bytes // self.decoder.row


@dataclass(frozen=True)
class ReadJob:
    """One read from byte `offset` of a file into the view `target`.

    If `inner` is set, `target` takes only that region of each row of shape `row`.
    """

    source: Source
    offset: int
    target: Tensor
    row: tuple[int, ...] = ()
    inner: Region | None = None


def read_jobs(source: Source, region: Region, target: Tensor) -> Iterator[ReadJob]:
    """Yield jobs of about `CHUNK_BYTES` that fill `target` with a region of a tensor."""
    if target.numel():
        shape = source.entry.shape if source.shape is None else source.shape
        yield from _jobs(source, source.entry.start, shape, region, target)


def _jobs(source: Source, start: int, shape: tuple[int, ...], region: Region, target: Tensor) -> Iterator[ReadJob]:
    """Yield the jobs for a region of a tensor of `shape`; its data begins at byte `start` of the file."""
    rows, *inner = region or (slice(0, 1),)
    row_bytes = source.byte_count(math.prod(shape[1:]))
    first = start + rows.start * row_bytes
    is_quantized = source.decoder is not None
    if tuple(inner) == full_region(shape[1:]) and not is_quantized:
        for offset, view in chunks(target, source.entry.dtype.itemsize):
            yield ReadJob(source, first + offset, view)
    # Rows of a quantized tensor are always decoded in full.
    elif row_bytes > CHUNK_BYTES and (source.decoder is None or math.prod(shape[1:]) > source.decoder.row):
        for row in range(rows.stop - rows.start):
            yield from _jobs(source, first + row * row_bytes, shape[1:], tuple(inner), target[row])
    else:
        # A column range reads full rows: the other columns are in the same memory pages anyway.
        step = max(1, CHUNK_BYTES // row_bytes)
        for row in range(0, rows.stop - rows.start, step):
            view = target[row : row + step]
            yield ReadJob(source, first + row * row_bytes, view, shape[1:], tuple(inner))


class JobReader:
    """Runner of read jobs in any number of threads, with one buffer per thread for out-of-place reads."""

    def __init__(self) -> None:
        self._buffers = threading.local()

    def read(self, job: ReadJob) -> None:
        """Run one job."""
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
        # Copied to a GPU in the file's dtype and converted there: fewer bytes on the bus, no second CPU buffer.
        target.copy_(values.to(target.device))

    def _buffer(self, size: int, pinned: bool) -> Tensor:
        """Return the thread's buffer of at least `size` bytes; a quantized row can be longer than a chunk."""
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
    """Return a region of a stored tensor, read into `out` if set; see `Source` for shape and decoder."""
    out = torch.empty(region_shape(region), dtype=entry.dtype) if out is None else out
    reader = JobReader()
    for job in read_jobs(Source(file, entry, decoder, shape), region, out):
        reader.read(job)
    return out


def lazy_tensor(file: RegularFile, entry: TensorEntry) -> LazyTensor:
    """Return a lazy tensor of an open file."""
    return LazyTensor(entry.dtype, entry.shape, functools.partial(read_region, file, entry), by_rows=True)


def prefault(target: Tensor) -> None:
    """Map all pages of newly allocated memory in one system call, which is cheaper than one fault per page.

    Huge pages are not requested: on a virtual machine they take 3 times as long.
    """
    if _madvise is None:
        return
    start = target.data_ptr() - target.data_ptr() % mmap.PAGESIZE
    size = -(-(target.data_ptr() + target.nbytes - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    # Kernels before 5.14 return an error: the pages then fault one by one.
    _madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)
