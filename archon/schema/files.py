"""Files that are written when the work is done."""

from __future__ import annotations

from pathlib import Path

from archon.schema.errors import ConfigError


def require_folder(file: Path) -> None:
    """ConfigError, before any work, where the folder that a file is to be written to does not exist."""
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{file.parent} is not a folder, and {file.name} is to be written there; make it first")
