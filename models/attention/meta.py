"""Attention of one forward, as attention modules see it.

Training passes `PackedAttention`, decoding `archon.models.attention.decode.paged.PagedAttention`; the modules are
the same.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from archon.models.attention.backend import AttentionBackend
from archon.models.attention.latent import LatentKeys
from archon.models.attention.packed.documents import PackedDocuments, check_lengths, cu_seqlens_from_lengths
from archon.models.attention.prefix.plan import SharedPrefixes
from archon.models.attention.registry import available_backends, backend_for_layer
from archon.models.attention.spec import AttentionSpec, LayerIndex
from archon.models.lora.mapping import LoRAMapping
from archon.schema.errors import ConfigError

RecurrentState = tuple[Tensor, ...]
"""State of a recurrent mixer: tensors [B, ...], a row for each of B documents."""

Scan = Callable[
    [Sequence[Tensor], Sequence[Tensor], PackedDocuments, RecurrentState | None], tuple[Tensor, RecurrentState]
]
"""(rows, weights, documents, state before) -> (outputs [T, H, V], state after), see `AttentionMeta.run_recurrence`."""


class AttentionMeta(abc.ABC):
    """Attention of the tokens of one forward to each other and to cached tokens.

    Attributes:
        valid_mask: [T], bool or int64, how many batch tokens each local row stands for, 0 for padding; None for one
            each.
        lora_mapping: LoRA of each token, for a multi-LoRA model; None if no document has one.
        gather_index: int64 [N], the index of each of the N requested hidden states among the T computed ones; None for
            the computed ones.
        token_rows: int64 [N], the same for the N tokens that a head scores; the head gathers these rows itself.
    """

    valid_mask: Tensor | None = None
    lora_mapping: LoRAMapping | None = None
    gather_index: Tensor | None = None
    token_rows: Tensor | None = None

    def prepare(self, hidden: Tensor) -> None:  # noqa: B027 - a cache has nothing to prepare
        """Prepare once per forward for the first layer's input [T, dim], in the compute device and dtype."""

    @abc.abstractmethod
    def attend(self, layer: LayerIndex, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Return causal attention [T, H, D] of one layer.

        Args:
            layer: index of the layer, for caches.
            q: [T, H, D], rotated.
            k: [T, G, D], rotated, with H a multiple of G.
            v: [T, G, D].
            spec: the layer's options; ConfigError for an unsupported one.
        """

    def attend_latent(self, layer: LayerIndex, q: Tensor, keys: LatentKeys, spec: AttentionSpec) -> Tensor:
        """Return attention [T, H, V] of queries q [T, H, N + R] to the expanded `keys`."""
        k, v = keys.expand(keys.rows, keys.lora_mapping)
        return self.attend(layer, keys.pad(q), k, v, spec)[..., : keys.value_features]

    def run_recurrence(
        self, layer: LayerIndex, rows: Sequence[Tensor], weights: Sequence[Tensor], scan: Scan
    ) -> Tensor:
        """Return the outputs [T, H, V] of a mixer with a state, which starts anew in each document.

        Args:
            layer: index of the layer, for caches.
            rows: tensors [T, H_i, ...] of the tokens, by heads; each H_i divides the largest.
            weights: tensors [H_i, ...] of the heads.
            scan: the mixer's computation for any subset of the heads.

        Raises:
            ConfigError: this attention does not support states.
        """
        raise ConfigError(f"a layer with a recurrent state cannot run under {type(self).__name__}")

    def document_lengths(self, positions: Tensor) -> Tensor | None:
        """Return each token's document length, int64 [T] on the CPU, or None if unknown.

        Dynamic and LongRoPE frequencies need it.
        """
        return None


class PackedAttention(AttentionMeta):
    """Documents packed one after another.

    Args:
        cu_seqlens, max_seqlen, lengths: see `PackedDocuments`.
        attn_type: `auto` or a registered backend.
    """

    def __init__(
        self, cu_seqlens: Tensor, max_seqlen: int, attn_type: str = "auto", lengths: tuple[int, ...] | None = None
    ) -> None:
        self.documents = PackedDocuments(cu_seqlens, max_seqlen, lengths)
        self.attn_type = attn_type
        self.backends: Sequence[AttentionBackend] = ()

    @classmethod
    def from_lengths(cls, lengths: tuple[int, ...], device: torch.device, attn_type: str) -> PackedAttention:
        """Return attention of documents of these lengths, with boundaries on `device`."""
        bounds = cu_seqlens_from_lengths(lengths, device)
        return cls(bounds, max(lengths), attn_type, lengths)

    def prepare(self, hidden: Tensor) -> None:
        """See `AttentionMeta.prepare`."""
        self.backends = available_backends(self.attn_type, hidden.device, hidden.dtype)
        # Fallbacks for single layers are prepared only if the host need not wait for the documents' lengths.
        for backend in self.backends if self.documents.has_host_lengths else self.backends[:1]:
            backend.prepare_packed(self.documents)

    def attend(self, layer: LayerIndex, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionMeta.attend`."""
        if not self.backends:
            self.prepare(q)
        return backend_for_layer(self.backends, spec, q.shape[-1]).attend_packed(q, k, v, self.documents, spec)

    def run_recurrence(
        self, layer: LayerIndex, rows: Sequence[Tensor], weights: Sequence[Tensor], scan: Scan
    ) -> Tensor:
        """See `AttentionMeta.run_recurrence`."""
        return scan(rows, weights, self.documents, None)[0]

    def document_lengths(self, positions: Tensor) -> Tensor:
        """See `AttentionMeta.document_lengths`."""
        check_lengths(sum(self.documents.lengths), positions.numel())
        lengths = self.documents.length_tensor
        return lengths.repeat_interleave(lengths)


class PrefixAttention(AttentionMeta):
    """Documents with shared prefixes, computed once (see `archon.models.attention.prefix.plan`).

    The model takes the pack's tokens at `shared.rows`, and its head scores all tokens of the pack.
    """

    def __init__(self, shared: SharedPrefixes, attn_type: str = "auto") -> None:
        self.shared, self.attn_type = shared, attn_type
        self.token_rows, self.valid_mask = shared.gather_index, shared.counts()

    def prepare(self, hidden: Tensor) -> None:
        """See `AttentionMeta.prepare`."""
        available = available_backends(self.attn_type, hidden.device, hidden.dtype)
        self.backends = [backend for backend in available if backend.supports_prefixed]

    @torch.compiler.disable
    def attend(self, layer: LayerIndex, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionMeta.attend`."""
        backend = backend_for_layer(self.backends, spec, q.shape[-1])
        if not spec.causal:
            raise ConfigError(
                "shared prefixes need causal attention, and this layer is bidirectional; disable prefix sharing"
            )
        return backend.attend_prefixed(q, k, v, self.shared, spec)

    @torch.compiler.disable
    def run_recurrence(
        self, layer: LayerIndex, rows: Sequence[Tensor], weights: Sequence[Tensor], scan: Scan
    ) -> Tensor:
        """Run level by level: each branch starts with the state after its parent run."""
        outs = list[Tensor]()
        state: RecurrentState | None = None
        for level in self.shared.levels:
            before = None
            if state is not None and level.before is not None:
                before = tuple(x.index_select(0, level.before) for x in state)
            out, state = scan([x.index_select(0, level.rows) for x in rows], weights, level.documents, before)
            outs.append(out)
        return torch.cat(outs).index_select(0, self.shared.level_order)
