"""Reward functions in TRL's form: lists of prompts and completions in, a list of rewards out."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TRLReward:
    """Reward function of one answer, made of a function `fn(completions, prompts=…, **columns) -> list[float | None]`.

    Prompts and completions are text, also if the row holds messages. The function may be `async`.
    """

    function: Callable[..., Any]

    def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> Any:
        """Call the function with lists of one element. Returns its reward, or an awaitable of it."""
        columns = {name: [value] for name, value in data.items() if name not in ("prompt", "messages")}
        arguments = {"prompts": [prompt], "completions": [completions], "completion_ids": [completion_ids]}
        parameters = inspect.signature(self.function).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        named = {name: value for name, value in (columns | arguments).items() if takes_all or name in parameters}
        rewards = self.function(**named)
        return _await_single(rewards) if inspect.isawaitable(rewards) else _single(rewards)


async def _await_single(rewards: Awaitable[Any]) -> Any:
    return _single(await rewards)


def _single(rewards: Any) -> Any:
    try:
        (reward,) = rewards
    except (TypeError, ValueError):
        raise ValueError(
            f"it returned {rewards!r:.80}; expected a list of one reward, because it gets one answer at a time"
        ) from None
    return reward


def per_answer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `TRLReward` if the function takes `completions` or `prompts` first, and no `prompt_ids`; else itself."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except ValueError:  # a builtin without a signature
        return function
    is_trl = parameters[:1] in (["completions"], ["prompts"]) and "prompt_ids" not in parameters
    return TRLReward(function) if is_trl else function
