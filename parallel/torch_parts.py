"""A check of PyTorch's private parts: a module that uses some lists them, and stops with one line where one is gone."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch

from archon.schema.errors import ConfigError

SUPPORTED = "2.11 to 2.13"


def require_parts(area: str, parts: Iterable[str]) -> None:
    """Raises ConfigError for the first of `parts`, dotted names such as `torch.distributed.x.Class._attribute`, that
    this PyTorch does not have; `area` says what needs it."""
    for part in parts:
        if not has_part(part):
            raise ConfigError(
                f"PyTorch {torch.__version__} has no {part}, which archon's {area} needs; archon is made for PyTorch "
                f"{SUPPORTED}: install one of these"
            )


def has_part(name: str) -> bool:
    """Whether a dotted name leads from a module of torch to something that exists."""
    names = name.split(".")
    found: Any = torch
    for depth, attribute in enumerate(names[1:], start=2):
        if not hasattr(found, attribute):
            try:  # a submodule that nothing has imported yet
                importlib.import_module(".".join(names[:depth]))
            except ImportError:
                return False
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True
