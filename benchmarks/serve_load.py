"""Load `archon serve` with agents: no answer is lost, nothing grows, and HTTP costs little.

    python -m benchmarks.serve_load --record benchmarks/records/serve_load.jsonl
    python -m benchmarks.serve_load --record trial.jsonl --seconds 30

64 concurrent agents, half of them streaming. Each opens a session, asks three turns, rewards every answer, exports,
compares and closes. The bare generator alternates with them in a similar process: it answers the same prompts with the
same concurrency and answer lengths. Five minutes of agents take ten in total. A line of the record is one such round,
the last line the outcome. The exit code is 1 if a request failed, an answer was lost, a resource grew (see
`benchmarks.watch`) or a limit was missed.

The model is the Qwen3 of 26 million parameters (hidden size 512, 8 layers) in float32 with a byte-level tokenizer. It
is close to the smallest useful agent model on a CPU, so that the server's overhead is visible next to the model's time.
Answers have 32 to 96 tokens, like steps of a small agent. Generator and server have one thread each (`--threads`); the
agents are a third process on the other core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from archon.tools.bench.origin import commit, machine
from benchmarks import harness
from benchmarks.harness import ROOT, Worker, say
from benchmarks.watch import Watch, sample, verdict

AGENTS, SHORTEST, LONGEST = 64, 32, 96
AIM = 0.8
"""Answered tokens a second, of the server's by the bare generator's."""

MEDIANS = ("served_tokens_per_second", "bare_tokens_per_second", "ratio", "cpu_ratio")

Run = Callable[..., dict[str, Any]]
Conversations = list[list[tuple[list[int], int]]]
"""For each turn of an agent: prompt length and answer length in tokens."""


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    """Prepare one of the two client processes."""
    return {"bare": bare, "agents": agents}[side](options)


def bare(options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    """Measure the generator alone, loaded as the server loads it; makes the checkpoint first."""
    from archon.checkpoint.hf_io import load_model
    from archon.checkpoint.tokenizer import load_tokenizer
    from archon.generation import InProcessEngine
    from archon.generation.types import GenerationHyperparameters, ModelRequest
    from archon.rl.bootstrap import make_tokenizer
    from archon.training.config import TokenizerRecipe
    from benchmarks.checkpoints import make_checkpoint, shape

    folder = make_checkpoint(Path(options["folder"]), options["model"])
    texts = [path.read_text() for room in ("models", "parallel", "rl") for path in sorted((ROOT / room).rglob("*.py"))]
    recipe = TokenizerRecipe(kind="bpe", vocab_size=shape(options["model"])["vocab_size"])
    make_tokenizer(recipe, texts).save_pretrained(folder)
    engine = InProcessEngine.from_model(load_model(folder), load_tokenizer(folder), max_slots=AGENTS)
    loop = asyncio.new_event_loop()

    async def converse(turns: list[tuple[list[int], int]]) -> int:
        count = 0
        for prompt, length in turns:
            gconfig = GenerationHyperparameters(max_new_tokens=length, ignore_eos=True)
            count += len((await engine.agenerate(ModelRequest(prompt, gconfig))).output_tokens)
        return count

    async def everyone(conversations: Conversations) -> int:
        return sum(await asyncio.gather(*map(converse, conversations)))

    def run(conversations: Conversations) -> dict[str, Any]:
        begun = cpu_seconds()
        return {"tokens": loop.run_until_complete(everyone(conversations)), "cpu_seconds": cpu_seconds() - begun}

    return {}, run


@dataclass
class Round:
    """Results of one session of every agent."""

    conversations: Conversations
    tokens: int = 0
    answers: int = 0
    lost: int = 0
    errors: list[str] = field(default_factory=list)


def agents(options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    """Run the agents of a server."""
    import aiohttp

    loop = asyncio.new_event_loop()

    async def open_client() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120), raise_for_status=True
        )

    client = loop.run_until_complete(open_client())

    async def everyone(number: int) -> Round:
        seen = Round([[] for _ in range(AGENTS)])
        # The first round, which warms up, is the longest: it touches more pages of the cache than any that follows.
        turns = options["turns"] + (number == 0)
        talks = (Agent(client, options["url"], number, index, seen).run(turns) for index in range(AGENTS))
        for outcome in await asyncio.gather(*talks, return_exceptions=True):
            if isinstance(outcome, BaseException):
                seen.errors.append(harness.one_line(outcome))
        return seen

    def run(number: int) -> dict[str, Any]:
        return vars(loop.run_until_complete(everyone(number)))

    return {}, run


class Agent:
    """One session, from its opening to its end."""

    def __init__(self, client: Any, url: str, number: int, index: int, seen: Round) -> None:
        self.client, self.url, self.number, self.index, self.seen = client, url, number, index, seen

    async def run(self, turns: int) -> None:
        session = await self.json("post", "/sessions")
        own, here = {"Authorization": f"Bearer {session['api_key']}"}, f"/sessions/{session['id']}"
        chance = random.Random(self.number * AGENTS + self.index)
        talk = [{"role": "user", "content": f"Step {self.number} of task {self.index}: what is to be done next?"}]
        answers: dict[str, list[int]] = {}
        for _ in range(turns):
            length = chance.randint(SHORTEST, LONGEST) if self.number else LONGEST
            body = {"messages": talk, "max_tokens": length, "ignore_eos": True}
            body |= {"return_token_ids": True, "stream": self.index % 2 == 0}
            completion, prompt, tokens, text = await self.ask(body, own)
            answers[completion] = prompt + tokens
            self.seen.conversations[self.index].append((prompt, len(tokens)))
            self.seen.tokens += len(tokens)
            self.seen.answers += 1
            if len(tokens) != length:
                raise RuntimeError(f"{len(tokens)} tokens came, asked for {length}")
            talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "Done. And then?"}]
        for completion in answers:
            reward = {"reward": chance.random(), "completion_id": completion}
            await self.json("post", f"{here}/reward", json=reward, headers=own)
        exported = await self.json("get", f"{here}/export", headers=own)
        kept = {row["answers"][0]["completion_id"]: row["input_ids"] for row in exported["trajectories"]}
        self.seen.lost += sum(kept.get(completion) != tokens for completion, tokens in answers.items())
        closed = await self.json("delete", here, headers=own)
        if closed["answers"] != turns:
            raise RuntimeError(f"the session had {closed['answers']} answers, {turns} were given")

    async def ask(self, body: dict[str, Any], own: dict[str, str]) -> tuple[str, list[int], list[int], str]:
        """Id, prompt, tokens and text of an answer."""
        if not body["stream"]:
            answer = await self.json("post", "/chat/completions", json=body, headers=own)
            (choice,) = answer["choices"]
            return answer["id"], answer["prompt_token_ids"], choice["token_ids"], choice["message"]["content"]
        prompt: list[int] = []
        tokens: list[int] = []
        text, chunk, ended = "", {"id": ""}, False
        async with self.client.post(f"{self.url}/chat/completions", json=body, headers=own) as response:
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    ended = True
                elif data:
                    chunk = json.loads(data)
                    (choice,) = chunk["choices"]
                    prompt += chunk.get("prompt_token_ids", [])
                    tokens += choice.get("token_ids", [])
                    text += choice["delta"].get("content", "")
        if not ended:
            raise RuntimeError("the stream broke off")
        return chunk["id"], prompt, tokens, text

    async def json(self, method: str, path: str, **options: Any) -> Any:
        async with self.client.request(method, self.url + path, **options) as response:
            return await response.json()


def cpu_seconds(pid: int | str = "self") -> float:
    """Processor time that a process has had (`man proc_pid_stat`)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Server:
    """`archon serve`, started by its command, and the resources of its process."""

    def __init__(self, folder: Path, threads: int) -> None:
        command = [sys.executable, "-m", "archon", "serve", str(folder), "--port", "0", f"max_slots={AGENTS}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.complaints = folder.parent / "complaints"
        with self.complaints.open("w") as complaints:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=complaints, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise harness.BenchmarkError(f"the server did not start: {self.end()}")
        self.url = line.split()[3]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def end(self) -> str:
        """Interrupt it and return its errors, or an empty string."""
        self.process.send_signal(signal.SIGINT)
        code, said = self.process.wait(timeout=30), self.complaints.read_text()
        return f"exit code {code}: {said[-2000:]}" if code or "Traceback" in said else ""


def measure(options: argparse.Namespace, folder: Path, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Round until the agents have been served for so long; returns the outcome."""
    made = {"threads": options.threads, "folder": str(folder), "model": options.model}
    rounds: list[dict[str, Any]] = []
    served = 0.0
    start = partial(Worker.start, "benchmarks.serve_load")
    with closing(start("bare", made)) as generator, Server(folder, options.threads) as server:
        idle = sample(server.process.pid)
        with closing(start("agents", {"threads": 1, "url": server.url, "turns": options.turns})) as crowd:
            last = crowd.run(number=0)
            generator.run(conversations=last["conversations"])
            with Watch(server.process.pid) as watch:
                while served < options.seconds:
                    # Both sides go first equally often; the bare generator gets the prompts of the previous round.
                    bare_first = len(rounds) % 2 == 1
                    alone = generator.run(conversations=last["conversations"]) if bare_first else None
                    had = cpu_seconds(server.process.pid)
                    last = crowd.run(number=len(rounds) + 1)
                    served += last["seconds"]
                    last["cpu_seconds"] = cpu_seconds(server.process.pid) - had
                    alone = alone or generator.run(conversations=last["conversations"])
                    rounds.append(one_round(len(rounds) + 1, last, alone))
                    write(rounds[-1])
        time.sleep(1.0)  # in which the server sees that its clients have gone
        left = sample(server.process.pid)
        complaints = server.end()
    assert idle is not None and left is not None
    return {
        "seconds": round(served, 1),
        "rounds": len(rounds),
        "answers": sum(row["answers"] for row in rounds),
        "errors": sum(len(row["errors"]) for row in rounds),
        "lost": sum(row["lost"] for row in rounds),
        "mib_by_minute": watch.mib_by_minute(),
        **verdict(watch.samples),
        "sockets_left": left["sockets"] - idle["sockets"],
        "complaints": complaints,
        **{name: statistics.median(row[name] for row in rounds) for name in MEDIANS},
    }


def one_round(number: int, served: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """Return a record line: wall seconds, and CPU seconds, which depend less on other programs."""
    if not served["tokens"]:
        raise harness.BenchmarkError(f"no agent was answered: {served['errors'][0]}")
    row = {"round": number} | {name: served[name] for name in ("answers", "tokens", "lost", "errors")}
    for side, run in (("served", served), ("bare", alone)):
        row[f"{side}_tokens_per_second"] = run["tokens"] / run["seconds"]
        row[f"{side}_tokens_per_cpu_second"] = run["tokens"] / run["cpu_seconds"]
    row["ratio"] = row["served_tokens_per_second"] / row["bare_tokens_per_second"]
    row["cpu_ratio"] = row["served_tokens_per_cpu_second"] / row["bare_tokens_per_cpu_second"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="JSON lines, overwritten")
    parser.add_argument("--seconds", type=float, default=300.0, help="of serving (default 300)")
    parser.add_argument("--model", default="26M", help="of benchmarks.checkpoints (default 26M)")
    parser.add_argument("--turns", type=int, default=3, help="of a session (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="of the server, and of the bare generator (default 1)")
    parser.add_argument("--aim", type=float, default=AIM, help=f"ratio to reach (default {AIM})")
    parser.add_argument("--worker", metavar="SIDE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return harness.serve(prepare, options.worker)
    if options.record is None:
        parser.error("--record is needed")
    with tempfile.TemporaryDirectory() as folder, options.record.open("w") as record:

        def write(row: dict[str, Any]) -> None:
            record.write(json.dumps(row) + "\n")
            record.flush()
            say(f"  {row}")

        found = measure(options, Path(folder) / "checkpoint", write)
        found |= {name: getattr(options, name) for name in ("aim", "model", "turns", "threads")} | {"agents": AGENTS}
        found |= {"commit": commit(), "machine": machine().cpu}
        clean = not any(found[name] for name in ("complaints", "errors", "lost", "sockets_left"))
        found["passed"] = clean and found["flat"] and found["ratio"] >= options.aim
        write(found)
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
