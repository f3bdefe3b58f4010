"""A run whose second optimizer step fails after it has changed the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archon.checkpoint.native import load_latest
from archon.training.loop import BaseTrainer


def require_no_checkpoint_of_a_failed_update(
    trainer: BaseTrainer, train: Callable[[], Any], checkpoints: Path, engine: str = "engine"
) -> None:
    """Run `train` and require that it fails in step 2 and saves nothing.

    The first step is not saved either if `checkpoint.every` is 0, so any checkpoint holds half-updated weights.

    Args:
        trainer: the trainer of the run.
        train: starts the run.
        checkpoints: the run's checkpoint directory.
        engine: attribute of the trainer whose optimizer fails.
    """
    step = trainer.train_step

    def fail(*_: Any) -> None:
        raise ArithmeticError("the optimizer failed")

    def failing_step() -> dict[str, float]:
        if trainer.step == 1:
            getattr(trainer, engine).optimizer.register_step_post_hook(fail)
        return step()

    trainer.train_step = failing_step  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError, match="the optimizer failed"):
        train()
    assert trainer.step == 1
    assert load_latest(checkpoints) is None
