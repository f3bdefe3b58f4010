"""Rubric rewards from a judge behind a real HTTP endpoint: points, cache, votes, failures and limits."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from archon.generation.types import GenerationHyperparameters
from archon.rl.bootstrap import make_tokenizer
from archon.rl.episode_context import EpisodeContext, workflow_context
from archon.rl.rewards import AsyncRewardWrapper, Judge, RewardInvalid, RewardRaised, RubricReward
from archon.rl.rewards.judge import KEY, parse_verdict
from archon.schema.errors import ConfigError, RewardError
from archon.serve import AgentServer
from archon.training.config import TokenizerRecipe
from tests.serve.scripted import Scripted
from tests.test_readme import shown

Reply = Callable[[dict[str, Any]], str | web.Response]
ITEMS = {"right": ("Is the result right?", 3.0), "short": ("Is it short?", 1.0), "rude": ("Is it rude?", -2.0)}
GOOD = json.dumps({"right": True, "short": True, "rude": False})


@asynccontextmanager
async def endpoint(reply: Reply, seconds: float = 0.0) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A chat-completions endpoint on loopback that answers with `reply` after `seconds`, and the requests it got."""
    requests: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        requests.append(await request.json() | {"key": request.headers.get("Authorization"), "at": time.monotonic()})
        await asyncio.sleep(seconds)
        said = reply(requests[-1])
        return (
            said if isinstance(said, web.Response) else web.json_response({"choices": [{"message": {"content": said}}]})
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", requests
    finally:
        await runner.cleanup()


async def score(reward: RubricReward, completion: str = "2", **data: Any) -> Any:
    """The reward as a rollout calls it."""
    return await AsyncRewardWrapper(reward)("1+1=", completion, [1], [2], **data)


async def test_points_are_parts_divided_by_the_points_above_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    monkeypatch.setenv("ARCHON_SERVERS_KEY", "of the servers")
    said = json.dumps({"right": True, "short": False, "rude": True})
    async with endpoint(lambda _: f"I think {{1}}.\n```json\n{said}\n```") as (url, requests):
        reward = await score(RubricReward(Judge(url, "judge"), ITEMS), answer="2")
    assert reward.parts == {"right": 0.75, "short": 0.0, "rude": -0.5} and reward == 0.25
    (request,) = requests
    assert request["key"] == "Bearer secret" and request["model"] == "judge"
    text = request["messages"][0]["content"]
    assert all(part in text for part in ("1+1=", "<answer>\n2\n</answer>", "<reference>\n2\n", "Is it rude?"))
    schema = request["response_format"]["json_schema"]["schema"]
    assert schema["required"] == list(ITEMS) and schema["properties"]["rude"] == {"type": "boolean"}


async def test_equal_answers_cost_one_request_also_in_another_run(tmp_path: Path) -> None:
    async with endpoint(lambda _: GOOD, seconds=0.05) as (url, requests):
        for _ in range(2):
            judge = Judge(url, "judge", cache=tmp_path / "verdicts.sqlite")
            reward = RubricReward(judge, ITEMS)
            assert await asyncio.gather(*(score(reward, text) for text in "22232")) == [1.0] * 5
        assert len(requests) == 2 and (judge.requests, judge.cached) == (0, 5)
        # What changes the request is asked again.
        other = Judge(url, "judge", cache=tmp_path / "verdicts.sqlite", temperature=1.0, json_schema=False)
        await score(RubricReward(other, ITEMS))
        assert len(requests) == 3 and "response_format" not in requests[-1]


async def test_votes_are_averaged_and_their_agreement_is_a_metric() -> None:
    replies = itertools.cycle([GOOD, GOOD, json.dumps({"right": False, "short": True, "rude": False})])
    workflow_context.enter(context := EpisodeContext())
    async with endpoint(lambda _: next(replies)) as (url, requests):
        reward = await score(RubricReward(Judge(url, "judge", temperature=1.0), ITEMS, votes=3))
    assert len(requests) == 3
    assert reward.parts == pytest.approx({"right": 0.75 * 2 / 3, "short": 0.25, "rude": 0.0})
    assert context.numbers["judge/agreement"] == pytest.approx([(2 / 3 + 1 + 1) / 3])


async def test_failures_are_tried_again_and_then_cost_the_sample() -> None:
    faults: list[Any] = [web.Response(status=503), "I do not know.", GOOD]
    async with endpoint(lambda _: faults.pop(0)) as (url, requests):
        assert await score(RubricReward(Judge(url, "judge", retries=2), ITEMS)) == 1.0
        assert len(requests) == 3
    for reply, retries, error, message in (
        ("I do not know.", 1, RewardInvalid, "the judge replied 'I do not know.'; expected a JSON object"),
        (web.Response(status=400, text="no such model"), 1, RewardRaised, "refused a request: .*no such model"),
    ):
        async with endpoint(partial(lambda said, _: said, reply)) as (url, requests):
            with pytest.raises(error, match=message):
                await score(RubricReward(Judge(url, "judge", retries=retries), ITEMS))
            assert len(requests) == (2 if error is RewardInvalid else 1)  # a refused request is not sent again


async def test_a_canceled_answer_does_not_cancel_the_request_of_another() -> None:
    async with endpoint(lambda _: GOOD, seconds=0.2) as (url, requests):
        reward = RubricReward(Judge(url, "judge"), ITEMS)
        first, second = (asyncio.create_task(score(reward)) for _ in range(2))
        await asyncio.sleep(0.05)
        first.cancel()
        assert await second == 1.0 and len(requests) == 1


async def test_budget_rate_and_concurrency_are_kept() -> None:
    running = most = 0

    def reply(_: dict[str, Any]) -> str:
        nonlocal running
        running -= 1
        return GOOD

    async with endpoint(reply, seconds=0.02) as (url, requests):
        judge = Judge(url, "judge", max_requests=6, requests_per_minute=60 / 0.03, concurrency=2)
        send = judge._http.answer

        async def counted(*arguments: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            return await send(*arguments)

        judge._http.answer = counted
        reward = RubricReward(judge, ITEMS)
        outcomes = await asyncio.gather(*(score(reward, str(n)) for n in range(8)), return_exceptions=True)
        times = sorted(request["at"] for request in requests)
    assert outcomes.count(1.0) == len(requests) == 6 and most <= 2
    assert times[-1] - times[0] > 0.8 * 5 * 0.03
    refused = [str(outcome) for outcome in outcomes if isinstance(outcome, Exception)]
    assert len(refused) == 2 and all("6 requests, its whole budget" in text for text in refused)


async def test_rows_may_have_their_own_rubric() -> None:
    said = json.dumps({"item_0": True, "item_1": False})
    async with endpoint(lambda _: said) as (url, requests):
        reward = RubricReward(Judge(url, "judge"))
        rubric = [{"question": "Does it name Rome?", "points": 3}, {"question": "Is it polite?", "points": 1}]
        assert (await score(reward, rubric=rubric)).parts == {"rubric": 0.75}
        assert "item_0: Does it name Rome?" in requests[0]["messages"][0]["content"]
        for wrong in (None, [], [{"question": "?"}], "text", [{"question": "?", "points": -1}]):
            with pytest.raises(RewardError, match=r"column 'rubric' is .*expected a list of objects"):
                await score(reward, rubric=wrong)


async def test_the_judge_of_the_guide_behind_archon_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alphabet = "".join(map(chr, range(32, 127)))
    tokenizer = make_tokenizer(TokenizerRecipe(kind="characters", alphabet=alphabet, chat_template="chatml"))
    said = json.dumps({"right": True, "explained": False, "invented": True})
    server = AgentServer(tokenizer, Scripted(tokenizer, [said]), GenerationHyperparameters(max_new_tokens=8))
    monkeypatch.setenv("JUDGE_URL", await server.start())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(shown("rubric"), "guide", "exec"), names)
    try:
        assert (await score(names["score"])).parts == {"right": 0.75, "explained": 0.0, "invented": -0.5}
    finally:
        await server.close()


@pytest.mark.parametrize(
    "text",
    ["", "yes", "{}", '{"a": 1}', '{"a": true, "b": true}', '{"a": true', "{" * 99, "[true]", '{"a": ' + "[" * 10**5],
    ids=range(9),
)
def test_an_unusable_verdict_is_refused(text: str) -> None:
    assert parse_verdict('{"a": true}', ["a"]) == {"a": True}
    with pytest.raises(RewardInvalid, match="expected a JSON object with true or false"):
        parse_verdict(text, ["a"])


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    for options, message in (
        ({"concurrency": 0}, "concurrency is 0; expected at least 1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"seconds": 0}, "must be above 0"),
        ({"cache": tmp_path}, "cannot be opened"),
    ):
        with pytest.raises(ConfigError, match=message):
            Judge("http://127.0.0.1:1", "judge", **options)
    judge = Judge("http://127.0.0.1:1", "judge")
    for items, votes, message in (
        ({}, 1, "0 items"),
        ({"a": ("?", -1.0)}, 1, "points above 0"),
        (ITEMS, 0, "votes is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            RubricReward(judge, items, votes=votes)
