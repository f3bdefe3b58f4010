"""The rows of several adapters that one run trains: some of each in every batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archon.data import RowLoader
from archon.schema.errors import ConfigError
from archon.training.config import SFTConfig


class MultiLoRALoader:
    """Batches of rows of several adapters: of each what its own loader returns, until its last step.

    Args:
        loaders: by the adapter's name, in the order of the engine's indices.
        steps: of each adapter.
    """

    def __init__(self, loaders: Mapping[str, RowLoader], steps: Mapping[str, int]) -> None:
        self.loaders, self.steps, self.step = loaders, steps, 0

    def next_batch(self) -> list[dict[str, Any]]:
        """Returns rows with the index of their adapter as `lora`."""
        batch = []
        for index, (name, loader) in enumerate(self.loaders.items()):
            if self.step < self.steps[name]:
                batch += [row | {"lora": index} for row in loader.next_batch()]
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the loaders' states, from which they continue with the next rows."""
        return {"step": self.step, "adapters": {name: loader.state_dict() for name, loader in self.loaders.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises DatasetError for that of other data."""
        for name, loader in self.loaders.items():
            loader.load_state_dict(state["adapters"][name])
        self.step = int(state["step"])


def multi_lora(config: SFTConfig) -> list[str]:
    """Returns the names of a run's several adapters; none for one that trains one, or all weights.

    Raises ConfigError for rows of an adapter that there is not, and for rows that no adapter reads.
    """
    lora = config.model.lora
    names = [] if lora is None or lora.loras is None else list(lora.loras)
    given = config.lora_data or {}
    if unknown := sorted(given.keys() - {*names}):
        raise ConfigError(
            f"lora_data has rows of {', '.join(unknown)}, and model.lora.loras names "
            f"{', '.join(names) or 'no adapters'}; expected the same names"
        )
    if names and given.keys() == {*names}:
        raise ConfigError(
            "lora_data has rows of every adapter, so that train_data is read by none; leave one of them out of "
            "lora_data, and let train_data be its rows"
        )
    return names


def with_total_steps(config: SFTConfig, steps: Mapping[str, int]) -> SFTConfig:
    """Returns the run with the steps of each of several adapters, at which its schedule ends."""
    lora = config.model.lora
    assert lora is not None and lora.loras is not None
    loras = {name: own.model_copy(update={"total_steps": steps[name]}) for name, own in lora.loras.items()}
    model = config.model.model_copy(update={"lora": lora.model_copy(update={"loras": loras})})
    return config.model_copy(update={"model": model})
