"""Rewards: functions `fn(prompt, completions, prompt_ids, completion_ids, **data)` that return numbers.

Nothing in this folder imports torch, and names load on first use, so that a worker process starts in milliseconds.
"""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "async_wrapper": ("AsyncRewardWrapper",),
        "extract": ("boxed_answer", "extract_answer", "gold_answer", "normalize_answer"),
        "gold": ("averify_gold", "gold_scores", "verify_gold"),
        "judge": ("Judge", "RubricItem", "RubricReward"),
        "lookup": ("VALID_REWARD_FN", "get_reward_fn", "register_reward"),
        "result": (
            "Reward",
            "RewardCrashed",
            "RewardFailure",
            "RewardInvalid",
            "RewardRaised",
            "RewardTimeout",
            "as_reward",
            "in_process",
        ),
    },
)
