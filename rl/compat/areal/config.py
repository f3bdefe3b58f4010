"""Detection of AReaL's configuration files, which archon refuses."""

from __future__ import annotations

from typing import Any

from archon.schema.errors import ConfigError

# Top-level keys that only AReaL's files have.
_AREAL_KEYS = ("experiment_name", "trial_name", "allocation_mode")


def require_own_config(data: dict[str, Any], source: str = "config") -> dict[str, Any]:
    """Return the values of a file unchanged.

    Raises:
        ConfigError: the file is AReaL's.
    """
    keys = [key for key in _AREAL_KEYS if key in data]
    if keys:
        raise ConfigError(
            f"{source}: {keys[0]} is a key of AReaL; archon reads its own keys. Its rl/README.md lists them next to "
            "AReaL's in 'Migrating from AReaL', such as rollout.prompts_per_step for train_dataset.batch_size, and "
            "`--help` describes each"
        )
    return data
