"""Teachers of on-policy distillation, in process and behind a server, and a run that learns from one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.engine.engine import ArchonEngine
from archon.rl.bootstrap import ensure_checkpoint
from archon.rl.config import RLConfig, TeacherServerConfig
from archon.rl.teacher import TeacherServer, open_teacher
from archon.rl.trainer import RLTrainer
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError, RolloutError
from archon.training.config import BootstrapConfig, TokenizerRecipe
from tests.rl.formulas import plain_logprobs
from tests.rl.objectives import trajectories
from tests.serve.served import served
from tests.small_qwen3 import SMALL_QWEN3

DISTILL: dict[str, Any] = {"algorithm": {"preset": "distill"}}


def make_checkpoint(folder: Path, alphabet: str = "0123456789+=") -> Path:
    recipe = TokenizerRecipe(kind="characters", alphabet=alphabet, chat_template="plain")
    ensure_checkpoint(BootstrapConfig(hf_config=SMALL_QWEN3, tokenizer=recipe, seed=5), folder)
    return folder


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another checkpoint with the actor's vocabulary."""
    return make_checkpoint(tmp_path_factory.mktemp("teacher") / "teacher")


def test_a_teacher_in_process_scores_the_sampled_tokens_as_whole_logits_do(
    rl_config: Callable[..., RLConfig], taught: Path, tokenizer: Any
) -> None:
    gconfig = {"n_samples": 1, "max_new_tokens": 4, "temperature": 0.7}
    config = rl_config(**DISTILL, teacher={"path": str(taught)}, gconfig=gconfig)
    teacher = config.resolve().teacher
    assert isinstance(teacher, EngineConfig) and not teacher.init_from_scratch and teacher.optimizer is None
    batch = trajectories()
    found = open_teacher(teacher, config, tokenizer)(batch)
    engine = ArchonEngine(teacher)
    engine.initialize()
    for row in range(9):
        trained = batch["loss_mask"][row] == 1
        with torch.no_grad():
            expected = plain_logprobs(engine, batch, row, 0.7)[0]
        torch.testing.assert_close(found[row][trained].float(), expected.float(), rtol=1e-5, atol=1e-5)
    assert found[batch["loss_mask"] == 0].abs().max() == 0


def test_a_teacher_behind_a_server_scores_as_in_process(
    rl_config: Callable[..., RLConfig], taught: Path, tokenizer: Any
) -> None:
    config = rl_config(**DISTILL, teacher={"path": str(taught)})
    teacher = config.resolve().teacher
    assert isinstance(teacher, EngineConfig)
    batch = trajectories(seed=2)
    expected = open_teacher(teacher, config, tokenizer)(batch)
    with served(taught) as url:
        remote = rl_config(**DISTILL, teacher={"url": url, "model": "teacher"}).resolve().teacher
        assert isinstance(remote, TeacherServerConfig)
        found = TeacherServer(remote)(batch)
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-5, atol=1e-5)
    with pytest.raises(RolloutError, match=r"teacher.url http.*: Connection error"):
        TeacherServer(remote)(batch)


def test_a_url_of_no_server_is_refused(rl_config: Callable[..., RLConfig]) -> None:
    with pytest.raises(ConfigError, match=r"teacher.url: got 'file:///x'; expected http://HOST:PORT"):
        rl_config(**DISTILL, teacher={"url": "file:///x"})


def test_a_run_comes_closer_to_its_teacher(rl_config: Callable[..., RLConfig], taught: Path) -> None:
    actor = rl_config().actor.model_dump() | {"optimizer": {"lr": 5e-3}}
    rollout = rl_config().rollout.model_dump() | {"prompts_per_step": 48}
    config = rl_config(**DISTILL, teacher={"path": str(taught)}, actor=actor, rollout=rollout, total_steps=16)
    with RLTrainer(config).opened() as trainer:
        gaps = [trainer.train_step()["teacher_kl"] for _ in range(16)]
    assert gaps[0] > 0.3 and sum(gaps[-3:]) / 3 < gaps[0] / 2, gaps


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (DISTILL, "advantage is distill, which needs a teacher: set teacher.path"),
        ({"teacher": {"path": "x"}}, "a teacher is set, but algorithm.advantage 'grpo' uses none"),
        (DISTILL | {"teacher": {"dtype": "float64"}}, "teacher has neither path nor url; set teacher.path"),
        (DISTILL | {"teacher": {"url": "http://x", "modl": "m"}}, "did you mean 'model'"),
        (
            DISTILL | {"teacher": {"url": "http://x"}, "gconfig": {"temperature": 0.5}},
            "temperature is 0.5, but teacher.url returns logprobs at temperature 1 only",
        ),
        (
            DISTILL | {"teacher": {"url": "http://x"}, "rollout": {"agent_sampling": "allow"}},
            "agent_sampling=allow lets agents choose temperatures, but teacher.url",
        ),
    ],
)
def test_a_teacher_that_cannot_be_is_refused(
    rl_config: Callable[..., RLConfig], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        rl_config(**changes)


def test_a_teacher_of_another_vocabulary_is_refused(
    rl_config: Callable[..., RLConfig], tokenizer: Any, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", alphabet="=+9876543210 ")
    config = rl_config(**DISTILL, teacher={"path": str(other)})
    teacher = config.resolve().teacher
    assert teacher is not None
    with pytest.raises(ConfigError, match="its vocabulary differs from the actor's"):
        open_teacher(teacher, config, tokenizer)
