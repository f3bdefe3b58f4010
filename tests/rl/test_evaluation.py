"""Held-out evaluation: what its numbers are means of."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import torch

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelResponse
from archon.rl import RLVRWorkflow, RolloutWorkflow
from archon.rl.episode_context import workflow_context
from archon.rl.evaluation import answer_texts, evaluate
from archon.rl.prompts import Prompt
from archon.rl.rollout import Rollout, WorkflowError
from archon.rl.trajectories import trajectory_tensors
from tests.rl import rewards_for_tests as rewards

PROMPTS = [Prompt(i, {"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(12)]
GCONFIG = GenerationHyperparameters(n_samples=3, max_new_tokens=4)


def test_evaluation_is_the_mean_over_prompts_of_real_samples(engine: InProcessEngine, tokenizer: Any) -> None:
    rollout = Rollout(engine, RLVRWorkflow(rewards.count_digits, GCONFIG, tokenizer), seed=4)
    measured = asyncio.run(evaluate(rollout, PROMPTS, tokenizer=tokenizer, well_formed=r"\d+"))
    episodes = asyncio.run(rollout.run(PROMPTS, is_eval=True))
    texts = answer_texts(episodes, tokenizer)
    assert len(texts) == 36
    digits = [sum(c.isdigit() for c in text) for text in texts]
    assert measured["reward"] == pytest.approx(sum(digits) / 36)
    assert measured["well_formed"] == sum(re.fullmatch(r"\d+", text) is not None for text in texts) / 36
    lengths = torch.cat([e.trajectories["loss_mask"].sum(1) for e in episodes if e.trajectories])
    assert measured["length"] == pytest.approx(lengths.double().mean().item())
    assert 0 < measured["truncated"] < 1
    assert (measured["failed"], measured["dropped"]) == (0, 0)


def test_a_trajectory_of_several_rows_counts_once(engine: InProcessEngine) -> None:
    class Parts(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            answer = ModelResponse([3], [4], [-0.5], [0])
            return trajectory_tensors([answer] * 4, [1.0, 0.0, 0.0, 0.0], [0, 1, 1, 1])

    assert asyncio.run(evaluate(Rollout(engine, Parts()), PROMPTS))["reward"] == 0.5


def test_a_prompt_of_few_samples_counts_as_much_as_one_of_many(engine: InProcessEngine) -> None:
    class Uneven(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            many = workflow_context.get().task_id % 3 == 0
            answer = ModelResponse([3], [4], [-0.5], [0])
            return trajectory_tensors([answer] * (4 if many else 2), [0.0] * 4 if many else [1.0] * 2)

    # Eight of twelve prompts are answered rightly, by half of all samples.
    assert asyncio.run(evaluate(Rollout(engine, Uneven()), PROMPTS))["reward"] == pytest.approx(2 / 3)


def test_lost_samples_are_left_out_of_the_mean_and_counted(engine: InProcessEngine, tokenizer: Any) -> None:
    rollout = Rollout(engine, RLVRWorkflow(rewards.raise_on_even_length, GCONFIG, tokenizer))
    measured = asyncio.run(evaluate(rollout, PROMPTS))
    assert measured["reward"] == 1.0
    assert measured["dropped"] > 0
    assert "well_formed" not in measured


def test_evaluation_in_which_every_prompt_fails_stops(engine: InProcessEngine, tokenizer: Any) -> None:
    rollout = Rollout(engine, RLVRWorkflow(rewards.always_raises, GCONFIG, tokenizer))
    with pytest.raises(WorkflowError, match="failed on 12 prompts and succeeded on none"):
        asyncio.run(evaluate(rollout, PROMPTS))


def test_what_a_workflow_records_while_it_is_evaluated_is_reported(engine: InProcessEngine, tokenizer: Any) -> None:
    class Recording(RLVRWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            workflow_context.record(index=workflow_context.get().task_id)
            return await super().arun_episode(engine, data)

    rollout = Rollout(engine, Recording(rewards.count_digits, GCONFIG, tokenizer))
    assert asyncio.run(evaluate(rollout, PROMPTS))["index"] == sum(range(12)) / 12
