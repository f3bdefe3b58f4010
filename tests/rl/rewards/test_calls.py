"""How workflows of the public guides make a reward wrapper, and how they call it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from archon.rl.rewards import (
    AsyncRewardWrapper,
    RewardCrashed,
    RewardFailure,
    RewardInvalid,
    RewardRaised,
    RewardTimeout,
    verify_gold,
)
from archon.rl.workflows.base import wrap_reward
from archon.schema.errors import RewardError
from tests.rl.rewards import faulty
from tests.test_readme import shown
from tests.tolerances import REWARD_TIMEOUT_SECONDS


@pytest.fixture
def told() -> Iterator[AsyncRewardWrapper]:
    with AsyncRewardWrapper(faulty.told, max_workers=1) as wrapper:
        yield wrapper


# -- a wrapper is wrapped again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [faulty.obey, faulty.obey_async])
async def test_the_kinds_of_failure_and_the_time_limit_are_those_of_the_wrapper_within(function: Any) -> None:
    with AsyncRewardWrapper(function, timeout_seconds=REWARD_TIMEOUT_SECONDS, max_workers=1) as inner:
        outer = AsyncRewardWrapper(inner)
        assert outer is inner
        ask = ["1.0", "hang", "raise"] + ["os._exit"] * (function is faulty.obey)
        outcomes = await asyncio.gather(*(outer("", each, [], []) for each in ask), return_exceptions=True)
        kinds = [1.0, RewardTimeout, RewardRaised, RewardCrashed][: len(ask)]
        assert [type(o) if isinstance(o, RewardFailure) else o for o in outcomes] == kinds
        assert outer.timeout_seconds == REWARD_TIMEOUT_SECONDS


async def test_time_begins_when_execution_does_whichever_wrapper_is_asked() -> None:
    """Of the calls in one worker's queue the last begins long after the time limit."""
    with AsyncRewardWrapper(faulty.obey, timeout_seconds=REWARD_TIMEOUT_SECONDS, max_workers=1) as inner:
        both = [inner, AsyncRewardWrapper(AsyncRewardWrapper(inner))]
        calls = [both[i % 2]("", "sleep", [], [], seconds=0.4 * REWARD_TIMEOUT_SECONDS) for i in range(5)]
        started = time.monotonic()
        assert await asyncio.gather(*calls) == [1.0] * 5
        assert time.monotonic() - started > REWARD_TIMEOUT_SECONDS


@pytest.mark.parametrize("limits", [{"timeout_seconds": 3.0}, {"max_workers": 5}, {"max_retries": 2}])
def test_other_limits_for_a_reward_that_is_wrapped_are_refused(told: AsyncRewardWrapper, limits: Any) -> None:
    AsyncRewardWrapper(told, timeout_seconds=15.0, max_workers=1)
    with pytest.raises(
        RewardError, match=r"told is already wrapped with timeout_seconds 15; set its limits in that call"
    ):
        AsyncRewardWrapper(told, **limits)


# -- calls ------------------------------------------------------------------------------------------------------------

WHOLE = {"prompt": 2.0, "completions": 3.0, "prompt_ids": 1.0, "completion_ids": 2.0, "answer": 1.0}


async def test_all_by_position_by_keyword_or_mixed_are_one_call(told: AsyncRewardWrapper) -> None:
    row = {"answer": "7"}
    calls = [
        told("ab", "abc", [1], [2, 3], **row),
        told(prompt="ab", completions="abc", prompt_ids=[1], completion_ids=[2, 3], **row),
        told("ab", "abc", prompt_ids=[1], completion_ids=[2, 3], **row),
        told("ab", "abc", [1], completion_ids=[2, 3], **row),
    ]
    assert [reward.parts for reward in await asyncio.gather(*calls)] == [WHOLE] * 4


async def test_ids_that_are_not_given_are_none_and_never_a_column_of_another_name(told: AsyncRewardWrapper) -> None:
    for call in (told("ab", "abc", answer="7"), told(prompt="ab", completions="abc", answer="7")):
        assert (await call).parts == WHOLE | {"prompt_ids": -1.0, "completion_ids": -1.0}


async def test_columns_named_like_an_argument_give_way_to_it_and_to_no_other(told: AsyncRewardWrapper) -> None:
    row = {"prompt": "a column", "completions": "of the row", "answer": "7"}
    assert (await told("ab", "abc", [1], [2, 3], **row, prompt_ids=[], completion_ids=[])).parts == WHOLE
    assert (await told("ab", "abc", **row, completion_ids=[2, 3])).parts == WHOLE | {"prompt_ids": -1.0}


async def test_a_function_with_names_of_its_own_is_called_by_them() -> None:
    with AsyncRewardWrapper(faulty.same, max_workers=1) as reward:
        assert await reward(result="7", answer="7") == 1.0
        assert await reward("7", answer="8") == 0.0
        with pytest.raises(RewardRaised, match="takes 2 positional arguments but 4 were given"):
            await reward("", "7", [], [])


async def test_a_name_behind_those_given_by_position_is_the_functions_own() -> None:
    with AsyncRewardWrapper(faulty.keyword_prompt, max_workers=1) as reward:
        assert await reward("7", "8", prompt="abc") == 3.0


async def test_a_wrapper_of_a_class_of_ones_own_wraps_another() -> None:
    class Own(AsyncRewardWrapper):
        pass

    with AsyncRewardWrapper(faulty.same, max_workers=1) as inner, Own(inner) as outer:
        assert await outer("7", "7") == 1.0


def test_a_workflow_that_calls_by_position_refuses_such_a_function() -> None:
    with pytest.raises(RewardError, match=r"same must take \(prompt, completions, prompt_ids, completion_ids, "):
        wrap_reward(faulty.same)


# -- functions in the forms of TRL and veRL ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["listed", "listed_async"])
async def test_a_reward_in_the_form_of_trl_is_called_by_its_name(name: str) -> None:
    with AsyncRewardWrapper(f"tests.rl.rewards.faulty.{name}", max_workers=1) as wrapper:
        wrapper.require_documented_form()
        assert wrapper.name == f"tests.rl.rewards.faulty.{name}"
        assert await wrapper("1+1=", "2", [1], [2], answer="2") == 1.0
        with pytest.raises(RewardInvalid, match=f"faulty.{name} returned an object of type NoneType"):
            await wrapper("1+1=", "", [1], [2], answer="2")


async def test_a_reward_in_the_form_of_trl_returns_a_list_of_one_reward() -> None:
    with AsyncRewardWrapper("tests.rl.rewards.faulty.unlisted", max_workers=1) as wrapper:
        (outcome,) = await asyncio.gather(wrapper("1+1=", "2", [1], [2]), return_exceptions=True)
    assert isinstance(outcome, RewardRaised) and "it returned 1.0; expected a list of one reward" in str(outcome)


def test_a_reward_in_the_form_of_verl_is_refused_and_the_wrapper_of_the_guide_calls_it() -> None:
    with pytest.raises(
        RewardError, match=r"compute_score takes veRL's arguments .data_source, solution_str, .*rewards.md"
    ):
        wrap_reward("tests.rl.rewards.faulty.compute_score")
    with pytest.raises(RewardError, match="takes veRL's arguments"):
        verify_gold("tests.rl.rewards.faulty.compute_score", [{"prompt": "1+1=", "answer": "2"}])
    names: dict[str, Any] = {"compute_score": faulty.compute_score}
    exec(compile(shown("verl-reward"), "guide", "exec"), names)
    row = {"data_source": "sums", "extra_info": {"index": 3}}
    assert [names["score"]("1+1=", text, [1], [2], answer="2", **row) for text in ("2", "3")] == [1.0, 0.0]
