"""Mistakes in gated delta nets and Mamba-2: documents, decays, convolutions, states."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import FURTHER_MATRIX
from tests.mutants.mutant import Mutant

DELTA = "tests/models/test_delta_net.py"
STATES = "tests/generation/test_states.py"
MAMBA = "tests/models/test_mamba.py"
NEMOTRON_PARITY = "tests/models/test_parity.py::test_logits_and_every_gradient_equal_transformers[nemotron_h-{}]"
MAMBA_PARITY = "tests/models/test_parity.py::test_logits_and_every_gradient_equal_transformers[granitemoehybrid-{}]"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the scan takes a pack for one document",
        "models/layers/delta_net.py",
        "gated_delta_rule(q, k, v, log_decay, beta, documents, matrices, self.rule)",
        "gated_delta_rule(\n"
        "            q, k, v, log_decay, beta, PackedDocuments(documents.cu_seqlens[[0, -1]], len(q)), matrices\n"
        "        )",
        (f"{DELTA}::test_a_document_does_not_see_the_one_before_it",),
    ),
    Mutant(
        "fla's kernel takes a pack for one document",
        "models/layers/delta_rule.py",
        "cu_seqlens=documents.cu_seqlens_int64",
        "cu_seqlens=documents.cu_seqlens_int64[[0, -1]]",
        (f"{DELTA}::test_flas_kernel_is_called_as_it_documents_and_computes_the_same",),
    ),
    Mutant(
        "the convolution sees the end of the document before",
        "models/layers/delta_net.py",
        "causal_convolution(channels, weight, documents, inputs)",
        "causal_convolution(\n"
        "            channels, weight, PackedDocuments(documents.cu_seqlens[[0, -1]], len(channels)), inputs\n"
        "        )",
        (f"{DELTA}::test_a_document_does_not_see_the_one_before_it",),
    ),
    Mutant(
        "decays are computed in the model's dtype",
        "models/layers/delta_net.py",
        "wide = torch.promote_types(a.dtype, torch.float32)",
        "wide = a.dtype",
        (f"{DELTA}::test_decays_stay_float32_in_a_bfloat16_model",),
    ),
    Mutant(
        "the parameters of decays are rounded with the model",
        "models/layers/delta_net.py",
        "return after if after.dtype.itemsize >= 4 else before.to(after.device)",
        "return after",
        (f"{DELTA}::test_decays_stay_float32_in_a_bfloat16_model",),
    ),
    Mutant(
        "a chunk takes no state from the one before",
        "models/layers/delta_rule.py",
        "corrections = value_part[now] - state_part[now] @ state",
        "corrections = value_part[now]",
        (f"{DELTA}::test_chunks_compute_the_definition_and_its_gradients",),
    ),
    Mutant(
        "Ulysses convolves with the first rank's weights on every rank",
        "models/attention/context_parallel.py",
        "weight.repeat_interleave(ulysses_repeat(heads, len(weight), group.size), 0).chunk(group.size)[group.rank]",
        "weight.repeat_interleave(ulysses_repeat(heads, len(weight), group.size), 0).chunk(group.size)[0]",
        (f"{FURTHER_MATRIX}[delta-c2-float64-context_parallel=ulysses]",),
    ),
    Mutant(
        "a fork starts without the prompt's state",
        "archon/generation/scheduler.py",
        "        if self.states is not None:\n            self.state_copies.append((state, sequence.state))\n",
        "",
        (f"{STATES}::test_greedy_forks_are_transformers_answers",),
    ),
    Mutant(
        "a duplicate keeps the state of the token before",
        "models/attention/decode/paged.py",
        "tuple(x.index_select(0, self._duplicates) for x in after)",
        "self.cache.states.read(layer, copies, None)",
        (f"{STATES}::test_an_answer_that_was_anothers_duplicate_goes_on_from_a_state_of_its_own",),
    ),
    Mutant(
        "a new sequence begins with the state that its slot's last one left",
        "models/attention/decode/paged_cache.py",
        "return tuple(x.masked_fill(fresh.view(-1, *[1] * (x.dim() - 1)), 0) for x in state)",
        "return state",
        (f"{STATES}::test_forks_of_a_prompt_answer_as_alone",),
    ),
    Mutant(
        "mixed precision casts decays",
        "parallel/fsdp.py",
        'if getattr(module, "full_precision", False)):\n        # A separate FSDP',
        "if False):\n        # A separate FSDP",
        (
            "tests/distributed/test_full_precision.py::test_decays_and_magnitudes_stay_float32_under_mixed_precision[d2-delta]",
        ),
    ),
    Mutant(
        "a narrower generator rounds decays",
        "archon/generation/replica.py",
        "wide if name in names else dtype",
        "dtype",
        ("tests/generation/test_replica.py::test_a_narrower_replica_keeps_decays_in_float32",),
    ),
    Mutant(
        "the convolution of a branch continues one token too early",
        "models/attention/packed/documents.py",
        "for first in (ends - counts - gap, ends - gap))",
        "for first in (ends - counts - gap, ends - gap - 1))",
        ("tests/models/test_prefix.py::test_logits_and_gradients_of_models_that_are_not_dense[qwen3_5_text-runs]",),
    ),
    Mutant(
        "a branch continues the state of the run next to the one before it",
        "models/attention/prefix/plan.py",
        "torch.tensor([place[parent] for parent in parents])",
        "torch.tensor([max(place[parent] - 1, 0) for parent in parents])",
        ("tests/models/test_prefix.py::test_logits_and_gradients_of_models_that_are_not_dense[qwen3_5_text-runs]",),
    ),
    Mutant(
        "silu of the output gate is rounded",
        "models/layers/delta_net.py",
        "gate = F.silu(z_THV.to(torch.promote_types(z_THV.dtype, torch.float32)))",
        "gate = F.silu(z_THV)",
        ("tests/models/test_delta_net.py::test_the_output_gate_is_computed_in_float32_as_in_transformers",),
    ),
    Mutant(
        "the output gate is rounded after silu",
        "models/layers/delta_net.py",
        "(self.norm(out_THV) * gate).to(x.dtype)",
        "(self.norm(out_THV) * gate.to(x.dtype))",
        ("tests/models/test_delta_net.py::test_the_output_gate_is_computed_in_float32_as_in_transformers",),
    ),
    Mutant(
        "a token of Mamba-2 decays itself",
        "models/layers/state_space.py",
        "decay = (total.unsqueeze(-1) - total.unsqueeze(-2))",
        "decay = (total.unsqueeze(-1) - total.unsqueeze(-2) + log_decay.unsqueeze(-2))",
        (f"{MAMBA}::test_chunks_compute_the_definition_and_its_gradients",),
    ),
    Mutant(
        "a chunk of Mamba-2 takes no state from the one before",
        "models/layers/state_space.py",
        "outs.append(inside[now] + reads[now] @ state)",
        "outs.append(inside[now])",
        (f"{MAMBA}::test_chunks_compute_the_definition_and_its_gradients",),
    ),
    Mutant(
        "the skip connection of Mamba-2 takes the input times its step size",
        "models/layers/state_space.py",
        "(out + values * skip.unsqueeze(-1))",
        "(out + values * (dt * skip).unsqueeze(-1))",
        (f"{MAMBA}::test_chunks_compute_the_definition_and_its_gradients",),
    ),
    Mutant(
        "the heads of Mamba-2 take groups in turn",
        "models/layers/state_space.py",
        "b, c = b.repeat_interleave(repeat, 1), c.repeat_interleave(repeat, 1)",
        "b, c = b.repeat(1, repeat, 1, 1), c.repeat(1, repeat, 1, 1)",
        (f"{MAMBA}::test_chunks_compute_the_definition_and_its_gradients",),
    ),
    Mutant(
        "one token of Mamba-2 takes groups in turn",
        "models/layers/state_space.py",
        "b, c = (part.repeat_interleave(x.shape[1] // part.shape[1], 1) for part in (b, c))",
        "b, c = (part.repeat(1, x.shape[1] // part.shape[1], 1) for part in (b, c))",
        (f"{MAMBA}::test_chunks_compute_the_definition_and_its_gradients",),
    ),
    Mutant(
        "the scan of Mamba-2 takes a pack for one document",
        "models/layers/mamba.py",
        "state_space_scan(x_mixed.view_as(x), (b, c), gates, documents, matrices)",
        "state_space_scan(\n"
        "            x_mixed.view_as(x), (b, c), gates, PackedDocuments(documents.cu_seqlens[[0, -1]], len(x))\n"
        "        )",
        (f"{MAMBA}::test_a_document_does_not_see_the_one_before_it",),
    ),
    Mutant(
        "the convolution of Mamba-2 sees the end of the document before",
        "models/layers/mamba.py",
        "causal_convolution(channels, weight, documents, inputs, bias)",
        "causal_convolution(\n"
        "            channels, weight, PackedDocuments(documents.cu_seqlens[[0, -1]], len(channels)), inputs, bias\n"
        "        )",
        (f"{MAMBA}::test_a_document_does_not_see_the_one_before_it",),
    ),
    Mutant(
        "step sizes of Mamba-2 have no limits",
        "models/layers/mamba.py",
        "F.softplus(a.to(wide) + dt_bias).clamp(*self.limits)",
        "F.softplus(a.to(wide) + dt_bias)",
        (MAMBA_PARITY.format(1),),
    ),
    Mutant(
        "step sizes of Mamba-2 are exponentials",
        "models/layers/mamba.py",
        "F.softplus(a.to(wide) + dt_bias)",
        "(a.to(wide) + dt_bias).exp()",
        (MAMBA_PARITY.format(1),),
    ),
    Mutant(
        "the decay of Mamba-2 lacks the step size",
        "models/layers/mamba.py",
        "torch.stack((-A_log.exp() * dt, dt, skip.expand_as(dt)), dim=-1)",
        "torch.stack((-A_log.exp().expand_as(dt), dt, skip.expand_as(dt)), dim=-1)",
        (MAMBA_PARITY.format(1),),
    ),
    Mutant(
        "the norm of Mamba-2 spans all groups",
        "models/layers/mamba.py",
        "x.unflatten(1, (max(1, self.groups // ranks), -1))",
        "x.unflatten(1, (1, -1))",
        (f"{MAMBA}::test_the_gated_norm_is_computed_in_float32_as_in_transformers",),
    ),
    Mutant(
        "the gate of Mamba-2 follows its norm",
        "models/layers/mamba.py",
        "return self.wo(self.norm(gated_THP, x.dtype).flatten(-2), lora_mapping)",
        "gate = F.silu(z_THP.to(wide))\n"
        "        return self.wo((self.norm(out_THP.to(wide)) * gate).to(x.dtype).flatten(-2), lora_mapping)",
        (f"{MAMBA}::test_the_gated_norm_is_computed_in_float32_as_in_transformers",),
    ),
    Mutant(
        "a rank normalizes its part of a group of Mamba-2 alone",
        "models/layers/mamba.py",
        "if self.tp is not None and self.groups < ranks:",
        "if False:",
        (f"{FURTHER_MATRIX}[one_group_mamba-t2-float64]",),
    ),
    Mutant(
        "the statistics of a group of Mamba-2 include other groups",
        "models/layers/mamba.py",
        "squares = sums[:, own : own + 1] / shared",
        "squares = sums.sum(1, keepdim=True) / ranks",
        (f"{FURTHER_MATRIX}[few_group_mamba-t4-float64]",),
    ),
    Mutant(
        "the convolution of Mamba-2 takes its bias for the last tap",
        "models/layers/mamba.py",
        "weight, bias = weight[:, :-1], weight[:, -1]",
        "weight, bias = weight[:, 1:], weight[:, 0]",
        (MAMBA_PARITY.format(3),),
    ),
    Mutant(
        "Nemotron-H's smallest step size is 0",
        "models/args/one_part.py",
        'extra | {"layer_types": kinds, "mamba_dt_limits": (low, float("inf"))}',
        'extra | {"layer_types": kinds, "mamba_dt_limits": (0 * low, float("inf"))}',
        (NEMOTRON_PARITY.format(2),),
    ),
    Mutant(
        "the convolution of Nemotron-H has the networks' activation",
        "models/args/mamba.py",
        "            self.mamba_hidden_act or self.hidden_act,\n            self.mamba_bias,",
        "            self.hidden_act,\n            self.mamba_bias,",
        ("tests/models/test_nemotron_h.py::test_the_convolution_has_an_activation_of_its_own",),
    ),
    Mutant(
        "a block of a network alone adds its input once more",
        "models/base.py",
        "        if self.mixer_name:\n            mixed = getattr(self, self.mixer_name)(normed, rotation, attention)",
        "        if not self.mixer_name:\n            x = x + normed\n"
        "        if self.mixer_name:\n            mixed = getattr(self, self.mixer_name)(normed, rotation, attention)",
        (NEMOTRON_PARITY.format(2),),
    ),
    Mutant(
        "a pattern of Nemotron-H takes networks for experts",
        "models/args/one_part.py",
        '"-": MLP, "E": MOE',
        '"-": MOE, "E": MLP',
        ("tests/models/test_nemotron_h.py::test_published_sizes_give_published_parameter_counts",),
    ),
    Mutant(
        "another epsilon next to Nemotron-H's is ignored",
        "models/args/one_part.py",
        "not in (None, eps):",
        "in (0,):",
        ("tests/models/test_nemotron_h.py::test_configs_that_archon_does_not_compute_are_refused",),
    ),
    Mutant(
        "a mixer alone needs no memory for its gradients",
        "archon/engine/memory/activations.py",
        "        working = mixer_working(layer.mixer, shard)\n",
        "        working = 0\n",
        (
            "tests/tools/planner/test_memory.py::test_memory_is_that_of_a_traced_step[one_part-d2e2-{}-rank0-1x4096]".format(
                "activation_checkpointmodefull"
            ),
        ),
    ),
)
