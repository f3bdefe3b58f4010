"""Training state as nested dictionaries of tensors and plain values, saved without pickle."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from archon.checkpoint.safetensors_file import LazyTensor, full_region
from archon.checkpoint.state_tree import Shard, select_region
from archon.engine.low_bit_adamw import MOMENTS, LowBitAdamW
from archon.engine.muon import Muon
from archon.models.layers.moe import expert_biases
from archon.models.lora.model import is_lora
from archon.parallel.fsdp import local_region, local_tensor
from archon.parallel.pipeline import StagedModel
from archon.schema.errors import CheckpointError

EMBEDDING = "tok_embeddings.weight"
NUMPY_STATE = ("kind", "keys", "position", "has_gauss", "cached")


def local_shard(tensor: Tensor) -> Tensor | Shard:
    """Return this rank's shard of a parameter or moment, with its region; not a copy."""
    region = local_region(tensor)
    local = local_tensor(tensor.detach())
    return local if region == full_region(tensor.shape) else Shard(local, tuple(tensor.shape), region)


def model_state(model: nn.Module) -> dict[str, Tensor | Shard]:
    """Return this rank's shards of parameters and balancing biases; tied weights appear as the embedding."""
    return {_source(model, name): local_shard(tensor) for name, tensor in _tensors(model).items()}


@torch.no_grad()
def load_model_state(
    model: nn.Module,
    state: Mapping[str, Tensor | Shard | LazyTensor],
    known: Collection[str] = (),
    *,
    any_dtype: bool = False,
) -> None:
    """Copy this rank's shard of each tensor into the parameter of the same name.

    Args:
        model: the initialized model.
        state: tensors by name, from a layout of any kind.
        known: the parameter names of the whole pipeline.
        any_dtype: convert dtypes in place of refusing them.

    Raises:
        CheckpointError: names, shapes or dtypes differ from the model's.
    """
    tensors = _tensors(model)
    sources = {name: _source(model, name) for name in tensors}
    _check_names("parameters", {*sources.values()}, state, known)
    for name, tensor in tensors.items():
        value = state[sources[name]]
        if tuple(tensor.shape) != tuple(value.shape) or (_dtype(value) != tensor.dtype and not any_dtype):
            raise CheckpointError(
                f"parameter {name!r} is {_dtype(value)} {tuple(value.shape)} in the checkpoint, "
                f"expected {tensor.dtype} {tuple(tensor.shape)}; it belongs to another model or dtype"
            )
    for name, tensor in tensors.items():
        local_tensor(tensor).copy_(select_region(state[sources[name]], local_region(tensor), f"parameter {name!r}"))


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor | Shard]]:
    """Return moments and step counts by parameter name, without copying; empty before the first step."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        _source(model, names[id(parameter)]): {key: local_shard(value) for key, value in values.items()}
        for parameter, values in optimizer.state.items()
    }


@torch.no_grad()
def load_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Mapping[str, Tensor | Shard | LazyTensor]],
    known: Collection[str] = (),
) -> None:
    """Copy moments and step counts to parameters by name; an empty state resets the optimizer."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = {name: p for name, p in model.named_parameters() if id(p) in trained}
    optimizer.state.clear()
    if not state:
        return
    sources = {name: _source(model, name) for name in parameters}
    _check_names("optimizer entries", {*sources.values()}, state, known)
    for name, parameter in parameters.items():
        values = dict(state[sources[name]])
        step = values.pop("step")
        if isinstance(optimizer, Muon):
            moments = Muon.new_moments(optimizer, parameter)
        elif isinstance(optimizer, LowBitAdamW):
            moments = LowBitAdamW.new_moments(optimizer, parameter)
        else:
            moments = {key: torch.empty_like(parameter) for key in MOMENTS}
        formats = {key: (x.dtype, tuple(x.shape)) for key, x in moments.items()}
        saved = {key: (_dtype(x), tuple(x.shape)) for key, x in values.items()}
        if saved != formats:
            raise CheckpointError(
                f"optimizer entry {name!r} is {_describe(saved)} in the checkpoint, expected {_describe(formats)}; was "
                "optimizer.kind or optimizer.moments changed, the layout of 8-bit moments, or the model?"
            )
        for key, moment in moments.items():
            region = local_region(moment)
            local_tensor(moment).copy_(select_region(values[key], region, f"optimizer entry {name!r}.{key}"))
        count = select_region(step, full_region(step.shape), f"optimizer entry {name!r}.step")
        # Keep AdamW's order: checkpoints are written in it, so a resumed run writes the same bytes.
        step_count = count.detach().to(local_tensor(parameter).device, copy=True)
        optimizer.state[parameter] = {"step": step_count, **moments}


def _describe(formats: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> str:
    return ", ".join(f"{key} {str(dtype).removeprefix('torch.')} {shape}" for key, (dtype, shape) in formats.items())


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state by name; frozen weights below a LoRA are left out."""
    parameters = dict(model.named_parameters())
    has_lora = any(map(is_lora, parameters))
    tensors = {name: p.detach() for name, p in parameters.items() if p.requires_grad or not has_lora}
    return tensors if has_lora else tensors | expert_biases(model)


def _source(model: nn.Module, name: str) -> str:
    """Return a tensor's name in a state; a tied head on a pipeline's last stage is the embedding."""
    tied = isinstance(model, StagedModel) and any(getattr(module, "tied", False) for module in model.modules())
    return EMBEDDING if tied and name == "output.weight" else name


def _dtype(value: Tensor | Shard | LazyTensor) -> torch.dtype:
    return value.data.dtype if isinstance(value, Shard) else value.dtype


def rng_state() -> dict[str, Any]:
    """Return the random state of Python, NumPy (if imported), torch and this process's GPUs."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": {"version": version, "words": list(words), "gauss": gauss}}
    if "numpy" in sys.modules:
        kind, keys, *position = sys.modules["numpy"].random.get_state()
        state["numpy"] = dict(zip(NUMPY_STATE, (kind, keys.tolist(), *position), strict=True))
    state["torch"] = torch.get_rng_state()
    state["cuda"] = [torch.cuda.get_rng_state(device) for device in _devices()]
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore an `rng_state`; generators outside the state are left unchanged."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    if "numpy" in state:
        import numpy as np

        kind, keys, *position = (state["numpy"][name] for name in NUMPY_STATE)
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *position))
    torch.set_rng_state(state["torch"].cpu())
    devices = _devices()
    if len(state["cuda"]) == len(devices):
        for device, x in zip(devices, state["cuda"], strict=True):
            torch.cuda.set_rng_state(x.cpu(), device)


def _devices() -> list[int]:
    """Return the GPUs with random generators of this process."""
    if not torch.cuda.is_available():
        return []
    several = dist.is_initialized() and dist.get_world_size() > 1
    return [torch.cuda.current_device()] if several else [*range(torch.cuda.device_count())]


def _check_names(kind: str, expected: Collection[str], actual: Collection[str], known: Collection[str]) -> None:
    missing, extra = sorted({*expected} - {*actual}), sorted({*actual} - {*expected, *known})
    if missing or extra:
        difference = [f"lacks {', '.join(missing[:3])}"] if missing else []
        difference += [f"has {', '.join(extra[:3])} in addition"] if extra else []
        if all(name.endswith("expert_bias") for name in missing + extra):
            holder, advice = ("this engine", "0") if missing else ("the checkpoint", "the rate of its run")
            raise CheckpointError(
                f"only {holder} has the routers' balancing biases ({(missing + extra)[0]}, …); set "
                f"router_bias_update_rate to {advice}"
            )
        raise CheckpointError(
            f"the checkpoint's {kind} are not this model's: it {' and '.join(difference)}; "
            "was it written for another model?"
        )
