"""From logits to tokens: temperature, top-k, top-p, and noise that depends on nothing but the request.

Sampling inverts the cumulative distribution at a uniform number that is a hash of (seed of the request, index of the
token). The noise is therefore the same whatever else is in the batch, after a preemption and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from archon.schema.errors import NotFiniteError

# Inverse sampling sums the distribution in blocks of this many tokens: one pass over the vocabulary, then one block.
_BLOCK = 128


def counter_uniform(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Uniform float64 numbers in [0, 1), one for each (seed, index) pair of uint64; 53 random bits each.

    The finaliser of SplitMix64 (Steele, Lea, Flood 2014) over the seed, then over its sum with the index.
    """
    mixed = _splitmix64(_splitmix64(seeds.astype(np.uint64)) + indices.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass
class SamplingParams:
    """Parameters of a batch of R rows, as host arrays."""

    temperature: np.ndarray  # float64 [R], > 0
    greedy: np.ndarray  # bool [R]
    top_p: np.ndarray  # float64 [R], 1 where unused
    top_k: np.ndarray  # int64 [R], 0 where unused
    seed: np.ndarray  # uint64 [R]
    index: np.ndarray  # uint64 [R], index of the token within its answer
    banned: list[tuple[int, list[int]]]  # (row, token ids that must not be sampled)


def sample(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Tokens int64 [R] and their logprobs [R] for logits [R, V].

    The logprob is `log_softmax(logits / temperature)` over the full vocabulary, in float32 (float64 for float64
    logits): what the trainer's head computes, whatever top-k, top-p and bans did to the choice.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if (params.temperature != 1.0).any():
        temperature = torch.from_numpy(params.temperature).to(scores.device, scores.dtype)
        scores = scores / temperature[:, None]
    log_normaliser = torch.logsumexp(scores, dim=-1)
    if not bool(log_normaliser.isfinite().all()):
        rows = (~log_normaliser.isfinite()).nonzero()[:, 0].tolist()
        raise NotFiniteError(f"logits of rows {rows[:8]} of {len(logits)} are not finite; the weights are damaged")

    choices = scores
    if params.banned:
        choices = scores.clone()
        for row, ids in params.banned:
            choices[row, ids] = -torch.inf
    if params.greedy.all():
        tokens = choices.argmax(dim=-1)
    else:
        tokens = _draw(choices, log_normaliser, params)
    logprobs = scores.gather(1, tokens[:, None])[:, 0] - log_normaliser
    return tokens, logprobs


def _draw(choices: Tensor, log_normaliser: Tensor, params: SamplingParams) -> Tensor:
    probs = torch.exp(choices - log_normaliser[:, None])
    filtered = np.flatnonzero((params.top_p < 1) | (params.top_k > 0))
    if filtered.size:
        rows = torch.from_numpy(filtered).to(probs.device)
        top_k = torch.from_numpy(params.top_k[filtered]).to(probs.device)
        top_p = torch.from_numpy(params.top_p[filtered]).to(probs.device)
        probs[rows] = filter_top_k_top_p(probs[rows], top_k, top_p)
    uniform = torch.from_numpy(counter_uniform(params.seed, params.index)).to(probs.device)
    tokens = invert_cumulative(probs, uniform)
    if params.greedy.any():
        greedy = torch.from_numpy(params.greedy).to(probs.device)
        tokens = torch.where(greedy, choices.argmax(dim=-1), tokens)
    return tokens


def filter_top_k_top_p(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities [R, V] with everything outside the top k, then outside the nucleus of what is left, set to 0.

    top_k int64 [R], 0 for no limit; top_p [R]. A token stays while the renormalised probability of those before it is
    below top_p (Holtzman et al. 2020), so the most likely one always stays. Ties go to the lower token id.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    limit = torch.where(top_k > 0, top_k, probs.shape[-1])
    ordered = ordered.masked_fill(rank >= limit[:, None], 0)
    mass = ordered.double().cumsum(dim=-1)
    before = (mass - ordered) / mass[:, -1:]
    # A nucleus of 1 keeps everything, also where rounding takes `before` to 1.
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (top_p[:, None] < 1), 0)
    return torch.zeros_like(probs).scatter_(1, order, ordered)


def invert_cumulative(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token of each row of probs [R, V] (need not sum to 1) whose cumulative interval holds uniform [R] in [0, 1).

    Sums are float64. A token of probability 0 is never returned.
    """
    rows, vocab = probs.shape
    padded = torch.nn.functional.pad(probs, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    mass = padded.sum(dim=-1, dtype=torch.float64)
    running = mass.cumsum(dim=-1)
    total = running[:, -1]
    below_one = 1 - torch.finfo(torch.float64).eps
    target = torch.minimum(uniform * total, total * below_one)
    block = torch.searchsorted(running, target[:, None], right=True)
    start = (running.gather(1, block) - mass.gather(1, block))[:, 0]
    inside = padded.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0].double().cumsum(dim=-1)
    # The block's own sum may round differently from its share of the running sum; stay strictly inside it.
    offset = torch.minimum((target - start).clamp_(min=0), inside[:, -1] * below_one)
    return block[:, 0] * _BLOCK + torch.searchsorted(inside, offset[:, None], right=True)[:, 0]
