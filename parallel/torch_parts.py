"""A check of PyTorch's private parts: a module that uses some lists them as `PARTS`, and where one is gone stops with
one line that names it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from archon.schema.errors import ConfigError

SUPPORTED = "2.11 to 2.13"


def require_parts(area: str, parts: Iterable[str]) -> None:
    """Raises ConfigError for the first of `parts`, dotted names such as `torch.distributed.x.Class._attribute`, that
    this PyTorch does not have; `area` is what needs it."""
    import torch

    for part in parts:
        if not has_part(part):
            raise ConfigError(
                f"PyTorch {torch.__version__} has no {part}, which archon's {area} needs; archon is made for PyTorch "
                f"{SUPPORTED}: install one of these"
            )


def has_part(name: str) -> bool:
    """Whether a dotted name leads to something that exists."""
    head, *attributes = name.split(".")
    found: Any = importlib.import_module(head)
    path = head
    for attribute in attributes:
        path = f"{path}.{attribute}"
        if not hasattr(found, attribute):
            try:  # a submodule that nothing has imported yet
                importlib.import_module(path)
            except ImportError:
                return False
        found = getattr(found, attribute)
    return True
