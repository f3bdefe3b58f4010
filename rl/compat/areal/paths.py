"""Dotted paths of AReaL's own classes and functions, as its users' scripts and configurations have them."""

from __future__ import annotations

from archon.rl.compat.areal.names import migration_hint
from archon.schema.errors import ConfigError

_PREFIX = "areal."


def native_path(path: str) -> str:
    """Return the path of archon's object for one of AReaL's (`areal.workflow.rlvr.RLVRWorkflow`), any other unchanged.

    Raises ConfigError for one that archon does not have.
    """
    if not path.startswith(_PREFIX):
        return path
    from archon.rl.compat import areal

    name = path.rpartition(".")[2]
    if name not in areal.__all__:
        line = migration_hint(name) or f"archon has no {name}; rl/compat/README.md lists the names that it has"
        raise ConfigError(f"{path!r} is AReaL's: {line}")
    return f"{areal.__name__}.{name}"
