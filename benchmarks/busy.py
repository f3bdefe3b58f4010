"""Measure how much longer the demo and the tests take on a busy machine.

The demo is `archon rl --config rl/recipes/arithmetic_cpu.yaml`, stopped after 30 steps: bootstrap, fine-tuning, RL,
evaluation and export. Fine-tuning runs a fixed number of steps here, because the demo's reward threshold would stop it
at a different step with another thread count, which changes rounding. The demo runs alone, with two background CPU
loops, and alone with torch's default thread count, which `archon.engine.threads` must at least match.

The tests are those of `make test`, alone and with one background CPU loop, once each: about an hour.

All sides must do the same work: equal numbers of steps and episodes and a similar held-out reward, or equal numbers of
passed tests.

    python -m benchmarks.busy
    python -m benchmarks.busy --case tests --rounds 1
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from archon.tools.bench.origin import spread
from archon.training.metrics import METRICS_FILE, read_jsonl
from benchmarks import harness
from benchmarks.harness import ROOT, say

RECIPE = ROOT / "rl" / "recipes" / "arithmetic_cpu.yaml"
BOOTSTRAP = RECIPE.with_name("arithmetic_bootstrap.yaml")
ALONE = "alone"
FIXED = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
"""torch's default thread count, held fixed."""


WARMUP_STEPS = 240
"""Fine-tuning steps; with its reward threshold the demo took 230 and 250."""
REWARD, EPISODES = "held-out reward", "rollout/episodes"
REWARDS_APART = 0.25
"""Tolerance of the final reward: another thread count changes rounding and therefore the samples."""


class Side(NamedTuple):
    """`loops` busy processes next to it; `environment` in addition to this process's."""

    loops: int
    environment: dict[str, str]


class Case(NamedTuple):
    """One measurement: its sides and the aims of their ratios."""

    sides: dict[str, Side]
    aims: dict[str, str]


NEXT_TO_TWO, NEXT_TO_ONE, DEFAULT = (
    "with two background CPU loops",
    "with one background CPU loop",
    "alone, fixed thread count",
)
CASES = {
    "demo": Case(
        {ALONE: Side(0, {}), NEXT_TO_TWO: Side(2, {}), DEFAULT: Side(0, FIXED)},
        {f"{NEXT_TO_TWO} / {ALONE}": "<= 2.5", f"{ALONE} / {DEFAULT}": "<= 1.05"},
    ),
    "tests": Case({ALONE: Side(0, {}), NEXT_TO_ONE: Side(1, {})}, {f"{NEXT_TO_ONE} / {ALONE}": "<= 2"}),
}


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Let that many processes compute for the time of the block."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def command(case: str, folder: Path, steps: int) -> list[str]:
    """Return the command of the case."""
    if case == "tests":
        return ["make", "test"]
    bootstrap = yaml.safe_load(BOOTSTRAP.read_text(encoding="utf-8"))
    bootstrap["warmup"]["total_steps"] = WARMUP_STEPS
    bootstrap["warmup"]["target"]["target_reward"] = 1.0  # measured as often, and not reached
    path = folder.with_name("bootstrap.yaml")
    path.write_text(yaml.safe_dump(bootstrap), encoding="utf-8")
    # The recipe warms up for 50 steps, which a shorter run has not.
    changes = (f"run_dir={folder}", f"bootstrap={path}", f"total_steps={steps}")
    changes += (f"actor.scheduler.warmup_steps={steps // 6}",)
    return [sys.executable, "-m", "archon", "rl", "--config", str(RECIPE), *changes]


def run(case: str, side: Side, steps: int) -> tuple[float, dict[str, float]]:
    """Return the wall time and the results of one run.

    Raises:
        BenchmarkError: the run failed.
    """
    with tempfile.TemporaryDirectory() as folder, busy(side.loops):
        start = time.perf_counter()
        done = subprocess.run(
            command(case, Path(folder) / "run", steps),
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | side.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            raise harness.BenchmarkError(f"it ended with {done.returncode}: {done.stdout[-2000:]}")
        if case == "tests":
            return seconds, count_passed(done.stdout)
        return seconds, {"fine-tuning steps": fine_tuned(done.stdout)} | learned(Path(folder) / "run")


def count_passed(output: str) -> dict[str, float]:
    """Return how many tests passed, of pytest's output."""
    return {"tests": float(re.findall(r"(\d+) passed", output)[-1])}


def fine_tuned(output: str) -> float:
    """Return the last step of fine-tuning that a run's output shows, which is its last."""
    return float(re.findall(r"^sft (\d+)/", output, re.MULTILINE)[-1])


def learned(folder: Path) -> dict[str, float]:
    """Return the steps and episodes of a run, and its last held-out reward."""
    lines = read_jsonl(folder / METRICS_FILE)
    steps = [line for line in lines if EPISODES in line]
    rewards = [line["eval/reward"] for line in lines if "eval/reward" in line]
    return {"steps": float(len(steps)), EPISODES: sum(line[EPISODES] for line in steps), REWARD: rewards[-1]}


def compare(first: str, done: dict[str, dict[str, float]]) -> list[harness.NumericCheck]:
    """Compare the results of all sides with the first.

    Raises:
        DisagreementError: they differ.
    """
    checks = []
    for what, ours in done[first].items():
        theirs = {side: facts[what] for side, facts in done.items() if side != first}
        checks += harness.check_close(what, ours, theirs, REWARDS_APART if what == REWARD else 0.0)
    return checks


def measure(name: str, rounds: int, steps: int, keep: bool) -> None:
    """Measure one case, its sides in turn."""
    case = CASES[name]
    record = harness.new_record("busy", name, os.cpu_count() or 1)
    record.setup = {"steps": steps} if name == "demo" else {}
    seconds: dict[str, list[float]] = {side: [] for side in case.sides}
    for number in range(rounds):
        done: dict[str, dict[str, float]] = {}
        for name_of_side in list(case.sides)[:: -1 if number % 2 else 1]:
            taken, done[name_of_side] = run(name, case.sides[name_of_side], steps)
            seconds[name_of_side].append(taken)
            say(f"  {name_of_side}: {seconds[name_of_side][-1]:.1f} s")
        record.checks = compare(ALONE, done)
    record.sides = {side: spread(values, "s") for side, values in seconds.items()}
    for ratio, aim in case.aims.items():
        ours, theirs = ratio.split(" / ")
        record.ratios[ratio] = harness.ratio(seconds[ours], seconds[theirs], aim)
    harness.finish(record, keep)


def main() -> None:
    """Parse and measure."""
    parser = harness.parser(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--case", choices=CASES, default="demo")
    arguments = parser.parse_args()
    rounds, steps = (1, 3) if arguments.quick else (arguments.rounds, 30)
    measure(arguments.case, rounds, steps, not (arguments.quick or arguments.no_record))


if __name__ == "__main__":
    main()
