"""Reference model of a KL term or of DPO: a separate engine, or the frozen base of the trained one."""

from __future__ import annotations

from torch import Tensor

from archon.engine.engine import ArchonEngine
from archon.engine.micro_batch import Batch
from archon.schema.config import EngineConfig, derive_reference


class FrozenBase:
    """The frozen base of an engine with a LoRA, as an evaluation-only model."""

    def __init__(self, engine: ArchonEngine) -> None:
        self.engine = engine
        self.ranks, self.device = engine.ranks, engine.device

    def forward_batch(self, batch: Batch, temperature: float = 1.0, *, only_trained: bool = False) -> Tensor:
        """Return the scores of the base model; see `ArchonEngine.forward_batch`."""
        with self.engine.without_lora():
            return self.engine.forward_batch(batch, temperature, only_trained=only_trained)


Reference = ArchonEngine | FrozenBase


def open_reference(engine: ArchonEngine, config: EngineConfig) -> Reference:
    """Return the reference model of an initialized engine.

    An engine with a LoRA is also the reference, with the LoRA disabled, if `config` differs in nothing else. No
    second copy of the weights is loaded then. Otherwise a separate engine is initialized.
    """
    if engine.lora and config == derive_reference(engine.config, {}, "ref"):
        return FrozenBase(engine)
    reference = ArchonEngine(config)
    reference.initialize()
    return reference
