"""Check that PyTorch still has the private APIs that modules list in `PRIVATE_APIS`."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable

from archon.schema.errors import ConfigError

SUPPORTED_TORCH = "2.11 to 2.13"


def require_private_apis(area: str, parts: Iterable[str]) -> None:
    """Raise ConfigError if PyTorch lacks one of `parts`.

    Args:
        area: the feature that needs them, for the message.
        parts: dotted names such as `torch.distributed.x.Class._attribute`.
    """
    import torch

    for part in parts:
        if not has_private_api(part):
            raise ConfigError(
                f"PyTorch {torch.__version__} has no {part}, which archon's {area} needs; archon is made for PyTorch "
                f"{SUPPORTED_TORCH}: install one of these"
            )


def has_private_api(name: str) -> bool:
    """Return whether a dotted name of a module or attribute exists."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
