"""What a layer of a decoder is: its mixer, its feed-forward network, and how both join the residual stream.

Layers, parameter counts, FLOPs, caches and the planner's estimates derive from these specs. A new kind of mixer or
feed-forward network is a module and a subclass of `MixerSpec` or `FeedForwardSpec`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from archon.models.attention.decode.cache import CacheSpec
from archon.models.layers.norm import NormSpec
from archon.models.layers.rope import RopeSpec

NormPlacement = Literal["before", "after", "both"]
"""Where a block normalizes: the input of mixer and feed-forward network, their output, or both."""


class MixerSpec(abc.ABC):
    """The part of a layer that mixes tokens. Subclasses are frozen dataclasses, since equal layers share estimates.

    Attributes:
        module_name: the block's attribute that holds the module.
        rope: the rotation of its queries and keys; None for none.
        window: each token sees itself and the window - 1 tokens before it; None for all.
        attention_width: query heads times the mean of key and value features, which attention's FLOPs are proportional
            to; 0 for a mixer without attention.
        shares_prefixes: whether documents with a common prefix can share its computation.
        gathers_keys: whether context parallelism can gather keys and values for it; else it must exchange tokens for
            heads, as Ulysses does.
    """

    module_name: ClassVar[str] = "attention"
    shares_prefixes: ClassVar[bool] = True
    gathers_keys: ClassVar[bool] = True
    rope: RopeSpec | None
    window: int | None

    @abc.abstractmethod
    def build(self, layer: int, dim: int) -> nn.Module:
        """Returns the module of layer number `layer`: called as module(x [T, dim], rotation, attention) -> [T, dim]."""

    @abc.abstractmethod
    def parameters(self, dim: int) -> int:
        """Returns the parameters of its matrix products."""

    @property
    @abc.abstractmethod
    def attention_width(self) -> int: ...

    @property
    @abc.abstractmethod
    def heads(self) -> tuple[int, int]:
        """The query and key heads, which tensor and context parallelism divide."""

    @property
    @abc.abstractmethod
    def cache(self) -> CacheSpec:
        """What it caches while a sequence is decoded."""

    def ulysses_bytes(self, tp: int, cp: int, itemsize: int) -> int:
        """Returns the bytes of a token that Ulysses exchanges over `cp` ranks in a forward: operands and result.

        Args:
            tp: ranks that share the heads.
            itemsize: bytes of a number in the dtype of the computation.
        """
        heads, kv_heads = (max(1, count // tp) for count in self.heads)
        return 2 * (self.attention_width // self.heads[0]) * (heads + max(kv_heads, cp)) * itemsize


class FeedForwardSpec(abc.ABC):
    """The part of a layer that processes each token alone. Subclasses are frozen dataclasses.

    Attributes:
        module_name: the block's attribute that holds the module; `moe` for one that also returns `RouterStats`.
        hidden_dims: the inner widths that tensor parallelism divides.
        n_experts, n_active_experts, expert_dim: the experts of the layer, those that process a token, and the inner
            width of one; 0 for a dense network.
        has_balancing_loss: whether the load-balancing loss of its router's statistics is defined.
    """

    module_name: ClassVar[str] = "feed_forward"
    n_experts: int

    @abc.abstractmethod
    def build(self, dim: int) -> nn.Module:
        """Returns the module."""

    @abc.abstractmethod
    def parameters(self, dim: int) -> tuple[int, int]:
        """Returns (active, all) parameters of its matrix products; active ones are used for a token."""

    def with_balancing_bias(self) -> FeedForwardSpec:
        """Returns this network with a balancing bias in its router, if it has one; see `ExpertsLayer.balance`."""
        return self

    @property
    @abc.abstractmethod
    def hidden_dims(self) -> tuple[int, ...]: ...

    @property
    def has_balancing_loss(self) -> bool:
        return False

    @property
    def n_active_experts(self) -> int:
        return 0

    @property
    def expert_dim(self) -> int:
        return 0


@dataclass(frozen=True)
class LayerSpec:
    """One layer.

    Attributes:
        norm: its norms of the residual stream.
        norm_placement: see `NormPlacement`.
        residual_multiplier: factor on what mixer and feed-forward network add to the residual stream.
    """

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    norm_placement: NormPlacement = "before"
    residual_multiplier: float = 1.0
