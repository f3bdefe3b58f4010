"""Watch a process from outside through /proc: do its resources grow?

The first third of the samples is warm-up. The first and the last quarter of the remaining samples are compared. The
minimum of memory may grow by 3 %; a process returns to it whenever it frees pages. The minimum of open files, threads
and child processes, which vary with the work, may not grow. The median of sockets may grow by a tenth, because clients
open as many as they use at once; a leak of one per hundred requests would exceed that within minutes.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

EVERY = 5.0
SEEN: dict[str, tuple[Callable[[Iterable[float]], float], float]] = {
    "mib": (min, 1.03),
    "files": (min, 1.0),
    "threads": (min, 1.0),
    "processes": (min, 1.0),
    "sockets": (statistics.median, 1.1),
}
"""Statistic of each quarter, and its allowed growth factor."""

Sample = dict[str, float]


class Watch:
    """Takes a sample of a process and its children every few seconds of the block."""

    def __init__(self, pid: int) -> None:
        self.samples: list[Sample] = []
        self._pid, self._done = pid, threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()

    def _watch(self) -> None:
        going = True
        while going:
            going = not self._done.wait(EVERY)  # a last sample at the end, which may come before the first
            if (seen := sample(self._pid)) is not None:
                self.samples.append(seen)

    def mib_by_minute(self) -> list[int]:
        """Memory at the first sample of every minute."""
        return [round(seen["mib"]) for seen in self.samples[:: round(60 / EVERY)]]


def sample(pid: int) -> Sample | None:
    """Return the current resources of a process; None if one of its processes ended meanwhile."""
    try:
        children = descendants(pid)
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        return {
            "mib": sum(map(resident, [pid, *children])) / 2**20,
            "sockets": sum(link.startswith("socket:") for link in links),
            "files": sum(not link.startswith("socket:") for link in links),
            "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
            "processes": len(children),
        }
    except (FileNotFoundError, ProcessLookupError, StopIteration):
        return None


def descendants(pid: int) -> list[int]:
    """Child processes, recursively."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def resident(pid: int) -> int:
    """Private and shared memory of a process, in bytes; memory shared within the group counts once.

    File pages, such as code, do not count: their share changes when other processes map the same files.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def verdict(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the first and the last quarter after warm-up, and whether they are alike."""
    settled = samples[len(samples) // 3 :]
    quarter = max(1, len(settled) // 4)
    then, now = (
        {name: of([s[name] for s in part]) for name, (of, _) in SEEN.items()}
        for part in (settled[:quarter], settled[-quarter:])
    )
    flat = all(now[name] <= growth * then[name] for name, (_, growth) in SEEN.items())
    return {"after_warm_up": then, "at_the_end": now, "flat": flat}
