"""Directories from which a running server may load LoRAs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archon.checkpoint.chat_template import prompt_separator, stop_token_ids
from archon.checkpoint.hub import CONFIG_FILE as MODEL_CONFIG_FILE
from archon.checkpoint.peft.config import CONFIG_FILE
from archon.checkpoint.peft.export import LoRAWeights
from archon.checkpoint.peft.reader import WEIGHTS_FILE
from archon.checkpoint.tokenizer import GENERATION_CONFIG_FILE, TOKENIZER_FILES, load_tokenizer
from archon.schema.errors import ConfigError


@dataclass(frozen=True)
class LoRAFolders:
    """LoRA directories in PEFT's format below `root`; `read` returns LoRAs of the served model."""

    root: Path
    read: Callable[[Path], LoRAWeights]

    def load(self, path: str) -> LoRAWeights:
        """Return the LoRA of a directory, absolute or relative to the root.

        Raises:
            ConfigError: the directory or a file is outside of the root after following links, or not regular.
            CheckpointError: `read` found no LoRA of this model.
        """
        root = self.root.resolve()
        folder = self._inside(root, root / path)
        if not folder.is_dir():
            raise ConfigError(f"lora_path: {path!r:.200} is no folder in {root}")
        for name in (CONFIG_FILE, WEIGHTS_FILE, MODEL_CONFIG_FILE, GENERATION_CONFIG_FILE, *TOKENIZER_FILES):
            file = self._inside(root, folder / name)
            if file.exists() and not file.is_file():
                raise ConfigError(f"lora_path: {name} in {path!r:.200} is no regular file")
        if not (folder / CONFIG_FILE).is_file():
            raise ConfigError(f"lora_path: {path!r:.200} has no {CONFIG_FILE}; expected a LoRA in PEFT's format")
        return self.read(folder)

    def _inside(self, root: Path, path: Path) -> Path:
        resolved = inside(root, path)
        if resolved is None:
            raise ConfigError(f"lora_path: {str(path)!r:.200} is outside of {root}, the only directory for LoRAs")
        return resolved


def lora_stop_ids(folder: Path | None, checkpoint: Path, tokenizer: Any) -> tuple[int, ...] | None:
    """Return the stop ids of a LoRA of `checkpoint`; None if the LoRA has no tokenizer.

    Args:
        folder: folder of the LoRA's tokenizer, if it has one.
        checkpoint: the base checkpoint; its stop ids are included.
        tokenizer: the served tokenizer.

    Raises:
        ConfigError: the LoRA's tokenizer formats prompts differently from the served one.
    """
    if folder is None:
        return None
    trained = load_tokenizer(folder, checkpoint)
    for name, expected, served in (
        ("chat template", trained.chat_template, tokenizer.chat_template),
        ("prompt separator", prompt_separator(trained), prompt_separator(tokenizer)),
    ):
        if expected != served:
            raise ConfigError(
                f"the LoRA {folder} was trained with another {name} than the served tokenizer has; serve it with "
                f"tokenizer={folder}, and LoRAs with other prompts on another server"
            )
    return stop_token_ids(trained)


def inside(root: Path, path: Path) -> Path | None:
    """Return the target of a path after following links; None unless it is in `root`, which has no links."""
    try:
        resolved = path.resolve()
        return resolved if resolved.is_relative_to(root) else None
    except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL, a name that is too long
        return None
