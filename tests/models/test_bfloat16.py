"""In bfloat16 a family is as near to its float64 value as transformers is, with the same numbers kept wide."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.olmo3.modeling_olmo3 import apply_rotary_pos_emb

import archon
from archon.models.cpu.fused import rotate
from archon.models.spec import FAMILIES
from archon.tools.check.family import REFERENCES
from archon.tools.check.oracle import (
    EXPERT_FIELDS,
    build_pair,
    family_config,
    hf_model,
    pack,
    random_config,
    randomize_vectors,
    reference_logits,
)
from archon.tools.check.random_configs import random_lengths

SEEDS = range(3)
LIMIT = 1.1
"""Of archon's error over transformers': both round as often, at places whose errors are independent."""


def error_ratio(family: str, seed: int, folder: Path) -> float:
    """The median error of archon's bfloat16 logits over that of transformers', both against transformers in float64.

    The median, since a token that is routed to another expert has an error of its own size on either side.
    """
    config = random_config(seed, family, REFERENCES.get(family))
    torch.manual_seed(seed)
    exact = hf_model(config)
    randomize_vectors(exact)
    exact.save_pretrained(folder)
    has_experts = any(getattr(config, name, None) for name in EXPERT_FIELDS)
    options = {"experts_implementation": "eager"} if has_experts else {}
    # Loaded from a file, transformers keeps some parameters and buffers in float32.
    theirs = type(exact).from_pretrained(folder, dtype=torch.bfloat16, **options)
    (folder / "config.json").write_text(json.dumps(family_config(config, family)))
    ours = archon.load_model(folder, dtype=torch.bfloat16, text_only=True)
    exact.load_state_dict(theirs.state_dict())
    lengths = random_lengths(seed)
    tokens, positions, cu_seqlens, longest = pack(lengths, ours.args.vocab_size, seed)
    with torch.no_grad():
        wanted = reference_logits(exact.double(), tokens, lengths)
        found: list[Tensor] = [
            ours(tokens, positions, cu_seqlens, longest),
            reference_logits(theirs, tokens, lengths),
        ]
    our_error, their_error = (float((logits.double() - wanted).abs().median()) for logits in found)
    return our_error / their_error


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_are_no_farther_from_float64_than_those_of_transformers(family: str, tmp_path: Path) -> None:
    ratios = [error_ratio(family, seed, tmp_path / str(seed)) for seed in SEEDS]
    assert statistics.median(ratios) <= LIMIT, ratios


def test_olmo3_rounds_its_rotation_once_as_transformers_does() -> None:
    """Its cos and sin stay in float32; rounded, they would put a third of the rotated queries an ulp away."""
    kinds = ["full_attention", "sliding_attention"]
    rope = {kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in kinds}
    config = random_config(0, "olmo3", num_hidden_layers=2, layer_types=kinds, rope_parameters=rope)
    theirs, ours, _ = build_pair(config, dtype=torch.bfloat16)
    positions = torch.arange(2000)
    x = torch.randn(2000, 3, ours.args.head_dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotation = ours.ropes[0](positions, torch.bfloat16)
    rotary = type(theirs.model.rotary_emb)(config)  # in float32, as a loaded model's
    cos, sin = rotary(x, positions.unsqueeze(0), "full_attention")
    wanted, _ = apply_rotary_pos_emb(x.unsqueeze(0), x.unsqueeze(0), cos, sin, unsqueeze_dim=2)
    found = rotate(x, rotation.cos, rotation.sin)
    assert found.dtype == torch.bfloat16
    # A fused product and sum in float32 may round a tie the other way.
    assert (found != wanted[0]).float().mean() <= 1e-3
    narrow = rotate(x, rotation.cos.bfloat16(), rotation.sin.bfloat16())
    assert (narrow != wanted[0]).float().mean() > 0.2


def test_the_gradient_of_a_rotation_that_rounds_once_is_the_one_of_plain_operations() -> None:
    generator = torch.Generator().manual_seed(1)
    angles = torch.rand(7, 1, 4, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    x = torch.randn(7, 2, 10, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(7, 2, 10, generator=generator)
    (rotate(x, cos, sin) * weight).sum().backward()
    wide = x.detach().float().requires_grad_()
    first, second, rest = wide.split([4, 4, 2], dim=-1)
    plain = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
    (plain * weight.bfloat16()).sum().backward()
    assert x.grad is not None and wide.grad is not None
    assert torch.equal(x.grad, wide.grad.bfloat16())
