"""The head against its formulas: log-probabilities, entropies, weighted loss, and their gradients in every tiling."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from archon.models.layers import logit_tiles, token_scores
from archon.models.layers.head import LMHead
from archon.tools.check.oracle import relative_error
from tests.tolerances import FORMULA_FP64, HEAD_BF16, HEAD_FP32

T, D, V = 13, 6, 23


@pytest.fixture(params=[(1024, 2048), (5, 7), (13, 1), (1, 23)], ids=str)
def _tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = request.param
    monkeypatch.setattr(logit_tiles, "CPU_ROWS", rows)
    monkeypatch.setattr(logit_tiles, "CPU_COLUMNS", columns)


def plain(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float | Tensor, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """log p(label) and entropy from whole logits; 0 where the label is -100."""
    scale = temperature.unsqueeze(1) if isinstance(temperature, Tensor) else temperature
    logits = F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    logp = (logits / scale).log_softmax(-1)
    kept = labels != -100
    logprobs = logp.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(kept, logprobs, 0), torch.where(kept, -(logp.exp() * logp).sum(1), 0)


def case(dtype: torch.dtype = torch.float64, soft_cap: float | None = None) -> tuple[LMHead, Tensor, Tensor]:
    head = LMHead(D, V, soft_cap=soft_cap).to(dtype)
    torch.nn.init.normal_(head.weight)
    labels = torch.randint(0, V, (T,))
    labels[[3, 7]] = -100
    return head, torch.randn(T, D, dtype=dtype, requires_grad=True), labels


# Logits have a standard deviation of 2.4: some are far beyond the cap.
SOFT_CAPS = [None, 1.5]
TEMPERATURES = [1.0, 0.7, torch.linspace(0.5, 2.0, T, dtype=torch.float64)]


@pytest.mark.usefixtures("_tiling")
@pytest.mark.parametrize("temperature", TEMPERATURES, ids=["one", "number", "per token"])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("soft_cap", SOFT_CAPS)
def test_scores_and_gradients_equal_the_formula(
    temperature: float | Tensor, entropy: bool, soft_cap: float | None
) -> None:
    head, hidden, labels = case(soft_cap=soft_cap)
    logprob_weight, entropy_weight = torch.randn(2, T, dtype=torch.float64)
    expected_logprobs, expected_entropy = plain(hidden, head.weight, labels, temperature, soft_cap)
    expected = (expected_logprobs * logprob_weight).sum()

    scores = head(hidden, labels, temperature, entropy=entropy)
    actual = (scores.logprobs * logprob_weight).sum()
    if entropy:
        actual, expected = (
            actual + (scores.entropy * entropy_weight).sum(),
            expected + (expected_entropy * entropy_weight).sum(),
        )
        torch.testing.assert_close(scores.entropy, expected_entropy, rtol=0, atol=FORMULA_FP64)
    else:
        assert scores.entropy is None

    torch.testing.assert_close(scores.logprobs, expected_logprobs, rtol=0, atol=FORMULA_FP64)
    for ours, theirs in zip(*(torch.autograd.grad(x, (hidden, head.weight)) for x in (actual, expected)), strict=True):
        assert relative_error(ours, theirs) <= FORMULA_FP64


@pytest.mark.usefixtures("_tiling")
@pytest.mark.parametrize("temperature", TEMPERATURES, ids=["one", "number", "per token"])
@pytest.mark.parametrize("soft_cap", SOFT_CAPS)
def test_weighted_loss_and_gradients_equal_the_formula(temperature: float | Tensor, soft_cap: float | None) -> None:
    head, hidden, labels = case(soft_cap=soft_cap)
    weights = torch.randn(T, dtype=torch.float64)
    weights[5] = 0
    expected_logprobs, _ = plain(hidden, head.weight, labels, temperature, soft_cap)
    expected = -(expected_logprobs * weights).sum()

    result = head(hidden, labels, temperature, weights=weights)

    torch.testing.assert_close(result.loss, expected, rtol=FORMULA_FP64, atol=0)
    torch.testing.assert_close(
        result.logprobs[weights != 0], expected_logprobs[weights != 0], rtol=0, atol=FORMULA_FP64
    )
    assert not result.logprobs.requires_grad
    gradients = (torch.autograd.grad(3 * x, (hidden, head.weight)) for x in (result.loss, expected))
    for ours, theirs in zip(*gradients, strict=True):
        assert relative_error(ours, theirs) <= FORMULA_FP64


@pytest.mark.slow
@pytest.mark.usefixtures("_tiling")
def test_gradcheck() -> None:
    head, hidden, labels = case()
    weight = head.weight.detach().clone().requires_grad_()
    kept = labels.clamp(min=0)
    for soft_cap in SOFT_CAPS:
        assert torch.autograd.gradcheck(
            lambda h, w, cap=soft_cap: token_scores.token_scores(h, w, kept, 0.8, soft_cap=cap), (hidden, weight)
        )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, HEAD_FP32), (torch.bfloat16, HEAD_BF16)])
@pytest.mark.usefixtures("_tiling")
def test_softmax_runs_in_float32_whatever_the_dtype(dtype: torch.dtype, tolerance: float) -> None:
    head, hidden, labels = case(dtype)
    scores = head(hidden, labels)
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    logprobs, entropy = plain(hidden, head.weight, labels, 1.0)
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=0, atol=HEAD_FP32)
    torch.testing.assert_close(scores.entropy, entropy, rtol=0, atol=HEAD_FP32)

    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, head.weight))
    expected = sum(x.sum() for x in plain(exact_hidden, exact_weight, labels, 1.0))
    gradients = torch.autograd.grad(scores.logprobs.sum() + scores.entropy.sum(), (hidden, head.weight))
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, (exact_hidden, exact_weight)), strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours.double(), theirs) <= tolerance


def summed_over_tiles(hidden: Tensor, weight: Tensor, labels: Tensor, fused: bool) -> tuple[Tensor, ...]:
    """Gradients in hidden and weight of the sum of -log p, by either way the head has."""
    if fused:
        loss, _ = token_scores.weighted_loss(hidden, weight, labels, torch.ones(len(labels)))
    else:
        loss = -token_scores.token_scores(hidden, weight, labels, with_entropy=False)[0].sum()
    return torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("fused", [True, False], ids=["weighted loss", "scores"])
def test_the_gradient_of_hidden_states_is_summed_over_the_vocabulary_in_fp32(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of 4 of 4,096 words gives 1/1024 of the sum: in bfloat16 it would no longer count next to 1/4."""
    monkeypatch.setattr(logit_tiles, "CPU_COLUMNS", 4)
    vocab, labels = 4096, torch.zeros(3, dtype=torch.int64)
    weight = torch.ones(vocab, D, dtype=torch.bfloat16)
    weight[0] = 0
    hidden = torch.zeros(3, D, dtype=torch.bfloat16)
    found, _ = summed_over_tiles(hidden.requires_grad_(), weight.requires_grad_(), labels, fused)
    # Every word has probability 1/4096, and all but the label pull by 1.
    assert torch.equal(found, torch.full_like(found, (vocab - 1) / vocab))


@pytest.mark.parametrize("fused", [True, False], ids=["weighted loss", "scores"])
def test_the_gradient_of_the_weight_is_summed_over_the_rows_in_fp32(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of 4 of 4,096 rows gives 1/1024 of the sum: in bfloat16 it would no longer count next to 1/4."""
    monkeypatch.setattr(logit_tiles, "CPU_ROWS", 4)
    rows, vocab = 4096, 16
    hidden = torch.ones(rows, D, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(vocab, D, dtype=torch.bfloat16, requires_grad=True)
    _, found = summed_over_tiles(hidden, weight, torch.zeros(rows, dtype=torch.int64), fused)
    expected = torch.full((vocab, 1), rows / vocab)
    expected[0] -= rows
    assert torch.equal(found, expected.expand(vocab, D).to(torch.bfloat16))


def test_extreme_logits_stay_finite() -> None:
    head, hidden, labels = case(torch.float32)
    scores = head(hidden * 1e4, labels)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    for tensor in (*scores, hidden.grad, head.weight.grad):
        assert tensor.isfinite().all()
    assert (scores.entropy >= 0).all()


def test_ignored_labels_have_no_score_no_gradient_and_no_cost() -> None:
    head, hidden, labels = case()
    labels[:] = -100
    scores = head(hidden, labels)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert not any(x.abs().max() for x in (*scores, hidden.grad, head.weight.grad))
    poisoned = torch.full_like(hidden, torch.nan)
    assert head(poisoned, labels).logprobs.abs().max() == 0


def test_rows_that_are_known_are_scored_as_if_they_had_been_looked_for() -> None:
    head, hidden, labels = case()
    labels[::3] = -100
    rows = (labels != -100).nonzero().squeeze(1)
    weights = torch.rand(len(labels), dtype=hidden.dtype)
    for looked_for, known in (
        (head(hidden, labels), head(hidden, labels, rows=rows)),
        (head(hidden, labels, 1.0, weights=weights), head(hidden, labels, 1.0, weights=weights, rows=rows)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(looked_for, known, strict=True))


@pytest.mark.parametrize("label", [-1, V])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    head, hidden, labels = case()
    labels[0] = label
    with pytest.raises(ValueError, match=r"labels range from .* expected 0 to 22"):
        head(hidden, labels)


@pytest.mark.parametrize("used", ["logprobs", "entropy"])
def test_what_takes_no_part_in_the_loss_has_no_part_in_the_gradient(used: str) -> None:
    head, hidden, labels = case()
    expected = dict(zip(("logprobs", "entropy"), plain(hidden, head.weight, labels, 0.7), strict=True))
    actual = getattr(head(hidden, labels, 0.7, entropy=True), used)
    grads = (torch.autograd.grad(x.sum(), (hidden, head.weight)) for x in (actual, expected[used]))
    for ours, theirs in zip(*grads, strict=True):
        assert relative_error(ours, theirs) <= FORMULA_FP64


def test_weights_without_labels_are_refused() -> None:
    head, hidden, _ = case()
    with pytest.raises(ValueError, match="weights without labels"):
        head(hidden, weights=torch.ones(T))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), torch.zeros(T)])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float | Tensor) -> None:
    head, hidden, labels = case()
    with pytest.raises(ValueError, match="temperature is"):
        head(hidden, labels, temperature)


def test_the_weighted_loss_refuses_a_second_backward_pass() -> None:
    head, hidden, labels = case()
    loss = head(hidden, labels, weights=torch.ones(T)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward of the weighted loss was called twice"):
        loss.backward()


def test_without_gradient_the_weighted_loss_is_the_same() -> None:
    head, hidden, labels = case()
    weights = torch.rand(T, dtype=torch.float64)
    with_gradient = head(hidden, labels, weights=weights)
    with torch.no_grad():
        without = head(hidden, labels, weights=weights)
    torch.testing.assert_close(without.loss, with_gradient.loss, rtol=FORMULA_FP64, atol=0)
    torch.testing.assert_close(without.logprobs, with_gradient.logprobs, rtol=0, atol=FORMULA_FP64)
