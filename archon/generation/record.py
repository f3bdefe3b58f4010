"""Token-level records of prompts and answers, and checks that an answer can be trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from archon.generation.expert_record import Experts, join_records
from archon.generation.types import ModelResponse
from archon.models.vision.images import ProcessedImage
from archon.schema.errors import RolloutError


class UnusableAnswerError(RolloutError):
    """An answer that cannot be trained on; `kind` is the name under which metrics count it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def check_answer(response: ModelResponse) -> None:
    """Raise UnusableAnswerError unless every generated token has one finite logprob and one version.

    Missing logprobs are never replaced by zeros, which would mean that the token had probability 1.
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
class TokenRecord:
    """The tokens of a trajectory so far: prompts, observations and answers, turn by turn.

    All lists have one entry per token, except `images`, the images of its placeholders. A temperature is 0 on tokens
    that were not sampled, and on answers with unknown temperature. `turns` is the number of answers so far.
    `routed_experts`, if the engine records them, belong to the first tokens: for each token, from the first answer with
    this token in its prompt.
    """

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    images: list[ProcessedImage] = field(default_factory=list)
    turns: int = 0
    truncated: bool = False
    routed_experts: Experts | None = None

    @classmethod
    def from_response(cls, response: ModelResponse, temperature: float = 0.0) -> TokenRecord:
        """Return the record of a prompt and its answer, sampled at `temperature` (0: not known)."""
        record = cls()
        record.observe(response.input_tokens)
        record.answer(response, temperature)
        return record

    def observe(self, ids: Sequence[int]) -> None:
        """Append context tokens, which are not trained on."""
        n = len(ids)
        self.input_ids += ids
        self.loss_mask += [0] * n
        self.logprobs += [0.0] * n
        self.versions += [-1] * n
        self.turn_ids += [-1] * n
        self.temperatures += [0.0] * n

    def answer(self, response: ModelResponse, temperature: float = 0.0) -> None:
        """Append the model's next answer, sampled at `temperature` (0: not known).

        Raises:
            UnusableAnswerError: its prompt differs from this record, so it would be trained on another context.
        """
        if response.input_tokens != self.input_ids:
            raise UnusableAnswerError(
                "other_prompt",
                f"turn {self.turns}: the engine answered a prompt of {len(response.input_tokens)} tokens; expected the "
                f"{len(self.input_ids)} tokens of this trajectory so far",
            )
        if not is_prefix(response.images, self.images):
            raise UnusableAnswerError(
                "other_prompt",
                f"turn {self.turns}: the answered prompt has other images than this trajectory",
            )
        self.images = [*response.images]
        n = response.output_len
        self.input_ids += response.output_tokens
        self.loss_mask += [1] * n
        self.logprobs += response.output_logprobs
        self.versions += response.output_versions
        self.turn_ids += [self.turns] * n
        self.temperatures += [temperature] * n
        self.turns += 1
        self.truncated = response.stop_reason == "length"
        self.routed_experts = join_records(self.routed_experts, response.routed_experts)


def is_prefix(images: Sequence[ProcessedImage], first: Sequence[ProcessedImage]) -> bool:
    """Return whether `first` are the first of `images`."""
    return [each.digest for each in images[: len(first)]] == [each.digest for each in first]
