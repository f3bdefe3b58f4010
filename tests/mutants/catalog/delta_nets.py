"""Mistakes in gated delta nets: documents, decays, convolutions, states."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import FURTHER_MATRIX
from tests.mutants.mutant import Mutant

DELTA = "tests/models/test_delta_net.py"
STATES = "tests/generation/test_states.py"

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
        ("tests/distributed/test_full_precision.py::test_decays_stay_float32_under_mixed_precision[d2]",),
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
)
