"""From a generator's answers to trajectory tensors, without leaving token space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from archon.rl.types import ModelResponse
from archon.schema.errors import RolloutError


class UnusableAnswerError(RolloutError):
    """An answer that cannot be trained on; `kind` is what it is counted under."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def check_answer(response: ModelResponse) -> None:
    """Raise `UnusableAnswerError` unless every generated token has one finite logprob and one version.

    Missing logprobs are never zeros: a zero would claim that the token was certain.
    """
    n_tokens, n_logprobs = len(response.output_tokens), len(response.output_logprobs)
    if response.stop_reason == "abort":
        raise UnusableAnswerError("aborted", f"the engine aborted the answer after {n_tokens} tokens")
    if n_tokens == 0:
        raise UnusableAnswerError("empty", "the engine returned an answer without tokens")
    if n_logprobs != n_tokens or len(response.output_versions) != n_tokens:
        raise UnusableAnswerError(
            "logprob_mismatch",
            f"the engine returned {n_tokens} tokens, {n_logprobs} logprobs and {len(response.output_versions)} versions"
            "; expected one of each a token",
        )
    if not all(map(math.isfinite, response.output_logprobs)):
        raise UnusableAnswerError("logprob_not_finite", "the engine returned a logprob that is not a finite number")


@dataclass
class InteractionWithTokenLogpReward(ModelResponse):
    """One answer and what it is worth; None: not known, which is not a reward of 0. A workflow may return several, in a
    dictionary by id."""

    reward: float | None = None

    @classmethod
    def of(cls, response: ModelResponse, reward: float | None = None) -> InteractionWithTokenLogpReward:
        return cls(**vars(response), reward=reward)


@dataclass
class TokenRecord:
    """One trajectory as it grows, in token space: what the model was given, and what it answered turn by turn.

    All lists have one entry a token. `turns` counts the answers so far.
    """

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    turns: int = 0
    truncated: bool = False

    @classmethod
    def of_answer(cls, response: ModelResponse) -> TokenRecord:
        """A prompt and its one answer."""
        record = cls()
        record.observe(response.input_tokens)
        record.answer(response)
        return record

    def observe(self, ids: Sequence[int]) -> None:
        """Tokens that the model is given and not trained on."""
        n = len(ids)
        self.input_ids += ids
        self.loss_mask += [0] * n
        self.logprobs += [0.0] * n
        self.versions += [-1] * n
        self.turn_ids += [-1] * n

    def answer(self, response: ModelResponse) -> None:
        """The model's next turn. Raises `UnusableAnswerError` for an answer to other tokens than these, which would be
        trained behind a prompt that it never saw."""
        if response.input_tokens != self.input_ids:
            raise UnusableAnswerError(
                "other_prompt",
                f"turn {self.turns}: the engine answered {len(response.input_tokens)} tokens that are not the "
                f"{len(self.input_ids)} of this trajectory so far",
            )
        n = response.output_len
        self.input_ids += response.output_tokens
        self.loss_mask += [1] * n
        self.logprobs += response.output_logprobs
        self.versions += response.output_versions
        self.turn_ids += [self.turns] * n
        self.turns += 1
        self.truncated = response.stop_reason == "length"


def trajectory_tensors(
    answers: Sequence[ModelResponse] | Sequence[TokenRecord],
    rewards: Sequence[float],
    trajectory_ids: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """One group: trajectories of the same prompt as batch-first tensors, padded on the right to the longest.

    Args:
        answers: G answers, each accepted by `check_answer`, or G records of several turns.
        rewards: G finite numbers.
        trajectory_ids: G integers, where several are parts of one trajectory: alike for these.

    Returns:
        The documented keys of a trajectory, and `truncated` bool [G]: the engine stopped at a length limit.
    """
    records = [answer if isinstance(answer, TokenRecord) else TokenRecord.of_answer(answer) for answer in answers]
    size = max(len(record.input_ids) for record in records)
    missing = [size - len(record.input_ids) for record in records]
    columns: dict[str, Tensor] = {}
    for name, (fill, dtype) in _COLUMNS.items():
        rows = [getattr(record, name) + [fill] * n for record, n in zip(records, missing, strict=True)]
        # By way of NumPy, which reads lists in half the time.
        columns[name] = torch.from_numpy(np.array(rows, dtype=dtype))
    if trajectory_ids is not None:
        columns["trajectory_ids"] = torch.tensor(trajectory_ids)
    return {
        **columns,
        "attention_mask": torch.arange(size) < size - torch.tensor(missing).unsqueeze(1),
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        "truncated": torch.tensor([record.truncated for record in records]),
    }


_COLUMNS: dict[str, tuple[float, type[np.generic]]] = {
    "input_ids": (0, np.int64),
    "loss_mask": (0, np.int64),
    "logprobs": (0.0, np.float32),
    "versions": (-1, np.int64),
    "turn_ids": (-1, np.int64),
}
"""What pads a row, and the dtype, of each."""
