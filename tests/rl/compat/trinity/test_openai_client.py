"""A Trinity-style workflow that asks its model by the OpenAI SDK, over HTTP, and gets back what can be trained on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from archon.rl import Experience, Workflow
from archon.rl.rollout import Rollout
from archon.schema.errors import RolloutError
from tests.rl.test_rollout import prompts


class Agent(Workflow):
    """Two turns, each with what the model said before; the reward is the length of the last answer."""

    can_reset = True
    made = 0

    def __init__(self, *, task: Any, model: Any, auxiliary_models: Any = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = model.get_openai_client()
        type(self).made += 1

    def reset(self, task: Any) -> None:
        self.task = task

    def run(self) -> list[Experience]:
        messages: list[Any] = [{"role": "user", "content": "1+2="}]
        for _ in range(2):
            reply = self.client.chat.completions.create(model=self.client.model_path, messages=messages)
            answer = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "3"}]
        experiences = self.model.extract_experience_from_history()
        assert self.model.extract_experience_from_history() == []
        for experience in experiences:
            experience.reward = float(len(answer))
        return experiences


class AsyncAgent(Agent):
    """The same, awaited."""

    is_async = True

    def __init__(self, *, task: Any, model: Any, auxiliary_models: Any = None) -> None:
        Workflow.__init__(self, task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = model.get_openai_async_client()

    async def run_async(self) -> list[Experience]:
        reply = await self.client.chat.completions.create(
            model=self.client.model_path, messages=[{"role": "user", "content": "1+2="}], n=2
        )
        experiences = self.model.extract_experience_from_history()
        assert [e.response_text for e in experiences] == [choice.message.content for choice in reply.choices]
        for index, experience in enumerate(experiences):
            experience.reward = float(index)
        return experiences


@pytest.mark.parametrize("workflow", [Agent, AsyncAgent])
def test_what_clients_were_answered_is_trained_on(adapted, run_episode, engine, workflow) -> None:
    result, _ = run_episode(adapted(workflow, enable_openai_api=True))
    assert result is not None
    trained = result["loss_mask"] == 1
    assert trained.any(1).all()
    assert (result["logprobs"][trained] < 0).all()
    assert (result["versions"][trained] == engine.version).all()
    # The recorded logprobs are those of exactly these tokens behind exactly these prompts.
    for ids, mask, logprobs, attended in zip(
        *(result[name] for name in ("input_ids", "loss_mask", "logprobs", "attention_mask")), strict=True
    ):
        n = int(attended.sum())
        bounds = torch.tensor([0, n], dtype=torch.int32)
        with torch.no_grad():
            logits = engine.model(ids[:n], torch.arange(n), bounds, n)
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:n, None])[:, 0]
        where = mask[1:n] == 1
        torch.testing.assert_close(logprobs[1:n][where], expected[where], rtol=0, atol=1e-4)


def test_a_client_made_once_speaks_for_each_run_that_uses_it(adapted, engine) -> None:
    """A workflow that is used again keeps the client of its constructor."""
    Agent.made = 0
    workflow = adapted(Agent, enable_openai_api=True)
    rollout = Rollout(engine, workflow, log=lambda _: None)
    for step in range(3):
        episodes = asyncio.run(rollout.run([raw(p) for p in prompts(2)], step))
        assert all(episode.trajectories for episode in episodes), [episode.error for episode in episodes]
    assert Agent.made < 3 * 2 * workflow.gconfig.n_samples


def raw(prompt: Any) -> Any:
    return type(prompt)(prompt.index, {**prompt.row, "raw_task": prompt.row})


def test_without_an_endpoint_the_client_says_what_to_set(adapted, run_episode) -> None:
    with pytest.raises(RolloutError, match=r"this run has no OpenAI endpoint; set explorer\.rollout_model"):
        run_episode(adapted(Agent))
