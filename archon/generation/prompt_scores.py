"""Logprobs of prompt tokens, for evaluations and teachers that score text instead of sampling it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from archon.generation.images import PromptImages
from archon.generation.types import TopLogprobs
from archon.models.attention.meta import PackedAttention
from archon.models.base import BaseArchonModel, ModelInputs
from archon.models.lora.mapping import LoRAMapping
from archon.models.vision.images import PackedImages
from archon.parallel.transfer import to_device_async

_MAX_LOGITS = 1 << 24
"""Maximum number of logits computed at once."""


@dataclass
class PromptScores:
    """Scores of n tokens: n − 1 values, from the second token on.

    Attributes:
        logprobs: log_softmax(logits / temperature) of each token, in at least float32.
        top_tokens, top_logprob_values: the most likely token at its place, and its logprob.
        top: the most likely tokens at each place with their logprobs, the most likely first; empty unless requested.
    """

    logprobs: list[float]
    top_tokens: list[int]
    top_logprob_values: list[float]
    top: list[TopLogprobs] = field(default_factory=list)


@torch.inference_mode()
def score_prompt(
    model: BaseArchonModel,
    tokens: list[int],
    temperature: float = 1.0,
    lora_mapping: LoRAMapping | None = None,
    prompt_images: PromptImages | None = None,
    top: int = 0,
) -> PromptScores:
    """Score `tokens` as one document, optionally with `lora_mapping` and images, without a cache.

    `top` is the number of most likely tokens to return at each place.
    """
    device, n = next(model.parameters()).device, len(tokens)
    scores = PromptScores([], [], [])
    if n < 2:
        return scores
    ids = to_device_async(torch.tensor(tokens), device)
    boundaries = to_device_async(torch.tensor([0, n], dtype=torch.int32), device)
    attention = PackedAttention(boundaries, n, model.args.attn_type)
    attention.lora_mapping = lora_mapping
    positions, images = torch.arange(n, device=device), None
    if prompt_images is not None:
        positions = to_device_async(torch.from_numpy(prompt_images.positions), device)
        image = model.args.image_format
        assert image is not None
        images = PackedImages.from_images(torch.tensor(tokens), prompt_images.images, image).to(device)
    hidden = model.hidden_states(ModelInputs(ids, positions, attention, images))[:-1]
    assert model.output is not None, "an engine generates with an actor"
    block = max(1, _MAX_LOGITS // model.args.vocab_size)
    for rows, labels in zip(hidden.split(block), ids[1:].split(block), strict=True):
        logits = model.output(rows)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logprobs = (wide / temperature).log_softmax(-1)
        best = logprobs.max(-1)
        scores.logprobs += logprobs.gather(1, labels.unsqueeze(1)).squeeze(1).tolist()
        scores.top_tokens += best.indices.tolist()
        scores.top_logprob_values += best.values.tolist()
        if top:
            likely = logprobs.topk(min(top, logprobs.shape[-1]))
            rows_of_pairs = zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
            scores.top += [list(zip(ids_, values, strict=True)) for ids_, values in rows_of_pairs]
    return scores
