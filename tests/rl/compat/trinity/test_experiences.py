"""What a workflow returns is checked, and a wrong result names the key and the shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from archon.rl import Experience, Workflow
from archon.schema.errors import RolloutError, UserError
from tests.rl.compat.trinity.conftest import GCONFIG
from tests.small_qwen3 import small_model

MESSAGES = [{"role": "user", "content": "1+1="}]


def returning(result: Callable[[Any, Experience], Any]) -> type[Workflow]:
    """A workflow that asks once, and returns what `result` makes of the model and its answer."""

    class Returns(Workflow):
        can_repeat = False

        def run(self) -> Any:
            (answer,) = self.model.chat(MESSAGES)
            return result(self.model, answer)

    return Returns


def experience(answer: Experience, **changes: Any) -> Experience:
    kept = {"tokens": answer.tokens, "prompt_length": answer.prompt_length, "logprobs": answer.logprobs, "reward": 1.0}
    return Experience(**(kept | changes))


WRONG: dict[str, tuple[Callable[[Any, Experience], Any], str]] = {
    "nothing": (lambda _, a: None, r"Returns\.run returned a NoneType, expected a list of Experience"),
    "one, not a list": (lambda _, a: experience(a), r"returned a Experience, expected a list"),
    "a dictionary": (lambda _, a: [{"tokens": a.tokens}], "experience 0 is a dict, expected an Experience"),
    "ragged": (lambda _, a: [experience(a, tokens=[[1], [2, 3]])], "'tokens' is a list, expected one dimension"),
    "two dimensions": (lambda _, a: [experience(a, tokens=a.tokens[None])], r"'tokens' has shape \(1, \d+\)"),
    "no integers": (lambda _, a: [experience(a, tokens=a.tokens.float())], r"'tokens' of shape \(\d+,\) is torch.flo"),
    "no answer": (
        lambda _, a: [experience(a, prompt_length=len(a.tokens))],
        r"'prompt_length' is (\d+), expected an integer from 1 to \d+, as 'tokens' has shape \(\1,\)",
    ),
    "no prompt": (lambda _, a: [experience(a, prompt_length=0)], "'prompt_length' is 0, expected an integer from 1"),
    "logprobs short": (lambda _, a: [experience(a, logprobs=a.logprobs[1:])], r"'logprobs' has shape \(\d,\), exp"),
    "logprobs for all": (
        lambda _, a: [experience(a, logprobs=torch.zeros(len(a.tokens)))],
        r"'logprobs' has shape \(\d+,\), expected \(\d,\), one for each token after prompt_length",
    ),
    "mask long": (
        lambda _, a: [experience(a, action_mask=[1] * len(a.tokens))],
        r"'action_mask' has shape \(\d+,\), expected \(\d,\)",
    ),
    "mask of twos": (
        lambda _, a: [experience(a, action_mask=torch.full_like(a.logprobs, 2, dtype=torch.int64))],
        r"'action_mask' of shape \(\d,\) must hold 0 and 1",
    ),
    "mask of nothing": (
        lambda _, a: [experience(a, action_mask=torch.zeros_like(a.logprobs, dtype=torch.bool))],
        "and 1 somewhere",
    ),
    "no reward": (lambda _, a: [experience(a, reward=None)], "'reward' is None, expected a number"),
    "reward in words": (lambda _, a: [experience(a, reward="good")], "'reward' is 'good', expected a number"),
    "metrics in words": (lambda _, a: [experience(a, metrics={"how": "well"})], "'metrics' must be numbers"),
    "the second": (lambda _, a: [experience(a), experience(a, reward=None)], "experience 1: 'reward' is None"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_result_names_the_key_and_the_shape(adapted, run_episode, case: str) -> None:
    result, message = WRONG[case]
    with pytest.raises(RolloutError, match=message) as caught:
        run_episode(adapted(returning(result)))
    assert isinstance(caught.value, UserError) and "Returns.run" in str(caught.value)


def test_logprobs_left_out_are_those_of_the_answer(adapted, run_episode) -> None:
    with_them, _ = run_episode(adapted(returning(lambda _, a: [experience(a)])))
    without, _ = run_episode(adapted(returning(lambda _, a: [experience(a, logprobs=None)])))
    assert with_them["logprobs"].equal(without["logprobs"]) and without["logprobs"].any()
    assert (without["versions"] == 0).equal(without["loss_mask"] == 1)


def test_tokens_that_the_model_did_not_generate_need_logprobs_of_their_own(adapted, run_episode) -> None:
    def other(logprobs: Any) -> Callable[[Any, Experience], Any]:
        return lambda _, a: [experience(a, tokens=[*a.tokens[: a.prompt_length].tolist(), 5, 6], logprobs=logprobs)]

    with pytest.raises(RolloutError, match="'logprobs' is missing for 2 of its 2 trained tokens"):
        run_episode(adapted(returning(other(None))))
    result, _ = run_episode(adapted(returning(other([-1.5, -2.5]))))
    assert result["logprobs"][0][result["loss_mask"][0] == 1].tolist() == [-1.5, -2.5]


def test_tokens_keep_the_version_of_their_sampling(adapted, run_episode, engine, tokenizer) -> None:
    def after_a_push(_: Any, answer: Experience) -> list[Experience]:
        engine.update_weights(small_model(len(tokenizer), max_seq_len=160), version=7)
        return [experience(answer)]

    result, _ = run_episode(adapted(returning(after_a_push), gconfig=GCONFIG.new(n_samples=1)))
    assert engine.version == 7 and result["versions"][result["loss_mask"] == 1].unique().tolist() == [0]


def test_masked_tokens_are_not_trained_and_carry_nothing(adapted, run_episode) -> None:
    def first_only(_: Any, answer: Experience) -> list[Experience]:
        mask = torch.zeros_like(answer.logprobs, dtype=torch.bool)
        mask[0] = True
        return [experience(answer, action_mask=mask)]

    result, _ = run_episode(adapted(returning(first_only)))
    trained = result["loss_mask"] == 1
    assert trained.sum(1).tolist() == [1] * 4
    assert not result["logprobs"][~trained].any() and (result["versions"] == -1).equal(~trained)
    assert (result["turn_ids"] == -1).equal(~trained)


def test_a_reward_that_is_no_number_costs_its_sample_and_is_counted(adapted, run_episode) -> None:
    def odd(_: Any, answer: Experience) -> list[Experience]:
        return [experience(answer, reward=1.0), experience(answer, reward=float("nan"))]

    result, context = run_episode(adapted(returning(odd)))
    assert result["rewards"].tolist() == [1.0] * 4
    assert context.drops == {"reward_not_finite": 4}


def test_what_one_of_several_runs_returns_is_one_trajectory_to_the_group(adapted, run_episode) -> None:
    """Group statistics are per trajectory, never per turn."""
    steps = returning(lambda _, a: [experience(a, reward=0.0), experience(a)])
    result, _ = run_episode(adapted(steps))
    assert result["trajectory_ids"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_an_empty_list_rejects_the_task(adapted, run_episode) -> None:
    result, context = run_episode(adapted(returning(lambda *_: [])))
    assert result is None and not context.drops


def test_a_workflow_that_does_nothing_is_refused_when_it_is_named(adapted) -> None:
    class Idle(Workflow):
        pass

    with pytest.raises(UserError, match="Idle defines neither run nor run_async"):
        adapted(Idle)
