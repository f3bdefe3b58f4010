"""Experts that servers report, in a run with a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archon.generation.expert_record import decode_server_experts
from archon.models import get_model_spec
from archon.remote.engine import NoServerError
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.schema.errors import ConfigError, RolloutError
from tests.remote.twin import VLLMTwin
from tests.rl.conftest import fresh_checkpoint, small_run
from tests.rl.test_router_biases import FAMILIES, blank_of
from tests.tolerances import FIRST_RATIO_FP32

Served = Callable[..., tuple[VLLMTwin, RLTrainer]]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a model whose first layer is dense."""
    folder = tmp_path_factory.mktemp("served")
    blank = blank_of("glm4_moe", folder)
    return fresh_checkpoint(blank, folder / "model")


@pytest.fixture
def served(moe: Path, tmp_path: Path) -> Iterator[Served]:
    """Start a twin of vLLM and makes a trainer for a run on it that replays experts."""
    started: list[VLLMTwin] = []

    def start(**settings: Any) -> tuple[VLLMTwin, RLTrainer]:
        started.append(VLLMTwin(moe, **settings))
        run = small_run(moe, tmp_path / "run")
        run |= {"generator": {"record_experts": True}, "actor": {"path": str(moe), "optimizer": {"lr": 1e-3}}}
        run["rollout"]["servers"] = [started[-1].url]
        return started[-1], RLTrainer(RLConfig.parse(run))

    yield start
    for server in started:
        server.stop()


@pytest.mark.parametrize("scale_out", [True, False], ids=["generate", "completions"])
def test_a_run_trains_with_the_experts_that_servers_report(served: Served, scale_out: bool) -> None:
    _, trainer = served(reports_experts=True, scale_out=scale_out)
    with trainer.opened():
        metrics = trainer.train_step()
    missing = metrics["samples"] / metrics["tokens"]  # the last token of each answer
    assert metrics["router_replay/share"] == pytest.approx(1 - missing, abs=1e-6)
    assert metrics["router_replay/changed"] < 0.05
    assert metrics["first_logprob_diff"] < FIRST_RATIO_FP32


def test_a_server_that_reports_no_experts_ends_the_run(served: Served) -> None:
    _, trainer = served()
    with trainer.opened(), pytest.raises(ConfigError, match=r"start it with --enable-return-routed-experts"):
        trainer.train_step()


def test_a_server_that_reports_experts_of_fewer_tokens_is_left_out(served: Served) -> None:
    server, trainer = served(reports_experts=True)
    server.faults = {"experts"}
    with trainer.opened(), pytest.raises(NoServerError, match=r"reported experts of \d+ tokens have shape \d+×1×2"):
        trainer.train_step()


def test_experts_of_all_layers_are_those_of_the_layers_with_experts() -> None:
    args = get_model_spec("glm4_moe").model_args_class.from_hf_config(
        {"model_type": "glm4_moe", "vocab_size": 15, **FAMILIES["glm4_moe"]}
    )
    reported = np.arange(12, dtype=np.int32).reshape(3, args.n_layers, 2) % 8
    stored = decode_server_experts(reported, args, 2)
    assert stored.dtype == np.uint8
    assert stored.tolist() == reported[:2, 1:].tolist()
    assert decode_server_experts(reported[:, 1:], args, 2).tolist() == stored.tolist()
    for wrong in (reported + 8, reported - 8, reported.astype(np.float32)):
        with pytest.raises(RolloutError, match=r"outside of 0 to 7"):
            decode_server_experts(wrong, args, 2)
