"""Sample tokens from logits: temperature, top-k, top-p, and random numbers that depend only on the request.

Sampling inverts the cumulative distribution at a uniform number, a hash of (seed of the request, index of the token).
It does not depend on the other sequences of the batch, and is the same after a preemption or a resume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from archon.generation.types import Constraint, GenerationHyperparameters, TopLogprobs
from archon.models.cpu import operations
from archon.parallel.transfer import to_device_async
from archon.schema.errors import NotFiniteError

# Maximum logits sampled at once, which bounds the memory for large vocabularies.
MAX_SAMPLED_ELEMENTS = 1 << 24

# Inverse sampling first sums the distribution in blocks of this many tokens, then searches one block.
_BLOCK = 128


def counter_uniform(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return uniform float64 numbers in [0, 1) of 53 random bits, one for each (seed, index) pair of uint64.

    Applies the finalizer of SplitMix64 (Steele, Lea, Flood 2014) to the seed, then to its sum with the index.
    """
    mixed = _splitmix64(_splitmix64(seeds.astype(np.uint64)) + indices.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class LogitChanges:
    """Logit bias, penalties, `min_p` and constraint of a request, in the order and by the formulas of vLLM.

    `output` is the answer so far; it grows in place.
    """

    gconfig: GenerationHyperparameters
    prompt: Sequence[int]
    output: Sequence[int]
    constraint: Constraint | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Return logits [V] with bias and penalties, and -inf for tokens that the constraint excludes."""
        g, changed = self.gconfig, logits.clone()
        if g.logit_bias:
            ids = torch.tensor(list(g.logit_bias), device=logits.device)
            changed[ids] += changed.new_tensor(list(g.logit_bias.values()))
        if g.repetition_penalty != 1:
            ids = torch.tensor(sorted({*self.prompt, *self.output}), device=logits.device)
            seen = changed[ids]
            changed[ids] = torch.where(seen > 0, seen / g.repetition_penalty, seen * g.repetition_penalty)
        if self.output and (g.presence_penalty or g.frequency_penalty):
            unique, counts = np.unique(np.asarray(self.output), return_counts=True)
            penalty = changed.new_tensor(g.presence_penalty + g.frequency_penalty * counts)
            changed[torch.from_numpy(unique).to(logits.device)] -= penalty
        if self.constraint is not None:
            allowed = to_device_async(torch.from_numpy(self.constraint.allowed(len(changed))), logits.device)
            changed = changed.masked_fill(~allowed, -torch.inf)
        return changed


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
    changed: list[tuple[int, LogitChanges]] = field(default_factory=list)  # (row, its changes)

    @property
    def filtered(self) -> np.ndarray:
        """Bool [R], the rows that sample from a top-k or top-p part of the vocabulary."""
        filtered: np.ndarray = (self.top_p < 1) | (self.top_k > 0)
        return filtered

    @property
    def partial(self) -> np.ndarray:
        """Bool [R], the rows that sample from a part of the vocabulary, or from changed logits."""
        partial = self.filtered
        partial[[row for row, _ in self.banned]] = True
        partial[[row for row, _ in self.changed]] = True
        return partial

    def select(self, rows: np.ndarray) -> SamplingParams:
        """Return the parameters of some rows."""
        names = ("temperature", "greedy", "top_p", "top_k", "seed", "index")
        place = {int(row): number for number, row in enumerate(rows)}
        banned = [(place[row], ids) for row, ids in self.banned if row in place]
        changed = [(place[row], changes) for row, changes in self.changed if row in place]
        return SamplingParams(**{name: getattr(self, name)[rows] for name in names}, banned=banned, changed=changed)


def sample(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Sample from logits [R, V]; return tokens int64 [R] and their logprobs [R] on the CPU, in one transfer.

    The logprob is `log_softmax(logits / temperature)` over the full vocabulary, in float32 (float64 for float64
    logits), as the trainer's head computes it, independent of top-k, top-p, banned tokens and changed logits.

    Raises:
        NotFiniteError: logits are not finite.
    """
    partial = params.partial if operations.can_use(logits) else np.ones(len(logits), dtype=bool)
    if partial.all() or not partial.any():
        tokens, logprobs = (_sample_torch if partial.all() else _sample_native)(logits, params)
    else:  # a row's draw must not depend on other rows
        tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        for how, rows in ((_sample_native, np.flatnonzero(~partial)), (_sample_torch, np.flatnonzero(partial))):
            index = torch.from_numpy(rows)
            tokens[index], logprobs[index] = how(logits[index], params.select(rows))
    require_finite(logprobs)
    return tokens, logprobs


def require_finite(logprobs: Tensor) -> None:
    """Raise NotFiniteError if logprobs [R] of sampled tokens, on the CPU, are not finite."""
    wrong = (~logprobs.isfinite()).nonzero()[:, 0].tolist()
    if wrong:
        raise NotFiniteError(f"logits of rows {wrong[:8]} of {len(logprobs)} are not finite; check the model's weights")


def _sample_native(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """See `sample`: of all of the vocabulary."""
    return operations.draw(logits, params.temperature, params.greedy, counter_uniform(params.seed, params.index))


def _sample_torch(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """See `sample`: by PyTorch's operations."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if (params.temperature != 1.0).any():
        temperature = _on_device(params.temperature, scores)
        scores = scores / temperature.to(scores.dtype)[:, None]
    all_logprobs = torch.log_softmax(scores, dim=-1)
    choices, drawn_from = scores, all_logprobs
    if params.changed:
        choices, drawn_from = choices.clone(), drawn_from.clone()
        for row, changes in params.changed:
            choices[row] = changes.apply(logits[row].to(scores.dtype)) / params.temperature[row]
            drawn_from[row] = torch.log_softmax(choices[row], dim=-1)
    if params.banned:
        rows = np.repeat([row for row, _ in params.banned], [len(ids) for _, ids in params.banned])
        places = _on_device(np.stack([rows, np.concatenate([ids for _, ids in params.banned])]), scores)
        choices, drawn_from = (x.index_put(tuple(places), x.new_full((), -torch.inf)) for x in (choices, drawn_from))
    for row, changes in params.changed:
        if changes.gconfig.min_p:
            unlikely = drawn_from[row] < drawn_from[row].max() + math.log(changes.gconfig.min_p)
            drawn_from[row].masked_fill_(unlikely, -torch.inf)
    if params.greedy.all():
        tokens = choices.argmax(dim=-1)
    else:
        tokens = _draw(choices, drawn_from, params)
    logprobs = all_logprobs.gather(1, tokens[:, None])[:, 0]
    # Float64 has every token and every logprob exactly.
    columns = torch.stack([tokens.double(), logprobs.double()]).cpu()
    return columns[0].long(), columns[1].to(logprobs.dtype)


@dataclass(frozen=True)
class DeviceSamplingParams:
    """Parameters of R rows on the device of their logits, without changed logits.

    Attributes:
        temperature, greedy, top_p, top_k: see `SamplingParams`; float64, bool, float64 and int64 [R].
        uniform: `counter_uniform` of each row, float64 [R].
        bans: bool [R], whether a row must not sample its `banned`.
        banned: token ids int64 [R, n], repeated to fill the row.
    """

    temperature: Tensor
    greedy: Tensor
    top_p: Tensor
    top_k: Tensor
    uniform: Tensor
    bans: Tensor
    banned: Tensor

    def rows(self, rows: slice) -> DeviceSamplingParams:
        """Return the parameters of some rows."""
        return DeviceSamplingParams(**{name: value[rows] for name, value in vars(self).items()})


def sample_on_device(
    logits: Tensor, params: DeviceSamplingParams, sampling: Literal["greedy", "sampled", "filtered"]
) -> tuple[Tensor, Tensor]:
    """Sample from logits [R, V] as `_sample_torch` does, with equal results, but without the host.

    Args:
        logits: logits of the rows.
        params: parameters of the rows.
        sampling: `greedy` if all rows are greedy, `filtered` if one has a top-k or top-p, else `sampled`.

    Returns:
        Tokens int64 [R], and their logprobs [R]; not finite where the logits are not.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    scores = logits / params.temperature.to(wide)[:, None]  # in one pass over the logits
    logprobs = torch.log_softmax(scores, dim=-1)
    # In place: a banned token is never chosen, so no chosen token loses its logprob.
    for x in (scores, logprobs):
        kept = x.gather(1, params.banned)
        x.scatter_(1, params.banned, kept.masked_fill(params.bans[:, None], -torch.inf))
    tokens = scores.argmax(dim=-1)
    if sampling != "greedy":
        probs = logprobs.exp()
        if sampling == "filtered":
            probs = filter_top_k_top_p(probs, params.top_k, params.top_p)
        tokens = torch.where(params.greedy, tokens, inverse_cdf_sample(probs, params.uniform))
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def most_likely(logits: Tensor, temperature: Sequence[float], count: int) -> list[TopLogprobs]:
    """Return the `count` most likely tokens of each row of logits [R, V], with logprobs as in `sample`."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = (wide / wide.new_tensor(temperature)[:, None]).log_softmax(dim=-1)
    best = logprobs.topk(min(count, logits.shape[-1]), dim=-1)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [list(zip(tokens, values, strict=True)) for tokens, values in rows]


def _on_device(x: np.ndarray, like: Tensor) -> Tensor:
    return to_device_async(torch.from_numpy(x), like.device)


def _draw(choices: Tensor, logprobs: Tensor, params: SamplingParams) -> Tensor:
    probs = logprobs.exp()
    if (filtered := np.flatnonzero(params.filtered)).size:
        rows, top_k, top_p = (_on_device(x, probs) for x in (filtered, params.top_k[filtered], params.top_p[filtered]))
        probs[rows] = filter_top_k_top_p(probs[rows], top_k, top_p)
    tokens = inverse_cdf_sample(probs, _on_device(counter_uniform(params.seed, params.index), probs))
    if params.greedy.any():
        tokens = torch.where(_on_device(params.greedy, probs), choices.argmax(dim=-1), tokens)
    return tokens


def filter_top_k_top_p(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return probabilities [R, V] with all tokens outside the top k, then outside the top-p nucleus, set to 0.

    top_k int64 [R], 0 for no limit; top_p [R]. A token is kept while the renormalized probability of the more likely
    ones is below top_p (Holtzman et al. 2020), so the most likely one is always kept. Ties go to the lower token id.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    limit = torch.where(top_k > 0, top_k, probs.shape[-1])
    ordered = ordered.masked_fill(rank >= limit[:, None], 0)
    mass = ordered.double().cumsum(dim=-1)
    before = (mass - ordered) / mass[:, -1:]
    # top_p of 1 keeps every token, also where `before` rounds to 1.
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (top_p[:, None] < 1), 0)
    return torch.zeros_like(probs).scatter_(1, order, ordered)


def inverse_cdf_sample(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the tokens int64 [R] at `uniform` [R] of each row's cumulative distribution.

    probs [R, V] need not sum to 1; uniform is in [0, 1). Sums are float64. A token of probability 0 is never returned;
    any token is where probabilities are NaN.
    """
    rows, vocab = probs.shape
    padded = torch.nn.functional.pad(probs, (0, -vocab % _BLOCK)) if vocab % _BLOCK else probs
    padded = padded.view(rows, -1, _BLOCK)
    mass = padded.sum(dim=-1, dtype=torch.float64)
    running = mass.cumsum(dim=-1)
    total = running[:, -1]
    below_one = 1 - torch.finfo(torch.float64).eps
    target = torch.minimum(uniform * total, total * below_one)
    block = torch.searchsorted(running, target[:, None], right=True).clamp_(max=running.shape[1] - 1)
    start = (running.gather(1, block) - mass.gather(1, block))[:, 0]
    inside = padded.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0].double().cumsum(dim=-1)
    # The block's sum may round differently from its part of the cumulative sum; clamp to stay inside the block.
    offset = torch.minimum((target - start).clamp_(min=0), inside[:, -1] * below_one)
    token = block[:, 0] * _BLOCK + torch.searchsorted(inside, offset[:, None], right=True)[:, 0]
    return token.clamp_(max=vocab - 1)
