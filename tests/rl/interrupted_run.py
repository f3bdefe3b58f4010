"""`archon rl` in a process of its own that is sent a signal when it comes to a named point, and what is left of it.

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

from archon.rl import RLVRWorkflow
from archon.rl.config import RLConfig
from archon.rl.context import workflow_context
from archon.rl.types import InferenceEngine
from tests.io import killing
from tests.rl import rewards_for_tests

SIGNALLED, OUTPUT, ERRORS = "signalled", "stdout", "stderr"
FIRST_PROMPT_OF_STEP_3 = 12
calls = 0


def tell(process: int) -> None:
    """Send the signal that the run's folder names, once."""
    folder = Path(os.environ["TOLD_IN"])
    if not (folder / SIGNALLED).exists():
        (folder / SIGNALLED).write_text(str(time.time()))
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
    """Make the run come to its point; gives back the overrides that this takes."""
    import archon.checkpoint
    import archon.cli.train
    import archon.hf_export
    from archon.rl.generation import InProcessEngine
    from archon.rl.sft import SFTTrainer
    from archon.rl.update import PolicyUpdate

    module = "tests.rl.interrupted_run"
    hooks: dict[str, Callable[[], None]] = {
        "start": lambda: before(archon.cli.train, "load_config", 1),
        "warm-up": lambda: before(SFTTrainer, "train_step", 2),
        "twice": lambda: before(PolicyUpdate, "train", 3, twice=True),
        "update": lambda: before(PolicyUpdate, "train", 3),
        "push": lambda: before(InProcessEngine, "update_weights", 3),
        "save": lambda: before(archon.checkpoint, "kill_point", 2, "save.tensors_written"),
        "export": lambda: before(archon.hf_export, "kill_point", 1, "export.staged"),
    }
    overrides = {
        "rollout": [f"workflow={module}.Waits"],
        "reward": [f"reward={module}.hangs_in_step_3"],
        "evaluation": [f"workflow={module}.WaitsInEvaluation"],
    }
    if point in hooks:
        hooks[point]()
    return overrides.get(point, [])


def run(folder: Path, point: str, number: int) -> None:
    """The process: `archon rl` with the configuration in `folder`, signalled at `point`."""
    os.setsid()
    for descriptor, name in ((1, OUTPUT), (2, ERRORS)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o644), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.__stderr__ = sys.stderr
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update({"TOLD_IN": str(folder), "TOLD_BY": str(number)})
    from archon.cli import main

    main(["rl", "--config", str(folder / "run.yaml"), *hook(point)])


class Ended:
    """A run that was signalled at `point`, after it has ended."""

    def __init__(self, config: RLConfig, point: str, number: int = signal.SIGINT) -> None:
        folder = Path(config.run_dir).parent
        (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        process = killing.start(run, folder, point, number)
        self.exit_code = killing.finish(process)
        self.seconds = time.time() - float((folder / SIGNALLED).read_text())
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
