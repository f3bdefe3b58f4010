"""Sizes of every weight's shard on a rank, as `archon.parallel` shards, without a process group."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

import torch
from torch import nn

from archon.engine.memory.activations import LoRAMatrices, LoRAMatrix
from archon.engine.muon import is_matrix, orthogonalize_flops
from archon.models.args.base import BaseModelArgs
from archon.models.lora.dora import Magnitude
from archon.models.lora.layers import LoRALayer
from archon.models.lora.model import add_lora
from archon.models.lora.quantized_base import BaseFormat, is_quantizable, stored_bytes, table_bytes
from archon.models.lora.saved_modules import train_saved_modules
from archon.models.lora.targets import LoRASize
from archon.models.spec import MOE_TP_PLAN, ModelSpec
from archon.parallel.layout import ParallelLayout
from archon.parallel.pipeline import StagePlan


@dataclass(frozen=True)
class ParameterShape:
    """Parameter with its full shape, the role of its layer, and the number of heads that share its rows, if any.

    The name of a LoRA weight ends with `lora.a` or `lora.b`; its role and heads equal the adapted matrix. A `saved`
    weight is trained whole next to a LoRA. A frozen weight with a `format` is stored quantized.
    """

    shape: tuple[int, ...]
    role: str
    name: str
    heads: int | None = None
    saved: bool = False
    format: BaseFormat | None = None

    @property
    def is_lora(self) -> bool:
        """Whether it is a LoRA weight."""
        return "lora." in self.name

    @property
    def _is_split(self) -> tuple[bool, bool]:
        """Whether rows and columns may be split: `lora.a` has the columns of its matrix, `lora.b` the rows."""
        return not self.name.endswith("lora.a"), not self.name.endswith("lora.b")

    def local(self, layout: ParallelLayout) -> tuple[int, ...]:
        """Return the shape after tensor and expert parallelism, which FSDP gathers."""
        shape, tp = list(self.shape), layout.tp
        rows, columns = self._is_split
        if self.role == "experts":
            shape[0] //= layout.ep
            dim = 2 if self.name.startswith("w2") else 1
            if (rows, columns)[dim - 1]:
                shape[dim] //= layout.etp
            return tuple(shape)
        style = MOE_TP_PLAN[self.role]
        if style == "split_rows" and rows and (self.heads is None or self.heads % tp == 0):
            shape[0] //= tp
        elif style == "split_columns" and columns and len(shape) > 1:
            shape[1] //= tp
        return tuple(shape)

    def shard(self, layout: ParallelLayout, rank: int) -> int:
        """Return the elements of the FSDP shard on `rank`; FSDP shards like torch.chunk."""
        shape = self.local(layout)
        if self.role != "experts":
            ways = layout.dp_shard * layout.cp
            return _chunk_rows(shape[0], ways, rank // layout.tp % ways) * prod(shape[1:])
        within = layout.ep * layout.etp
        ways = layout.dp_shard * layout.cp * layout.tp // within
        # With fewer experts than ranks, `archon.parallel.fsdp` shards the rows of each expert.
        dim = 1 if shape[0] < ways and shape[1] % ways == 0 else 0
        return prod(shape) // shape[dim] * _chunk_rows(shape[dim], ways, rank // within % ways)


def _chunk_rows(rows: int, ways: int, index: int) -> int:
    step = -(-rows // ways)
    return max(0, min(step, rows - index * step))


@dataclass(frozen=True)
class ParameterCounts:
    """Elements of a set of weights: one rank's shards (`local`), and after FSDP's all-gather (`gathered`).

    Weights of a quantized base are counted in bytes instead, in `quantized` and `quantized_gathered`;
    `largest_quantized` are the elements of the largest one, which a matmul dequantizes.
    `experts` are the gathered elements of experts, which have a separate FSDP group. `matrices` are the part of `local`
    that Muon trains, and `muon_flops` this rank's FLOPs to orthogonalize their updates.
    """

    local: int
    gathered: int
    experts: int
    matrices: int
    muon_flops: float
    quantized: int = 0
    quantized_gathered: int = 0
    largest_quantized: int = 0


@lru_cache(maxsize=65536)
def count_parameters(weights: tuple[ParameterShape, ...], layout: ParallelLayout, rank: int) -> ParameterCounts:
    """Return the element counts of `weights` on `rank`."""
    quantized = [(w, w.format) for w in weights if w.format is not None]
    weights = tuple(w for w in weights if w.format is None)
    local = [(prod(w.local(layout)), w.role == "experts") for w in weights]
    matrices = [w for w in weights if is_matrix(w.role, w.shape)]
    return ParameterCounts(
        sum(w.shard(layout, rank) for w in weights),
        sum(size for size, _ in local),
        sum(size for size, expert in local if expert),
        sum(w.shard(layout, rank) for w in matrices),
        sum(orthogonalize_flops(w.shape) for w in matrices) * layout.pp / layout.world_size,
        sum(stored_bytes(w.shard(layout, rank), format) + table_bytes(w.shape, format) for w, format in quantized),
        sum(stored_bytes(prod(w.local(layout)), format) for w, format in quantized),
        max((prod(w.local(layout)) for w, _ in quantized), default=0),
    )


@dataclass(frozen=True)
class ModelWeights:
    """Weights of a model.

    Attributes:
        layers: index in `distinct_layers` of each layer's weights.
        distinct_layers: weights of layers with different shapes or roles.
        tied: the head is the embedding; a pipeline's last stage has a copy of it.
        lora_layers: matrices with LoRA of each layer; if there are any, all other weights are frozen.
    """

    layers: tuple[int, ...]
    distinct_layers: tuple[tuple[ParameterShape, ...], ...]
    embedding: tuple[ParameterShape, ...]
    head: tuple[ParameterShape, ...]
    tied: bool
    lora_layers: tuple[LoRAMatrices, ...]

    @classmethod
    def from_spec(
        cls,
        spec: ModelSpec,
        args: BaseModelArgs,
        lora: Mapping[str, LoRASize] | None = None,
        saved_modules: Collection[str] = (),
        quantize_base: BaseFormat | Literal["none"] = "none",
    ) -> ModelWeights:
        """Build the family's model with `lora` and `saved_modules` on the meta device, and return its weights.

        `quantize_base` is the format of the frozen linear layers of blocks.
        """
        with torch.device("meta"):
            model = spec.model_class(args)
            add_lora(model, lora or {}, torch.float32)
            train_saved_modules(model, saved_modules, torch.float32)
        saved = {id(model.get_parameter(name)) for name in saved_modules}
        outside = {name: tuple(_weights(part, saved)) for name, part in model.named_children() if name != "layers"}
        head = tuple(w for name in ("norm", "output", "score") for w in outside.get(name, ()))
        layers = [tuple(_weights(block, saved, quantize_base)) for block in model.layers.values()]
        distinct = tuple(dict.fromkeys(layers))
        tied = args.tie_word_embeddings and not args.is_critic
        lora_layers = tuple(tuple(_lora_matrices(block)) if lora else None for block in model.layers.values())
        # The vision encoder is on the first stage, like the embedding. A frozen one has less state than counted here.
        embedding = outside["tok_embeddings"] + outside.get("visual", ())
        return cls(tuple(map(distinct.index, layers)), distinct, embedding, head, tied, lora_layers)

    @property
    def has_lora(self) -> bool:
        """Whether any matrix has a LoRA."""
        return any(self.lora_layers)

    @property
    def trains_head(self) -> bool:
        """True if the head, or the embedding that is tied to it, is a saved module."""
        return any(w.saved for w in self.head if w.role == "head")

    def stage(self, plan: StagePlan | None, stage: int) -> tuple[tuple[int, ...], tuple[ParameterShape, ...]]:
        """Return the layers of a pipeline stage (without a pipeline, of the model), and the weights outside layers.

        The latter are the embedding, the final norm and the head; a tied head is counted once.
        """
        layers = self.layers if plan is None else self.layers[slice(*plan.layers[stage])]
        first, last = stage == 0, plan is None or stage == plan.n_stages - 1
        outside = self.embedding if first else ()
        if last:
            outside += tuple(w for w in self.head if not (first and self.tied and w.role == "head"))
        return layers, outside


def _weights(
    module: nn.Module, saved: Collection[int], quantize_base: BaseFormat | Literal["none"] = "none"
) -> Iterator[ParameterShape]:
    for part in module.modules():
        if isinstance(part, LoRALayer | Magnitude):
            continue  # yielded with its matrix
        heads, roles = getattr(part, "heads", None), getattr(part, "parameter_roles", {})
        for name, parameter in part.named_parameters(recurse=False):
            role = roles.get(name, getattr(part, "role", None))
            assert role is not None, f"parameter {name} of {type(part).__name__} has no role"
            stored = quantize_base if name == "weight" and quantize_base != "none" else None
            format = stored if stored is not None and is_quantizable(part, stored) else None
            yield ParameterShape(tuple(parameter.shape), role, name, heads, id(parameter) in saved, format)
        for matrix, lora in _lora_layers(part):
            for half, parameter in lora.named_parameters():
                yield ParameterShape(tuple(parameter.shape), str(part.role), f"{matrix}.lora.{half}", heads)


def _lora_layers(module: nn.Module) -> Iterator[tuple[str, LoRALayer]]:
    """Yield (matrix name, LoRA) of a module's matrices; the name is empty for a linear layer."""
    lora = getattr(module, "lora", None)
    if isinstance(lora, LoRALayer):
        yield "", lora
    elif isinstance(lora, nn.ModuleDict):
        yield from ((name, layer) for name, layer in lora.items() if isinstance(layer, LoRALayer))


def _lora_matrices(block: nn.Module) -> Iterator[LoRAMatrix]:
    for name, module in block.named_modules():
        for matrix, lora in _lora_layers(module):
            full = f"{name}.{matrix}" if matrix else name
            rank, in_features = lora.a.shape[-2:]
            options = lora.dropout is not None, lora.magnitude is not None
            yield LoRAMatrix(full, str(module.role), in_features, lora.b.shape[-2], rank, *options)
