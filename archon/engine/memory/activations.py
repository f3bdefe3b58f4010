"""Activation memory of a block and of the head: every tensor saved for the backward pass, with shape and bytes.

A kind of layer without a formula here is counted by a dry run (`archon.engine.memory.traced_block`).

Shapes on a rank: T tokens (a micro-batch has T·c), r = T / t tokens in sequence-parallel regions, H query heads, G key
heads, D features of a head, F hidden features, n rows of experts. Routing is assumed to be even.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import torch

from archon.engine.memory.traced_block import TOKENS, trace_block
from archon.models.args.base import BaseModelArgs
from archon.models.attention.packed.documents import MAX_CHUNK
from archon.models.layers.attention import AttentionLayer
from archon.models.layers.delta_net import DeltaNetLayer
from archon.models.layers.feed_forward import DenseLayer
from archon.models.layers.latent_attention import LatentLayer
from archon.models.layers.logit_tiles import kernel_rows, tile_shape
from archon.models.layers.mamba import MambaLayer
from archon.models.layers.moe import ExpertsLayer
from archon.models.layers.spec import FeedForwardSpec, LayerSpec, MixerSpec, NoFeedForward, NoMixer
from archon.parallel.context import ulysses_repeat
from archon.parallel.layout import ParallelLayout
from archon.parallel.resolve import context_parallel_kind
from archon.schema.errors import ConfigError

INT64 = 8


@dataclass(frozen=True)
class SavedTensor:
    """Tensor of a block.

    Attributes:
        name: description and shape.
        bytes: size.
        saved: autograd keeps it.
        is_op: output of a matmul or of attention; the recompute policy `selective: op` keeps it.
    """

    name: str
    bytes: int
    saved: bool = True
    is_op: bool = False


@dataclass(frozen=True)
class BlockActivations:
    """Tensors of a block; `working` is the peak bytes of temporaries in its backward pass."""

    tensors: tuple[SavedTensor, ...]
    working: int

    @property
    def input(self) -> int:
        """Bytes of the block's input, which full recomputation keeps."""
        return self.tensors[0].bytes

    @property
    def saved(self) -> int:
        """Bytes that autograd keeps without recomputation."""
        return sum(t.bytes for t in self.tensors if t.saved)

    @property
    def kept_by_op(self) -> int:
        """Bytes kept by `selective: op`: the block's input, and the outputs of matmuls and attention."""
        return self.input + sum(t.bytes for t in self.tensors if t.is_op)

    @property
    def recomputed_by_op(self) -> int:
        """Bytes that `selective: op` recomputes."""
        return sum(t.bytes for t in self.tensors[1:] if t.saved and not t.is_op)


@dataclass(frozen=True)
class MicroBatchShard:
    """Shard of a micro-batch of `pack` tokens on a rank; `bytes` is the item size of the compute dtype."""

    layout: ParallelLayout
    pack: int
    bytes: int

    @property
    def tokens(self) -> int:
        """T, a multiple of t with padding."""
        t = self.layout.tp
        return -(-self.pack // (self.layout.cp * t)) * t

    @property
    def rows(self) -> int:
        """r, the tokens in sequence-parallel regions."""
        return self.tokens // self.layout.tp

    @property
    def wide(self) -> int:
        """Item size of statistics, masters and gradients: at least float32."""
        return max(self.bytes, 4)


@dataclass(frozen=True)
class LoRAMatrix:
    """Matrix with a LoRA: name in the layer (such as attention.wq), role, features, LoRA rank, dropout and DoRA."""

    name: str
    role: str
    in_features: int
    out_features: int
    rank: int
    has_dropout: bool = False
    has_dora: bool = False

    def active_parameters(self, network: FeedForwardSpec) -> int:
        """Return the LoRA parameters that a token uses in a layer with this feed-forward network."""
        times = network.top_k if self.role == "experts" else 1
        return times * self.rank * (self.in_features + self.out_features)


LoRAMatrices = tuple[LoRAMatrix, ...] | None
"""Matrices of a layer with LoRA; None if all weights are trained."""
# Matmul inputs that are saved only for the gradient of a weight or of a LoRA, with the matrices that use them.
_INPUTS = {
    "normed [T, dim]": ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"),
    "act(gate) · up [T, F]": ("feed_forward.w2",),
    "act(up) [T, F]": ("feed_forward.w2",),
    "rows in expert order [n, dim]": ("moe.experts.w1", "moe.experts.w3"),
    "act(gate) · up [n, F]": ("moe.experts.w2",),
    "act(up) [n, F]": ("moe.experts.w2",),
}


def block_activations(
    dim: int, layer: LayerSpec, shard: MicroBatchShard, context_parallel: str, lora: LoRAMatrices = None
) -> BlockActivations:
    """Return the tensors of a layer in a model of width `dim`; with `lora`, all other weights are frozen.

    Raises:
        ConfigError: a kind of layer has no formula, and ranks share the block.
    """
    if unknown := kinds_without_formula(layer):
        return _traced_activations(dim, layer, shard, unknown)
    b, wide, rows = shard.bytes, shard.wide, shard.rows
    hidden = rows * dim * b
    before, after = (layer.norm_placement in (place, "both") for place in ("before", "after"))
    # A parallel block has one norm and one normed input, which tensor parallelism gathers twice.
    parallel = layer.norm_placement == "parallel"
    mixes = not isinstance(layer.mixer, NoMixer)
    statistics = rows * wide * (2 if layer.norm.centered else 1)
    attention = [
        SavedTensor("input [r, dim]", hidden),
        SavedTensor("attention_norm: 1/rms [r]", statistics, saved=before or parallel),
        # Without a norm and without tensor parallelism, it is the input.
        SavedTensor(
            "normed [T, dim]", shard.tokens * dim * b, saved=mixes and (before or parallel or shard.layout.tp > 1)
        ),
        *mixer_activations(layer.mixer, shard, context_parallel),
        SavedTensor("wo output [T, dim]", shard.tokens * dim * b * mixes, saved=False, is_op=True),
        SavedTensor("attention_post_norm: input and 1/rms [r, dim + 1]", hidden + statistics, saved=after),
        SavedTensor("after attention [r, dim]", hidden, saved=not parallel),
        SavedTensor("ffn_norm: 1/rms [r]", statistics, saved=before),
    ]
    tensors, working = feed_forward_activations(layer.feed_forward, dim, shard)
    # In a parallel block, it is the mixer's.
    is_input = before or shard.layout.tp > 1 or not mixes
    network = [replace(tensor, saved=tensor.saved and is_input) for tensor in tensors[:1]] + tensors[1:]
    network.append(SavedTensor("ffn_post_norm: input and 1/rms [r, dim + 1]", hidden + statistics, saved=after))
    tensors = [*attention, *network]
    if lora is not None:
        names = {matrix.name for matrix in lora}
        kept = [t.name not in _INPUTS or not names.isdisjoint(_INPUTS[t.name]) for t in tensors]
        tensors = [t if keep else replace(t, saved=False) for t, keep in zip(tensors, kept, strict=True)]
        tensors += [tensor for matrix in lora for tensor in lora_tensors(matrix, layer.feed_forward, shard)]
    if isinstance(layer.feed_forward, NoFeedForward):
        working = mixer_working(layer.mixer, shard)
    # The gradient of the block's output is alive during the network's backward.
    return BlockActivations(tuple(tensors), working + hidden)


def kinds_without_formula(layer: LayerSpec) -> list[str]:
    """Return the type names of a layer's mixer and feed-forward network that have no registered formula."""
    of_mixer: Any = mixer_working if isinstance(layer.feed_forward, NoFeedForward) else mixer_activations
    kinds = ((layer.mixer, of_mixer), (layer.feed_forward, feed_forward_activations))
    return [type(kind).__name__ for kind, formulas in kinds if type(kind) not in formulas.registry]


def is_shared(layout: ParallelLayout) -> bool:
    """Return whether ranks of the layout share the tensors of a block."""
    return layout.tp * layout.cp * layout.ep * layout.etp > 1


def _traced_activations(dim: int, layer: LayerSpec, shard: MicroBatchShard, unknown: list[str]) -> BlockActivations:
    """Return the tensors of a block that a dry run counts; with a LoRA, as if all weights were trained."""
    if is_shared(shard.layout):
        raise ConfigError(
            f"the memory of {' and '.join(unknown)} is known only if ranks share no block, but layout "
            f"{shard.layout} has t, c or e; use d, r and p, or register a function with mixer_activations or "
            "feed_forward_activations"
        )
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[shard.bytes]
    traced = trace_block(dim, layer, dtype)

    def scaled(size: int) -> int:
        return size * shard.tokens // TOKENS

    tensors = (
        SavedTensor("input [r, dim]", scaled(traced.input)),
        SavedTensor("matmuls and attention", scaled(traced.operators), is_op=True),
        SavedTensor("matmuls and attention", scaled(traced.unsaved_operators), saved=False, is_op=True),
        SavedTensor("elementwise", scaled(traced.elementwise)),
    )
    return BlockActivations(tensors, scaled(traced.working))


def lora_tensors(matrix: LoRAMatrix, network: FeedForwardSpec, shard: MicroBatchShard) -> list[SavedTensor]:
    """Return the tensors of a LoRA: x a, which it saves, and x a b; with DoRA x W + x a b, which it saves."""
    layout, split = shard.layout, matrix.role == "column"
    if matrix.role == "experts":
        rows = shard.rows * layout.etp * network.top_k
        out_features = matrix.out_features // (1 if matrix.name.endswith("w2") else layout.etp)
    else:
        rows = shard.rows if matrix.role == "latent" else shard.tokens
        out_features = matrix.out_features // (layout.tp if split else 1)
    in_features = matrix.in_features // (layout.tp if matrix.role == "row" else 1)
    dropped = rows * in_features * (shard.bytes + 1)  # and its mask
    dropout = [SavedTensor(f"{matrix.name}: dropout [rows, in]", dropped)] if matrix.has_dropout else []
    low = SavedTensor(f"{matrix.name}: x a [rows, r]", rows * matrix.rank * shard.bytes, is_op=True)
    product = SavedTensor(
        f"{matrix.name}: x a b [rows, out]", rows * out_features * shard.bytes, saved=False, is_op=True
    )
    if not matrix.has_dora:
        return [*dropout, low, product]
    scaled = SavedTensor(f"{matrix.name}: x W + x a b [rows, out]", product.bytes, is_op=not matrix.has_dropout)
    return [*dropout, low, scaled, *([product, product] if matrix.has_dropout else [])]


@singledispatch
def mixer_activations(mixer: MixerSpec, shard: MicroBatchShard, context_parallel: str) -> list[SavedTensor]:
    """Return the tensors of a mixer from its input to its last matmul. Register one function per type of mixer.

    A subclass does not inherit its base's function; without one, `block_activations` counts the block by a dry run.
    """
    raise NotImplementedError(type(mixer).__name__)


@mixer_activations.register
def _attention(mixer: AttentionLayer, shard: MicroBatchShard, context_parallel: str) -> list[SavedTensor]:
    layout, T, b, wide = shard.layout, shard.tokens, shard.bytes, shard.wide
    H, G, D = mixer.n_heads // layout.tp, max(1, mixer.n_kv_heads // layout.tp), mixer.head_dim
    q, k = T * H * D * b, T * G * D * b
    normed = mixer.qk_norm is not None
    projected = [SavedTensor("wq, wk outputs [T, H + G, D]", q + k, saved=normed, is_op=True)]
    if normed:
        projected.append(SavedTensor("q_norm, k_norm: 1/rms [T, H + G]", T * (H + G) * wide))
    out = _attention_outputs(q, H, shard)
    if mixer.gated:
        out.append(SavedTensor("gate and sigmoid [T, H, D]", 2 * q, is_op=False))
    if layout.cp == 1:
        return [
            *projected,
            SavedTensor("rotated q, k [T, H + G, D]", q + k),
            SavedTensor("v [T, G, D]", k, is_op=True),
            *out,
        ]
    projected.append(SavedTensor("wv output [T, G, D]", k, saved=False, is_op=True))
    if context_parallel_kind(context_parallel, layout.cp, layout.tp, *mixer.heads) == "ulysses":
        return [*projected, *_ulysses(q, k * ulysses_repeat(H, G, layout.cp), out)]
    return [*projected, SavedTensor("rotated q [T, H, D]", q), *_gathered_attention(k, shard, out)]


def _attention_outputs(q: int, heads: int, shard: MicroBatchShard) -> list[SavedTensor]:
    return [
        SavedTensor("attention output [T, H, D]", q, is_op=True),
        SavedTensor("log-sum-exp [H, T]", heads * shard.tokens * shard.wide, is_op=True),
    ]


def _ulysses(q: int, keys: int, out: list[SavedTensor]) -> list[SavedTensor]:
    """Return the tensors of attention between two all-to-alls, which exchange tokens for heads of equal size."""
    # The second all-to-all copies wo's input.
    return [SavedTensor("exchanged q, k, v", q + 2 * keys), *out, SavedTensor("wo input [T, H, D]", q)]


def _gathered_attention(keys: int, shard: MicroBatchShard, out: list[SavedTensor]) -> list[SavedTensor]:
    """Return the tensors of attention to all-gathered keys and values; `keys` is the bytes of a rank's keys."""
    # The causal attention of a rank's two chunks covers all tokens and one more chunk.
    attended = shard.layout.cp * shard.tokens + shard.tokens // 2
    return [
        SavedTensor("gathered keys and values [T·c + T/2, 2 G, D]", 2 * attended * (keys // shard.tokens)),
        SavedTensor("indices of keys and values", attended * INT64),
        *out,
    ]


@mixer_activations.register
def _latent(mixer: LatentLayer, shard: MicroBatchShard, context_parallel: str) -> list[SavedTensor]:
    layout, T, r, b, wide = shard.layout, shard.tokens, shard.rows, shard.bytes, shard.wide
    H, latent = mixer.n_heads // layout.tp, mixer.kv_rank + mixer.rope.dim
    # Queries, keys and values are padded to the same width.
    D, V = max(mixer.q_features, mixer.value_features), mixer.value_features
    q, expanded = T * H * D * b, T * H * (mixer.key_features + V) * b
    tensors = [
        SavedTensor("wkv_a output [r, C + R]", r * latent * b, is_op=True),
        SavedTensor("kv_a_norm: 1/rms [r]", r * wide),
        SavedTensor("latents and rotated keys [T, C + R]", T * latent * b),
    ]
    if mixer.q_rank:
        tensors += [
            SavedTensor("wq_a output [r, q_rank]", r * mixer.q_rank * b, is_op=True),
            SavedTensor("q_a_norm: 1/rms [r]", r * wide),
            SavedTensor("normed [T, q_rank]", T * mixer.q_rank * b),
        ]
    tensors.append(SavedTensor("wq_b output [T, H, N + R]", T * H * mixer.q_features * b, saved=False, is_op=True))
    out = _attention_outputs(q, H, shard)
    if D > V:
        out.append(SavedTensor("wo input [T, H, V]", T * H * V * b))
    if layout.cp == 1:
        # Without padding, the values are a view of the expanded latents.
        return [
            *tensors,
            SavedTensor("wkv_b output [T, H, N + V]", expanded, saved=D == V, is_op=True),
            SavedTensor("q, k [T, 2 H, D]", 2 * q),
            *([SavedTensor("v [T, H, D]", q)] if D > V else []),
            *out,
        ]
    if context_parallel_kind(context_parallel, layout.cp, layout.tp, *mixer.heads) == "ulysses":
        tensors.append(SavedTensor("wkv_b output [T, H, N + V]", expanded, saved=False, is_op=True))
        return [*tensors, *_ulysses(q, q, out)]
    return [
        *tensors,
        SavedTensor("gathered latents [T·c, C + R]", layout.cp * T * latent * b),
        SavedTensor("wkv_b output [T·c, H, N + V]", layout.cp * expanded, saved=False, is_op=True),
        SavedTensor("q [T, H, D]", q),
        *_gathered_attention(q, shard, out),
    ]


@mixer_activations.register
def _delta_net(mixer: DeltaNetLayer, shard: MicroBatchShard, context_parallel: str) -> list[SavedTensor]:
    layout, T, b, wide = shard.layout, shard.tokens, shard.bytes, shard.wide
    H, G = mixer.n_heads // layout.tp, max(1, mixer.n_key_heads // layout.tp)
    keys, values = G * mixer.key_dim, H * mixer.value_dim
    # Ulysses gives a rank all tokens of some heads; fewer key heads than ranks are repeated.
    repeat = ulysses_repeat(H, G, layout.cp) if layout.cp > 1 else 1
    channels = 2 * keys * repeat + values
    # Per token and head: queries and keys repeated, scaled, by chunk, as operands of two matmuls (twice in another
    # order), decayed and solved; values by chunk, solved, and corrections; two square matrices of a chunk before and
    # after their decay, and the decay.
    scan = H * (10 * mixer.key_dim + 3 * mixer.value_dim + 5 * MAX_CHUNK)
    if b < wide:
        scan += 2 * keys * repeat + values
    states = -(-T * layout.cp // MAX_CHUNK) * H // layout.cp * mixer.key_dim * mixer.value_dim
    exchanged = [SavedTensor("exchanged queries, keys and values", T * channels * b)] if layout.cp > 1 else []
    return [
        SavedTensor("wq, wk, wv outputs [T, 2 G K + H V]", T * (2 * keys + values) * b, saved=False, is_op=True),
        SavedTensor("wa, wb outputs, log-decay and beta [T, H]", T * H * (2 * b + 2 * wide)),
        *exchanged,
        SavedTensor("convolution input and output [T, 2 G K + H V]", 2 * T * channels * b),
        SavedTensor("activated queries, keys and values", T * channels * b),
        SavedTensor("scan operands, in float32", T * scan * wide),
        SavedTensor("chunk states [T / 64, H, K, V]", 2 * states * wide),
        SavedTensor("scan output and its 1/rms [T, H V + H]", T * (values * b + H * wide)),
        SavedTensor("wz output and its gate [T, H V]", T * values * (b + 2 * wide), is_op=False),
        SavedTensor("wo input [T, H V]", T * values * b),
    ]


@mixer_activations.register
def _mamba(mixer: MambaLayer, shard: MicroBatchShard, context_parallel: str) -> list[SavedTensor]:
    layout, T, b, wide = shard.layout, shard.tokens, shard.bytes, shard.wide
    H, G = mixer.n_heads // layout.tp, max(1, mixer.n_groups // layout.tp)
    values, vectors = H * mixer.head_dim, 2 * G * mixer.state_dim
    repeat = ulysses_repeat(H, G, layout.cp) if layout.cp > 1 else 1
    channels = values + vectors * repeat
    # Per token and head: B and C by head, before and after their decay; x by chunk, as operand of two matmuls; two
    # square matrices of a chunk before and after their decay, and the decay. Per group: B and C by chunk.
    scan = H * (4 * mixer.state_dim + 2 * mixer.head_dim + 3 * MAX_CHUNK) + vectors * repeat
    states = -(-T * layout.cp // MAX_CHUNK) * H // layout.cp * mixer.state_dim * mixer.head_dim
    exchanged = [SavedTensor("exchanged x, B, C", T * channels * b)] if layout.cp > 1 else []
    # In a narrow dtype, the scan and the gate keep copies in float32 in place of their inputs.
    activated = T * (channels if b == wide else values) * wide
    return [
        SavedTensor("wx, wb, wc outputs [T, H P + 2 G N]", T * (values + vectors) * b, saved=False, is_op=True),
        SavedTensor("wz and wdt outputs [T, H P + H]", T * (values + H) * b, saved=b == wide, is_op=True),
        SavedTensor("step size, log-decay and skip factor [T, H]", 6 * T * H * wide),
        *exchanged,
        SavedTensor("convolution input and output [T, H P + 2 G N]", 2 * T * channels * b),
        SavedTensor("activated x, B, C", activated),
        SavedTensor("scan operands, in float32", T * scan * wide),
        SavedTensor("chunk states [T / 64, H, N, P]", states * wide),
        SavedTensor(
            "scan output, gate, their product, and z in float32 [T, H P]", (3 + (b < wide)) * T * values * wide
        ),
        SavedTensor("normed [T, H P]", T * values * b),
        SavedTensor("wo input [T, H P]", T * values * b),
    ]


@mixer_activations.register
def _no_mixer(mixer: NoMixer, shard: MicroBatchShard, context_parallel: str) -> list[SavedTensor]:
    return []


@singledispatch
def mixer_working(mixer: MixerSpec, shard: MicroBatchShard) -> int:
    """Return the peak bytes of temporaries in the backward pass of a mixer that is alone in its block."""
    raise NotImplementedError(type(mixer).__name__)


@mixer_working.register
def _attention_working(mixer: AttentionLayer, shard: MicroBatchShard) -> int:
    H, G = mixer.n_heads // shard.layout.tp, max(1, mixer.n_kv_heads // shard.layout.tp)
    # The gradients of wo's input and, by query head, of queries, keys and values; the last two also by key head.
    return shard.tokens * (4 * H + 2 * G) * mixer.head_dim * shard.bytes


@mixer_working.register
def _mamba_working(mixer: MambaLayer, shard: MicroBatchShard) -> int:
    # The gradients of the norm's input and of the product, the gate and the scan's output, in float32.
    return 4 * shard.tokens * mixer.n_heads // shard.layout.tp * mixer.head_dim * shard.wide


@singledispatch
def feed_forward_activations(
    network: FeedForwardSpec, dim: int, shard: MicroBatchShard
) -> tuple[list[SavedTensor], int]:
    """Return the tensors of a feed-forward network, and the peak bytes of temporaries in its backward pass.

    Register one function per type of network, as for `mixer_activations`.
    """
    raise NotImplementedError(type(network).__name__)


@feed_forward_activations.register
def _dense(network: DenseLayer, dim: int, shard: MicroBatchShard) -> tuple[list[SavedTensor], int]:
    T, b = shard.tokens, shard.bytes
    inner, outer = T * network.hidden_dim // shard.layout.tp * b, T * dim * b
    if not network.is_gated:
        # Squared ReLU saves the ReLU of its input only.
        squared = network.hidden_act == "relu2"
        tensors = [
            SavedTensor("normed [T, dim]", outer),
            SavedTensor("up [T, F]", inner, saved=not squared, is_op=True),
            SavedTensor("relu(up) [T, F]", inner, saved=squared),
            SavedTensor("act(up) [T, F]", inner),
            SavedTensor("w2 output [T, dim]", outer, saved=False, is_op=True),
        ]
        # The peak: gradients of up and of the activation. In a narrow network: the gradient of the input.
        return tensors, max(2 * inner, outer)
    tensors = [
        SavedTensor("normed [T, dim]", outer),
        SavedTensor("gate, up [T, 2 F]", 2 * inner, is_op=True),
        SavedTensor("act(gate) [T, F]", inner, saved=network.hidden_act not in ("silu", "swish")),
        SavedTensor("act(gate) · up [T, F]", inner),
        SavedTensor("w2 output [T, dim]", outer, saved=False, is_op=True),
    ]
    # The peak: gradients of gate, up and their product. In a narrow network: the two gradients of the input, through
    # gate and through up.
    return tensors, max(3 * inner, 2 * outer - inner)


@feed_forward_activations.register
def _experts(network: ExpertsLayer, dim: int, shard: MicroBatchShard) -> tuple[list[SavedTensor], int]:
    layout, rows, b, wide = shard.layout, shard.rows, shard.bytes, shard.wide
    chosen, gathered = network.top_k, rows * layout.etp
    n = gathered * chosen
    width, parts = network.expert_dim(dim), 2 if network.is_gated else 1
    up, activated = (
        ("gate, up [n, 2 F]", "act(gate) · up [n, F]") if network.is_gated else ("up [n, F]", "act(up) [n, F]")
    )
    inner, outer = n * network.hidden_dim // layout.etp * b, n * width * b
    # Squared ReLU saves the ReLU of its input only.
    keeps_up = network.is_gated or network.hidden_act != "relu2"
    tensors = [
        SavedTensor("normed [r, dim]", rows * dim * b),
        *([SavedTensor("normed in float32 [r, dim]", rows * dim * wide)] if network.fp32_logits and b < wide else []),
        SavedTensor("router logits [r, E]", rows * network.n_experts * b, saved=False, is_op=True),
        SavedTensor("probabilities [r, E]", rows * network.n_experts * wide),
        SavedTensor("chosen experts [r, k]", rows * chosen * INT64),
        SavedTensor("weights [r, k]", n * b + (rows * chosen * wide if network.normalize else 0)),
        SavedTensor("permutation and its inverse [n]", (4 if layout.ep > 1 else 2) * n * INT64),
        SavedTensor("rows in expert order [n, dim]", outer),
        SavedTensor(up, parts * inner, saved=keeps_up, is_op=True),
        *([] if keeps_up else [SavedTensor("relu(up) [n, F]", inner)]),
        SavedTensor(activated, inner),
        SavedTensor("w2 output [n, dim]", outer, saved=False, is_op=True),
        SavedTensor("outputs in token order [n, dim]", outer),
    ]
    if layout.etp > 1:
        tensors.append(SavedTensor("gathered tokens [T, dim]", gathered * width * b))
    if network.latent_dim:
        latent = rows * width * b
        tensors += [
            SavedTensor("latents of the tokens [r, C]", latent, saved=layout.etp == 1, is_op=True),
            SavedTensor("sum of the experts' outputs [r, C]", latent),
            SavedTensor("latent_out output [r, dim]", rows * dim * b, saved=False, is_op=True),
        ]
    # The forward holds the experts' outputs before and after the all-to-all. The backward holds as many gradients, or
    # the gradients inside the experts, as in a dense network.
    working = max((2 if layout.ep > 1 else 1) * outer, (parts + 1) * inner - outer)
    if network.shared_hidden_dim:
        dense = DenseLayer(network.shared_hidden_dim, network.hidden_act, is_gated=network.is_gated)
        shared, shared_working = _dense(dense, dim, shard)
        # Without tensor parallelism, it shares the router's input.
        shared = shared if layout.tp > 1 else shared[1:]
        if network.shared_gate:
            shared.append(SavedTensor("shared experts output [r, dim]", rows * dim * b))
        # Its backward comes first and frees its saved tensors.
        working = max(shared_working, working - sum(t.bytes for t in shared if t.saved))
        tensors += shared
    return tensors, working


@feed_forward_activations.register
def _no_network(network: NoFeedForward, dim: int, shard: MicroBatchShard) -> tuple[list[SavedTensor], int]:
    return [], 0


def head_memory(
    args: BaseModelArgs, shard: MicroBatchShard, gpu_memory: int | None, frozen: bool = False
) -> tuple[int, int]:
    """Return the bytes of final norm, head and loss (`token_scores.weighted_loss`) with all tokens scored.

    Args:
        args: the model's.
        shard: a rank's shard of a micro-batch.
        gpu_memory: bytes of the GPU; None on a CPU.
        frozen: the head's weight has no gradient.

    Returns:
        The peak in the forward, and the gradient of the head's weight. The forward computes this gradient, and it stays
        until the embedding's gradient is computed; a frozen head has none.
    """
    T, b, wide, dim = shard.tokens, shard.bytes, shard.wide, args.dim
    normed = shard.rows * (dim * b * 2 + wide)
    if args.is_critic:
        return normed + 2 * T * wide, 0
    vocab = args.vocab_size // shard.layout.tp
    weight = 0 if frozen else vocab * dim
    if gpu_memory is not None:
        # One buffer of logits; hidden's gradient has the compute dtype from the start.
        tiles = min(T, kernel_rows(vocab, b, gpu_memory)) * vocab * b
        sums, converted = T * dim * b + weight * wide, weight * b
    else:
        rows, columns = tile_shape(T, vocab, torch.device("cpu"), full_rows=True)
        tiles = rows * vocab * wide + rows * columns * wide
        # A tile and its matmul outputs in the compute dtype.
        tiles += (rows * columns + (max(rows, columns) + rows) * dim if b < wide else rows * dim) * b
        sums, converted = (T * dim + weight) * wide, (T * dim + weight) * b
    # The sums are converted to the compute dtype after the tiles are freed.
    return normed + T * dim * b + sums + max(tiles, converted if b < wide else 0), weight * b
