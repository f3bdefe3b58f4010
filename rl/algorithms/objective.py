"""Objectives of policy and critic: a sum over units, and the number of units."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from archon.engine.batch import PackedBatch
from archon.engine.loss import Metrics, document_ids, masked_sum
from archon.rl.algorithms.aggregation import AGGREGATIONS
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.algorithms.covariance import CovarianceLoss
from archon.rl.algorithms.kl import kl_estimate
from archon.rl.algorithms.losses import POLICY_LOSSES, PolicyTerms


@dataclass(frozen=True)
class PolicyObjective:
    """Policy objective: policy loss + kl.coef · KL(π ‖ π_ref) − entropy_coef · H.

    The micro-batch holds per-token `loss_mask`, `advantages` and the generator's `logprobs`. Depending on the
    configuration it also holds `ref_logprobs`, `prox_logprobs` (the denominator of the ratio), `policy_weights`,
    `demonstrations` and `selected_tokens`.
    """

    config: AlgorithmConfig

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
        """Return the sum over units, with gradient, and metrics as (sum, count) pairs without.

        Args:
            logprobs: [T], trained policy at the rollout's temperature.
            entropy: [T], entropy of the policy.
            mb: the micro-batch.
        """
        assert entropy is not None, "the engine computes entropy for the policy objective"
        config, mask = self.config, mb["loss_mask"].to(logprobs.dtype)
        weights, units = self._weights(mask, mb)

        def column(name: str) -> Tensor:
            # Masked positions hold arbitrary values (a document's last token predicts nothing): keep them from exp().
            return torch.where(mask > 0, mb[name].to(logprobs.dtype), logprobs.detach())

        # 1. Policy loss.
        generated = column("logprobs")
        old = column("prox_logprobs") if config.recomputes_logprobs else generated
        demonstrations = mb["demonstrations"] if config.policy_loss.uses_demonstrations else None
        selected = mb["selected_tokens"] if isinstance(config.policy_loss, CovarianceLoss) else None
        documents = document_ids(mb)
        terms = PolicyTerms(logprobs, old, mb["advantages"], mask, documents, mb.n_documents, demonstrations, selected)
        policy = POLICY_LOSSES[config.policy_loss.kind](terms, config.policy_loss)
        log_ratio = (logprobs - generated).detach()
        policy_weights = weights * mb["policy_weights"].to(weights.dtype) if config.has_token_weights else weights
        loss = (policy.loss * policy_weights).sum()
        metrics = {
            "policy_loss": (loss.detach(), units),
            "ratio": masked_sum(policy.ratio.detach(), mask),
            "clip_fraction": masked_sum(policy.clipped.to(mask.dtype), mask),
            "clip_fraction_low": masked_sum((policy.clipped & (policy.ratio < 1)).to(mask.dtype), mask),
            "clip_fraction_high": masked_sum((policy.clipped & (policy.ratio > 1)).to(mask.dtype), mask),
            # KL(π_old ‖ π) by k3 with swapped roles: the old policy drew the tokens.
            "approx_kl": masked_sum(log_ratio.expm1() - log_ratio, mask),
            "logprob_diff": masked_sum(log_ratio.abs(), mask),
            "entropy": masked_sum(entropy.detach(), mask),
        }
        # 2. KL and entropy terms.
        if config.kl.coef > 0:
            kl = kl_estimate(logprobs, column("ref_logprobs"), config.kl.kind)
            metrics["kl_ref"] = masked_sum(kl.detach(), mask)
            if config.kl.place == "loss":
                loss = loss + config.kl.coef * (kl * weights).sum()
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * (entropy * weights).sum()
        return loss, metrics

    def units(self, mb: PackedBatch) -> Tensor:
        """Return the number of units in the micro-batch: loss tokens, or answers with a loss token."""
        return self._weights(mb["loss_mask"].float(), mb)[1]

    def _weights(self, mask: Tensor, mb: PackedBatch) -> tuple[Tensor, Tensor]:
        settings = self.config.aggregation
        return AGGREGATIONS[settings.kind](mask, document_ids(mb), mb.n_documents, settings)


@dataclass(frozen=True)
class ValueObjective:
    """Critic objective: ½ (V − R)², averaged over trained tokens.

    With `value_clip` ε it is ½ max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²) (PPO with value clipping, arXiv
    2005.12729, section 3). The micro-batch holds per-token `loss_mask`, `returns` and `old_values`.
    """

    config: AlgorithmConfig

    def __call__(self, values: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
        """Return the loss sum, with gradient, and metrics."""
        mask = mb["loss_mask"].to(values.dtype)
        returns, old = (torch.where(mask > 0, mb[name].to(values.dtype), 0.0) for name in ("returns", "old_values"))
        error = (values - returns).square()
        clipped = torch.zeros_like(mask, dtype=torch.bool)
        if self.config.value_clip is not None:
            clipped_values = old + (values - old).clamp(-self.config.value_clip, self.config.value_clip)
            clipped_error = (clipped_values - returns).square()
            clipped, error = clipped_error > error, torch.maximum(error, clipped_error)
        loss = (error * mask).sum() / 2
        return loss, {
            "value_loss": (loss.detach(), mask.sum()),
            "value": masked_sum(values.detach(), mask),
            "value_clip_fraction": masked_sum(clipped.to(mask.dtype), mask),
        }

    def units(self, mb: PackedBatch) -> Tensor:
        """Return the number of trained tokens in the micro-batch."""
        return mb["loss_mask"].sum()
