"""Layer specs: the token mixer, the feed-forward network and their residual connections.

Layers, parameter counts, FLOPs, caches and the planner's estimates derive from these specs. A new kind of mixer or
feed-forward network is a module plus a subclass of `MixerSpec` or `FeedForwardSpec`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from archon.models.attention.decode.cache import CacheSpec
from archon.models.layers.norm import NormSpec
from archon.models.layers.rope import RopeSpec

NormPlacement = Literal["before", "after", "both", "parallel"]
"""Where a block normalizes: the inputs of mixer and feed-forward network, their outputs, or both.

In a `parallel` block, one norm feeds both, and the block adds both outputs to its input.
"""


class MixerSpec(abc.ABC):
    """Token mixer of a layer. Subclasses are frozen dataclasses, because equal layers share estimates.

    Attributes:
        module_name: the block's attribute that holds the module.
        rope: rotation of queries and keys; None for none.
        window: each token attends to itself and the window - 1 tokens before it; None for all.
        shares_prefixes: whether documents with a common prefix can share its computation.
        gathers_keys: whether context parallelism can gather keys and values; otherwise it uses Ulysses.
    """

    module_name: ClassVar[str] = "attention"
    shares_prefixes: ClassVar[bool] = True
    gathers_keys: ClassVar[bool] = True
    rope: RopeSpec | None
    window: int | None

    @abc.abstractmethod
    def build(self, layer: int, dim: int) -> nn.Module:
        """Return the module of layer number `layer`: module(x [T, dim], rotation, attention) -> [T, dim]."""

    @abc.abstractmethod
    def parameters(self, dim: int) -> int:
        """Return the parameter count of its matrices."""

    @property
    @abc.abstractmethod
    def attention_width(self) -> int:
        """Query heads times the mean of key and value features, as in attention FLOPs; 0 without attention."""

    @property
    @abc.abstractmethod
    def heads(self) -> tuple[int, int]:
        """Counts of query and key heads, which tensor and context parallelism divide."""

    @property
    @abc.abstractmethod
    def cache(self) -> CacheSpec:
        """Layout of its decoding cache."""

    def ulysses_bytes(self, tp: int, cp: int, itemsize: int) -> int:
        """Return the bytes that Ulysses exchanges per token in a forward: operands and result.

        `tp` and `cp` are numbers of ranks; `itemsize` is the bytes of a number in the compute dtype.
        """
        heads, kv_heads = (max(1, count // tp) for count in self.heads)
        return 2 * (self.attention_width // self.heads[0]) * (heads + max(kv_heads, cp)) * itemsize


class FeedForwardSpec(abc.ABC):
    """Feed-forward network of a layer. Subclasses are frozen dataclasses.

    Attributes:
        module_name: the block's attribute that holds the module; `moe` for one that also returns `RouterStats`.
        hidden_dim: inner width of the network, or of one expert.
        n_experts, top_k: experts of the layer, and experts per token; 0 for a dense network.
    """

    module_name: ClassVar[str] = "feed_forward"
    hidden_dim: int
    n_experts: int
    top_k: int

    @abc.abstractmethod
    def build(self, dim: int) -> nn.Module:
        """Return the module."""

    @abc.abstractmethod
    def parameters(self, dim: int) -> tuple[int, int]:
        """Return (active, total) parameter counts of its matrices; a token uses the active ones."""

    def with_balancing_bias(self) -> FeedForwardSpec:
        """Return a copy with a balancing bias in its router; see `ExpertsLayer.balance`."""
        return self

    @property
    @abc.abstractmethod
    def hidden_dims(self) -> tuple[int, ...]:
        """Inner widths that tensor parallelism divides."""

    @property
    def has_balancing_loss(self) -> bool:
        """Whether the load-balancing loss is defined for its router."""
        return False


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        norm: norms of the residual stream.
        norm_placement: see `NormPlacement`.
        residual_multiplier: factor on the outputs that mixer and feed-forward network add to the residual stream.
    """

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    norm_placement: NormPlacement = "before"
    residual_multiplier: float = 1.0
