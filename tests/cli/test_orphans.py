"""A killed command leaves no process and no folder: real commands, killed at random times."""

from __future__ import annotations

import ast
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from archon.schema.capacity import rank_limit
from archon.schema.keeper import MARK
from tests.conftest import Kills
from tests.rl.conftest import small_run
from tests.test_readme import ROOT

SECONDS = 10.0
"""From the kill to the end of everything: the grace and the last look of the keeper, on a busy machine."""
RANDOM = random.SystemRandom()
"""Tests set the seed of `random`."""
TOKEN = "ARCHON_TEST_ORPHANS"
SLEEPERS = """
import subprocess, sys, time
for number in range(3):  # in a session of its own, in the same one, and one that ignores SIGTERM
    subprocess.Popen(["bash", "-c", "trap '' TERM; sleep 1000"] if number == 2 else ["sleep", "1000"],
                     start_new_session=number == 0)
"""
REWARD = f"""
import time
def reward(prompt, completions, *_, **__):
    {textwrap.indent(SLEEPERS, "    ").strip()}
    print("started", flush=True)
    time.sleep(1000)
"""
"""A reward whose call starts three processes and never returns."""


def processes_of(token: str) -> list[str]:
    """Commands of the running processes that were started with the token in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                if f"{TOKEN}={token}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it has just ended
                continue
    return found


class Killed:
    """A command in a folder of its own, with its own folder of temporary files, to be killed."""

    def __init__(self, folder: Path, arguments: list[object], **environment: str) -> None:
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.token = os.urandom(8).hex()
        variables = {"TMPDIR": str(self.temporary), TOKEN: self.token, "OMP_NUM_THREADS": "1"}
        paths = os.pathsep.join([str(ROOT), str(folder)])
        inherited = {name: value for name, value in os.environ.items() if name != MARK}
        self.output = folder / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                env=inherited | variables | {"PYTHONPATH": paths} | environment,
                cwd=folder,
                stdout=output,
                stderr=output,
            )

    def wait_for(self, name: str, count: int) -> None:
        """Wait until `count` processes of the command have `name` in their command line."""
        until = time.monotonic() + 120
        while sum(name in command for command in processes_of(self.token)) < count:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < until, (processes_of(self.token), self.output.read_text())
            time.sleep(0.02)

    def assert_nothing_is_left(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the signal, and wait for the end of everything that the command started and made."""
        self.process.send_signal(number)
        until = time.monotonic() + SECONDS
        while left := [*processes_of(self.token), *self._folders()]:
            if self.process.poll() is None and number != signal.SIGKILL:
                until = time.monotonic() + SECONDS  # a command may take some time to stop in order
            assert time.monotonic() < until, left
            time.sleep(0.02)
        self.process.wait()

    def _folders(self) -> list[str]:
        # PyTorch's caches of compiled code are for the next process.
        return [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]


def bench(layout: str) -> list[object]:
    return ["-m", "archon", "bench", "checkpoint", layout, "--seq", "64", "--fresh", "--steps", "100000"]


def rl(**changes: object) -> Callable[[Path], list[object]]:
    def arguments(folder: Path) -> list[object]:
        run = small_run(folder / "checkpoint", folder / "run") | {"total_steps": 100000} | changes
        (folder / "rl.yaml").write_text(yaml.safe_dump(run))
        return ["-m", "archon", "rl", "--config", "rl.yaml"]

    return arguments


def train(command: str, *overrides: str) -> list[object]:
    run = ["run_dir=run", "model.path=checkpoint", "train_data.path=rows.jsonl", "total_steps=100000"]
    return [command, *run, "checkpoint.every=1", "train_data.prompt_key=prompt", *overrides]


def script(text: str) -> Callable[[Path], list[object]]:
    def arguments(folder: Path) -> list[object]:
        (folder / "script.py").write_text(text)
        return ["script.py"]

    return arguments


def d2(folder: Path) -> dict[str, object]:
    return {"path": str(folder / "checkpoint"), "layout": "d2", "device": "cpu"}


LAUNCH = {"prompts_per_step": 6, "n_gold_checks": 0, "launch": {"args": ["device=cpu"]}}
TRAINER = """
import asyncio
from archon.rl.rewards import AsyncRewardWrapper
from slow_reward import reward
if __name__ == "__main__":
    asyncio.run(AsyncRewardWrapper(reward, timeout_seconds=1000)("", "", [], []))
"""
AGENT = f"""
import asyncio, sys
from archon.rl.workflows import ProcessAgent
agent = ProcessAgent([sys.executable, "-c", {SLEEPERS + "time.sleep(1000)"!r}])
asyncio.run(agent.run({{}}, base_url="", api_key=""))
"""
FORKS = """
import os, time
from archon.schema.children import marked_environment
with marked_environment(forks=True):  # as a command does
    if os.fork() == 0:
        os.setsid()
        os.execv("/bin/sleep", ["sleep", "1000"])
    if os.fork() == 0:
        os.fork()
        time.sleep(1000)
    time.sleep(1000)
"""
TOKENIZING = """
from archon.data import token_rows
token_rows._POOL_SECONDS = 0.0  # start worker processes for small data, too
from archon.cli import main
if __name__ == "__main__":
    main(["sft", "run_dir=run", "model.path=checkpoint", "train_data.path=rows.jsonl", "total_steps=100000",
          "train_data.prompt_key=prompt", "train_data.response_key=response"])
"""
COMPILING = """
from archon.models.cpu import library
library._library()
"""
LAUNCHER = """
import os, socket, subprocess, sys, time
store = socket.create_server(("127.0.0.1", 0))
address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
environment = os.environ | address | {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
subprocess.Popen([sys.executable, "-m", "archon", "serve", "checkpoint", "--port", "0"], env=environment)
time.sleep(1000)
"""
"""Starts a command as torchrun starts a rank."""
RANKS = """
import time
from archon.tools.check.rank_pool import Pool
if __name__ == "__main__":
    Pool(2).run(time.sleep, 1000)
"""
DOCTOR = ["-m", "archon", "doctor", "checkpoint", "--layout", "d2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--log-dir", "logs", "-m", "archon"]
LAUNCHED = ["-m", "archon", "launch", "--nproc-per-node", "2"]
EVAL = ["eval", "checkpoint", "--data", "rows.jsonl", "--reward", "slow_reward.reward", "--out", "scores"]
EVAL += ["data.split=train", "data.prompt_key=prompt", "data.response_key=response", "device=cpu", "max_new_tokens=2"]
RESPONSE = "train_data.response_key=response"
COMMANDS: dict[str, tuple[Callable[[Path], list[object]], str, int]] = {
    # Name: arguments in a folder; part of the command line of the last children; how many there are.
    "bench-ranks": (lambda _: bench("d2"), "rank_process", 3),
    "bench-rank": (lambda _: bench("d1"), "rank_process", 1),
    "rl-rewards": (rl(reward="slow_reward.reward"), "sleep 1000 ", 3),
    "rl-servers": (rl(generator=None, rollout=LAUNCH), "archon serve", 1),
    "agent": (script(AGENT), "sleep 1000 ", 3),
    "rewards": (script(TRAINER), "sleep 1000 ", 3),
    "forks": (script(FORKS), "script.py", 3),
    "tokenizing": (script(TOKENIZING), "spawn_main", 2),
    "ranks": (script(RANKS), "multiprocessing.forkserver", 3),
    "check-model": (lambda _: ["-m", "archon", "check-model", "qwen3"], "check-model", 1),
    "doctor": (lambda _: [*DOCTOR, "--rank", "0"], "multiprocessing.forkserver", 2),
    "torchrun": (lambda _: [*TORCHRUN, *DOCTOR[2:]], "archon doctor", 3),
    "rank": (script(LAUNCHER), "keeper.py", 1),
    "sft": (lambda _: ["-m", "archon", *train("sft", RESPONSE)], "archon sft", 1),
    "preference": (lambda _: ["-m", "archon", *train("preference")], "archon preference", 1),
    "launch-sft": (lambda _: [*LAUNCHED, *train("sft", RESPONSE, "model.layout=d2")], "archon sft", 2),
    "launch-rl": (
        lambda folder: [*LAUNCHED, *rl(reward="slow_reward.reward", actor=d2(folder))(folder)[2:]],
        "sleep 1000 ",
        3,  # of rank 0, which scores the gold answers
    ),
    "eval": (lambda _: ["-m", "archon", *EVAL], "sleep 1000 ", 3),
    "serve": (lambda _: ["-m", "archon", "serve", "checkpoint", "--port", "0"], "archon serve", 1),
    "compiling": (script(COMPILING), "sleep 1000 ", 2),
}
FAST = ["rewards", "forks", "rank"]
"""Commands that do not load a model."""


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    assert checkpoint.parent == tmp_path
    (tmp_path / "slow_reward.py").write_text(REWARD)
    answers = [(f"{a}+{b}=", str(a + b)) for a in range(60) for b in range(60)]
    rows = [{"prompt": q, "response": r, "chosen": r, "rejected": r[::-1]} for q, r in answers]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def start(name: str, folder: Path) -> Killed:
    compiler = {"CC": str(folder / "cc"), "XDG_CACHE_HOME": str(folder / "cache")} if name == "compiling" else {}
    (folder / "cc").write_text("#!/bin/bash\n[ $1 = --version ] && exec gcc --version\nsleep 1000 & sleep 1000\n")
    (folder / "cc").chmod(0o755)
    return Killed(folder, COMMANDS[name][0](folder), **compiler)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in COMMANDS]
)
def test_children_of_a_killed_command_end(folder: Path, name: str) -> None:
    killed = start(name, folder)
    killed.wait_for(*COMMANDS[name][1:])
    time.sleep(RANDOM.uniform(0, 0.1 if name in FAST else 2))
    killed.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(max(1, Kills("").wanted // 6)))
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_killed_at_any_time_leaves_nothing(folder: Path, name: str, attempt: int, kills: Kills) -> None:
    """Once per command here, and five times in `make test-kill`, which records the kills."""
    killed = start(name, folder)
    moment = RANDOM.uniform(0, 10)
    time.sleep(moment)
    processes, begin = len(processes_of(killed.token)), time.monotonic()
    killed.assert_nothing_is_left()
    kills.add(f"{moment:.3f} s", processes=processes, left=0, ended_after_s=round(time.monotonic() - begin, 3))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", ["bench-ranks", "rl-rewards", "rl-servers", "rewards"])
def test_an_ended_command_leaves_nothing(folder: Path, name: str, number: signal.Signals) -> None:
    killed = start(name, folder)
    killed.wait_for(*COMMANDS[name][1:])
    killed.assert_nothing_is_left(number)


def test_a_rank_of_a_torchrun_that_has_ended_exits(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused.getsockname()[1])}
    variables = {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    rank = Killed(tmp_path, ["-m", "archon", "models"], **variables, **address)
    assert rank.process.wait(60) == 1 and rank.output.read_text() == "archon: torchrun has ended\n"


def test_a_command_outlives_the_shell_that_started_it(tmp_path: Path) -> None:
    """As with nohup, setsid or a closed terminal: only children of archon end with their parent."""
    text = "from archon.schema.children import start_child; import time, sys; start_child(['sleep', '2']).wait()"
    text += "; open(sys.argv[1], 'w')"
    shell = ["bash", "-c", f'nohup "{sys.executable}" -c "{text}" {tmp_path}/done >/dev/null 2>&1 & kill -9 $$']
    subprocess.run(shell, cwd=ROOT)
    until = time.monotonic() + 20
    while not (tmp_path / "done").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_bench_refuses_a_layout_of_more_ranks(archon: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message has the number of ranks, the limit and its reasons, and what to do."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("archon.tools.bench.sweep.run_ranks", start)
    said = archon("bench", checkpoint, "d100000", "--seq", "64").complaint
    assert f"layout d100000: 100000 ranks do not fit this machine, which runs at most {rank_limit()}: 8 on each" in said
    assert said.endswith("GiB of memory; use fewer, or more machines")


def test_every_child_and_temporary_folder_is_known_to_the_keeper() -> None:
    """Calls that start a process have an environment with the mark; temporary folders are private directories."""
    start = ("subprocess.run", "subprocess.Popen", "asyncio.create_subprocess_exec", "os.fork", "ProcessPoolExecutor")
    found = []
    for path in sorted(
        file for folder in ("archon", "models", "parallel", "rl") for file in ROOT.glob(f"{folder}/**/*.py")
    ):
        text = path.read_text()
        words = ("subprocess", "tempfile", "fork", "ProcessPool")
        for node in ast.walk(ast.parse(text)) if any(word in text for word in words) else ():
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                marked = any(
                    word.arg == "env" and "child_environment(" in ast.unparse(word.value) for word in node.keywords
                )
                temporary = name.endswith(("TemporaryDirectory", "TemporaryFile", "mkdtemp", "mkstemp"))
                if (name in start and not marked) or temporary:
                    found.append(f"{path.relative_to(ROOT)}: {name}")
    assert sorted(set(found)) == [
        "archon/data/token_rows.py: ProcessPoolExecutor",  # in `marked_environment`
        "archon/engine/dry_run.py: ProcessPoolExecutor",  # of a marked forkserver
        "archon/remote/supervisor.py: subprocess.Popen",  # on a node of Slurm, without archon
        "archon/schema/children.py: subprocess.run",  # the keeper
        "archon/schema/keeper.py: os.fork",
        "archon/schema/keeper.py: subprocess.run",  # ps
        "parallel/failure.py: tempfile.mkdtemp",  # the report of a failure, which the user reads later
        # A marked launcher starts the worker of a sandbox; its descendants end with it, and it removes the folder.
        "rl/sandbox/inside/supervisor.py: os.fork",
        "rl/sandbox/inside/worker.py: os.fork",
        "rl/sandbox/inside/worker.py: tempfile.mkdtemp",
    ]
