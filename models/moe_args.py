"""Arguments shared by the families with mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from archon.models.args import BaseModelArgs
from archon.models.hf_config import as_dict, reject_field
from archon.models.layers.moe import ExpertsLayer
from archon.models.layers.spec import FeedForwardSpec
from archon.schema.errors import ConfigError


@dataclass
class MoEModelArgs(BaseModelArgs):
    """Arguments of a decoder in which some or all layers have a mixture of experts.

    Attributes:
        n_experts, n_experts_per_token: experts in a layer, and experts chosen per token.
        moe_hidden_dim: inner width of one expert; `hidden_dim` is that of the dense layers.
        shared_hidden_dim: inner width of the shared experts' network; 0 for none.
        norm_topk_prob: divide the chosen experts' weights by their sum.
        balance_by_bias: auxiliary-loss-free load balancing by a bias per expert, which these families' checkpoints
            cannot store.

    Raises ConfigError for values that contradict each other.
    """

    n_experts: int = 0
    n_experts_per_token: int = 0
    moe_hidden_dim: int = 0
    shared_hidden_dim: int = 0
    norm_topk_prob: bool = False
    balance_by_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(self.is_sparse(layer) for layer in range(self.n_layers)):
            if not 1 <= self.n_experts_per_token <= self.n_experts:
                raise ConfigError(
                    f"n_experts_per_token is {self.n_experts_per_token}; expected 1 to the {self.n_experts} experts"
                )
            if self.moe_hidden_dim < 1:
                raise ConfigError(f"moe_hidden_dim is {self.moe_hidden_dim}; expected at least 1")

    def is_sparse(self, layer: int) -> bool:
        """Returns whether this layer (from 0) has experts."""
        return self.n_experts > 0

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """See `BaseModelArgs.feed_forward`; with experts if `is_sparse(layer)`."""
        if not self.is_sparse(layer):
            return super().feed_forward(layer)
        return ExpertsLayer(
            self.n_experts,
            self.n_experts_per_token,
            self.moe_hidden_dim,
            self.hidden_act,
            normalize=self.norm_topk_prob,
            balance=self.balance_by_bias,
            shared_hidden_dim=self.shared_hidden_dim,
        )

    @classmethod
    def from_hf_config(cls, hf_config: Any, is_critic: bool = False, **kwargs: Any) -> Self:
        """See `BaseModelArgs.from_hf_config`; `num_local_experts` is transformers' other name of `num_experts`."""
        config = as_dict(hf_config)
        if "num_local_experts" in config:
            experts = config.pop("num_local_experts")
            if config.setdefault("num_experts", experts) != experts:
                reject_field(
                    "num_local_experts", experts, f"it contradicts num_experts {config['num_experts']!r}; keep one"
                )
        return super().from_hf_config(config, is_critic, **kwargs)
