"""Run modes `explore` and `train` (separate processes) and `bench`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from archon.checkpoint.native import latest_checkpoint, open_state
from archon.engine.engine import ArchonEngine
from archon.parallel.control_plane import ControlPlane
from archon.rl.config import ExperiencesConfig, RLConfig
from archon.rl.experience_buffer import ExperienceBuffer, split_groups
from archon.rl.rollout import RolloutBatch
from archon.rl.summary import batch_metrics
from archon.rl.trainer import RLTrainer
from archon.schema.config import derive_engine
from archon.schema.errors import CheckpointError, ConfigError, RolloutError
from archon.training.loop import timed
from archon.training.runner import Runner

POLL_SECONDS = 0.2


def make_trainer(config: RLConfig, runner: Runner | None = None) -> RLTrainer:
    """Return the trainer for the configuration's `mode`."""
    kinds: dict[str, type[RLTrainer]] = {kind.mode: kind for kind in (RLTrainer, Explorer, BufferTrainer, Bench)}
    return kinds[config.mode](config, runner)


class _CheckpointReader(RLTrainer):
    """Run without an optimizer on another run's checkpoints."""

    @property
    def experiences(self) -> ExperiencesConfig:
        """Configuration of buffer and checkpoints."""
        assert self.config.experiences is not None
        return self.config.experiences

    def _open_models(self) -> None:
        evaluated = {"optimizer": None, "router_bias_update_rate": 0.0}
        self.engine = ArchonEngine(derive_engine(self.config.actor, evaluated, "actor"))
        self.engine.initialize()

    def load_weights(self, folder: Path) -> int:
        """Load a checkpoint's weights into engine and generator, and return its step."""
        with open_state(folder, self.engine.fingerprint) as (step, state):
            weights = {name: value for name, value in state["engine"].items() if name not in _OPTIMIZER}
            self.engine.load_state_dict(weights)
        self.generator.update_weights(self.weight_sync.weights(), version=self.engine.version)
        return step

    def checkpoints(self) -> Path | None:
        """Return the checkpoint folder of the other run."""
        source = self.experiences.weights_from
        return None if source is None else Path(source) / "checkpoints"

    def save(self, *, asynchronous: bool = False) -> None:
        """Save nothing."""

    def finish(self) -> None:
        """Export nothing."""


_OPTIMIZER = ("optimizer", "scheduler", "skipped_steps")


class Explorer(_CheckpointReader):
    """Mode explore: adds groups to the experience buffer, and periodically loads the newest checkpoint.

    A resumed run continues at the position in the buffer.
    """

    mode = "explore"
    title = "explore"
    columns = ("reward", "eval/reward", "length", "samples_per_second")

    def resume(self) -> None:
        """Continue at the position in the buffer."""
        self.buffer = ExperienceBuffer(self.experiences.path or "")
        self._loaded: Path | None = None
        if (state := self.buffer.explorer_state()) is None:
            return
        if not self.config.resume:
            raise ConfigError(
                f"experiences.path {self.buffer.path} holds {len(self.buffer)} groups of an earlier run; set "
                "resume=true to add to them, or use another file"
            )
        self.step, position = state
        self.load_position(position)
        if self.step < self.total_steps and ControlPlane.world().is_main:
            self.buffer.finish(False)
        if self.runner is not None:
            self.runner.rewind(self.step or -1)

    def train_step(self) -> dict[str, float]:
        """Sample the groups of a step, add them to the buffer, and return their metrics."""
        if self.step % self.experiences.sync_every == 0:
            self._sync()
        seconds: dict[str, float] = {}
        with timed(seconds, "seconds/rollout"):
            batch = self.rollout_batch()
        groups = split_groups(batch.trajectories) if batch else []
        if ControlPlane.world().is_main:
            position = {"prompts": self.prompts.state_dict()}
            self.buffer.append(groups, batch.prompts, self.step + 1, position)
        metrics = batch_metrics(batch, self.engine.version)
        if batch:
            self._dump(batch, metrics)
            metrics["samples_per_second"] = metrics["samples"] / seconds["seconds/rollout"]
        return metrics | seconds | {"version": self.engine.version}

    def finish(self) -> None:
        """Tell the trainer that the buffer is complete."""
        if ControlPlane.world().is_main:
            self.buffer.finish()

    def _sync(self) -> None:
        folder = self.checkpoints()
        name = ControlPlane.world().broadcast_json(lambda: _latest_checkpoint_name(folder))
        if not name or Path(name) == self._loaded:
            return
        try:
            step = self.load_weights(Path(name))
        except (CheckpointError, FileNotFoundError) as error:  # a newer checkpoint replaced it
            self._log(f"step {self.step}: keeping the weights; the trainer's checkpoint cannot be read: {error}")
            return
        self._loaded = Path(name)
        self._log(f"step {self.step}: loaded the weights of the trainer's step {step}")


class BufferTrainer(RLTrainer):
    """Mode train: trains on the groups of the experience buffer in order, once per pass.

    It waits for the explorer's next groups, and ends early if the explorer is finished. A checkpoint stores the number
    of trained groups for resuming. Second passes begin when the explorer is finished; groups of a resumed explorer are
    trained after them, in passes of their own.
    """

    mode = "train"
    title = "train"

    def __init__(self, config: RLConfig, runner: Runner | None = None) -> None:
        super().__init__(config, runner)
        assert config.experiences is not None
        self._buffer = ExperienceBuffer(config.experiences.path or "")
        self._taken = self._trained = 0  # groups over all passes: after this step, after the last complete step
        self._pass_boundaries: list[int] = []  # buffer sizes at which the explorer was finished

    @property
    def finished(self) -> bool:
        """Whether the last step is done, or nothing is left to train on."""
        if super().finished:
            return True
        return self._next_group_numbers(1) == []

    def rollout_batch(self) -> RolloutBatch:
        """Return the next groups of the buffer, or fewer at its end."""
        episodes = self._buffer.read(self._await(self._wait_for_group_numbers()))
        self._taken = self._trained + len(episodes)
        kept = [e for e in episodes if e.is_trainable(self.rollout.rule_of(e.prompt))]
        return self.rollout.make_batch(kept, episodes, Counter(), self.step)

    def after_step(self) -> dict[str, float]:
        """Advance the number of trained groups."""
        super().after_step()
        self._trained = self._taken
        return {"experiences": float(self._trained)}

    def position(self) -> dict[str, Any]:
        """Return the data position and the number of trained groups."""
        return super().position() | {"experiences": self._trained, "experience_ends": self._pass_boundaries}

    def load_position(self, state: dict[str, Any]) -> None:
        """Continue after the trained groups."""
        super().load_position(state)
        self._trained = self._taken = state["experiences"]
        self._pass_boundaries = list(state["experience_ends"])

    def _next_group_numbers(self, count: int) -> list[int] | None:
        """Return the next `count` numbers, fewer at the end of the buffer, or None if they are not ready."""
        numbers, self._pass_boundaries = ControlPlane.world().broadcast_json(lambda: self._find_group_numbers(count))
        return None if numbers is None else list(numbers)

    def _find_group_numbers(self, count: int) -> tuple[list[int] | None, list[int]]:
        assert self.config.experiences is not None
        finished = self._buffer.finished  # read before the size, which grows until the explorer is finished
        size, passes = len(self._buffer), self.config.experiences.passes
        pass_boundaries = self._pass_boundaries
        if finished and size > (pass_boundaries[-1] if pass_boundaries else 0):
            pass_boundaries = [*pass_boundaries, size]
        numbers = group_numbers(self._trained, count, size, pass_boundaries, passes)
        return numbers if finished or len(numbers) == count else None, pass_boundaries

    async def _wait_for_group_numbers(self) -> list[int]:
        assert self.config.experiences is not None
        limit, waited = self.config.experiences.wait_seconds, 0.0
        while waited <= limit:
            numbers = self._next_group_numbers(self.config.rollout.prompts_per_step)
            if numbers is not None:
                return numbers
            await asyncio.sleep(POLL_SECONDS)
            waited += POLL_SECONDS
        raise RolloutError(
            f"{self._buffer.path} has {len(self._buffer)} groups ({self._trained} trained), and no full step arrived "
            f"within {limit:g} s (experiences.wait_seconds); start the explorer"
        )

    def _check_logprobs(self, batch: RolloutBatch) -> None:
        """Check the first on-policy batch; off-policy batches differ by design."""
        if batch.is_on_policy(self.generator.version):
            super()._check_logprobs(batch)


def group_numbers(start: int, count: int, size: int, pass_boundaries: Sequence[int], passes: int) -> list[int]:
    """Return the buffer numbers of the training groups `start` to `start + count` (fewer at the end).

    Args:
        start: number of trained groups.
        count: maximum number of groups.
        size: size of the buffer.
        pass_boundaries: increasing buffer sizes; the groups between two boundaries are trained `passes` times.
        passes: passes over each section.
    """
    numbers: list[int] = []
    first = 0
    for end, times in [*((end, passes) for end in pass_boundaries), (size, 1)]:
        length = end - first
        stop = min(start + count - len(numbers), times * length)
        numbers += [first + number % length for number in range(start, stop)]
        start, first = max(0, start - times * length), end
    return numbers


class Bench(_CheckpointReader):
    """Mode bench: evaluates another run's checkpoints, or the model itself without checkpoints.

    Each evaluation is one record with the checkpoint's step as `checkpoint`.
    """

    mode = "bench"
    title = "bench"
    columns = ("checkpoint", "eval/reward", "eval/greedy_reward", "eval/length")

    def resume(self) -> None:
        """List the checkpoints; there is nothing to resume."""
        folder = self.checkpoints()
        names = ControlPlane.world().broadcast_json(lambda: _checkpoint_names(folder))
        self._folders = [Path(name) for name in (names[-1:] if self.experiences.latest_only else names)]
        self.total_steps = max(1, len(self._folders))
        if self.runner is not None:
            self.runner.rewind(-1)

    @property
    def evaluation_due(self) -> bool:
        """False: each step is an evaluation."""
        return False

    def before_first_step(self) -> dict[str, float]:
        """Skip the initial evaluation."""
        return {}

    def train_step(self) -> dict[str, float]:
        """Evaluate the next checkpoint and return its metrics."""
        step = self.load_weights(self._folders[self.step]) if self._folders else 0
        return self.timed_evaluation() | {"checkpoint": float(step)}


def _latest_checkpoint_name(folder: Path | None) -> str:
    latest = None if folder is None or not folder.exists() else latest_checkpoint(folder)
    return "" if latest is None else str(latest)


def _checkpoint_names(folder: Path | None) -> list[str]:
    if folder is None or not folder.exists():
        return []
    return [str(path) for path in sorted(folder.glob("step-*")) if path.is_dir()]
