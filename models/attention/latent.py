"""Latent keys and values, compressed for all heads (DeepSeek-V2: arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archon.models.lora.mapping import LoRAMapping


@dataclass(frozen=True)
class LatentKeys:
    """Compressed keys and values of every token.

    A head's key is [K_h c, r] and its value V_h c, for the latent c [C] and the rotated features r [R] of a row.
    Attention backends expect one width D, so expanded keys, values and queries are padded with zeros.

    Decoding absorbs K_h into the query instead: q_h^T K_h c = (K_h^T q_h)^T c, so attention runs on the cached rows.

    Attributes:
        rows: [T, 1, C + R], latent and rotated key features of each token; the cache stores them.
        expansion: the linear layer with weight [H (N + V), C], which holds K_h [N, C] and V_h [V, C] of each head.
        key_features, value_features: N, the unrotated features of a key, and V.
        lora_mapping: LoRA of each row, for a multi-LoRA layer.
    """

    rows: Tensor
    expansion: nn.Linear
    key_features: int
    value_features: int
    lora_mapping: LoRAMapping | None = None

    @property
    def rank(self) -> int:
        """Latent features C."""
        return self.expansion.in_features

    def pad(self, x: Tensor) -> Tensor:
        """Return x [..., n] padded with zeros to the larger width of keys and values."""
        width = max(self.key_features + self.rows.shape[-1] - self.rank, self.value_features)
        return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))

    def expand(self, rows: Tensor, lora_mapping: LoRAMapping | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values [T, H, D] of rows [T, 1, C + R] with LoRAs `lora_mapping`."""
        expanded = self.expansion(rows[:, 0, : self.rank], lora_mapping)
        expanded = expanded.unflatten(-1, (-1, self.key_features + self.value_features))
        keys, values = expanded.split((self.key_features, self.value_features), dim=-1)
        rotated = rows[..., self.rank :].expand(-1, keys.shape[1], -1)
        return self.pad(torch.cat((keys, rotated), dim=-1)), self.pad(values)

    def absorb(self, q: Tensor, lora_mapping: LoRAMapping | None = None) -> Tensor:
        """Return queries [B, H, C + R] for attention to latent rows, from q [B, H, N + R].

        Their products with rows equal the products of q with expanded keys. `lora_mapping` holds the LoRAs of the
        queries and of the rows that they attend to; the same holds for `expand_values`.
        """
        keys, rotated = q.split((self.key_features, q.shape[-1] - self.key_features), dim=-1)
        absorbed = torch.bmm(keys.transpose(0, 1), self._matrices()[:, : self.key_features])
        absorbed = absorbed.transpose(0, 1)
        for rows, a, b, keep in self._parts(lora_mapping):
            absorbed[rows] += keep(torch.einsum("bhn,hnr->bhr", keys[rows], b[:, : self.key_features])) @ a
        return torch.cat((absorbed, rotated), dim=-1)

    def expand_values(self, latents: Tensor, lora_mapping: LoRAMapping | None = None) -> Tensor:
        """Return weighted sums of values [B, H, V] from the weighted sums of latents [B, H, C]."""
        matrices = self._matrices()[:, self.key_features :]
        values = torch.bmm(latents.transpose(0, 1), matrices.transpose(1, 2)).transpose(0, 1)
        for rows, a, b, keep in self._parts(lora_mapping):
            values[rows] += torch.einsum("bhr,hvr->bhv", keep(latents[rows] @ a.t()), b[:, self.key_features :])
        return values

    def _parts(
        self, lora_mapping: LoRAMapping | None
    ) -> Iterator[tuple[slice, Tensor, Tensor, Callable[[Tensor], Tensor]]]:
        """Yield the rows of each enabled LoRA of the expansion, its a [r, C], b as [H, N + V, r], and a function.

        The function scales the products [B, H, r] of these rows with a or b. If only the device knows the rows of a
        LoRA, all LoRAs are one, and the function keeps the products of each row's LoRA.
        """
        several: Any = getattr(self.expansion, "lora", None)
        if lora_mapping is None or several is None or not several.enabled:
            return
        if lora_mapping.on_host is None:
            if (stacked := several.stacked) is not None:
                yield slice(None), stacked.a, self._by_head(stacked.b), partial(stacked.keep, lora_mapping=lora_mapping)
            return
        for name, first, last in lora_mapping.runs:
            if (part := several.part(name)) is not None:
                yield slice(first, last), part.a, self._by_head(part.b), partial(torch.mul, other=part.scale)

    def _matrices(self) -> Tensor:
        """Return the weight [H, N + V, C], with a single LoRA merged."""
        weight: Tensor = self.expansion.weight
        lora: Any = getattr(self.expansion, "lora", None)
        if lora is not None and lora.enabled and not isinstance(lora, nn.ModuleDict):
            weight = lora.merge(weight)
        return self._by_head(weight)

    def _by_head(self, weight: Tensor) -> Tensor:
        """Return a matrix of H (N + V) rows as [H, N + V, …]."""
        return weight.unflatten(0, (-1, self.key_features + self.value_features))
