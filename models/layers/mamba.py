"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) as in Granite 4 and Nemotron-H.

x, B, C = act(conv([wx h, wb h, wc h]))    dt = clamp(softplus(wdt h + dt_bias))    g = -exp(A_log) dt
out = wo rms_norm(state_space_scan(x, B, C, g, dt, D) * silu(wz h))
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
from archon.models.layers.delta_net import LogDecay, ShortConvolution, causal_convolution
from archon.models.layers.feed_forward import get_activation
from archon.models.layers.linear import Linear, Role
from archon.models.layers.norm import NormSpec, RMSNorm
from archon.models.layers.rope import RopeSpec, Rotation
from archon.models.layers.spec import MixerSpec
from archon.models.layers.state_space import state_space_scan
from archon.parallel.comm import Group, all_gather, all_reduce_sharded, local
from archon.parallel.context import ulysses_repeat


@dataclass(frozen=True)
class MambaLayer(MixerSpec):
    """Mamba-2 layer of `n_heads` heads in `n_groups` groups; the heads of a group share B and C.

    Attributes:
        head_dim, state_dim: features P of a head's input, and N of a write or read vector.
        kernel_size: tokens in the window of the convolution.
        norm: norm of the gated output, over the features of each group of heads.
        hidden_act: activation after the convolution.
        bias: biases of all projections.
        conv_bias: bias of the convolution.
        dt_limits: smallest and largest step size.
    """

    module_name: ClassVar[str] = "mamba"
    gathers_keys: ClassVar[bool] = False
    n_heads: int
    n_groups: int
    head_dim: int
    state_dim: int
    kernel_size: int
    norm: NormSpec
    hidden_act: str = "silu"
    bias: bool = False
    conv_bias: bool = True
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    rope: RopeSpec | None = None
    window: int | None = None

    def build(self, layer: int, dim: int) -> Mamba:
        """See `MixerSpec.build`."""
        return Mamba(layer, dim, self)

    def parameters(self, dim: int) -> int:
        """Return the parameter count of its matrices; see `MixerSpec.parameters`.

        The convolution counts as a matrix of its size. Each head's state counts as two matrices, because a token
        updates and reads it.
        """
        inner, channels = self.n_heads * self.head_dim, self.channels
        return dim * (2 * inner + channels + self.n_heads) + self.kernel_size * channels + 2 * inner * self.state_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.n_heads * self.head_dim + 2 * self.n_groups * self.state_dim

    @property
    def attention_width(self) -> int:
        """See `MixerSpec.attention_width`."""
        return 0

    @property
    def heads(self) -> tuple[int, int]:
        """See `MixerSpec.heads`."""
        return self.n_heads, self.n_groups

    @property
    def cache(self) -> RecurrentStates:
        """See `MixerSpec.cache`."""
        return RecurrentStates((self.kernel_size - 1, self.channels), (self.n_heads, self.state_dim, self.head_dim))

    def ulysses_bytes(self, tp: int, cp: int, itemsize: int) -> int:
        """Count x, B, C and result in `itemsize`; log-decay, step size and skip factor in at least float32."""
        heads, groups = (max(1, count // tp) for count in self.heads)
        vectors = 2 * groups * ulysses_repeat(heads, groups, cp) * self.state_dim
        return (vectors + 2 * heads * self.head_dim) * itemsize + 3 * heads * max(itemsize, 4)


class Mamba(nn.Module):
    """Mixer module of `MambaLayer`."""

    tp: Group | None = None

    def __init__(self, layer: int, dim: int, spec: MambaLayer) -> None:
        super().__init__()
        s, self.layer, self.head_dim, self.state_dim = spec, LayerIndex(layer), spec.head_dim, spec.state_dim
        self.act = get_activation(s.hidden_act)
        inner, groups = s.n_heads * s.head_dim, s.n_groups * s.state_dim
        self.wz = Linear(dim, inner, bias=s.bias, role="column", heads=s.n_heads)
        self.wx = Linear(dim, inner, bias=s.bias, role="column", heads=s.n_heads)
        self.wb = Linear(dim, groups, bias=s.bias, role="column", heads=s.n_groups)
        self.wc = Linear(dim, groups, bias=s.bias, role="column", heads=s.n_groups)
        self.wdt = Linear(dim, s.n_heads, bias=s.bias, role="column", heads=s.n_heads)
        self.wdt.quantizable = False  # a few features that control the state
        self.x_conv = ShortConvolution(s.n_heads, s.head_dim, s.kernel_size, bias=s.conv_bias)
        self.b_conv = ShortConvolution(s.n_groups, s.state_dim, s.kernel_size, bias=s.conv_bias)
        self.c_conv = ShortConvolution(s.n_groups, s.state_dim, s.kernel_size, bias=s.conv_bias)
        self.step = TimeStep(s.n_heads, s.dt_limits)
        self.norm = GroupRMSNorm(s.n_heads, s.n_groups, s.head_dim, s.norm)
        self.wo = Linear(inner, dim, bias=s.bias, role="row")

    def forward(self, x: Tensor, rotation: Rotation | None, attention: AttentionMeta) -> Tensor:
        """Return [T, dim] for x [T, dim]."""
        if self.tp is not None:
            x = all_gather(x, self.tp)
        # The head counts come from the tensors, since a sharded projection holds fewer heads.
        lora_mapping = attention.lora_mapping
        z_THP, x_THP = (proj(x, lora_mapping).unflatten(-1, (-1, self.head_dim)) for proj in (self.wz, self.wx))
        b_TGN, c_TGN = (proj(x, lora_mapping).unflatten(-1, (-1, self.state_dim)) for proj in (self.wb, self.wc))
        rows = x_THP, torch.cat((b_TGN, c_TGN), dim=-1), self.step(self.wdt(x, lora_mapping))
        filters = self.x_conv(), torch.cat((self.b_conv(), self.c_conv()), dim=1)
        out_THP = attention.run_recurrence(self.layer, rows, filters, self.scan)
        wide = torch.promote_types(z_THP.dtype, torch.float32)
        gated_THP = out_THP.to(wide) * F.silu(z_THP.to(wide))
        return self.wo(self.norm(gated_THP, x.dtype).flatten(-2), lora_mapping)

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
            rows: x [T, H, P] and B, C [T, G, 2 N] before the convolution, and the gates [T, H, 3] of `TimeStep`.
            filters: the convolution's weights [H, P, taps] and [G, 2 N, taps]; with a bias it follows the taps.
            documents: boundaries of the B documents.
            state: the convolution's last inputs [B, taps - 1, channels], and the matrices [B, H, N, P].

        Returns:
            The heads' outputs [T, H, P], and the state after each document.
        """
        x, bc, gates = rows
        inputs, matrices = state or (None, None)
        channels = torch.cat((x.flatten(1), bc.flatten(1)), dim=1)
        weight = torch.cat([part.flatten(0, 1) for part in filters])
        bias = None
        if self.x_conv.bias is not None:
            weight, bias = weight[:, :-1], weight[:, -1]
        mixed, inputs = causal_convolution(channels, weight, documents, inputs, bias)
        x_mixed, bc_mixed = self.act(mixed).split([x[0].numel(), bc[0].numel()], dim=1)
        b, c = bc_mixed.unflatten(1, (-1, 2 * self.state_dim)).chunk(2, dim=-1)
        out, matrices = state_space_scan(x_mixed.view_as(x), (b, c), gates, documents, matrices)
        return out, (inputs, matrices)


def _log_uniform(x: Tensor) -> Tensor:
    """Fill x with logarithms of numbers between 1 and 16, as the paper's code does."""
    return x.uniform_(1, 16).log_()


class TimeStep(LogDecay):
    """Step size dt = clamp(softplus(a + dt_bias)) of each head, log-decay -exp(A_log) dt, and skip factor D."""

    parameter_roles: ClassVar[Mapping[str, Role]] = {**LogDecay.parameter_roles, "D": "heads"}
    parameter_initializers: ClassVar[Mapping[str, Callable[[Tensor], Any]]] = {
        "A_log": _log_uniform,
        "dt_bias": nn.init.ones_,
        "D": nn.init.ones_,
    }

    def __init__(self, heads: int, limits: tuple[float, float]) -> None:
        super().__init__(heads)
        self.limits = limits
        self.D = nn.Parameter(torch.empty(heads))

    def forward(self, a: Tensor) -> Tensor:
        """Return log-decay, dt and D, [T, H, 3], for a [T, H]."""
        wide = torch.promote_types(a.dtype, torch.float32)
        A_log, dt_bias, skip = (local(parameter).to(wide) for parameter in (self.A_log, self.dt_bias, self.D))
        dt = F.softplus(a.to(wide) + dt_bias).clamp(*self.limits)
        return torch.stack((-A_log.exp() * dt, dt, skip.expand_as(dt)), dim=-1)


class GroupRMSNorm(RMSNorm):
    """Norm over the features of each group of heads, sharded by heads under tensor parallelism."""

    tp: Group | None = None

    def __init__(self, heads: int, groups: int, head_dim: int, spec: NormSpec) -> None:
        super().__init__(heads * head_dim, spec.eps, role="heads_norm")
        self.heads, self.groups = heads, groups

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the norm of x [T, heads of this rank, features], rounded to `dtype` before the weight."""
        weight, ranks = local(self.weight).view(x.shape[1:]), 1 if self.tp is None else self.tp.size
        grouped = x.unflatten(1, (max(1, self.groups // ranks), -1))
        squares = grouped.square().mean((2, 3))
        if self.tp is not None and self.groups < ranks:
            # Several ranks hold parts of a group, and each adds the mean square of its part to its group's sum.
            shared = ranks // self.groups
            own = self.tp.rank // shared
            sums = all_reduce_sharded(F.pad(squares, (own, self.groups - 1 - own)), self.tp)
            squares = sums[:, own : own + 1] / shared
        normed = grouped * torch.rsqrt(squares + self.eps)[..., None, None]
        return normed.flatten(1, 2).to(dtype or x.dtype) * weight
