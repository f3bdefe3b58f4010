"""AReaL's reward helpers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from archon.rl.rewards import VALID_REWARD_FN, get_reward_fn
from archon.rl.rewards.datasets import clevr_count_70k_reward, geometry3k_reward, gsm8k_reward
from archon.rl.rewards.math_verify import math_verify_reward

clevr_count_70k_reward_fn = clevr_count_70k_reward
geometry3k_reward_fn = geometry3k_reward
gsm8k_reward_fn = gsm8k_reward
math_verify_reward_fn = math_verify_reward


def get_custom_reward_fn(path: str) -> Callable[..., Any]:
    """Return the reward of the dataset name in `path`, or of a name or dotted path."""
    contained = [name for name in VALID_REWARD_FN if name in path]
    is_dotted = "." in path and "/" not in path  # file paths may contain dots
    return get_reward_fn(max(contained, key=len) if contained and not is_dotted else path)


class MathVerifyWorker:
    r"""Comparison of mathematical answers; only the last `\boxed{…}` of a response counts."""

    def verify(self, response: str, ground_truth: str) -> float:
        """Return 1.0 if the answer in `response` equals `ground_truth`, else 0.0."""
        return math_verify_reward(None, response, None, None, answer=ground_truth)


@cache
def get_math_verify_worker() -> MathVerifyWorker:
    """Return the shared worker of this process."""
    return MathVerifyWorker()
