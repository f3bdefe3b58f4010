"""MultiTurnWorkflow through the real generator: token space, turns, discounts, limits."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from archon.data.encoding import next_turn_ids
from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest, ModelResponse
from archon.rl import MultiTurnWorkflow
from archon.rl.bootstrap import make_tokenizer
from archon.rl.episode_context import EpisodeContext, EpisodeEngine, workflow_context
from archon.rl.trajectories import validate_trajectory
from archon.rl.workflows import resolve_workflow
from archon.schema.errors import ConfigError, ContextOverflowError
from archon.training.config import TokenizerRecipe
from tests.rl import rewards_for_tests as rewards

ROW = {"messages": [{"role": "user", "content": "12+34="}], "prompt": "12+34=", "answer": "46"}
GCONFIG = GenerationHyperparameters(n_samples=24, max_new_tokens=12)


class Recorder(EpisodeEngine):
    """Keeps what was asked and answered."""

    def __init__(self, engine: InProcessEngine, context: EpisodeContext) -> None:
        super().__init__(engine, context)
        self.answers: list[ModelResponse] = []
        self.seeds: list[int | None] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.seeds.append(req.gconfig.seed)
        self.answers.append(await super().agenerate(req))
        return self.answers[-1]


def converse(
    engine: InProcessEngine, workflow: MultiTurnWorkflow, row: dict[str, Any] = ROW, recorder: type[Recorder] = Recorder
) -> tuple[dict[str, torch.Tensor], EpisodeContext, list[ModelResponse]]:
    result, context, recording = recorded(engine, workflow, row, recorder)
    return result, context, recording.answers


def recorded(
    engine: InProcessEngine, workflow: MultiTurnWorkflow, row: dict[str, Any] = ROW, recorder: type[Recorder] = Recorder
) -> tuple[dict[str, torch.Tensor], EpisodeContext, Recorder]:
    context = EpisodeContext(seed=3)
    recording = recorder(engine, context)

    async def episode() -> dict[str, torch.Tensor] | None:
        workflow_context.enter(context)
        return await workflow.arun_episode(recording, row)

    result = asyncio.run(episode())
    assert result is not None
    return validate_trajectory(result), context, recording


def test_multi_turn_tokens_are_never_decoded_and_re_encoded(engine: InProcessEngine, tokenizer: Any) -> None:
    """Each trajectory is the prompt, and then answer, message, answer, as the engine saw and gave them."""
    workflow = MultiTurnWorkflow(rewards.half, GCONFIG, tokenizer, max_turns=3, retry="0+0=")
    result, context, answers = converse(engine, workflow)
    asked = {tuple(answer.input_tokens + answer.output_tokens) for answer in answers}
    for row in range(24):
        ids = result["input_ids"][row][result["attention_mask"][row]].tolist()
        assert tuple(ids) in asked  # its last request and answer are all of it
        turns = result["turn_ids"][row][result["attention_mask"][row]]
        trained = result["loss_mask"][row][result["attention_mask"][row]] == 1
        assert (turns >= 0).equal(trained)
        for turn in range(int(turns.max()) + 1):
            place = (turns == turn).nonzero().flatten()
            prompt, answer = tuple(ids[: place[0]]), [ids[i] for i in place]
            of_engine = [a for a in answers if tuple(a.input_tokens) == prompt and a.output_tokens == answer]
            assert of_engine, (row, turn)
            logprobs = result["logprobs"][row][place].tolist()
            assert any(logprobs == pytest.approx(a.output_logprobs, abs=0, rel=1e-6) for a in of_engine)
    assert sorted(context.numbers["turns"]) != [1.0] * 24


def test_a_conversation_ends_when_the_reward_is_enough(engine: InProcessEngine, tokenizer: Any) -> None:
    workflow = MultiTurnWorkflow(rewards.half, GCONFIG, tokenizer, max_turns=3, reward_threshold=0.5)
    result, context, answers = converse(engine, workflow)
    assert len(answers) == 24 and context.numbers["turns"] == [1.0] * 24
    assert result["rewards"].tolist() == [0.5] * 24


def test_each_further_turn_discounts_the_reward(engine: InProcessEngine, tokenizer: Any) -> None:
    workflow = MultiTurnWorkflow(rewards.half, GCONFIG, tokenizer, max_turns=3, turn_discount=0.5, retry="0+0=")
    result, context, _ = converse(engine, workflow)
    turns = result["turn_ids"].amax(1) + 1
    assert len(turns.unique()) > 1  # one that reached its limit of length ended there
    assert result["rewards"].equal(0.5 * 0.5 ** (turns - 1))
    assert sorted(context.numbers["turns"]) == sorted(turns.double().tolist())


def test_the_same_seed_gives_the_same_conversations(engine: InProcessEngine, tokenizer: Any) -> None:
    workflow = MultiTurnWorkflow(rewards.half, GCONFIG, tokenizer, retry="0+0=")
    first, second = converse(engine, workflow)[0], converse(engine, workflow)[0]
    assert first["input_ids"].equal(second["input_ids"])


def test_every_turn_of_every_conversation_draws_from_a_random_stream_of_its_own(
    engine: InProcessEngine, tokenizer: Any
) -> None:
    """With one stream for all turns, a model that has not learnt to look at its prompt would say the same again."""
    workflow = MultiTurnWorkflow(rewards.half, GCONFIG, tokenizer, max_turns=3, retry="0+0=")
    _, context, recording = recorded(engine, workflow)
    assert None not in recording.seeds
    assert len({*recording.seeds}) == len(recording.seeds) == sum(context.numbers["turns"]) > 24


class SamePrompt(Recorder):
    """The real generator, asked in every turn for an answer to the first turn's prompt."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        asked = req.input_ids
        response = await super().agenerate(replace(req, input_ids=asked[: len(ROW["prompt"])]))
        return replace(response, input_tokens=asked)


def test_a_later_turn_is_not_the_first_one_again(engine: InProcessEngine, tokenizer: Any) -> None:
    workflow = MultiTurnWorkflow(rewards.half, GCONFIG, tokenizer, max_turns=2, retry="0+0=")
    result, _, _ = recorded(engine, workflow, recorder=SamePrompt)
    turns = [
        [ids[places == turn].tolist() for turn in (0, 1)]
        for ids, places in zip(result["input_ids"], result["turn_ids"], strict=True)
        if places.max() == 1
    ]
    assert len(turns) > 8
    assert sum(first == second for first, second in turns) < len(turns) / 4


def test_context_overflow_ends_a_conversation_and_keeps_it(engine: InProcessEngine, tokenizer: Any) -> None:
    """The next turn does not fit: the conversation keeps the reward it has, and says that it was cut."""
    limit = GCONFIG.new(max_new_tokens=4, max_tokens=12)
    workflow = MultiTurnWorkflow(rewards.half, limit, tokenizer, max_turns=9, retry="0+0=")
    result, context, _ = converse(engine, workflow)
    assert not context.drops
    assert result["truncated"].all()
    assert result["input_ids"].shape[1] <= 12


def test_context_overflow_of_the_prompt_fails_the_episode(engine: InProcessEngine, tokenizer: Any) -> None:
    workflow = MultiTurnWorkflow(rewards.half, GCONFIG.new(max_tokens=6), tokenizer)
    with pytest.raises(ContextOverflowError, match="the prompt of 6 tokens leaves no room for an answer within 6"):
        converse(engine, workflow)


def test_rewards_that_fail_cost_their_conversation(engine: InProcessEngine, tokenizer: Any) -> None:
    workflow = MultiTurnWorkflow(rewards.raise_on_even_length, GCONFIG, tokenizer, reward_threshold=0.0)
    result, context, _ = converse(engine, workflow)
    assert 0 < context.drops["reward_raised"] < 24
    assert len(result["rewards"]) == 24 - context.drops["reward_raised"]


@pytest.mark.parametrize("template", ["plain", "chatml"])
def test_the_next_turn_is_what_the_chat_template_would_write(template: Any) -> None:
    """Answer and message in token space equal the whole conversation rendered and tokenised at once."""
    tokenizer = make_tokenizer(
        TokenizerRecipe(kind="characters", alphabet="0123456789+= usertainolm\nh", chat_template=template)
    )
    talk = [{"role": "user", "content": "1+1="}]
    answer = [*tokenizer("3").input_ids, tokenizer.eos_token_id]
    message = {"role": "user", "content": "2+2="}
    prompt = tokenizer(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)).input_ids
    ours = prompt + answer + next_turn_ids(tokenizer, message, answer)
    whole = [*talk, {"role": "assistant", "content": "3"}, message]
    theirs = tokenizer(tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)).input_ids
    if template == "plain":  # which writes no end of a turn; the model said one
        ours = [i for i in ours if i != tokenizer.eos_token_id]
        theirs = [i for i in theirs if i != tokenizer.eos_token_id]
    assert ours == theirs


class AnswersToOthers(Recorder):
    """The real generator; every other answer of a second turn comes back as one to fewer tokens."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        response = await super().agenerate(req)
        if sum(map(is_second, self.answers)) % 2 == 0 or not is_second(response):
            return response
        return replace(response, input_tokens=response.input_tokens[1:])


def is_second(response: ModelResponse) -> bool:
    return len(response.input_tokens) > len(ROW["prompt"])


def test_an_answer_to_other_tokens_is_refused(engine: InProcessEngine, tokenizer: Any) -> None:
    """It would be trained behind a prompt that it never saw. It costs its conversation, and is counted."""
    workflow = MultiTurnWorkflow(rewards.half, GCONFIG, tokenizer, retry="0+0=")
    result, context, answers = converse(engine, workflow, recorder=AnswersToOthers)
    second = sum(map(is_second, answers))
    refused = (second + 1) // 2
    assert context.drops == {"other_prompt": refused} and refused > 4
    message = str(context.first_errors["other_prompt"])
    expected = r"turn 1: the engine answered a prompt of \d+ tokens; expected the \d+ tokens of this trajectory so far"
    assert re.fullmatch(expected, message)
    assert len(result["rewards"]) == 24 - refused
    assert (result["turn_ids"].amax(1) == 1).sum() == second - refused


def test_arguments_come_from_the_configuration(tokenizer: Any) -> None:
    offered = {"reward_fn": rewards.half, "gconfig": GCONFIG, "tokenizer": tokenizer}
    workflow = resolve_workflow("archon.rl.MultiTurnWorkflow", {"max_turns": 5}, **offered)
    assert isinstance(workflow, MultiTurnWorkflow) and workflow.max_turns == 5
    with pytest.raises(ConfigError, match="MultiTurnWorkflow has no argument 'max_turn', did you mean 'max_turns'"):
        resolve_workflow("archon.rl.MultiTurnWorkflow", {"max_turn": 5}, **offered)
    with pytest.raises(ConfigError, match=r"max_turns = 0 must be at least 1, and turn_discount = 1 in \(0, 1\]"):
        resolve_workflow("archon.rl.MultiTurnWorkflow", {"max_turns": 0}, **offered)
