"""Checks of requests, shared by all engines, and the end of answers."""

from __future__ import annotations

from collections.abc import Collection

from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.schema.errors import ContextOverflowError, RolloutError


def max_answer_tokens(request: ModelRequest, vocab_size: int, max_seq_len: int, setting: str) -> int:
    """Return the maximum number of answer tokens of a request.

    Args:
        request: the request.
        vocab_size: size of the vocabulary.
        max_seq_len: maximum tokens of prompt and answer together.
        setting: name of the setting to increase, for errors.

    Raises:
        RolloutError: the request can never be answered.
        ContextOverflowError: the prompt leaves no room for an answer.
    """
    g, prompt = request.gconfig, request.input_ids
    if g.n_samples != 1:
        raise RolloutError(
            f"request {request.rid}: n_samples is {g.n_samples}; expected 1: send a request for each answer"
        )
    if not prompt:
        raise RolloutError(f"request {request.rid}: the prompt is empty, expected at least one token")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        wrong = next(i for i in prompt if not 0 <= i < vocab_size)
        raise RolloutError(f"request {request.rid}: token id {wrong} is not below the vocabulary size {vocab_size}")
    if wrong_bias := [i for i in g.logit_bias if not 0 <= i < vocab_size]:
        raise RolloutError(
            f"request {request.rid}: logit_bias has token id {wrong_bias[0]}; expected ids from 0 to {vocab_size - 1}"
        )
    max_tokens = max_seq_len if g.max_tokens is None else min(g.max_tokens, max_seq_len)
    limit = min(g.max_new_tokens, max_tokens - len(prompt))
    if limit < 1:
        raise ContextOverflowError(
            f"request {request.rid}: the prompt of {len(prompt)} tokens leaves no room for an answer within"
            f" {max_tokens} tokens; shorten it, or raise max_tokens or {setting}"
        )
    return limit


def stop_ids(gconfig: GenerationHyperparameters, eos_token_ids: Collection[int], vocab_size: int) -> list[int]:
    """Return the tokens that end an answer, each once."""
    ids = [*gconfig.stop_token_ids, *(() if gconfig.ignore_eos else eos_token_ids)]
    # A tokenizer may have a padding id outside of the model's vocabulary; it is never sampled.
    return [i for i in dict.fromkeys(ids) if i < vocab_size]
