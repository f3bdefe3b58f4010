"""The whole objective: what happens to per-token losses, against hand-worked numbers and plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.engine.batch import PackedBatch
from archon.rl.algorithms.aggregation import AGGREGATIONS
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.algorithms.losses import POLICY_LOSSES, M2POLoss, second_moment_mask
from archon.rl.algorithms.objective import PolicyObjective, ValueObjective
from archon.schema.errors import ConfigError
from tests.rl.formulas import documents, plain_kept, plain_objective
from tests.tolerances import FORMULA_FP32, FORMULA_FP64

NONE = {"coef": 0.0}


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
    fields["selected_tokens"] = mask * (torch.arange(total) % 3 == 0)
    fields["demonstrations"] = mask * (torch.arange(total) >= sum(lengths[:3]))  # the last two documents
    return -noise().abs(), noise().abs(), documents(lengths, **fields)


def objective_of(config: AlgorithmConfig, logprobs: Tensor, entropy: Tensor, batch: PackedBatch) -> float:
    """The number that is minimized."""
    objective = PolicyObjective(config)
    return (objective(logprobs, entropy, batch)[0] / objective.units(batch)).item()


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("correction", ["none", "tis"])
@pytest.mark.parametrize("policy_loss", sorted(POLICY_LOSSES))
def test_policy_loss_equals_plain_loop(policy_loss: str, correction: str, dual_clip: float | None) -> None:
    if policy_loss == "decoupled" and correction == "none":
        with pytest.raises(ConfigError, match="policy_loss decoupled needs a correction"):
            AlgorithmConfig.parse({"policy_loss": policy_loss})
        return
    settings: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": dual_clip, "tau_positive": 0.8}
    settings["tau_negative"] = 1.3
    settings["max_second_moment"] = 0.3
    sides = {("none", None): "one", ("none", 1.5): "two", ("tis", None): "ring", ("tis", 1.5): "ring"}
    settings |= {"epsilon": 0.2, "sides": sides[correction, dual_clip]}
    known = POLICY_LOSSES.settings_class(policy_loss).model_fields
    given = {name: value for name, value in settings.items() if name in known}
    config = AlgorithmConfig.parse({"policy_loss": {"kind": policy_loss, **given}, "correction": correction})
    logprobs, entropy, batch = random_batch()
    kept = None
    if isinstance(config.policy_loss, M2POLoss):
        threshold = config.policy_loss.max_second_moment
        log_ratio, trained = batch["prox_logprobs"] - batch["logprobs"], batch["loss_mask"] == 1
        batch.fields["policy_weights"] *= second_moment_mask(log_ratio, batch["loss_mask"], threshold)
        kept = plain_kept(log_ratio[trained].tolist(), threshold)
        assert 0 < sum(kept) < len(kept)
    expected = plain_objective(logprobs, entropy, batch, config, kept)
    assert math.isclose(objective_of(config, logprobs, entropy, batch), expected, rel_tol=FORMULA_FP64)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("kl_kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("correction", ["none", "tis"])
def test_objective_equals_plain_loop(aggregation: str, kl_kind: str, correction: str) -> None:
    """With a correction too: it weighs the policy loss, and neither the KL nor the entropy."""
    config = AlgorithmConfig.parse(
        {
            "correction": correction,
            "aggregation": {"kind": aggregation, **({"max_tokens": 11} if aggregation == "dr_grpo" else {})},
            "kl": {"kind": kl_kind, "coef": 0.3},
            "entropy_coef": 0.05,
            "policy_loss": {"clip_low": 0.1, "clip_high": 0.4},
        }
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
    _, metrics = PolicyObjective(AlgorithmConfig.parse({"kl": NONE}))(logprobs, entropy, batch)
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


def test_clip_fractions_by_the_side_that_was_clipped() -> None:
    # The five tokens above and a masked one: of 5, the first is clipped at 1 + ε and the fourth at 1 − ε.
    logprobs = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1, 9.0], dtype=torch.float64).log()
    fields = {
        "loss_mask": torch.tensor([1, 1, 1, 1, 1, 0]),
        "advantages": torch.tensor([2.0, 2.0, -1.0, -1.0, 2.0, 2.0], dtype=torch.float64),
        "logprobs": torch.zeros(6, dtype=torch.float64),
    }
    config = AlgorithmConfig.parse({"kl": NONE, "policy_loss": {"clip_low": 0.2, "clip_high": 0.2}})
    _, metrics = PolicyObjective(config)(logprobs, torch.zeros_like(logprobs), documents((6,), **fields))
    found = {name: [x.item() for x in metrics[name]] for name in metrics if name.startswith("clip_fraction")}
    assert found == {"clip_fraction": [2, 5], "clip_fraction_low": [1, 5], "clip_fraction_high": [1, 5]}


def test_decoupled_loss_worked_by_hand() -> None:
    # Three tokens of which π_prox gave each 1/2, so ρ = π / π_prox = 1.5, 0.5 and 1.5, the last not trained. A = 2:
    # −min(3, 2 · 1.2) = −2.4, times the weight 0.5: −1.2; and −min(1, 1.6) = −1, times 2: −2. Mean −1.6. What the
    # generator gave them (1/10) is in the weights alone.
    logprobs = torch.tensor([0.75, 0.25, 0.75], dtype=torch.float64).log()
    fields = {
        "loss_mask": torch.tensor([1, 1, 0]),
        "advantages": torch.full((3,), 2.0, dtype=torch.float64),
        "logprobs": torch.full((3,), 0.1, dtype=torch.float64).log(),
        "prox_logprobs": torch.full((3,), 0.5, dtype=torch.float64).log(),
        "policy_weights": torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64),
    }
    decoupled = {"kind": "decoupled", "clip_low": 0.2, "clip_high": 0.2}
    config = AlgorithmConfig.parse({"policy_loss": decoupled, "correction": "tis", "kl": NONE})
    found = objective_of(config, logprobs, torch.zeros(3), documents((3,), **fields))
    assert found == pytest.approx(-1.6, rel=FORMULA_FP64)


def test_m2po_loss_worked_by_hand() -> None:
    # log π_prox / π_behave = 0.1, −0.2 and 0.5: the mean square of all is 0.1, of the first two 0.025 <= 0.04, so the
    # third is left out. ρ = π / π_prox = 3, 0.5 and 7 without a clip, A = 2, −1 and 4: −6, 0.5 and nothing, over the
    # three tokens of the batch: −5.5 / 3.
    prox, log_ratio = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64), torch.tensor([0.1, -0.2, 0.5])
    fields = {
        "loss_mask": torch.ones(3),
        "advantages": torch.tensor([2.0, -1.0, 4.0], dtype=torch.float64),
        "logprobs": prox - log_ratio,
        "prox_logprobs": prox,
        "policy_weights": second_moment_mask(log_ratio, torch.ones(3), 0.04).double(),
    }
    logprobs = prox + torch.tensor([3.0, 0.5, 7.0], dtype=torch.float64).log()
    found = objective_of(AlgorithmConfig(preset="m2po"), logprobs, torch.zeros(3), documents((3,), **fields))
    assert found == pytest.approx(-5.5 / 3, rel=FORMULA_FP64)


def test_entropy_bonus_worked_by_hand() -> None:
    # Entropies 2 and 1 | 4, and 9 off the mask; advantages of 0. The bonus is taken off what is minimized, aggregated
    # as the loss is: −0.1 · ((2 + 1)/2 + 4) / 2 = −0.275 by answer, −0.1 · (2 + 1 + 4) / 3 = −0.233333 by token.
    mask, zeros = torch.tensor([0, 1, 1, 0, 1]), torch.zeros(5, dtype=torch.float64)
    batch = documents((3, 2), loss_mask=mask, advantages=zeros, logprobs=zeros)
    entropy = torch.tensor([9.0, 2.0, 1.0, 9.0, 4.0], dtype=torch.float64)
    for aggregation, expected in (("seq_mean_token_mean", -0.275), ("token_mean", -0.7 / 3)):
        config = AlgorithmConfig.parse({"kl": NONE, "entropy_coef": 0.1, "aggregation": aggregation})
        assert objective_of(config, zeros, entropy, batch) == pytest.approx(expected, rel=FORMULA_FP64)


def test_aggregations_worked_by_hand() -> None:
    # Three documents of 3, 2 and 2 tokens; loss tokens 2, 1 and 0; losses of the loss tokens 1, 3 | 10 | none.
    # token_mean: (1 + 3 + 10) / 3 = 4.6667. seq_mean_token_mean: ((1 + 3)/2 + 10) / 2 = 6. The third document has no
    # loss token and is not an answer. seq_mean_token_sum: (1 + 3 + 10) / 2 = 7. dr_grpo with a limit of 4 tokens: 7/4.
    mask = torch.tensor([0.0, 1, 1, 1, 0, 0, 0])
    losses = torch.tensor([99.0, 1, 3, 10, 99, 99, 99])
    owners = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    expected = {"token_mean": 14 / 3, "seq_mean_token_mean": 6.0, "seq_mean_token_sum": 7.0, "dr_grpo": 1.75}
    assert set(AGGREGATIONS) == set(expected)
    limit = {"dr_grpo": {"max_tokens": 4}}
    for name, value in expected.items():
        weights, units = AGGREGATIONS[name](mask, owners, 3, AGGREGATIONS.parse({"kind": name, **limit.get(name, {})}))
        assert math.isclose(((weights * losses).sum() / units).item(), value, rel_tol=FORMULA_FP32)


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
    objective = PolicyObjective(AlgorithmConfig.parse({"preset": "grpo", "kl": NONE}))
    loss, _ = objective(logprobs, torch.zeros(7), batch)
    assert (loss / objective.units(batch)).item() == -(3.0 - 1.0) / 2
