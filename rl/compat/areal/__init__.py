"""What workflows written for AReaL return: one trajectory a run, short forms, and interactions with a reward."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"short_forms": ("InteractionWithTokenLogpReward",)})
