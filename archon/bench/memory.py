"""Memory of a process: what its kernel counters and, on a GPU, torch's allocator say."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Any


def _status(pid: int | str, field: str) -> int:
    """A field of /proc/PID/status in bytes; 0 when the process or the field is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def anonymous_bytes(pid: int | str = "self") -> int:
    """Resident memory that no file backs (RssAnon)."""
    return _status(pid, "RssAnon")


def give_back_free_memory() -> None:
    """Collect garbage and return the C library's free memory: what is measured next starts from what is in use."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library: there is nothing to trim


class MemoryMeter:
    """Peak memory of this process from construction to `read`.

    `rss_peak` is the whole process's largest resident memory, `rss_above_start` what it grew by; on a GPU also torch's
    peak `allocated` and `reserved` there. `rss` is the resident memory at the start, 0 where it cannot be known.

    Args:
        on_gpu: whether the work is done on a GPU; by default, if there is one.
    """

    def __init__(self, on_gpu: bool = True) -> None:
        give_back_free_memory()
        self._gpu = _cuda() if on_gpu else None
        if self._gpu is not None:
            self._gpu.synchronize()
            self._gpu.reset_peak_memory_stats()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5: forget the peak of the resident memory
            self.rss = _status("self", "VmRSS")
        except OSError:
            self.rss = 0  # without the reset a peak would be that of the process's whole life

    def synchronize(self) -> None:
        """Wait until the GPU, if there is one, has done its work."""
        if self._gpu is not None:
            self._gpu.synchronize()

    def read(self) -> dict[str, int]:
        """Bytes by kind; a kind that cannot be known here is left out."""
        sizes: dict[str, int] = {}
        if self.rss:
            peak = _status("self", "VmHWM")
            sizes |= {"rss_peak": peak, "rss_above_start": peak - self.rss}
        if self._gpu is not None:
            sizes |= {"allocated": self._gpu.max_memory_allocated(), "reserved": self._gpu.max_memory_reserved()}
        return sizes


def _cuda() -> Any:
    torch = sys.modules.get("torch")  # a process that never loaded it has nothing on a GPU
    return torch.cuda if torch is not None and torch.cuda.is_available() else None
