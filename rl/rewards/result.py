"""Result of a reward call: a `Reward` (a float with parts), or a typed failure that costs one sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import CoroutineType, FunctionType
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakSet

from archon.schema.errors import RewardError
from archon.schema.numbers import LARGEST_FLOAT32

Function = TypeVar("Function", bound=Callable[..., Any])
_IN_PROCESS = WeakSet[Callable[..., Any]]()

REWARD_PART = "reward/"
"""Prefix of the names of parts, as columns of trajectories and as metrics."""

MAX_PARTS, MAX_PART_NAME = 256, 200
"""Parts of one reward and characters of a name: each part is a metric of the run."""


def in_process(function: Function) -> Function:
    """Mark a reward that takes microseconds and always returns, such as a text comparison.

    It runs in the caller's loop without a time limit, which saves the 80 us of a worker process. Functions that wrap
    it are not marked.
    """
    _IN_PROCESS.add(function)
    return function


def is_in_process(function: object) -> bool:
    """Return whether a reward is marked as `in_process`."""
    return isinstance(function, FunctionType) and function in _IN_PROCESS


class Reward(float):
    """Total reward of one sample; `parts` holds its summands by name (empty for a plain number)."""

    parts: dict[str, float]

    def __new__(cls, total: float, parts: Mapping[str, float] | None = None) -> Self:
        """Return a float with parts."""
        reward = super().__new__(cls, total)
        reward.parts = dict(parts or {})
        return reward

    def scaled(self, factor: float) -> Reward:
        """Return the reward with total and parts multiplied by `factor`."""
        return Reward(self * factor, {name: part * factor for name, part in self.parts.items()})


def part_columns(rewards: Sequence[float]) -> dict[str, list[float]]:
    """Return the parts of G rewards as columns [G] by name, NaN for a reward without the part."""
    parts = [reward.parts if isinstance(reward, Reward) else {} for reward in rewards]
    names = dict.fromkeys(name for one in parts for name in one)
    return {f"{REWARD_PART}{name}": [one.get(name, math.nan) for one in parts] for name in names}


class RewardFailure(RewardError):  # noqa: N818 - base class of four failures
    """Reward call without a reward: the sample is dropped and counted under `kind`, never scored 0."""

    kind: ClassVar[str] = "failed"


class RewardTimeout(RewardFailure):
    """The call ran longer than its time-out, counted from its start, and its process was killed."""

    kind = "timeout"


class RewardCrashed(RewardFailure):
    """The process that ran the call died: a segmentation fault, `os._exit`, the kernel's out-of-memory killer."""

    kind = "crashed"


class RewardRaised(RewardFailure):
    """The call raised. `traceback_text` is the worker's traceback, also attached as a note."""

    kind = "raised"

    def __init__(self, message: str, traceback_text: str = "") -> None:
        super().__init__(message)
        self.traceback_text = traceback_text
        if traceback_text:
            self.add_note(traceback_text)


class RewardInvalid(RewardFailure):
    """The call returned something other than a finite number or a dictionary of finite numbers."""

    kind = "invalid"


FAILURE_KINDS = tuple(failure.kind for failure in (RewardTimeout, RewardCrashed, RewardRaised, RewardInvalid))


def as_reward(value: Any, name: str) -> Reward:
    """Convert the result of reward function `name`, summing the parts of a dictionary.

    Raises:
        RewardInvalid: `value` is neither a real number (anything with `__float__`, but no text) that is finite in
            float32, nor a non-empty dict of at most `MAX_PARTS` such numbers whose sum is one.
    """
    if isinstance(value, Reward):
        return Reward(_finite(value, name, "returned"), value.parts)
    if isinstance(value, CoroutineType):
        value.close()  # Python would warn that it was never awaited
        raise RewardInvalid(
            f"reward function {name} returned a coroutine; define it with `async def`, or await inside it"
        )
    if not isinstance(value, Mapping):
        return Reward(_finite(value, name, "returned"))
    if not value:
        raise RewardInvalid(f"reward function {name} returned an empty dictionary; it needs at least one named part")
    if len(value) > MAX_PARTS:
        raise RewardInvalid(f"reward function {name} returned {len(value):,} parts; expected at most {MAX_PARTS}")
    parts: dict[str, float] = {}
    for key, part in value.items():
        if not isinstance(key, str) or len(key) > MAX_PART_NAME:
            raise RewardInvalid(
                f"reward function {name} returned a part named {key!r:.80}; names must be strings of at most "
                f"{MAX_PART_NAME} characters"
            )
        parts[key] = _finite(part, name, f"returned, as part {key!r},")
    return Reward(_finite(sum(parts.values()), name, "returned parts whose sum is"), parts)


def _finite(value: Any, name: str, verb: str) -> float:
    if not hasattr(type(value), "__float__") or isinstance(value, str | bytes):  # NumPy's texts have __float__
        raise RewardInvalid(
            f"reward function {name} {verb} an object of type {type(value).__name__}; "
            "expected a number or a dictionary of numbers"
        )
    try:
        # float() of a complex number of NumPy drops its imaginary part with a warning.
        exact = complex(value) if hasattr(type(value), "__complex__") else None
        number: float | complex = exact if exact is not None and exact.imag else float(value)
    except Exception as error:  # such as a tensor of many elements
        raise RewardInvalid(f"reward function {name} {verb} a value that is not a number: {error!s:.200}") from error
    if isinstance(number, complex) or not abs(number) <= LARGEST_FLOAT32:  # refuses NaN as well
        raise RewardInvalid(
            f"reward function {name} {verb} {number}; expected a finite number, of at most {LARGEST_FLOAT32:g} as "
            "training uses float32"
        )
    return number
