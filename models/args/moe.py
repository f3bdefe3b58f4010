"""Arguments of families with mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from archon.models.args.base import BaseModelArgs
from archon.models.hf.checks import reject_field, require
from archon.models.hf.config import Field
from archon.models.layers.moe import ExpertsLayer
from archon.models.layers.spec import FeedForwardSpec, LayerSpec

# Bounds the number of tensor names; no real model has more than 25,000 experts over all layers.
MAX_EXPERTS = 2**20


@dataclass
class MoEModelArgs(BaseModelArgs):
    """Arguments of a decoder with mixtures of experts in some or all layers.

    Attributes:
        n_experts, n_experts_per_token: Experts in a layer, and experts chosen per token.
        moe_hidden_dim: Inner width of one expert; `hidden_dim` is the width of dense layers.
        shared_hidden_dim, shared_gate: See `ExpertsLayer`.
        norm_topk_prob: Divide the chosen experts' weights by their sum.
        n_dense_layers: Number of leading dense layers.
        decoder_sparse_step: Layers n - 1, 2n - 1, ... after them have experts.
        mlp_only_layers: Further dense layers, counted from zero.
        has_no_dense_layers: `hidden_dim` sets `moe_hidden_dim`, since `intermediate_size` is the experts' width.
        hf_aliases: Alternative names of config fields that transformers accepts.
    """

    n_experts: int = 0
    n_experts_per_token: int = 0
    moe_hidden_dim: int = 0
    shared_hidden_dim: int = 0
    norm_topk_prob: bool = False
    n_dense_layers: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    shared_gate: ClassVar[bool] = False
    has_no_dense_layers: ClassVar[bool] = False
    hf_aliases: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    def __post_init__(self) -> None:
        self.mlp_only_layers = tuple(self.mlp_only_layers)
        if self.has_no_dense_layers:
            self.moe_hidden_dim = self.hidden_dim
        super().__post_init__()
        n_experts, chosen = self.n_experts, self.n_experts_per_token
        problem = f"n_experts is {n_experts} in {self.n_layers} layers"
        require(self.n_layers * n_experts <= MAX_EXPERTS, f"{problem}; expected at most {MAX_EXPERTS} in total")
        if any(self.is_sparse(layer) for layer in range(self.n_layers)):
            expected = f"expected 1 to n_experts {n_experts}"
            require(1 <= chosen <= n_experts, f"n_experts_per_token is {chosen}; {expected}")
            require(self.moe_hidden_dim >= 1, f"moe_hidden_dim is {self.moe_hidden_dim}; expected at least 1")

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer (from 0) has experts."""
        return (
            self.n_experts > 0
            and layer >= self.n_dense_layers
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """See `BaseModelArgs.feed_forward`; with experts if `is_sparse(layer)`."""
        return self.experts() if self.is_sparse(layer) else super().feed_forward(layer)

    def experts(self) -> ExpertsLayer:
        """Return the spec of the MoE layers; families with another router extend this."""
        return ExpertsLayer(
            self.n_experts,
            self.n_experts_per_token,
            self.moe_hidden_dim,
            self.hidden_act,
            normalize=self.norm_topk_prob,
            shared_hidden_dim=self.shared_hidden_dim,
            shared_gate=self.shared_gate,
        )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `BaseModelArgs.decoder_config`; also resolves `hf_aliases`."""
        config, extra = super().decoder_config(config)
        for alias, name in cls.hf_aliases.items():
            if alias in config and alias not in cls.hf_fields:
                value = config.pop(alias)
                if config.setdefault(name, value) != value:
                    reject_field(alias, value, f"it contradicts {name} {config[name]!r}; keep one")
        return config, extra


def pop_mlp_layer_types(config: dict[str, Any]) -> dict[str, Any]:
    """Remove `mlp_layer_types` (dense or sparse per layer), and return the arguments of `MoEModelArgs` for it."""
    kinds, n_layers = config.pop("mlp_layer_types", None), config.get("num_hidden_layers")
    if kinds is None:
        return {}
    if not isinstance(kinds, list | tuple) or any(kind not in ("dense", "sparse") for kind in kinds):
        reject_field("mlp_layer_types", kinds, "expected dense or sparse for each layer")
    if n_layers is not None and len(kinds) != n_layers:
        reject_field("mlp_layer_types", kinds, f"expected one for each of {n_layers} layers")
    first_sparse = [*kinds, "sparse"].index("sparse")
    later_dense = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense" and layer > first_sparse)
    return {"n_dense_layers": first_sparse, "mlp_only_layers": later_dense}


# For `hf_examples`: the normalized weight of a single expert is always 1, which leaves the router without a gradient.
SEVERAL_EXPERTS = {"num_experts_per_tok": (2, 3, 4)}
# Experts of Mixtral and MiniMax-M2, in every layer.
LOCAL_EXPERT_FIELDS = {
    "num_local_experts": Field("n_experts", int),
    "num_experts_per_tok": Field("n_experts_per_token", int),
    "router_aux_loss_coef": Field("", float, 0.001),
}
# Experts of Qwen, in every `decoder_sparse_step`-th layer.
STEPPED_EXPERT_FIELDS = {
    "num_experts": Field("n_experts", int, minimum=0),
    "num_experts_per_tok": Field("n_experts_per_token", int),
    "moe_intermediate_size": Field("moe_hidden_dim", int),
    "norm_topk_prob": Field("norm_topk_prob", bool, False),
    "decoder_sparse_step": Field("decoder_sparse_step", int, 1),
    "mlp_only_layers": Field("mlp_only_layers", list, (), null=()),
    "router_aux_loss_coef": Field("", float, 0.001),
}
# Experts of `GroupRoutedArgs`.
GROUP_ROUTED_FIELDS = {
    "n_routed_experts": Field("n_experts", int),
    "num_experts_per_tok": Field("n_experts_per_token", int),
    "moe_intermediate_size": Field("moe_hidden_dim", int),
    "n_shared_experts": Field("n_shared_experts", int, 1),
    "first_k_dense_replace": Field("n_dense_layers", int, minimum=0),
    "n_group": Field("n_group", int, 1),
    "topk_group": Field("topk_group", int, 1),
    "routed_scaling_factor": Field("routed_scaling_factor", float, 1.0),
    "norm_topk_prob": Field("norm_topk_prob", bool, True),
}


@dataclass
class GroupRoutedArgs(MoEModelArgs):
    """Arguments of a decoder with DeepSeek-V3's router (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2).

    Scores are sigmoids in float32. A stored bias corrects the choice, and each token chooses within its best groups.
    Shared experts process every token.

    Attributes:
        n_group, topk_group: Groups of experts, and groups that a token uses; see `ExpertsLayer`.
        routed_scaling_factor: Factor on the weights of the chosen experts.
        n_shared_experts: Shared experts, each as wide as a routed one.
    """

    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    n_shared_experts: int = 1

    hf_aliases: ClassVar[dict[str, str]] = {"num_local_experts": "n_routed_experts"}

    def __post_init__(self) -> None:
        self.shared_hidden_dim = self.n_shared_experts * self.moe_hidden_dim
        super().__post_init__()

    def mtp_layer(self) -> LayerSpec:
        """See `BaseModelArgs.mtp_layer`; it has experts even if the last layer is dense."""
        return replace(super().mtp_layer(), feed_forward=self.experts())

    def experts(self) -> ExpertsLayer:
        """See `MoEModelArgs.experts`."""
        return replace(
            super().experts(),
            score="sigmoid",
            normalize_epsilon=1e-20,
            scale=self.routed_scaling_factor,
            n_groups=self.n_group,
            top_groups=self.topk_group,
            fp32_logits=True,
            correction_bias=True,
        )
