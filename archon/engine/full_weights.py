"""The weights of a model in any layout as whole tensors. Every rank must consume what these methods yield."""

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
    """Gathers the weights of a model.

    Attributes:
        build: what made the model, and tells the ranks of a pipeline what the others hold.
        stored: the native names of the parameters in the model's checkpoint, in its order.
        stages: the ranks of the pipeline.
    """

    model: BaseArchonModel | StagedModel
    build: ModelBuilder
    stored: Collection[str]
    stages: Group

    def base(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """See `ArchonEngine.base_weights`."""
        own = {name: parameter for name, parameter in self.model.named_parameters() if not is_lora(name)}
        biases = expert_biases(self.model)
        if not isinstance(self.model, StagedModel):
            yield from full_tensors(own.items(), bucket_bytes)
            yield from biases.items()
            return
        whole, device = self.build.full_model(), self.build.device
        parameters = dict(whole.named_parameters())
        # A tied head is not stored; it is the embedding.
        like = {name: parameters[name] for name in self.stored}
        yield from full_tensors_across_stages(own, like, self.stages, device, bucket_bytes)
        wide = torch.promote_types(self.build.master_dtype, torch.float32)
        all_biases = {name: bias.to(wide) for name, bias in expert_biases(whole).items()}
        yield from full_tensors_across_stages(biases, all_biases, self.stages, device, bucket_bytes)

    def lora_weights(self, chosen: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yields (native name, whole tensor) of every adapter's a and b whose name is chosen."""
        own = {name: parameter for name, parameter in self.model.named_parameters() if chosen(name)}
        if not isinstance(self.model, StagedModel):
            return full_tensors(own.items())
        like = {name: p for name, p in self.build.full_model().named_parameters() if chosen(name)}
        return full_tensors_across_stages(own, like, self.stages, self.build.device, BUCKET_BYTES)
