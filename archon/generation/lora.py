"""Adapters that a generator serves next to its model: each request has one of them, or none.

They stay apart from the model's weights, which are never touched: a layer adds to the rows of a request what the
request's own adapter adds. Requests of an adapter that is unloaded are still answered with it, and it is freed after
the last one, as vLLM does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from archon.checkpoint.peft.export import LoRAWeights
from archon.models.base import BaseArchonModel
from archon.models.layers.moe import GroupedExperts
from archon.models.lora.layers import MultiLoRALayer
from archon.models.lora.mapping import NO_LORA, LoRAMapping
from archon.models.lora.model import is_lora, lora_parameter_names
from archon.schema.errors import RolloutError, UnknownLoRAError


@dataclass(eq=False)
class ServedLoRA:
    """An adapter that requests can name. Another one of the same name, loaded later, is another object.

    Attributes:
        key: its number, and in layers its name, which no other has had.
        version: of its weights; tokens that are sampled with them carry it.
        unfinished: requests that are being answered with it.
        requests, prompt_tokens, answer_tokens: counts since it was loaded; of an answer what was sampled so far.
    """

    name: str
    key: int
    version: int
    unfinished: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0


class _LoRATensors(NamedTuple):
    """The adapter of one matrix, with the names of `LoRALayer`'s attributes."""

    a: Tensor
    b: Tensor
    scale: float


class ServedMultiLoRALayer(MultiLoRALayer):
    """The loaded adapters of one matrix, or of one matrix of every expert.

    They are no parameters: the model's own, which a trainer pushes and a fingerprint verifies, stay as they are. Rows
    of an adapter lie together, so that a product for each run of rows needs no sorting. Writes to its argument `out`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, _LoRATensors] = {}

    def part(self, name: str) -> Any:
        """See `MultiLoRALayer.part`."""
        return self.parts.get(name)

    def forward(self, out: Tensor, x: Tensor, lora_mapping: LoRAMapping, rows: slice | None = None) -> Tensor:
        """See `MultiLoRALayer.forward`."""
        assert rows is None, "a generator's layers are whole"
        for name, first, last in lora_mapping.runs:
            if name in self.parts:
                _add(out[first:last], x[first:last], *self.parts[name])
        return out

    def add_to_experts(self, out: Tensor, x: Tensor, names: Sequence[str], counts: Tensor) -> Tensor:
        """See `MultiLoRALayer.add_to_experts`."""
        first = 0
        for group, count in enumerate(counts.tolist()):
            expert, index = divmod(group, len(names) + 1)
            if count and index < len(names) and names[index] in self.parts:
                a, b, scale = self.parts[names[index]]
                _add(out[first : first + count], x[first : first + count], a[expert], b[expert], scale)
            first += count
        return out


def _add(out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Add scale * b a x to out [n, out] for x [n, in]."""
    out.addmm_(x @ a.t(), b.t(), alpha=scale)


class LoRAManager:
    """The adapters of a generator's model, its replica.

    Attributes:
        limit: adapters in memory at the same time; those count that are unloaded and still in use.
    """

    limit = 64

    def __init__(self, model: BaseArchonModel) -> None:
        self._model = model
        self._served: dict[str, ServedLoRA] = {}  # those that requests can name
        self._places: dict[ServedLoRA, list[dict[str, _LoRATensors]]] = {}  # where the parts of those in memory are
        self._keys = itertools.count()

    @property
    def served(self) -> dict[str, ServedLoRA]:
        """The adapters that requests can name, by name."""
        return dict(self._served)

    def find(self, name: str) -> ServedLoRA:
        """Return the adapter of this name. Raises UnknownLoRAError where none is loaded."""
        if name not in self._served:
            loaded = ", ".join(map(repr, self._served)) or "none"
            raise UnknownLoRAError(f"no adapter {name!r:.200} is loaded; loaded are: {loaded}")
        return self._served[name]

    def load(self, name: str, weights: LoRAWeights, version: int = 0) -> ServedLoRA:
        """Load a copy of an adapter's weights.

        Raises RolloutError for a name that is taken, for too many, and for weights that are not of this model.
        """
        if name in self._served:
            raise RolloutError(f"an adapter {name!r:.200} is loaded already; unload it first, or load it in place")
        if len(self._places) >= self.limit:
            leaving = len(self._places) - len(self._served)
            raise RolloutError(
                f"{len(self._places)} adapters are loaded, as many as allowed"
                + (f", {leaving} of them until the last answer with them ends" if leaving else "")
                + "; unload one, or raise max_loras"
            )
        lora = ServedLoRA(name, next(self._keys), version)
        self._put(lora, self._parts(weights))
        self._served[name] = lora
        return lora

    def replace(self, name: str, weights: LoRAWeights, version: int | None = None) -> ServedLoRA:
        """Replace the weights of an adapter in place; `version` is by default the next one. Raises as `load` does."""
        lora = self.find(name)
        parts = self._parts(weights)
        self._remove(lora)
        self._put(lora, parts)
        lora.version = lora.version + 1 if version is None else version
        return lora

    def unload(self, name: str) -> None:
        """Take an adapter away from new requests, and free it once no request uses it."""
        lora = self.find(name)
        del self._served[name]
        if not lora.unfinished:
            self._remove(lora)

    def begin(self, lora: ServedLoRA, prompt_tokens: int) -> None:
        """Note that a request with a prompt of so many tokens uses an adapter."""
        lora.unfinished += 1
        lora.requests += 1
        lora.prompt_tokens += prompt_tokens

    def end(self, lora: ServedLoRA) -> None:
        """Note that a request that used an adapter is over."""
        lora.unfinished -= 1
        if not lora.unfinished and self._served.get(lora.name) is not lora:
            self._remove(lora)

    def rows(self, owners: Iterable[tuple[ServedLoRA | None, int]], total: int) -> LoRAMapping | None:
        """Return the adapters of `total` rows; None if no row has one.

        Args:
            owners: the adapter of consecutive rows and their number, from the first row on; further rows have none.
        """
        names: dict[str, int] = {}
        ids = torch.full((total,), NO_LORA)
        first = 0
        for lora, count in owners:
            if lora is not None:
                ids[first : first + count] = names.setdefault(str(lora.key), len(names))
            first += count
        return LoRAMapping.of(list(names), ids, next(self._model.parameters()).device) if names else None

    def _parts(self, weights: LoRAWeights) -> dict[str, _LoRATensors]:
        """Return copies of an adapter's parts by matrix, in the matrix' dtype and on its device. Raises RolloutError
        for those of another model.
        """
        own = dict(self._model.named_parameters())
        if any(map(is_lora, own)):
            raise RolloutError("the generator's model has an adapter of its own, which its weights are pushed to")
        parts = {}
        for matrix, size in weights.sizes.items():
            a, b = (weights.tensors[name] for name in lora_parameter_names(matrix))
            if matrix not in own:
                raise RolloutError(f"the adapter is of {matrix!r}, which this model does not have")
            weight = own[matrix]
            *stack, out_features, in_features = weight.shape
            if (*a.shape, *b.shape) != (*stack, size.rank, in_features, *stack, out_features, size.rank):
                raise RolloutError(
                    f"the adapter of {matrix!r} has shapes {tuple(a.shape)} and {tuple(b.shape)}; expected "
                    f"{(*stack, size.rank, in_features)} and {(*stack, out_features, size.rank)}"
                )
            a, b = (x.detach().to(weight.device, weight.dtype, copy=True) for x in (a, b))
            parts[matrix] = _LoRATensors(a, b, size.scale)
        return parts

    def _put(self, lora: ServedLoRA, parts: Mapping[str, _LoRATensors]) -> None:
        self._places[lora] = [self._layer_parts(matrix) for matrix in parts]
        for place, part in zip(self._places[lora], parts.values(), strict=True):
            place[str(lora.key)] = part

    def _remove(self, lora: ServedLoRA) -> None:
        for place in self._places.pop(lora):
            del place[str(lora.key)]

    def _layer_parts(self, matrix: str) -> dict[str, _LoRATensors]:
        """Return the parts of the loaded adapters of a matrix, by the adapters' names in layers."""
        owner, _, name = matrix.rpartition(".")
        module: Any = self._model.get_submodule(owner)
        if not isinstance(module, GroupedExperts):
            if module.lora is None:
                module.lora = ServedMultiLoRALayer()
            return _parts_of(module.lora)
        if module.lora is None:
            module.lora = nn.ModuleDict()
        if name not in module.lora:
            module.lora[name] = ServedMultiLoRALayer()
        return _parts_of(module.lora[name])


def _parts_of(layer: Any) -> dict[str, _LoRATensors]:
    assert isinstance(layer, ServedMultiLoRALayer)
    return layer.parts
