"""Vision encoder of Qwen3-VL and Qwen3.5 (Qwen 2025, arXiv:2511.21631): a transformer over image patches.

A linear layer embeds each patch. The learned position grid is interpolated to the size of each image. Attention within
an image is bidirectional; RoPE rotates one half of each head by the row and the other by the column. DeepStack also
merges the outputs of some earlier blocks for the decoder's first layers (Meng et al. 2024, arXiv:2406.04334).

Qwen2.5-VL's encoder (Qwen 2025, arXiv:2502.13923) has RMS norms, gated feed-forward networks and no position grid. Most
of its blocks attend within windows of the image.
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
from archon.models.attention.spec import AttentionSpec, LayerIndex
from archon.models.cpu.fused import rotate
from archon.models.hf.checks import require
from archon.models.layers.feed_forward import get_activation
from archon.models.layers.linear import Linear, Role
from archon.models.layers.norm import RMSNorm
from archon.models.layers.rope import Rotation
from archon.models.vision.images import Grid, patch_coordinates, window_order
from archon.parallel.comm import local
from archon.parallel.transfer import to_device_async

NORM_EPS = 1e-6


@dataclass(frozen=True)
class VisionSpec:
    """Sizes of a vision encoder.

    Attributes:
        depth: Number of blocks.
        dim: Features of a patch between blocks.
        hidden_dim: Inner width of the feed-forward networks.
        channels, temporal_patch_size, patch_size: Sizes of a patch, [channels, frames, rows, columns].
        merge_size: The encoder merges merge_size x merge_size patches into one decoder row.
        out_dim: Features of a decoder row.
        n_positions: Entries of the learned position grid, a square number; 0 for no grid.
        initializer_range: Standard deviation of newly initialized matrices.
        deepstack: Blocks (from 0) that feed the decoder's first layers, in this order.
        rms_norm: RMS norms in place of layer norms.
        gated: Gated feed-forward networks.
        patch_bias: Bias of the linear layer that embeds patches.
        window: Rows, and columns, of decoder rows within which blocks attend; 0 for the whole image.
        full_attention: Blocks (from 0) that attend to the whole image despite `window`.

    Raises:
        ConfigError: Values contradict each other.
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
    rms_norm: bool = False
    gated: bool = False
    patch_bias: bool = True
    window: int = 0
    full_attention: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        get_activation(self.hidden_act)
        require(
            [*self.deepstack] == sorted({*self.deepstack} & {*range(self.depth)}),
            f"deepstack_visual_indexes is {[*self.deepstack]}; expected increasing indices below the encoder's depth "
            f"{self.depth}",
        )
        problem = f"fullatt_block_indexes is {[*self.full_attention]}"
        is_below = {*self.full_attention} <= {*range(self.depth)}
        require(is_below, f"{problem}; expected blocks below the encoder's depth {self.depth}")
        require(
            self.dim % (4 * self.n_heads) == 0,
            f"the vision encoder has hidden_size {self.dim} and num_heads {self.n_heads}; expected heads of a multiple "
            "of 4 features, since RoPE rotates pairs by row and by column",
        )
        is_square = self.side**2 == self.n_positions
        require(is_square, f"num_position_embeddings is {self.n_positions}; expected a square number")

    @property
    def side(self) -> int:
        """Rows, and columns, of the learned position grid."""
        return int(self.n_positions**0.5)

    @property
    def head_dim(self) -> int:
        """Features per head."""
        return self.dim // self.n_heads

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """Shape of a patch: [channels, frames, rows, columns]."""
        return self.channels, self.temporal_patch_size, self.patch_size, self.patch_size

    def forward_flops(self, patches: int) -> int:
        """Return the FLOPs of encoding an image of `patches` patches: two per weight and row, plus attention."""
        features = self.channels * self.temporal_patch_size * self.patch_size**2
        width = self.dim * self.merge_size**2
        block = 4 * self.dim**2 + (2 + self.gated) * self.dim * self.hidden_dim
        # Keys of a patch, summed over the blocks; windows at the edges of an image count as whole ones.
        windowed = self.depth - len(self.full_attention) if self.window else 0
        keys = (self.depth - windowed) * patches + windowed * min(patches, (self.window * self.merge_size) ** 2)
        rows = patches // self.merge_size**2 * (1 + len(self.deepstack))
        blocks = self.depth * block + 2 * self.dim * keys
        return 2 * (patches * (features * self.dim + blocks) + rows * width * (width + self.out_dim))

    def build_norm(self, dim: int) -> nn.Module:
        """Return a norm over `dim` features, replicated under tensor parallelism."""
        return RMSNorm(dim, NORM_EPS, role="vision") if self.rms_norm else VisionLayerNorm(dim, NORM_EPS)


class PatchEmbedding(nn.Module):
    """Linear layer over the pixels of a patch.

    Checkpoints store it as a convolution with equal kernel and stride: weight [dim, channels, frames, rows, columns].
    """

    role: Role = "vision"

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.dim, *spec.patch_shape))
        self.bias = nn.Parameter(torch.empty(spec.dim)) if spec.patch_bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """Return [P, dim] for patches [P, F]."""
        weight = local(self.weight)
        bias = None if self.bias is None else local(self.bias)
        return F.linear(patches.to(weight.dtype), weight.flatten(1), bias)


class PositionGrid(nn.Module):
    """Learned positions [side^2, dim], interpolated bilinearly to each image, corner to corner."""

    role: Role = "vision"

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.side = spec.side
        self.weight = nn.Parameter(torch.empty(spec.n_positions, spec.dim))

    def forward(self, coordinates: Tensor, sizes: Tensor) -> Tensor:
        """Return [P, dim] for the row and column [2, P] of each patch and its image's size [2, P]."""
        places = coordinates.float() * (self.side - 1) / (sizes - 1).clamp(min=1)
        low = places.floor()
        fraction = places - low
        (row, column), (below, right) = low.long(), (low.long() + 1).clamp(max=self.side - 1)
        row_weight, column_weight = fraction
        corners = (
            (row, column, (1 - row_weight) * (1 - column_weight)),
            (row, right, (1 - row_weight) * column_weight),
            (below, column, row_weight * (1 - column_weight)),
            (below, right, row_weight * column_weight),
        )
        weight = local(self.weight)
        wide = torch.promote_types(weight.dtype, torch.float32)
        parts = [F.embedding(y * self.side + x, weight) * factor.to(wide).unsqueeze(1) for y, x, factor in corners]
        return torch.stack(parts).sum(0).to(weight.dtype)


class VisionLayerNorm(nn.LayerNorm):
    """Layer norm, replicated under tensor parallelism."""

    role: Role = "vision"

    def forward(self, x: Tensor) -> Tensor:
        """Return [P, dim] for x [P, dim]."""
        return F.layer_norm(x, self.normalized_shape, local(self.weight), local(self.bias), self.eps)


vision_linear = partial(Linear, bias=True, role="vision")
"""Linear layer with bias, replicated under tensor parallelism."""


class VisionAttention(nn.Module):
    """Attention between the patches of an image; the rows of `wqkv` are queries, keys, values."""

    def __init__(self, layer: int, spec: VisionSpec) -> None:
        super().__init__()
        self.layer, self.n_heads = LayerIndex(layer), spec.n_heads
        self.spec = AttentionSpec(spec.head_dim**-0.5, causal=False)
        self.wqkv = vision_linear(spec.dim, 3 * spec.dim)
        self.wo = vision_linear(spec.dim, spec.dim)

    def forward(self, x: Tensor, rotation: Rotation, attention: AttentionMeta) -> Tensor:
        """Return [P, dim] for x [P, dim]."""
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
        """Return [P, out_dim] for x [P, dim]."""
        return self.w2(self.activation(self.w1(x)))


class GatedVisionFeedForward(VisionFeedForward):
    """SwiGLU with biases: w2(activation(w1(x)) * w3(x))."""

    def __init__(self, dim: int, hidden_dim: int, out_dim: int, activation: str) -> None:
        super().__init__(dim, hidden_dim, out_dim, activation)
        self.w3 = vision_linear(dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return [P, out_dim] for x [P, dim]."""
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


class VisionBlock(nn.Module):
    """Pre-norm attention and feed-forward network with residual connections."""

    def __init__(self, layer: int, spec: VisionSpec) -> None:
        super().__init__()
        network = GatedVisionFeedForward if spec.gated else VisionFeedForward
        self.attention_norm = spec.build_norm(spec.dim)
        self.attention = VisionAttention(layer, spec)
        self.ffn_norm = spec.build_norm(spec.dim)
        self.feed_forward = network(spec.dim, spec.hidden_dim, spec.dim, spec.hidden_act)

    def forward(self, x: Tensor, rotation: Rotation, attention: AttentionMeta) -> Tensor:
        """Return [P, dim] for x [P, dim]."""
        x = x + self.attention(self.attention_norm(x), rotation, attention)
        return x + self.feed_forward(self.ffn_norm(x))


class PatchMerger(nn.Module):
    """Merge of each square of patches into one row of the decoder.

    The norm spans each patch, or with `use_postshuffle_norm` the whole square.
    """

    def __init__(self, spec: VisionSpec, *, use_postshuffle_norm: bool) -> None:
        super().__init__()
        self.width = spec.dim * spec.merge_size**2
        self.norm_dim = self.width if use_postshuffle_norm else spec.dim
        self.norm = spec.build_norm(self.norm_dim)
        self.feed_forward = VisionFeedForward(self.width, self.width, spec.out_dim, "gelu")

    def forward(self, x: Tensor) -> Tensor:
        """Return [M, out_dim] for patches x [P, dim] in the order of `PackedImages.patches`."""
        return self.feed_forward(self.norm(x.view(-1, self.norm_dim)).view(-1, self.width))


class VisionEncoder(nn.Module):
    """Vision encoder from packed patches to decoder rows."""

    def __init__(self, spec: VisionSpec, attn_type: str) -> None:
        super().__init__()
        self.spec, self.attn_type = spec, attn_type
        self.patch_embedding = PatchEmbedding(spec)
        self.position_grid = PositionGrid(spec) if spec.n_positions else None
        self.blocks = nn.ModuleList([VisionBlock(layer, spec) for layer in range(spec.depth)])
        self.merger = PatchMerger(spec, use_postshuffle_norm=False)
        self.deepstack_mergers = nn.ModuleList([PatchMerger(spec, use_postshuffle_norm=True) for _ in spec.deepstack])

    def forward(self, patches: Tensor, grids: tuple[Grid, ...]) -> Tensor:
        """Return [M, 1 + D, out_dim] for patches [P, F] of images of sizes `grids`; see `ImageFeatures.features`."""
        # 1. Embed the patches.
        counts = tuple(height * width for height, width in grids)
        coordinates = to_device_async(patch_coordinates(grids, self.spec.merge_size), patches.device)
        x = self.patch_embedding(patches)
        if self.position_grid is not None:
            sizes = torch.tensor(grids).repeat_interleave(torch.tensor(counts), dim=0).t()
            x = x + self.position_grid(coordinates, to_device_async(sizes, patches.device))

        # 2. Sort the patches by window, one after the other.
        in_image = in_window = PackedAttention.from_lengths(counts, x.device, self.attn_type)
        order: Tensor | None = None
        if self.spec.window:
            order, lengths = window_order(grids, self.spec.merge_size, self.spec.window)
            order = to_device_async(order, x.device)
            x, coordinates = self._sort(x, order), self._sort(coordinates.t(), order).t()
            in_window = PackedAttention.from_lengths(lengths, x.device, self.attn_type)
            in_window.prepare(x)
        in_image.prepare(x)
        rotation = self._rotation(coordinates, x.dtype)

        # 3. Run the blocks and merge their outputs.
        mergers, features = dict(zip(self.spec.deepstack, self.deepstack_mergers, strict=True)), []
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, in_image if layer in self.spec.full_attention else in_window)
            if layer in mergers:
                features.append(mergers[layer](x))
        merged = torch.stack([self.merger(x), *features], dim=1)
        return merged if order is None else merged.index_select(0, order.argsort())

    def _sort(self, x: Tensor, order: Tensor) -> Tensor:
        """Return x [P, F] with its squares of patches, which become decoder rows, in the order [M]."""
        return x.view(-1, self.spec.merge_size**2, x.shape[-1]).index_select(0, order).flatten(0, 1)

    @torch.no_grad()
    def _rotation(self, coordinates: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the RoPE angles of patches at coordinates [2, P], in at least float32."""
        pairs = torch.arange(0, self.spec.head_dim // 2, 2, dtype=torch.float32, device=coordinates.device)
        frequencies = 1.0 / (self.spec.rope_theta ** (pairs / (self.spec.head_dim // 2)))
        wide = torch.promote_types(dtype, torch.float32)
        angles = coordinates.unsqueeze(-1).to(wide) * frequencies.to(wide)
        angles = torch.cat((angles[0], angles[1]), dim=-1).unsqueeze(1)
        return Rotation(angles.cos(), angles.sin())

    def initializers(self, prefix: str) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        """Yield each parameter's name after `prefix` and the function that initializes it in place."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                fill: Callable[[Tensor], Any] = partial(nn.init.normal_, std=self.spec.initializer_range)
            else:
                fill = nn.init.ones_ if name.endswith("norm.weight") else nn.init.zeros_
            yield f"{prefix}.{name}", fill
