"""Policy losses, KL estimators and aggregations against hand-worked numbers and plain-loop references."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from archon.batch import PackedBatch
from archon.rl.algorithms.aggregation import AGGREGATIONS
from archon.rl.algorithms.kl import kl_estimate
from archon.rl.algorithms.losses import ppo_clip_loss
from archon.rl.algorithms.objective import PolicyObjective
from archon.rl.config import AlgorithmConfig
from archon.schema.errors import ConfigError
from tests.tolerances import FORMULA_FP32, FORMULA_FP64


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


def test_ppo_clip_worked_by_hand() -> None:
    # ε = 0.2, one token each, old logprob 0 so that ρ = e^logprob:
    #   A = 2,  ρ = 1.5: −Aρ = −3.0, −A·clip = −2 · 1.2 = −2.4 → max −2.4, clipped
    #   A = 2,  ρ = 0.5: −1.0, −2 · 0.8 = −1.6                → max −1.0, not clipped
    #   A = −1, ρ = 1.5: 1.5, 1.2                             → max 1.5, not clipped
    #   A = −1, ρ = 0.5: 0.5, 0.8                             → max 0.8, clipped
    #   A = 2,  ρ = 1.1: −2.2, −2.2                           → equal, not clipped
    logprobs = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1], dtype=torch.float64).log()
    advantages = torch.tensor([2.0, 2.0, -1.0, -1.0, 2.0], dtype=torch.float64)
    loss, ratio, clipped = ppo_clip_loss(logprobs, torch.zeros_like(logprobs), advantages, 0.2, 0.2)
    expected = torch.tensor([-2.4, -1.0, 1.5, 0.8, -2.2], dtype=torch.float64)
    torch.testing.assert_close(loss, expected, rtol=FORMULA_FP64, atol=FORMULA_FP64)
    torch.testing.assert_close(ratio, logprobs.exp(), rtol=0, atol=0)
    assert clipped.tolist() == [True, False, False, True, False]


def test_ppo_clip_gradient_stops_where_the_clip_decides() -> None:
    logprobs = torch.tensor([1.5, 0.5, 0.5], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64)
    ppo_clip_loss(logprobs, torch.zeros(3, dtype=torch.float64), advantages, 0.2, 0.2).loss.sum().backward()
    # d(−Aρ)/dlogπ = −Aρ: clipped tokens 0 and 2 give nothing, token 1 gives −2 · 0.5 = −1.
    expected = torch.tensor([0.0, -1.0, 0.0], dtype=torch.float64)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, expected, rtol=FORMULA_FP64, atol=FORMULA_FP64)


def test_ppo_clip_bounds_are_separate() -> None:
    loss = ppo_clip_loss(torch.tensor([2.0, 0.1]).log(), torch.zeros(2), torch.tensor([1.0, -1.0]), 0.2, 0.28).loss
    # A = 1: −min(2, 1.28); A = −1: max(0.1, 0.8).
    torch.testing.assert_close(loss, torch.tensor([-1.28, 0.8]), rtol=FORMULA_FP32, atol=FORMULA_FP32)


def test_kl_estimators_worked_by_hand() -> None:
    # π = 0.5, π_ref = 0.25: d = ln 2 = 0.693147. k1 = d; k2 = d²/2 = 0.240227; k3 = 1/2 − 1 + ln 2 = 0.193147.
    # π = 0.25, π_ref = 0.5: d = −ln 2. k1 = −0.693147; k2 = 0.240227; k3 = 2 − 1 − ln 2 = 0.306853.
    pi, ref = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    expected = {"k1": [0.693147, -0.693147], "k2": [0.240227, 0.240227], "k3": [0.193147, 0.306853]}
    for kind, values in expected.items():
        torch.testing.assert_close(kl_estimate(pi, ref, kind), torch.tensor(values), rtol=0, atol=1e-6)


def test_k1_and_k3_average_to_the_exact_kl() -> None:
    """Σ_a π(a) k(a) over a whole categorical distribution is KL(π ‖ π_ref); k2 has no such property."""
    generator = torch.Generator().manual_seed(0)
    pi = torch.randn(11, generator=generator, dtype=torch.float64).log_softmax(0)
    ref = torch.randn(11, generator=generator, dtype=torch.float64).log_softmax(0)
    exact = sum(math.exp(p) * (p - q) for p, q in zip(pi.tolist(), ref.tolist(), strict=True))
    for kind in ("k1", "k3"):
        assert abs((pi.exp() * kl_estimate(pi, ref, kind)).sum().item() - exact) < FORMULA_FP64
    assert abs((pi.exp() * kl_estimate(pi, ref, "k2")).sum().item() - exact) > 1e-3


def test_aggregations_worked_by_hand() -> None:
    # Three documents of 3, 2 and 2 tokens; loss tokens 2, 1 and 0; losses of the loss tokens 1, 3 | 10 | none.
    # token_mean: (1 + 3 + 10) / 3 = 4.6667. seq_mean_token_mean: ((1 + 3)/2 + 10) / 2 = 6. The third document has no
    # loss token and is not an answer. seq_mean_token_sum: (1 + 3 + 10) / 2 = 7.
    mask = torch.tensor([0.0, 1, 1, 1, 0, 0, 0])
    losses = torch.tensor([99.0, 1, 3, 10, 99, 99, 99])
    owners = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    expected = {"token_mean": 14 / 3, "seq_mean_token_mean": 6.0, "seq_mean_token_sum": 7.0}
    assert set(AGGREGATIONS) == set(expected)
    for name, value in expected.items():
        weights, units = AGGREGATIONS[name](mask, owners, 3)
        assert math.isclose(((weights * losses).sum() / units).item(), value, rel_tol=FORMULA_FP32)


def random_batch(seed: int = 0) -> tuple[Tensor, Tensor, PackedBatch]:
    generator = torch.Generator().manual_seed(seed)
    lengths = (5, 1, 7, 3, 4)
    total = sum(lengths)

    def noise() -> Tensor:
        return torch.randn(total, generator=generator, dtype=torch.float64)

    mask = torch.randint(0, 2, (total,), generator=generator)
    mask[0:5] = 0  # a document without a loss token
    fields = {"loss_mask": mask, "advantages": noise(), "logprobs": -noise().abs(), "ref_logprobs": -noise().abs()}
    return -noise().abs(), noise().abs(), documents(lengths, **fields)


def plain_objective(logprobs: Tensor, entropy: Tensor, batch: PackedBatch, config: AlgorithmConfig) -> float:
    """DeepSeekMath's equation 3 with its parts exchangeable, one token at a time."""
    per_document: list[list[float]] = []
    start = 0
    for length in batch.lengths:
        values = []
        for t in range(start, start + length):
            if batch["loss_mask"][t] == 0:
                continue
            new, old, ref = (x[t].item() for x in (logprobs, batch["logprobs"], batch["ref_logprobs"]))
            advantage, ratio = batch["advantages"][t].item(), math.exp(new - old)
            clipped = min(max(ratio, 1 - config.clip_eps_low), 1 + config.clip_eps_high)
            value = -min(advantage * ratio, advantage * clipped)
            d = new - ref
            value += config.kl_coef * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[config.kl_kind]
            values.append(value - config.entropy_coef * entropy[t].item())
        if values:
            per_document.append(values)
        start += length
    if config.aggregation == "token_mean":
        return sum(map(sum, per_document)) / sum(map(len, per_document))
    if config.aggregation == "seq_mean_token_mean":
        return sum(sum(values) / len(values) for values in per_document) / len(per_document)
    return sum(map(sum, per_document)) / len(per_document)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
@pytest.mark.parametrize("kl_kind", ["k1", "k2", "k3"])
def test_objective_equals_plain_loop(aggregation: str, kl_kind: str) -> None:
    config = AlgorithmConfig(
        aggregation=aggregation, kl_kind=kl_kind, kl_coef=0.3, entropy_coef=0.05, clip_eps_low=0.1, clip_eps_high=0.4
    )
    logprobs, entropy, batch = random_batch()
    objective = PolicyObjective(config)
    loss, metrics = objective(logprobs, entropy, batch)
    expected = plain_objective(logprobs, entropy, batch, config)
    assert math.isclose((loss / objective.units(batch)).item(), expected, rel_tol=FORMULA_FP64)
    assert metrics["entropy"][1].item() == batch["loss_mask"].sum().item()


def test_objective_metrics_are_sums_and_counts_over_loss_tokens() -> None:
    logprobs, entropy, batch = random_batch(1)
    loss_tokens = batch["loss_mask"].nonzero().flatten().tolist()
    _, metrics = PolicyObjective(AlgorithmConfig(kl_coef=0))(logprobs, entropy, batch)
    log_ratio = [(logprobs[t] - batch["logprobs"][t]).item() for t in loss_tokens]
    expected = {
        "ratio": sum(math.exp(x) for x in log_ratio),
        "approx_kl": sum(math.exp(x) - 1 - x for x in log_ratio),
        "logprob_diff": sum(abs(x) for x in log_ratio),
        "entropy": sum(entropy[t].item() for t in loss_tokens),
    }
    for name, value in expected.items():
        total, count = metrics[name]
        assert math.isclose(total.item(), value, rel_tol=FORMULA_FP64), name
        assert count.item() == len(loss_tokens)
    assert "kl_ref" not in metrics


def test_masked_positions_cannot_reach_the_loss_or_its_gradient() -> None:
    """Garbage at masked positions (the end of a document, a prompt) must not become inf · 0 = NaN."""
    logprobs, entropy, batch = random_batch(2)
    objective = PolicyObjective(AlgorithmConfig(entropy_coef=0.1))
    reference, _ = objective(logprobs, entropy, batch)
    masked = batch["loss_mask"] == 0
    batch.fields["logprobs"] = batch["logprobs"].masked_fill(masked, -1e30)
    batch.fields["ref_logprobs"] = batch["ref_logprobs"].masked_fill(masked, float("nan"))
    leaf = logprobs.clone().requires_grad_()
    loss, _ = objective(leaf, entropy, batch)
    loss.backward()
    assert loss.item() == reference.item()
    assert leaf.grad is not None
    assert leaf.grad[masked].abs().max() == 0
    assert leaf.grad.isfinite().all()


def test_preset_grpo_means_exactly_its_paper() -> None:
    """DeepSeekMath: group-normalised, 1/|o_i| aggregation, ε 0.2, k3 KL with β 0.04, one update, nothing filtered."""
    config = AlgorithmConfig(preset="grpo")
    assert config.model_dump() == {
        "preset": "grpo",
        "advantage": "grpo",
        "advantage_eps": 1e-6,
        "policy_loss": "ppo",
        "clip_eps_low": 0.2,
        "clip_eps_high": 0.2,
        "aggregation": "seq_mean_token_mean",
        "kl_kind": "k3",
        "kl_coef": 0.04,
        "entropy_coef": 0.0,
        "groups_without_spread": "keep",
        "ppo_epochs": 1,
        "minibatches": 1,
    }


def test_no_hidden_second_normalisation() -> None:
    """With on-policy logprobs and no KL the loss is −Σ_i A_i / G: each answer counts once, whatever its length."""
    lengths = (2, 5)
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 0])
    advantages = torch.tensor([3.0, 3, -1, -1, -1, -1, -1], dtype=torch.float64)
    logprobs = torch.full((7,), -0.5, dtype=torch.float64)
    batch = documents(lengths, loss_mask=mask, advantages=advantages, logprobs=logprobs)
    objective = PolicyObjective(AlgorithmConfig(kl_coef=0))
    loss, _ = objective(logprobs, torch.zeros(7), batch)
    assert (loss / objective.units(batch)).item() == -(3.0 - 1.0) / 2


def test_every_part_of_a_preset_can_be_overridden_and_unknown_ones_are_named() -> None:
    assert AlgorithmConfig(preset="grpo", kl_coef=0.0, aggregation="token_mean").kl_coef == 0.0
    with pytest.raises(ConfigError, match="unknown preset 'grop', did you mean 'grpo'"):
        AlgorithmConfig.parse({"preset": "grop"})
    with pytest.raises(ConfigError, match="preset: got 5, input should be a valid string"):
        AlgorithmConfig.parse({"preset": 5})
