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


# Largest mean |Δ logprob| allowed on the first batch at temperature 1, by compute dtype. Measured on a CPU with a
# trained Qwen3 of 0.8 M parameters (2 to 4 tokens an answer) and a random one of 5 M with wide weights (100 tokens):
#   float32    8e-8 and 1.2e-6 at temperature 1;  4e-7 and 1.9e-6 at the worst of 0.3, 0.7, 1 and 2
#   bfloat16   3e-4 and 9.5e-3;                   1.5e-3 and 1.5e-2 (8 bits of mantissa: 4e-3 of a logit)
#   float64    2e-9 and 5e-8, the rounding of the float32 in which logprobs travel
# For comparison: one optimiser step that is not pushed, at lr 1e-4, moves logprobs by 2.5e-2 (median over a run). The
# difference is that of logits over the temperature, so the limit grows as 1 / temperature below 1.
GATE_LIMITS = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 3e-2}


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
