"""A small model that is taught to answer in given words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy

from archon.models.base import BaseArchonModel


def teach(model: BaseArchonModel, pairs: Sequence[tuple[list[int], list[int]]], sure: float) -> None:
    """Fine-tune on (prompt, answer) in tokens until each token of each answer has a probability above `sure`."""
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in pairs])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    tokens = torch.tensor([[token for prompt, answer in pairs for token in prompt + answer]])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
    marks = torch.tensor([mark for prompt, answer in pairs for mark in [0] * len(prompt) + [1] * len(answer)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(800):
        logits = model(tokens, positions, bounds, int(lengths.max()))[0]
        losses = cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")[marks[1:] == 1]
        if torch.exp(-losses.max()) > sure:
            return
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    raise AssertionError(f"the model is no surer than {torch.exp(-losses.max()):.4f}")
