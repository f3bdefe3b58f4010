"""Can the trainer replay what the generator sampled? Which sampling values it can, and the check on the first batch."""

from __future__ import annotations

from torch import Tensor

from archon.rl.types import GenerationHyperparameters
from archon.schema.errors import ConfigError, RolloutError


def check_replayable(gconfig: GenerationHyperparameters, temperature: float) -> None:
    """Raise `ConfigError` unless the sampled distribution is the softmax over the whole vocabulary at `temperature`.

    The trainer recomputes that softmax and nothing else: tokens drawn from a cut or altered one would have a ratio to
    it that no importance weight accounts for.
    """
    cut = {
        "greedy": (gconfig.greedy, "false"),
        "top_p": (gconfig.top_p < 1, "1.0"),
        "top_k": (gconfig.top_k is not None, "null"),
        "min_new_tokens": (gconfig.min_new_tokens > 0, "0"),
        "temperature": (gconfig.temperature != temperature, f"{temperature}, the trainer's"),
    }
    for name, (refused, needed) in cut.items():
        if refused:
            raise ConfigError(
                f"gconfig.{name}: got {getattr(gconfig, name)}, which the trainer cannot replay; training needs "
                f"{needed} (evaluation may use other values)"
            )


# Largest mean |Δ logprob| allowed on the first batch at temperature 1, by compute dtype. Logits differ by rounding, and
# a logprob is a logit over the temperature, so the limit grows as 1 / temperature below 1.
GATE_LIMITS = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2}


def gate_limit(dtype: str, temperature: float) -> float:
    """Largest mean |Δ logprob| between generator and trainer with which training may start."""
    return GATE_LIMITS[dtype] / min(1.0, temperature)


def mean_logprob_difference(trainer_logprobs: Tensor, generator_logprobs: Tensor, loss_mask: Tensor) -> float:
    """Mean |log π_trainer − log π_generator| over the loss tokens; all [B, S], token-aligned."""
    difference = (trainer_logprobs - generator_logprobs.to(trainer_logprobs.device)).abs()
    mask = loss_mask.to(difference.device) != 0
    return float(difference[mask].double().mean())


def check_gate(difference: float, limit: float) -> None:
    """Raise `RolloutError` when generator and trainer disagree on the first batch by more than `limit`."""
    if not difference <= limit:  # a NaN is a disagreement too
        raise RolloutError(
            f"first-step ratio gate: the trainer's logprobs differ from the generator's by {difference:.3e} on average "
            f"(limit {limit:.1e}), so the importance ratio would not start at 1; generator and trainer do not compute "
            "the same policy (weights, temperature or dtype differ). If the difference is understood, set gate.limit"
        )
