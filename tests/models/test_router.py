"""The router against its definition, in plain steps: which experts it chooses, what they weigh, what it counts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from archon.models.attention.meta import PackedAttention
from archon.models.layers.moe import ExpertsLayer, MoE, Router
from archon.models.qwen3_moe import Qwen3MoEModel, Qwen3MoEModelArgs
from tests.models.reference import pack
from tests.tolerances import FORMULA_FP64

T, DIM, EXPERTS, TOP_K = 40, 12, 16, 3


def router(dtype: torch.dtype, *, normalize: bool, balance: bool = False, experts: int = EXPERTS) -> Router:
    """Random weights; with `balance` a bias that is as large as the probabilities."""
    made = Router(DIM, experts, TOP_K, normalize=normalize, balance=balance).to(dtype)
    torch.nn.init.normal_(made.gate.weight)
    if balance:
        made.expert_bias = torch.randn(experts, dtype=torch.promote_types(dtype, torch.float32))
    return made


def plain(module: Router, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [T, E] in at least float32, and the weights and indices [T, k] of the chosen experts."""
    logits = x @ module.gate.weight.t()
    p = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    scores = p if module.expert_bias is None else p + module.expert_bias
    experts = scores.argsort(dim=-1, descending=True)[:, :TOP_K]
    weights = torch.stack([p[t, experts[t]] for t in range(len(x))])
    return p, weights / weights.sum(-1, keepdim=True) if module.normalize else weights, experts


@pytest.mark.parametrize("normalize", [True, False])
def test_the_balancing_bias_decides_which_experts_are_chosen_and_not_what_they_weigh(normalize: bool) -> None:
    module = router(torch.float64, normalize=normalize, balance=True)
    x = torch.randn(T, DIM, dtype=torch.float64)
    _, expected, chosen = plain(module, x)
    weights, experts, _ = module(x, None)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, expected, rtol=FORMULA_FP64, atol=0)
    assert module.expert_bias is not None
    module.expert_bias.zero_()
    assert not torch.equal(module(x, None)[1], experts), "a bias of this size is meant to change the choice"


@pytest.mark.parametrize("normalize", [True, False])
def test_under_bf16_compute_the_softmax_over_the_experts_runs_in_fp32(normalize: bool) -> None:
    """Of 128 experts: probabilities of 1/128 in bfloat16 are often equal, and then others are chosen."""
    module = router(torch.bfloat16, normalize=normalize, experts=128)
    with torch.no_grad():
        module.gate.weight.mul_(0.05)
    x = torch.randn(T, DIM, dtype=torch.bfloat16)
    p, expected, chosen = plain(module, x)
    weights, experts, stats = module(x, None)
    assert weights.dtype == torch.bfloat16
    assert torch.equal(p.gather(1, experts), p.gather(1, chosen)), "experts of a lower probability were chosen"
    assert torch.equal(weights, expected.to(torch.bfloat16))
    assert stats.probabilities.dtype == torch.float32
    assert torch.equal(stats.probabilities, p.sum(0))


def moe_model() -> Qwen3MoEModel:
    """Three layers of experts in float64, every weight random."""
    args = Qwen3MoEModelArgs(
        dim=24, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=16, vocab_size=50, n_experts=8, n_experts_per_token=2,
        moe_hidden_dim=16, norm_topk_prob=True, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3MoEModel(args).double()
    model.init_weights()
    model.init_buffers("cpu")
    return model


def test_padding_is_left_out_of_the_counts_wherever_it_stands_among_documents_of_mixed_lengths() -> None:
    model, lengths = moe_model(), (5, 9, 5, 9, 2, 9, 5, 9)
    tokens, positions, bounds, longest = pack(list(lengths), 50, seed=1)
    meta = PackedAttention(bounds, longest, "sdpa", lengths)
    meta.valid_mask = torch.ones(len(tokens), dtype=torch.bool)
    meta.valid_mask[bounds[4] : bounds[5]] = False  # the document of two tokens is padding
    model(tokens, positions, bounds, longest, meta)
    found = model.router_stats

    counts, probabilities = ([torch.zeros(8, dtype=torch.float64) for _ in found] for _ in range(2))
    for document, (start, stop) in enumerate(pairwise(bounds.tolist())):
        if document != 4:
            alone = torch.tensor([0, stop - start], dtype=torch.int32)
            model(tokens[start:stop], positions[start:stop], alone, stop - start)
            for layer, stats in enumerate(model.router_stats):
                counts[layer] += stats.counts
                probabilities[layer] += stats.probabilities.detach()
    for layer, stats in enumerate(found):
        assert torch.equal(stats.counts, counts[layer])
        torch.testing.assert_close(stats.probabilities, probabilities[layer], rtol=FORMULA_FP64, atol=0)
        assert float(stats.tokens) == len(tokens) - 2


@pytest.mark.parametrize("normalize", [True, False])
def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts(normalize: bool) -> None:
    module = MoE(DIM, ExpertsLayer(EXPERTS, TOP_K, 8, normalize=normalize, shared_hidden_dim=6)).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(T, DIM, dtype=torch.float64)
    _, weights, experts = plain(module.router, x)
    w1, w2, w3 = module.experts.w1, module.experts.w2, module.experts.w3
    expected = module.shared_experts(x) if module.shared_experts is not None else torch.zeros_like(x)
    for t in range(T):
        for weight, e in zip(weights[t], experts[t], strict=True):
            gate = w1[e] @ x[t]
            expected[t] += weight * (w2[e] @ (gate * gate.sigmoid() * (w3[e] @ x[t])))
    torch.testing.assert_close(module(x)[0], expected, rtol=FORMULA_FP64, atol=FORMULA_FP64)
