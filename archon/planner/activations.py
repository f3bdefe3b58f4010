"""What a block and the head keep for their backward pass: each tensor by name, shape and bytes, as the layers save it.

Shapes: T tokens of a rank (of a pack of T·c), r = T / t of them between the products of tensor parallelism with
sequence parallelism, H and G query and key heads of a rank, D features of a head, F hidden features of a rank; n rows
that a rank's experts work on, every expert being met equally often.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from archon.models.args import BaseModelArgs
from archon.models.token_scores import tile_shape
from archon.parallel.constraints import context_parallel_kind
from archon.parallel.context import ulysses_repeat
from archon.parallel.layout import ParallelLayout

INT64 = 8


@dataclass(frozen=True)
class Kept:
    """A tensor of a block: `saved` for the backward by autograd, `is_op` kept by `selective: op` as a product's or
    attention's result."""

    name: str
    bytes: int
    saved: bool = True
    is_op: bool = False


@dataclass(frozen=True)
class Block:
    """One block's tensors; `working` are the bytes its backward has besides them at its fullest."""

    tensors: tuple[Kept, ...]
    working: int

    @property
    def input(self) -> int:
        """Bytes of what a recomputed block keeps."""
        return self.tensors[0].bytes

    @property
    def saved(self) -> int:
        return sum(t.bytes for t in self.tensors if t.saved)

    @property
    def of_ops(self) -> int:
        """Bytes kept by `selective: op`: the block's input and the results of its costly operators."""
        return self.input + sum(t.bytes for t in self.tensors if t.is_op)

    @property
    def recomputed(self) -> int:
        """Bytes that `selective: op` computes again."""
        return sum(t.bytes for t in self.tensors[1:] if t.saved and not t.is_op)


@dataclass(frozen=True)
class Share:
    """A rank's part of a micro-batch of `pack` tokens, and the bytes of the dtype it computes in."""

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
        """Bytes of statistics, which are in float32 at least."""
        return max(self.bytes, 4)


@dataclass(frozen=True)
class BlockSizes:
    """The fields of a model's arguments that decide its activations."""

    dim: int
    heads: int
    key_heads: int
    head_dim: int
    hidden: int
    qk_norm: bool
    experts: int
    chosen: int
    expert_hidden: int
    normalised: bool
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
def block_of(sizes: BlockSizes, sparse: bool, share: Share, context_parallel: str) -> Block:
    """The tensors of a dense layer, or of one with experts."""
    b, wide, rows = share.bytes, share.wide, share.rows
    stream = rows * sizes.dim * b
    attention = [
        Kept("input [r, dim]", stream),
        Kept("attention_norm: 1/rms [r]", rows * wide),
        Kept("normed [T, dim]", share.tokens * sizes.dim * b),
        *_attention(sizes, share, context_parallel),
        Kept("wo's result [T, dim]", share.tokens * sizes.dim * b, saved=False, is_op=True),
        Kept("after attention [r, dim]", stream),
        Kept("ffn_norm: 1/rms [r]", rows * wide),
    ]
    network, working = _experts(sizes, share) if sparse else _dense(sizes, share, sizes.hidden)
    # Besides the network's own: the gradient of the block's output, which the residual stream holds.
    return Block((*attention, *network), working + stream)


def _attention(s: BlockSizes, share: Share, context_parallel: str) -> list[Kept]:
    layout, T, b, wide = share.layout, share.tokens, share.bytes, share.wide
    H, G, D = s.heads // layout.tp, max(1, s.key_heads // layout.tp), s.head_dim
    q, k = T * H * D * b, T * G * D * b
    kind = context_parallel_kind(context_parallel, layout.cp, layout.tp, s.heads, s.key_heads)
    found = []
    if s.qk_norm:
        found += [Kept("q_norm, k_norm: 1/rms [T, H + G]", T * (H + G) * wide)]
    found += [Kept("wq's, wk's results [T, H + G, D]", q + k, saved=s.qk_norm, is_op=True)]
    out = [Kept("attention's result [T, H, D]", q, is_op=True), Kept("log-sum-exp [H, T]", H * T * wide, is_op=True)]
    if layout.cp == 1:
        return [*found, Kept("turned q, k [T, H + G, D]", q + k), Kept("v [T, G, D]", k, is_op=True), *out]
    found.append(Kept("wv's result [T, G, D]", k, saved=False, is_op=True))
    if kind == "ulysses":
        keys = k * ulysses_repeat(H, G, layout.cp)
        # The ranks' tokens against their heads: sizes stay. wo takes a copy that has come back.
        return [*found, Kept("swapped q, k, v", q + 2 * keys), *out, Kept("wo's input [T, H, D]", q)]
    # Each chunk's queries meet the keys before them: a rank's two chunks of a document meet all its tokens and a chunk.
    met = share.layout.cp * T + T // 2
    return [
        *found,
        Kept("turned q [T, H, D]", q),
        Kept("keys and values met [T·c + T/2, 2 G, D]", 2 * met * G * D * b),
        Kept("their places", met * INT64),
        *out,
    ]


def _dense(s: BlockSizes, share: Share, hidden: int) -> tuple[list[Kept], int]:
    T, b = share.tokens, share.bytes
    inner = T * hidden // share.layout.tp * b
    tensors = [
        Kept("normed [T, dim]", T * s.dim * b),
        Kept("gate, up [T, 2 F]", 2 * inner, is_op=True),
        Kept("act(gate) · up [T, F]", inner),
        Kept("w2's result [T, dim]", T * s.dim * b, saved=False, is_op=True),
    ]
    # Gradients of gate, up and their product, and what the second makes on its way, less the product, then freed. Or,
    # where the network is narrow: of gate and up, themselves freed, and of the network's input by way of each.
    return tensors, max(3 * inner, 2 * T * s.dim * b - inner)


def _experts(s: BlockSizes, share: Share) -> tuple[list[Kept], int]:
    layout, rows, b, wide = share.layout, share.rows, share.bytes, share.wide
    n = rows * layout.etp * s.chosen
    inner, outer = n * s.expert_hidden // layout.etp * b, n * s.dim * b
    weights = rows * layout.etp * s.chosen
    tensors = [
        Kept("normed [r, dim]", rows * s.dim * b),
        Kept("router's logits [r, E]", rows * s.experts * b, saved=False, is_op=True),
        Kept("probabilities [r, E]", rows * s.experts * wide),
        Kept("experts chosen [r, k]", rows * s.chosen * INT64),
        Kept("weights [r, k]", weights * b + (rows * s.chosen * wide if s.normalised else 0)),
        Kept("order, places [n]", (4 if layout.ep > 1 else 2) * n * INT64),
        Kept("rows of experts [n, dim]", outer),
        Kept("gate, up [n, 2 F]", 2 * inner, is_op=True),
        Kept("act(gate) · up [n, F]", inner),
        Kept("w2's result [n, dim]", outer, saved=False, is_op=True),
        Kept("results in tokens' order [n, dim]", outer),
    ]
    if layout.etp > 1:
        tensors.append(Kept("gathered tokens [T, dim]", rows * layout.etp * s.dim * b))
    # Forward: what the experts made, in their order, as it was sent and as it came back; backward: the same number of
    # gradients, or those within the experts as in a dense network.
    working = max((2 if layout.ep > 1 else 1) * outer, 3 * inner - outer)
    if s.shared_hidden:
        shared, more = _dense(s, share, s.shared_hidden)
        return tensors + shared, working + more
    return tensors, working


@dataclass(frozen=True)
class Head:
    """Final norm, head and weighted loss of one micro-batch.

    `forward` is what they hold at their fullest. `gradient` is that of the head's weight, which the forward makes and
    which waits until the embedding's is found.
    """

    forward: int
    gradient: int


def head_of(args: BaseModelArgs, share: Share, device_type: str = "cuda") -> Head:
    """See `archon.models.token_scores.weighted_loss`, all tokens being scored."""
    T, b, wide, dim = share.tokens, share.bytes, share.wide, args.dim
    normed = share.rows * (dim * b * 2 + wide)
    if args.is_critic:
        return Head(normed + 2 * T * wide, 0)
    vocab = args.vocab_size // share.layout.tp
    rows, columns = tile_shape(T, vocab, torch.device(device_type), whole_rows=True)
    narrow = b < wide
    tiles = rows * vocab * wide + rows * columns * wide
    sums = (T * dim + vocab * dim) * wide
    if narrow:
        # A tile and its products in the narrow dtype, or in the end all sums in it.
        passing = max(rows * columns + (max(rows, columns) + rows) * dim, (T + vocab) * dim) * b
    else:
        passing = rows * dim * b
    return Head(normed + T * dim * b + tiles + sums + passing, vocab * dim * b)
