"""Gated feed-forward network (Shazeer 2020, arXiv:2002.05202), with the activations of Hugging Face configs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archon.models.layers.fused import swiglu
from archon.models.layers.linear import Linear
from archon.parallel.comm import Group, all_gather
from archon.schema.errors import ConfigError

Activation = Callable[[Tensor], Tensor]

_GELU_TANH = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
"""The activations, by Hugging Face's `hidden_act`."""


def get_activation(name: str) -> Activation:
    """Returns the activation with this name in `ACTIVATIONS`. Raises ConfigError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act is {name!r}; expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gated(act: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """Returns act(gate) * up."""
    return swiglu(gate, up) if act is F.silu else act(gate) * up


class FeedForward(nn.Module):
    """w2(act(w1 x) * w3 x), without biases; w1 is Hugging Face's gate_proj, w3 its up_proj, w2 its down_proj."""

    tp: Group | None = None

    def __init__(self, dim: int, hidden_dim: int, hidden_act: str) -> None:
        super().__init__()
        self.act = get_activation(hidden_act)
        self.w1 = Linear(dim, hidden_dim, bias=False, role="column")
        self.w2 = Linear(hidden_dim, dim, bias=False, role="row")
        self.w3 = Linear(dim, hidden_dim, bias=False, role="column")

    def forward(self, x: Tensor) -> Tensor:
        if self.tp is not None:
            x = all_gather(x, self.tp)
        return self.w2(gated(self.act, self.w1(x), self.w3(x)))
