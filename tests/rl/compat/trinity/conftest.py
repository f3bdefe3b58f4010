"""A tiny Qwen3 that can read the guides' prompts, behind the real generator."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Callable
from typing import Any

import pytest
import torch

from archon.generation import InProcessEngine
from archon.rl import GenerationHyperparameters, TrinityWorkflow, Workflow
from archon.rl.bootstrap import make_tokenizer
from archon.rl.episode_context import EpisodeContext, EpisodeEngine, workflow_context
from archon.rl.trajectories import validate_group
from archon.training.config import TokenizerRecipe
from tests.rl import rewards_for_tests as rewards
from tests.small_qwen3 import small_model

ROW = {"raw_task": {"question": "1+1=", "answer": "2"}}
GCONFIG = GenerationHyperparameters(n_samples=4, max_new_tokens=6)

Episode = tuple[dict[str, torch.Tensor] | None, EpisodeContext]
RunEpisode = Callable[..., Episode]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    alphabet = string.ascii_letters + string.digits + string.punctuation + " \n"
    return make_tokenizer(TokenizerRecipe(kind="characters", alphabet=alphabet, chat_template="chatml"))


@pytest.fixture
def engine(tokenizer: Any) -> InProcessEngine:
    model = small_model(len(tokenizer), max_seq_len=160)
    return InProcessEngine.from_model(model, tokenizer, max_slots=32, page_size=8)


@pytest.fixture
def adapted(tokenizer: Any) -> Callable[..., TrinityWorkflow]:
    def make(workflow: type[Workflow] | str, **arguments: Any) -> TrinityWorkflow:
        given = {"reward_fn": rewards.count_digits, "gconfig": GCONFIG} | arguments
        return TrinityWorkflow(workflow, tokenizer=tokenizer, **given)

    return make


@pytest.fixture
def run_episode(engine: InProcessEngine) -> RunEpisode:
    """One episode of a workflow, its result checked as a rollout checks it."""

    def run(workflow: TrinityWorkflow, row: dict[str, Any] = ROW, seed: int = 0) -> Episode:
        context = EpisodeContext(task_id=3, seed=seed)

        async def episode() -> dict[str, torch.Tensor] | None:
            workflow_context.enter(context)
            return await workflow.arun_episode(EpisodeEngine(engine, context), row)

        result = asyncio.run(episode())
        return (None if result is None else validate_group(result, context, "test")), context

    return run


def prompts(result: Any, tokenizer: Any) -> set[str]:
    """The texts before the first trained token."""
    rows = zip(result["input_ids"], result["attention_mask"], result["loss_mask"], strict=True)
    return {tokenizer.decode(ids[seen][: int(mask[seen].argmax())]) for ids, seen, mask in rows}
