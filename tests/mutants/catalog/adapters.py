"""Mistakes in low-rank adapters: sums over ranks, scales, shared heads, what is merged and what a checkpoint names."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import FURTHER_MATRIX
from tests.mutants.mutant import Mutant

OPTIONS = "lora={'rank': 3, 'alpha': 5.0, 'init': 'random'}"
PEFT = "tests/lora/test_peft.py::test_peft_computes_with_archons_adapter_what_archon_does"
LAYOUTS = "tests/lora/test_peft_layouts.py"
WRITTEN = f"{LAYOUTS}::test_peft_computes_with_archons_adapters_what_archon_does"
READ = f"{LAYOUTS}::test_archon_computes_with_pefts_adapters_what_peft_does"
OLDER = f"{LAYOUTS}::test_files_of_older_versions_of_peft"
REFUSALS = "tests/lora/test_peft_refusals.py"
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
        "models/lora_targets.py",
        "(math.sqrt(self.rank) if self.rslora else self.rank)",
        "self.rank",
        (f"{PEFT}[qwen3]",),
    ),
    Mutant(
        "alphas of single modules are ignored",
        "models/lora_targets.py",
        'float(_by_pattern("alpha_pattern", alphas, spellings, config.alpha))',
        "config.alpha",
        ("tests/lora/test_peft.py::test_ranks_and_scales_of_patterns_are_pefts",),
    ),
    Mutant(
        "merged weights lack the scale",
        "models/lora.py",
        "weight.to(wide) + scale * (b @ a)",
        "weight.to(wide) + (b @ a)",
        (
            f"{TRAINING}::test_weights_that_are_pushed_or_exported_have_the_adapters_added",
            "tests/lora/test_export.py::test_merged_computes_what_unmerged_does[qwen3_moe]",
        ),
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
    Mutant(
        "stacked experts of PEFT 0.19.0 are read as those of 0.19.1",
        "archon/checkpoint/peft_layout.py",
        "version < (0, 19, 1)",
        "version < (0, 19, 0)",
        (OLDER,),
    ),
    Mutant(
        "stacked experts of PEFT 0.19.0 are read as those of 0.18",
        "archon/checkpoint/peft_layout.py",
        "(not transposed or version >= (0, 19))",
        "not transposed",
        (OLDER,),
    ),
    Mutant(
        "the B of stacked experts is written expert after expert",
        "archon/checkpoint/peft_layout.py",
        "b.permute(1, 2, 0).flatten(1, 2)",
        "b.permute(1, 0, 2).flatten(1, 2)",
        (WRITTEN,),
    ),
    Mutant(
        "the first of a module's adapted parameters has the plain name",
        "archon/checkpoint/peft_layout.py",
        "enumerate(reversed(names))",
        "enumerate(names)",
        (WRITTEN, READ),
    ),
    Mutant(
        "the adapters of fused matrices are written into the first rows",
        "archon/checkpoint/peft_layout.py",
        "replace(target.placement, transposed=False).insert(rows, b)",
        "b[..., : rows.shape[-2], :].copy_(rows)",
        (WRITTEN,),
    ),
    Mutant(
        "matrices that share an A are written as if they did not",
        "archon/checkpoint/peft_layout.py",
        "shared = len(given) == len(parts) and all(",
        "shared = len(parts) == 1 and all(",
        (READ,),
    ),
    Mutant(
        "a part's ranks may be another part's as well",
        "archon/checkpoint/peft_layout.py",
        "if rows[..., : columns.start].any() or rows[..., columns.stop :].any():",
        "if rows[..., : columns.start].any():",
        (f"{REFUSALS}::test_metadata_of_other_parts",),
    ),
    Mutant(
        "the alpha of a fused adapter grows with the rank under rslora too",
        "archon/checkpoint/peft_config.py",
        "first.alpha * (math.sqrt(factor) if first.rslora else factor)",
        "first.alpha * factor",
        (WRITTEN,),
    ),
    Mutant(
        "the ranks of the parts of a tensor are not read back",
        "archon/checkpoint/peft_adapter.py",
        "    shared = parts is None",
        "    shared = parts is None or len(tensor.parts) > 1",
        (WRITTEN,),
    ),
    Mutant(
        "shared experts are named as PEFT takes for experts",
        "archon/checkpoint/peft_export.py",
        'converted = experts == "stacked" and any(',
        'converted = experts == "per_expert" and any(',
        (WRITTEN,),
    ),
    Mutant(
        "adapters of some experts of a layer are read",
        "archon/checkpoint/peft_adapter.py",
        "if None not in rows and len(rows) < experts:",
        "if None not in rows and not rows:",
        (f"{REFUSALS}::test_tensors_that_are_not_all_of_a_models_adapters",),
    ),
    Mutant(
        "experts of a layer may have alphas of their own",
        "archon/checkpoint/peft_adapter.py",
        "if sizes.setdefault(target.name, size) != size:",
        "if sizes.setdefault(target.name, size).rank != size.rank:",
        (f"{REFUSALS}::test_experts_of_different_alphas_and_weights_with_two_adapters",),
    ),
    Mutant(
        "a pattern of one expert is a pattern of all",
        "models/lora_targets.py",
        "if value != values[0]:",
        "if len(modules) > len(values):",
        (f"{LAYOUTS}::test_adapters_that_peft_cannot_hold_are_refused",),
    ),
    Mutant(
        "layers_to_transform is not compared with the tensors",
        "archon/checkpoint/peft_config.py",
        "or int(layer[1]) in self.layers:",
        "or int(layer[1]) >= 0:",
        (f"{REFUSALS}::test_fields_that_contradict_the_tensors_or_archon",),
    ),
    Mutant(
        "a pattern of names before a regular expression is the later one",
        "archon/schema/name_patterns.py",
        "return min(found, key=lambda item: item[0])[1]",
        "return max(found, key=lambda item: item[0])[1]",
        ("tests/lora/test_name_patterns.py",),
    ),
    Mutant(
        "patterns of names may repeat groups",
        "archon/schema/name_patterns.py",
        "if counts != (1, 1):",
        "if counts == (0, 0):",
        ("tests/lora/test_name_patterns.py", REFUSALS),
    ),
    Mutant(
        "a pattern of names is tried from its first dot alone",
        "archon/schema/name_patterns.py",
        '1 | _Name(name).places.get(".", 0) << 1',
        '1 | 1 << name.find(".") + 1',
        ("tests/lora/test_name_patterns.py",),
    ),
    Mutant(
        "adapters of a composite model's text decoder alone are not read",
        "archon/checkpoint/peft_adapter.py",
        "known = [tensor.in_text_model for tensor in known]",
        "known = [*known]",
        (f"{LAYOUTS}::test_a_composite_models_adapters_are_of_it_or_of_its_text_decoder",),
    ),
    Mutant(
        "a critic's adapter has a base of its own next to the actor's",
        "models/lora.py",
        "            setattr(module, name, other)\n",
        "            pass\n",
        ("tests/lora/test_critic.py::test_a_critic_on_the_actors_base_trains_as_one_apart",),
    ),
    Mutant(
        "the value head next to a critic's adapters is frozen",
        "models/lora.py",
        "head.to(dtype).requires_grad_(True)",
        "head.to(dtype)",
        ("tests/lora/test_critic.py::test_a_critic_on_the_actors_base_trains_as_one_apart",),
    ),
    Mutant(
        "merged weights are rounded before they are widened",
        "models/lora.py",
        "(weight.to(wide) + scale * (b @ a)).to(dtype)",
        "(weight.to(wide) + scale * (b @ a)).to(weight.dtype).to(dtype)",
        ("tests/lora/test_export.py::test_a_bfloat16_base_keeps_its_dtype_or_is_merged_in_a_wider_one",),
    ),
    Mutant(
        "a run's adapters are merged into any base",
        "archon/checkpoint/adapter_export.py",
        '"base": checkpoint_digest(base)}',
        '"base": saved["base"]}',
        ("tests/lora/test_export.py::test_adapters_of_a_run_are_for_its_base_alone",),
    ),
    Mutant(
        "the planner gives frozen weights masters",
        "archon/planner/memory_model.py",
        "weights = (self.counts.own * self.shard.bytes, masters)",
        "weights = (self.counts.own * self.shard.wide, masters)",
        ("tests/planner/test_memory.py::test_frozen_weights_have_the_compute_dtype_and_adapters_the_state",),
    ),
    Mutant(
        "frozen weights cost the FLOPs of trained ones",
        "models/flops.py",
        "(4 if self.adapters else 6)",
        "6",
        ("tests/engine/test_flops.py::test_frozen_weights_cost_no_gradient_and_their_adapters_all_three_products",),
    ),
    Mutant(
        "the deviation of a Gaussian A is by its input features",
        "models/lora.py",
        "std=1 / module.a.shape[-2]",
        "std=1 / module.a.shape[-1]",
        ("tests/lora/test_peft.py::test_first_values_are_pefts",),
    ),
    Mutant(
        "the deviation of a Gaussian A is by its first dimension",
        "models/lora.py",
        "std=1 / module.a.shape[-2]",
        "std=1 / module.a.shape[0]",
        ("tests/lora/test_peft.py::test_first_values_are_pefts",),
    ),
    Mutant(
        "the deviation of a Gaussian A is 1 / sqrt(rank)",
        "models/lora.py",
        "std=1 / module.a.shape[-2]",
        "std=module.a.shape[-2] ** -0.5",
        ("tests/lora/test_peft.py::test_first_values_are_pefts",),
    ),
    Mutant(
        "the bound of first values is by the output features",
        "models/lora.py",
        "bound = 1 / math.sqrt(x.shape[-1])",
        "bound = 1 / math.sqrt(x.shape[-2])",
        ("tests/lora/test_peft.py::test_first_values_are_pefts",),
    ),
    Mutant(
        "the bound of first values of experts is by their number",
        "models/lora.py",
        "bound = 1 / math.sqrt(x.shape[-1])",
        "bound = 1 / math.sqrt(x.flatten(1).shape[-1])",
        ("tests/lora/test_peft.py::test_first_values_are_pefts",),
    ),
)
