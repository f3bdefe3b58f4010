"""A run of RL whose servers and ranks are killed, stopped, cut off and lied to: is each prompt trained once, on right
tokens?

    python -m benchmarks.faults --record benchmarks/records/faults.jsonl
    python -m benchmarks.faults --record trial.jsonl --events 12

Two processes of `archon serve` answer a tiny Qwen3, each behind a proxy that does the harm at a chosen moment: while
an answer is sampled, or while weights are loaded. Two ranks under torchrun train it, with a checkpoint after each step,
in a network namespace of their own with a cable to each proxy. Events are drawn, one after another once the fleet is
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
again, the last the outcome. The command ends with 1 where a prompt was trained twice or never by what the final weights
contain, a token's logprob was not that of the trainer's weights (the mean of a step above 1e-5), or anything took
longer than it may.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from archon.bench.origin import commit, machine
from archon.engine.engine import ArchonEngine
from archon.remote.http import KEY
from archon.rl.bootstrap import write_blank
from archon.schema.config import EngineConfig
from archon.training.config import BootstrapConfig, TokenizerRecipe
from benchmarks.faults.outcome import is_good, outcome
from benchmarks.faults.served import KINDS, MOMENTS, Served, proxies
from benchmarks.faults.trainer import RANKS, Trainer
from benchmarks.harness import BenchmarkError, say
from benchmarks.namespaces import Cable, Host, Network, missing

OF_RANKS = ("rank", "controller", "pause")
SERVERS = 2
SECONDS = 10.0
"""Time-out of an answer and of a push."""
STOPPED_SECONDS = SECONDS + 2
WHOLE_SECONDS = 240.0
"""Within which the fleet must be whole again after an event: starts of a server and of the ranks, and two steps."""
LONGEST_WAIT = 0.7
"""Before a rank is harmed: about a step, so that it may be at any point of one."""
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


class Chaos:
    """Does harm to a run, event after event, each once the run has overcome the last."""

    def __init__(self, servers: list[Served], trainer: Trainer, disk: Path, kinds: list[str], seed: int) -> None:
        self._servers, self._trainer, self._disk, self._kinds = servers, trainer, disk, kinds
        self._random = random.Random(seed)

    def do(self, number: int) -> dict[str, Any]:
        """Returns the event, once it was done and overcome."""
        kinds, starts = self._kinds, self._trainer.starts
        # Each kind once before any is drawn.
        kind = kinds[number] if number < len(kinds) else self._random.choice(kinds)
        started = time.monotonic()
        event: dict[str, Any] = {"event": number, "kind": kind}
        if kind == "disk":
            self._fill_disk()
        elif kind in OF_RANKS:
            event |= {"rank": self._harm_rank(kind)}
        else:
            event |= self._harm_server(kind)
        self.wait_until_whole()
        seconds = round(time.monotonic() - started, 1)
        return event | {"run_started_again": self._trainer.starts - starts, "seconds": seconds}

    def wait_until_whole(self) -> None:
        """Waits for two further steps, with a push to every server in each; starts a run again that has ended."""
        until, before = time.monotonic() + WHOLE_SECONDS, None
        while time.monotonic() < until:
            self._trainer.keep()
            last = self._trainer.steps()[-2:]
            step = last[-1]["step"] if last else 0
            before = step if before is None else min(before, step)  # a resumed run drops those after its checkpoint
            if step >= before + 2 and all(record.get("push/servers") == len(self._servers) for record in last):
                return
            time.sleep(0.05)
        raise BenchmarkError(f"not whole again within {WHOLE_SECONDS:g} s: {self._trainer.output()[-3000:]}")

    def _harm_server(self, kind: str) -> dict[str, Any]:
        server, moment = self._random.choice(self._servers), self._random.choice(MOMENTS)
        server.plan(kind, moment, self._random.randrange(2**16))
        if not server.done.wait(WHOLE_SECONDS):
            raise BenchmarkError(f"no {moment} reached server {server.number} within {WHOLE_SECONDS:g} s")
        if kind == "kill":
            server.process.wait(WHOLE_SECONDS)
            server.start_again()
        return {"moment": moment, "server": server.number}

    def _harm_rank(self, kind: str) -> int:
        time.sleep(self._random.uniform(0, LONGEST_WAIT))
        rank = {"rank": 1, "controller": 0}.get(kind, self._random.randrange(RANKS))
        if kind != "pause":
            self._trainer.signal_rank(rank, signal.SIGKILL)
            return rank
        pid = self._trainer.signal_rank(rank, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        return rank

    def _fill_disk(self) -> None:
        """Fills the folder of pushes until the run has said so."""
        said = self._trainer.output().count("No space left on device")
        filler = self._disk / "filler"
        until = time.monotonic() + WHOLE_SECONDS
        try:
            while self._trainer.output().count("No space left on device") == said:
                with suppress(OSError), filler.open("ab", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
                if time.monotonic() > until:
                    raise BenchmarkError("a full disk did not end the run")
                time.sleep(0.05)
        finally:
            filler.unlink()


def faults(folder: Path, events: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yields that many events of a run, and its outcome."""
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
        config.write_text(yaml.safe_dump(_config(blank, run_dir, urls, disk)))
        trainer = Trainer(config, run_dir, folder / "trainer.log", host)
        stack.callback(trainer.end)
        kinds = [kind for kind in (*KINDS, "cut", *OF_RANKS, "disk") if kind not in left_out]
        chaos = Chaos(servers, trainer, disk, kinds, seed)
        chaos.wait_until_whole()
        for number in range(events):
            yield chaos.do(number)
        trainer.stop()
        counted = {"starts": trainer.starts, "started_by_hand": trainer.started_again, "left_out": left_out}
    seconds = round(time.monotonic() - started)
    yield outcome(run_dir) | counted | {"events": events, "seconds": seconds}


@contextmanager
def small_disk(folder: Path, mib: int = 4) -> Iterator[Path]:
    """Yields a file system of a few MiB, which needs root; where there is none, no disk is ever full."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(["mount", *options], capture_output=True).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _config(blank: Path, run_dir: Path, urls: list[str], disk: Path) -> dict[str, Any]:
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
            "gold_checked": 0,
            "dump_groups": 6,
            "reward_workers": 1,
            "servers": urls,
            "push": {"folder": str(disk), "seconds": SECONDS, "answer_seconds": SECONDS},
        },
        "train_data": {"path": "arithmetic"},
        "reward": "benchmarks.faults.digits.digits",
        "checkpoint": {"every": 1},
        "evaluation": {"every": 0},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, required=True, help="JSON lines, overwritten")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # which ends all processes
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for line in faults(Path(folder), options.events, options.seed):
            found.append(line)
            say(json.dumps(line))
    found[-1] |= {"passed": is_good(found[-1]), "seed": options.seed, "commit": commit(), "machine": vars(machine())}
    options.record.write_text("".join(json.dumps(line) + "\n" for line in found))
    sys.exit(not found[-1]["passed"])


if __name__ == "__main__":
    main()
