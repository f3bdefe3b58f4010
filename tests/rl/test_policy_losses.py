"""Policy losses, KL estimators and aggregations against hand-worked numbers and plain-loop references."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from archon.batch import PackedBatch
from archon.rl.algorithms.aggregation import AGGREGATIONS
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.algorithms.corrections import CORRECTIONS
from archon.rl.algorithms.kl import kl_estimate
from archon.rl.algorithms.losses import POLICY_LOSSES, PolicyTerms, clipped_loss, second_moment_mask
from archon.rl.algorithms.objective import PolicyObjective, ValueObjective
from archon.rl.algorithms.presets import PRESETS
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
    loss, ratio, clipped = clipped_loss(logprobs.exp(), advantages, 0.2, 0.2)
    expected = torch.tensor([-2.4, -1.0, 1.5, 0.8, -2.2], dtype=torch.float64)
    torch.testing.assert_close(loss, expected, rtol=FORMULA_FP64, atol=FORMULA_FP64)
    torch.testing.assert_close(ratio, logprobs.exp(), rtol=0, atol=0)
    assert clipped.tolist() == [True, False, False, True, False]


def test_clip_fractions_by_the_side_that_was_clipped() -> None:
    # The five tokens above and a masked one: of 5, the first is clipped at 1 + ε and the fourth at 1 − ε.
    logprobs = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1, 9.0], dtype=torch.float64).log()
    fields = {
        "loss_mask": torch.tensor([1, 1, 1, 1, 1, 0]),
        "advantages": torch.tensor([2.0, 2.0, -1.0, -1.0, 2.0, 2.0], dtype=torch.float64),
        "logprobs": torch.zeros(6, dtype=torch.float64),
    }
    config = AlgorithmConfig(kl_coef=0, clip_eps_low=0.2, clip_eps_high=0.2)
    _, metrics = PolicyObjective(config)(logprobs, torch.zeros_like(logprobs), documents((6,), **fields))
    found = {name: [x.item() for x in metrics[name]] for name in metrics if name.startswith("clip_fraction")}
    assert found == {"clip_fraction": [2, 5], "clip_fraction_low": [1, 5], "clip_fraction_high": [1, 5]}


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
    # loss token and is not an answer. seq_mean_token_sum: (1 + 3 + 10) / 2 = 7. dr_grpo with a limit of 4 tokens: 7/4.
    mask = torch.tensor([0.0, 1, 1, 1, 0, 0, 0])
    losses = torch.tensor([99.0, 1, 3, 10, 99, 99, 99])
    owners = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    expected = {"token_mean": 14 / 3, "seq_mean_token_mean": 6.0, "seq_mean_token_sum": 7.0, "dr_grpo": 1.75}
    assert set(AGGREGATIONS) == set(expected)
    for name, value in expected.items():
        weights, units = AGGREGATIONS[name](mask, owners, 3, AlgorithmConfig(length_budget=4))
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
    fields |= {"prox_logprobs": -noise().abs(), "policy_weights": noise().abs()}
    return -noise().abs(), noise().abs(), documents(lengths, **fields)


def plain_objective(logprobs: Tensor, entropy: Tensor, batch: PackedBatch, config: AlgorithmConfig) -> float:
    """Each objective as its paper writes it, its parts exchangeable, one token at a time."""
    per_document: list[list[float]] = []
    start = 0
    for length in batch.lengths:
        tokens = [t for t in range(start, start + length) if batch["loss_mask"][t]]
        start += length
        if not tokens:
            continue
        name = "prox_logprobs" if config.recomputes else "logprobs"
        logs = [(logprobs[t] - batch[name][t]).item() for t in tokens]
        values = []
        for t, log_ratio in zip(tokens, logs, strict=True):
            if config.policy_loss == "gspo":
                log_ratio = sum(logs) / len(logs)
            value = plain_loss(logprobs[t].item(), math.exp(log_ratio), batch["advantages"][t].item(), config)
            if config.recomputes:
                value *= batch["policy_weights"][t].item()
            d = (logprobs[t] - batch["ref_logprobs"][t]).item()
            value += config.kl_coef * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[config.kl_kind]
            values.append(value - config.entropy_coef * entropy[t].item())
        per_document.append(values)
    if config.aggregation == "token_mean":
        return sum(map(sum, per_document)) / sum(map(len, per_document))
    if config.aggregation == "seq_mean_token_mean":
        return sum(sum(values) / len(values) for values in per_document) / len(per_document)
    mean = sum(map(sum, per_document)) / len(per_document)
    return mean / config.length_budget if config.aggregation == "dr_grpo" and config.length_budget else mean


def plain_loss(logprob: float, ratio: float, advantage: float, config: AlgorithmConfig) -> float:
    clipped = min(max(ratio, 1 - config.clip_eps_low), 1 + config.clip_eps_high)
    if config.policy_loss in ("ppo", "decoupled", "gspo"):
        value = min(advantage * ratio, advantage * clipped)
        if config.dual_clip is not None and advantage < 0:
            value = max(value, advantage * config.dual_clip)
        return -value
    if config.policy_loss == "cispo":
        return -clipped * advantage * logprob
    if config.policy_loss == "sapo":
        tau = config.sapo_tau_positive if advantage > 0 else config.sapo_tau_negative
        return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    if config.policy_loss == "reinforce":
        return -advantage * logprob
    return -advantage * ratio


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("correction", ["none", "tis"])
@pytest.mark.parametrize("policy_loss", sorted(POLICY_LOSSES))
def test_policy_loss_equals_plain_loop(policy_loss: str, correction: str, dual_clip: float | None) -> None:
    if policy_loss == "decoupled" and correction == "none":
        with pytest.raises(ConfigError, match="policy_loss decoupled is weighted by a correction"):
            AlgorithmConfig.parse({"policy_loss": policy_loss})
        return
    config = AlgorithmConfig(
        policy_loss=policy_loss,
        correction=correction,
        dual_clip=dual_clip,
        clip_eps_low=0.1,
        clip_eps_high=0.4,
        sapo_tau_positive=0.8,
        sapo_tau_negative=1.3,
    )
    logprobs, entropy, batch = random_batch()
    objective = PolicyObjective(config)
    loss, _ = objective(logprobs, entropy, batch)
    expected = plain_objective(logprobs, entropy, batch, config)
    assert math.isclose((loss / objective.units(batch)).item(), expected, rel_tol=FORMULA_FP64)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("kl_kind", ["k1", "k2", "k3"])
def test_objective_equals_plain_loop(aggregation: str, kl_kind: str) -> None:
    config = AlgorithmConfig(
        aggregation=aggregation,
        length_budget=11,
        kl_kind=kl_kind,
        kl_coef=0.3,
        entropy_coef=0.05,
        clip_eps_low=0.1,
        clip_eps_high=0.4,
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


GROUP = {"advantage": "grpo", "aggregation": "seq_mean_token_mean", "ppo_epochs": 1, "entropy_coef": 0.0}
CLIP = {"policy_loss": "ppo", "clip_eps_low": 0.2, "clip_eps_high": 0.2, "dual_clip": None}
NO_KL = {"kl_coef": 0.0}


@pytest.mark.parametrize(
    ("preset", "parts"),
    [
        ("grpo", GROUP | CLIP | {"kl_kind": "k3", "kl_coef": 0.04, "kl_in": "loss", "minibatches": 1}),
        ("dr_grpo", GROUP | CLIP | NO_KL | {"advantage": "dr_grpo", "aggregation": "dr_grpo"}),
        (
            "rloo",
            {"advantage": "rloo", "policy_loss": "reinforce", "aggregation": "seq_mean_token_sum"}
            | {"kl_in": "reward", "kl_kind": "k1", "kl_coef": 0.03},
        ),
        (
            "reinforce_pp",
            CLIP
            | {"advantage": "reinforce_pp", "aggregation": "token_mean"}
            | {"kl_in": "reward", "kl_kind": "k1", "kl_coef": 0.01},
        ),
        (
            "ppo",
            CLIP
            | {"advantage": "gae", "gae_gamma": 1.0, "gae_lambda": 0.95, "value_clip": 0.2, "aggregation": "token_mean"}
            | {"kl_in": "reward", "kl_kind": "k1", "kl_coef": 0.02, "ppo_epochs": 1, "minibatches": 8},
        ),
        (
            "dapo",
            GROUP
            | CLIP
            | NO_KL
            | {"clip_eps_high": 0.28, "aggregation": "token_mean", "groups_without_spread": "refill"}
            | {"overlong_penalty": 1.0, "overlong_buffer": 0.2, "minibatches": 16},
        ),
        ("gspo", GROUP | NO_KL | {"policy_loss": "gspo", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4}),
        ("cispo", GROUP | NO_KL | {"policy_loss": "cispo", "clip_eps_low": 1.0, "aggregation": "token_mean"}),
        ("sapo", GROUP | NO_KL | {"policy_loss": "sapo", "sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05}),
        ("m2po", GROUP | NO_KL | {"policy_loss": "m2po", "m2_threshold": 0.04, "aggregation": "token_mean"}),
    ],
)
def test_preset_means_exactly_its_paper(preset: str, parts: dict[str, object]) -> None:
    config = AlgorithmConfig(preset=preset).model_dump()
    assert {name: config[name] for name in parts} == parts
    if preset not in ("dapo",):
        assert config["overlong_penalty"] == 0 and config["groups_without_spread"] == "keep"
    assert config["correction"] == "none"


def test_every_preset_is_checked_above() -> None:
    assert set(PRESETS) == {
        *("grpo", "dr_grpo", "rloo", "reinforce_pp", "ppo", "dapo", "gspo", "cispo", "sapo", "m2po")
    }


def terms(logprobs: list[float], advantages: list[float], documents: list[int] | None = None) -> PolicyTerms:
    """Tokens whose old logprob is 0."""
    new = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    owners = torch.tensor(documents or [0] * len(logprobs))
    ones = torch.ones_like(new)
    return PolicyTerms(
        new, torch.zeros_like(new), torch.tensor(advantages, dtype=torch.float64), ones, owners, int(owners.max()) + 1
    )


def test_dual_clip_worked_by_hand() -> None:
    # A = −1, ρ = 5: −Aρ = 5, clip 1.2, so 5; c = 3 bounds it by 3. A = −1, ρ = 2: 2 is below. A = 1, ρ = 5: still −1.2.
    ratio, advantages = torch.tensor([5.0, 2.0, 5.0]), torch.tensor([-1.0, -1.0, 1.0])
    loss, _, clipped = clipped_loss(ratio, advantages, 0.2, 0.2, 3.0)
    torch.testing.assert_close(loss, torch.tensor([3.0, 2.0, -1.2]), rtol=FORMULA_FP32, atol=FORMULA_FP32)
    assert clipped.tolist() == [True, False, True]


def test_gspo_worked_by_hand() -> None:
    # Log-ratios 0.1, 0.3 | −0.2: s = e^0.2 = 1.221403 for both tokens of the first answer, e^−0.2 = 0.818731. With
    # A = 1 and bounds far away the loss is −s, and its gradient −s at every token, though only their mean enters s.
    config = AlgorithmConfig(policy_loss="gspo", clip_eps_low=0.9, clip_eps_high=0.9)
    of = terms([0.1, 0.3, -0.2], [1.0, 1.0, 1.0], [0, 0, 1])
    loss = POLICY_LOSSES["gspo"](of, config).loss
    expected = torch.tensor([-1.221403, -1.221403, -0.818731], dtype=torch.float64)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    loss.sum().backward()
    assert of.logprobs.grad is not None
    torch.testing.assert_close(of.logprobs.grad, expected, rtol=0, atol=1e-6)


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    # ρ = e^1 = 2.718282 is bounded by 1.5: loss −1.5 · A · log π = −1.5 · 2 · 1, gradient −1.5 · 2. PPO's would be 0.
    config = AlgorithmConfig(policy_loss="cispo", clip_eps_low=1.0, clip_eps_high=0.5)
    of = terms([1.0], [2.0])
    loss, _, clipped = POLICY_LOSSES["cispo"](of, config)
    loss.sum().backward()
    assert of.logprobs.grad is not None
    assert (loss.item(), of.logprobs.grad.item(), clipped.tolist()) == (-3.0, -3.0, [True])


def test_sapo_worked_by_hand() -> None:
    # On policy ρ = 1: the gate is 4/τ · σ(0) = 2/τ, and its slope 4/τ · τ · 1/4 = 1, the plain policy gradient's.
    config = AlgorithmConfig(policy_loss="sapo", sapo_tau_positive=1.0, sapo_tau_negative=2.0)
    of = terms([0.0, 0.0], [3.0, -3.0])
    loss = POLICY_LOSSES["sapo"](of, config).loss
    loss.sum().backward()
    assert of.logprobs.grad is not None
    assert loss.tolist() == [-6.0, 3.0]
    assert of.logprobs.grad.tolist() == [-3.0, 3.0]


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
    left = sorted(log_ratio[mask == 1].double().square().tolist())
    while sum(left) / len(left) > 0.3:
        left.pop()
    kept = second_moment_mask(log_ratio, mask, 0.3)
    assert sorted(log_ratio[kept].double().square().tolist()) == left


def test_corrections_worked_by_hand() -> None:
    # ρ = 3, 0.4, 1 in the first answer and 3 off the mask; its product is 1.2.
    log_ratio, mask = torch.tensor([[3.0, 0.4, 1.0, 3.0]]).log(), torch.tensor([[1, 1, 1, 0]])
    config = AlgorithmConfig(correction_low=0.5, correction_high=2.0)
    expected = {
        "none": ([1, 1, 1], [False, False, False]),
        "tis": ([2, 0.4, 1], [True, False, False]),
        "icepop": ([0, 0, 1], [True, True, False]),
        "sequence_tis": ([1.2, 1.2, 1.2], [False, False, False]),
    }
    assert set(CORRECTIONS) == set(expected)
    for name, (weights, touched) in expected.items():
        found = CORRECTIONS[name](log_ratio, mask, config)
        torch.testing.assert_close(found[0][0, :3], torch.tensor(weights).float(), rtol=1e-5, atol=1e-6)
        assert found[1][0, :3].tolist() == touched, name


def test_value_loss_worked_by_hand() -> None:
    # V = 3, R = 1, V_old = 2, ε = 0.5: (3 − 1)² = 4, clipped to 2.5: 2.25, so ½ · 4. V = 1, R = 3, V_old = 0, ε = 0.5:
    # (1 − 3)² = 4, clipped to 0.5: 6.25, so ½ · 6.25, which the clip decided. The third token is not trained.
    fields = {"returns": torch.tensor([1.0, 3.0, 9.0]), "old_values": torch.tensor([2.0, 0.0, 9.0])}
    batch = documents((3,), loss_mask=torch.tensor([1, 1, 0]), **fields)
    values = torch.tensor([3.0, 1.0, 0.0])
    loss, metrics = ValueObjective(AlgorithmConfig(value_clip=0.5))(values, None, batch)
    assert loss.item() == 2 + 3.125
    assert [x.item() for x in metrics["value_clip_fraction"]] == [1, 2]
    assert ValueObjective(AlgorithmConfig())(values, None, batch)[0].item() == 2 + 2


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
