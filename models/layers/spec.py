"""Layer specs: the token mixer, the feed-forward network and their residual connections.

Layers, parameter counts, FLOPs, caches and the planner's estimates derive from these specs. A new kind of mixer or
feed-forward network is a module plus a subclass of `MixerSpec` or `FeedForwardSpec`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NoReturn

from torch import nn

from archon.models.attention.decode.cache import CacheSpec
from archon.models.layers.norm import NormSpec
from archon.models.layers.rope import RopeSpec
from archon.schema.errors import FamilyError

NormPlacement = Literal["before", "after", "both", "parallel"]
"""Where a block normalizes: the inputs of mixer and feed-forward network, their outputs, or both.

In a `parallel` block, one norm feeds both, and the block adds both outputs to its input. A block of a mixer or a
network alone, see `NoMixer` and `NoFeedForward`, is a parallel block without the other.
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


@dataclass(frozen=True)
class NoMixer(MixerSpec):
    """Absent mixer of a layer that is a feed-forward network alone."""

    module_name: ClassVar[str] = ""
    rope: RopeSpec | None = field(default=None, init=False)
    window: int | None = field(default=None, init=False)

    def build(self, layer: int, dim: int) -> NoReturn:
        """Raise an error: blocks build no module for it."""
        raise FamilyError("a layer without a mixer has no module for it; build a TransformerBlock of its LayerSpec")

    def parameters(self, dim: int) -> int:
        """See `MixerSpec.parameters`."""
        return 0

    @property
    def attention_width(self) -> int:
        """See `MixerSpec.attention_width`."""
        return 0

    @property
    def heads(self) -> tuple[int, int]:
        """See `MixerSpec.heads`; every number of ranks divides 0."""
        return 0, 0

    @property
    def cache(self) -> CacheSpec:
        """See `MixerSpec.cache`."""
        return CacheSpec()

    def ulysses_bytes(self, tp: int, cp: int, itemsize: int) -> int:
        """See `MixerSpec.ulysses_bytes`."""
        return 0


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

    def expert_dim(self, dim: int) -> int:
        """Return the input and output width of its experts, in a model of width `dim`."""
        return dim

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
class NoFeedForward(FeedForwardSpec):
    """Absent feed-forward network of a layer that is a mixer alone."""

    module_name: ClassVar[str] = ""
    hidden_dim: int = field(default=0, init=False)
    n_experts: int = field(default=0, init=False)
    top_k: int = field(default=0, init=False)

    def build(self, dim: int) -> NoReturn:
        """Raise an error: blocks build no module for it."""
        raise FamilyError("a layer without a network has no module for it; build a TransformerBlock of its LayerSpec")

    def parameters(self, dim: int) -> tuple[int, int]:
        """See `FeedForwardSpec.parameters`."""
        return 0, 0

    @property
    def hidden_dims(self) -> tuple[int, ...]:
        """See `FeedForwardSpec.hidden_dims`."""
        return ()


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        norm: norms of the residual stream.
        norm_placement: see `NormPlacement`.
        residual_multiplier: factor on the outputs that mixer and feed-forward network add to the residual stream.

    Raises:
        FamilyError: the mixer or the network is absent, and the block is not parallel.
    """

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    norm_placement: NormPlacement = "before"
    residual_multiplier: float = 1.0

    def __post_init__(self) -> None:
        is_alone = isinstance(self.mixer, NoMixer) or isinstance(self.feed_forward, NoFeedForward)
        if is_alone and self.norm_placement != "parallel":
            raise FamilyError(
                f"norm_placement is {self.norm_placement!r} in a layer of a mixer or a network alone; expected "
                "'parallel', whose one norm feeds either"
            )
