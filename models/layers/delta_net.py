"""Gated delta nets (Yang et al. 2024, arXiv:2412.06464) as in Qwen3-Next.

q, k, v = act(conv([wq x, wk x, wv x]))    g = -exp(A_log) softplus(wa x + dt_bias)    beta = sigmoid(wb x)
out = wo (rms_norm(gated_delta_rule(q, k, v, g, beta)) * silu(wz x))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archon.models.attention.decode.cache import RecurrentStates
from archon.models.attention.meta import AttentionMeta, RecurrentState
from archon.models.attention.packed.documents import PackedDocuments
from archon.models.attention.spec import LayerIndex
from archon.models.layers.delta_rule import DeltaRule, gated_delta_rule
from archon.models.layers.feed_forward import get_activation
from archon.models.layers.linear import Linear, Role
from archon.models.layers.norm import NormSpec
from archon.models.layers.rope import RopeSpec, Rotation
from archon.models.layers.spec import MixerSpec
from archon.parallel.comm import Group, all_gather, local
from archon.parallel.context import ulysses_repeat
from archon.parallel.torch_private import ConversionHook


class ShortConvolution(nn.Module):
    """Weights of a depthwise convolution over `heads * features` channels.

    Each channel has `kernel_size` taps; the last one multiplies the token itself. A bias is optional.

    Attributes:
        rows: this rank's rows of a replicated weight, if there are fewer heads than ranks.
    """

    role: Role = "column"
    rows: slice | None = None

    def __init__(self, heads: int, features: int, kernel_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.features = heads, features
        self.weight = nn.Parameter(torch.empty(heads * features, 1, kernel_size))
        self.bias = nn.Parameter(torch.empty(heads * features)) if bias else None

    def forward(self) -> Tensor:
        """Return this rank's weights [heads, features, taps]; a bias follows the taps as one more."""
        weight = local(self.weight)
        if self.bias is not None:
            weight = torch.cat((weight, local(self.bias).view(-1, 1, 1)), dim=-1)
        return (weight if self.rows is None else weight[self.rows]).view(-1, self.features, weight.shape[-1])

    def extra_repr(self) -> str:
        """Describe the module in one line."""
        return f"{tuple(self.weight.shape)}, heads={self.heads}"


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    documents: PackedDocuments,
    history: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute y_t = sum over i of weight[:, n - 1 - i] x_{t - i}, plus the bias, within each document.

    Args:
        x: [T, C], the tokens of B documents.
        weight: [C, n].
        documents: boundaries of the B documents.
        history: [B, n - 1, C], the inputs before each document's first token; zeros by default.
        bias: [C].

    Returns:
        y [T, C], and the `history` [B, n - 1, C] for the next tokens.
    """
    gap = weight.shape[1] - 1
    spaced = documents.spaced(gap)
    # `gap` rows before each document keep its windows out of the previous document.
    padded = x.new_zeros(spaced.length, x.shape[1]).index_copy(0, spaced.rows, x)
    if history is not None:
        padded = padded.index_copy(0, spaced.history_rows, history.flatten(0, 1).to(x.dtype))
    out = F.conv1d(padded.t().unsqueeze(0), weight.unsqueeze(1), bias, groups=x.shape[1]).squeeze(0).t()
    return out.index_select(0, spaced.rows - gap), padded.index_select(0, spaced.last_rows).unflatten(
        0, (len(documents.lengths), gap)
    )


@dataclass(frozen=True)
class DeltaNetLayer(MixerSpec):
    """Gated delta net of `n_heads` value heads; several may share one of the `n_key_heads`.

    Attributes:
        key_dim, value_dim: features of a head's keys and queries, and of its values.
        kernel_size: tokens in the window of the convolution.
        norm: norm of each head's output.
        hidden_act: activation after the convolution.
        rule: implementation of the delta rule.
    """

    module_name: ClassVar[str] = "delta_net"
    gathers_keys: ClassVar[bool] = False
    n_heads: int
    n_key_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    norm: NormSpec
    hidden_act: str = "silu"
    rule: DeltaRule = "torch"
    rope: RopeSpec | None = None
    window: int | None = None

    def build(self, layer: int, dim: int) -> DeltaNet:
        """See `MixerSpec.build`."""
        return DeltaNet(layer, dim, self)

    def parameters(self, dim: int) -> int:
        """Return the parameter count of its matrices; see `MixerSpec.parameters`.

        The convolution counts as a matrix of its size. Each head's state counts as three matrices, because a token
        decays, corrects, updates and reads it.
        """
        keys, values = self.n_key_heads * self.key_dim, self.n_heads * self.value_dim
        projections = dim * (2 * keys + 3 * values + 2 * self.n_heads)
        return projections + self.kernel_size * (2 * keys + values) + 3 * values * self.key_dim

    @property
    def attention_width(self) -> int:
        """See `MixerSpec.attention_width`."""
        return 0

    @property
    def heads(self) -> tuple[int, int]:
        """See `MixerSpec.heads`."""
        return self.n_heads, self.n_key_heads

    @property
    def cache(self) -> RecurrentStates:
        """See `MixerSpec.cache`."""
        keys, values = self.n_key_heads * self.key_dim, self.n_heads * self.value_dim
        return RecurrentStates((self.kernel_size - 1, 2 * keys + values), (self.n_heads, self.key_dim, self.value_dim))

    def ulysses_bytes(self, tp: int, cp: int, itemsize: int) -> int:
        """Count queries, keys, values and result in `itemsize`, decay and beta in at least float32."""
        heads, key_heads = (max(1, count // tp) for count in self.heads)
        keys = key_heads * ulysses_repeat(heads, key_heads, cp) * self.key_dim
        return 2 * (keys + heads * self.value_dim) * itemsize + 2 * heads * max(itemsize, 4)


class DeltaNet(nn.Module):
    """Mixer module of `DeltaNetLayer`."""

    tp: Group | None = None

    def __init__(self, layer: int, dim: int, spec: DeltaNetLayer) -> None:
        super().__init__()
        s, self.layer, self.key_dim, self.value_dim = spec, LayerIndex(layer), spec.key_dim, spec.value_dim
        self.act, self.rule = get_activation(s.hidden_act), s.rule
        self.wq = Linear(dim, s.n_key_heads * s.key_dim, bias=False, role="column", heads=s.n_key_heads)
        self.wk = Linear(dim, s.n_key_heads * s.key_dim, bias=False, role="column", heads=s.n_key_heads)
        self.wv = Linear(dim, s.n_heads * s.value_dim, bias=False, role="column", heads=s.n_heads)
        self.wz = Linear(dim, s.n_heads * s.value_dim, bias=False, role="column", heads=s.n_heads)
        self.wa = Linear(dim, s.n_heads, bias=False, role="column", heads=s.n_heads)
        self.wb = Linear(dim, s.n_heads, bias=False, role="column", heads=s.n_heads)
        self.wa.quantizable = self.wb.quantizable = False  # a few gate features that control the state
        self.q_conv = ShortConvolution(s.n_key_heads, s.key_dim, s.kernel_size)
        self.k_conv = ShortConvolution(s.n_key_heads, s.key_dim, s.kernel_size)
        self.v_conv = ShortConvolution(s.n_heads, s.value_dim, s.kernel_size)
        self.decay = LogDecay(s.n_heads)
        self.norm = s.norm.build(s.value_dim, "head_norm")
        self.wo = Linear(s.n_heads * s.value_dim, dim, bias=False, role="row")

    def forward(self, x: Tensor, rotation: Rotation | None, attention: AttentionMeta) -> Tensor:
        """Return [T, dim] for x [T, dim]."""
        if self.tp is not None:
            x = all_gather(x, self.tp)
        # The head counts come from the tensors, since a sharded projection holds fewer heads.
        lora_mapping = attention.lora_mapping
        q_TGK, k_TGK = (proj(x, lora_mapping).unflatten(-1, (-1, self.key_dim)) for proj in (self.wq, self.wk))
        v_THV, z_THV = (proj(x, lora_mapping).unflatten(-1, (-1, self.value_dim)) for proj in (self.wv, self.wz))
        gates_TH2 = torch.stack((self.decay(self.wa(x, lora_mapping)), self.wb(x, lora_mapping).sigmoid()), dim=-1)
        rows = torch.cat((q_TGK, k_TGK), dim=-1), v_THV, gates_TH2
        filters = torch.cat((self.q_conv(), self.k_conv()), dim=1), self.v_conv()
        out_THV = attention.run_recurrence(self.layer, rows, filters, self.scan)
        gate = F.silu(z_THV.to(torch.promote_types(z_THV.dtype, torch.float32)))
        return self.wo((self.norm(out_THV) * gate).to(x.dtype).flatten(-2), lora_mapping)

    @torch.compiler.disable
    def scan(
        self,
        rows: Sequence[Tensor],
        filters: Sequence[Tensor],
        documents: PackedDocuments,
        state: RecurrentState | None,
    ) -> tuple[Tensor, RecurrentState]:
        """Run the recurrence over B documents; see `AttentionMeta.run_recurrence`.

        Args:
            rows: queries and keys [T, G, 2 K], values [T, H, V], log-decay and beta [T, H, 2], before the convolution.
            filters: the convolution's weights [G, 2 K, taps] and [H, V, taps].
            documents: boundaries of the B documents.
            state: the convolution's last inputs [B, taps - 1, channels], and the matrices [B, H, K, V].

        Returns:
            The heads' outputs [T, H, V], and the state after each document.
        """
        qk, v, gates = rows
        inputs, matrices = state or (None, None)
        channels = torch.cat((qk.flatten(1), v.flatten(1)), dim=1)
        weight = torch.cat([part.flatten(0, 1) for part in filters])
        mixed, inputs = causal_convolution(channels, weight, documents, inputs)
        qk, v = self.act(mixed).split([qk[0].numel(), v[0].numel()], dim=1)
        q, k = qk.unflatten(1, (-1, 2 * self.key_dim)).chunk(2, dim=-1)
        v = v.unflatten(1, (-1, self.value_dim))
        log_decay, beta = gates.unbind(-1)
        out, matrices = gated_delta_rule(q, k, v, log_decay, beta, documents, matrices, self.rule)
        return out, (inputs, matrices)


def _log_uniform(x: Tensor) -> Tensor:
    """Fill x with logarithms of numbers between 0.01 and 16, as transformers does."""
    return x.uniform_(0.01, 16).log_()


class LogDecay(ConversionHook):
    """Log-decay of each head, -exp(A_log) softplus(a + dt_bias).

    Parameters and result are in at least float32 in every model, because the decays of a document's tokens are
    multiplied.
    """

    parameter_roles: ClassVar[Mapping[str, Role]] = {"A_log": "heads", "dt_bias": "heads"}
    parameter_initializers: ClassVar[Mapping[str, Callable[[Tensor], Any]]] = {
        "A_log": _log_uniform,
        "dt_bias": nn.init.ones_,
    }
    full_precision: ClassVar[bool] = True

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))

    def forward(self, a: Tensor) -> Tensor:
        """Return [T, H] for a [T, H]."""
        wide = torch.promote_types(a.dtype, torch.float32)
        rate, bias = local(self.A_log).to(wide).exp(), local(self.dt_bias).to(wide)
        return -rate * F.softplus(a.to(wide) + bias)

    def adjust_converted(self, before: Tensor, after: Tensor) -> Tensor:
        """Keep at least float32."""
        return after if after.dtype.itemsize >= 4 else before.to(after.device)
