"""The decoder that dense families share, and the contract of every model in the zoo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from archon.models.args import BaseModelArgs
from archon.models.attention.meta import AttentionMeta, PackedAttention
from archon.models.head import LMHead, TokenScores, WeightedLoss
from archon.models.layers.attention import Attention
from archon.models.layers.feed_forward import FeedForward
from archon.models.layers.linear import Embedding, Linear
from archon.models.layers.moe import GroupedExperts, MoE, Router, RouterStats
from archon.models.layers.norm import RMSNorm
from archon.models.layers.rope import RotaryEmbedding
from archon.parallel.comm import all_gather_replicated

__all__ = ["BaseArchonModel", "BaseModelArgs", "MoETransformerBlock", "TransformerBlock"]


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward network, each added to the residual stream."""

    def __init__(self, layer: int, args: BaseModelArgs, *, dense: bool = True) -> None:
        super().__init__()
        self.attention = Attention(
            layer,
            args.dim,
            args.n_heads,
            args.n_kv_heads,
            args.head_dim,
            bias=args.attention_bias,
            out_bias=args.attention_out_bias,
            qk_norm_eps=args.norm_eps if args.qk_norm else None,
            window=args.layer_windows[layer],
        )
        if dense:
            self.feed_forward = FeedForward(args.dim, args.hidden_dim, args.hidden_act)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionMeta) -> Tensor:
        """[T, dim] to [T, dim]."""
        x = x + self.attention(self.attention_norm(x), cos, sin, attention)
        return x + self.feed_forward(self.ffn_norm(x))


class MoETransformerBlock(TransformerBlock):
    """The block with a mixture of experts in place of the one network."""

    def __init__(self, layer: int, args: BaseModelArgs, moe: MoE) -> None:
        super().__init__(layer, args, dense=False)
        self.moe = moe

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionMeta
    ) -> tuple[Tensor, RouterStats]:
        """[T, dim] to [T, dim], and what the router did: returned, so that a recomputed one does not count twice."""
        x = x + self.attention(self.attention_norm(x), cos, sin, attention)
        out, stats = self.moe(self.ffn_norm(x), attention.valid_mask)
        return x + out, stats


class BaseArchonModel(nn.Module):
    """A decoder: actor with a language-model head `output`, or critic with a value head `score`.

    Built on the current default device; the engine builds on meta, parallelises, then materialises and calls
    `init_buffers`. A pipeline stage sets the modules it does not own to None.
    """

    args_class: ClassVar[type[BaseModelArgs]] = BaseModelArgs

    def __init__(self, args: BaseModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_class = type(self)
        """The class it was built as; `fully_shard` puts one of its own in front."""
        self.tok_embeddings = Embedding(args.vocab_size, args.dim, padding_idx=args.pad_token_id)
        self.rope = RotaryEmbedding(args.rope_scaling, args.rope_theta, args.head_dim, args.max_seq_len)
        self.layers = nn.ModuleDict({str(layer): self.build_block(layer) for layer in range(args.n_layers)})
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.router_stats: list[RouterStats] = []
        """Of each mixture of experts in the last forward, in the order of the layers."""
        self.output: LMHead | None = None
        self.score: Linear | None = None
        if args.is_critic:
            self.score = Linear(args.dim, 1, bias=False, role="value_head")
        else:
            self.output = LMHead(args.dim, args.vocab_size, tied=args.tie_word_embeddings)
            self.tie_weights()

    def build_block(self, layer: int) -> nn.Module:
        """One layer; a family whose layers differ overrides this."""
        return TransformerBlock(layer, self.args)

    def tie_weights(self) -> None:
        """Make `output.weight` the very parameter of `tok_embeddings` where the config ties them; idempotent."""
        if self.args.tie_word_embeddings and self.output is not None and self.tok_embeddings is not None:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        tree_attn_meta: AttentionMeta | None = None,
        *,
        labels: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        entropy: bool = True,
        loss_weights: Tensor | None = None,
        label_rows: Tensor | None = None,
    ) -> Tensor | TokenScores | WeightedLoss:
        """Run packed documents through the model.

        Args:
            tokens: int [T] or [1, T]; hidden states [T, dim] on a pipeline stage without embeddings.
            positions: int, shaped as tokens: position within the document.
            cu_seqlens: int32 [B + 1], the documents' boundaries, from 0 to T.
            max_seqlen: length of the longest document.
            tree_attn_meta: how tokens attend, in place of plain packed documents.
            labels: int64, shaped as tokens: the token each position predicts, -100 for none.
            temperature: divides the logits before the softmax; a number, or one a token [T].
            entropy: whether scores carry entropies.
            loss_weights: float, shaped as tokens; asks for the fused weighted loss in place of scores.
            label_rows: int64 [n], the positions whose labels are tokens of the vocabulary, where they are known; then
                the host need not wait for a GPU to find and check them.

        Returns:
            Logits [T, vocab] ([1, T, vocab]) without labels; `TokenScores` of [T] with them; `WeightedLoss` with
            `loss_weights`; values [T] ([1, T]) of a critic; hidden states of a stage without a head.
        """
        batched = positions.dim() == 2
        if batched:
            if positions.shape[0] != 1:
                raise ValueError(f"positions have shape {tuple(positions.shape)}; packed batches are [T] or [1, T]")
            tokens, positions = tokens.squeeze(0), positions.squeeze(0)
            labels = None if labels is None else labels.squeeze(0)
            loss_weights = None if loss_weights is None else loss_weights.squeeze(0)
        attention = tree_attn_meta
        if attention is None:
            attention = PackedAttention(cu_seqlens, max_seqlen, self.args.attn_type)
        hidden = self.hidden_states(tokens, positions, attention)
        if self.score is not None:
            values = self.score(hidden).squeeze(-1)
            if self.score.tp is not None:
                values = all_gather_replicated(values, self.score.tp)
            values = values.to(torch.promote_types(values.dtype, torch.float32))
            return values.unsqueeze(0) if batched else values
        if self.output is None:
            return hidden.unsqueeze(0) if batched else hidden
        if labels is None:
            logits = self.output(hidden)
            return logits.unsqueeze(0) if batched else logits
        scores = self.output(hidden, labels, temperature, entropy=entropy, weights=loss_weights, rows=label_rows)
        if not batched or isinstance(scores, Tensor):
            return scores
        if isinstance(scores, WeightedLoss):
            return WeightedLoss(scores.loss, scores.logprobs.unsqueeze(0))
        entropies = None if scores.entropy is None else scores.entropy.unsqueeze(0)
        return TokenScores(scores.logprobs.unsqueeze(0), entropies)

    def hidden_states(self, tokens: Tensor, positions: Tensor, attention: AttentionMeta) -> Tensor:
        """Tokens [T] (or a stage's hidden states [T, dim]) to hidden states, after the final norm if this stage has it.

        Returns [T, dim], or [N, dim] of the tokens that `attention.gather_index` [N] names.
        """
        hidden = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        attention.prepare(hidden)
        lengths = attention.document_lengths(positions) if self.args.rope_scaling.depends_on_length else None
        cos, sin = self.rope(positions, hidden.dtype, lengths)
        self.router_stats = []
        for block in self.layers.values():
            hidden = block(hidden, cos, sin, attention)
            if isinstance(hidden, tuple):
                hidden, stats = hidden
                self.router_stats.append(stats)
        if attention.gather_index is not None:
            hidden = hidden.index_select(0, attention.gather_index)
        return hidden if self.norm is None else self.norm(hidden)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fresh weights as Hugging Face makes them: normal(0, initializer_range) matrices, zero biases, unit norms."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, fill in self.initializers():
            fill(parameters[name])

    def initializers(self) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        """Name of each parameter, and what fills it or a tensor of its shape; a tied one is named, and drawn, twice."""
        normal = partial(nn.init.normal_, std=self.args.initializer_range)
        for prefix, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                yield f"{prefix}.weight", normal
            if isinstance(module, nn.Linear) and module.bias is not None:
                yield f"{prefix}.bias", nn.init.zeros_
            if isinstance(module, RMSNorm):
                yield f"{prefix}.weight", nn.init.ones_
            if isinstance(module, GroupedExperts):
                yield from ((f"{prefix}.{name}", normal) for name, _ in module.named_parameters())

    def init_buffers(self, device: torch.device | str) -> None:
        """Recompute on `device` what no checkpoint of Hugging Face's holds: rotary frequencies, balancing biases of
        0."""
        self.rope.init_buffers(device)
        for module in self.modules():
            if isinstance(module, Router) and module.expert_bias is not None:
                dtype = torch.promote_types(module.expert_bias.dtype, torch.float32)
                module.expert_bias = torch.zeros_like(module.expert_bias, dtype=dtype, device=device)
