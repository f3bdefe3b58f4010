"""LoRAs that a generator serves next to its model; each request uses one of them, or none.

The model's weights never change: a layer adds the LoRA's term to the rows of its requests. As in vLLM, requests of an
unloaded LoRA still finish with it, and it is freed after the last one.
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
    """A LoRA that requests can name. A later LoRA of the same name is another object.

    Attributes:
        key: its unique number, also its name in layers.
        version: version of its weights; sampled tokens carry it.
        stop_ids: ids that end an answer; None: the generator's ids.
        unfinished: number of its unfinished requests.
        requests, prompt_tokens, answer_tokens: counts since loading; answer tokens count when sampled.
    """

    name: str
    key: int
    version: int
    stop_ids: tuple[int, ...] | None = None
    unfinished: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0


class _LoRATensors(NamedTuple):
    """The LoRA of one matrix, with the attribute names of `LoRALayer`."""

    a: Tensor
    b: Tensor
    scale: float


class ServedMultiLoRALayer(MultiLoRALayer):
    """Loaded LoRAs of one matrix, or of one matrix of every expert. Writes to its argument `out`.

    They are not parameters, so that pushes and fingerprints of the model do not see them. Rows of a LoRA are
    contiguous, so that each run of rows needs one matmul and no sorting.
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
    """The LoRAs of a generator's replica.

    Attributes:
        limit: maximum LoRAs in memory, including unloaded ones that are still in use.
    """

    limit = 64

    def __init__(self, model: BaseArchonModel) -> None:
        self._model = model
        self._served: dict[str, ServedLoRA] = {}  # LoRAs that requests can name
        self._places: dict[ServedLoRA, list[dict[str, _LoRATensors]]] = {}  # layer entries of every LoRA in memory
        self._keys = itertools.count()

    @property
    def served(self) -> dict[str, ServedLoRA]:
        """LoRAs that requests can name, by name."""
        return dict(self._served)

    def find(self, name: str) -> ServedLoRA:
        """Return the LoRA of this name.

        Raises:
            UnknownLoRAError: none is loaded.
        """
        if name not in self._served:
            loaded = ", ".join(map(repr, self._served)) or "none"
            raise UnknownLoRAError(f"unknown LoRA {name!r:.200}; loaded: {loaded}")
        return self._served[name]

    def load(self, name: str, weights: LoRAWeights, version: int = 0) -> ServedLoRA:
        """Load a copy of a LoRA.

        Raises:
            RolloutError: the name is taken, too many are loaded, or the weights do not fit this model.
        """
        if name in self._served:
            raise RolloutError(f"LoRA {name!r:.200} is already loaded; unload it first, or load it in place")
        if len(self._places) >= self.limit:
            leaving = len(self._places) - len(self._served)
            raise RolloutError(
                f"{len(self._places)} LoRAs are loaded, the maximum"
                + (f", {leaving} of them until the last answer with them ends" if leaving else "")
                + "; unload one, or raise max_loras"
            )
        lora = ServedLoRA(name, next(self._keys), version, weights.stop_ids)
        self._put(lora, self._parts(weights))
        self._served[name] = lora
        return lora

    def replace(self, name: str, weights: LoRAWeights, version: int | None = None) -> ServedLoRA:
        """Replace the weights of a LoRA in place; `version` is by default the next one.

        Raises errors as `load` does.
        """
        lora = self.find(name)
        parts = self._parts(weights)
        self._remove(lora)
        self._put(lora, parts)
        lora.stop_ids = weights.stop_ids
        lora.version = lora.version + 1 if version is None else version
        return lora

    def unload(self, name: str) -> None:
        """Hide a LoRA from new requests, and free it once no request uses it."""
        lora = self.find(name)
        del self._served[name]
        if not lora.unfinished:
            self._remove(lora)

    def begin(self, lora: ServedLoRA, prompt_tokens: int) -> None:
        """Count a request that starts to use a LoRA."""
        lora.unfinished += 1
        lora.requests += 1
        lora.prompt_tokens += prompt_tokens

    def end(self, lora: ServedLoRA) -> None:
        """Count the end of a request with a LoRA."""
        lora.unfinished -= 1
        if not lora.unfinished and self._served.get(lora.name) is not lora:
            self._remove(lora)

    def rows(self, owners: Iterable[tuple[ServedLoRA | None, int]], total: int) -> LoRAMapping | None:
        """Return the LoRAs of all rows; None if no row has one.

        Args:
            owners: the LoRA of consecutive rows and their number, from the first row on; further rows have none.
            total: number of rows.
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
        """Return copies of the LoRA tensors by matrix, in the dtype and on the device of the matrix.

        Raises:
            RolloutError: they belong to another model.
        """
        parameters = dict(self._model.named_parameters())
        if any(map(is_lora, parameters)):
            raise RolloutError("the generator serves a model in LoRA training; it cannot load another LoRA")
        parts = {}
        for matrix, size in weights.sizes.items():
            a, b = (weights.tensors[name] for name in lora_parameter_names(matrix))
            if matrix not in parameters:
                raise RolloutError(f"the LoRA adapts {matrix!r}, which this model does not have")
            weight = parameters[matrix]
            *stack, out_features, in_features = weight.shape
            if (*a.shape, *b.shape) != (*stack, size.rank, in_features, *stack, out_features, size.rank):
                raise RolloutError(
                    f"the LoRA of {matrix!r} has shapes {tuple(a.shape)} and {tuple(b.shape)}; expected "
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
        """Return the tensors of the loaded LoRAs of a matrix, by LoRA key."""
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
