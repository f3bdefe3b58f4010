"""Activation memory of a block and of the head: each tensor saved for the backward pass, with shape and bytes.

Shapes: T tokens of a rank (of a micro-batch of T·c), r = T / t tokens in the sequence-parallel regions, H and G query
and key heads of a rank, D features of a head, F hidden features of a rank; n rows processed by a rank's experts,
assuming that every expert is chosen equally often.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from archon.models.args import BaseModelArgs
from archon.models.token_scores import tile_shape
from archon.parallel.context import ulysses_repeat
from archon.parallel.layout import ParallelLayout
from archon.parallel.resolve import context_parallel_kind

INT64 = 8


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a block: `saved` if autograd keeps it, `is_op` if it is the result of a matrix product or attention,
    which recompute policy `selective: op` keeps."""

    name: str
    bytes: int
    saved: bool = True
    is_op: bool = False


@dataclass(frozen=True)
class BlockActivations:
    """One block's tensors; `working` is the peak of further bytes during its backward."""

    tensors: tuple[SavedTensor, ...]
    working: int

    @property
    def input(self) -> int:
        """Bytes that a fully recomputed block keeps: its input."""
        return self.tensors[0].bytes

    @property
    def saved(self) -> int:
        return sum(t.bytes for t in self.tensors if t.saved)

    @property
    def kept_by_op(self) -> int:
        """Bytes kept by `selective: op`: the block's input and the results of products and attention."""
        return self.input + sum(t.bytes for t in self.tensors if t.is_op)

    @property
    def recomputed_by_op(self) -> int:
        """Bytes that `selective: op` recomputes."""
        return sum(t.bytes for t in self.tensors[1:] if t.saved and not t.is_op)


@dataclass(frozen=True)
class MicroBatchShard:
    """A rank's shard of a micro-batch of `pack` tokens; `bytes` is the item size of the compute dtype."""

    layout: ParallelLayout
    pack: int
    bytes: int

    @property
    def tokens(self) -> int:
        """T: a multiple of t, padding included."""
        t = self.layout.tp
        return -(-self.pack // (self.layout.cp * t)) * t

    @property
    def rows(self) -> int:
        return self.tokens // self.layout.tp

    @property
    def wide(self) -> int:
        """Item size of statistics, masters and gradients, which are at least float32."""
        return max(self.bytes, 4)


@dataclass(frozen=True)
class BlockSizes:
    """The model sizes that determine its activations."""

    dim: int
    heads: int
    key_heads: int
    head_dim: int
    hidden: int
    qk_norm: bool
    experts: int
    chosen: int
    expert_hidden: int
    normalized: bool
    shared_hidden: int

    @classmethod
    def of(cls, args: Any) -> BlockSizes:
        return cls(
            args.dim,
            args.n_heads,
            args.n_kv_heads,
            args.head_dim,
            args.hidden_dim,
            args.qk_norm,
            getattr(args, "n_experts", 0),
            getattr(args, "n_experts_per_token", 0),
            getattr(args, "moe_hidden_dim", 0),
            getattr(args, "norm_topk_prob", False),
            getattr(args, "shared_hidden_dim", 0),
        )


@lru_cache(maxsize=16384)
def block_activations(
    sizes: BlockSizes, sparse: bool, shard: MicroBatchShard, context_parallel: str
) -> BlockActivations:
    """Returns the tensors of a dense layer, or of one with experts (`sparse`)."""
    b, wide, rows = shard.bytes, shard.wide, shard.rows
    hidden = rows * sizes.dim * b
    attention = [
        SavedTensor("input [r, dim]", hidden),
        SavedTensor("attention_norm: 1/rms [r]", rows * wide),
        SavedTensor("normed [T, dim]", shard.tokens * sizes.dim * b),
        *_attention(sizes, shard, context_parallel),
        SavedTensor("wo's result [T, dim]", shard.tokens * sizes.dim * b, saved=False, is_op=True),
        SavedTensor("after attention [r, dim]", hidden),
        SavedTensor("ffn_norm: 1/rms [r]", rows * wide),
    ]
    network, working = _experts(sizes, shard) if sparse else _dense(sizes, shard, sizes.hidden)
    # The gradient of the block's output, in the residual stream, is alive besides the network's working memory.
    return BlockActivations((*attention, *network), working + hidden)


def _attention(s: BlockSizes, shard: MicroBatchShard, context_parallel: str) -> list[SavedTensor]:
    layout, T, b, wide = shard.layout, shard.tokens, shard.bytes, shard.wide
    H, G, D = s.heads // layout.tp, max(1, s.key_heads // layout.tp), s.head_dim
    q, k = T * H * D * b, T * G * D * b
    kind = context_parallel_kind(context_parallel, layout.cp, layout.tp, s.heads, s.key_heads)
    found = []
    if s.qk_norm:
        found += [SavedTensor("q_norm, k_norm: 1/rms [T, H + G]", T * (H + G) * wide)]
    found += [SavedTensor("wq's, wk's results [T, H + G, D]", q + k, saved=s.qk_norm, is_op=True)]
    out = [
        SavedTensor("attention's result [T, H, D]", q, is_op=True),
        SavedTensor("log-sum-exp [H, T]", H * T * wide, is_op=True),
    ]
    if layout.cp == 1:
        return [
            *found,
            SavedTensor("turned q, k [T, H + G, D]", q + k),
            SavedTensor("v [T, G, D]", k, is_op=True),
            *out,
        ]
    found.append(SavedTensor("wv's result [T, G, D]", k, saved=False, is_op=True))
    if kind == "ulysses":
        keys = k * ulysses_repeat(H, G, layout.cp)
        # The all-to-all exchanges tokens for heads and keeps sizes. wo's input is a copy, after the second all-to-all.
        return [*found, SavedTensor("exchanged q, k, v", q + 2 * keys), *out, SavedTensor("wo's input [T, H, D]", q)]
    # Each chunk's queries attend to the keys before them: a rank's two chunks of a document to all tokens and a chunk.
    attended = shard.layout.cp * T + T // 2
    return [
        *found,
        SavedTensor("rotated q [T, H, D]", q),
        SavedTensor("gathered keys and values [T·c + T/2, 2 G, D]", 2 * attended * G * D * b),
        SavedTensor("their indices", attended * INT64),
        *out,
    ]


def _dense(s: BlockSizes, shard: MicroBatchShard, hidden: int) -> tuple[list[SavedTensor], int]:
    T, b = shard.tokens, shard.bytes
    inner = T * hidden // shard.layout.tp * b
    tensors = [
        SavedTensor("normed [T, dim]", T * s.dim * b),
        SavedTensor("gate, up [T, 2 F]", 2 * inner, is_op=True),
        SavedTensor("act(gate) · up [T, F]", inner),
        SavedTensor("w2's result [T, dim]", T * s.dim * b, saved=False, is_op=True),
    ]
    # The peak is the gradients of gate, up and their product with the temporaries of the second, less the product,
    # which is freed; or, in a narrow network, the two gradients of the network's input, by way of gate and of up.
    return tensors, max(3 * inner, 2 * T * s.dim * b - inner)


def _experts(s: BlockSizes, shard: MicroBatchShard) -> tuple[list[SavedTensor], int]:
    layout, rows, b, wide = shard.layout, shard.rows, shard.bytes, shard.wide
    n = rows * layout.etp * s.chosen
    inner, outer = n * s.expert_hidden // layout.etp * b, n * s.dim * b
    weights = rows * layout.etp * s.chosen
    tensors = [
        SavedTensor("normed [r, dim]", rows * s.dim * b),
        SavedTensor("router's logits [r, E]", rows * s.experts * b, saved=False, is_op=True),
        SavedTensor("probabilities [r, E]", rows * s.experts * wide),
        SavedTensor("experts chosen [r, k]", rows * s.chosen * INT64),
        SavedTensor("weights [r, k]", weights * b + (rows * s.chosen * wide if s.normalized else 0)),
        SavedTensor("order, places [n]", (4 if layout.ep > 1 else 2) * n * INT64),
        SavedTensor("rows of experts [n, dim]", outer),
        SavedTensor("gate, up [n, 2 F]", 2 * inner, is_op=True),
        SavedTensor("act(gate) · up [n, F]", inner),
        SavedTensor("w2's result [n, dim]", outer, saved=False, is_op=True),
        SavedTensor("results in tokens' order [n, dim]", outer),
    ]
    if layout.etp > 1:
        tensors.append(SavedTensor("gathered tokens [T, dim]", rows * layout.etp * s.dim * b))
    # Forward: the experts' results in expert order, before and after the all-to-all; backward: as many gradients, or
    # those within the experts as in a dense network.
    working = max((2 if layout.ep > 1 else 1) * outer, 3 * inner - outer)
    if s.shared_hidden:
        shared, more = _dense(s, shard, s.shared_hidden)
        return tensors + shared, working + more
    return tensors, working


@dataclass(frozen=True)
class HeadMemory:
    """Bytes of final norm, head and weighted loss of one micro-batch.

    `forward` is their peak. `gradient` is the gradient of the head's weight, which the forward computes and which stays
    until the embedding's gradient has been computed.
    """

    forward: int
    gradient: int


def head_memory(args: BaseModelArgs, shard: MicroBatchShard, device_type: str = "cuda") -> HeadMemory:
    """Returns the memory of `archon.models.token_scores.weighted_loss` where all tokens are scored."""
    T, b, wide, dim = shard.tokens, shard.bytes, shard.wide, args.dim
    normed = shard.rows * (dim * b * 2 + wide)
    if args.is_critic:
        return HeadMemory(normed + 2 * T * wide, 0)
    vocab = args.vocab_size // shard.layout.tp
    rows, columns = tile_shape(T, vocab, torch.device(device_type), whole_rows=True)
    narrow = b < wide
    tiles = rows * vocab * wide + rows * columns * wide
    sums = (T * dim + vocab * dim) * wide
    if narrow:
        # A tile and its products in the compute dtype, or at the end both sums converted to it.
        temporary = max(rows * columns + (max(rows, columns) + rows) * dim, (T + vocab) * dim) * b
    else:
        temporary = rows * dim * b
    return HeadMemory(normed + T * dim * b + tiles + sums + temporary, vocab * dim * b)
