"""`archon models [NAME]`: list the supported Hugging Face model types, or find a released model."""

from __future__ import annotations

from typing import Annotated, Any

import typer

SETTINGS: dict[str, Any] = {
    "name": "models",
    "help": "List supported model types, or find a released model.\n\n"
    "The list has the classes of each type. The name of a model, such as Qwen3.8, prints its family.",
}


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="part of a hub id or of a model_type, such as Qwen3.8")
    ] = None,
) -> None:
    """Print every supported model type with its class, or the released models with a name."""
    from archon.models import get_model_spec, get_supported_model_types
    from archon.models.released import find_models
    from archon.schema.errors import ConfigError

    if name is None:
        for model_type in sorted(get_supported_model_types()):
            spec = get_model_spec(model_type)
            print(f"{model_type:<16} {spec.model_class.__module__}.{spec.model_class.__name__}")
        return
    found = find_models(name)
    for model in found:
        print(f"{model.name:<45} {model.model_type:<16} {model.status}")
    types = sorted(t for t in get_supported_model_types() if name.lower() in t)
    if not found and not types:
        raise ConfigError(
            f"no known model has {name!r} in its name; look up model_type in the config.json of the model, and compare "
            "it with the types that `archon models` lists"
        )
    if not found:
        print("\n".join(f"{model_type}: a supported model_type" for model_type in types))
