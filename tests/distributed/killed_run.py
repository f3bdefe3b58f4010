"""A training run of four ranks with asynchronous saves, one rank of which is killed.

The ranks are forked from a server that has imported PyTorch once, and told who they are as torchrun does; like it, the
launcher ends the others when one has died.
"""

from __future__ import annotations

import os
import random
import socket
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch

from archon.checkpoint.native import broadcast_latest_checkpoint, open_state
from archon.checkpoint.state_tree import Shard, read_all
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.schema.config import EngineConfig, LoRAConfig, OptimizerConfig, SchedulerConfig
from tests.checkpoint import killing
from tests.distributed.cases import batch

LAYOUT, RANKS, STEPS = "d2t2", 4, 6
GRACE_SECONDS = 1.0


def train(folder: Path, rank: int, port: int, base: str | None) -> None:
    """One rank: continue from the latest checkpoint to the last step, with a save behind each; then write the digest of
    everything this rank holds. The documents are drawn from the rank's global generator. With a `base` its adapters are
    trained, else a fresh model."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    config = EngineConfig(
        path=base or str(folder.parent / "model" / "config"),
        device="cpu",
        layout=LAYOUT,
        init_from_scratch=base is None,
        lora=None if base is None else LoRAConfig(rank=3, init="random"),
        max_tokens_per_mb=40,
        optimizer=OptimizerConfig(lr=1e-2),
        scheduler=SchedulerConfig(kind="cosine", warmup_steps=2),
    )
    engine = ArchonEngine(config)
    engine.initialize(STEPS)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5 + engine.ranks.dp.rank)
    fingerprint, losses = engine.fingerprint, list[float]()
    latest = broadcast_latest_checkpoint(folder / "run")
    if latest is not None:
        with open_state(latest, fingerprint) as (_, state):
            engine.load_state_dict(state["engine"])
            losses = read_all(state["losses"])
    (folder / f"ready{rank}").touch()
    while engine.step < STEPS:
        lengths = tuple(torch.randint(2, 14, (4,)).tolist())
        data = batch(lengths, seed=int(torch.randint(1000, ())))
        losses.append(engine.train_batch(data, CrossEntropyLoss(), loss_token_count)["loss"])
        engine.step_lr_scheduler()
        state = {"engine": engine.state_dict(), "losses": losses}
        engine.saver.save(folder / "run", engine.step, state, 1, fingerprint, asynchronous=True)
    engine.wait_for_saves()
    state = engine.state_dict()
    parts = [[state["model"][name], *state["optimizer"][name].values()] for name in sorted(state["model"].keys())]
    tensors = [part.data if isinstance(part, Shard) else part for group in parts for part in group]
    (folder / f"digest{rank}").write_text(killing.digest([tensors, state["rng"].values, state["scheduler"], losses]))


class Run:
    """The processes of one run in `folder`, of a fresh model or of adapters of `base`."""

    def __init__(self, folder: Path, kill_at: str | None = None, victim: int = 0, base: str | None = None) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(RANKS):
            (folder / f"ready{rank}").unlink(missing_ok=True)
        self.ranks: list[BaseProcess] = [
            killing.start(train, folder, rank, port, base, kill_at=kill_at if rank == victim else None)
            for rank in range(RANKS)
        ]

    def until_ready(self) -> None:
        while not all((self.folder / f"ready{rank}").exists() for rank in range(RANKS)):
            assert all(process.is_alive() for process in self.ranks)
            time.sleep(0.005)

    def finish(self) -> list[int | None]:
        """The exit codes; when a rank has failed the others are given a moment and then killed."""
        deadline = time.monotonic() + 120
        while any(process.is_alive() for process in self.ranks) and time.monotonic() < deadline:
            if any(process.exitcode for process in self.ranks):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            time.sleep(0.01)
        for process in self.ranks:
            process.kill()
            process.join()
        return [process.exitcode for process in self.ranks]

    def digests(self) -> list[str]:
        return [(self.folder / f"digest{rank}").read_text() for rank in range(RANKS)]
