"""Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): router, experts and load balancing.

    out_t = sum over the k experts e chosen for token t of p_te * w2_e (act(w1_e x_t) * w3_e x_t)

or p_te * w2_e act(w3_e x_t) without a gate, with p the softmax, or the sigmoid, of the router's logits, optionally
divided by its sum over the k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archon.models.layers.feed_forward import ClampedSwiGLU, FeedForward, gated_activation, get_activation
from archon.models.layers.fp8 import fp8_grouped_linear
from archon.models.layers.linear import Linear, Role
from archon.models.layers.matmul import group_ends, grouped_linear
from archon.models.layers.spec import FeedForwardSpec
from archon.models.lora.layers import LoRALayer, MultiLoRALayer
from archon.models.lora.mapping import LoRAMapping
from archon.parallel.comm import Group, all_gather, all_reduce, all_reduce_replicated, local, reduce_scatter
from archon.parallel.expert import ExpertParallel
from archon.parallel.fp8 import Fp8Scaling
from archon.parallel.torch_private import ConversionHook
from archon.schema.errors import ConfigError

Score = Literal["softmax", "sigmoid"]
"""Scores from a token's router logits: a softmax over all experts, or a sigmoid of each logit."""


class RouterStats(NamedTuple):
    """Statistics of one layer's router over this rank's tokens, without padding.

    A row that several documents share counts once for each of them.

    Attributes:
        counts: [E], number of times each expert was chosen.
        probabilities: [E], sum of each expert's scores, differentiable.
        tokens: number of tokens, a scalar.
        replayed: number of tokens with replayed experts, a scalar; None without replay.
        changed: number of replayed tokens for which the router would have chosen other experts.
        experts: int64 [T, k], the experts of all T tokens, padding included; None while gradients are recorded.
    """

    counts: Tensor
    probabilities: Tensor
    tokens: Tensor
    replayed: Tensor | None = None
    changed: Tensor | None = None
    experts: Tensor | None = None


@dataclass(frozen=True)
class ExpertsLayer(FeedForwardSpec):
    """Mixture of `n_experts` networks of inner width `hidden_dim`, gated or not; each token uses `top_k`.

    Attributes:
        hidden_act: the name of an activation, or an activation of gate and up.
        is_gated: the routed and the shared experts have a gate.
        score: function from logits to scores, used to choose and to weigh experts.
        normalize: divide the chosen experts' scores by their sum plus `normalize_epsilon`. With softmax scores this is
            the softmax over the chosen experts' logits.
        scale: factor on the weights.
        n_groups, top_groups: the experts form `n_groups` groups of neighbors. A token uses only experts of the
            `top_groups` groups with the highest sum of their `group_best` best scores (DeepSeek-AI 2024,
            arXiv:2412.19437, section 2.1.2).
        fp32_logits: compute the router's logits in at least float32.
        router_bias: the router's linear layer has a bias.
        correction_bias: choose experts by score plus a bias that checkpoints store, see `Router`.
        balance: add that bias even if checkpoints store none (it then starts at 0), and let
            `archon.engine.router_balance` update it.
        expert_biases: the matrices of each expert have biases.
        latent_dim: input and output width of the routed experts, if projections map tokens to it and the weighted
            sum of outputs back; 0 for the model's width and no projections.
        shared_hidden_dim: inner width of the shared experts, which process every token; 0 for none.
        shared_bias: the shared experts, and the projections of `latent_dim`, have biases.
        shared_gate: multiply the shared experts' output by the sigmoid of a linear function of the token.

    Raises:
        ConfigError: fields contradict each other.
    """

    module_name: ClassVar[str] = "moe"
    n_experts: int
    top_k: int
    hidden_dim: int
    hidden_act: str | ClampedSwiGLU = "silu"
    score: Score = "softmax"
    normalize: bool = False
    normalize_epsilon: float = 0.0
    scale: float = 1.0
    n_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    fp32_logits: bool = False
    router_bias: bool = False
    correction_bias: bool = False
    balance: bool = False
    expert_biases: bool = False
    shared_hidden_dim: int = 0
    shared_gate: bool = False
    is_gated: bool = True
    latent_dim: int = 0
    shared_bias: bool = False

    def __post_init__(self) -> None:
        if self.score not in get_args(Score):
            raise ConfigError(f"router score is {self.score!r}; expected one of {', '.join(get_args(Score))}")
        if not 1 <= self.top_k <= self.n_experts:
            raise ConfigError(f"experts per token are {self.top_k}; expected 1 to the {self.n_experts} experts")
        if self.n_experts % self.n_groups or not 1 <= self.top_groups <= self.n_groups:
            raise ConfigError(
                f"a token uses {self.top_groups} of {self.n_groups} groups of the {self.n_experts} experts; expected "
                "groups that divide the experts, and no more of them than there are"
            )
        size = self.n_experts // self.n_groups
        if self.n_groups > 1 and (size < self.group_best or self.top_groups * size < self.top_k):
            raise ConfigError(
                f"{self.n_groups} groups have {size} experts each, and a token uses {self.top_k} experts of "
                f"{self.top_groups} groups; expected at least {self.group_best} in each group, and enough in the "
                "chosen ones"
            )

    def build(self, dim: int) -> MoE:
        """See `FeedForwardSpec.build`."""
        return MoE(dim, self)

    def parameters(self, dim: int) -> tuple[int, int]:
        """See `FeedForwardSpec.parameters`; the router, the shared and the chosen experts are active."""
        matrices = 3 if self.is_gated else 2
        expert = matrices * self.expert_dim(dim) * self.hidden_dim
        always = dim * (self.n_experts + matrices * self.shared_hidden_dim + self.shared_gate + 2 * self.latent_dim)
        return always + self.top_k * expert, always + self.n_experts * expert

    def expert_dim(self, dim: int) -> int:
        """See `FeedForwardSpec.expert_dim`."""
        return self.latent_dim or dim

    def with_balancing_bias(self) -> ExpertsLayer:
        """See `FeedForwardSpec.with_balancing_bias`."""
        return replace(self, balance=True)

    @property
    def has_expert_bias(self) -> bool:
        """Whether the router adds a bias to the scores to choose experts."""
        return self.correction_bias or self.balance

    @property
    def has_balancing_loss(self) -> bool:
        """See `FeedForwardSpec.has_balancing_loss`."""
        return self.score == "softmax"

    @property
    def hidden_dims(self) -> tuple[int, ...]:
        """See `FeedForwardSpec.hidden_dims`."""
        return (self.shared_hidden_dim,) if self.shared_hidden_dim else ()


def _moved(bias: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    leaves_meta = bias.is_meta and device.type != "meta"
    return torch.zeros_like(bias, dtype=dtype, device=device) if leaves_meta else bias.to(device, dtype)


class Router(ConversionHook):
    """Chooses `top_k` of `n_experts` for each token and computes their weights, in at least float32.

    `expert_bias` [E], if the spec has one, is added to the scores to choose experts, but not to compute their weights
    (Wang et al. 2024, arXiv:2408.15664). It stays in at least float32.
    """

    expert_bias: Tensor | None

    def __init__(self, dim: int, spec: ExpertsLayer) -> None:
        super().__init__()
        self.spec = spec
        self.gate = Linear(dim, spec.n_experts, bias=spec.router_bias, role="router")
        self.register_buffer("expert_bias", torch.zeros(spec.n_experts) if spec.has_expert_bias else None)

    def adjust_converted(self, before: Tensor, after: Tensor) -> Tensor:
        """Keep the expert bias in at least float32, and 0 when it leaves the meta device."""
        if before is not self.expert_bias:
            return after
        return _moved(before, after.device, torch.promote_types(after.dtype, torch.float32))

    def init_buffers(self, device: torch.device | str) -> None:
        """Move the bias to `device`; a bias on the meta device becomes 0, another one keeps its values."""
        if self.expert_bias is not None:
            self.expert_bias = _moved(self.expert_bias, torch.device(device), self.expert_bias.dtype)

    def forward(
        self, x: Tensor, valid_mask: Tensor | None, routed_experts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, RouterStats]:
        """Return weights [T, k] in the dtype of x, experts int64 [T, k], and statistics.

        Args:
            x: hidden states [T, dim].
            valid_mask: [T], how often each row counts in the statistics; None for once.
            routed_experts: [T, k], experts to replay, negative entries are chosen by the router. Their
                weights come from the current scores (Ma et al. 2025, arXiv:2510.11370).
        """
        # 1. Choose the experts of each token: by score plus bias, or as recorded.
        logits = self._logits(x)
        p = logits.sigmoid() if self.spec.score == "sigmoid" else torch.softmax(logits, dim=-1)
        scores = p.detach() if self.expert_bias is None else p.detach() + self.expert_bias
        experts, replayed, changed = self._choose(scores), None, None
        if routed_experts is not None:
            experts, replayed, changed = _replay(experts, routed_experts, valid_mask)
        recorded = None if torch.is_grad_enabled() else experts
        if _has_kernels(p):
            weights, counts, kept, tokens = self._weigh_by_kernel(p, experts, valid_mask, x.dtype)
            return weights, experts, RouterStats(counts, kept, tokens, replayed, changed, recorded)
        # 2. Weigh them by their scores, without the bias.
        weights = p.gather(-1, experts)
        if self.spec.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + self.spec.normalize_epsilon)
        if self.spec.scale != 1:
            weights = weights * self.spec.scale
        # 3. Count choices and sum probabilities for load balancing.
        ones = torch.ones_like(experts, dtype=p.dtype) if valid_mask is None else valid_mask.to(p.dtype).unsqueeze(-1)
        counts = p.new_zeros(p.shape[-1]).scatter_add_(0, experts.flatten(), ones.expand_as(experts).flatten())
        kept = p if valid_mask is None else p * ones
        tokens = p.new_full((), p.shape[0]) if valid_mask is None else ones.sum()
        return weights.to(x.dtype), experts, RouterStats(counts, kept.sum(0), tokens, replayed, changed, recorded)

    def _weigh_by_kernel(
        self, p: Tensor, experts: Tensor, valid_mask: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the weights [T, k] of the chosen experts, and counts, probabilities and tokens of `RouterStats`."""
        from archon.models.cuda.experts import route

        spec = self.spec
        weights, sums = route(p, experts, valid_mask, spec.normalize, spec.normalize_epsilon, spec.scale, dtype)
        counts, probabilities, tokens = sums.sum(0).split([p.shape[1], p.shape[1], 1])
        return weights, counts.detach(), probabilities, tokens.detach().squeeze(0)

    def _logits(self, x: Tensor) -> Tensor:
        """Return the logits [T, E] in at least float32, rounded to the dtype of x first unless `fp32_logits`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if not self.spec.fp32_logits or x.dtype == wide:
            return self.gate(x).to(wide)
        bias = local(self.gate.bias)
        return F.linear(x.to(wide), local(self.gate.weight).to(wide), None if bias is None else bias.to(wide))

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the k experts with the highest scores [T, E] among the best groups: [T, k]."""
        if self.spec.n_groups > 1:
            groups = scores.unflatten(-1, (self.spec.n_groups, -1))
            best = groups.topk(self.spec.group_best, dim=-1).values.sum(-1).topk(self.spec.top_groups, dim=-1).indices
            excluded = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            scores = groups.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores.topk(self.spec.top_k, dim=-1).indices


def _has_kernels(x: Tensor) -> bool:
    """Return whether kernels of `archon.models.cuda.experts` compute with the dtype of x on its device."""
    return x.is_cuda and x.dtype.itemsize <= 4


def _replay(chosen: Tensor, routed_experts: Tensor, valid_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Replace `chosen` [T, k] by `routed_experts` where these are not negative.

    Returns the experts int64 [T, k], and the numbers of replayed tokens and of replayed tokens with another choice. A
    row counts `valid_mask` times.
    """
    is_replayed = routed_experts[:, :1] >= 0
    experts = torch.where(is_replayed, routed_experts.to(chosen.dtype), chosen)
    differs = (experts.sort(-1).values != chosen.sort(-1).values).any(-1)
    counted = is_replayed.squeeze(-1) if valid_mask is None else is_replayed.squeeze(-1) * valid_mask
    return experts, counted.sum(), (differs * counted).sum()


class GroupedExperts(nn.Module):
    """Networks of all local experts: w1, w3 [E, hidden, dim] and w2 [E, dim, hidden]; w1 is None without a gate.

    Under expert parallelism E counts this rank's experts. `etp` shards w1, w3, b1, b3 and the columns of w2 by hidden
    features, so that the ranks' outputs are terms of a sum; it shards b2 by features, so that each feature of b2 is in
    one term.

    Attributes:
        b1, b2, b3: [E, out], biases of w1, w2 and w3; None without `expert_biases`, or without the matrix.
        lora: LoRAs of w1, w2 and w3 by matrix name.
        fp8: scaling of the FP8 matmuls by matrix name; None for the compute dtype.
    """

    role: Role = "experts"
    etp: Group | None = None
    fp8: dict[str, Fp8Scaling] | None = None

    def __init__(self, dim: int, spec: ExpertsLayer) -> None:
        super().__init__()
        self.lora: nn.ModuleDict | None = None
        n_experts, hidden_dim = spec.n_experts, spec.hidden_dim
        self.n_experts, self.dim = n_experts, dim
        act = spec.hidden_act
        self.act = get_activation(act) if isinstance(act, str) else act
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim)) if spec.is_gated else None
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.b1, self.b2, self.b3 = (
            nn.Parameter(torch.empty(n_experts, out)) if spec.expert_biases and has_matrix else None
            for out, has_matrix in ((hidden_dim, spec.is_gated), (dim, True), (hidden_dim, True))
        )

    def forward(self, x: Tensor, counts: Tensor, lora_names: tuple[str, ...] = ()) -> Tensor:
        """Return [N, dim] for rows x [N, dim] sorted by expert; counts int64 [E] are the rows of each expert.

        With n `lora_names` the rows of an expert are sorted by LoRA, rows without one last: counts [E (n + 1)].
        """
        compute = self._compute if self._can_compile(x) or not torch.compiler.is_compiling() else self._compute_eager
        return compute(x, counts, lora_names)

    def _compute(self, x: Tensor, counts: Tensor, lora_names: tuple[str, ...]) -> Tensor:
        groups = counts
        if lora_names:
            counts = groups.unflatten(0, (-1, len(lora_names) + 1)).sum(1)
        ends = group_ends(counts)
        product = partial(self._product, counts=counts, ends=ends, groups=groups, lora_names=lora_names)
        up = product(x, "w3")
        gate = None if self.w1 is None else product(x, "w1")
        if self.b3 is None:
            return product(self._activate(gate, up), "w2")
        add: Callable[[Tensor, Tensor | None], Tensor]
        if _has_kernels(x):
            from archon.models.cuda.experts import add_bias

            add = partial(add_bias, ends=ends)
        else:
            experts = torch.arange(counts.shape[0], device=counts.device)
            add = partial(_add_rows, experts=experts.repeat_interleave(counts, output_size=x.shape[0]))
        hidden = self._activate(None if gate is None else add(gate, local(self.b1)), add(up, local(self.b3)))
        out_bias = local(self.b2)
        assert out_bias is not None
        if self.etp is not None:
            start = self.etp.rank * out_bias.shape[1]
            out_bias = F.pad(out_bias, (start, self.dim - start - out_bias.shape[1]))
        return add(product(hidden, "w2"), out_bias)

    def _activate(self, gate: Tensor | None, up: Tensor) -> Tensor:
        if gate is not None:
            return gated_activation(self.act, gate, up)
        assert not isinstance(self.act, ClampedSwiGLU), "it needs a gate"
        return self.act(up)

    def _can_compile(self, x: Tensor) -> bool:
        """Return whether torch's compiler knows the shapes of the grouped matmuls.

        It knows `grouped_mm` only in bfloat16; the emulation of FP8 runs it in float32.
        """
        return x.dtype == torch.bfloat16 and (self.fp8 is None or x.is_cuda)

    @torch.compiler.disable
    def _compute_eager(self, x: Tensor, counts: Tensor, lora_names: tuple[str, ...]) -> Tensor:
        return self._compute(x, counts, lora_names)

    def _product(
        self, x: Tensor, matrix: str, counts: Tensor, ends: Tensor, groups: Tensor, lora_names: tuple[str, ...]
    ) -> Tensor:
        """Multiply rows x [N, in] by their experts' matrix, plus the LoRA term: [N, out]."""
        weight = local(getattr(self, matrix))
        if self.fp8 is None:
            out = grouped_linear(x, weight, counts, ends)
        else:
            out = fp8_grouped_linear(x, weight, counts, self.fp8[matrix])
        if self.lora is None or matrix not in self.lora:
            return out
        lora = self.lora[matrix]
        assert isinstance(lora, LoRALayer | MultiLoRALayer)
        return lora.add_to_experts(out, x, lora_names, groups) if lora.enabled else out

    def extra_repr(self) -> str:
        """Describe the module in one line."""
        return f"{tuple(self.w3.shape)}"


def _add_rows(x: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
    """Add to row n of x [N, out] the bias of its expert, from bias [E, out] and experts int64 [N].

    The gradient of the bias, a sum over many rows, is accumulated in at least float32.
    """
    assert bias is not None
    wide = torch.promote_types(bias.dtype, torch.float32)
    return x + bias.to(wide).index_select(0, experts).to(x.dtype)


class MoE(nn.Module):
    """Router and routed experts, and optionally shared experts that process every token.

    Attributes:
        ep: expert parallelism, which sends rows to the ranks of their experts.
        etp: ranks that shard each expert's hidden features; tokens are gathered over them.
    """

    ep: ExpertParallel | None = None
    etp: Group | None = None

    def __init__(self, dim: int, spec: ExpertsLayer) -> None:
        super().__init__()
        self.router, self.experts = Router(dim, spec), GroupedExperts(spec.expert_dim(dim), spec)
        self.shared_experts: FeedForward | None = None
        if spec.shared_hidden_dim:
            width, act = spec.shared_hidden_dim, spec.hidden_act
            self.shared_experts = FeedForward(dim, width, act, bias=spec.shared_bias, is_gated=spec.is_gated)
        self.shared_gate = Linear(dim, 1, bias=False, role="router") if spec.shared_gate else None
        latent, bias = spec.latent_dim, spec.shared_bias
        self.latent_in = Linear(dim, latent, bias=bias, role="latent") if latent else None
        self.latent_out = Linear(latent, dim, bias=bias, role="latent") if latent else None

    def forward(
        self,
        x: Tensor,
        valid_mask: Tensor | None = None,
        lora_mapping: LoRAMapping | None = None,
        routed_experts: Tensor | None = None,
    ) -> tuple[Tensor, RouterStats]:
        """Return [T, dim] for x [T, dim], and the router's statistics.

        Args:
            x: hidden states.
            valid_mask: see `AttentionMeta`.
            lora_mapping: see `AttentionMeta`.
            routed_experts: [T, k], experts to replay, see `Router.forward`.
        """
        names, ids = ((), None) if lora_mapping is None else (lora_mapping.names, lora_mapping.local_rows.ids)
        weights, experts, stats = self.router(x, valid_mask, routed_experts)
        rows = x if self.latent_in is None else self.latent_in(x, lora_mapping)
        if self.etp is not None:
            rows, weights = all_gather(rows, self.etp), all_gather(weights, self.etp)
            experts = all_gather(experts, self.etp)
            ids = None if ids is None else all_gather(ids, self.etp)
        out = self._apply_experts(rows, weights, experts, names, ids)
        if self.etp is not None:
            out = reduce_scatter(out, self.etp)
        if self.latent_out is not None:
            out = self.latent_out(out, lora_mapping)
        if self.shared_experts is None:
            return out, stats
        shared = self.shared_experts(x, lora_mapping)
        return out + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared), stats

    def _apply_experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, lora_names: tuple[str, ...], ids: Tensor | None
    ) -> Tensor:
        """Return [T, dim] for x [T, dim], weights and experts [T, k], and LoRA indices `ids` [T]."""
        # 1. Sort the T k (token, expert) pairs by expert, then by LoRA.
        groups = experts if ids is None else experts * (len(lora_names) + 1) + ids.unsqueeze(1)
        n_groups = self.experts.n_experts * (len(lora_names) + 1)
        if _has_kernels(x):
            from archon.models.cuda.experts import gather_rows, group_rows, sum_rows

            positions, counts = group_rows(groups, n_groups)
            rows = gather_rows(x, positions)
            return sum_rows(self._run_experts(rows, counts, lora_names), weights, positions)
        group_ids = groups.flatten()
        order = group_ids.argsort(stable=True)
        counts = torch.zeros(n_groups, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, group_ids, torch.ones_like(group_ids))
        # 2. Run the experts on the rows of the pairs.
        out = self._run_experts(x.index_select(0, order // experts.shape[1]), counts, lora_names)
        # 3. Undo the sort and sum each token's k outputs by weight.
        out = out.index_select(0, order.argsort()).unflatten(0, experts.shape)
        return torch.bmm(weights.unsqueeze(1), out).squeeze(1)

    def _run_experts(self, rows: Tensor, counts: Tensor, lora_names: tuple[str, ...]) -> Tensor:
        """Return the experts' outputs [n, dim] for sorted rows [n, dim], on their ranks under expert parallelism."""
        if self.ep is None:
            return self.experts(rows, counts, lora_names)
        rows, counts, routes = self.ep.dispatch(rows, counts)
        return self.ep.combine(self.experts(rows, counts, lora_names), routes)


def expert_biases(model: nn.Module) -> dict[str, Tensor]:
    """Return the bias [E] (not a copy) of each router that has one, by name, in layer order."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("router.expert_bias")}


def load_balancing_loss(stats: Sequence[RouterStats], groups: Sequence[Group] = ()) -> Tensor:
    """Return E * sum over experts of f_e P_e over all layers: fraction of choices times mean probability.

    As in transformers (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6, over top-k choices and all layers at
    once), without a gradient through f. The result is a scalar over the tokens of `stats` on the ranks of `groups`,
    equal on every rank; count its gradient once. It is not the mean of the losses of two halves of the tokens. The
    scores must be a softmax: sigmoid scores do not compete, so lowering all of them would lower the loss.
    """
    counts = torch.stack([s.counts for s in stats]).sum(0)
    probabilities = torch.stack([s.probabilities for s in stats]).sum(0)
    tokens = torch.stack([s.tokens for s in stats]).sum()
    for group in groups:
        counts, tokens = all_reduce(counts, group), all_reduce(tokens, group)
        probabilities = all_reduce_replicated(probabilities, group)
    return (counts * probabilities).sum() * counts.shape[0] / tokens.square()
