"""Multi-LoRA training data: every batch has rows of several LoRAs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archon.data import RowLoader
from archon.schema.errors import ConfigError
from archon.training.config import SFTConfig


class MultiLoRALoader:
    """Combines one row loader per LoRA; a LoRA has rows until its last step.

    Args:
        loaders: loader by LoRA name, in the order of the engine's LoRA indices.
        steps: number of steps by LoRA name.
    """

    def __init__(self, loaders: Mapping[str, RowLoader], steps: Mapping[str, int]) -> None:
        self.loaders, self.steps, self.step = loaders, steps, 0

    def next_batch(self) -> list[dict[str, Any]]:
        """Return rows with the index of their LoRA as `lora`."""
        batch = []
        for index, (name, loader) in enumerate(self.loaders.items()):
            if self.step < self.steps[name]:
                batch += [row | {"lora": index} for row in loader.next_batch()]
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every loader."""
        return {"step": self.step, "adapters": {name: loader.state_dict() for name, loader in self.loaders.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises DatasetError if it belongs to other data."""
        for name, loader in self.loaders.items():
            loader.load_state_dict(state["adapters"][name])
        self.step = int(state["step"])


def multi_lora(config: SFTConfig) -> list[str]:
    """Return the LoRA names of a multi-LoRA run; empty for other runs.

    Raises:
        ConfigError: `lora_data` names an unknown LoRA, or no LoRA uses `train_data`.
    """
    lora = config.model.lora
    names = [] if lora is None or lora.loras is None else list(lora.loras)
    lora_data = config.lora_data or {}
    if unknown := sorted(lora_data.keys() - {*names}):
        raise ConfigError(
            f"lora_data names {', '.join(unknown)}, but model.lora.loras names "
            f"{', '.join(names) or 'no LoRA'}; expected the same names"
        )
    if names and lora_data.keys() == {*names}:
        raise ConfigError(
            "lora_data has rows for every LoRA, so train_data is unused; remove one LoRA from lora_data and "
            "put its rows into train_data"
        )
    return names


def with_total_steps(config: SFTConfig, steps: Mapping[str, int]) -> SFTConfig:
    """Return the config with the number of steps of each LoRA, which ends its learning-rate schedule."""
    lora = config.model.lora
    assert lora is not None and lora.loras is not None
    loras = {name: spec.model_copy(update={"total_steps": steps[name]}) for name, spec in lora.loras.items()}
    model = config.model.model_copy(update={"lora": lora.model_copy(update={"loras": loras})})
    return config.model_copy(update={"model": model})
