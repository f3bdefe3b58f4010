"""Lookup of reward functions by name or dotted path.

`register_reward` names a function; other packages name theirs by entry points in the group `archon.rewards`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from archon.data.environments import environment_function, parse_environment
from archon.rl.hooks import translate_path
from archon.rl.rewards.trl import per_answer
from archon.schema.errors import RewardError
from archon.schema.registry import NamedObjects

_BUILT_IN = {
    "clevr_count_70k": "archon.rl.rewards.datasets.clevr_count_70k_reward",
    "code_tests": "archon.rl.rewards.code_tests.code_tests_reward",
    "code_tests_fraction": "archon.rl.rewards.code_tests.code_tests_fraction_reward",
    "countdown": "archon.rl.rewards.countdown.countdown_reward",
    "exact_match": "archon.rl.rewards.datasets.exact_match_reward",
    "geometry3k": "archon.rl.rewards.datasets.geometry3k_reward",
    "gsm8k": "archon.rl.rewards.datasets.gsm8k_reward",
    "math_verify": "archon.rl.rewards.math_verify.math_verify_reward",
}
_NEED_MATH_VERIFY = ("geometry3k", "math_verify")

_SUFFIXES = ("_reward_fn", "_reward")  # optional in names
_NAMED: NamedObjects[str | Callable[..., Any]] = NamedObjects("reward", "archon.rewards", _BUILT_IN)

VALID_REWARD_FN = _NAMED.names
register_reward = _NAMED.register
"""Registers the decorated function under a name: `@register_reward("close_enough")`."""


def reward_name(function: Any) -> str:
    """Return the name of a reward function: its dotted path, with the bound arguments of a `functools.partial`.

    Long arguments are shortened. The name of an instance is `module.Class()`, without its state.
    """
    if isinstance(function, functools.partial):
        keywords = [f"{key}={_argument(value)}" for key, value in function.keywords.items()]
        return f"{reward_name(function.func)}({', '.join([*map(_argument, function.args), *keywords])})"
    if hasattr(function, "__qualname__"):
        return f"{function.__module__}.{function.__qualname__}"
    return f"{type(function).__module__}.{type(function).__qualname__}()"


def _argument(value: Any) -> str:
    is_plain = isinstance(value, str | int | float | list | tuple | dict | set | None)
    return reprlib.repr(value) if is_plain else reward_name(value)


def get_reward_fn(name: str) -> Callable[..., Any]:
    """Return the reward function of a name in `VALID_REWARD_FN`, a dotted path, or an environment.

    A name may end in `_reward_fn` or `_reward`: `gsm8k_reward_fn` is `gsm8k`.
    A function in TRL's form is wrapped in a `TRLReward`.

    Raises:
        RewardError: unknown name, module or function, or a missing package of a built-in reward.
    """
    if environment := parse_environment(name):
        scorer: Callable[..., Any] = environment_function(environment, "reward")(environment)
        return scorer
    if name.endswith(")"):
        raise RewardError(
            f"the reward {name} was passed to RLTrainer as an object, which its name cannot restore; pass reward=… to "
            "RLTrainer again"
        )
    name = translate_path(name)
    short = _short_name(name)
    if short in _NEED_MATH_VERIFY and importlib.util.find_spec("math_verify") is None:
        raise RewardError(
            f"the reward {name} needs the package math-verify, which is not installed; "
            "install archon's extra `rl`: pip install 'archon-engine[rl]'"
        )
    entry = name if "." in name else _NAMED.find(short) or name
    function: Any = _import_object(name, entry) if isinstance(entry, str) else entry
    if not callable(function):
        raise RewardError(f"the reward {name!r} is a {type(function).__name__}, not a function")
    return per_answer(function)


def is_verifier(name: str) -> bool:
    """Return whether it is a reward of archon or of an environment, which gives gold answers 1.0."""
    return parse_environment(name) is not None or _short_name(name) in _BUILT_IN


def _short_name(name: str) -> str:
    """Return the registered name without optional suffix, else `name`."""
    if "." in name or _NAMED.find(name) is not None:
        return name
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and _NAMED.find(name.removesuffix(suffix)) is not None:
            return name.removesuffix(suffix)
    return name


def _import_object(name: str, path: str) -> Any:
    """Return the object at a dotted path; `name` is the user's name for it."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name or path.startswith("."):
        if Path(name, "config.json").is_file():
            raise RewardError(
                f"reward is the folder {name!r}; for a reward model `archon rl` takes reward.model={name}"
            )
        raise RewardError(
            f"unknown reward {name!r}{_NAMED.nearest(name)}; expected one of {', '.join(VALID_REWARD_FN)}, "
            "or a dotted path such as 'my_package.rewards.score'"
        )
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"cannot load the reward {name!r}: {error}") from error
