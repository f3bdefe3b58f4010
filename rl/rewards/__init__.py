"""Rewards: functions `fn(prompt, completions, prompt_ids, completion_ids, **data)` that give a number or several.

Nothing in this folder imports torch, and every name loads on first use: a reward's worker process starts in tens of
milliseconds.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "async_wrapper": ("AsyncRewardWrapper",),
    "extract": ("boxed_answer", "extract_answer", "gold_answer", "normalise_answer"),
    "gold": ("averify_gold", "verify_gold"),
    "registry": ("VALID_REWARD_FN", "get_reward_fn"),
    "result": (
        "Reward",
        "RewardCrashed",
        "RewardFailure",
        "RewardInvalid",
        "RewardRaised",
        "RewardTimeout",
        "as_reward",
    ),
}
_ROOM_OF = {name: room for room, names in _EXPORTS.items() for name in names}

__all__ = sorted(_ROOM_OF)


def __getattr__(name: str) -> Any:
    if name in _ROOM_OF:
        return getattr(importlib.import_module(f"archon.rl.rewards.{_ROOM_OF[name]}"), name)
    raise AttributeError(f"module 'archon.rl.rewards' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
