"""Mixture of experts: a top-k router (Shazeer et al. 2017, arXiv:1701.06538), experts as stacked matrices, and load
balancing.

    out_t = sum over the k experts e chosen for token t of p_te * w2_e (act(w1_e x_t) * w3_e x_t)

with p = softmax of the router's logits, optionally divided by its sum over the k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archon.models.layers.feed_forward import FeedForward, gated, get_activation
from archon.models.layers.linear import Linear, Role
from archon.models.layers.spec import FeedForwardSpec
from archon.parallel.comm import Group, all_gather, all_reduce, all_reduce_replicated, local, reduce_scatter
from archon.parallel.expert import ExpertParallel


class RouterStats(NamedTuple):
    """Statistics of one layer's router over this rank's tokens, without padding.

    Attributes:
        counts: [E], how often each expert was chosen.
        probabilities: [E], sum of each expert's softmax probabilities, differentiable.
        tokens: number of tokens, a scalar.
    """

    counts: Tensor
    probabilities: Tensor
    tokens: Tensor


class Router(nn.Module):
    """Chooses `top_k` of `n_experts` for each token and computes their weights, in at least float32.

    With `balance`, `expert_bias` [E] is added to the probabilities to choose experts, but not to compute their weights
    (Wang et al. 2024, arXiv:2408.15664); `archon.engine.router_balance` updates it.
    """

    expert_bias: Tensor | None

    def __init__(self, dim: int, n_experts: int, top_k: int, *, normalize: bool, balance: bool) -> None:
        super().__init__()
        self.top_k, self.normalize = top_k, normalize
        self.gate = Linear(dim, n_experts, bias=False, role="router")
        self.register_buffer("expert_bias", torch.zeros(n_experts) if balance else None)

    def forward(self, x: Tensor, valid_mask: Tensor | None) -> tuple[Tensor, Tensor, RouterStats]:
        """Returns weights [T, k] in the dtype of x [T, dim], experts int64 [T, k], statistics over `valid_mask` [T]."""
        logits = self.gate(x)
        p = torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        scores = p.detach() if self.expert_bias is None else p.detach() + self.expert_bias
        experts = scores.topk(self.top_k, dim=-1).indices
        weights = p.gather(-1, experts)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        ones = torch.ones_like(experts, dtype=p.dtype) if valid_mask is None else valid_mask.to(p.dtype).unsqueeze(-1)
        counts = p.new_zeros(p.shape[-1]).scatter_add_(0, experts.flatten(), ones.expand_as(experts).flatten())
        kept = p if valid_mask is None else p * ones
        tokens = p.new_tensor(float(p.shape[0])) if valid_mask is None else ones.sum()
        return weights.to(x.dtype), experts, RouterStats(counts, kept.sum(0), tokens)


class GroupedExperts(nn.Module):
    """The experts' gated networks, with weights [E, out, in]; under expert parallelism of this rank's experts."""

    role: Role = "experts"

    def __init__(self, n_experts: int, dim: int, hidden_dim: int, hidden_act: str) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.act = get_activation(hidden_act)
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Returns [N, dim] for rows x [N, dim] sorted by expert; counts int64 [E] has the rows of each expert."""
        w1, w2, w3 = local(self.w1), local(self.w2), local(self.w3)
        hidden = gated(self.act, grouped_linear(x, w1, counts), grouped_linear(x, w3, counts))
        return grouped_linear(hidden, w2, counts)

    def extra_repr(self) -> str:
        return f"{tuple(self.w1.shape)}"


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns x [N, in] times the transpose of its expert's matrix in weight [E, out, in]: [N, out].

    The first counts[0] rows belong to expert 0, and so on. Uses `grouped_mm`, which needs no host synchronization on
    the counts; a loop for what it does not support: float64, no rows, and rows that are no multiple of 16 bytes.
    """
    unaligned = any(width * x.element_size() % 16 for width in weight.shape[1:])
    if x.dtype == torch.float64 or x.shape[0] == 0 or unaligned:
        parts = x.split(counts.tolist())
        return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(parts, weight.unbind(), strict=True)])
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))


@dataclass(frozen=True)
class ExpertsLayer(FeedForwardSpec):
    """A mixture of `n_experts` gated networks of inner width `hidden_dim`, of which each token uses `top_k`.

    Attributes:
        normalize: divide the chosen experts' weights by their sum.
        balance: keep a balancing bias, see `Router`.
        shared_hidden_dim: inner width of the shared experts, which process every token; 0 for none.
    """

    module_name: ClassVar[str] = "moe"
    n_experts: int
    top_k: int
    hidden_dim: int
    hidden_act: str = "silu"
    normalize: bool = False
    balance: bool = False
    shared_hidden_dim: int = 0

    def build(self, dim: int) -> MoE:
        """See `FeedForwardSpec.build`."""
        return MoE(dim, self)

    def parameters(self, dim: int) -> tuple[int, int]:
        """See `FeedForwardSpec.parameters`; the router, the shared and the chosen experts are active."""
        expert, always = 3 * dim * self.hidden_dim, dim * self.n_experts + 3 * dim * self.shared_hidden_dim
        return always + self.top_k * expert, always + self.n_experts * expert

    @property
    def hidden_dims(self) -> tuple[int, ...]:
        return (self.shared_hidden_dim,) if self.shared_hidden_dim else ()

    @property
    def n_active_experts(self) -> int:
        return self.top_k

    @property
    def expert_dim(self) -> int:
        return self.hidden_dim


class MoE(nn.Module):
    """Router and experts, and optionally shared experts that process every token.

    `etp` are the ranks that shard each expert's hidden features; tokens are gathered over them.
    """

    ep: ExpertParallel | None = None
    etp: Group | None = None

    def __init__(self, dim: int, spec: ExpertsLayer) -> None:
        super().__init__()
        self.router = Router(dim, spec.n_experts, spec.top_k, normalize=spec.normalize, balance=spec.balance)
        self.experts = GroupedExperts(spec.n_experts, dim, spec.hidden_dim, spec.hidden_act)
        shared = spec.shared_hidden_dim
        self.shared_experts = FeedForward(dim, shared, spec.hidden_act) if shared else None

    def forward(self, x: Tensor, valid_mask: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        """Returns [T, dim] for x [T, dim], and the router's statistics over `valid_mask` (bool [T])."""
        weights, experts, stats = self.router(x, valid_mask)
        rows = x
        if self.etp is not None:
            rows, weights = all_gather(x, self.etp), all_gather(weights, self.etp)
            experts = all_gather(experts, self.etp)
        out = self._routed(rows, weights, experts)
        if self.etp is not None:
            out = reduce_scatter(out, self.etp)
        return (out if self.shared_experts is None else out + self.shared_experts(x)), stats

    def _routed(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        expert_ids = experts.flatten()
        order = expert_ids.argsort(stable=True)
        counts = torch.zeros(self.experts.n_experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, expert_ids, torch.ones_like(expert_ids))
        rows = x.index_select(0, order // experts.shape[1])
        if self.ep is None:
            out = self.experts(rows, counts)
        else:
            rows, counts, routes = self.ep.dispatch(rows, counts)
            out = self.ep.combine(self.experts(rows, counts), routes)
        out = out.index_select(0, order.argsort()).unflatten(0, experts.shape)
        return torch.bmm(weights.unsqueeze(1), out).squeeze(1)


def expert_biases(model: nn.Module) -> dict[str, Tensor]:
    """Returns the balancing bias [E] (not a copy) of each router that has one, by name, in the order of the layers."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("router.expert_bias")}


def load_balancing_loss(stats: Sequence[RouterStats], groups: Sequence[Group] = ()) -> Tensor:
    """Returns E * sum over experts of f_e P_e: share of the choices times mean probability, over all layers' tokens.

    As in transformers (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6, over top-k choices and all layers at
    once), without a gradient through f. It is a scalar over the tokens of `stats` on the ranks of `groups`, equal on
    every rank; its gradient must be counted once. It is not the mean of the losses of two halves of the tokens.
    """
    counts = torch.stack([s.counts for s in stats]).sum(0)
    probabilities = torch.stack([s.probabilities for s in stats]).sum(0)
    tokens = torch.stack([s.tokens for s in stats]).sum()
    for group in groups:
        counts, tokens = all_reduce(counts, group), all_reduce(tokens, group)
        probabilities = all_reduce_replicated(probabilities, group)
    return (counts * probabilities).sum() * counts.shape[0] / tokens.square()
