"""A node of a Ray cluster, as `ray start` makes one, on this machine or in a network namespace."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).resolve().parents[2]
HEAD = "ray start --head --block --port {port} --disable-usage-stats --include-dashboard=false"
NODE = "ray start --block --address {address}"
BOUNDS = ["--object-store-memory=100000000", "--include-log-monitor=false"]
# Ray's own defaults need half a minute to notice that a host is cut off.
WATCHFUL = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    **WATCHFUL,
}


class RayNode:
    """A process of `ray start`: the head of a new cluster, or with `head` a further node of that.

    Attributes:
        address: of the cluster.

    Args:
        folder: for its files; short, as sockets are among them.
        start: the command.
        ip: of its host; None: that which Ray finds.
        before: stands before the command.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start: str | None = None,
        ip: str | None = None,
        head: RayNode | None = None,
        cpus: int = 8,
        resources: str = "{}",
        before: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        if head is None:
            start = start or HEAD.format(port=_free_port())
            self.address = f"{ip or '127.0.0.1'}:{re.search(r'--port[= ]([0-9]+)', start)[1]}"  # type: ignore[index]
        else:
            self.address, start = head.address, start or NODE.format(address=head.address)
        program, *words = shlex.split(start)
        command = [*before, str(Path(sys.executable).with_name(program)), *words, *BOUNDS, f"--num-cpus={cpus}"]
        command += [f"--resources={resources}"]
        command += [f"--temp-dir={folder}", "--no-monitor"] if head is None else []
        command += [] if ip is None else [f"--node-ip-address={ip}"]
        self.log = folder / f"start-{secrets.token_hex(4)}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self, seconds: float = 120) -> Self:
        """Return the node once it has started."""
        until = time.monotonic() + seconds
        while b"Ray runtime started" not in self.log.read_bytes():
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()
            time.sleep(0.2)
        return self

    def processes(self) -> list[psutil.Process]:
        """Return what runs on the node: Ray's own processes and its workers."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """End the node as a power cut would."""
        for process in [*self.processes(), self.process]:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait(30)

    def stop(self) -> None:
        """End the node and whatever of it is left."""
        left = self.processes()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
