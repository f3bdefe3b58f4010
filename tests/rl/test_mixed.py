"""Losses that mix demonstrations into a batch: against hand-worked numbers, plain loops, and the real trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.models.vision.images import ProcessedImage
from archon.rl import RLTrainer
from archon.rl.algorithms.aggregation import AGGREGATIONS
from archon.rl.algorithms.losses import POLICY_LOSSES, PolicyTerms
from archon.rl.algorithms.mixed import mixing_weights
from archon.rl.config import RLConfig
from archon.rl.demonstrations import add_demonstrations
from archon.schema.errors import ConfigError
from archon.training.metrics import read_jsonl
from tests.tolerances import FORMULA_FP64

MakeConfig = Callable[..., RLConfig]


def terms(logprobs: list[float], advantages: list[float], given: list[int]) -> PolicyTerms:
    """Tokens of one document each, whose old logprob is log 0.5."""
    new = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    old = torch.full_like(new, math.log(0.5)).detach()
    owners, values = torch.arange(len(given)), torch.tensor(advantages, dtype=torch.float64)
    return PolicyTerms(new, old, values, torch.ones_like(old), owners, len(given), torch.tensor(given))


@pytest.mark.parametrize(
    ("settings", "weights"), [({"kind": "mix"}, [1, 1]), ({"kind": "chord"}, [0.16, 0.25]), ("chord", [0.16, 0.25])]
)
def test_demonstrations_are_weighed_by_hand_worked_numbers(settings: object, weights: list[float]) -> None:
    # Tokens: the policy's with ρ = 0.75/0.5 = 1.5, A = 2, clipped to 1.2: −2.4, without gradient; the policy's with
    # ρ = 0.5, A = 2: −1, whose gradient is −Aρ = −1; demonstrations with p = 0.8 and 0.5: −w·log p, gradient −w,
    # with w = 1, or φ = p(1 − p) = 0.16 and 0.25.
    of = terms([math.log(p) for p in (0.75, 0.25, 0.8, 0.5)], [2.0, 2.0, 9.0, 9.0], [0, 0, 1, 1])
    parsed = POLICY_LOSSES.parse(settings)
    loss, _, clipped = POLICY_LOSSES[parsed.kind](of, parsed)
    demonstrated = [-weights[0] * math.log(0.8), -weights[1] * math.log(0.5)]
    assert loss.tolist() == pytest.approx([-2.4, -1.0, *demonstrated], rel=FORMULA_FP64)
    assert clipped.tolist() == [True, False, False, False]
    loss.sum().backward()
    assert of.logprobs.grad is not None
    assert of.logprobs.grad.tolist() == pytest.approx([0, -1, -weights[0], -weights[1]], rel=FORMULA_FP64, abs=1e-12)


def test_chord_without_phi_is_plain_likelihood() -> None:
    of = terms([math.log(0.8)], [0.0], [1])
    settings = POLICY_LOSSES.parse({"kind": "chord", "phi": False})
    assert POLICY_LOSSES["chord"](of, settings).loss.item() == pytest.approx(-math.log(0.8))


def test_the_weight_warms_up_and_decays() -> None:
    """CHORD, section 3: linear from 0 to 0.9 in 4 steps, then a half cosine to 0.1 in 2."""
    settings = POLICY_LOSSES.parse(
        {"kind": "chord", "mu_peak": 0.9, "mu_valley": 0.1, "mu_warmup_steps": 4, "mu_decay_steps": 2}
    )
    found = [settings.weight_at(step) for step in range(8)]
    assert found == pytest.approx([0.0, 0.225, 0.45, 0.675, 0.9, 0.5, 0.1, 0.1])
    assert POLICY_LOSSES.parse({"kind": "mix", "mu": 0.3}).weight_at(7) == 0.3


@pytest.mark.parametrize("kind", sorted(AGGREGATIONS))
def test_the_whole_is_the_weighted_sum_of_the_two_means(kind: str) -> None:
    """As a plain loop: each mean over the rows of its own kind, then (1 − μ) and μ of them."""
    given = torch.tensor([False, True, False, True, True])
    mask, losses = torch.randint(0, 2, (5, 7)), torch.randn(5, 7, dtype=torch.float64)
    mask[:, 0] = 1
    settings = AGGREGATIONS.parse({"kind": kind, "max_tokens": 7} if kind == "dr_grpo" else kind)

    def aggregated(rows: Tensor, weights: Tensor) -> float:
        n, owners = len(rows), torch.arange(len(rows)).repeat_interleave(7)
        tokens, units = AGGREGATIONS[kind](mask[rows].flatten().double(), owners, n, settings)
        return float((tokens * (losses[rows] * weights).flatten()).sum() / units)

    own, demonstrated = (aggregated(rows.nonzero().flatten(), torch.ones(1)) for rows in (~given, given))
    weights = mixing_weights(mask, given, 0.3, settings).unsqueeze(1)
    whole = aggregated(torch.arange(5), weights)
    assert whole == pytest.approx(0.7 * own + 0.3 * demonstrated, rel=FORMULA_FP64)


def test_rows_without_a_sampler_get_the_policys_logprobs() -> None:
    batch = {name: torch.ones(2, 3) for name in ("logprobs", "prox_logprobs", "ref_logprobs", "advantages")}
    batch |= {"input_ids": torch.ones(2, 3).long(), "loss_mask": torch.ones(2, 3).long()}
    batch["attention_mask"] = torch.ones(2, 3).bool()
    rows = {"input_ids": torch.full((1, 5), 7), "loss_mask": torch.tensor([[0, 0, 1, 1, 1]])}
    rows["attention_mask"] = torch.ones(1, 5).bool()
    scores = {"logprobs": -2.0, "ref_logprobs": -3.0}
    mixed = add_demonstrations(batch, rows, lambda column, _: torch.full((1, 5), scores[column]))
    assert mixed["demonstrations"].tolist() == [[0] * 5, [0] * 5, [0, 0, 1, 1, 1]]
    assert mixed["advantages"][2].tolist() == [0.0] * 5 and mixed["input_ids"].shape == (3, 5)
    assert mixed["logprobs"][2].tolist() == mixed["prox_logprobs"][2].tolist() == [-2.0] * 5
    assert mixed["ref_logprobs"][2].tolist() == [-3.0] * 5


def test_demonstrations_of_text_join_a_batch_with_pictures() -> None:
    batch: dict[str, Any] = {name: torch.ones(2, 3) for name in ("logprobs", "advantages")}
    batch |= {name: torch.ones(2, 3).long() for name in ("input_ids", "loss_mask", "attention_mask")}
    batch["images"] = [[ProcessedImage(torch.zeros(4, 6), (1, 2, 2))], []]
    rows = {name: torch.ones(1, 5).long() for name in ("input_ids", "loss_mask", "attention_mask")}
    mixed = add_demonstrations(batch, rows, lambda *_: torch.zeros(1, 5))
    assert mixed["images"] == [*batch["images"], []]


@pytest.fixture
def experts(tmp_path: Path) -> dict[str, object]:
    path = tmp_path / "experts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "response": str(2 * n)}) + "\n" for n in range(5)))
    return {"data": {"path": str(path)}, "per_step": 3}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mix", "chord"])
def test_a_run_learns_what_is_demonstrated(rl_config: MakeConfig, experts: dict[str, object], kind: str) -> None:
    """With μ = 1, rewards do not matter: the demonstrations' likelihood rises; a resumed run takes the next rows."""
    loss = {"mix": {"kind": "mix", "mu": 1.0}, "chord": {"kind": "chord", "mu_peak": 1.0, "mu_valley": 1.0}}[kind]
    config = rl_config(algorithm={"kl": {"coef": 0.0}, "policy_loss": loss}, demonstrations=experts)
    trainer = RLTrainer(config)
    with trainer.opened():
        assert trainer.demonstrations is not None
        rows = trainer.demonstrations.take()
        rows["logprobs"] = torch.zeros(rows["input_ids"].shape)

        def likelihood() -> float:
            scored = trainer.engine.forward_batch(dict(rows), 1.0)
            return float(scored[rows["loss_mask"] == 1].mean())

        before = likelihood()
        for _ in range(6):
            metrics = trainer.train_step()
            trainer.step += 1
            assert metrics["demonstrations"] == 3 and metrics["first_logprob_diff"] < 1e-4
        trainer.after_step()
        assert likelihood() > before + 0.01
        position = trainer.position()
        following = trainer.demonstrations.take()["input_ids"]
        trainer.load_position(position)
        assert trainer.demonstrations.take()["input_ids"].equal(following)


def test_demonstrations_and_the_losses_that_need_them_come_together(
    rl_config: MakeConfig, experts: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="policy_loss is mix, and demonstrations are not set"):
        rl_config(algorithm={"kl": {"coef": 0.0}, "policy_loss": "mix"})
    with pytest.raises(ConfigError, match="policy_loss is ppo, and demonstrations are set"):
        rl_config(demonstrations=experts)


def test_run_weighs_demonstrations_by_its_step(rl_config: MakeConfig, experts: dict[str, object]) -> None:
    loss = {"kind": "chord", "mu_peak": 0.8, "mu_valley": 0.2, "mu_warmup_steps": 2, "mu_decay_steps": 2}
    trainer = RLTrainer(rl_config(algorithm={"kl": {"coef": 0.0}, "policy_loss": loss}, demonstrations=experts))
    expected = [trainer.config.algorithm.policy_loss.weight_at(step) for step in range(4)]  # type: ignore[union-attr]
    trainer.train()
    rows = read_jsonl(Path(trainer.config.run_dir) / "metrics.jsonl")
    assert [row["demonstrations_weight"] for row in rows] == expected
    assert len(set(expected)) > 2


def test_resumed_run_continues_its_demonstrations(
    rl_config: MakeConfig, experts: dict[str, object], tmp_path: Path
) -> None:
    """Three of five demonstrations a step: a restart at the first row would repeat them."""

    def run(name: str, **changes: object) -> RLTrainer:
        algorithm = {"kl": {"coef": 0.0}, "policy_loss": {"kind": "mix"}}
        config = rl_config(run_dir=str(tmp_path / name), algorithm=algorithm, demonstrations=experts, **changes)
        trainer = RLTrainer(config)
        trainer.train()
        return trainer

    whole = run("whole")
    run("parts", total_steps=2)
    resumed = run("parts", resume=True)
    assert whole.position() == resumed.position()
    expected = dict(whole.engine.weights())
    assert all(tensor.equal(expected[name]) for name, tensor in resumed.engine.weights())
