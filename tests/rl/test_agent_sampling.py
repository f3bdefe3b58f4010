"""What training does with the temperature, top_p and the like that an agent asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.rl.logprob_check import check_mismatch
from archon.schema.errors import ConfigError, RolloutError
from tests.serve.test_workflow import ask
from tests.tolerances import FIRST_RATIO_FP32

ASKED: dict[str, Any] = {}


class Picky:
    """Answers twice, the second time with the sampling that `ASKED` says."""

    async def run(self, data: dict[str, Any], **given: Any) -> float:
        talk = [*data["messages"]]
        talk += [(await ask(talk, given))["choices"][0]["message"], {"role": "user", "content": "0+0="}]
        second = await ask(talk, given, **ASKED)
        return float(sum(map(str.isdigit, second["choices"][0]["message"]["content"])))


@pytest.fixture
def trainer(rl_config: Callable[..., RLConfig], monkeypatch: pytest.MonkeyPatch) -> Callable[..., RLTrainer]:
    def make(mode: str, **asked: Any) -> RLTrainer:
        monkeypatch.setattr(f"{__name__}.ASKED", asked)
        rollout = {"prompts_per_step": 4, "n_gold_checks": 0, "agent_sampling": mode, "workers": {"rewards": 1}}
        return RLTrainer(rl_config(rollout=rollout, eval_data={"path": "arithmetic"}, evaluation={"max_prompts": 2}))

    return make


@pytest.mark.slow
def test_an_override_samples_as_if_nothing_was_asked_and_says_so_once_a_field(
    trainer: Callable[..., RLTrainer], capsys: pytest.CaptureFixture[str]
) -> None:
    batches = []
    penalties: dict[str, Any] = {"presence_penalty": 1.5, "repetition_penalty": 1.2, "logit_bias": {"5": 2}}
    for asked in ({}, {"temperature": 0.7, "top_p": 0.95}, {"temperature": 0}, penalties):
        run = trainer("override", **asked)
        with run.opened(f"{__name__}.Picky"):
            batches.append(run.rollout_batch())
            if len(asked) == 2:
                run.train_step()
                run.train_step()
    told = capsys.readouterr().out
    assert told.count("an agent asked for temperature=0.7; training samples with 1.0") == 1
    assert told.count("an agent asked for top_p=0.95") == told.count("an agent asked for greedy=True") == 1
    assert (
        told.count("an agent asked for logit_bias={5: 2.0}") == told.count("an agent asked for presence_penalty=") == 1
    )
    for batch, overridden in zip(batches, (0.0, 1.0, 1.0, 1.0), strict=True):
        assert "temperatures" not in batch.trajectories
        assert batch.trajectories["input_ids"].equal(batches[0].trajectories["input_ids"])
        assert batch.trajectories["logprobs"].equal(batches[0].trajectories["logprobs"])
        assert batch.numbers["agent_answers_overridden"] == overridden


def test_a_refusal_ends_the_run_by_name(trainer: Callable[..., RLTrainer]) -> None:
    with pytest.raises(ConfigError, match=r"gconfig.top_p: got 0.95, .* needs 1.0"):
        trainer("refuse", top_p=0.95).train(f"{__name__}.Picky")


def listened(run: RLTrainer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[GenerationHyperparameters, Any]]:
    """What the generator is asked from now on, and what it answers."""
    heard: list[tuple[GenerationHyperparameters, Any]] = []
    answer = run.generator.agenerate

    async def listen(req: ModelRequest) -> Any:
        response = await answer(req)
        heard.append((req.gconfig, response))
        return response

    monkeypatch.setattr(run.generator, "agenerate", listen)
    return heard


def test_what_is_allowed_is_trained_at_the_temperature_of_each_answer(
    trainer: Callable[..., RLTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer("allow", temperature=0.4)
    with run.opened(f"{__name__}.Picky"):
        heard = listened(run, monkeypatch)
        for _ in range(3):
            heard.clear()
            batch = run.rollout_batch().trajectories
            mask, column = batch["loss_mask"] == 1, batch["temperatures"]
            assert (column[~mask] == 0).all()
            seen = 0
            for gconfig, response in heard:
                tokens = torch.tensor(response.input_tokens + response.output_tokens)
                size = batch["input_ids"].shape[1]
                rows = (
                    (batch["input_ids"][:, : len(tokens)] == tokens).all(1).nonzero().flatten()
                    if len(tokens) <= size
                    else []
                )
                assert len(rows)
                for row in rows:
                    asked = column[row, len(response.input_tokens) : len(tokens)]
                    assert (asked == torch.tensor(gconfig.temperature)).all()
                    seen += 1
            assert seen >= len(heard) and {round(float(v), 3) for v in column[mask]} == {0.4, 1.0}
            plain = {name: value for name, value in batch.items() if name != "temperatures"}
            cold = run.engine.forward_batch(plain, 0.4)
            expected = torch.where(column == 1, run.engine.forward_batch(plain, 1.0), cold)
            found = run.engine.forward_batch(batch, 1.0)
            assert (found - expected)[mask].abs().max() < FIRST_RATIO_FP32
            assert (found - batch["logprobs"])[mask].abs().max() < FIRST_RATIO_FP32
            metrics = run.train_step()
            assert metrics["first_logprob_diff"] < FIRST_RATIO_FP32 and metrics["grad_norm"] > 0
            assert metrics["agent_answers_uncorrected"] == 0
        uncorrected = run.update.logprob_difference(plain)
    with pytest.raises(RolloutError, match="logprob check"):
        check_mismatch(uncorrected, 1e-3)


def test_the_gradient_is_that_of_each_answers_temperature(trainer: Callable[..., RLTrainer]) -> None:
    """The gradients of the answers at one temperature and at the other add up to that of the batch."""
    run = trainer("allow", temperature=0.4)

    def loss(logprobs: torch.Tensor, entropy: Any, mb: Any) -> torch.Tensor:
        return -(logprobs * mb["loss_mask"]).sum()

    def gradient(batch: dict[str, torch.Tensor], temperature: float) -> dict[str, torch.Tensor]:
        return run.engine.gradients(batch, loss, lambda mb: 1.0, temperature)[0]

    with run.opened(f"{__name__}.Picky"):
        batch = run.rollout_batch().trajectories
        plain = {name: batch[name] for name in ("input_ids", "attention_mask", "loss_mask")}
        whole = gradient(plain | {"temperatures": batch["temperatures"]}, 1.0)
        parts = []
        for temperature in (1.0, 0.4):
            at = (batch["temperatures"] - temperature).abs() < 1e-3
            assert at.any()
            parts.append(gradient(plain | {"loss_mask": plain["loss_mask"] * at}, temperature))
    for name, value in whole.items():
        torch.testing.assert_close(value, parts[0][name] + parts[1][name], rtol=1e-4, atol=1e-4)


def test_what_is_no_softmax_is_counted_and_not_corrected(trainer: Callable[..., RLTrainer]) -> None:
    run = trainer("allow", temperature=0.5, top_p=0.9)
    with run.opened(f"{__name__}.Picky"):
        metrics = run.train_step()
    assert metrics["agent_answers_uncorrected"] == 1.0 and metrics["first_logprob_diff"] < FIRST_RATIO_FP32


def test_an_evaluation_samples_what_an_agent_asks_for(
    trainer: Callable[..., RLTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer("override", temperature=0.25, top_p=0.5)
    with run.opened(f"{__name__}.Picky"):
        heard = listened(run, monkeypatch)
        run.evaluate()
    assert {(asked.temperature, asked.top_p) for asked, _ in heard} == {(1.0, 1.0), (0.25, 0.5)}
