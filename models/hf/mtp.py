"""Checkpoint names of multi-token-prediction (MTP) layers, see `archon.models.mtp`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from archon.models.hf.fused_tensors import Fused
from archon.models.hf.names import HFMap


@dataclass(frozen=True)
class MTPNames:
    """Names of MTP layers in the checkpoints of a family.

    Attributes:
        block: prefix of the weights of a layer's block; `{}` is the number of the layer.
        outside: key templates of the other weights by their names in `MTPLayer`.
        copies: key templates of tensors that equal a parameter of the trunk, by that parameter.
        counts_from_trunk: the first MTP layer has the number after the trunk's last layer, else 0.
        most: the most layers that the names can describe.
    """

    block: str
    outside: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)
    counts_from_trunk: bool = False
    most: int | None = None

    def prefix(self, layer: int, n_layers: int) -> str:
        """Return the prefix of the block of an MTP layer (from 0) after a trunk of `n_layers`."""
        return self.block.format(layer + n_layers * self.counts_from_trunk)

    def count(self, keys: Iterable[str], n_layers: int) -> int:
        """Return the number of MTP layers after a trunk of `n_layers` that `keys` of a checkpoint have."""
        # One match per key: DeepSeek-V3 has 91,000 keys.
        number = re.compile(re.escape(self.block).replace(r"\{\}", "([0-9]{1,9})"))
        numbers = {int(match[1]) for key in keys if (match := number.match(key))}
        return sum(layer >= n_layers * self.counts_from_trunk for layer in numbers)

    def complete(self, hf_map: HFMap, count: int, n_layers: int) -> HFMap:
        """Return the map of a family with the names of `count` MTP layers."""
        names = dict(hf_map)
        for layer in range(count):
            number = layer + n_layers * self.counts_from_trunk
            for hf, entry in hf_map.items():
                parts = entry.parts if isinstance(entry, Fused) else (entry or "",)
                if all(part.startswith("layers.{}.") for part in parts):
                    native = tuple(part.replace("layers.{}.", f"mtp.{layer}.block.", 1) for part in parts)
                    key = self.prefix(layer, n_layers) + hf.partition("layers.{}.")[2]
                    names[key] = replace(entry, parts=native) if isinstance(entry, Fused) else native[0]
            names |= {hf.format(number): f"mtp.{layer}.{native}" for native, hf in self.outside.items()}
        return names

    def copied(self, count: int, n_layers: int) -> dict[str, str]:
        """Return the parameter of the trunk that each copy in a checkpoint of `count` MTP layers equals, by key."""
        numbers = [layer + n_layers * self.counts_from_trunk for layer in range(count)]
        return {hf.format(number): native for native, hf in self.copies.items() for number in numbers}


DEEPSEEK_MTP = MTPNames(
    block="model.layers.{}.",
    outside={
        "enorm.weight": "model.layers.{}.enorm.weight",
        "hnorm.weight": "model.layers.{}.hnorm.weight",
        "eh_proj.weight": "model.layers.{}.eh_proj.weight",
        "norm.weight": "model.layers.{}.shared_head.norm.weight",
    },
    copies={
        "tok_embeddings.weight": "model.layers.{}.embed_tokens.weight",
        "output.weight": "model.layers.{}.shared_head.head.weight",
    },
    counts_from_trunk=True,
)
"""Names of DeepSeek-V3 and GLM-4.5."""

QWEN_MTP = MTPNames(
    block="mtp.layers.{}.",
    outside={
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "norm.weight": "mtp.norm.weight",
    },
    most=1,
)
"""Names of Qwen3-Next and Qwen3.5; the projection and the norms have no layer number."""
