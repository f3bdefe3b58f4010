"""Rewards: functions `fn(prompt, completions, prompt_ids, completion_ids, **data)` that give a number or several.

Nothing in this folder imports torch, and every name loads on first use: a reward's worker process starts in tens of
milliseconds.
"""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
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
    },
)
