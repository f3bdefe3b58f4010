"""Sessions that clients outside rate, as the episodes of a run; in one process, over a real server and generator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters
from archon.rl.agent_sampling import SamplingPolicy
from archon.rl.episode_context import EpisodeContext, EpisodeEngine, workflow_context
from archon.rl.trajectories import validate_trajectory
from archon.rl.workflows import AgentWorkflow, OnlineWorkflow, RLVRWorkflow
from archon.schema.errors import ConfigError
from tests.serve.test_workflow import OneTurn, rows_of
from tests.test_readme import shown

TALK = [{"role": "user", "content": "1+1="}]


class Outside:
    """A client of a run that serves its policy."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self._url, self._client = url, client

    async def post(self, path: str, key: str = "any", **body: Any) -> httpx.Response:
        return await self._client.post(self._url + path, json=body, headers={"Authorization": f"Bearer {key}"})

    async def session(self, group: str | None = None) -> dict[str, str]:
        opened = await self._client.post(f"{self._url}/sessions", params={} if group is None else {"group": group})
        assert opened.status_code == 201, opened.text
        found: dict[str, str] = opened.json()
        return found

    async def ask(self, session: dict[str, str], **body: Any) -> dict[str, Any]:
        body = {"messages": TALK, "return_token_ids": True, **body}
        answer = await self.post("/chat/completions", session["api_key"], **body)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    async def rate(self, session: dict[str, str], reward: float, **body: Any) -> None:
        rated = await self.post(f"/sessions/{session['id']}/reward", session["api_key"], reward=reward, **body)
        assert rated.status_code == 200, rated.text


Make = Callable[..., OnlineWorkflow]


def online(tokenizer: Any, n_samples: int, **options: Any) -> OnlineWorkflow:
    gconfig = GenerationHyperparameters(n_samples=n_samples, max_new_tokens=6)
    return OnlineWorkflow(gconfig, tokenizer, reward_fn="exact_match", port=0, **options)


@pytest.fixture
async def make(tokenizer: Any) -> AsyncIterator[Make]:
    made: list[OnlineWorkflow] = []

    def one(n_samples: int, **options: Any) -> OnlineWorkflow:
        made.append(online(tokenizer, n_samples, **options))
        return made[-1]

    yield one
    for workflow in made:
        await workflow.aclose()


async def begin(workflow: OnlineWorkflow, engine: Any, client: httpx.AsyncClient) -> tuple[asyncio.Task[Any], Outside]:
    async def episode() -> Any:
        workflow_context.enter(engine._context)
        return await workflow.arun_episode(engine, {})

    task = asyncio.create_task(episode())
    while workflow.url is None:  # noqa: ASYNC110 (it tells nobody)
        await asyncio.sleep(0.01)
    return task, Outside(workflow.url, client)


def episode_engine(engine: InProcessEngine) -> EpisodeEngine:
    policy = SamplingPolicy("override", GenerationHyperparameters(), lambda line: None)
    return EpisodeEngine(engine, EpisodeContext(), agent_sampling=policy)


async def test_a_group_is_trained_once_all_its_sessions_are_rated(
    engine: InProcessEngine, make: Make, client: httpx.AsyncClient
) -> None:
    running = episode_engine(engine)
    task, outside = await begin(make(2), running, client)
    refused = await client.post(f"{outside._url}/sessions")
    assert refused.status_code == 400 and "?group=NAME" in refused.json()["error"]["message"]
    refused = await client.post(f"{outside._url}/sessions?group=a&group=b")
    assert refused.status_code == 400 and "more than once" in refused.json()["error"]["message"]
    sessions = [await outside.session(group) for group in ("a", "b", "a")]
    answers = [await outside.ask(session, temperature=0.3) for session in sessions]
    await outside.rate(sessions[1], 9.0)
    await outside.rate(sessions[0], 1.0)
    gone = await outside.post("/chat/completions", sessions[0]["api_key"], messages=TALK)
    assert gone.status_code == 200, "without a token any other key is answered, and not recorded"
    assert not task.done()
    first = (await outside.ask(sessions[2]))["id"]
    await outside.rate(sessions[2], 0.5, completion_id=first)  # of one answer: the session goes on
    assert not task.done()
    await outside.rate(sessions[2], 3.0)
    group = validate_trajectory(await asyncio.wait_for(task, 20))
    told = [answer["prompt_token_ids"] + answer["choices"][0]["token_ids"] for answer in (answers[0], answers[2])]
    rows = rows_of(group)
    assert rows[:2] == told and len(rows) == 3 and group["trajectory_ids"].tolist() == [0, 1, 1]
    assert group["rewards"].tolist() == [1.0, 3.0, 0.5]
    assert running._context.numbers["agent_answers"] == [1.0, 2.0]
    assert running._context.numbers["agent_answers_overridden"] == [1.0, 1.0]


async def test_a_session_of_old_weights_is_dropped_and_counted(
    engine: InProcessEngine, make: Make, client: httpx.AsyncClient
) -> None:
    running = episode_engine(engine)
    task, outside = await begin(make(1, max_age=1), running, client)
    old, new = await outside.session(), await outside.session()
    await outside.ask(old)
    for version in (1, 2):
        engine.update_weights(engine.model.state_dict().items(), version=version)
    answer = await outside.ask(new)
    await outside.rate(old, 1.0)
    await outside.rate(new, 2.0)
    group = await asyncio.wait_for(task, 20)
    assert group["rewards"].tolist() == [2.0]
    assert rows_of(group) == [answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]]
    assert running._context.drops == {"stale_session": 1}


async def test_a_group_that_is_never_full_is_dropped_after_its_time_and_counted(
    engine: InProcessEngine, make: Make, client: httpx.AsyncClient
) -> None:
    running = episode_engine(engine)
    workflow = make(3, group_timeout=0.3)
    task, outside = await begin(workflow, running, client)
    for _ in range(2):
        session = await outside.session("never full")
        await outside.ask(session)
        await outside.rate(session, 1.0)
    while running._context.drops != {"incomplete_group": 2}:  # noqa: ASYNC110 (it tells nobody)
        await asyncio.sleep(0.01)
    lost = running._context.first_errors["incomplete_group"]
    assert "group never full had 2 of 3 rated sessions 0.3 s after the first" in str(lost)
    workflow._group_timeout = 60.0  # a slow machine rates all of the next in time
    sessions = [await outside.session(group) for group in ("full", "never full", "full", "full")]
    for session in sessions:
        await outside.ask(session)
    await asyncio.gather(*(outside.rate(session, float(i)) for i, session in enumerate(sessions)))
    group = await asyncio.wait_for(task, 20)
    assert sorted(group["rewards"].tolist()) == [0.0, 2.0, 3.0], "what comes late is of a new group"


async def test_a_group_timeout_must_be_a_time(tokenizer: Any) -> None:
    for seconds in (0, float("inf")):
        with pytest.raises(ConfigError, match=f"group_timeout = {seconds} must be above 0"):
            online(tokenizer, 2, group_timeout=seconds)


async def test_rewards_that_cannot_be_trained_are_refused_and_leave_the_session_as_it_was(
    engine: InProcessEngine, make: Make, client: httpx.AsyncClient
) -> None:
    task, outside = await begin(make(1), episode_engine(engine), client)
    session, other = await outside.session(), await outside.session()
    path = f"/sessions/{session['id']}/reward"
    empty = await outside.post(path, session["api_key"], reward=1.0)
    assert empty.status_code == 400 and "has not asked the model once" in empty.text
    await outside.ask(session)
    for text in ("NaN", "Infinity", "1e400", "1e39", '"1"', "null", "true"):
        headers = {"Authorization": f"Bearer {session['api_key']}", "content-type": "application/json"}
        refused = await client.post(outside._url + path, content=f'{{"reward": {text}}}', headers=headers)
        assert refused.status_code == 400, (text, refused.text)
    assert (await outside.post(path, other["api_key"], reward=1.0)).status_code == 404
    assert (await outside.post("/sessions/session-0/reward", reward=1.0)).status_code == 404
    assert not task.done()
    await outside.rate(session, 2.0)
    assert (await outside.post(path, session["api_key"], reward=3.0)).status_code == 404
    assert (await asyncio.wait_for(task, 20))["rewards"].tolist() == [2.0]


async def test_rewards_that_add_up_to_infinity_cost_their_session_alone(
    engine: InProcessEngine, make: Make, client: httpx.AsyncClient
) -> None:
    running = episode_engine(engine)
    task, outside = await begin(make(1, style="individual"), running, client)
    session, good = await outside.session(), await outside.session()
    said = await outside.ask(session)
    await outside.rate(session, 3e38, completion_id=said["id"])
    turn = [*TALK, {"role": "assistant", "content": said["choices"][0]["message"]["content"]}, *TALK]
    await outside.ask(session, messages=turn)
    await outside.rate(session, 3e38)
    await outside.ask(good)
    await outside.rate(good, 1.0)
    assert (await asyncio.wait_for(task, 20))["rewards"].tolist() == [1.0]
    assert running._context.drops == {"session": 1}


async def test_a_session_ends_with_a_reward_that_counts(
    engine: InProcessEngine, make: Make, client: httpx.AsyncClient
) -> None:
    task, outside = await begin(make(1), episode_engine(engine), client)
    session = await outside.session()
    path, key = f"/sessions/{session['id']}/reward", session["api_key"]
    said = (await outside.ask(session))["id"]
    await outside.rate(session, 0.5, finished=False)
    ignored = await outside.post(path, key, reward=1.0)
    assert ignored.status_code == 400 and "pass completion_id" in ignored.text
    await outside.rate(session, 1.0, completion_id=said, finished=True)
    assert (await asyncio.wait_for(task, 20))["rewards"].tolist() == [1.0]


async def test_a_session_does_not_end_while_it_is_answered(
    engine: InProcessEngine, make: Make, client: httpx.AsyncClient
) -> None:
    task, outside = await begin(make(1), episode_engine(engine), client)
    session = await outside.session()
    await outside.ask(session)
    engine.pause()
    late = asyncio.create_task(outside.ask(session))
    for _ in range(200):
        await asyncio.sleep(0.01)
        if len(engine._generator.unfinished):
            break
    early = await outside.post(f"/sessions/{session['id']}/reward", session["api_key"], reward=1.0)
    assert early.status_code == 400 and "1 requests of this session are being answered" in early.text
    engine.resume()
    await late
    await outside.rate(session, 1.0)
    assert (await asyncio.wait_for(task, 20))["rewards"].tolist() == [1.0, 1.0]


async def test_with_a_token_only_its_owner_opens_sessions(
    engine: InProcessEngine, make: Make, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHON_TOKEN", "secret")
    task, outside = await begin(make(1), episode_engine(engine), client)
    assert (await client.post(f"{outside._url}/sessions")).status_code == 401
    owner = {"Authorization": "Bearer secret"}
    session = (await client.post(f"{outside._url}/sessions", headers=owner)).json()
    await outside.ask(session)
    await outside.rate(session, 1.0)
    await asyncio.wait_for(task, 20)
    assert (await outside.post("/chat/completions", session["api_key"], messages=TALK)).status_code == 401


async def test_the_client_of_the_guide_rates_its_sessions(
    engine: InProcessEngine, make: Make, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow = make(2)
    task, outside = await begin(workflow, episode_engine(engine), client)
    monkeypatch.setenv("ARCHON_URL", outside._url)
    names: dict[str, Any] = {}
    exec(compile(shown("online-client"), "guide", "exec"), names)
    for expected in ("", "no such text"):
        await asyncio.to_thread(names["answer"], "a sum", "1+1=", expected)
    group = await asyncio.wait_for(task, 20)
    assert group["rewards"].tolist() == [1.0, 0.0]
    names["owner"].close()


def test_evaluations_do_not_wait_for_sessions(tokenizer: Any) -> None:
    gconfig = GenerationHyperparameters(n_samples=1)
    assert isinstance(online(tokenizer, 2).with_gconfig(gconfig), RLVRWorkflow)
    agent = online(tokenizer, 2, eval_agent=f"{OneTurn.__module__}.OneTurn").with_gconfig(gconfig)
    assert isinstance(agent, AgentWorkflow)
    with pytest.raises(ConfigError, match="max_age = -1"):
        online(tokenizer, 2, max_age=-1)
