"""What `test_advantages` and `test_objective` leave: critic's loss, corrections and losses of pairs, as loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.algorithms.corrections import CORRECTIONS
from archon.rl.algorithms.objective import ValueObjective
from archon.training.preference_losses import preference_loss
from tests.rl.formulas import documents, plain_correction
from tests.rl.objectives import PAIR_LOSSES
from tests.tolerances import FORMULA_FP64


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss_equals_plain_loop(clip: float | None) -> None:
    """arXiv 2005.12729, section 3: the larger of the two squares, halved, over trained tokens."""
    values, returns, old = torch.randn(3, 12, dtype=torch.float64)
    mask = torch.tensor([0, 1, 1] * 4)
    batch = documents((5, 7), loss_mask=mask, returns=returns, old_values=old)
    objective = ValueObjective(AlgorithmConfig(value_clip=clip))
    loss, _ = objective(values, None, batch)
    squares = []
    for v, r, before, trained in zip(values.tolist(), returns.tolist(), old.tolist(), mask.tolist(), strict=True):
        if trained:
            near = v if clip is None else before + min(max(v - before, -clip), clip)
            squares.append(max((v - r) ** 2, (near - r) ** 2) / 2)
    assert (loss / objective.units(batch)).item() == pytest.approx(sum(squares) / len(squares), rel=FORMULA_FP64)


@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
def test_correction_equals_plain_loop(correction: str) -> None:
    trainer, generator = -torch.rand(2, 6, 9, dtype=torch.float64).mul(3) - 0.05
    log_ratio, mask = trainer - generator, torch.randint(0, 2, (6, 9))
    bounds = {name: {"max_ratio": 1.4} for name in ("tis", "sequence_tis")}
    bounds |= {"sequence_mask": {"max_ratio": 1.4}, "k3_mask": {"max_divergence": 0.6}}
    bounds |= {"geometric_mask": {"min_ratio": 0.6, "max_ratio": 1.4}}
    bounds |= {"icepop": {"max_ratio": 1.4, "min_ratio": 0.6}, "kpop": {"max_divergence": 0.07}}
    settings = CORRECTIONS.parse({"kind": correction, **bounds.get(correction, {})})
    weights, touched = CORRECTIONS[correction](log_ratio, mask, generator, settings)
    assert 0 < touched[mask == 1].sum() < mask.sum() or correction == "none"
    for row in range(6):
        trained = mask[row] == 1
        expected = plain_correction(log_ratio[row][trained].tolist(), generator[row][trained].tolist(), settings)
        assert weights[row][trained].tolist() == pytest.approx([weight for weight, _ in expected], rel=FORMULA_FP64)
        assert touched[row][trained].tolist() == [beyond for _, beyond in expected]


@pytest.mark.parametrize("kind", PAIR_LOSSES)
def test_preference_loss_equals_plain_loop(kind: Any) -> None:
    chosen, rejected = -torch.rand(2, 20, dtype=torch.float64) * 4 - 0.01
    margins = torch.randn(20, dtype=torch.float64)
    loss = preference_loss(chosen, rejected, kind, 0.3, gamma=0.7, margin=margins if kind == "reward" else None)
    for c, r, margin, found in zip(*(x.tolist() for x in (chosen, rejected, margins, loss)), strict=True):
        odds = [math.exp(x) / (1 - math.exp(x)) for x in (c, r)]
        expected = {
            "dpo": math.log(1 + math.exp(-0.3 * (c - r))),
            "cpo": math.log(1 + math.exp(-0.3 * (c - r))),
            "ipo": (c - r - 1 / 0.6) ** 2,
            "simpo": math.log(1 + math.exp(-0.3 * (c - r) + 0.7)),
            "orpo": 0.3 * math.log(1 + odds[1] / odds[0]),
            "reward": math.log(1 + math.exp(-(c - r - margin))),
        }[kind]
        assert found == pytest.approx(expected, rel=FORMULA_FP64)
