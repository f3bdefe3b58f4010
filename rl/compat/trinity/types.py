"""The inputs and outputs of a Trinity-style workflow: tasks and experiences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class FormatConfig:
    """The columns of prompt and answer, and the system prompt (None: the workflow's default)."""

    prompt_key: str = "prompt"
    response_key: str = "response"
    system_prompt: str | None = None


@dataclass
class GenerationConfig:
    """Sampling parameters of a task's `n` answers. Temperature 0 is greedy, and top_k −1 is off. `max_tokens` limits an
    answer; `logprobs` has no effect, as they are always returned."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    logprobs: int = 0


@dataclass
class Task:
    """The input of one run of a workflow.

    `raw_task` is the unchanged row of the dataset. `reward_fn` is a `RewardFn` class, or the run's archon reward.
    `task_id` is the prompt's position in the data stream.
    """

    workflow: Any = None
    reward_fn: Any = None
    raw_task: dict[str, Any] = field(default_factory=dict)
    format_args: FormatConfig = field(default_factory=FormatConfig)
    rollout_args: GenerationConfig = field(default_factory=GenerationConfig)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    task_id: int = 0

    @property
    def task_desc(self) -> Any:
        """Returns the prompt; None where the row has no such column."""
        return self.raw_task.get(self.format_args.prompt_key)

    @property
    def truth(self) -> Any:
        """Returns the gold answer; None where the row has no such column."""
        return self.raw_task.get(self.format_args.response_key)


@dataclass
class EID:
    """The origin of an experience. A workflow may set it; archon does not read it."""

    batch: int = 0
    task: int = 0
    run: int = 0
    step: int = 0


@dataclass(kw_only=True, eq=False)
class Experience:
    """One trajectory of L tokens, the first P of which are the prompt.

    Attributes:
        tokens: int [L], prompt and answer.
        prompt_length: P, from 1 to L − 1.
        reward: of the whole trajectory.
        logprobs: float [L − P] of the tokens after the prompt; None: those the model recorded for the same tokens.
        action_mask: int or bool [L − P], 1 at generated tokens that are trained; None: all ones.
        metrics: numbers for the run's log.

    Lists become tensors. Experiences are checked when the workflow returns them.
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
                    pass  # not numbers, or ragged: reported when the workflow returns it
