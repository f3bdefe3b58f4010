"""A training command in a process of its own that is sent a signal when it comes to a named point, and what is left
of it.

Where a run waits for something, it waits for ever from then on: only the signal can end it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from archon.generation.types import InferenceEngine
from archon.rl import RLVRWorkflow
from archon.rl.config import RLConfig
from archon.rl.episode_context import workflow_context
from archon.training.config import PreferenceConfig
from tests.checkpoint import killing
from tests.rl import rewards_for_tests
from tests.serve.test_workflow import ask

SIGNALED, OUTPUT, ERRORS = "signaled", "stdout", "stderr"
FIRST_PROMPT_OF_STEP_3 = 12
calls = 0


def tell(process: int) -> None:
    """Send the signal that the run's folder names, once."""
    folder = Path(os.environ["TOLD_IN"])
    if not (folder / SIGNALED).exists():
        (folder / SIGNALED).write_text(str(time.time()))
        os.kill(process, int(os.environ["TOLD_BY"]))


class Waits(RLVRWorkflow):
    """For ever, in the third step."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        context = workflow_context.get()
        if not context.is_eval and context.task_id >= FIRST_PROMPT_OF_STEP_3:
            tell(os.getpid())
            await asyncio.sleep(3600)
        return await super().arun_episode(engine, data)


class WaitsInEvaluation(RLVRWorkflow):
    """For ever, in the second evaluation, which has as many prompts as the first."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        global calls
        calls += workflow_context.get().is_eval
        if calls > 4:
            tell(os.getpid())
            await asyncio.sleep(3600)
        return await super().arun_episode(engine, data)


def hangs_in_step_3(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """Gold answers of two sets, two evaluations and two steps come before."""
    global calls
    calls += 1
    if calls > 2 * 8 + 2 * 4 + 2 * 24:
        tell(os.getppid())
        time.sleep(3600)
    return rewards_for_tests.nearness(prompt, completions, prompt_ids, completion_ids, **data)


def hangs_at_once(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """On the first gold answer."""
    tell(os.getppid())
    time.sleep(3600)
    return 1.0


class Asks:
    """An agent; the reward is the length of its answer."""

    async def run(self, data: dict[str, Any], **given: Any) -> float:
        answer = await ask(data["messages"], given)
        return float(len(answer["choices"][0]["message"]["content"]))


class AsksAndWaits(Asks):
    """For ever, in the third step, with a stream open of which it has read a line."""

    async def run(self, data: dict[str, Any], **given: Any) -> float:
        context = workflow_context.get()
        if context.is_eval or context.task_id < FIRST_PROMPT_OF_STEP_3:
            return await super().run(data, **given)
        url, headers = f"{given['base_url']}/chat/completions", {"Authorization": f"Bearer {given['api_key']}"}
        body = {"messages": data["messages"], "stream": True}
        async with given["http_client"].stream("POST", url, json=body, headers=headers) as response:
            await anext(response.aiter_lines())
            tell(os.getpid())
            await asyncio.sleep(3600)
        return 0.0


def before(owner: Any, name: str, nth: int, first: str = "", *, twice: bool = False) -> None:
    """Tell this process before the nth call of a function (with `first` as its argument, if given)."""
    function, count = getattr(owner, name), 0

    def told(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += not first or args[0] == first
        if count == nth:
            tell(os.getpid())
            if twice:
                os.kill(os.getpid(), signal.SIGINT)
        return function(*args, **kwargs)

    setattr(owner, name, told)


def hook(point: str) -> list[str]:
    """Make the run come to its point; returns the overrides that this takes."""
    import archon.checkpoint.hf_export
    import archon.checkpoint.native
    import archon.cli.train
    import archon.rl.trainer
    from archon.engine.engine import ArchonEngine
    from archon.generation import InProcessEngine
    from archon.rl.update import PolicyUpdate
    from archon.training.preference import PreferenceTrainer
    from archon.training.sft import SFTTrainer

    module = "tests.rl.interrupted_run"
    hooks: dict[str, Callable[[], None]] = {
        "start": lambda: before(archon.cli.train, "load_config", 1),
        "data": lambda: before(archon.rl.trainer, "load_rows", 1),
        "models": lambda: before(ArchonEngine, "initialize", 1),
        "warm-up": lambda: before(SFTTrainer, "train_step", 2),
        "twice": lambda: before(PolicyUpdate, "train", 3, twice=True),
        # The logprob check scores the first batch too, and each step has a reference and a proximal policy.
        "reference": lambda: before(ArchonEngine, "forward_batch", 1 + 2 * 2 + 1),
        "proximal": lambda: before(ArchonEngine, "forward_batch", 1 + 2 * 2 + 2),
        "update": lambda: before(PolicyUpdate, "train", 3),
        "push": lambda: before(InProcessEngine, "update_weights", 3),
        "save": lambda: before(archon.checkpoint.native, "kill_point", 2, "save.tensors_written"),
        "export": lambda: before(archon.checkpoint.hf_export, "kill_point", 1, "export.staged"),
        "pairs": lambda: before(PreferenceTrainer, "train_step", 3),
        "pairs-update": lambda: before(ArchonEngine, "train_batch", 3),
        "pairs-evaluation": lambda: before(PreferenceTrainer, "evaluate", 1),
    }
    overrides = {
        "rollout": [f"workflow={module}.Waits"],
        "gold": [f"reward={module}.hangs_at_once"],
        "reward": [f"reward={module}.hangs_in_step_3"],
        "agent": [f"workflow={module}.AsksAndWaits"],
        "evaluation": [f"workflow={module}.WaitsInEvaluation"],
    }
    if point in hooks:
        hooks[point]()
    return overrides.get(point, [])


def run(folder: Path, command: str, point: str, number: int) -> None:
    """The process: `archon COMMAND` with the configuration in `folder`, signaled at `point`."""
    os.setsid()
    for descriptor, name in ((1, OUTPUT), (2, ERRORS)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o644), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.__stderr__ = sys.stderr
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update({"TOLD_IN": str(folder), "TOLD_BY": str(number)})
    from archon.cli import main

    main([command, "--config", str(folder / "run.yaml"), *hook(point)])


class Ended:
    """A run that was signaled at `point`, after it has ended."""

    def __init__(self, config: RLConfig | PreferenceConfig, point: str, number: int = signal.SIGINT) -> None:
        folder, command = Path(config.run_dir).parent, "rl" if isinstance(config, RLConfig) else "preference"
        (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        process = killing.start(run, folder, command, point, number)
        self.exit_code = killing.finish(process)
        self.seconds = time.time() - float((folder / SIGNALED).read_text())
        self.errors = [line for line in (folder / ERRORS).read_text().splitlines() if line.strip()]
        self.orphans = left_of(process.pid)


def left_of(process: int | None, seconds: float = 10.0) -> list[int]:
    """The workers of a process that are still there `seconds` after it ended: being killed takes a moment too."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid, parent in reward_workers() if parent == process]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def reward_workers() -> list[tuple[int, int]]:
    """(process, the process that started it) of each worker of a reward on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if len(command) > 4 and b"archon.rl.rewards.worker" in command[2]:
            found.append((int(path.parent.name), int(command[4])))
    return found
