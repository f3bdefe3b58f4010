"""An agent of a public framework, Pydantic AI, that reasons and calls a tool: asked of a real model, and trained on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest, ModelResponse
from archon.rl.bootstrap import make_tokenizer
from archon.rl.prompts import Prompt
from archon.rl.rollout import Rollout
from archon.rl.workflows.agent import AgentWorkflow
from archon.training.config import TokenizerRecipe
from tests.serve.scripted import Scripted
from tests.serve.taught import teach
from tests.small_qwen3 import small_model

WEATHER = {"Rome": "sunny", "Oslo": "snowy"}
SAYS = {
    city: [
        f'I should look.\n<tool_call>\n{{"name": "weather", "arguments": {{"place": "{city}"}}}}\n</tool_call>',
        f"In {city} it is {weather}.",
    ]
    for city, weather in WEATHER.items()
}
SURE = 0.99  # probability of each token that is learnt; greedy answers want no more than 0.5
ROWS = [{"city": city, "question": f"How is the weather in {city}?"} for city in WEATHER]


class Forecaster:
    """The framework's loop: ask, call what is called for, ask again. The reward is 1 for the right weather."""

    def __init__(self) -> None:
        self.looked_up: list[str] = []

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **given: Any) -> float:
        provider = OpenAIProvider(base_url=base_url, api_key=api_key, http_client=http_client)
        agent = Agent(OpenAIChatModel("archon", provider=provider), instructions="Use the tool.")

        @agent.tool_plain
        def weather(place: str) -> str:
            """What the weather is like in a place."""
            self.looked_up.append(place)
            return WEATHER[place]

        answer = await agent.run(data["question"])
        return float(WEATHER[data["city"]] in answer.output)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(
        TokenizerRecipe(kind="bpe", vocab_size=400), [said for talk in SAYS.values() for said in talk]
    )


class Keeps(InProcessEngine):
    """The real generator; keeps what it answered."""

    answered: list[ModelResponse]

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        response = await super().agenerate(req)
        self.answered.append(response)
        return response


def asked(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer, in tokens, of every call of conversations that go as they should."""
    pairs = []
    for row in ROWS:
        scripted = Scripted(tokenizer, SAYS[row["city"]])
        workflow = AgentWorkflow(Forecaster(), GenerationHyperparameters(), tokenizer)
        asyncio.run(workflow.arun_episode(scripted, row))
        answers = [[*tokenizer(said).input_ids, tokenizer.eos_token_id] for said in SAYS[row["city"]]]
        pairs += list(zip([request.input_ids for request in scripted.requests], answers, strict=True))
    return pairs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.httpx.AsyncClient. support for:UserWarning")
def test_a_published_framework_calls_a_tool_and_its_answers_alone_are_trained(tokenizer: Any) -> None:
    pairs = asked(tokenizer)
    model = small_model(len(tokenizer), max_seq_len=1024)
    teach(model, pairs, SURE)
    engine = Keeps.from_model(model, tokenizer, max_slots=8)
    assert isinstance(engine, Keeps)
    engine.answered = []
    agent = Forecaster()
    workflow = AgentWorkflow(agent, GenerationHyperparameters(n_samples=2, max_new_tokens=100, greedy=True), tokenizer)
    rollout = Rollout(engine, workflow)
    prompts = [Prompt(index, row) for index, row in enumerate(ROWS)]

    batch = asyncio.run(rollout.collect(lambda n: prompts[:n], len(prompts), 0))

    assert sorted(agent.looked_up) == ["Oslo", "Oslo", "Rome", "Rome"]
    rows = batch.trajectories
    assert rows["rewards"].tolist() == [1.0] * 4 and rows["group_ids"].tolist() == [0, 0, 1, 1]
    assert batch.numbers["agent_answers"] == 2.0 and batch.numbers["agent_answers_unrewarded"] == 0.0
    for row, trained in enumerate(rows["loss_mask"] == 1):
        city = ROWS[row // 2]["city"]
        (first_prompt, first), (second_prompt, second) = pairs[2 * (row // 2) : 2 * (row // 2) + 2]
        whole = second_prompt + second
        assert rows["input_ids"][row][rows["attention_mask"][row]].tolist() == whole
        assert rows["input_ids"][row][trained].tolist() == first + second
        assert tokenizer.decode(first, skip_special_tokens=True) == SAYS[city][0]
        between = len(whole) - len(first_prompt) - len(first) - len(second)  # what the tool said, and the template
        turns = [-1] * len(first_prompt) + [0] * len(first) + [-1] * between + [1] * len(second)
        assert rows["turn_ids"][row][: len(whole)].tolist() == turns
        told = next(a for a in engine.answered if a.input_tokens == first_prompt)
        assert told.output_tokens == first
        assert rows["versions"][row][trained].unique().tolist() == [0]
    sampled = sorted(logprob for answer in engine.answered for logprob in answer.output_logprobs)
    torch.testing.assert_close(rows["logprobs"][rows["loss_mask"] == 1].sort().values, torch.tensor(sampled))
