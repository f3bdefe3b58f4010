"""Time pushes of SmolLM2-135M-Instruct to vLLM against plain file copies, and measure how many weights RL changes.

Copies and pushes alternate; every push changes all weights. A push ends when the server's logprobs match the trainer's.
RL steps at 1e-6 follow; after each step the bfloat16 checkpoint is compared with the previous one, like
`rollout.push.transport: delta`.

    .ci/setup_vllm
    python -m benchmarks.pushes --record benchmarks/records/pushes.jsonl
    python -m benchmarks.pushes --url http://127.0.0.1:8000    # with a running server, see "RL with vLLM"

The exit code is 1 if writing a pushed checkpoint takes more than twice the time of a copy, a delta exceeds a fifth of a
checkpoint, or logprobs differ by more than 1e-3.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from archon.remote.connect import SHARED_MEMORY
from benchmarks.harness import say

TRANSPORTS = ("disk", "gloo")
RL_STEPS = 4
MAX_COPIES, MAX_DELTA, MAX_DIFFERENCE = 2.0, 0.2, 1e-3


def vowels(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """Return the share of vowels in an answer: any two answers differ in it, so that every step has a gradient."""
    return sum(letter in "aeiouAEIOU" for letter in completions) / max(len(completions), 1)


def measure_pushes(url: str, checkpoint: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds of every copy and push, and the largest |Δ logprob|."""
    import torch

    from archon.checkpoint.tokenizer import load_tokenizer
    from archon.engine.engine import ArchonEngine
    from archon.remote.config import PushConfig
    from archon.remote.connect import connect
    from archon.rl.weight_sync import PushedWeights, probe_tokens
    from archon.schema.config import EngineConfig

    engine = ArchonEngine(EngineConfig(path=str(checkpoint), optimizer=None))
    engine.initialize()
    questions = [{"prompt": f"What is {n} + {n * 37 % 90 + 10}?"} for n in range(10, 60)]
    probe = probe_tokens(load_tokenizer(checkpoint), questions)
    remotes = {
        transport: connect([url], PushConfig(transport=transport), vocab_size=engine.args.vocab_size, probe=probe)
        for transport in TRANSPORTS
    }
    seconds: dict[str, list[float]] = {"copy": [], "disk_written": [], "disk": [], "gloo": []}
    differences, version = [], 0
    for _ in range(rounds):
        started = time.perf_counter()
        shutil.copyfile(checkpoint / "model.safetensors", folder / "copy")
        seconds["copy"].append(time.perf_counter() - started)
        (folder / "copy").unlink()
        for transport, remote in remotes.items():
            version += 1
            with torch.no_grad():
                for parameter in engine.full_model.parameters():
                    parameter.mul_(1.001)
            remote.update_weights(PushedWeights(engine), version=version)
            metrics = remote.push_metrics
            seconds[transport].append(metrics["push/seconds"])
            differences.append(metrics["push/difference"])
            if transport == "disk":
                seconds["disk_written"].append(metrics["push/write_seconds"])
            say(f"{transport}: {metrics}")
    for remote in remotes.values():
        remote.close()
    return {"seconds": seconds, "difference": max(differences)}


def measure_deltas(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Return the bytes of a bfloat16 checkpoint, and those changed by each RL step with the in-process generator."""
    import torch

    from archon.remote.delta import DELTA_FILE, write_delta
    from archon.rl import RLTrainer
    from archon.rl.config import RLConfig

    run = {
        "run_dir": str(folder / "run"),
        "total_steps": RL_STEPS,
        "actor": {"path": str(checkpoint), "optimizer": {"lr": 1e-6}},
        "gconfig": {"n_samples": 4, "max_new_tokens": 12},
        "rollout": {"prompts_per_step": 2, "n_gold_checks": 0, "workers": {"rewards": 1}},
        "algorithm": {"kl": {"coef": 0.0}},
        "train_data": {"path": "arithmetic"},
        "reward": "benchmarks.pushes.vowels",
    }
    trainer = RLTrainer(RLConfig.parse(run))
    deltas = []
    with trainer.opened():
        before = folder / "bfloat16-0"
        trainer.engine.save(before, dtype=torch.bfloat16)
        size = (before / "model.safetensors").stat().st_size
        for step in range(1, RL_STEPS + 1):
            metrics = trainer.train_step()
            after, delta = folder / f"bfloat16-{step}", folder / f"delta-{step}"
            trainer.engine.save(after, dtype=torch.bfloat16)
            sent = (delta / DELTA_FILE).stat().st_size if write_delta(before, after, delta) else size
            deltas.append(sent)
            say(f"step {step}: {sent} of {size} bytes changed, gradient {metrics['grad_norm']:.3g}")
            shutil.rmtree(before)
            before = after
    return {"bytes": size, "delta_bytes": deltas}


@contextlib.contextmanager
def server_of(checkpoint: Path, url: str | None) -> Iterator[str]:
    """Yield the URL of a server of the checkpoint, by default of one that ends afterwards."""
    if url is not None:
        yield url
        return
    from tests.vllm.server import VLLMServer

    with tempfile.TemporaryDirectory() as logs:
        server = VLLMServer(checkpoint, Path(logs) / "log")
        try:
            yield server.wait().url
        finally:
            server.stop()


def main() -> None:
    from tests.real_model import SMOLLM2

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="JSON lines, overwritten")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--url", help="of a vLLM that serves SmolLM2-135M-Instruct in float32")
    options = parser.parse_args()
    checkpoint, parent = SMOLLM2.make(SMOLLM2.folder), SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    found: dict[str, Any] = {"load": os.getloadavg()[0]}
    with server_of(checkpoint, options.url) as url, tempfile.TemporaryDirectory(dir=parent) as folder:
        found |= measure_pushes(url, checkpoint, Path(folder), options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        found |= measure_deltas(checkpoint, Path(folder))
    # Medians of ratios within a round, because the background load changes between rounds.
    copies = found["seconds"]["copy"]
    for name in ("disk_written", "disk", "gloo"):
        ratios = [push / copy for push, copy in zip(found["seconds"][name], copies, strict=True)]
        found[f"{name}_in_copies"] = round(statistics.median(ratios), 2)
    found["delta_share"] = round(max(found["delta_bytes"]) / found["bytes"], 4)
    found["passed"] = (
        found["disk_written_in_copies"] <= MAX_COPIES
        and found["delta_share"] <= MAX_DELTA
        and found["difference"] <= MAX_DIFFERENCE
    )
    found["seconds"] = {name: [round(value, 3) for value in values] for name, values in found["seconds"].items()}
    if options.record:
        options.record.write_text(json.dumps(found) + "\n")
    say(json.dumps(found, indent=2))
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
