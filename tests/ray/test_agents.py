"""Agents in workers on the nodes of a Ray cluster: one that fails, or is lost with its worker, costs its own sample."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters
from archon.remote.config import WorkersConfig
from archon.rl import AgentWorkflow
from archon.rl.episode_context import EpisodeContext, EpisodeEngine, workflow_context
from archon.rl.trajectories import validate_trajectory
from archon.schema.errors import ConfigError, RolloutError, UserError
from tests.ray.agents import Told
from tests.remote.test_launch import is_alive, wait_for
from tests.small_qwen3 import small_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

GCONFIG = GenerationHyperparameters(n_samples=3, max_new_tokens=4)
ROW = {"prompt": "12+34=", "answer": "46"}


@pytest.fixture
def engine(tokenizer: Any) -> InProcessEngine:
    return InProcessEngine.from_model(small_model(len(tokenizer)), tokenizer, max_slots=16, page_size=8)


def run(
    engine: InProcessEngine, workflow: AgentWorkflow, episodes: int = 1
) -> list[tuple[dict[str, Any] | BaseException, EpisodeContext]]:
    """Run episodes one after another on one loop, and ends the workers."""

    async def one(seed: int) -> tuple[dict[str, Any] | BaseException, EpisodeContext]:
        context = EpisodeContext(seed=seed)
        workflow_context.enter(context)
        try:
            result = await workflow.arun_episode(EpisodeEngine(engine, context), dict(ROW))
        except UserError as error:
            return error, context
        assert result is not None
        return result, context

    async def work() -> list[Any]:
        try:
            return [await one(seed) for seed in range(episodes)]
        finally:
            await workflow.aclose()

    return asyncio.run(work())


def made(how: str, folder: Path, tokenizer: Any, seconds: float = 60.0, **workers: Any) -> AgentWorkflow:
    config = WorkersConfig(kind="ray", **{"agents": 3, **workers})
    return AgentWorkflow(Told(how, folder), GCONFIG, tokenizer, timeout_seconds=seconds, workers=config)


def test_agents_run_on_nodes_and_ask_the_trainer(ray: Any, engine: Any, tokenizer: Any, tmp_path: Path) -> None:
    ((group, context),) = run(engine, made("well", tmp_path, tokenizer))
    assert not isinstance(group, BaseException)
    validate_trajectory(group)
    assert group["rewards"].tolist() == [1.0] * 3 and not context.drops
    assert context.numbers["asked"] == [1.0] * 3, "what an agent records arrives"
    pids = {int((tmp_path / f"{sample}").read_text()) for sample in range(3)}
    assert os.getpid() not in pids
    wait_for(lambda: not any(map(is_alive, pids)))


def test_an_agent_on_a_node_samples_what_it_would_here(ray: Any, engine: Any, tokenizer: Any, tmp_path: Path) -> None:
    ((there, _),) = run(engine, made("well", tmp_path, tokenizer, agents=1, runs=3))
    ((here, _),) = run(engine, AgentWorkflow(Told("well", tmp_path), GCONFIG, tokenizer))
    assert isinstance(there, dict) and isinstance(here, dict)
    assert there["input_ids"].equal(here["input_ids"])


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("raises", "agent_raised"),
        ("hangs", "agent_timeout"),
        ("blocks", "agent_timeout"),
        ("dies", "agent_lost"),
        ("nan", "reward_invalid"),
        ("none", "reward_invalid"),
        ("unknown", "agent_raised"),
    ],
)
def test_an_agent_that_fails_costs_its_sample_and_is_counted(
    ray: Any, engine: Any, tokenizer: Any, tmp_path: Path, how: str, kind: str
) -> None:
    """In two episodes, so that a worker which was lost or is blocked has been replaced."""
    seconds = 10.0 if kind == "agent_timeout" else 60.0
    for result, context in run(engine, made(how, tmp_path, tokenizer, seconds), episodes=2):
        assert isinstance(result, dict) and result["rewards"].tolist() == [1.0]
        assert context.drops == Counter({kind: 2})
        assert f"{next(iter(context.first_errors.values()))}"


def test_a_worker_that_dies_costs_the_runs_that_it_has(ray: Any, engine: Any, tokenizer: Any, tmp_path: Path) -> None:
    ((result, context),) = run(engine, made("dies with all", tmp_path, tokenizer, agents=1, runs=3))
    assert isinstance(result, RolloutError) and "was lost" in str(result)
    assert context.drops == Counter({"agent_lost": 3})


def test_a_mistake_in_the_configuration_ends_the_run(ray: Any, engine: Any, tokenizer: Any, tmp_path: Path) -> None:
    ((error, _),) = run(engine, made("refuses", tmp_path, tokenizer))
    assert isinstance(error, ConfigError)


def test_an_agent_that_cannot_be_sent_is_refused(ray: Any, tokenizer: Any) -> None:
    class Here(Told):
        pass

    with pytest.raises(ConfigError, match="the agent cannot be pickled"):
        AgentWorkflow(Here("well", Path()), GCONFIG, tokenizer, workers=WorkersConfig(kind="ray"))


def test_resources_that_ray_refuses_end_the_run(ray: Any, engine: Any, tokenizer: Any, tmp_path: Path) -> None:
    ((error, _),) = run(engine, made("well", tmp_path, tokenizer, resources={"object_store_memory": 1e9}))
    assert isinstance(error, ConfigError) and "cannot be started" in str(error)


def test_agents_for_which_there_is_no_place_end_the_run(
    ray: Any, engine: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archon.rl.ray_workers.START_SECONDS", 1.0)
    ((error, _),) = run(engine, made("well", tmp_path, tokenizer, resources={"quantum": 1.0}))
    assert isinstance(error, ConfigError)
    assert "no node has free resources" in str(error) and "quantum" in str(error)
