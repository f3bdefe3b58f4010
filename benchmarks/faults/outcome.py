"""Check the records and the last checkpoint of a run: each prompt once, on tokens of the right weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from archon.checkpoint.native import load_latest
from archon.training.metrics import METRICS_FILE, TRAJECTORIES_FILE, read_jsonl

WRONG = 1e-5
"""Mean |Δ logprob| of a synchronous step that reveals tokens of other weights."""
WRONG_TOKEN = 1e-4
"""|Δ logprob| of a token that reveals other weights; rounding is below a tenth of it."""


def outcome(run_dir: Path) -> dict[str, Any]:
    """Return the prompts behind the final weights, and the largest logprob error of a step.

    Only surviving steps count: a resumed run drops the records of steps after its checkpoint, because its weights do
    not contain their updates.
    """
    steps = [record for record in read_jsonl(run_dir / METRICS_FILE) if "first_logprob_diff" in record]
    groups: dict[int, set[int]] = {}
    for row in read_jsonl(run_dir / TRAJECTORIES_FILE):
        groups.setdefault(row["group"], set()).add(row["step"])
    numbers = Counter(step["step"] for step in steps)
    checkpoint, taken = last_checkpoint(run_dir / "checkpoints")
    return {
        "outcome": "steps",
        "steps": len(steps),
        "steps_missing": max(numbers) - len(numbers),
        "steps_twice": len(steps) - len(numbers),
        "steps_since_checkpoint": max(numbers) - checkpoint,
        "prompts": len(groups),
        "prompts_taken": len(taken),
        "prompts_missing": len(taken - set(groups)),
        "prompts_beyond": len(set(groups) - taken),
        "prompts_twice": sum(len(found) > 1 for found in groups.values()),
        "episodes_lost": _sum(steps, "rollout/dropped/", "rollout/failed/"),
        "records_lost": _sum(steps, "rollout/dump_lost"),
        "tokens_trained": round(sum(step["samples"] * step["length"] for step in steps)),
        "stalest_token": max(step["staleness_max"] for step in steps),
        "largest_mean_difference": max(
            (step["first_logprob_diff"] for step in steps if not step["staleness_max"]), default=0.0
        ),
        "servers_lost": _sum(steps, "servers/lost"),
        "requests_retried": _sum(steps, "servers/retried"),
    }


def is_good(found: dict[str, Any]) -> bool:
    """Return whether every prompt was trained once, or counted as lost, on tokens of the right weights.

    `found` is an outcome with its logprob differences, the allowed `staleness`, and the failures.
    """
    nothing = ("steps_missing", "steps_twice", "steps_since_checkpoint", "prompts_beyond", "prompts_twice", "failed")
    counted = found["prompts_missing"] <= found["episodes_lost"] and not found["records_lost"]
    known = found["tokens"] == found["tokens_trained"] and found["stalest_token"] <= found["staleness"]
    right = found["largest_mean_difference"] < WRONG and found["largest_token_difference"] < WRONG_TOKEN
    return counted and known and right and not any(found[name] for name in nothing)


def last_checkpoint(folder: Path) -> tuple[int, set[int]]:
    """Return the step of the newest checkpoint, and the prompts that were trained, or lost, until then."""
    found = load_latest(folder)
    if found is None:
        return 0, set()
    step, data = found[0], found[1]["prompts"]
    return step, set(range(data["epoch"] * data["rows"] + data["cursor"])) - set(data["again"])


def _sum(steps: list[dict[str, Any]], *names: str) -> int:
    return int(sum(value for step in steps for name, value in step.items() if name.startswith(names)))
