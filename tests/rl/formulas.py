"""What the formula tests share: each formula as its paper writes it, in plain loops over Python floats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from archon.engine.batch import PackedBatch
from archon.engine.engine import ArchonEngine
from archon.rl.algorithms.advantages import AdvantageInputs, GAESettings
from archon.rl.algorithms.aggregation import DrGRPOAggregation
from archon.rl.algorithms.config import AlgorithmConfig


def documents(lengths: tuple[int, ...], **fields: Tensor) -> PackedBatch:
    """A packed micro-batch with these per-token fields; its tokens do not matter to a loss."""
    blank = torch.zeros(sum(lengths), dtype=torch.int64)
    return PackedBatch(
        tokens=blank,
        positions=blank,
        labels=blank,
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        lengths=lengths,
        fields=fields,
    )


def plain_logprobs(
    engine: ArchonEngine, batch: dict[str, Tensor], row: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Logprob and entropy of one answer's trained tokens, from whole logits."""
    tokens = batch["input_ids"][row][batch["attention_mask"][row]]
    n = len(tokens)
    logits = engine.model(tokens, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n) / temperature
    trained = (batch["loss_mask"][row][:n] == 1).nonzero().flatten()
    log_p = logits.log_softmax(-1)[trained - 1]
    return log_p.gather(1, tokens[trained].unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def plain_kl(d: float, kind: str) -> float:
    """Of one token, with d = log π − log π_ref."""
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def plain_penalty(length: int, most: int, buffer: int) -> float:
    """DAPO, equation 13, case by case."""
    if length <= most - buffer:
        return 0.0
    return (most - buffer - length) / buffer if length <= most else -1.0


def plain_binary_kl(p: float, q: float) -> float:
    """Of drawing a token or not, with these probabilities."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def plain_correction(log_ratios: Sequence[float], logprobs: Sequence[float], settings: Any) -> list[tuple[float, bool]]:
    """Of the trained tokens of one answer: the weight of each, and whether a bound touched it."""
    if settings.kind == "none":
        return [(1.0, False)] * len(log_ratios)
    ratios = [math.exp(x) for x in log_ratios]
    if settings.kind == "kpop":
        pairs = [(math.exp(q + x), math.exp(q)) for q, x in zip(logprobs, log_ratios, strict=True)]
        far = [max(plain_binary_kl(p, q), plain_binary_kl(q, p)) > settings.max_divergence for p, q in pairs]
        return [(0.0, True) if out else (ratio, False) for ratio, out in zip(ratios, far, strict=True)]
    if settings.kind == "k3_mask":
        far_off = statistics.fmean(r - 1 - math.log(r) for r in ratios) > settings.max_divergence
        return [(float(not far_off), far_off)] * len(ratios)
    high = settings.max_ratio
    if settings.kind == "sequence_mask":
        whole = math.prod(ratios)
        inside = settings.min_ratio <= whole <= high
        return [(whole if inside else 0.0, not inside)] * len(ratios)
    if settings.kind == "geometric_mask":
        inside = settings.min_ratio <= statistics.geometric_mean(ratios) <= high
        return [(float(inside), not inside)] * len(ratios)
    if settings.kind == "sequence_tis":
        whole = math.exp(math.fsum(log_ratios))
        return [(min(whole, high), whole > high)] * len(log_ratios)
    if settings.kind == "tis":
        return [(min(ratio, high), ratio > high) for ratio in ratios]
    return [(ratio, False) if settings.min_ratio <= ratio <= high else (0.0, True) for ratio in ratios]


def plain_kept(log_ratios: Sequence[float], threshold: float) -> list[bool]:
    """Of all trained tokens of a batch, whether M2PO keeps each: the one that strayed furthest is left out until the
    mean square of the rest is small enough."""
    kept = sorted(range(len(log_ratios)), key=lambda i: log_ratios[i] ** 2)
    while kept and statistics.fmean(log_ratios[i] ** 2 for i in kept) > threshold:
        kept.pop()
    return [i in kept for i in range(len(log_ratios))]


def plain_answer(reward: float, members: list[float], everyone: list[float], settings: Any) -> float:
    """The advantage of an answer with this reward, from its group's rewards and those of the whole batch."""
    mean, kind = statistics.fmean(members), settings.kind
    if kind == "grpo":
        return (reward - mean) / ((statistics.stdev(members) if len(members) > 1 else 0.0) + settings.eps)
    if kind == "lite_ppo":
        return (reward - mean) / (statistics.stdev(everyone) + settings.eps)
    if kind == "maxrl":
        return (reward - mean) / mean if mean > 0 else 0.0
    if kind == "raft":
        return float(reward > 0 and (not settings.best_only or reward == max(members)))
    if kind == "opmd":
        partition = statistics.fmean([math.exp(r / settings.tau) for r in members])
        return reward - settings.tau * math.log(partition)
    if kind == "rloo":
        others = members.copy()
        others.remove(reward)
        return reward - statistics.fmean(others) if others else 0.0
    if kind == "reward":
        return reward
    return reward - mean - (settings.shift if kind == "asymre" else 0.0)


def plain_gdpo(of: AdvantageInputs, settings: Any) -> list[float]:
    """The advantage of each answer, from the parts of its reward."""
    assert of.reward_parts is not None
    groups, sums = of.group_ids.tolist(), [0.0] * len(of.rewards)
    for name, part in of.reward_parts.items():
        values = part.tolist()
        for row, value in enumerate(values):
            if not math.isnan(value):
                members = [v for v, group in zip(values, groups, strict=True) if group == groups[row] and v == v]
                std = statistics.stdev(members) if len(members) > 1 else 0.0
                weight = settings.weights.get(name, 1.0)
                sums[row] += weight * (value - statistics.fmean(members)) / (std + settings.eps)
    mean, std = statistics.fmean(sums), statistics.stdev(sums)
    return [(value - mean) / (std + settings.eps) for value in sums]


def plain_advantages(of: AdvantageInputs, settings: Any) -> list[list[float]]:
    """Each formula as its paper writes it, from lists."""
    assert of.token_rewards is not None and of.values is not None
    kind = settings.kind
    steps = [[t for t, m in enumerate(row) if m] for row in of.loss_mask.tolist()]
    extra, values, groups = of.token_rewards.tolist(), of.values.tolist(), of.group_ids.tolist()
    earned = []
    for row, reward in enumerate(of.rewards.tolist()):
        per_step = [extra[row][t] for t in steps[row]]
        per_step[-1] += reward
        earned.append(per_step)
    total = [sum(per_step) for per_step in earned]
    found = []
    decoupled = plain_gdpo(of, settings) if kind == "gdpo" else []
    for row, per_step in enumerate(earned):
        members = [total[i] for i in range(len(total)) if groups[i] == groups[row]]
        if kind == "reinforce_pp":
            a = [sum(per_step[k:]) for k in range(len(per_step))]
        elif kind == "distill":
            assert of.logprobs is not None and of.teacher_logprobs is not None
            own, teacher = of.logprobs.tolist()[row], of.teacher_logprobs.tolist()[row]
            a = [-(own[t] - teacher[t]) for t in steps[row]]
        elif kind == "gdpo":
            a = [decoupled[row]] * len(per_step)
        elif isinstance(settings, GAESettings):
            a, following = [0.0] * len(per_step), (0.0, 0.0)
            for k in range(len(per_step) - 1, -1, -1):
                v = values[row][steps[row][k]]
                delta = per_step[k] + settings.gamma * following[0] - v
                a[k] = delta + settings.gamma * settings.lam * following[1]
                following = (v, a[k])
        else:
            a = [plain_answer(total[row], members, total, settings)] * len(per_step)
        found.append(a)
    if kind in ("reinforce_pp", "reinforce_baseline"):
        every = [x for a in found for x in a]
        mean, std = statistics.fmean(every), statistics.pstdev(every)
        found = [[(x - mean) / (std + settings.eps) for x in a] for a in found]
    placed = []
    for row, a in enumerate(found):
        line = [0.0] * of.loss_mask.shape[1]
        for t, x in zip(steps[row], a, strict=True):
            line[t] = x
        placed.append(line)
    return placed


def plain_covariances(logprobs: Sequence[float], advantages: Sequence[float]) -> list[float]:
    """Of the trained tokens of a batch, arXiv 2505.22617, section 4.2."""
    middle, mean = statistics.fmean(logprobs), statistics.fmean(advantages)
    return [(logprob - middle) * (a - mean) for logprob, a in zip(logprobs, advantages, strict=True)]


def plain_loss(logprob: float, ratio: float, advantage: float, settings: Any, selected: bool = False) -> float:
    """Of one token."""
    if settings.kind in ("ppo", "decoupled", "gspo", "opsm", "cispo", "mix", "chord"):
        clipped = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
        if settings.kind == "cispo":
            return -clipped * advantage * logprob
        value = min(advantage * ratio, advantage * clipped)
        if settings.dual_clip is not None and advantage < 0:
            value = max(value, advantage * settings.dual_clip)
        return -value
    if settings.kind == "sapo":
        tau = settings.tau_positive if advantage > 0 else settings.tau_negative
        return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    if settings.kind == "dppo":
        new, old = math.exp(logprob), math.exp(logprob) / ratio
        moved = abs(new - old) if settings.divergence == "tv" else plain_binary_kl(old, new)
        if advantage > 0 and ratio > 1 and moved > settings.delta_high:
            return 0.0
        if advantage < 0 and ratio < 1 and moved > settings.delta_low:
            return 0.0
    if selected and settings.kind in ("clip_cov", "kl_cov"):
        return -advantage * ratio + settings.coef * abs(math.log(ratio)) if settings.kind == "kl_cov" else 0.0
    if settings.kind == "reinforce":
        return -advantage * logprob
    if settings.kind == "sppo":
        return -advantage * math.log(min(max(ratio, 1 / (1 + settings.epsilon)), 1 + settings.epsilon))
    if settings.kind == "rec":
        return -advantage * logprob * plain_rec(ratio, advantage, settings)
    return -advantage * ratio


def plain_rec(ratio: float, advantage: float, settings: Any) -> int:
    """Whether a token is trained, by each of the masks."""
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    if settings.sides == "one":
        return int(ratio <= high if advantage >= 0 else ratio >= low)
    if settings.sides == "ring" and advantage >= 0 and ratio <= 0.4:
        return 1
    if settings.sides == "ring" and advantage < 0 and ratio >= 3:
        return 1
    return int(low <= ratio <= high)


def plain_objective(
    logprobs: Tensor, entropy: Tensor, batch: PackedBatch, config: AlgorithmConfig, kept: Sequence[bool] | None = None
) -> float:
    """Each objective as its paper writes it, its parts exchangeable, one token at a time; of all trained tokens, `kept`
    says which count for the policy loss."""
    per_document: list[list[float]] = []
    start, left = 0, iter(kept or [True] * len(logprobs))
    for length in batch.lengths:
        tokens = [t for t in range(start, start + length) if batch["loss_mask"][t]]
        start += length
        if not tokens:
            continue
        name = "prox_logprobs" if config.recomputes_logprobs else "logprobs"
        logs = [(logprobs[t] - batch[name][t]).item() for t in tokens]
        values = []
        for t, log_ratio in zip(tokens, logs, strict=True):
            if config.policy_loss.kind == "gspo":
                log_ratio = sum(logs) / len(logs)
            advantage = batch["advantages"][t].item()
            if config.policy_loss.kind == "topr":
                alpha = min(math.exp(sum(logs)), 1.0) if advantage < 0 else 1.0
                value = -alpha * advantage * logprobs[t].item()
            elif (
                config.policy_loss.kind == "opsm"
                and advantage < 0
                and -sum(logs) / len(logs) > config.policy_loss.max_drift
            ):
                value = 0.0
            elif config.policy_loss.uses_demonstrations and batch["demonstrations"][t]:
                p = math.exp(logprobs[t].item())
                value = -logprobs[t].item() * (p * (1 - p) if config.policy_loss.kind == "chord" else 1.0)
            else:
                selected = "selected_tokens" in batch.fields and bool(batch["selected_tokens"][t])
                value = plain_loss(logprobs[t].item(), math.exp(log_ratio), advantage, config.policy_loss, selected)
            if not next(left):
                value = 0.0
            elif config.has_token_weights:
                value *= batch["policy_weights"][t].item()
            value += config.kl.coef * plain_kl((logprobs[t] - batch["ref_logprobs"][t]).item(), config.kl.kind)
            values.append(value - config.entropy_coef * entropy[t].item())
        per_document.append(values)
    if config.aggregation.kind == "token_mean":
        return sum(map(sum, per_document)) / sum(map(len, per_document))
    if config.aggregation.kind == "seq_mean_token_mean":
        return sum(sum(values) / len(values) for values in per_document) / len(per_document)
    mean = sum(map(sum, per_document)) / len(per_document)
    if isinstance(config.aggregation, DrGRPOAggregation):
        assert config.aggregation.max_tokens is not None
        return mean / config.aggregation.max_tokens
    return mean
