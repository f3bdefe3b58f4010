"""Measure archon on one GPU within minutes: correctness, training, generation, RL, memory and profiles.

    python -m benchmarks.gpu --minutes 9 --out DIR     # stages in order of value; the same command continues later
    python -m benchmarks.gpu --stage train-0.6B --out DIR
    python -m benchmarks.gpu --summary --out DIR       # the figures in DIR next to aims and predictions
    python -m benchmarks.gpu --wheels > wheels.txt     # packages to carry to a machine without a network

It needs torch's CUDA build and no network: weights are random. Every stage is a process with a time limit, so a crash,
a hang or exhausted memory loses one stage. A stage writes `DIR/gpu.STAGE.json` after every side that it measures; its
output is in `DIR/STAGE.log`. A stage whose record is complete is not run again. `ARCHON_COMMIT` names the commit of a
tree without `.git`. To publish results, copy the records to `benchmarks/records` and run `python -m benchmarks.readme`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from archon.tools.bench.origin import NumericCheck, spread
from benchmarks import generate, gpu_step, harness, vllm_side
from benchmarks.checkpoints import make_checkpoint, shape
from benchmarks.gpu_predictions import Prediction, read_predictions
from benchmarks.harness import ROOT, say
from benchmarks.readme import number
from benchmarks.record import Record, read_records

IMPOSSIBLE = 3
"""Exit code of a stage that this machine cannot run."""
END_S = 5.0
"""Seconds for the workers of a killed stage to end."""
TESTS = ("tests/models/cuda", "tests/gpu", "tests/models/test_attention.py", "tests/checkpoint/test_round_trip.py")
TEST_RECORD, UNFINISHED_TESTS = "gpu.jsonl", "gpu.unfinished.jsonl"
GENERATION_AIM, VLLM_AIM = 60_000, ">= 0.9"
PHASES = ("rollout", "sleep", "score", "update", "push")
# In addition to archon's dependencies: peers, and imports of the tests.
CARRIED = (
    *("flash-attn-4==4.0.0b36", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "quack-kernels"),
    *("apache-tvm-ffi", "torch-c-dlpack-ext", "liger-kernel", "torchao", "peft", "accelerate", "setuptools"),
    *("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil"),
)


@dataclass(frozen=True)
class Run:
    """Arguments of a stage.

    Attributes:
        stage: name of the stage.
        out: folder of records.
        scratch: folder of checkpoints, shared by the stages of a command.
        rounds: timed runs of each side.
        threads: CPU threads of each side.
        miniature: run every stage with tiny models on the CPU.
    """

    stage: str
    out: Path
    scratch: Path
    rounds: int
    threads: int
    miniature: bool

    @property
    def device(self) -> str:
        """Device of all sides."""
        return "cpu" if self.miniature else "cuda"

    def write(self, record: Record) -> None:
        """Write a record, which may still lack sides."""
        record.command = f"python -m benchmarks.gpu --stage {self.stage}{' --miniature' if self.miniature else ''}"
        record.write(self.out)


class Stage(NamedTuple):
    """A measurement and its limit in seconds."""

    seconds: float
    run: Callable[[Run], None]


class Attempt(NamedTuple):
    """How a stage ended: `done`, `impossible`, `failed`, `out of time`, `interrupted` or `not started`."""

    stage: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""


def correctness(run: Run) -> None:
    """Run the tests that need a GPU; each writes its line when it ends."""
    record = run.out / UNFINISHED_TESTS
    record.write_text("")
    tests = ["tests/gpu/test_fp8.py"] if run.miniature else TESTS
    parallel = ["-n", "4", "--dist", "loadgroup"] if find_spec("xdist") and not run.miniature else []
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not multi_gpu", *parallel]
    environment = {**os.environ, "ARCHON_GPU_RECORD": str(record), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *tests], cwd=ROOT, env=environment, check=False)
    record.rename(run.out / TEST_RECORD)


def train(name: str, run: Run) -> None:
    """Measure a training step of `benchmarks.gpu_step`."""
    case = gpu_step.CASES[name]
    options = gpu_step.case_options(case, run.scratch, run.threads, miniature=run.miniature)
    gpu_step.measure_gpu(name, case, options, run.rounds, run.write)


def generation(run: Run) -> None:
    """Measure 256 greedy answers of 128 tokens to prompts of 128 tokens, all at once."""
    model, slots, length = ("tiny", 4, 8) if run.miniature else ("0.6B", 256, 128)
    make = partial(make_checkpoint, name=model, dtype="bfloat16", device=run.device)
    checkpoint = gpu_step.make_once(run.scratch / model, make)
    options: dict[str, Any] = {"threads": run.threads, "checkpoint": str(checkpoint), "model": model, "slots": slots}
    options |= {"device": run.device, "dtype": "bfloat16", "lengths": [length] * slots, "prompt_length": length}
    names, aims = [generate.ARCHON, generate.DYNAMIC], {generate.VLLM_GPU: VLLM_AIM}
    if not run.miniature:
        names += [generate.CONTINUOUS, generate.VLLM_GPU]
    record = generate.measure("generate-0.6B", options, run.rounds, names, aims, benchmark="gpu", profiled=True)
    rates = record.sides[generate.ARCHON].values
    name = f"{generate.ARCHON} / {GENERATION_AIM:,} tok/s"
    record.ratios[name] = harness.ratio(rates, [float(GENERATION_AIM)] * len(rates), ">= 1")
    run.write(record)


def reinforce(name: str, run: Run, change: Callable[[Run, dict[str, Any], dict[str, Any]], None]) -> None:
    """Run `archon rl` on the arithmetic recipe and its bootstrap file after `change`, and record its phases."""
    import yaml

    from archon.rl.logprob_check import mismatch_limit
    from archon.training.metrics import read_jsonl

    folder = run.scratch / name
    folder.mkdir()
    files = (ROOT / "rl" / "recipes" / f"arithmetic_{part}.yaml" for part in ("cpu", "bootstrap"))
    recipe, bootstrap = (yaml.safe_load(file.read_text()) for file in files)
    recipe |= {"run_dir": str(folder / "run"), "total_steps": 60, "bootstrap": "bootstrap.yaml"}
    recipe["evaluation"]["every"] = 0
    recipe["actor"] |= {"path": str(folder / "start"), "device": run.device}
    change(run, recipe, bootstrap)
    for file, content in (("bootstrap.yaml", bootstrap), ("rl.yaml", recipe)):
        (folder / file).write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "archon", "rl", "--config", str(folder / "rl.yaml")]
    subprocess.run(command, cwd=ROOT, check=True)
    lines = read_jsonl(folder / "run" / "metrics.jsonl")
    # The first update compiles.
    steps = [line for line in lines if "seconds/update" in line][1:][-4 * run.rounds :]
    record = harness.new_record("gpu", name, run.threads)
    record.setup = {"model": bootstrap["hf_config"], "recipe": recipe}
    record.sides["archon rl"] = spread([line["samples_per_second"] for line in steps], "samples/s")
    for phase in PHASES:
        if seconds := [line[f"seconds/{phase}"] for line in steps if f"seconds/{phase}" in line]:
            record.sides[phase] = spread(seconds, "s")
    difference = max(line["first_logprob_diff"] for line in steps)
    limit = mismatch_limit(recipe["actor"].get("dtype", "float32"), 1.0)
    record.checks.append(NumericCheck(what="|Δ logprob|", peer="generator", difference=difference, tolerance=limit))
    rewards = [line["eval/reward"] for line in lines if "eval/reward" in line]
    if len(rewards) > 1:
        record.notes.append(f"held-out reward {rewards[0]:.3f} before, {rewards[-1]:.3f} after {len(lines)} steps")
    harness.finish(record, keep=False)
    run.write(record)


def learning(run: Run, recipe: dict[str, Any], bootstrap: dict[str, Any]) -> None:
    """The recipe itself: the small model learns to add."""
    if run.miniature:
        bootstrap["warmup"] |= {"total_steps": 2, "target": None, "batch_size": 8}
        recipe |= {"total_steps": 3, "rollout": {"prompts_per_step": 4}, "eval_data": None, "verify_export": False}
        recipe["algorithm"]["zero_variance_groups"] = "keep"  # all answers are wrong


def colocated(run: Run, recipe: dict[str, Any], bootstrap: dict[str, Any]) -> None:
    """The recipe with vLLM on the trainer's GPU as generator."""
    learning(run, recipe, bootstrap)
    # vLLM encodes English text when it starts.
    bootstrap["tokenizer"]["alphabet"] = "".join(map(chr, range(32, 127)))
    bootstrap["hf_config"]["vocab_size"] = 128
    program = shlex.split(os.environ.get("ARCHON_VLLM_COMMAND", "")) or _vllm_command()
    launch = {"engine": "vllm", "command": program, "gpu_share": 0.3, "args": ["--max-model-len=64"]}
    recipe |= {"generator": None, "rollout": recipe["rollout"] | {"launch": launch}, "verify_export": False}
    recipe["actor"]["dtype"] = "bfloat16"


def real_size(run: Run, recipe: dict[str, Any], bootstrap: dict[str, Any]) -> None:
    """Five steps of Qwen3-0.6B with random weights: 32 prompts, 8 answers of up to 256 tokens. It learns nothing."""
    model = shape("tiny" if run.miniature else "0.6B")
    left_out = ("model_type", "rope_parameters", "bos_token_id", "eos_token_id")
    bootstrap |= {"warmup": None, "hf_config": {k: v for k, v in model.items() if k not in left_out}}
    prompts, answers, tokens = (2, 2, 8) if run.miniature else (32, 8, 256)
    recipe |= {"total_steps": 5, "ref": None, "eval_data": None, "verify_export": False}
    recipe |= {"rollout": {"prompts_per_step": prompts}, "gconfig": {"n_samples": answers, "max_new_tokens": tokens}}
    recipe["algorithm"] = {"preset": "grpo_no_kl", "zero_variance_groups": "keep"}
    recipe["actor"]["dtype"] = "bfloat16"


def _vllm_command() -> list[str]:
    """Return the command of the installed vLLM; leave the stage if there is none."""
    program = vllm_side.environment() / "bin" / "vllm" if vllm_side.is_installed() else None
    if program is None and find_spec("vllm") is None:
        say("vLLM is not installed; set ARCHON_VLLM_COMMAND, for example to path/to/vllm serve")
        sys.exit(IMPOSSIBLE)
    return [str(program), "serve"] if program else [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


# In order of value. The limits allow for making a checkpoint, compiling, and starting every side's process.
STAGES: dict[str, Stage] = {
    "correctness": Stage(150, correctness),
    "train-0.6B": Stage(150, partial(train, "0.6B")),
    "generate-0.6B": Stage(120, generation),
    "train-experts": Stage(120, partial(train, "experts")),
    "train-prefixes": Stage(100, partial(train, "prefixes")),
    "train-8B-lora": Stage(200, partial(train, "8B-lora")),
    "train-fp8": Stage(200, partial(train, "fp8")),
    "train-1.7B": Stage(120, partial(train, "1.7B")),
    "rl": Stage(180, partial(reinforce, "rl", change=learning)),
    "rl-0.6B": Stage(200, partial(reinforce, "rl-0.6B", change=real_size)),
    "rl-vllm": Stage(300, partial(reinforce, "rl-vllm", change=colocated)),
    "train-0.6B-32k": Stage(120, partial(train, "0.6B-32k")),
}


def is_complete(out: Path, stage: str) -> bool:
    """Return whether an earlier command has measured every side of a stage."""
    if stage == "correctness":
        return (out / TEST_RECORD).exists()
    path = out / f"gpu.{stage}.json"
    return path.exists() and gpu_step.PENDING not in json.loads(path.read_text())["missing"].values()


def run_stages(
    commands: Mapping[str, tuple[Sequence[str], float]], out: Path, minutes: float, poll_s: float = 0.1
) -> list[Attempt]:
    """Run each command in a new session, within its limit and the remaining `minutes`.

    SIGTERM and SIGINT end the running stage and all later ones.
    """
    until = time.monotonic() + 60 * minutes
    stopped: list[int] = []
    earlier = {
        number: signal.signal(number, lambda number, _: stopped.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    attempts: list[Attempt] = []
    try:
        for stage, (command, limit) in commands.items():
            started = time.monotonic()
            if stopped or started >= until:
                attempts.append(Attempt(stage, "not started", reason="interrupted" if stopped else "no time left"))
                continue
            seconds = min(limit, until - started)
            say(f"{stage}: at most {seconds:.0f} s")
            with (out / f"{stage}.log").open("w") as log:
                process = subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
                while process.poll() is None and not stopped and time.monotonic() - started < seconds:
                    time.sleep(poll_s)
                code = process.poll()
                _kill_session(process)
            took = time.monotonic() - started
            if code is None:
                outcome = "interrupted" if stopped else "out of time"
            else:
                outcome = {0: "done", IMPOSSIBLE: "impossible"}.get(code, "failed")
            reason = "" if outcome == "done" else _end_of_log(out / f"{stage}.log", code)
            attempts.append(Attempt(stage, outcome, took, reason))
            say(f"{stage}: {outcome} after {took:.0f} s{reason and ': '}{reason}")
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    return attempts


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a stage and the workers that it left behind, and wait until their GPU memory is free."""
    until = time.monotonic() + END_S
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while time.monotonic() < until:  # orphans are not waited for
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    except ProcessLookupError:
        process.wait()


def _end_of_log(path: Path, code: int | None) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return f"{'' if code is None else f'exit code {code}, '}log ends with: {lines[-1][:300] if lines else 'nothing'}"


def summary(out: Path, attempts: Iterable[Attempt] = ()) -> list[str]:
    """Return lines on tests, figures, aims, predictions and, where an aim is missed, the profile."""
    records = {record.case: record for record in read_records(out)}
    lines = []
    for name, what in ((TEST_RECORD, "tests on the GPU"), (UNFINISHED_TESTS, "tests on the GPU, unfinished")):
        if (out / name).exists():
            tests = [json.loads(line) for line in (out / name).read_text().splitlines()]
            failed = [test["test"] for test in tests if not test["ok"]]
            lines.append(f"{what}: {len(tests) - len(failed)} passed, {len(failed)} failed")
            lines += [f"  failed: {test}" for test in failed]
    for prediction in read_predictions():
        name, figure = f"{prediction.name} ({prediction.setup})", prediction.measured(records)
        aim = f"aim {prediction.aim:,g}, predicted {number(prediction.value)} {prediction.unit}"
        if figure is None:
            lines.append(f"{name}: not measured; {aim}")
            continue
        ratio = figure / prediction.value
        verdict = "confirmed" if prediction.is_confirmed(figure) else "refuted"
        met = "met" if figure >= prediction.aim else "MISSED"
        verdict = f"aim {met}; prediction {verdict} ({ratio:.2f}×)"
        lines.append(f"{name}: {number(figure)} {prediction.unit}; {aim}; {verdict}")
        if met == "MISSED":
            lines += [f"  {line}" for line in _profile_lines(records[prediction.case], prediction)]
    for record in records.values():
        for name, ratio in record.ratios.items():
            if gpu_step.PLANNED in name:
                lines.append(f"{record.case}: {name}: {ratio.value:.2f}×, aim {ratio.aim}")
        lines += [f"{record.case}: {side} is missing: {reason}" for side, reason in record.missing.items()]
    lines += [f"{a.stage}: {a.outcome}{a.reason and ': '}{a.reason}" for a in attempts if a.outcome != "done"]
    return lines


def _profile_lines(record: Record, prediction: Prediction) -> list[str]:
    """Return measured next to predicted milliseconds by class of kernel."""
    measured = {kind: 1e3 * seconds for kind, seconds in record.profiles.get(prediction.side, {}).items()}
    figures = ((kind, measured[kind]) for kind in sorted(measured, key=lambda kind: -measured[kind]))
    predicted = ", ".join(f"{part} {ms:.0f}" for part, ms in prediction.parts_ms.items())
    return [
        f"measured ms: {', '.join(f'{kind} {ms:.0f}' for kind, ms in figures) or 'no profile'}",
        f"predicted ms: {predicted}",
    ]


def wheels() -> list[str]:
    """Return requirements to carry to the machine; Triton comes with torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["rl"]]
    return [requirement for requirement in requirements if not requirement.startswith("torch>")] + list(CARRIED)


def main() -> int:
    """Run the stages, and print the summary. Return 1 if a stage failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of all stages together (default 9)")
    parser.add_argument("--out", type=Path, default=Path("gpu-records"), help="folder of the records")
    parser.add_argument("--stage", choices=STAGES, action="append", help="this stage only, also if it is complete")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each side (default 5)")
    parser.add_argument("--threads", type=int, default=8, help="CPU threads of each side (default 8)")
    parser.add_argument("--miniature", action="store_true", help="run every stage with tiny models on the CPU")
    parser.add_argument("--summary", action="store_true", help="print the summary of the records in DIR")
    parser.add_argument("--wheels", action="store_true", help="print the packages to carry, as pip requirements")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)  # in the process of a stage
    arguments = parser.parse_args()
    if arguments.wheels:
        print("\n".join(wheels()))
        return 0
    if not (arguments.summary or arguments.miniature or torch.cuda.is_available()):
        parser.error("PyTorch sees no GPU; --miniature tries every stage on the CPU")
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.scratch is not None:
        (stage,) = arguments.stage
        sizes = arguments.rounds, arguments.threads, arguments.miniature
        STAGES[stage].run(Run(stage, out, arguments.scratch, *sizes))
        return 0
    attempts: list[Attempt] = []
    if not arguments.summary:
        stages = arguments.stage or [stage for stage in STAGES if not is_complete(out, stage)]
        options = ["--out", str(out), "--rounds", str(arguments.rounds), "--threads", str(arguments.threads)]
        options += ["--miniature"] if arguments.miniature else []
        with tempfile.TemporaryDirectory() as scratch:
            child = [sys.executable, "-m", "benchmarks.gpu", *options, "--scratch", scratch]
            commands = {stage: ([*child, "--stage", stage], STAGES[stage].seconds) for stage in stages}
            attempts = run_stages(commands, out, arguments.minutes)
    for line in summary(out, attempts):
        say(line)
    return int(any(attempt.outcome == "failed" for attempt in attempts))


if __name__ == "__main__":
    sys.exit(main())
