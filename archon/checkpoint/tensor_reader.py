"""Reads regions of the tensors in safetensors files into tensors of any device, layout and float dtype."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from archon.checkpoint.safetensors_file import (
    CHUNK_BYTES,
    LazyTensor,
    Region,
    RegularFile,
    SafetensorsFile,
    TensorEntry,
    bytes_of,
    chunks,
    full_region,
    region_shape,
)

_MADV_POPULATE_WRITE = 23
_madvise = getattr(ctypes.CDLL(None), "madvise", None)


@dataclass(frozen=True)
class ReadJob:
    """One read: the data of `entry` from byte `offset` of a file, and the view `target` to fill with it.

    `inner`, where given, is the region of each row of shape `row` that `target` takes.
    """

    file: RegularFile
    entry: TensorEntry
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
) -> Iterator[ReadJob]:
    """Yield jobs of about `CHUNK_BYTES` that fill `target` with a region of a tensor, viewed as `shape` if given."""
    if target.numel():
        yield from _jobs(file, entry, entry.start, entry.shape if shape is None else shape, region, target)


def _jobs(
    file: RegularFile, entry: TensorEntry, start: int, shape: tuple[int, ...], region: Region, target: Tensor
) -> Iterator[ReadJob]:
    """Yield the jobs for a region of a tensor of `shape` whose data begin at byte `start` of the file."""
    rows, *inner = region or (slice(0, 1),)
    row_bytes = math.prod(shape[1:]) * entry.dtype.itemsize
    first = start + rows.start * row_bytes
    if tuple(inner) == full_region(shape[1:]):
        for offset, view in chunks(target, entry.dtype.itemsize):
            yield ReadJob(file, entry, first + offset, view)
    elif row_bytes > CHUNK_BYTES:
        for row in range(rows.stop - rows.start):
            yield from _jobs(file, entry, first + row * row_bytes, shape[1:], tuple(inner), target[row])
    else:
        # For some columns of a matrix whole rows are read, because the other columns are in the same pages anyway.
        step = max(1, CHUNK_BYTES // row_bytes)
        for row in range(0, rows.stop - rows.start, step):
            view = target[row : row + step]
            yield ReadJob(file, entry, first + row * row_bytes, view, shape[1:], tuple(inner))


class JobReader:
    """Runs read jobs in any number of threads, with one buffer per thread for data that cannot be read in place."""

    def __init__(self) -> None:
        self._buffers = threading.local()

    def read(self, job: ReadJob) -> None:
        target, entry = job.target, job.entry
        is_plain = target.device.type == "cpu" and target.is_contiguous()
        if is_plain:
            prefault(target)
        if is_plain and target.dtype == entry.dtype and job.inner is None:
            job.file.read_into(bytes_of(target), job.offset, f"key {entry.name!r}")
            return
        if not hasattr(self._buffers, "bytes"):
            self._buffers.bytes = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=target.is_cuda)
        shape = target.shape if job.inner is None else (target.shape[0], *job.row)
        size = math.prod(shape) * entry.dtype.itemsize
        staged = self._buffers.bytes[:size]
        job.file.read_into(bytes_of(staged), job.offset, f"key {entry.name!r}")
        values = staged.view(entry.dtype).view(shape)
        if job.inner is not None:
            values = values[(slice(None), *job.inner)]
        # Sent to a GPU in the file's dtype and converted there: fewer bytes on the bus, and no second buffer here.
        target.copy_(values.to(target.device))


def read_region(file: RegularFile, entry: TensorEntry, region: Region, out: Tensor | None = None) -> Tensor:
    """Returns a region of a tensor in a file, read into `out` where it is given."""
    out = torch.empty(region_shape(region), dtype=entry.dtype) if out is None else out
    reader = JobReader()
    for job in read_jobs(file, entry, region, out):
        reader.read(job)
    return out


def lazy_tensor(file: SafetensorsFile, entry: TensorEntry) -> LazyTensor:
    """Returns a tensor of an open file."""
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
