"""Where megatron-core's GPTModel keeps each weight: its names, its fused forms, and which rank holds what. Data only.

Every tensor of a rank is a list of pieces of Hugging Face tensors, one below the other, so that one description serves
both ways. The fused forms, for `tp` ranks of tensor parallelism:

    linear_qkv            for each key-value head its query heads, its key, its value; cut evenly among the ranks.
                          With fewer key-value heads than ranks a head's rows are spread over several, which gather them
    linear_fc1            this rank's rows of the gate, then of the up projection
    linear_proj, _fc2     this rank's columns
    word_embeddings,      this rank's rows of the vocabulary, padded at its end
    output_layer

Norms and routers are whole on every rank. Experts are spread over the ranks of expert parallelism and each is cut like
a dense network by tensor parallelism; all else is repeated on those ranks. A pipeline's stages have equally many
layers, counted from 0 in each; the last has a copy of a tied embedding as its output_layer. Names are those of
megatron-core 0.16.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from archon.checkpoint.state_tree import Box, box_shape, whole_box
from archon.models.args import BaseModelArgs
from archon.models.state_dict import BaseStateDictAdapter
from archon.schema.errors import CheckpointError, LayoutError

Spec = Literal["local", "te"]
Experts = Literal["sequential", "grouped"]
EMBEDDING = "embedding.word_embeddings.weight"
HF_EMBEDDING = "model.embed_tokens.weight"


class Rank(NamedTuple):
    """The coordinates of a rank."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class MegatronLayout:
    """How a GPTModel is spread over ranks, and how its modules are named.

    Attributes:
        tp, pp, ep: degrees of tensor, pipeline and expert parallelism; experts have the tensor degree of the rest.
        spec: `te` where Transformer Engine's linear layers contain the norms before them, else `local`.
        experts: `sequential` has a module an expert, `grouped` numbered weights of one module (Transformer Engine's).
        vocab_rows: rows of the embedding over all ranks, padding included.

    Raises LayoutError for a degree below 1.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    spec: Spec = "local"
    experts: Experts = "sequential"
    vocab_rows: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}; expected at least 1")

    def ranks(self) -> Iterator[Rank]:
        """Every rank, tensor parallelism fastest."""
        for ep, pp, tp in itertools.product(range(self.ep), range(self.pp), range(self.tp)):
            yield Rank(tp, pp, ep)


def padded_vocabulary(vocab_size: int, tp: int, multiple: int) -> int:
    """Rows of the embedding with what Megatron-LM calls make_vocab_size_divisible_by: a multiple of `multiple * tp`."""
    return math.ceil(vocab_size / (multiple * tp)) * multiple * tp


class Piece(NamedTuple):
    """A part of a Hugging Face tensor, or rows of zeros behind it (`padding`, of its dtype)."""

    key: str
    box: Box
    padding: bool = False

    @property
    def rows(self) -> int:
        return self.box[0].stop - self.box[0].start


Fused = list[Piece]
"""Pieces, one below the other."""


def fused_shape(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """The shape of the tensor that pieces make."""
    return (sum(piece.rows for piece in pieces), *box_shape(pieces[0].box[1:]))


class Cut(NamedTuple):
    """What cutting one tensor depends on: the model, the Hugging Face shapes, the vocabulary's rows, the rank."""

    args: BaseModelArgs
    shapes: Mapping[str, tuple[int, ...]]
    vocab_rows: int
    tp: int
    rank: int

    def whole(self, key: str) -> Piece:
        return Piece(key, whole_box(self.shapes[key]))

    def share(self, pieces: Fused) -> Fused:
        """This rank's rows of pieces that the ranks divide evenly."""
        rows = fused_shape(pieces)[0] // self.tp
        return rows_between(pieces, self.rank * rows, (self.rank + 1) * rows)


def rows_between(pieces: Fused, start: int, stop: int) -> Fused:
    """The rows [start, stop) of fused pieces."""
    found: Fused = []
    first = 0
    for piece in pieces:
        a, b = max(start, first), min(stop, first + piece.rows)
        if a < b:
            offset = piece.box[0].start - first
            found.append(piece._replace(box=(slice(a + offset, b + offset), *piece.box[1:])))
        first += piece.rows
    return found


def _whole(cut: Cut, keys: Sequence[str]) -> Fused:
    return [cut.whole(key) for key in keys]


def _columns(cut: Cut, keys: Sequence[str]) -> Fused:
    (key,) = keys
    rows, columns = whole_box(cut.shapes[key])
    width = columns.stop // cut.tp
    return [Piece(key, (rows, slice(cut.rank * width, (cut.rank + 1) * width)))]


def _gated(cut: Cut, keys: Sequence[str]) -> Fused:
    return [piece for key in keys for piece in cut.share([cut.whole(key)])]


def _heads(cut: Cut, keys: Sequence[str]) -> Fused:
    groups, pieces = cut.args.n_kv_heads, []
    for group in range(groups):
        for key in keys:
            rows = cut.shapes[key][0] // groups
            pieces += rows_between([cut.whole(key)], group * rows, (group + 1) * rows)
    return cut.share(pieces)


def _vocabulary(cut: Cut, keys: Sequence[str]) -> Fused:
    (key,) = keys
    rows, width = cut.shapes[key]
    return cut.share([cut.whole(key), Piece(key, (slice(rows, cut.vocab_rows), slice(0, width)), padding=True)])


class Rule(NamedTuple):
    """Which tensors become which, and how they are cut."""

    name: str
    keys: tuple[str, ...]
    cut: Callable[[Cut, Sequence[str]], Fused]


INPUT_NORM: dict[Spec, str] = {
    "local": "input_layernorm.weight",
    "te": "self_attention.linear_qkv.layer_norm_weight",
}
DENSE_NORM: dict[Spec, str] = {"local": "pre_mlp_layernorm.weight", "te": "mlp.linear_fc1.layer_norm_weight"}
EXPERT_NAMES: dict[Experts, str] = {
    "sequential": "mlp.experts.local_experts.{0}.{1}.weight",
    "grouped": "mlp.experts.{1}.weight{0}",
}
ATTENTION = (
    Rule("self_attention.linear_qkv.weight", tuple(f"self_attn.{p}_proj.weight" for p in "qkv"), _heads),
    Rule("self_attention.linear_qkv.bias", tuple(f"self_attn.{p}_proj.bias" for p in "qkv"), _heads),
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), _whole),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), _whole),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), _columns),
)
DENSE = (
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), _gated),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), _columns),
)
SPARSE = (
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), _whole),
    Rule("mlp.router.weight", ("mlp.gate.weight",), _whole),
)


def _layer_rules(layout: MegatronLayout, experts: range) -> Iterator[Rule]:
    """The rules of a layer, a sparse one where there are `experts`, which are those of one rank."""
    yield Rule(INPUT_NORM[layout.spec], ("input_layernorm.weight",), _whole)
    yield from ATTENTION
    if not experts:
        yield Rule(DENSE_NORM[layout.spec], ("post_attention_layernorm.weight",), _whole)
        yield from DENSE
        return
    yield from SPARSE
    for local, expert in enumerate(experts):
        for rule in DENSE:
            name = EXPERT_NAMES[layout.experts].format(local, rule.name.split(".")[1])
            keys = tuple(key.replace("mlp.", f"mlp.experts.{expert}.") for key in rule.keys)
            yield Rule(name, keys, rule.cut)


class Placement:
    """Every tensor of every rank, for one model and one layout.

    Raises LayoutError unless the model can be divided so, CheckpointError for a key that GPTModel has no place for.
    """

    def __init__(self, adapter: BaseStateDictAdapter, layout: MegatronLayout) -> None:
        self.args, self.is_tied, self.layout = adapter.args, adapter.is_tied, layout
        self.shapes = adapter.hf_shapes()
        _check_divisions(self.args, layout)
        rules = (rule for rank in layout.ranks() if rank.tp == 0 for rule in self._rules(rank))
        placed = {key for rule in rules for key in rule.keys}
        unplaced = [key for key in self.shapes if key not in placed]
        if unplaced:
            more = f" and {len(unplaced) - 1} more" if len(unplaced) > 1 else ""
            raise CheckpointError(f"key {unplaced[0]!r}{more} has no place in megatron-core's GPTModel")

    def tensors(self, rank: Rank) -> dict[str, Fused]:
        """What the state dict of a rank's GPTModel holds, by name."""
        cut = Cut(self.args, self.shapes, self.layout.vocab_rows, self.layout.tp, rank.tp)
        return {rule.name: rule.cut(cut, rule.keys) for rule in self._rules(rank)}

    def _rules(self, rank: Rank) -> Iterator[Rule]:
        last = self.layout.pp - 1
        if rank.pp == 0:
            yield Rule(EMBEDDING, (HF_EMBEDDING,), _vocabulary)
        layers = self.args.n_layers // self.layout.pp
        share = self.args.sizes.experts // self.layout.ep
        for layer in range(layers):
            prefix = f"model.layers.{rank.pp * layers + layer}."
            sparse = f"{prefix}mlp.gate.weight" in self.shapes
            experts = range(rank.ep * share, (rank.ep + 1) * share) if sparse else range(0)
            for rule in _layer_rules(self.layout, experts):
                keys = tuple(prefix + key for key in rule.keys)
                if keys[0] in self.shapes:  # biases, and norms of queries and keys, are not in every family
                    yield Rule(f"decoder.layers.{layer}.{rule.name}", keys, rule.cut)
        if rank.pp == last:
            yield Rule("decoder.final_layernorm.weight", ("model.norm.weight",), _whole)
            if not self.is_tied or last > 0:
                yield Rule("output_layer.weight", (HF_EMBEDDING if self.is_tied else "lm_head.weight",), _vocabulary)


def _check_divisions(args: BaseModelArgs, layout: MegatronLayout) -> None:
    sizes = args.sizes
    if layout.ep > 1 and not sizes.experts:
        raise LayoutError(f"ep is {layout.ep}, but the model has no experts; leave it at 1")
    if args.n_kv_heads % layout.tp and layout.tp % args.n_kv_heads:
        raise LayoutError(
            f"tp {layout.tp} neither divides the {args.n_kv_heads} key-value heads nor is a multiple of their number"
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
    for name, what, count in divided:
        if count % getattr(layout, name):
            raise LayoutError(f"{name} {getattr(layout, name)} does not divide the {count} {what}")
