"""Runs of RL whose servers and ranks are killed, stopped, cut off and lied to: is each prompt trained once, on right
tokens?

    python -m benchmarks.faults --record benchmarks/records/faults.jsonl
    python -m benchmarks.faults ahead --record trial.jsonl --events 12

Two processes of `archon serve` answer a tiny Qwen3, each behind a proxy that does the harm at a chosen moment: while
an answer is sampled, or while weights are loaded. Two ranks under torchrun train it, with a checkpoint after each step,
in a network namespace of their own with a cable to each proxy. Of two such runs the first is synchronous, and the
answers of the second are sampled up to two versions ahead. Events are drawn, one after another once the fleet is
whole again, which two further steps with a push to both servers show:

- `kill`: SIGKILL of a server, which is started again on its port, with the weights that it first had;
- `stop`: SIGSTOP of a server for longer than the time-out;
- `drop`: the connection is cut in the middle of a request, which the server may still have carried out;
- `garbage`: the answer is not JSON, cut short, has tokens that there are not, or logprobs that are no numbers;
- `version`: the answer names weights that were never pushed;
- `cut`: the cable to a server is pulled for 10 s;
- `rank`: SIGKILL of rank 1: torchrun starts both ranks anew, from the last checkpoint;
- `controller`: the same of rank 0, which pushes, records and saves;
- `pause`: SIGSTOP of a rank for longer than the time-out;
- `disk`: the folder of pushes is full while one is written, which ends the run with a line; it is resumed.

torchrun gives up after some restarts, and is then started again, as a user would. `cut` needs root and `ip`, and `disk`
root; the outcome names what was left out. A line of the record is an event with the seconds until the fleet was whole
again and those that it was given, the last of a run is its outcome. An event may take the harm's own time and two
time-outs, besides the starts and steps that it costs, which are measured before the first event (`pace`), and longer
as far as the machine is slower than it was then, by a process that computes next to the run (`slowdown`).

In the end every token that was trained on is scored with the weights of the version that it names, by the checkpoint
of that step. The command ends with 1 where a prompt was trained twice or never by what the final weights contain, a
token was older than allowed or its logprob was not that of its version's weights, or anything took longer than it may.
An interrupted command leaves the lines of what it has seen; the next one makes the runs that have not passed.
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
    """Yield that many events of a run, and its outcome; fewer where the run does not overcome one.

    Args:
        folder: for the run, empty.
        events: each of `kinds` once before any is drawn.
        staleness: how many versions the run may be ahead.
        seed: of what is drawn.
        kinds: of the events; those that cannot be had here are left out.
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
    """Yield a file system of a few MiB, which needs root; where there is none, no disk is ever full."""
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
                    # At once, so that an interrupted command leaves what it has seen.
                    record.write(json.dumps(line) + "\n")
                    record.flush()
                    say(json.dumps(line))
    sys.exit(not passed.issuperset(options.runs or RUNS))


if __name__ == "__main__":
    main()
