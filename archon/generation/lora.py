"""LoRAs that a generator serves next to its model; each request uses one of them, or none.

The model's weights never change: a layer adds the LoRA's term to the rows of its requests. As in vLLM, requests of an
unloaded LoRA still finish with it, and its slot is free after the last one.

Every LoRA has a slot, and a layer has one tensor for the matrices of all slots. `Generator` computes the rows of one
LoRA after another, with views of that tensor. `DecodeStep`, where only the device knows the LoRA of a row, multiplies
every row by the matrices of all slots, and each row keeps the products of its slot: shapes and addresses are then the
same for every mix of LoRAs.
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
from archon.models.layers.matmul import grouped_linear, padded_group_width
from archon.models.layers.moe import GroupedExperts
from archon.models.lora.layers import MultiLoRALayer
from archon.models.lora.mapping import NO_LORA, LoRAMapping
from archon.models.lora.model import is_lora, lora_parameter_names
from archon.models.lora.targets import EMBEDDING, HEAD
from archon.schema.errors import RolloutError, UnknownLoRAError


@dataclass(eq=False)
class ServedLoRA:
    """A LoRA that requests can name. A later LoRA of the same name is another object.

    Attributes:
        slot: its index among the LoRAs in memory, also its name in layers.
        version: version of its weights; sampled tokens carry it.
        stop_ids: ids that end an answer; None: the generator's ids.
        unfinished: number of its unfinished requests.
        requests, prompt_tokens, answer_tokens: counts since loading; answer tokens count when sampled.
    """

    name: str
    slot: int
    version: int
    stop_ids: tuple[int, ...] | None = None
    unfinished: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0


@dataclass(eq=False)
class LoRASlots:
    """Slots that LoRAs are loaded into, the same ones in every layer.

    Attributes:
        count: number of slots, a power of two, so that loading a LoRA seldom moves the others.
        moves: how often `count` has changed, or a layer has allocated or freed its matrices.
    """

    count: int = 1
    moves: int = 0

    def resize(self, count: int) -> None:
        """Change the number of slots; layers with LoRAs must then move them."""
        self.count = count
        self.moves += 1

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all slots in layers."""
        return tuple(map(str, range(self.count)))


class _LoRATensors(NamedTuple):
    """The LoRA of one matrix, with the attribute names of `LoRALayer`."""

    a: Tensor
    b: Tensor
    scale: float


class StackedLoRAs(NamedTuple):
    """The LoRAs of one matrix in all n slots, padded with zeros to one rank r.

    Attributes:
        rank: r, the largest rank of this matrix, rounded up for grouped matmuls.
        a, b: [n r, in] and [out, n r]; [E, n r, in] and [E, out, n r] for E experts.
        scales: [n r], scale of each product with a row of `a`, in at least float32.
    """

    rank: int
    a: Tensor
    b: Tensor
    scales: Tensor

    def keep(self, low: Tensor, lora_mapping: LoRAMapping) -> Tensor:
        """Scale the products low [T, ..., n r] with `a` or `b` in place; set the products of other slots to 0."""
        others = lora_mapping.others(self.rank)
        return low.mul_(self.scales).masked_fill_(others.view(len(low), *[1] * (low.dim() - 2), -1), 0)


class ServedMultiLoRALayer(MultiLoRALayer):
    """Loaded LoRAs of one matrix, or of one matrix of every expert. Writes to its argument `out`.

    They are not parameters, so that pushes and fingerprints of the model do not see them.

    Attributes:
        parts: views of each LoRA's a and b, by the name of its slot.
        stacked: the same memory as matrices of all slots; None without LoRAs.
    """

    def __init__(self, slots: LoRASlots) -> None:
        super().__init__()
        self.parts: dict[str, _LoRATensors] = {}
        self.stacked: StackedLoRAs | None = None
        self._slots = slots

    def part(self, name: str) -> Any:
        """See `MultiLoRALayer.part`."""
        return self.parts.get(name)

    def put(self, name: str, new: _LoRATensors) -> None:
        """Copy a LoRA of this matrix into a slot."""
        rank = padded_group_width(new.a.shape[-2], new.a)
        if self.stacked is None or rank > self.stacked.rank:
            self.parts[name] = new
            self._allocate(rank)
        else:
            self._write(name, new)

    def remove(self, name: str) -> None:
        """Remove a LoRA, and free the memory with the last one."""
        del self.parts[name]
        if not self.parts:
            self.stacked = None
            self._slots.moves += 1

    def resize(self) -> None:
        """Move the LoRAs to as many slots as there are now."""
        if self.parts:
            assert self.stacked is not None
            self._allocate(self.stacked.rank)

    def _allocate(self, rank: int) -> None:
        """Move all LoRAs to new memory of slots of this rank."""
        n, (a, b, _) = self._slots.count, next(iter(self.parts.values()))
        self.stacked = StackedLoRAs(
            rank,
            a.new_zeros(*a.shape[:-2], n * rank, a.shape[-1]),
            b.new_zeros(*b.shape[:-1], n * rank),
            torch.ones(n * rank, device=a.device, dtype=torch.promote_types(a.dtype, torch.float32)),
        )
        self._slots.moves += 1
        for name, part in [*self.parts.items()]:
            self._write(name, part)

    def _write(self, name: str, new: _LoRATensors) -> None:
        stacked = self.stacked
        assert stacked is not None
        first = int(name) * stacked.rank
        columns = slice(first, first + stacked.rank)
        stacked.a[..., columns, :] = 0  # a LoRA of a higher rank may have been here
        stacked.b[..., columns] = 0
        stacked.scales[columns] = new.scale
        columns = slice(first, first + new.a.shape[-2])
        part = _LoRATensors(stacked.a[..., columns, :], stacked.b[..., columns], new.scale)
        part.a.copy_(new.a)
        part.b.copy_(new.b)
        self.parts[name] = part

    def forward(self, out: Tensor, x: Tensor, lora_mapping: LoRAMapping, rows: slice | None = None) -> Tensor:
        """See `MultiLoRALayer.forward`."""
        assert rows is None, "a generator's layers are whole"
        if lora_mapping.on_host is None:
            if (stacked := self.stacked) is not None:
                out.addmm_(stacked.keep(x @ stacked.a.t(), lora_mapping), stacked.b.t())
            return out
        # Rows of a LoRA are contiguous, so that each run of rows needs one matmul and no sorting.
        for name, first, last in lora_mapping.runs:
            if name in self.parts:
                _add(out[first:last], x[first:last], *self.parts[name])
        return out

    def add_to_experts(self, out: Tensor, x: Tensor, names: Sequence[str], counts: Tensor) -> Tensor:
        """See `MultiLoRALayer.add_to_experts`."""
        if names == self._slots.names:
            return self._add_slots_to_experts(out, x, counts)
        first = 0
        for group, count in enumerate(counts.tolist()):
            expert, index = divmod(group, len(names) + 1)
            if count and index < len(names) and names[index] in self.parts:
                a, b, scale = self.parts[names[index]]
                _add(out[first : first + count], x[first : first + count], a[expert], b[expert], scale)
            first += count
        return out

    def _add_slots_to_experts(self, out: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        """Do what `add_to_experts` does for the LoRAs of all slots, without `counts` on the host."""
        if (stacked := self.stacked) is None:
            return out
        names = self._slots.names
        per_expert = counts.unflatten(0, (-1, len(names) + 1))
        slot = torch.arange(len(names) + 1, device=counts.device).repeat(len(per_expert))
        ids = slot.repeat_interleave(counts, output_size=x.shape[0])
        low = stacked.keep(grouped_linear(x, stacked.a, per_expert.sum(1)), LoRAMapping(names, ids, counts))
        return out.add_(grouped_linear(low, stacked.b, per_expert.sum(1)))


def _add(out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Add scale * b a x to out [n, out] for x [n, in]."""
    out.addmm_(x @ a.t(), b.t(), alpha=scale)


class LoRAManager:
    """The LoRAs of a generator's replica.

    Attributes:
        limit: maximum LoRAs in memory, including unloaded ones that are still in use.
        slots: slots of the LoRAs in layers.
        changes: number of LoRAs that were loaded, replaced or removed so far.
    """

    limit = 64

    def __init__(self, model: BaseArchonModel) -> None:
        self._model = model
        self._served: dict[str, ServedLoRA] = {}  # LoRAs that requests can name
        self._layers: dict[ServedLoRA, list[ServedMultiLoRALayer]] = {}  # layers of every LoRA in memory
        self.slots = LoRASlots()
        self.changes = 0

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
        if len(self._layers) >= self.limit:
            leaving = len(self._layers) - len(self._served)
            raise RolloutError(
                f"{len(self._layers)} LoRAs are loaded, the maximum"
                + (f", {leaving} of them until the last answer with them ends" if leaving else "")
                + "; unload one, or raise max_loras"
            )
        parts = self._parts(weights)
        lora = ServedLoRA(name, self._free_slot(), version, weights.stop_ids)
        self._put(lora, parts)
        self._served[name] = lora
        return lora

    def replace(self, name: str, weights: LoRAWeights, version: int | None = None) -> ServedLoRA:
        """Replace the weights of a LoRA in place; `version` is by default the next one.

        Raises errors as `load` does.
        """
        lora = self.find(name)
        self._put(lora, self._parts(weights))
        lora.stop_ids = weights.stop_ids
        lora.version = lora.version + 1 if version is None else version
        return lora

    def unload(self, name: str) -> None:
        """Hide a LoRA from new requests, and free its slot once no request uses it."""
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
                ids[first : first + count] = names.setdefault(str(lora.slot), len(names))
            first += count
        return LoRAMapping.of(list(names), ids, next(self._model.parameters()).device) if names else None

    def _parts(self, weights: LoRAWeights) -> dict[str, _LoRATensors]:
        """Return copies of the LoRA tensors by matrix, in the dtype and on the device of the matrix.

        Raises:
            RolloutError: they belong to another model.
        """
        if weights.modules:
            raise RolloutError(
                "the LoRA has modules_to_save, and a generator that serves LoRAs by name shares all other weights; "
                "merge it with archon export --merge and serve the merged model"
            )
        parameters = dict(self._model.named_parameters())
        if any(map(is_lora, parameters)):
            raise RolloutError("the generator serves a model in LoRA training; it cannot load another LoRA")
        parts = {}
        for matrix, size in weights.sizes.items():
            if matrix in (EMBEDDING, HEAD):
                raise RolloutError(
                    f"the LoRA adapts {matrix!r}, and a generator that serves LoRAs by name does not support the "
                    "embedding and the head; merge it with archon export --merge and serve the merged model"
                )
            if size.dora:
                raise RolloutError(
                    "the LoRA has DoRA magnitudes, and a generator that serves LoRAs by name does not support them; "
                    "merge it with archon export --merge and serve the merged model"
                )
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
            a, b = (x.detach().to(weight.device, weight.dtype) for x in (a, b))
            if not (a.isfinite().all() and b.isfinite().all()):
                raise RolloutError(f"the LoRA of {matrix!r} has values that are not finite in {weight.dtype}")
            parts[matrix] = _LoRATensors(a, b, size.scale)
        return parts

    def _free_slot(self) -> int:
        """Return the first free slot; double the slots if none is free."""
        taken = {lora.slot for lora in self._layers}
        slot = next(slot for slot in itertools.count() if slot not in taken)
        if slot == self.slots.count:
            self.slots.resize(2 * self.slots.count)
            for layer in {layer for layers in self._layers.values() for layer in layers}:
                layer.resize()
        return slot

    def _put(self, lora: ServedLoRA, parts: Mapping[str, _LoRATensors]) -> None:
        """Write a LoRA to its slot, in place of the one there."""
        self.changes += 1
        before, self._layers[lora] = self._layers.get(lora, []), [self._layer(matrix) for matrix in parts]
        for layer, part in zip(self._layers[lora], parts.values(), strict=True):
            layer.put(str(lora.slot), part)
        for layer in before:
            if layer not in self._layers[lora]:
                layer.remove(str(lora.slot))

    def _remove(self, lora: ServedLoRA) -> None:
        self.changes += 1
        for layer in self._layers.pop(lora):
            layer.remove(str(lora.slot))
        if not self._layers:
            self.slots.resize(1)

    def _layer(self, matrix: str) -> ServedMultiLoRALayer:
        """Return the layer with the loaded LoRAs of a matrix."""
        owner, _, name = matrix.rpartition(".")
        module: Any = self._model.get_submodule(owner)
        if not isinstance(module, GroupedExperts):
            if module.lora is None:
                module.lora = ServedMultiLoRALayer(self.slots)
            layer = module.lora
        else:
            if module.lora is None:
                module.lora = nn.ModuleDict()
            if name not in module.lora:
                module.lora[name] = ServedMultiLoRALayer(self.slots)
            layer = module.lora[name]
        assert isinstance(layer, ServedMultiLoRALayer)
        return layer
