"""Weights that a trainer pushes to a server: whole checkpoints, or adapters, from folders that both see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from archon.checkpoint.peft.export import LoRAWeights
from archon.generation.inprocess import InProcessEngine
from archon.models.base import BaseArchonModel
from archon.schema.errors import ConfigError
from archon.serve.lora_folders import inside

POLICY = "policy"
"""The pushed adapter's name, which a trainer's requests give."""
NO_VERSION = -1
"""The version of the weights that a server begins with, which is no trainer's."""


@dataclass
class PushedWeights:
    """The weights of `engine`, whose version is `NO_VERSION` at first.

    Attributes:
        root: folders are loaded from here alone.
        read_model: returns the model of a checkpoint, as the server's own was loaded.
        read_lora_weights: returns adapters of the server's model.
        version: of the last push.
    """

    engine: InProcessEngine
    root: Path
    read_model: Callable[[Path], BaseArchonModel]
    read_lora_weights: Callable[[Path], LoRAWeights]
    version: int = NO_VERSION
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    async def load(self, transport: Literal["disk", "lora"], folder: str, version: int) -> None:
        """Replace the weights, or those of the adapter `POLICY`; takes effect between two tokens.

        Raises ConfigError for a folder that is not in the root, and what reading raises; then nothing has changed.
        """
        async with self._lock:
            path = self._folder(folder)
            if transport == "disk":
                model = await asyncio.to_thread(self.read_model, path)
                self.engine.update_weights(model, version=version)
            else:
                loras = await asyncio.to_thread(self.read_lora_weights, path)
                if POLICY in self.engine.loras:
                    self.engine.update_lora(POLICY, loras, version=version)
                else:
                    self.engine.load_lora(POLICY, loras, version=version)
            self.version = version

    def _folder(self, folder: str) -> Path:
        root = self.root.resolve()
        found = inside(root, root / folder)
        if found is None or not found.is_dir():
            raise ConfigError(f"folder: {folder!r:.200} is no folder in {root}, the only place to load weights from")
        return found
