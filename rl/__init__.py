"""The small RL layer: workflows, rewards, datasets, rollout, trainer. Every public name imports from `archon.rl`.

Names load on first use, so that a reward's worker process starts without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

if __name__ != "archon.rl":
    raise ImportError(f"import this package as archon.rl, not as {__name__!r}; put the folder above it on the path")

_EXPORTS = {
    "types": (
        "GenerationHyperparameters",
        "InferenceEngine",
        "ModelRequest",
        "ModelResponse",
        "concat_padded_tensors",
    ),
    "workflows": ("RLVRWorkflow", "RolloutWorkflow"),
    "rewards": ("VALID_REWARD_FN", "AsyncRewardWrapper", "get_reward_fn"),
    "datasets": ("VALID_DATASETS", "get_custom_dataset"),
    "generation": ("InProcessEngine",),
    "config": ("RLConfig", "SFTConfig"),
    "trainer": ("RLTrainer",),
    "sft": ("SFTTrainer",),
}
_ROOM_OF = {name: room for room, names in _EXPORTS.items() for name in names}

__all__ = sorted(_ROOM_OF)


def __getattr__(name: str) -> Any:
    if name in _ROOM_OF:
        return getattr(importlib.import_module(f"archon.rl.{_ROOM_OF[name]}"), name)
    raise AttributeError(f"module 'archon.rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
