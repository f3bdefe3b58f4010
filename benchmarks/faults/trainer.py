"""The trainer of a run as a user has it: torchrun, which starts its ranks anew where one ends, started again itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from archon.training.metrics import METRICS_FILE, read_jsonl
from benchmarks.harness import ROOT, BenchmarkError
from benchmarks.namespaces import Host

RANKS = 2
RESTARTS = 3
"""Restarts of the ranks by one torchrun."""
END_SECONDS = 90.0
_START_SECONDS = 30.0
_BEGINS = ("resuming after step", "the run begins at step")


class Trainer:
    """`archon rl` of two ranks on a host, with a run to resume at each start.

    Args:
        config: the run's file.
        run_dir: its folder.
        log: for the output of all starts.
        host: on which it runs.
    """

    def __init__(self, config: Path, run_dir: Path, log: Path, host: Host) -> None:
        self._config, self._run_dir, self._log, self._host = config, run_dir, log, host
        self.started_again = 0
        self._start()

    def _start(self) -> None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        torchrun += ["--monitor-interval", "0.2", "--max-restarts", str(RESTARTS), "--nproc-per-node", str(RANKS)]
        command = [sys.executable, *torchrun, "-m", "archon", "rl", "--config", str(self._config), "resume=true"]
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._host.command(*command),
                env=os.environ | own,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def keep(self) -> None:
        """Start the run again if it has ended."""
        if self._process.poll() is not None:
            self.started_again += 1
            self._start()

    @property
    def starts(self) -> int:
        """How often the ranks began or resumed the run."""
        return sum(self.output().count(line) for line in _BEGINS)

    def output(self) -> str:
        """Return all that was printed so far."""
        return self._log.read_text(errors="replace")

    def steps(self) -> list[dict[str, Any]]:
        """Return the records of the run's steps, without one that is being written."""
        path = self._run_dir / METRICS_FILE
        return read_jsonl(path) if path.exists() else []

    def signal_rank(self, rank: int, number: signal.Signals) -> int:
        """Send a signal to the process of a rank and return its id.

        Raises:
            BenchmarkError: the rank has no process.
        """
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            for pid in _children(self._process.pid):
                if f"RANK={rank}".encode() in _environment(pid):
                    os.kill(pid, number)
                    return pid
            time.sleep(0.05)
        raise BenchmarkError(f"rank {rank} does not run: {self.output()[-2000:]}")

    def stop(self) -> int:
        """Ask the run to save and to end. Returns the exit code of torchrun; raises BenchmarkError if it hangs."""
        self._process.terminate()
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"the run did not end within {END_SECONDS:g} s: {self.output()[-2000:]}") from None

    def end(self) -> None:
        """End all its processes, however they are."""
        ranks = _children(self._process.pid)
        self._process.kill()
        for pid in ranks:
            if b"RANK" in b"".join(_environment(pid)):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def _children(parent: int) -> list[int]:
    """Return the child processes of `parent`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
