"""Lazy imports: exports of a package on first use, and objects by dotted path."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from archon.schema.errors import ConfigError
from archon.schema.user_code import user_code


def lazy_exports(
    package: str, exports: Mapping[str, Sequence[str]], expected: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Create `__getattr__`, `__dir__` and `__all__` of a package with lazy exports.

    Args:
        package: the package's `__name__`.
        exports: names by the module that defines them: one of the package, or an absolute `archon.…` one.
        expected: the only name under which the package may be imported; another raises ImportError.
    """
    if expected is not None and package != expected:
        raise ImportError(
            f"this package was imported as {package!r}; import it as `{expected}` "
            "(run from the repository root, or install archon-engine)"
        )
    home = {name: module for module, names in exports.items() for name in names}
    names = sorted(home)

    def load(name: str) -> Any:
        if name in home:
            module = home[name] if home[name].startswith("archon.") else f"{package}.{home[name]}"
            return getattr(importlib.import_module(module), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load, lambda: names, names


def import_dotted(path: str, what: str) -> Any:
    """Import the object of a dotted path. Raises ConfigError, starting with `what`, if there is none."""
    module, _, name = path.rpartition(".")
    try:
        if path.startswith("."):
            raise ValueError("the path is relative")
        with user_code("its module"):
            return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what} {path!r} cannot be imported ({error}); expected 'package.module.Name'") from error
