"""A run of RL whose servers are killed, stopped, cut off and made to lie: is each prompt trained once, on right tokens?

    python -m benchmarks.faults --record benchmarks/records/faults.jsonl
    python -m benchmarks.faults --record trial.jsonl --events 10

Two processes of `archon serve` answer a tiny Qwen3, each behind a proxy that does the harm at a chosen moment: while
an answer is sampled, or while weights are loaded. Events are drawn, one after another once the fleet is whole again:

- `kill`: SIGKILL; the server is started again on its port, with the weights that it first had;
- `stop`: SIGSTOP for longer than the time-out;
- `drop`: the connection is cut in the middle of a request, which the server may still have carried out;
- `garbage`: the answer is not JSON, cut short, has tokens that there are not, or logprobs that are no numbers;
- `version`: the answer names weights that were never pushed;
- `disk`: the folder of pushes is full while one is written, which ends the run with a line; it is resumed.

A line of the record is an event with the seconds until the fleet was whole again, the last the outcome. The command
ends with 1 where a prompt was trained twice or never, a token's logprob was not that of the trainer's weights (the mean
of a step above 1e-5, where the weights of the step before differ by far more), or anything took longer than it may.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from archon.bench.origin import commit, machine
from archon.engine.engine import ArchonEngine
from archon.remote.http import KEY
from archon.rl.bootstrap import write_blank
from archon.rl.config import RLConfig
from archon.rl.trainer import RLTrainer
from archon.schema.config import EngineConfig
from archon.schema.errors import UserError
from archon.training.config import BootstrapConfig, TokenizerRecipe
from archon.training.metrics import read_jsonl
from archon.training.runner import Runner
from benchmarks.harness import ROOT, BenchmarkError, say

KINDS = ("kill", "stop", "drop", "garbage", "version")
MOMENTS = ("answer", "push")
SECONDS = 10.0
"""Time-out of an answer and of a push."""
WHOLE_SECONDS = 180.0
"""Within which the fleet must be whole again after an event: a start of a server, and a step."""
WRONG = 1e-5
"""Mean |Δ logprob| of a step that tells tokens of other weights."""
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
GARBAGE: tuple[bytes, ...] = (
    b"<html>502 Bad Gateway</html>",
    b'{"output_ids": [1, 2',
    b"[]",
    b'{"output_ids": [1, 2], "logprobs": [-1.0], "versions": [0, 0], "stop_reason": "stop"}',
    b'{"output_ids": [999999], "logprobs": [-1.0], "versions": [0], "stop_reason": "stop"}',
    b'{"output_ids": ["a"], "logprobs": [-1.0], "versions": [0], "stop_reason": "stop"}',
    b'{"output_ids": [1], "logprobs": [NaN], "versions": [0], "stop_reason": "stop"}',
    b'{"output_ids": [1], "logprobs": [-1.0], "versions": ["new"], "stop_reason": "stop"}',
    b'{"logprobs": [0.5], "version": null}',
)


class Served:
    """`archon serve` on a port of its own behind a proxy on another, which `plan` makes do harm once."""

    def __init__(self, number: int, model: Path, root: Path, folder: Path) -> None:
        self.number, self._model, self._root = number, model, root
        self._log = folder / f"server-{number}.log"
        self._port = 0
        self._planned: tuple[str, str, int] | None = None
        self.done = threading.Event()
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "archon", "serve", self._model, "--port", self._port]
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [*map(str, command), "--push-root", str(self._root), "device=cpu"],
                env=os.environ | {"ARCHON_TOKEN": os.environ[KEY], "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if " at http://127.0.0.1:" not in line:
            raise BenchmarkError(f"server {self.number} did not start: {line}{self._log.read_text()[-2000:]}")
        self._port = int(line.split(" at http://127.0.0.1:")[1].partition("/")[0])

    def plan(self, kind: str, moment: str, which: int) -> None:
        """Do harm of a kind to the next request of that moment."""
        self.done.clear()
        self._planned = kind, moment, which

    def start_again(self) -> None:
        """Start the server again if it is dead."""
        if self.process.poll() is not None:
            self._start()

    def end(self) -> None:
        """End the server, however it is."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    async def serve(self) -> str:
        """Starts the proxy on the running event loop. Returns its URL."""
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Ends the proxy."""
        await self._runner.cleanup()
        await self._client.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body, path = await request.read(), request.path
        moment = {"/v1/rollout/generate": "answer", "/v1/rollout/weights": "push"}.get(path)
        kind, which = "", 0
        if self._planned is not None and moment == self._planned[1]:
            kind, _, which = self._planned
            self._planned = None
        harm = asyncio.create_task(self._harm(kind, request)) if kind else None
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        try:
            url = f"http://127.0.0.1:{self._port}{path}"
            async with self._client.request(request.method, url, data=body, headers=headers) as found:
                status, content = found.status, await found.read()
        except aiohttp.ClientError:
            assert request.transport is not None
            request.transport.abort()
            return web.Response(status=502)
        finally:
            if harm is not None:
                await harm
        if kind == "garbage":
            content = GARBAGE[which % len(GARBAGE)]
        elif kind == "version":
            content = _other_version(content, which)
        return web.Response(status=status, body=content, content_type="application/json")

    async def _harm(self, kind: str, request: web.Request) -> None:
        await asyncio.sleep(0.005)
        if kind == "kill":
            self.process.kill()
        elif kind == "stop":
            self.process.send_signal(signal.SIGSTOP)
            loop = asyncio.get_running_loop()
            loop.call_later(SECONDS + 2, self.process.send_signal, signal.SIGCONT)
        elif kind == "drop":
            assert request.transport is not None
            request.transport.abort()
        self.done.set()


def _other_version(content: bytes, which: int) -> bytes:
    """Returns a response whose versions were never pushed."""
    body = json.loads(content)
    other = (-1, 10**6)[which % 2]
    if "versions" in body:
        body["versions"] = [other] * len(body["versions"])
    return json.dumps(body | ({"version": other} if "version" in body else {})).encode()


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


@contextmanager
def proxies(servers: list[Served]) -> Iterator[list[str]]:
    """Yields the URLs of the servers' proxies, on an event loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    try:
        yield [run(server.serve()) for server in servers]
    finally:
        for server in servers:
            with suppress(Exception):
                run(server.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Chaos(threading.Thread):
    """Does harm to the servers of a run, event after event, and stops the run after the last."""

    def __init__(self, servers: list[Served], disk: Path, events: int, seed: int) -> None:
        super().__init__(name="chaos")
        self._servers, self._disk, self._count = servers, disk, events
        self._random = random.Random(seed)
        self.has_disk = disk.is_mount()
        self.events: list[dict[str, Any]] = []
        self.trainer: RLTrainer | None = None
        self.runner: Runner | None = None
        self.full = threading.Event()  # while the folder of pushes is full
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._wait_until_whole()
            for number in range(self._count):
                self._do(number)
        except BaseException as error:
            self.error = error
        finally:
            if self.runner is not None:
                self.runner.request_stop(signal.SIGTERM)

    def _do(self, number: int) -> None:
        kinds = (*KINDS, "disk") if self.has_disk else KINDS
        # Each kind once before any is drawn.
        kind = kinds[number] if number < len(kinds) else self._random.choice(kinds)
        moment = (
            MOMENTS[(number + number // len(kinds)) % 2] if number < 2 * len(kinds) else self._random.choice(MOMENTS)
        )
        started = time.monotonic()
        event: dict[str, Any] = {"event": number, "kind": kind}
        if kind == "disk":
            self._fill_disk()
        else:
            server = self._random.choice(self._servers)
            event |= {"moment": moment, "server": server.number}
            server.plan(kind, moment, self._random.randrange(2**16))
            if not server.done.wait(WHOLE_SECONDS):
                raise BenchmarkError(f"no {moment} reached server {server.number} within {WHOLE_SECONDS:g} s")
            if kind == "kill":
                server.process.wait(WHOLE_SECONDS)
            server.start_again()
        self._wait_until_whole()
        self.events.append(event | {"seconds": round(time.monotonic() - started, 1)})
        say(json.dumps(self.events[-1]))

    def _fill_disk(self) -> None:
        self.full.set()
        filler = self._disk / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        until = time.monotonic() + WHOLE_SECONDS
        while self.full.is_set():  # until the run has ended
            if time.monotonic() > until:
                raise BenchmarkError("a full disk did not end the run")
            time.sleep(0.05)
        filler.unlink()

    def _wait_until_whole(self) -> None:
        """Waits for two further steps with every server in the fleet."""
        until, first = time.monotonic() + WHOLE_SECONDS, None
        while time.monotonic() < until:
            trainer = self.trainer
            engine = getattr(trainer, "generator", None)
            whole = engine is not None and all(server.failure is None for server in engine.servers)
            step = trainer.step if trainer is not None else 0
            first = (step if first is None else first) if whole else None
            if first is not None and step > first:
                return
            time.sleep(0.05)
        raise BenchmarkError(f"the fleet was not whole again within {WHOLE_SECONDS:g} s")


def faults(folder: Path, events: int, seed: int = 0) -> list[dict[str, Any]]:
    """Run with that many events; returns them, and the outcome."""
    os.environ.setdefault(KEY, "faults")
    blank, model, run_dir = folder / "blank", folder / "model", folder / "run"
    recipe = TokenizerRecipe(kind="characters", alphabet="0123456789+=", chat_template="plain")
    write_blank(BootstrapConfig(hf_config=SIZES, tokenizer=recipe), blank)
    engine = ArchonEngine(EngineConfig(path=str(blank), init_from_scratch=True, optimizer=None, device="cpu"))
    engine.initialize()
    engine.save(model)
    started = time.monotonic()
    with small_disk(folder / "pushes") as disk:
        servers: list[Served] = []
        try:
            servers += [Served(number, model, disk, folder) for number in range(2)]
            with proxies(servers) as urls:
                chaos = Chaos(servers, disk, events, seed)
                ends = _train(chaos, _config(blank, run_dir, urls, disk))
        finally:
            for server in servers:
                server.end()
    return [*chaos.events, _outcome(run_dir, ends) | {"events": events, "seconds": round(time.monotonic() - started)}]


def _config(blank: Path, run_dir: Path, urls: list[str], disk: Path) -> dict[str, Any]:
    return {
        "run_dir": str(run_dir),
        "total_steps": 10**6,
        "actor": {"path": str(blank), "init_from_scratch": True, "optimizer": {"lr": 1e-3}, "device": "cpu"},
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
        "reward": "benchmarks.faults.digits",
        "checkpoint": {"every": 1},
        "evaluation": {"every": 0},
    }


def digits(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """Returns the share of an answer's tokens that are digits, a reward that hardly any answers have in common."""
    return sum(token.isdigit() for token in completions) / max(1, len(completions))


def _train(chaos: Chaos, config: dict[str, Any]) -> list[str]:
    """Runs until the last event, resumed after each full disk. Returns with what lines it ended before."""
    ends: list[str] = []
    chaos.start()
    while True:
        parsed = RLConfig.parse(config | {"resume": True})
        try:
            with Runner(parsed.run_dir, parsed, resume=True) as runner:
                chaos.runner = runner
                chaos.trainer = RLTrainer(parsed, runner)
                chaos.trainer.train()
            break
        except UserError as error:
            chaos.trainer = None
            ends.append(" ".join(str(error).split()))
            say(f"the run ended: {ends[-1][:200]}")
            if not chaos.full.is_set():
                break
            chaos.full.clear()
            time.sleep(0.2)  # until the disk is free again
        if not chaos.is_alive():
            break
    chaos.join(WHOLE_SECONDS)
    if chaos.error is not None:
        raise chaos.error
    return ends


def _outcome(run_dir: Path, ends: list[str]) -> dict[str, Any]:
    """Returns what was trained: prompts, those missing or twice, and the largest mistake of a step's logprobs."""
    steps = [record for record in read_jsonl(run_dir / "metrics.jsonl") if "first_logprob_diff" in record]
    groups: dict[int, set[int]] = {}
    for row in read_jsonl(run_dir / "trajectories.jsonl"):
        groups.setdefault(row["group"], set()).add(row["step"])
    last = max(groups)
    lost = sum(
        value
        for step in steps
        for name, value in step.items()
        if name.startswith(("rollout/dropped/", "rollout/failed/"))
    )
    mistake = max(step["first_logprob_diff"] for step in steps)
    return {
        "outcome": "steps",
        "steps": len(steps),
        "prompts": len(groups),
        "prompts_missing": last + 1 - len(groups),
        "prompts_twice": sum(len(found) > 1 for found in groups.values()),
        "episodes_lost": lost,
        "largest_logprob_difference": mistake,
        "servers_lost": max(step["servers/lost"] for step in steps),
        "requests_retried": max(step["servers/retried"] for step in steps),
        "ended_by_full_disk": len(ends),
    }


def is_good(outcome: dict[str, Any]) -> bool:
    """Returns whether every prompt was trained once, or counted as lost, on tokens of the right weights."""
    missing = outcome["prompts_missing"] <= outcome["episodes_lost"]
    return missing and not outcome["prompts_twice"] and outcome["largest_logprob_difference"] < WRONG


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = faults(Path(folder), options.events, options.seed)
    origin = {"commit": commit(), "machine": vars(machine()), "seed": options.seed}
    options.record.write_text("".join(json.dumps(line) + "\n" for line in [*found[:-1], found[-1] | origin]))
    say(json.dumps(found[-1]))
    sys.exit(not is_good(found[-1]))


if __name__ == "__main__":
    main()
