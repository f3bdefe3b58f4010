"""Peak memory of a process, from the kernel's counters and torch's GPU allocator."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Any


def status_bytes(field: str, pid: int | str = "self") -> int:
    """Return a field of /proc/PID/status in bytes; 0 if the process or the field does not exist."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)


def trim_free_memory() -> None:
    """Collect garbage and release the C library's free memory, so a measurement starts from the used memory."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library has no malloc_trim


class MemoryMeter:
    """Measures the peak memory of this process from construction to `read`.

    `rss_peak` is the peak of resident memory, `rss_above_start` its growth. On a GPU, `allocated` and `reserved` are
    the peaks of torch's allocator. `rss` is the resident memory at the start, 0 if unknown.

    Args:
        on_gpu: also measure GPU memory, if there is a GPU.
    """

    def __init__(self, on_gpu: bool = True) -> None:
        trim_free_memory()
        self._gpu = _cuda() if on_gpu else None
        if self._gpu is not None:
            self._gpu.synchronize()
            self._gpu.reset_peak_memory_stats()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5 resets the peak of the resident memory
            self.rss = status_bytes("VmRSS")
        except OSError:
            self.rss = 0  # without the reset, the peak would include everything since process start

    def synchronize(self) -> None:
        """Wait until the GPU, if there is one, is idle."""
        if self._gpu is not None:
            self._gpu.synchronize()

    def read(self) -> dict[str, int]:
        """Return peak bytes by kind; kinds that are unknown on this machine are omitted."""
        sizes: dict[str, int] = {}
        if self.rss:
            peak = status_bytes("VmHWM")
            sizes |= {"rss_peak": peak, "rss_above_start": peak - self.rss}
        if self._gpu is not None:
            sizes |= {"allocated": self._gpu.max_memory_allocated(), "reserved": self._gpu.max_memory_reserved()}
        return sizes


def _cuda() -> Any:
    torch = sys.modules.get("torch")  # without torch, the process uses no GPU
    return torch.cuda if torch is not None and torch.cuda.is_available() else None
