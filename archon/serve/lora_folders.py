"""The folders that adapters may be loaded from while a server runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from archon.checkpoint.peft.config import CONFIG_FILE
from archon.checkpoint.peft.export import LoRAWeights
from archon.checkpoint.peft.reader import WEIGHTS_FILE
from archon.schema.errors import ConfigError


@dataclass(frozen=True)
class LoRAFolders:
    """Folders in `root`, which hold adapters in PEFT's format; `read` returns those of the served model."""

    root: Path
    read: Callable[[Path], LoRAWeights]

    def load(self, path: str) -> LoRAWeights:
        """Return the adapters of a folder, absolute or relative to the root.

        Raises ConfigError for a folder or file that is not in the root, links followed, or is no regular file, and
        what `read` raises for one that holds no adapter of this model.
        """
        root = self.root.resolve()
        folder = self._inside(root, root / path)
        if not folder.is_dir():
            raise ConfigError(f"lora_path: {path!r:.200} is no folder in {root}")
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            file = self._inside(root, folder / name)
            if file.exists() and not file.is_file():
                raise ConfigError(f"lora_path: {name} in {path!r:.200} is no regular file")
        if not (folder / CONFIG_FILE).is_file():
            raise ConfigError(f"lora_path: {path!r:.200} has no {CONFIG_FILE}; expected an adapter in PEFT's format")
        return self.read(folder)

    def _inside(self, root: Path, path: Path) -> Path:
        found = inside(root, path)
        if found is None:
            raise ConfigError(
                f"lora_path: {str(path)!r:.200} leads out of {root}, the only place to load adapters from"
            )
        return found


def inside(root: Path, path: Path) -> Path | None:
    """Return what a path leads to, links followed; None unless it is in `root`, itself without links."""
    try:
        found = path.resolve()
        return found if found.is_relative_to(root) else None
    except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL, a name that is too long
        return None
