"""AgentWorkflow: agents that ask a real server over the real generator, and what is trained of it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest, ModelResponse
from archon.rl import AgentWorkflow
from archon.rl.episode_context import EpisodeContext, EpisodeEngine, workflow_context
from archon.rl.logprob_check import check_recomputable
from archon.rl.trajectories import validate_trajectory
from archon.rl.workflows import resolve_workflow
from archon.rl.workflows.agent import ProcessAgent
from archon.schema.errors import ConfigError
from tests.serve.scripted import Scripted

GCONFIG = GenerationHyperparameters(n_samples=4, max_new_tokens=6)
ROW = {"prompt": "12+34=", "answer": "46"}


async def ask(messages: list[dict[str, Any]], given: dict[str, Any], **body: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {given['api_key']}"}
    url = f"{given['base_url']}/chat/completions"
    response = await given["http_client"].post(url, json={"messages": messages, **body}, headers=headers)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


class OneTurn:
    """The reward is the length of the answer's text."""

    async def run(self, data: dict[str, Any], **given: Any) -> float:
        answer = await ask([{"role": "user", "content": data["prompt"]}], given)
        return float(len(answer["choices"][0]["message"]["content"]))


class Turns:
    """Says something after each answer; the reward is the number of the sample."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    async def run(self, data: dict[str, Any], **given: Any) -> Any:
        talk = [{"role": "user", "content": data["prompt"]}]
        for _ in range(self.turns):
            answer = await ask(talk, given)
            talk += [answer["choices"][0]["message"], {"role": "user", "content": "and?"}]
        return workflow_context.get().sample_index


class Recorder(EpisodeEngine):
    def __init__(self, engine: Any, context: EpisodeContext, check: Any = None) -> None:
        super().__init__(engine, context, check)
        self.answers: list[ModelResponse] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.answers.append(await super().agenerate(req))
        return self.answers[-1]


def run_episode(
    engine: Any, workflow: AgentWorkflow, seed: int = 0, check: Any = None
) -> tuple[dict[str, torch.Tensor], EpisodeContext, list[ModelResponse]]:
    context = EpisodeContext(seed=seed)
    recorder = Recorder(engine, context, check)

    async def episode() -> dict[str, torch.Tensor] | None:
        workflow_context.enter(context)
        return await workflow.arun_episode(recorder, ROW)

    result = asyncio.run(episode())
    assert result is not None
    return validate_trajectory(result), context, recorder.answers


def rows_of(result: dict[str, torch.Tensor]) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(result["input_ids"], result["attention_mask"], strict=True)]


def test_what_is_trained_is_what_was_sampled_and_only_that(engine: InProcessEngine, tokenizer: Any) -> None:
    result, context, answers = run_episode(engine, AgentWorkflow(OneTurn(), GCONFIG, tokenizer))
    assert not context.drops and len(answers) == 4
    talk = [{"role": "user", "content": "12+34="}]
    prompt = tokenizer(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)).input_ids
    by_tokens = {tuple(a.input_tokens + a.output_tokens): a for a in answers}
    for row, ids in enumerate(rows_of(result)):
        answer = by_tokens[tuple(ids)]
        trained = result["loss_mask"][row] == 1
        assert ids[: len(prompt)] == prompt and answer.input_tokens == prompt
        assert result["input_ids"][row][trained].tolist() == answer.output_tokens
        assert result["logprobs"][row][trained].equal(torch.tensor(answer.output_logprobs))
        assert result["versions"][row][trained].tolist() == answer.output_versions
        text = tokenizer.decode(answer.output_tokens, skip_special_tokens=True)
        assert result["rewards"][row].item() == len(text)


def test_each_run_of_an_agent_has_a_row_of_its_own(engine: InProcessEngine, tokenizer: Any) -> None:
    class Alters:
        async def run(self, data: dict[str, Any], **given: Any) -> float:
            talk = data["messages"]
            talk += [(await ask(talk, given))["choices"][0]["message"]]
            return float(len(talk))

    row = {"messages": [{"role": "user", "content": "12+34="}]}
    workflow = AgentWorkflow(Alters(), GCONFIG, tokenizer)
    for _ in range(2):
        result = asyncio.run(workflow.arun_episode(EpisodeEngine(engine, EpisodeContext()), row))
        assert result is not None and result["rewards"].tolist() == [2.0] * 4
    assert len(row["messages"]) == 1


def test_a_conversation_is_one_row_or_one_an_answer(engine: InProcessEngine, tokenizer: Any) -> None:
    """In both the same tokens are trained with the same logprobs, and the discount is of the tree."""
    trained = []
    for style, discounted in (("concat", 0.25), ("individual", 1.0)):
        workflow = AgentWorkflow(Turns(), GCONFIG, tokenizer, style=style, turn_discount=0.5)  # type: ignore[arg-type]
        result, context, answers = run_episode(engine, workflow, seed=5)
        assert context.numbers["agent_answers"] == [3.0] * 4
        linked = [row for row in range(len(result["rewards"])) if result["turn_ids"][row].max() == 2]
        if style == "concat":
            assert len(linked) >= 2  # a special token within an answer is text no more, and begins a new tree
        rewards = result["rewards"][linked] if linked else result["rewards"]
        assert {round(float(r), 6) for r in rewards} <= {discounted * s * d for s in range(4) for d in (1, 0.5, 0.25)}
        mask = result["loss_mask"] == 1
        trained.append(list(zip(result["input_ids"][mask].tolist(), result["logprobs"][mask].tolist(), strict=True)))
    assert len(trained[1]) == sum(len(answer.output_tokens) for answer in answers)
    assert set(trained[0]) == set(trained[1])  # the beginning that two branches share is in both


def test_answers_of_one_run_are_one_trajectory_to_the_group(engine: InProcessEngine, tokenizer: Any) -> None:
    """Group statistics are per trajectory, never per turn."""
    workflow = AgentWorkflow(Turns(), GCONFIG, tokenizer, style="individual")
    result, _, answers = run_episode(engine, workflow)
    runs = result["trajectory_ids"].tolist()
    assert len(runs) == len(answers) == 12 and sorted(runs) == sorted([*range(4)] * 3)


def test_text_that_is_tokenised_otherwise_begins_a_new_tree(tokenizer: Any) -> None:
    """The first answer holds a special token, which its text has lost: the second is no continuation of it."""
    pad = tokenizer.pad_token_id
    three, four = tokenizer("34").input_ids
    scripted = Scripted(tokenizer, [[three, pad, four], "5"])
    workflow = AgentWorkflow(Turns(2), GCONFIG.new(n_samples=1), tokenizer)
    result, _, _ = run_episode(scripted, workflow)
    assert [row.count(pad) for row in rows_of(result)] == [1, 0]
    assert result["turn_ids"].max() == 0
    scripted = Scripted(tokenizer, ["34", "5"])
    result, _, _ = run_episode(scripted, workflow)
    assert len(result["rewards"]) == 1 and result["turn_ids"].max() == 1


def test_the_same_seed_gives_the_same_group(engine: InProcessEngine, tokenizer: Any) -> None:
    workflow = AgentWorkflow(Turns(2), GCONFIG, tokenizer)
    first, second, other = (run_episode(engine, workflow, seed=seed)[0] for seed in (1, 1, 2))
    assert first["input_ids"].equal(second["input_ids"]) and first["logprobs"].equal(second["logprobs"])
    assert rows_of(first) != rows_of(other)
    assert len(set(map(tuple, rows_of(first)))) > 1


class Misbehaves:
    """Sample 0 behaves; the others do what they are told to."""

    def __init__(self, how: str) -> None:
        self.how = how

    async def run(self, data: dict[str, Any], **given: Any) -> Any:
        if self.how == "silent" and workflow_context.get().sample_index:
            return 1.0
        await ask([{"role": "user", "content": "1"}], given)
        if not workflow_context.get().sample_index:
            return 1.0
        if self.how == "hangs":
            await asyncio.sleep(60)
        if self.how == "raises":
            raise KeyError("a defect of the agent")
        return {"nan": float("nan"), "none": None, "unknown": {"chatcmpl-0": 1.0}}[self.how]


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("raises", "agent_raised"),
        ("hangs", "agent_timeout"),
        ("nan", "reward_invalid"),
        ("none", "reward_invalid"),
        ("unknown", "agent_raised"),
        ("silent", "agent_raised"),
    ],
)
def test_an_agent_that_fails_costs_its_sample_and_is_counted(
    engine: InProcessEngine, tokenizer: Any, how: str, kind: str
) -> None:
    workflow = AgentWorkflow(Misbehaves(how), GCONFIG, tokenizer, timeout_seconds=1.0)
    result, context, _ = run_episode(engine, workflow)
    assert result["rewards"].tolist() == [1.0]
    assert context.drops == {kind: 3}
    assert engine.abort() == 0


def test_agents_that_all_fail_raise_the_first_failure(engine: InProcessEngine, tokenizer: Any) -> None:
    class Broken:
        async def run(self, data: dict[str, Any], **given: Any) -> float:
            return data["no such column"]

    with pytest.raises(KeyError, match="no such column"):
        run_episode(engine, AgentWorkflow(Broken(), GCONFIG, tokenizer))


def test_an_evaluation_samples_as_it_is_told(engine: InProcessEngine, tokenizer: Any) -> None:
    greedy = GCONFIG.new(n_samples=2, greedy=True, max_new_tokens=3)
    evaluated = AgentWorkflow(OneTurn(), GCONFIG, tokenizer).with_gconfig(greedy)
    assert isinstance(evaluated, AgentWorkflow)
    result, _, answers = run_episode(engine, evaluated)
    assert len(answers) == 2 and answers[0].output_tokens == answers[1].output_tokens
    assert result["loss_mask"].sum(1).max() <= 3


def test_rewards_by_completion(engine: InProcessEngine, tokenizer: Any) -> None:
    class Scores:
        async def run(self, data: dict[str, Any], **given: Any) -> dict[str, float]:
            answers = [await ask([{"role": "user", "content": text}], given) for text in ("1", "2", "3")]
            return {answers[0]["id"]: 0.5, answers[2]["id"]: -1.0}

    result, context, _ = run_episode(engine, AgentWorkflow(Scores(), GCONFIG.new(n_samples=2), tokenizer))
    assert result["rewards"].tolist() == [0.5, -1.0] * 2
    assert context.numbers["agent_answers_unrewarded"] == [1.0, 1.0]


def test_sampling_that_cannot_be_replayed_stops_the_run_by_name(engine: InProcessEngine, tokenizer: Any) -> None:
    class Greedy:
        async def run(self, data: dict[str, Any], **given: Any) -> float:
            await ask([{"role": "user", "content": "1"}], given, temperature=0)
            return 1.0

    workflow = AgentWorkflow(Greedy(), GCONFIG, tokenizer)
    with pytest.raises(ConfigError, match=r"gconfig.greedy: got True, but the trainer cannot recompute its logprobs"):
        run_episode(engine, workflow, check=lambda gconfig: check_recomputable(gconfig, 1.0))
    run_episode(engine, workflow)  # as in an evaluation


def test_keys_end_with_their_episode_and_the_server_with_the_last(engine: InProcessEngine, tokenizer: Any) -> None:
    seen: list[dict[str, Any]] = []

    class Leaks:
        async def run(self, data: dict[str, Any], **given: Any) -> float:
            seen.append(given)
            await ask([{"role": "user", "content": "1"}], given)
            return 1.0

    class LooksBack:
        async def run(self, data: dict[str, Any], **given: Any) -> float:
            stolen = given | {"api_key": seen[0]["api_key"]}
            response = await given["http_client"].get(
                f"{given['base_url']}/models", headers={"Authorization": f"Bearer {stolen['api_key']}"}
            )
            assert response.status_code == 401
            await ask([{"role": "user", "content": "1"}], given)
            return 1.0

    run_episode(engine, AgentWorkflow(Leaks(), GCONFIG, tokenizer))
    assert len({given["api_key"] for given in seen}) == 4
    assert all(given["http_client"].is_closed for given in seen)
    run_episode(engine, AgentWorkflow(LooksBack(), GCONFIG, tokenizer))


def test_a_key_is_void_when_its_agent_has_ended(engine: InProcessEngine, tokenizer: Any) -> None:
    """Also while others still use the server."""
    keys: list[str] = []

    class SecondWaits:
        async def run(self, data: dict[str, Any], **given: Any) -> float:
            await ask([{"role": "user", "content": "1"}], given)
            keys.append(given["api_key"])
            if workflow_context.get().sample_index == 1:
                await asyncio.sleep(0.3)
                stolen = {"Authorization": f"Bearer {keys[0]}"}
                response = await given["http_client"].get(f"{given['base_url']}/models", headers=stolen)
                assert response.status_code == 401
            return 1.0

    _, context, _ = run_episode(engine, AgentWorkflow(SecondWaits(), GCONFIG.new(n_samples=2), tokenizer))
    assert not context.drops and len(keys) == 2


CHILD = """
import json, sys
from openai import OpenAI
row = json.load(sys.stdin)
answer = OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": row["prompt"]}])
print("thinking ...")
print(json.dumps({answer.id: 2.5}))
"""


def test_an_agent_in_its_own_process_finds_the_model_by_its_environment(
    engine: InProcessEngine, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    workflow = AgentWorkflow(ProcessAgent([sys.executable, "-c", CHILD]), GCONFIG.new(n_samples=2), tokenizer)
    result, context, answers = run_episode(engine, workflow)
    assert result["rewards"].tolist() == [2.5, 2.5] and not context.drops
    assert sorted(rows_of(result)) == sorted(a.input_tokens + a.output_tokens for a in answers)
    assert "OPENAI_BASE_URL" not in os.environ


def test_a_process_that_takes_too_long_is_killed(engine: InProcessEngine, tokenizer: Any, tmp_path: Path) -> None:
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    agent = ProcessAgent([sys.executable, "-c", code])
    workflow = AgentWorkflow(agent, GCONFIG.new(n_samples=1), tokenizer, timeout_seconds=2.0)
    with pytest.raises(TimeoutError, match="the agent ran longer than 2 s"):
        run_episode(engine, workflow)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise SystemExit('no model')", "exited with code 1: no model"),
        ("print('done')", "last line, got 'done'"),
    ],
)
def test_a_process_that_fails_says_why(engine: InProcessEngine, tokenizer: Any, code: str, told: str) -> None:
    workflow = AgentWorkflow(ProcessAgent([sys.executable, "-c", code]), GCONFIG.new(n_samples=1), tokenizer)
    with pytest.raises(ValueError, match=told):
        run_episode(engine, workflow)


def test_the_workflow_and_its_agent_may_be_named(tokenizer: Any) -> None:
    offered = {"reward_fn": None, "gconfig": GCONFIG, "tokenizer": tokenizer}
    path = f"{__name__}.OneTurn"
    workflow = resolve_workflow("archon.rl.AgentWorkflow", {"agent": path, "turn_discount": 0.9}, **offered)
    assert isinstance(workflow, AgentWorkflow) and type(workflow.agent).__name__ == "OneTurn"
    turns = resolve_workflow(f"{__name__}.Turns", {"turns": 5}, **offered)  # an agent by itself
    assert isinstance(turns, AgentWorkflow) and isinstance(turns.agent, Turns) and turns.agent.turns == 5
    assert turns.gconfig.n_samples == GCONFIG.n_samples
    with pytest.raises(ConfigError, match="Misbehaves needs how, but the trainer passes nothing to an agent"):
        resolve_workflow(Misbehaves, **offered)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"agent 'nowhere\.Agent' cannot be imported"):
        resolve_workflow(AgentWorkflow, {"agent": "nowhere.Agent"}, **offered)
    with pytest.raises(ConfigError, match="expected an object with `async def run"):
        AgentWorkflow(object(), GCONFIG, tokenizer)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"turn_discount = 0 in \(0, 1\]"):
        AgentWorkflow(OneTurn(), GCONFIG, tokenizer, turn_discount=0)
