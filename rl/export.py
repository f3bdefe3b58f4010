"""Compares the logits of a model with those that transformers computes from its export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from archon.models.base import BaseArchonModel

LOGIT_TOLERANCE = 1e-5
"""The maximal difference between the float32 logits of archon and transformers, as `export_difference` returns it."""


@torch.no_grad()
def export_difference(model: BaseArchonModel, path: str | Path, documents: Sequence[Sequence[int]]) -> float:
    """Return max|a − b| / max|b| of the float32 logits of `model` and those of transformers with the export.

    Args:
        model: the trained actor with float32 weights, on any device.
        path: the export.
        documents: token ids, which transformers runs one by one and `model` packed.
    """
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
    device = next(model.parameters()).device
    tokens = torch.tensor([token for document in documents for token in document], device=device)
    lengths = torch.tensor([len(document) for document in documents])
    positions = torch.cat([torch.arange(int(n)) for n in lengths]).to(device)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().to(device)
    ours = model(tokens, positions, cu_seqlens, int(lengths.max())).cpu()
    expected = torch.cat([theirs(torch.tensor([list(document)])).logits[0] for document in documents])
    return float((ours - expected).abs().max() / expected.abs().max())
