"""A layout that the model or the options do not allow is refused before any process group is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError, LayoutError
from tests.engine.tiny import write_config

MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 15,
    "tie_word_embeddings": False,
}


def engine(folder: Path, layout: str, hf: dict[str, Any], **config: Any) -> ArchonEngine:
    path = write_config(folder, **hf)
    return ArchonEngine(
        EngineConfig.model_validate(
            {"path": path, "device": "cpu", "layout": layout, "init_from_scratch": True} | config
        )
    )


@pytest.mark.parametrize(
    ("layout", "hf", "config", "message"),
    [
        ("t4", {}, {}, "tp = 4 does not divide the 6 attention heads; nearest layouts that this model fits: "),
        ("t2", {}, {}, "tp = 2 does not divide the vocabulary of 101"),
        ("d4e4", MOE, {}, "ep = 4 does not divide the 6 experts"),
        ("(attn:d2t2|ffn:d2t2)", MOE | {"vocab_size": 102}, {}, "etp = 2 does not divide the 15 hidden features"),
        ("d2e2", {}, {}, "lay out experts, and the model has none"),
        ("c4", {}, {"context_parallel": "ulysses"}, "cp = 4 does not divide the 6 heads"),
        ("p4", {}, {}, "has 4 stages, and the model 3 layers"),
    ],
)
def test_sizes_that_a_degree_does_not_divide(
    layout: str, hf: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused = engine(tmp_path, layout, hf, **config)
    with pytest.raises(LayoutError, match=message):
        refused.initialize()
    assert not dist.is_initialized() or dist.get_world_size() == 1


@pytest.mark.parametrize(
    ("layout", "hf", "config", "message"),
    [
        ("d1", {}, {"cpu_offload": True}, "cpu_offload = true needs sharded parameters"),
        (
            "d2",
            {},
            {"activation_checkpoint": {"mode": "memory_budget"}},
            "memory_budget needs torch.compile, which is off",
        ),
        ("d2", {}, {"router_aux_loss_coef": 0.1}, "router_aux_loss_coef = 0.1 balances experts"),
        ("p2", MOE, {"router_aux_loss_coef": 0.1}, "a pipeline has them on different ranks"),
        ("p2", {}, {"gradient_reduction": "per_microbatch"}, "a pipeline reduces gradients once a step"),
        (
            "d2",
            {},
            {"gradient_reduction": "step_in_backward", "optimizer": {"max_grad_norm": None}},
            "runs on one process, and layout d2 has 2",
        ),
        ("p2", {}, {"pipeline": {"schedule": "zbv"}, "compile": True}, "zbv splits the backward pass"),
    ],
)
def test_options_that_exclude_each_other(
    layout: str, hf: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused = engine(tmp_path, layout, {"num_hidden_layers": 4} | hf, **config)
    with pytest.raises(ConfigError, match=message):
        refused.initialize()
    assert not dist.is_initialized() or dist.get_world_size() == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda engine, batch: engine.train_batch(batch, CrossEntropyLoss(), loss_token_count),
        lambda engine, batch: engine.eval_batch(batch, CrossEntropyLoss(), loss_token_count),
        lambda engine, batch: engine.forward_batch(batch),
        lambda engine, batch: engine.save("nowhere"),
        lambda engine, batch: engine.load("nowhere"),
        lambda engine, batch: engine.state_dict(),
        lambda engine, batch: engine.offload(),
        lambda engine, batch: engine.step_lr_scheduler(),
    ],
)
def test_an_engine_that_was_not_initialised_says_so(
    use: Callable[[ArchonEngine, dict[str, torch.Tensor]], object], tmp_path: Path
) -> None:
    fresh = engine(tmp_path, "d1", {})
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "attention_mask": torch.ones(1, 4, dtype=torch.bool)}
    with pytest.raises(ConfigError, match=r"call initialize\(\) first"):
        use(fresh, batch)
    assert not hasattr(fresh, "no_such_name")
