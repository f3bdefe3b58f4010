"""Run RL while servers and ranks are killed, stopped, disconnected or given wrong answers.

    python -m benchmarks.faults --record benchmarks/records/faults.jsonl
    python -m benchmarks.faults ahead --record trial.jsonl --events 12

The question: is every prompt trained exactly once, on tokens of the right weights?

Two `archon serve` processes serve a tiny Qwen3. Each sits behind a proxy that injects a fault at a chosen moment: while
an answer is sampled, or while weights are loaded. Two torchrun ranks train the model and save a checkpoint after each
step. They run in a separate network namespace with a virtual cable to each proxy. The first run is synchronous; the
second samples up to two versions ahead. Events are drawn one after another. The next event starts when two further
steps with a push to both servers have shown that the fleet has recovered.

- `kill`: SIGKILL of a server, which restarts on its port with its initial weights;
- `stop`: SIGSTOP of a server for longer than the time-out;
- `drop`: the connection breaks in the middle of a request, which the server may still execute;
- `garbage`: the answer is not JSON, truncated, or has impossible tokens or non-finite logprobs;
- `version`: the answer names weights that were never pushed;
- `cut`: the cable to a server is unplugged for 10 s;
- `rank`: SIGKILL of rank 1; torchrun restarts both ranks from the last checkpoint;
- `controller`: SIGKILL of rank 0, which pushes, records and saves;
- `pause`: SIGSTOP of a rank for longer than the time-out;
- `disk`: the push directory is full during a write, which ends the run with an error; the run is resumed.

When torchrun gives up after several restarts, the benchmark starts it again, as a user would. `cut` needs root and
`ip`, `disk` needs root; the outcome names the events that were left out.

A line of the record is an event with its recovery time and its limit; the last line of a run is its outcome. The limit
of an event adds the duration of the fault, two time-outs, and the restarts and steps that it costs. These are measured
before the first event (`pace`) and scaled by how much slower the machine has become (`slowdown`).

At the end, the checkpoint of each step scores every token that was trained with the weights of that version. The exit
code is 1 if the final weights contain a prompt twice or not at all, a token was too stale, a logprob does not belong to
its version, or a limit was exceeded. An interrupted command keeps its lines; the next one runs what has not passed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from archon.engine.engine import ArchonEngine
from archon.remote.http import KEY
from archon.rl.bootstrap import write_blank
from archon.schema.config import EngineConfig
from archon.tools.bench.origin import commit, machine
from archon.training.config import BootstrapConfig, TokenizerRecipe
from benchmarks.faults.chaos import ALL_KINDS, SECONDS, STOPPED_SECONDS, Chaos
from benchmarks.faults.outcome import is_good, outcome
from benchmarks.faults.served import Served, proxies
from benchmarks.faults.slowdown import Slowdown
from benchmarks.faults.tokens import token_differences
from benchmarks.faults.trainer import RANKS, Trainer
from benchmarks.harness import BenchmarkError, say
from benchmarks.namespaces import Cable, Host, Network, missing

SERVERS = 2
RUNS = {"synchronous": 0, "ahead": 2}
"""The staleness of each run."""
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}


def faults(
    folder: Path, events: int, staleness: int, seed: int = 0, kinds: Sequence[str] = ALL_KINDS
) -> Iterator[dict[str, Any]]:
    """Yield that many events of a run, then its outcome; fewer events if the run does not recover.

    Args:
        folder: empty directory for the run.
        events: number of events; each of `kinds` comes once before any is drawn again.
        staleness: maximum number of versions ahead.
        seed: seed of the draws.
        kinds: event kinds; unavailable ones are left out.
    """
    os.environ.setdefault(KEY, "faults")
    blank, model, run_dir = folder / "blank", folder / "model", folder / "run"
    recipe = TokenizerRecipe(kind="characters", alphabet="0123456789+=", chat_template="plain")
    write_blank(BootstrapConfig(hf_config=SIZES, tokenizer=recipe), blank)
    engine = ArchonEngine(EngineConfig(path=str(blank), init_from_scratch=True, optimizer=None, device="cpu"))
    engine.initialize()
    engine.save(model)
    started, left_out = time.monotonic(), dict[str, str]()
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder / "pushes"))
        if not disk.is_mount():
            left_out["disk"] = "no file system can be mounted; it needs root"
        host, cables = Host(), list[Cable]()
        if why := missing():
            left_out["cut"] = why
        else:
            network = stack.enter_context(Network())
            host = network.host()
            cables = [network.join(Host(), host) for _ in range(SERVERS)]
        servers: list[Served] = []
        for number in range(SERVERS):
            cable = cables[number] if cables else None
            servers.append(Served(number, model, disk, folder, STOPPED_SECONDS, cable))
            stack.callback(servers[-1].end)
        urls = stack.enter_context(proxies(servers))
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump(_config(blank, run_dir, urls, disk, staleness)))
        trainer = Trainer(config, run_dir, folder / "trainer.log", host)
        stack.callback(trainer.end)
        possible, failed = [kind for kind in kinds if kind not in left_out], ""
        slowdown = stack.enter_context(Slowdown())
        chaos, done = Chaos(servers, trainer, disk, possible, seed, slowdown), 0
        pace = chaos.begin()
        try:
            for number in range(events):
                yield chaos.do(number, pace)
                done += 1
            trainer.stop()
        except BenchmarkError as error:
            failed = str(error)
            trainer.end()
    found = outcome(run_dir) | token_differences(run_dir, blank) | {"staleness": staleness, "events": done}
    found |= {"starts": trainer.starts, "started_by_hand": trainer.started_again, "left_out": left_out}
    yield found | {"failed": failed, "pace": vars(pace), "seconds": round(time.monotonic() - started)}


@contextmanager
def small_disk(folder: Path, mib: int = 4) -> Iterator[Path]:
    """Yield a file system of a few MiB, which needs root, or None."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(["mount", *options], capture_output=True).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _config(blank: Path, run_dir: Path, urls: list[str], disk: Path, staleness: int) -> dict[str, Any]:
    return {
        "run_dir": str(run_dir),
        "total_steps": 10**6,
        "actor": {
            "path": str(blank),
            "init_from_scratch": True,
            "optimizer": {"lr": 1e-3},
            "device": "cpu",
            "layout": f"d{RANKS}",
        },
        "algorithm": {"kl": {"coef": 0.0}},
        "gconfig": {"n_samples": 4, "max_new_tokens": 16, "ignore_eos": True},
        "rollout": {
            "prompts_per_step": 6,
            "n_gold_checks": 0,
            "dump_groups": 6,
            "workers": {"rewards": 1},
            "max_staleness": staleness,
            "servers": urls,
            "push": {"folder": str(disk), "seconds": SECONDS, "answer_seconds": SECONDS},
        },
        "train_data": {"path": "arithmetic"},
        "reward": "benchmarks.faults.digits.digits",
        "checkpoint": {"every": 1, "keep": 10**6},
        "evaluation": {"every": 0},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help=f"of {', '.join(RUNS)}; all by default")
    parser.add_argument("--events", type=int, default=100 // len(RUNS), help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, required=True, help="JSON lines; runs that passed are not run again")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # which ends all processes
    made = {"seed": options.seed, "commit": commit(), "machine": vars(machine())}
    lines = [json.loads(line) for line in options.record.read_text().splitlines()] if options.record.exists() else []
    passed = {line["run"] for line in lines if line.get("passed")}
    kept = [line for line in lines if line["run"] in passed]
    with options.record.open("w") as record:
        record.writelines(json.dumps(line) + "\n" for line in kept)
        for name in options.runs or RUNS:
            if name in passed:
                continue
            with tempfile.TemporaryDirectory() as folder:
                for found in faults(Path(folder), options.events, RUNS[name], options.seed + RUNS[name]):
                    line = {"run": name} | found
                    if "outcome" in found and is_good(found):
                        passed.add(name)
                    if "outcome" in found:
                        line |= {"passed": name in passed} | made
                    # Immediately, so that an interrupted command keeps its lines.
                    record.write(json.dumps(line) + "\n")
                    record.flush()
                    say(json.dumps(line))
    sys.exit(not passed.issuperset(options.runs or RUNS))


if __name__ == "__main__":
    main()
