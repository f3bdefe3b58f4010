"""OpenEnv: archon's client against the package's own server, on loopback, and three steps of a run."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from archon.data import get_custom_dataset
from archon.rl import GenerationHyperparameters, RLTrainer
from archon.rl.config import RLConfig
from archon.rl.episode_context import EpisodeContext, workflow_context
from archon.rl.workflows import resolve_workflow
from archon.schema.errors import ConfigError
from archon.training.metrics import read_jsonl
from tests.rl.written import assert_each_prompt_trained_once
from tests.serve.scripted import Scripted

GCONFIG = GenerationHyperparameters(n_samples=1, max_new_tokens=32)


def make_app(sessions: int) -> Any:
    """A server of the package: say the word of the seed; 0.25 for one that has its length, which may be tried again."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Say(Action):
        word: str

    class Heard(Observation):
        text: str
        tries: int = 0

    class Words(Environment):  # type: ignore[type-arg]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
            self.word, self.tries = "ab" * (1 + (seed or 0) % 3), 0
            return Heard(text=f"Say {self.word}.")

        def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Heard:
            if action.word == "break":
                raise OSError("the disk is full")
            self.tries += 1
            right = action.word == self.word
            close = 0.25 * (len(action.word) == len(self.word))
            done = right or self.tries == 2
            return Heard(text="No.", tries=self.tries, done=done, reward=1.0 if right else close)

        @property
        def state(self) -> State:
            return State()

    return create_fastapi_app(Words, Say, Heard, max_concurrent_envs=sessions)


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., str]]:
    import uvicorn

    running = []

    def start(sessions: int = 8) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(make_app(sessions), host="127.0.0.1", port=port, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + 60
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.started
        running.append((server, thread))
        return f"openenv:http://127.0.0.1:{port}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(timeout=30)


def played(workflow: Any, engine: Any, seed: int) -> tuple[Any, EpisodeContext]:
    context = EpisodeContext(seed=3)

    async def episode() -> Any:
        workflow_context.enter(context)
        return await workflow.arun_episode(engine, {"seed": seed})

    return asyncio.run(episode()), context


@pytest.mark.slow
def test_episodes_are_played_at_the_packages_own_server(serve: Callable[..., str], speaker: Any) -> None:
    """The rewards of the steps are summed, the seed chooses the episode, and a failing server costs its sample."""
    name = serve()
    workflow = resolve_workflow(name, gconfig=GCONFIG, tokenizer=speaker)
    episodes = [(0, ["ab"], 1.0), (1, ["abab"], 1.0), (1, ["baba", "abab"], 1.25), (2, ["x", "x"], 0.0)]
    for seed, words, expected in episodes:
        engine = Scripted(speaker, words)
        group, context = played(workflow, engine, seed)
        assert group["rewards"].tolist() == [expected] and context.numbers["unfinished"] == [0.0]
        assert f"Say {'ab' * (1 + seed)}." in speaker.decode(engine.requests[0].input_ids)
        trained = group["input_ids"][0][group["loss_mask"][0] == 1].tolist()
        assert trained == [i for word in words for i in [*speaker(word).input_ids, speaker.eos_token_id]]
    two = resolve_workflow(name, gconfig=GCONFIG.new(n_samples=2), tokenizer=speaker)
    group, context = played(two, Scripted(speaker, ["break", "ab"]), 0)
    assert group["rewards"].tolist() == [1.0] and context.drops == {"environment_failed": 1}
    assert "the disk is full" in str(context.first_errors["environment_failed"])


@pytest.mark.slow
def test_a_server_of_few_sessions_is_shared_or_its_refusal_said(serve: Callable[..., str], speaker: Any) -> None:
    name = serve(sessions=1)
    three = GCONFIG.new(n_samples=3)
    one_by_one = resolve_workflow(name, {"max_concurrent": 1}, gconfig=three, tokenizer=speaker)
    group, context = played(one_by_one, Scripted(speaker, ["ab"] * 3), 0)
    assert group["rewards"].tolist() == [1.0] * 3 and not context.drops
    at_once = resolve_workflow(name, gconfig=three, tokenizer=speaker)
    _, context = played(at_once, Scripted(speaker, ["ab"] * 3), 0)
    assert context.drops == {"environment_failed": 2}
    assert "set workflow_args.max_concurrent" in str(context.first_errors["environment_failed"])


@pytest.mark.slow
def test_three_steps_are_trained_at_a_server(serve: Callable[..., str], short_run: Callable[..., RLConfig]) -> None:
    name = serve()
    config = short_run(workflow=name, train_data={"path": f"{name}?size=8"})
    metrics = RLTrainer(config).train()
    assert metrics["version"] == 3
    assert_each_prompt_trained_once(config)
    for one in read_jsonl(Path(config.run_dir) / "trajectories.jsonl"):
        assert "Say ab" in one["prompt"] and one["reward"] in (0.0, 0.25, 0.5, 1.0, 1.25)


@pytest.mark.slow
def test_fields_of_the_server_are_checked(serve: Callable[..., str], speaker: Any) -> None:
    name = serve()
    for query, message in [
        ("?action_field=words", "an action has no field 'words'; choose from word: openenv:http"),
        ("?observation_field=x", "an observation has no field 'x'; choose from text, tries: openenv"),
        ("?field=x", "an environment's workflow has no option 'field'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            resolve_workflow(name + query, gconfig=GCONFIG, tokenizer=speaker)


def test_a_name_without_a_server_is_refused(speaker: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected the server's base URL, such as openenv:http://127\.0\.0\.1:8000"):
        get_custom_dataset("openenv:echo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ConfigError, match="start the server first"):
        resolve_workflow(f"openenv:{url}", gconfig=GCONFIG, tokenizer=speaker)
    assert len(get_custom_dataset(f"openenv:{url}?size=3")) == 3
