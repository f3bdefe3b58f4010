"""Looks up reward functions by name or by dotted path."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from archon.schema.errors import RewardError

_BUILT_IN = {
    "clevr_count_70k": "archon.rl.rewards.datasets.clevr_count_70k_reward",
    "exact_match": "archon.rl.rewards.datasets.exact_match_reward",
    "geometry3k": "archon.rl.rewards.datasets.geometry3k_reward",
    "gsm8k": "archon.rl.rewards.datasets.gsm8k_reward",
    "math_verify": "archon.rl.rewards.math_verify.math_verify_reward",
}
_NEED_MATH_VERIFY = ("geometry3k", "math_verify")

VALID_REWARD_FN = tuple(sorted(_BUILT_IN))


def get_reward_fn(name: str) -> Callable[..., Any]:
    """Returns the reward function called `name`: one of `VALID_REWARD_FN`, or a dotted path.

    Raises:
        RewardError: no such name, module or function, or a built-in one whose package is not installed.
    """
    if name in _NEED_MATH_VERIFY and importlib.util.find_spec("math_verify") is None:
        raise RewardError(
            f"the reward {name} needs the package math-verify, which is not installed; "
            "install archon's extra `rl`: pip install 'archon-engine[rl]'"
        )
    module_name, _, attribute = _BUILT_IN.get(name, name).rpartition(".")
    if not module_name or name.startswith("."):
        near = difflib.get_close_matches(name, VALID_REWARD_FN, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise RewardError(
            f"unknown reward {name!r}{hint}; expected one of {', '.join(VALID_REWARD_FN)}, "
            "or a dotted path such as 'my_package.rewards.score'"
        )
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"cannot load the reward {name!r}: {error}") from error
    if not callable(function):
        raise RewardError(f"the reward {name!r} is a {type(function).__name__}, not a function")
    return function
