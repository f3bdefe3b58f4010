"""Detection of AReaL's configuration files, which archon refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archon.schema.errors import ConfigError

# Top-level keys that only AReaL's files have.
_AREAL_KEYS = ("experiment_name", "trial_name", "allocation_mode")


def reject_areal_config(data: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError if the values of the file `source` are AReaL's."""
    if keys := [key for key in _AREAL_KEYS if key in data]:
        raise ConfigError(
            f"{source}: {keys[0]} is a key of AReaL; archon has its own keys. docs/moving/areal.md lists them next to "
            "AReaL's, such as rollout.prompts_per_step for train_dataset.batch_size, and `--help` describes each"
        )
