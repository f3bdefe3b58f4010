"""The kernel of `decode.c`: attention of one query per sequence to the pages of a cache, in float32 on a CPU.

It reads keys and values once where they lie, which is two to three times as fast as products of pages
(`page_batches`). The machine's C compiler builds it on first use, in about a second, and the result is kept for the
user's other processes; without a compiler, or without its OpenMP, products of pages do the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from archon.models.attention.paged_cache import PagedTensors
from archon.models.attention.spec import AttentionSpec

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decode.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
SECONDS = 120.0
"""That the compiler may take."""

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
Kernel = Callable[..., int]


def applies(q: Tensor, paged: PagedTensors) -> bool:
    """Returns whether the kernel computes attention of queries [B, H, K]: in float32 on a CPU, without a gradient, and
    where sequences times heads of the cache are at least as many as threads."""
    return (
        type(q) is type(paged.keys) is Tensor
        and q.device.type == "cpu"
        and q.dtype == paged.keys.dtype == torch.float32
        and not (q.requires_grad and torch.is_grad_enabled())
        and q.shape[0] * paged.rows.heads >= torch.get_num_threads()
        and kernel() is not None
    )


def attend(q: Tensor, paged: PagedTensors, pages: np.ndarray, lengths: np.ndarray, spec: AttentionSpec) -> Tensor:
    """Returns attention [B, H, V] of one query [B, H, K] per sequence to its pages in one layer, where `applies`.

    Args:
        pages: int64 [B, width], the pages of each sequence, in order.
        lengths: int64 [B], tokens of each sequence, at least 1.
    """
    function, rows, page_size = kernel(), paged.rows, paged.keys.shape[-2]
    assert function is not None
    q = q.contiguous()
    out = q.new_empty(*q.shape[:2], rows.value_features)
    sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
    assert sinks is None or sinks.numel() == q.shape[1]
    assert pages.shape[1] * page_size >= lengths.max()
    pages, lengths = np.ascontiguousarray(pages, dtype=np.int64), np.ascontiguousarray(lengths, dtype=np.int64)
    failed = function(
        out.data_ptr(),
        q.data_ptr(),
        paged.keys.data_ptr(),
        paged.values.data_ptr(),
        pages.ctypes.data,
        lengths.ctypes.data,
        None if sinks is None else sinks.data_ptr(),
        *q.shape[:2],
        rows.heads,
        rows.key_features,
        rows.value_features,
        paged.keys.stride(-2),
        paged.values.stride(-2),
        page_size,
        pages.shape[1],
        spec.window or 0,
        spec.scale,
        spec.soft_cap or 0.0,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("attention to pages: out of memory")
    return out


@functools.cache
def kernel() -> Kernel | None:
    """Returns the compiled function, built if need be; None where it cannot be."""
    try:
        ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)  # a second OpenMP would have threads of its own
        function: Kernel = ctypes.CDLL(str(_library())).decode_attention
    except (AttributeError, OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        reason = f"{error} {said.decode(errors='replace')}".strip()
        logger.info("generation on this CPU goes without its compiled attention: %s", reason)
        return None
    function.argtypes = [*[_POINTER] * 7, *[_INT] * 10, _FLOAT, _FLOAT, ctypes.c_int]  # type: ignore[attr-defined]
    return function


def _library() -> Path:
    """Returns the shared library for this source, compiler and processor, built where it is missing."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=SECONDS).stdout
    if b"clang" in version:
        raise OSError("clang has an OpenMP of its own, whose threads would be in the way of torch's; set CC to a gcc")
    what = [
        SOURCE.read_bytes(),
        version,
        shlex.join([*compiler, *FLAGS]).encode(),
        platform.machine().encode(),
        _processor(),
    ]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "archon" / "kernels"
    library = folder / f"decode-{hashlib.sha256(b'|'.join(what)).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / library.name
            command = [*compiler, *FLAGS, "-o", str(built), str(SOURCE), "-lm"]
            subprocess.run(command, capture_output=True, check=True, timeout=SECONDS)
            with built.open("rb") as file:
                os.fsync(file.fileno())
            built.replace(library)  # other processes see all of it or nothing
    return library


def _processor() -> bytes:
    """Returns what code for this processor may use; a home folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
