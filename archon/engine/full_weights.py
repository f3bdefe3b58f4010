"""Whole weight tensors of a model in any layout; every rank must consume the iterators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from archon.engine.build import ModelBuilder
from archon.models.base import BaseArchonModel
from archon.models.layers.moe import expert_biases
from archon.models.lora.model import is_lora
from archon.parallel.comm import Group
from archon.parallel.gather import BUCKET_BYTES, full_tensors, full_tensors_across_stages
from archon.parallel.pipeline import StagedModel


@dataclass(frozen=True)
class WeightGatherer:
    """Gatherer of a model's weights.

    Attributes:
        build: builder of the model; it lists the parameters of other pipeline stages.
        stored: native names of the checkpoint's parameters, in checkpoint order.
        stages: the ranks of the pipeline.
    """

    model: BaseArchonModel | StagedModel
    build: ModelBuilder
    stored: Collection[str]
    stages: Group

    def base(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the base weights; see `ArchonEngine.base_weights`."""
        local = {name: parameter for name, parameter in self.model.named_parameters() if not is_lora(name)}
        biases = expert_biases(self.model)
        if not isinstance(self.model, StagedModel):
            yield from full_tensors(local.items(), bucket_bytes)
            yield from biases.items()
            return
        full_model, device = self.build.full_model(), self.build.device
        parameters = dict(full_model.named_parameters())
        # A tied head is not stored, since it is the embedding.
        like = {name: parameters[name] for name in self.stored}
        yield from full_tensors_across_stages(local, like, self.stages, device, bucket_bytes)
        wide = torch.promote_types(self.build.master_dtype, torch.float32)
        all_biases = {name: bias.to(wide) for name, bias in expert_biases(full_model).items()}
        yield from full_tensors_across_stages(biases, all_biases, self.stages, device, bucket_bytes)

    def lora_weights(self, is_selected: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield (native name, whole tensor) of the selected LoRA matrices a and b."""
        local = {name: parameter for name, parameter in self.model.named_parameters() if is_selected(name)}
        if not isinstance(self.model, StagedModel):
            return full_tensors(local.items())
        like = {name: p for name, p in self.build.full_model().named_parameters() if is_selected(name)}
        return full_tensors_across_stages(local, like, self.stages, self.build.device, BUCKET_BYTES)
