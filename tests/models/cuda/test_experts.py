"""Kernels around the grouped matmuls of experts against plain float64 formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archon.models.cuda.experts import add_bias, gather_rows, group_rows, route, sum_rows
from archon.models.layers import moe
from archon.models.layers.moe import ExpertsLayer, MoE

# Sums in another order in float32; one rounding in bfloat16.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize(("tokens", "top_k", "n_groups"), [(1, 1, 1), (70, 4, 5), (131, 2, 31), (3, 2, 40)])
def test_pairs_are_sorted_stably(device: torch.device, tokens: int, top_k: int, n_groups: int) -> None:
    groups = torch.randint(n_groups, (tokens, top_k))
    positions, counts = group_rows(groups.to(device), n_groups)
    order = groups.flatten().argsort(stable=True)
    assert torch.equal(positions.flatten().long().cpu(), order.argsort())
    assert torch.equal(counts.cpu(), groups.flatten().bincount(minlength=n_groups))


def _pairs(device: torch.device, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [15, width], weights [5, 3] and positions [5, 3]."""
    positions = torch.randperm(15).int().view(5, 3).to(device)
    return torch.randn(15, width).to(device, dtype), torch.randn(5, 3).to(device, dtype), positions


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 24, 1100])
def test_rows_are_gathered_and_summed(device: torch.device, dtype: torch.dtype, width: int) -> None:
    rows, weights, positions = _pairs(device, dtype, width)
    x, grad = torch.randn(5, width).to(device, dtype).requires_grad_(), torch.randn(15, width).to(device, dtype)
    order = positions.flatten().long().argsort()
    out = gather_rows(x, positions)
    assert torch.equal(out, x[order // 3])
    out.backward(grad)
    expected = grad.double()[positions.flatten().long()].view(5, 3, width).sum(1)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    leaves, wide = [rows, weights], [rows.double(), weights.double()]
    for leaf in leaves + wide:
        leaf.requires_grad_()
    grad = torch.randn(1, width).to(device, dtype).expand(5, width)
    out = sum_rows(*leaves, positions)
    picked = wide[0][positions.flatten().long()].view(5, 3, width)
    expected = (wide[1].unsqueeze(-1) * picked).sum(1)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
    out.backward(grad)
    expected.backward(grad.double())
    for leaf, reference in zip(leaves, wide, strict=True):
        assert leaf.grad is not None and leaf.grad.dtype == dtype
        # The gradient of a weight is a sum over the width.
        atol = TOLERANCE[dtype] * width**0.5
        torch.testing.assert_close(leaf.grad.double(), reference.grad, rtol=TOLERANCE[dtype], atol=atol)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 24, 1100])
def test_biases_of_groups(device: torch.device, dtype: torch.dtype, width: int) -> None:
    counts = torch.tensor([0, 3, 40, 0, 5, 0])
    groups, ends = torch.arange(6).repeat_interleave(counts), counts.cumsum(0).int().to(device)
    x, grad = torch.randn(2, 48, width).to(device, dtype)
    bias = torch.randn(6, width).to(device).requires_grad_()
    x.requires_grad_()
    out = add_bias(x, bias, ends)
    # Triton's interpreter truncates to bfloat16.
    atol = TOLERANCE[dtype] if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(out, x + bias.to(dtype)[groups], rtol=TOLERANCE[dtype], atol=2 * atol)
    out.backward(grad)
    expected = torch.zeros(6, width).double().index_add_(0, groups, grad.cpu().double())
    assert bias.grad is not None and torch.equal(x.grad, grad)
    torch.testing.assert_close(bias.grad.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "n_experts", "top_k"), [(1, 2, 1), (70, 12, 3), (9, 1500, 8)])
@pytest.mark.parametrize(("normalize", "epsilon", "scale"), [(False, 0.0, 1.0), (True, 0.5, 2.5)])
@pytest.mark.parametrize("counted", [False, True])
def test_routing(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    n_experts: int,
    top_k: int,
    normalize: bool,
    epsilon: float,
    scale: float,
    counted: bool,
) -> None:
    p = torch.rand(tokens, n_experts).to(device).requires_grad_()
    wide = p.detach().double().requires_grad_()
    experts = torch.rand(tokens, n_experts).topk(top_k).indices.to(device)
    counts = torch.randint(3, (tokens,)).to(device) if counted else None
    weights, sums = route(p, experts, counts, normalize, epsilon, scale, dtype)
    chosen, probabilities, total = sums.sum(0).split([n_experts, n_experts, 1])

    times = torch.ones(tokens, device=device).double() if counts is None else counts.double()
    expected = wide.gather(1, experts)
    if normalize:
        expected = expected / (expected.sum(1, keepdim=True) + epsilon)
    expected = expected * scale
    expected_sums = (wide * times[:, None]).sum(0)
    expected_counts = torch.zeros_like(expected_sums).scatter_add(0, experts.flatten(), times.repeat_interleave(top_k))
    assert weights.dtype == dtype
    torch.testing.assert_close(weights.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(chosen.double(), expected_counts) and total.item() == times.sum()
    torch.testing.assert_close(probabilities.double(), expected_sums, rtol=1e-5, atol=1e-5)

    grads = torch.randn(tokens, top_k).to(device, dtype), torch.randn(n_experts).to(device)
    for with_weights, with_sums in ((True, False), (False, True), (True, True)):
        outs = [weights] * with_weights + [probabilities] * with_sums
        wide_outs = [expected] * with_weights + [expected_sums] * with_sums
        used = [*grads[:1]] * with_weights + [*grads[1:]] * with_sums
        (grad,) = torch.autograd.grad(outs, p, used, retain_graph=True)
        (reference,) = torch.autograd.grad(wide_outs, wide, [x.double() for x in used], retain_graph=True)
        torch.testing.assert_close(grad.double(), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize": True, "normalize_epsilon": 1e-3, "scale": 2.5, "shared_hidden_dim": 8},
        {"score": "sigmoid", "balance": True, "n_groups": 2, "top_groups": 1, "normalize": True},
        {"expert_biases": True, "router_bias": True},
    ],
    ids=["softmax", "normalized", "groups", "biases"],
)
@pytest.mark.parametrize("counted", [False, True])
def test_a_layer_of_experts_equals_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, options: dict[str, Any], counted: bool
) -> None:
    layer = MoE(8, ExpertsLayer(6, 2, 12, **options)).to(device)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    x, grad = torch.randn(2, 21, 8).to(device)
    counts = torch.randint(3, (21,)).to(device) if counted else None
    replay = torch.where(torch.arange(21).unsqueeze(1) < 5, torch.tensor([4, 5]), -1).to(device)

    def results() -> Iterator[Tensor]:
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out, stats = layer(leaf, counts, routed_experts=replay)
        ((out * grad).sum() + (stats.probabilities * torch.arange(6, device=device)).sum()).backward()
        yield from (out, stats.counts, stats.probabilities, stats.tokens, leaf.grad)
        yield from (parameter.grad for parameter in layer.parameters())

    actual, expected = [], []
    for values, has_kernels in ((actual, True), (expected, False)):
        monkeypatch.setattr(moe, "_has_kernels", lambda _, has_kernels=has_kernels: has_kernels)
        values += [value.clone() for value in results()]
    assert len(actual) == len(expected) > 8
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-5)
