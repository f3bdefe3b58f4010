"""Broadcast of weights from a trainer to the workers of one server, in buckets.

Nothing is pickled. A bucket is three broadcasts from rank 0: two sizes, a JSON description, and the bytes of its
tensors. Sizes of 0 end the stream. Trainer and workers import this file, which needs only torch.

Each push has a new process group, so a failed or restarted server cannot hang the next push. NCCL has never been run.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 2**25
ALIGNMENT = 16
"""Alignment of the tensors in a bucket in bytes, so that they are views of the bucket."""
POLL_SECONDS = 0.01
_JOINED = "joined"

MAX_DESCRIPTION_BYTES = 2**24
"""Maximum bytes of a bucket's description, far above the 200 bytes of each of the tensors in `BUCKET_BYTES`."""
MAX_DIMENSIONS = 8

Named = tuple[str, Tensor]


class WeightStreamError(RuntimeError):
    """A stream of weights that is malformed, or announces more than a machine holds."""


@dataclass(frozen=True)
class Bucket:
    """Concatenated tensors: JSON [[name, dtype, shape], …] and their bytes, uint8 [n]."""

    description: bytes
    data: Tensor


def pack(tensors: Iterable[Named], device: torch.device) -> Iterator[Bucket]:
    """Yield buckets with copies of the tensors on `device`, of at most `BUCKET_BYTES` or one larger tensor."""
    held: list[Named] = []
    size = 0
    for name, tensor in tensors:
        if held and size + _padded_size(tensor.nbytes) > BUCKET_BYTES:
            yield _pack_bucket(held, size, device)
            held, size = [], 0
        held.append((name, tensor))
        size += _padded_size(tensor.nbytes)
    if held:
        yield _pack_bucket(held, size, device)


def unpack(bucket: Bucket) -> Iterator[Named]:
    """Yield (name, tensor); the tensors are views of `bucket.data`.

    Raises:
        WeightStreamError: the description is malformed, or describes other bytes than the bucket has.
    """
    start = 0
    for name, dtype, shape in _described(bucket.description):
        end = start + math.prod(shape) * dtype.itemsize
        if end > bucket.data.numel():
            raise WeightStreamError(f"{name!r:.200} ends at byte {end} of a bucket of {bucket.data.numel()} bytes")
        yield name, bucket.data[start:end].view(dtype).view(shape)
        start = _padded_size(end)
    if start != bucket.data.numel():
        raise WeightStreamError(f"a bucket of {bucket.data.numel()} bytes is described as one of {start}")


def _described(description: bytes) -> list[tuple[str, torch.dtype, list[int]]]:
    """Return the checked entries of a description."""
    try:
        entries = json.loads(description)
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, list):
        raise WeightStreamError(f"a bucket is described by {description[:80]!r}; expected a JSON list of tensors")
    found = []
    for entry in entries:
        name, dtype, shape = entry if isinstance(entry, list) and len(entry) == 3 else (None, None, None)
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        sizes = shape if isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS else [-1]
        if not (isinstance(name, str) and isinstance(kind, torch.dtype)) or not all(
            type(size) is int and 0 <= size < 2**40 for size in sizes
        ):
            raise WeightStreamError(f"a tensor is described by {entry!r:.200}; expected [name, dtype, shape]")
        found.append((name, kind, sizes))
    return found


class Sender:
    """Rank 0 of a weight broadcast. Workers join at `address` and `port`, on the interface that routes to them.

    Args:
        host: host of the workers.
        workers: number of workers.
        backend: `gloo`, or `nccl` for buckets on the GPU.
        seconds: time-out of each wait.
    """

    def __init__(self, host: str, workers: int, backend: str, seconds: float) -> None:
        self.address, self.workers = local_address(host), workers
        self._backend, self._limit = backend, timedelta(seconds=seconds)
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        with socket.create_server((self.address, 0), family=family) as listening:
            self.port: int = listening.getsockname()[1]
            descriptor = listening.detach()
        self._store = dist.TCPStore(
            self.address,
            self.port,
            is_master=True,
            timeout=self._limit,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        self._group: _Group | None = None

    def connect(self, is_cancelled: Callable[[], bool]) -> bool:
        """Wait for all workers and return True, or False after `is_cancelled`. Raises TimeoutError."""
        deadline = time.monotonic() + self._limit.total_seconds()
        while self._store.add(_JOINED, 0) < self.workers:
            if is_cancelled():
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.workers} workers did not join within {self._limit.total_seconds():g} s")
            time.sleep(POLL_SECONDS)
        self._group = _Group(self._store, 0, self.workers + 1, self._backend, self.address, self._limit)
        return True

    def send(self, buckets: Iterable[Bucket]) -> None:
        """Send all buckets and the end of the stream. Raises RuntimeError if a worker is gone or too slow."""
        assert self._group is not None
        for bucket in buckets:
            device = bucket.data.device
            description = torch.frombuffer(bytearray(bucket.description), dtype=torch.uint8)
            sizes = torch.tensor([description.numel(), bucket.data.numel()])
            for tensor in (sizes, description, bucket.data):
                self._group.broadcast(tensor.to(device))
        self._group.broadcast(torch.zeros(2, dtype=torch.int64, device=stream_device(self._backend)))

    def close(self) -> None:
        """Leave the group. Workers that still wait for a bucket fail."""
        self._group = None
        del self._store


def receive_tensors(
    address: str, port: int, rank: int, workers: int, backend: str, seconds: float, device: torch.device
) -> Iterator[Named]:
    """Join the group of a `Sender` as worker `rank` (from 1), and yield each (name, tensor) of the stream.

    The tensors stay valid. If the caller stops before the end, the sender and the other workers block.

    Raises:
        WeightStreamError: the stream is malformed, repeats a name, or announces a bucket larger than the memory.
    """
    limit = timedelta(seconds=seconds)
    store = dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
    store.add(_JOINED, 1)
    group = _Group(store, rank, workers + 1, backend, local_address(address), limit)
    device = device if backend == "nccl" else torch.device("cpu")
    most, names = _memory_bytes(device), set[str]()
    try:
        while True:
            sizes = group.broadcast(torch.empty(2, dtype=torch.int64, device=device)).tolist()
            if not any(sizes):
                return
            if not 0 <= sizes[0] <= MAX_DESCRIPTION_BYTES or not 0 <= sizes[1] <= most:
                raise WeightStreamError(
                    f"a bucket of {sizes[1]:,} bytes with a description of {sizes[0]:,} is announced; expected at most "
                    f"{most:,}, the memory of {device}, and {MAX_DESCRIPTION_BYTES:,}"
                )
            description, data = (group.broadcast(torch.empty(n, dtype=torch.uint8, device=device)) for n in sizes)
            for name, tensor in unpack(Bucket(description.cpu().numpy().tobytes(), data)):
                if name in names:
                    raise WeightStreamError(f"the tensor {name!r:.200} is sent twice")
                names.add(name)
                yield name, tensor
    finally:
        del group  # a traceback would keep it, and the sender would wait until its time-out


def _memory_bytes(device: torch.device) -> int:
    """Return the memory of a device, used or not: no bucket can be larger."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def local_address(host: str) -> str:
    """Return the address of the local interface that routes to `host`."""
    family, kind, _, _, peer = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(peer)  # sends nothing
        address: str = probe.getsockname()[0]
    return address


class _Group:
    """A process group that is independent of torch's default process group."""

    def __init__(self, store: dist.Store, rank: int, size: int, backend: str, address: str, limit: timedelta) -> None:
        prefixed = dist.PrefixStore("weights", store)
        from archon.parallel.torch_private import separate_group  # slow to import in a worker of vLLM

        self._backend: Any = separate_group(prefixed, rank, size, backend, address, limit)
        # Keep a reference to the last tensor. If the group's thread freed it, the thread would wait for the GIL while
        # Python waits for the thread.
        self._held: Tensor | None = None

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return `tensor` with rank 0's values."""
        self._backend.broadcast([tensor], dist.BroadcastOptions()).wait()
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        self._held = tensor
        return tensor


def _pack_bucket(tensors: list[Named], size: int, device: torch.device) -> Bucket:
    description = [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in tensors]
    bucket = Bucket(json.dumps(description).encode(), torch.empty(size, dtype=torch.uint8, device=device))
    for (_, target), (_, tensor) in zip(unpack(bucket), tensors, strict=True):
        target.copy_(tensor.detach())
    return bucket


def _padded_size(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def stream_device(backend: str) -> torch.device:
    """Return the device of broadcast buckets."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
