"""Mistakes where a batch has documents of several adapters: whose rows, losses and steps are whose."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MANY = "tests/lora/test_many.py"
LOW_RANKS = "tests/lora/test_low_ranks.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a document gets the adapter of another one",
        "archon/engine/batch.py",
        "lora_ids=None if packed.lora_ids is None else tuple(packed.lora_ids[d] for d in documents),",
        "lora_ids=None if packed.lora_ids is None else packed.lora_ids[: len(documents)],",
        (f"{MANY}::test_each_adapter_is_trained_as_if_alone[dense-two-cross-entropy]",),
    ),
    Mutant(
        "documents of different adapters share the states of their common beginning",
        "archon/engine/micro_batch.py",
        "keys = keys + vocab_size * (documents.token_lora_ids() + 1)",
        "pass",
        (f"{MANY}::test_documents_score_as_with_their_adapter_alone_or_with_the_base",),
    ),
    Mutant(
        "an adapter's loss is divided by the tokens of all adapters",
        "archon/engine/train_step.py",
        "fn.token_weights(part).double() / group.weight",
        "fn.token_weights(part).double() / loss.denominator",
        (f"{MANY}::test_each_adapter_is_trained_as_if_alone[dense-two-cross-entropy]",),
    ),
    Mutant(
        "adapters without a document take a step of momentum and decay",
        "archon/engine/engine.py",
        "for name in trained:\n                    metrics |=",
        'for name in self.loras:\n                    metrics.setdefault(f"{name}/grad_norm", 0.0)\n'
        "                    metrics |=",
        (f"{MANY}::test_an_adapter_without_documents_stays_as_it_is",),
    ),
    Mutant(
        "rows of several adapters come back sorted by adapter",
        "models/lora/mapping.py",
        "return x if self.inverse is None else x.index_select(0, self.inverse)",
        "return x",
        (f"{LOW_RANKS}::test_each_row_has_its_own_adapter",),
    ),
    Mutant(
        "an expert's rows all have the first adapter",
        "models/layers/moe.py",
        "experts * (len(lora_names) + 1) + ids.unsqueeze(1)",
        "experts * (len(lora_names) + 1)",
        (f"{LOW_RANKS}::test_each_row_of_an_expert_has_its_own_adapter",),
    ),
    Mutant(
        "experts keep only the last of several adapters",
        "models/lora/model.py",
        "_with_name(dict(module.lora).get(matrix), lora, lora_name)",
        "_with_name(None, lora, lora_name)",
        ("tests/lora/test_many.py::test_each_adapter_is_trained_as_if_alone[moe-two-any-loss]",),
    ),
    Mutant(
        "adapters whose names end alike get one's first values",
        "models/lora/model.py",
        'prefix.endswith(f".{lora_name}")',
        "prefix.endswith(lora_name)",
        ("tests/lora/test_low_ranks.py::test_first_values_are_drawn_for_the_adapter_with_exactly_this_name",),
    ),
    Mutant(
        "B is padded at its first ranks, A at its last",
        "models/lora/layers.py",
        "F.pad(b, (0, missing))",
        "F.pad(b, (missing, 0))",
        ("tests/lora/test_low_ranks.py::test_each_row_has_its_own_adapter",),
    ),
    Mutant(
        "grouped products scale every adapter by the first one's scale",
        "models/lora/layers.py",
        "group_parts[index], scales[index] = part, lora.scale",
        "group_parts[index] = part",
        ("tests/lora/test_low_ranks.py::test_each_row_has_its_own_adapter",),
    ),
    Mutant(
        "scales of experts are repeated for each adapter",
        "models/lora/layers.py",
        ".repeat(counts.shape[0] // len(scales))",
        ".repeat_interleave(counts.shape[0] // len(scales))",
        ("tests/lora/test_low_ranks.py::test_each_row_of_an_expert_has_its_own_adapter",),
    ),
    Mutant(
        "outputs are not sorted with the rows of their adapters",
        "models/lora/layers.py",
        "lora_mapping.sort(out), lora_mapping.sort(x), lora_mapping.names",
        "out, lora_mapping.sort(x), lora_mapping.names",
        ("tests/lora/test_low_ranks.py::test_each_row_has_its_own_adapter",),
    ),
    Mutant(
        "the loop over experts takes each expert's matrices by the adapter",
        "models/lora/layers.py",
        "expert if stacked else None, scale",
        "index if stacked else None, scale",
        ("tests/lora/test_low_ranks.py::test_each_row_of_an_expert_has_its_own_adapter",),
    ),
    Mutant(
        "rows without an adapter get the first one",
        "models/lora/layers.py",
        "places.get(index, (None, 1.0))",
        "places.get(index, (0, 1.0))",
        ("tests/lora/test_low_ranks.py::test_each_row_has_its_own_adapter",),
    ),
    Mutant(
        "a matrix that lacks one of a batch's adapters applies none",
        "models/lora/layers.py",
        "return any(name in self for name in names)",
        "return all(name in self for name in names)",
        ("tests/lora/test_low_ranks.py::test_a_batch_names_only_the_adapters_that_it_needs",),
    ),
    Mutant(
        "an adapter's own schedule is ignored",
        "archon/engine/lora.py",
        "lora.scheduler or config.scheduler",
        "config.scheduler",
        ("tests/lora/test_many.py::test_each_adapter_is_trained_as_if_alone[dense-two-cross-entropy]",),
    ),
    Mutant(
        "an adapter's own end of the schedule is ignored",
        "archon/engine/lora.py",
        "lora.total_steps or total_steps",
        "total_steps",
        ("tests/lora/test_many.py::test_each_adapter_is_trained_as_if_alone[dense-two-cross-entropy]",),
    ),
    Mutant(
        "an adapter's own optimizer is ignored",
        "archon/engine/lora.py",
        "config.optimizer if lora.optimizer is None else lora.optimizer",
        "config.optimizer or lora.optimizer",
        ("tests/lora/test_many.py::test_each_adapter_is_trained_as_if_alone[dense-two-cross-entropy]",),
    ),
    Mutant(
        "a resumed adapter counts its steps anew",
        "archon/engine/lora.py",
        'self.steps, self._skips.total = int(state["steps"])',
        "self.steps, self._skips.total = 0",
        ("tests/lora/test_many.py::test_an_infinite_gradient_skips_the_step_of_its_adapter_alone",),
    ),
    Mutant(
        "a resumed adapter forgets its skipped steps",
        "archon/engine/lora.py",
        'int(state["steps"]), int(state["skipped_steps"])',
        'int(state["steps"]), 0',
        ("tests/lora/test_many.py::test_an_infinite_gradient_skips_the_step_of_its_adapter_alone",),
    ),
    Mutant(
        "gradients of one of several adapters are not clipped",
        "archon/engine/lora.py",
        "            clip_gradients(self.parameters, norm, self.config.max_grad_norm)\n",
        "",
        ("tests/lora/test_many.py::test_each_adapter_is_trained_as_if_alone[dense-two-cross-entropy]",),
    ),
    Mutant(
        "skipped steps of one of several adapters never stop the run",
        "archon/engine/lora.py",
        "        self._skips.count(not finite, self.steps, self.config.max_skipped_in_a_row)\n",
        "        self._skips.total += not finite\n",
        ("tests/lora/test_many.py::test_an_infinite_gradient_skips_the_step_of_its_adapter_alone",),
    ),
)
