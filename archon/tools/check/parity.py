"""Logits and all gradients of random configurations, compared with transformers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from archon.models import BaseArchonModel, BaseStateDictAdapter
from archon.tools.check.oracle import (
    ContractError,
    InFloat64,
    build_pair,
    checkpoint_tensors,
    pack,
    random_config,
    reference_logits,
    relative_error,
)
from archon.tools.check.random_configs import random_lengths

FP32_TOLERANCE = 1e-5
"""Maximum max|a - b| / max|b| per float32 tensor: one ulp is 6e-8, and reordered sums have fewer than 1e3 terms."""
ROUNDING = 4.0
"""Maximum ratio of archon's float32 rounding to transformers', for tensors beyond FP32_TOLERANCE.

The largest observed ratio is 1.8, for the gradient of a key bias, which mostly cancels."""
SEEDS = range(18)


def parity(
    seed: int, model_type: str, reference: str | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Return max|a - b| / max|b| of the logits and of each parameter's gradient, by name.

    transformers runs one document at a time, with eager attention or SDPA; archon packs all documents. If a float32
    difference exceeds FP32_TOLERANCE, both models run in float64, transformers under `InFloat64`. If archon's float32
    error is at most ROUNDING times transformers' float32 error, the float64 difference replaces the float32 difference.

    Args:
        seed: seed of configuration, weights and documents.
        model_type: type of archon's family.
        reference: equivalent type in transformers; by default `model_type`.
        dtype: dtype of the weights.

    Raises:
        ContractError: the models have different parameters, or a reference gradient is all zero.
    """
    config = random_config(seed, model_type, reference)
    hf_model, model, adapter = build_pair(
        config, attention="eager" if seed % 3 else "sdpa", seed=seed, dtype=dtype, model_type=model_type
    )
    actual, expected = _results(model, hf_model, adapter, seed)
    differences = {name: relative_error(actual[name], expected[name]) for name in actual}
    beyond = [name for name, difference in differences.items() if not difference <= FP32_TOLERANCE]
    if beyond and dtype is torch.float32:
        actual64, expected64 = _results(model.double(), hf_model.double(), adapter, seed)
        for name in beyond:
            rounding = relative_error(expected[name].double(), expected64[name])
            if relative_error(actual[name].double(), expected64[name]) <= ROUNDING * rounding:
                differences[name] = relative_error(actual64[name], expected64[name])
    return differences


@torch.no_grad()
def first_difference(seed: int, model_type: str, reference: str | None = None) -> str:
    """Return the end of an error message: the first layer with another output than the transformers model."""
    config = random_config(seed, model_type, reference)
    hf_model, model, _ = build_pair(config, seed=seed, dtype=torch.float64, model_type=model_type)
    tokens = torch.randint(model.args.vocab_size, (9,), generator=torch.Generator().manual_seed(seed))
    # transformers returns the input of each layer, and the output of the final norm.
    expected = hf_model(input_ids=tokens[None], use_cache=False, output_hidden_states=True).hidden_states
    actual: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, inputs: actual.append(inputs[0])) for block in model.layers.values()
    ]
    if model.norm is not None:
        hooks.append(model.norm.register_forward_hook(lambda _, inputs, output: actual.append(output)))
    model(tokens, torch.arange(9), torch.tensor([0, 9], dtype=torch.int32), 9)
    for hook in hooks:
        hook.remove()
    if len(actual) != len(expected):
        return ""
    layers = [f"layer {layer}" for layer in range(len(actual) - 2)]
    names = ["the embedding", *layers, "the last layer or the final norm"]
    for name, states, reference_states in zip(names, actual, expected, strict=True):
        if relative_error(states, reference_states[0]) > FP32_TOLERANCE:
            return f"; the first difference is in {name}"
    return "; the first difference is in the head"


def _results(
    model: BaseArchonModel, hf_model: Any, adapter: BaseStateDictAdapter, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return logits and gradients of archon and of transformers, by native name."""
    lengths = random_lengths(seed)
    tokens, positions, cu_seqlens, longest = pack(lengths, model.args.vocab_size, seed)
    logits = model(tokens, positions, cu_seqlens, longest)
    with InFloat64() if logits.dtype is torch.float64 else nullcontext():
        hf_logits = reference_logits(hf_model, tokens, lengths)
    weight = torch.randn(hf_logits.shape, generator=torch.Generator().manual_seed(seed)).to(hf_logits.dtype)
    (logits * weight).sum().backward()
    (hf_logits * weight).sum().backward()

    actual, expected = {"logits": logits.detach()}, {"logits": hf_logits.detach()}
    expected |= adapter.from_hf(checkpoint_tensors(hf_model, gradients=True, adapter=adapter))
    for name, parameter in model.named_parameters():
        if name not in expected:
            raise ContractError(f"transformers has no parameter for {name}")
        if parameter.grad is None or not expected[name].abs().max() > 0:
            raise ContractError(f"the gradient of {name} is {'missing' if parameter.grad is None else 'all zero'}")
        actual[name] = parameter.grad
    model.zero_grad()
    hf_model.zero_grad()
    return actual, expected
