"""Reward functions in TRL's form: lists of prompts and completions in, a list of rewards out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TRLReward:
    """Reward function of one answer, made of a function `fn(completions, prompts=…, **columns) -> list[float]`.

    Prompts and completions are text, also if the row holds messages.
    """

    function: Callable[..., Any]

    def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float:
        """Call the function with lists of one element."""
        columns = {name: [value] for name, value in data.items() if name not in ("prompt", "messages")}
        arguments = {"prompts": [prompt], "completions": [completions], "completion_ids": [completion_ids]}
        parameters = inspect.signature(self.function).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        named = {name: value for name, value in (columns | arguments).items() if takes_all or name in parameters}
        return float(self.function(**named)[0])


def is_trl_reward(function: Callable[..., Any]) -> bool:
    """Return whether a function takes `completions` or `prompts` first, and no token ids of the prompt."""
    parameters = list(inspect.signature(function).parameters)
    return parameters[:1] in (["completions"], ["prompts"]) and "prompt_ids" not in parameters
