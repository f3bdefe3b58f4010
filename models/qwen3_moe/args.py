"""What distinguishes a Qwen3-MoE config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from archon.models.args import BaseModelArgs
from archon.models.hf_config import DENSE_FIELDS, Field, as_dict, refuse
from archon.parallel.layout import ModelSizes
from archon.schema.errors import ConfigError


@dataclass
class Qwen3MoEModelArgs(BaseModelArgs):
    """Qwen3 with mixtures of experts.

    Attributes:
        n_experts, n_experts_per_token: how many there are in a layer and how many a token chooses.
        moe_hidden_dim: inner width of one expert; `hidden_dim` is that of the dense layers.
        norm_topk_prob: the chosen experts' weights are divided by their sum.
        decoder_sparse_step: every such layer is sparse, counted from one.
        mlp_only_layers: layers that are dense all the same, counted from zero.
        balance_by_bias: keep a bias a layer that evens the experts' load; a Hugging Face checkpoint cannot hold it.
    """

    n_experts: int = 128
    n_experts_per_token: int = 8
    moe_hidden_dim: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    balance_by_bias: bool = False
    qk_norm: bool = True

    model_types: ClassVar[frozenset[str]] = frozenset({"qwen3_moe"})
    hf_fields: ClassVar[dict[str, Field]] = DENSE_FIELDS | {
        "head_dim": Field("head_dim", int, 0, optional=True),
        "attention_bias": Field("attention_bias", bool, False),
        "num_experts": Field("n_experts", int, 128, least=0),
        "num_experts_per_tok": Field("n_experts_per_token", int, 8),
        "moe_intermediate_size": Field("moe_hidden_dim", int, 768),
        "norm_topk_prob": Field("norm_topk_prob", bool, False),
        "decoder_sparse_step": Field("decoder_sparse_step", int, 1),
        "mlp_only_layers": Field("mlp_only_layers", list, (), optional=True),
        "router_aux_loss_coef": Field("", float, 0.001),
    }

    def __post_init__(self) -> None:
        self.attention_out_bias = self.attention_bias
        self.mlp_only_layers = tuple(self.mlp_only_layers)
        if self.sliding_window is not None:
            # transformers slides in every layer of this family, whatever max_window_layers says.
            self.layer_windows = ()
        super().__post_init__()
        if any(self.is_sparse(layer) for layer in range(self.n_layers)):
            if not 1 <= self.n_experts_per_token <= self.n_experts:
                raise ConfigError(
                    f"n_experts_per_token is {self.n_experts_per_token}; expected 1 to the {self.n_experts} experts"
                )
            if self.moe_hidden_dim < 1:
                raise ConfigError(f"moe_hidden_dim is {self.moe_hidden_dim}; expected at least 1")

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer, counted from zero, is a mixture of experts."""
        return layer not in self.mlp_only_layers and self.n_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def sizes(self) -> ModelSizes:
        """See `BaseModelArgs.sizes`."""
        sparse = [self.is_sparse(layer) for layer in range(self.n_layers)]
        sizes = replace(super().sizes, hidden=() if all(sparse) else (self.hidden_dim,))
        return replace(sizes, experts=self.n_experts, expert_hidden=self.moe_hidden_dim) if any(sparse) else sizes

    def feed_forward_parameters(self, layer: int) -> tuple[int, int]:
        """See `BaseModelArgs.feed_forward_parameters`; a token meets the router and the experts it chose."""
        if not self.is_sparse(layer):
            return super().feed_forward_parameters(layer)
        expert, router = 3 * self.dim * self.moe_hidden_dim, self.dim * self.n_experts
        return router + self.n_experts_per_token * expert, router + self.n_experts * expert

    @classmethod
    def from_hf_config(cls, hf_config: Any, is_critic: bool = False, **kwargs: Any) -> Self:
        """See `BaseModelArgs.from_hf_config`; transformers also writes `num_experts` as `num_local_experts`."""
        config = as_dict(hf_config)
        if "num_local_experts" in config:
            experts = config.pop("num_local_experts")
            if config.setdefault("num_experts", experts) != experts:
                refuse("num_local_experts", experts, f"it contradicts num_experts {config['num_experts']!r}; keep one")
        return super().from_hf_config(config, is_critic, **kwargs)
