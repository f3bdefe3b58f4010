"""An agent in the trainer's loop: what it is trained on is what the trainer computes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.rl import RLTrainer
from archon.rl.bootstrap import write_blank
from archon.rl.config import RLConfig
from archon.rl.episode_context import workflow_context
from archon.rl.rollout import WorkflowError
from archon.training.config import BootstrapConfig, TokenizerRecipe
from archon.training.metrics import read_jsonl
from tests.serve.test_workflow import ask, rows_of
from tests.small_qwen3 import SMALL_QWEN3
from tests.tolerances import FIRST_RATIO_FP32


class Retries:
    """Answers twice; the reward is how many digits the second answer has."""

    async def run(self, data: dict[str, Any], **given: Any) -> float:
        talk = [*data["messages"]]
        first = await ask(talk, given)
        talk += [first["choices"][0]["message"], {"role": "user", "content": "0+0="}]
        second = await ask(talk, given)
        return float(sum(map(str.isdigit, second["choices"][0]["message"]["content"])))


def test_first_step_importance_ratio_is_one_for_an_agent(rl_config: Callable[..., RLConfig]) -> None:
    config = rl_config(
        workflow_args={"agent": f"{__name__}.Retries"}, rollout={"prompts_per_step": 6, "n_gold_checks": 0}
    )
    trainer = RLTrainer(config)
    with trainer.opened("archon.rl.AgentWorkflow"):
        for step in range(3):
            batch = trainer.rollout_batch().trajectories
            trained = batch["loss_mask"] == 1
            assert batch["turn_ids"].max() == 1
            assert (batch["versions"][trained] == step).all()
            logprobs = trainer.engine.forward_batch(batch, temperature=1.0)
            assert (logprobs - batch["logprobs"])[trained].abs().max() < FIRST_RATIO_FP32
            metrics = trainer.train_step()
            assert metrics["first_logprob_diff"] < FIRST_RATIO_FP32
            assert metrics["agent_answers"] == 2.0
            assert metrics["grad_norm"] > 0
    assert torch.isfinite(batch["logprobs"]).all()


LONG = 900
"""Tokens of an answer that nobody reads to its end."""
READ: list[tuple[int, ...]] = []
"""Prompt and answer of every call that was."""


class BreaksOff:
    """Sample 0 reads one answer; 1 breaks one off; 2 does both; 3 breaks one off and then reads one."""

    async def run(self, data: dict[str, Any], **given: Any) -> float:
        sample = workflow_context.get().sample_index
        assert sample is not None
        if sample in (1, 3):
            await read_stream(data["messages"], given, whole=False)
        if sample != 1:
            READ.append(await read_stream(data["messages"], given, whole=True))
        if sample == 2:
            await read_stream(data["messages"], given, whole=False)
        return float(sample)


class OnlyBreaksOff:
    async def run(self, data: dict[str, Any], **given: Any) -> float:
        await read_stream(data["messages"], given, whole=False)
        return 1.0


async def read_stream(messages: list[dict[str, Any]], given: dict[str, Any], *, whole: bool) -> tuple[int, ...]:
    """Prompt and answer of a call in tokens. Goes when it has read the reason why the answer ended, before the stream
    does; or at once, of one that is far from its end."""
    body = {"messages": messages, "stream": True, "return_token_ids": True} | ({} if whole else {"max_tokens": LONG})
    headers = {"Authorization": f"Bearer {given['api_key']}"}
    url = f"{given['base_url']}/chat/completions"
    tokens: list[int] = []
    async with given["http_client"].stream("POST", url, json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            if line:
                chunk = json.loads(line.removeprefix("data: "))
                (choice,) = chunk["choices"]
                tokens += [*chunk.get("prompt_token_ids", []), *choice.get("token_ids", [])]
                if not whole or choice["finish_reason"]:
                    break
    return tuple(tokens)


@pytest.fixture
def roomy_config(rl_config: Callable[..., RLConfig], tmp_path: Path) -> RLConfig:
    """Of a model that writes long answers: the two tokens that end one are among two thousand."""
    alphabet = "0123456789+=" + "".join(map(chr, range(0x4E00, 0x4E00 + 2000)))
    recipe = TokenizerRecipe(kind="characters", alphabet=alphabet, chat_template="plain")
    hf_config = SMALL_QWEN3 | {"max_position_embeddings": 2 * LONG}
    write_blank(BootstrapConfig(hf_config=hf_config, tokenizer=recipe), tmp_path / "roomy")
    return rl_config(
        total_steps=2,
        actor={"path": str(tmp_path / "roomy"), "init_from_scratch": True, "optimizer": {"lr": 1e-3}},
        rollout={"prompts_per_step": 2, "n_gold_checks": 0, "dump_groups": 2},
    )


def test_an_answer_that_the_agent_breaks_off_is_not_trained_and_is_counted(
    roomy_config: RLConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """What is trained is what was sampled to its end and recorded; a sample that read nothing so is lost."""
    caplog.set_level(logging.WARNING)
    trainer = RLTrainer(roomy_config)
    with trainer.opened(f"{__name__}.BreaksOff"):
        for _ in range(2):
            READ.clear()
            batch = trainer.rollout_batch()
            rows, trained = batch.trajectories, batch.trajectories["loss_mask"] == 1
            assert sorted(map(tuple, rows_of(rows))) == sorted(READ) and len(READ) == 2 * 3
            assert rows["rewards"].tolist() == [0.0, 2.0, 3.0] * 2
            logprobs = trainer.engine.forward_batch(rows, temperature=1.0)
            assert (logprobs - rows["logprobs"])[trained].abs().max() < FIRST_RATIO_FP32
            assert batch.counts["dropped/broken_off"] == 2
            assert batch.numbers["agent_answers"] == 1.0
            assert batch.numbers["agent_answers_broken_off"] == pytest.approx(2 / 3)
        assert trainer.generator.abort() == 0
        assert trainer.generator.stats.decode_tokens < 2 * 6 * LONG / 2, "what is broken off is not sampled to its end"
    assert not caplog.records, "a client that goes is no error of the server's"


def test_a_run_whose_agent_breaks_answers_off_trains_the_others_and_shows_the_count(roomy_config: RLConfig) -> None:
    RLTrainer(roomy_config).train(f"{__name__}.BreaksOff")
    rows = read_jsonl(Path(roomy_config.run_dir) / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollout/dropped/broken_off"] == 2 and row["samples"] == 6
        assert row["agent_answers_broken_off"] == pytest.approx(2 / 3)
        assert row["first_logprob_diff"] < FIRST_RATIO_FP32 and row["grad_norm"] > 0


def test_an_agent_that_reads_no_answer_to_its_end_ends_the_run_in_one_line(roomy_config: RLConfig) -> None:
    with pytest.raises(WorkflowError, match="canceled all of its 1 answers; a canceled answer is not"):
        RLTrainer(roomy_config).train(f"{__name__}.OnlyBreaksOff")
