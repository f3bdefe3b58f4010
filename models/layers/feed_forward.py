"""Feed-forward network, gated (Shazeer 2020, arXiv:2002.05202) or not, with the activations of Hugging Face configs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archon.models.cpu.fused import clamped_swiglu, swiglu
from archon.models.layers.linear import Linear, project
from archon.models.layers.spec import FeedForwardSpec
from archon.models.lora.mapping import LoRAMapping
from archon.parallel.comm import Group, all_gather
from archon.schema.errors import ConfigError

Activation = Callable[[Tensor], Tensor]


def _gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


# Functions, not lambdas, so that modules can be pickled. `gelu_new` rounds after each operation, as transformers does.
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_new,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu_squared,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
"""Activations by Hugging Face's `hidden_act`."""


def get_activation(name: str, field: str = "hidden_act") -> Activation:
    """Return the activation with this name in `ACTIVATIONS`; ConfigError for an unknown name, which is in `field`."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"{field} is {name!r}; expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


@dataclass(frozen=True)
class ClampedSwiGLU:
    """Gated activation of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with clamped gate and up.

    The gate is clamped to at most `limit`, and up to [-limit, limit].
    """

    alpha: float = 1.702
    limit: float = 7.0


def gated_activation(act: Activation | ClampedSwiGLU, gate: Tensor, up: Tensor) -> Tensor:
    """Return act(gate) * up, or `ClampedSwiGLU` of both."""
    if isinstance(act, ClampedSwiGLU):
        return clamped_swiglu(gate, up, act.alpha, act.limit)
    return swiglu(gate, up) if act is F.silu else act(gate) * up


@dataclass(frozen=True)
class DenseLayer(FeedForwardSpec):
    """Feed-forward network of inner width `hidden_dim`, with or without biases and gate."""

    hidden_dim: int
    hidden_act: str | ClampedSwiGLU = "silu"
    bias: bool = False
    is_gated: bool = True
    n_experts: int = field(default=0, init=False)
    top_k: int = field(default=0, init=False)

    def build(self, dim: int) -> FeedForward:
        """See `FeedForwardSpec.build`."""
        return FeedForward(dim, self.hidden_dim, self.hidden_act, bias=self.bias, is_gated=self.is_gated)

    def parameters(self, dim: int) -> tuple[int, int]:
        """See `FeedForwardSpec.parameters`."""
        inputs = 2 if self.is_gated else 1
        count = (inputs + 1) * dim * self.hidden_dim + (inputs * self.hidden_dim + dim if self.bias else 0)
        return count, count

    @property
    def hidden_dims(self) -> tuple[int, ...]:
        """See `FeedForwardSpec.hidden_dims`."""
        return (self.hidden_dim,)


class FeedForward(nn.Module):
    """w2(act(w1 x) * w3 x), or w2(act(w3 x)) without a gate; with biases if `bias`.

    w1, w3 [hidden, dim] and w2 [dim, hidden] are Hugging Face's gate_proj, up_proj and down_proj.
    """

    tp: Group | None = None

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        hidden_act: str | ClampedSwiGLU,
        *,
        bias: bool = False,
        is_gated: bool = True,
    ) -> None:
        super().__init__()
        self.act = get_activation(hidden_act) if isinstance(hidden_act, str) else hidden_act
        self.w1 = Linear(dim, hidden_dim, bias=bias, role="column") if is_gated else None
        self.w2 = Linear(hidden_dim, dim, bias=bias, role="row")
        self.w3 = Linear(dim, hidden_dim, bias=bias, role="column")

    def input_projections(self) -> tuple[Linear, ...]:
        """Return the gate, if there is one, and up projections, which share an input."""
        return (self.w3,) if self.w1 is None else (self.w1, self.w3)

    def forward(self, x: Tensor, lora_mapping: LoRAMapping | None = None) -> Tensor:
        """Return [T, dim] for x [T, dim]."""
        if self.tp is not None:
            x = all_gather(x, self.tp)
        *gate, up = project(x, self.input_projections(), lora_mapping)
        if gate:
            return self.w2(gated_activation(self.act, gate[0], up), lora_mapping)
        assert not isinstance(self.act, ClampedSwiGLU), "it needs a gate"
        return self.w2(self.act(up), lora_mapping)
