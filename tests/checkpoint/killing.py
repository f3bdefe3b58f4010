"""Processes that train or export and are killed, and what must hold afterwards.

The processes are forked from a server that has imported the engine once; they die by a real SIGKILL.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import archon
from archon.checkpoint.atomic import KILL_AT
from archon.checkpoint.native import load_latest, load_state, save_state
from archon.engine.engine import ArchonEngine
from archon.engine.forkserver import forkserver_context
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.schema.config import EngineConfig, LoRAConfig, OptimizerConfig, SchedulerConfig
from tests.checkpoint.tiny_checkpoints import hf_state
from tests.engine.tiny import sft_batch, write_config

STEPS = 8
# 2 + 3 * 11 parameters (see `tests.engine.tiny.CONFIG`), two moments and a step each, and PyTorch's generator.
TENSORS_IN_A_SAVE = 35 * 4 + 1
# A save of step n passes these after `latest` names step n.
AFTER_LATEST = ("save.latest_renamed", "save.old_hidden", "save.end")
AFTER_PUBLISHING = ("export.published", "export.end")


def start(work: Callable[..., None], *args: Any, kill_at: str | None = None) -> BaseProcess:
    process = forkserver_context().Process(target=_run, args=(work, args, kill_at), daemon=True)
    process.start()
    return process


def _run(work: Callable[..., None], args: tuple[Any, ...], kill_at: str | None) -> None:
    torch.set_num_threads(1)
    os.environ.pop(KILL_AT, None)
    if kill_at:
        os.environ[KILL_AT] = kill_at
    work(*args)


def finish(process: BaseProcess) -> int | None:
    process.join(timeout=120)
    return process.exitcode


def kill_at_random(process: BaseProcess, ready: Path, seconds: float, chance: random.Random) -> float:
    """SIGKILL within `seconds` of the moment when the process says that it is ready; returns after how many."""
    while process.is_alive() and not ready.exists():
        time.sleep(0.002)
    after = chance.uniform(0, seconds)
    time.sleep(after)
    process.kill()
    process.join(timeout=60)
    ready.unlink(missing_ok=True)
    return after


# Training


def train(folder: Path, base: str | None = None) -> None:
    """Continue from the latest checkpoint to the last step, with a checkpoint after each; then write the digest.

    Everything a run depends on is in play: AdamW, a cosine schedule, and batches drawn from the global generators of
    Python and PyTorch. With a `base` its LoRAs are trained, else a fresh model.
    """
    config = EngineConfig(
        path=base or write_config(folder / "model"),
        device="cpu",
        init_from_scratch=base is None,
        lora=None if base is None else LoRAConfig(rank=3, init="random"),
        max_tokens_per_mb=64,
        optimizer=OptimizerConfig(lr=1e-2),
        scheduler=SchedulerConfig(kind="cosine", warmup_steps=2),
    )
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    engine = ArchonEngine(config)
    engine.initialize(STEPS)
    fingerprint = engine.fingerprint
    losses: list[float] = []
    order: list[int] = []
    found = load_latest(folder / "run", fingerprint)
    if found is not None:
        _, state = found
        engine.load_state_dict(state["engine"])
        losses, order = state["losses"], state["order"]
    (folder / "ready").touch()
    while engine.step < STEPS:
        order = order or torch.randperm(5).tolist()
        batch = sft_batch(lengths=(9, 4, random.randint(2, 15)), seed=order.pop())
        losses.append(engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)["loss"])
        engine.step_lr_scheduler()
        state = {"engine": engine.state_dict(), "losses": losses, "order": order}
        save_state(folder / "run", engine.step, state, keep=1, fingerprint=fingerprint)
    (folder / "digest").write_text(digest({"engine": engine.state_dict(), "losses": losses, "order": order}))


def digest(state: Any) -> str:
    """SHA-256 over every bit of a nested state."""
    sha = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sha.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value):
                sha.update(key.encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            sha.update(json.dumps(value).encode())

    add(state)
    return sha.hexdigest()


def assert_checkpoints_whole(run: Path) -> int:
    """Every checkpoint that can be seen is whole, `latest` names one of them; returns its step, -1 for none."""
    for folder in run.glob("step-*") if run.exists() else ():
        load_state(folder)
    if (run / "latest").exists():
        assert (run / (run / "latest").read_text().strip()).is_dir()
    found = load_latest(run)
    return -1 if found is None else found[0]


def passage(point: str, save: int) -> str:
    """The kill point of the given save, counted from 1, as ARCHON_KILL_AT wants it."""
    if point == "save.tensor":
        # Passed for each tensor: this one is in the middle of the file.
        return f"{point}:{(save - 1) * TENSORS_IN_A_SAVE + 7}"
    # The first save has no older checkpoint to remove.
    return f"{point}:{save - 1 if point == 'save.old_hidden' else save}"


# Export


def export(folder: Path, source: str) -> None:
    """Replace `folder`/out by an export of `folder`/`source` in several shards."""
    model = archon.load_model(folder / source)
    (folder / "ready").touch()
    archon.save_model(model, folder / "out", like=folder / source, max_shard_bytes=6000)


def export_in_turns(folder: Path) -> None:
    """Replace `folder`/out for ever by exports of two models in turn."""
    models = {source: archon.load_model(folder / source) for source in ("old", "new")}
    (folder / "ready").touch()
    while True:
        for source, model in models.items():
            archon.save_model(model, folder / "out", like=folder / source, max_shard_bytes=6000)


def which_export(folder: Path) -> str:
    """Which of the two models is at `folder`/out, every weight of it."""
    state = hf_state(archon.load_model(folder / "out"), folder / "out")
    for source in ("old", "new"):
        expected = hf_state(archon.load_model(folder / source), folder / source)
        if all(torch.equal(state[name], tensor) for name, tensor in expected.items()):
            return source
    raise AssertionError("the export is neither the old one nor the new one")
