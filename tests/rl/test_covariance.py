"""Which tokens Clip-Cov and KL-Cov select, and their losses, against hand-worked numbers and plain loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.algorithms.covariance import CovarianceLoss, select_tokens
from archon.rl.algorithms.losses import POLICY_LOSSES
from archon.rl.update import PolicyUpdate
from archon.schema.errors import ConfigError
from tests.rl.formulas import plain_covariances
from tests.rl.objectives import float64_engine, trajectories
from tests.rl.test_policy_losses import assert_loss, terms
from tests.tolerances import FORMULA_FP64


def settings_of(**given: Any) -> CovarianceLoss:
    settings: CovarianceLoss = POLICY_LOSSES.parse(given)
    return settings


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    advantages, logprobs = torch.randn(2, 6, 20, generator=generator, dtype=torch.float64)
    return advantages, -logprobs.abs(), torch.randint(0, 2, (6, 20), generator=generator)


def test_covariances_worked_by_hand() -> None:
    # log π = −1, −2, −3, −6, mean −3; A = 2, 0, 0, 2, mean 1. The products: 2 · 1 = 2, 1 · −1 = −1, 0 and −3 · 1 = −3.
    # The fifth token is not trained.
    logprobs, advantages = torch.tensor([[-1.0, -2, -3, -6, -50]]), torch.tensor([[2.0, 0, 0, 2, 90]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    expected = {0.3: [0], 0.5: [0, 2], 0.99: [0, 2, 1]}
    for fraction, chosen in expected.items():
        settings = settings_of(kind="kl_cov", fraction=fraction)
        found = select_tokens(advantages, logprobs, mask, settings, drawn())
        assert set(found[0].nonzero().flatten().tolist()) == set(chosen)
    for low, high, chosen in ((-0.5, 1.0, [2]), (-2.0, 0.5, [1, 2]), (1.0, 5.0, [0]), (2.0, 5.0, [])):
        settings = settings_of(kind="clip_cov", fraction=0.9, min_covariance=low, max_covariance=high)
        found = select_tokens(advantages, logprobs, mask, settings, drawn())
        assert found[0].nonzero().flatten().tolist() == chosen


@pytest.mark.parametrize("fraction", [1e-4, 0.1, 0.6])
def test_selection_equals_plain_loop(fraction: float) -> None:
    advantages, logprobs, mask = tokens()
    trained = mask == 1
    covariances = plain_covariances(logprobs[trained].tolist(), advantages[trained].tolist())
    count = max(1, int(fraction * len(covariances)))
    largest = sorted(range(len(covariances)), key=lambda i: covariances[i], reverse=True)[:count]
    found = select_tokens(advantages, logprobs, mask, settings_of(kind="kl_cov", fraction=fraction), drawn())
    assert found[trained].nonzero().flatten().tolist() == sorted(largest) and not found[~trained].any()

    clip = settings_of(kind="clip_cov", fraction=fraction, min_covariance=0.1, max_covariance=0.9)
    within = {i for i, covariance in enumerate(covariances) if 0.1 < covariance < 0.9}
    found = select_tokens(advantages, logprobs, mask, clip, drawn())
    assert set(found[trained].nonzero().flatten().tolist()) <= within and not found[~trained].any()
    assert int(found.sum()) == min(count, len(within))


def test_draws_of_clip_cov_reach_every_token_within_the_bounds_and_depend_on_no_order() -> None:
    advantages, logprobs, mask = tokens(1)
    clip = settings_of(kind="clip_cov", fraction=0.1, min_covariance=0.1, max_covariance=0.9)
    draws = [select_tokens(advantages, logprobs, mask, clip, drawn(seed)) for seed in range(60)]
    trained = mask == 1
    covariances = torch.tensor(plain_covariances(logprobs[trained].tolist(), advantages[trained].tolist()))
    reached = torch.stack(draws).any(0)[trained]
    assert reached.equal((covariances > 0.1) & (covariances < 0.9))
    order = torch.randperm(6, generator=drawn(2))
    turned = select_tokens(advantages[order], logprobs[order], mask[order], clip, drawn(7))
    assert turned.equal(draws[7][order])


def test_losses_worked_by_hand() -> None:
    # ρ = e^0.5, e^−0.5, 1: the second is selected. KL-Cov adds 2 · |−0.5| = 1 to it, with the derivative −2.
    of = replace(terms([0.5, -0.5, 0.0], [1.0, -1.0, 2.0]), selected=torch.tensor([0, 1, 0]))
    up, down = 1.6487213, 0.6065307
    assert assert_loss(of, settings_of(kind="kl_cov", coef=2.0), [-up, down + 1, -2.0], [-up, down - 2, -2.0]) == [
        *(False, True, False)
    ]
    of = replace(terms([0.5, -0.5, 0.0], [1.0, -1.0, 2.0]), selected=torch.tensor([0, 1, 0]))
    assert assert_loss(of, settings_of(kind="clip_cov"), [-up, 0.0, -2.0], [-up, 0.0, -2.0]) == [False, True, False]


def test_update_selects_from_the_whole_batch_without_truncated_answers(blank: Path) -> None:
    batch = trajectories()
    batch["truncated"] = torch.arange(9) == 4
    engine = float64_engine(str(blank))
    loss = {"kind": "kl_cov", "fraction": 0.2}
    algorithm = {"policy_loss": loss, "kl": {"coef": 0.0}, "overlong": {"mask_truncated": True}}
    update = PolicyUpdate(engine, None, AlgorithmConfig.parse(algorithm), temperature=0.8)
    prepared, metrics = update.prepare(batch, step=0)
    trained = prepared["loss_mask"] == 1
    covariances = plain_covariances(batch["logprobs"][trained].tolist(), prepared["advantages"][trained].tolist())
    count = int(0.2 * len(covariances))
    largest = sorted(range(len(covariances)), key=lambda i: covariances[i], reverse=True)[:count]
    assert prepared["selected_tokens"][trained].nonzero().flatten().tolist() == sorted(largest)
    assert not prepared["selected_tokens"][4].any()
    assert metrics["selected_fraction"] == pytest.approx(count / len(covariances), rel=FORMULA_FP64)


def test_draws_of_an_update_change_with_the_step_and_repeat_with_it(blank: Path) -> None:
    batch, engine = trajectories(), float64_engine(str(blank))
    loss = {"kind": "clip_cov", "fraction": 0.2, "min_covariance": -9.0, "max_covariance": 9.0}
    config = AlgorithmConfig.parse({"policy_loss": loss, "kl": {"coef": 0.0}})
    update = PolicyUpdate(engine, None, config, temperature=0.8, seed=3)
    first, second, again = (update.prepare(batch, step)[0]["selected_tokens"] for step in (0, 1, 0))
    assert first.equal(again) and not first.equal(second)


def test_bounds_that_hold_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_covariance 5\.0 is not below max_covariance 5\.0"):
        AlgorithmConfig.parse({"policy_loss": {"kind": "clip_cov", "min_covariance": 5.0}})
