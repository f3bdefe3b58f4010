"""Held-out evaluation: what its numbers are means of."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelResponse
from archon.rl import RLTrainer, RLVRWorkflow, RolloutWorkflow
from archon.rl.config import RLConfig
from archon.rl.episode_context import workflow_context
from archon.rl.evaluation import answer_texts, evaluate
from archon.rl.prompts import Prompt
from archon.rl.rollout import Rollout, WorkflowError
from archon.rl.trajectories import trajectory_tensors
from tests.rl import rewards_for_tests as rewards
from tests.tolerances import FIRST_RATIO_FP32

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


HELD_OUT = {"path": "arithmetic", "split": "test"}
ALL_KEYWORDS: list[dict[str, Any]] = [{}, {"eval_workflow_kwargs": {}}]


def held_out_answers(trainer: RLTrainer, prefix: str) -> list[tuple[list[int], int, list[float]]]:
    """Return (tokens, prompt length, answer logprobs) of every held-out answer of one evaluation."""
    episodes = asyncio.run(trainer.evaluations[prefix].run(trainer.held_out, is_eval=True))
    answers = []
    for episode in episodes:
        assert episode.trajectories
        columns = (episode.trajectories[name] for name in ("input_ids", "attention_mask", "loss_mask", "logprobs"))
        for ids, attended, trained, logprobs in zip(*columns, strict=True):
            prompt = int((attended.bool() & (trained == 0)).sum())
            answers.append((ids[attended.bool()].tolist(), prompt, logprobs[trained == 1].tolist()))
    return answers


def test_greedy_evaluation_answers_with_the_most_likely_tokens(rl_config: Callable[..., RLConfig]) -> None:
    """Also if the policy is trained at another temperature and with several samples."""
    gconfig = {"n_samples": 4, "max_new_tokens": 4, "temperature": 1.5}
    evaluation = {"max_prompts": 8, "n_samples": 2}
    trainer = RLTrainer(rl_config(eval_data=HELD_OUT, evaluation=evaluation, gconfig=gconfig))
    with trainer.opened():
        answers = held_out_answers(trainer, "greedy_")
        assert len(answers) == 8, "one answer a prompt"
        for tokens, prompt, _ in answers:
            ids, n = torch.tensor(tokens), len(tokens)
            logits = trainer.engine.model(ids, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n)
            assert tokens[prompt:] == logits[prompt - 1 : -1].argmax(-1).tolist()
        assert len(held_out_answers(trainer, "")) == 16, "the sampled evaluation is apart"


@pytest.mark.parametrize("keywords", ALL_KEYWORDS, ids=["workflow", "eval_workflow_kwargs"])
def test_evaluation_samples_at_its_own_temperature(
    rl_config: Callable[..., RLConfig], keywords: dict[str, Any]
) -> None:
    """The generator reports logprobs of the distribution that it sampled from."""
    gconfig = {"n_samples": 4, "max_new_tokens": 4, "temperature": 1.5}
    evaluation = {"max_prompts": 8, "n_samples": 3, "temperature": 0.5}
    trainer = RLTrainer(rl_config(eval_data=HELD_OUT, evaluation=evaluation, gconfig=gconfig))
    with trainer.opened(**keywords):
        answers = held_out_answers(trainer, "")
        assert len(answers) == 24, "evaluation.n_samples answers a prompt"
        for tokens, prompt, logprobs in answers:
            scores = trainer.generator.prompt_logprobs(tokens, 0.5)
            assert logprobs == pytest.approx(scores[prompt - 1 :], abs=FIRST_RATIO_FP32)


def test_evaluation_depends_on_the_seed_of_the_run(rl_config: Callable[..., RLConfig]) -> None:
    """The weights do not: they have a seed of their own."""
    sampled, greedy = [], []
    for seed in (0, 0, 1):
        trainer = RLTrainer(rl_config(eval_data=HELD_OUT, evaluation={"max_prompts": 8}, seed=seed))
        with trainer.opened():
            sampled.append([tokens for tokens, *_ in held_out_answers(trainer, "")])
            greedy.append([tokens for tokens, *_ in held_out_answers(trainer, "greedy_")])
    assert sampled[0] == sampled[1] != sampled[2]
    assert greedy[0] == greedy[1] == greedy[2]


def test_a_long_evaluation_says_how_far_it_is(engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archon.rl.rollout.REPORT_SECONDS", 0.05)
    logged: list[str] = []
    reported = asyncio.Event()

    def log(line: str) -> None:
        logged.append(line)
        reported.set()

    class Waits(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            if workflow_context.get().task_id:
                await reported.wait()
            return trajectory_tensors([ModelResponse([3], [4], [-0.5], [0])], [1.0])

    asyncio.run(evaluate(Rollout(engine, Waits(), log=log), PROMPTS))
    assert logged[0] == "evaluation: 1 of 12 prompts"
