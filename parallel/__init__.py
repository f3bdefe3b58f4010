"""Layouts: how a model is spread over processes. Import it as `archon.parallel`.

Public names are loaded on first use, so that a layout string can be checked without loading torch.distributed.
"""

from __future__ import annotations

import importlib
from typing import Any

if __name__ != "archon.parallel":
    raise ImportError(
        f"the parallel room was imported as {__name__!r}; import it as `archon.parallel` "
        "(run from the repository root, or install archon-engine)"
    )

_EXPORTS = {
    "ArchonParallelDims": "dims",
    "ParallelLayout": "layout",
    "parse_layout": "layout",
    "parallelize_decoder": "decoder",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"archon.parallel.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'archon.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
