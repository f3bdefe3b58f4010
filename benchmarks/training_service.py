"""Clients of the training service, together and one after the other: throughput and weights.

    python -m benchmarks.training_service --record benchmarks/records/training_service.jsonl
    python -m benchmarks.training_service --record trial.jsonl --rounds 1 --steps 5

Each client is a process with the unmodified Tinker SDK that trains a LoRA. A step is forward_backward and optim_step,
both sent before it waits for their results, on one document: of 8 tokens, like the sum in the guide, or of 16.

In each round the clients train at the same time, and each trains alone; the order of the two changes from round to
round. The throughput ratio is the sum of the times alone, over the time together. After each run the LoRAs are saved,
and each client's weights are compared with those of its run alone. A line of the record is a round; the last line of
each case and number of clients is the outcome, of medians. The exit code is 1 if a limit was missed.

The model is the Qwen3 of 26 million parameters in float32. The server has one thread (`--threads`), and the clients
share the other processor. On a CPU, batching saves the time that does not depend on the number of
tokens: Python, and reading the weights. With a hundred tokens in a step, matmuls take most of the time, alone and
together.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from archon.tools.bench.origin import commit, machine
from benchmarks import harness
from benchmarks.harness import ROOT, Worker, say

CASES = {"8 tokens": 8, "16 tokens": 16}
"""Tokens of the document of a step."""
AIM = 1.6
"""Steps per second of clients at the same time, over those of clients one after the other."""
WEIGHTS = 1e-6
"""Largest difference of a weight from that of the client's run alone."""
RANK = 8
ADAM = {"learning_rate": 1e-4, "eps": 1e-5, "grad_clip_norm": 1.0}
"""With the SDK's eps of 1e-12, AdamW turns rounding noise of a gradient near 0 into a full step."""

Run = Callable[..., dict[str, Any]]


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    """Prepare a worker: the maker of the checkpoint, or a client."""
    return {"checkpoint": checkpoint, "client": client}[side](options)


def checkpoint(options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    """Write the base model with a tokenizer."""
    from archon.rl.bootstrap import make_tokenizer
    from archon.training.config import TokenizerRecipe
    from benchmarks.checkpoints import make_checkpoint

    folder = make_checkpoint(Path(options["folder"]), options["model"])
    alphabet = "".join(map(chr, range(32, 127)))
    make_tokenizer(TokenizerRecipe(kind="characters", alphabet=alphabet), []).save_pretrained(folder)
    return {}, dict


def client(options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    """Connect a client of the SDK."""
    import tinker
    from tinker import types

    number, base = options["number"], options["base"]
    service = tinker.ServiceClient(base_url=options["url"], api_key=f"tml-{number}")
    models = dict[str, Any]()
    adam = types.AdamParams(**ADAM)

    def document(step: int, length: int) -> Any:
        chance = random.Random(f"{number} {step}")
        row = [chance.randrange(4000) for _ in range(length + 1)]
        inputs = {"target_tokens": row[1:]}
        return types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)

    def run(what: str, name: str, case: str = "", steps: int = 0) -> dict[str, Any]:
        if what == "create":
            models[name] = service.create_lora_training_client(base, rank=RANK, seed=number).result()
            return {}
        model = models[name]
        if what == "save":
            del models[name]
            return {"path": model.save_state(name).result().path}
        losses = []
        for step in range(steps):
            loss = model.forward_backward([document(step, CASES[case])], "cross_entropy")
            model.optim_step(adam).result()
            losses.append(loss.result().metrics["loss:sum"])
        return {"first": losses[0], "last": losses[-1]}

    return {}, run


class Server:
    """`archon serve-training`, started by its command; `program` replaces `-m archon`."""

    def __init__(
        self,
        base: Path,
        state: Path,
        threads: int,
        *overrides: str,
        port: int = 0,
        program: Sequence[str] = ("-m", "archon"),
    ) -> None:
        command = [sys.executable, *program, "serve-training", str(base), "--port", str(port), "--state", str(state)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.complaints = state.parent / f"{state.name}.stderr"
        with self.complaints.open("a") as complaints:
            self.process = subprocess.Popen(
                [*command, *overrides], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=complaints, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise harness.BenchmarkError(f"the server did not start: {self.end()}")
        self.url = line.split(" at ")[1].split()[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def end(self) -> str:
        """Interrupt it and return its errors, or an empty string."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        code, said = self.process.wait(timeout=60), self.complaints.read_text()
        return f"exit code {code}: {said[-2000:]}" if code or "Traceback" in said else ""


class Clients:
    """Client processes of a server."""

    def __init__(self, stack: ExitStack, server: Server, base: Path, state: Path, options: argparse.Namespace) -> None:
        self.state, self.steps = state, options.steps
        self.workers = []
        for number in range(max(options.clients)):
            made = {"threads": 1, "number": number, "url": server.url, "base": str(base)}
            self.workers.append(Worker.start("benchmarks.training_service", "client", made))
            stack.callback(self.workers[-1].close)

    def train(self, case: str, numbers: Sequence[int], name: str) -> tuple[float, dict[int, Path]]:
        """Train some clients at the same time from new LoRAs; return the seconds and their saved weights."""
        together = self._together
        together(numbers, what="create", name=name)
        begun = time.perf_counter()
        together(numbers, what="train", name=name, case=case, steps=self.steps)
        seconds = time.perf_counter() - begun
        saved = together(numbers, what="save", name=name)
        folders = {}
        for number, answer in zip(numbers, saved, strict=True):
            model, kind, name = answer["path"].removeprefix("tinker://").split("/")
            folders[number] = self.state / "checkpoints" / model.replace(":", "_") / kind / name / "adapter"
        return seconds, folders

    def _together(self, numbers: Sequence[int], **request: Any) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(numbers)) as pool:
            return list(pool.map(lambda number: self.workers[number].run(**request), numbers))


def difference(first: Path, second: Path) -> float:
    """Return the largest difference of two LoRAs."""
    from safetensors.numpy import load_file

    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    if a.keys() != b.keys():
        raise harness.BenchmarkError("two runs of a client saved other matrices")
    return max(float(abs(a[name] - b[name]).max()) for name in a)


def measure(
    clients: Clients, case: str, count: int, rounds: int, write: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Measure rounds of some clients; the first round warms up."""
    numbers = range(count)
    rows = []
    for turn in range(rounds + 1):
        name = f"{CASES[case]}-{count}-{turn}"
        if turn % 2:
            together, shared = clients.train(case, numbers, f"{name}-together")
        alone = [clients.train(case, [number], f"{name}-alone") for number in numbers]
        if not turn % 2:
            together, shared = clients.train(case, numbers, f"{name}-together")
        own = {number: folder for _, folders in alone for number, folder in folders.items()}
        one_by_one = sum(seconds for seconds, _ in alone)
        row = {
            "case": case,
            "clients": count,
            "round": turn,
            "together_steps_per_second": count * clients.steps / together,
            "alone_steps_per_second": count * clients.steps / one_by_one,
            "ratio": one_by_one / together,
            "weights_difference": max(difference(shared[number], own[number]) for number in numbers),
        }
        if turn:
            rows.append(row)
            write(row)
    return rows


def outcome(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the outcome of the rounds with one number of clients."""
    found = {"case": rows[0]["case"], "clients": rows[0]["clients"], "rounds": len(rows)}
    for name in ("together_steps_per_second", "alone_steps_per_second", "ratio"):
        found[name] = statistics.median(row[name] for row in rows)
    found["weights_difference"] = max(row["weights_difference"] for row in rows)
    found |= {name: getattr(options, name) for name in ("model", "steps", "threads")}
    found |= {"aim": AIM, "commit": commit(), "machine": machine().cpu}
    return found | {"passed": found["ratio"] >= AIM and found["weights_difference"] <= WEIGHTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="JSON lines, overwritten")
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 8], help="clients at once (default 2 8)")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--steps", type=int, default=15, help="of a client in a round (default 15)")
    parser.add_argument("--model", default="26M", help="of benchmarks.checkpoints (default 26M)")
    parser.add_argument("--threads", type=int, default=1, help="of the server (default 1)")
    parser.add_argument("--worker", metavar="SIDE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return harness.serve(prepare, options.worker)
    if options.record is None:
        parser.error("--record is needed")
    with tempfile.TemporaryDirectory() as folder, options.record.open("w") as record, ExitStack() as stack:

        def write(row: dict[str, Any]) -> None:
            record.write(json.dumps(row) + "\n")
            record.flush()
            say(f"  {row}")

        base, state = Path(folder) / "checkpoint", Path(folder) / "state"
        made = {"threads": 1, "folder": str(base), "model": options.model}
        Worker.start("benchmarks.training_service", "checkpoint", made).close()
        server = stack.enter_context(Server(base, state, options.threads, "max_models=4096"))
        clients = Clients(stack, server, base, state, options)
        found = []
        for case in options.cases:
            for count in options.clients:
                found.append(outcome(measure(clients, case, count, options.rounds, write), options))
                write(found[-1])
        complaints = server.end()
        if complaints:
            raise harness.BenchmarkError(complaints)
    sys.exit(0 if all(row["passed"] for row in found) else 1)


if __name__ == "__main__":
    main()
