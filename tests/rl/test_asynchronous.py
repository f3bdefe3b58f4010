"""Rollouts that run ahead: how many, how stale, in which order, and that nothing is lost, trained twice or waited for
without end. The generator is the real one; only the time an episode takes is made up."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.rl import RLTrainer, RLVRWorkflow, RolloutWorkflow
from archon.rl.algorithms.config import GroupRule
from archon.rl.asynchronous import AsyncRollout, capacity
from archon.rl.config import RLConfig
from archon.rl.episode_context import workflow_context
from archon.rl.prompts import PromptStream
from archon.rl.rollout import Rollout, WorkflowError
from archon.training.metrics import read_jsonl
from tests.rl import rewards_for_tests as rewards
from tests.rl.test_rollout import Stream

MakeConfig = Callable[..., RLConfig]

B, GCONFIG = 4, GenerationHyperparameters(n_samples=2, max_new_tokens=3)


def load(trainer: RLTrainer, weights: dict[str, torch.Tensor]) -> None:
    """Give the policy these weights."""
    with torch.no_grad():
        for name, parameter in trainer.engine.model.named_parameters():
            parameter.copy_(weights[name])


class Delayed(RolloutWorkflow):
    """RLVR whose episodes take as long as `delay` says; notes how many ran at once and the version each began with."""

    def __init__(self, tokenizer: Any, delay: Callable[[int], float] = lambda _: 0.0) -> None:
        self.inner, self.delay = RLVRWorkflow(rewards.count_digits, GCONFIG, tokenizer), delay
        self.began: dict[int, int] = {}
        self.running = self.most = 0

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        index = workflow_context.get().task_id
        self.began[index] = engine.version
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.delay(index))
            return self.change(await self.inner.arun_episode(engine, data), index)
        finally:
            self.running -= 1

    def change(self, result: Any, index: int) -> Any:
        return result


def ahead(engine: InProcessEngine, workflow: RolloutWorkflow, stream: Stream, **options: Any) -> AsyncRollout:
    options = {"batch": B, "staleness": 2, "concurrent": None} | options
    rule = GroupRule(options.pop("zero_variance", "keep"))
    return AsyncRollout(Rollout(engine, workflow, rule=rule, log=lambda _: None), stream.take, **options)


async def train(rollouts: AsyncRollout, engine: InProcessEngine, steps: int, pause: float = 0.0) -> list[list[int]]:
    """The prompts of each batch, with a new version after each."""
    batches = []
    for step in range(steps):
        batch = await asyncio.wait_for(rollouts.collect(step), 60)
        batches.append([prompt.index for prompt in batch.prompts])
        await asyncio.sleep(pause)
        engine._generator.version += 1
    await rollouts.close()
    return batches


def test_capacity_is_the_published_formula() -> None:
    limits = {"staleness": 2, "batch": 8, "concurrent": 100}
    # Nothing done yet at version 0: (2 + 0 + 1) * 8 = 24 may be on their way.
    assert capacity(0, 0, 0, **limits) == 24
    # 5 run, 10 are done: 24 - 15 = 9 more; at version 1 the bound is 32, so 17 more.
    assert capacity(5, 10, 0, **limits) == 9
    assert capacity(5, 10, 1, **limits) == 17
    # At most 100 at once, however stale they may be.
    assert capacity(90, 0, 50, **limits) == 10
    # Ahead as far as allowed.
    assert capacity(4, 20, 0, **limits) == 0


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
async def test_no_group_is_staler_than_the_bound_and_each_prompt_is_trained_on_once(
    engine: InProcessEngine, tokenizer: Any, staleness: int, seed: int
) -> None:
    """A tenth of the episodes take as long as several steps: they are waited for before they are too old."""
    chance = random.Random(seed)
    delays = [0.3 if chance.random() < 0.1 else chance.random() * 0.01 for _ in range(99)]
    workflow, stream = Delayed(tokenizer, delays.__getitem__), Stream()
    rollouts = ahead(engine, workflow, stream, staleness=staleness)
    batches = await train(rollouts, engine, 12, pause=0.02)
    trained = [index for batch in batches for index in batch]
    assert len(set(trained)) == len(trained) == 12 * B
    ages = [step - workflow.began[index] for step, batch in enumerate(batches) for index in batch]
    assert min(ages) >= 0
    assert max(ages) <= staleness
    assert max(ages) > 0, "nothing ran ahead, so nothing was tested"
    assert workflow.most <= (staleness + 1) * B
    assert workflow.running == 0


async def test_without_an_odd_delay_groups_come_in_the_order_of_their_prompts(
    engine: InProcessEngine, tokenizer: Any
) -> None:
    batches = await train(ahead(engine, Delayed(tokenizer), Stream()), engine, 3)
    assert all(batch == sorted(batch) for batch in batches)


async def test_at_most_so_many_episodes_run_at_once(engine: InProcessEngine, tokenizer: Any) -> None:
    workflow = Delayed(tokenizer, lambda index: 0.005)
    batches = await train(ahead(engine, workflow, Stream(), concurrent=3), engine, 4)
    assert workflow.most == 3
    assert [len(batch) for batch in batches] == [B] * 4


async def test_a_batch_counts_the_episodes_that_still_run(engine: InProcessEngine, tokenizer: Any) -> None:
    rollouts = ahead(engine, Delayed(tokenizer, lambda index: 0 if index < B else 60), Stream())
    batch = await asyncio.wait_for(rollouts.collect(0), 60)
    assert batch.counts["running"] == len(rollouts.untrained) == 2 * B
    await rollouts.close()


async def test_episodes_go_on_while_the_policy_is_trained(engine: InProcessEngine, tokenizer: Any) -> None:
    rollouts = ahead(engine, Delayed(tokenizer), Stream(), staleness=1)
    await rollouts.collect(0)
    await asyncio.sleep(0.5)
    # The bound is (1 + 0 + 1) * 4 = 8, of which 4 have been trained on: a whole batch waits.
    assert not rollouts._running
    assert len(rollouts.untrained) == B
    await rollouts.close()


async def test_failed_and_rejected_episodes_give_their_places_back_and_are_counted(
    engine: InProcessEngine, tokenizer: Any
) -> None:
    class Unreliable(Delayed):
        def change(self, result: Any, index: int) -> Any:
            if index % 4 == 1:
                raise KeyError(index)
            return None if index % 4 == 2 else result

    workflow, stream = Unreliable(tokenizer), Stream()
    rollouts = ahead(engine, workflow, stream)
    batch = await rollouts.collect(0)
    assert len(batch.prompts) == B
    assert all(prompt.index % 4 in (0, 3) for prompt in batch.prompts)
    assert batch.counts["failed/KeyError"] + batch.counts["rejected"] == batch.counts["resampled"] > 0
    await rollouts.close()


async def test_a_prompt_is_untrained_until_a_batch_has_it_or_counts_its_failure(
    engine: InProcessEngine, tokenizer: Any
) -> None:
    class Fails(Delayed):
        def change(self, result: Any, index: int) -> Any:
            if index % 4 == 1:
                raise KeyError(index)
            return result

    stream = Stream()
    rollouts = ahead(engine, Fails(tokenizer), stream)
    told = [episode.prompt.index for episode in (await rollouts.gather()).episodes]
    await asyncio.sleep(0.5)  # others end, and fail, until no more may begin
    assert rollouts._replaced, "failures that a run that ends now has not counted"
    assert sorted(told + rollouts.untrained) == list(range(sum(stream.asked)))
    await rollouts.close()


async def test_places_are_given_back_only_so_often(engine: InProcessEngine, tokenizer: Any) -> None:
    class Fails(Delayed):
        def change(self, result: Any, index: int) -> Any:
            if index:
                raise KeyError(index)
            return result

    rollouts = ahead(engine, Fails(tokenizer), Stream(), staleness=1, max_resamples=1)
    batch = await asyncio.wait_for(rollouts.collect(0), 60)
    assert [prompt.index for prompt in batch.prompts] == [0]
    assert batch.counts["resampled"] == B
    await rollouts.close()


async def test_a_workflow_that_always_fails_ends_the_run(engine: InProcessEngine, tokenizer: Any) -> None:
    class Fails(Delayed):
        def change(self, result: Any, index: int) -> Any:
            raise KeyError("always")

    rollouts = ahead(engine, Fails(tokenizer), Stream())
    with pytest.raises(WorkflowError, match=r"Fails failed on \d+ prompts and succeeded on none"):
        await asyncio.wait_for(rollouts.collect(0), 60)
    await rollouts.close()


@pytest.mark.parametrize("spread", ["drop", "resample"])
async def test_zero_variance_groups(engine: InProcessEngine, tokenizer: Any, spread: Any) -> None:
    class Alike(Delayed):
        def change(self, result: Any, index: int) -> Any:
            result["rewards"] = torch.tensor([1.0, float(index % 2)])
            return result

    rollouts = ahead(engine, Alike(tokenizer), Stream(), zero_variance=spread)
    batch = await rollouts.collect(0)
    assert all(prompt.index % 2 == 0 for prompt in batch.prompts)
    if spread == "resample":
        assert len(batch.prompts) == B
        assert batch.counts["resampled"] == batch.counts["zero_variance_groups"] > 0
    else:
        assert len(batch.prompts) + batch.counts["zero_variance_groups"] == B
        assert batch.counts["resampled"] == 0
    await rollouts.close()


async def test_batches_with_nothing_to_train_on_do_not_stop_the_flow(engine: InProcessEngine, tokenizer: Any) -> None:
    """They are no steps, so that the version stays: their places must be free all the same."""

    class Alike(Delayed):
        def change(self, result: Any, index: int) -> Any:
            result["rewards"] = torch.ones(2)
            return result

    rollouts = ahead(engine, Alike(tokenizer), Stream(), zero_variance="drop", staleness=1)
    for step in range(5):
        assert not await asyncio.wait_for(rollouts.collect(step), 60)
    await rollouts.close()


def test_a_resumed_stream_begins_with_what_was_taken_and_not_trained_on() -> None:
    rows = [{"messages": [], "answer": str(i)} for i in range(10)]
    stream = PromptStream(rows, seed=3)
    taken = stream.take(7) + stream.take(8)  # into the second epoch
    state = stream.state_dict(untrained=[4, 9, 12])
    resumed = PromptStream(rows, seed=3)
    resumed.load_state_dict(state)
    assert resumed.take(2) == [taken[4], taken[9]]
    # What is still to be repeated is not forgotten by a second checkpoint.
    again = PromptStream(rows, seed=3)
    again.load_state_dict(resumed.state_dict())
    assert again.take(3) == [taken[12], *stream.take(2)]


def test_a_run_overlaps_and_its_tokens_are_no_older_than_allowed(rl_config: MakeConfig) -> None:
    config = rl_config(
        total_steps=8, rollout={"prompts_per_step": 6, "n_gold_checks": 0, "dump_groups": 6, "max_staleness": 2}
    )
    RLTrainer(config).train()
    rows = [row for row in read_jsonl(Path(config.run_dir) / "metrics.jsonl") if row["step"]]
    assert [row["version"] for row in rows] == list(range(1, 9))
    assert sum(row["rollout/overlap"] for row in rows) > 0
    assert all(0 <= row["rollout/overlap"] <= 1 for row in rows)
    # Of the first batch every token is of the policy that is trained; later ones may be two versions behind.
    assert abs(rows[0]["ratio"] - 1) < 1e-4
    groups = Counter((row["step"], row["group"]) for row in read_jsonl(Path(config.run_dir) / "trajectories.jsonl"))
    assert len({group for _, group in groups}) == len(groups) == 8 * 6


def test_versions_in_a_batch_are_within_the_bound(rl_config: MakeConfig) -> None:
    rollout = {"prompts_per_step": 6, "n_gold_checks": 0, "max_staleness": 2}
    trainer = RLTrainer(rl_config(rollout=rollout))
    seen: set[int] = set()
    with trainer.opened():
        collect = trainer.rollout_batch

        def checked() -> Any:
            batch = collect()
            versions = batch.trajectories["versions"]
            ages = trainer.engine.version - versions[versions >= 0]
            assert int(ages.min()) >= 0
            assert int(ages.max()) <= 2
            seen.update(ages.tolist())
            return batch

        trainer.rollout_batch = checked  # type: ignore[method-assign]
        for _ in range(8):
            trainer.train_step()
            trainer.step += 1
    assert len(seen) > 1, "no token was stale, so nothing was tested"


def test_a_resumed_run_that_runs_ahead_trains_each_prompt_exactly_once(rl_config: MakeConfig) -> None:
    rollout = {"prompts_per_step": 6, "n_gold_checks": 0, "dump_groups": 6, "max_staleness": 2}
    config = rl_config(total_steps=7, rollout=rollout)
    trainer = RLTrainer(config)
    step = trainer.train_step

    def stop_in_the_third() -> dict[str, float]:
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step()

    trainer.train_step = stop_in_the_third  # type: ignore[method-assign]
    trainer.train()
    assert trainer.step in (2, 3)  # the step is cut short unless all of its groups are there already
    RLTrainer(config.model_copy(update={"resume": True})).train()
    rows = read_jsonl(Path(config.run_dir) / "trajectories.jsonl")
    groups = {(row["step"], row["group"]) for row in rows}
    # None twice, and none left out: what ran ahead at the end of the first run came first in the second.
    trained = sorted(group for _, group in groups)
    assert len(trained) == len(set(trained)) == 7 * 6
    assert set(range(2 * 6)) <= set(trained)


@pytest.mark.slow
def test_tokens_sampled_beside_an_update_are_of_the_weights_they_name(rl_config: MakeConfig, tokenizer: Any) -> None:
    """The update's new weights must not reach the generator before they are pushed."""
    rollout = {"prompts_per_step": 6, "n_gold_checks": 0, "max_staleness": 1}
    trainer = RLTrainer(rl_config(rollout=rollout, actor=rl_config().actor.model_dump() | {"optimizer": {"lr": 0.05}}))
    known: dict[int, dict[str, torch.Tensor]] = {}
    stale = 0
    between = threading.Event()  # optimizer step and push

    class Sly(Delayed):
        """From the third batch on, samples when it could go wrong."""

        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            if workflow_context.get().task_id >= 12:
                await asyncio.to_thread(between.wait, 2)
            return await super().arun_episode(engine, data)

    with trainer.opened(Sly(tokenizer)):
        train, collect = trainer.update.train, trainer.rollout_batch

        def slowly(batch: Any, step: int) -> dict[str, float]:
            metrics = train(batch, step)
            between.set()
            time.sleep(0.3)
            between.clear()
            return metrics

        trainer.update.train = slowly  # type: ignore[method-assign]
        for _ in range(4):
            now = trainer.engine.version
            known[now] = {name: weight.clone() for name, weight in trainer.engine.weights()}
            given = collect()
            trainer.rollout_batch = lambda given=given: given  # type: ignore[method-assign,misc]
            documents = {name: value for name, value in given.trajectories.items() if name != "group_ids"}
            for version, weights in known.items():
                load(trainer, weights)
                of_it = documents["versions"] == version
                logprobs = trainer.engine.forward_batch(documents)
                assert (logprobs - documents["logprobs"])[of_it].abs().sum() <= 1e-4 * of_it.sum()
                stale += int(of_it.sum()) if version < now else 0
            load(trainer, known[now])
            trainer.train_step()
            trainer.step += 1
    assert stale, "no token was stale, so nothing was tested"
