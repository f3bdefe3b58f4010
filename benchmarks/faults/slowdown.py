"""Measure how much slower this machine has become, by a process that computes at short intervals."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Self

SPIN_SECONDS = 0.03
"""CPU seconds per probe: several scheduler quanta, so that a process after a sleep has no advantage."""
EVERY_SECONDS = 0.5


class Slowdown:
    """Watches until its block is left."""

    def __enter__(self) -> Self:
        self._seen: list[tuple[float, float]] = []
        self._process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._seen.append((time.monotonic(), float(line)))

    def since(self, moment: float) -> float:
        """Return the mean of wall time over processor time since a moment of the monotonic clock; 1 on an idle
        machine, and where nothing was measured since."""
        seen = [ratio for when, ratio in self._seen if when >= moment]
        return max(1.0, sum(seen) / len(seen)) if seen else 1.0


def _spin() -> None:
    while True:
        began, used = time.perf_counter(), time.thread_time()
        while time.thread_time() - used < SPIN_SECONDS:
            pass
        sys.stdout.write(f"{(time.perf_counter() - began) / SPIN_SECONDS}\n")
        sys.stdout.flush()
        time.sleep(EVERY_SECONDS)


if __name__ == "__main__":
    _spin()
