"""Policy losses, KL estimators and corrections, token by token, against hand-worked numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from archon.rl.algorithms.corrections import CORRECTIONS
from archon.rl.algorithms.kl import kl_estimate
from archon.rl.algorithms.losses import POLICY_LOSSES, PolicyTerms, clipped_loss, second_moment_mask
from tests.rl.formulas import plain_kept
from tests.tolerances import FORMULA_FP32, FORMULA_FP64


def terms(logprobs: list[float], advantages: list[float], documents: list[int] | None = None) -> PolicyTerms:
    """Tokens whose old logprob is 0."""
    new = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    owners = torch.tensor(documents or [0] * len(logprobs))
    ones = torch.ones_like(new)
    return PolicyTerms(
        new, torch.zeros_like(new), torch.tensor(advantages, dtype=torch.float64), ones, owners, int(owners.max()) + 1
    )


def assert_loss(of: PolicyTerms, settings: Any, loss: list[float], gradient: list[float]) -> list[bool]:
    """Each token's loss, and its derivative by the token's logprob; returns which a bound decided."""
    found = POLICY_LOSSES[settings.kind](of, settings)
    torch.testing.assert_close(found.loss, torch.tensor(loss, dtype=torch.float64), rtol=0, atol=1e-6)
    found.loss.sum().backward()
    assert of.logprobs.grad is not None
    torch.testing.assert_close(of.logprobs.grad, torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=1e-6)
    return found.clipped.tolist()


def test_ppo_clip_worked_by_hand() -> None:
    # ε = 0.2, one token each, old logprob 0 so that ρ = e^logprob:
    #   A = 2,  ρ = 1.5: −Aρ = −3.0, −A·clip = −2 · 1.2 = −2.4 → max −2.4, clipped
    #   A = 2,  ρ = 0.5: −1.0, −2 · 0.8 = −1.6                → max −1.0, not clipped
    #   A = −1, ρ = 1.5: 1.5, 1.2                             → max 1.5, not clipped
    #   A = −1, ρ = 0.5: 0.5, 0.8                             → max 0.8, clipped
    #   A = 2,  ρ = 1.1: −2.2, −2.2                           → equal, not clipped
    logprobs = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1], dtype=torch.float64).log()
    advantages = torch.tensor([2.0, 2.0, -1.0, -1.0, 2.0], dtype=torch.float64)
    loss, ratio, clipped = clipped_loss(logprobs.exp(), advantages, 0.2, 0.2)
    expected = torch.tensor([-2.4, -1.0, 1.5, 0.8, -2.2], dtype=torch.float64)
    torch.testing.assert_close(loss, expected, rtol=FORMULA_FP64, atol=FORMULA_FP64)
    torch.testing.assert_close(ratio, logprobs.exp(), rtol=0, atol=0)
    assert clipped.tolist() == [True, False, False, True, False]


def test_ppo_clip_gradient_stops_where_the_clip_decides() -> None:
    logprobs = torch.tensor([1.5, 0.5, 0.5], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64)
    clipped_loss(logprobs.exp(), advantages, 0.2, 0.2).loss.sum().backward()
    # d(−Aρ)/dlogπ = −Aρ: clipped tokens 0 and 2 give nothing, token 1 gives −2 · 0.5 = −1.
    expected = torch.tensor([0.0, -1.0, 0.0], dtype=torch.float64)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, expected, rtol=FORMULA_FP64, atol=FORMULA_FP64)


def test_ppo_clip_bounds_are_separate() -> None:
    loss = clipped_loss(torch.tensor([2.0, 0.1]), torch.tensor([1.0, -1.0]), 0.2, 0.28).loss
    # A = 1: −min(2, 1.28); A = −1: max(0.1, 0.8).
    torch.testing.assert_close(loss, torch.tensor([-1.28, 0.8]), rtol=FORMULA_FP32, atol=FORMULA_FP32)


def test_dual_clip_worked_by_hand() -> None:
    # A = −1, ρ = 5: −Aρ = 5, clip 1.2, so 5; c = 3 bounds it by 3. A = −1, ρ = 2: 2 is below. A = 1, ρ = 5: still −1.2.
    ratio, advantages = torch.tensor([5.0, 2.0, 5.0]), torch.tensor([-1.0, -1.0, 1.0])
    loss, _, clipped = clipped_loss(ratio, advantages, 0.2, 0.2, 3.0)
    torch.testing.assert_close(loss, torch.tensor([3.0, 2.0, -1.2]), rtol=FORMULA_FP32, atol=FORMULA_FP32)
    assert clipped.tolist() == [True, False, True]


def test_gspo_worked_by_hand() -> None:
    # Log-ratios 0.1, 0.3 | −0.2: s = e^0.2 = 1.221403 for both tokens of the first answer, e^−0.2 = 0.818731. With
    # A = 1 and bounds far away the loss is −s, and its gradient −s at every token, though only their mean enters s.
    settings = POLICY_LOSSES.parse({"kind": "gspo", "clip_low": 0.9, "clip_high": 0.9})
    of = terms([0.1, 0.3, -0.2], [1.0, 1.0, 1.0], [0, 0, 1])
    expected = [-1.221403, -1.221403, -0.818731]
    assert assert_loss(of, settings, expected, expected) == [False, False, False]


def test_cispo_worked_by_hand() -> None:
    # A = 2, ρ = e^0.2 = 1.221403 within the bound of 1.5: loss −1.221403 · 2 · 0.2 = −0.488561, gradient −ρA =
    # −2.442806. ρ = e^1 is bounded: loss −1.5 · 2 · 1, gradient −1.5 · 2, where PPO's would be 0. There is no bound
    # below: A = −1, ρ = e^−3 = 0.049787: loss 0.049787 · −3 = −0.149361, gradient 0.049787.
    settings = POLICY_LOSSES.parse({"kind": "cispo", "clip_low": 1.0, "clip_high": 0.5})
    of = terms([0.2, 1.0, -3.0], [2.0, 2.0, -1.0])
    clipped = assert_loss(of, settings, [-0.488561, -3.0, -0.149361], [-2.442806, -3.0, 0.049787])
    assert clipped == [False, True, False]


def test_sapo_worked_by_hand_on_policy() -> None:
    # ρ = 1: the gate is 4/τ · σ(0) = 2/τ, and its slope 4/τ · τ · 1/4 = 1, the plain policy gradient's.
    settings = POLICY_LOSSES.parse({"kind": "sapo", "tau_positive": 1.0, "tau_negative": 2.0})
    assert assert_loss(terms([0.0, 0.0], [3.0, -3.0]), settings, [-6.0, 3.0], [-3.0, 3.0]) == [False, False]


def test_sapo_worked_by_hand_away_from_ratio_1() -> None:
    # A = 3, ρ = 2, τ = 1: σ(1) = 0.731059, loss −3 · 4 · 0.731059 = −8.772703; its slope by ρ is 4/τ · τσ(1 − σ) = 4 ·
    # 0.196612, times −A · ρ: −4.718686. A = −3, ρ = 0.5, τ = 2: σ(−1) = 0.268941, loss 3 · 2 · 0.268941 = 1.613649,
    # gradient 3 · 4 · 0.196612 · 0.5 = 1.179672.
    settings = POLICY_LOSSES.parse({"kind": "sapo", "tau_positive": 1.0, "tau_negative": 2.0})
    of = terms([math.log(2), math.log(0.5)], [3.0, -3.0])
    assert assert_loss(of, settings, [-8.772703, 1.613649], [-4.718686, 1.179672]) == [False, False]


def test_importance_worked_by_hand() -> None:
    # −Aρ whatever the ratio: −2 · 5 = −10 and 1 · 0.1; its gradient by log π is itself.
    settings = POLICY_LOSSES.parse("importance")
    of = terms([math.log(5), math.log(0.1)], [2.0, -1.0])
    assert assert_loss(of, settings, [-10.0, 0.1], [-10.0, 0.1]) == [False, False]


def test_reinforce_worked_by_hand() -> None:
    # −A log π: −2 · −0.5 = 1 and 3 · −0.25 = −0.75, gradients −A; the ratios e^−0.5 and e^−0.25 have no part in it.
    settings = POLICY_LOSSES.parse("reinforce")
    assert assert_loss(terms([-0.5, -0.25], [2.0, -3.0]), settings, [1.0, -0.75], [-2.0, 3.0]) == [False, False]


def test_kpop_is_bounded_in_both_directions() -> None:
    # q = 0.5, p = 0.2: D(p ‖ q) = 0.1927 and D(q ‖ p) = 0.2231, so a bound of 0.2 masks it by the second alone, and
    # with p and q exchanged by the first alone.
    settings = CORRECTIONS.parse({"kind": "kpop", "max_divergence": 0.2})
    for trainer, generator in ((0.2, 0.5), (0.5, 0.2)):
        q, p = torch.tensor([[generator]]).log(), torch.tensor([[trainer]]).log()
        weights, touched = CORRECTIONS["kpop"](p - q, torch.ones(1, 1), q, settings)
        assert (weights.item(), touched.item()) == (0.0, True)


def test_topr_worked_by_hand() -> None:
    # Log-ratios 0.1, −0.4 | 0.3, −0.1 | −0.2, all to an old logprob of 0. The first answer failed: its ratio e^−0.3 =
    # 0.740818 is the weight of both its tokens: 0.740818 · 0.1 and 0.740818 · −0.4. The second failed, and its ratio
    # e^0.2 is truncated to 1. The third succeeded and has weight 1, whatever its ratio.
    of = terms([0.1, -0.4, 0.3, -0.1, -0.2], [-1.0, -1.0, -1.0, -1.0, 2.0], [0, 0, 1, 1, 2])
    loss, gradient = [0.074082, -0.296327, 0.3, -0.1, 0.4], [0.740818, 0.740818, 1.0, 1.0, -2.0]
    assert assert_loss(of, POLICY_LOSSES.parse("topr"), loss, gradient) == [False, False, True, True, False]


def test_sppo_worked_by_hand() -> None:
    # ε = 0.5 bounds the ratio by 1/1.5 and 1.5, its logarithm by ±0.405465. Within: −2 · 0.3; beyond, whatever the sign
    # of A, −2 · 0.405465 and −(−1) · −0.405465, without a gradient.
    of = terms([0.3, 0.7, -0.9], [2.0, 2.0, -1.0])
    settings = POLICY_LOSSES.parse({"kind": "sppo", "epsilon": 0.5})
    assert assert_loss(of, settings, [-0.6, -0.810930, -0.405465], [-2.0, 0.0, 0.0]) == [False, True, True]


@pytest.mark.parametrize(
    ("divergence", "limit", "kept"),
    [
        # π_old = 0.5: π = 0.6 and 0.8 differ by 0.1 and 0.3, for A = 1 and then for A = −1; 0.4 and 0.2 likewise.
        ("tv", 0.2, [1, 0, 1, 1, 1, 1, 1, 0]),
        # KL(0.5 ‖ 0.8) = 0.5 ln 0.625 + 0.5 ln 2.5 = 0.2231, of 0.2 the same; of 0.6 and 0.4 0.0204.
        ("kl", 0.2, [1, 0, 1, 1, 1, 1, 1, 0]),
        ("kl", 0.25, [1, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_dppo_worked_by_hand(divergence: str, limit: float, kept: list[int]) -> None:
    new = torch.tensor([0.6, 0.8, 0.6, 0.8, 0.4, 0.2, 0.4, 0.2], dtype=torch.float64)
    of = terms(new.log().tolist(), [1.0, 1.0, -1.0, -1.0] * 2)
    of = replace(of, old_logprobs=torch.full_like(new, math.log(0.5)))
    settings = POLICY_LOSSES.parse({"kind": "dppo", "divergence": divergence, "delta_low": limit, "delta_high": limit})
    loss = [-k * a * p / 0.5 for k, a, p in zip(kept, of.advantages.tolist(), new.tolist(), strict=True)]
    assert assert_loss(of, settings, loss, loss) == [not k for k in kept]


def test_opsm_worked_by_hand() -> None:
    # Means of log π_old − log π: 0.6 | 0.6 | 0.4. The first answer failed and is left out, the second succeeded, the
    # third is near. PPO's bounds do not matter: A > 0 with ρ < 1, and 0.8 at A < 0 with ρ < 0.8 (no gradient).
    of = terms([-0.2, -1.0, -0.6, -0.4], [-1.0, -1.0, 1.0, -1.0], [0, 0, 1, 2])
    settings = POLICY_LOSSES.parse({"kind": "opsm", "clip_low": 0.2, "clip_high": 0.2, "max_drift": 0.5})
    loss, gradient = [0.0, 0.0, -math.exp(-0.6), 0.8], [0.0, 0.0, -math.exp(-0.6), 0.0]
    assert assert_loss(of, settings, loss, gradient) == [True, True, False, True]


@pytest.mark.parametrize(
    ("sides", "kept"),
    [
        # Bounds 0.8 and 1.2; ρ = 0.3, 1, 1.5 and 4 for A = 1, then for A = −1.
        # One side: above 1.2 is left out where A > 0, below 0.8 where A < 0.
        ("one", [1, 1, 0, 0, 0, 1, 1, 1]),
        ("two", [0, 1, 0, 0, 0, 1, 0, 0]),
        # A ring, with outer bounds 0.4 and 3: 0.3 is trained again where A > 0, 4 where A < 0.
        ("ring", [1, 1, 0, 0, 0, 1, 0, 1]),
    ],
)
def test_rec_worked_by_hand(sides: str, kept: list[int]) -> None:
    ratios, advantages = [0.3, 1.0, 1.5, 4.0] * 2, [1.0] * 4 + [-1.0] * 4
    logs = [math.log(ratio) for ratio in ratios]
    gradient = [-k * a for k, a in zip(kept, advantages, strict=True)]
    loss = [g * log for g, log in zip(gradient, logs, strict=True)]
    settings = POLICY_LOSSES.parse({"kind": "rec", "sides": sides})
    assert assert_loss(terms(logs, advantages), settings, loss, gradient) == [not k for k in kept]


def test_second_moment_mask_worked_by_hand() -> None:
    # Squares 0.01, 0.04, 0.25 | 0 off the mask: the mean of all is 0.1; without 0.25 it is 0.025 <= 0.04.
    log_ratio, mask = torch.tensor([[0.1, -0.2], [0.5, 9.0]]), torch.tensor([[1, 1], [1, 0]])
    assert second_moment_mask(log_ratio, mask, 0.04).tolist() == [[True, True], [False, False]]
    assert second_moment_mask(log_ratio, mask, 0.2).tolist() == [[True, True], [True, False]]
    assert not second_moment_mask(log_ratio, mask, 0.005).any()


def test_second_moment_mask_equals_plain_loop() -> None:
    generator = torch.Generator().manual_seed(4)
    log_ratio = torch.randn(7, 11, generator=generator)
    mask = torch.randint(0, 2, (7, 11), generator=generator)
    kept = second_moment_mask(log_ratio, mask, 0.3)
    assert not kept[mask == 0].any()
    assert kept[mask == 1].tolist() == plain_kept(log_ratio[mask == 1].double().tolist(), 0.3)


def test_corrections_worked_by_hand() -> None:
    # ρ = 3, 0.4, 1 in the first answer and 3 off the mask; its product is 1.2.
    # The generator gave 0.2, 0.5, 0.9 and 0.2. For KPop: p = 0.6 against q = 0.2 is D(p ‖ q) = 0.6 ln 3 + 0.4 ln 0.5 =
    # 0.3819 > 0.3; 0.2 against 0.5 is 0.2 ln 0.4 + 0.8 ln 1.6 = 0.1927 one way, 0.5 ln 2.5 + 0.5 ln 0.625 = 0.2231 the
    # other, both <= 0.3; the third does not differ.
    log_ratio, mask = torch.tensor([[3.0, 0.4, 1.0, 3.0]]).log(), torch.tensor([[1, 1, 1, 0]])
    logprobs = torch.tensor([[0.2, 0.5, 0.9, 0.2]]).log()
    bounds = {"tis": {"max_ratio": 2.0}, "icepop": {"min_ratio": 0.5, "max_ratio": 2.0}}
    bounds |= {"sequence_tis": bounds["tis"], "kpop": {"max_divergence": 0.3}}
    # The geometric mean is 1.2^(1/3) = 1.0627; the mean of k3 is (3 − 1 − ln 3 + 0.4 − 1 − ln 0.4) / 3 = 0.4059.
    bounds |= {"sequence_mask": {"max_ratio": 1.1}, "geometric_mask": {"max_ratio": 1.06}}
    bounds |= {"k3_mask": {"max_divergence": 0.41}}
    expected = {
        "none": ([1, 1, 1], [False, False, False]),
        "tis": ([2, 0.4, 1], [True, False, False]),
        "icepop": ([0, 0, 1], [True, True, False]),
        "kpop": ([0, 0.4, 1], [True, False, False]),
        "sequence_tis": ([1.2, 1.2, 1.2], [False, False, False]),
        "sequence_mask": ([0, 0, 0], [True, True, True]),
        "geometric_mask": ([0, 0, 0], [True, True, True]),
        "k3_mask": ([1, 1, 1], [False, False, False]),
    }
    assert set(CORRECTIONS) == set(expected)
    for name, (weights, touched) in expected.items():
        settings = CORRECTIONS.parse({"kind": name, **bounds.get(name, {})})
        found = CORRECTIONS[name](log_ratio, mask, logprobs, settings)
        torch.testing.assert_close(found[0][0, :3], torch.tensor(weights).float(), rtol=1e-5, atol=1e-6)
        assert found[1][0, :3].tolist() == touched, name


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
