"""Kill clients of the training service, and the service itself: no acknowledged update is lost or repeated.

    python -m benchmarks.training_soak --record benchmarks/records/training_soak.jsonl
    python -m benchmarks.training_soak --record trial.jsonl --minutes 1 --server-kills 3

Eight client processes with the unmodified Tinker SDK train LoRAs of 60 steps, one after the other, save their state
every 10 steps and sample from it. Each writes what was acknowledged to a log of its own, and continues from the last
saved state in that log.

1. For ten minutes a random client is killed every few seconds and started again. The resources of the server may not
   grow (see `benchmarks.watch`). Sessions end after 30 seconds without a heartbeat instead of 10 minutes, so that the
   server removes the models of killed clients several times.
2. The server is killed 20 times at random moments and started again with the same state folder and port. Each request
   without a result must fail.

After each part, LoRAs that were interrupted are trained again without interruptions. A lost or repeated update would
move a weight by about the learning rate; the limit is a hundredth of it. All acknowledged states must be listed. The
record has one line per part. The exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from archon.tools.bench.origin import commit, machine
from benchmarks.harness import ROOT, BenchmarkError, Worker, say
from benchmarks.training_service import Server, difference
from benchmarks.watch import Watch, sample, verdict

STEPS, SAVE_EVERY, SAMPLE_EVERY = 60, 10, 15
LR = 1e-3
SESSION_SECONDS = 30.0
RESULT_SECONDS = 90.0
"""Longest wait for a result; the SDK itself has no limit."""
CHECKED = 16
"""LoRAs of a part that are trained again."""
PATIENT_SERVER = (
    "import archon.serve.training.service as s; s.SESSION_SECONDS = {}; from archon.cli import main; main()"
)

Event = dict[str, Any]


class Log:
    """Acknowledged events of a client, one JSON line each; a killed writer may leave half a line, which is ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = read_log(path)
        self._file = path.open("ab")
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")

    def add(self, event: str, **values: Any) -> None:
        """Append an event; it survives the end of this process."""
        entry = {"event": event, "time": time.time(), **values}
        self.events.append(entry)
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()

    def last(self, *events: str) -> Event | None:
        """Return the newest event of some kinds."""
        return next((entry for entry in reversed(self.events) if entry["event"] in events), None)


def read_log(path: Path) -> list[Event]:
    """Return the whole lines of a log."""
    events = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


def data(number: int, lora: int, step: int) -> list[Any]:
    """Return the documents of a step."""
    from tinker import types

    chance = random.Random(f"{number} {lora} {step}")
    rows = ([chance.randrange(500) for _ in range(chance.randint(4, 24))] for _ in range(2))
    return [
        types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:]})
        for row in rows
    ]


class Client:
    """One client process: trains LoRA after LoRA until the file `stop` exists next to its log."""

    def __init__(self, number: int, url: str, base: str, log: Log) -> None:
        import tinker

        self.number, self.url, self.base, self.log = number, url, base, log
        self.rest = tinker.RestClient(base_url=url, api_key=f"tml-{number}")
        self.adam = tinker.AdamParams(learning_rate=LR, eps=1e-5)
        self.stop = log.path.parent / "stop"

    def run(self) -> None:
        """Train; a failed request is logged, and training continues from the last saved state."""
        import tinker

        self.log.add("started")
        while not self.stop.exists():
            try:
                service = tinker.ServiceClient(base_url=self.url, api_key=f"tml-{self.number}")
                self.train(service)
                service.close("success").result(RESULT_SECONDS)
            except TimeoutError as error:
                self.log.add("hung", error=str(error))
            except tinker.TinkerError as error:
                self.log.add("failed", error=f"{type(error).__name__}: {error!s:.300}")
                time.sleep(0.3)

    def train(self, service: Any) -> None:
        """Train the LoRA of the log, or the next one, to its end."""
        last = self.log.last("saved", "finished")
        if last is None or last["event"] == "finished":
            lora, step, path = (-1 if last is None else last["lora"]) + 1, 0, None
        else:
            lora, step, path = last["lora"], last["step"], last["path"]
        self.log.add("continues", lora=lora, step=step, path=path)
        model = self.model(service, lora, path)
        while step < STEPS and not self.stop.exists():
            self.log.add("sent", lora=lora, step=step + 1)
            loss, norm = self.step(model, lora, step)
            step += 1
            self.log.add("step", lora=lora, step=step, loss=loss, norm=norm)
            if step % SAVE_EVERY == 0:
                saved = model.save_state(f"lora-{lora}-{step}", overwrite=True).result(RESULT_SECONDS).path
                self.log.add("saved", lora=lora, step=step, path=saved)
                if path is not None:
                    self.log.add("deleted", path=path)
                    self.rest.delete_checkpoint_from_tinker_path(path).result(RESULT_SECONDS)
                path = saved
            if step % SAMPLE_EVERY == 0:
                self.sample(model)
        if step == STEPS:
            self.log.add("finished", lora=lora, path=path)

    def model(self, service: Any, lora: int, path: str | None) -> Any:
        """Return the training client of a saved state, or of a new LoRA."""
        if path is not None:
            return service.create_training_client_from_state_with_optimizer(path).result(RESULT_SECONDS)
        seed = 1000 * self.number + lora
        return service.create_lora_training_client(self.base, rank=2, seed=seed).result(RESULT_SECONDS)

    def step(self, model: Any, lora: int, step: int) -> tuple[float, float]:
        """Take a step; return its loss and the norm of its gradient."""
        loss = model.forward_backward(data(self.number, lora, step), "cross_entropy")
        update = model.optim_step(self.adam)
        return (
            loss.result(RESULT_SECONDS).metrics["loss:sum"],
            update.result(RESULT_SECONDS).metrics["grad_norm"],
        )

    def sample(self, model: Any) -> None:
        """Sample from the current LoRA."""
        import tinker

        sampler = model.save_weights_and_get_sampling_client().result(RESULT_SECONDS)
        params = tinker.SamplingParams(max_tokens=8, seed=1)
        [answer] = sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 1, params).result(RESULT_SECONDS).sequences
        self.log.add("sampled", tokens=len(answer.tokens))

    def retrain(self, lora: int) -> str:
        """Train a LoRA without interruptions; return the path of its state."""
        import tinker

        service = tinker.ServiceClient(base_url=self.url, api_key="tml-check")
        model = self.model(service, lora, None)
        for step in range(STEPS):
            self.step(model, lora, step)
        path: str = model.save_state(f"check-{self.number}-{lora}").result(RESULT_SECONDS).path
        service.close("success").result(RESULT_SECONDS)
        return path


class Crowd:
    """The client processes of a part."""

    def __init__(self, folder: Path, url: str, base: Path, count: int) -> None:
        self.folder, self.url, self.base = folder, url, base
        folder.mkdir()
        self.processes = [self.start(number) for number in range(count)]

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """Start a client."""
        command = [sys.executable, "-m", "benchmarks.training_soak", "--client", str(number), "--url", self.url]
        command += ["--base", str(self.base), "--log", str(self.log(number))]
        with (self.folder / f"{number}.stderr").open("ab") as complaints:
            return subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "TINKER_TELEMETRY": "0"}, stdout=complaints, stderr=complaints
            )

    def log(self, number: int) -> Path:
        return self.folder / f"{number}.jsonl"

    def kill(self, number: int) -> None:
        """Kill a client and start it again."""
        self.processes[number].kill()
        self.processes[number].wait()
        self.processes[number] = self.start(number)

    def end(self) -> list[str]:
        """Let all clients end; return their failures."""
        (self.folder / "stop").touch()
        failures = []
        for number, process in enumerate(self.processes):
            try:
                code = process.wait(2 * RESULT_SECONDS)
            except subprocess.TimeoutExpired:
                code = "none, killed"
            if code:
                text = (self.folder / f"{number}.stderr").read_text()
                failures.append(f"client {number} ended with {code}: {text[-500:]}")
        return failures

    def close(self) -> None:
        """Kill clients that are left."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def interrupted(events: Sequence[Event]) -> list[Event]:
    """Return the finished LoRAs that continued from a saved state, and others that were interrupted, first."""
    counts: dict[int, int] = {}
    for event in events:
        if event["event"] == "continues":
            counts[event["lora"]] = counts.get(event["lora"], 0) + 1
    finished = [event for event in events if event["event"] == "finished"]
    return sorted(finished, key=lambda event: -counts[event["lora"]])


def replayed(events: Sequence[Event]) -> Iterator[float]:
    """Yield the relative difference of the losses of each step that was acknowledged twice."""
    first: dict[tuple[int, int], float] = {}
    for event in events:
        if event["event"] == "step":
            loss = first.setdefault((event["lora"], event["step"]), event["loss"])
            yield abs(event["loss"] - loss) / abs(loss)


def unanswered(events: Sequence[Event]) -> int:
    """Count requests that a living client sent, which neither succeeded nor failed."""
    following = pairwise(events)
    return sum(
        event["event"] == "sent" and then["event"] not in ("step", "failed", "started") for event, then in following
    )


def check(crowd: Crowd, state: Path) -> dict[str, Any]:
    """Compare the clients' logs with the server."""
    import tinker

    warnings.simplefilter("ignore")  # the SDK's
    logging.getLogger("tinker").setLevel(logging.ERROR)
    found: dict[str, Any] = dict.fromkeys(
        ("steps", "saved", "loras", "failed", "hung", "unanswered", "missing_states"), 0
    )
    candidates: list[tuple[int, int, Event]] = []
    replay = 0.0
    for number in range(len(crowd.processes)):
        events = read_log(crowd.log(number))
        for name, event in (("steps", "step"), ("saved", "saved"), ("loras", "finished"), ("failed", "failed")):
            found[name] += sum(entry["event"] == event for entry in events)
        found["hung"] += sum(entry["event"] == "hung" for entry in events)
        found["unanswered"] += unanswered(events)
        replay = max(replay, *replayed(events), 0.0)
        candidates += [(rank, number, event) for rank, event in enumerate(interrupted(events))]
        deleted = {entry["path"] for entry in events if entry["event"] == "deleted"}
        acknowledged = {entry["path"] for entry in events if entry["event"] == "saved"} - deleted
        rest = tinker.RestClient(base_url=crowd.url, api_key=f"tml-{number}")
        listed: set[str] = set()
        while page := rest.list_user_checkpoints(limit=500, offset=len(listed)).result(60).checkpoints:
            listed |= {checkpoint.tinker_path for checkpoint in page}
        found["missing_states"] += len(acknowledged - listed)
    worst = 0.0
    checked = sorted(candidates, key=lambda candidate: candidate[:2])[:CHECKED]
    for _, number, event in checked:
        client = Client(number, crowd.url, str(crowd.base), Log(crowd.folder / "check.jsonl"))
        worst = max(worst, difference(adapter(state, event["path"]), adapter(state, client.retrain(event["lora"]))))
    return found | {"checked_loras": len(checked), "weights_difference": worst, "replayed_loss_difference": replay}


def adapter(state: Path, path: str) -> Path:
    """Return the folder of a state's LoRA."""
    model, kind, name = path.removeprefix("tinker://").split("/")
    return state / "checkpoints" / model.replace(":", "_") / kind / name / "adapter"


def kill_clients(server: Server, crowd: Crowd, minutes: float) -> dict[str, Any]:
    """Kill random clients for some minutes, and watch the server."""
    chance, kills = random.Random(0), 0
    until = time.monotonic() + 60 * minutes
    with Watch(server.process.pid) as watch:
        while time.monotonic() < until:
            time.sleep(chance.uniform(4, 10))
            crowd.kill(chance.randrange(len(crowd.processes)))
            kills += 1
    failures = crowd.end()
    return {
        "minutes": minutes,
        "client_kills": kills,
        "failures": failures,
        "mib_by_minute": watch.mib_by_minute(),
        **verdict(watch.samples),
    }


def kill_server(make: Callable[[], Server], crowd: Crowd, servers: list[Server], kills: int) -> dict[str, Any]:
    """Kill the server at random moments, and add the next one to `servers`."""
    chance = random.Random(1)
    for _ in range(kills):
        time.sleep(chance.uniform(2, 8))
        servers[-1].process.send_signal(signal.SIGKILL)
        servers[-1].process.wait()
        servers.append(make())
    time.sleep(10)
    return {"server_kills": kills, "failures": crowd.end()}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def passed(found: dict[str, Any]) -> bool:
    """Return whether a part met all limits."""
    clean = not any(found[name] for name in ("failures", "hung", "unanswered", "missing_states", "complaints"))
    same = found["weights_difference"] <= LR / 100 and found["replayed_loss_difference"] <= 1e-4
    return clean and same and found["checked_loras"] > 0 and found.get("flat", True)


def measure(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each part."""
    base = folder / "checkpoint"
    made = {"threads": 1, "folder": str(base), "model": "tiny"}
    Worker.start("benchmarks.training_service", "checkpoint", made).close()
    for part in ("clients", "server"):
        if not (options.minutes if part == "clients" else options.server_kills):
            continue
        state, port = folder / f"state-{part}", free_port()
        code = ["-c", PATIENT_SERVER.format(SESSION_SECONDS)]

        def make(state: Path = state, port: int = port, code: Sequence[str] = code) -> Server:
            return Server(base, state, 1, "max_models=512", port=port, program=code)

        with ExitStack() as stack:
            servers = [make()]
            stack.callback(lambda servers=servers: stop(servers[-1]))
            crowd = Crowd(folder / part, servers[0].url, base, options.clients)
            stack.callback(crowd.close)
            begun = time.monotonic()
            if part == "clients":
                found = kill_clients(servers[0], crowd, options.minutes)
            else:
                found = kill_server(make, crowd, servers, options.server_kills)
            found = {"part": part, "seconds": round(time.monotonic() - begun), **found, **check(crowd, state)}
            resources = sample(servers[-1].process.pid)
            found |= {"complaints": servers[-1].end(), "left": resources}
            found |= {"commit": commit(), "machine": machine().cpu}
            yield found | {"passed": passed(found)}


def stop(server: Server) -> None:
    if server.process.poll() is None:
        server.process.kill()
    server.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="JSON lines, overwritten")
    parser.add_argument("--minutes", type=float, default=10.0, help="of killing clients (default 10)")
    parser.add_argument("--server-kills", type=int, default=20, help="kills of the server (default 20)")
    parser.add_argument("--clients", type=int, default=8, help="client processes (default 8)")
    for name in ("--client", "--url", "--base", "--log"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        return Client(int(options.client), options.url, options.base, Log(Path(options.log))).run()
    if options.record is None:
        parser.error("--record is needed")
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, options.record.open("w") as record:
        for found in measure(options, Path(folder)):
            record.write(json.dumps(found) + "\n")
            record.flush()
            say(f"  {found}")
            outcomes.append(found["passed"])
    if not outcomes:
        raise BenchmarkError("there is no part to run; set --minutes or --server-kills")
    sys.exit(0 if all(outcomes) else 1)


if __name__ == "__main__":
    main()
