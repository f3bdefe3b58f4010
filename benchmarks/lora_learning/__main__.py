"""Compare learning with LoRA and with full fine-tuning: SmolLM2-135M-Instruct on chat-form sums, on two cores.

    python -m benchmarks.lora_learning                        # all runs missing from the record, then the figure
    python -m benchmarks.lora_learning --only grpo sft        # runs with these name prefixes
    python -m benchmarks.lora_learning --only grpo-seed0 --again -- total_steps=10
    python -m benchmarks.lora_learning --figure              # only the figure, from the record
    python -m benchmarks.lora_learning --only grpo-seed0 --again --keep runs   # keeps the run and its export
    python -m benchmarks.lora_learning --only grpo-seed0 --exported --keep runs   # compares the export again

A line of the record is one run: the held-out reward of sampled answers before and after, its curve over steps and
seconds (SFT: the loss; DPO: the share of correctly ranked pairs), and the breakdown of seconds and pushed bytes. A run
of RL also has the rewards of its export in archon and in transformers: greedy answers must agree, sampled ones may
differ by chance. Recorded runs are not repeated. A run that exceeds its time limit is stopped, and its line says so.

Expectations: GRPO with rank-16 LoRA raises the reward by at least 0.25 within 20 minutes for each of three seeds, on
sums (`grpo-…`) and on two reasoning_gym tasks (`letters-…`, `syllogism-…`). With rewards shuffled over the batch it
stays within 0.1 of its start. Full fine-tuning, with the same steps and seeds and the best of three learning rates, is
at most 0.03 better. SFT and DPO raise the reward too. The exit code is 1 if an expectation is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archon.cli.config import load_config
from archon.rl.config import RLConfig
from archon.rl.trainer import RLTrainer
from archon.tools.bench.origin import commit
from archon.training.metrics import read_jsonl
from benchmarks.harness import ROOT, say
from benchmarks.lora_learning.exports import compared, is_lora, standard_error
from benchmarks.lora_learning.figure import draw
from benchmarks.lora_learning.record import append, read_record

HERE = Path(__file__).parent
RECIPES = ROOT / "rl" / "recipes"
SUMS = RECIPES / "smollm2_sums.yaml"
GYM = {"letters": RECIPES / "smollm2_letter_counting.yaml", "syllogism": RECIPES / "smollm2_syllogism.yaml"}
RECORD = ROOT / "benchmarks" / "records" / "lora_learning.jsonl"
RISE, FLAT, CLOSE, MINUTES = 0.25, 0.1, 0.03, 20.0
FULL_RATES = ("1.0e-5", "3.0e-5", "1.0e-4")
FULL_BEST = FULL_RATES[0]
"""The rate of the further seeds of all weights, which must be the best of the record."""


@dataclass(frozen=True)
class Run:
    """One run of a command: overrides, recorded metric, time limit, and configuration file if not the default."""

    command: str
    changes: tuple[str, ...] = ()
    metric: str = "eval/reward"
    model: str = "actor"
    minutes: float = MINUTES
    recipe: Path | None = None

    @property
    def config(self) -> Path:
        """The file of the recipe."""
        return self.recipe or {"rl": SUMS, "sft": HERE / "sft.yaml", "preference": HERE / "dpo.yaml"}[self.command]


RUNS = {
    **{f"grpo-seed{seed}": Run("rl", (f"seed={seed}", f"actor.lora.seed={seed}")) for seed in range(3)},
    "shuffled-seed0": Run("rl", ("control.shuffle_rewards=true",)),
    **{
        f"{task}-seed{seed}": Run("rl", (f"seed={seed}", f"actor.lora.seed={seed}"), recipe=recipe)
        for task, recipe in GYM.items()
        for seed in range(3)
    },
    **{
        f"{task}-shuffled-seed0": Run("rl", ("control.shuffle_rewards=true",), recipe=recipe)
        for task, recipe in GYM.items()
    },
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
    """Run one of `RUNS` from the model to the export. Returns its line of the record."""
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
        before, after = (reward_of(model, lora, folder) for lora in (None, run_dir / "export"))
        line |= {"before": before, "after": after}
    elif code == 0:
        line |= {"exported": exported(name, model, run_dir / "export", folder)}
    return line


def reward_of(model: Path, export: Path | None, folder: Path) -> float:
    """Return the held-out reward of sampled answers of the model, or of a run's export."""
    with opened(model, export, folder) as trainer:
        return trainer.evaluate()["eval/reward"]


def exported(name: str, model: Path, export: Path, folder: Path) -> dict[str, Any]:
    """Return the rewards of the export of a run in archon and in transformers, see `compared`."""
    with opened(model, export, folder, RUNS[name].config) as trainer:
        return compared(model, export, trainer)


@contextmanager
def opened(model: Path, export: Path | None, folder: Path, recipe: Path = SUMS) -> Iterator[RLTrainer]:
    """Open a trainer with the weights of the model or of an export, which is not trained."""
    changes = [f"run_dir={folder / 'measured'}"]
    loras = export is not None and is_lora(export)
    changes += [f"actor.lora={{path: {export}}}" if loras else "actor.lora=null"]
    changes += [f"actor.path={model if loras or export is None else export}"]
    with RLTrainer(load_config(RLConfig, recipe, changes)).opened() as trainer:
        yield trainer


def measured(rows: Sequence[dict[str, Any]], metric: str, seconds: float) -> dict[str, Any]:
    """Return the record fields of a run's metrics.

    Args:
        rows: rows of metrics.jsonl.
        metric: name of the held-out metric.
        seconds: wall time of the run; time outside of steps is loading and export.
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
    """Return the expectations of the recorded runs and whether they are met."""
    done = {name: line for name, line in lines.items() if _ended(line)}
    found = {f"{name} did not end well": False for name in lines.keys() - done.keys()}
    loras = [line for name, line in done.items() if name.startswith("grpo-")]
    of_gym = [line for name, line in done.items() if name.startswith(tuple(f"{task}-seed" for task in GYM))]
    for line in [*loras, *of_gym]:
        in_time = [value for _, seconds, value in line["curve"] if seconds <= 60 * MINUTES]
        rise = in_time[-1] - line["before"]
        found[f"{line['run']} rises by {rise:+.3f} in {MINUTES:g} minutes (at least {RISE})"] = rise >= RISE
    for name, line in done.items():
        if "shuffled-" in name:
            moved = line["after"] - line["before"]
            found[f"{name} moves by {moved:+.3f} (at most {FLAT})"] = abs(moved) <= FLAT
    for name, line in done.items():
        if "exported" in line:
            found |= _same_in_transformers(name, line["exported"])
    full = {name: line for name, line in done.items() if name.startswith("full-")}
    if full and loras:
        of_rates = {name: full[name] for rate in FULL_RATES if (name := f"full-lr{rate}") in full}
        best = max(of_rates, key=lambda name: float(of_rates[name]["after"]))
        if full.keys() - of_rates.keys():
            found[f"the further seeds of all weights have the best rate ({best})"] = best == f"full-lr{FULL_BEST}"
        of_best = [line for name, line in full.items() if name.startswith(best)]
        mean, of_all = (sum(line["after"] for line in lines) / len(lines) for lines in (loras, of_best))
        what = (
            f"adapters end at {mean:.3f}, all weights at {of_all:.3f} ({best}, {len(of_best)} seeds), at most {CLOSE}"
        )
        found[f"{what} apart"] = of_all - mean <= CLOSE
        share = loras[0]["push_bytes"] / full[best]["push_bytes"]
        found[f"a push of adapters writes {share:.1%} of a full one's bytes (at most 5%)"] = share <= 1 / 20
    for name in sorted(done.keys() & {"sft-seed0", "dpo-seed0"}):
        rise = done[name]["after"] - done[name]["before"]
        found[f"{name} raises the reward by {rise:+.3f}"] = rise > 0
    return found


def _same_in_transformers(name: str, of: dict[str, Any]) -> dict[str, bool]:
    """Return whether an export's answers earn the same in both, sampled ones within three standard errors."""
    greedy, sampled, error = of["greedy"], of["sampled"], 3 * standard_error(of)
    differing = f"{of['differing']} of {of['prompts']} answers differ"
    greedily = f"{greedy['archon']:.3f} greedily, in transformers {greedy['transformers']:.3f} ({differing})"
    apart = sampled["transformers"] - sampled["archon"]
    return {
        f"{name}'s export earns {greedily}": greedy["archon"] == greedy["transformers"],
        f"{name}'s export earns {apart:+.3f} in transformers, sampled (at most {error:.3f})": abs(apart) <= error,
    }


def _ended(line: dict[str, Any]) -> bool:
    return bool(line.get("curve")) and (line["code"] == 0 or line.get("stopped", False))


def main() -> int:
    """Run the missing runs one after the other, draw the figure, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON lines; every run appends its own")
    parser.add_argument("--only", nargs="+", default=[""], help=f"names, or beginnings of several: {' '.join(RUNS)}")
    parser.add_argument("--again", action="store_true", help="also runs that the record has")
    parser.add_argument("--figure", action="store_true", help="no runs, only the figure")
    parser.add_argument("--exported", action="store_true", help="no runs, only the exports that are in --keep")
    parser.add_argument("--model", type=Path, help="its folder; by default the one that the tests make")
    parser.add_argument("--threads", type=int, default=2, help="of every run")
    parser.add_argument("--keep", type=Path, help="folder in which the runs stay; by default they are deleted")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, changes = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    if not (chosen := named(options.only)):
        parser.error(f"no run begins with {' or '.join(options.only)}; there are {', '.join(RUNS)}")
    if options.exported and options.keep is None:
        parser.error("--exported needs the folder --keep of earlier runs")
    record: Path = options.record
    model = None if options.figure else options.model or _real_model()
    with tempfile.TemporaryDirectory() as temporary:
        if model is not None and options.exported:
            for name in chosen:
                answers = exported(name, model, options.keep / name / "export", Path(temporary))
                append(record, {"run": name, "exported": answers})
        elif model is not None:
            there = {name for name, line in read_record(record).items() if _ended(line)}
            for name in [name for name in chosen if options.again or name not in there]:
                line = run(name, model, options.keep or Path(temporary), options.threads, changes)
                if options.keep is None:  # a run of all weights leaves two gigabytes
                    shutil.rmtree(Path(temporary) / name, ignore_errors=True)
                append(record, line)
                after = f"{line.get('before')} to {line.get('after')}"
                say(f"{name}: {after}, {line['seconds']:.0f} s, code {line['code']}")
    lines = {name: line for name, line in read_record(record).items() if name in RUNS}
    found = verdicts(lines)
    for what, fine in found.items():
        say(f"{'as expected' if fine else 'NOT AS EXPECTED'}: {what}")
    say(f"figure: {draw(lines, record.with_suffix('.png'))}")
    return int(not all(found.values()))


def named(wanted: Sequence[str]) -> list[str]:
    """Return the runs with these names or name prefixes."""
    beginnings = tuple(word for word in wanted if word not in RUNS)
    return [name for name in RUNS if name in wanted or (beginnings and name.startswith(beginnings))]


def _real_model() -> Path:
    from tests.real_model import SMOLLM2

    return SMOLLM2.make(SMOLLM2.folder)


if __name__ == "__main__":
    sys.exit(main())
