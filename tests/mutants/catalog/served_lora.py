"""Mistakes in a generator and a server with several adapters."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SERVED = "tests/generation/test_adapters.py"
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
)
