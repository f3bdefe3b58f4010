"""Linear and embedding layers that declare their role in the parallel plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archon.models.layers.fp8 import fp8_linear
from archon.models.layers.matmul import linear, lora_linear
from archon.models.lora.layers import LoRALayer, MultiLoRALayer
from archon.models.lora.mapping import LoRAMapping
from archon.models.lora.quantized_base import QuantizedWeight
from archon.parallel.comm import Group, local, reduce_scatter
from archon.parallel.fp8 import Fp8Scaling

# column: output features are sharded; row: input features are sharded; latent: compresses each token for all heads;
# head_norm: norm over one head's features, input sharded by heads; heads_norm: norm over the features of all heads,
# sharded by heads; heads: one row per head; vision: part of a vision encoder, replicated on every rank. A module has
# one role for its weight and bias, and declares the roles of further parameters in `parameter_roles`.
Role = Literal[
    "column",
    "row",
    "latent",
    "norm",
    "head_norm",
    "heads_norm",
    "heads",
    "router",
    "experts",
    "embedding",
    "head",
    "value_head",
    "vision",
]


class Linear(nn.Linear):
    """`nn.Linear` with a role. The weight is [out_features, in_features], contiguous or a transposed view.

    Attributes:
        heads: heads that the rows of the weight form; tensor parallelism shards by heads.
        rows: this rank's rows of a replicated weight, if there are fewer heads than ranks.
        lora: the layer's LoRA, or several by name.
        joint: one matmul for this layer and others with the same input, if their weights are packed together.
        fp8: scaling of the FP8 matmuls; None for the compute dtype. LoRA matmuls are never FP8.
        quantizable: whether its matmuls may be FP8, and its frozen weight below a LoRA be stored quantized.
        quantized: the weight, if it is stored quantized; `weight` is then None.
    """

    tp: Group | None = None
    rows: slice | None = None
    joint: Callable[[Tensor], Tensor] | None = None
    fp8: Fp8Scaling | None = None
    quantizable = True

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, role: Role, heads: int | None = None
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.role: Role = role
        self.heads = heads
        self.lora: LoRALayer | MultiLoRALayer | None = None
        self.quantized: QuantizedWeight | None = None

    def forward(self, x: Tensor, lora_mapping: LoRAMapping | None = None) -> Tensor:
        """Return [T, out] for x [T, in] with the LoRA of each row, for a multi-LoRA layer.

        Under tensor parallelism a column layer returns its shard of the features. A row layer takes its shard of the
        features, and returns all features of its token shard.
        """
        weight, bias = self._local_parts()
        if self.tp is not None and self.role == "row":
            out = reduce_scatter(self._product(x, weight, None, lora_mapping), self.tp)
            return out if bias is None else out + bias
        return self._product(x, weight, bias, lora_mapping)

    def _local_parts(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's rows, or columns, of the weight (None if it is quantized), and its part of the bias."""
        weight, bias = local(self.weight), local(self.bias)
        if self.rows is not None:
            weight = None if weight is None else weight[self.rows]
            bias = None if bias is None else bias[self.rows]
        return weight, bias

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, lora_mapping: LoRAMapping | None) -> Tensor:
        if self.quantized is not None:
            return self.apply_lora(self.quantized.linear(x, bias, self.rows), x, lora_mapping)
        if self.fp8 is not None:
            return self.apply_lora(fp8_linear(x, weight, bias, self.fp8), x, lora_mapping)
        drops = lora_mapping is not None and lora_mapping.dropout_keys is not None
        if isinstance(self.lora, LoRALayer) and self.lora.enabled and self.lora.magnitude is None and not drops:
            return lora_linear(x, weight, bias, *self.lora.parts(x.dtype, self.rows), self.lora.scale)
        return self.apply_lora(linear(x, weight, bias), x, lora_mapping)

    def apply_lora(self, out: Tensor, x: Tensor, lora_mapping: LoRAMapping | None) -> Tensor:
        """Add the LoRA term for x [T, in] to the product out [T, out]. May modify `out`.

        A row layer under tensor parallelism adds its bias later; otherwise `out` has it.
        """
        if self.lora is None or not self.lora.enabled:
            return out
        if isinstance(self.lora, LoRALayer):
            group = self.tp if self.role == "row" else None
            dropout, scale, dropped = self.lora.dropout, self.lora.scale, False
            keys = None if lora_mapping is None else self._local_rows(lora_mapping).dropout_keys
            if dropout is not None and keys is not None:
                shard = 0 if group is None else group.rank
                x, dropped = dropout.apply(x, keys, shard * x.shape[1]), True
                scale /= 1 - dropout.probability
            if self.lora.magnitude is not None:
                return self._apply_dora(out, x * (scale / self.lora.scale) if dropped else x, group, dropped=dropped)
            a, b = self.lora.parts(x.dtype, self.rows)
            return torch.addmm(out, linear(x, a), b.t(), alpha=scale)
        if lora_mapping is None:
            return out
        return self.lora(out, x, self._local_rows(lora_mapping), self.rows)

    def _apply_dora(self, out: Tensor, x: Tensor, group: Group | None, *, dropped: bool) -> Tensor:
        """Return out [T, out] with DoRA of the LoRA's input x [T, in], which is the layer's unless `dropped`."""
        assert isinstance(self.lora, LoRALayer)
        weight, bias = self._local_parts()
        bias = bias if group is None else None
        return self.lora.add_dora(out, x, weight, bias, group, self.rows, dropped=dropped)

    def _local_rows(self, lora_mapping: LoRAMapping) -> LoRAMapping:
        return lora_mapping.local_rows if self.role == "latent" else lora_mapping


def project(x: Tensor, layers: Sequence[Linear], lora_mapping: LoRAMapping | None) -> list[Tensor]:
    """Return each layer's output for x [T, in]; views of one matmul if the layers have a joint one."""
    joint = layers[0].joint
    if joint is None:
        return [layer(x, lora_mapping) for layer in layers]
    outs = joint(x).split_with_sizes([layer.out_features for layer in layers], dim=-1)
    return [layer.apply_lora(out, x, lora_mapping) for layer, out in zip(layers, outs, strict=True)]


class Embedding(nn.Embedding):
    """Token embedding [vocab, dim]. The row of `padding_idx` gets no gradient from lookups.

    Attributes:
        lora: its LoRA, with the matrices of a linear layer: a [r, dim], b [vocab, r], and W + scale * b a.
    """

    role: Role = "embedding"
    tp: Group | None = None

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.lora: LoRALayer | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [T, dim] for tokens int [T]; this rank's shard [T / tp, dim] under tensor parallelism."""
        weight, padding = local(self.weight), self.padding_idx
        if self.tp is None:
            return self._look_up(tokens, weight, padding)
        rows = weight.shape[0]
        shifted = tokens - self.tp.rank * rows
        inside = (shifted >= 0) & (shifted < rows)
        if padding is not None:
            padding -= self.tp.rank * rows
        out = self._look_up(torch.where(inside, shifted, 0), weight, padding if padding in range(rows) else None)
        return reduce_scatter(torch.where(inside.unsqueeze(-1), out, 0), self.tp)

    def _look_up(self, rows: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        """Return these rows of the weight, with the LoRA's term."""
        out = F.embedding(rows, weight, padding)
        if self.lora is None or not self.lora.enabled:
            return out
        a, b = self.lora.parts(out.dtype)
        return torch.addmm(out, F.embedding(rows, b, padding), a, alpha=self.lora.scale)
