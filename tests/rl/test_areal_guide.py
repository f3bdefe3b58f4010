"""AReaL's guides, with only their imports changed: what their workflows return, call and change, through the real
generator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
import torch

from archon.checkpoint.tokenizer import load_tokenizer
from archon.generation import InProcessEngine
from archon.generation.record import TokenRecord
from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelResponse
from archon.rl import AsyncRewardWrapper, RLTrainer, RLVRWorkflow, RolloutWorkflow
from archon.rl import InteractionWithTokenLogpReward as Interaction
from archon.rl.config import RLConfig
from archon.rl.episode_context import workflow_context
from archon.rl.prompts import Prompt
from archon.rl.rollout import Rollout
from archon.rl.trajectories import add_temperatures, trajectory_tensors
from archon.rl.workflows.short_forms import expand_short_form
from archon.schema.errors import RolloutError
from archon.training.metrics import read_jsonl
from tests.rl import areal_guide as guide
from tests.rl import rewards_for_tests as rewards
from tests.rl.test_rollout import prompts

GCONFIG = GenerationHyperparameters(n_samples=4, max_new_tokens=4)
GUIDES = [guide.OneAnswer, guide.TwoTexts, guide.OwnNames, guide.Retries]


@pytest.fixture(scope="module")
def tokenizer(blank: Path) -> Any:
    """As a run loads it."""
    return load_tokenizer(blank)


@pytest.fixture(scope="module")
def score() -> Iterator[AsyncRewardWrapper]:
    with AsyncRewardWrapper(rewards.count_digits, max_workers=1) as wrapper:
        yield wrapper


def run(engine: InProcessEngine, workflow: RolloutWorkflow, n: int = 2, **options: Any) -> tuple[list[Any], list[str]]:
    """Episodes of n prompts, and what was said."""
    log: list[str] = []
    return asyncio.run(Rollout(engine, workflow, log=log.append, **options).run(prompts(n))), log


def failure(engine: InProcessEngine, workflow: RolloutWorkflow) -> str:
    """Of the only episode."""
    (episode,), _ = run(engine, workflow, 1)
    assert isinstance(episode.error, RolloutError), episode
    return str(episode.error)


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workflow", GUIDES)
def test_a_guides_workflow_runs_and_makes_whole_groups(
    engine: InProcessEngine, tokenizer: Any, score: AsyncRewardWrapper, workflow: Any
) -> None:
    made = workflow(GCONFIG, tokenizer, guide.digits if workflow is guide.OwnNames else score)
    episodes, log = run(engine, made)
    for episode in episodes:
        assert episode.error is None and not episode.context.drops
        group = episode.trajectories
        assert len(episode.rewards) == len(group["rewards"]) == 4
        assert (group["logprobs"][group["loss_mask"] == 1] < 0).all()
        trained = [ids[mask == 1].tolist() for ids, mask in zip(group["input_ids"], group["loss_mask"], strict=True)]
        assert len(set(map(tuple, trained))) > 1
        if workflow is not guide.Retries:
            texts = tokenizer.batch_decode(trained)
            found = guide.digits if workflow is guide.OwnNames else lambda text, _: sum(c.isdigit() for c in text)
            assert group["rewards"].tolist() == [found(text, "0") for text in texts]
    name = workflow.__name__
    assert log == [
        line for line in log if line.startswith(f"{name} returned one trajectory, so each prompt is run 4 times")
    ]
    assert len(log) == 1


def test_what_is_repeated_does_not_depend_on_when(
    engine: InProcessEngine, tokenizer: Any, score: AsyncRewardWrapper
) -> None:
    """After the first, or all at once as the class asks: the same answers."""

    class AtOnce(guide.OneAnswer):
        returns_group = False

    (one, _), (other, log) = (run(engine, kind(GCONFIG, tokenizer, score)) for kind in (guide.OneAnswer, AtOnce))
    assert log == []
    for a, b in zip(one, other, strict=True):
        assert a.trajectories["input_ids"].equal(b.trajectories["input_ids"])


def test_each_run_has_its_own_number_seed_and_row(engine: InProcessEngine, tokenizer: Any) -> None:
    seen = []

    class Looks(guide.OneAnswer):
        returns_group = False

        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            context = workflow_context.get()
            seen.append((context.sample_index, context.seed, len(data["messages"])))
            data["messages"] += data["messages"]
            return self.result(await self.ask(engine, data["messages"][:1]), float(context.sample_index or 0))

    (episode,), _ = run(engine, Looks(GCONFIG, tokenizer, rewards.constant), 1)
    seed = episode.context.seed
    assert seen == [(i, derive_seed(seed, i, 0) if i else seed, 1) for i in range(4)]
    assert episode.trajectories["rewards"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_what_a_workflow_counts_as_dropped_does_not_make_a_group_of_its_answer(
    engine: InProcessEngine, tokenizer: Any
) -> None:
    class Counts(guide.OneAnswer):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            workflow_context.drop("tool", TimeoutError("no answer"))
            return await super().arun_episode(engine, data)

    (episode,), _ = run(engine, Counts(GCONFIG, tokenizer, rewards.constant), 1)
    assert len(episode.rewards) == 4 and episode.context.drops["tool"] == 4


def test_one_of_several_runs_returns_one_trajectory(engine: InProcessEngine, tokenizer: Any) -> None:
    class Two(guide.OneAnswer):
        returns_group = False

        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            return [await super(Two, self).arun_episode(engine, data) for _ in range(2)]

    said = failure(engine, Two(GCONFIG, tokenizer, rewards.constant))
    assert "Two: one of several runs for a prompt returned several trajectories; return one, or set" in said


def test_a_run_that_fails_or_rejects_costs_its_sample_and_is_counted(engine: InProcessEngine, tokenizer: Any) -> None:
    class Sometimes(guide.OneAnswer):
        returns_group = False

        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            if workflow_context.get().sample_index == 1:
                return None
            return await super().arun_episode(engine, data)

    with AsyncRewardWrapper(rewards.raise_on_even_length, max_workers=1) as reward:
        episodes, _ = run(engine, Sometimes(GCONFIG, tokenizer, reward), 8)
    lost = [episode.context.drops["reward_raised"] for episode in episodes]
    assert 0 < sum(lost) < 24
    for episode, n in zip(episodes, lost, strict=True):
        assert episode.context.drops["rejected_run"] == 1
        assert (len(episode.rewards) == 3 - n) if n < 3 else episode.error is not None


def test_runs_with_and_without_temperatures_make_one_group(engine: InProcessEngine, tokenizer: Any) -> None:
    class OneWarmer(guide.OneAnswer):
        returns_group = False

        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            temperature = 0.5 if workflow_context.get().sample_index == 1 else 1.0
            record = TokenRecord.from_response(await self.ask(engine, data["messages"]), temperature)
            return add_temperatures(trajectory_tensors([record], [0.0]), [record], 1.0)

    (episode,), _ = run(engine, OneWarmer(GCONFIG, tokenizer, rewards.constant), 1)
    assert episode.error is None and episode.trajectories is not None
    expected = 0.5 * episode.trajectories["loss_mask"]
    expected[[0, 2, 3]] = 0.0
    assert episode.trajectories["temperatures"].tolist() == expected.tolist()


def test_an_evaluation_repeats_as_often_as_its_own_values_say(
    engine: InProcessEngine, tokenizer: Any, score: AsyncRewardWrapper
) -> None:
    trained = guide.OneAnswer(GCONFIG, tokenizer, score)
    greedy = trained.with_gconfig(trained.gconfig.new(n_samples=1, greedy=True))
    (episode,), _ = run(engine, greedy, 1)
    assert len(episode.rewards) == 1


@pytest.mark.parametrize(
    ("groups_of", "told"),
    [
        (None, "returned one trajectory, so each prompt is run 4 times"),
        (True, "each group is one trajectory with advantage 0"),
    ],
)
def test_a_run_learns_from_single_answers_or_says_that_it_cannot(
    rl_config: Callable[..., RLConfig], capsys: pytest.CaptureFixture[str], groups_of: bool | None, told: str
) -> None:
    class Guide(guide.OneAnswer):
        returns_group = groups_of

    config = rl_config(total_steps=1)
    metrics = RLTrainer(config).train(Guide)
    assert told in capsys.readouterr().out
    (step,) = [row for row in read_jsonl(Path(config.run_dir) / "metrics.jsonl") if row["step"] == 1]
    assert step["group_size"] == (1.0 if groups_of else 4.0)
    assert (metrics["grad_norm"] > 0) is not groups_of


# -- the short form ---------------------------------------------------------------------------------------------------


def returning(change: Callable[[Any, float], Any], score: Any, tokenizer: Any) -> RolloutWorkflow:
    """A workflow with another result of one answer; it is its whole group."""

    class Changed(guide.OneAnswer):
        returns_group = True

        def result(self, response: Any, reward: float) -> Any:
            return change(response, reward)

    return Changed(GCONFIG, tokenizer, score)


def short(response: Any, reward: Any) -> dict[str, Any]:
    return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": reward}


def test_equal_answers_of_a_short_form_keep_what_was_recorded_of_each() -> None:
    answers = [
        ModelResponse(input_tokens=[3], output_tokens=[4], output_logprobs=[-0.5 - n], output_versions=[n])
        for n in range(2)
    ]
    group = expand_short_form([short(answer, 0.0) for answer in answers], answers, "Twice")
    assert group["versions"][:, 1].tolist() == [0, 1] and group["logprobs"][:, 1].tolist() == [-0.5, -1.5]


@pytest.mark.parametrize(
    "change",
    [
        short,
        lambda response, reward: [short(response, reward)],
        lambda response, reward: {name: torch.tensor([value]) for name, value in short(response, reward).items()},
        lambda response, reward: short(response, reward) | {"reward": torch.tensor([reward])},
        lambda response, reward: {"id": Interaction(model_response=response, reward=reward)},
    ],
)
def test_every_shape_of_the_short_form_is_the_whole_form(
    engine: InProcessEngine, tokenizer: Any, score: AsyncRewardWrapper, change: Any
) -> None:
    kept = []

    def whole(response: Any, reward: float) -> Any:
        kept.append(response)
        return change(response, reward)

    (episode,), log = run(engine, returning(whole, score, tokenizer), 1)
    (response,), group = kept, episode.trajectories
    assert log == []
    n = len(response.input_tokens)
    assert group["input_ids"].tolist() == [response.input_tokens + response.output_tokens]
    assert group["loss_mask"].tolist() == [[0] * n + [1] * response.output_len]
    assert group["logprobs"][0, n:].equal(torch.tensor(response.output_logprobs))
    assert group["versions"].tolist() == [[-1] * n + response.output_versions]
    assert group["truncated"].tolist() == [response.stop_reason == "length"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r, _: {"input_ids": r.input_tokens, "output_ids": r.output_tokens}, "lacks key 'reward' of the short"),
        (lambda r, x: short(r, x) | {"output_ids": [*r.output_tokens, 3]}, "answers in this episode, 1 of them to the"),
        (lambda r, x: short(r, x) | {"input_ids": r.input_tokens[1:]}, "1 answers in this episode, 0 of them to the"),
        (
            lambda r, x: short(r, x) | {"output_ids": torch.zeros(2, 3)},
            r"'output_ids' is torch.float32 of shape \(2, 3",
        ),
        (lambda r, x: short(r, x) | {"input_ids": "1+1="}, "'input_ids' is a str, expected a tensor of integers"),
        (lambda r, x: short(r, {"a": x}), "'reward' is .*, expected one number"),
        (lambda r, x: {"a": Interaction(reward=x)}, "the interaction has no model_response"),
        (lambda r, x: [short(r, x), {"reward": x}], "row 1 lacks key 'input_ids' of the short form; it has"),
        (
            lambda r, x: {"a": Interaction(model_response=r)},
            "none of the 1 interactions has a reward",
        ),
        (
            lambda r, x: {"a": Interaction(model_response=r, reward=x), "b": 3},
            "'b' is a int, expected an Interaction",
        ),
    ],
)
def test_what_a_short_form_lacks_is_named(
    engine: InProcessEngine, tokenizer: Any, score: AsyncRewardWrapper, change: Any, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failure(engine, returning(change, score, tokenizer)))


def test_an_episode_never_borrows_the_answers_of_another(
    engine: InProcessEngine, tokenizer: Any, score: AsyncRewardWrapper
) -> None:
    """Both run at once, over one generator; the second returns what the first was answered."""
    answers: list[Any] = []

    def first_answer(response: Any, reward: float) -> Any:
        answers.append(response)
        return short(answers[0], reward)

    episodes, _ = run(engine, returning(first_answer, score, tokenizer), 2)
    assert sorted(episode.error is None for episode in episodes) == [False, True]
    assert "the logprobs of the" in str(next(e.error for e in episodes if e.error))


def test_several_rows_are_a_group_and_the_parts_of_an_interaction_are_one_trajectory(
    engine: InProcessEngine, tokenizer: Any
) -> None:
    class Asks(guide.OneAnswer):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            answers = [await self.ask(engine, data["messages"]) for _ in range(3)]
            if self.returns_group is None:
                return [short(answer, float(i)) for i, answer in enumerate(answers)]
            parts = [Interaction(model_response=answer, reward=float(i)) for i, answer in enumerate(answers)]
            return {str(i): part for i, part in enumerate(parts)} | {"unknown": Interaction(model_response=answers[0])}

    earned = []
    for declared in (None, True, False):
        kind = type("Declared", (Asks,), {"returns_group": declared})
        (episode,), _ = run(engine, kind(GCONFIG, tokenizer, rewards.constant), 1)
        earned.append(episode.rewards.tolist())
    assert earned == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [1.0] * 4]  # each run's mean


# -- rows -------------------------------------------------------------------------------------------------------------


def test_a_workflow_changes_its_own_copy_of_a_row_and_no_tensor_is_copied(
    engine: InProcessEngine, tokenizer: Any
) -> None:
    shared, seen = torch.zeros(3), []
    row = {"messages": [{"role": "user", "content": "1+1="}], "deep": [{"a": ({1}, [2])}], "image": shared}

    class Changes(guide.OneAnswer):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            seen.append((data["image"] is shared, len(data["messages"]), len(data["deep"][0]["a"][1])))
            response = await self.ask(engine, data["messages"])
            data["messages"] += [{"role": "assistant", "content": "2"}]
            data["deep"][0]["a"][0].clear()
            data["deep"][0]["a"][1].append(3)
            del data["image"]
            return self.result(response, 1.0)

    rollout = Rollout(engine, Changes(GCONFIG, tokenizer, rewards.constant), log=lambda _: None)
    asyncio.run(rollout.run([Prompt(0, row), Prompt(1, row)]))
    assert seen == [(True, 1, 1)] * 8
    assert row["deep"] == [{"a": ({1}, [2])}] and row["image"] is shared and len(row["messages"]) == 1


def test_a_rows_columns_named_like_an_argument_are_there_and_do_not_collide(
    engine: InProcessEngine, tokenizer: Any
) -> None:
    seen = []

    class Looks(guide.OneAnswer):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            seen.append((data["prompt"], data.get("prompt_ids"), "prompt" in data, sorted(dict(prompt="mine", **data))))
            return None

    asyncio.run(Rollout(engine, Looks(GCONFIG, tokenizer, rewards.constant)).run(
        [Prompt(0, {"prompt": "1+1=", "prompt_ids": [7], "answer": "2"})]))  # fmt: skip
    assert seen == [("1+1=", [7], True, ["answer", "prompt"])]


def test_the_engine_tells_its_version_both_ways(
    engine: InProcessEngine, tokenizer: Any, score: AsyncRewardWrapper
) -> None:
    engine.update_weights(engine.model, version=5)
    workflow = guide.OneAnswer(GCONFIG, tokenizer, score)
    run(engine, workflow, 1)
    assert set(workflow.versions) == {engine.get_version()} == {5}


def test_a_unit_test_of_the_guide_mocks_tokenizer_and_engine() -> None:
    tokenizer = MagicMock(pad_token_id=0, eos_token_id=1)
    tokenizer.apply_chat_template.return_value, tokenizer.decode.return_value = [1, 2, 3], "7"
    engine = MagicMock(spec=InferenceEngine)
    fields = {"output_logprobs": [-0.1, -0.2], "output_versions": [0, 0], "stop_reason": "stop"}
    engine.agenerate = AsyncMock(return_value=ModelResponse(input_tokens=[1, 2, 3], output_tokens=[4, 1], **fields))
    workflow = RLVRWorkflow(rewards.count_digits, GCONFIG.new(n_samples=2), tokenizer)
    row = {"messages": [{"role": "user", "content": "3+4="}], "answer": "7"}
    result = asyncio.run(workflow.arun_episode(engine, row))
    assert result["input_ids"].tolist() == [[1, 2, 3, 4, 1]] * 2 and result["rewards"].tolist() == [1.0, 1.0]
