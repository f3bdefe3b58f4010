"""Asynchronous runs as rank processes make them: what each rank has seen and trained on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from archon.engine.batch import PackedBatch
from archon.generation.types import InferenceEngine
from archon.rl import RLTrainer, RLVRWorkflow
from archon.rl.config import RLConfig
from archon.rl.episode_context import workflow_context
from archon.rl.rollout import RolloutBatch
from archon.schema.errors import ConfigError

BATCH, N_SAMPLES = 4, 2
FIRST_PROMPT_OF_STEP_3 = 2 * BATCH


def run_config(folder: Path, layout: str, staleness: int, servers: list[str] | None, **changes: Any) -> RLConfig:
    """A small run on the arithmetic set in `folder`, which has the blank model; without servers it is in process."""
    run = {
        "run_dir": str(folder / "run"),
        "total_steps": 5,
        "actor": {"path": str(folder / "blank"), "device": "cpu", "layout": layout, "init_from_scratch": True},
        "algorithm": {"kl": {"coef": 0.0}},
        "gconfig": {"n_samples": N_SAMPLES, "max_new_tokens": 12, "ignore_eos": True},
        "rollout": {"prompts_per_step": BATCH, "n_gold_checks": 0, "dump_groups": BATCH, "workers": {"rewards": 1}},
        "train_data": {"path": "arithmetic"},
        "reward": "tests.rl.rewards_for_tests.nearness",
    }
    run["actor"] |= {"optimizer": {"lr": 1e-3}, "scheduler": {"kind": "constant"}}
    run["rollout"] |= {"max_staleness": staleness, "servers": servers}
    if servers is None:
        run["generator"] = {"max_slots": 32, "page_size": 8}
    return RLConfig.parse(run | changes)


class Observed(RLTrainer):
    """Notes of each step the prompts, the ages of tokens, and the rows that this rank computed gradients of."""

    def __init__(self, config: RLConfig) -> None:
        super().__init__(config)
        self.prompts_of: list[list[int]] = []
        self.ages: list[int] = []
        self.rows: list[Counter[Any]] = []
        self.own: list[Counter[Any]] = []

    def _open_models(self) -> None:
        super()._open_models()
        train = self.engine.train_batch

        def noted(batch: Any, *args: Any) -> Any:
            self.own[-1] += rows_of(batch)
            return train(batch, *args)

        self.engine.train_batch = noted  # type: ignore[method-assign]

    def rollout_batch(self) -> RolloutBatch:
        batch = super().rollout_batch()
        self.prompts_of.append([prompt.index for prompt in batch.prompts])
        versions = batch.trajectories["versions"][batch.trajectories["loss_mask"] == 1]
        self.ages += (self.engine.version - versions).tolist()
        self.rows.append(rows_of(batch.trajectories))
        self.own.append(Counter())
        return batch


class SignaledAtStep3(Observed):
    """Rank 1 gets SIGTERM when it begins to wait for a batch that never comes."""

    def rollout_batch(self) -> RolloutBatch:
        if self.step == 2 and not self.controller.is_main:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().rollout_batch()


class WaitsInStep3(RLVRWorkflow):
    """For ever, on every prompt after those of two steps."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        if workflow_context.get().task_id >= FIRST_PROMPT_OF_STEP_3:
            await asyncio.sleep(3600)
        return await super().arun_episode(engine, data)


class LosesARankInStep3(WaitsInStep3):
    """As it begins to wait, the process of the other rank is killed."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        if workflow_context.get().task_id == FIRST_PROMPT_OF_STEP_3:
            note_end()
            os.kill(other_rank(), signal.SIGKILL)
        return await super().arun_episode(engine, data)


def note_end() -> None:
    """Write the time into the file that the environment names."""
    Path(os.environ["ENDS_IN"]).write_text(str(time.time()))


def other_rank() -> int:
    """The process of the other of two ranks under torchrun."""
    siblings = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
    return next(int(pid) for pid in siblings if int(pid) != os.getpid())


class FailsInStep3(RLVRWorkflow):
    """Is configured in a way that no episode can have."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        if workflow_context.get().task_id >= FIRST_PROMPT_OF_STEP_3:
            note_end()
            raise ConfigError("this can never be asked")
        return await super().arun_episode(engine, data)


def rows_of(batch: Any) -> Counter[Any]:
    """Count the rows of a padded or packed batch by their trained tokens with logprobs."""
    columns: Any
    if isinstance(batch, PackedBatch):  # labels and fields have the same shift
        tensors = (batch.labels, batch["loss_mask"], batch["logprobs"])
        columns = [[row.tolist() for row in x.split(batch.lengths)] for x in tensors]
    else:
        columns = [batch[name].tolist() for name in ("input_ids", "loss_mask", "logprobs")]
    return Counter(
        tuple((token, round(logprob, 4)) for token, kept, logprob in zip(*row, strict=True) if kept)
        for row in zip(*columns, strict=True)
        if any(row[1])
    )


def train(config: RLConfig, signaled: bool = False) -> dict[str, Any]:
    """Run; returns what this rank has seen."""
    trainer = (SignaledAtStep3 if signaled else Observed)(config)
    trainer.train()
    assert trainer.runner is not None
    return {
        "exit_code": trainer.runner.exit_code,
        "dp": trainer.engine.ranks.dp.rank,
        "step": trainer.step,
        "version": trainer.engine.version,
        "prompts": trainer.prompts_of,
        "ages": trainer.ages,
        "rows": trainer.rows,
        "own": trainer.own,
    }
