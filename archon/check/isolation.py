"""Packed documents do not see each other: one changed, the others keep their logits bit for bit."""

from __future__ import annotations

import math

import torch

from archon.check.oracle import ContractError, pack
from archon.check.random_configs import draw_fields
from archon.check.round_trip import fresh_model
from archon.models import BaseArchonModel

LENGTHS = [9, 13, 1, 31]
# Experts process the tokens that chose them together, in products of other sizes: rounding of float64.
EXPERTS_TOLERANCE = 1e-12
SLOW_DECAY = 0.05


@torch.no_grad()
def slow_down(model: BaseArchonModel) -> None:
    """Set the decay of recurrent mixers to a slow one; a fast one would hide what leaks from document to document."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.fill_(math.log(SLOW_DECAY))


def check_isolation(seed: int, model_type: str) -> int:
    """Change each document in turn, in float64. Returns the number of documents.

    Raises ContractError where another document's logits change: by one bit, or with experts by more than rounding.
    """
    config = {"model_type": model_type} | draw_fields(seed, model_type)
    model = fresh_model(config, seed, torch.float64)
    slow_down(model)
    sparse = any(layer.feed_forward.n_experts for layer in model.layer_specs)
    vocab = model.args.vocab_size
    tokens, positions, cu_seqlens, longest = pack(LENGTHS, vocab, seed)
    with torch.no_grad():
        before = model(tokens, positions, cu_seqlens, longest).split(LENGTHS)
        for changed, document in enumerate(tokens.split(LENGTHS)):
            parts = list(tokens.split(LENGTHS))
            parts[changed] = (document + 1) % vocab
            after = model(torch.cat(parts), positions, cu_seqlens, longest).split(LENGTHS)
            for other, (old, new) in enumerate(zip(before, after, strict=True)):
                difference = float((old - new).abs().max() / old.abs().max())
                if other == changed and difference == 0:
                    raise ContractError(f"document {changed + 1} has the same logits with other tokens")
                if other != changed and difference > (EXPERTS_TOLERANCE if sparse else 0.0):
                    raise ContractError(
                        f"document {other + 1} changes by {difference:.1e} when document {changed + 1} does"
                    )
    return len(LENGTHS)
