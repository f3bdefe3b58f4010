"""The vision tower of Qwen3-VL and Qwen3.5 (Qwen 2025, arXiv:2511.21631): a transformer over the patches of each image.

A patch is one row of a linear layer. The learned grid of positions is interpolated to the size of each image, and
attention within an image, which is not causal, rotates one half of each head by the row and the other by the column.
Besides the result of the last block, those of some others are merged for the decoder's first layers (DeepStack: Meng et
al. 2024, arXiv:2406.04334).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archon.models.attention.meta import AttentionMeta, PackedAttention
from archon.models.attention.spec import AttentionSpec
from archon.models.cpu.fused import rotate
from archon.models.layers.feed_forward import get_activation
from archon.models.layers.linear import Linear, Role
from archon.models.layers.rope import Rotation
from archon.models.vision.images import Grid, patch_coordinates
from archon.parallel.comm import local
from archon.parallel.transfer import to_device_async
from archon.schema.errors import ConfigError

NORM_EPS = 1e-6


@dataclass(frozen=True)
class VisionSpec:
    """Sizes of a tower.

    Attributes:
        depth: number of blocks.
        dim: features of a patch between blocks.
        hidden_dim: inner width of the feed-forward networks.
        channels, temporal_patch_size, patch_size: of a patch's pixels, [channels, frames, rows, columns].
        merge_size: squares of merge_size by merge_size patches become one row of the decoder.
        out_dim: features of such a row.
        n_positions: entries of the learned grid of positions, a square number.
        initializer_range: standard deviation of fresh matrices.
        deepstack: the blocks (from 0) whose results the decoder's first layers are given, in their order.

    Raises ConfigError for values that contradict each other.
    """

    depth: int = 27
    dim: int = 1152
    hidden_dim: int = 4304
    n_heads: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    out_dim: int = 3584
    n_positions: int = 2304
    rope_theta: float = 10_000.0
    initializer_range: float = 0.02
    deepstack: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        get_activation(self.hidden_act)
        if [*self.deepstack] != sorted({*self.deepstack} & {*range(self.depth)}):
            raise ConfigError(
                f"deepstack_visual_indexes is {[*self.deepstack]}; expected blocks of the tower, which has "
                f"{self.depth}, in increasing order"
            )
        if self.dim % (4 * self.n_heads):
            raise ConfigError(
                f"the vision tower has hidden_size {self.dim} and num_heads {self.n_heads}; expected heads of "
                "a multiple of 4 features, whose pairs turn by row and column"
            )
        if self.side**2 != self.n_positions:
            raise ConfigError(f"num_position_embeddings is {self.n_positions}; expected a square number")

    @property
    def side(self) -> int:
        """Rows and columns of the learned grid of positions."""
        return int(self.n_positions**0.5)

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """The shape of a patch's pixels."""
        return self.channels, self.temporal_patch_size, self.patch_size, self.patch_size

    def forward_flops(self, patches: int) -> int:
        """Returns the operations of a forward over an image of so many patches: two for each weight that a row meets,
        and those of attention between all of them."""
        features = self.channels * self.temporal_patch_size * self.patch_size**2
        width = self.dim * self.merge_size**2
        block = 4 * self.dim**2 + 2 * self.dim * self.hidden_dim + 2 * self.dim * patches
        rows = patches // self.merge_size**2 * (1 + len(self.deepstack))
        return 2 * (patches * (features * self.dim + self.depth * block) + rows * width * (width + self.out_dim))

    def build(self, attn_type: str) -> VisionEncoder:
        """Returns the tower, whose attention `attn_type` computes."""
        return VisionEncoder(self, attn_type)


class PatchEmbedding(nn.Module):
    """A linear layer over the pixels of a patch. Its weight [dim, channels, frames, rows, columns] is, as in
    checkpoints, that of a convolution whose kernel is as large as its stride."""

    role: Role = "vision"

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.dim, *spec.patch_shape))
        self.bias = nn.Parameter(torch.empty(spec.dim))

    def forward(self, patches: Tensor) -> Tensor:
        """Returns [P, dim] for patches [P, F]."""
        weight = local(self.weight)
        return F.linear(patches.to(weight.dtype), weight.flatten(1), local(self.bias))


class PositionGrid(nn.Module):
    """Learned positions [side^2, dim], interpolated bilinearly to each image, corner to corner."""

    role: Role = "vision"

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.side = spec.side
        self.weight = nn.Parameter(torch.empty(spec.n_positions, spec.dim))

    def forward(self, coordinates: Tensor, sizes: Tensor) -> Tensor:
        """Returns [P, dim] for the row and column [2, P] of each patch and its image's numbers of them [2, P]."""
        places = coordinates.float() * (self.side - 1) / (sizes - 1).clamp(min=1)
        low = places.floor()
        share = places - low
        (row, column), (below, right) = low.long(), (low.long() + 1).clamp(max=self.side - 1)
        row_share, column_share = share
        corners = (
            (row, column, (1 - row_share) * (1 - column_share)),
            (row, right, (1 - row_share) * column_share),
            (below, column, row_share * (1 - column_share)),
            (below, right, row_share * column_share),
        )
        weight = local(self.weight)
        wide = torch.promote_types(weight.dtype, torch.float32)
        parts = [F.embedding(y * self.side + x, weight) * factor.to(wide).unsqueeze(1) for y, x, factor in corners]
        return torch.stack(parts).sum(0).to(weight.dtype)


class VisionLayerNorm(nn.LayerNorm):
    """A layer norm that every rank of tensor parallelism holds whole."""

    role: Role = "vision"

    def forward(self, x: Tensor) -> Tensor:
        """Returns [P, dim] for x [P, dim]."""
        return F.layer_norm(x, self.normalized_shape, local(self.weight), local(self.bias), self.eps)


def vision_linear(in_features: int, out_features: int) -> Linear:
    """Returns a linear layer with a bias that every rank of tensor parallelism holds whole."""
    return Linear(in_features, out_features, bias=True, role="vision")


class VisionAttention(nn.Module):
    """Attention of the patches of an image to each other; `wqkv` has the rows of queries, then keys, then values."""

    def __init__(self, layer: int, spec: VisionSpec) -> None:
        super().__init__()
        self.layer, self.n_heads = layer, spec.n_heads
        self.spec = AttentionSpec(spec.head_dim**-0.5, causal=False)
        self.wqkv = vision_linear(spec.dim, 3 * spec.dim)
        self.wo = vision_linear(spec.dim, spec.dim)

    def forward(self, x: Tensor, rotation: Rotation, attention: AttentionMeta) -> Tensor:
        """Returns [P, dim] for x [P, dim]."""
        q, k, v = self.wqkv(x).unflatten(1, (3, self.n_heads, -1)).unbind(1)
        q, k = (rotate(each, rotation.cos, rotation.sin) for each in (q, k))
        return self.wo(attention.attend(self.layer, q, k, v, self.spec).flatten(1))


class VisionFeedForward(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, dim: int, hidden_dim: int, out_dim: int, activation: str) -> None:
        super().__init__()
        self.w1, self.w2 = vision_linear(dim, hidden_dim), vision_linear(hidden_dim, out_dim)
        self.activation = get_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [P, out_dim] for x [P, dim]."""
        return self.w2(self.activation(self.w1(x)))


class VisionBlock(nn.Module):
    """Attention and a feed-forward network, each of normalized inputs and added to the residual stream."""

    def __init__(self, layer: int, spec: VisionSpec) -> None:
        super().__init__()
        self.attention_norm = VisionLayerNorm(spec.dim, NORM_EPS)
        self.attention = VisionAttention(layer, spec)
        self.ffn_norm = VisionLayerNorm(spec.dim, NORM_EPS)
        self.feed_forward = VisionFeedForward(spec.dim, spec.hidden_dim, spec.dim, spec.hidden_act)

    def forward(self, x: Tensor, rotation: Rotation, attention: AttentionMeta) -> Tensor:
        """Returns [P, dim] for x [P, dim]."""
        x = x + self.attention(self.attention_norm(x), rotation, attention)
        return x + self.feed_forward(self.ffn_norm(x))


class PatchMerger(nn.Module):
    """Makes each square of patches one row of the decoder's residual stream.

    The norm is over each patch, or over the whole square.
    """

    def __init__(self, spec: VisionSpec, *, use_postshuffle_norm: bool) -> None:
        super().__init__()
        self.width = spec.dim * spec.merge_size**2
        self.norm = VisionLayerNorm(self.width if use_postshuffle_norm else spec.dim, NORM_EPS)
        self.feed_forward = VisionFeedForward(self.width, self.width, spec.out_dim, "gelu")

    def forward(self, x: Tensor) -> Tensor:
        """Returns [M, out_dim] for patches x [P, dim] in the order of `PackedImages.patches`."""
        return self.feed_forward(self.norm(x.view(-1, *self.norm.normalized_shape)).view(-1, self.width))


class VisionEncoder(nn.Module):
    """Turns packed patches into rows of the decoder's residual stream."""

    def __init__(self, spec: VisionSpec, attn_type: str) -> None:
        super().__init__()
        self.spec, self.attn_type = spec, attn_type
        self.patch_embedding = PatchEmbedding(spec)
        self.position_grid = PositionGrid(spec)
        self.blocks = nn.ModuleList([VisionBlock(layer, spec) for layer in range(spec.depth)])
        self.merger = PatchMerger(spec, use_postshuffle_norm=False)
        self.deepstack_mergers = nn.ModuleList([PatchMerger(spec, use_postshuffle_norm=True) for _ in spec.deepstack])

    def forward(self, patches: Tensor, grids: tuple[Grid, ...]) -> Tensor:
        """Returns [M, 1 + D, out_dim] for patches [P, F] of images with these sizes; see `ImageFeatures.features`."""
        counts = tuple(height * width for height, width in grids)
        coordinates = to_device_async(patch_coordinates(grids, self.spec.merge_size), patches.device)
        sizes = torch.tensor(grids).repeat_interleave(torch.tensor(counts), dim=0).t()
        sizes = to_device_async(sizes, patches.device)
        x = self.patch_embedding(patches) + self.position_grid(coordinates, sizes)
        rotation = self._rotation(coordinates, x.dtype)
        attention = PackedAttention.from_lengths(counts, x.device, self.attn_type)
        attention.prepare(x)
        mergers, features = dict(zip(self.spec.deepstack, self.deepstack_mergers, strict=True)), []
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, attention)
            if layer in mergers:
                features.append(mergers[layer](x))
        return torch.stack([self.merger(x), *features], dim=1)

    @torch.no_grad()
    def _rotation(self, coordinates: Tensor, dtype: torch.dtype) -> Rotation:
        """Returns the rotation of patches at coordinates [2, P], in at least float32 whatever the tower computes in."""
        pairs = torch.arange(0, self.spec.head_dim // 2, 2, dtype=torch.float32, device=coordinates.device)
        frequencies = 1.0 / (self.spec.rope_theta ** (pairs / (self.spec.head_dim // 2)))
        wide = torch.promote_types(dtype, torch.float32)
        angles = coordinates.unsqueeze(-1).to(wide) * frequencies.to(wide)
        angles = torch.cat((angles[0], angles[1]), dim=-1).unsqueeze(1)
        return Rotation(angles.cos(), angles.sin())

    def initializers(self, prefix: str) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        """Yields each parameter's name after `prefix` and the function that initializes it in place."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                fill: Callable[[Tensor], Any] = partial(nn.init.normal_, std=self.spec.initializer_range)
            else:
                fill = nn.init.ones_ if name.endswith("norm.weight") else nn.init.zeros_
            yield f"{prefix}.{name}", fill
