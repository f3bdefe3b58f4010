"""Names, fusion and sharding of a model's weights in megatron-core's GPTModel, without data.

Every tensor of a rank is a list of slices of Hugging Face tensors, concatenated along rows; import and export use the
same description. The fused tensors, with tensor parallelism over `tp` ranks:

    linear_qkv            for each key-value head its query heads, key and value; split evenly among the ranks. With
                          fewer key-value heads than ranks, several ranks split and gather a head's rows
    linear_fc1            this rank's rows of the gate, then of the up projection
    linear_proj, _fc2     this rank's columns
    word_embeddings,      this rank's rows of the vocabulary, padded at its end
    output_layer

Norms and routers are replicated. Experts are distributed over the expert-parallel ranks, and each expert is split by
tensor parallelism like a dense network; all other weights are replicated over the expert-parallel ranks. Pipeline
stages have equally many layers, numbered from 0 in each; the last stage has a copy of a tied embedding as its
output_layer. Names follow megatron-core 0.16.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from archon.checkpoint.safetensors_file import Region, full_region, region_shape
from archon.models.args.base import BaseModelArgs
from archon.models.hf.names import DENSE_HF_MAP, EXPERTS_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.schema.errors import CheckpointError, LayoutError

LayerSpec = Literal["local", "te"]
ExpertModules = Literal["sequential", "grouped"]
EMBEDDING = "embedding.word_embeddings.weight"
HF_EMBEDDING = "model.embed_tokens.weight"


class RankCoordinates(NamedTuple):
    """The coordinates of a rank in tensor, pipeline and expert parallelism."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class MegatronLayout:
    """Distribution of a GPTModel over ranks, and the variant of its module names.

    Attributes:
        tp: degree of tensor parallelism, also of experts.
        pp: degree of pipeline parallelism.
        ep: degree of expert parallelism.
        spec: layer spec: `te` if Transformer Engine's linear layers contain the norms before them, else `local`.
        experts: `sequential` has one module per expert, `grouped` (Transformer Engine) one module with numbered
            weights.
        vocab_rows: rows of the embedding over all ranks, including padding.

    Raises:
        LayoutError: a degree is below 1.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    spec: LayerSpec = "local"
    experts: ExpertModules = "sequential"
    vocab_rows: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}; expected at least 1")

    def ranks(self) -> Iterator[RankCoordinates]:
        """Yield the coordinates of every rank; tp varies fastest."""
        for ep, pp, tp in itertools.product(range(self.ep), range(self.pp), range(self.tp)):
            yield RankCoordinates(tp, pp, ep)


def padded_vocabulary(vocab_size: int, tp: int, multiple: int) -> int:
    """Return the rows of the padded embedding: a multiple of `multiple * tp`, as Megatron-LM computes it.

    `multiple` is Megatron-LM's make_vocab_size_divisible_by.
    """
    return math.ceil(vocab_size / (multiple * tp)) * multiple * tp


class TensorSlice(NamedTuple):
    """A region of a Hugging Face tensor; with `padding`, zero rows after its end in its dtype."""

    key: str
    region: Region
    padding: bool = False

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.region[0].stop - self.region[0].start


FusedTensor = list[TensorSlice]
"""Slices that are concatenated along rows."""


def fused_shape(slices: Sequence[TensorSlice]) -> tuple[int, ...]:
    """Return the shape of the concatenated slices."""
    return (sum(part.rows for part in slices), *region_shape(slices[0].region[1:]))


class ShardContext(NamedTuple):
    """Inputs of a shard function: model arguments, Hugging Face shapes, vocabulary rows, tp and tp rank."""

    args: BaseModelArgs
    shapes: Mapping[str, tuple[int, ...]]
    vocab_rows: int
    tp: int
    rank: int

    def full(self, key: str) -> TensorSlice:
        """Return the slice that covers a tensor."""
        return TensorSlice(key, full_region(self.shapes[key]))

    def local_rows(self, slices: FusedTensor) -> FusedTensor:
        """Return this rank's rows of a fused tensor that is split evenly among the ranks."""
        rows = fused_shape(slices)[0] // self.tp
        return slice_rows(slices, self.rank * rows, (self.rank + 1) * rows)


def slice_rows(slices: FusedTensor, start: int, stop: int) -> FusedTensor:
    """Return the rows [start, stop) of a fused tensor."""
    selected: FusedTensor = []
    first = 0
    for part in slices:
        a, b = max(start, first), min(stop, first + part.rows)
        if a < b:
            offset = part.region[0].start - first
            selected.append(part._replace(region=(slice(a + offset, b + offset), *part.region[1:])))
        first += part.rows
    return selected


def _replicated(context: ShardContext, keys: Sequence[str]) -> FusedTensor:
    return [context.full(key) for key in keys]


def _columns(context: ShardContext, keys: Sequence[str]) -> FusedTensor:
    (key,) = keys
    rows, columns = full_region(context.shapes[key])
    width = columns.stop // context.tp
    return [TensorSlice(key, (rows, slice(context.rank * width, (context.rank + 1) * width)))]


def _gate_and_up(context: ShardContext, keys: Sequence[str]) -> FusedTensor:
    return [part for key in keys for part in context.local_rows([context.full(key)])]


def _qkv(context: ShardContext, keys: Sequence[str]) -> FusedTensor:
    groups, slices = context.args.n_kv_heads, []
    for group in range(groups):
        for key in keys:
            rows = context.shapes[key][0] // groups
            slices += slice_rows([context.full(key)], group * rows, (group + 1) * rows)
    return context.local_rows(slices)


def _vocabulary(context: ShardContext, keys: Sequence[str]) -> FusedTensor:
    (key,) = keys
    rows, width = context.shapes[key]
    return context.local_rows(
        [context.full(key), TensorSlice(key, (slice(rows, context.vocab_rows), slice(0, width)), padding=True)]
    )


class WeightRule(NamedTuple):
    """A tensor of GPTModel, its Hugging Face keys, and the function that computes a rank's shard."""

    name: str
    keys: tuple[str, ...]
    shard: Callable[[ShardContext, Sequence[str]], FusedTensor]


INPUT_NORM: dict[LayerSpec, str] = {
    "local": "input_layernorm.weight",
    "te": "self_attention.linear_qkv.layer_norm_weight",
}
DENSE_NORM: dict[LayerSpec, str] = {"local": "pre_mlp_layernorm.weight", "te": "mlp.linear_fc1.layer_norm_weight"}
EXPERT_NAMES: dict[ExpertModules, str] = {
    "sequential": "mlp.experts.local_experts.{0}.{1}.weight",
    "grouped": "mlp.experts.{1}.weight{0}",
}
ATTENTION = (
    WeightRule("self_attention.linear_qkv.weight", tuple(f"self_attn.{p}_proj.weight" for p in "qkv"), _qkv),
    WeightRule("self_attention.linear_qkv.bias", tuple(f"self_attn.{p}_proj.bias" for p in "qkv"), _qkv),
    WeightRule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), _replicated),
    WeightRule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), _replicated),
    WeightRule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), _columns),
)
DENSE = (
    WeightRule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), _gate_and_up),
    WeightRule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), _columns),
)
SPARSE = (
    WeightRule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), _replicated),
    WeightRule("mlp.router.weight", ("mlp.gate.weight",), _replicated),
)


def _layer_rules(layout: MegatronLayout, experts: range) -> Iterator[WeightRule]:
    """Yield the rules of a layer: dense if `experts` is empty, otherwise with this rank's `experts`."""
    yield WeightRule(INPUT_NORM[layout.spec], ("input_layernorm.weight",), _replicated)
    yield from ATTENTION
    if not experts:
        yield WeightRule(DENSE_NORM[layout.spec], ("post_attention_layernorm.weight",), _replicated)
        yield from DENSE
        return
    yield from SPARSE
    for local, expert in enumerate(experts):
        for rule in DENSE:
            name = EXPERT_NAMES[layout.experts].format(local, rule.name.split(".")[1])
            keys = tuple(key.replace("mlp.", f"mlp.experts.{expert}.") for key in rule.keys)
            yield WeightRule(name, keys, rule.shard)


_COMMON_KEYS = {
    native: hf for hf, native in (DENSE_HF_MAP | QK_NORM_HF_MAP | EXPERTS_HF_MAP).items() if isinstance(native, str)
}


def _common_key(adapter: BaseStateDictAdapter, key: str) -> str:
    """Return the key that most checkpoints use for the parameter of `key`; `key` if there is none."""
    targets = adapter.hf_to_native(key)
    if len(targets) != 1 or targets[0].placement is not None:
        return key
    template = re.sub(r"(?<=^layers\.)\d+(?=\.)", "{}", targets[0].name)
    layer = re.findall(r"^layers\.(\d+)\.", targets[0].name)
    indices = layer if targets[0].index is None else [*layer, str(targets[0].index)]
    common = _COMMON_KEYS.get(template, key)
    # A tensor that stacks all experts has no counterpart among tensors of one expert.
    return common.format(*indices) if common.count("{}") == len(indices) else key


class RankTensors:
    """Tensors of every rank for one model and layout; common keys are used inside, so that all families convert.

    Raises:
        LayoutError: the layout does not divide the model.
        CheckpointError: GPTModel has no counterpart for a key.
    """

    def __init__(self, adapter: BaseStateDictAdapter, layout: MegatronLayout) -> None:
        self.args, self.is_tied, self.layout = adapter.args, adapter.is_tied, layout
        self.shapes = adapter.hf_shapes()
        self._family_keys = {_common_key(adapter, key): key for key in self.shapes}
        self._common_shapes = {common: self.shapes[key] for common, key in self._family_keys.items()}
        _check_divisions(self.args, layout)
        rules = (rule for rank in layout.ranks() if rank.tp == 0 for rule in self._rules(rank))
        placed = {key for rule in rules for key in rule.keys}
        unplaced = [key for common, key in self._family_keys.items() if common not in placed]
        if unplaced:
            more = f" and {len(unplaced) - 1} more" if len(unplaced) > 1 else ""
            raise CheckpointError(
                f"key {unplaced[0]!r}{more} has no counterpart in megatron-core's GPTModel; archon cannot convert it"
            )

    def tensors(self, rank: RankCoordinates) -> dict[str, FusedTensor]:
        """Return the tensors of the state dict of a rank's GPTModel, by name."""
        context = ShardContext(self.args, self._common_shapes, self.layout.vocab_rows, self.layout.tp, rank.tp)
        return {
            rule.name: [part._replace(key=self._family_keys[part.key]) for part in rule.shard(context, rule.keys)]
            for rule in self._rules(rank)
        }

    def _rules(self, rank: RankCoordinates) -> Iterator[WeightRule]:
        last = self.layout.pp - 1
        if rank.pp == 0:
            yield WeightRule(EMBEDDING, (HF_EMBEDDING,), _vocabulary)
        layers = self.args.n_layers // self.layout.pp
        local_experts = self.args.sizes.experts // self.layout.ep
        for layer in range(layers):
            prefix = f"model.layers.{rank.pp * layers + layer}."
            sparse = f"{prefix}mlp.gate.weight" in self._common_shapes
            experts = range(rank.ep * local_experts, (rank.ep + 1) * local_experts) if sparse else range(0)
            for rule in _layer_rules(self.layout, experts):
                keys = tuple(prefix + key for key in rule.keys)
                if keys[0] in self._common_shapes:  # not every family has biases or norms of queries and keys
                    yield WeightRule(f"decoder.layers.{layer}.{rule.name}", keys, rule.shard)
        if rank.pp == last:
            yield WeightRule("decoder.final_layernorm.weight", ("model.norm.weight",), _replicated)
            if not self.is_tied or last > 0:
                yield WeightRule(
                    "output_layer.weight", (HF_EMBEDDING if self.is_tied else "lm_head.weight",), _vocabulary
                )


def _check_divisions(args: BaseModelArgs, layout: MegatronLayout) -> None:
    sizes = args.sizes
    if layout.ep > 1 and not sizes.experts:
        raise LayoutError(f"ep is {layout.ep}, but the model has no experts; leave it at 1")
    if args.n_kv_heads % layout.tp and layout.tp % args.n_kv_heads:
        raise LayoutError(
            f"tp is {layout.tp}; expected a divisor or a multiple of the number of key-value heads, {args.n_kv_heads}"
        )
    divided = [
        ("tp", "attention heads", args.n_heads),
        ("tp", "rows of linear_qkv", (args.n_heads + 2 * args.n_kv_heads) * args.head_dim),
        ("tp", "rows of the padded vocabulary", layout.vocab_rows),
        *(("tp", "features of a feed-forward network", width) for width in sizes.hidden),
        ("tp", "features of an expert", sizes.expert_hidden),
        ("pp", "layers", args.n_layers),
        ("ep", "experts", sizes.experts),
    ]
    for name, label, count in divided:
        if count % getattr(layout, name):
            raise LayoutError(f"{name} is {getattr(layout, name)}; expected a divisor of the {count} {label}")
