"""`archon models`: list the supported Hugging Face model types."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, Any] = {"name": "models", "help": "List supported model types and their model classes."}


def command() -> None:
    """Print every supported model type with its class."""
    from archon.models import get_model_spec, get_supported_model_types

    for model_type in sorted(get_supported_model_types()):
        spec = get_model_spec(model_type)
        print(f"{model_type:<16} {spec.model_class.__module__}.{spec.model_class.__name__}")
