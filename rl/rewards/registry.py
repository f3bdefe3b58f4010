"""Reward functions by name, or by the dotted path of a function of the user's own."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from archon.schema.errors import RewardError

_BUILT_IN = {
    "clevr_count_70k": "archon.rl.rewards.brackets.clevr_count_70k_reward",
    "exact_match": "archon.rl.rewards.exact_match.exact_match_reward",
    "geometry3k": "archon.rl.rewards.brackets.geometry3k_reward",
    "gsm8k": "archon.rl.rewards.gsm8k.gsm8k_reward",
    "math_verify": "archon.rl.rewards.math_verify.math_verify_reward",
}
_NEEDS = {
    "geometry3k": "math_verify",
    "math_verify": "math_verify",
}  # reward name -> module that the extra `rl` installs

VALID_REWARD_FN = tuple(sorted(_BUILT_IN))


def get_reward_fn(name: str) -> Callable[..., Any]:
    """The reward function called `name`: one of `VALID_REWARD_FN`, or a dotted path such as "my_package.rewards.score".

    Raises:
        RewardError: no such name, module or function, or a built-in one whose package is not installed.
    """
    path = _BUILT_IN.get(name, name)
    needed = _NEEDS.get(name)
    if needed and importlib.util.find_spec(needed) is None:
        raise RewardError(
            f"the reward {name} needs the package {needed.replace('_', '-')}, which is not installed; "
            "install archon's extra `rl`: pip install 'archon-engine[rl]'"
        )
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
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
