"""Train a small task with asynchronous rollouts on two servers, in several layouts and stalenesses.

    python -m benchmarks.async_layouts --record benchmarks/records/async_layouts.jsonl
    python -m benchmarks.async_layouts --record trial.jsonl --within 1 d2:2 -- total_steps=4 evaluation.max_prompts=20

Each asynchronous run must learn as well as the synchronous run, train on no token that is too stale, and train on no
prompt twice. A case is LAYOUT:STALENESS. Two reference runs come first: the synchronous run in one process without
servers, and a control with asynchronous rollouts whose rewards are shuffled over the batch. All runs start from the
same warmed-up checkpoint.

A line of the record is one run: held-out reward of sampled answers before and after, the largest staleness of a trained
token, whether a prompt was trained twice or lost, and whether the run met its expectation. A run must end at most 0.02
below the synchronous run; the control must end at most 0.1 above its start. The exit code is 1 if a run fails.

The task (the first digit of the larger of two numbers that are far apart) is learned almost completely, even from
tokens that are eight versions old. Final rewards therefore differ because of mistakes, not because of progress: with
two answers to each of 454 held-out prompts, a difference of 0.02 is 18 answers.

A run that is already in the record with the same checkpoint and overrides is skipped unless it failed, so that an
interrupted command can be repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from archon.parallel.layout import parse_layout
from archon.training.metrics import read_jsonl
from benchmarks.harness import ROOT, BenchmarkError, say
from benchmarks.learning import preferences

RECIPE = ROOT / "benchmarks" / "learning" / "larger.yaml"
BOOTSTRAP = RECIPE.with_name("larger_bootstrap.yaml")
WITHIN, FLAT = 0.02, 0.1
LAUNCH = "{engine: archon, count: 2, args: [device=cpu]}"
"""The servers of every run but the synchronous one, which the run starts and ends."""
PROMPTS_PER_STEP = 32
APART = 30
ROWS = "python:benchmarks.async_layouts.rows"
CHANGES = (
    *("total_steps=40", "algorithm.kl.coef=0.0", "algorithm.zero_variance_groups=keep"),
    *("gconfig.max_new_tokens=1", "evaluation.n_samples=2"),
    *(f"{section}.{key}" for section in ("train_data", "eval_data") for key in (f"path={ROWS}", "response_key=answer")),
    *(f"rollout.prompts_per_step={PROMPTS_PER_STEP}", f"rollout.dump_groups={PROMPTS_PER_STEP}"),
)
"""Overrides of the recipe.

Whole answers take several times as many steps, and more with stale tokens: the model learns last not to mix the digits
of the two numbers. Every group is trained on, even if all its answers are right.
"""
CASES = tuple(f"{layout}:{staleness}" for layout, staleness in product(("d2", "t2", "p2", "d2t2"), (0, 2, 8)))


@dataclass(frozen=True)
class Case:
    """One run: its layout, how far it runs ahead, whether servers answer, and whether its rewards say nothing."""

    layout: str
    staleness: int
    servers: bool = True
    control: bool = False

    @classmethod
    def parse(cls, text: str) -> Case:
        layout, _, staleness = text.partition(":")
        return cls(layout, int(staleness))

    @property
    def name(self) -> str:
        where = "servers" if self.servers else "in process"
        return f"{self.layout}:{self.staleness} {where}{', control' if self.control else ''}"


SYNCHRONOUS = Case("d1", 0, servers=False)
CONTROL = Case("d1", 2, control=True)


def rows(split: str) -> list[dict[str, str]]:
    """Return the recipe's rows with the first digit as the answer, of pairs that differ by at least `APART`; no two
    numbers of `test` are in `train`."""
    pairs = [row for row in preferences.rows(split) if abs(int(row["chosen"]) - int(row["rejected"])) >= APART]
    return [{"prompt": row["prompt"], "answer": row["chosen"][0]} for row in pairs]


def train(case: Case, start: Path, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the recipe from the checkpoint `start` and return its record line."""
    run_dir, processes = folder / case.name.replace(" ", "-").replace(",", ""), parse_layout(case.layout).world_size
    changes = [
        *(f"run_dir={run_dir}", f"actor.path={start}", "bootstrap=null"),
        *(f"actor.layout={case.layout}", f"rollout.max_staleness={case.staleness}"),
        *CHANGES,
        f"control.shuffle_rewards={str(case.control).lower()}",
    ]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    started = time.monotonic()
    if case.servers:
        changes.append(f"rollout.launch={LAUNCH}")
    command = [*(launch if processes > 1 else []), "-m", "archon", "rl", "--config", str(RECIPE)]
    code = subprocess.run(
        [sys.executable, *command, *changes, *overrides],
        env={"OMP_NUM_THREADS": "1"} | os.environ,
        cwd=ROOT,
        check=False,
    ).returncode
    found: dict[str, Any] = {"case": case.name, "code": code, "seconds": round(time.monotonic() - started, 1)}
    return found if code else found | outcome(run_dir)


def outcome(run_dir: Path) -> dict[str, Any]:
    """Read the outcome of a finished run from its records."""
    rows = read_jsonl(run_dir / "metrics.jsonl")
    steps = [row for row in rows if row["step"]]
    rewards = [row["eval/reward"] for row in rows if "eval/reward" in row]
    dumped = {(row["step"], row["group"]) for row in read_jsonl(run_dir / "trajectories.jsonl")}
    trained = sum(row.get("groups", 0) for row in steps)
    taken = len(steps) * PROMPTS_PER_STEP
    return {
        "steps": len(steps),
        "reward_before": rewards[0],
        "reward_after": rewards[-1],
        "staleness_max": max(row.get("staleness_max", 0.0) for row in steps),
        "overlap": round(sum(row.get("rollout/overlap", 0.0) for row in steps) / len(steps), 3),
        "each_once": len({group for _, group in dumped}) == len(dumped) == trained == taken,
    }


def is_as_expected(case: Case, found: dict[str, Any], synchronous: float, within: float) -> bool:
    """Return whether a run met its expectation; `synchronous` is the synchronous run's final reward."""
    if found["code"] or not found["each_once"] or found["staleness_max"] > case.staleness:
        return False
    if case.control:
        return bool(found["reward_after"] <= found["reward_before"] + FLAT)
    return bool(found["reward_after"] >= synchronous - within)


def warmed_up(path: Path) -> Path:
    """Return `path`, where the recipe's first checkpoint was made."""
    command = [sys.executable, "-m", "archon", "bootstrap", "--config", str(BOOTSTRAP), f"path={path}"]
    code = subprocess.run(command, env={"OMP_NUM_THREADS": "1"} | os.environ, cwd=ROOT, check=False).returncode
    if code:
        raise BenchmarkError(f"archon bootstrap ended with {code}")
    return path


def recorded(path: Path, of: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the finished runs of a record by case.

    Raises:
        BenchmarkError: the record has runs from another checkpoint or with other overrides.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for line in lines:
        if (found := {name: line[name] for name in of}) != of:
            raise BenchmarkError(f"{path} has a run of {found}, and this one is of {of}; name another record")
    return {line["case"]: line for line in lines if not line["code"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"default: {' '.join(CASES)}")
    parser.add_argument("--record", type=Path, required=True, help="JSON lines, continued where it was interrupted")
    parser.add_argument("--within", type=float, default=WITHIN, help="of the synchronous run's reward")
    parser.add_argument("--start", type=Path, help="the warmed-up checkpoint; default: one is made")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, overrides = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    missed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = options.start.absolute() if options.start else warmed_up(folder / "start")
        digest = hashlib.sha256((start / "model.safetensors").read_bytes()).hexdigest()[:16]
        of = {"start": digest, "changes": overrides}
        lines = recorded(options.record, of)
        for case in (SYNCHRONOUS, CONTROL, *map(Case.parse, options.cases)):
            if case.name not in lines:
                found = train(case, start, folder, overrides)
                if case == SYNCHRONOUS and found["code"]:
                    raise BenchmarkError(f"the synchronous run ended with {found['code']}; the others need its reward")
                lines[case.name] = found
                synchronous = lines[SYNCHRONOUS.name]["reward_after"]
                found |= of | {"as_expected": is_as_expected(case, found, synchronous, options.within)}
                options.record.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))
            say(f"{case.name}: {lines[case.name]}")
            missed += [] if lines[case.name]["as_expected"] else [case.name]
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
