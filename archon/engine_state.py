"""The state of a training run as nested dictionaries of tensors and plain values, which need no pickle to be stored."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from archon.parallel.fsdp import local_tensor
from archon.schema.errors import CheckpointError


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter by name, tied ones once: the live tensors, not copies."""
    return {name: local_tensor(parameter.detach()) for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_model_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy tensors into the parameters of the same names; `CheckpointError` unless names and shapes are exactly the
    model's."""
    own = model_state(model)
    _check_names("parameters", own, state)
    for name, tensor in own.items():
        if tensor.shape != state[name].shape or tensor.dtype != state[name].dtype:
            raise CheckpointError(
                f"parameter {name!r} is {state[name].dtype} {tuple(state[name].shape)} in the checkpoint, "
                f"expected {tensor.dtype} {tuple(tensor.shape)}; it belongs to another model or dtype"
            )
        tensor.copy_(state[name])


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Moments and step count by parameter name: live tensors; empty before the first step."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: {key: local_tensor(value) for key, value in values.items()}
        for parameter, values in optimizer.state.items()
    }


@torch.no_grad()
def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, dict[str, Tensor]]) -> None:
    """Copy moments and step counts to the parameters of the same names; an empty state is that of before the first
    step."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    if not state:
        return
    _check_names("optimiser entries", {name: p for name, p in parameters.items() if p.requires_grad}, state)
    for name, values in state.items():
        parameter = parameters[name]
        own: dict[str, Tensor] = {}
        for key, value in values.items():
            if key == "step":
                own[key] = value.detach().to(local_tensor(parameter).device, copy=True)
            else:
                if value.shape != local_tensor(parameter).shape:
                    raise CheckpointError(
                        f"optimiser entry {name!r}.{key} is {tuple(value.shape)} in the checkpoint, "
                        f"expected {tuple(local_tensor(parameter).shape)}; it belongs to another model"
                    )
                own[key] = torch.empty_like(parameter)
                local_tensor(own[key]).copy_(value)
        optimizer.state[parameter] = own


def rng_state() -> dict[str, Any]:
    """The state of every global random generator in use: python, numpy where imported, torch on the CPU and on each
    GPU."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": {"version": version, "words": list(words), "gauss": gauss}}
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = {
            "kind": kind,
            "keys": keys.tolist(),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        }
    state["torch"] = torch.get_rng_state()
    state["cuda"] = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo `rng_state`. A generator that the state does not know of is left alone."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    if "numpy" in state:
        import numpy as np

        saved = state["numpy"]
        keys = np.array(saved["keys"], dtype=np.uint32)
        np.random.set_state((saved["kind"], keys, saved["position"], saved["has_gauss"], saved["cached"]))
    torch.set_rng_state(state["torch"].cpu())
    if len(state["cuda"]) == torch.cuda.device_count() and state["cuda"]:
        torch.cuda.set_rng_state_all([x.cpu() for x in state["cuda"]])


def move_optimizer_state(optimizer: Optimizer, device: torch.device) -> None:
    """Move moments and step counts to `device`, in place."""
    for values in optimizer.state.values():
        for key, value in values.items():
            values[key] = value.to(device)


def _check_names(what: str, expected: dict[str, Any], given: dict[str, Any]) -> None:
    missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or extra:
        parts = [
            f"lacks {', '.join(missing[:3])}" if missing else "",
            f"has {', '.join(extra[:3])} besides" if extra else "",
        ]
        raise CheckpointError(
            f"the checkpoint's {what} are not this model's: it {' and '.join(p for p in parts if p)}; "
            "was it written for another model?"
        )
