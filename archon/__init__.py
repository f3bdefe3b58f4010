"""archon: a model engine. A Hugging Face checkpoint in, a trained or reinforced one out, in any parallel layout.

Public names are loaded on first use, so that `import archon` and `archon --help` stay light.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "ArchonEngine": "archon.engine",
    "EngineConfig": "archon.schema.config",
    "load_model": "archon.hf_io",
    "save_model": "archon.hf_io",
    "get_model_spec": "archon.models",
    "ArchonParallelDims": "archon.parallel",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'archon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
