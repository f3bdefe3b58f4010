"""Logits and every gradient of a random configuration against transformers'."""

from __future__ import annotations

import torch

from archon.check.oracle import (
    ContractError,
    build_pair,
    checkpoint_tensors,
    pack,
    random_config,
    reference_logits,
    relative,
)
from archon.check.random_configs import random_lengths

FP32_TOLERANCE = 1e-5
"""Of max|a - b| / max|b| per tensor in float32: the same operations in another order; one ulp is 6e-8 and sums run over
fewer than 1e3 terms."""
SEEDS = range(18)


def parity(
    seed: int, model_type: str, reference: str | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Returns max|a - b| / max|b| of the logits and of each parameter's gradient, by name.

    transformers runs one document at a time, with eager attention or SDPA; here all are packed.

    Args:
        reference: transformers' type that computes the same, by default `model_type`.

    Raises ContractError where parameters differ or a gradient of the reference is all zero.
    """
    config = random_config(seed, model_type, reference)
    theirs, ours, adapter = build_pair(
        config, attention="eager" if seed % 3 else "sdpa", seed=seed, dtype=dtype, model_type=model_type
    )
    lengths = random_lengths(seed)
    tokens, positions, cu_seqlens, longest = pack(lengths, ours.args.vocab_size, seed)
    logits = ours(tokens, positions, cu_seqlens, longest)
    expected = reference_logits(theirs, tokens, lengths)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()

    found = {"logits": relative(logits, expected)}
    wanted = adapter.from_hf(checkpoint_tensors(theirs, gradients=True, adapter=adapter))
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    if missing := gradients.keys() - wanted.keys():
        raise ContractError(f"transformers has no parameter for {sorted(missing)}")
    for name, gradient in gradients.items():
        if gradient is None or not wanted[name].abs().max() > 0:
            raise ContractError(f"the gradient of {name} is {'missing' if gradient is None else 'all zero'}")
        found[name] = relative(gradient, wanted[name])
    return found
