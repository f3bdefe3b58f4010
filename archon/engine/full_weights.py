"""Whole weight tensors of a model in any layout; every rank must consume the iterators."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from archon.engine.initialize import BuiltEngine
from archon.models.layers.moe import expert_biases
from archon.models.lora.model import is_lora
from archon.parallel.gather import BUCKET_BYTES, full_tensors, full_tensors_across_stages
from archon.parallel.pipeline import StagedModel


def full_base_weights(built: BuiltEngine, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (native name, whole tensor) of the base weights and balancing biases."""
    local = {name: parameter for name, parameter in built.model.named_parameters() if not is_lora(name)}
    biases = expert_biases(built.model)
    if not isinstance(built.model, StagedModel):
        yield from full_tensors(local.items(), bucket_bytes)
        yield from biases.items()
        return
    # Ranks of a pipeline list the tensors of other stages by a model on the meta device.
    full_model, stages, device = built.builder.full_model(), built.ranks.pp, built.device
    parameters = dict(full_model.named_parameters())
    # A tied head is not stored, since it is the embedding.
    like = {name: parameters[name] for name in built.adapter.native_shapes}
    yield from full_tensors_across_stages(local, like, stages, device, bucket_bytes)
    wide = torch.promote_types(built.builder.master_dtype, torch.float32)
    all_biases = {name: bias.to(wide) for name, bias in expert_biases(full_model).items()}
    yield from full_tensors_across_stages(biases, all_biases, stages, device, bucket_bytes)


def full_lora_weights(built: BuiltEngine, is_selected: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Yield (native name, whole tensor) of the selected LoRA matrices a and b."""
    local = {name: parameter for name, parameter in built.model.named_parameters() if is_selected(name)}
    if not isinstance(built.model, StagedModel):
        return full_tensors(local.items())
    like = {name: p for name, p in built.builder.full_model().named_parameters() if is_selected(name)}
    return full_tensors_across_stages(local, like, built.ranks.pp, built.device, BUCKET_BYTES)
