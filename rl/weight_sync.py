"""From an engine in any layout to a generator in this process."""

from __future__ import annotations

from typing import Any

import torch

from archon.engine.engine import ArchonEngine
from archon.generation import InProcessEngine
from archon.generation.replica import WeightSource


def weights_of(engine: ArchonEngine) -> WeightSource:
    """What a generator is given: the model, or its weights one by one where it lies on several processes, all of which
    then take them together."""
    return engine.weights() if engine.parallel_dims.world_size > 1 else engine.whole_model


def in_process(engine: ArchonEngine, tokenizer: Any, **options: Any) -> InProcessEngine:
    """A generator with the engine's weights; of a model that lies on several processes each gets a whole replica.

    `options` are those of `InProcessEngine.from_model`. Raises `RolloutError`, with the estimate, where replica and
    cache do not fit.
    """
    if engine.parallel_dims.world_size == 1:
        return InProcessEngine.from_model(engine.whole_model, tokenizer, **options)
    with torch.device("meta"):
        empty = engine.spec.model_class(engine.args)
    return InProcessEngine.from_model(empty, tokenizer, source=engine.weights(), device=engine.device, **options)
