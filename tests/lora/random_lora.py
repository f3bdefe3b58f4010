"""Random adapters of a model's matrices, and the model with one of them added to its weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from archon.checkpoint.peft.export import LoRAWeights
from archon.models.base import BaseArchonModel
from archon.models.layers.linear import Linear
from archon.models.lora.model import lora_parameter_names, merge_lora_weights
from archon.models.lora.targets import EXPERT_MATRICES, LORA_ROLES, LoRASize


def matrices(model: nn.Module) -> list[str]:
    """The names of every matrix that can have an adapter."""
    modules = dict(model.named_modules())
    linear = [f"{name}.weight" for name, m in modules.items() if isinstance(m, Linear) and m.role in LORA_ROLES]
    own = dict(model.named_parameters())
    experts = [f"{name}.{w}" for name in modules if name.endswith(".experts") for w in EXPERT_MATRICES]
    return linear + [name for name in experts if name in own]  # without a gate there is no w1


def random_lora(model: nn.Module, seed: int, rank: int = 3, alpha: float = 6.0) -> LoRAWeights:
    """An adapter of every matrix that changes what the model says."""
    generator, own = torch.Generator().manual_seed(seed), dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name in matrices(model):
        *stack, out_features, in_features = own[name].shape
        shapes = ((*stack, rank, in_features), (*stack, out_features, rank))
        for part, shape in zip(lora_parameter_names(name), shapes, strict=True):
            tensors[part] = 0.15 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return LoRAWeights(dict.fromkeys(matrices(model), LoRASize(rank, alpha, False)), tensors)


def merged(model: BaseArchonModel, lora: LoRAWeights) -> BaseArchonModel:
    """A copy of the model with the adapter added to its weights: what the adapter alone computes."""
    whole = copy.deepcopy(model)
    state = dict(model.named_parameters())
    whole.load_state_dict(dict(merge_lora_weights(state.items(), lora.tensors, lora.sizes)), strict=False)
    return whole
