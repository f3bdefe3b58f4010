"""Experience of a Trinity-style workflow: one trajectory of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class EID:
    """Origin of an experience; archon does not read it."""

    batch: int = 0
    task: int = 0
    run: int = 0
    step: int = 0


@dataclass(kw_only=True, eq=False)
class Experience:
    """Trajectory of L tokens; the first P are the prompt.

    Attributes:
        tokens: int [L], prompt and answer.
        prompt_length: P, from 1 to L − 1.
        reward: reward of the whole trajectory.
        logprobs: float [L − P] of the tokens after the prompt; None: use the logprobs that the model recorded.
        action_mask: int or bool [L − P], 1 at trained tokens; None: all ones.
        metrics: numbers for the training log.

    Lists become tensors. The adapter validates experiences when the workflow returns.
    """

    tokens: Tensor
    prompt_length: int = 1
    reward: float | None = None
    logprobs: Tensor | None = None
    action_mask: Tensor | None = None
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    response_text: str | None = None
    prompt_text: str | None = None
    messages: list[dict[str, Any]] | None = None
    truncate_status: str | None = None
    eid: EID = field(default_factory=EID)

    def __post_init__(self) -> None:
        self.info, self.metrics = self.info or {}, self.metrics or {}
        for name in ("tokens", "logprobs", "action_mask"):
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                try:
                    setattr(self, name, torch.tensor(value))
                except (TypeError, ValueError):
                    pass  # ragged or not numbers: the adapter reports it
