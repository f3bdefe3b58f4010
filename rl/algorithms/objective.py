"""The whole objective of a policy step, in the form the engine asks for: a sum over units, and the number of units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from archon.rl.algorithms.aggregation import AGGREGATIONS, document_ids
from archon.rl.algorithms.kl import kl_estimate
from archon.rl.algorithms.losses import POLICY_LOSSES

if TYPE_CHECKING:
    from archon.rl.config import AlgorithmConfig


class LossBatch(Protocol):
    """What a loss reads of a packed micro-batch: the documents' lengths, and per-token fields [T] by name."""

    @property
    def lengths(self) -> Sequence[int]: ...

    def __getitem__(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class PolicyObjective:
    """policy loss + kl_coef · KL(π ‖ π_ref) − entropy_coef · H, aggregated over tokens as the configuration says.

    The micro-batch carries, per token: `loss_mask`, `advantages`, `logprobs` (of the policy that generated), and
    `ref_logprobs` when `kl_coef` is positive.
    """

    config: AlgorithmConfig

    def loss(
        self, logprobs: Tensor, entropy: Tensor, batch: LossBatch
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """The sum over units, with gradient, and metrics as (sum, count) pairs without.

        Args:
            logprobs: [T], of the policy being trained, at the temperature of the rollout.
            entropy: [T], of its distribution at each position.
            batch: the micro-batch.
        """
        config = self.config
        mask = batch["loss_mask"].to(logprobs.dtype)
        weights, units = self._aggregate(mask, batch)
        # A masked position may hold anything (a document's last token predicts nothing): replace it before exp() sees it.
        old_logprobs = torch.where(mask > 0, batch["logprobs"].to(logprobs.dtype), logprobs.detach())
        policy = POLICY_LOSSES[config.policy_loss](logprobs, old_logprobs, batch["advantages"], config)
        per_token, n_tokens = policy.loss, mask.sum()
        log_ratio = (logprobs - old_logprobs).detach()

        def mean_of(values: Tensor) -> tuple[Tensor, Tensor]:
            return (values.detach() * mask).sum(), n_tokens

        metrics = {
            "policy_loss": ((policy.loss.detach() * weights).sum(), units),
            "ratio": mean_of(policy.ratio),
            "clip_fraction": mean_of(policy.clipped.to(mask.dtype)),
            # KL(π_old ‖ π) by k3: the tokens were drawn from the old policy, so the roles are turned round.
            "approx_kl": mean_of(log_ratio.expm1() - log_ratio),
            "logprob_diff": mean_of(log_ratio.abs()),
            "entropy": mean_of(entropy),
        }
        if config.kl_coef > 0:
            ref_logprobs = torch.where(mask > 0, batch["ref_logprobs"].to(logprobs.dtype), logprobs.detach())
            kl = kl_estimate(logprobs, ref_logprobs, config.kl_kind)
            per_token = per_token + config.kl_coef * kl
            metrics["kl_ref"] = mean_of(kl)
        if config.entropy_coef > 0:
            per_token = per_token - config.entropy_coef * entropy
        return (per_token * weights).sum(), metrics

    def units(self, batch: LossBatch) -> Tensor:
        """The number of units in the micro-batch: loss tokens, or answers that have one."""
        return self._aggregate(batch["loss_mask"].float(), batch)[1]

    def _aggregate(self, mask: Tensor, batch: LossBatch) -> tuple[Tensor, Tensor]:
        documents = document_ids(batch.lengths, mask.device)
        return AGGREGATIONS[self.config.aggregation](mask, documents, len(batch.lengths))
