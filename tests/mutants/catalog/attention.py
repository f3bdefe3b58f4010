"""Mistakes in attention: windows, kernels, documents, pages."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import FURTHER_MATRIX, MATRIX
from tests.mutants.mutant import Mutant

SINKS = "tests/models/test_sinks.py"
CASCADE = "tests/models/test_cascade.py"
DECODE_KERNEL = "tests/generation/test_decode_kernel.py"
NATIVE = "tests/models/test_native.py"

PREFIX = "tests/models/test_prefix.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a document's last token is left out where another document goes on",
        "models/attention/prefix/search.py",
        "for leaf in {node for node in end if not node.children}:",
        "for leaf in {*end}:",
        ("tests/models/test_prefix.py",),
    ),
    Mutant(
        "the tokens that routers count are left out where they predict none",
        "archon/engine/engine.py",
        "every_token=bool(self.args.expert_layers) or",
        "every_token=",
        ("tests/engine/test_shared_prefixes.py::test_routers_count_a_beginning_for_each_document",),
    ),
    Mutant(
        "Ulysses repeats the row of key heads, not each key head",
        "models/attention/context_parallel.py",
        "k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)",
        "k, v = k.repeat(1, repeat, 1), v.repeat(1, repeat, 1)",
        (f"{MATRIX}[few_kv-c4-float64-context_parallel=ulysses]",),
    ),
    Mutant(
        "a branch of a tree sees one token more than its window",
        "models/attention/prefix/tree.py",
        "hidden = hidden | (trees.distance >= spec.window)",
        "hidden = hidden | (trees.distance > spec.window)",
        ("tests/models/test_prefix.py",),
    ),
    Mutant(
        "the keys of a common beginning have the gradient of its own queries alone",
        "models/attention/prefix/plan.py",
        "        keys += ks.unbind()\n",
        "        keys += ks.detach().unbind()\n",
        ("tests/models/test_prefix.py::test_attention_equals_that_of_whole_documents",),
    ),
    Mutant(
        "the last queries of a long document see the keys that its first ones see",
        "models/attention/packed/blockwise.py",
        "(length < BLOCKWISE_BELOW or queries < length)\n",
        "length < BLOCKWISE_BELOW\n    queries = length\n",
        ("tests/models/test_attention.py::test_long_documents[2]",),
    ),
    Mutant(
        "a block of queries sees one key more than its window",
        "models/attention/packed/blockwise.py",
        "hidden |= j <= i - self.window",
        "hidden |= j < i - self.window",
        ("tests/models/test_attention.py",),
    ),
    Mutant(
        "a decoding step sees one key more than its window",
        "models/attention/decode/page_batches.py",
        "np.maximum(lengths - window, 0)",
        "np.maximum(lengths - window - 1, 0)",
        ("tests/generation/test_paged_attention.py",),
    ),
    Mutant(
        "the compiled decoding step sees one key more than its window",
        "models/cpu/kernels.c",
        "length > window ? length - window : 0",
        "length > window ? length - window - 1 : 0",
        (f"{DECODE_KERNEL}::test_attention_to_pages",),
    ),
    Mutant(
        "the compiled decoding step forgets what it summed where a later page has a larger score",
        "models/cpu/kernels.c",
        "                        totals[g] *= factor;\n",
        "",
        (f"{DECODE_KERNEL}::test_attention_to_pages",),
    ),
    Mutant(
        "a compiled product forgets the sums of the features before",
        "models/cpu/kernels.c",
        "const float *start = k > 0 ? result : bias == NULL",
        "const float *start = bias == NULL",
        (f"{NATIVE}::test_products_with_packed_weights",),
    ),
    Mutant(
        "a compiled norm forgets its offset",
        "models/cpu/kernels.c",
        "out[i] = x[i] * factor * (offset + weight[i]);",
        "out[i] = x[i] * factor * weight[i];",
        (f"{NATIVE}::test_layers_equal_their_plain_twins",),
    ),
    Mutant(
        "compiled layers are given tensors whose memory may be elsewhere",
        "models/cpu/operations.py",
        "        type(x) in (Tensor, nn.Parameter)\n        and x.is_cpu\n",
        "        x.is_cpu\n",
        (f"{NATIVE}::test_where_they_apply",),
    ),
    Mutant(
        "the gradient of a compiled norm forgets that of its factor",
        "models/cpu/kernels.c",
        "(offset + weight[i]) * factor - v[i] * slope;",
        "(offset + weight[i]) * factor;",
        (f"{NATIVE}::test_their_gradients_equal_those_of_the_plain_twins",),
    ),
    Mutant(
        "a compiled rotation's gradient is turned as the result is",
        "models/cpu/fused.py",
        "sin if direction == 1 else -sin, interleaved",
        "sin, interleaved",
        (f"{NATIVE}::test_their_gradients_equal_those_of_the_plain_twins",),
    ),
    Mutant(
        "the gradient of attention in trees forgets that probabilities sum to one",
        "models/cpu/kernels.c",
        "slope = weight * (slope - mean) * scale;",
        "slope = weight * slope * scale;",
        (f"{PREFIX}::test_the_functions_for_trees_are_as_near_to_float64_as_products",),
    ),
    Mutant(
        "a token of a tree sees one token more than its window",
        "models/cpu/kernels.c",
        "hidden = window > 0 && count > window ? count - window : 0;",
        "hidden = window > 0 && count > window ? count - window - 1 : 0;",
        (f"{PREFIX}::test_the_functions_for_trees_are_as_near_to_float64_as_products",),
    ),
    Mutant(
        "the joint product of queries, keys and values has no biases",
        "archon/generation/replica.py",
        "bias = None if bias is None else torch.cat([layer.bias for layer in layers])",
        "bias = None",
        ("tests/generation/test_replica.py::test_layers_with_one_input_are_one_product",),
    ),
    Mutant(
        "the compiled decoding step is used where a gradient is wanted",
        "models/cpu/decode_kernel.py",
        "and not (q.requires_grad and torch.is_grad_enabled())",
        "and q is not None",
        (f"{DECODE_KERNEL}::test_where_it_applies",),
    ),
    Mutant(
        "a prompt read in parts sees one key more than its window",
        "models/attention/decode/paged.py",
        "batched_attention(*document, spec)[0]",
        "batched_attention(*document, AttentionSpec(spec.scale, spec.window and spec.window + 1))[0]",
        ("tests/generation/test_paged_attention.py",),
    ),
    Mutant(
        "flash-attn is told of a window one token too wide",
        "models/attention/packed/flash_kernel.py",
        "else self.spec.window - 1, 0 if",
        "else self.spec.window, 0 if",
        ("tests/models/test_attention.py",),
    ),
    Mutant(
        "compiled attention forgets the window",
        "models/attention/packed/sdpa.py",
        "AttentionSpec(scale, window or None, soft_cap or None, sinks)",
        "AttentionSpec(scale, None, soft_cap or None, sinks)",
        ("tests/models/test_attention.py",),
    ),
    Mutant(
        "the gradient of compiled attention forgets the window",
        "models/attention/packed/sdpa.py",
        "AttentionSpec(scale, window or None, soft_cap or None, *leaves[3:])",
        "AttentionSpec(scale, None, soft_cap or None, *leaves[3:])",
        ("tests/models/test_attention.py",),
    ),
    Mutant(
        "gathered keys of every document are the first one's",
        "models/attention/packed/documents.py",
        "tuple((starts[document], stop) for document, _, stop in chunks)",
        "tuple((starts[0], stop) for document, _, stop in chunks)",
        (f"{MATRIX}[dense-c2-float64-context_parallel=allgather]",),
    ),
    Mutant(
        "the kernel's log-sum-exp is a constant where sinks rescale its result",
        "models/attention/sinks.py",
        "        dq, dk, dv = ctx.kernel.backward(grad, q, k, v, out, lse)\n",
        "        own, own_lse = ctx.kernel.forward(q, k, v)\n"
        "        scaled = (grad * (own_lse - lse).exp().t().unsqueeze(-1)).to(grad.dtype)\n"
        "        dq, dk, dv = ctx.kernel.backward(scaled, q, k, v, own, own_lse)\n",
        (f"{SINKS}::test_a_kernels_own_backward_gives_the_gradients_with_sinks",),
    ),
    Mutant(
        "a kernel's backward takes the log-sum-exp without sinks",
        "models/attention/sinks.py",
        "ctx.save_for_backward(q, k, v, sinks, out, with_sinks)",
        "ctx.save_for_backward(q, k, v, sinks, out, lse)",
        (f"{SINKS}::test_a_kernels_own_backward_gives_the_gradients_with_sinks",),
    ),
    Mutant(
        "the gradient of soft-capped scores is that of scores",
        "models/attention/packed/blockwise.py",
        "                    ds.mul_(slope)\n",
        "                    ds.mul_(1.0)\n",
        (f"{SINKS}::test_packed_documents",),
    ),
    Mutant(
        "a decoding step over several pages forgets the sinks",
        "models/attention/decode/page_batches.py",
        "if spec.sinks is None else torch.exp(spec.sinks - maximum)",
        "if spec.sinks is None else torch.zeros_like(maximum)",
        (f"{SINKS}::test_decoding_from_pages",),
    ),
    Mutant(
        "Ulysses gives every rank the sinks of the first one's heads",
        "models/attention/context_parallel.py",
        "sinks=spec.sinks.chunk(group.size)[group.rank]",
        "sinks=spec.sinks.chunk(group.size)[0]",
        (f"{FURTHER_MATRIX}[sinks-c2-float64-context_parallel=ulysses]",),
    ),
    Mutant(
        "the backward of a context's kernel is given its own log-sum-exp, not the merged one",
        "models/attention/prefix/cascade.py",
        "ctx.save_for_backward(q, k, v, sinks, merged, lse, queries, keys)",
        "ctx.save_for_backward(q, k, v, sinks, merged, run_lse, queries, keys)",
        (f"{CASCADE}::test_attention_and_gradients_are_those_of_whole_documents[2-answers-None-None-plain]",),
    ),
    Mutant(
        "a run after two branches sees only the last one's tokens",
        "models/attention/prefix/cascade.py",
        "above = () if parent < 0 else (*self._paths[number[parent]], number[parent])",
        "above = () if parent < 0 else (number[parent],)",
        (f"{CASCADE}::test_attention_and_gradients_are_those_of_whole_documents[2-a history-None-None-plain]",),
    ),
    Mutant(
        "a window ends one token too early in the context before a run",
        "models/attention/prefix/cascade.py",
        "self._tail(path, window - 1)",
        "self._tail(path, window - 2)",
        (f"{CASCADE}::test_attention_and_gradients_are_those_of_whole_documents[2-answers-45-None-plain]",),
    ),
    Mutant(
        "the log-sum-exp has the dtype of the sinks",
        "models/attention/sinks.py",
        "torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))",
        "torch.logaddexp(lse.to(sinks.dtype), sinks.unsqueeze(1)).to(lse.dtype)",
        ("tests/models/test_sinks.py::test_the_log_sum_exp_stays_wide_under_narrow_sinks",),
    ),
    Mutant(
        "the gradient of sinks is computed in their dtype",
        "models/attention/sinks.py",
        "dsinks = -((sinks.to(lse.dtype).unsqueeze(1) - lse).exp() * row_sums).sum(1)",
        "dsinks = -((sinks.unsqueeze(1) - lse.to(sinks.dtype)).exp() * row_sums.to(sinks.dtype)).sum(1)",
        ("tests/models/test_sinks.py::test_the_log_sum_exp_stays_wide_under_narrow_sinks",),
    ),
    Mutant(
        "gradients of sinks are summed over documents in their dtype",
        "models/attention/packed/sdpa.py",
        "    spec, outs = spec.with_wide_sinks(q.dtype), []\n",
        "    outs = []\n",
        ("tests/models/test_sinks.py::test_gradients_of_narrow_sinks_are_rounded_once",),
    ),
    Mutant(
        "gradients of sinks are summed over gathered chunks in their dtype",
        "models/attention/packed/sdpa.py",
        "        spec = spec.with_wide_sinks(q.dtype)\n",
        "",
        ("tests/models/test_sinks.py::test_gradients_of_narrow_sinks_are_rounded_once",),
    ),
    Mutant(
        "gradients of sinks are summed over shared prefixes in their dtype",
        "models/attention/prefix/plan.py",
        "    spec = spec.with_wide_sinks(q.dtype)\n",
        "",
        ("tests/models/test_sinks.py::test_gradients_of_narrow_sinks_are_rounded_once",),
    ),
    Mutant(
        "scores of decoded tokens are rounded to the dtype of the sinks",
        "models/attention/spec.py",
        "column = sinks.to(scores.dtype).expand(",
        "scores = scores.to(sinks.dtype).to(scores.dtype)\n    column = sinks.to(scores.dtype).expand(",
        ("tests/models/test_sinks.py::test_narrow_sinks_round_no_score",),
    ),
)
