"""Environments of other packages, such as `reasoning_gym:leg_counting`, `textarena:GuessTheNumber-v0`."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"episodes": ("EnvironmentWorkflow", "Step", "TextEnvironment")})
