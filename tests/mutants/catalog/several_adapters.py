"""Mistakes where a batch has documents of several adapters: whose rows, losses and steps are whose."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MANY = "tests/lora/test_many.py"
LOW_RANKS = "tests/lora/test_low_ranks.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a document gets the adapter of another one",
        "archon/engine/batch.py",
        "adapters=None if packed.adapters is None else tuple(packed.adapters[d] for d in documents),",
        "adapters=None if packed.adapters is None else packed.adapters[: len(documents)],",
        (f"{MANY}::test_each_adapter_is_trained_as_if_alone[dense-two-cross-entropy]",),
    ),
    Mutant(
        "documents of different adapters share the states of their common beginning",
        "archon/engine/train_step.py",
        "return mb.tokens if mb.adapters is None else mb.tokens + vocab_size * (mb.token_adapters() + 1)",
        "return mb.tokens",
        (f"{MANY}::test_documents_score_as_with_their_adapter_alone_or_with_the_base",),
    ),
    Mutant(
        "an adapter's loss is divided by the tokens of all adapters",
        "archon/engine/train_step.py",
        "fn.token_weights(part).double() / share.weight",
        "fn.token_weights(part).double() / loss.denominator",
        (f"{MANY}::test_each_adapter_is_trained_as_if_alone[dense-two-cross-entropy]",),
    ),
    Mutant(
        "adapters without a document take a step of momentum and decay",
        "archon/engine/engine.py",
        "for name in trained:\n                    metrics |=",
        'for name in self.adapters:\n                    metrics.setdefault(f"{name}/grad_norm", 0.0)\n'
        "                    metrics |=",
        (f"{MANY}::test_an_adapter_without_documents_stays_as_it_is",),
    ),
    Mutant(
        "rows of several adapters come back sorted by adapter",
        "models/adapter_rows.py",
        "return x if self.inverse is None else x.index_select(0, self.inverse)",
        "return x",
        (f"{LOW_RANKS}::test_each_row_has_its_own_adapter",),
    ),
    Mutant(
        "an expert's rows all have the first adapter",
        "models/layers/moe.py",
        "experts * (len(adapters) + 1) + ids.unsqueeze(1)",
        "experts * (len(adapters) + 1)",
        (f"{LOW_RANKS}::test_each_row_of_an_expert_has_its_own_adapter",),
    ),
)
