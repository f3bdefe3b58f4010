"""Pool of reusable rank processes: gloo over loopback, one thread per rank.

Starting processes costs more than a typical case, so they stay alive; a case is a function that all of them call. A
rank that raises, dies or hangs ends its case with the tracebacks of all ranks. The pool then restarts, so no case
inherits broken collectives.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from archon.engine.forkserver import forkserver_context, replace_environment
from archon.schema.capacity import require_rank_capacity
from archon.schema.private_directory import PrivateDirectory

START_SECONDS = 120.0
CASE_SECONDS = 240.0


class RankError(AssertionError):
    """A case failed on some ranks; the message has their tracebacks."""


class Pool:
    """Pool of `size` rank processes, started on first use.

    with Pool(4) as pool:
        results = pool.run(function, argument, …)  # a module-level function and picklable arguments; one result a rank
    """

    def __init__(self, size: int) -> None:
        require_rank_capacity(size)
        self.size = size
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder = PrivateDirectory("archon-ranks-")

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = CASE_SECONDS) -> list[Any]:
        """Call `function(*args)` on every rank; return the results in rank order.

        Raises:
            RankError: some ranks failed; has their tracebacks.
        """
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((function.__module__, function.__qualname__, args))
        results = self._collect(timeout)
        failed = {rank: text for rank, (succeeded, text) in results.items() if not succeeded}
        if failed:
            self.close()
            raise RankError("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failed.items())))
        return [value for _, (_, value) in sorted(results.items())]

    def _start(self) -> None:
        context = forkserver_context()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.size):
            pipe, rank_pipe = context.Pipe()
            arguments = (rank, self.size, port, rank_pipe, self._trace(rank), dict(os.environ))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            rank_pipe.close()
            self._ranks.append((process, pipe))
        ready = self._collect(START_SECONDS)
        if any(not succeeded for succeeded, _ in ready.values()):
            self.close()
            raise RankError("\n".join(str(text) for _, text in ready.values()))

    def _trace(self, rank: int) -> str:
        return str(self._folder.path / f"rank{rank}.txt")

    def _collect(self, timeout: float) -> dict[int, tuple[bool, Any]]:
        """Return (success, result or traceback) of each rank; after a failure, wait only 5 seconds for the others."""
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(results) < self.size:
            pipes: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in results}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    results[rank] = self._ranks[rank][1].recv()
                except EOFError:
                    results[rank] = (False, f"the process ended (exit code {self._ranks[rank][0].exitcode})")
                if not results[rank][0]:
                    deadline = min(deadline, time.monotonic() + 5.0)
            if not ready and time.monotonic() >= deadline:
                for rank in pipes.values():
                    results[rank] = (False, f"no result before the timeout; current stack:\n{self._stack(rank)}")
        return results

    def _stack(self, rank: int) -> str:
        process = self._ranks[rank][0]
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return Path(self._trace(rank)).read_text() if Path(self._trace(rank)).exists() else "(no stack was written)"

    def close(self) -> None:
        """Kill the processes."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(rank: int, size: int, port: int, pipe: Connection, trace: str, environment: dict[str, str]) -> None:
    replace_environment(environment)
    handle = open(trace, "w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=handle, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import torch
        import torch.distributed as dist

        from archon.parallel.gloo import use_single_worker_gloo

        use_single_worker_gloo()
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=CASE_SECONDS),
        )
        pipe.send((True, None))
    except BaseException:  # noqa: BLE001 - the pool raises it
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            sys.exit(0)
        try:
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            pipe.send((True, function(*args)))  # type: ignore[operator]
        except BaseException:  # noqa: BLE001 - the pool raises it
            pipe.send((False, traceback.format_exc()))
