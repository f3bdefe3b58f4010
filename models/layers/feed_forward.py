"""Gated feed-forward network (Shazeer 2020, arXiv:2002.05202), with the activations of Hugging Face configs."""

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


# Functions, not lambdas: a module can be pickled. `gelu_new` rounds after each operation, as transformers does.
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
"""The activations, by Hugging Face's `hidden_act`."""


def get_activation(name: str) -> Activation:
    """Returns the activation with this name in `ACTIVATIONS`. Raises ConfigError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act is {name!r}; expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The gated activation of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with clamped gate and up.

    Gates are at most `limit`, and ups between -limit and limit.
    """

    alpha: float = 1.702
    limit: float = 7.0


def gated_activation(act: Activation | ClampedSwiGLU, gate: Tensor, up: Tensor) -> Tensor:
    """Returns act(gate) * up, or the activation of both."""
    if isinstance(act, ClampedSwiGLU):
        return clamped_swiglu(gate, up, act.alpha, act.limit)
    return swiglu(gate, up) if act is F.silu else act(gate) * up


@dataclass(frozen=True)
class DenseLayer(FeedForwardSpec):
    """A gated network of inner width `hidden_dim`."""

    hidden_dim: int
    hidden_act: str | ClampedSwiGLU = "silu"
    n_experts: int = field(default=0, init=False)

    def build(self, dim: int) -> FeedForward:
        """See `FeedForwardSpec.build`."""
        return FeedForward(dim, self.hidden_dim, self.hidden_act)

    def parameters(self, dim: int) -> tuple[int, int]:
        """See `FeedForwardSpec.parameters`."""
        count = 3 * dim * self.hidden_dim
        return count, count

    @property
    def hidden_dims(self) -> tuple[int, ...]:
        return (self.hidden_dim,)


class FeedForward(nn.Module):
    """w2(act(w1 x) * w3 x), without biases; w1 is Hugging Face's gate_proj, w3 its up_proj, w2 its down_proj."""

    tp: Group | None = None

    def __init__(self, dim: int, hidden_dim: int, hidden_act: str | ClampedSwiGLU) -> None:
        super().__init__()
        self.act = get_activation(hidden_act) if isinstance(hidden_act, str) else hidden_act
        self.w1 = Linear(dim, hidden_dim, bias=False, role="column")
        self.w2 = Linear(hidden_dim, dim, bias=False, role="row")
        self.w3 = Linear(dim, hidden_dim, bias=False, role="column")

    def input_projections(self) -> tuple[Linear, ...]:
        """Returns the layers of the gate and of what it multiplies."""
        return self.w1, self.w3

    def forward(self, x: Tensor, lora_mapping: LoRAMapping | None = None) -> Tensor:
        """Returns [T, dim] for x [T, dim]."""
        if self.tp is not None:
            x = all_gather(x, self.tp)
        gate, up = project(x, self.input_projections(), lora_mapping)
        return self.w2(gated_activation(self.act, gate, up), lora_mapping)
