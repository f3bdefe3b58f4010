"""Passes weights from an engine in any layout to a generator in this process."""

from __future__ import annotations

from typing import Any

import torch

from archon.engine.engine import ArchonEngine
from archon.generation import InProcessEngine
from archon.generation.replica import WeightSource


def weights_of(engine: ArchonEngine) -> WeightSource:
    """Returns the model, or where it is sharded over processes or has adapters an iterator of its weights, which all
    ranks consume."""
    return engine.whole_model if _is_plain(engine) else engine.weights()


def _is_plain(engine: ArchonEngine) -> bool:
    return engine.parallel_dims.world_size == 1 and not engine.lora


def in_process(engine: ArchonEngine, tokenizer: Any, **options: Any) -> InProcessEngine:
    """Returns a generator with the engine's weights; each process gets a full replica of a sharded model, or of one
    with adapters, which are merged there.

    `options` are those of `InProcessEngine.from_model`. Raises `RolloutError` where replica and cache do not fit.
    """
    if _is_plain(engine):
        return InProcessEngine.from_model(engine.whole_model, tokenizer, **options)
    with torch.device("meta"):
        model = engine.spec.model_class(engine.args)
    return InProcessEngine.from_model(model, tokenizer, source=engine.weights(), device=engine.device, **options)
