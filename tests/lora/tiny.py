"""Small runs that train adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.rl.config import RLConfig
from archon.schema.config import EngineConfig
from tests.engine.tiny import sft_batch
from tests.rl.conftest import small_run

LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0}
RANDOM: dict[str, Any] = LORA | {"init": "random"}
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
"""Fields that give the tiny model of `tests.engine` experts."""


def engine_of(base: str, **options: Any) -> ArchonEngine:
    defaults: dict[str, Any] = {"path": base, "device": "cpu", "lora": LORA, "optimizer": {"lr": 1e-2}}
    engine = ArchonEngine(EngineConfig.parse(defaults | options))
    engine.initialize()
    return engine


def train(engine: ArchonEngine, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        batch = sft_batch(seed=step % 2)
        losses.append(engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)["loss"])
    return losses


def rl_run(checkpoint: Path, run_dir: Path, /, **changes: Any) -> RLConfig:
    actor = {"path": str(checkpoint), "device": "cpu", "optimizer": {"lr": 1e-2}, "lora": LORA}
    values = small_run(checkpoint, run_dir) | {"actor": actor, "ref": {}, "algorithm": {"kl": {"coef": 0.1}}}
    return RLConfig.parse(values | changes)


def pairs(split: str) -> list[dict[str, str]]:
    """Rows of preferences, for `python:tests.lora.tiny.pairs`."""
    return [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(n)} for n in range(1, 20)]
