"""RLVRWorkflow through the real generator: token space, finish reasons, rewards that fail."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest, ModelResponse
from archon.rl import RLVRWorkflow, RolloutWorkflow
from archon.rl.episode_context import EpisodeContext, EpisodeEngine, workflow_context
from archon.rl.rewards import AsyncRewardWrapper, RewardRaised
from archon.rl.trajectories import trajectory_tensors, validate_trajectory
from archon.rl.workflows import resolve_workflow
from archon.schema.errors import ConfigError
from tests.rl import rewards_for_tests as rewards

ROW = {"messages": [{"role": "user", "content": "12+34="}], "prompt": "12+34=", "answer": "46"}
GCONFIG = GenerationHyperparameters(n_samples=8, max_new_tokens=6)


def run_episode(
    engine: InProcessEngine, workflow: RolloutWorkflow, row: dict[str, Any] = ROW, seed: int = 0
) -> tuple[dict[str, torch.Tensor] | None, EpisodeContext]:
    context = EpisodeContext(seed=seed)

    async def episode() -> dict[str, torch.Tensor] | None:
        workflow_context.enter(context)
        return await workflow.arun_episode(EpisodeEngine(engine, context), row)

    return asyncio.run(episode()), context


def test_rlvr_returns_one_group_of_documented_tensors(engine: InProcessEngine, tokenizer: Any) -> None:
    workflow = RLVRWorkflow(rewards.count_digits, GCONFIG, tokenizer)
    result, context = run_episode(engine, workflow)
    assert result is not None
    checked = validate_trajectory(result)
    assert checked["input_ids"].shape[0] == 8
    assert not context.drops
    prompt = tokenizer("12+34=")["input_ids"]
    for row in range(8):
        trained = checked["loss_mask"][row] == 1
        assert checked["input_ids"][row, : len(prompt)].tolist() == prompt
        assert trained.nonzero()[0].item() == len(prompt)
        assert (checked["versions"][row] == -1).equal(~trained)
        assert (checked["turn_ids"][row] == -1).equal(~trained)
        assert checked["logprobs"][row][~trained].abs().max() == 0
        assert (checked["logprobs"][row][trained] < 0).all()
        answer = tokenizer.decode(checked["input_ids"][row][trained], skip_special_tokens=True)
        assert checked["rewards"][row].item() == sum(c.isdigit() for c in answer)


def test_answers_stay_in_token_space(engine: InProcessEngine, tokenizer: Any) -> None:
    """The trained tokens are the engine's own, not those of the decoded and re-encoded text."""
    responses: list[ModelResponse] = []

    class Recorder(EpisodeEngine):
        async def agenerate(self, req: ModelRequest) -> ModelResponse:
            responses.append(await super().agenerate(req))
            return responses[-1]

    workflow = RLVRWorkflow(rewards.constant, GCONFIG, tokenizer)
    result = asyncio.run(workflow.arun_episode(Recorder(engine, EpisodeContext()), ROW))
    assert result is not None
    rows = [ids[mask == 1].tolist() for ids, mask in zip(result["input_ids"], result["loss_mask"], strict=True)]
    assert sorted(rows) == sorted(response.output_tokens for response in responses)
    # A special token that is not the end stays where it was sampled; text would have lost it.
    assert any(tokenizer.pad_token_id in row or tokenizer.convert_tokens_to_ids("<|im_start|>") in row for row in rows)


def test_finish_reason_comes_from_the_engine_never_from_padding(engine: InProcessEngine, tokenizer: Any) -> None:
    """An answer that ends with the stop token in its last allowed place is not truncated; padding says nothing."""
    workflow = RLVRWorkflow(rewards.constant, GCONFIG.new(n_samples=64), tokenizer)
    result, _ = run_episode(engine, workflow)
    assert result is not None
    stops = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    seen = set()
    for ids, mask, truncated in zip(result["input_ids"], result["loss_mask"], result["truncated"], strict=True):
        answer = ids[mask == 1].tolist()
        assert bool(truncated) == (answer[-1] not in stops)
        seen.add((bool(truncated), len(answer) == 6))
    assert (False, False) in seen
    assert (True, True) in seen


def test_episode_seed_fixes_the_samples_and_samples_differ(engine: InProcessEngine, tokenizer: Any) -> None:
    workflow = RLVRWorkflow(rewards.constant, GCONFIG, tokenizer)
    first, second, other = (run_episode(engine, workflow, seed=seed)[0] for seed in (1, 1, 2))
    assert first is not None
    assert second is not None
    assert other is not None
    assert first["input_ids"].equal(second["input_ids"])
    assert first["logprobs"].equal(second["logprobs"])
    assert not (first["input_ids"].shape == other["input_ids"].shape and first["input_ids"].equal(other["input_ids"]))
    assert len({tuple(row) for row in first["input_ids"].tolist()}) > 1


@pytest.mark.parametrize(
    ("reward", "kind"),
    [
        (rewards.raise_on_even_length, "reward_raised"),
        (rewards.dies_on_even_length, "reward_crashed"),
        (rewards.hangs_on_even_length, "reward_timeout"),
        (rewards.nan_on_even_length, "reward_invalid"),
    ],
)
def test_failing_reward_costs_its_sample_is_counted_and_is_never_zero(
    engine: InProcessEngine, tokenizer: Any, reward: Any, kind: str
) -> None:
    with AsyncRewardWrapper(reward, timeout_seconds=1.0, max_workers=8) as wrapper:
        workflow = RLVRWorkflow(wrapper, GCONFIG, tokenizer)
        result, context = run_episode(engine, workflow)
    assert result is not None
    lengths = result["loss_mask"].sum(1)
    assert (lengths % 2 == 1).all()
    assert result["rewards"].tolist() == [1.0] * len(lengths)
    assert 0 < len(lengths) < 8
    assert context.drops == {kind: 8 - len(lengths)}


def test_group_whose_every_reward_fails_raises_the_first_failure(engine: InProcessEngine, tokenizer: Any) -> None:
    workflow = RLVRWorkflow(rewards.always_raises, GCONFIG, tokenizer)
    with pytest.raises(RewardRaised, match="this reward is broken"):
        run_episode(engine, workflow)


def test_parts_of_a_reward_dictionary_are_summed_and_recorded(engine: InProcessEngine, tokenizer: Any) -> None:
    result, context = run_episode(engine, RLVRWorkflow(rewards.in_parts, GCONFIG, tokenizer))
    assert result is not None
    assert result["rewards"].equal(0.25 + result["loss_mask"].sum(1).float())
    assert context.numbers["reward/format"] == [0.25] * 8


def test_a_reward_may_ask_which_answer_of_the_group_it_scores(engine: InProcessEngine, tokenizer: Any) -> None:
    result, context = run_episode(engine, RLVRWorkflow(rewards.sample_index, GCONFIG, tokenizer))
    assert result is not None
    assert result["rewards"].tolist() == list(range(8))
    assert context.sample_index is None and context.numbers["seen"] == list(range(8))


class Damages(EpisodeEngine):
    """The real generator, of which every other answer loses or changes some fields on its way."""

    def __init__(self, engine: InProcessEngine, context: EpisodeContext, change: dict[str, Any]) -> None:
        super().__init__(engine, context)
        self._change = change
        self.whole: list[ModelResponse] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        damaged = self._requests % 2 == 1
        response = await super().agenerate(req)
        if not damaged:
            self.whole.append(response)
            return response
        changed = {name: made(getattr(response, name)) for name, made in self._change.items()}
        return replace(response, **changed)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"output_logprobs": lambda logprobs: logprobs[1:]}, "logprob_mismatch"),
        ({"output_logprobs": lambda logprobs: []}, "logprob_mismatch"),
        ({"output_versions": lambda versions: [*versions, 0]}, "logprob_mismatch"),
        ({"output_logprobs": lambda logprobs: [*logprobs[1:], math.nan]}, "logprob_not_finite"),
        ({"output_logprobs": lambda logprobs: [-math.inf, *logprobs[1:]]}, "logprob_not_finite"),
        (dict.fromkeys(("output_tokens", "output_logprobs", "output_versions"), lambda values: []), "empty"),
        ({"stop_reason": lambda reason: "abort"}, "aborted"),
    ],
    ids=["a logprob less", "no logprobs", "a version more", "nan", "infinite", "no tokens", "aborted"],
)
def test_an_answer_without_one_finite_logprob_a_token_is_dropped_never_zeroed(
    engine: InProcessEngine, tokenizer: Any, change: dict[str, Any], kind: str
) -> None:
    context = EpisodeContext(seed=0)
    damaging = Damages(engine, context, change)

    async def episode() -> dict[str, torch.Tensor] | None:
        workflow_context.enter(context)
        return await RLVRWorkflow(rewards.count_digits, GCONFIG, tokenizer).arun_episode(damaging, ROW)

    result = asyncio.run(episode())
    assert result is not None
    assert context.drops == {kind: 4}
    assert [error.kind for error in context.first_errors.values()] == [kind]  # type: ignore[attr-defined]
    trained = result["loss_mask"] == 1
    rows = [ids[mask].tolist() for ids, mask in zip(result["input_ids"], trained, strict=True)]
    assert sorted(rows) == sorted(response.output_tokens for response in damaging.whole) and len(rows) == 4
    assert (result["logprobs"][trained] < 0).all()


def test_trajectory_tensors_worked_by_hand() -> None:
    responses = [
        ModelResponse([7, 8], [4], [-0.5], [3], "stop"),
        ModelResponse([7, 8], [5, 6], [-1.0, -2.0], [3, 4], "length"),
    ]
    result = trajectory_tensors(responses, [1.0, 0.0])
    assert result["input_ids"].tolist() == [[7, 8, 4, 0], [7, 8, 5, 6]]
    assert result["attention_mask"].tolist() == [[True, True, True, False], [True] * 4]
    assert result["loss_mask"].tolist() == [[0, 0, 1, 0], [0, 0, 1, 1]]
    assert result["logprobs"].tolist() == [[0, 0, -0.5, 0], [0, 0, -1.0, -2.0]]
    assert result["versions"].tolist() == [[-1, -1, 3, -1], [-1, -1, 3, 4]]
    assert result["turn_ids"].tolist() == [[-1, -1, 0, -1], [-1, -1, 0, 0]]
    assert result["rewards"].tolist() == [1.0, 0.0]
    assert result["truncated"].tolist() == [False, True]


def test_workflow_is_given_as_instance_class_or_dotted_string(tokenizer: Any) -> None:
    offered = {"reward_fn": rewards.constant, "gconfig": GCONFIG, "tokenizer": tokenizer}
    instance = RLVRWorkflow(**offered)
    assert resolve_workflow(instance, **offered) is instance
    assert type(resolve_workflow(RLVRWorkflow, **offered)) is RLVRWorkflow
    assert type(resolve_workflow("archon.rl.RLVRWorkflow", **offered)) is RLVRWorkflow


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("archon.rl.NoSuchWorkflow", "cannot be imported"),
        ("nonsense", "expected 'package.module.Name'"),
        (object(), "expected a RolloutWorkflow"),
        (dict, "expected a RolloutWorkflow"),
    ],
)
def test_what_is_no_workflow_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_workflow(given)


def test_workflow_class_that_needs_more_than_the_trainer_offers_names_it() -> None:
    class Needy(RolloutWorkflow):
        def __init__(self, environment: Any) -> None:
            self.environment = environment

        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
            return None

    with pytest.raises(ConfigError, match="needs environment, but the trainer passes gconfig"):
        resolve_workflow(Needy, gconfig=GCONFIG)


def test_evaluation_changes_sampling_values_without_touching_training(tokenizer: Any) -> None:
    workflow = RLVRWorkflow(rewards.constant, GCONFIG, tokenizer)
    greedy = workflow.with_gconfig(GCONFIG.new(greedy=True, n_samples=1))
    assert isinstance(greedy, RLVRWorkflow)
    assert (greedy.gconfig.greedy, greedy.gconfig.n_samples) == (True, 1)
    assert (workflow.gconfig.greedy, workflow.gconfig.n_samples) == (False, 8)
    assert tokenizer.eos_token_id in greedy.gconfig.stop_token_ids
