"""From a generator's answers to trajectory tensors, without leaving token space."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def trajectory_tensors(responses: Sequence[ModelResponse], rewards: Sequence[float]) -> dict[str, Tensor]:
    """One group: the answers to one prompt as batch-first tensors, padded on the right to the longest.

    Args:
        responses: G answers, each accepted by `check_answer`.
        rewards: G finite numbers.

    Returns:
        The documented keys of a trajectory, and `truncated` bool [G]: the engine stopped at a length limit.
    """
    size = max(r.input_len + r.output_len for r in responses)
    columns: dict[str, list[list[float]]] = {name: [] for name in _PADDING}
    for response in responses:
        prompt, answer = response.input_len, response.output_len
        padding = size - prompt - answer
        for name, before, values, inside in (
            ("input_ids", response.input_tokens, response.output_tokens, None),
            ("attention_mask", [True] * prompt, None, True),
            ("loss_mask", [0] * prompt, None, 1),
            ("logprobs", [0.0] * prompt, response.output_logprobs, None),
            ("versions", [-1] * prompt, response.output_versions, None),
            ("turn_ids", [-1] * prompt, None, 0),
        ):
            body = [inside] * answer if values is None else values
            columns[name].append([*before, *body, *[_PADDING[name]] * padding])
    return {
        **{name: torch.tensor(rows) for name, rows in columns.items()},
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        "truncated": torch.tensor([r.stop_reason == "length" for r in responses]),
    }


_PADDING = {"input_ids": 0, "attention_mask": False, "loss_mask": 0, "logprobs": 0.0, "versions": -1, "turn_ids": -1}
