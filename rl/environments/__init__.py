"""Environments of other packages, such as `reasoning_gym:leg_counting`, `textarena:GuessTheNumber-v0`."""

from functools import partial
from importlib import import_module

from archon.data.environments import FAMILIES, register_environment
from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"episodes": ("EnvironmentWorkflow", "Step", "TextEnvironment")})

for _family in FAMILIES:  # imported on first use
    register_environment(_family, partial(import_module, f"{__name__}.{_family}"))
