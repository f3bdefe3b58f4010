"""Training runs: the loop, run directory, metrics and progress that all trainers share; SFT and preferences."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "config": ("PreferenceConfig", "SFTConfig"),
        "preference": ("PreferenceTrainer",),
        "sft": ("SFTTrainer",),
    },
)
