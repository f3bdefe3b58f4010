"""Weights that a trainer pushes to a server: whole checkpoints, or LoRAs, in shared directories."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from archon.checkpoint.peft.export import LoRAWeights
from archon.generation.inprocess import InProcessEngine
from archon.models.base import BaseArchonModel
from archon.schema.errors import CheckpointError, ConfigError
from archon.serve.lora_folders import inside

POLICY = "policy"
"""Name of the pushed LoRA in a trainer's requests."""
NO_VERSION = -1
"""Initial version of the weights, which is no version of a trainer."""


@dataclass
class PushedWeights:
    """Weights of `engine`; their version is `NO_VERSION` at first.

    Attributes:
        root: only directories below it are loaded.
        read_model: returns the model of a checkpoint, loaded like the server's.
        read_lora_weights: returns a LoRA of the server's model.
        version: version of the last push, a number that the trainer chose; trainers choose different ones.
    """

    engine: InProcessEngine
    root: Path
    read_model: Callable[[Path], BaseArchonModel]
    read_lora_weights: Callable[[Path], LoRAWeights]
    version: int = NO_VERSION
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    async def load(self, transport: Literal["disk", "lora"], folder: str, version: int) -> None:
        """Replace the weights, or the LoRA `POLICY`; takes effect between two tokens.

        Raises:
            CheckpointError: a weight is not finite.
            ConfigError: the directory is not in the root. Errors of reading are passed on. Nothing has changed then.
        """
        async with self._lock:
            path = self._folder(folder)
            if transport == "disk":
                model = await asyncio.to_thread(self._read_finite_model, path)
                if POLICY in self.engine.loras:  # another trainer's, which belongs to the replaced weights
                    self.engine.unload_lora(POLICY)
                self.engine.update_weights(model, version=version)
            else:
                loras = await asyncio.to_thread(self._read_finite_lora, path)
                if POLICY in self.engine.loras:
                    self.engine.update_lora(POLICY, loras, version=version)
                else:
                    self.engine.load_lora(POLICY, loras, version=version)
            self.version = version

    def _read_finite_model(self, path: Path) -> BaseArchonModel:
        model = self.read_model(path)
        self._require_finite(path, model.state_dict())
        return model

    def _read_finite_lora(self, path: Path) -> LoRAWeights:
        weights = self.read_lora_weights(path)
        self._require_finite(path, weights.tensors)
        return weights

    def _require_finite(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise CheckpointError(
                    f"{path}: {name} holds numbers that are not finite; the server keeps its weights. "
                    "Find the step at which the training diverged"
                )

    def _folder(self, folder: str) -> Path:
        root = self.root.resolve()
        resolved = inside(root, root / folder)
        if resolved is None or not resolved.is_dir():
            raise ConfigError(f"folder: {folder!r:.200} is no folder in {root}, the only place to load weights from")
        return resolved
