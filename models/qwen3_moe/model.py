"""Qwen3-MoE (Yang et al. 2025, arXiv:2505.09388): the shared decoder with QK norm, most layers a mixture of experts."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from archon.models.base import BaseArchonModel, BaseModelArgs, MoETransformerBlock, TransformerBlock
from archon.models.layers.moe import MoE
from archon.models.qwen3_moe.args import Qwen3MoEModelArgs


class Qwen3MoEModel(BaseArchonModel):
    """See `BaseArchonModel`; which layers are sparse is in `Qwen3MoEModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen3MoEModelArgs
    args: Qwen3MoEModelArgs
    shared_hidden_dim: ClassVar[int] = 0
    """Inner width of the shared experts' network in a family that has one."""

    def build_block(self, layer: int) -> nn.Module:
        """A dense layer where the config says so, else one with experts."""
        args = self.args
        if not args.is_sparse(layer):
            return TransformerBlock(layer, args)
        moe = MoE(
            args.dim,
            args.moe_hidden_dim,
            args.hidden_act,
            n_experts=args.n_experts,
            top_k=args.n_experts_per_token,
            normalise=args.norm_topk_prob,
            shared_hidden_dim=self.shared_hidden_dim,
            balance=args.balance_by_bias,
        )
        return MoETransformerBlock(layer, args, moe)
