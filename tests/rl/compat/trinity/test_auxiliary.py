"""Auxiliary models: a checkpoint that is served here, and an endpoint of others, reach the workflow."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.checkpoint.hf_io import load_model
from archon.rl import REWARD_FUNCTIONS, GenerationHyperparameters, RewardFn, TrinityWorkflow, Workflow
from archon.rl.compat.trinity.auxiliary import AuxiliaryConfig, with_thinking
from archon.rl.compat.trinity.ruler import parse_scores
from archon.rl.prompts import Prompt
from archon.rl.rewards import RewardInvalid
from archon.rl.rollout import Rollout
from archon.schema.errors import ConfigError, RolloutError
from archon.serve import AgentServer
from tests.rl.compat.trinity.checkpoints import write_judge
from tests.rl.compat.trinity.conftest import GCONFIG, ROW
from tests.serve.scripted import Scripted

KEYS = {"prompt_key": "question", "response_key": "answer"}
ASKED = [{"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge(tmp_path_factory.mktemp("judge"), "[1,0]")


def served(judge: Path, **changes: Any) -> dict[str, Any]:
    return {"model_path": str(judge), "dtype": "float32", "device": "cpu", "max_response_tokens": 8} | changes


@REWARD_FUNCTIONS.register_module("seven")
class Seven(RewardFn):
    def __call__(self, **_: Any) -> float:
        return 7.0


class AsksTheJudge(Workflow):
    """Its reward is what the auxiliary model said, read by the SDK; what that model is for is checked on the way."""

    can_reset = True
    made = 0

    def __init__(self, *, task: Any, model: Any, auxiliary_models: Any = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        type(self).made += 1

    def run(self) -> list[Any]:
        (judge,), (wrapper,) = self.auxiliary_models, self.auxiliary_model_wrappers
        said = judge.chat.completions.create(model=judge.model_path, messages=ASKED).choices[0].message.content
        (same,) = wrapper.chat(ASKED, temperature=0)
        assert same.response_text == said == "[1,0]"
        (answer,) = self.model.chat(ASKED)
        answer.reward = float(said.strip("[]").split(",")[0])
        return [answer]


class AsyncAsksTheJudge(AsksTheJudge):
    is_async = True

    async def run_async(self) -> list[Any]:
        (judge,) = self.auxiliary_models
        said = await judge.chat.completions.create(model=judge.model_path, messages=ASKED)
        (answer,) = await self.model.chat_async(ASKED)
        answer.reward = float(said.choices[0].message.content == "[1,0]")
        return [answer]


@pytest.mark.parametrize("workflow", [AsksTheJudge, AsyncAsksTheJudge])
def test_a_checkpoint_that_is_served_here_answers_every_step_of_a_run(adapted, engine, judge, workflow) -> None:
    workflow.made = 0
    made = adapted(workflow, auxiliary_models=[served(judge)], gconfig=GCONFIG.new(n_samples=2))
    rollout = Rollout(engine, made, log=lambda _: None)

    async def steps() -> list[Any]:  # the endpoint is closed after each
        return [await rollout.run([Prompt(0, ROW)], step) for step in range(2)]

    for (episode,) in asyncio.run(steps()):
        assert episode.error is None and episode.rewards.tolist() == [1.0, 1.0]
    assert workflow.made == 1  # it was reset


def test_its_logprobs_are_those_of_its_weights(judge: Path, adapted, run_episode) -> None:
    ids = [5, 6, 7, 8]
    seen: list[torch.Tensor] = []

    class Scores(Workflow):
        def run(self) -> list[Any]:
            seen.append(self.auxiliary_model_wrappers[0].logprobs(torch.tensor(ids)))
            seen.append(self.model.logprobs(ids, temperature=2.0))
            (answer,) = self.model.chat(ASKED)
            answer.reward = 1.0
            # Of an answer they are the logprobs it was sampled with.
            scored = self.model.logprobs(answer.tokens)[answer.prompt_length - 1 :]
            torch.testing.assert_close(scored, answer.logprobs, rtol=0, atol=1e-4)
            return [answer]

    gconfig = GCONFIG.new(n_samples=1, temperature=0.7)
    run_episode(adapted(Scores, auxiliary_models=[served(judge)], gconfig=gconfig))
    model, tokens = load_model(judge, device="cpu", dtype=torch.float32), torch.tensor(ids)
    with torch.no_grad():
        logits = model(tokens, torch.arange(4), torch.tensor([0, 4], dtype=torch.int32), 4)
    expected = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=1e-4)
    assert seen[1].shape == (3,) and (seen[1] < 0).all()


@pytest.mark.parametrize("ids", [[1], [1, 10**6], [-1, 2], list(range(5)) * 100])
def test_logprobs_of_tokens_that_cannot_be_read_are_refused(engine, ids: list[int]) -> None:
    with pytest.raises(RolloutError, match=rf"logprobs of {len(ids)} tokens; expected 2 to 160 ids from 0 to"):
        engine.prompt_logprobs(ids)


def test_an_endpoint_of_others_scores_the_answers_in_their_order(adapted, engine, tokenizer) -> None:
    """RULER: the judge, behind a real server, is asked once a group; the task's own reward is recorded."""
    told = Scripted(tokenizer, ["First 2 is right. [0.25, 1.5]", "I cannot say."])

    async def episodes() -> Any:
        server = AgentServer(tokenizer, told, GenerationHyperparameters(), token="key")  # type: ignore[arg-type]
        url = await server.start()
        try:
            workflow = adapted(
                "math_ruler_workflow",
                reward="seven",
                format_args=KEYS,
                gconfig=GCONFIG.new(n_samples=2),
                auxiliary_models=[{"base_url": url, "name": "judge", "api_key": "key"}],
            )
            rollout = Rollout(engine, workflow, log=lambda _: None)
            return await rollout.run([Prompt(0, ROW), Prompt(1, ROW)])
        finally:
            await server.close()

    runs = sorted(asyncio.run(episodes()), key=lambda episode: episode.error is not None)
    assert runs[0].rewards.tolist() == [0.25, 1.0]
    assert runs[0].context.numbers["gold_reward"] == [7.0, 7.0]
    assert isinstance(runs[1].error, RewardInvalid) and "I cannot say." in str(runs[1].error)
    asked = tokenizer.decode(told.requests[0].input_ids)
    assert "Question:\n1+1=" in asked and "Answer 2:" in asked and len(told.requests) == 2


@pytest.mark.parametrize(
    ("verdict", "scores"),
    [("[1, 0]", [1.0, 0.0]), ("[9] so [0.5,-2]", [0.5, 0.0]), ("a [0.1,\n 0.2] b", [0.1, 0.2])],
)
def test_a_verdict_is_its_last_list(verdict: str, scores: list[float]) -> None:
    assert parse_scores(verdict, 2) == scores


@pytest.mark.parametrize("verdict", ["", "1, 0", "[1]", "[1, 0, 1]", "[a, b]", "[[1], [0]]", "[NaN, 1]", '["x", 1]'])
def test_a_verdict_without_a_number_for_each_answer_is_none(verdict: str) -> None:
    with pytest.raises(RewardInvalid, match="expected a list of 2 numbers"):
        parse_scores(verdict, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "name a checkpoint"),
        ({"base_url": "http://x/v1"}, "base_url needs the model's name"),
        ({"model_path": "x", "temperatur": 1}, "did you mean 'temperature'"),
    ],
)
def test_an_auxiliary_model_that_is_not_named_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AuxiliaryConfig.parse(given)


def test_thinking_is_what_the_run_says_whatever_a_request_asks_for(tokenizer: Any) -> None:
    switched = copy.copy(tokenizer)
    switched.chat_template = "{% if enable_thinking is defined and not enable_thinking %}quick{% else %}slow{% endif %}"
    asked = {"tokenize": False, "enable_thinking": True}
    assert with_thinking(switched, None) is switched
    for enabled, said in ((False, "quick"), (True, "slow")):
        assert with_thinking(switched, enabled).apply_chat_template(ASKED, **asked) == said
    assert switched.apply_chat_template(ASKED, **asked) == "slow"  # it is left as it was


def test_ruler_needs_a_judge(adapted, run_episode) -> None:
    with pytest.raises(ConfigError, match=r"needs a judge: name one in explorer\.auxiliary_models"):
        run_episode(adapted("math_ruler_workflow", format_args=KEYS))


def test_an_endpoint_of_others_has_clients_only(tokenizer: Any, engine, run_episode) -> None:
    class Chats(Workflow):
        def run(self) -> list[Any]:
            return self.auxiliary_model_wrappers[0].chat(ASKED)  # type: ignore[no-any-return]

    auxiliary = [{"base_url": "http://127.0.0.1:9/v1", "name": "judge"}]
    workflow = TrinityWorkflow(Chats, GCONFIG, tokenizer, reward_fn="exact_match", auxiliary_models=auxiliary)
    with pytest.raises(RolloutError, match=r"judge is an external endpoint; call it by get_openai_client"):
        run_episode(workflow)
