"""Mistakes in low-rank adapters: sums over ranks, scales, shared heads, what is merged and what a checkpoint names."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import FURTHER_MATRIX
from tests.mutants.mutant import Mutant

OPTIONS = "lora={'rank': 3, 'alpha': 5.0, 'init': 'random'}"
PEFT = "tests/lora/test_peft.py::test_peft_computes_with_archons_adapter_what_archon_does"
TRAINING = "tests/lora/test_training.py"
UNSUMMED = "(lambda p: p.to_local() if hasattr(p, 'to_local') else p)"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the part of a column product's adapter that all ranks have gets one rank's gradient",
        "models/layers/lora.py",
        "a = local(self.a)",
        f"a = {UNSUMMED}(self.a)",
        (f"{FURTHER_MATRIX}[dense-t2-float64-{OPTIONS}]",),
    ),
    Mutant(
        "the part of a row product's adapter that all ranks have gets one rank's gradient",
        "models/layers/lora.py",
        "b = local(self.b)",
        f"b = {UNSUMMED}(self.b)",
        (f"{FURTHER_MATRIX}[dense-t2-float64-{OPTIONS}]",),
    ),
    Mutant(
        "ranks that share a key head adapt the first one",
        "models/layers/lora.py",
        "b if rows is None else b[rows]",
        "b if rows is None else b[: rows.stop - rows.start]",
        (f"{FURTHER_MATRIX}[few_kv-t4-float64-{OPTIONS}]",),
    ),
    Mutant(
        "experts' adapters have no scale",
        "models/layers/moe.py",
        "grouped_linear(x, a, counts) * adapter.scale",
        "grouped_linear(x, a, counts)",
        (f"{TRAINING}::test_experts_adapters_are_added_to_their_matrices",),
    ),
    Mutant(
        "rslora divides by the rank",
        "models/lora.py",
        "(math.sqrt(self.rank) if self.rslora else self.rank)",
        "self.rank",
        (f"{PEFT}[qwen3]",),
    ),
    Mutant(
        "alphas of single modules are ignored",
        "models/lora.py",
        'float(_by_pattern("alpha_pattern", alphas, spellings, config.alpha))',
        "config.alpha",
        ("tests/lora/test_peft.py::test_ranks_and_scales_of_patterns_are_pefts",),
    ),
    Mutant(
        "merged weights lack the scale",
        "models/lora.py",
        "sizes[name].scale * (b @ a)",
        "(b @ a)",
        (f"{TRAINING}::test_weights_that_are_pushed_or_exported_have_the_adapters_added",),
    ),
    Mutant(
        "a checkpoint of adapters fits every base",
        "archon/engine/engine.py",
        '"adapters": sizes, "base": self._base_digest}',
        '"adapters": sizes}',
        (f"{TRAINING}::test_a_checkpoint_of_another_base_or_size_is_refused",),
    ),
    Mutant(
        "the reference model has the adapters",
        "models/lora.py",
        "        adapter.enabled = False\n",
        "        adapter.enabled = True\n",
        ("tests/lora/test_reference.py::test_the_base_scores_as_a_reference_of_its_own",),
    ),
    Mutant(
        "absorbed matrices lack the adapter",
        "models/attention/latent.py",
        "weight + adapter.scale * (adapter.b @ adapter.a)",
        "weight",
        ("tests/lora/test_generation.py::test_the_generator_computes_the_trainers_policy[deepseek_v3]",),
    ),
    Mutant(
        "a generator that shares the frozen base takes new weights of it",
        "archon/generation/replica.py",
        "for name, tensor in tensors.items() if is_adapter(name)} or tensors",
        "for name, tensor in tensors.items()}",
        ("tests/lora/test_generation.py::test_a_push_of_the_base_or_of_other_adapters_is_refused",),
    ),
)
