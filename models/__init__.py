"""The zoo: one folder a family, shared layers beside them. Import it as `archon.models`.

Public names are loaded on first use, so that `archon models` can list families without building anything.
"""

from __future__ import annotations

import importlib
from typing import Any

if __name__ != "archon.models":
    raise ImportError(
        f"the model zoo was imported as {__name__!r}; import it as `archon.models` "
        "(run from the repository root, or install archon-engine)"
    )

_EXPORTS = {
    "ModelSpec": "spec",
    "get_model_spec": "spec",
    "get_supported_model_types": "spec",
    "is_supported_model": "spec",
    "register_model_spec": "spec",
    "AttentionMeta": "attention.meta",
    "PackedAttention": "attention.meta",
    "BaseArchonModel": "base",
    "BaseModelArgs": "args",
    "BaseStateDictAdapter": "state_dict",
    "NativeTarget": "state_dict",
    "LMHead": "head",
    "TokenScores": "head",
    "WeightedLoss": "head",
    "RopeConfig": "layers.rope",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"archon.models.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'archon.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
