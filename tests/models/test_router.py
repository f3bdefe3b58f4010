"""The router against its definition, in plain steps: which experts it chooses, what they weigh, what it counts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, Glm4MoeConfig, GptOssConfig, Qwen2MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from archon.models.attention.meta import PackedAttention
from archon.models.layers.feed_forward import ClampedSwiGLU
from archon.models.layers.moe import ExpertsLayer, GroupedExperts, MoE, Router
from archon.models.qwen3_moe import Qwen3MoEModel, Qwen3MoEModelArgs
from archon.schema.errors import ConfigError
from archon.tools.check.oracle import pack, relative_error
from tests.models.recorder import SummedRows
from tests.tolerances import FORMULA_FP32, FORMULA_FP64

T, DIM, EXPERTS, TOP_K = 40, 12, 16, 3


def router(dtype: torch.dtype, *, normalize: bool, balance: bool = False, experts: int = EXPERTS) -> Router:
    """Random weights; with `balance` a bias that is as large as the probabilities."""
    made = Router(DIM, ExpertsLayer(experts, TOP_K, 8, normalize=normalize, balance=balance)).to(dtype)
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
    return p, weights / weights.sum(-1, keepdim=True) if module.spec.normalize else weights, experts


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


@pytest.mark.parametrize("normalize", [True, False])
def test_given_experts_are_weighed_by_the_scores_of_now_and_counted(normalize: bool) -> None:
    module = router(torch.float64, normalize=normalize, balance=True)
    x = torch.randn(T, DIM, dtype=torch.float64)
    valid = torch.arange(T) % 7 != 0
    given = torch.rand(T, EXPERTS).topk(TOP_K).indices
    given[::5] = -1
    p, _, chosen = plain(module, x)
    used = torch.where(given < 0, chosen, given)
    expected = torch.stack([p[t, used[t]] for t in range(T)])
    expected = expected / expected.sum(-1, keepdim=True) if normalize else expected
    factors = torch.randn_like(expected)
    (slope,) = torch.autograd.grad((expected * factors).sum(), module.gate.weight)

    weights, experts, stats = module(x, valid, given.to(torch.int16))
    assert torch.equal(experts, used)
    torch.testing.assert_close(weights, expected, rtol=FORMULA_FP64, atol=0)
    (found,) = torch.autograd.grad((weights * factors).sum(), module.gate.weight)
    torch.testing.assert_close(found, slope, rtol=FORMULA_FP64, atol=FORMULA_FP64)
    assert torch.equal(stats.counts, torch.bincount(used[valid].flatten(), minlength=EXPERTS).double())
    replayed = valid & (given[:, 0] >= 0)
    changed = [{*used[t].tolist()} != {*chosen[t].tolist()} for t in replayed.nonzero().flatten().tolist()]
    assert (stats.replayed, stats.changed) == (int(replayed.sum()), sum(changed))


def test_the_same_experts_in_another_order_are_not_counted_as_changed() -> None:
    module = router(torch.float64, normalize=True)
    x = torch.randn(T, DIM, dtype=torch.float64)
    weights, chosen, _ = module(x, None)
    given = chosen.flip(-1).to(torch.int16)
    replayed_weights, experts, stats = module(x, None, given)
    assert torch.equal(experts, chosen.flip(-1))
    torch.testing.assert_close(replayed_weights, weights.flip(-1), rtol=FORMULA_FP64, atol=0)
    assert (stats.replayed, stats.changed) == (T, 0)
    # Token 0 replaces one expert, the first, second or third, by an expert that the router did not choose.
    other = max(expert for expert in range(EXPERTS) if expert not in chosen[0])
    for place in range(TOP_K):
        replaced = given.clone()
        replaced[0, place] = other
        assert module(x, None, replaced)[2].changed == 1


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


# Routers and experts of other families, against transformers' modules

GROUPED = {
    "one group": {"n_group": 1, "topk_group": 1},
    "half of the groups": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "one group of several": {"n_group": 4, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 0.7},
}


def grouped(
    options: dict[str, object], dtype: torch.dtype, config_class: type, router_class: type
) -> tuple[Router, object]:
    """Our router and transformers', with the same random weights and a correction bias as large as the scores."""
    config = config_class(hidden_size=DIM, n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, **options)
    theirs = router_class(config).to(dtype)
    theirs.e_score_correction_bias = torch.randn(EXPERTS, dtype=torch.promote_types(dtype, torch.float32))
    torch.nn.init.normal_(theirs.weight)
    spec = ExpertsLayer(
        EXPERTS, TOP_K, 8, score="sigmoid", normalize=config.norm_topk_prob, normalize_epsilon=1e-20,
        scale=config.routed_scaling_factor, n_groups=config.n_group, top_groups=config.topk_group, fp32_logits=True,
        correction_bias=True,
    )  # fmt: skip
    ours = Router(DIM, spec).to(dtype)
    ours.load_state_dict({"gate.weight": theirs.weight, "expert_bias": theirs.e_score_correction_bias})
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("name", GROUPED)
def test_group_limited_routing_is_that_of_transformers(name: str, family: str, dtype: torch.dtype) -> None:
    classes = {"deepseek_v3": (DeepseekV3Config, DeepseekV3TopkRouter), "glm4_moe": (Glm4MoeConfig, Glm4MoeTopkRouter)}
    ours, theirs = grouped(GROUPED[name], dtype, *classes[family])
    x = torch.randn(200, DIM, dtype=dtype)
    weights, experts, _ = ours(x, None)
    _, expected, chosen = theirs(x)
    order, wanted = experts.argsort(-1), chosen.argsort(-1)
    assert torch.equal(experts.gather(-1, order), chosen.gather(-1, wanted))
    assert weights.dtype == dtype
    rounded = expected.gather(-1, wanted).to(dtype)
    torch.testing.assert_close(weights.gather(-1, order), rounded, rtol=FORMULA_FP32, atol=0)
    assert ours.expert_bias is not None and ours.expert_bias.dtype == torch.float32
    zero = torch.zeros_like(ours.expert_bias)
    ours.expert_bias = zero
    assert not torch.equal(ours(x, None)[1].sort(-1).values, experts.sort(-1).values), "the bias changes the choice"


def test_group_limited_routing_in_plain_steps() -> None:
    """In float64, where transformers rounds to float32: the groups by their two best biased scores."""
    spec = ExpertsLayer(
        EXPERTS, TOP_K, 8, score="sigmoid", normalize=True, scale=1.5, n_groups=4, top_groups=2, correction_bias=True
    )
    module = Router(DIM, spec).double()
    torch.nn.init.normal_(module.gate.weight)
    module.expert_bias = torch.randn(EXPERTS, dtype=torch.float64)
    x = torch.randn(T, DIM, dtype=torch.float64)
    weights, experts, stats = module(x, None)
    scores = (x @ module.gate.weight.t()).sigmoid()
    for t in range(T):
        biased = (scores[t] + module.expert_bias).tolist()
        sums = [sum(sorted(biased[first : first + 4])[-2:]) for first in range(0, EXPERTS, 4)]
        best = sorted(range(4), key=sums.__getitem__)[-2:]
        allowed = sorted((e for e in range(EXPERTS) if e // 4 in best), key=biased.__getitem__)[-TOP_K:]
        assert {*experts[t].tolist()} == {*allowed}
        expected = scores[t, experts[t]] / scores[t, allowed].sum() * 1.5
        torch.testing.assert_close(weights[t], expected, rtol=FORMULA_FP64, atol=0)
    torch.testing.assert_close(stats.probabilities, scores.sum(0), rtol=FORMULA_FP64, atol=0)


def test_wide_logits_choose_experts_that_rounded_ones_confuse() -> None:
    spec = {"score": "sigmoid", "fp32_logits": True, "correction_bias": True}
    wide = Router(DIM, ExpertsLayer(128, TOP_K, 8, **spec)).bfloat16()
    narrow = Router(DIM, ExpertsLayer(128, TOP_K, 8, **spec | {"fp32_logits": False})).bfloat16()
    torch.nn.init.normal_(wide.gate.weight, std=0.02)
    narrow.load_state_dict(wide.state_dict())
    x = torch.randn(400, DIM, dtype=torch.bfloat16)
    exact = (x.float() @ wide.gate.weight.float().t()).sigmoid().topk(TOP_K).indices
    assert torch.equal(wide(x, None)[1], exact)
    assert not torch.equal(narrow(x, None)[1], exact)


def test_the_correction_bias_stays_wide_is_0_where_given_memory_and_keeps_what_was_loaded() -> None:
    spec = ExpertsLayer(EXPERTS, TOP_K, 8, score="sigmoid", correction_bias=True)
    module = Router(DIM, spec)
    values = torch.randn(EXPERTS)
    module.load_state_dict({"gate.weight": module.gate.weight, "expert_bias": values})
    module.bfloat16().init_buffers("cpu")
    assert module.gate.weight.dtype == torch.bfloat16
    assert torch.equal(module.expert_bias, values)
    with torch.device("meta"):
        empty = Router(DIM, spec).bfloat16()
    for made in (empty.to_empty(device="cpu"), Router(DIM, spec)):
        assert made.expert_bias.dtype == torch.float32
        assert not made.expert_bias.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_biased_clamped_experts_are_those_of_gpt_oss(dtype: torch.dtype) -> None:
    """Its router too: a softmax over the chosen experts' logits, which have a bias."""
    config = GptOssConfig(
        hidden_size=DIM, intermediate_size=16, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, num_hidden_layers=1
    )
    router, experts = GptOssTopKRouter(config).to(dtype), GptOssExperts(config).to(dtype)
    act = ClampedSwiGLU(alpha=1.702, limit=7.0)
    spec = ExpertsLayer(EXPERTS, TOP_K, 16, act, normalize=True, router_bias=True, expert_biases=True)
    module = MoE(DIM, spec).to(dtype)
    with torch.no_grad():
        for parameter in (*router.parameters(), *experts.parameters()):
            parameter.normal_(std=1.5)
        ours = dict(module.named_parameters())
        for name, value in {
            "router.gate.weight": router.weight,
            "router.gate.bias": router.bias,
            "experts.w1": experts.gate_up_proj[..., ::2].mT,
            "experts.w3": experts.gate_up_proj[..., 1::2].mT,
            "experts.w2": experts.down_proj.mT,
            "experts.b1": experts.gate_up_proj_bias[:, ::2],
            "experts.b3": experts.gate_up_proj_bias[:, 1::2],
            "experts.b2": experts.down_proj_bias,
        }.items():
            ours.pop(name).copy_(value)
        assert not ours
    x = torch.randn(T, DIM, dtype=dtype, requires_grad=True)
    theirs = x.detach().clone().requires_grad_()
    _, scores, chosen = router(theirs)
    expected = experts(theirs, chosen, scores)
    found, _ = module(x)
    weight = torch.randn_like(expected)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    tolerance = {torch.float64: FORMULA_FP64, torch.float32: FORMULA_FP32, torch.bfloat16: 0.03}[dtype]
    pairs = [(found, expected), (x.grad, theirs.grad), (module.router.gate.bias.grad, router.bias.grad)]
    pairs += [
        (module.experts.b2.grad, experts.down_proj_bias.grad),
        (module.experts.b1.grad, experts.gate_up_proj_bias.grad[:, ::2]),
        (module.experts.w3.grad, experts.gate_up_proj.grad[..., 1::2].mT),
        (module.experts.w2.grad, experts.down_proj.grad.mT),
    ]
    for ours_part, theirs_part in pairs:
        assert relative_error(ours_part.float(), theirs_part.float()) <= tolerance


def biased_experts(bias_dtype: torch.dtype) -> GroupedExperts:
    """Two experts in bfloat16 whose matrices are 0, so that an output is its expert's bias b2 alone."""
    experts = GroupedExperts(DIM, ExpertsLayer(2, 1, 16, expert_biases=True)).bfloat16()
    for parameter in experts.parameters():
        torch.nn.init.zeros_(parameter)
    for name in ("b1", "b2", "b3"):
        setattr(experts, name, torch.nn.Parameter(getattr(experts, name).detach().to(bias_dtype)))
    return experts


def test_the_gradient_of_an_expert_bias_is_summed_in_float32() -> None:
    """Of a bias in float32 it is the sum of the rows' gradients to float32's accuracy: a sum that is bfloat16 at any
    point is off by up to 2^-9, or stops at 256."""
    counts = torch.tensor([1700, 300])
    rows = torch.rand(2000, DIM).bfloat16()
    expected = torch.stack([part.double().sum(0) for part in rows.split(counts.tolist())])
    experts = biased_experts(torch.float32)
    experts(torch.zeros(2000, DIM, dtype=torch.bfloat16), counts).backward(rows)
    torch.testing.assert_close(experts.b2.grad.double(), expected, rtol=FORMULA_FP32, atol=0)
    narrow = biased_experts(torch.bfloat16)
    narrow(torch.zeros(2000, DIM, dtype=torch.bfloat16), counts).backward(rows)
    torch.testing.assert_close(narrow.b2.grad.double(), expected, rtol=2**-8, atol=0)  # rounded once


def test_rows_of_expert_biases_are_added_up_in_float32_on_any_device() -> None:
    """The CPU's own sum over rows of bfloat16 is wide, that of other devices is not: what they are given must be."""
    experts = biased_experts(torch.bfloat16)
    out = experts(torch.zeros(20, DIM, dtype=torch.bfloat16), torch.tensor([15, 5]))
    with SummedRows() as summed:
        out.sum().backward()
    assert summed.dtypes == [torch.float32] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_shared_expert_is_that_of_qwen2_moe(dtype: torch.dtype) -> None:
    config = Qwen2MoeConfig(
        hidden_size=DIM, num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=8,
        shared_expert_intermediate_size=6, experts_implementation="eager",
    )  # fmt: skip
    block = Qwen2MoeSparseMoeBlock(config).to(dtype)
    module = MoE(DIM, ExpertsLayer(EXPERTS, TOP_K, 8, shared_hidden_dim=6, shared_gate=True)).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    gate, up = block.experts.gate_up_proj.chunk(2, dim=1)
    shared = block.shared_expert
    weights = {
        "router.gate.weight": block.gate.weight, "experts.w1": gate, "experts.w3": up,
        "experts.w2": block.experts.down_proj, "shared_gate.weight": block.shared_expert_gate.weight,
        "shared_experts.w1.weight": shared.gate_proj.weight, "shared_experts.w2.weight": shared.down_proj.weight,
        "shared_experts.w3.weight": shared.up_proj.weight,
    }  # fmt: skip
    module.load_state_dict(weights)
    x = torch.randn(T, DIM, dtype=dtype)
    expected = block(x.unsqueeze(0))[0]
    assert relative_error(module(x)[0].float(), expected.float()) <= (FORMULA_FP32 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 17}, "experts per token are 17; expected 1 to the 16 experts"),
        ({"score": "tanh"}, "router score is 'tanh'; expected one of softmax, sigmoid"),
        ({"n_groups": 3}, "1 of 3 groups of the 16 experts; expected groups that divide the experts"),
        ({"n_groups": 4, "top_groups": 5}, "5 of 4 groups of the 16 experts"),
        ({"n_groups": 16, "top_groups": 16}, "16 groups have 1 experts each"),
        ({"n_groups": 8, "top_groups": 1}, "8 groups have 2 experts each, and a token uses 3 experts of 1 groups"),
    ],
)
def test_routers_that_contradict_themselves_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertsLayer(**{"n_experts": EXPERTS, "top_k": TOP_K, "hidden_dim": 8} | fields)
