"""Logits and every gradient of a random configuration against transformers'."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archon.models import BaseArchonModel, BaseStateDictAdapter
from archon.tools.check.oracle import (
    ContractError,
    build_pair,
    checkpoint_tensors,
    pack,
    random_config,
    reference_logits,
    relative_error,
)
from archon.tools.check.random_configs import random_lengths

FP32_TOLERANCE = 1e-5
"""Of max|a - b| / max|b| per tensor in float32: the same operations in another order; one ulp is 6e-8 and sums run over
fewer than 1e3 terms."""
ROUNDING = 4.0
"""How many times transformers' own rounding in float32 archon's may be, for tensors that FP32_TOLERANCE is too narrow
for: 1.8 seen, where a key's bias has a gradient that mostly cancels."""
SEEDS = range(18)


def parity(
    seed: int, model_type: str, reference: str | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Return max|a - b| / max|b| of the logits and of each parameter's gradient, by name.

    transformers runs one document at a time, with eager attention or SDPA; here all are packed. Where float32 differs
    by more than FP32_TOLERANCE, float64 of the same weights decides: archon's float32 may be off by ROUNDING times what
    transformers' own is, and then the difference given is float64's. Otherwise it stays that of float32.

    Args:
        reference: transformers' type that computes the same, by default `model_type`.

    Raises ContractError where parameters differ or a gradient of the reference is all zero.
    """
    config = random_config(seed, model_type, reference)
    hf_model, model, adapter = build_pair(
        config, attention="eager" if seed % 3 else "sdpa", seed=seed, dtype=dtype, model_type=model_type
    )
    found, wanted = _results(model, hf_model, adapter, seed)
    differences = {name: relative_error(found[name], wanted[name]) for name in found}
    beyond = [name for name, difference in differences.items() if not difference <= FP32_TOLERANCE]
    if beyond and dtype is torch.float32:
        exact, wanted_exact = _results(model.double(), hf_model.double(), adapter, seed)
        for name in beyond:
            rounding = relative_error(wanted[name].double(), wanted_exact[name])
            if relative_error(found[name].double(), wanted_exact[name]) <= ROUNDING * rounding:
                differences[name] = relative_error(exact[name], wanted_exact[name])
    return differences


def _results(
    model: BaseArchonModel, hf_model: Any, adapter: BaseStateDictAdapter, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return logits and gradients by native name: archon's, and transformers'."""
    lengths = random_lengths(seed)
    tokens, positions, cu_seqlens, longest = pack(lengths, model.args.vocab_size, seed)
    logits = model(tokens, positions, cu_seqlens, longest)
    expected = reference_logits(hf_model, tokens, lengths)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed)).to(expected.dtype)
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()

    found, wanted = {"logits": logits.detach()}, {"logits": expected.detach()}
    wanted |= adapter.from_hf(checkpoint_tensors(hf_model, gradients=True, adapter=adapter))
    for name, parameter in model.named_parameters():
        if name not in wanted:
            raise ContractError(f"transformers has no parameter for {name}")
        if parameter.grad is None or not wanted[name].abs().max() > 0:
            raise ContractError(f"the gradient of {name} is {'missing' if parameter.grad is None else 'all zero'}")
        found[name] = parameter.grad
    model.zero_grad()
    hf_model.zero_grad()
    return found, wanted
