"""A short SFT run under torchrun of which one rank goes wrong: `failing.py HOW RANK FOLDER TIMEOUT [STEPS]`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from archon.checkpoint import native
from archon.cli.app import exit_on_error
from archon.engine.engine import ArchonEngine
from archon.parallel.control_plane import ControlPlane
from archon.rl import SFTTrainer
from archon.schema.errors import DatasetError
from archon.training.config import SFTConfig

STEP = 3
CLEANUP_SECONDS = 0.5
"""Seconds of the caller's cleanup; torchrun notices a dead rank and stops the others sooner."""


def go_wrong(how: str) -> None:
    if how == "raise":
        raise ArithmeticError("this rank has had enough")
    if how == "mistake":
        raise DatasetError("row 7 is not a row; fix it")
    if how == "kill" or (how == "kill once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(3600)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "stop process":
        stop_process()
    if how == "stop process in a save":
        native.kill_point = lambda _: stop_process()


def stop_process() -> None:
    """Stop this process and all its threads, and leave the time in a file."""
    (Path(sys.argv[3]) / "stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def main(how: str, rank: str, folder: str, timeout: str, steps: str = "2000") -> None:
    def probe(engine: ArchonEngine, step: int) -> tuple[dict[str, float], bool]:
        if step == STEP and os.environ["RANK"] == rank:
            go_wrong(how)
        if step == STEP and how == "stop process in a push":
            stop = stop_process if os.environ["RANK"] == rank else lambda: None
            ControlPlane.with_long_timeout("pushes").run_on_all(stop)
        return {}, False

    if how == "stop process at the start":
        if os.environ["RANK"] == rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        (Path(folder) / "joining").touch()

    config = SFTConfig.parse(
        {
            "run_dir": str(Path(folder) / "run"),
            "resume": True,
            "total_steps": int(steps),
            "checkpoint": {"every": 1},
            "batch_size": 8,
            "model": {
                "path": str(Path(folder) / "blank"),
                "device": "cpu",
                "layout": "d2",
                "init_from_scratch": True,
                "optimizer": {"lr": 1e-3},
                "timeout_s": float(timeout),
            },
            "train_data": {"path": folder},
        }
    )
    try:
        SFTTrainer(config, probe=probe).train()
    finally:
        time.sleep(CLEANUP_SECONDS)


if __name__ == "__main__":
    with exit_on_error():
        main(*sys.argv[1:])
