"""An optimizer step inside the backward pass equals the step after it, and frees each gradient at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.parallel.fsdp import local_tensor
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError, UserError
from tests.engine.tiny import make_engine, sft_batch
from tests.tolerances import FORMULA_FP64

WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
TIED = {"tie_word_embeddings": True}


def engine_of(folder: Path, reduction: str, **options: Any) -> ArchonEngine:
    optimizer = {"lr": 1e-2, "max_grad_norm": None} | options.pop("optimizer", {})
    return make_engine(folder, gradient_reduction=reduction, optimizer=optimizer, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "hf": WIDE | TIED},  # parameters are DTensors
        {"max_tokens_per_mb": 21},  # several micro-batches
        {"optimizer": {"moments": "int8"}, "hf": WIDE},
        {"activation_checkpoint": {"mode": "full"}},
    ],
    ids=["float32", "bfloat16, tied", "micro-batches", "int8", "recomputed"],
)
def test_weights_are_bitwise_those_of_a_step_after_it(options: dict[str, Any], tmp_path: Path) -> None:
    results: list[list[dict[str, Tensor]]] = []
    for reduction in ("per_step", "step_in_backward"):
        engine, steps = engine_of(tmp_path, reduction, **options), list[dict[str, Tensor]]()
        for _ in range(3):
            metrics = engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
            norm = {"grad_norm": torch.tensor(metrics["grad_norm"], dtype=torch.float64)}
            steps.append({n: local_tensor(p.detach()).clone() for n, p in engine.model.named_parameters()} | norm)
        results.append(steps)
    for after, inside in zip(*results, strict=True):
        torch.testing.assert_close(inside.pop("grad_norm"), after.pop("grad_norm"), rtol=FORMULA_FP64, atol=0)
        assert all(inside[name].equal(weight) for name, weight in after.items())


def test_at_most_one_gradient_exists_at_a_time(tmp_path: Path) -> None:
    engine, alive = engine_of(tmp_path, "step_in_backward"), list[int]()
    assert engine.optimizer is not None
    step = engine.optimizer.step

    def counting() -> None:
        alive.append(sum(p.grad is not None for p in engine.model.parameters()))
        step()

    engine.optimizer.step = counting  # type: ignore[method-assign]
    engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
    assert alive == [1] * len({id(p) for p in engine.model.parameters()}) + [0]


def test_gradients_alone_change_no_weight(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "step_in_backward")
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
    after = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    grads, _ = engine.gradients(sft_batch(), CrossEntropyLoss(), loss_token_count)
    assert grads.keys() == before.keys()
    assert all(p.equal(after[name]) for name, p in engine.model.named_parameters())
    assert any(not after[name].equal(weight) for name, weight in before.items())


def test_a_gradient_that_is_not_finite_ends_training(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "step_in_backward")
    with torch.no_grad():
        engine.full_model.norm.weight[0] = float("nan")
    with pytest.raises(UserError, match=r"step 1 is not finite, and .* has changed the weights; resume"):
        engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
    with pytest.raises(ConfigError, match="load the last checkpoint"):
        engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "and optimizer.max_grad_norm is 1; set it to null"),
        ({"optimizer": {"max_grad_norm": None}, "lora": {"loras": {"x": {"rank": 2}}}}, "trains several LoRAs"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.parse({"path": "model", "gradient_reduction": "step_in_backward"} | changes, source="model")
