"""The tree of a session's calls: links by tokens, credit, exports. Worked by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from archon.generation import InProcessEngine
from archon.generation.record import UnusableAnswerError
from archon.generation.types import GenerationHyperparameters, ModelResponse
from archon.rl.trajectories import trajectory_tensors
from archon.schema.errors import RolloutError
from archon.serve import Limits
from archon.serve.sessions import InvalidRewardError, LimitError, Session, Sessions
from tests.serve.scripted import Start

ENGINE: Any = None  # a session hands it on, and asks it nothing


def answered(prompt: list[int], answer: list[int], version: int = 0) -> ModelResponse:
    logprobs = [-0.1 * token for token in answer]
    return ModelResponse(prompt, answer, logprobs, [version] * len(answer))


def session_of(*calls: tuple[str, list[int], list[int]]) -> Session:
    session = Session(ENGINE, GenerationHyperparameters())
    for name, prompt, answer in calls:
        session.record(name, 0, answered(prompt, answer))
    return session


def tree() -> Session:
    """a ─ b ─ d, a ─ c, and e, a root of its own (its prompt has one token of a's answer otherwise)."""
    return session_of(
        ("a", [1, 2], [3, 4]),
        ("b", [1, 2, 3, 4, 5], [6]),
        ("c", [1, 2, 3, 4, 7], [8]),
        ("d", [1, 2, 3, 4, 5, 6, 9], [10, 11]),
        ("e", [1, 2, 3, 5, 5], [6]),
    )


def test_a_call_is_linked_to_the_longest_answer_that_its_prompt_begins_with() -> None:
    parents = {i.completion: i.parent and i.parent.completion for i in tree().interactions}
    assert parents == {"a": None, "b": "a", "c": "a", "d": "b", "e": None}


def test_a_prompt_that_repeats_another_is_its_sibling_not_its_child() -> None:
    parents = [i.parent for i in session_of(("a", [1, 2], [3]), ("b", [1, 2], [3]), ("c", [1, 2], [4])).interactions]
    assert parents == [None, None, None]


def test_credit_goes_up_the_tree_discounted_and_averaged_over_branches() -> None:
    session = tree()
    session.set_reward(1.0, "d")
    session.set_reward(0.25, "b")
    session.set_reward(-1.0, "c")
    credit = {row.answers[0][0]: row.reward for row in session.export("individual", turn_discount=0.5)}
    # d: 1; b: 0.25 + 0.5 · 1; c: −1; a: 0.5 · (0.75 − 1) / 2. Nothing that e led to was rewarded.
    assert credit == {"d": 1.0, "b": 0.75, "c": -1.0, "a": -0.0625}


def test_concat_makes_a_row_of_each_branch() -> None:
    session = tree()
    session.set_reward(1.0, "d")
    session.set_reward(0.25, "b")
    session.set_reward(-1.0, "c")
    left, right = session.export("concat", turn_discount=0.5)
    assert [left.answers, right.answers] == [[("a", 0), ("c", 0)], [("a", 0), ("b", 0), ("d", 0)]]
    assert [left.reward, right.reward] == [-0.5, 0.5 * 0.25 + 0.25 * 1.0]
    assert right.record.input_ids == [1, 2, 3, 4, 5, 6, 9, 10, 11]
    assert right.record.loss_mask == [0, 0, 1, 1, 0, 1, 0, 1, 1]
    assert right.record.turn_ids == [-1, -1, 0, 0, -1, 1, -1, 2, 2]
    assert right.record.logprobs == pytest.approx([0, 0, -0.3, -0.4, 0, -0.6, 0, -1.0, -1.1])
    assert right.record.versions == [-1, -1, 0, 0, -1, 0, -1, 0, 0]


def test_versions_stay_those_of_each_token() -> None:
    session = session_of(("a", [1], [2, 3]))
    session.interactions[0].response.output_versions[:] = [4, 5]
    session.record("b", 0, answered([1, 2, 3], [6], version=5))
    session.set_reward(1.0)
    (row,) = session.export("concat")
    assert row.record.versions == [-1, 4, 5, 5]
    assert trajectory_tensors([row.record], [row.reward])["versions"].tolist() == [[-1, 4, 5, 5]]


def test_a_reward_of_the_episode_reaches_every_branch() -> None:
    session = tree()
    session.set_reward(0.5, "c")
    session.reward_every_branch(1.0)
    assert {i.completion: i.reward for i in session.interactions} == {
        "a": None, "b": None, "c": 0.5, "d": 1.0, "e": 1.0
    }  # fmt: skip


def test_the_last_answer_is_rewarded_unless_one_is_named() -> None:
    session = tree()
    session.set_reward(2)
    session.record("n", 1, answered([1], [2]))
    session.record("n", 0, answered([1], [3]))
    session.set_reward(3.0, "n", 1)
    assert {i.place: i.reward for i in session.interactions if i.reward is not None} == {("e", 0): 2.0, ("n", 1): 3.0}


def test_no_reward_is_not_a_reward_of_zero() -> None:
    session = tree()
    with pytest.raises(RolloutError, match="none of the session's 5 answers has a reward"):
        session.export()
    session.set_reward(0.0, "c")
    assert [row.answers[0][0] for row in session.export("individual")] == ["a", "c"]
    assert len(session.export("concat")) == 1


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1", [1.0], torch.ones(2), 10**400, 1e39, -1e300])
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    with pytest.raises(InvalidRewardError, match="a reward must be a finite number"):
        tree().set_reward(reward)


def test_a_reward_may_be_any_kind_of_number() -> None:
    session = tree()
    for reward in (1, True, np.float32(1.0), torch.ones(())):
        session.set_reward(reward, "a")  # type: ignore[arg-type]
        assert session.interactions[0].reward == 1.0


def test_what_there_is_not_cannot_be_rewarded() -> None:
    with pytest.raises(RolloutError, match="a reward needs an answer"):
        session_of().set_reward(1.0)
    with pytest.raises(RolloutError, match="has not asked the model once"):
        session_of().reward_every_branch(1.0)
    with pytest.raises(RolloutError, match="no answer 1 of a call 'a'"):
        tree().set_reward(1.0, "a", 1)


@pytest.mark.parametrize("options", [{"style": "both"}, {"turn_discount": 0.0}, {"turn_discount": 1.5}])
def test_an_export_of_another_kind_is_refused(options: dict[str, Any]) -> None:
    session = tree()
    session.set_reward(1.0)
    with pytest.raises(RolloutError, match="expected 'individual' or 'concat', and a number"):
        session.export(**options)


@pytest.mark.parametrize("style", ["individual", "concat"])
def test_rewards_that_add_up_to_infinity_are_not_exported(style: Any) -> None:
    session = tree()
    for name in ("a", "b", "d"):
        session.set_reward(3e38, name)
    with pytest.raises(
        InvalidRewardError, match=r"a reward must be a finite number, got .*e\+38; training uses float32"
    ):
        session.export(style)


def test_an_answer_without_its_logprobs_is_not_recorded() -> None:
    session = session_of()
    broken = answered([1], [2, 3])
    broken.output_logprobs.pop()
    with pytest.raises(UnusableAnswerError):
        session.record("a", 0, broken)
    assert session.interactions == []


def test_sessions_and_their_calls_are_limited() -> None:
    sessions = Sessions(max_open=2, max_calls=1)
    first, _ = (sessions.open(ENGINE, GenerationHyperparameters()) for _ in range(2))
    with pytest.raises(LimitError, match="2 sessions are open"):
        sessions.open(ENGINE, GenerationHyperparameters())
    first.admit(1)
    first.record("a", 0, answered([1], [2]))
    with pytest.raises(LimitError, match="has 1 of its 1 answers, and 1 more are too many"):
        first.admit(1)
    sessions.close(first)
    assert sessions.find_by_key(first.key) is None and sessions.find_by_id(first.id) is None
    sessions.open(ENGINE, GenerationHyperparameters())


async def test_a_session_never_has_more_answers_than_it_may(serve: Start, engine: InProcessEngine) -> None:
    server, url = await serve(limits=Limits(calls_per_session=3))
    session = server.sessions.open(engine, GenerationHyperparameters())
    chat = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 3}
    own = {"Authorization": f"Bearer {session.key}"}
    async with httpx.AsyncClient(trust_env=False, timeout=None, headers=own) as client:
        many = await client.post(f"{url}/chat/completions", json=chat | {"n": 4})
        assert many.status_code == 429 and "has 0 of its 3 answers, and 4 more are too many" in many.text
        answers = await asyncio.gather(*(client.post(f"{url}/chat/completions", json=chat) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 429, 429]
    assert len(session.interactions) == 3


def test_a_session_is_not_idle_while_it_is_answered() -> None:
    sessions = Sessions(max_open=2, max_calls=1, idle_seconds=0.0)
    session = sessions.open(ENGINE, GenerationHyperparameters())
    with sessions.in_use(session), sessions.in_use(session):
        assert sessions.find_by_key(session.key) is session
        sessions.open(ENGINE, GenerationHyperparameters())
        assert sessions.find_by_id(session.id) is session
    assert sessions.find_by_key(session.key) is None and len(sessions) == 0
    with sessions.in_use(session):  # whoever still holds it
        pass
    assert len(sessions) == 0


def test_each_answer_of_a_session_has_a_random_stream_of_its_own() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        session = Session(ENGINE, GenerationHyperparameters(), seed=seed)
        return [session.next_seed() for _ in range(3)]

    assert seeds(1) == seeds(1) and len({*seeds(1), *seeds(2)}) == 6
    assert seeds(None) == [None] * 3
