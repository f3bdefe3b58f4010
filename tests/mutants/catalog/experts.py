"""Mistakes in routers and experts."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import FURTHER_MATRIX
from tests.mutants.mutant import Mutant

ROUTER = "tests/models/test_router.py"
KERNELS, KERNEL_TESTS = "models/cuda/experts.py", "tests/models/cuda/test_experts.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the balancing bias is part of the routing weights",
        "models/layers/moe.py",
        "weights = p.gather(-1, experts)",
        "weights = (p if self.expert_bias is None else p + self.expert_bias).gather(-1, experts)",
        ("tests/models/test_router.py",),
    ),
    Mutant(
        "the router's softmax runs in the compute dtype",
        "models/layers/moe.py",
        "return self.gate(x).to(wide)",
        "return self.gate(x)",
        ("tests/models/test_router.py",),
    ),
    Mutant(
        "padding's probabilities count in the balancing loss",
        "models/layers/moe.py",
        "kept = p if valid_mask is None else p * ones",
        "kept = p",
        ("tests/models/test_router.py",),
    ),
    Mutant(
        "routers count a common beginning once, not for each document",
        "models/attention/meta.py",
        "self.token_rows, self.valid_mask = shared.gather_index, shared.counts()",
        "self.token_rows, self.valid_mask = shared.gather_index, None",
        ("tests/engine/test_shared_prefixes.py::test_routers_count_a_beginning_for_each_document",),
    ),
    Mutant(
        "the weights of chosen experts are divided by the sum over all experts",
        "models/layers/moe.py",
        "weights = weights / (weights.sum(-1, keepdim=True) + self.spec.normalize_epsilon)",
        "weights = weights / (p.sum(-1, keepdim=True) + self.spec.normalize_epsilon)",
        ("tests/models/test_router.py",),
    ),
    Mutant(
        "the balancing loss is not squared in the number of tokens",
        "models/layers/moe.py",
        "return (counts * probabilities).sum() * counts.shape[0] / tokens.square()",
        "return (counts * probabilities).sum() * counts.shape[0] / (tokens * counts.sum())",
        ("tests/engine/test_balancing.py",),
    ),
    Mutant(
        "a router's bias is rounded with the model",
        "models/layers/moe.py",
        "torch.promote_types(after.dtype, torch.float32)",
        "after.dtype",
        (f"{ROUTER}::test_the_correction_bias_stays_wide_is_0_where_given_memory_and_keeps_what_was_loaded",),
    ),
    Mutant(
        "giving buffers a device erases the bias that was loaded",
        "models/layers/moe.py",
        "device=device) if leaves_meta else bias.to(device, dtype)",
        "device=device)",
        (f"{ROUTER}::test_the_correction_bias_stays_wide_is_0_where_given_memory_and_keeps_what_was_loaded",),
    ),
    Mutant(
        "groups are chosen by their best expert, not by the two best",
        "models/layers/moe.py",
        "groups.topk(self.spec.group_best, dim=-1).values.sum(-1)",
        "groups.amax(-1)",
        (f"{ROUTER}::test_group_limited_routing_in_plain_steps",),
    ),
    Mutant(
        "experts are chosen by rounded logits",
        "models/layers/moe.py",
        "F.linear(x.to(wide), local(self.gate.weight).to(wide), None if bias is None else bias.to(wide))",
        "F.linear(x, local(self.gate.weight), bias).to(wide)",
        (f"{ROUTER}::test_wide_logits_choose_experts_that_rounded_ones_confuse",),
    ),
    Mutant(
        "gates are clamped from below too",
        "models/cpu/fused.py",
        "gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)",
        "gate, up = gate.clamp(-limit, limit), up.clamp(-limit, limit)",
        (f"{ROUTER}::test_biased_clamped_experts_are_those_of_gpt_oss",),
    ),
    Mutant(
        "gates beyond their limit have a gradient",
        "models/cpu/fused.py",
        "gate_grad = slope.mul_(factor).mul_(grad).masked_fill_(gate > ctx.limit, 0)",
        "gate_grad = slope.mul_(factor).mul_(grad)",
        (f"{ROUTER}::test_biased_clamped_experts_are_those_of_gpt_oss",),
    ),
    Mutant(
        "ranks that split an expert each add all of its output bias",
        "models/layers/moe.py",
        "out_bias = F.pad(out_bias, (start, self.dim - start - out_bias.shape[1]))",
        "out_bias = all_gather(out_bias.t().contiguous(), self.etp).t() + 0 * start",
        (f"{FURTHER_MATRIX}[tied_sinks-(attn:d1t2|ffn:d1t2)-float64]",),
    ),
    Mutant(
        "the gradient of an expert's bias is rounded to the compute dtype",
        "models/layers/moe.py",
        "x + bias.to(wide).index_select(0, experts).to(x.dtype)",
        "x + bias.to(x.dtype).to(wide).index_select(0, experts).to(x.dtype)",
        (f"{ROUTER}::test_the_gradient_of_an_expert_bias_is_summed_in_float32",),
    ),
    Mutant(
        "the gradient of an expert's bias is summed in the compute dtype",
        "models/layers/moe.py",
        "    wide = torch.promote_types(bias.dtype, torch.float32)\n    return x +",
        "    wide = x.dtype\n    return x +",
        (f"{ROUTER}::test_rows_of_expert_biases_are_added_up_in_float32_on_any_device",),
    ),
    Mutant(
        "the kernel's sort is not stable",
        KERNELS,
        "(other[None, :] < pair[:, None])",
        "(other[None, :] > pair[:, None])",
        (f"{KERNEL_TESTS}::test_pairs_are_sorted_stably",),
    ),
    Mutant(
        "the kernel's sort counts from the end of a group, not of the block before",
        KERNELS,
        "before = group * n_blocks + block - 1",
        "before = group * n_blocks + block",
        (f"{KERNEL_TESTS}::test_pairs_are_sorted_stably",),
    ),
    Mutant(
        "the kernel sums the rows of a token without weights",
        KERNELS,
        "row *= tl.load(Weights + token * TOP_K + choice)",
        "row *= 1.0 + 0 * tl.load(Weights + token * TOP_K + choice)",
        (f"{KERNEL_TESTS}::test_rows_are_gathered_and_summed",),
    ),
    Mutant(
        "the kernel's gradient of a weight is that of the first columns",
        KERNELS,
        "product += grad * row\n",
        "product = grad * row\n",
        (f"{KERNEL_TESTS}::test_rows_are_gathered_and_summed",),
    ),
    Mutant(
        "the kernel's routing weights are divided by a sum without epsilon",
        KERNELS,
        "total = tl.sum(weight, 1) + epsilon",
        "total = tl.sum(weight, 1)",
        (f"{KERNEL_TESTS}::test_routing",),
    ),
    Mutant(
        "the kernel's gradient of a score leaves out the sum that it is divided by",
        KERNELS,
        "slope = tl.sum(weights_grad * p, 1) / total",
        "slope = tl.sum(weights_grad * p, 1) * 0",
        (f"{KERNEL_TESTS}::test_routing",),
    ),
    Mutant(
        "the kernel's gradient of a score leaves out the scale",
        KERNELS,
        "p_grad = (grad_k - slope) / total * scale",
        "p_grad = (grad_k - slope) / total",
        (f"{KERNEL_TESTS}::test_routing",),
    ),
    Mutant(
        "the kernel counts a shared token's choices once",
        KERNELS,
        "tl.where(expert_k[:, None] == column[None, :], count[:, None], 0.0)",
        "tl.where(expert_k[:, None] == column[None, :], 1.0, 0.0)",
        (f"{KERNEL_TESTS}::test_routing",),
    ),
    Mutant(
        "the kernel's gradient of shared tokens' probabilities counts them once",
        KERNELS,
        "grad += count[:, None] * tl.load(sums",
        "grad += inside.to(tl.float32)[:, None] * tl.load(sums",
        (f"{KERNEL_TESTS}::test_routing",),
    ),
    Mutant(
        "the kernel's bias at the end of a group is that of the group before",
        KERNELS,
        "other=2147483647) <= row)",
        "other=2147483647) < row)",
        (f"{KERNEL_TESTS}::test_biases_of_groups",),
    ),
    Mutant(
        "the kernel's gradient of a bias is summed over the rows of the groups before too",
        KERNELS,
        "for first in range(start, stop, ROWS):",
        "for first in range(0 * start, stop, ROWS):",
        (f"{KERNEL_TESTS}::test_biases_of_groups",),
    ),
)
