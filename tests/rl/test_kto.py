"""KTO: its loss, its mismatched answers, its gradient through the engine, and the rows that it reads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.rl import PreferenceConfig
from archon.schema.errors import ConfigError, DatasetError
from archon.training.preference import PreferenceTrainer, mismatch
from archon.training.preference_losses import kto_loss
from tests.rl.objectives import opened, steps_undone, write_pairs
from tests.rl.test_preference import plain_number
from tests.tolerances import FORMULA_FP64, INVARIANCE_FP64


def config_of(blank: Path, folder: Path, **changes: Any) -> PreferenceConfig:
    optimizer = {"lr": 3e-3, "max_grad_norm": None, "weight_decay": 0.0}
    model = {"path": str(blank), "init_from_scratch": True, "dtype": "float64", "optimizer": optimizer}
    run = {"run_dir": str(folder / "run"), "total_steps": 1, "batch_size": 8, "loss": "kto", "beta": 0.4}
    return PreferenceConfig.parse(run | {"model": model, "train_data": {"path": str(folder)}} | changes)


def test_kto_worked_by_hand() -> None:
    # z = (3 − 1) / 2 = 1. β = 0.5: v = 3 is desirable: 1 − σ(1) = 0.268941, times 2; v = 2 is not: σ(0.5) = 0.622459,
    # times 3. With mismatched log-ratios of mean −1, z is 0: 1 − σ(1.5) = 0.182426 and σ(1) = 0.731059.
    values, labels = torch.tensor([3.0, 2.0], dtype=torch.float64), torch.tensor([True, False])
    for mismatched, expected in (([3.0, -1.0], [0.537883, 1.867378]), ([-3.0, 1.0], [0.364851, 2.193176])):
        found = kto_loss(values, torch.tensor(mismatched, dtype=torch.float64), labels, 0.5, 2.0, 3.0)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def test_kto_equals_plain_loop_and_has_no_gradient_in_the_reference_point() -> None:
    values, mismatched = torch.randn(2, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    labels, mismatched = torch.arange(20) % 3 == 0, (mismatched + 2).requires_grad_()
    found = kto_loss(values, mismatched, labels, 0.3, 1.5, 0.7)
    z = max(0.0, sum(mismatched.tolist()) / 20)
    assert z > 0 and not found.requires_grad
    for v, label, loss in zip(values.tolist(), labels.tolist(), found.tolist(), strict=True):
        sigma = 1 / (1 + math.exp(-0.3 * ((v - z) if label else (z - v))))
        assert loss == pytest.approx((1.5 if label else 0.7) * (1 - sigma), rel=FORMULA_FP64)


def test_mismatched_document_is_the_prompt_with_another_answer() -> None:
    one = {"input_ids": [5, 6, 7, 2], "loss_mask": [0, 0, 1, 1]}
    other = {"input_ids": [8, 9, 3, 4], "loss_mask": [0, 1, 1, 0]}
    assert mismatch(one, other) == {"input_ids": [5, 6, 9, 3, 4], "loss_mask": [0, 0, 1, 1, 0]}
    assert mismatch(other, one) == {"input_ids": [8, 7, 2], "loss_mask": [0, 1, 1]}


@pytest.mark.parametrize("max_tokens_per_mb", [8192, 14])
def test_gradient_is_that_of_the_loss_written_out(blank: Path, tmp_path: Path, max_tokens_per_mb: int) -> None:
    """One answer at a time with autograd through plain logits, from a policy that has left its reference."""
    write_pairs(tmp_path)
    config = config_of(blank, tmp_path, desirable_weight=1.5, undesirable_weight=0.5, ref={"seed": 7})
    config.model.max_tokens_per_mb = max_tokens_per_mb
    trainer = opened(config)
    assert trainer.reference is not None
    rows = trainer.loader.next_batch()
    trainer.loader.load_state_dict(trainer.loader.state_dict() | {"cursor": 0})
    batch = trainer._pairs(rows)
    mismatched = [mismatch(row, rows[number - 1]) for number, row in enumerate(rows)]
    assert trainer._documents(rows)[1::2] == mismatched and trainer._documents(rows)[::2] == rows

    def ratio(row: int) -> torch.Tensor:
        return plain_number(trainer.engine, batch, row) - plain_number(trainer.reference, batch, row).detach()  # type: ignore[arg-type]

    z = max(0.0, sum(ratio(2 * i + 1).item() for i in range(8)) / 8)
    total = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(rows):
        margin = 0.4 * (ratio(2 * i) - z)
        total = total + (1.5 * (1 - margin.sigmoid()) if row["label"] else 0.5 * margin.sigmoid()) / 8
    total.backward()
    expected = {name: p.grad.clone() for name, p in trainer.engine.model.named_parameters() if p.grad is not None}
    trainer.engine.model.zero_grad()
    with steps_undone(model=trainer.engine) as found:
        metrics = trainer.train_step()
    assert {row["label"] for row in rows} == {True, False}
    assert metrics["loss"] == pytest.approx(total.item(), rel=INVARIANCE_FP64)
    assert metrics["kl"] == pytest.approx(z, rel=INVARIANCE_FP64, abs=INVARIANCE_FP64)
    for name, gradient in expected.items():
        difference = (found[f"model.{name}"] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-30)
        assert difference < INVARIANCE_FP64, name


def test_it_learns_which_answers_are_desirable_whatever_the_batch_of_its_evaluation(
    blank: Path, tmp_path: Path
) -> None:
    write_pairs(tmp_path)
    changes = {"total_steps": 60, "batch_size": 16, "eval_data": {"path": str(tmp_path), "split": "test"}}
    config = config_of(blank, tmp_path, **changes, eval_every=0)
    trainer = PreferenceTrainer(config)
    metrics = trainer.train()
    assert metrics["eval/accuracy"] > 0.7 and metrics["eval/chosen"] > metrics["eval/rejected"]
    assert metrics["eval/loss"] < 0.35  # it is 0.5 for a policy that is its reference
    config.batch_size = 7
    assert trainer.evaluate() == pytest.approx(
        {name: metrics[name] for name in metrics if name.startswith("eval/")}, rel=1e-9
    )


def test_rows_with_labels_and_pairs_are_read_and_others_refused(blank: Path, tmp_path: Path) -> None:
    def loaded(*rows: dict[str, Any]) -> list[dict[str, Any]]:
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = opened(config_of(blank, tmp_path, batch_size=2)).loader.rows  # type: ignore[union-attr]
        return [dict(row) for row in found]

    pairs = loaded({"prompt": "1=", "chosen": "1", "rejected": "22"}, {"prompt": "2=", "chosen": "2", "rejected": "3"})
    assert [row["label"] for row in pairs] == [True, False, True, False]
    first = {"prompt": "1=", "completion": "1", "label": True}
    assert loaded(first, {"prompt": "1=", "completion": "22", "label": False}) == pairs[:2]
    turns = [{"role": "user", "content": "1="}, {"role": "assistant", "content": "1"}]
    assert loaded({"messages": turns, "label": True}, {"messages": turns, "label": False})[0] == pairs[0]
    for wrong, shown in ((None, "None"), (1, "1"), ("true", "'true'")):
        with pytest.raises(DatasetError, match=rf"train\.jsonl:2: 'label' is {shown}, expected true for a desirable"):
            loaded(first, first | {"label": wrong})
    with pytest.raises(DatasetError, match="the last turn has the role 'user'; expected 'assistant'"):
        loaded({"messages": turns[:1], "label": True}, {"messages": turns, "label": False})


def test_settings_of_other_losses_are_refused(blank: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"batch_size": 1}, "loss kto pairs a prompt with the answer of another row; set it to 2 or more"),
        ({"nll_coef": 0.1}, r"nll_coef is 0\.1, but rows of loss kto have no chosen answers; remove it"),
        (
            {"loss": "dpo", "desirable_weight": 2.0},
            "desirable_weight is set, which only loss kto uses, but",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            config_of(blank, tmp_path, **changes)
