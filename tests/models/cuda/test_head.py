"""The head's kernel, and the head that uses it, against float64 formulas of the same logits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.models.cuda import head as kernels
from archon.models.layers import logit_tiles, token_scores
from archon.models.layers.head import LMHead
from archon.models.layers.logit_tiles import KernelTiles, TorchTiles, kernel_rows
from archon.parallel.comm import Group
from archon.parallel.mesh import default_group
from archon.tools.check.oracle import relative_error
from archon.tools.check.rank_pool import Pool
from tests.tolerances import HEAD_FP32, HEAD_KERNEL_BF16

ROWS, DIM, VOCAB = 13, 8, 53
COLUMNS = 26  # of a rank
BLOCK = 16
TILE_ROWS = 5

SOFT_CAPS = [None, 1.5]
# 1, another number, and one per row.
TEMPERATURES = [1.0, 0.7, torch.linspace(0.5, 2.0, ROWS)]
temperatures = pytest.mark.parametrize("temperature", TEMPERATURES, ids=["one", "number", "per row"])
soft_caps = pytest.mark.parametrize("soft_cap", SOFT_CAPS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch.setattr)


def use_kernels(replace: Callable[[Any, str, Any], None]) -> None:
    """Let the head use kernels wherever it runs, with several tiles of rows and several blocks of columns."""
    replace(kernels, "BLOCK", BLOCK)
    replace(token_scores, "logit_tiles", KernelTiles)
    replace(logit_tiles, "KERNEL_ROWS", (TILE_ROWS, TILE_ROWS))
    replace(logit_tiles, "_device_memory", lambda device: 0)


def formula(
    products: Tensor, labels: Tensor, temperature: float | Tensor, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    """log p(label) and entropy from the matmul's results."""
    logits = products.double()
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    scale = temperature.to(logits).unsqueeze(1) if isinstance(temperature, Tensor) else temperature
    logp = (logits / scale).log_softmax(-1)
    # The limit of p log p is 0.
    return logp.gather(1, labels.unsqueeze(1)).squeeze(1), torch.special.entr(logp.exp()).sum(1)


def tolerance(dtype: torch.dtype) -> float:
    """Relative tolerance of gradients: the kernel rounds its results once."""
    return HEAD_FP32 if dtype == torch.float32 else HEAD_KERNEL_BF16


class RowsCase:
    """Rows of logits, with the first arguments of an operator."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shape: tuple[int, int] = (7, 53),
        temperature: float | Tensor = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        rows, vocab = shape
        self.products = (3 * torch.randn(shape)).to(device, dtype)
        self.labels = torch.randint(0, vocab, (rows,), device=device)
        self.temperature, self.soft_cap = temperature, soft_cap
        self.grads = torch.randn(2, rows, device=device)
        if isinstance(temperature, Tensor):
            self.temperature = temperature[:rows].to(device)
            self.options: tuple[Any, ...] = 1.0, self.temperature.reciprocal(), soft_cap
        else:
            self.options = 1 / temperature, None, soft_cap

    def expected(self) -> tuple[Tensor, Tensor]:
        self.exact = self.products.double().requires_grad_()
        return formula(self.exact, self.labels, self.temperature, self.soft_cap)

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """lse, label logits and entropy."""
        lse, label_logits, entropy = self.grads.new_full((3, len(self.labels)), torch.nan)
        kernels.head_sums(self.products, self.labels, *self.options, lse, label_logits, entropy)
        return lse, label_logits, entropy

    def check_gradient(self, objective: Tensor) -> None:
        (expected,) = torch.autograd.grad(objective, self.exact)
        assert relative_error(self.products.double(), expected) <= tolerance(self.products.dtype)


# Several blocks and a part of one, whole blocks, one column after a block.
SHAPES = [(5, 53), (2, 32), (3, 17)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@temperatures
@soft_caps
@dtypes
def test_sums_and_gradient_equal_the_formula(
    device: torch.device,
    dtype: torch.dtype,
    soft_cap: float | None,
    temperature: float | Tensor,
    shape: tuple[int, int],
) -> None:
    case = RowsCase(device, dtype, shape, temperature, soft_cap)
    logprobs, entropies = case.expected()
    before = case.products.clone()
    lse, label_logits, entropy = case.sums()
    assert torch.equal(case.products, before)
    torch.testing.assert_close((label_logits - lse).double(), logprobs, rtol=0, atol=HEAD_FP32)
    torch.testing.assert_close(entropy.double(), entropies, rtol=0, atol=HEAD_FP32)

    logprob_grad, entropy_grad = case.grads
    kernels.head_gradient(case.products, case.labels, *case.options, lse, entropy, logprob_grad, entropy_grad)
    case.check_gradient((logprobs * logprob_grad + entropies * entropy_grad).sum())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@temperatures
@soft_caps
@dtypes
def test_loss_and_gradient_equal_the_formula(
    device: torch.device,
    dtype: torch.dtype,
    soft_cap: float | None,
    temperature: float | Tensor,
    shape: tuple[int, int],
) -> None:
    case = RowsCase(device, dtype, shape, temperature, soft_cap)
    logprobs, _ = case.expected()
    lse, label_logits = case.grads.new_full((2, len(case.labels)), torch.nan)
    logprob_grad = case.grads[0]
    logprob_grad[0] = 0.0
    kernels.head_loss(case.products, case.labels, *case.options, lse, label_logits, logprob_grad)
    torch.testing.assert_close((label_logits - lse).double(), logprobs, rtol=0, atol=HEAD_FP32)
    case.check_gradient((logprobs * logprob_grad).sum())
    assert not case.products[0].any()


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes_and_options(device: torch.device, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(kernels, "BLOCK", rng.choice([16, 32, 64]))
    shape, dtype = (rng.randint(1, 6), rng.randint(2, 150)), rng.choice([torch.float32, torch.bfloat16])
    case = RowsCase(device, dtype, shape, rng.choice(TEMPERATURES), rng.choice(SOFT_CAPS))
    logprobs, entropies = case.expected()
    lse, label_logits, entropy = case.sums()
    torch.testing.assert_close((label_logits - lse).double(), logprobs, rtol=0, atol=HEAD_FP32)
    torch.testing.assert_close(entropy.double(), entropies, rtol=0, atol=HEAD_FP32)
    kernels.head_gradient(case.products, case.labels, *case.options, lse, entropy, *case.grads)
    case.check_gradient((torch.stack((logprobs, entropies)) * case.grads).sum())


@soft_caps
def test_a_label_outside_the_columns_has_logit_0_and_no_part_in_the_gradient(
    device: torch.device, soft_cap: float | None
) -> None:
    case = RowsCase(device, torch.float32, soft_cap=soft_cap)
    case.labels[:2] = torch.tensor([-3, VOCAB])
    lse, label_logits, _ = case.sums()
    assert label_logits[:2].tolist() == [0.0, 0.0]
    exact = case.products.double().requires_grad_()
    logits = exact if soft_cap is None else soft_cap * torch.tanh(exact / soft_cap)
    (expected,) = torch.autograd.grad(-logits.logsumexp(1)[:2].sum(), exact)
    kernels.head_gradient(case.products, case.labels, *case.options, lse, None, torch.ones_like(lse), None)
    assert relative_error(case.products[:2].double(), expected[:2]) <= HEAD_FP32


@pytest.mark.parametrize("magnitude", [1e4, 1e30])
def test_large_logits_stay_finite(device: torch.device, magnitude: float) -> None:
    case = RowsCase(device, torch.float32)
    case.products *= magnitude
    logprobs, entropies = case.expected()
    lse, label_logits, entropy = case.sums()
    torch.testing.assert_close((label_logits - lse).double(), logprobs, rtol=1e-6, atol=HEAD_FP32)
    torch.testing.assert_close(entropy.double(), entropies, rtol=0, atol=HEAD_FP32)
    kernels.head_gradient(case.products, case.labels, *case.options, lse, entropy, *case.grads)
    assert case.products.isfinite().all()


@pytest.mark.parametrize("columns", [slice(0, BLOCK), slice(20, 50), slice(BLOCK, VOCAB)], ids=str)
def test_logits_of_minus_infinity_have_probability_0(device: torch.device, columns: slice) -> None:
    """Also if they fill the first block, which then has no maximum."""
    case = RowsCase(device, torch.float32)
    case.products[:, columns] = -torch.inf
    kept = torch.ones(VOCAB, dtype=torch.bool, device=device)
    kept[columns] = False
    case.labels[:] = kept.nonzero()[3]
    exact = case.products[:, kept].double().requires_grad_()
    scores = formula(exact, torch.full_like(case.labels, 3), 1.0, None)
    lse, label_logits, entropy = case.sums()
    torch.testing.assert_close((label_logits - lse).double(), scores[0], rtol=0, atol=HEAD_FP32)
    torch.testing.assert_close(entropy.double(), scores[1], rtol=0, atol=HEAD_FP32)
    kernels.head_gradient(case.products, case.labels, *case.options, lse, entropy, *case.grads)
    (expected,) = torch.autograd.grad((torch.stack(scores) * case.grads).sum(), exact)
    assert relative_error(case.products[:, kept].double(), expected) <= HEAD_FP32
    assert not case.products[:, columns].any()


def test_rows_may_have_a_stride(device: torch.device) -> None:
    case = RowsCase(device, torch.float32)
    wider = torch.full((len(case.products), 64), torch.nan, device=device)
    wider[:, :VOCAB] = case.products
    expected = case.sums()
    case.products = wider[:, :VOCAB]
    for actual, exact in zip(case.sums(), expected, strict=True):
        assert torch.equal(actual, exact)


def test_operators_say_what_they_write(device: torch.device) -> None:
    case = RowsCase(device, torch.float32, temperature=TEMPERATURES[2])
    lse, label_logits, entropy = case.sums()
    inputs = case.products, case.labels, *case.options
    for operator, outputs in (
        (kernels.head_sums, (lse, label_logits, entropy)),
        (kernels.head_gradient, (lse, entropy, *case.grads)),
        (kernels.head_gradient, (lse, None, case.grads[0], None)),
        (kernels.head_loss, (lse, label_logits, case.grads[0])),
    ):
        torch.library.opcheck(operator, (*inputs, *outputs))


# The head


class HeadCase:
    """A head with hidden states and labels, and their products as the head rounds them.

    Hidden states and weight are multiples of 1/8: sums of their products are exact, and every matmul rounds them alike.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, soft_cap: float | None = None) -> None:
        self.head = LMHead(DIM, VOCAB, soft_cap=soft_cap).to(device, dtype)
        self.head.weight.data = (torch.randint(-12, 13, (VOCAB, DIM)) / 8).to(device, dtype)
        self.hidden = (torch.randint(-12, 13, (ROWS, DIM)) / 8).to(device, dtype).requires_grad_()
        self.labels = torch.randint(0, VOCAB, (ROWS,), device=device)
        self.exact = [x.detach().double().requires_grad_() for x in (self.hidden, self.head.weight)]
        products = self.exact[0] @ self.exact[1].t()
        self.products = products + (self.hidden @ self.head.weight.t()).double().detach() - products.detach()

    def check_gradients(self, actual: Tensor, expected: Tensor) -> None:
        grads = torch.autograd.grad(actual, (self.hidden, self.head.weight))
        for grad, exact in zip(grads, torch.autograd.grad(expected, self.exact), strict=True):
            assert grad.dtype == self.hidden.dtype
            assert relative_error(grad.double(), exact) <= 2 * tolerance(grad.dtype)  # the result rounds too


@pytest.mark.parametrize("entropy", [True, False])
@temperatures
@soft_caps
@dtypes
def test_scores_of_the_head(
    device: torch.device, dtype: torch.dtype, soft_cap: float | None, temperature: float | Tensor, entropy: bool
) -> None:
    case = HeadCase(device, dtype, soft_cap)
    logprobs, entropies = formula(case.products, case.labels, temperature, soft_cap)
    scores = case.head(case.hidden, case.labels, temperature, entropy=entropy)
    assert scores.logprobs.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs.double(), logprobs, rtol=0, atol=HEAD_FP32)
    # The gradient of a sum is expanded and not dense.
    actual, expected = scores.logprobs.sum(), logprobs.sum()
    if entropy:
        torch.testing.assert_close(scores.entropy.double(), entropies, rtol=0, atol=HEAD_FP32)
        actual, expected = actual - 0.3 * scores.entropy.sum(), expected - 0.3 * entropies.sum()
    case.check_gradients(actual, expected)


@pytest.mark.parametrize("rows", [ROWS, TILE_ROWS, 1])
@temperatures
@soft_caps
@dtypes
def test_weighted_loss_of_the_head(
    device: torch.device, dtype: torch.dtype, soft_cap: float | None, temperature: float | Tensor, rows: int
) -> None:
    case = HeadCase(device, dtype, soft_cap)
    weights = torch.zeros(ROWS, device=device)
    weights[:rows] = torch.randn(rows)
    every_row = torch.arange(ROWS, device=device)
    logprobs, _ = formula(case.products, case.labels, temperature, soft_cap)
    result = case.head(case.hidden, case.labels, temperature, weights=weights, rows=every_row)
    torch.testing.assert_close(result.logprobs.double(), logprobs, rtol=0, atol=HEAD_FP32)
    torch.testing.assert_close(result.loss.double(), -(logprobs * weights).sum(), rtol=HEAD_FP32, atol=HEAD_FP32)
    case.check_gradients(3 * result.loss, -3 * (logprobs * weights).sum())


@pytest.mark.parametrize("weighted", [True, False])
def test_no_rows(device: torch.device, weighted: bool) -> None:
    case = HeadCase(device, torch.float32)
    case.labels[:] = -100
    if weighted:
        case.head(case.hidden, case.labels, weights=torch.ones(ROWS, device=device)).loss.backward()
    else:
        case.head(case.hidden, case.labels).logprobs.sum().backward()
    assert not case.hidden.grad.any() and not case.head.weight.grad.any()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_gradient_that_is_not_needed_is_not_computed(device: torch.device, frozen: str) -> None:
    case = HeadCase(device, torch.float32)
    expected = torch.autograd.grad(case.head(case.hidden, case.labels).logprobs.sum(), (case.hidden, case.head.weight))
    for weights in (None, -torch.ones(ROWS, device=device)):
        case.hidden.requires_grad_(frozen != "hidden")
        case.head.weight.requires_grad_(frozen != "weight")
        result = case.head(case.hidden, case.labels, weights=weights)
        trained, grad = (case.head.weight, expected[1]) if frozen == "hidden" else (case.hidden, expected[0])
        total = result.logprobs.sum() if weights is None else result.loss
        assert relative_error(*torch.autograd.grad(total, trained), grad) <= HEAD_FP32


def split_vocabulary(device: torch.device, soft_cap: float | None) -> float:
    """Return the largest difference of scores, loss and gradients on this rank, with columns sharded over ranks."""
    use_kernels(setattr)
    torch.manual_seed(0)
    group = Group.from_process_group(default_group())
    hidden, weight = torch.randn(ROWS, DIM, device=device), torch.randn(2 * COLUMNS, DIM, device=device)
    labels = torch.randint(0, 2 * COLUMNS, (ROWS,), device=device)
    weights, grads = torch.rand(ROWS, device=device), torch.randn(2, ROWS, device=device)
    columns = slice(group.rank * COLUMNS, (group.rank + 1) * COLUMNS)

    def compute(weight: Tensor, group: Group | None) -> list[Tensor]:
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        options: dict[str, Any] = {"temperature": TEMPERATURES[2], "soft_cap": soft_cap, "group": group}
        scores = token_scores.token_scores(*inputs, labels, **options)
        loss, logprobs = token_scores.weighted_loss(*inputs, labels, weights, **options)
        total = (torch.stack([x for x in scores if x is not None]) * grads).sum()
        return [*scores, logprobs, loss, *torch.autograd.grad(total, inputs), *torch.autograd.grad(loss, inputs)]

    actual, expected = compute(weight[columns], group), compute(weight, None)
    for i in (4, 6):  # gradients of hidden states are sums over the ranks
        torch.distributed.all_reduce(actual[i])
    expected[5], expected[7] = expected[5][columns], expected[7][columns]
    return max(relative_error(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.slow
def test_a_vocabulary_split_over_ranks(device: torch.device) -> None:
    with Pool(2) as pool:
        for soft_cap in SOFT_CAPS:
            assert max(pool.run(split_vocabulary, device, soft_cap)) <= 2 * HEAD_FP32


def test_the_size_of_a_gpu_decides_how_many_rows_a_tile_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert kernel_rows(151_936, 2, 80 << 30) == 4096
    assert kernel_rows(151_936, 2, 24 << 30) == 2560
    assert kernel_rows(262_144, 4, 24 << 30) == 2048
    assert kernel_rows(32_000, 2, 24 << 30) == 4096


def test_a_cpu_and_other_dtypes_use_no_kernel() -> None:
    hidden, weight, labels = torch.randn(2, 3), torch.randn(5, 3), torch.zeros(2, dtype=torch.int64)
    options = logit_tiles.LogitOptions(1.0, None, None)
    assert isinstance(logit_tiles.logit_tiles(logit_tiles.HeadOperands(hidden, weight), labels, options), TorchTiles)
