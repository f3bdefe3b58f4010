"""The whole objective of a policy step, in the form the engine asks for: a sum over units, and the number of units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from archon.batch import PackedBatch
from archon.loss import Metrics, document_ids, masked_sum
from archon.rl.algorithms.aggregation import AGGREGATIONS
from archon.rl.algorithms.kl import kl_estimate
from archon.rl.algorithms.losses import POLICY_LOSSES

if TYPE_CHECKING:
    from archon.rl.config import AlgorithmConfig


@dataclass(frozen=True)
class PolicyObjective:
    """policy loss + kl_coef · KL(π ‖ π_ref) − entropy_coef · H, aggregated over tokens as the configuration says.

    The micro-batch carries, per token: `loss_mask`, `advantages`, `logprobs` (of the policy that generated), and
    `ref_logprobs` when `kl_coef` is positive.
    """

    config: AlgorithmConfig

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
        """The sum over units, with gradient, and metrics as (sum, count) pairs without.

        Args:
            logprobs: [T], of the policy being trained, at the temperature of the rollout.
            entropy: [T], of its distribution at each position.
            mb: the micro-batch.
        """
        assert entropy is not None, "the policy objective reports entropy, so the engine computes it"
        config, mask = self.config, mb["loss_mask"].to(logprobs.dtype)
        weights, units = self._weights(mask, mb)
        # A masked position may hold anything (a document's last token predicts nothing): exp() must not see it.
        old_logprobs = torch.where(mask > 0, mb["logprobs"].to(logprobs.dtype), logprobs.detach())
        policy = POLICY_LOSSES[config.policy_loss](logprobs, old_logprobs, mb["advantages"], config)
        log_ratio = (logprobs - old_logprobs).detach()
        loss = (policy.loss * weights).sum()
        metrics = {
            "policy_loss": (loss.detach(), units),
            "ratio": masked_sum(policy.ratio.detach(), mask),
            "clip_fraction": masked_sum(policy.clipped.to(mask.dtype), mask),
            # KL(π_old ‖ π) by k3: the tokens were drawn from the old policy, so the roles are turned round.
            "approx_kl": masked_sum(log_ratio.expm1() - log_ratio, mask),
            "logprob_diff": masked_sum(log_ratio.abs(), mask),
            "entropy": masked_sum(entropy.detach(), mask),
        }
        if config.kl_coef > 0:
            ref_logprobs = torch.where(mask > 0, mb["ref_logprobs"].to(logprobs.dtype), logprobs.detach())
            kl = kl_estimate(logprobs, ref_logprobs, config.kl_kind)
            metrics["kl_ref"] = masked_sum(kl.detach(), mask)
            loss = loss + config.kl_coef * (kl * weights).sum()
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * (entropy * weights).sum()
        return loss, metrics

    def units(self, mb: PackedBatch) -> Tensor:
        """The number of units in the micro-batch: loss tokens, or answers that have one."""
        return self._weights(mb["loss_mask"].float(), mb)[1]

    def _weights(self, mask: Tensor, mb: PackedBatch) -> tuple[Tensor, Tensor]:
        return AGGREGATIONS[self.config.aggregation](mask, document_ids(mb), mb.n_documents)
