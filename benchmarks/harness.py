"""Shared parts of all benchmarks: sides in separate processes, alternating runs, and records.

Each side (archon or a peer) has a worker process, so that memory is measured per side and one library's patches do not
affect another. The parent starts all workers first and then runs them alternately. It imports neither torch nor
transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from archon.tools.bench.memory_meter import status_bytes
from archon.tools.bench.origin import NumericCheck, origin, relative_difference
from benchmarks.record import Ratio, Record

ROOT = Path(__file__).resolve().parents[1]
# Options reach every rank of a worker in its environment; requests reach rank 0 through its standard input.
OPTIONS = "ARCHON_BENCHMARK_OPTIONS"
# Seconds for a worker to exit after its input is closed, and for torchrun to end its ranks after a signal.
END_S = 20


class BenchmarkError(RuntimeError):
    """The sides did not compute the same thing, or archon itself could not run: nothing is timed."""


class DisagreementError(BenchmarkError):
    """Two sides did not compute the same thing."""


class Worker:
    """A side in a worker process, controlled by JSON lines.

    Args:
        module: benchmark module, for example `benchmarks.train_step`; it runs with `--worker SIDE`.
        side: name of the side.
        options: JSON-compatible options of `prepare`. With `ranks` above 1, the side runs that many torchrun processes,
            which share `threads`. `pythons` maps sides to the Python of another environment; in such an environment,
            neither the benchmark nor `archon` may import packages that it lacks.

    After the constructor exactly one of `facts` (results to check) and `missing` (why the side cannot run) is set.
    """

    def __init__(self, module: str, side: str, options: Mapping[str, Any]) -> None:
        self.side = side
        self.facts: dict[str, Any] | None = None
        self.missing: str | None = None
        ranks = options.get("ranks", 1)
        # Read by OpenMP and MKL when they are loaded, and by torch from them.
        threads = str(max(1, options["threads"] // ranks))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
        environment[OPTIONS] = json.dumps(dict(options))
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        python = options.get("pythons", {}).get(side, sys.executable)
        self._process = subprocess.Popen(
            [python, "-m", *(torchrun if ranks > 1 else []), module, "--worker", side],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._complaints: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        answer = self._hear()
        if "ready" in answer:
            self.facts = answer["ready"]
        else:
            self.missing = answer["error"]
            self.close()

    @classmethod
    def start(cls, module: str, side: str, options: Mapping[str, Any]) -> Worker:
        """Return a worker that can run. Raises BenchmarkError if it cannot."""
        worker = cls(module, side, options)
        if worker.missing is not None:
            raise BenchmarkError(f"{side}: {worker.missing}")
        return worker

    def run(self, **request: Any) -> dict[str, Any]:
        """Do one run. Returns its seconds, its memory and the side's results. Raises BenchmarkError if it fails."""
        answer = self._ask({"run": True, **request})
        if "error" in answer:
            raise BenchmarkError(f"{self.side}: {answer['error']}")
        return answer

    def run_watched(self, **request: Any) -> dict[str, Any]:
        """Do an untimed run, and add `anonymous_peak_bytes`, the peak of the process's RssAnon above its start."""
        start = status_bytes("RssAnon", self._process.pid)
        peak, done = start, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.001):
                peak = max(peak, status_bytes("RssAnon", self._process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            answer = self.run(**request)
        finally:
            done.set()
            watcher.join()
        return {**answer, "anonymous_peak_bytes": peak - start}

    def close(self) -> None:
        """End the process; idempotent."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # the process has ended before it read its input
                    stream.close()
        for end in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(timeout=END_S)
                return
            except subprocess.TimeoutExpired:
                end()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._complaints.append(line.rstrip())
            del self._complaints[:-40]

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its last output can still be read
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        reason = "killed, most likely for memory" if code == -9 else f"exit code {code}"
        return {"error": f"worker ended ({reason}): {' | '.join(self._complaints[-3:])}"}


class Sides:
    """The workers of one benchmark, closed together.

    Args:
        module: the benchmark.
        names: the sides. Sides named archon… must run; others may be missing.
        options: options of all sides.
    """

    def __init__(self, module: str, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self.workers: dict[str, Worker] = {}
        self.missing: dict[str, str] = {}
        for name in names:
            worker = Worker(module, name, options)
            if worker.missing is None:
                self.workers[name] = worker
                say(f"  {name}: ready")
            else:
                self.drop(name, worker.missing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.close()

    def facts(self, name: str) -> dict[str, Any]:
        """Return the facts that a running side reported."""
        facts = self.workers[name].facts
        assert facts is not None
        return facts

    def drop(self, name: str, reason: str) -> None:
        """Leave a side out and keep the reason; archon's cannot be left out."""
        say(f"  {name}: MISSING, {reason}")
        if name.startswith("archon"):
            raise BenchmarkError(f"{name} cannot run: {reason}")
        self.missing[name] = reason
        self.close(name)

    def close(self, name: str) -> None:
        """End one side."""
        worker = self.workers.pop(name, None)
        if worker is not None:
            worker.close()

    def alternate(self, rounds: int, warmup: int = 1, **request: Any) -> dict[str, list[dict[str, Any]]]:
        """Let the sides run in turn, `rounds` times each after `warmup` untimed ones.

        Every round starts with another side, so that no side always runs after the same one. A peer that fails is
        dropped with its reason.
        """
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in self.workers}
        for turn in range(warmup + rounds if self.workers else 0):
            order = list(self.workers)
            first = turn % len(order)
            for name in order[first:] + order[:first]:
                try:
                    result = self.workers[name].run(**request)
                except BenchmarkError as error:
                    self.drop(name, str(error))
                    runs.pop(name)
                    continue
                if turn >= warmup:
                    runs[name].append(result)
            say(f"  {'warm-up' if turn < warmup else 'round'} {turn + 1 - (turn >= warmup) * warmup} done")
        return runs


def serve(
    prepare: Callable[[str, dict[str, Any]], tuple[dict[str, Any], Callable[..., dict[str, Any]]]], side: str
) -> None:
    """Run in the worker: read options, prepare the side, then run it once per input line.

    `prepare(side, options)` returns facts for the parent's checks, and a function that does one run and returns further
    results besides seconds and memory. Returned seconds replace the measured ones. With several ranks, rank 0 answers
    with the slowest rank's seconds and the sum of the ranks' memory.
    """
    from archon.tools.bench.memory_meter import MemoryMeter, trim_free_memory

    # Output that a library prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(os.environ[OPTIONS])
    ranks = options.get("ranks", 1)
    speaks = ranks == 1 or os.environ["RANK"] == "0"

    def answer(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    def fail(error: Exception) -> None:
        answer({"error": one_line(error)})
        if ranks > 1:
            os._exit(1)  # immediately: other ranks may wait in a collective, and torchrun stops them

    try:
        facts, run = prepare(side, options)
    except Exception as error:
        return fail(error)
    trim_free_memory()
    if speaks:
        answer({"ready": facts})
    for line in _requests(ranks):
        request = json.loads(line)
        request.pop("run")
        meter = MemoryMeter()
        start = time.perf_counter()
        try:
            result = run(**request)
            meter.synchronize()
            measured = {"seconds": time.perf_counter() - start, "memory": meter.read()}
            measured = measured if ranks == 1 else _of_all_ranks(measured)
            trim_free_memory()  # so that the next run, and an outside watcher, start from the memory in use
            if speaks:
                answer({**measured, **result})
        except Exception as error:
            fail(error)
    return None


def _requests(ranks: int) -> Iterator[str]:
    """Yield the lines of the standard input, on every rank."""
    if ranks == 1:
        yield from sys.stdin
        return
    from archon.parallel.control_plane import ControlPlane

    world = ControlPlane.world()  # which `prepare` has joined
    while line := world.broadcast_json(sys.stdin.readline):
        yield line


def _of_all_ranks(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the slowest rank's seconds, and the sum of memory by kind."""
    from archon.parallel.control_plane import ControlPlane

    everyone = [json.loads(data) for data in ControlPlane.world().all_gather(json.dumps(measured).encode())]
    kinds = measured["memory"]
    return {
        "seconds": max(rank["seconds"] for rank in everyone),
        "memory": {kind: sum(rank["memory"][kind] for rank in everyone) for kind in kinds},
    }


def one_line(error: BaseException) -> str:
    """Return the class of an error and the start of its message, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def check_close(what: str, ours: float, theirs: Mapping[str, float], tolerance: float) -> list[NumericCheck]:
    """Compare archon's number with every peer's. Raises DisagreementError at the first that differs by more."""
    checks = []
    for peer, value in theirs.items():
        difference = relative_difference(ours, value)
        say(f"  {what}: archon {ours:.7g}, {peer} {value:.7g}, relative difference {difference:.1e}")
        if not difference <= tolerance:
            raise DisagreementError(
                f"{what} of archon and {peer} differ by {difference:.2e} > {tolerance:.0e}; nothing is timed"
            )
        checks.append(NumericCheck(what=what, peer=peer, difference=difference, tolerance=tolerance))
    return checks


def check_same(what: str, ours: Any, theirs: Mapping[str, Any]) -> list[NumericCheck]:
    """Check that archon's value equals every peer's. Raises DisagreementError at the first that differs."""
    checks = []
    for peer, value in theirs.items():
        say(f"  {what}: archon and {peer} {'agree' if ours == value else 'DIFFER'}")
        if ours != value:
            raise DisagreementError(f"{what} of archon and {peer} differ; nothing is timed")
        checks.append(NumericCheck(what=what, peer=peer, difference=0.0, tolerance=0.0))
    return checks


def ratio(ours: Sequence[float], theirs: Sequence[float], aim: str | None = None) -> Ratio:
    """Ratio of the medians; min and max are ratios of single rounds."""
    rounds = [a / b for a, b in zip(ours, theirs, strict=True)]
    value = statistics.median(ours) / statistics.median(theirs)
    return Ratio(
        value=value, min=min(rounds), max=max(rounds), aim=aim, aim_met=None if aim is None else meets(value, aim)
    )


def meets(value: float, aim: str) -> bool:
    """Return whether a ratio meets an aim written as `>= 1.05`, `<= 0.4` or `0.85 to 1.15`."""
    if " to " in aim:
        low, high = aim.split(" to ")
        return float(low) <= value <= float(high)
    sign, bound = aim.split()
    return value >= float(bound) if sign == ">=" else value <= float(bound)


def new_record(benchmark: str, case: str, threads: int, layout: str = "one process") -> Record:
    """Return a record of this command on this machine, still without numbers."""
    command = ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    return Record(
        benchmark=benchmark,
        case=case,
        threads=threads,
        layout=layout,
        **origin(shlex.join(command)),
    )


def say(text: str) -> None:
    """Print and flush a line."""
    print(text, flush=True)


def finish(record: Record, keep: bool) -> None:
    """Print a record's numbers, and write it below benchmarks/records when `keep`."""
    for name, side in record.sides.items():
        say(f"  {name}: {side.median:.4g} {side.unit} (min {side.min:.4g}, max {side.max:.4g})")
    for name, value in record.ratios.items():
        aim = "" if value.aim is None else f", aim {value.aim}: {'met' if value.aim_met else 'MISSED'}"
        say(f"  {name}: {value.value:.3g} (rounds {value.min:.3g} to {value.max:.3g}{aim})")
    for name, profile in record.profiles.items():
        parts = sorted(profile.items(), key=lambda part: -part[1])
        say(f"  {name}, a profiled step: {', '.join(f'{kind} {seconds:.3g} s' for kind, seconds in parts)}")
    for name, reason in record.missing.items():
        say(f"  {name}: MISSING, {reason}")
    if keep:
        say(f"  wrote {record.write().relative_to(ROOT)}")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the options of every benchmark."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--threads", type=int, default=2, help="threads of each side (default 2)")
    made.add_argument("--rounds", type=int, default=5, help="timed runs of each side, alternating (default 5)")
    made.add_argument("--quick", action="store_true", help="small sizes, to see that it works; writes no record")
    made.add_argument("--no-record", action="store_true", help="print only")
    made.add_argument("--worker", metavar="SIDE", help=argparse.SUPPRESS)
    return made
