"""Capacity of this machine or its container: processors, memory, and the number of ranks that it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from archon.schema.errors import LayoutError

RANKS_PER_CORE = 8
"""Ranks of a core: small layouts run on a laptop for tests, and beyond it ranks only wait for each other."""
RANK_BYTES = 256 * 2**20
"""Memory of a rank without a model: the interpreter, PyTorch and a gloo group (240 MiB measured)."""
GIB = 2**30


def rank_limit(root: Path = Path("/")) -> int:
    """Return the maximum number of ranks on this machine: 8 per core and 256 MiB each, and at least 1."""
    return max(1, min(int(RANKS_PER_CORE * cores(root)), memory_bytes(root) // RANK_BYTES))


def rank_limit_error(ranks: int, noun: str = "ranks") -> str:
    """Return why this machine cannot run `ranks` processes, named `noun`; an empty string if it can."""
    limit = rank_limit()
    if ranks <= limit:
        return ""
    return (
        f"{ranks} {noun} do not fit this machine, which runs at most {limit}: {RANKS_PER_CORE} on each of {cores():g} "
        f"processors, and one per {RANK_BYTES >> 20} MiB of {memory_bytes() / GIB:.1f} GiB of memory; use fewer, or "
        "more machines"
    )


def require_rank_capacity(ranks: int) -> None:
    """Raise LayoutError if this machine cannot run `ranks` ranks."""
    if error := rank_limit_error(ranks):
        raise LayoutError(error)


def cores(root: Path = Path("/")) -> float:
    """Return the processors that this process may use: its affinity, or the smaller quota of its control groups.

    Args:
        root: folder with `proc` and `sys`.
    """
    limits = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    for group in _control_groups("cpu", root):
        with suppress(OSError, ValueError):  # no such file, or "max": no limit
            quota, period = map(int, (group / "cpu.max").read_text().split())
            limits.append(quota / period)
        with suppress(OSError, ValueError):  # version 1; -1: no limit
            quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:
                limits.append(quota / period)
    return min(limits)


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory of this machine, or the smaller limit of its control groups; `root` as for `cores`."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _control_groups("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):  # versions 2 and 1
            with suppress(OSError, ValueError):  # no such file, or "max": no limit
                limits.append(int((group / name).read_text()))
    return min(limits)


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups and their parents, of both versions.

    A container may show only its own group, as the top folder, and name a path outside it in `/proc/self/cgroup`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return
    top = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folders = [top / controllers, top / controller] if controllers else [top, top / "unified"]
        for folder in folders:
            group = folder / path.lstrip("/")
            yield from [group, *(parent for parent in group.parents if parent.is_relative_to(folder))]
