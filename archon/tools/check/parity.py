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
"""Tolerance of max|a - b| / max|b| per tensor in float32: the same operations in another order.

One ulp is 6e-8, and sums have fewer than 1e3 terms.
"""
ROUNDING = 4.0
"""Allowed ratio between archon's and transformers' float32 rounding, for tensors beyond FP32_TOLERANCE.

Measured: 1.8 for the bias of keys, whose gradient mostly cancels.
"""
SEEDS = range(18)


def parity(
    seed: int, model_type: str, reference: str | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Return max|a - b| / max|b| of the logits and of each parameter's gradient, by name.

    transformers runs one document at a time, with eager attention or SDPA; archon runs all packed. If float32 differs
    by more than FP32_TOLERANCE, float64 with the same weights decides: archon's float32 error may be ROUNDING times
    transformers' float32 error, and the float64 difference is returned. Otherwise the float32 difference is returned.

    Args:
        seed: seed of configuration, weights and documents.
        model_type: type of the family.
        dtype: dtype of both models.
        reference: equivalent transformers type, by default `model_type`.

    Raises:
        ContractError: parameters differ or a gradient of the reference is all zero.
    """
    config = random_config(seed, model_type, reference)
    hf_model, model, adapter = build_pair(
        config, attention="eager" if seed % 3 else "sdpa", seed=seed, dtype=dtype, model_type=model_type
    )
    actual, expected = _results(model, hf_model, adapter, seed)
    differences = {name: relative_error(actual[name], expected[name]) for name in actual}
    beyond = [name for name, difference in differences.items() if not difference <= FP32_TOLERANCE]
    if beyond and dtype is torch.float32:
        exact, wanted_exact = _results(model.double(), hf_model.double(), adapter, seed)
        for name in beyond:
            rounding = relative_error(expected[name].double(), wanted_exact[name])
            if relative_error(actual[name].double(), wanted_exact[name]) <= ROUNDING * rounding:
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

    results, references = {"logits": logits.detach()}, {"logits": expected.detach()}
    references |= adapter.from_hf(checkpoint_tensors(hf_model, gradients=True, adapter=adapter))
    for name, parameter in model.named_parameters():
        if name not in references:
            raise ContractError(f"transformers has no parameter for {name}")
        if parameter.grad is None or not references[name].abs().max() > 0:
            raise ContractError(f"the gradient of {name} is {'missing' if parameter.grad is None else 'all zero'}")
        results[name] = parameter.grad
    model.zero_grad()
    hf_model.zero_grad()
    return results, references
