"""`modules_to_save` of PEFT: modules that are trained whole, next to a LoRA.

PEFT trains a copy of such a module and keeps the original. archon trains the module's parameters themselves, in at
least float32, and keeps the shards of the original in the compute dtype (`original_weights`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from archon.models.base import BaseArchonModel
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.layers.moe import GroupedExperts
from archon.models.lora.model import is_lora
from archon.models.lora.targets import VISION_PREFIX, LoRASize
from archon.parallel.fsdp import local_tensor, reshard
from archon.schema.errors import ConfigError

VALUE_HEAD = "score.weight"
"""The value head of a critic, which is always trained."""


def resolve_saved_modules(
    adapter: BaseStateDictAdapter, modules: Collection[str], sizes: Mapping[str, LoRASize], *, strict: bool = True
) -> tuple[str, ...]:
    """Return the native parameters of the modules that `modules_to_save` names, in the model's order.

    As in PEFT, a name matches each module of transformers' model whose full name ends with it, even within a word:
    `norm` matches `input_layernorm`.

    Args:
        adapter: adapter of the base model.
        modules: the names.
        sizes: LoRA sizes by native matrix name.
        strict: refuse a name that matches nothing, which PEFT ignores.

    Raises:
        ConfigError: a name matches nothing, or a parameter that cannot be trained next to a LoRA.
    """
    if not modules:
        return ()
    memory, tied = whole_adapter(adapter), tied_keys(adapter)
    keys = [*memory.hf_shapes()] if tied is None else [*memory.hf_shapes(), tied[1]]
    prefixes = {key: _modules_of(key) for key in keys}
    if strict and (unknown := [x for x in modules if not any(m.endswith(x) for p in prefixes.values() for m in p)]):
        leaves = sorted({key.split(".")[-2] for key in keys})
        raise ConfigError(
            f"modules_to_save has {unknown[0]!r}, which is none of this model's modules; expected names such as "
            f"{', '.join(leaves)}"
        )
    saved = [key for key in keys if any(module.endswith(x) for module in prefixes[key] for x in modules)]
    names = list(dict.fromkeys(target.name for key in saved for target in memory.hf_to_native(key)))
    experts = {name for name, module in adapter.meta_model.named_modules() if isinstance(module, GroupedExperts)}
    for name in names:
        problem = ""
        if name in sizes:
            problem = "it has a LoRA too; leave it out of targets or of modules_to_save"
        elif name in adapter.buffer_shapes:
            problem = "it is a balancing bias, which has no gradient; leave its module out"
        elif name.rpartition(".")[0] in experts:
            problem = "whole experts are not trained next to a LoRA; leave them out, or add them to targets"
        elif name.startswith(VISION_PREFIX):
            problem = "it belongs to a vision encoder, which is not trained next to a LoRA; leave it out"
        if problem:
            raise ConfigError(f"modules_to_save selects {memory.hf_names(name)[0]!r}: {problem}")
    return tuple(name for name in adapter.native_shapes if name in names and name != VALUE_HEAD)


def whole_adapter(adapter: BaseStateDictAdapter) -> BaseStateDictAdapter:
    """Return the adapter for transformers' model that also has the value head of a critic built from an actor."""
    memory = adapter.in_memory
    if memory.init_score:
        memory = copy.copy(memory)
        memory.init_score = False
    return memory


def _modules_of(key: str) -> list[str]:
    """Return the names of the modules that hold a parameter, outermost first."""
    parts = key.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def tied_keys(adapter: BaseStateDictAdapter) -> tuple[str, str] | None:
    """Return the keys of a tied embedding and head in transformers' model; None for other models."""
    names = adapter.in_memory.to_hf_map
    return (names["tok_embeddings.weight"], names["output.weight"]) if adapter.is_tied else None


def outer_modules(keys: Iterable[str]) -> list[str]:
    """Return the modules that hold parameters, without those inside another one."""
    modules = {key.rpartition(".")[0] for key in keys}
    return sorted(module for module in modules if modules.isdisjoint(_modules_of(module)))


def train_saved_modules(model: BaseArchonModel, names: Collection[str], dtype: torch.dtype) -> None:
    """Make the parameters `names` of a LoRA model on the meta device trainable, in `dtype`."""
    model.saved_modules = frozenset(names)
    for name in names:
        owner, _, parameter = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, parameter, nn.Parameter(getattr(module, parameter).detach().to(dtype)))
    model.tie_weights()


def trained_modules(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters outside of the LoRAs of a model: saved modules, and a critic's value head."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and not is_lora(name)}


def copy_originals(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies of this rank's shards of `trained_modules` in the compute dtype, before training."""
    return {name: local_tensor(p.detach()).to(dtype, copy=True) for name, p in trained_modules(model).items()}


@contextmanager
def original_weights(model: nn.Module, originals: Mapping[str, Tensor]) -> Iterator[None]:
    """Compute with the original weights of saved modules until the end of the block."""
    if not originals:
        yield
        return
    reshard(model)  # FSDP would keep using weights that it has gathered
    shards = {name: local_tensor(p.detach()) for name, p in trained_modules(model).items()}
    trained = {name: shard.clone() for name, shard in shards.items()}
    _copy(shards, originals)
    try:
        yield
    finally:
        reshard(model)
        _copy(shards, trained)


@torch.no_grad()
def _copy(shards: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    for name, shard in shards.items():
        shard.copy_(sources[name])
