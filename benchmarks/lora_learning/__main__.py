"""Do adapters learn as much as all weights? A real model, SmolLM2-135M-Instruct, on sums in chat form, on two cores.

    python -m benchmarks.lora_learning                        # all runs that the record lacks, then the picture
    python -m benchmarks.lora_learning --only grpo sft        # runs whose names begin so
    python -m benchmarks.lora_learning --only grpo-seed0 --again -- total_steps=10
    python -m benchmarks.lora_learning --picture              # only the picture, from the record

A line of the record is one run: the held-out reward of sampled answers before and after, its curve over steps and
seconds (of SFT the loss, of DPO the share of pairs that are told apart), where the seconds and the bytes of pushes
went, and of a run of RL the reward of its export's greedy answers, in archon and in transformers, which must be equal.
A run that the record has is not repeated; one that takes longer than its minutes is stopped, and its line says so.

What is expected: GRPO with adapters of rank 16 raises the reward by at least 0.25 within 20 minutes, with each of three
seeds, on sums and on syllogisms of reasoning_gym (`reasoning-…`); with rewards shuffled over the batch it stays within
0.1 of where it began; after as many steps all weights, with the same three seeds at the best of three learning rates,
are at most 0.03 better than adapters; SFT and DPO raise it too. The command ends with 1 where that is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archon.bench.origin import commit
from archon.training.metrics import read_jsonl
from benchmarks.harness import ROOT, say
from benchmarks.lora_learning import sums
from benchmarks.lora_learning.in_transformers import greedy_reward
from benchmarks.lora_learning.picture import draw

HERE = Path(__file__).parent
RECORD = ROOT / "benchmarks" / "records" / "lora_learning.jsonl"
RISE, FLAT, CLOSE, MINUTES = 0.25, 0.1, 0.03, 20.0
FULL_RATES = ("1.0e-5", "3.0e-5", "1.0e-4")
FULL_BEST = FULL_RATES[0]
"""The rate of the further seeds of all weights, which must be the best of the record."""


@dataclass(frozen=True)
class Run:
    """One run of a command: changes to its configuration, the metric that is recorded, its time, and the file of the
    configuration where it is not the command's own."""

    command: str
    changes: tuple[str, ...] = ()
    metric: str = "eval/reward"
    model: str = "actor"
    minutes: float = MINUTES
    recipe: str | None = None

    @property
    def config(self) -> Path:
        """The file of the recipe."""
        return HERE / (self.recipe or {"rl": "grpo.yaml", "sft": "sft.yaml", "preference": "dpo.yaml"}[self.command])


RUNS = {
    **{f"grpo-seed{seed}": Run("rl", (f"seed={seed}", f"actor.lora.seed={seed}")) for seed in range(3)},
    "shuffled-seed0": Run("rl", ("control.shuffle_rewards=true",)),
    **{
        f"reasoning-seed{seed}": Run("rl", (f"seed={seed}", f"actor.lora.seed={seed}"), recipe="reasoning.yaml")
        for seed in range(3)
    },
    "reasoning-shuffled-seed0": Run("rl", ("control.shuffle_rewards=true",), recipe="reasoning.yaml"),
    # All weights have three times the backward pass, so that as many steps take longer.
    **{
        f"full-lr{rate}": Run("rl", ("actor.lora=null", f"actor.optimizer.lr={rate}"), minutes=3 * MINUTES)
        for rate in FULL_RATES
    },
    **{
        f"full-lr{FULL_BEST}-seed{seed}": Run(
            "rl", (f"seed={seed}", "actor.lora=null", f"actor.optimizer.lr={FULL_BEST}"), minutes=3 * MINUTES
        )
        for seed in (1, 2)
    },
    "sft-seed0": Run("sft", metric="eval/loss", model="model"),
    "dpo-seed0": Run("preference", metric="eval/accuracy", model="model"),
}


def run(name: str, model: Path, folder: Path, threads: int, changes: Sequence[str]) -> dict[str, Any]:
    """Runs one of `RUNS` from the model to the export. Returns its line of the record."""
    settings, run_dir = RUNS[name], folder / name
    shutil.rmtree(run_dir, ignore_errors=True)  # of an earlier attempt
    call = [sys.executable, "-m", "archon", settings.command, "--config", str(settings.config)]
    call += [f"run_dir={run_dir}", f"{settings.model}.path={model}", *settings.changes, *changes]
    started = time.monotonic()
    stopped = False
    with subprocess.Popen(call, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, cwd=ROOT) as process:
        try:
            code = process.wait(timeout=60 * settings.minutes)
        except subprocess.TimeoutExpired:
            stopped = True
            process.send_signal(signal.SIGINT)  # it saves and ends after its step
            code = process.wait()
    seconds = time.monotonic() - started
    line = {"run": name, "code": code, "seconds": round(seconds, 1), "threads": threads, "commit": commit()}
    line |= {"changes": [*settings.changes, *changes]} | ({"stopped": True} if stopped else {})
    metrics = run_dir / "metrics.jsonl"
    line |= measured(read_jsonl(metrics) if metrics.exists() else [], settings.metric, seconds)
    if code == 0 and settings.command != "rl":
        before, after = (reward_of(model, adapter, folder) for adapter in (None, run_dir / "export"))
        line |= {"before": before["reward"], "after": after["reward"]}
    elif code == 0 and settings.config == HERE / "grpo.yaml":
        line |= {"greedy": greedy_rewards(model, run_dir / "export", folder)}
    return line


def reward_of(model: Path, export: Path | None, folder: Path, *, greedy: bool = False) -> dict[str, float]:
    """Returns the held-out `reward` of the model, of adapters on it or of another whole checkpoint, and with `greedy`
    that of greedy answers, `greedy_reward`."""
    from archon.cli.config import load_config
    from archon.rl.config import RLConfig
    from archon.rl.trainer import RLTrainer

    is_adapter = export is not None and (export / "adapter_config.json").exists()
    changes = [f"run_dir={folder / 'measured'}", f"evaluation.greedy={str(greedy).lower()}"]
    changes += [f"actor.lora={{path: {export}}}"] if is_adapter else ["actor.lora=null"]
    changes += [f"actor.path={model if is_adapter or export is None else export}"]
    with RLTrainer(load_config(RLConfig, HERE / "grpo.yaml", changes)).opened() as trainer:
        return {name.removeprefix("eval/"): value for name, value in trainer.evaluate().items()}


def greedy_rewards(model: Path, export: Path, folder: Path) -> dict[str, float]:
    """Returns the held-out reward of an export's greedy answers, in archon and in transformers."""
    from archon.cli.config import load_config
    from archon.rl.config import RLConfig
    from archon.rl.rewards.datasets import exact_match_reward

    limit = load_config(RLConfig, HERE / "grpo.yaml", []).gconfig.max_new_tokens
    return {
        "archon": reward_of(model, export, folder, greedy=True)["greedy_reward"],
        "transformers": greedy_reward(model, export, sums.rows("test"), exact_match_reward, limit),
    }


def measured(rows: Sequence[dict[str, Any]], metric: str, seconds: float) -> dict[str, Any]:
    """Returns what the record says of a run's metrics.

    Args:
        rows: those of metrics.jsonl.
        metric: the name of what is measured on held-out rows.
        seconds: wall time of the run; what its steps did not take was loading and export.
    """
    phases = {key for row in rows for key in row if key.startswith("seconds/")}
    spent = {phase.removeprefix("seconds/"): sum(row.get(phase, 0.0) for row in rows) for phase in sorted(phases)}
    elapsed, curve = max(0.0, seconds - sum(spent.values())), []
    for row in rows:
        elapsed += sum(row.get(phase, 0.0) for phase in phases)
        if metric in row:
            curve.append([row["step"], round(elapsed, 1), round(row[metric], 4)])
    if not curve:
        return {"metric": metric, "curve": []}
    found: dict[str, Any] = {"metric": metric, "curve": curve, "steps": rows[-1]["step"]}
    found |= {"before": curve[0][2], "after": curve[-1][2], "spent": {name: round(s, 1) for name, s in spent.items()}}
    pushes = [row["push/bytes"] for row in rows if "push/bytes" in row]
    if pushes:
        found["push_bytes"] = pushes[-1]
        found["push_seconds"] = round(spent["push"] / len(pushes), 4)
    differences = [row["first_logprob_diff"] for row in rows if "first_logprob_diff" in row]
    return found | ({"largest_first_logprob_diff": max(differences)} if differences else {})


def verdicts(lines: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Returns what was expected of the runs that are there, and whether it is so."""
    done = {name: line for name, line in lines.items() if _ended(line)}
    found = {f"{name} did not end well": False for name in lines.keys() - done.keys()}
    adapters = [line for name, line in done.items() if name.startswith("grpo-")]
    reasoning = [line for name, line in done.items() if name.startswith("reasoning-seed")]
    for line in [*adapters, *reasoning]:
        in_time = [value for _, seconds, value in line["curve"] if seconds <= 60 * MINUTES]
        rise = in_time[-1] - line["before"]
        found[f"{line['run']} rises by {rise:+.3f} in {MINUTES:g} minutes (at least {RISE})"] = rise >= RISE
    for name, line in done.items():
        if name.startswith(("shuffled-", "reasoning-shuffled-")):
            moved = line["after"] - line["before"]
            found[f"{name} moves by {moved:+.3f} (at most {FLAT})"] = abs(moved) <= FLAT
    for name, line in done.items():
        if "greedy" in line:
            ours, theirs = line["greedy"]["archon"], line["greedy"]["transformers"]
            found[f"{name}'s export earns {ours:.3f} greedily, in transformers {theirs:.3f}"] = ours == theirs
    full = {name: line for name, line in done.items() if name.startswith("full-")}
    if full and adapters:
        of_rates = {name: full[name] for rate in FULL_RATES if (name := f"full-lr{rate}") in full}
        best = max(of_rates, key=lambda name: float(of_rates[name]["after"]))
        if full.keys() - of_rates.keys():
            found[f"the further seeds of all weights have the best rate ({best})"] = best == f"full-lr{FULL_BEST}"
        of_best = [line for name, line in full.items() if name.startswith(best)]
        mean, of_all = (sum(line["after"] for line in lines) / len(lines) for lines in (adapters, of_best))
        what = (
            f"adapters end at {mean:.3f}, all weights at {of_all:.3f} ({best}, {len(of_best)} seeds), at most {CLOSE}"
        )
        found[f"{what} apart"] = of_all - mean <= CLOSE
        share = adapters[0]["push_bytes"] / full[best]["push_bytes"]
        found[f"a push of adapters writes {share:.1%} of a full one's bytes (at most 5%)"] = share <= 1 / 20
    for name in sorted(done.keys() & {"sft-seed0", "dpo-seed0"}):
        rise = done[name]["after"] - done[name]["before"]
        found[f"{name} raises the reward by {rise:+.3f}"] = rise > 0
    return found


def _ended(line: dict[str, Any]) -> bool:
    return bool(line.get("curve")) and (line["code"] == 0 or line.get("stopped", False))


def read_record(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the newest line of each run."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line["run"]: line for line in map(json.loads, lines)}


def main() -> int:
    """Makes the runs that are missing, one after the other, and the picture. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON lines; every run appends its own")
    parser.add_argument("--only", nargs="+", default=[""], help=f"beginnings of names: {' '.join(RUNS)}")
    parser.add_argument("--again", action="store_true", help="also runs that the record has")
    parser.add_argument("--picture", action="store_true", help="no runs, only the picture")
    parser.add_argument("--model", type=Path, help="its folder; by default the one that the tests make")
    parser.add_argument("--threads", type=int, default=2, help="of every run")
    parser.add_argument("--keep", type=Path, help="folder in which the runs stay; by default they are deleted")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, changes = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    chosen = [name for name in RUNS if name.startswith(tuple(options.only))]
    if not chosen:
        parser.error(f"no run begins with {' or '.join(options.only)}; there are {', '.join(RUNS)}")
    record: Path = options.record
    there = {name for name, line in read_record(record).items() if _ended(line)}
    missing = [] if options.picture else [name for name in chosen if options.again or name not in there]
    if missing:
        model = options.model or _real_model()
        with tempfile.TemporaryDirectory() as temporary:
            for name in missing:
                line = run(name, model, options.keep or Path(temporary), options.threads, changes)
                if options.keep is None:  # a run of all weights leaves two gigabytes
                    shutil.rmtree(Path(temporary) / name, ignore_errors=True)
                with record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                say(
                    f"{name}: {line.get('before')} to {line.get('after')}, {line['seconds']:.0f} s, code {line['code']}"
                )
    lines = {name: line for name, line in read_record(record).items() if name in RUNS}
    found = verdicts(lines)
    for what, fine in found.items():
        say(f"{'as expected' if fine else 'NOT AS EXPECTED'}: {what}")
    say(f"picture: {draw(lines, record.with_suffix('.png'))}")
    return int(not all(found.values()))


def _real_model() -> Path:
    from tests.real_model import SMOLLM2

    return SMOLLM2.make(SMOLLM2.folder)


if __name__ == "__main__":
    sys.exit(main())
