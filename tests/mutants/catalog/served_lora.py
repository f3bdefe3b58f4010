"""Mistakes in a generator and a server with several adapters."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SERVED = "tests/generation/test_adapters.py"
STEP = "tests/generation/test_decode_step.py"
TOGETHER = f"{SERVED}::test_served_together_each_answer_is_that_of_its_adapter_alone"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a prompt's pages are shared by adapters",
        "archon/generation/sequence.py",
        "self.prompt_key = (self.lora, tuple(self.prompt))",
        "self.prompt_key = (None, tuple(self.prompt))",
        (f"{SERVED}::test_answers_of_one_prompt_share_its_pages_within_an_adapter_alone",),
    ),
    Mutant(
        "a generator's row has the adapter of the row before it",
        "archon/generation/lora.py",
        "ids[first : first + count] = ",
        "ids[first + 1 : first + 1 + count] = ",
        (f"{TOGETHER}[qwen3-2]",),
    ),
    Mutant(
        "an adapter that is updated in place keeps its pages",
        "archon/generation/generator.py",
        "self.scheduler.restart(self.lora_manager.replace(name, weights, version))",
        "self.lora_manager.replace(name, weights, version)",
        (f"{SERVED}::test_an_adapter_updated_in_place_starts_its_own_answers_anew_and_no_others",),
    ),
    Mutant(
        "queries of an adapter are absorbed by the keys of the model",
        "models/attention/decode/paged.py",
        "keys.absorb(q[:first], lora_mapping)",
        "keys.absorb(q[:first])",
        (f"{TOGETHER}[deepseek_v3-2]",),
    ),
    Mutant(
        "a link leads a client out of the folder of adapters",
        "archon/serve/lora_folders.py",
        "resolved = path.resolve()",
        "resolved = path.absolute()",
        ("tests/cli/test_serve_adapters.py::test_a_hostile_load_is_one_line_and_changes_nothing",),
    ),
    Mutant(
        "a row of the decode step has the products of all LoRAs",
        "archon/generation/lora.py",
        ".masked_fill_(others.view(len(low), *[1] * (low.dim() - 2), -1), 0)",
        "",
        (f"{STEP}::test_loras_of_several_requests[qwen3]",),
    ),
    Mutant(
        "the decode step does not scale products of LoRAs",
        "archon/generation/lora.py",
        "stacked.scales[columns] = new.scale",
        "stacked.scales[columns] = 1",
        (f"{STEP}::test_loras_of_several_requests[qwen3]",),
    ),
    Mutant(
        "rows of experts have the LoRA of the first row of their expert",
        "archon/generation/lora.py",
        "ids = slot.repeat_interleave(counts, output_size=x.shape[0])",
        "ids = slot.repeat_interleave(counts.sort().values, output_size=x.shape[0])",
        (f"{STEP}::test_loras_of_several_requests[qwen3_moe]",),
    ),
    Mutant(
        "queries of the decode step are absorbed by the keys of the model",
        "models/attention/decode/static.py",
        "keys.absorb(q, self.lora_mapping)",
        "keys.absorb(q)",
        (f"{STEP}::test_loras_of_several_requests[deepseek_v3]",),
    ),
    Mutant(
        "the decode step caches keys that are not finite",
        "models/attention/decode/static.py",
        "*self.finite_rows(new)",
        "*new",
        (f"{STEP}::test_a_lora_that_computes_no_numbers_fails_its_own_answers_alone[qwen3-]",),
    ),
    Mutant(
        "tokens in flight have the version of the LoRA that replaces theirs",
        "archon/generation/generator.py",
        "        self._read_tokens_in_flight()\n        self.scheduler.restart(self.lora_manager",
        "        self.scheduler.restart(self.lora_manager",
        (f"{SERVED}::test_an_adapter_updated_in_place_starts_its_own_answers_anew_and_no_others[step]",),
    ),
    Mutant(
        "LoRAs stay in fewer slots than there are",
        "archon/generation/lora.py",
        "                layer.resize()\n",
        "                pass\n",
        (f"{STEP}::test_loras_that_come_and_go_leave_running_answers_as_they_are[qwen3]",),
    ),
    Mutant(
        "a slot keeps columns of the LoRA that it had before",
        "archon/generation/lora.py",
        "        stacked.a[..., columns, :] = 0  # a LoRA of a higher rank may have been here\n"
        "        stacked.b[..., columns] = 0\n",
        "",
        (f"{STEP}::test_a_slot_is_empty_for_a_lora_of_a_lower_rank",),
    ),
)
