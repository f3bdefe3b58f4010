"""Import of plugin modules that register workflows and rewards."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from archon.schema.errors import ConfigError

VARIABLE = "TRINITY_PLUGIN_DIRS"


def import_plugins() -> list[str]:
    """Import every module of the folders in $TRINITY_PLUGIN_DIRS once and return the module names.

    Raises:
        ConfigError: missing folder, or a module that fails to import.
    """
    names = []
    for folder in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        if not Path(folder).is_dir():
            raise ConfigError(f"{VARIABLE} names {folder!r}, which is not a folder; expected folders of plugins")
        for file in sorted(Path(folder).glob("*.py")):
            name = f"trinity_plugin_{file.stem}"
            if name not in sys.modules:
                _import(name, file)
            names.append(name)
    return names


def _import(name: str, file: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"the plugin {file} cannot be imported: {type(error).__name__}: {error}") from error
