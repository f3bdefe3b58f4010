"""The names that users of AReaL import, from one package: `from areal.anything import X` becomes
`from archon.rl.compat.areal import X`. `names.py` lists them, and what to write for those that are not here.
"""

from typing import Any

from archon.rl.compat.areal.names import export_map, migration_hint
from archon.schema.lazy import lazy_exports

_load, __dir__, __all__ = lazy_exports(__name__, export_map())


def __getattr__(name: str) -> Any:
    """Return a name that works; of another of AReaL's, `ImportError` says what to write in its place."""
    line = migration_hint(name)
    if line is not None:
        raise ImportError(line)
    return _load(name)
