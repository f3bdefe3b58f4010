"""Dotted paths of AReaL's classes and functions in scripts and configurations."""

from __future__ import annotations

from archon.rl.compat.areal.names import migration_hint
from archon.schema.errors import ConfigError

_PREFIX = "areal."


def native_path(path: str) -> str:
    """Translate an AReaL path (`areal.workflow.rlvr.RLVRWorkflow`) to archon's; return other paths unchanged.

    Raises:
        ConfigError: archon lacks the name.
    """
    if not path.startswith(_PREFIX):
        return path
    from archon.rl.compat import areal

    name = path.rpartition(".")[2]
    if name not in areal.__all__:
        line = migration_hint(name) or f"archon has no {name}; rl/compat/README.md lists the available names"
        raise ConfigError(f"{path!r} is a path of AReaL: {line}")
    return f"{areal.__name__}.{name}"
