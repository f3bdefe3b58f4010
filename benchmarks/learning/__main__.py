"""Check that each training method learns: small tasks with real commands, each with a control without training signal.

    python -m benchmarks.learning --record benchmarks/records/learning.jsonl
    python -m benchmarks.learning --record trial.jsonl calculator -- total_steps=10

A line of the record is one run: held-out reward of sampled answers before and after, the highest and lowest in between,
seconds from start to export (warm-up included), and whether it met its expectation:

- A task starts at or below 0.5 and ends at least 0.3 higher within six minutes. `shapes`, which first builds its vision
  encoder, must end at 0.85 or more within ten minutes. `staleness` must also end within 0.05 of `synchronous`.
- A control, with rewards shuffled over the batch (for DPO, randomly swapped pairs), never rises by more than 0.1 and
  ends within 0.1 of its start. The control of `distillation` has a teacher with random weights and may end lower.

The exit code is 1 if a run misses its expectation. A task and its control run side by side, with one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from archon.training.metrics import read_jsonl
from benchmarks.harness import ROOT, say

HERE = Path(__file__).parent
ARITHMETIC = ROOT / "rl" / "recipes" / "arithmetic_cpu.yaml"
START, RISE, FLAT, CLOSE, SECONDS = 0.5, 0.3, 0.1, 0.05, 360
SHUFFLED = ("control.shuffle_rewards=true",)
# A trainer in this process has its seeds for itself.
MEASURING = Lock()


@dataclass(frozen=True)
class Task:
    """One run: a configuration and overrides.

    `module` holds the command. `measure`, if set, computes held-out rewards for a run directory without them in its
    metrics. `teacher` makes the checkpoint `teacher` next to the run directory before the run, and `untaught` with
    random weights. `reach` is the minimum final held-out reward, `seconds` the time limit.
    """

    config: Path
    changes: tuple[str, ...] = ()
    control: tuple[str, ...] = SHUFFLED
    command: str = "rl"
    module: str = "archon"
    measure: Callable[[Path], list[float]] | None = None
    teacher: Path | None = None
    reach: float = 0.0
    seconds: float = SECONDS


def preferred_of(run_dir: Path) -> list[float]:
    """Return the held-out reward of the checkpoints that a run on pairs begins and ends with."""
    return [preferred_by(run_dir / name) for name in ("start", "export")]


def preferred_by(checkpoint: Path) -> float:
    """Return the share of held-out prompts with the preferred answer, sampled."""
    from archon.cli.config import load_config
    from archon.rl.config import RLConfig
    from archon.rl.trainer import RLTrainer

    asked = "{path: 'python:benchmarks.learning.preferences.rows', split: test, response_key: chosen}"
    changes = [
        f"actor.path={checkpoint}",
        f"run_dir={checkpoint}-measured",
        f"train_data={asked}",
        f"eval_data={asked}",
    ]
    config = load_config(
        RLConfig,
        ARITHMETIC,
        [*changes, "algorithm.kl.coef=0", "evaluation.greedy=false", "evaluation.well_formed=null", "bootstrap=null"],
    )
    with RLTrainer(config).opened() as trainer:
        return trainer.evaluate()["eval/reward"]


TASKS = {
    "synchronous": Task(ARITHMETIC, ("total_steps=500",)),
    "staleness": Task(ARITHMETIC, ("total_steps=500", "rollout.max_staleness=2")),
    "ppo": Task(
        ARITHMETIC,
        (
            *("algorithm.preset=ppo", "algorithm.kl.coef=0.05", "algorithm.zero_variance_groups=keep"),
            *("algorithm.minibatches=2", "critic.optimizer={lr: 5.0e-4, weight_decay: 0.01}"),
            "critic.scheduler={kind: constant, warmup_steps: 0}",
            *("gconfig.n_samples=1", "rollout.prompts_per_step=256", "total_steps=150"),
        ),
    ),
    "multi_turn": Task(
        ARITHMETIC,
        (
            *("workflow=archon.rl.MultiTurnWorkflow", "workflow_args.retry='!'", "workflow_args.turn_discount=0.9"),
            *(f"bootstrap={HERE / 'multi_turn_bootstrap.yaml'}", "evaluation.well_formed=null", "total_steps=700"),
        ),
    ),
    "environment": Task(HERE / "walking.yaml"),
    "calculator": Task(HERE / "calculator.yaml"),
    "step_wise_grpo": Task(
        HERE / "walking.yaml",
        (
            *("workflow=benchmarks.learning.walking.StepByStep", "algorithm.preset=step_wise_grpo"),
            *("algorithm.advantage=step_wise_grpo", "total_steps=100"),
        ),
    ),
    "distillation": Task(
        ARITHMETIC,
        (
            *("algorithm.preset=distill", "algorithm.kl.coef=0", "algorithm.zero_variance_groups=keep"),
            *("teacher.path=${run_dir}/../teacher", "gconfig.n_samples=1", "rollout.prompts_per_step=128"),
            *("total_steps=400", "evaluation.every=50", "checkpoint.every=0"),
        ),
        control=("teacher.path=${run_dir}/../untaught",),
        teacher=HERE / "teacher_bootstrap.yaml",
    ),
    "shapes": Task(ROOT / "rl" / "recipes" / "shapes_cpu.yaml", reach=0.85, seconds=600),
    "online": Task(HERE / "online.yaml", module="benchmarks.learning.online"),
    "dpo": Task(
        HERE / "preferences.yaml",
        control=("train_data.split=shuffled",),
        command="preference",
        measure=preferred_of,
    ),
}


def run(name: str, task: Task, folder: Path, changes: Sequence[str], control: bool) -> dict[str, Any]:
    """Run a task once, from nothing to its export, and returns the result."""
    run_dir = folder / "run"
    started = time.monotonic()

    def archon(command: str, config: Path, *changes: str, module: str = "archon") -> int:
        call = [sys.executable, "-m", module, command, "--config", str(config), *changes]
        return subprocess.run(call, env={"OMP_NUM_THREADS": "1"} | os.environ, cwd=ROOT, check=False).returncode

    if task.teacher is not None and control:
        archon("bootstrap", task.teacher, f"path={folder / 'untaught'}", "warmup=null")
    elif task.teacher is not None:
        archon("bootstrap", task.teacher, f"path={folder / 'teacher'}")
    code = archon(task.command, task.config, f"run_dir={run_dir}", *changes, module=task.module)
    found = {"task": name, "control": control, "code": code, "seconds": round(time.monotonic() - started, 1)}
    if code != 0:
        return found | {"reached": False}
    rows = read_jsonl(run_dir / "metrics.jsonl")
    with MEASURING:
        rewards = (
            task.measure(run_dir) if task.measure else [row["eval/reward"] for row in rows if "eval/reward" in row]
        )
    found |= {"steps": rows[-1]["step"], "before": rewards[0], "after": rewards[-1]}
    found |= {"highest": max(rewards), "lowest": min(rewards)}
    if control:
        kept = task.teacher is not None or rewards[-1] >= rewards[0] - FLAT
        return found | {"reached": max(rewards) <= rewards[0] + FLAT and kept}
    learned = rewards[0] <= START and rewards[-1] >= max(rewards[0] + RISE, task.reach)
    return found | {"reached": learned and found["seconds"] <= task.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help=f"default: {' '.join(TASKS)}")
    parser.add_argument("--record", type=Path, required=True, help="JSON lines; those of these tasks are replaced")
    parser.add_argument("--no-controls", action="store_true", help="leave the controls out")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, overrides = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    if unknown := [name for name in options.tasks if name not in TASKS]:
        parser.error(f"no such task here: {', '.join(unknown)}; expected some of {', '.join(TASKS)}")
    kept = options.record.read_text().splitlines() if options.record.exists() else []
    others = [line for line in map(json.loads, kept) if line["task"] not in options.tasks]
    lines: list[dict[str, Any]] = []
    controls = (False,) if options.no_controls else (False, True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        for name in options.tasks:

            def one(control: bool, name: str = name, task: Task = TASKS[name]) -> dict[str, Any]:
                where = Path(folder) / f"{name}{'-control' * control}"
                return run(name, task, where, [*task.changes, *(task.control if control else ()), *overrides], control)

            for line in pool.map(one, controls):
                lines.append(line)
                found = sorted([*others, *lines], key=lambda line: list(TASKS).index(line["task"]))
                options.record.write_text("".join(json.dumps(line) + "\n" for line in found))
                say(f"{name}: {line}")
    after = {line["task"]: line.get("after") for line in lines if not line["control"]}
    close = True
    if after.get("synchronous") is not None and after.get("staleness") is not None:
        close = abs(after["staleness"] - after["synchronous"]) <= CLOSE
        say(f"staleness ends {after['staleness'] - after['synchronous']:+.3f} from synchronous")
    sys.exit(0 if close and all(line["reached"] for line in lines) else 1)


if __name__ == "__main__":
    main()
