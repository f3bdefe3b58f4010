"""The loss and every gradient do not depend on padding, packing order, micro-batches or the route through the head."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from archon.engine.batch import PackedBatch, pack
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, document_sums, loss_token_count, masked_sum
from archon.schema.errors import BatchError, ConfigError
from tests.engine.tiny import (
    LENGTHS,
    assert_gradients_close,
    documents,
    engine_gradients,
    full_tensor,
    loss_masks,
    make_engine,
    padded,
    reference_gradients,
    sft_batch,
)
from tests.tolerances import REORDER_FP32, REORDER_FP64

DTYPES = [pytest.param("float64", REORDER_FP64, id="float64"), pytest.param("float32", REORDER_FP32, id="float32")]
PLAIN_SFT = CrossEntropyLoss().__call__  # a bare function, so that the head gives logprobs one by one


def rl_loss(logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Any]:
    """A clipped ratio with an entropy bonus, and a term that needs whole documents and their rewards."""
    assert entropy is not None
    mask = mb["loss_mask"]
    ratio = ((logprobs - mb["old_logprobs"]) * mask).exp()
    policy = -torch.minimum(ratio * mb["advantages"], ratio.clamp(0.8, 1.2) * mb["advantages"])
    sequence = (document_sums(logprobs * mask, mb) * mb["rewards"]).tanh()
    loss = ((policy - 0.1 * entropy) * mask).sum() + sequence.sum()
    return loss, {"entropy": masked_sum(entropy.detach(), mask)}


def rl_batch(dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
    docs = documents()
    generator = torch.Generator().manual_seed(3)
    return padded(
        docs,
        loss_mask=loss_masks(docs),
        old_logprobs=[-4 + torch.randn(len(doc), generator=generator).to(dtype) for doc in docs],
        advantages=[torch.randn(len(doc), generator=generator).to(dtype) for doc in docs],
        rewards=[torch.randn((), generator=generator).to(dtype) for _ in docs],
        **how,
    )


def plain_rl_loss(batch: dict[str, Tensor]) -> Any:
    """The same loss of one document, written for unpadded token-aligned rows."""

    def loss(index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
        row = {k: v[index][batch["attention_mask"][index]][1:] for k, v in batch.items() if v.ndim == 2}
        mask = row["loss_mask"] == 1
        ratio = (logprobs - row["old_logprobs"])[mask].exp()
        gain = row["advantages"][mask]
        total = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).sum() - 0.1 * entropy[mask].sum()
        return total + (logprobs[mask].sum() * batch["rewards"][index]).tanh()

    return loss


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_packed_sft_gradients_are_those_of_one_document_at_a_time(
    tmp_path: Path, dtype: str, tolerance: float, tied: bool
) -> None:
    engine = make_engine(tmp_path, dtype=dtype, hf={"tie_word_embeddings": tied})
    docs, masks = documents(), loss_masks(documents())
    units = float(sum(mask[1:].sum() for mask in masks))
    expected, grads = reference_gradients(
        engine.model, docs, lambda i, logp, _: -(logp * masks[i][1:]).sum(), units, temperature=1.3
    )
    batch = padded(docs, loss_mask=masks)
    for loss_fn in (CrossEntropyLoss(), PLAIN_SFT):
        loss, actual = engine_gradients(engine, batch, loss_fn, loss_token_count, temperature=1.3)
        assert loss == pytest.approx(expected, rel=tolerance)
        assert_gradients_close(actual, grads, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_packed_rl_gradients_are_those_of_one_document_at_a_time(tmp_path: Path, dtype: str, tolerance: float) -> None:
    engine = make_engine(tmp_path, dtype=dtype)
    batch = rl_batch(getattr(torch, dtype))
    expected, grads = reference_gradients(engine.model, documents(), plain_rl_loss(batch), 10.0, temperature=0.7)
    for max_tokens in (64, 22):
        loss, actual = engine_gradients(
            engine, batch, rl_loss, lambda mb: torch.tensor(10.0 * mb.n_documents / len(LENGTHS)), max_tokens, 0.7
        )
        assert loss == pytest.approx(expected, rel=tolerance)
        assert_gradients_close(actual, grads, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("loss", ["sft", "rl"])
def test_loss_and_gradients_do_not_change_under_padding_packing_and_micro_batch_split(
    tmp_path: Path, dtype: str, tolerance: float, loss: str
) -> None:
    engine = make_engine(tmp_path, dtype=dtype)
    loss_fn: Any = CrossEntropyLoss() if loss == "sft" else rl_loss
    batch = rl_batch(getattr(torch, dtype))
    expected, grads = engine_gradients(engine, batch, loss_fn, loss_token_count)

    order = torch.tensor([4, 2, 0, 6, 5, 1, 3])
    variants = {
        "left padding": (rl_batch(getattr(torch, dtype), side="left"), 64),
        "wider padding with rubbish in it": (rl_batch(getattr(torch, dtype), extra=9, fill=7), 64),
        "another order": ({name: x[order] for name, x in batch.items()}, 64),
        "two micro-batches": (batch, 30),
        "one micro-batch a document or so": (batch, 21),
    }
    for name, (variant, max_tokens) in variants.items():
        value, actual = engine_gradients(engine, variant, loss_fn, loss_token_count, max_tokens)
        assert value == pytest.approx(expected, rel=tolerance), name
        assert_gradients_close(actual, grads, tolerance)


def test_the_denominator_is_global_when_micro_batches_have_unequal_token_counts(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, dtype="float64", max_tokens_per_mb=16)
    docs = documents([16, 3])
    masks = [torch.tensor([0] * 14 + [1, 1]), torch.tensor([0, 1, 1])]
    batch = padded(docs, loss_mask=masks)
    metrics = engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
    assert (metrics["micro_batches"], metrics["loss_weight"], metrics["tokens"]) == (2, 4, 19)
    engine = make_engine(tmp_path, dtype="float64")
    logp = engine.forward_batch(batch)
    assert metrics["loss"] == pytest.approx(-float((logp * batch["loss_mask"]).sum()) / 4, rel=REORDER_FP64)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("loss_fn", [CrossEntropyLoss(), PLAIN_SFT], ids=["fused", "plain"])
def test_a_micro_batch_without_a_loss_token_adds_nothing(tmp_path: Path, dtype: str, loss_fn: Any) -> None:
    """Wherever it stands: also last, where gradients are reduced."""
    engine = make_engine(tmp_path, dtype=dtype)
    docs = documents([16, 15])
    trained, idle = torch.tensor([0] * 4 + [1] * 12), torch.zeros(15, dtype=torch.int64)
    expected, grads = engine_gradients(engine, padded(docs[:1], loss_mask=[trained]), loss_fn, loss_token_count)
    for order in ([0, 1], [1, 0]):
        batch = padded([docs[i] for i in order], loss_mask=[(trained, idle)[i] for i in order])
        loss, actual = engine_gradients(engine, batch, loss_fn, loss_token_count, max_tokens=16)
        assert loss == expected
        assert all(torch.equal(actual[name], grads[name]) for name in grads)


def test_a_batch_without_a_loss_token_is_refused(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    batch = sft_batch() | {"loss_mask": torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)}
    with pytest.raises(BatchError, match="nothing to train: its loss weight is 0"):
        engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)


def test_a_loss_that_is_no_sum_and_a_metric_without_count_are_refused(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)

    def unsummed(logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> Tensor:
        return -logprobs

    def uncounted(logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> Any:
        return -logprobs.sum(), {"accuracy": 0.5}

    with pytest.raises(ConfigError, match=r"unsummed returned a loss of shape \[\d+\]; expected a scalar"):
        engine.train_batch(sft_batch(), unsummed, loss_token_count)
    with pytest.raises(ConfigError, match=r"metric 'accuracy' is a float; expected tensors \(sum, count\)"):
        engine.train_batch(sft_batch(), uncounted, loss_token_count)


def test_a_detached_loss_is_refused(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)

    def detached(logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> Tensor:
        return -logprobs.detach().sum()

    with pytest.raises(ConfigError, match="detached returned a loss without gradient"):
        engine.train_batch(sft_batch(), detached, loss_token_count)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    batch = sft_batch()
    batch["input_ids"][0, 3] = 101
    with pytest.raises(BatchError, match="token id 101 is outside the model's vocabulary of 101"):
        engine.forward_batch(batch)


@pytest.mark.parametrize("label", [-1, 101])
def test_a_label_outside_the_vocabulary_is_refused(tmp_path: Path, label: int) -> None:
    engine = make_engine(tmp_path)
    packed = pack(sft_batch())
    packed.labels[2] = label
    with pytest.raises(BatchError, match=f"label {label} is outside the model's vocabulary of 101"):
        engine.train_batch(packed, CrossEntropyLoss(), loss_token_count)


def test_a_critic_trains_on_its_values(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, dtype="float64", is_critic=True)
    batch = rl_batch(torch.float64)

    def squared_error(values: Tensor, entropy: Tensor | None, mb: PackedBatch) -> Tensor:
        assert entropy is None
        return (((values - mb["advantages"]) ** 2) * mb["loss_mask"]).sum()

    values = engine.forward_batch(batch)
    assert values.shape == batch["input_ids"].shape
    assert torch.equal(values[:, 0], torch.zeros(len(LENGTHS), dtype=torch.float64))
    by_hand = (((values - batch["advantages"]) ** 2) * batch["loss_mask"]).sum() / batch["loss_mask"][:, 1:].sum()
    loss, grads = engine_gradients(engine, batch, squared_error, loss_token_count, max_tokens=22)
    assert loss == pytest.approx(float(by_hand), rel=REORDER_FP64)
    assert all(grad.abs().max() > 0 for grad in grads.values())


def test_metrics_are_sums_over_counts_of_the_whole_batch(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, dtype="float64", max_tokens_per_mb=21)
    batch = rl_batch(torch.float64)
    logp, entropy = engine.forward_with_entropy(batch, 0.7)
    mask = batch["loss_mask"].clone()
    mask[:, 0] = 0

    metrics = engine.eval_batch(batch, rl_loss, loss_token_count, 0.7)
    assert metrics["entropy"] == pytest.approx(float((entropy * mask).sum() / mask.sum()), rel=REORDER_FP64)
    sft = engine.eval_batch(batch, CrossEntropyLoss(), loss_token_count, 0.7)
    assert sft["token_prob"] == pytest.approx(float((logp.exp() * mask).sum() / mask.sum()), rel=REORDER_FP64)
    assert sft["loss"] == pytest.approx(-float((logp * mask).sum() / mask.sum()), rel=REORDER_FP64)


@pytest.mark.parametrize("max_tokens", [64, 21])
def test_forward_batch_is_token_aligned(tmp_path: Path, max_tokens: int) -> None:
    engine: ArchonEngine = make_engine(tmp_path, dtype="float64", max_tokens_per_mb=max_tokens)
    docs, masks = documents(), loss_masks(documents())
    batch = padded(docs, side="left", extra=2, loss_mask=masks)

    logp, entropy = engine.forward_with_entropy(batch, temperature=0.5)

    assert torch.equal(logp, engine.forward_batch(batch, temperature=0.5))
    for row, doc in enumerate(docs):
        ends = torch.tensor([0, len(doc)], dtype=torch.int32)
        with torch.no_grad():
            logits = engine.model(doc, torch.arange(len(doc)), ends, len(doc)) / 0.5
        mine = logits[:-1].log_softmax(-1)
        start = batch["input_ids"].shape[1] - len(doc) + 1
        torch.testing.assert_close(logp[row, start:], mine.gather(-1, doc[1:, None])[:, 0], rtol=REORDER_FP64, atol=0)
        torch.testing.assert_close(entropy[row, start:], -(mine.exp() * mine).sum(-1), rtol=REORDER_FP64, atol=0)
        assert not logp[row, :start].any() and not entropy[row, :start].any()
    only = engine.forward_batch(batch, temperature=0.5, only_trained=True)
    torch.testing.assert_close(only, logp * batch["loss_mask"], rtol=REORDER_FP64, atol=0)


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf])
def test_a_temperature_that_is_not_positive_and_finite_is_refused(tmp_path: Path, value: float) -> None:
    engine, batch = make_engine(tmp_path, optimizer={"lr": 1e-4}), sft_batch()
    temperatures = torch.full(batch["input_ids"].shape, 0.7)
    temperatures[1, 2] = value
    wrong = batch | {"temperatures": temperatures}
    calls = [
        lambda batch, *temperature: engine.forward_batch(batch, *temperature),
        lambda batch, *temperature: engine.eval_batch(batch, CrossEntropyLoss(), loss_token_count, *temperature),
        lambda batch, *temperature: engine.train_batch(batch, CrossEntropyLoss(), loss_token_count, *temperature),
    ]
    for call in calls:
        with pytest.raises(BatchError, match=f"field 'temperatures' has {value}; expected positive, finite numbers"):
            call(wrong)
        with pytest.raises(BatchError, match=f"temperature is {value}; expected a positive, finite number"):
            call(batch, value)
    with pytest.raises(BatchError, match="temperature is 0"):
        engine.forward_batch(batch, 0.0)
    zero = batch | {"temperatures": torch.zeros_like(temperatures)}
    assert torch.equal(engine.forward_batch(zero, 0.7), engine.forward_batch(batch, 0.7))


@pytest.mark.parametrize("config", [{}, {"dtype": "bfloat16", "optimizer": {"lr": 1e-4}}], ids=["plain", "sharded"])
def test_gradients_are_those_of_a_step_that_is_not_taken(tmp_path: Path, config: dict[str, Any]) -> None:
    config = {"optimizer": {"lr": 1e-4}} | config
    engine, batch = make_engine(tmp_path, **config), sft_batch()
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    full, metrics = engine.gradients(batch, CrossEntropyLoss(), loss_token_count)
    local, again = engine.gradients(batch, CrossEntropyLoss(), loss_token_count, full=False)
    assert full.keys() == local.keys() == before.keys()
    assert all(torch.equal(full[name], full_tensor(local[name])) for name in full)
    assert all(not isinstance(grad, DTensor) and grad.shape == before[name].shape for name, grad in full.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights())
    assert all(parameter.grad is None for parameter in engine.model.parameters()) and engine.step == 0
    step = engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
    assert again == metrics == {name: step[name] for name in metrics}
    assert step.keys() - metrics.keys() == {"lr", "skipped"}
