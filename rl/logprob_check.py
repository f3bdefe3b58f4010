"""Check that trainer and generator compute the same logprobs."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from archon.generation.types import GenerationHyperparameters
from archon.schema.errors import ConfigError, RolloutError

# Settings that draw tokens from the softmax over the whole vocabulary.
FULL_VOCABULARY_SAMPLING: dict[str, Any] = {
    "greedy": False,
    "top_p": 1.0,
    "top_k": None,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
}


def truncating_fields(gconfig: GenerationHyperparameters) -> list[str]:
    """Return the fields that truncate or replace the softmax over the whole vocabulary."""
    return [name for name, full in FULL_VOCABULARY_SAMPLING.items() if getattr(gconfig, name) != full]


def check_recomputable(gconfig: GenerationHyperparameters, temperature: float) -> None:
    """Raise `ConfigError` unless tokens are drawn from the full softmax at `temperature`.

    The trainer recomputes only this softmax: importance weights of other distributions would be wrong.
    """
    expected = {name: json.dumps(FULL_VOCABULARY_SAMPLING[name]) for name in truncating_fields(gconfig)}
    if gconfig.temperature != temperature:
        expected["temperature"] = f"{temperature}, the trainer's"
    for name, value in expected.items():
        raise ConfigError(
            f"gconfig.{name}: got {getattr(gconfig, name)}, but the trainer cannot recompute its logprobs; training "
            f"needs {value} (evaluation may use other values)"
        )


# Largest mean |Δ logprob| on a fresh batch at temperature 1, by compute dtype. Measured on a CPU with a
# trained Qwen3 of 0.8 M parameters (2 to 4 tokens an answer) and a random one of 5 M with wide weights (100 tokens):
#   float32    8e-8 and 1.2e-6 at temperature 1;  4e-7 and 1.9e-6 at the worst of 0.3, 0.7, 1 and 2
#   bfloat16   3e-4 and 9.5e-3;                   1.5e-3 and 1.5e-2 (8 bits of mantissa: 4e-3 of a logit)
#   float64    2e-9 and 5e-8, the rounding of the float32 in which logprobs travel
# For comparison: an optimizer step at lr 1e-4 without a push changes logprobs by 2.5e-2 (median over a run). Logits
# are divided by the temperature: below 1 the limit grows as 1 / temperature.
MISMATCH_LIMITS = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 3e-2}


def mismatch_limit(dtype: str, temperature: float) -> float:
    """Return the largest accepted mean |Δ logprob| between generator and trainer."""
    return MISMATCH_LIMITS[dtype] / min(1.0, temperature)


def mean_logprob_difference(trainer_logprobs: Tensor, generator_logprobs: Tensor, loss_mask: Tensor) -> float:
    """Return mean |log π_trainer − log π_generator| over the loss tokens; all [B, S], token-aligned."""
    difference = (trainer_logprobs - generator_logprobs.to(trainer_logprobs.device)).abs()
    mask = loss_mask.to(difference.device) != 0
    return float(difference[mask].double().mean())


def check_mismatch(difference: float, limit: float) -> None:
    """Raise `RolloutError` if the logprobs of a new batch differ by more than `limit`."""
    if not difference <= limit:  # also catches NaN
        raise RolloutError(
            f"logprob check: the trainer's logprobs differ from the generator's by {difference:.3e} on average "
            f"(limit {limit:.1e}), so the importance ratio would not start at 1; weights, temperature or dtype differ. "
            "If the difference is understood, set logprob_check.max_mismatch"
        )
