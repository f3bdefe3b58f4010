"""Names of AReaL in one package: `from areal.anything import X` becomes `from archon.rl.compat.areal import X`."""

from typing import Any

from archon.rl.compat.areal.names import export_map, migration_hint
from archon.schema.lazy import lazy_exports

_load, __dir__, __all__ = lazy_exports(__name__, export_map())


def __getattr__(name: str) -> Any:
    """Return an available name; raise `ImportError` with a migration hint for other names of AReaL."""
    line = migration_hint(name)
    if line is not None:
        raise ImportError(line)
    return _load(name)
