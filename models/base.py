"""The decoder that families share, and the interface of every model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from archon.models.args.base import BaseModelArgs
from archon.models.attention.meta import AttentionMeta, PackedAttention
from archon.models.attention.registry import saved_ops
from archon.models.layers.delta_net import ShortConvolution
from archon.models.layers.head import LMHead, TokenScores, WeightedLoss
from archon.models.layers.linear import Embedding, Linear
from archon.models.layers.moe import GroupedExperts, Router, RouterStats
from archon.models.layers.norm import LayerNorm, RMSNorm
from archon.models.layers.rope import RotaryEmbedding, Rotation
from archon.models.layers.spec import LayerSpec, NoFeedForward, NoMixer
from archon.models.mtp import MTPInputs, MTPLayer
from archon.models.vision.images import Grid, PackedImages
from archon.parallel.comm import all_gather_replicated
from archon.parallel.torch_private import register_dataclass
from archon.schema.errors import BatchError, FamilyError

__all__ = ["BaseArchonModel", "BaseModelArgs", "ModelInputs", "TransformerBlock"]


class TransformerBlock(nn.Module):
    """Transformer block: a mixer, then a feed-forward network or mixture of experts, with residuals; or one of them."""

    def __init__(self, layer: int, spec: LayerSpec, dim: int) -> None:
        super().__init__()
        self.mixer_name, self.residual_multiplier = spec.mixer.module_name, spec.residual_multiplier
        self.moe: nn.Module | None = None
        self.feed_forward: nn.Module | None = None
        if not isinstance(spec.mixer, NoMixer):
            setattr(self, self.mixer_name, spec.mixer.build(layer, dim))
        if not isinstance(spec.feed_forward, NoFeedForward):
            setattr(self, spec.feed_forward.module_name, spec.feed_forward.build(dim))
        before, after = (spec.norm_placement in (place, "both") for place in ("before", "after"))
        self.is_parallel = spec.norm_placement == "parallel"
        self.attention_norm = spec.norm.build(dim) if before or self.is_parallel else None
        self.attention_post_norm = spec.norm.build(dim) if after else None
        self.ffn_norm = spec.norm.build(dim) if before else None
        self.ffn_post_norm = spec.norm.build(dim) if after else None

    def forward(
        self, x: Tensor, rotation: Rotation | None, attention: AttentionMeta, layer_experts: Tensor | None = None
    ) -> Tensor | tuple[Tensor, RouterStats]:
        """Return the output [T, dim] of x [T, dim]; an MoE block also returns router statistics.

        Statistics are returned, not stored, so that recomputation does not count them twice. Replayed experts
        `layer_experts` [T, k] are an argument, so that recomputation uses them too.
        """
        normed = _normed(self.attention_norm, x)
        if self.mixer_name:
            mixed = getattr(self, self.mixer_name)(normed, rotation, attention)
            x = self._add(x, _normed(self.attention_post_norm, mixed))
        normed = normed if self.is_parallel else _normed(self.ffn_norm, x)
        if self.feed_forward is not None:
            out = self.feed_forward(normed, attention.lora_mapping)
            return self._add(x, _normed(self.ffn_post_norm, out))
        if self.moe is None:
            return x
        out, stats = self.moe(normed, attention.valid_mask, attention.lora_mapping, layer_experts)
        return self._add(x, _normed(self.ffn_post_norm, out)), stats

    def _add(self, x: Tensor, out: Tensor) -> Tensor:
        return x + out if self.residual_multiplier == 1 else x + out * self.residual_multiplier


def _rows(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """Inputs of the layers for T packed tokens.

    Attributes:
        tokens: int [T]; hidden states [T, dim] on a pipeline stage without embeddings.
        positions: int [T], position within the document; [3, T] (time, row, column) in a vision-language model.
        attention: attention between the tokens.
        images: the images of the tokens; None without images.
        routed_experts: int [N, L, k], the experts to replay for N tokens (see `AttentionMeta.valid_mask`) in all L MoE
            layers of the model; negative entries let the router choose.
        mtp: the inputs of the MTP layers; None to leave them out.
    """

    tokens: Tensor
    positions: Tensor
    attention: AttentionMeta
    images: PackedImages | None = None
    routed_experts: Tensor | None = None
    mtp: MTPInputs | None = None


# FSDP finds the tensors in the arguments of a forward by pytree.
register_dataclass(ModelInputs)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


Args = TypeVar("Args", bound=BaseModelArgs)


def _copy(x: Tensor, source: Tensor) -> None:
    x.copy_(source)


def _forward_of_family(self: BaseArchonModel, tokens: Tensor | ModelInputs, *args: Any, **kwargs: Any) -> Any:
    """Run a family's forward, or the engine's call with `ModelInputs` or arguments of the head."""
    if isinstance(tokens, ModelInputs) or self._runs_decoder or kwargs.keys() - {*_DECODER_ARGUMENTS}:
        return BaseArchonModel.forward(self, tokens, *args, **kwargs)
    assert self.decoder_forward is not None
    return self.decoder_forward(tokens, *args, **kwargs)


_DECODER_ARGUMENTS = ("positions", "cu_seqlens", "max_seqlen", "tree_attn_meta")


class BaseArchonModel(nn.Module, Generic[Args]):
    """Decoder: an actor with a language-model head `output`, or a critic with a value head `score`.

    The engine builds it on the meta device, parallelizes it, allocates its memory and calls `init_buffers`. Modules of
    other pipeline stages are None.

    `LlamaModel = BaseArchonModel[LlamaModelArgs]` creates the model class of a family, usable as an annotation.

    Attributes:
        model_class: the class at construction; `fully_shard` changes the type of the object.
        saved_modules: names of the parameters trained whole next to a LoRA, PEFT's `modules_to_save`.
        router_stats: router statistics of each MoE layer in the last forward, in layer order; without MTP layers.
        mtp: the MTP layers; None without them.
    """

    args_class: ClassVar[type[BaseModelArgs]] = BaseModelArgs
    saved_modules: frozenset[str] = frozenset()
    _runs_decoder = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A forward(tokens, positions, cu_seqlens, max_seqlen, tree_attn_meta) returns logits. The engine needs hidden
        # states, and passes labels to the head: it runs this forward without the head, like a pipeline stage.
        forward = vars(cls).get("forward")
        parameters = {} if forward is None else dict(inspect.signature(forward).parameters)
        takes_head = "labels" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if forward is not None and not takes_head:
            cls.decoder_forward = forward
            cls.forward = _forward_of_family  # type: ignore[method-assign]

    decoder_forward: ClassVar[Callable[..., Tensor] | None] = None

    def __class_getitem__(cls, args_class: Any) -> Any:
        if not isinstance(args_class, type):  # a type variable: this is the generic base class of a model
            return super().__class_getitem__(args_class)  # type: ignore[misc]  # of Generic
        name = f"{args_class.__name__.removesuffix('ModelArgs')}Model"
        doc = f"See `{cls.__name__}` and `{args_class.__name__}`."
        return type(name, (cls,), {"__module__": args_class.__module__, "__doc__": doc, "args_class": args_class})

    def __init__(self, args: Args = None) -> None:  # type: ignore[assignment]
        if not isinstance(args, BaseModelArgs):
            raise FamilyError(
                f"{type(self).__name__} passes {args!r:.80} to BaseArchonModel; call super().__init__(model_args) with "
                "an instance of a subclass of BaseModelArgs"
            )
        super().__init__()
        self.args: BaseModelArgs = args
        self.model_class = type(self)
        self.tok_embeddings = Embedding(args.vocab_size, args.dim, padding_idx=args.pad_token_id)
        self.layer_specs = args.layer_specs
        ropes = args.ropes  # computed from all layers at every access
        self.ropes = [RotaryEmbedding(spec) for spec in ropes]
        self.rope_of_layer = [
            None if spec.mixer.rope is None else ropes.index(spec.mixer.rope) for spec in self.layer_specs
        ]
        self.expert_layers = args.expert_layers
        self.layers = nn.ModuleDict({str(layer): self.build_block(layer) for layer in range(args.n_layers)})
        self.norm: RMSNorm | LayerNorm | None = args.norm.build(args.dim)
        self.mtp: nn.ModuleDict | None = None
        if args.n_mtp_layers:
            blocks = [TransformerBlock(args.n_layers + k, spec, args.dim) for k, spec in enumerate(args.mtp_specs)]
            self.mtp = nn.ModuleDict({str(k): MTPLayer(block, args.norm, args.dim) for k, block in enumerate(blocks)})
        self.router_stats: list[RouterStats] = []
        self.output: LMHead | None = None
        self.score: Linear | None = None
        if args.is_critic:
            self.score = Linear(args.dim, 1, bias=False, role="value_head")
        else:
            self.output = LMHead(
                args.dim, args.vocab_size, tied=args.tie_word_embeddings, soft_cap=args.logits_soft_cap
            )
            self.tie_weights()

    def build_block(self, layer: int) -> nn.Module:
        """Build the block of a layer from `layer_specs`."""
        return TransformerBlock(layer, self.layer_specs[layer], self.args.dim)

    def tie_weights(self) -> None:
        """Make `output.weight` and `tok_embeddings.weight` one parameter if the config ties them; idempotent."""
        if self.args.tie_word_embeddings and self.output is not None and self.tok_embeddings is not None:
            self.output.weight = self.tok_embeddings.weight

    def untie_weights(self) -> None:
        """Give a tied head on the meta device a parameter of its own, so that each module can be sharded alone."""
        if self.output is not None and self.tok_embeddings is not None:
            self.output.weight = nn.Parameter(self.output.weight.detach().clone(), self.output.weight.requires_grad)

    def full_precision_names(self) -> frozenset[str]:
        """Return the names of parameters that are always at least float32."""
        wide = ((name, module) for name, module in self.named_modules() if getattr(module, "full_precision", False))
        return frozenset(f"{name}.{parameter}" for name, module in wide for parameter, _ in module.named_parameters())

    @property
    def attention_ops(self) -> frozenset[str]:
        """The attention operators with results kept by selective recomputation."""
        return saved_ops(self.args.attn_type)

    def forward(
        self,
        tokens: Tensor | ModelInputs,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        tree_attn_meta: AttentionMeta | None = None,
        *,
        labels: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        entropy: bool = True,
        loss_weights: Tensor | None = None,
        label_rows: Tensor | None = None,
        images: PackedImages | None = None,
        routed_experts: Tensor | None = None,
    ) -> Tensor | TokenScores | WeightedLoss:
        """Run packed documents through the model.

        Args:
            tokens: int [T] or [1, T]; hidden states [T, dim] on a pipeline stage without embeddings. `ModelInputs`
                replace all arguments except the head's.
            positions: int [T] or [1, T], position within the document; in a vision-language model [3, T] or [1, 3, T],
                the time, row and column of each token.
            cu_seqlens: int32 [B + 1], document boundaries from 0 to T.
            max_seqlen: length of the longest document.
            tree_attn_meta: attention between tokens; by default causal within packed documents.
            labels: int, shaped as tokens; see `LMHead.forward`.
            temperature: divisor of the logits, a number or shaped as tokens.
            entropy: whether to compute entropies.
            loss_weights: float, shaped as tokens, the `weights` of `LMHead.forward`.
            label_rows: the `rows` of `LMHead.forward`.
            images: images of the documents, in a vision-language model.
            routed_experts: int [N, L, k] or [1, N, L, k], the experts to replay for N tokens (see
                `AttentionMeta.valid_mask`) in all L MoE layers of the model; negative entries let the router choose.

        Returns:
            The output of `LMHead.forward`, the values [T] of a critic, or the hidden states [T, dim] of a stage without
            a head; with a leading dimension of 1 if tokens have one.
        """
        # The engine passes `ModelInputs`. FSDP gathers the weights of norm and head in this method alone.
        head: dict[str, Any] = {"temperature": temperature, "entropy": entropy, "rows": label_rows}
        if isinstance(tokens, ModelInputs):
            return self._scores(tokens, labels, loss_weights, head)
        assert positions is not None
        has_axes = any(rope.spec.sections for rope in self.ropes) and positions.shape[-2:-1] == (3,)
        is_batched = positions.dim() == (3 if has_axes else 2)
        if is_batched:
            if positions.shape[0] != 1:
                raise ValueError(f"positions have shape {tuple(positions.shape)}; packed batches are [T] or [1, T]")
            tokens, positions = tokens.squeeze(0), positions.squeeze(0)
            labels, loss_weights, routed_experts = (
                None if x is None else x.squeeze(0) for x in (labels, loss_weights, routed_experts)
            )
        attention = tree_attn_meta
        if attention is None:
            assert cu_seqlens is not None and max_seqlen is not None
            attention = PackedAttention(cu_seqlens, max_seqlen, self.args.attn_type)
        inputs = ModelInputs(tokens, positions, attention, images, routed_experts)
        out: Any = self._scores(inputs, labels, loss_weights, head)
        if not is_batched:
            return out
        if isinstance(out, Tensor):
            return out.unsqueeze(0)
        return out._make(x if x is None or x.dim() == 0 else x.unsqueeze(0) for x in out)

    def _scores(
        self, inputs: ModelInputs, labels: Tensor | None, loss_weights: Tensor | None, head: Mapping[str, Any]
    ) -> Any:
        """Return the output of the head, or the hidden states of a stage without a head.

        With `inputs.mtp` it is a pair with `mtp_losses`.
        """
        hidden, token_rows = self.hidden_states(inputs), inputs.attention.token_rows
        if self.score is not None:
            weight = self.score.weight  # wider than the compute dtype if LoRAs are trained
            values = self.score(hidden.to(weight.dtype)).squeeze(-1)
            if self.score.tp is not None:
                values = all_gather_replicated(values, self.score.tp)
            values = _rows(values, token_rows)
            return values.to(torch.promote_types(values.dtype, torch.float32))
        if self.output is None:
            return hidden
        if labels is None:
            return _rows(self.output(hidden), token_rows)  # a linear layer, like a generator's packed head
        scores = self.output(hidden, labels, weights=loss_weights, token_rows=token_rows, **head)
        return scores if inputs.mtp is None else (scores, self.mtp_losses(hidden, inputs))

    def encode_images(self, patches: Tensor, grids: tuple[Grid, ...]) -> Tensor:
        """Encode image patches [P, F]; see `ImageFeatures.features`.

        Raises:
            BatchError: this is a text model.
        """
        raise BatchError(f"{self.model_class.__name__} accepts no images; expected a text batch")

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """Return hidden states [T, dim], after the final norm if this stage has it.

        With `attention.gather_index` [N] the result is [N, dim].
        """
        if self.decoder_forward is not None and not self._runs_decoder:
            return self._run_decoder_forward(inputs)
        attention, positions, routed_experts = inputs.attention, inputs.positions, inputs.routed_experts
        features = None if inputs.images is None else inputs.images.encode(self.encode_images)
        hidden = inputs.tokens
        if self.tok_embeddings is not None:
            hidden = self.tok_embeddings(hidden)
            hidden = hidden if features is None else features.embed(hidden)
            hidden = self._scale_embedding(hidden)
        attention.prepare(hidden)
        lengths = attention.document_lengths(positions) if self.args.rope_depends_on_length else None
        rotations = [rope(positions, hidden.dtype, lengths) for rope in self.ropes]
        self.router_stats = []
        for layer, block in self.layers.items():
            rope = self.rope_of_layer[int(layer)]
            moe_index = None if routed_experts is None else self.expert_layers.get(int(layer))
            layer_experts = None if routed_experts is None or moe_index is None else routed_experts[:, moe_index]
            hidden = block(hidden, None if rope is None else rotations[rope], attention, layer_experts)
            if isinstance(hidden, tuple):
                hidden, stats = hidden
                self.router_stats.append(stats)
            hidden = hidden if features is None else features.add(hidden, int(layer))
        if attention.gather_index is not None:
            hidden = hidden.index_select(0, attention.gather_index)
        if self.norm is None:
            return hidden
        hidden = self.norm(hidden)
        # The head is linear, so dividing its input divides the logits.
        return hidden if self.args.logits_divisor == 1 or self.output is None else hidden / self.args.logits_divisor

    def _scale_embedding(self, embedding: Tensor) -> Tensor:
        if (factor := self.args.embedding_multiplier) == 1:
            return embedding
        rounded = self.args.embedding_multiplier_is_rounded
        return embedding * (embedding.new_full((), factor) if rounded else factor)

    def mtp_losses(self, hidden: Tensor, inputs: ModelInputs) -> tuple[Tensor, ...]:
        """Return the cross-entropy of each MTP layer, a sum over its labels in nats.

        Only the MTP layers get gradients: hidden states [T, dim] of the trunk, embedding and head are detached.
        """
        mtp, embed, head = inputs.mtp, self.tok_embeddings, self.output
        assert mtp is not None and self.mtp is not None and embed is not None and head is not None
        hidden, losses = hidden.detach(), []
        for layer, spec, tokens, labels, rows in zip(
            self.mtp.values(), self.args.mtp_specs, mtp.tokens, mtp.labels, mtp.label_rows, strict=True
        ):
            with torch.no_grad():
                embedding = self._scale_embedding(embed(tokens))
            rope = None if spec.mixer.rope is None else self.ropes[self.args.ropes.index(spec.mixer.rope)]
            rotation = None if rope is None else rope(inputs.positions, hidden.dtype, None)
            hidden = layer(embedding, hidden, rotation, inputs.attention)
            weights = torch.ones_like(labels, dtype=torch.promote_types(hidden.dtype, torch.float32))
            losses.append(head(hidden, labels, weights=weights, rows=rows, detached=True).loss)
        return tuple(losses)

    def _run_decoder_forward(self, inputs: ModelInputs) -> Tensor:
        """Return hidden states from a family's own forward, run without the head."""
        if inputs.images is not None or inputs.routed_experts is not None:
            raise BatchError(
                f"{self.model_class.__name__}.forward takes no images and no routed experts; override "
                "hidden_states(inputs) in its place"
            )
        output, score = self.output, self.score
        documents = getattr(inputs.attention, "documents", None)
        bounds = (None, None) if documents is None else (documents.cu_seqlens, documents.max_seqlen)
        self._runs_decoder, self.output, self.score = True, None, None
        try:
            assert self.decoder_forward is not None
            hidden = self.decoder_forward(inputs.tokens, inputs.positions, *bounds, tree_attn_meta=inputs.attention)
            # The forward of this class has gathered rows already; a loop over the layers has not.
            rows = inputs.attention.gather_index
            return hidden if rows is None or len(rows) == len(hidden) else hidden.index_select(0, rows)
        except (AttributeError, TypeError) as error:
            if documents is not None:
                raise
            raise FamilyError(
                f"{self.model_class.__name__}.forward fails without cu_seqlens ({error}); generation, shared prefixes "
                "and context parallelism pass only tree_attn_meta: use tree_attn_meta.attend, as archon's layers do"
            ) from error
        finally:
            self._runs_decoder, self.output, self.score = False, output, score

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize as Hugging Face does: normal(0, initializer_range) matrices, zero biases, unit norms."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, fill in self.initializers():
            fill(parameters[name])

    @torch.no_grad()
    def initial_weights(self) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        """Yield `initializers` of a model on the meta device; an overridden `init_weights` draws all weights first.

        Raises:
            FamilyError: the family's `init_weights` leaves a parameter out.
        """
        if type(self).init_weights is BaseArchonModel.init_weights:
            yield from self.initializers()
            return
        model = copy.deepcopy(self).to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        model.tie_weights()
        model.init_buffers("cpu")
        model.init_weights()
        for name, parameter in model.named_parameters():
            if parameter.isnan().any():
                raise FamilyError(f"{type(self).__name__}.init_weights leaves {name} uninitialized; initialize it")
            yield name, partial(_copy, source=parameter)

    def initializers(self) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        """Yield each parameter's name and in-place initializer; a tied parameter occurs twice."""
        normal = partial(nn.init.normal_, std=self.args.initializer_range)
        for prefix, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding, ShortConvolution)):
                yield f"{prefix}.weight", normal
            if isinstance(module, (nn.Linear, ShortConvolution)) and module.bias is not None:
                yield f"{prefix}.bias", nn.init.zeros_
            if isinstance(module, RMSNorm):
                yield f"{prefix}.weight", partial(nn.init.constant_, val=1.0 - module.offset)
            if isinstance(module, LayerNorm):
                yield f"{prefix}.weight", nn.init.ones_
                if module.bias is not None:
                    yield f"{prefix}.bias", nn.init.zeros_
            for name in getattr(module, "parameter_roles", {}):
                if getattr(module, name) is not None:
                    yield f"{prefix}.{name}", getattr(module, "parameter_initializers", {}).get(name, normal)
            if isinstance(module, GroupedExperts):
                for name, _ in module.named_parameters(recurse=False):
                    yield f"{prefix}.{name}", normal if name.startswith("w") else nn.init.zeros_

    def init_buffers(self, device: torch.device | str) -> None:
        """Recompute rotary frequencies and move router biases to `device`, in at least float32.

        A bias on the meta device becomes 0; a loaded bias keeps its values.
        """
        for rope in self.ropes:
            rope.init_buffers(device)
        for module in self.modules():
            if isinstance(module, Router):
                module.init_buffers(device)
