"""The reference model of a KL term or of DPO: an engine of its own, or the base of the trained one."""

from __future__ import annotations

from torch import Tensor

from archon.engine.engine import ArchonEngine
from archon.engine.train_step import Batch
from archon.schema.config import EngineConfig, derive_reference


class FrozenBase:
    """The base of an engine with adapters as a model that is only evaluated: the same weights, adapters off."""

    def __init__(self, engine: ArchonEngine) -> None:
        self.engine = engine
        self.ranks, self.device = engine.ranks, engine.device

    def forward_batch(self, batch: Batch, temperature: float = 1.0, *, only_trained: bool = False) -> Tensor:
        """See `ArchonEngine.forward_batch`."""
        with self.engine.without_lora():
            return self.engine.forward_batch(batch, temperature, only_trained=only_trained)


Reference = ArchonEngine | FrozenBase


def open_reference(engine: ArchonEngine, config: EngineConfig) -> Reference:
    """Returns the reference of an initialized `engine` that `config` describes.

    It is the engine's base, without a second copy of the weights, where the engine has adapters and the reference
    differs from it in nothing else; otherwise an engine of its own, which is loaded.
    """
    if engine.lora and config == derive_reference(engine.config, {}, "ref"):
        return FrozenBase(engine)
    reference = ArchonEngine(config)
    reference.initialize()
    return reference
