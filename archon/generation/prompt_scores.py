"""The logprobs of given tokens, for evaluations and teachers that read prompts in place of sampling answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from archon.generation.pictures import PromptPictures
from archon.models.adapter_rows import AdapterRows
from archon.models.attention.meta import PackedAttention
from archon.models.base import BaseArchonModel, given_inputs
from archon.models.vision.images import PackedImages
from archon.parallel.transfer import to_device_async

_MAX_LOGITS = 1 << 24
"""Elements of logits that are computed at once."""


@dataclass
class PromptScores:
    """Of n tokens, by their context, for the n − 1 from the second on.

    Attributes:
        logprobs: log_softmax(logits / temperature) of each token, in at least float32.
        best_tokens, best_logprobs: the most likely token in its place, and its logprob.
    """

    logprobs: list[float]
    best_tokens: list[int]
    best_logprobs: list[float]


@torch.inference_mode()
def score_prompt(
    model: BaseArchonModel,
    tokens: list[int],
    temperature: float = 1.0,
    adapters: AdapterRows | None = None,
    pictures: PromptPictures | None = None,
) -> PromptScores:
    """Returns the scores of `tokens`, which may have `adapters` and pictures, as one document, without a cache."""
    device, n = next(model.parameters()).device, len(tokens)
    scores = PromptScores([], [], [])
    if n < 2:
        return scores
    ids = to_device_async(torch.tensor(tokens), device)
    boundaries = to_device_async(torch.tensor([0, n], dtype=torch.int32), device)
    attention = PackedAttention(boundaries, n, model.args.attn_type)
    attention.adapters = adapters
    positions, images = torch.arange(n, device=device), None
    if pictures is not None:
        positions = to_device_async(torch.from_numpy(pictures.positions), device)
        image = model.args.image_format
        assert image is not None
        images = PackedImages.of_pictures(torch.tensor(tokens), pictures.pictures, image).to(device)
    hidden = model.hidden_states(ids, positions, attention, **given_inputs(images=images))[:-1]
    assert model.output is not None, "an engine generates with an actor"
    block = max(1, _MAX_LOGITS // model.args.vocab_size)
    for rows, labels in zip(hidden.split(block), ids[1:].split(block), strict=True):
        logits = model.output(rows)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logprobs = (wide / temperature).log_softmax(-1)
        best = logprobs.max(-1)
        scores.logprobs += logprobs.gather(1, labels.unsqueeze(1)).squeeze(1).tolist()
        scores.best_tokens += best.indices.tolist()
        scores.best_logprobs += best.values.tolist()
    return scores
